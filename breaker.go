package oncehttp

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/sony/gobreaker/v2"
)

// A Breaker stops requests to a host that is failing, so that callers fail at
// once instead of in their timeouts, and the host can recover. It opens when,
// within Window, at least MinRequests requests have ended, more than
// FailureRatio of them failed, and so did the last Consecutive ones in a row. It
// opens also when the last MinRequests in a row failed and nothing succeeded for a
// tenth of Window: a busy host that has died is not given half a Window more.
// After OpenFor it lets one probe through, whose result closes it or opens it
// again.
//
// Failures are transport errors, timeouts of attempts, and 5xx responses. Other
// responses are successes, except for 429, which is neither; nor is a request
// whose caller has cancelled it. A request counts when it ends: one that hangs
// for longer than Window is a failure all the same.
//
// While the breaker is open, requests fail with a [*CircuitOpenError]; nothing
// is stored or sent.
//
// A nil *Breaker, like the zero value, means the defaults. Each host has a
// breaker of its own, in each process. The state machine is
// github.com/sony/gobreaker; the defaults are this package's own.
type Breaker struct {
	// Disabled lets every request through. The other fields are then
	// ignored.
	Disabled bool

	// Window is how far the breaker looks back. It is kept in ten buckets
	// of equal length. 0 means 10 s.
	Window time.Duration

	// MinRequests is the least number of requests that says anything about
	// a host. 0 means 20.
	MinRequests int

	// FailureRatio is the part of the requests in [0, 1) that may fail
	// without opening the breaker. 0 means 0.5; negative means that the
	// ratio does not count.
	FailureRatio float64

	// Consecutive is how many requests in a row must have failed before the
	// breaker opens: a host that still answers some is not down. 0 means 5.
	Consecutive int

	// OpenFor is how long the breaker stays open before a probe. A probe
	// that has not ended after OpenFor is joined by another. 0 means 30 s.
	OpenFor time.Duration
}

const breakerBuckets = 10

// withDefaults returns the breaker in force for b, which may be nil.
func (b *Breaker) withDefaults() Breaker {
	var c Breaker
	if b != nil {
		c = *b
	}
	c.Window = cmp.Or(c.Window, 10*time.Second)
	c.MinRequests = cmp.Or(c.MinRequests, 20)
	c.FailureRatio = cmp.Or(c.FailureRatio, 0.5)
	c.Consecutive = cmp.Or(c.Consecutive, 5)
	c.OpenFor = cmp.Or(c.OpenFor, 30*time.Second)
	return c
}

// validate reports what is wrong with b, which may be nil.
func (b *Breaker) validate() error {
	switch {
	case b == nil:
		return nil
	case b.Window < 0 || b.MinRequests < 0 || b.Consecutive < 0 || b.OpenFor < 0:
		return errors.New("oncehttp: negative Breaker.Window, MinRequests, Consecutive or OpenFor")
	case math.IsNaN(b.FailureRatio) || b.FailureRatio >= 1:
		return errors.New("oncehttp: Breaker.FailureRatio is not less than 1; use Disabled for no breaker")
	}
	return nil
}

// A CircuitOpenError is the refusal of a request by the breaker of its host. It
// matches [ErrCircuitOpen].
type CircuitOpenError struct {
	Host string // scheme://host

	// Until is when the breaker lets the next probe through. If one is
	// under way, its success closes the breaker before Until.
	Until time.Time
}

func (e *CircuitOpenError) Error() string {
	return fmt.Sprintf("%v for %s until %s", ErrCircuitOpen, e.Host, e.Until.UTC().Format("2006-01-02T15:04:05.000Z07:00"))
}

// Unwrap returns [ErrCircuitOpen].
func (e *CircuitOpenError) Unwrap() error { return ErrCircuitOpen }

// A breaker is the state of a [Breaker] for one host. A nil *breaker lets
// everything through.
//
// It keeps its time by time.Now, as gobreaker does.
type breaker struct {
	host     string
	openFor  time.Duration
	onChange func(host, from, to string) // nil means that nobody listens; called without locks

	// mu is held around every use of cb, and therefore taken before cb's own
	// lock, under which noteLocked runs. It guards the following.
	mu      sync.Mutex
	cb      *gobreaker.TwoStepCircuitBreaker[struct{}]
	results results         // of the closed state; cb is told only when it is to open
	current gobreaker.State // cb's state, as of its last use
	era     uint64          // number of changes of current; a result counts only in the era of its permit
	until   time.Time       // open: when cb lets a probe through; half-open: when another probe may join probe
	probe   *probe          // half-open: the probe that cb waits for, nil if there is none

	changes []stateChange // not yet told to onChange
	telling bool          // some goroutine is at it
}

type stateChange struct{ from, to gobreaker.State }

// newBreaker returns the state for cfg, nil if cfg disables the breaker. The
// host is for errors and for onChange, which may be nil. onChange is told of all
// changes, one at a time and in their order, by whichever call noticed one.
func newBreaker(cfg *Breaker, host string, onChange func(host, from, to string)) *breaker {
	c := cfg.withDefaults()
	if c.Disabled {
		return nil
	}
	b := &breaker{host: host, openFor: c.OpenFor, onChange: onChange}
	b.results = results{time: timeline{width: max(c.Window/breakerBuckets, 1)}, trip: c}
	b.cb = gobreaker.NewTwoStepCircuitBreaker[struct{}](gobreaker.Settings{
		// cb is open including the last instant of its timeout. One
		// nanosecond less, and a caller who waits until b.until gets in.
		Timeout:       max(c.OpenFor-1, 1),
		ReadyToTrip:   func(gobreaker.Counts) bool { return true }, // b.results has said so
		OnStateChange: func(_ string, from, to gobreaker.State) { b.noteLocked(from, to) },
		IsExcluded:    func(err error) bool { return err == errIgnored },
	})
	return b
}

// results are those of the requests that have ended within the window. gobreaker
// could count them too, but takes twice the time, and drops a result whose request
// began before the window: with windows shorter than timeouts, it would never
// find a host failing that swallows requests.
type results struct {
	trip    Breaker  // with defaults
	time    timeline // a tick is a bucket
	buckets [breakerBuckets]counts
	total   counts    // sum of buckets
	inRow   int       // failures since the last success
	well    time.Time // of the last success
}

type counts struct{ ended, failed int }

// add counts a result, and reports whether the breaker is to open.
func (r *results) add(h health, now time.Time) bool {
	for n := min(r.time.advance(now), breakerBuckets); n > 0; n-- {
		expired := &r.buckets[(r.time.tick-n+1)%breakerBuckets]
		r.total.ended -= expired.ended
		r.total.failed -= expired.failed
		*expired = counts{}
	}
	bucket := &r.buckets[r.time.tick%breakerBuckets]
	bucket.ended++
	r.total.ended++
	if h == success {
		r.inRow, r.well = 0, now
		return false
	}
	bucket.failed++
	r.total.failed++
	r.inRow++
	dead := min(r.inRow, r.total.failed) >= r.trip.MinRequests && now.Sub(r.well) >= r.time.width
	return dead || r.total.ended >= r.trip.MinRequests &&
		float64(r.total.failed) > r.trip.FailureRatio*float64(r.total.ended) &&
		r.inRow >= r.trip.Consecutive
}

// clear forgets all results.
func (r *results) clear() { *r = results{trip: r.trip, time: timeline{width: r.time.width}} }

// The results that cb is told, other than nil.
var (
	errFailed  = errors.New("failed")
	errIgnored = errors.New("neither failed nor succeeded")
)

// health is what a request says about its host.
type health uint8

const (
	ignored health = iota // nothing: never sent, cancelled by the caller, 429
	success
	failure
)

func (h health) err() error { return [...]error{errIgnored, nil, errFailed}[h] }

// A permit allows one request. The zero permit is that of a breaker that is
// disabled, or one that was returned. It is used by one goroutine at a time, and
// not copied while it is out.
type permit struct {
	b     *breaker // nil: nothing to return
	era   uint64   // b's, when the permit was given
	probe *probe   // nil if this is none
}

// A probe is the one request that cb waits for when it is half-open. report
// tells cb its result. cb takes that at any time, and more than once. One that is
// ignored twice makes cb count a request too few, and let a probe too many
// through if b did not see to it that there is one.
type probe struct{ report func(error) }

// allow returns a permit for one request, or a [*CircuitOpenError]. The permit
// must be returned, with [permit.done], whatever becomes of the request.
func (b *breaker) allow() (permit, error) {
	if b == nil {
		return permit{}, nil
	}
	b.mu.Lock()
	p, err := b.allowLocked()
	b.unlockAndTell()
	return p, err
}

func (b *breaker) allowLocked() (permit, error) {
	if b.current == gobreaker.StateClosed { // only a result changes that: cb need not be asked
		return permit{b: b, era: b.era}, nil
	}
	if b.probe != nil {
		if time.Now().Before(b.until) {
			return permit{}, &CircuitOpenError{Host: b.host, Until: b.until}
		}
		// Whoever has the probe may never come back. cb forgets it, but
		// if it does come back, its result is as good as any.
		b.probe.report(errIgnored)
		b.probe = nil
	}
	report, err := b.cb.Allow()
	if err != nil { // open; it cannot be ErrTooManyRequests, as cb waits for no probe
		return permit{}, &CircuitOpenError{Host: b.host, Until: b.until}
	}
	b.probe = &probe{report}
	b.until = time.Now().Add(b.openFor)
	return permit{b, b.era, b.probe}, nil // of the era that cb may just have begun
}

// done returns the permit. Only the first call counts.
func (p *permit) done(h health) {
	if p.b != nil {
		p.doneAt(h, time.Now())
	}
}

// doneAt is done, with a time that is known already.
func (p *permit) doneAt(h health, now time.Time) {
	given := *p
	*p = permit{}
	b := given.b
	if b == nil {
		return
	}
	b.mu.Lock()
	b.doneLocked(given, h, now)
	b.unlockAndTell()
}

func (b *breaker) doneLocked(p permit, h health, now time.Time) {
	if p.era != b.era {
		return // it belongs to a state that has passed
	}
	if p.probe != nil {
		if b.probe == p.probe {
			b.probe = nil // before the report, which may begin a new era
		}
		p.probe.report(h.err())
		return
	}
	if h != ignored && b.results.add(h, now) {
		if report, err := b.cb.Allow(); err == nil {
			report(errFailed)
		}
	}
}

// noteLocked runs within cb, whenever cb changes its state: under b.mu and cb's
// own lock.
func (b *breaker) noteLocked(from, to gobreaker.State) {
	b.current = to
	b.results.clear()
	b.era++
	b.probe = nil
	b.until = time.Time{}
	if to == gobreaker.StateOpen {
		b.until = time.Now().Add(b.openFor)
	}
	if b.onChange != nil {
		b.changes = append(b.changes, stateChange{from, to})
	}
}

// unlockAndTell releases b.mu and tells the changes of state that are due.
// Changes that occur meanwhile, in onChange too, are left to the goroutine that
// is telling already: so they are told in order.
func (b *breaker) unlockAndTell() {
	if len(b.changes) == 0 || b.telling {
		b.mu.Unlock()
		return
	}
	b.telling = true
	defer func() { // also if onChange panics
		b.telling = false
		b.mu.Unlock()
	}()
	for len(b.changes) > 0 {
		c := b.changes[0]
		b.changes = b.changes[1:]
		b.tellUnlocked(c)
	}
}

func (b *breaker) tellUnlocked(c stateChange) {
	b.mu.Unlock()
	defer b.mu.Lock()
	b.onChange(b.host, c.from.String(), c.to.String())
}

// state returns "closed", "open", "half-open" or, for a disabled breaker,
// "disabled". A breaker whose time to stay open is over is half-open, although
// its listener hears of it with the probe.
func (b *breaker) state() string {
	if b == nil {
		return "disabled"
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.current == gobreaker.StateOpen && !time.Now().Before(b.until) {
		return gobreaker.StateHalfOpen.String()
	}
	return b.current.String()
}

// openUntil returns when the breaker lets a probe through, the zero time if it
// is not open now.
func (b *breaker) openUntil() time.Time {
	if b == nil {
		return time.Time{}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.current != gobreaker.StateOpen || !time.Now().Before(b.until) {
		return time.Time{}
	}
	return b.until
}

// refusal returns the [*CircuitOpenError] that a request would meet at the time
// at, zero for now, nil if the breaker is not open now or will not be then: a wait that ends at
// an open breaker is not worth beginning. It does not foresee how a probe ends.
func (b *breaker) refusal(at time.Time) error {
	if until := b.openUntil(); at.Before(until) {
		return &CircuitOpenError{Host: b.host, Until: until}
	}
	return nil
}

// untouched reports whether losing b, no permit of which is out, loses nothing at
// the time now, except for the results of the last Window: it is closed; or it has
// not been used since a probe was due, keep ago.
func (b *breaker) untouched(now time.Time, keep time.Duration) bool {
	if b == nil {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.current == gobreaker.StateClosed || now.Sub(b.until) > keep
}
