package oncehttp_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// A clause is one case of the contract with net/http: what a program does with a
// client. It runs on a bare http.Client and on ours, on fake time and an
// in-memory network under net/http's own Transport and Server, and what the
// program could see must be the same.
type clause struct {
	name   string
	config func(x *trial) // of the clients; nil leaves them as they are
	serve  func(x *trial, n int, w http.ResponseWriter, r *http.Request)
	run    func(x *trial)

	// differs are the facts that are another on purpose, and what they are:
	// what got better, or what replacing the client costs. "= name" stands for
	// the fact of that name, "" for none.
	differs map[string]string
}

// A sender is what http.Client and Client have in common.
type sender interface {
	Do(*http.Request) (*http.Response, error)
	Get(url string) (*http.Response, error)
	Head(url string) (*http.Response, error)
	Post(url, contentType string, body io.Reader) (*http.Response, error)
	PostForm(url string, data url.Values) (*http.Response, error)
	CloseIdleConnections()
}

// The clients that a clause runs on.
const (
	bare = "http.Client"
	ours = "Client"
	std  = "Client.StandardClient"
)

// A trial is one run of a clause on one client.
type trial struct {
	t      *testing.T
	who    string
	hc     http.Client // what the client is made of
	opts   oncehttp.Options
	client sender
	once   *oncehttp.Client // nil on the bare one
	net    *pipeNet
	ctx    *strictContext // of all requests that state no other
	bodies []*watchedBody
	start  time.Time

	// timeout is set where http.Client.Timeout is the subject. Its errors say
	// so, but net/http's only after the very instant, at which fake time
	// stands still; and over a Transport that it does not know, it ends a
	// request in two ways at once. So they are told as one.
	// TestClientTimeoutSaysSo is on the real clock.
	timeout bool

	mu    sync.Mutex // guards the following
	wire  []string   // requests that arrived
	names []string
	facts map[string]string
}

// fulfil runs clauses on all clients. The bare one is the oracle.
func fulfil(t *testing.T, clauses []clause) {
	for _, c := range clauses {
		t.Run(c.name, func(t *testing.T) {
			want := try(t, c, bare, oncehttp.OnlyGivenKeys)
			for _, who := range []string{ours, std} {
				got := try(t, c, who, oncehttp.OnlyGivenKeys)
				compare(t, who, want, got, c.differs)
			}
		})
	}
}

func compare(t *testing.T, who string, want, got *trial, differs map[string]string) {
	t.Helper()
	names := slices.Clone(want.names)
	for _, name := range append(slices.Clone(got.names), slices.Sorted(maps.Keys(differs))...) {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	for _, name := range names {
		w, g := want.facts[name], got.facts[name]
		if d, ok := differs[name]; ok {
			if other, same := strings.CutPrefix(d, "= "); same {
				d = got.facts[other]
			}
			if d == w {
				t.Errorf("%s: %s does not differ from http.Client's: %s", who, name, w)
			}
			w = d
		}
		if g != w {
			t.Errorf("%s: %s\n got %s\nwant %s", who, name, g, w)
		}
	}
}

// try runs a clause on one client and returns what there was to see.
func try(t *testing.T, c clause, who string, unlisted oncehttp.Unlisted) *trial {
	t.Helper()
	x := &trial{who: who, facts: map[string]string{}}
	synctest.Test(t, func(t *testing.T) {
		x.t, x.ctx, x.start = t, newStrictContext(), time.Now()
		x.net = newPipeNet(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { x.arrived(c, w, r) }))
		transport := &http.Transport{DialContext: x.net.dial, DialTLSContext: x.net.dial}
		x.hc.Transport = transport
		x.opts = oncehttp.Options{Unlisted: unlisted, MaxAttempts: 3, BackoffBase: time.Second, BackoffCap: time.Second}
		if c.config != nil {
			c.config(x)
		}
		x.opts.HTTPClient = &x.hc
		if who == bare {
			x.client = &x.hc
		} else {
			o, err := oncehttp.New(oncehttptest.NewStore(), x.opts.WithRand(func(n int64) int64 { return n - 1 }))
			if err != nil {
				t.Fatal(err)
			}
			x.once, x.client = o, o
			if who == std {
				x.client = o.StandardClient()
			}
		}
		c.run(x)
		synctest.Wait()
		x.note("elapsed", "%v", time.Since(x.start))
		transport.CloseIdleConnections()
		synctest.Wait()
		x.note("contexts left", "%d", x.ctx.left())
		x.note("connections left", "%d", x.net.left())
		for i, b := range x.bodies {
			x.note(fmt.Sprintf("body %d", i+1), "closed %d times", b.closes())
		}
		x.mu.Lock()
		wire := x.wire
		x.mu.Unlock()
		for i, r := range wire {
			x.note(fmt.Sprintf("request %d", i+1), "%s", r)
		}
		if x.once != nil {
			if err := x.once.Close(); err != nil {
				t.Error(err)
			}
		}
		x.net.close()
	})
	return x
}

// note records a fact.
func (x *trial) note(name, format string, args ...any) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for n, base := 2, name; slices.Contains(x.names, name); n++ {
		name = fmt.Sprintf("%s (%d)", base, n)
	}
	x.names = append(x.names, name)
	x.facts[name] = fmt.Sprintf(format, args...)
}

// arrived records a request and serves it.
func (x *trial) arrived(c clause, w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	at := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	x.mu.Lock()
	x.wire = append(x.wire, fmt.Sprintf("%s %s at %v for %s, %s, length %d %v close %v, body %q %v",
		r.Method, r.RequestURI, at, r.Host, headerText(r.Header), r.ContentLength, r.TransferEncoding, r.Close, body, err))
	n := len(x.wire)
	x.mu.Unlock()
	if c.serve == nil {
		io.WriteString(w, "ok")
		return
	}
	c.serve(x, n, w, r)
}

// headerText prints a header, keys in order, without what depends on the time or
// is new with each operation.
func headerText(h http.Header) string {
	var text []string
	for _, name := range slices.Sorted(maps.Keys(h)) {
		if name != "Date" {
			text = append(text, fmt.Sprintf("%s=%q", name, h[name]))
		}
	}
	return fmt.Sprint(text)
}

// request makes a request. Its body is watched, unless it is nil.
func (x *trial) request(method, url string, body io.Reader) *http.Request {
	x.t.Helper()
	req, err := http.NewRequestWithContext(x.ctx, method, url, body)
	if err != nil {
		x.t.Fatal(err)
	}
	if req.Body == nil || req.Body == http.NoBody {
		return req
	}
	req.Body = x.watch(req.Body)
	if again := req.GetBody; again != nil {
		req.GetBody = func() (io.ReadCloser, error) {
			b, err := again()
			return x.watch(b), err
		}
	}
	return req
}

// do sends a request and records all there is to see, until the response is
// closed.
func (x *trial) do(req *http.Request) {
	x.t.Helper()
	before := requestText(req)
	resp, err := x.client.Do(req)
	if after := requestText(req); after != before {
		x.note("request changed", "%s", pointer.ReplaceAllString("from "+before+" to "+after, "0x"))
	}
	x.see(req, resp, err)
}

var pointer = regexp.MustCompile(`0x[0-9a-f]+`)

// requestText tells all that a program can see of its request.
func requestText(r *http.Request) string {
	return fmt.Sprintf("%s %v %s %d %v %v %s %s %q %p %p %p %p %v %v", r.Method, r.URL, headerText(r.Header), r.ContentLength, r.TransferEncoding,
		r.Close, r.Host, headerText(r.Trailer), r.RequestURI, r.URL, r.Body, r.Response, r.Context(), r.GetBody == nil, r.Header == nil)
}

// panicking calls f and records what it panics with.
func (x *trial) panicking(f func()) {
	defer func() { x.note("panic", "%v", recover()) }()
	f()
}

// retried are the differences of a request that is sent n times instead of once,
// and every time fails.
func retried(n int) map[string]string {
	d := map[string]string{"elapsed": fmt.Sprint(time.Duration(n-1) * time.Second)}
	for i := 2; i <= n; i++ {
		d[fmt.Sprintf("request %d", i)] = "= request 1"
	}
	return d
}

// with adds differences, pairs of name and fact.
func with(d map[string]string, more ...string) map[string]string {
	if d == nil {
		d = map[string]string{}
	}
	for i := 0; i+1 < len(more); i += 2 {
		d[more[i]] = more[i+1]
	}
	return d
}

// see records what a request came to, and reads and closes the response.
func (x *trial) see(req *http.Request, resp *http.Response, err error) {
	x.t.Helper()
	x.note("error", "%s", x.errorText(err))
	if resp == nil {
		return
	}
	x.note("status", "%s %s", resp.Status, resp.Proto)
	x.note("header", "%s", headerText(resp.Header))
	x.note("length", "%d %v uncompressed %v close %v", resp.ContentLength, resp.TransferEncoding, resp.Uncompressed, resp.Close)
	x.note("response's request", "%s", chainText(resp, req))
	if err != nil {
		return // it is closed
	}
	body, err := io.ReadAll(resp.Body)
	x.note("answer", "%q, %s", body, x.errorText(err))
	x.note("trailer", "%s", headerText(resp.Trailer))
	x.note("closing", "%v", resp.Body.Close())
}

// chainText tells the requests behind a response, the last one first.
func chainText(resp *http.Response, first *http.Request) string {
	var text []string
	for ; resp != nil; resp = resp.Request.Response {
		if resp.Request == nil {
			text = append(text, "none")
			break
		}
		r := resp.Request
		text = append(text, fmt.Sprintf("%s %v %s same %v body %v", r.Method, r.URL, headerText(r.Header), r == first, r.Body != nil))
	}
	return strings.Join(text, " after ")
}

type temporary interface{ Temporary() bool }

func (x *trial) errorText(err error) string {
	text := errorText(err)
	if x.timeout {
		text = clientTimeout.ReplaceAllString(text, "Client.Timeout, is")
	}
	return text
}

var clientTimeout = regexp.MustCompile(`(context deadline exceeded|net/http: request canceled)( \(Client\.Timeout [a-z ]+\))?, net\.Error timeout true, temporary true, (==|is)`)

// What http.Client.Timeout says.
const (
	awaitingHeaders = "context deadline exceeded (Client.Timeout exceeded while awaiting headers)"
	readingBody     = "context deadline exceeded (Client.Timeout or context cancellation while reading body)"
)

// errorText tells all that a program can ask an error.
func errorText(err error) string {
	if err == nil {
		return "none"
	}
	var text strings.Builder
	if u, ok := err.(*url.Error); ok {
		fmt.Fprintf(&text, "url.Error{%s %s} ", u.Op, u.URL)
		fmt.Fprintf(&text, "timeout %v temporary %v: ", u.Timeout(), u.Temporary())
		err = u.Err
	}
	fmt.Fprintf(&text, "%s", err)
	if t, ok := err.(net.Error); ok {
		fmt.Fprintf(&text, ", net.Error timeout %v", t.Timeout())
	}
	if t, ok := err.(temporary); ok {
		fmt.Fprintf(&text, ", temporary %v", t.Temporary())
	}
	if op, ok := err.(*net.OpError); ok {
		fmt.Fprintf(&text, ", net.OpError %s", op.Op)
	}
	for _, target := range []error{context.Canceled, context.DeadlineExceeded, errCause, errBroken, io.EOF, io.ErrUnexpectedEOF, http.ErrSchemeMismatch, http.ErrUseLastResponse} {
		if err == target {
			fmt.Fprintf(&text, ", == %v", target)
		} else if errors.Is(err, target) {
			fmt.Fprintf(&text, ", is %v", target)
		}
	}
	if errors.Is(err, context.Canceled) && errors.Is(err, context.DeadlineExceeded) {
		text.WriteString(" (!)")
	}
	return text.String()
}

var (
	errCause  = errors.New("shop closes")
	errBroken = errors.New("broken")
)

// A watchedBody counts how often it is closed.
type watchedBody struct {
	io.ReadCloser
	mu sync.Mutex
	n  int
}

func (x *trial) watch(b io.ReadCloser) *watchedBody {
	w := &watchedBody{ReadCloser: b}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.bodies = append(x.bodies, w)
	return w
}

func (b *watchedBody) Close() error {
	b.mu.Lock()
	b.n++
	b.mu.Unlock()
	return b.ReadCloser.Close()
}

func (b *watchedBody) closes() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.n
}

// A strictContext counts the contexts below it that were not cancelled: each of
// them is a timer or a goroutine that somebody forgot.
type strictContext struct {
	context.Context
	done chan struct{}

	mu    sync.Mutex // guards the following
	funcs map[int]func()
	next  int
}

func newStrictContext() *strictContext {
	return &strictContext{Context: context.Background(), done: make(chan struct{}), funcs: map[int]func(){}}
}

func (c *strictContext) Done() <-chan struct{} { return c.done }

// AfterFunc is what package context asks for to be told of the end.
func (c *strictContext) AfterFunc(f func()) (stop func() bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.next++
	id := c.next
	c.funcs[id] = f
	return func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		_, there := c.funcs[id]
		delete(c.funcs, id)
		return there
	}
}

func (c *strictContext) left() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.funcs)
}

// A pipeNet is a network in memory with one http.Server at every address. It
// works in a bubble.
type pipeNet struct {
	server *http.Server
	accept chan net.Conn
	closed chan struct{}
	dialed func(ctx context.Context, n int, addr string) error // before the n-th connection; nil lets it be made

	mu    sync.Mutex // guards the following
	dials int
	open  int // connections, as the clients see it
}

func newPipeNet(h http.Handler) *pipeNet {
	p := &pipeNet{server: &http.Server{Handler: h}, accept: make(chan net.Conn), closed: make(chan struct{})}
	go p.server.Serve(p)
	return p
}

func (p *pipeNet) dial(ctx context.Context, _, addr string) (net.Conn, error) {
	p.mu.Lock()
	p.dials++
	n := p.dials
	p.mu.Unlock()
	if p.dialed != nil {
		if err := p.dialed(ctx, n, addr); err != nil {
			return nil, &net.OpError{Op: "dial", Net: "tcp", Err: err}
		}
	}
	a, b := net.Pipe()
	p.mu.Lock()
	p.open++
	p.mu.Unlock()
	select {
	case p.accept <- &pipeConn{Conn: b, at: pipeAddr(addr)}:
		return &pipeConn{Conn: a, at: pipeAddr("client"), closed: sync.OnceFunc(p.left1)}, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipeNet) left1() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open--
}

func (p *pipeNet) left() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.open
}

func (p *pipeNet) close() {
	p.server.Close()
	synctest.Wait()
}

// Accept, Close and Addr make it the server's net.Listener.
func (p *pipeNet) Accept() (net.Conn, error) {
	select {
	case c := <-p.accept:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipeNet) Close() error   { close(p.closed); return nil }
func (p *pipeNet) Addr() net.Addr { return pipeAddr("everywhere") }

type pipeAddr string

func (pipeAddr) Network() string  { return "pipe" }
func (a pipeAddr) String() string { return string(a) }

type pipeConn struct {
	net.Conn
	at     pipeAddr
	closed func() // nil on the server's side
}

func (c *pipeConn) LocalAddr() net.Addr { return c.at }

func (c *pipeConn) Close() error {
	if c.closed != nil {
		c.closed()
	}
	return c.Conn.Close()
}

// reused returns a context whose requests record whether they found a
// connection.
func (x *trial) reused(ctx context.Context) context.Context {
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) { x.note("connection", "reused %v", i.Reused) }})
}

// after calls f when some time has passed.
func (x *trial) after(d time.Duration, f func()) { time.AfterFunc(d, f) }

// stall keeps a client waiting until it has left.
func stall(r *http.Request) { <-r.Context().Done() }

// hangUp ends a connection without an answer.
func hangUp() { panic(http.ErrAbortHandler) }
