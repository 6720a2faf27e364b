package oncehttptest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/oncehttp/oncehttp"
)

// The promises of TestKeyStore about calls: memory, concurrency, contexts, and
// the end.

func testSlices(t *storeTest) {
	scribble := func(r *oncehttp.Record) {
		for _, b := range [][]byte{r.Meta, r.Request, r.Answer} {
			for i := range b {
				b[i] = '!'
			}
		}
	}
	want := sample("k")
	want.Answer = []byte("answer")
	given := *kept(want)
	given.Meta, given.Request, given.Answer = bytes.Clone(want.Meta), bytes.Clone(want.Request), bytes.Clone(want.Answer)
	t.begin(given)
	scribble(&given)
	t.holds(want)

	given.Meta, given.Request, given.Answer = bytes.Clone(want.Meta), bytes.Clone(want.Request), bytes.Clone(want.Answer)
	t.save(given)
	scribble(&given)
	t.holds(want)

	scribble(t.get(want.ID))
	t.holds(want)
	if existing, err := t.s.Begin(t.ctx, want); err != nil || existing == nil {
		t.Fatal(existing, err)
	} else {
		scribble(existing)
	}
	t.holds(want)
	for _, r := range t.list(10) {
		scribble(&r)
	}
	t.holds(want)
}

func testBeginRace(t *storeTest) {
	const writers = 32
	var (
		group sync.WaitGroup
		mu    sync.Mutex
		won   []string
		seen  = make(map[string]int) // owners of existing records
	)
	for i := range writers {
		group.Go(func() {
			r := sample("k")
			r.Owner, r.Scope, r.ScopeStated = fmt.Sprint(i), fmt.Sprint("scope", i%2), false
			existing, err := t.s.Begin(t.ctx, r)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err != nil:
				t.Errorf("Begin: %v", err)
			case existing == nil:
				won = append(won, r.Owner)
			default:
				seen[existing.Owner]++
			}
		})
	}
	group.Wait()
	if len(won) != 1 || len(seen) != 1 || seen[won[0]] != writers-1 {
		t.Errorf("won: %q; existing records had owners %v", won, seen)
	}
}

func testConcurrent(t *storeTest) {
	const writers, rounds = 16, 4
	var group sync.WaitGroup
	for w := range writers {
		group.Go(func() {
			for i := range rounds {
				r := sample(fmt.Sprint("k", w, "-", i))
				for step, do := range []func() error{
					func() error { _, err := t.s.Begin(t.ctx, r); return err },
					func() error { r.Attempts++; return t.s.Save(t.ctx, r) },
					func() error { r.Epoch++; return t.s.Save(t.ctx, r) },
					func() error {
						got, err := t.s.Get(t.ctx, r.ID)
						if err == nil && (got.Epoch != r.Epoch || !bytes.Equal(got.Request, r.Request)) {
							err = fmt.Errorf("read %+v", got)
						}
						return err
					},
					func() error { _, err := t.s.List(t.ctx, 0, 5); return err },
					func() error {
						if w%2 == 0 {
							return t.s.Delete(t.ctx, r)
						}
						r.Outcome = oncehttp.Succeeded
						return t.s.Save(t.ctx, r)
					},
				} {
					if err := do(); err != nil {
						t.Errorf("%s, step %d: %v", r.Key, step, err)
					}
				}
			}
		})
	}
	group.Wait()
	t.counts(0, 0, writers/2*rounds)
	if got := len(t.list(10)); got != writers/2*rounds {
		t.Errorf("%d records listed, want %d", got, writers/2*rounds)
	}
}

func testContext(t *storeTest) {
	cause := errors.New("the cause")
	ended, cancel := context.WithCancelCause(t.ctx)
	cancel(cause)
	r := sample("k")
	if existing, err := t.s.Begin(ended, r); !errors.Is(err, cause) || existing != nil {
		t.Errorf("Begin: %+v, %v, want the context's cause", existing, err)
	}
	t.missing(r.ID)
	t.begin(r)
	w := r
	w.Attempts = 100
	for name, do := range map[string]func(context.Context, oncehttp.Record) error{"Save": t.s.Save, "Ack": t.s.Ack, "Delete": t.s.Delete} {
		if err := do(ended, w); !errors.Is(err, cause) {
			t.Errorf("%s: %v, want the context's cause", name, err)
		}
	}
	if _, _, err := t.s.Purge(ended, base.AddDate(1, 0, 0), 10); !errors.Is(err, cause) {
		t.Errorf("Purge: %v, want the context's cause", err)
	}
	t.holds(r)
}

func testClosed(t *storeTest) {
	r := sample("k")
	t.begin(r)
	for range 2 { // the second does nothing
		if err := t.s.Close(); err != nil {
			t.Fatalf("Close: %v", err)
		}
	}
	for name, do := range map[string]func() error{
		"Begin":  func() error { _, err := t.s.Begin(t.ctx, sample("new")); return err },
		"Save":   func() error { return t.s.Save(t.ctx, r) },
		"Ack":    func() error { return t.s.Ack(t.ctx, r) },
		"Delete": func() error { return t.s.Delete(t.ctx, r) },
		"Get":    func() error { _, err := t.s.Get(t.ctx, r.ID); return err },
		"Find":   func() error { _, err := t.s.Find(t.ctx, r.Key); return err },
		"List":   func() error { _, err := t.s.List(t.ctx, 0, 1); return err },
		"Counts": func() error { _, err := t.s.Counts(t.ctx); return err },
		"Purge":  func() error { _, _, err := t.s.Purge(t.ctx, base, 1); return err },
		"SaveSoon": func() error {
			lazy, ok := t.s.(oncehttp.LazyStore)
			if !ok {
				return oncehttp.ErrStoreFailed
			}
			done := make(chan error, 1)
			lazy.SaveSoon(r, func(err error) { done <- err })
			return <-done
		},
	} {
		if err := do(); !errors.Is(err, oncehttp.ErrStoreFailed) {
			t.Errorf("%s on a closed store: %v, want ErrStoreFailed", name, err)
		}
	}
	if t.outlives {
		t.reopen()
		t.holds(r)
	}
}
