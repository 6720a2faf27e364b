package oncehttptest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"time"
)

// memoryWire is the wire of a Transport: serve writes at one end, the client
// reads the response's body at the other. Nothing ever waits for the client.
type memoryWire struct {
	x      *exchange
	headed chan struct{} // closed when resp or err is set
	left   chan struct{} // closed when the client has left

	mu   sync.Mutex
	more *sync.Cond // L is &mu; buf, ended or failed has changed
	resp *http.Response
	err  error        // instead of resp
	buf  bytes.Buffer // written and not read
	// How the body ends for the client: ended comes after buf, failed at once.
	ended  error
	failed error
	reuse  bool        // the connection may be used again after the body
	stop   func() bool // ends the watch on the context; set before the body is handed out
}

func (w *memoryWire) gone() <-chan struct{} { return w.left }

func (w *memoryWire) reset() { w.finish(resetError("read"), false) }

// finish ends what has not ended yet, with err for the client.
func (w *memoryWire) finish(err error, reuse bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended != nil {
		return
	}
	w.ended, w.reuse = err, reuse
	w.more.Broadcast()
	if w.resp == nil {
		w.err = err
		close(w.headed)
	}
}

func (w *memoryWire) head(a *answer, length int, announce bool) {
	h := a.header.Clone()
	if h.Get("Date") == "" {
		h.Set("Date", time.Now().UTC().Format(http.TimeFormat))
	}
	resp := &http.Response{
		Status: fmt.Sprintf("%03d %s", a.code, http.StatusText(a.code)), StatusCode: a.code,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: h, ContentLength: int64(length), Request: w.x.req, Body: memoryBody{w},
	}
	switch {
	case a.code == 204 || a.code == 304:
		resp.ContentLength = 0
	case announce:
		h.Set("Content-Length", fmt.Sprint(length))
	default:
		resp.ContentLength, resp.Close = -1, true
	}
	if w.x.req.Method == http.MethodHead || resp.ContentLength == 0 {
		resp.Body = http.NoBody
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended != nil {
		return
	}
	w.resp = resp
	close(w.headed)
}

func (w *memoryWire) write(p []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended == nil {
		w.buf.Write(p)
		w.more.Broadcast()
	}
}

func (w *memoryWire) end(complete bool) {
	w.mu.Lock()
	delimited := w.resp != nil && !w.resp.Close
	w.mu.Unlock()
	if complete || !delimited {
		w.finish(io.EOF, complete)
	} else {
		w.finish(io.ErrUnexpectedEOF, false)
	}
}

// wait is the client waiting for the response's header.
func (w *memoryWire) wait() (*http.Response, error) {
	ctx := w.x.ctx
	select {
	case <-w.headed:
	case <-ctx.Done():
		w.leave(context.Cause(ctx))
		return nil, context.Cause(ctx)
	}
	if w.err != nil {
		return nil, w.err
	}
	w.x.trace.GotFirstResponseByte()
	if w.resp.Body == http.NoBody {
		if !w.resp.Close {
			w.putIdle()
		}
		return w.resp, nil
	}
	stop := context.AfterFunc(ctx, func() { w.leave(context.Cause(ctx)) })
	w.mu.Lock()
	w.stop = stop
	w.mu.Unlock()
	return w.resp, nil
}

// leave is the client closing the connection; err is what its reads get.
func (w *memoryWire) leave(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.failed != nil {
		return
	}
	w.failed = err
	w.more.Broadcast()
	if w.ended == nil || w.buf.Len() > 0 {
		close(w.left)
	}
}

func (w *memoryWire) putIdle() {
	s, host := w.x.s, hostPort(w.x.req.URL)
	s.mu.Lock()
	s.conns[host]++
	s.mu.Unlock()
	w.x.trace.PutIdleConn(nil)
}

// memoryBody is a response's body.
type memoryBody struct{ w *memoryWire }

var errBodyClosed = errors.New("http: read on closed response body")

func (b memoryBody) Read(p []byte) (int, error) {
	w := b.w
	w.mu.Lock()
	for w.failed == nil && w.buf.Len() == 0 && w.ended == nil {
		w.more.Wait()
	}
	if w.failed != nil {
		defer w.mu.Unlock()
		return 0, w.failed
	}
	if w.buf.Len() > 0 {
		defer w.mu.Unlock()
		return w.buf.Read(p)
	}
	err, reuse, stop := w.ended, w.reuse, w.stop
	w.reuse = false
	w.mu.Unlock()
	stop()
	if reuse {
		w.putIdle()
	}
	return 0, err
}

func (b memoryBody) Close() error {
	b.w.mu.Lock()
	stop := b.w.stop
	b.w.mu.Unlock()
	stop()
	b.w.leave(errBodyClosed)
	return nil
}

type memoryAddr string

func (memoryAddr) Network() string  { return "tcp" }
func (a memoryAddr) String() string { return string(a) }

// memoryConn stands for the connection in GotConnInfo; there is nothing to
// read from it.
type memoryConn struct {
	addr memoryAddr
	mu   sync.Mutex
	err  error // why nothing can be written
}

func (c *memoryConn) failed() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

func (c *memoryConn) fail(err error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil {
		c.err = &net.OpError{Op: "write", Net: "tcp", Addr: c.addr, Err: err}
	}
	return nil
}

func (c *memoryConn) Read([]byte) (int, error)          { return 0, io.EOF }
func (c *memoryConn) Write(p []byte) (int, error)       { return 0, errors.ErrUnsupported }
func (c *memoryConn) Close() error                      { return c.fail(net.ErrClosed) }
func (c *memoryConn) LocalAddr() net.Addr               { return memoryAddr("192.0.2.1:1234") }
func (c *memoryConn) RemoteAddr() net.Addr              { return c.addr }
func (c *memoryConn) SetDeadline(t time.Time) error     { return c.SetWriteDeadline(t) }
func (c *memoryConn) SetReadDeadline(t time.Time) error { return nil }
func (c *memoryConn) SetWriteDeadline(t time.Time) error {
	if !t.IsZero() && !t.After(time.Now()) {
		return c.fail(os.ErrDeadlineExceeded)
	}
	return nil
}
