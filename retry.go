package oncehttp

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/hashicorp/go-retryablehttp"
)

// An exchange is what one attempt came to.
type exchange struct {
	resp    *http.Response // nil with an error; a keyed one's body is in body, unless it streams
	body    []byte
	streams bool // too long, or an event stream: body is not buffered
	err     error
	refused bool // refused by us: never handed to the transport
	notSent bool // provably no byte was written
	final   bool // unkeyed: cannot be sent again
}

func (x *exchange) status() int {
	if x.resp == nil {
		return 0
	}
	return x.resp.StatusCode
}

// A judgement says what an exchange means for the operation.
type judgement struct {
	next      next
	outcome   Outcome // with settle and stop
	reason    Reason  // with stop and Unknown
	uncertain bool    // the attempt may have had its effect
}

type next uint8

const (
	settle next = iota // the answer settles the operation
	again              // retry, if the limits allow
	stop               // no retry, and no answer
)

// atTheDoor are the statuses that refuse a request before it is looked at, and
// so say nothing about an earlier attempt.
var atTheDoor = []int{
	http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound, http.StatusMethodNotAllowed,
	http.StatusProxyAuthRequired, http.StatusMisdirectedRequest, http.StatusUpgradeRequired,
	http.StatusRequestHeaderFieldsTooLarge, http.StatusUnavailableForLegalReasons,
}

// judge classifies the outcome of a keyed attempt. earlier says that an earlier
// attempt, of this run or another, may have had its effect.
func judge(p *Provider, x exchange, earlier bool) judgement {
	if x.err != nil {
		j := judgement{next: again, outcome: Unknown, reason: ReasonGaveUp, uncertain: !x.refused && !x.notSent}
		if x.refused || !retryable(x.err) {
			j.next = stop
		}
		return j
	}
	unknown := func(r Reason) judgement { return judgement{next: stop, outcome: Unknown, reason: r, uncertain: true} }
	retry := judgement{next: again, outcome: Unknown, reason: ReasonGaveUp, uncertain: true}
	succeeded := judgement{next: settle, outcome: Succeeded, uncertain: true}
	rejected := judgement{next: settle, outcome: Rejected}
	status := x.resp.StatusCode

	verdict := NoVerdict
	if p.Judge != nil && !x.streams {
		verdict = p.Judge(x.resp, x.body)
	}
	switch verdict {
	case InFlight:
		return retry
	case NotExecuted:
		retry.uncertain = false
		return retry
	case AlreadyCreated:
		return succeeded
	case OtherPayload:
		return unknown(ReasonConflict)
	case StoredFailure:
		return unknown(ReasonStored)
	case Retry:
		if status/100 != 2 {
			retry.uncertain = status != http.StatusTooManyRequests
			return retry
		}
	case Stop:
		if retriedStatus(status) || status == http.StatusConflict && earlier {
			return unknown(ReasonGaveUp)
		}
	}

	switch {
	case status/100 == 2, status == http.StatusSeeOther:
		return succeeded
	case status >= 500 && p.replayed(x.resp.Header):
		return unknown(ReasonStored)
	case status == http.StatusTooManyRequests:
		retry.uncertain = false
		return retry
	case retriedStatus(status):
		return retry
	case status/100 == 4 && p.replayed(x.resp.Header):
		return rejected // the stored answer of this very key
	case status == http.StatusConflict && earlier:
		return retry // our own earlier attempt may still run there
	case status/100 == 4 && !earlier:
		return rejected
	case slices.Contains(atTheDoor, status):
		return unknown(ReasonRefused)
	case slices.Contains(p.StoredRefusals, status):
		return rejected
	case (status == http.StatusTemporaryRedirect || status == http.StatusPermanentRedirect) && !earlier:
		return rejected
	}
	return unknown(ReasonAmbiguous)
}

// judgePlain classifies the outcome of an attempt without a key.
func judgePlain(x exchange) judgement {
	if !x.final && (x.err == nil && retriedStatus(x.resp.StatusCode) || x.err != nil && retryable(x.err)) {
		return judgement{next: again}
	}
	return judgement{next: settle}
}

func retriedStatus(status int) bool {
	return status == http.StatusRequestTimeout || status == http.StatusTooManyRequests || status >= 500
}

// retryable reports whether a transport error may go away by itself. Errors are
// told apart by type, never by text.
func retryable(err error) bool {
	if dns, ok := errors.AsType[*net.DNSError](err); ok && dns.IsNotFound {
		return false
	}
	return !isCertificateError(err)
}

func isCertificateError(err error) bool {
	_, verification := errors.AsType[*tls.CertificateVerificationError](err)
	_, authority := errors.AsType[x509.UnknownAuthorityError](err)
	_, hostname := errors.AsType[x509.HostnameError](err)
	_, invalid := errors.AsType[x509.CertificateInvalidError](err)
	return verification || authority || hostname || invalid
}

// connectError reports whether an error is one of dialling: DNS, connect, or
// TLS handshake.
func connectError(err error) bool {
	if op, ok := errors.AsType[*net.OpError](err); ok && (op.Op == "dial" || op.Op == "proxyconnect" || op.Op == "socks connect") {
		return true
	}
	_, dns := errors.AsType[*net.DNSError](err)
	_, record := errors.AsType[tls.RecordHeaderError](err)
	_, alert := errors.AsType[tls.AlertError](err)
	return dns || record || alert || isCertificateError(err)
}

// detail returns the text of an error for logs and records: without the URL
// that a *url.Error carries, whose query may be secret.
func detail(err error) string {
	if err == nil {
		return ""
	}
	if u, ok := errors.AsType[*url.Error](err); ok {
		return detail(u.Err)
	}
	return err.Error()
}

// A call is one way through the retry loop: an operation's, or an unkeyed
// request's. The loop itself is go-retryablehttp's, which is given nothing but
// the call in a context and asks it at every step.
type call struct {
	c      *Client
	p      *Provider
	limits *hostLimits
	trace  tracer
	flight *flight                  // nil for an unkeyed request
	info   AttemptInfo              // what is the same for all attempts
	send   func(n int) exchange     // makes attempt n, beginning with 1
	until  func() (time.Time, bool) // the deadline, if there is one

	attempts  int
	permit    permit // of the breaker, for the next or running attempt
	last      exchange
	primed    bool // last is not judged yet: the loop starts with it
	drained   bool // last's body is no longer readable
	verdict   judgement
	wait      time.Duration
	notBefore time.Time // what the server asked for
	why       error     // what ended the loop, if not the verdict
}

type callKey struct{} // context key of *call

// newLoop returns the retry loop that all calls of a client share.
func newLoop(c *Client) *retryablehttp.Client {
	return &retryablehttp.Client{
		HTTPClient:   &http.Client{Transport: loopTransport{}},
		RetryMax:     math.MaxInt, // CheckRetry counts
		CheckRetry:   func(ctx context.Context, _ *http.Response, _ error) (bool, error) { return callOf(ctx).again(ctx), nil },
		Backoff:      func(time.Duration, time.Duration, int, *http.Response) time.Duration { return 0 }, // PrepareRetry waits
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
	callOf(req.Context()).attempt()
	return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody, Request: req}, nil
}

// run goes through the loop until the call has a verdict that stands.
func (a *call) run(ctx context.Context) {
	ctx = context.WithValue(ctx, callKey{}, a)
	token := &http.Request{Method: http.MethodGet, URL: &url.URL{Scheme: "http", Host: "loop"}, Header: http.Header{}}
	_, _ = a.c.loop.Do(&retryablehttp.Request{Request: token.WithContext(ctx)})
	if a.verdict.next == again && a.why == nil {
		a.why = context.Cause(ctx)
	}
	a.permit.done(ignored)
}

// attempt makes the next attempt, unless the call was primed with one.
func (a *call) attempt() {
	if a.primed {
		a.primed = false
		return
	}
	a.attempts++
	info := a.info
	info.Attempt = a.attempts
	a.trace.attemptStart(info)
	start := time.Now()
	a.last, a.drained = a.send(a.attempts), false
	info.Status, info.Err, info.Duration = a.last.status(), a.last.err, time.Since(start)
	a.trace.attemptDone(info)
}

// again is CheckRetry: it judges the last exchange and decides whether another
// attempt will be made, and after which wait. The response is still readable.
func (a *call) again(ctx context.Context) bool {
	a.permit.done(a.health(ctx))
	if a.flight == nil {
		a.verdict = judgePlain(a.last)
	} else {
		a.verdict = a.flight.judge(a.last)
	}
	if a.verdict.next != again {
		return false
	}
	if a.why = a.plan(ctx); a.why != nil {
		return false
	}
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
	errBudget     = errors.New("retry budget is exhausted")
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
	if asked {
		if s := a.last.status(); s == http.StatusTooManyRequests || s == http.StatusServiceUnavailable {
			a.limits.pause(time.Now().Add(min(after, o.MaxRetryAfter)))
		}
	}
	a.wait = fullJitter(a.attempts-1, o.BackoffBase, o.BackoffCap, o.rnd)
	if asked {
		a.notBefore = now.Add(min(after, math.MaxInt64-a.wait))
		a.wait += min(after, math.MaxInt64-a.wait) // a minimum: jitter on top
	}
	deadline, limited := a.until()
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case a.c.isClosing():
		return ErrClosed
	case a.attempts >= o.MaxAttempts:
		return errAttempts
	case after > o.MaxRetryAfter:
		return errRetryAfter
	case limited && time.Until(deadline) <= a.wait:
		return ErrWaitTooLong
	case a.flight != nil && now.Add(a.wait).After(a.flight.rec.ResendUntil):
		return ErrWindowClosed
	}
	if err := a.limits.breaker.refusal(time.Now().Add(a.wait)); err != nil {
		return err
	}
	if !a.limits.budget.withdraw(time.Now()) {
		return errBudget
	}
	return nil
}

// pause is PrepareRetry: it waits and gets the permission for the next attempt.
func (a *call) pause(ctx context.Context) error {
	timer := time.NewTimer(a.wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		a.permit, a.why = a.admit(ctx)
	case <-ctx.Done():
		a.why = context.Cause(ctx)
	case <-a.c.closing:
		a.why = ErrClosed
	}
	return a.why
}

// admit waits out the host's pause and rate limit, and takes a permit of its
// breaker. It refuses at once a wait that cannot end before the deadline.
func (a *call) admit(ctx context.Context) (permit, error) {
	if a.c.isClosing() {
		return permit{}, ErrClosed
	}
	if deadline, ok := a.until(); ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, deadline)
		defer cancel()
	}
	if err := a.limits.breaker.refusal(time.Now()); err != nil { // before a turn is spent on it
		return permit{}, err
	}
	if err := a.limits.wait(ctx, a.c.closing); err != nil {
		return permit{}, err
	}
	return a.limits.breaker.allow()
}

// health tells the breaker what an exchange says about the host.
func (a *call) health(ctx context.Context) health {
	switch {
	case a.last.refused, a.last.status() == http.StatusTooManyRequests:
		return ignored
	case a.last.err != nil && ctx.Err() != nil: // the caller left
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

// drain gives up the body of an answer that is retried.
func (a *call) drain() {
	if a.last.resp != nil && (a.flight == nil || a.last.streams) {
		drain(a.last.resp.Body)
		a.drained = true
	}
}
