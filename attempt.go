package oncehttp

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
)

// attempt makes attempt n of the operation: one exchange, or several where the
// server redirects within its origin.
func (f *flight) attempt(n int) (x exchange) {
	f.made = n
	if f.ctx.Err() != nil { // left before anything was sent
		return exchange{err: context.Cause(f.ctx), refused: true}
	}
	ctx, cancel := context.WithCancelCause(f.ctx)
	defer func() {
		if !x.streams {
			cancel(nil)
		}
	}()
	var timer *time.Timer
	if timeout := f.c.opts.attemptTimeout(f.p); timeout > 0 {
		timer = time.AfterFunc(timeout, func() { cancel(errAttemptTimeout) })
		defer timer.Stop()
	}
	// net/http resends a request without body on a dead connection by itself:
	// each connection is an attempt, and meets the window.
	until := f.rec.ResendUntil // a transport may hedge, and come back late
	onConn := func(n int, conn net.Conn) {
		if n > 1 {
			f.resent.Add(1)
		}
		if f.c.clock.now().After(until) {
			cancel(ErrWindowClosed)
			hangUp(conn) // the end of the context alone does not stop net/http here
		}
	}

	target := f.template.URL
	var via []*http.Request
	for {
		var conn connTrace
		req, err := f.request(ctx, conn.watch(ctx, onConn), target)
		if err != nil {
			return exchange{err: err, refused: len(via) == 0, resent: x.resent}
		}
		x.resp, x.err = roundTrip(f.c.base, req)
		x.resent = x.resent || conn.got.Load() > 1
		if x.err != nil {
			if cause := context.Cause(ctx); errors.Is(cause, errAttemptTimeout) || errors.Is(cause, ErrWindowClosed) {
				x.err = cause
			}
			x.notSent = conn.notSent(x.err) && len(via) == 0
			return x
		}
		via = append(via, req)
		to := f.followed(x.resp, target, via)
		if to == nil {
			break
		}
		drain(x.resp.Body)
		target, x.url = to, to
	}
	return f.read(x, cancel)
}

// hangUp closes a connection before a request is written to it. One of HTTP/2 is
// shared, and stays.
func hangUp(conn net.Conn) {
	if t, ok := conn.(*tls.Conn); conn != nil && (!ok || t.ConnectionState().NegotiatedProtocol != "h2") {
		conn.Close()
	}
}

// request makes the request of an attempt and checks it against the record. It has
// the context watched, and not what Authorize sends with ctx.
func (f *flight) request(ctx, watched context.Context, target *url.URL) (*http.Request, error) {
	if now := f.c.clock.now(); now.After(f.rec.ResendUntil) {
		return nil, fmt.Errorf("%w (since %v)", ErrWindowClosed, f.rec.ResendUntil.Format(time.RFC3339))
	}
	authorize := f.c.opts.Authorize
	if authorize == nil {
		ctx = watched
	}
	req := f.template.WithContext(ctx)
	u := *target
	req.URL = &u
	req.Header = f.template.Header.Clone()
	req.Body = f.newBody()
	if authorize != nil {
		given := req.Body
		if err := authorize(ctx, f.info(), req); err != nil {
			return nil, fmt.Errorf("oncehttp: Options.Authorize: %w", err)
		}
		if req.Body != given {
			return nil, fmt.Errorf("%w: Options.Authorize replaced its body", ErrMismatch)
		}
		req = req.WithContext(watched)
		req.Body = f.newBody() // that one may have been read, for a signature
	}
	if err := f.checkOut(req, target); err != nil {
		return nil, err
	}
	return req, nil
}

// newBody returns the operation's body, nil if it has none: anything else would
// be sent chunked, and some servers answer 411 to that.
func (f *flight) newBody() io.ReadCloser {
	switch {
	case !f.hasBody:
		return nil
	case len(f.body) == 0:
		return http.NoBody
	}
	return io.NopCloser(bytes.NewReader(f.body))
}

// checkOut compares what goes to the user's transport with the record.
func (f *flight) checkOut(req *http.Request, target *url.URL) error {
	if len(f.withheld) > 0 && !f.authorized(req) {
		return fmt.Errorf("%w (were in %s)", ErrNoCredentials, strings.Join(f.withheld, ", "))
	}
	t := f.template
	differs := ""
	switch {
	case req.Method != t.Method:
		differs = "method"
	case *req.URL != *target && requestURL(req.URL) != requestURL(target):
		differs = "URL"
	case req.Host != t.Host:
		differs = "Host"
	case req.ContentLength != t.ContentLength || req.GetBody != nil:
		differs = "body"
	case !f.p.carries(f.rec.Key, req.Header, f.body):
		differs = "key"
	case req.Header.Get("Content-Type") != t.Header.Get("Content-Type"):
		differs = "Content-Type"
	case f.p.account(req.Header) != accountOf(f.rec.Scope):
		differs = "account"
	}
	for _, name := range f.p.FingerprintHeaders {
		if !slices.Equal(valuesOf(req.Header, name), valuesOf(t.Header, name)) {
			differs = "header " + name
		}
	}
	if differs != "" {
		return fmt.Errorf("%w: its %s was changed; Options.Authorize may only add credentials, and a Provider must not change", ErrMismatch, differs)
	}
	return nil
}

// authorized reports whether a resumed request has credentials again.
func (f *flight) authorized(req *http.Request) bool {
	for name := range req.Header {
		if f.c.withheld(f.p, name) {
			return true
		}
	}
	return req.URL.User != nil
}

// followed returns where a redirect within the origin leads, or nil if the
// response is not one that an operation follows: the method, the body and the
// credentials go nowhere else.
func (f *flight) followed(resp *http.Response, from *url.URL, via []*http.Request) *url.URL {
	if s := resp.StatusCode; s != http.StatusTemporaryRedirect && s != http.StatusPermanentRedirect {
		return nil
	}
	to, err := from.Parse(resp.Header.Get("Location"))
	if err != nil || resp.Header.Get("Location") == "" || originOf(to) != f.rec.Origin || len(via) >= maxRedirects {
		return nil
	}
	to.User = from.User
	next := via[0].Clone(via[0].Context())
	next.URL, next.Response, next.Body = to, resp, nil
	if consult(f.c.inner, next, via) != nil {
		return nil
	}
	return to
}

// read reads the answer. One that was cut off is no answer.
func (f *flight) read(x exchange, cancel context.CancelCauseFunc) exchange {
	resp := x.resp
	limit := f.c.opts.MaxResponseBytes
	if resp.StatusCode == http.StatusSwitchingProtocols || mediaType(resp.Header.Get("Content-Type")) == "text/event-stream" {
		return f.stream(x, nil, cancel)
	}
	if resp.ContentLength > limit {
		return f.stream(x, nil, cancel)
	}
	body, err := readUpTo(resp.Body, limit+1, resp.ContentLength)
	if err == nil && int64(len(body)) > limit {
		return f.stream(x, body, cancel)
	}
	resp.Body.Close()
	if err == nil && cutShort(resp, body) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return exchange{err: fmt.Errorf("%w: %w", ErrAnswerLost, err), resent: x.resent}
	}
	x.body = body
	return x
}

// stream leaves the rest of the body to a caller. The answer counts as
// complete with its header, and the attempt's timeout is over.
func (f *flight) stream(x exchange, prefix []byte, cancel context.CancelCauseFunc) exchange {
	x.streams = true
	x.resp.Body = &stream{Reader: io.MultiReader(bytes.NewReader(prefix), x.resp.Body), connBody: connBody{x.resp.Body}, end: cancel}
	return x
}

// cutShort reports whether a body that ends with its connection, without any
// announced length, was cut: JSON that does not parse.
func cutShort(resp *http.Response, body []byte) bool {
	if resp.ContentLength >= 0 || len(resp.TransferEncoding) > 0 || resp.ProtoMajor != 1 || resp.Header.Get("Content-Encoding") != "" ||
		resp.Request != nil && resp.Request.Method == http.MethodHead || resp.StatusCode == http.StatusNoContent || resp.StatusCode == http.StatusNotModified {
		return false
	}
	return isJSON(mediaType(resp.Header.Get("Content-Type"))) && !json.Valid(body)
}
