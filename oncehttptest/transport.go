package oncehttptest

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

// Transport is a network on which every host, by http or https, is s. It opens
// no socket, waits only on timers and channels made during the request, and so
// works inside a testing/synctest bubble. It otherwise does what
// [http.Transport] does over HTTP/1: honours the request's context, closes its
// body, keeps connections alive per host (CloseIdleConnections forgets them)
// and fires httptrace's GetConn, ConnectStart, ConnectDone, GotConn,
// WroteHeaders, WroteRequest, GotFirstResponseByte and PutIdleConn.
//
// The body is read after GotConn, except while [Server.ScriptFor],
// [Server.FaultFunc] or [Server.Random] may choose by body: then it is read
// before GetConn. A context that ends within the GotConn hook does not stop a
// request, neither here nor in http.Transport, unless its body fails (or was
// read before). Closing GotConnInfo.Conn, or setting a deadline on it that has
// passed, does.
func (s *Server) Transport() http.RoundTripper { return &transport{s} }

type transport struct{ s *Server }

// CloseIdleConnections makes the next request of each host dial again.
func (t *transport) CloseIdleConnections() {
	t.s.mu.Lock()
	defer t.s.mu.Unlock()
	clear(t.s.conns)
}

func (t *transport) RoundTrip(req *http.Request) (*http.Response, error) {
	if err := check(req); err != nil {
		if req.Body != nil {
			req.Body.Close()
		}
		return nil, err
	}
	body := req.Body
	for {
		x := &exchange{s: t.s, req: req, ctx: req.Context(), in: body}
		resp, err := x.do()
		if err == nil || !x.attempt.Fault.stale || !replayable(req) {
			return resp, err
		}
		if body = req.Body; req.GetBody != nil {
			if body, err = req.GetBody(); err != nil {
				return nil, err
			}
		}
	}
}

func check(req *http.Request) error {
	switch {
	case req.URL == nil:
		return errors.New("http: nil Request.URL")
	case req.Header == nil:
		return errors.New("http: nil Request.Header")
	case req.URL.Scheme != "http" && req.URL.Scheme != "https":
		return errors.New("unsupported protocol scheme " + strconv.Quote(req.URL.Scheme))
	case req.URL.Host == "":
		return errors.New("http: no Host in request URL")
	}
	return nil
}

// replayable is net/http's rule for sending a request again by itself.
func replayable(req *http.Request) bool {
	if req.Body != nil && req.Body != http.NoBody && req.GetBody == nil {
		return false
	}
	switch cmp.Or(req.Method, "GET") {
	case "GET", "HEAD", "OPTIONS", "TRACE":
		return true
	}
	_, key := req.Header["Idempotency-Key"]
	_, xKey := req.Header["X-Idempotency-Key"]
	return key || xKey
}

// exchange is one attempt as its client sees it.
type exchange struct {
	s       *Server
	req     *http.Request
	ctx     context.Context
	in      io.ReadCloser // body; nil once read and closed
	attempt Attempt
	bodyErr error
	trace   *httptrace.ClientTrace // with every hook used set
}

func (x *exchange) do() (*http.Response, error) {
	if x.ctx.Err() != nil {
		x.closeBody()
		return nil, context.Cause(x.ctx)
	}
	s := x.s
	serverReq := serverRequest(x.req)
	x.attempt = s.attempt(serverReq)
	early := s.needsBody()
	if early {
		x.readBody()
		s.number(&x.attempt)
	}
	if x.bodyErr == nil {
		x.attempt.Fault = s.fault(x.attempt)
	}
	f := x.attempt.Fault
	x.trace = hooks(x.ctx, s.NoHooks || f.noHooks)

	conn, err := x.connect()
	if err != nil {
		x.closeBody()
		if !early {
			s.number(&x.attempt)
		}
		x.attempt.Action = NotDialed
		s.enter(&s.unsent, x.attempt)
		return nil, err
	}
	if !f.part || f.partN >= 0 {
		x.trace.WroteHeaders()
	}
	if !early {
		x.readBody()
		s.number(&x.attempt)
	} else if x.attempt.Body != nil && x.ctx.Err() != nil {
		x.bodyErr = context.Cause(x.ctx)
	}
	if err := cmp.Or(conn.failed(), x.bodyErr); err != nil {
		x.broken(conn.failed() != nil, serverReq)
		x.trace.WroteRequest(httptrace.WroteRequestInfo{Err: err})
		return nil, err
	}
	if f.part {
		n := min(max(f.partN, 0), len(x.attempt.Body))
		x.attempt.Body, x.attempt.Partial = x.attempt.Body[:n], true
	}
	e := s.enter(&s.attempts, x.attempt)
	served, done, ok := s.begin(context.Background(), e)
	if !ok {
		s.note(e, Dropped, 0, false)
		return nil, resetError("write")
	}
	w := &memoryWire{x: x, headed: make(chan struct{}), left: make(chan struct{})}
	w.more = sync.NewCond(&w.mu)
	go func() {
		defer done()
		s.serve(served, e, serverReq, w)
	}()
	if f.part {
		err = resetError("write")
	}
	x.trace.WroteRequest(httptrace.WroteRequestInfo{Err: err})
	return w.wait()
}

// connect fires the hooks until there is a connection.
func (x *exchange) connect() (*memoryConn, error) {
	s, f, host := x.s, x.attempt.Fault, hostPort(x.req.URL)
	x.trace.GetConn(host)
	s.mu.Lock()
	dial := f.dial || f.slowDial != 0
	reused := !s.closed && (f.stale || !dial && s.conns[host] > 0)
	if reused && !f.stale {
		s.conns[host]--
	}
	closed := s.closed
	s.mu.Unlock()
	if !reused {
		x.trace.ConnectStart("tcp", host)
		var err error
		switch {
		case f.slowDial != 0 && !pause(x.ctx, f.slowDial, nil):
			err = context.Cause(x.ctx)
		case closed || f.dial && f.dialErr == nil:
			err = &net.OpError{Op: "dial", Net: "tcp", Addr: memoryAddr(host), Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
		case f.dial:
			err = f.dialErr
		}
		x.trace.ConnectDone("tcp", host, err)
		if err != nil {
			return nil, err
		}
	}
	conn := &memoryConn{addr: memoryAddr(host)}
	x.trace.GotConn(httptrace.GotConnInfo{Conn: conn, Reused: reused, WasIdle: reused})
	return conn, nil
}

// broken logs a request of which at most a part was written. net/http buffers
// 4 KiB before the first byte leaves.
func (x *exchange) broken(connClosed bool, r *http.Request) {
	var head bytes.Buffer
	fmt.Fprintf(&head, "%s %s HTTP/1.1\r\nHost: %s\r\n", r.Method, r.RequestURI, r.Host)
	r.Header.Write(&head)
	x.attempt.Partial = true
	x.attempt.Action = Dropped
	log := &x.s.unsent
	if !connClosed && head.Len()+2+len(x.attempt.Body) >= 4096 {
		log = &x.s.attempts
		x.attempt.Gone = true
	}
	x.s.enter(log, x.attempt)
}

func (x *exchange) closeBody() {
	if x.in != nil {
		x.in.Close()
		x.in = nil
	}
}

// readBody reads the request's body into the attempt, and closes it.
func (x *exchange) readBody() {
	if x.in == nil || x.in == http.NoBody {
		x.closeBody()
		return
	}
	in, length := io.Reader(x.in), x.req.ContentLength
	if length > 0 {
		in = io.LimitReader(in, length+1)
	}
	var mu sync.Mutex // guards buf until read is closed
	var buf []byte
	var err error
	read := make(chan struct{})
	go func() {
		defer close(read)
		p := make([]byte, 32<<10)
		for err == nil {
			var n int
			n, err = in.Read(p)
			mu.Lock()
			buf = append(buf, p[:n]...)
			mu.Unlock()
		}
	}()
	select {
	case <-read:
		if err != io.EOF {
			x.bodyErr = err
		} else if length > 0 && int64(len(buf)) != length {
			x.bodyErr = fmt.Errorf("http: ContentLength=%d with Body length %d", length, len(buf))
		}
	case <-x.ctx.Done():
		x.bodyErr = context.Cause(x.ctx)
	}
	x.closeBody()
	mu.Lock()
	defer mu.Unlock()
	if x.attempt.Body = buf; buf == nil {
		x.attempt.Body = []byte{}
	}
}

// serverRequest is the request as it would arrive.
func serverRequest(req *http.Request) *http.Request {
	r := &http.Request{
		Method: cmp.Or(req.Method, "GET"), Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		URL:        &url.URL{Path: req.URL.Path, RawPath: req.URL.RawPath, RawQuery: req.URL.RawQuery, ForceQuery: req.URL.ForceQuery},
		Header:     req.Header.Clone(),
		Host:       cmp.Or(req.Host, req.URL.Host),
		RequestURI: req.URL.RequestURI(),
		RemoteAddr: "192.0.2.1:1234",

		ContentLength: req.ContentLength,
	}
	if r.URL.Path == "" {
		r.URL.Path = "/"
	}
	if req.ContentLength > 0 {
		r.Header.Set("Content-Length", strconv.FormatInt(req.ContentLength, 10))
	} else if req.Body != nil && req.Body != http.NoBody {
		r.ContentLength = -1
	}
	if agent, ok := r.Header["User-Agent"]; !ok {
		r.Header.Set("User-Agent", "Go-http-client/1.1")
	} else if len(agent) == 0 || agent[0] == "" {
		r.Header.Del("User-Agent")
	}
	r.Header.Del("Host")
	return r
}

// hooks is the context's trace with every hook that is used set.
func hooks(ctx context.Context, hidden bool) *httptrace.ClientTrace {
	var t httptrace.ClientTrace
	if set := httptrace.ContextClientTrace(ctx); set != nil && !hidden {
		t = *set
	}
	if t.GetConn == nil {
		t.GetConn = func(string) {}
	}
	if t.ConnectStart == nil {
		t.ConnectStart = func(string, string) {}
	}
	if t.ConnectDone == nil {
		t.ConnectDone = func(string, string, error) {}
	}
	if t.GotConn == nil {
		t.GotConn = func(httptrace.GotConnInfo) {}
	}
	if t.WroteHeaders == nil {
		t.WroteHeaders = func() {}
	}
	if t.WroteRequest == nil {
		t.WroteRequest = func(httptrace.WroteRequestInfo) {}
	}
	if t.GotFirstResponseByte == nil {
		t.GotFirstResponseByte = func() {}
	}
	if t.PutIdleConn == nil {
		t.PutIdleConn = func(error) {}
	}
	return &t
}

func hostPort(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[strings.ToLower(u.Scheme)]
	}
	return net.JoinHostPort(u.Hostname(), port)
}

func resetError(op string) error {
	return &net.OpError{Op: op, Net: "tcp", Err: os.NewSyscallError(op, syscall.ECONNRESET)}
}
