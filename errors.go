package oncehttp

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"
)

// Errors that keep a request, or its next attempt, from being sent. Each comes
// inside an [*OperationError], whose Outcome says what is known of the operation:
// an earlier attempt of it, or one of an earlier call, may have been sent.
var (
	ErrKeyInvalid      = errors.New("oncehttp: invalid idempotency key")
	ErrNoKeys          = errors.New("oncehttp: the provider takes no idempotency keys, so Start can promise nothing; send the request without it")
	ErrKeyReused       = errors.New("oncehttp: idempotency key was used for a different request")
	ErrScope           = errors.New("oncehttp: idempotency key was used under another account or with other credentials; state Op.Scope")
	ErrBodyTooLarge    = errors.New("oncehttp: request body is larger than MaxBodyBytes")
	ErrInProgress      = errors.New("oncehttp: operation is in progress elsewhere")
	ErrWindowClosed    = errors.New("oncehttp: the server may have forgotten the idempotency key; look the operation up at the provider, then Resolve it")
	ErrNoCredentials   = errors.New("oncehttp: the operation had credentials, which are not stored; set Options.Authorize")
	ErrMismatch        = errors.New("oncehttp: request differs from its record")
	ErrBudgetExhausted = errors.New("oncehttp: retry budget is exhausted")
	ErrCircuitOpen     = errors.New("oncehttp: circuit breaker is open")
	ErrWaitTooLong     = errors.New("oncehttp: the wait would not end before the deadline")
	ErrClosed          = errors.New("oncehttp: client is closed")
)

// Errors of a request whose operation was sent, now or earlier.
var (
	ErrAnswerLost  = errors.New("oncehttp: answer was cut off")
	ErrNotRetained = errors.New("oncehttp: operation has its answer, which was not retained")
	ErrNotAnswered = errors.New("oncehttp: operation has no answer")
	ErrNotFollowed = errors.New("oncehttp: the redirect of an operation is not followed; set Client.CheckRedirect of the http.Client above to that of Client.StandardClient")
)

// Errors of a [KeyStore].
var (
	// ErrStoreFailed: the write was not done. The store may work again.
	ErrStoreFailed = errors.New("oncehttp: key store failed")
	// ErrStoreUncertain: the write may or may not have been done. The store
	// accepts no more writes until it is opened again.
	ErrStoreUncertain = errors.New("oncehttp: key store failed at an unknown point and is closed for writing")
	ErrStoreLocked    = errors.New("oncehttp: key store is in use by another process")
	ErrStoreReplaced  = errors.New("oncehttp: key store's file was deleted or replaced")
	ErrStoreVersion   = errors.New("oncehttp: key store has a format this version does not know")
	ErrDamaged        = errors.New("oncehttp: key store is damaged")
	ErrSealed         = errors.New("oncehttp: sealed with a key that is not in Options.SealingKeys")
	ErrFenced         = errors.New("oncehttp: operation was taken over by another owner")
	ErrNotFound       = errors.New("oncehttp: no such operation")
)

// An OperationError is the error of a keyed request that ends without a
// response. Inside the [*url.Error] of a client it is found with [errors.As].
type OperationError struct {
	Key       string
	Attempts  int       // so far
	Outcome   Outcome   // NotSent, Unknown, or what an earlier answer settled; Undecided: it will be resumed
	NotBefore time.Time // the server asked not to come back before; zero means that it did not
	Err       error     // what happened last
}

func (e *OperationError) Error() string {
	text := strings.TrimPrefix(e.Err.Error(), "oncehttp: ")
	return fmt.Sprintf("oncehttp: operation %s: outcome %v after %d attempts: %s", e.Key, e.Outcome, e.Attempts, text)
}

func (e *OperationError) Unwrap() error { return e.Err }

// Timeout reports whether the error was a timeout, as net/http's errors do.
func (e *OperationError) Timeout() bool {
	t, ok := errors.AsType[interface {
		error
		Timeout() bool
	}](e.Err)
	return ok && t.Timeout()
}

// OperationFrom returns what is known of the operation that a response answers.
// It reports false for the response of an unkeyed request.
func OperationFrom(resp *http.Response) (Info, bool) {
	info, _ := operationBehind(resp)
	if info == nil {
		return Info{}, false
	}
	return *info, true
}

// operationBehind is OperationFrom, with nil for an unkeyed request's response.
// direct says that the response is the operation's own, not one of a request that
// followed its redirect.
func operationBehind(resp *http.Response) (info *Info, direct bool) {
	for direct = true; resp != nil && resp.Request != nil; direct = false {
		if m, ok := resp.Request.Context().Value(infoKey{}).(*infoMark); ok && m.req == resp.Request {
			return &m.info, direct
		}
		resp = resp.Request.Response // the redirect that led here
	}
	return nil, false
}

type infoKey struct{} // context key of *infoMark

// An infoMark is a context with the Info of a response's request. It counts for
// that request alone, not for others that are made with its context.
type infoMark struct {
	context.Context
	req  *http.Request
	info Info
}

func (m *infoMark) Value(key any) any {
	if key == (infoKey{}) {
		return m
	}
	return m.Context.Value(key)
}

// withInfo returns a copy of a request from which OperationFrom reads info.
func withInfo(req *http.Request, info Info) *http.Request {
	m := &infoMark{Context: req.Context(), info: info}
	m.req = req.WithContext(m)
	return m.req
}

var outcomeNames = [...]string{"undecided", "succeeded", "rejected", "not sent", "unknown"}

func (o Outcome) String() string { return nameOf(outcomeNames[:], o) }

var reasonNames = [...]string{
	"none", "gave up", "stored failure", "conflicting payload", "refused at the door",
	"ambiguous answer", "window closed", "clock went back", "poison", "abandoned", "unreadable",
}

func (r Reason) String() string { return nameOf(reasonNames[:], r) }

func nameOf[T ~uint8](names []string, v T) string {
	if int(v) < len(names) {
		return names[v]
	}
	return fmt.Sprintf("%T(%d)", v, uint8(v))
}
