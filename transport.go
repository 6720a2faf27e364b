package oncehttp

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// transport is the http.RoundTripper under the client's http.Client. It finds
// out whether a request is an operation, and sends it on its way:
//
//	keyed:    read and check, join or begin, attempts in the retry loop, settle
//	unkeyed:  admission, attempts in the retry loop
type transport struct{ c *Client }

func (t *transport) RoundTrip(req *http.Request) (*http.Response, error) {
	if t.c.inner.Timeout > 0 {
		return t.c.withTimeout(req)
	}
	return t.c.send(req)
}

func (c *Client) send(req *http.Request) (*http.Response, error) {
	p := &unlisted
	if req.URL != nil {
		p = c.provider(req.URL)
	}
	if req.Response != nil {
		if info, direct := operationBehind(req.Response); info != nil {
			return c.follow(req, p, info, direct)
		}
	}
	if req.Context().Value(withoutKeyKey{}) != nil {
		return c.plain(withoutHeader(req, p.header()), p)
	}
	if p.BodyField != "" {
		return c.sendKeyInBody(req, p)
	}
	if key, ok := c.keyOf(p, req); ok {
		return c.operate(req, p, key)
	}
	return c.plain(req, p)
}

// CloseIdleConnections lets http.Client.CloseIdleConnections reach the
// connections.
func (t *transport) CloseIdleConnections() {
	if c, ok := t.c.base.(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
}

// A chosenKey is the key of a request and where it came from.
type chosenKey struct {
	key   string
	given bool       // by the caller
	op    *Operation // its handle; nil if there is none
	first bool       // the request is the first that took the handle
	err   error      // why it cannot be used
}

// keyOf returns the key of a request, or false if the request is not an
// operation.
func (c *Client) keyOf(p *Provider, req *http.Request) (chosenKey, bool) {
	ctx := req.Context()
	if op := operationFrom(ctx); op != nil && (takesHandle(req.Method) || p.keys(req.Method)) {
		k := chosenKey{key: op.op.Key, given: op.given, op: op}
		if p.NoKeys {
			k.err = fmt.Errorf("%w: %s", ErrNoKeys, p.Name)
		}
		return k, true
	}
	if p.NoKeys {
		return chosenKey{}, false
	}
	if values := valuesOf(req.Header, p.header()); len(values) > 0 {
		k := chosenKey{given: true}
		if k.key, k.err = p.read(values[0]); len(values) > 1 {
			k.err = fmt.Errorf("%w: header %s has %d values", ErrKeyInvalid, p.header(), len(values))
		}
		return k, true
	}
	if p.keys(req.Method) && (p != &unlisted || c.opts.Unlisted == KeyUnlisted) {
		return chosenKey{key: NewKey()}, true
	}
	return chosenKey{}, false
}

// sendKeyInBody sends a request to a provider that looks for the key in the body.
// Without one it is no operation.
func (c *Client) sendKeyInBody(req *http.Request, p *Provider) (*http.Response, error) {
	if !takesHandle(req.Method) {
		return c.plain(req, p)
	}
	var k chosenKey
	read := req
	if isJSON(mediaType(req.Header.Get("Content-Type"))) && hasBody(req) {
		var body []byte
		body, k.err = c.readBody(req)
		k.key, k.given = p.keyIn(body), true
		read = withBody(req, body)
	}
	op := operationFrom(req.Context())
	switch {
	case op != nil:
		if k.err == nil && k.key != op.op.Key {
			k.err = fmt.Errorf("%w: %s wants it in the body: set its field %s to Operation.Key", ErrKeyInvalid, p.Name, p.BodyField)
		}
		k.key, k.given, k.op = op.op.Key, op.given, op
	case k.err == nil && k.key == "":
		resp, err := c.plain(read, p)
		if err == nil && resp.Request == read {
			resp.Request = req
		}
		return resp, err
	}
	return c.operate(read, p, k)
}

// withBody returns a copy of a request whose body was read.
func withBody(req *http.Request, body []byte) *http.Request {
	r := *req
	r.Body = io.NopCloser(bytes.NewReader(body))
	r.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(body)), nil }
	return &r
}

func hasBody(req *http.Request) bool { return req.Body != nil && req.Body != http.NoBody }

// takesHandle reports whether a method takes the operation of Start; the others
// pass it by.
func takesHandle(method string) bool {
	return slices.Contains([]string{http.MethodPost, http.MethodPatch, http.MethodPut, http.MethodDelete}, method)
}

// follow sends the request that net/http makes of an operation's redirect: the
// GET after a 303, without key. If it fails, the operation has succeeded all the
// same. Other redirects are refused: the http.Client above is not ours, and would
// make a GET of a POST, or take its body elsewhere.
func (c *Client) follow(req *http.Request, p *Provider, info *Info, direct bool) (*http.Response, error) {
	var resp *http.Response
	err := ErrNotFollowed
	if direct && req.Response.StatusCode != http.StatusSeeOther {
		closeBody(req)
	} else {
		resp, err = c.plain(withoutHeader(req, p.header(), c.providerAt(info.URL).header()), p)
	}
	if err != nil {
		return nil, &OperationError{Key: info.Key, Attempts: info.Attempts, Outcome: info.Outcome, Err: err}
	}
	return resp, nil
}

// valuesOf returns a header's values. net/http sends names as they are in the
// map, so their case does not matter.
func valuesOf(h http.Header, name string) (values []string) {
	for n, v := range h {
		if len(n) == len(name) && strings.EqualFold(n, name) {
			values = append(v[:len(v):len(v)], values...)
		}
	}
	return values
}

// canonical returns a header with its names in the form that Get looks for.
func canonical(h http.Header) http.Header {
	for name := range h {
		if http.CanonicalHeaderKey(name) != name {
			c := make(http.Header, len(h))
			for name := range h {
				c[http.CanonicalHeaderKey(name)] = valuesOf(h, name)
			}
			return c
		}
	}
	return h
}

// deleteHeader deletes a header, whatever the case of its name in the map.
func deleteHeader(h http.Header, name string) {
	for n := range h {
		if len(n) == len(name) && strings.EqualFold(n, name) {
			delete(h, n)
		}
	}
}

// withoutHeader returns the request, or a copy of it that lacks the headers.
func withoutHeader(req *http.Request, names ...string) *http.Request {
	for _, name := range names {
		if len(valuesOf(req.Header, name)) == 0 {
			continue
		}
		r := *req
		r.Header = req.Header.Clone()
		deleteHeader(r.Header, name)
		req = &r
	}
	return req
}

// withoutHandle hides the context's operation, if there is one.
func withoutHandle(ctx context.Context) context.Context {
	if operationFrom(ctx) == nil {
		return ctx
	}
	return context.WithValue(ctx, operationKey{}, (*Operation)(nil))
}

// plain sends a request without a key. It is retried if its method is
// idempotent or if nothing of it was sent, and if its body can be had again.
func (c *Client) plain(req *http.Request, p *Provider) (*http.Response, error) {
	if req.URL == nil || req.URL.Scheme != "http" && req.URL.Scheme != "https" {
		return roundTrip(c.base, req) // as net/http: perhaps a registered protocol, else its error
	}
	ctx, stop := waitContext(req)
	defer stop()
	limits := c.limitsFor(req.URL)
	first := call{
		c: c, p: p, limits: limits, trace: c.tracerFor(ctx), plain: plainSender{c, req, idempotent(req.Method)},
		info: AttemptInfo{Method: req.Method, Origin: limits.origin},
	}
	defer func() { limits.release(first.ended) }()
	if err := first.admit(ctx); err != nil {
		closeBody(req)
		return nil, err
	}
	defer first.permit.done(ignored) // a transport may panic
	first.attempt(ctx)
	if first.verdict.next == settle { // nearly always, and without a call on the heap
		return first.last.resp, first.last.err
	}
	return retryPlain(ctx, first)
}

// retryPlain makes the further attempts of a request.
func retryPlain(ctx context.Context, a call) (*http.Response, error) {
	defer a.permit.done(ignored)
	a.retry(ctx)
	if a.waiting {
		return nil, a.why
	}
	return a.last.resp, a.last.err
}

// waitContext returns the context of the waits for a request. It ends also when the
// caller closes Request.Cancel, which attempts need no help with.
func waitContext(req *http.Request) (_ context.Context, stop func()) {
	c := canceled(req)
	if c == nil {
		return req.Context(), func() {}
	}
	ctx, cancel := context.WithCancelCause(req.Context())
	go func() {
		select {
		case <-c:
			cancel(errCanceled)
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil) }
}

// canceled returns the channel that the caller closes who has no context: old
// programs do.
func canceled(req *http.Request) <-chan struct{} {
	return req.Cancel //lint:ignore SA1019 whoever replaces http.DefaultClient has such programs
}

// withTimeout sends a request within http.Client.Timeout, which covers
// redirects and the reading of the body. It is kept here and not by the outer
// http.Client, whose error would not tell what became of the operation.
func (c *Client) withTimeout(req *http.Request) (*http.Response, error) {
	deadline := time.Now().Add(c.inner.Timeout)
	if r := req.Response; r != nil && r.Request != nil { // the redirect that led here
		if d, ok := r.Request.Context().Value(deadlineKey{c}).(time.Time); ok {
			deadline = d
		}
	}
	ctx, cancel := context.WithDeadlineCause(context.WithValue(req.Context(), deadlineKey{c}, deadline), deadline, errClientTimeout)
	req = req.WithContext(ctx)
	resp, err := c.send(req)
	if err != nil {
		err = timedOut(ctx, err, "Client.Timeout exceeded while awaiting headers")
		cancel()
		return nil, err
	}
	if resp.Request == nil { // where a redirect finds its deadline
		resp.Request = req
	}
	resp.Body = &timedBody{connBody{resp.Body}, ctx, cancel}
	return resp, nil
}

// deadlineKey is the context key of the time.Time when a client's Timeout ends a
// request and those that its redirects lead to.
type deadlineKey struct{ c *Client }

// timedOut returns an error as net/http's client does, which says so when its
// Timeout was the reason.
func timedOut(ctx context.Context, err error, when string) error {
	if context.Cause(ctx) != errClientTimeout {
		return err
	}
	return &timeoutError{fmt.Errorf("%w (%s)", err, when)}
}

// A timedBody ends its request's timeout when it is closed.
type timedBody struct {
	connBody
	ctx    context.Context // of the request
	cancel context.CancelFunc
}

func (b *timedBody) Read(p []byte) (int, error) {
	n, err := b.connBody.Read(p)
	if err != nil && err != io.EOF {
		err = timedOut(b.ctx, err, "Client.Timeout or context cancellation while reading body")
	}
	return n, err
}

func (b *timedBody) Close() error {
	defer b.cancel()
	return b.connBody.Close()
}

// A connBody is a body that may be that of a connection after 101, which
// net/http lets be written and half closed.
type connBody struct{ io.ReadCloser }

func (b connBody) Write(p []byte) (int, error) {
	if w, ok := b.ReadCloser.(io.Writer); ok {
		return w.Write(p)
	}
	return 0, errors.ErrUnsupported
}

func (b connBody) CloseWrite() error {
	if w, ok := b.ReadCloser.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return errors.ErrUnsupported
}

// plainSender makes the attempts of an unkeyed request.
type plainSender struct {
	c          *Client
	req        *http.Request
	idempotent bool
}

func (s *plainSender) until() time.Time {
	deadline, _ := s.req.Context().Deadline()
	return deadline
}

// idempotent reports whether RFC 9110, section 9.2.2, allows to repeat a
// request of the method.
func idempotent(method string) bool {
	switch method {
	case "", http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace, http.MethodPut, http.MethodDelete:
		return true
	}
	return false
}

func (s *plainSender) hasBody() bool { return hasBody(s.req) }

// repeatable reports whether the request's body can be had again.
func (s *plainSender) repeatable() bool { return !s.hasBody() || s.req.GetBody != nil }

// replayable reports whether the request may be sent again after x.
func (s *plainSender) replayable(x exchange) bool {
	return (s.idempotent || x.notSent) && s.repeatable() && !x.refused && !x.left
}

func (s *plainSender) attempt(n int) (x exchange) {
	req, ctx := s.req, withoutHandle(s.req.Context()) // passed by; it must not reach a request made below
	var conn *connTrace
	if !s.idempotent && s.repeatable() { // it is only sent again if it was not sent
		conn = new(connTrace)
		ctx = conn.watch(ctx, nil)
	}
	if ctx != req.Context() || n > 1 && s.hasBody() {
		req = req.WithContext(ctx)
	}
	if n > 1 && s.hasBody() {
		body, err := s.req.GetBody()
		if err != nil {
			return exchange{err: err, refused: true, final: true}
		}
		req.Body = body
	}
	x.resp, x.err = roundTrip(s.c.base, req)
	if x.err == nil {
		if x.resp.Request == req {
			x.resp.Request = s.req // the copy was ours alone
		}
	} else {
		x.notSent = conn != nil && conn.notSent(x.err)
		x.refused = checkRequest(s.req) != nil // by net/http, every time
		select {
		case <-canceled(s.req):
			x.left = true
		default:
		}
	}
	x.final = !s.replayable(x)
	return x
}

// roundTrip is rt.RoundTrip, with its contract enforced as by http.Client.
func roundTrip(rt http.RoundTripper, req *http.Request) (*http.Response, error) {
	resp, err := rt.RoundTrip(req)
	if record, ok := err.(tls.RecordHeaderError); ok && string(record.RecordHeader[:]) == "HTTP/" {
		err = http.ErrSchemeMismatch // as http.Client tells it; the one above does not see into our errors
	}
	switch {
	case err != nil:
		return nil, err
	case resp == nil:
		return nil, contractError(fmt.Sprintf("http: RoundTripper implementation (%T) returned a nil *Response with a nil error", rt))
	case resp.Body == nil && resp.ContentLength > 0 && req.Method != http.MethodHead:
		return nil, contractError(fmt.Sprintf("http: RoundTripper implementation (%T) returned a *Response with content length %d but a nil Body", rt, resp.ContentLength))
	case resp.Body == nil:
		resp.Body = http.NoBody
	}
	return resp, nil
}

// A contractError is the error of a RoundTripper that is none.
type contractError string

func (e contractError) Error() string { return string(e) }

// connTrace watches whether a transport got a connection for a request.
type connTrace struct {
	asked, got atomic.Int32 // times that GetConn and GotConn fired
}

func (t *connTrace) watch(ctx context.Context, onConn func(n int, conn net.Conn)) context.Context {
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GetConn: func(string) { t.asked.Add(1) },
		GotConn: func(info httptrace.GotConnInfo) {
			if n := t.got.Add(1); onConn != nil {
				onConn(int(n), info.Conn)
			}
		},
	})
}

// notSent reports whether an attempt that ended with err provably wrote no
// byte. It needs positive evidence: an error of dialling, from a transport that
// asked for a connection and never got one. A transport that fires no hooks
// counts as having sent.
func (t *connTrace) notSent(err error) bool {
	return t.asked.Load() > 0 && t.got.Load() == 0 && connectError(err)
}

func closeBody(req *http.Request) {
	if req.Body != nil {
		req.Body.Close()
	}
}

// drain reads the rest of a body that nobody wants, up to a bound, so that its
// connection can be used again.
func drain(body io.ReadCloser) {
	_, _ = io.CopyN(io.Discard, body, drainLimit)
	body.Close()
}

// checkKeyed reports why a keyed request cannot be sent.
func (k chosenKey) check(p *Provider, req *http.Request) error {
	if err := checkRequest(req); err != nil {
		return err
	}
	if k.err != nil {
		return k.err
	}
	if len(req.Trailer) > 0 { // they are filled in while the body is sent, and are not stored
		return errors.New("oncehttp: a keyed request cannot have trailers; send it WithoutKey")
	}
	return checkKey(k.key, p.maxKey())
}

var (
	errAttemptTimeout = &timeoutError{errors.New("oncehttp: attempt timed out; see Options.AttemptTimeout")}
	errClientTimeout  = &timeoutError{context.DeadlineExceeded} // the cause of a context; see timedOut
	errCanceled       = errors.New("net/http: request canceled")
)

// A timeoutError is a timeout as net/http has it, a net.Error.
type timeoutError struct{ error }

func (e *timeoutError) Unwrap() error      { return e.error }
func (*timeoutError) Timeout() bool        { return true }
func (*timeoutError) Temporary() bool      { return true }
func (*timeoutError) Is(target error) bool { return target == context.DeadlineExceeded }

// mediaType returns the media type of a Content-Type, in lower case.
func mediaType(contentType string) string {
	t, _, _ := strings.Cut(contentType, ";")
	return strings.ToLower(strings.TrimSpace(t))
}

// isJSON reports whether a media type is that of JSON: RFC 6839, section 3.1.
func isJSON(mediaType string) bool {
	return mediaType == "application/json" || strings.HasSuffix(mediaType, "+json")
}
