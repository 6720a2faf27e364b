package oncehttptest

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp"
)

func TestStoreConforms(t *testing.T) {
	var mu sync.Mutex
	stores := make(map[string]*Store)
	TestKeyStore(t, func(t *testing.T, dir string) oncehttp.KeyStore {
		mu.Lock()
		defer mu.Unlock()
		if before := stores[dir]; before != nil {
			stores[dir] = before.Crash()
		} else {
			stores[dir] = NewStore()
		}
		return stores[dir]
	})
}

// crashTest is a store with one record in it.
func crashTest(t *testing.T) (*Store, oncehttp.Record) {
	t.Helper()
	s := NewStore()
	r := sample("k")
	if existing, err := s.Begin(t.Context(), r); existing != nil || err != nil {
		t.Fatal(existing, err)
	}
	return s, r
}

func attempts(t *testing.T, s *Store, id oncehttp.ID) int {
	t.Helper()
	r, err := s.Get(context.Background(), id)
	if err != nil {
		t.Fatal(err)
	}
	return r.Attempts
}

func TestCrashLosesWhatWasNotDurable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, r := crashTest(t)
		var told error
		r.Attempts = 50
		s.SaveSoon(r, func(err error) { told = err })
		time.Sleep(lazyAfter - 1)
		next := s.Crash()
		synctest.Wait()
		if !errors.Is(told, oncehttp.ErrStoreFailed) {
			t.Errorf("the lazy write was told %v, want ErrStoreFailed", told)
		}
		if n := attempts(t, next, r.ID); n != 2 {
			t.Errorf("%d attempts after the crash, want 2", n)
		}
		if err := s.Save(t.Context(), r); !errors.Is(err, oncehttp.ErrStoreFailed) {
			t.Errorf("Save after the crash: %v, want ErrStoreFailed", err)
		}
		if _, err := s.Get(t.Context(), r.ID); !errors.Is(err, oncehttp.ErrStoreFailed) {
			t.Errorf("Get after the crash: %v, want ErrStoreFailed", err)
		}
		before, _ := next.Session(t.Context(), base)
		after, _ := next.Crash().Session(t.Context(), base)
		if before.Owner == after.Owner || before.Secret != after.Secret {
			t.Errorf("sessions %+v and %+v, want other owners and the same secret", before, after)
		}
	})
}

func TestCrashKeepsWhatWasDurable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, r := crashTest(t)
		r.Attempts = 50
		s.SaveSoon(r, func(error) {})
		if n := attempts(t, s, r.ID); n != 2 {
			t.Errorf("a lazy write is visible at once")
		}
		time.Sleep(lazyAfter)
		synctest.Wait()
		s = s.Crash()
		if n := attempts(t, s, r.ID); n != 50 {
			t.Errorf("%d attempts, want 50: the idle time was over", n)
		}
		r.Attempts = 60
		s.SaveSoon(r, func(error) {})
		if _, err := s.Begin(t.Context(), sample("other")); err != nil {
			t.Fatal(err)
		}
		if n := attempts(t, s.Crash(), r.ID); n != 60 {
			t.Errorf("%d attempts, want 60: a Begin took the lazy write along", n)
		}
		synctest.Wait()
	})
}

func TestStoreHooksAreCrashPoints(t *testing.T) {
	for _, test := range []struct {
		point string
		want  int
	}{{"before", 2}, {"after", 50}} {
		s, r := crashTest(t)
		var next *Store
		crash := func(op string, rec oncehttp.Record) {
			if op == "Save" && rec.Attempts == 50 {
				next = s.Crash()
			}
		}
		if test.point == "before" {
			s.Before = crash
		} else {
			s.After = crash
		}
		r.Attempts = 50
		if err := s.Save(t.Context(), r); !errors.Is(err, oncehttp.ErrStoreFailed) {
			t.Errorf("Save that crashes %s: %v, want ErrStoreFailed", test.point, err)
		}
		if n := attempts(t, next, r.ID); n != test.want {
			t.Errorf("%d attempts after a crash %s Save, want %d", n, test.point, test.want)
		}
	}
}

func TestStoreFaults(t *testing.T) {
	s, r := crashTest(t)
	full := errors.New("disk full")
	s.Fail("Save", 2, full)
	save := func(attempts int) error {
		r.Attempts = attempts
		return s.Save(t.Context(), r)
	}
	if err := save(10); err != nil {
		t.Errorf("first Save: %v", err)
	}
	if err := save(11); !errors.Is(err, oncehttp.ErrStoreFailed) || !errors.Is(err, full) {
		t.Errorf("second Save: %v, want ErrStoreFailed and its cause", err)
	}
	if n := attempts(t, s, r.ID); n != 10 {
		t.Errorf("%d attempts after a failed Save, want 10", n)
	}
	if err := save(12); err != nil {
		t.Errorf("third Save: %v", err)
	}
	for _, written := range []bool{true, false} {
		before := attempts(t, s, r.ID)
		s.FailUncertain("", 1, written)
		if err := save(before + 1); !errors.Is(err, oncehttp.ErrStoreUncertain) || errors.Is(err, oncehttp.ErrStoreFailed) {
			t.Errorf("uncertain Save: %v, want ErrStoreUncertain", err)
		}
		if n := attempts(t, s, r.ID); (n > before) != written {
			t.Errorf("%d attempts after %d, written %v", n, before, written)
		}
		if err := save(99); !errors.Is(err, oncehttp.ErrStoreFailed) {
			t.Errorf("Save after an uncertain one: %v, want ErrStoreFailed", err)
		}
		s = s.Crash()
	}
}
