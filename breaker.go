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
// FailureRatio of them failed, and so did the last Consecutive ones in a row.
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
	current gobreaker.State // cb's state, as of its last use
	era     uint64          // number of changes of current; a result counts only in the era of its permit
	until   time.Time       // open: when cb lets a probe through; half-open: when another probe may join probe
	probe   *ticket         // half-open: the probe that cb waits for, nil if there is none
	out     int             // permits that were not returned

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
	b.cb = gobreaker.NewTwoStepCircuitBreaker[struct{}](gobreaker.Settings{
		Interval:     c.Window,
		BucketPeriod: max(c.Window/breakerBuckets, 1),
		// cb is open including the last instant of its timeout. One
		// nanosecond less, and a caller who waits until b.until gets in.
		Timeout: max(c.OpenFor-1, 1),
		ReadyToTrip: func(n gobreaker.Counts) bool {
			ended := float64(n.TotalSuccesses) + float64(n.TotalFailures)
			return ended >= float64(c.MinRequests) &&
				float64(n.TotalFailures) > c.FailureRatio*ended &&
				float64(n.ConsecutiveFailures) >= float64(c.Consecutive)
		},
		OnStateChange: func(_ string, from, to gobreaker.State) { b.noteLocked(from, to) },
		IsExcluded:    func(err error) bool { return err == errIgnored },
	})
	return b
}

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
// disabled. Copies are one permit.
type permit struct{ t *ticket }

// A ticket is what a permit's copies share.
type ticket struct {
	b   *breaker
	era uint64 // b's, when the permit was given

	// report tells cb the result of a probe; nil if this is none. cb takes
	// it at any time, and more than once. One that is ignored twice makes cb
	// count a request too few, and let a probe too many through if b did not
	// see to it that there is one.
	report func(error)

	returned bool // guarded by b.mu
}

// allow returns a permit for one request, or a [*CircuitOpenError]. The permit
// must be returned, with [permit.done], whatever becomes of the request.
func (b *breaker) allow() (permit, error) {
	if b == nil {
		return permit{}, nil
	}
	b.mu.Lock()
	t, err := b.allowLocked()
	b.unlockAndTell()
	return permit{t}, err
}

func (b *breaker) allowLocked() (*ticket, error) {
	if b.current == gobreaker.StateClosed { // only a result changes that: cb need not be asked
		b.out++
		return &ticket{b: b, era: b.era}, nil
	}
	if b.probe != nil {
		if time.Now().Before(b.until) {
			return nil, &CircuitOpenError{Host: b.host, Until: b.until}
		}
		// Whoever has the probe may never come back. cb forgets it, but
		// if it does come back, its result is as good as any.
		b.probe.report(errIgnored)
		b.probe = nil
	}
	report, err := b.cb.Allow()
	if err != nil { // open; it cannot be ErrTooManyRequests, as cb waits for no probe
		return nil, &CircuitOpenError{Host: b.host, Until: b.until}
	}
	b.probe = &ticket{b: b, era: b.era, report: report} // of the era that cb may just have begun
	b.until = time.Now().Add(b.openFor)
	b.out++
	return b.probe, nil
}

// done returns the permit. Only the first call counts.
func (p permit) done(h health) {
	t := p.t
	if t == nil {
		return
	}
	b := t.b
	b.mu.Lock()
	if !t.returned {
		t.returned = true
		b.out--
		b.doneLocked(t, h)
	}
	b.unlockAndTell()
}

func (b *breaker) doneLocked(t *ticket, h health) {
	if t.era != b.era {
		return // it belongs to a state that has passed
	}
	if t.report != nil {
		if b.probe == t {
			b.probe = nil // before the report, which may begin a new era
		}
		t.report(h.err())
		return
	}
	if h == ignored {
		return
	}
	// A request of the closed state is announced to cb when it ends. cb counts
	// a result in the bucket of the announcement, and drops it when that has
	// left the window: with windows shorter than timeouts, a host that swallows
	// requests would never be found failing.
	if report, err := b.cb.Allow(); err == nil {
		report(h.err())
	}
}

// noteLocked runs within cb, whenever cb changes its state: under b.mu and cb's
// own lock.
func (b *breaker) noteLocked(from, to gobreaker.State) {
	b.current = to
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
// at, nil if the breaker is not open now or will not be then: a wait that ends at
// an open breaker is not worth beginning. It does not foresee how a probe ends.
func (b *breaker) refusal(at time.Time) error {
	if until := b.openUntil(); at.Before(until) {
		return &CircuitOpenError{Host: b.host, Until: until}
	}
	return nil
}

// untouched reports whether losing b loses nothing at the time now, except for
// the results of the last Window: it is closed, and no permit is out; or it has
// not been used since a probe was due, keep ago.
func (b *breaker) untouched(now time.Time, keep time.Duration) bool {
	if b == nil {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.current == gobreaker.StateClosed {
		return b.out == 0
	}
	return now.Sub(b.until) > keep
}
