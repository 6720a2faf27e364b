package oncehttp

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"time"

	"github.com/hashicorp/go-retryablehttp"
)

// A call is one way through the retry loop: an operation's, or an unkeyed
// request's. The loop itself is go-retryablehttp's, which is given nothing but
// the call in a context and asks it at every step.
type call struct {
	c      *Client
	p      *Provider
	limits *hostLimits
	trace  tracer
	flight *flight     // what is sent; nil for an unkeyed request
	plain  plainSender // that request
	info   AttemptInfo // what is the same for all attempts
	repeat bool        // its first attempt is a retry, too, and pays for none

	attempts  int
	permit    permit // of the breaker, for the next or running attempt
	last      exchange
	ended     time.Time // when last did
	drained   bool      // last's body is no longer readable
	verdict   judgement // on last
	wait      time.Duration
	waiting   bool      // for the next attempt, or due to make it
	notBefore time.Time // what the server asked for
	why       error     // what ended the loop, if not the verdict
}

// send makes attempt n, beginning with 1.
func (a *call) send(n int) exchange {
	if a.flight != nil {
		return a.flight.attempt(n)
	}
	return a.plain.attempt(n)
}

// judge says what the last attempt means.
func (a *call) judge() judgement {
	if a.flight != nil {
		return a.flight.judge(a.last)
	}
	return judgePlain(a.last)
}

// until returns the deadline; zero means that there is none.
func (a *call) until() time.Time {
	if a.flight != nil {
		return a.flight.until()
	}
	return a.plain.until()
}

type callKey struct{} // context key of *call

// loopWait is the loop's own wait before it calls PrepareRetry, which waits for the
// rest, as long at least. It is not 0, since a timer that is over when it is read
// corrupts the race detector on the fake time of testing/synctest (Go 1.26: two
// threads may use the bubble's context at once).
const (
	loopWait  = time.Nanosecond
	leastWait = 2 * loopWait
)

// newLoop returns the retry loop that all calls of a client share.
func newLoop(c *Client) *retryablehttp.Client {
	return &retryablehttp.Client{
		HTTPClient:   &http.Client{Transport: loopTransport{}},
		RetryMax:     math.MaxInt, // CheckRetry counts
		CheckRetry:   func(ctx context.Context, _ *http.Response, _ error) (bool, error) { return callOf(ctx).again(ctx), nil },
		Backoff:      func(time.Duration, time.Duration, int, *http.Response) time.Duration { return loopWait },
		PrepareRetry: func(req *http.Request) error { return callOf(req.Context()).pause(req.Context()) },
		ErrorHandler: retryablehttp.PassthroughErrorHandler,
	}
}

func callOf(ctx context.Context) *call { return ctx.Value(callKey{}).(*call) }

// loopTransport makes the attempts of a call. What it returns is only a token:
// the exchange stays in the call, out of reach of http.Client's redirects and
// of the loop's draining. It has no CloseIdleConnections, so that a give-up
// does not cost other hosts their connections.
type loopTransport struct{}

func (loopTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	if a := callOf(req.Context()); a.waiting { // the loop begins with the first attempt, which was made
		a.attempt(req.Context())
	}
	return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody, Request: req}, nil
}

// retry makes further attempts, after the first, until there is a verdict that
// stands.
func (a *call) retry(ctx context.Context) {
	loop := context.WithValue(ctx, callKey{}, a)
	token := &http.Request{Method: http.MethodGet, URL: &url.URL{Scheme: "http", Host: "loop"}, Header: http.Header{}}
	_, _ = a.c.loop.Do(&retryablehttp.Request{Request: token.WithContext(loop)})
	if a.verdict.next == again && a.why == nil {
		a.why = context.Cause(ctx)
	}
}

// attempt makes the next attempt, returns its permit, and judges it.
func (a *call) attempt(ctx context.Context) {
	a.attempts++
	a.waiting = false
	start := a.attemptStart()
	a.last, a.drained = a.send(a.attempts), false
	a.obey()
	a.attemptDone(start)
	a.ended = time.Now()
	if a.attempts == 1 && !a.repeat {
		a.limits.budget.deposit(a.ended)
	}
	a.permit.doneAt(a.health(ctx), a.ended)
	a.verdict = a.judge()
}

// attemptStart tells the hooks that an attempt begins, and returns when it did: the
// zero time, if there are none.
func (a *call) attemptStart() time.Time {
	if len(a.trace) == 0 {
		return time.Time{}
	}
	info := a.info
	info.Attempt = a.attempts
	a.trace.attemptStart(info)
	return time.Now()
}

// attemptDone tells the hooks what became of it.
func (a *call) attemptDone(start time.Time) {
	if start.IsZero() {
		return
	}
	info := a.info
	info.Attempt, info.Status, info.Err, info.Duration = a.attempts, a.last.status(), a.last.err, time.Since(start)
	a.trace.attemptDone(info)
}

// obey pauses the host if the last answer asks for that, whether or not this call
// will be retried. What is replayed was said at another time.
func (a *call) obey() {
	s := a.last.status()
	if s != http.StatusTooManyRequests && s != http.StatusServiceUnavailable || a.p.replayed(a.last.resp.Header) {
		return
	}
	if d, asked := retryAfter(a.last.resp.Header, a.c.clock.now()); asked {
		a.limits.pause(time.Now().Add(min(d, a.c.opts.MaxRetryAfter)))
	}
}

// again is CheckRetry: it decides whether another attempt will be made, and after
// which wait. The response is still readable.
func (a *call) again(ctx context.Context) bool {
	if a.verdict.next != again {
		return false
	}
	if a.why = a.plan(ctx); a.why != nil {
		return false
	}
	a.waiting = true
	a.drain()
	if a.flight != nil {
		a.flight.note(a)
	}
	a.trace.retry(RetryInfo{Key: a.info.Key, Origin: a.info.Origin, Attempt: a.attempts, Wait: a.wait, Status: a.last.status(), Err: a.last.err})
	return true
}

// Why a call made no further attempt although its last one could be retried.
var (
	errAttempts   = errors.New("all attempts made")
	errRetryAfter = errors.New("the server asks to come back later than MaxRetryAfter")
)

// plan computes the wait before the next attempt, or says why there is none.
// The budget comes last: what is not done is not charged.
func (a *call) plan(ctx context.Context) error {
	o := &a.c.opts
	now := a.c.clock.now()
	after, asked := time.Duration(0), false
	if a.last.resp != nil {
		after, asked = retryAfter(a.last.resp.Header, now)
	}
	if a.verdict.wait > after {
		after, asked = a.verdict.wait, true
	}
	a.wait = fullJitter(a.attempts-1, o.BackoffBase, o.BackoffCap, o.rnd)
	if asked {
		a.notBefore = now.Add(min(after, math.MaxInt64-a.wait))
	}
	atLeast := max(after, time.Until(a.limits.pausedUntil()))
	a.wait += min(atLeast, math.MaxInt64-a.wait) // jitter on top
	a.wait = max(a.wait, leastWait)
	deadline := a.until()
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case a.c.isClosing():
		return ErrClosed
	case a.attempts >= o.MaxAttempts:
		return errAttempts
	case after > o.MaxRetryAfter:
		return errRetryAfter
	case !deadline.IsZero() && time.Until(deadline) <= a.wait:
		return ErrWaitTooLong
	case a.flight != nil && now.Add(a.wait).After(a.flight.rec.ResendUntil):
		return ErrWindowClosed
	}
	if err := a.limits.breaker.refusal(time.Now().Add(a.wait)); err != nil {
		return err
	}
	if !a.limits.budget.withdraw(time.Now()) {
		return ErrBudgetExhausted
	}
	return nil
}

// pause is PrepareRetry: it waits and gets the permission for the next attempt.
func (a *call) pause(ctx context.Context) error {
	timer := time.NewTimer(a.wait - loopWait)
	defer timer.Stop()
	select {
	case <-timer.C:
		a.why = a.admit(ctx)
	case <-ctx.Done():
		a.why = context.Cause(ctx)
	case <-a.c.closing:
		a.why = ErrClosed
	}
	return a.why
}

// admit waits out the host's pause and rate limit, and takes a permit of its
// breaker. It refuses at once a wait that cannot end before the deadline.
func (a *call) admit(ctx context.Context) (err error) {
	if a.c.isClosing() {
		return ErrClosed
	}
	if err := a.limits.breaker.refusal(time.Time{}); err != nil { // before a turn is spent on it
		return err
	}
	if err := a.limits.wait(ctx, a.until(), a.c.closing); err != nil {
		return err
	}
	a.permit, err = a.limits.breaker.allow()
	return err
}

// health tells the breaker what an exchange says about the host.
func (a *call) health(ctx context.Context) health {
	switch {
	case a.last.refused, errors.Is(a.last.err, ErrWindowClosed), a.last.status() == http.StatusTooManyRequests:
		return ignored
	case a.last.err != nil && (ctx.Err() != nil || a.last.left): // the caller left
		return ignored
	case a.last.err != nil, a.last.status() >= 500:
		return failure
	}
	return success
}

// err returns the error of a call that ended without a response.
func (a *call) err() error {
	switch {
	case a.why == nil || errors.Is(a.why, errAttempts):
		if a.last.err == nil {
			return fmt.Errorf("oncehttp: no answer that settles the operation, last status %d", a.last.status())
		}
		return a.last.err
	case a.last.err == nil, errors.Is(a.why, context.Canceled), errors.Is(a.why, context.DeadlineExceeded), errors.Is(a.why, ErrClosed):
		return a.why
	}
	return fmt.Errorf("%w (no retry: %w)", a.last.err, a.why)
}

// drainLimit is how much of an answer that is retried is read to keep its
// connection: go-retryablehttp's respReadLimit.
const drainLimit = 4096

// drain gives up the body of an answer that is retried, unless it was buffered.
// A stream may never end, and has no timeout any more.
func (a *call) drain() {
	switch {
	case a.last.resp == nil || a.drained:
	case a.last.streams:
		a.last.resp.Body.Close()
		a.drained = true
	case a.flight == nil:
		drain(a.last.resp.Body)
		a.drained = true
	}
}
