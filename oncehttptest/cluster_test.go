package oncehttptest

import (
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp"
)

func TestClusterConforms(t *testing.T) {
	var mu sync.Mutex
	clusters := make(map[string]*Cluster)
	TestKeyStore(t, func(t *testing.T, dir string) oncehttp.KeyStore {
		mu.Lock()
		defer mu.Unlock()
		if clusters[dir] == nil {
			clusters[dir] = NewCluster(time.Minute)
		}
		return clusters[dir].Store()
	})
}

// replicas returns two clients of a cluster, and a record that the first owns.
func replicas(t *testing.T, ttl time.Duration) (a, b *ClusterStore, r, takeover oncehttp.Record) {
	t.Helper()
	c := NewCluster(ttl)
	a, b = c.Store(), c.Store()
	as, err := a.Session(t.Context(), base)
	if err != nil {
		t.Fatal(err)
	}
	bs, err := b.Session(t.Context(), base)
	if err != nil {
		t.Fatal(err)
	}
	if as.Owner == bs.Owner || as.Secret != bs.Secret || as.Era != bs.Era {
		t.Fatalf("sessions %+v and %+v, want other owners, the same secret and era", as, bs)
	}
	r = sample("k")
	r.Owner = as.Owner
	if existing, err := a.Begin(t.Context(), r); existing != nil || err != nil {
		t.Fatal(existing, err)
	}
	takeover = r
	takeover.Epoch, takeover.Owner = r.Epoch+1, bs.Owner
	return a, b, r, takeover
}

func TestLiveOwnerIsNotTakenOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, b, r, takeover := replicas(t, time.Minute)
		time.Sleep(time.Hour) // the heart beats
		if err := b.Save(t.Context(), takeover); !errors.Is(err, oncehttp.ErrInProgress) {
			t.Errorf("taking over: %v, want ErrInProgress", err)
		}
		if err := b.Delete(t.Context(), takeover); !errors.Is(err, oncehttp.ErrInProgress) {
			t.Errorf("deleting: %v, want ErrInProgress", err)
		}
		if existing, err := b.Begin(t.Context(), takeover); err != nil || existing == nil || existing.Owner != r.Owner {
			t.Errorf("Begin elsewhere: %+v, %v; want the owner's record", existing, err)
		}
	})
}

func TestExpiredLeaseIsTakenOverAndFencesItsOwner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b, r, takeover := replicas(t, time.Minute)
		a.StopHeartbeat()
		time.Sleep(time.Minute - 1)
		if err := b.Save(t.Context(), takeover); !errors.Is(err, oncehttp.ErrInProgress) {
			t.Errorf("taking over before the lease ends: %v, want ErrInProgress", err)
		}
		if err := a.Save(t.Context(), r); err != nil {
			t.Errorf("Save by the partitioned owner, not taken over: %v", err)
		}
		time.Sleep(time.Nanosecond)
		if err := b.Save(t.Context(), takeover); err != nil {
			t.Errorf("taking over after the lease's end: %v", err)
		}
		if err := a.Save(t.Context(), r); !errors.Is(err, oncehttp.ErrFenced) {
			t.Errorf("Save by the former owner: %v, want ErrFenced", err)
		}
	})
}

func TestClosedClientIsTakenOverAtOnce(t *testing.T) {
	a, b, _, takeover := replicas(t, time.Hour)
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if err := b.Save(t.Context(), takeover); err != nil {
		t.Errorf("taking over from a closed client: %v", err)
	}
}

func TestReleasedOperationIsTakenByAnyone(t *testing.T) {
	a, b, r, takeover := replicas(t, time.Hour)
	r.Epoch, r.Owner = r.Epoch+1, ""
	if err := a.Save(t.Context(), r); err != nil {
		t.Fatalf("letting go: %v", err)
	}
	takeover.Epoch = r.Epoch + 1
	if err := b.Save(t.Context(), takeover); err != nil {
		t.Errorf("taking up: %v", err)
	}
}
