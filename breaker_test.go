package oncehttp

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// changes records what a breaker tells its listener.
type changes struct {
	mu   sync.Mutex
	list []string
}

func (c *changes) add(host, from, to string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.list = append(c.list, host+": "+from+" > "+to)
}

func (c *changes) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return strings.Join(c.list, ", ")
}

// request makes a request that ends at once and reports whether it was allowed.
func request(b *breaker, h health) bool {
	p, err := b.allow()
	p.done(h)
	return err == nil
}

// tripped returns a breaker that has just opened.
func tripped(t *testing.T, onChange func(host, from, to string)) *breaker {
	t.Helper()
	b := newBreaker(nil, "https://a", onChange)
	for range 20 {
		request(b, failure)
	}
	if got := b.state(); got != "open" {
		t.Fatalf("after 20 failures it is %s", got)
	}
	return b
}

func TestBreakerOpensOnlyForAHostThatIsDown(t *testing.T) {
	ok, bad := strings.Repeat("+", 10), strings.Repeat("-", 10)
	for _, tt := range []struct {
		name string
		seq  string // + success, - failure, . ignored, s a second passes
		want string
	}{
		{"too few", strings.Repeat("-", 19), "closed"},
		{"enough", strings.Repeat("-", 20), "open"},
		{"ignored ones are no requests", strings.Repeat("-", 19) + strings.Repeat(".", 50), "closed"},
		{"ignored ones do not interrupt", strings.Repeat("-", 17) + ".-.-.-", "open"},
		{"half failed", ok + bad, "closed"},
		{"more than half failed", ok + bad + "-", "open"},
		{"most failed, but not the last five", bad + bad[:9] + "+----", "closed"},
		{"most failed, and the last five", bad + bad[:9] + "+-----", "open"},
		{"every second fails for long", strings.Repeat("+-", 100), "closed"},
		{"some fail for long", strings.Repeat("--+", 100), "closed"},
		{"failures age", bad + strings.Repeat("s", 10) + bad[:9], "closed"},
		{"failures of nine seconds", bad + strings.Repeat("s", 9) + bad, "open"},
		{"successes age", ok + ok + strings.Repeat("s", 10) + bad + bad, "open"},
		{"one failure a second", strings.Repeat("-s", 100), "closed"},
		{"a busy host fails for less than a second", strings.Repeat(ok+"s", 9) + ok + bad + bad + bad, "closed"},
		{"a busy host has died", strings.Repeat(ok+"s", 9) + ok + bad + bad + "s-", "open"},
		{"a busy host answers one", strings.Repeat(ok+"s", 9) + ok + bad + bad + "+s" + bad, "closed"},
		{"a host that is less busy", strings.Repeat("++s", 9) + "--s--s--s--s", "closed"},
		{"three failures a second", strings.Repeat("---s", 100), "open"},
	} {
		synctest.Test(t, func(t *testing.T) {
			b := newBreaker(nil, "https://a", nil)
			for _, c := range tt.seq {
				switch c {
				case '+':
					request(b, success)
				case '-':
					request(b, failure)
				case '.':
					request(b, ignored)
				case 's':
					time.Sleep(time.Second)
				}
				if b.state() == "open" {
					break
				}
			}
			if got := b.state(); got != tt.want {
				t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
			}
		})
	}
}

func TestBreakerOpensForAHostThatSwallowsRequests(t *testing.T) {
	// Every request ends in a timeout that is longer than the window.
	synctest.Test(t, func(t *testing.T) {
		b := newBreaker(nil, "https://a", nil)
		for range 20 {
			p, err := b.allow()
			if err != nil {
				t.Fatal(err)
			}
			go func() {
				time.Sleep(80 * time.Second)
				p.done(failure)
			}()
			time.Sleep(10 * time.Millisecond)
		}
		time.Sleep(80 * time.Second)
		if got := b.state(); got != "open" {
			t.Errorf("%s, want open", got)
		}
	})
}

func TestBreakerSaysUntilWhen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := tripped(t, nil)
		until := time.Now().Add(30 * time.Second)
		time.Sleep(7 * time.Second)
		p, err := b.allow()
		open, ok := errors.AsType[*CircuitOpenError](err)
		if !errors.Is(err, ErrCircuitOpen) || !ok || p != (permit{}) {
			t.Fatalf("%v, %v", p, err)
		}
		if open.Host != "https://a" || !open.Until.Equal(until) {
			t.Errorf("%+v, want until %v", open, until)
		}
		if want := "oncehttp: circuit breaker is open for https://a until 2000-01-01T00:00:30.000Z"; err.Error() != want {
			t.Errorf("%q, want %q", err, want)
		}
		if got := b.openUntil(); !got.Equal(until) {
			t.Errorf("openUntil %v, want %v", got, until)
		}
		for at, want := range map[time.Time]bool{time.Now(): true, until.Add(-1): true, until: false, until.Add(time.Hour): false} {
			if got := b.refusal(at) != nil; got != want {
				t.Errorf("refusal at %v: %v", at.Sub(until), got)
			}
			open, ok := errors.AsType[*CircuitOpenError](b.refusal(at))
			if ok != want || ok && *open != (CircuitOpenError{"https://a", until}) {
				t.Errorf("refusal at %v: %v", at.Sub(until), open)
			}
		}
		time.Sleep(time.Until(until) - 1)
		if request(b, success) {
			t.Error("allowed an instant too early")
		}
		time.Sleep(time.Nanosecond)
		if got := b.state(); got != "half-open" || !b.openUntil().IsZero() || b.refusal(time.Now()) != nil {
			t.Errorf("at the end it is %s until %v", got, b.openUntil())
		}
		if !request(b, success) {
			t.Error("refused at the time that was told")
		}
		if got := b.state(); got != "closed" {
			t.Errorf("after a good probe it is %s", got)
		}
	})
}

func TestBreakerLetsOneProbeThrough(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := tripped(t, nil)
		time.Sleep(30 * time.Second)
		probe, err := b.allow()
		if err != nil {
			t.Fatal(err)
		}
		until := time.Now().Add(30 * time.Second)
		for range 3 {
			time.Sleep(time.Second)
			_, err := b.allow()
			if open, ok := errors.AsType[*CircuitOpenError](err); !ok || !open.Until.Equal(until) {
				t.Fatalf("beside the probe: %v, want open until %v", err, until)
			}
		}
		if b.refusal(time.Now()) != nil {
			t.Error("it foresees that the probe fails")
		}
		probe.done(failure)
		if got, want := b.openUntil(), time.Now().Add(30*time.Second); !got.Equal(want) {
			t.Errorf("after a bad probe: until %v, want %v", got, want)
		}
		time.Sleep(30 * time.Second)
		if first, second := request(b, success), request(b, success); !first || !second {
			t.Error("refused after a good probe")
		}
	})
}

func TestBreakerIsNotWedgedByAnIgnoredProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := tripped(t, nil)
		time.Sleep(30 * time.Second)
		for i := range 1000 {
			probe, err := b.allow()
			if err != nil {
				t.Fatalf("probe %d: %v", i, err)
			}
			if _, err := b.allow(); !errors.Is(err, ErrCircuitOpen) {
				t.Fatalf("beside probe %d: %v", i, err)
			}
			probe.done(ignored)
		}
		if !request(b, success) || b.state() != "closed" {
			t.Errorf("it is %s", b.state())
		}
	})
}

func TestBreakerIsNotWedgedByALostProbe(t *testing.T) {
	for _, late := range []health{ignored, success, failure} {
		synctest.Test(t, func(t *testing.T) {
			b := tripped(t, nil)
			time.Sleep(30 * time.Second)
			lost, err := b.allow()
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(30*time.Second - 1)
			if _, err := b.allow(); !errors.Is(err, ErrCircuitOpen) {
				t.Fatalf("too early beside the lost probe: %v", err)
			}
			time.Sleep(time.Nanosecond)
			second, err := b.allow()
			if err != nil {
				t.Fatalf("the lost probe was not replaced: %v", err)
			}
			if _, err := b.allow(); !errors.Is(err, ErrCircuitOpen) {
				t.Fatalf("beside the second probe: %v", err)
			}

			lost.done(late) // it turns up after all
			want := map[health]string{ignored: "half-open", success: "closed", failure: "open"}[late]
			if got := b.state(); got != want {
				t.Errorf("late result %d: %s, want %s", late, got, want)
			}
			if late == ignored {
				if _, err := b.allow(); !errors.Is(err, ErrCircuitOpen) {
					t.Errorf("a late ignored probe let a third through: %v", err)
				}
			}
			second.done(success)
			if want == "half-open" {
				want = "closed"
			}
			if got := b.state(); got != want {
				t.Errorf("late result %d, then a good probe: %s, want %s", late, got, want)
			}
		})
	}
}

func TestPermitCountsOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBreaker(nil, "https://a", nil)
		for range 19 {
			p, _ := b.allow()
			p.done(failure)
			p.done(failure)
			p.done(failure)
		}
		if got := b.state(); got != "closed" {
			t.Errorf("19 permits returned thrice: %s", got)
		}
		request(b, failure)
		time.Sleep(30 * time.Second)
		probe, _ := b.allow()
		probe.done(ignored)
		probe.done(success)
		if got := b.state(); got != "half-open" {
			t.Errorf("after an ignored probe: %s", got)
		}
		var none permit
		none.done(failure)
	})
}

func TestResultsOfAnEarlierStateDoNotCount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBreaker(nil, "https://a", nil)
		var old []permit
		for range 50 {
			p, _ := b.allow()
			old = append(old, p)
		}
		for _, p := range old[:20] {
			p.done(failure)
		}
		old[20].done(success)
		if got := b.state(); got != "open" {
			t.Fatalf("a success of before closed it: %s", got)
		}
		time.Sleep(30 * time.Second)
		probe, _ := b.allow()
		old[21].done(success)
		old[22].done(failure)
		if got := b.state(); got != "half-open" {
			t.Fatalf("results of before counted as the probe's: %s", got)
		}
		probe.done(success)
		for _, p := range old[23:] {
			p.done(failure)
		}
		if got := b.state(); got != "closed" {
			t.Errorf("failures of before opened it: %s", got)
		}
	})
}

func TestBreakerTellsChangesInOrderAndWithoutLocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got changes
		var b *breaker
		b = newBreaker(nil, "https://a", func(host, from, to string) {
			// All of these deadlock under a lock.
			b.state()
			b.openUntil()
			b.refusal(time.Now())
			if to == "half-open" {
				probe := b.probeOf()
				probe.done(failure) // another change, from within
			}
			got.add(host, from, to)
		})
		for range 20 {
			request(b, failure)
		}
		time.Sleep(30 * time.Second)
		request(b, ignored)
		want := "https://a: closed > open, https://a: open > half-open, https://a: half-open > open"
		if got.String() != want {
			t.Errorf("told %s\nwant %s", &got, want)
		}
	})
}

// probeOf returns another permit of the probe that is out.
func (b *breaker) probeOf() permit {
	b.mu.Lock()
	defer b.mu.Unlock()
	return permit{b, b.era, b.probe}
}

func TestBreakerSurvivesAPanickingListener(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got changes
		explode := true
		b := newBreaker(nil, "https://a", func(host, from, to string) {
			if got.add(host, from, to); explode {
				panic("listener")
			}
		})
		func() {
			defer func() {
				if recover() == nil {
					t.Error("the panic was swallowed")
				}
			}()
			for range 20 {
				request(b, failure)
			}
		}()
		explode = false
		time.Sleep(30 * time.Second)
		if !request(b, success) {
			t.Error("wedged")
		}
		want := "https://a: closed > open, https://a: open > half-open, https://a: half-open > closed"
		if got.String() != want {
			t.Errorf("told %s\nwant %s", &got, want)
		}
	})
}

func TestBreakerNeverWedges(t *testing.T) {
	for seed := range uint64(50) {
		synctest.Test(t, func(t *testing.T) {
			r := seeded(seed)
			last := "closed"
			b := newBreaker(&Breaker{MinRequests: 3, Consecutive: 2}, "https://a", func(_, from, to string) {
				if from != last {
					t.Errorf("seed %d: told of a change from %s after one to %s", seed, from, last)
				}
				last = to
			})
			var out []permit
			for range 500 {
				switch r.IntN(5) {
				case 0, 1:
					p, err := b.allow()
					if err == nil {
						out = append(out, p)
						break
					}
					open, ok := errors.AsType[*CircuitOpenError](err)
					if left := time.Until(open.Until); !ok || left <= 0 || left > 30*time.Second {
						t.Fatalf("seed %d: %v, %v from now", seed, err, left)
					}
				case 2, 3:
					if len(out) > 0 {
						i := r.IntN(len(out))
						out[i].done(health(r.IntN(3)))
						out = slices.Delete(out, i, i+1)
					}
				case 4:
					time.Sleep(time.Duration(r.Int64N(int64(20 * time.Second))))
				}
			}
			// Whatever is still out, and never returns: it recovers.
			time.Sleep(30 * time.Second)
			if !request(b, success) {
				t.Fatalf("seed %d: refused after 30 s of rest, it is %s", seed, b.state())
			}
			if got := b.state(); got != "closed" {
				t.Fatalf("seed %d: after a success it is %s", seed, got)
			}
			if last != "closed" {
				t.Fatalf("seed %d: last told of %s", seed, last)
			}
		})
	}
}

func TestBreakerHoldsUnderConcurrency(t *testing.T) {
	var got changes
	b := newBreaker(&Breaker{OpenFor: time.Microsecond}, "https://a", got.add)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			r := seeded(uint64(g))
			for i := range 500 {
				p, err := b.allow()
				if err != nil && !errors.Is(err, ErrCircuitOpen) {
					t.Error(err)
				}
				if i%7 == 0 {
					runtime.Gosched()
				}
				p.done(min(health(r.IntN(12)), failure)) // most fail
				b.state()
				b.refusal(time.Now())
			}
		})
	}
	wg.Wait()
	from := "closed"
	for _, c := range got.list {
		var f, to string
		fmt.Sscanf(c, "https://a: %s > %s", &f, &to)
		if f != from {
			t.Fatalf("told of a change from %s after one to %s", f, from)
		}
		from = to
	}
}

func TestBreakerSwitches(t *testing.T) {
	off := newBreaker(&Breaker{Disabled: true}, "https://a", nil)
	for range 1000 {
		if !request(off, failure) {
			t.Fatal("disabled: refused")
		}
	}
	if off.state() != "disabled" || !off.openUntil().IsZero() || off.refusal(time.Time{}) != nil || !off.untouched(time.Now(), 0) {
		t.Error("disabled, and not as if closed")
	}
	synctest.Test(t, func(t *testing.T) {
		b := newBreaker(&Breaker{Window: time.Second, MinRequests: 3, FailureRatio: -1, Consecutive: 1, OpenFor: time.Minute}, "", nil)
		request(b, success)
		request(b, success)
		request(b, failure)
		if want := time.Now().Add(time.Minute); !b.openUntil().Equal(want) {
			t.Errorf("open until %v, want %v", b.openUntil(), want)
		}
	})
}

func TestBreakerIsForgottenOnlyWhenNothingIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const keep = 10 * time.Minute
		fresh := newBreaker(nil, "https://a", nil)
		if !fresh.untouched(time.Now(), keep) {
			t.Error("a new one is not untouched")
		}
		b := tripped(t, nil)
		time.Sleep(30*time.Second + keep)
		if b.untouched(time.Now(), keep) {
			t.Error("it is open")
		}
		time.Sleep(time.Nanosecond)
		if !b.untouched(time.Now(), keep) {
			t.Error("nobody wanted a probe for long")
		}
	})
}

func TestBreakerValidation(t *testing.T) {
	for _, ok := range []*Breaker{nil, {}, {Disabled: true}, {FailureRatio: -1}, {FailureRatio: 0.99}} {
		if err := ok.validate(); err != nil {
			t.Errorf("%+v: %v", ok, err)
		}
	}
	for _, bad := range []*Breaker{
		{Window: -1}, {MinRequests: -1}, {Consecutive: -1}, {OpenFor: -1}, {FailureRatio: 1}, {FailureRatio: math.NaN()},
	} {
		if bad.validate() == nil {
			t.Errorf("%+v is accepted", bad)
		}
	}
}

func BenchmarkBreaker(b *testing.B) {
	b.Run("closed", func(b *testing.B) {
		br := newBreaker(nil, "https://a", nil)
		b.ReportAllocs()
		for b.Loop() {
			request(br, success)
		}
	})
	b.Run("open", func(b *testing.B) {
		br := newBreaker(&Breaker{OpenFor: time.Hour}, "https://a", nil)
		for range 20 {
			request(br, failure)
		}
		b.ReportAllocs()
		for b.Loop() {
			request(br, success)
		}
	})
	b.Run("refusal", func(b *testing.B) {
		br, at := newBreaker(nil, "https://a", nil), time.Now()
		b.ReportAllocs()
		for b.Loop() {
			br.refusal(at)
		}
	})
}
