package oncehttp

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/oncehttp/oncehttp/internal/reliability"
)

// newTestLimits returns a registry whose hosts all have cfg.
func newTestLimits(cfg hostConfig) *limits {
	return newLimits(func(string) hostConfig { return cfg })
}

func hostName(i int) string { return "https://" + strconv.Itoa(i) + ".example" }

func TestAMillionHostsStayBounded(t *testing.T) {
	hosts := 1_000_000
	if testing.Short() || RaceEnabled() {
		hosts = 50_000
	}
	cases := 0
	for _, tt := range []struct {
		name string
		use  func(h *hostLimits)
	}{
		{"nothing to remember", func(*hostLimits) {}},
		{"all with something to remember", func(h *hostLimits) { h.budget.deposit(time.Now()) }},
	} {
		synctest.Test(t, func(t *testing.T) {
			l := newTestLimits(hostConfig{})
			for i := range hosts {
				h := l.get(hostName(i))
				tt.use(h)
				h.release(time.Now())
				if len(l.hosts) > maxHosts {
					t.Fatalf("%s: %d hosts", tt.name, len(l.hosts))
				}
			}
			checkRing(t, l)
			if got := len(l.hosts); got != maxHosts {
				t.Errorf("%s: %d hosts are left, want %d", tt.name, got, maxHosts)
			}
			if l.hosts[hostName(hosts-1)] == nil || l.hosts[hostName(hosts-maxHosts-1)] != nil {
				t.Errorf("%s: the least recently used ones are not those that went", tt.name)
			}
			cases += hosts
			hosts = min(hosts, 100_000)
		})
	}
	reliability.Report(t, reliability.Result{Class: "a million hosts", How: "limits of each, with and without something to remember", Cases: cases})
}

// checkRing compares the ring of idle hosts with the map.
func checkRing(t *testing.T, l *limits) {
	t.Helper()
	idle := 0
	for h := l.idle.next; h != &l.idle; h = h.next {
		if idle++; h.users != 0 || l.hosts[h.origin] != h || h.next.prev != h {
			t.Fatalf("%s in the ring: %d users", h.origin, h.users)
		}
	}
	used := 0
	for _, h := range l.hosts {
		if h.users > 0 {
			used++
		}
	}
	if idle+used != len(l.hosts) {
		t.Fatalf("%d idle and %d used of %d hosts", idle, used, len(l.hosts))
	}
}

func TestIdleHostsAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newTestLimits(hostConfig{})
		for i := range 1000 {
			l.get(hostName(i)).release(time.Now())
		}
		time.Sleep(hostIdle)
		for i := range 500 {
			l.get("https://new-" + strconv.Itoa(i)).release(time.Now())
		}
		if got := len(l.hosts); got != 500 {
			t.Errorf("%d hosts, want the 500 new ones", got)
		}
		checkRing(t, l)
	})
}

func TestHostsWithSomethingToRememberAreKept(t *testing.T) {
	for _, tt := range []struct {
		name  string
		touch func(h *hostLimits) (forget func())
		until time.Duration // after which it is forgotten
	}{
		{"in use", func(h *hostLimits) func() { h.all.get(h.origin); return func() { h.release(time.Now()) } }, math.MaxInt64},
		{"permit lost", func(h *hostLimits) func() { _, _ = h.breaker.allow(); return nil }, 0}, // in a panicking OnChange
		{"paused", func(h *hostLimits) func() { h.pause(time.Now().Add(5 * time.Minute)); return nil }, 5 * time.Minute},
		{"open breaker", func(h *hostLimits) func() {
			for range 20 {
				request(h.breaker, failure)
			}
			return nil
		}, hostTripped + 30*time.Second + 1},
		{"slow floor", func(h *hostLimits) func() { withdrawAll(h.budget, time.Now()); return nil }, 200 * time.Second},
		{"slow rate", func(h *hostLimits) func() { _ = h.wait(t.Context(), time.Time{}, nil); return nil }, 100 * time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			l := newTestLimits(hostConfig{Budget: &Budget{MinPerSecond: 0.1, Burst: 20}, Rate: 0.01, Burst: 1, Rand: least})
			h := l.get("https://a")
			forget := tt.touch(h)
			h.release(time.Now())

			others := 0
			kept := func() bool { // looks at every host
				for range 4 {
					l.get(hostName(others)).release(time.Now())
					others++
				}
				return l.hosts["https://a"] == h
			}
			for elapsed := time.Duration(0); elapsed < min(tt.until, time.Hour); {
				if !kept() {
					t.Fatalf("%s: forgotten after %v", tt.name, elapsed)
				}
				step := min(10*time.Second, tt.until-elapsed)
				time.Sleep(step)
				elapsed += step
			}
			if forget != nil {
				forget()
			}
			time.Sleep(hostIdle)
			for range 20 {
				if !kept() {
					return
				}
			}
			t.Errorf("%s: never forgotten", tt.name)
		})
	}
}

func TestHostsInUseAreNeverSplit(t *testing.T) {
	// Far more hosts in use than there is room for.
	l := newTestLimits(hostConfig{})
	l.max = 4
	var holders [32]atomic.Pointer[hostLimits] // of each origin: its state while somebody holds it
	var held [32]atomic.Int64
	var wg sync.WaitGroup
	var mu [32]sync.Mutex
	for g := range 8 {
		wg.Go(func() {
			r := seeded(uint64(g))
			for range 2000 {
				i := r.IntN(len(held))
				h := l.get(hostName(i))
				mu[i].Lock()
				if held[i].Add(1) > 1 && holders[i].Load() != h {
					t.Errorf("%s has two states", h.origin)
				}
				holders[i].Store(h)
				mu[i].Unlock()

				j := r.IntN(len(held))
				l.get(hostName(j)).release(time.Now())

				mu[i].Lock()
				held[i].Add(-1)
				h.release(time.Now())
				mu[i].Unlock()
			}
		})
	}
	wg.Wait()
	checkRing(t, l)
	if got := len(l.hosts); got > l.max {
		t.Errorf("%d hosts are left, want at most %d", got, l.max)
	}
}

func TestMoreHostsThanRoomGoWhenTheyAreReleased(t *testing.T) {
	l := newTestLimits(hostConfig{})
	l.max = 10
	var all []*hostLimits
	for i := range 100 {
		all = append(all, l.get(hostName(i)))
	}
	if got := len(l.hosts); got != 100 {
		t.Errorf("%d hosts, want all that are in use", got)
	}
	for i, h := range all {
		if l.get(hostName(i)) != h {
			t.Fatal("a host in use was split")
		}
		h.release(time.Now())
		h.release(time.Now())
	}
	if got := len(l.hosts); got > l.max {
		t.Errorf("%d hosts are left, want at most %d", got, l.max)
	}
	checkRing(t, l)
}

func TestVictimsAreThoseWithNothingToRemember(t *testing.T) {
	l := newTestLimits(hostConfig{})
	l.max = 3
	for i := range 3 {
		h := l.get(hostName(i))
		if i != 1 {
			h.pause(time.Now().Add(time.Hour))
		}
		h.release(time.Now())
	}
	l.get("https://new").release(time.Now())
	if l.hosts[hostName(0)] == nil || l.hosts[hostName(1)] != nil || l.hosts[hostName(2)] == nil {
		t.Error("a paused host went before one that was not")
	}
}

func TestReleasingTwiceIsNoticed(t *testing.T) {
	l := newTestLimits(hostConfig{})
	h := l.get("https://a")
	h.release(time.Now())
	defer func() {
		if recover() == nil {
			t.Error("it was not")
		}
	}()
	h.release(time.Now())
}

func TestAThousandHostsDoNotShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newTestLimits(hostConfig{Rate: 1, Burst: 1, Rand: least})
		bad := l.get("https://bad")
		defer bad.release(time.Now())
		for range 20 {
			request(bad.breaker, failure)
		}
		withdrawAll(bad.budget, time.Now())
		_ = bad.wait(t.Context(), time.Time{}, nil)
		bad.pause(time.Now().Add(time.Minute))

		start := time.Now()
		for i := range 1000 {
			h := l.get(hostName(i))
			defer h.release(time.Now())
			if err := h.wait(t.Context(), time.Time{}, nil); err != nil {
				t.Fatal(err)
			}
			if !request(h.breaker, success) || !h.budget.withdraw(time.Now()) {
				t.Fatalf("host %d suffers from another", i)
			}
		}
		if waited := time.Since(start); waited != 0 {
			t.Errorf("waited %v", waited)
		}
		for _, s := range l.stats() {
			want := hostStats{Origin: s.Origin, Breaker: "closed", Floor: 19, Users: 1}
			if s.Origin == "https://bad" {
				want = hostStats{
					Origin: s.Origin, Breaker: "open", Users: 1,
					OpenUntil: start.Add(30 * time.Second), PausedUntil: start.Add(time.Minute),
				}
			}
			if s != want {
				t.Fatalf("stats %+v\nwant  %+v", s, want)
			}
		}
	})
}

func TestHostsHaveTheirOwnConfiguration(t *testing.T) {
	var told []string
	l := newLimits(func(origin string) hostConfig {
		if origin == "https://off" {
			return hostConfig{Budget: &Budget{Disabled: true}, Breaker: &Breaker{Disabled: true}}
		}
		return hostConfig{Rate: 25, OnChange: func(origin, from, to string) { told = append(told, origin+" "+from+" "+to) }}
	})
	off, on := l.get("https://off"), l.get("https://on")
	if off.budget != nil || off.breaker != nil || off.gate.rate != nil {
		t.Error("limits that are off are not")
	}
	if on.budget == nil || on.breaker == nil || on.gate.rate.Limit() != 25 || on.gate.rate.Burst() != 25 {
		t.Error("limits that are on are not")
	}
	for range 20 {
		request(off.breaker, failure)
		request(on.breaker, failure)
	}
	if got := fmt.Sprint(told); got != "[https://on closed open]" {
		t.Errorf("told %s", got)
	}
}

func TestWaitWithoutLimitsDoesNotWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newTestLimits(hostConfig{}).get("https://a")
		start := time.Now()
		for range 1000 {
			if err := h.wait(t.Context(), time.Time{}, nil); err != nil {
				t.Fatal(err)
			}
		}
		if waited := time.Since(start); waited != 0 {
			t.Errorf("waited %v", waited)
		}
	})
}

func TestPauseHoldsEveryoneBackAndSpreadsThem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newTestLimits(hostConfig{Rand: lockedRand(1)}).get("https://a")
		start := time.Now()
		h.pause(start.Add(20 * time.Second))
		h.pause(start.Add(10 * time.Second)) // never shorter
		end := h.pausedUntil()
		if got := end.Sub(start); got < 20*time.Second || got > 20*time.Second+20*time.Second/pauseDelay {
			t.Errorf("paused until %v", got)
		}
		var mu sync.Mutex
		var ends [5]int // in each second after the pause
		var wg sync.WaitGroup
		for i := range 1000 {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * 19 * time.Millisecond) // the late ones too
				if err := h.wait(t.Context(), time.Time{}, nil); err != nil {
					t.Error(err)
				}
				after := time.Since(end)
				if after < 0 || after > 5*time.Second {
					t.Errorf("came back %v after the pause", after)
					return
				}
				mu.Lock()
				defer mu.Unlock()
				ends[min(after/time.Second, 4)]++
			})
		}
		wg.Wait()
		for _, n := range ends {
			if n < 140 || n > 260 { // 200 ± 5 standard deviations
				t.Errorf("came back in each second: %v, want about 200", ends)
				break
			}
		}
		if !h.gate.pausedUntil().IsZero() {
			t.Error("still paused")
		}
	})
}

func lockedRand(seed uint64) func(int64) int64 {
	var mu sync.Mutex
	r := seeded(seed)
	return func(n int64) int64 {
		mu.Lock()
		defer mu.Unlock()
		return r.Int64N(n)
	}
}

// A server that sends thousands of processes away at once would see them all at
// once again.
func TestProcessesThatWereSentAwayTogetherDoNotComeBackTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const processes = 1000
		start := time.Now()
		var back [5]int // in each second of the ten that they may stay away longer, in pairs
		for seed := range uint64(processes) {
			h := newTestLimits(hostConfig{Rand: lockedRand(seed)}).get("https://a")
			h.pause(start.Add(20 * time.Second))
			late := h.pausedUntil().Sub(start) - 20*time.Second
			if late < 0 || late > 10*time.Second {
				t.Fatalf("%v later than asked", late)
			}
			back[min(late/(2*time.Second), 4)]++

			// The same process is told again, as its other requests fail.
			h.pause(start.Add(20*time.Second + time.Millisecond))
			if again := h.pausedUntil().Sub(start) - 20*time.Second - late; again < 0 || again > 2*time.Millisecond {
				t.Fatalf("told 1 ms more, it stays away for %v more", again)
			}
		}
		for _, n := range back {
			if n < 140 || n > 260 { // 200 ± 5 standard deviations
				t.Errorf("back in each two seconds: %v, want about 200", back)
				break
			}
		}
	})
}

func TestPauseIsObeyedByThoseWhoWaitAlready(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newTestLimits(hostConfig{Rand: least}).get("https://a")
		start := time.Now()
		h.pause(start.Add(10 * time.Second))
		time.AfterFunc(5*time.Second, func() { h.pause(start.Add(30 * time.Second)) })
		if err := h.wait(t.Context(), time.Time{}, nil); err != nil {
			t.Fatal(err)
		}
		if waited := time.Since(start); waited != 30*time.Second {
			t.Errorf("waited %v, want 30s", waited)
		}
	})
}

func TestPauseSpreadsOverAllOfItsLength(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newTestLimits(hostConfig{Rand: most}).get("https://a")
		wait := func() time.Duration {
			start := time.Now()
			if err := h.wait(t.Context(), time.Time{}, nil); err != nil {
				t.Fatal(err)
			}
			return time.Since(start)
		}
		h.pause(time.Now().Add(10 * time.Second))
		time.Sleep(8 * time.Second)
		h.pause(time.Now().Add(12 * time.Second)) // lengthened to 20 s
		time.Sleep(11 * time.Second)
		if got, want := wait(), 1*time.Second+20*time.Second/pauseDelay+20*time.Second/pauseSpread; got != want {
			t.Errorf("in the last second of 20: %v, want %v", got, want)
		}
		h.pause(time.Now().Add(4 * time.Second)) // another one
		if got, want := wait(), 4*time.Second+4*time.Second/pauseDelay+4*time.Second/pauseSpread; got != want {
			t.Errorf("in another of 4 s: %v, want %v", got, want)
		}
		h.pause(time.Now().Add(4 * time.Second))
		ctx, cancel := context.WithDeadline(t.Context(), h.pausedUntil().Add(100*time.Millisecond))
		defer cancel()
		end := h.pausedUntil()
		if err := h.wait(ctx, deadlineOf(ctx), nil); err != nil || time.Since(end) != 50*time.Millisecond {
			t.Errorf("shortly before the deadline: %v, %v after the pause", err, time.Since(end))
		}
	})
}

func TestPauseInThePastIsNone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newTestLimits(hostConfig{}).get("https://a")
		h.pause(time.Time{})
		h.pause(time.Now())
		if !h.gate.pausedUntil().IsZero() {
			t.Errorf("paused until %v", h.gate.pausedUntil())
		}
	})
}

func TestWaitThatCannotEndInTimeIsNeverBegun(t *testing.T) {
	for _, tt := range []struct {
		name string
		prep func(h *hostLimits)
		free time.Duration // when a wait can end
	}{
		{"pause", func(h *hostLimits) { h.pause(time.Now().Add(10 * time.Second)) }, 15 * time.Second},
		{"rate", func(h *hostLimits) { _ = h.wait(t.Context(), time.Time{}, nil) }, 4 * time.Second},
		{"rate after pause", func(h *hostLimits) {
			h.pause(time.Now().Add(10 * time.Second))
			go h.wait(context.Background(), time.Time{}, nil)
			synctest.Wait()
		}, 19 * time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			h := newTestLimits(hostConfig{Rate: 0.25, Burst: 1, Rand: most}).get("https://a")
			tt.prep(h)
			start := time.Now()
			for range 100 { // and leaves no trace
				ctx, cancel := context.WithTimeout(t.Context(), tt.free)
				defer cancel()
				err := h.wait(ctx, deadlineOf(ctx), nil)
				if waited := time.Since(start); waited != 0 {
					t.Fatalf("%s: waited %v", tt.name, waited)
				}
				refused, ok := errors.AsType[*waitError](err)
				if !errors.Is(err, ErrWaitTooLong) || !ok || !refused.Timeout() {
					t.Fatalf("%s: %v", tt.name, err)
				}
				if got := refused.until.Sub(start); got != tt.free {
					t.Fatalf("%s: said to be free after %v, want %v", tt.name, got, tt.free)
				}
			}
			ctx, cancel := context.WithTimeout(t.Context(), tt.free+1)
			defer cancel()
			if err := h.wait(ctx, deadlineOf(ctx), nil); err != nil {
				t.Fatalf("%s: with enough time: %v", tt.name, err)
			}
			if waited := time.Since(start); waited != tt.free {
				t.Errorf("%s: waited %v, want %v", tt.name, waited, tt.free)
			}
			synctest.Wait()
		})
	}
}

func TestWaitErrorSaysUntilWhen(t *testing.T) {
	err := &waitError{"https://a", epoch}
	if got, want := err.Error(), "oncehttp: the wait would not end before the deadline: https://a is not free until 2026-11-06T00:00:00Z"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestWaitEndsWithItsContextAndGivesItsTurnBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newTestLimits(hostConfig{Rate: 1, Burst: 1}).get("https://a")
		_ = h.wait(t.Context(), time.Time{}, nil)
		cause := errors.New("enough")
		start := time.Now()
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(300*time.Millisecond, func() { cancel(cause) })
		if err := h.wait(ctx, deadlineOf(ctx), nil); err != cause || time.Since(start) != 300*time.Millisecond {
			t.Errorf("%v after %v", err, time.Since(start))
		}
		if err := h.wait(ctx, deadlineOf(ctx), nil); err != cause {
			t.Errorf("ended before: %v", err)
		}
		closing := make(chan struct{})
		time.AfterFunc(300*time.Millisecond, func() { close(closing) })
		if err := h.wait(t.Context(), time.Time{}, closing); err != ErrClosed || time.Since(start) != 600*time.Millisecond {
			t.Errorf("%v after %v", err, time.Since(start))
		}
		if err := h.wait(t.Context(), time.Time{}, nil); err != nil || time.Since(start).Round(time.Microsecond) != time.Second {
			t.Errorf("the turn was lost: %v after %v", err, time.Since(start))
		}
	})
}

func TestRateIsGivenOutInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newTestLimits(hostConfig{Rate: 10, Burst: 2}).get("https://a")
		start := time.Now()
		var mu sync.Mutex
		var order []int
		var wg sync.WaitGroup
		for i := range 22 {
			wg.Go(func() {
				if err := h.wait(t.Context(), time.Time{}, nil); err != nil {
					t.Error(err)
				}
				if want := time.Duration(max(i-1, 0)) * 100 * time.Millisecond; time.Since(start) != want {
					t.Errorf("attempt %d after %v, want %v", i, time.Since(start), want)
				}
				mu.Lock()
				defer mu.Unlock()
				order = append(order, i)
			})
			synctest.Wait()
		}
		wg.Wait()
		for i, got := range order {
			if got != i {
				t.Fatalf("order %v", order)
			}
		}
	})
}

func TestRateHoldsAfterAPause(t *testing.T) {
	// What gathers in a pause does not come at once after it.
	synctest.Test(t, func(t *testing.T) {
		h := newTestLimits(hostConfig{Rate: 10, Burst: 5, Rand: least}).get("https://a")
		start := time.Now()
		h.pause(start.Add(10 * time.Second))
		var mu sync.Mutex
		perSecond := make(map[int]int)
		var wg sync.WaitGroup
		for range 100 {
			wg.Go(func() {
				if err := h.wait(t.Context(), time.Time{}, nil); err != nil {
					t.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				perSecond[int(time.Since(start)/time.Second)]++
			})
		}
		wg.Wait()
		for second, n := range perSecond {
			if second < 10 || n > 15 {
				t.Errorf("%d attempts in second %d", n, second)
			}
		}
	})
}

func TestRateHoldsUnderPausesAndCancellations(t *testing.T) {
	for seed := range uint64(10) {
		synctest.Test(t, func(t *testing.T) {
			const limit, burst = 10, 3
			r := seeded(seed)
			h := newTestLimits(hostConfig{Rate: limit, Burst: burst, Rand: lockedRand(seed)}).get("https://a")
			var mu sync.Mutex
			var passed []time.Time
			var wg sync.WaitGroup
			for range 300 {
				timeout := time.Duration(r.Int64N(int64(5 * time.Second)))
				leave := time.Duration(r.Int64N(int64(5 * time.Second)))
				wg.Go(func() {
					ctx, cancel := context.WithTimeout(t.Context(), timeout)
					defer cancel()
					time.AfterFunc(leave, cancel)
					if h.wait(ctx, deadlineOf(ctx), nil) != nil {
						return
					}
					mu.Lock()
					defer mu.Unlock()
					if !h.gate.pausedUntil().IsZero() {
						t.Errorf("seed %d: passed in a pause", seed)
					}
					passed = append(passed, time.Now())
				})
				time.Sleep(time.Duration(r.Int64N(int64(100 * time.Millisecond))))
				if r.IntN(40) == 0 {
					h.pause(time.Now().Add(time.Duration(r.Int64N(int64(2 * time.Second)))))
				}
			}
			wg.Wait()
			for i := range passed {
				for j := i; j < len(passed); j++ {
					took := passed[j].Sub(passed[i]).Seconds()
					if got, most := float64(j-i+1), took*limit+burst+1e-3; got > most {
						t.Fatalf("seed %d: %v attempts in %v s, want at most %v", seed, got, took, most)
					}
				}
			}
			if len(passed) < 20 {
				t.Errorf("seed %d: only %d passed", seed, len(passed))
			}
		})
	}
}

func TestKnownHostCostsNoAllocation(t *testing.T) {
	l := newTestLimits(hostConfig{})
	l.get("https://a").release(time.Now())
	if n := testing.AllocsPerRun(100, func() {
		h := l.get("https://a")
		_ = h.wait(context.Background(), time.Time{}, nil)
		_ = h.breaker.refusal(epoch)
		h.budget.deposit(time.Now())
		h.release(time.Now())
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestHostIsSmall(t *testing.T) {
	fixed := unsafe.Sizeof(hostLimits{}) + unsafe.Sizeof(budget{}) + unsafe.Sizeof(breaker{})
	if fixed > 1024 {
		t.Errorf("%d bytes, without gobreaker's", fixed)
	}
}

func BenchmarkLimits(b *testing.B) {
	l := newTestLimits(hostConfig{})
	for i := range 1000 {
		l.get(hostName(i)).release(time.Now())
	}
	b.Run("get/idle", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			l.get("https://500.example").release(time.Now())
		}
	})
	b.Run("get/used", func(b *testing.B) {
		defer l.get("https://500.example").release(time.Now())
		b.ReportAllocs()
		for b.Loop() {
			l.get("https://500.example").release(time.Now())
		}
	})
	b.Run("get/parallel", func(b *testing.B) {
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				l.get("https://500.example").release(time.Now())
			}
		})
	})
	b.Run("get/new", func(b *testing.B) {
		names := make([]string, 1<<16)
		for i := range names {
			names[i] = hostName(i)
		}
		l, i := newTestLimits(hostConfig{}), 0
		b.ReportAllocs()
		for b.Loop() {
			l.get(names[i%len(names)]).release(time.Now())
			i++
		}
	})
	b.Run("wait/free", func(b *testing.B) {
		h := l.get("https://500.example")
		defer h.release(time.Now())
		b.ReportAllocs()
		for b.Loop() {
			_ = h.wait(context.Background(), time.Time{}, nil)
		}
	})
}

// deadlineOf returns the deadline of ctx, zero if there is none.
func deadlineOf(ctx context.Context) time.Time {
	deadline, _ := ctx.Deadline()
	return deadline
}
