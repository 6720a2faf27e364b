package oncehttp

import (
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

var epoch = time.Date(2026, time.November, 6, 0, 0, 0, 0, time.UTC)

// withdrawAll withdraws until it is refused and returns how often it was not.
func withdrawAll(b *budget, now time.Time) (n int) {
	for b.withdraw(now) {
		n++
	}
	return n
}

func TestBudgetBoundsRetriesInAnOutage(t *testing.T) {
	// 1,000 first attempts per second; from 30 s to 90 s the host is down,
	// and every attempt, retries included, asks for a retry.
	b := newBudget(nil)
	down, up := epoch.Add(30*time.Second), epoch.Add(90*time.Second)
	firsts, retries := 0, 0
	for now := epoch; now.Before(up); now = now.Add(time.Millisecond) {
		b.deposit(now)
		if !now.Before(down.Add(-10 * time.Second)) {
			firsts++
		}
		if !now.Before(down) {
			retries += withdrawAll(b, now)
		}
	}
	bound := 0.1*float64(firsts) + 10*60 + 20
	if float64(retries) > bound {
		t.Errorf("%d retries of %d first attempts, at most %.0f were promised", retries, firsts, bound)
	}
	if least := bound - 0.1*1000; float64(retries) < least { // half a second is lost to the steps of the window
		t.Errorf("%d retries of %d first attempts, %.0f were possible", retries, firsts, least)
	}
}

func TestBudgetBoundsRetriesInAnyPeriod(t *testing.T) {
	for seed := range uint64(12) {
		r := seeded(seed)
		cfg := &Budget{
			Ratio:        []float64{0, -1, 0.3, 2}[r.IntN(4)],
			Window:       []time.Duration{0, time.Second, time.Millisecond}[r.IntN(3)],
			MinPerSecond: []float64{0, -1, 0.5}[r.IntN(3)],
			Burst:        r.IntN(3),
		}
		c := cfg.withDefaults()
		ratio, floor, burst := max(c.Ratio, 0), c.MinPerSecond, float64(c.Burst)
		if floor < 0 {
			floor, burst = 0, 0
		}
		b := newBudget(cfg)
		var firsts, retries []time.Time
		now := epoch
		for range 1500 {
			switch r.IntN(4) {
			case 0:
				now = now.Add(time.Duration(r.Int64N(int64(c.Window)/4 + 2)))
			case 1:
				b.deposit(now)
				firsts = append(firsts, now)
			case 2:
				// Overtaken by the other callers.
				if b.withdraw(now.Add(-time.Duration(r.IntN(1000)))) {
					retries = append(retries, now)
				}
			case 3:
				if b.withdraw(now) {
					retries = append(retries, now)
				}
			}
		}
		for i, from := range retries {
			paid := 0
			for _, f := range firsts {
				if !f.Before(from.Add(-c.Window)) {
					paid++
				}
			}
			for j := i; j < len(retries); j += 7 {
				// Of the first attempts since, count those that were made by then.
				made := paid
				for k := len(firsts) - 1; k >= 0 && firsts[k].After(retries[j]); k-- {
					made--
				}
				bound := ratio*float64(made) + floor*retries[j].Sub(from).Seconds() + burst
				if got := float64(j - i + 1); got > bound+1e-6 {
					t.Fatalf("seed %d, %+v: %v retries within %v, at most %v were promised", seed, *cfg, got, retries[j].Sub(from), bound)
				}
			}
		}
	}
}

func TestBudgetLeavesSmallProgramsAlone(t *testing.T) {
	b := newBudget(nil)
	for minute := range 60 {
		now := epoch.Add(time.Duration(minute) * time.Minute)
		b.deposit(now)
		for retry := range 20 {
			if !b.withdraw(now) {
				t.Fatalf("minute %d: retry %d was refused", minute, retry)
			}
		}
	}
}

func TestBudgetDepositsExpire(t *testing.T) {
	b := newBudget(&Budget{MinPerSecond: -1})
	for range 100 {
		b.deposit(epoch)
	}
	if got, _ := b.balance(epoch.Add(9500*time.Millisecond - 1)); got != 10 {
		t.Errorf("after nearly 9.5 s: %v retries, want 10", got)
	}
	if !b.withdraw(epoch.Add(9500*time.Millisecond - 1)) {
		t.Error("after nearly 9.5 s: refused")
	}
	if got, _ := b.balance(epoch.Add(10 * time.Second)); got != 0 {
		t.Errorf("after 10 s: %v retries, want 0", got)
	}
	if b.withdraw(epoch.Add(10 * time.Second)) {
		t.Error("after 10 s: allowed")
	}
	for idle := 10 * time.Second; idle < time.Minute; idle += 100 * time.Millisecond {
		b := newBudget(&Budget{Ratio: 1, MinPerSecond: -1})
		for at := time.Duration(0); at < 10*time.Second; at += 250 * time.Millisecond {
			b.deposit(epoch.Add(at))
		}
		if got, _ := b.balance(epoch.Add(10*time.Second + idle)); got != 0 {
			t.Fatalf("%v after the last of many: %v retries, want 0", idle, got)
		}
	}
}

func TestBudgetSpendsDepositsBeforeTheFloor(t *testing.T) {
	b := newBudget(nil)
	for range 10 {
		b.deposit(epoch)
	}
	b.withdraw(epoch)
	if deposits, floor := b.balance(epoch); deposits != 0 || floor != 20 {
		t.Errorf("deposits %v, floor %v; want 0, 20", deposits, floor)
	}
	if got := withdrawAll(b, epoch); got != 20 {
		t.Errorf("the floor allowed %d at once, want 20", got)
	}
	if got := withdrawAll(b, epoch.Add(time.Second)); got != 10 {
		t.Errorf("a second later the floor allowed %d, want 10", got)
	}
}

func TestBudgetSpendsTheOldestDepositsFirst(t *testing.T) {
	b := newBudget(&Budget{Ratio: 1, MinPerSecond: -1})
	b.deposit(epoch)
	b.deposit(epoch.Add(5 * time.Second))
	b.withdraw(epoch.Add(5 * time.Second))
	if !b.withdraw(epoch.Add(11 * time.Second)) {
		t.Error("the younger deposit was spent first")
	}
}

func TestBudgetTenthsAddUp(t *testing.T) {
	b := newBudget(&Budget{MinPerSecond: -1})
	for i := range 9 {
		b.deposit(epoch.Add(time.Duration(i) * time.Second))
	}
	now := epoch.Add(9 * time.Second)
	if b.withdraw(now) {
		t.Error("nine first attempts paid for a retry")
	}
	b.deposit(now)
	if got := withdrawAll(b, now); got != 1 {
		t.Errorf("ten first attempts paid for %d retries, want 1", got)
	}
}

func TestBudgetIsNotPaidOutTwiceByTimeGoingBack(t *testing.T) {
	b := newBudget(nil)
	granted := withdrawAll(b, epoch)
	for i := range 1000 {
		if b.withdraw(epoch.Add(time.Duration(1-i%2) * time.Second)) {
			granted++
		}
	}
	if granted != 30 {
		t.Errorf("%d retries in a second, want 10 and the burst of 20", granted)
	}
	if got := withdrawAll(b, epoch.Add(-1000*time.Hour)); got != 0 {
		t.Errorf("%d retries from the past", got)
	}
}

func TestBudgetSwitches(t *testing.T) {
	off := newBudget(&Budget{Disabled: true})
	off.deposit(epoch)
	for range 1000 {
		if !off.withdraw(epoch) {
			t.Fatal("disabled: refused")
		}
	}
	if d, f := off.balance(epoch); !math.IsInf(d, 1) || !math.IsInf(f, 1) || !off.untouched(epoch) {
		t.Errorf("disabled: balance %v, %v", d, f)
	}
	for _, tt := range []struct {
		name string
		cfg  Budget
		want int // after 100 first attempts
	}{
		{"default", Budget{}, 30},
		{"no floor", Budget{MinPerSecond: -1}, 10},
		{"no deposits", Budget{Ratio: -1}, 20},
		{"neither", Budget{Ratio: -1, MinPerSecond: -1}, 0},
		{"slow floor", Budget{Ratio: -1, MinPerSecond: 0.01}, 1},
		{"fast floor", Budget{Ratio: -1, MinPerSecond: 100}, 200},
		{"burst", Budget{Ratio: -1, Burst: 3}, 3},
		{"ratio", Budget{Ratio: 1, MinPerSecond: -1}, 100},
	} {
		b := newBudget(&tt.cfg)
		if !b.untouched(epoch) {
			t.Errorf("%s: not untouched", tt.name)
		}
		for range 100 {
			b.deposit(epoch)
		}
		if got := withdrawAll(b, epoch); got != tt.want {
			t.Errorf("%s: %d retries, want %d", tt.name, got, tt.want)
		}
		if !b.untouched(epoch.Add(time.Hour)) {
			t.Errorf("%s: not untouched after an hour", tt.name)
		}
	}
}

func TestBudgetValidation(t *testing.T) {
	for _, ok := range []*Budget{nil, {}, {Ratio: -1}, {Ratio: 1000}, {MinPerSecond: -1}, {Disabled: true}} {
		if err := ok.validate(); err != nil {
			t.Errorf("%+v: %v", ok, err)
		}
	}
	for _, bad := range []*Budget{
		{Ratio: math.NaN()}, {Ratio: math.Inf(1)}, {Ratio: 1001}, {Window: -1}, {Window: 1},
		{MinPerSecond: math.NaN()}, {MinPerSecond: math.Inf(1)}, {Burst: -1},
	} {
		if bad.validate() == nil {
			t.Errorf("%+v is accepted", bad)
		}
	}
}

func TestBudgetHoldsUnderConcurrency(t *testing.T) {
	b := newBudget(nil)
	var granted atomic.Int64
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 1000 {
				now := epoch.Add(time.Duration(i*g) * time.Microsecond) // out of order
				b.deposit(now)
				for range 2 {
					if b.withdraw(now) {
						granted.Add(1)
					}
				}
			}
		})
	}
	wg.Wait()
	if got, most := granted.Load(), int64(800+20); got > most {
		t.Errorf("%d retries, want at most %d", got, most)
	}
}

func TestBudgetAllocatesNothing(t *testing.T) {
	b := newBudget(nil)
	now := epoch
	if n := testing.AllocsPerRun(1000, func() {
		now = now.Add(10 * time.Millisecond)
		b.deposit(now)
		b.withdraw(now)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkBudget(b *testing.B) {
	b.Run("deposit", func(b *testing.B) {
		budget, now := newBudget(nil), epoch
		b.ReportAllocs()
		for b.Loop() {
			now = now.Add(time.Millisecond)
			budget.deposit(now)
		}
	})
	b.Run("withdraw", func(b *testing.B) { // one granted, nine refused
		budget, now := newBudget(&Budget{MinPerSecond: -1}), epoch
		b.ReportAllocs()
		for b.Loop() {
			now = now.Add(time.Millisecond)
			budget.deposit(now)
			budget.withdraw(now)
		}
	})
	b.Run("floor", func(b *testing.B) {
		budget, now := newBudget(nil), epoch
		b.ReportAllocs()
		for b.Loop() {
			now = now.Add(time.Millisecond)
			budget.withdraw(now)
		}
	})
}
