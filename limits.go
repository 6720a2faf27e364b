package oncehttp

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// Bounds of the memory that hosts take; a host takes about 1.3 KiB.
const (
	maxHosts    = 10_000           // more only while more are in use at once
	hostIdle    = time.Minute      // after which a host is forgotten that has nothing to remember
	hostTripped = 10 * time.Minute // after which one is forgotten whose breaker waits for a probe
	hostSweep   = 2                // hosts looked at for each new one: more than come, so that the idle ones go
	hostSearch  = 16               // hosts looked at for a victim when there are maxHosts
)

// A hostConfig is what applies to one host.
type hostConfig struct {
	Budget  *Budget
	Breaker *Breaker

	// Rate is the number of attempts per second, 0 or less means no limit;
	// Burst is how many of them may come at once, 0 or less means 1 s worth.
	Rate  float64
	Burst int

	// OnChange is told when the breaker changes its state, in the order of
	// the changes, without locks; nil means that nobody listens. The states
	// are "closed", "open" and "half-open".
	OnChange func(origin, from, to string)

	// Rand spreads the ends of pauses; see fullJitter. nil means
	// rand.Int64N of math/rand/v2.
	Rand func(n int64) int64
}

// limits holds the limits of each host that was used lately.
//
// It has no goroutine of its own: each new host pays for a look at a few that
// nobody uses. Hosts in use are never dropped. Of the others, a host goes when
// it was not used for hostIdle and has nothing to remember: no deposits, a full
// floor, a closed breaker, no pause. When there are maxHosts, the least recently
// used one that has nothing to remember goes at once, and if hostSearch of them
// all do, the least recently used one: what it forgets are retries paid for, or
// that a pause or an open breaker had still to last. When all are in use,
// maxHosts is exceeded: then their callers hold far more memory than the limits
// do, and it is given back when they are done.
type limits struct {
	config func(origin string) hostConfig
	max    int // maxHosts, but in tests

	mu    sync.Mutex // guards the following, and the fields of hostLimits that say so
	hosts map[string]*hostLimits
	idle  hostLimits // ring of the hosts that nobody uses; next is the least recently used
}

// newLimits returns the registry. config tells what applies to a host whenever it
// becomes known; it is called without locks, possibly twice at once.
func newLimits(config func(origin string) hostConfig) *limits {
	l := &limits{config: config, max: maxHosts, hosts: make(map[string]*hostLimits)}
	l.idle.prev, l.idle.next = &l.idle, &l.idle
	return l
}

// hostLimits are the limits of one host: what to ask before an attempt. Budget
// and breaker are used directly.
type hostLimits struct {
	all     *limits
	origin  string
	budget  *budget  // nil: no bound
	breaker *breaker // nil: never open
	gate    gate     // pause and rate; see pause and wait

	// users counts the gets without their release; guarded by limits.mu.
	// Only at 0 is a host in the idle ring, and only from there it can be
	// dropped. Both get and the dropping hold the lock, so nobody can get a
	// host that is going, nor go on using one that is gone: an origin never
	// has two states at once.
	users      int
	used       time.Time   // of the last release; guarded by limits.mu
	prev, next *hostLimits // in the idle ring, nil while in use; guarded by limits.mu
}

// known returns the limits of a host, as get does, if it is known, else nil.
func (l *limits) known(origin []byte) *hostLimits {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.hosts[string(origin)]
	if h != nil {
		l.takeLocked(h)
	}
	return h
}

// get returns the limits of a host, which must be released, once, when the
// operation that asked for them ends: after the return of its permit.
func (l *limits) get(origin string) *hostLimits {
	if h := l.known([]byte(origin)); h != nil {
		return h
	}
	made := l.newHost(origin, l.config(origin))

	l.mu.Lock()
	defer l.mu.Unlock()
	if h := l.hosts[origin]; h != nil { // another caller was faster
		l.takeLocked(h)
		return h
	}
	l.makeRoomLocked(time.Now())
	l.hosts[origin] = made
	made.users = 1
	return made
}

// release ends the use of a host by the caller of one get. now may be earlier, and
// zero if nothing was sent: reading the clock costs as much as all the rest.
func (h *hostLimits) release(now time.Time) {
	l := h.all
	l.mu.Lock()
	defer l.mu.Unlock()
	h.users--
	switch {
	case h.users < 0:
		panic("oncehttp: limits of a host released twice")
	case h.users > 0:
		return
	}
	h.used = latest(h.used, now)
	l.linkLocked(h)
	if len(l.hosts) > l.max {
		l.makeRoomLocked(h.used)
	}
}

func (l *limits) newHost(origin string, cfg hostConfig) *hostLimits {
	h := &hostLimits{
		all:     l,
		origin:  origin,
		budget:  newBudget(cfg.Budget),
		breaker: newBreaker(cfg.Breaker, origin, cfg.OnChange),
	}
	if h.gate.rnd = cfg.Rand; h.gate.rnd == nil {
		h.gate.rnd = rand.Int64N
	}
	if cfg.Rate > 0 {
		burst := cfg.Burst
		if burst <= 0 {
			burst = secondsWorth(cfg.Rate)
		}
		h.gate.rate = rate.NewLimiter(rate.Limit(cfg.Rate), burst)
	}
	return h
}

// A hostStats is the state of the limits of one host.
type hostStats struct {
	Origin      string
	Breaker     string    // closed, open, half-open, disabled
	OpenUntil   time.Time // zero unless the breaker is open
	PausedUntil time.Time // zero unless the host is paused
	Deposits    float64   // retries that first attempts have paid for; +Inf without a budget
	Floor       float64   // retries in the floor; +Inf without a budget
	Users       int       // operations
}

// stats returns the state of all known hosts, in no order.
func (l *limits) stats() []hostStats {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := make([]hostStats, 0, len(l.hosts))
	now := time.Now()
	for origin, h := range l.hosts {
		s := hostStats{
			Origin:      origin,
			Breaker:     h.breaker.state(),
			OpenUntil:   h.breaker.openUntil(),
			PausedUntil: h.gate.pausedUntil(),
			Users:       h.users,
		}
		s.Deposits, s.Floor = h.budget.balance(now)
		all = append(all, s)
	}
	return all
}

// pause lets no wait of the host end before asked, nor for a while after that;
// see pauseDelay. A pause is only ever lengthened. Bounding it is up to the
// caller.
func (h *hostLimits) pause(asked time.Time) { h.gate.pause(asked) }

// pausedUntil returns the end of the host's pause, the zero time if there is
// none.
func (h *hostLimits) pausedUntil() time.Time { return h.gate.pausedUntil() }

// wait waits out the host's pause and its rate limit; see [gate.wait].
func (h *hostLimits) wait(ctx context.Context, deadline time.Time, closing <-chan struct{}) error {
	return h.gate.wait(ctx, deadline, closing, h.origin)
}

// mayWait reports whether wait may have to wait. It errs on the side of true.
func (h *hostLimits) mayWait() bool { return !h.gate.untouched(time.Now()) }

// untouched reports whether h is as a new one would be, but for its breaker's
// results of the last seconds.
func (h *hostLimits) untouched(now time.Time) bool {
	return h.budget.untouched(now) && h.gate.untouched(now) && h.breaker.untouched(now, hostTripped)
}

// makeRoomLocked drops idle hosts: what has been idle for long, of the first few
// of the ring; then, if another host would be too many, a victim.
func (l *limits) makeRoomLocked(now time.Time) {
	for range hostSweep {
		h := l.idle.next
		if h == &l.idle || now.Sub(h.used) < hostIdle {
			break
		}
		l.unlinkLocked(h)
		if h.untouched(now) {
			delete(l.hosts, h.origin)
		} else {
			l.linkLocked(h) // it has its turn again
		}
	}
	for range 2 { // one for the new host, one of those by which l.max was exceeded
		if len(l.hosts) < l.max || l.idle.next == &l.idle {
			return
		}
		h := l.victimLocked(now)
		l.unlinkLocked(h)
		delete(l.hosts, h.origin)
	}
}

// victimLocked returns the first of the ring that is untouched; failing that,
// the first. The ring must not be empty.
func (l *limits) victimLocked(now time.Time) *hostLimits {
	h := l.idle.next
	for range hostSearch {
		if h == &l.idle {
			break
		}
		if h.untouched(now) {
			return h
		}
		h = h.next
	}
	return l.idle.next
}

// takeLocked counts a user of h.
func (l *limits) takeLocked(h *hostLimits) {
	if h.users == 0 {
		l.unlinkLocked(h)
	}
	h.users++
}

func (l *limits) linkLocked(h *hostLimits) {
	h.prev, h.next = l.idle.prev, &l.idle
	h.prev.next, h.next.prev = h, h
}

func (l *limits) unlinkLocked(h *hostLimits) {
	h.prev.next, h.next.prev = h.next, h.prev
	h.prev, h.next = nil, nil
}

// A gate holds attempts back until a host wants them: after its pause, and no
// faster than its rate.
type gate struct {
	rate *rate.Limiter       // nil means no limit; set before use
	rnd  func(n int64) int64 // see fullJitter; set before use

	mu     sync.Mutex // guards the following, and every use of rate
	from   time.Time  // when the present or last pause began
	asked  time.Time  // when the server wants it to end
	share  float64    // of its longest delay; in [0, 1], drawn when it began
	until  time.Time  // when it ends or ended
	latest time.Time  // the latest time rate was told; never goes back, or it would pay out twice
}

// A pause is spread twice, as parts of its length.
//
// The processes that a server sends away together would come back together, be
// sent away again, and so in waves, between which the server has nothing to do.
// So each ends its pause at a time of its own, up to half of the length after
// what the server asked for.
//
// Then its waiters come back over a quarter of the length, as many as have
// gathered in it: that keeps them to a few times the usual rate.
const (
	pauseDelay  = 2
	pauseSpread = 4
)

// A waitError is the refusal of a wait. It matches [ErrWaitTooLong].
type waitError struct {
	host  string
	until time.Time // when the wait would have ended at the earliest; zero means never
}

func (e *waitError) Error() string {
	if e.until.IsZero() {
		return fmt.Sprintf("%v: %s is never free", ErrWaitTooLong, e.host)
	}
	return fmt.Sprintf("%v: %s is not free until %s", ErrWaitTooLong, e.host, e.until.UTC().Format(time.RFC3339))
}

func (e *waitError) Unwrap() error { return ErrWaitTooLong }

// Timeout reports true: it is the deadline that made the wait too long.
func (e *waitError) Timeout() bool { return true }

func (g *gate) pause(asked time.Time) {
	now := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case !asked.After(now):
		return
	case !g.until.After(now): // a new one
		const steps = 1 << 30
		g.from, g.share = now, float64(g.rnd(steps))/(steps-1)
	case !asked.After(g.asked):
		return
	}
	g.asked = asked
	g.until = asked.Add(time.Duration(g.share * float64(asked.Sub(g.from)/pauseDelay)))
}

func (g *gate) pausedUntil() time.Time {
	now := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.until.After(now) {
		return time.Time{}
	}
	return g.until
}

// wait returns when the host is not paused and its rate allows one more attempt,
// which it counts. If that cannot be before the deadline, it returns an error that
// matches [ErrWaitTooLong] at once; zero means that there is none. If ctx ends
// first, it returns its cause, and if closing is closed first, [ErrClosed]: then
// the attempt is not counted.
//
// The rate is given out in the order of the calls, beginning with its burst when a
// pause ends. Without a rate, the ends of waits for a pause are spread at random
// over a pauseSpread-th of its length, or half of what the deadline leaves,
// whichever is less.
func (g *gate) wait(ctx context.Context, deadline time.Time, closing <-chan struct{}, host string) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	for {
		until, reserved, err := g.reserve(deadline, host)
		if err != nil || until.IsZero() {
			return err
		}
		timer := time.NewTimer(time.Until(until))
		select {
		case <-timer.C:
			if g.pausedUntil().IsZero() {
				return nil
			}
			// Paused meanwhile: once more, after that. The turn that
			// came in the pause is lost.
		case <-ctx.Done():
			timer.Stop()
			g.cancel(reserved)
			return context.Cause(ctx)
		case <-closing:
			timer.Stop()
			g.cancel(reserved)
			return ErrClosed
		}
	}
}

// reserve decides on a wait: until when, and with what reservation, nil without
// a rate limit. A zero time means that there is no need to wait.
func (g *gate) reserve(deadline time.Time, host string) (time.Time, *rate.Reservation, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.rate == nil && g.until.IsZero() { // never paused
		return time.Time{}, nil, nil
	}
	now, limited := time.Now(), !deadline.IsZero()
	free, paused := now, g.until.After(now)
	if paused {
		free = g.until
		if limited && !free.Before(deadline) {
			return time.Time{}, nil, &waitError{host, free}
		}
	}
	var reserved *rate.Reservation
	if g.rate != nil {
		// What is reserved during a pause is counted from its end: or all
		// that gathered in it would have its turn at once.
		at := g.rateTimeLocked(free)
		reserved = g.rate.ReserveN(at, 1)
		switch delay := reserved.DelayFrom(at); {
		case delay == rate.InfDuration:
			reserved.CancelAt(at)
			return time.Time{}, nil, &waitError{host: host}
		case delay > 0:
			free = at.Add(delay)
		}
		if limited && !free.Before(deadline) {
			reserved.CancelAt(at)
			return time.Time{}, nil, &waitError{host, free}
		}
	}
	if paused && g.rate == nil { // whoever were later than its turn would send in somebody else's
		spread := g.asked.Sub(g.from) / pauseSpread
		if limited {
			spread = min(spread, deadline.Sub(g.until)/2) // the attempt needs time too
		}
		if late := g.until.Add(uniform(spread, g.rnd)); late.After(free) {
			free = late
		}
	}
	if !free.After(now) {
		return time.Time{}, reserved, nil
	}
	return free, reserved, nil
}

// cancel gives a reservation back, as far as later ones allow.
func (g *gate) cancel(reserved *rate.Reservation) {
	if reserved == nil {
		return
	}
	now := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	reserved.CancelAt(g.rateTimeLocked(now))
}

// rateTimeLocked returns t, or the latest time it returned before.
func (g *gate) rateTimeLocked(t time.Time) time.Time {
	if t.After(g.latest) {
		g.latest = t
	}
	return g.latest
}

// untouched reports whether there is no pause, and no rate is used up.
func (g *gate) untouched(now time.Time) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return !g.until.After(now) &&
		(g.rate == nil || g.rate.TokensAt(g.rateTimeLocked(now)) >= float64(g.rate.Burst()))
}
