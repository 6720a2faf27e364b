package oncehttptest

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/oncehttp/oncehttp"
)

// The promises of TestKeyStore about what happens to records in time: purging,
// lazy writes, openings, clocks, and what is kept to the bit.

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
	for _, later := range []time.Duration{time.Minute, time.Hour} {
		if _, _, err := t.s.Purge(t.ctx, now.Add(later), 0); err != nil {
			t.Fatal(err)
		}
		if later > time.Minute {
			now = now.Add(later)
		}
		if s := open(now); s.SteppedBack || !s.Mark.Equal(now) {
			t.Errorf("after %v without a write but a purge: %+v, want mark %v", later, s, now)
		}
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
		r.FirstSent, r.ResendUntil, r.NotBefore, r.RestUntil, r.Updated, r.AnswerUntil, r.KeepUntil = at, at, at, at, at, at, at
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
