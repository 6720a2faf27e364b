package oncehttp

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
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
	fresh       bool            // the key was made for this request: it cannot have a record
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
	left     bool              // it is over, with or without its waiters: nobody may join any more
	told     bool              // some waiter has left, and was told that there is no answer
	plain    bool              // some waiter does not come from Start
	handles  []context.Context // of the Start calls whose caller will acknowledge
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
	url    *url.URL       // of resp, if a redirect was followed
	stream *stream        // for the first who takes it
	err    error
	panic  any // of user code; goes on in the callers
}

// operate sends a keyed request.
func (c *Client) operate(req *http.Request, p *Provider, key chosenKey) (*http.Response, error) {
	if key.op != nil {
		key.first = key.op.take(c)
	}
	f := newFlight(c)
	if err := f.prepare(req, p, key); err != nil {
		return f.refuse(req, key, err)
	}
	return c.fly(f, req, key, f.begin)
}

// fly enters a flight, or joins the one of the same operation, and waits for the
// result.
func (c *Client) fly(f *flight, req *http.Request, key chosenKey, begin func(*call) bool) (*http.Response, error) {
	running, err := c.join(req.Context(), f, key.op)
	switch {
	case err != nil:
		return f.refuse(req, key, err)
	case running == f && neverEnds(req):
		f.run(begin)
	case running == f:
		go f.run(begin)
	default:
		f.limits.release(time.Now())
	}
	return c.await(running, req, key)
}

// neverEnds reports whether a caller cannot leave: its operation needs no goroutine
// of its own.
func neverEnds(req *http.Request) bool { return req.Context().Done() == nil && canceled(req) == nil }

// await waits for a flight's result on behalf of one caller.
func (c *Client) await(f *flight, req *http.Request, key chosenKey) (*http.Response, error) {
	select {
	case <-f.answered:
		return f.deliver(req, key)
	default:
	}
	var cause error
	select {
	case <-f.answered:
		return f.deliver(req, key)
	case <-req.Context().Done():
		cause = context.Cause(req.Context())
	case <-canceled(req):
		cause = cmp.Or(context.Cause(req.Context()), error(errCanceled))
	}
	if last := c.leave(f, cause); !last {
		return nil, c.left(f, req, key, cause)
	}
	<-f.answered // what we are told must be durable first
	return f.deliver(req, key)
}

// refuse tells one caller what a request came to that never became part of an
// operation.
func (f *flight) refuse(req *http.Request, key chosenKey, err error) (*http.Response, error) {
	if f.limits != nil {
		f.limits.release(time.Now())
	}
	switch {
	case f.id.Key == "", errors.Is(err, ErrKeyReused): // of this request, nothing was or will be sent
		f.res = *f.refused(err)
		f.res.info.Key = key.key
	default:
		f.res = *f.notBegun(err)
	}
	if key.op != nil && !key.first { // what its first request came to is not for this one to tell
		key.op = nil
	}
	return f.deliver(req, key)
}

// left returns the error of a caller that leaves a flight to the others.
func (c *Client) left(f *flight, req *http.Request, key chosenKey, cause error) error {
	if key.op != nil && key.first {
		key.op.tell(c, Info{
			ID: f.id, Method: req.Method, URL: requestURL(req.URL), Metadata: key.op.op.Metadata,
			Outcome: Unknown, Reason: ReasonGaveUp, Detail: detail(cause),
		}, nil)
	}
	return &OperationError{Key: key.key, Outcome: Unknown, Err: cause}
}

func newFlight(c *Client) *flight {
	return &flight{c: c, answered: make(chan struct{}), landed: make(chan struct{})}
}

// join enters a flight into the client, and returns it, or the one of the same
// operation that it has joined. Where nobody may join, it waits until that flight
// has landed.
func (c *Client) join(ctx context.Context, f *flight, op *Operation) (*flight, error) {
	for {
		running, joined, err := c.tryJoin(ctx, f, op)
		if err != nil || joined {
			return running, err
		}
		if ctx.Value(handlerKey{}) == running.id {
			return nil, fmt.Errorf("%w: its handler is running", ErrInProgress)
		}
		if !running.exclusive { // it is over, and what it comes to is what there is to tell
			<-running.landed
			continue
		}
		select {
		case <-running.landed:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// tryJoin returns the flight that has the operation now: f, if it was free. The
// callers' deadlines and their wish to acknowledge add up.
func (c *Client) tryJoin(ctx context.Context, f *flight, op *Operation) (running *flight, joined bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	running = c.flights[f.id]
	switch {
	case running == nil && c.idle != nil:
		return nil, false, ErrClosed
	case running == nil && ctx.Err() != nil: // else the answer may be there before anybody looks
		return nil, false, context.Cause(ctx)
	case running == nil:
		running = f
		c.flights[f.id] = f
	case running.exclusive || running.left:
		return running, false, nil
	case running.fingerprint != f.fingerprint:
		return nil, false, fmt.Errorf("%w: method, URL, body or a header that matters differs", ErrKeyReused)
	}
	running.waiters++
	if d, ok := ctx.Deadline(); !ok {
		running.endless = true
	} else if d.After(running.deadline) {
		running.deadline = d
	}
	if op == nil {
		running.plain = true
	} else if !op.op.NoAck {
		running.handles = append(running.handles, op.ctx)
	}
	return running, true, nil
}

// leave takes a waiter off a flight. The last one cancels it, and waits for what
// it comes to; so does every one of a flight that is over.
func (c *Client) leave(f *flight, cause error) (last bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f.waiters--
	f.told = true
	if f.waiters == 0 {
		f.left = true
		f.cancel(cause)
	}
	return f.left
}

// until returns the latest deadline of those who wait, the zero time if one of
// them has none.
func (f *flight) until() time.Time {
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	if f.endless {
		return time.Time{}
	}
	return f.deadline
}

// conclude tells the waiters, when nothing is left to be written. The flight is
// off the client by then, so that a caller that comes back at once starts anew. A
// resumed flight goes on to its handler.
func (f *flight) conclude(res *result) {
	f.res = *res
	if !f.resumed {
		f.land(res.rec != nil)
	}
	close(f.answered)
}

// land takes the flight off the client: its last write is durable. waiting says
// that its answer waits for those who will acknowledge it.
func (f *flight) land(waiting bool) {
	c := f.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.flights[f.id] != f {
		return
	}
	delete(c.flights, f.id)
	close(f.landed)
	if waiting && len(f.handles) > 0 {
		c.held[f.id] = append(stillAlive(c.held[f.id]), f.handles...)
	}
	if c.idle != nil && len(c.flights) == 0 {
		close(c.idle)
	}
}

// deliver hands the result to one caller.
func (f *flight) deliver(req *http.Request, key chosenKey) (*http.Response, error) {
	res := &f.res
	if key.op != nil {
		key.op.tell(f.c, res.info, res.rec)
	}
	if res.panic != nil {
		panic(res.panic)
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

// response returns a copy of the answer, with its own body. A stream goes to one
// caller, whose the answer is from then on: its trailer changes while it is read.
func (res *result) response(req *http.Request) (*http.Response, error) {
	if res.stream != nil && !res.stream.take(req.Context()) {
		return nil, fmt.Errorf("%w: it was longer than MaxResponseBytes, or an event stream, and went to another caller", ErrNotRetained)
	}
	resp := new(http.Response)
	*resp = *res.resp
	resp.Header, resp.Trailer = res.resp.Header.Clone(), res.resp.Trailer.Clone()
	resp.Request = withInfo(req, res.info)
	if res.url != nil {
		resp.Request.URL = res.url
		if location := resp.Header.Get("Location"); location != "" { // which may be relative to where the redirects led
			if u, err := res.url.Parse(location); err == nil {
				resp.Header.Set("Location", u.String())
			}
		}
	}
	if res.stream == nil {
		resp.Body = io.NopCloser(bytes.NewReader(res.body))
		if len(res.body) == 0 {
			resp.Body = http.NoBody
		}
		return resp, nil
	}
	resp.Trailer, resp.Body = res.resp.Trailer, res.stream // the trailer is filled in at its end
	return resp, nil
}

// A stream is the body of an answer that is not buffered. It keeps the attempt's
// context alive until it is closed.
type stream struct {
	io.Reader
	connBody
	end   context.CancelCauseFunc // of the attempt's context
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

func (s *stream) Close() error {
	err := s.connBody.Close()
	if s.stop != nil {
		s.stop()
	}
	s.end(context.Canceled)
	return err
}

// infoOf describes a record.
func infoOf(rec *Record, meta *storedMeta) Info {
	attempts := rec.Attempts
	if rec.Uncertain { // of a process that died before it could count
		attempts = max(attempts, 1)
	}
	return Info{
		ID: rec.ID, Method: meta.Method, URL: meta.URL, Metadata: maps.Clone(meta.Metadata), Detail: meta.Detail,
		Outcome: rec.Outcome, Reason: rec.Reason, Status: rec.Status, Attempts: attempts, Acked: rec.Acked,
		FirstSent: rec.FirstSent, ResendUntil: rec.ResendUntil, NotBefore: rec.NotBefore,
	}
}
