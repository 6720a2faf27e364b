package oncehttp

import (
	"cmp"
	"errors"
	"math"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// A Budget bounds the retries to one host by the number of first attempts, so
// that clients do not multiply the load of a server that is failing under it.
// Each first attempt deposits Ratio of a retry when it ends, each retry withdraws a
// whole one, and a deposit that nobody withdraws expires after Window. Beside the
// deposits there is a floor, so that a small program, with few requests to draw
// on, never meets the budget.
//
// In any period, a host gets at most
//
//	Ratio × first attempts that ended in the period or in the Window before it
//	+ MinPerSecond × seconds of the period + Burst
//
// retries. First attempts are never refused. A retry that is refused is not
// waited for: the operation ends with what it has.
//
// A nil *Budget, like the zero value, means the defaults. Each host has a
// budget of its own, in each process.
//
// The design is that of the retry budgets of Finagle and Linkerd. The default
// ratio is the per-client retry budget in "Handling Overload" of Google's Site
// Reliability Engineering book; theirs is 0.2.
type Budget struct {
	// Disabled lifts the bound: every retry is allowed, as far as
	// Options.MaxAttempts goes. The other fields are then ignored.
	Disabled bool

	// Ratio is the number of retries that each first attempt pays for.
	// 0 means 0.1; negative means none, only the floor is left. The most is
	// 1000. It is kept in millionths.
	Ratio float64

	// Window is how long a deposit can be withdrawn. It is kept in steps of
	// a twentieth: a deposit expires up to that much earlier, never later.
	// 0 means 10 s, as in Finagle and Linkerd. The least is 1 ms.
	Window time.Duration

	// MinPerSecond is the floor: retries per second, whatever the number of
	// first attempts. 0 means 10, as in Finagle and Linkerd; negative means
	// no floor.
	MinPerSecond float64

	// Burst is how many retries the floor allows at once after a quiet time.
	// 0 means 2 s worth of MinPerSecond, and at least 1; with the defaults
	// that is 20.
	Burst int
}

const (
	budgetUnit    = 1_000_000 // of one retry; deposits are integers, so that they add up
	budgetBuckets = 20        // steps of a window
	maxRatio      = 1000
)

// withDefaults returns the budget in force for b, which may be nil.
func (b *Budget) withDefaults() Budget {
	var c Budget
	if b != nil {
		c = *b
	}
	c.Ratio = cmp.Or(c.Ratio, 0.1)
	c.Window = cmp.Or(c.Window, 10*time.Second)
	c.MinPerSecond = cmp.Or(c.MinPerSecond, 10)
	if c.Burst == 0 {
		c.Burst = secondsWorth(2 * c.MinPerSecond)
	}
	return c
}

// validate reports what is wrong with b, which may be nil.
func (b *Budget) validate() error {
	switch {
	case b == nil:
		return nil
	case math.IsNaN(b.Ratio) || b.Ratio > maxRatio:
		return errors.New("oncehttp: Budget.Ratio is not a number up to 1000")
	case b.Window != 0 && b.Window < time.Millisecond:
		return errors.New("oncehttp: Budget.Window is shorter than 1 ms")
	case math.IsNaN(b.MinPerSecond) || math.IsInf(b.MinPerSecond, 0):
		return errors.New("oncehttp: Budget.MinPerSecond is not a finite number; use Disabled for no bound")
	case b.Burst < 0:
		return errors.New("oncehttp: negative Budget.Burst; use a negative MinPerSecond for no floor")
	}
	return nil
}

// secondsWorth rounds a number of events up to a burst of at least 1.
func secondsWorth(events float64) int {
	return int(min(max(math.Ceil(events), 1), math.MaxInt32))
}

// A budget is the state of a [Budget] for one host. A nil *budget allows
// everything. Its size is fixed, and its methods do not allocate.
//
// Times are readings of time.Now. Callers that were overtaken between the
// reading and the call may hand them in out of order.
type budget struct {
	perAttempt int64         // deposit of one first attempt, in budgetUnit
	floor      *rate.Limiter // nil means no floor

	mu      sync.Mutex           // guards the following, and every use of floor
	time    timeline             // a tick is a bucket
	buckets [budgetBuckets]int64 // unspent deposits, in budgetUnit; tick t is in t mod budgetBuckets
	total   int64                // sum of buckets
}

// newBudget returns the state for cfg, nil if cfg disables the budget.
func newBudget(cfg *Budget) *budget {
	c := cfg.withDefaults()
	if c.Disabled {
		return nil
	}
	b := &budget{
		perAttempt: int64(math.Round(min(max(c.Ratio, 0), maxRatio) * budgetUnit)),
		time:       timeline{width: max(c.Window, time.Millisecond) / budgetBuckets},
	}
	if c.MinPerSecond > 0 {
		b.floor = rate.NewLimiter(rate.Limit(c.MinPerSecond), c.Burst)
	}
	return b
}

// deposit counts a first attempt that ended at the time now.
func (b *budget) deposit(now time.Time) {
	if b == nil || b.perAttempt == 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.advanceLocked(now)
	b.buckets[b.time.tick%budgetBuckets] += b.perAttempt
	b.total += b.perAttempt
}

// withdraw reports whether there may be a retry at the time now, and counts it
// if so.
//
// Deposits are spent before the floor, the oldest first: they expire. The order
// does not matter for the bound, since every retry is paid for by one source or
// the other; it leaves the floor untouched for when the deposits are gone.
func (b *budget) withdraw(now time.Time) bool {
	if b == nil {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.advanceLocked(now)
	if b.total < budgetUnit {
		return b.floor != nil && b.floor.AllowN(b.time.latest, 1)
	}
	b.total -= budgetUnit
	for due, t := int64(budgetUnit), b.time.tick+1; due > 0; t++ { // tick+1 mod budgetBuckets is the oldest
		bucket := &b.buckets[t%budgetBuckets]
		part := min(due, *bucket)
		*bucket -= part
		due -= part
	}
	return true
}

// balance returns what could be withdrawn at the time now: the number of
// retries, with fraction, in deposits and in the floor.
func (b *budget) balance(now time.Time) (deposits, floor float64) {
	if b == nil {
		return math.Inf(1), math.Inf(1)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.advanceLocked(now)
	if b.floor != nil {
		floor = b.floor.TokensAt(b.time.latest)
	}
	return float64(b.total) / budgetUnit, floor
}

// untouched reports whether b is, at the time now, as a new one would be: no
// deposits, and the floor full.
func (b *budget) untouched(now time.Time) bool {
	if b == nil {
		return true
	}
	deposits, floor := b.balance(now)
	return deposits == 0 && (b.floor == nil || floor >= float64(b.floor.Burst()))
}

// advanceLocked moves the time to now and drops the deposits that have expired.
func (b *budget) advanceLocked(now time.Time) {
	for n := min(b.time.advance(now), budgetBuckets); n > 0; n-- {
		bucket := &b.buckets[(b.time.tick-n+1)%budgetBuckets]
		b.total -= *bucket
		*bucket = 0
	}
}
