package oncehttptest

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"time"
)

// ServeHTTP serves one attempt of a real connection. Faults that break the
// connection need a ResponseWriter that can be hijacked (HTTP/1), and do what
// [http.ErrAbortHandler] does on others.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a := s.attempt(r)
	var err error
	a.Body, err = io.ReadAll(r.Body)
	a.Partial = err != nil
	s.number(&a)
	if !a.Partial {
		a.Fault = s.fault(a)
	}
	if a.Fault.part && !a.Partial {
		a.Body, a.Partial = a.Body[:min(max(a.Fault.partN, 0), len(a.Body))], true
	}
	e := s.enter(&s.attempts, a)
	ctx, done, ok := s.begin(r.Context(), e)
	if err != nil || !ok {
		s.note(e, Dropped, 0, err != nil)
		if ok {
			done()
		}
		panic(http.ErrAbortHandler)
	}
	wire := &socketWire{w: w, left: r.Context().Done()}
	serve := func() {
		defer done()
		s.serve(ctx, e, r, wire)
	}
	if a.Fault.late {
		// The connection must end now, and not every ResponseWriter can be
		// hijacked.
		early := *wire
		early.reset()
		wire.w = nil
		go serve()
		if early.abort {
			panic(http.ErrAbortHandler)
		}
		return
	}
	serve()
	if wire.abort {
		panic(http.ErrAbortHandler)
	}
}

// socketWire answers over a ResponseWriter, or over the connection below it.
type socketWire struct {
	w     http.ResponseWriter // nil: the connection is gone already
	left  <-chan struct{}
	conn  net.Conn      // hijacked, while open
	buf   *bufio.Writer // of conn
	open  bool          // no length was announced to w
	abort bool          // ServeHTTP is to panic with ErrAbortHandler
}

func (x *socketWire) gone() <-chan struct{} { return x.left }

func (x *socketWire) hijack() bool {
	if x.w == nil || x.conn != nil {
		return x.conn != nil
	}
	conn, rw, err := http.NewResponseController(x.w).Hijack()
	if err != nil {
		return false
	}
	x.conn, x.buf, x.w = conn, rw.Writer, nil
	return true
}

func (x *socketWire) reset() {
	if x.w == nil && x.conn == nil {
		return
	}
	if !x.hijack() {
		x.abort = true
		return
	}
	conn := x.conn
	for {
		inner, ok := conn.(interface{ NetConn() net.Conn })
		if !ok {
			break
		}
		conn = inner.NetConn()
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		tcp.SetLinger(0) // a reset rather than an end
	}
	conn.Close()
	x.conn = nil
}

func (x *socketWire) head(a *answer, length int, announce bool) {
	if x.w == nil {
		return
	}
	if !announce && x.hijack() {
		h := a.header.Clone()
		h.Set("Connection", "close")
		if h.Get("Date") == "" {
			h.Set("Date", time.Now().UTC().Format(http.TimeFormat))
		}
		var b bytes.Buffer
		fmt.Fprintf(&b, "HTTP/1.1 %03d %s\r\n", a.code, http.StatusText(a.code))
		h.Write(&b)
		b.WriteString("\r\n")
		x.buf.Write(b.Bytes())
		return
	}
	maps.Copy(x.w.Header(), a.header)
	x.open = !announce
	if announce && a.code != 204 && a.code != 304 {
		x.w.Header().Set("Content-Length", fmt.Sprint(length))
	}
	x.w.WriteHeader(a.code)
}

func (x *socketWire) write(p []byte) {
	switch {
	case x.conn != nil:
		x.buf.Write(p)
		x.buf.Flush()
	case x.w != nil:
		x.w.Write(p)
		http.NewResponseController(x.w).Flush()
	}
}

func (x *socketWire) end(complete bool) {
	switch {
	case x.conn != nil:
		x.buf.Flush()
		x.conn.Close()
		x.conn = nil
	case x.w != nil && !complete && !x.open:
		x.abort = true
	}
}
