package oncehttp_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp"
)

// The contract of the wire: put in the place of http.DefaultClient, the client is
// net/http's to the program and to the server, but for the attempts that it makes
// again. Every scene is played with a bare http.Client, which is the oracle, and
// with both forms of ours; what program and server saw is compared.

// A scene is played on a wire. What it sees must be what it sees with net/http,
// unless it is told what is better.
type scene struct {
	name   string
	play   func(w *wire)
	better []string         // what it sees with ours; nil means the same
	opts   oncehttp.Options // of ours
	fake   bool             // on fake time, over pipes
}

// A wire is a client, the servers it talks to, and what was seen.
type wire struct {
	*testing.T
	transport *http.Transport // what the client sends through; a scene may change it before the first request
	client    *oncehttp.Client
	store     oncehttp.KeyStore
	do        func(*http.Request) (*http.Response, error)
	idle      func() // closes the client's idle connections
	ours      bool
	fake      bool

	bodies    atomic.Int64 // response bodies that are not closed
	listeners []*watchedListener
	closers   []func()
	mu        sync.Mutex
	seen      []string
}

// wireOptions retry at once, and leave unkeyed what the program did not key.
func wireOptions(o oncehttp.Options) oncehttp.Options {
	o.Unlisted = oncehttp.OnlyGivenKeys
	if o.BackoffBase == 0 {
		o.BackoffBase, o.BackoffCap = time.Millisecond, 2*time.Millisecond
	}
	return o
}

// playAll plays scenes with every client.
func playAll(t *testing.T, scenes []scene) {
	t.Helper()
	for _, s := range scenes {
		t.Run(s.name, func(t *testing.T) {
			var oracle []string
			onWire(t, "net/http", s, func(w *wire) { s.play(w); oracle = w.seen })
			if s.better != nil && slices.Equal(s.better, oracle) {
				t.Errorf("nothing is better than with net/http:\n%s", strings.Join(oracle, "\n"))
			}
			want := oracle
			if s.better != nil {
				want = s.better
			}
			for form := range forms {
				onWire(t, form, s, func(w *wire) {
					s.play(w)
					if !slices.Equal(w.seen, want) {
						w.Errorf("saw\n\t%s\nwant\n\t%s\nwith net/http\n\t%s", strings.Join(w.seen, "\n\t"), strings.Join(want, "\n\t"), strings.Join(oracle, "\n\t"))
					}
				})
			}
		})
	}
}

// playKeyed plays a scene with both forms of a client that keys every POST.
func playKeyed(t *testing.T, s scene) {
	t.Helper()
	t.Run(s.name, func(t *testing.T) {
		for form := range forms {
			onWire(t, form, s, func(w *wire) {
				s.play(w)
				if s.better != nil && !slices.Equal(w.seen, s.better) {
					w.Errorf("saw\n\t%s\nwant\n\t%s", strings.Join(w.seen, "\n\t"), strings.Join(s.better, "\n\t"))
				}
			})
		}
	})
}

func onWire(t *testing.T, form string, s scene, play func(*wire)) {
	t.Helper()
	t.Run(form, func(t *testing.T) {
		if s.fake {
			synctest.Test(t, func(t *testing.T) { playOn(t, form, s, play) })
			return
		}
		playOn(t, form, s, play)
	})
}

func playOn(t *testing.T, form string, s scene, play func(*wire)) {
	t.Helper()
	goroutines := runtime.NumGoroutine()
	w := &wire{T: t, transport: &http.Transport{}, fake: s.fake}
	inner := &http.Client{Transport: &bodyWatch{w}}
	w.do, w.idle = inner.Do, inner.CloseIdleConnections
	if via, ok := forms[form]; ok {
		opts := wireOptions(s.opts)
		opts.HTTPClient = inner
		w.store = oncehttp.NewMemoryStore()
		client, err := oncehttp.New(w.store, &opts)
		if err != nil {
			t.Fatal(err)
		}
		w.ours, w.client, w.idle = true, client, client.CloseIdleConnections
		w.do = func(req *http.Request) (*http.Response, error) { return via(client, req) }
	}
	play(w)
	w.leavesNothing(goroutines)
}

// leavesNothing checks that a scene left no body open, and then that, with its
// idle connections closed, no connection and no goroutine is left.
func (w *wire) leavesNothing(goroutines int) {
	w.Helper()
	w.settles(func() string {
		if n := w.bodies.Load(); n != 0 {
			return fmt.Sprintf("%d response bodies were not closed", n)
		}
		return ""
	})
	w.settles(func() string {
		w.idle()
		for _, l := range w.listeners {
			if n := l.open.Load(); n != 0 {
				return fmt.Sprintf("%d connections are open, of %d", n, l.accepted.Load())
			}
		}
		return ""
	})
	if w.client != nil {
		if err := w.client.Close(); err != nil {
			w.Error(err)
		}
	}
	for _, c := range slices.Backward(w.closers) {
		c()
	}
	if w.fake {
		return // the bubble sees to its goroutines
	}
	w.settles(func() string {
		if n := runtime.NumGoroutine(); n > goroutines {
			stacks := make([]byte, 1<<20)
			return fmt.Sprintf("%d goroutines, %d at the beginning\n%s", n, goroutines, stacks[:runtime.Stack(stacks, true)])
		}
		return ""
	})
}

// settles waits until check finds no fault any more.
func (w *wire) settles(check func() string) {
	w.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for limit := time.Now().Add(10 * time.Second); ; <-tick.C {
		fault := check()
		if fault == "" {
			return
		}
		if time.Now().After(limit) {
			w.Error(fault)
			return
		}
	}
}

// saw notes what the program or the server saw.
func (w *wire) saw(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.seen = append(w.seen, differs.ReplaceAllString(fmt.Sprintf(format, args...), "ADDR"))
}

// What is different every time: ports, and the time in the error of a certificate.
var differs = regexp.MustCompile(`127\.0\.0\.1:\d+|current time \S+`)

// request makes a request. Its header is given as names and values.
func (w *wire) request(method, url string, body io.Reader, header ...string) *http.Request {
	w.Helper()
	req, err := http.NewRequestWithContext(w.Context(), method, url, body)
	if err != nil {
		w.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	return req
}

// try sends a request and notes everything that comes of it.
func (w *wire) try(req *http.Request) {
	resp, err := w.do(req)
	if err != nil {
		w.saw("error %s", errText(err))
		return
	}
	w.saw("announced trailer %v", resp.Trailer)
	w.saw("%s", answerOf(resp))
}

// tryShort is try, without what is not worth saying.
func (w *wire) tryShort(req *http.Request) {
	resp, err := w.do(req)
	if err != nil {
		w.saw("error %s", errText(err))
		return
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		w.saw("%d %.20q, then %s", resp.StatusCode, body, errText(err))
		return
	}
	w.saw("%d %.20q", resp.StatusCode, body)
}

// answerOf reads and closes a response, and tells all of it.
func answerOf(resp *http.Response) string {
	body, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	resp.Header.Del("Date")
	return fmt.Sprintf("%s %s length %d %v uncompressed %v close %v tls %v header %v body %.60q of %d then %s trailer %v",
		resp.Proto, resp.Status, resp.ContentLength, resp.TransferEncoding, resp.Uncompressed, resp.Close, resp.TLS != nil,
		resp.Header, body, len(body), errText(err), resp.Trailer)
}

// heard notes all of a request at the server.
func (w *wire) heard(r *http.Request) {
	body, err := io.ReadAll(r.Body)
	w.saw("heard %s %s %s length %d %v close %v header %v body %.60q of %d then %s trailer %v",
		r.Method, r.RequestURI, r.Proto, r.ContentLength, r.TransferEncoding, r.Close, r.Header, body, len(body), errText(err), r.Trailer)
}

// errorText is what a program can tell of an error.
func errText(err error) string {
	if err == nil {
		return "nil"
	}
	var is []string
	for name, target := range map[string]error{
		"EOF": io.EOF, "UnexpectedEOF": io.ErrUnexpectedEOF, "ECONNRESET": syscall.ECONNRESET, "ECONNREFUSED": syscall.ECONNREFUSED,
		"DeadlineExceeded": context.DeadlineExceeded, "Canceled": context.Canceled, "SchemeMismatch": http.ErrSchemeMismatch,
	} {
		if errors.Is(err, target) {
			is = append(is, name)
		}
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		is = append(is, "CertificateVerificationError")
	}
	slices.Sort(is)
	timeout, _ := err.(interface{ Timeout() bool })
	return fmt.Sprintf("%q (%T, is %v, timeout %v)", err, err, is, timeout != nil && timeout.Timeout())
}

// bodyWatch is the transport of a wire, which counts the bodies that are open.
type bodyWatch struct{ w *wire }

func (t *bodyWatch) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := t.w.transport.RoundTrip(req)
	if err != nil || resp.Body == http.NoBody {
		return resp, err
	}
	t.w.bodies.Add(1)
	closed := sync.OnceFunc(func() { t.w.bodies.Add(-1) })
	if d, ok := resp.Body.(duplex); ok {
		resp.Body = &watchedDuplex{d, closed}
	} else {
		resp.Body = &wireWatchedBody{resp.Body, closed}
	}
	return resp, nil
}

func (t *bodyWatch) CloseIdleConnections() { t.w.transport.CloseIdleConnections() }

type wireWatchedBody struct {
	io.ReadCloser
	closed func()
}

func (b *wireWatchedBody) Close() error { defer b.closed(); return b.ReadCloser.Close() }

// duplex is what a body is after 101.
type duplex interface {
	io.ReadWriteCloser
	CloseWrite() error
}

type watchedDuplex struct {
	duplex
	closed func()
}

func (b *watchedDuplex) Close() error { defer b.closed(); return b.duplex.Close() }

// A watchedListener counts its connections.
type watchedListener struct {
	net.Listener
	accepted, open atomic.Int64
}

func (l *watchedListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.accepted.Add(1)
	l.open.Add(1)
	closed := sync.OnceFunc(func() { l.open.Add(-1) })
	if tcp, ok := c.(*net.TCPConn); ok {
		return &watchedTCP{tcp, closed}, nil
	}
	return &watchedConn{c, closed}, nil
}

type watchedTCP struct {
	*net.TCPConn
	closed func()
}

func (c *watchedTCP) Close() error { defer c.closed(); return c.TCPConn.Close() }

type watchedConn struct {
	net.Conn
	closed func()
}

func (c *watchedConn) Close() error { defer c.closed(); return c.Conn.Close() }

// listener returns a new one: of loopback, or of pipes that this wire's
// transport dials whatever the address.
func (w *wire) listener() *watchedListener {
	w.Helper()
	var inner net.Listener
	if w.fake {
		p := &pipes{conns: make(chan net.Conn), done: make(chan struct{})}
		w.transport.DialContext, inner = p.dial, p
	} else {
		var err error
		if inner, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			w.Fatal(err)
		}
	}
	l := &watchedListener{Listener: inner}
	w.listeners = append(w.listeners, l)
	return l
}

// serve starts a server, and returns its URL and its listener.
func (w *wire) serve(h http.HandlerFunc, setup ...func(*httptest.Server)) (string, *watchedListener) {
	w.Helper()
	l := w.listener()
	s := &httptest.Server{Listener: l, Config: &http.Server{Handler: h, ErrorLog: log.New(io.Discard, "", 0)}}
	for _, f := range setup {
		f(s)
	}
	if s.URL == "" {
		s.Start()
	}
	w.closers = append(w.closers, s.Close)
	return s.URL, l
}

// withTLS makes a server one of TLS, which the wire's transport trusts.
func (w *wire) withTLS(protocols ...string) func(*httptest.Server) {
	return func(s *httptest.Server) {
		s.EnableHTTP2 = slices.Contains(protocols, "h2")
		s.StartTLS()
		w.trust(s.Certificate())
		w.transport.ForceAttemptHTTP2 = s.EnableHTTP2
	}
}

func (w *wire) trust(cert *x509.Certificate) {
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	w.transport.TLSClientConfig = &tls.Config{RootCAs: pool}
}

// accept starts a server that is written by hand: handle has connection n of it,
// beginning with 1, which is closed when it returns.
func (w *wire) accept(handle func(n int, c net.Conn)) (string, *watchedListener) {
	w.Helper()
	l := w.listener()
	var running sync.WaitGroup
	running.Go(func() {
		for n := 1; ; n++ {
			c, err := l.Accept()
			if err != nil {
				return
			}
			running.Go(func() {
				defer c.Close()
				handle(n, c)
			})
		}
	})
	w.closers = append(w.closers, func() { l.Close(); running.Wait() })
	return "http://" + l.Addr().String(), l
}

// pipes is a network of net.Pipe, for fake time.
type pipes struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func (p *pipes) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	near, far := net.Pipe()
	select {
	case p.conns <- far:
		return near, nil
	case <-p.done:
		return nil, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error   { p.once.Do(func() { close(p.done) }); return nil }
func (p *pipes) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1} }

// stored is all that the store has, as text.
func (w *wire) stored() string {
	w.Helper()
	recs, err := w.store.List(w.Context(), 0, 1000)
	if err != nil {
		w.Fatal(err)
	}
	var b bytes.Buffer
	for _, r := range recs {
		whole, err := w.store.Get(w.Context(), r.ID)
		if err != nil {
			w.Fatal(err)
		}
		fmt.Fprintf(&b, "%+v %s %s %s\n", whole.ID, whole.Request, whole.Meta, whole.Answer)
	}
	return b.String()
}
