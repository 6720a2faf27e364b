package oncehttptest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/oncehttp/oncehttp"
)

// The promises of TestKeyStore about what happens around records: purging, lazy
// writes, openings, ownership of memory, concurrency, the end.

func testPurge(t *storeTest) {
	now := base.Truncate(time.Microsecond)
	type test struct {
		key                    string
		acked                  bool
		answerUntil, keepUntil time.Time
		record, answer         bool // there after purging at now
	}
	before, after := now.Add(-time.Microsecond), now.Add(time.Microsecond)
	tests := []test{
		{"open, all due", false, before, before, true, true},
		{"nothing due", true, after, after, true, true},
		{"due this moment", true, now, now, true, true},
		{"answer due", true, before, after, true, false},
		{"all due", true, before, before, false, false},
		{"kept for ever", true, time.Time{}, time.Time{}, true, true},
		{"answer due, record for ever", true, before, time.Time{}, true, false},
		{"record due, answer for ever", true, time.Time{}, before, false, false},
	}
	for _, test := range tests {
		r := sample(test.key)
		r.AnswerUntil, r.KeepUntil = test.answerUntil, test.keepUntil
		r.Outcome, r.Answer = oncehttp.Succeeded, []byte("answer")
		t.begin(r)
		if test.acked {
			t.ack(r)
		}
	}
	dropped, done, err := t.s.Purge(t.ctx, now, 1000)
	if err != nil || dropped != 4 || !done {
		t.Errorf("Purge: dropped %d, done %v, %v; want 4, true", dropped, done, err)
	}
	check := func() {
		t.Helper()
		for _, test := range tests {
			id := sample(test.key).ID
			if !test.record {
				t.missing(id)
			} else if r := t.get(id); (r.Answer != nil) != test.answer {
				t.Errorf("%s: answer %q, want one: %v", test.key, r.Answer, test.answer)
			}
		}
		t.counts(0, 0, 1)
	}
	check()
	if dropped, done, err = t.s.Purge(t.ctx, now, 1000); err != nil || dropped != 0 || !done {
		t.Errorf("second Purge: dropped %d, done %v, %v; want 0, true", dropped, done, err)
	}
	t.reopen()
	check()
}

func testPurgeRounds(t *storeTest) {
	const records = 25
	for i := range records {
		r := sample(fmt.Sprint("k", i))
		t.begin(r)
		if i%2 == 0 {
			r.Outcome = oncehttp.Rejected
			t.ack(r)
		}
	}
	for round, want := range []int{13, 0} {
		sum := 0
		for calls := 1; ; calls++ {
			dropped, done, err := t.s.Purge(t.ctx, base.AddDate(1, 0, 0), 3)
			if err != nil || dropped > 3 {
				t.Fatalf("Purge of 3: dropped %d, %v", dropped, err)
			}
			sum += dropped
			if done {
				break
			}
			if calls > records {
				t.Fatal("the round does not end")
			}
		}
		if sum != want {
			t.Errorf("round %d dropped %d, want %d", round, sum, want)
		}
	}
	t.counts(12, 0, 0)
}

func testSaveSoon(t *storeTest) {
	lazy, ok := t.s.(oncehttp.LazyStore)
	if !ok {
		t.Skip("not a LazyStore")
	}
	var done sync.WaitGroup
	saveSoon := func(r oncehttp.Record, want error) {
		done.Add(1)
		lazy.SaveSoon(r, func(err error) {
			defer done.Done()
			if !errors.Is(err, want) {
				t.Errorf("SaveSoon of %q: %v, want %v", r.Key, err, want)
			}
		})
	}

	// Alone, it is done without another write.
	r := sample("k")
	t.begin(r)
	r.Attempts = 3
	saveSoon(r, nil)
	done.Wait()
	t.holds(r)

	// Failures are told.
	fenced := r
	fenced.Epoch = 100
	saveSoon(fenced, oncehttp.ErrFenced)
	saveSoon(sample("none"), oncehttp.ErrNotFound)
	done.Wait()

	// Writes of one ID keep their order, lazy or not.
	for i := range 20 {
		r.Attempts, r.Epoch = 10+i, r.Epoch+1
		if i%5 == 4 {
			t.save(r)
		} else {
			saveSoon(r, nil)
		}
	}
	done.Wait()
	t.holds(r)

	// A Begin sees the lazy writes before it; Close makes them durable.
	acked := r
	acked.Outcome, acked.Answer, acked.Acked, acked.Request = oncehttp.Succeeded, []byte("answer"), true, nil
	saveSoon(acked, nil)
	existing, err := t.s.Begin(t.ctx, r)
	if err != nil || existing == nil || !existing.Acked {
		t.Errorf("Begin after SaveSoon: %+v, %v; want the acknowledged record", existing, err)
	}
	acked.Status = 299
	request := []byte("scribbled over after the call")
	again := acked
	again.Request = request
	saveSoon(again, nil)
	clear(request)
	if err := t.s.Close(); err != nil {
		t.Fatal(err)
	}
	done.Wait()
	if t.outlives {
		t.reopen()
		t.holds(acked)
	}
}

func testSession(t *storeTest) {
	now := base.Add(time.Hour)
	first, err := t.s.Session(t.ctx, now)
	if err != nil {
		t.Fatal(err)
	}
	if first.Owner == "" || first.Secret == [32]byte{} || !first.Mark.IsZero() || first.SteppedBack {
		t.Errorf("session of a new store: %+v", first)
	}
	t.begin(sample("a"))
	late := sample("b")
	late.Updated = base.Add(30 * time.Minute)
	t.begin(late)
	t.begin(sample("c"))
	if err := t.s.Delete(t.ctx, late); err != nil {
		t.Fatal(err)
	}
	t.begin(late)
	if again, err := t.s.Session(t.ctx, now.Add(-time.Hour)); err != nil || again != first {
		t.Errorf("second call: %+v, %v, want %+v", again, err, first)
	}

	if !t.outlives {
		return
	}
	t.reopen()
	second, err := t.s.Session(t.ctx, now)
	if err != nil {
		t.Fatal(err)
	}
	if second.Owner == "" || second.Owner == first.Owner {
		t.Errorf("owners %q and then %q, want another", first.Owner, second.Owner)
	}
	if second.Secret != first.Secret || second.Era != first.Era || second.SteppedBack {
		t.Errorf("second session %+v, want secret and era of %+v", second, first)
	}
	if want := late.Updated.Truncate(time.Microsecond); !second.Mark.Equal(want) {
		t.Errorf("mark %v, want %v", second.Mark, want)
	}
}

func testEras(t *storeTest) {
	if !t.outlives {
		t.Skip("the store does not outlive its Close")
	}
	first, err := t.s.Session(t.ctx, base)
	if err != nil {
		t.Fatal(err)
	}
	r := sample("k")
	r.Updated = base
	t.begin(r)
	mark := base.Truncate(time.Microsecond)
	open := func(now time.Time) oncehttp.Session {
		t.Helper()
		t.reopen()
		session, err := t.s.Session(t.ctx, now)
		if err != nil {
			t.Fatal(err)
		}
		return session
	}
	if s := open(mark.Add(-time.Minute)); s.SteppedBack || s.Era != first.Era || !s.Mark.Equal(mark) {
		t.Errorf("a minute behind the mark: %+v, want era %d and mark %v", s, first.Era, mark)
	}
	now := mark.Add(-time.Minute - time.Microsecond)
	stepped := open(now)
	if !stepped.SteppedBack || stepped.Era <= first.Era || !stepped.Mark.Equal(now) {
		t.Errorf("more than a minute behind the mark: %+v, want an era after %d and mark %v", stepped, first.Era, now)
	}
	if s := open(now); s.SteppedBack || s.Era != stepped.Era || !s.Mark.Equal(now) {
		t.Errorf("opened again: %+v, want era %d and mark %v", s, stepped.Era, now)
	}
	if s := open(now.AddDate(1, 0, 0)); s.SteppedBack || s.Era != stepped.Era || !s.Mark.Equal(now) {
		t.Errorf("a year later: %+v, want era %d and mark %v", s, stepped.Era, now)
	}
	t.holds(r)
}

func testTimes(t *storeTest) {
	zone := time.FixedZone("east", 5*3600)
	for i, at := range []time.Time{
		{}, time.Unix(0, 0), time.Unix(0, 999), time.Unix(-1, 999_999_999),
		base, base.In(zone), base.Truncate(time.Second),
		time.Date(1, 1, 1, 0, 0, 0, 1000, time.UTC), time.Date(9999, 12, 31, 23, 59, 59, 999_999_999, time.UTC),
		time.Now(),
	} {
		r := sample(fmt.Sprint(i))
		r.FirstSent, r.ResendUntil, r.NotBefore, r.Updated, r.AnswerUntil, r.KeepUntil = at, at, at, at, at, at
		t.begin(r)
		t.holds(r)
	}
}

func testOpaque(t *storeTest) {
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	for i, b := range [][]byte{nil, {}, {0}, all, bytes.Repeat(all, 400)} {
		for part := range 3 {
			r := sample(fmt.Sprint(i, "-", part))
			switch part {
			case 0:
				r.Meta = b
			case 1:
				r.Request = b
			case 2:
				r.Answer = b
			}
			t.begin(r)
			t.holds(r)
			t.ack(r)
			r.Acked, r.Request = true, nil
			t.holds(r)
		}
	}
}

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
