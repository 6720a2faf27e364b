package oncehttp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// A flight is an operation that this process works on. It runs in a goroutine
// of its own, from admission until its last write is durable; everybody who
// asks for the same key meanwhile waits for its result, and leaves it by their
// own context.
type flight struct {
	// Written once, before the flight is entered into the client.
	c           *Client
	p           *Provider
	limits      *hostLimits
	trace       tracer
	id          ID
	fingerprint [32]byte
	template    *http.Request // of every attempt: no body, no GetBody
	hasBody     bool
	body        []byte
	exclusive   bool            // nobody may join: by Resume, or by somebody who resolves or forgets the operation
	resumed     bool            // by Resume: nobody is told, and without an answer it stays pending
	fromStore   bool            // resumed or redriven: the request comes from the record
	withheld    []string        // then: headers that carried credentials and are not stored
	ctx         context.Context // of the attempts; ends when the last waiter has left
	cancel      context.CancelCauseFunc

	// Of the flight's goroutine.
	rec     Record // as it is in the store
	meta    storedMeta
	created bool // rec did not exist before this flight
	earlier bool // an earlier attempt may have had its effect
	sent    bool // some attempt of this flight may have written a byte
	before  int  // attempts of earlier runs
	made    int  // attempts of this one

	resent atomic.Int32 // attempts that net/http made by itself

	// Guarded by c.mu.
	waiters  int
	left     bool              // the last waiter has left: nobody may join any more
	handles  []context.Context // of the Start calls whose caller will acknowledge
	started  bool              // some waiter comes from Start
	deadline time.Time         // the latest of the waiters'
	endless  bool              // some waiter has no deadline

	answered chan struct{} // closed when res is there
	res      result        // written before answered is closed
	landed   chan struct{} // closed when the flight has left the client
}

// A result is what the callers of a flight are told.
type result struct {
	info   Info
	rec    *Record        // the stored answer that waits for Ack; nil if there is none
	resp   *http.Response // nil with an error
	body   []byte         // of resp, unless it streams
	stream *stream        // for the first who takes it
	err    error
	panic  any // of user code; goes on in the callers
}

// operate sends a keyed request.
func (c *Client) operate(req *http.Request, p *Provider, key chosenKey) (*http.Response, error) {
	if key.op != nil {
		key.first = key.op.take(c)
	}
	f, err := c.prepare(req, p, key)
	if err != nil {
		return nil, c.refuse(req, key, err)
	}
	f, joined, err := c.join(req.Context(), f, key.op)
	if err != nil {
		return nil, c.refuse(req, key, err)
	}
	if !joined {
		go f.run(f.begin)
	}
	return c.await(f, req, key)
}

// await waits for a flight's result on behalf of one caller.
func (c *Client) await(f *flight, req *http.Request, key chosenKey) (*http.Response, error) {
	ctx := req.Context()
	select {
	case <-f.answered:
	case <-ctx.Done():
		if last := c.leave(f, context.Cause(ctx)); !last {
			return nil, c.left(f, key, context.Cause(ctx))
		}
		<-f.answered // what we are told must be durable first
	}
	return f.deliver(req, key)
}

// refuse returns the error of a request that never became part of an operation.
// It was not sent; but with a key that was used before, the operation may have
// been.
func (c *Client) refuse(req *http.Request, key chosenKey, err error) error {
	info := Info{ID: ID{Key: key.key}, Method: req.Method, Outcome: NotSent, Detail: detail(err)}
	if key.given && !errors.Is(err, ErrKeyInvalid) && !errors.Is(err, ErrKeyReused) && !errors.Is(err, ErrNoKeys) {
		earlier, findErr := c.Lookup(context.WithoutCancel(req.Context()), key.key)
		switch {
		case findErr != nil:
			info.Outcome, info.NotRecorded = Unknown, true
		case len(earlier) > 0:
			info = earlier[0]
		}
	}
	if key.op != nil && key.first {
		info.Metadata = key.op.op.Metadata
		key.op.tell(c, info, nil)
	}
	return &OperationError{Key: key.key, Attempts: info.Attempts, Outcome: info.Outcome, NotBefore: info.NotBefore, Err: err}
}

// left returns the error of a caller that leaves a flight to the others.
func (c *Client) left(f *flight, key chosenKey, cause error) error {
	if key.op != nil {
		key.op.tell(c, Info{
			ID: f.id, Method: f.template.Method, URL: requestURL(f.template.URL), Metadata: key.op.op.Metadata,
			Outcome: Unknown, Reason: ReasonGaveUp, Detail: detail(cause),
		}, nil)
	}
	return &OperationError{Key: key.key, Outcome: Unknown, Err: cause}
}

func newFlight(c *Client) *flight {
	return &flight{c: c, answered: make(chan struct{}), landed: make(chan struct{})}
}

// prepare reads a request and makes the flight that would send it. It closes
// the body, at the latest when the request's context ends.
func (c *Client) prepare(req *http.Request, p *Provider, key chosenKey) (*flight, error) {
	closed := sync.OnceFunc(func() { closeBody(req) })
	defer closed()
	if req.Body != nil {
		defer context.AfterFunc(req.Context(), closed)()
	}
	if err := key.check(p, req); err != nil {
		return nil, err
	}
	timeout := c.opts.attemptTimeout(p)
	if p.resendFor(timeout) <= 0 {
		return nil, fmt.Errorf("oncehttp: provider %s: window %v is too short for AttemptTimeout %v", p.Name, p.window(), timeout)
	}
	body, err := c.readBody(req)
	if err != nil {
		return nil, err
	}

	f := newFlight(c)
	f.p, f.body, f.hasBody = p, body, req.Body != nil && req.Body != http.NoBody
	var stated string
	if key.op != nil {
		f.meta.Metadata = key.op.op.Metadata
		stated = key.op.op.Scope
	}
	f.meta.Method, f.meta.URL, f.meta.Host = req.Method, requestURL(req.URL), hostOverride(req)
	f.template = f.newTemplate(req, key.key)
	f.id = ID{Key: key.key, Origin: originOf(req.URL), Scope: c.digest.scope(p, req, stated, c.opts.secret)}
	f.fingerprint = c.digest.fingerprint(p, req, body)
	f.rec = Record{ID: f.id, Fingerprint: f.fingerprint, KeyGiven: key.given, ScopeStated: stated != ""}
	f.limits = c.limits.get(f.id.Origin)
	f.trace = c.tracerFor(req.Context())
	// The flight outlives a caller that leaves it to others; the handle must
	// not be taken by a request that is made below, such as one for a token.
	f.ctx, f.cancel = context.WithCancelCause(withoutHandle(context.WithoutCancel(req.Context())))
	return f, nil
}

// readBody returns the request's body, or nil if it has none.
func (c *Client) readBody(req *http.Request) ([]byte, error) {
	if req.Body == nil || req.Body == http.NoBody {
		return nil, nil
	}
	limit := c.opts.MaxBodyBytes
	if req.ContentLength > limit {
		return nil, fmt.Errorf("%w (%d > %d); raise Options.MaxBodyBytes, or send it WithoutKey", ErrBodyTooLarge, req.ContentLength, limit)
	}
	body, err := readUpTo(req.Body, limit+1, req.ContentLength)
	switch {
	case err != nil:
		return nil, err
	case int64(len(body)) > limit:
		return nil, fmt.Errorf("%w (> %d); raise Options.MaxBodyBytes, or send it WithoutKey", ErrBodyTooLarge, limit)
	case req.ContentLength > 0 && int64(len(body)) != req.ContentLength:
		return nil, fmt.Errorf("oncehttp: ContentLength=%d with body of %d bytes", req.ContentLength, len(body))
	}
	return body, nil
}

// readUpTo reads at most limit bytes; size is a hint, -1 if there is none.
func readUpTo(r io.Reader, limit, size int64) ([]byte, error) {
	var buf bytes.Buffer
	if size > 0 {
		buf.Grow(int(min(size, limit, defaultMaxBody)) + bytes.MinRead)
	}
	_, err := buf.ReadFrom(io.LimitReader(r, limit))
	return buf.Bytes(), err
}

// newTemplate returns the request that every attempt is a copy of. It shares
// nothing with the caller's that the caller may change. Without GetBody,
// net/http does not resend it behind our back.
func (f *flight) newTemplate(req *http.Request, key string) *http.Request {
	u := *req.URL
	t := &http.Request{
		Method: req.Method, URL: &u, Host: req.Host, Header: req.Header.Clone(), Close: req.Close,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, ContentLength: int64(len(f.body)),
	}
	if t.Header == nil {
		t.Header = make(http.Header)
	}
	t.Header.Set(f.p.header(), f.p.wire(key))
	return t
}

// join enters a flight into the client, or joins the one of the same operation.
// The callers' deadlines and their wish to acknowledge add up. Where nobody may
// join, it waits until that flight has landed.
func (c *Client) join(ctx context.Context, f *flight, op *Operation) (_ *flight, joined bool, err error) {
	for {
		running, err := c.tryJoin(ctx, f, op)
		switch {
		case err == nil && running == f:
			return f, false, nil
		case err == nil && !running.exclusive && !running.left:
			f.limits.release()
			return running, true, nil
		case err == nil && ctx.Value(handlerKey{}) == running.id:
			err = fmt.Errorf("%w: its handler is running", ErrInProgress)
		case err == nil:
			select {
			case <-running.landed:
				continue
			case <-ctx.Done():
				err = context.Cause(ctx)
			}
		}
		f.limits.release()
		return nil, false, err
	}
}

// tryJoin returns the flight that has the operation now: f, if it was free.
func (c *Client) tryJoin(ctx context.Context, f *flight, op *Operation) (*flight, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	running := c.flights[f.id]
	switch {
	case running == nil && c.idle != nil:
		return nil, ErrClosed
	case running == nil:
		running = f
		c.flights[f.id] = f
	case running.exclusive || running.left:
		return running, nil
	case running.fingerprint != f.fingerprint:
		return nil, fmt.Errorf("%w: method, URL, body or a header that matters differs", ErrKeyReused)
	}
	running.waiters++
	if d, ok := ctx.Deadline(); !ok {
		running.endless = true
	} else if d.After(running.deadline) {
		running.deadline = d
	}
	if op != nil {
		running.started = true
		if !op.op.NoAck {
			running.handles = append(running.handles, op.ctx)
		}
	}
	return running, nil
}

// leave takes a waiter off a flight. The last one cancels it.
func (c *Client) leave(f *flight, cause error) (last bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f.waiters--
	if f.waiters == 0 {
		f.left = true
		f.cancel(cause)
	}
	return f.left
}

// until returns the latest deadline of those who wait.
func (f *flight) until() (time.Time, bool) {
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	return f.deadline, !f.endless
}

// conclude tells the waiters, when nothing is left to be written. The flight is
// off the client by then, so that a caller that comes back at once starts anew. A
// resumed flight goes on to its handler.
func (f *flight) conclude(res result) {
	f.res = res
	if !f.resumed {
		f.land()
	}
	close(f.answered)
}

// land takes the flight off the client: its last write is durable.
func (f *flight) land() {
	c := f.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.flights[f.id] != f {
		return
	}
	delete(c.flights, f.id)
	close(f.landed)
	if c.idle != nil && len(c.flights) == 0 {
		close(c.idle)
	}
}

// deliver hands the result to one caller.
func (f *flight) deliver(req *http.Request, key chosenKey) (*http.Response, error) {
	res := &f.res
	if res.panic != nil {
		panic(res.panic)
	}
	if key.op != nil {
		key.op.tell(f.c, res.info, res.rec)
	}
	if res.err != nil {
		return nil, &OperationError{Key: res.info.Key, Attempts: res.info.Attempts, Outcome: res.info.Outcome, NotBefore: res.info.NotBefore, Err: res.err}
	}
	resp, err := res.response(req)
	if err != nil {
		return nil, &OperationError{Key: res.info.Key, Attempts: res.info.Attempts, Outcome: res.info.Outcome, Err: err}
	}
	return resp, nil
}

// response returns a copy of the answer, with its own body.
func (res *result) response(req *http.Request) (*http.Response, error) {
	resp := new(http.Response)
	*resp = *res.resp
	resp.Header, resp.Trailer = res.resp.Header.Clone(), res.resp.Trailer.Clone()
	resp.Request = withInfo(req, res.info)
	if res.stream == nil {
		resp.Body = io.NopCloser(bytes.NewReader(res.body))
		if len(res.body) == 0 {
			resp.Body = http.NoBody
		}
		return resp, nil
	}
	if !res.stream.take(req.Context()) {
		return nil, fmt.Errorf("%w: it was longer than MaxResponseBytes, or an event stream, and went to another caller", ErrNotRetained)
	}
	resp.Header, resp.Trailer, resp.Body = res.resp.Header, res.resp.Trailer, res.stream
	return resp, nil
}

// A stream is the body of an answer that is not buffered. It keeps the attempt's
// context alive until it is closed.
type stream struct {
	io.Reader
	body  io.ReadCloser
	end   context.CancelCauseFunc // of the flight
	taken atomic.Bool
	stop  func() bool // ends the watch over the taker's context
}

// take gives the stream to the first caller; the end of its context ends the
// stream.
func (s *stream) take(ctx context.Context) bool {
	if s.taken.Swap(true) {
		return false
	}
	s.stop = context.AfterFunc(ctx, func() { s.end(context.Cause(ctx)) })
	return true
}

func (s *stream) Write(p []byte) (int, error) { // of a connection after 101
	if w, ok := s.body.(io.Writer); ok {
		return w.Write(p)
	}
	return 0, errors.ErrUnsupported
}

func (s *stream) Close() error {
	err := s.body.Close()
	if s.stop != nil {
		s.stop()
	}
	s.end(context.Canceled)
	return err
}

// infoOf describes a record.
func infoOf(rec *Record, meta *storedMeta) Info {
	return Info{
		ID: rec.ID, Method: meta.Method, URL: meta.URL, Metadata: maps.Clone(meta.Metadata), Detail: meta.Detail,
		Outcome: rec.Outcome, Reason: rec.Reason, Status: rec.Status, Attempts: rec.Attempts, Acked: rec.Acked,
		FirstSent: rec.FirstSent, ResendUntil: rec.ResendUntil, NotBefore: rec.NotBefore,
	}
}
