package oncehttp_test

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// Two replicas share a store: what one works on, the other leaves alone, until
// its lease has ended; then the other finishes it, with the same key, and the
// first one's late answer is told as not recorded.
func TestReplicasTakeOverFromOneThatIsCutOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const lease = 10 * time.Second
		cluster := oncehttptest.NewCluster(lease)
		server := oncehttptest.New(oncehttptest.Charges())
		server.Script(oncehttptest.Hold(time.Minute)) // executed; the answer comes late
		replica := func() (*bench, *oncehttptest.ClusterStore) {
			store := cluster.Store()
			b := &bench{t: t, server: server, opts: oncehttp.Options{
				HTTPClient: &http.Client{Transport: server.Transport()}, AttemptTimeout: -1,
			}}
			var err error
			if b.client, err = oncehttp.New(store, &b.opts); err != nil {
				t.Fatal(err)
			}
			return b, store
		}
		a, lost := replica()
		b, kept := replica()

		type told struct {
			info oncehttp.Info
			err  error
		}
		first := make(chan told)
		go func() {
			info, err := a.charge(t.Context(), "k", "1")
			first <- told{info, err}
		}()
		synctest.Wait()

		info, err := b.charge(t.Context(), "k", "1")
		if !errors.Is(err, oncehttp.ErrInProgress) || info.Outcome != oncehttp.Undecided {
			t.Errorf("while the other works on it: %v, %v", info.Outcome, err)
		}
		if orders, sum := b.resume(); len(orders) > 0 || sum.Held != 1 {
			t.Errorf("resumed while the other works on it: %v, %+v", orders, sum)
		}

		lost.StopHeartbeat()
		time.Sleep(2 * lease)
		if orders, sum := b.resume(); len(orders) != 1 {
			t.Errorf("after the lease: %v, %+v", orders, sum)
		}
		got := <-first
		if got.err != nil || got.info.Outcome != oncehttp.Succeeded || !got.info.NotRecorded {
			t.Errorf("who was cut off is told %+v, %v", got.info, got.err)
		}
		keys := map[string]bool{}
		for _, attempt := range server.Attempts() {
			keys[attempt.Key] = true
		}
		if len(keys) != 1 || len(server.Attempts()) != 2 {
			t.Errorf("keys %v in %d attempts", keys, len(server.Attempts()))
		}
		a.wantEffects("1")

		// The graceful end of one leaves its work to the other at once.
		server.Script(oncehttptest.Hold(time.Hour))
		go func() {
			info, err := b.charge(t.Context(), "k2", "2")
			first <- told{info, err}
		}()
		synctest.Wait()
		b.close()
		if got := <-first; !errors.Is(got.err, oncehttp.ErrClosed) || got.info.Outcome != oncehttp.Undecided {
			t.Errorf("closed: %+v, %v", got.info, got.err)
		}
		kept.Close()
		c, last := replica()
		time.Sleep(time.Second)
		if orders, sum := c.resume(); len(orders) != 1 {
			t.Errorf("after the graceful end: %v, %+v", orders, sum)
		}
		a.wantEffects("1", "2")
		c.close()
		last.Close()
		a.client.Shutdown(context.Background())
		lost.Close()
		server.Wait()
	})
}
