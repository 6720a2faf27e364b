package oncehttp_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// TestManyCallersOfAFewKeys lets callers, passes and people get into each other's
// way on real time and a real file, with faults at random: one effect for each
// key, nothing hangs, and nothing is left behind.
func TestManyCallersOfAFewKeys(t *testing.T) {
	if testing.Short() {
		t.Skip("takes 1.5 s")
	}
	const callers, passes, keys = 12, 2, 40
	goroutines := runtime.NumGoroutine()

	server := oncehttptest.New(oncehttptest.Charges())
	server.Random(7, map[oncehttptest.Fault]float64{
		oncehttptest.DropRequest(): .1, oncehttptest.DropResponse(): .1, oncehttptest.DialError(nil): .1,
		oncehttptest.Status(503): .1, oncehttptest.Unauthorized(): .05, oncehttptest.Stored500(): .03,
		oncehttptest.Slow(5 * time.Millisecond): .1, oncehttptest.Stall(5 * time.Millisecond): .1,
		oncehttptest.Late(3 * time.Millisecond): .05, oncehttptest.TruncateResponse(3): .05,
	})
	client, err := oncehttp.Open(filepath.Join(t.TempDir(), "keys.db"), &oncehttp.Options{
		HTTPClient:  &http.Client{Transport: server.Transport()},
		BackoffBase: time.Millisecond, AttemptTimeout: 20 * time.Millisecond,
		Breaker: &oncehttp.Breaker{Disabled: true}, Budget: &oncehttp.Budget{Disabled: true},
	})
	if err != nil {
		t.Fatal(err)
	}

	s := &stress{t: t, client: client, paid: make(map[string]bool)}
	ctx, stop := context.WithTimeout(t.Context(), 1500*time.Millisecond)
	defer stop()
	var work sync.WaitGroup
	for range passes {
		work.Go(func() { client.Run(ctx, s.handler()) })
	}
	for range callers {
		work.Go(func() {
			for ctx.Err() == nil {
				key := fmt.Sprint("key-", rand.IntN(keys))
				s.call(ctx, key)
				s.decide(ctx, key)
			}
		})
	}
	ends(t, "the callers and the passes", work.Wait)
	ends(t, "Shutdown", func() {
		limit, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := client.Shutdown(limit); err != nil {
			t.Error(err)
		}
	})
	ends(t, "the server", func() { server.Wait(); server.Close() })

	effects := server.EffectsByBody()
	for body, n := range effects {
		if n != 1 {
			t.Errorf("%s: %d effects", body, n)
		}
	}
	for key := range s.paid {
		if effects["order="+key] == 0 {
			t.Errorf("%s succeeded without an effect", key)
		}
	}
	if len(effects) < keys/2 {
		t.Errorf("only %d effects after %d attempts", len(effects), len(server.Attempts()))
	}
	ends(t, "what was started", func() {
		for runtime.NumGoroutine() > goroutines+1 { // this one
			time.Sleep(time.Millisecond)
		}
	})
}

// ends fails if f does not return.
func ends(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		t.Fatalf("%s: not at an end after 30 s:\n%s", what, stacksOfAll())
	}
}

// stress is what those who use the client know.
type stress struct {
	t      *testing.T
	client *oncehttp.Client

	mu   sync.Mutex
	paid map[string]bool // keys of which somebody was told that they succeeded
}

func (s *stress) settled(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.paid[key] = true
}

func (s *stress) handler() oncehttp.Handler {
	return oncehttp.Handler{
		Settled: func(_ context.Context, info oncehttp.Info, _ *http.Response) error {
			if rand.IntN(4) == 0 {
				return errors.New("ledger is down")
			}
			if info.Outcome == oncehttp.Succeeded {
				s.settled(info.Key)
			}
			return nil
		},
		Unknown: func(context.Context, oncehttp.Info) error { return nil },
		Before:  func(context.Context, oncehttp.Info) oncehttp.Decision { return oncehttp.Decision(rand.IntN(3)) },
	}
}

// call charges an order with little patience, with a handle or without.
func (s *stress) call(ctx context.Context, key string) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(1+rand.IntN(40))*time.Millisecond)
	defer cancel()
	var op *oncehttp.Operation
	if rand.IntN(2) == 0 {
		ctx, op = oncehttp.Start(ctx, oncehttp.Op{Key: key})
	}
	req := (&bench{t: s.t}).request(ctx, key, "Idempotency-Key", key)
	if resp, err := s.client.Do(req); err == nil {
		if info, _ := oncehttp.OperationFrom(resp); info.Outcome == oncehttp.Succeeded {
			s.settled(key)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	if op == nil || op.Info().Outcome != oncehttp.Succeeded || rand.IntN(2) == 0 {
		return
	}
	err := op.Ack(context.Background())
	for _, meanwhile := range []error{nil, oncehttp.ErrFenced, oncehttp.ErrNotFound, oncehttp.ErrClosed} {
		if errors.Is(err, meanwhile) {
			return
		}
	}
	s.t.Errorf("Ack: %v", err)
}

// decide does now and then what people do.
func (s *stress) decide(ctx context.Context, key string) {
	infos, err := s.client.Lookup(ctx, key)
	if err != nil || len(infos) == 0 {
		return
	}
	switch rand.IntN(8) {
	case 0:
		if resp, err := s.client.Redrive(ctx, infos[0].ID); err == nil {
			resp.Body.Close()
		}
	case 1:
		s.client.Forget(ctx, infos[0].ID)
	}
}
