package oncehttp

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
)

// prepare reads a request. It closes the body.
func (f *flight) prepare(req *http.Request, p *Provider, key chosenKey) error {
	err := f.check(req, p, key)
	if f.hasBody = hasBody(req); f.hasBody && err == nil {
		f.body, err = f.c.readBody(req)
	} else {
		closeBody(req)
	}
	if err != nil {
		return err
	}
	f.fingerprint = f.c.digest.fingerprint(p, req, f.meta.URL, f.body)
	f.rec.Fingerprint = f.fingerprint
	f.template = f.newTemplate(req)
	if p.BodyField == "" {
		deleteHeader(f.template.Header, p.header())
		f.template.Header.Set(p.header(), p.wire(key.key))
	}
	f.trace = f.c.tracerFor(req.Context())
	// The flight outlives a caller that leaves it to others; the handle must
	// not be taken by a request that is made below, such as one for a token.
	f.ctx, f.cancel = context.WithCancelCause(withoutHandle(context.WithoutCancel(req.Context())))
	return nil
}

// check checks what can be checked without the body, and finds out which operation
// the request is.
func (f *flight) check(req *http.Request, p *Provider, key chosenKey) error {
	f.p, f.meta.Method = p, req.Method
	if key.op != nil {
		f.meta.Metadata = key.op.op.Metadata
	}
	if err := key.check(p, req); err != nil {
		return err
	}
	if err := f.identify(req, key); err != nil {
		return err
	}
	if timeout := f.c.opts.attemptTimeout(p); p.resendFor(timeout) <= 0 {
		return fmt.Errorf("oncehttp: provider %s: window %v is too short for AttemptTimeout %v", p.Name, p.window(), timeout)
	}
	return nil
}

// identify finds out which operation a request is.
func (f *flight) identify(req *http.Request, key chosenKey) error {
	c := f.c
	var stated string
	if key.op != nil {
		stated = key.op.op.Scope
	}
	account, err := f.account(req, key)
	if err != nil {
		return err
	}
	secret := func(name string) bool { return c.withheld(f.p, name) }
	f.limits = c.limitsFor(req.URL)
	f.id = ID{Key: key.key, Origin: f.limits.origin, Scope: c.digest.scope(account, req, stated, secret)}
	f.fresh = !key.given && (key.op == nil || key.first)
	f.meta.URL, f.meta.Host = requestURL(req.URL), hostOverride(req)
	f.rec = Record{ID: f.id, KeyGiven: key.given, ScopeStated: stated != ""}
	return nil
}

// account returns the account that a request acts on. The credentials that tell
// it may come from Options.Authorize.
func (f *flight) account(req *http.Request, key chosenKey) (string, error) {
	authorize := f.c.opts.Authorize
	if authorize == nil || f.p.Account == nil {
		return f.p.account(req.Header), nil
	}
	copied := &http.Request{Method: req.Method, URL: req.URL, Host: req.Host, Header: req.Header.Clone()}
	if copied.Header == nil {
		copied.Header = make(http.Header)
	}
	ctx := withoutHandle(req.Context())
	info := Info{ID: ID{Key: key.key, Origin: originOf(req.URL)}, Method: req.Method, URL: requestURL(req.URL), Metadata: f.meta.Metadata}
	if err := authorize(ctx, info, copied.WithContext(ctx)); err != nil {
		return "", fmt.Errorf("oncehttp: Options.Authorize: %w", err)
	}
	return f.p.account(copied.Header), nil
}

// readBody reads the request's body, and closes it, at the latest when the
// request's context ends.
func (c *Client) readBody(req *http.Request) ([]byte, error) {
	limit, ctx := c.opts.MaxBodyBytes, req.Context()
	stop := func() bool { return true }
	if ctx.Done() != nil {
		stop = context.AfterFunc(ctx, func() { closeBody(req) })
	}
	defer func() {
		if stop() {
			closeBody(req)
		}
	}()
	if req.ContentLength > limit {
		return nil, fmt.Errorf("%w (%d > %d); raise Options.MaxBodyBytes, or send it WithoutKey", ErrBodyTooLarge, req.ContentLength, limit)
	}
	body, err := readUpTo(req.Body, limit+1, req.ContentLength)
	switch {
	case err != nil:
		return nil, cmp.Or(context.Cause(ctx), err)
	case int64(len(body)) > limit:
		return nil, fmt.Errorf("%w (> %d); raise Options.MaxBodyBytes, or send it WithoutKey", ErrBodyTooLarge, limit)
	case req.ContentLength > 0 && int64(len(body)) != req.ContentLength:
		return nil, fmt.Errorf("oncehttp: ContentLength=%d with body of %d bytes", req.ContentLength, len(body))
	}
	return body, nil
}

// readUpTo reads at most limit bytes; size is a hint, -1 if there is none.
func readUpTo(r io.Reader, limit, size int64) ([]byte, error) {
	buf := make([]byte, 0, min(max(size, 0), limit, defaultMaxBody)+bytes.MinRead/8)
	for {
		room := buf[len(buf):min(int64(cap(buf)), limit)]
		if len(room) == 0 {
			if int64(len(buf)) >= limit {
				return buf, nil
			}
			buf = slices.Grow(buf, max(bytes.MinRead, cap(buf)))
			continue
		}
		n, err := r.Read(room)
		buf = buf[:len(buf)+n]
		if err == io.EOF {
			return buf, nil
		}
		if err != nil {
			return buf, err
		}
	}
}

// newTemplate returns the request that every attempt is a copy of. It shares
// nothing with the caller's that the caller may change. Without GetBody,
// net/http does not resend it behind our back.
func (f *flight) newTemplate(req *http.Request) *http.Request {
	u := *req.URL
	t := &http.Request{
		Method: req.Method, URL: &u, Host: req.Host, Header: req.Header.Clone(), Close: req.Close,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, ContentLength: int64(len(f.body)),
	}
	if t.Header == nil {
		t.Header = make(http.Header)
	}
	return t
}
