package oncehttp_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// host is where the in-memory server of the tests is.
const host = "https://api.example.com"

// A bench is a client over an in-memory server and a store that may outlive it.
type bench struct {
	t      *testing.T
	server *oncehttptest.Server
	store  *spyStore
	opts   oncehttp.Options
	client *oncehttp.Client
}

// inBubble runs a test on fake time, with a server of charges and a client.
func inBubble(t *testing.T, opts oncehttp.Options, test func(t *testing.T, b *bench)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := &bench{t: t, server: oncehttptest.New(oncehttptest.Charges()), store: &spyStore{LazyStore: oncehttptest.NewStore()}, opts: opts}
		if b.opts.HTTPClient == nil {
			b.opts.HTTPClient = &http.Client{Transport: b.server.Transport()}
		}
		b.open()
		test(t, b)
		b.close()
		b.server.Wait()
	})
}

func (b *bench) open() {
	b.t.Helper()
	c, err := oncehttp.New(b.store, &b.opts)
	if err != nil {
		b.t.Fatal(err)
	}
	b.client = c
}

func (b *bench) close() {
	b.t.Helper()
	if err := b.client.Close(); err != nil {
		b.t.Error(err)
	}
}

// restart closes the client and opens a new one on what is durable.
func (b *bench) restart() {
	b.t.Helper()
	b.close()
	b.store.LazyStore = b.store.LazyStore.(*oncehttptest.Store).Crash()
	b.open()
}

// request makes a POST that charges an order.
func (b *bench) request(ctx context.Context, order string, header ...string) *http.Request {
	b.t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, host+"/v1/charges", strings.NewReader("order="+order))
	if err != nil {
		b.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	return req
}

// charge charges an order under a key and returns what the caller is told.
func (b *bench) charge(ctx context.Context, key, order string, header ...string) (oncehttp.Info, error) {
	b.t.Helper()
	ctx, op := oncehttp.Start(ctx, oncehttp.Op{Key: key, Metadata: map[string]string{"order": order}})
	resp, err := b.client.Do(b.request(ctx, order, header...))
	if err == nil {
		resp.Body.Close()
	}
	return op.Info(), err
}

// pending makes an operation that nobody was told about.
func (b *bench) pending(key, order string, header ...string) {
	b.t.Helper()
	b.server.Script(oncehttptest.Stall(-1))
	closed := make(chan error)
	time.AfterFunc(time.Millisecond, func() { closed <- b.client.Close() })
	if info, _ := b.charge(b.t.Context(), key, order, header...); info.Outcome != oncehttp.Undecided {
		b.t.Errorf("an interrupted operation is %v", info.Outcome)
	}
	<-closed
	b.restart()
}

// lost makes an operation whose caller was told that it is unknown.
func (b *bench) lost(key, order string, header ...string) oncehttp.ID {
	b.t.Helper()
	for range 4 {
		b.server.Script(oncehttptest.DropResponse())
	}
	info, _ := b.charge(b.t.Context(), key, order, header...)
	if info.Outcome != oncehttp.Unknown {
		b.t.Errorf("an operation without answer is %v", info.Outcome)
	}
	return info.ID
}

// wire returns how often the server was reached.
func (b *bench) wire() int { return len(b.server.Attempts()) }

// wantEffects fails unless each of the orders was charged exactly once, and no
// other.
func (b *bench) wantEffects(orders ...string) {
	b.t.Helper()
	got := b.server.EffectsByBody()
	for _, o := range orders {
		if got["order="+o] != 1 {
			b.t.Errorf("order %s was charged %d times, want once", o, got["order="+o])
		}
		delete(got, "order="+o)
	}
	if len(got) > 0 {
		b.t.Errorf("charged besides: %v", got)
	}
}

// resume makes one pass and returns the orders whose answers were handed over.
func (b *bench) resume() (orders []string, sum oncehttp.Summary) {
	b.t.Helper()
	var mu sync.Mutex
	sum, err := b.client.Resume(b.t.Context(), oncehttp.Handler{
		Settled: func(_ context.Context, info oncehttp.Info, resp *http.Response) error {
			body, err := io.ReadAll(resp.Body)
			if err != nil || !bytes.Contains(body, []byte(info.Metadata["order"])) {
				b.t.Errorf("handed over %q, %v for order %s", body, err, info.Metadata["order"])
			}
			mu.Lock()
			defer mu.Unlock()
			orders = append(orders, info.Metadata["order"])
			return nil
		},
	})
	if err != nil {
		b.t.Error(err)
	}
	return orders, sum
}

// spyStore calls hooks around the writes of a store.
type spyStore struct {
	oncehttp.LazyStore
	before, after func(write string, rec oncehttp.Record) error // a before's error replaces the write
	noPurge       atomic.Bool                                   // Purge fails
	mu            sync.Mutex
	held          []func()
	hold          bool
}

func (s *spyStore) around(write string, rec oncehttp.Record, do func() error) error {
	if s.before != nil {
		if err := s.before(write, rec); err != nil {
			return err
		}
	}
	err := do()
	if s.after != nil {
		if hook := s.after(write, rec); hook != nil {
			return hook
		}
	}
	return err
}

func (s *spyStore) Begin(ctx context.Context, rec oncehttp.Record) (old *oncehttp.Record, err error) {
	err = s.around("begin", rec, func() error { old, err = s.LazyStore.Begin(ctx, rec); return err })
	return old, err
}

func (s *spyStore) Save(ctx context.Context, rec oncehttp.Record) error {
	return s.around("save", rec, func() error { return s.LazyStore.Save(ctx, rec) })
}

func (s *spyStore) Ack(ctx context.Context, rec oncehttp.Record) error {
	return s.around("ack", rec, func() error { return s.LazyStore.Ack(ctx, rec) })
}

func (s *spyStore) Delete(ctx context.Context, rec oncehttp.Record) error {
	return s.around("delete", rec, func() error { return s.LazyStore.Delete(ctx, rec) })
}

func (s *spyStore) Purge(ctx context.Context, now time.Time, n int) (int, bool, error) {
	if s.noPurge.Load() {
		return 0, false, oncehttp.ErrStoreFailed
	}
	return s.LazyStore.Purge(ctx, now, n)
}

func (s *spyStore) SaveSoon(rec oncehttp.Record, done func(error)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hold {
		s.held = append(s.held, func() { s.LazyStore.SaveSoon(rec, done) })
		return
	}
	s.LazyStore.SaveSoon(rec, done)
}

// release does the lazy writes that were held back.
func (s *spyStore) release() {
	s.mu.Lock()
	held := s.held
	s.held, s.hold = nil, false
	s.mu.Unlock()
	for _, f := range held {
		f()
	}
}

// forms are the two ways to send through a client.
var forms = map[string]func(*oncehttp.Client, *http.Request) (*http.Response, error){
	"Do":             func(c *oncehttp.Client, r *http.Request) (*http.Response, error) { return c.Do(r) },
	"StandardClient": func(c *oncehttp.Client, r *http.Request) (*http.Response, error) { return c.StandardClient().Do(r) },
}

// TestEveryFaultHasItsOutcome is the classification, seen from outside: after
// each fault of the server, what the caller is told and what was on the wire.
func TestEveryFaultHasItsOutcome(t *testing.T) {
	type fault = oncehttptest.Fault
	drop, lost := oncehttptest.DropRequest(), oncehttptest.DropResponse()
	refused := oncehttptest.DialError(nil)
	tests := []struct {
		name     string
		faults   []fault
		outcome  oncehttp.Outcome
		reason   oncehttp.Reason
		status   int // 0: an error
		attempts int // on the wire
		effects  int
	}{
		{"no fault", nil, oncehttp.Succeeded, 0, 200, 1, 1},
		{"request dropped", []fault{drop}, oncehttp.Succeeded, 0, 200, 2, 1},
		{"response dropped", []fault{lost}, oncehttp.Succeeded, 0, 200, 2, 1},
		{"answer truncated", []fault{oncehttptest.TruncateResponse(3)}, oncehttp.Succeeded, 0, 200, 2, 1},
		{"close-delimited answer cut short", []fault{oncehttptest.CutResponse(9)}, oncehttp.Succeeded, 0, 200, 2, 1},
		{"408", []fault{oncehttptest.Status(408)}, oncehttp.Succeeded, 0, 200, 2, 1},
		{"429", []fault{oncehttptest.Status(429)}, oncehttp.Succeeded, 0, 200, 2, 1},
		{"500, 502, 503", []fault{oncehttptest.Status(500), oncehttptest.Status(502), oncehttptest.Status(503)}, oncehttp.Succeeded, 0, 200, 4, 1},
		{"503 for ever", []fault{oncehttptest.Status(503), oncehttptest.Status(503), oncehttptest.Status(503), oncehttptest.Status(503)}, oncehttp.Unknown, oncehttp.ReasonGaveUp, 503, 4, 0},
		{"dropped for ever", []fault{drop, drop, drop, drop}, oncehttp.Unknown, oncehttp.ReasonGaveUp, 0, 4, 0},
		{"connection refused for ever", []fault{refused, refused, refused, refused}, oncehttp.NotSent, 0, 0, 0, 0},
		{"connection refused, no hooks", []fault{refused.With(oncehttptest.NoHooks()), refused, refused, refused}, oncehttp.Unknown, oncehttp.ReasonGaveUp, 0, 0, 0},
		{"refused, then dropped", []fault{refused, drop, refused, refused}, oncehttp.Unknown, oncehttp.ReasonGaveUp, 0, 1, 0},
		{"402", []fault{oncehttptest.Stored(402)}, oncehttp.Rejected, 0, 402, 1, 1},
		{"401 at first", []fault{oncehttptest.Unauthorized()}, oncehttp.Rejected, 0, 401, 1, 0},
		{"401 after a lost response", []fault{lost, oncehttptest.Unauthorized()}, oncehttp.Unknown, oncehttp.ReasonRefused, 401, 2, 1},
		{"401 after a 429", []fault{oncehttptest.Status(429), oncehttptest.Unauthorized()}, oncehttp.Rejected, 0, 401, 2, 0},
		{"422 at first", []fault{oncehttptest.Status(422)}, oncehttp.Rejected, 0, 422, 1, 0},
		{"422 after a lost response", []fault{lost, oncehttptest.Status(422)}, oncehttp.Unknown, oncehttp.ReasonAmbiguous, 422, 2, 1},
		{"409 at first", []fault{oncehttptest.Status(409)}, oncehttp.Rejected, 0, 409, 1, 0},
		{"409 after a dropped request", []fault{drop, oncehttptest.Status(409)}, oncehttp.Succeeded, 0, 200, 3, 1},
		{"stored 500", []fault{oncehttptest.Stored500()}, oncehttp.Unknown, oncehttp.ReasonStored, 500, 2, 1},
		{"307 to another origin", []fault{oncehttptest.Redirect(307, "https://other.example.com/")}, oncehttp.Rejected, 0, 307, 1, 0},
		{"307 to the same origin", []fault{oncehttptest.Redirect(307, "/v1/elsewhere")}, oncehttp.Succeeded, 0, 200, 2, 1},
		{"302", []fault{oncehttptest.Redirect(302, "/v1/charges/1")}, oncehttp.Unknown, oncehttp.ReasonAmbiguous, 302, 1, 0},
	}
	for form, via := range forms {
		for _, tt := range tests {
			t.Run(form+"/"+tt.name, func(t *testing.T) {
				inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
					b.server.Script(tt.faults...)
					ctx, op := oncehttp.Start(t.Context(), oncehttp.Op{})
					resp, err := via(b.client, b.request(ctx, "1"))
					info := op.Info()
					if info.Outcome != tt.outcome || info.Reason != tt.reason {
						t.Errorf("told %v (%v), want %v (%v)", info.Outcome, info.Reason, tt.outcome, tt.reason)
					}
					switch {
					case tt.status == 0:
						told, ok := errors.AsType[*oncehttp.OperationError](err)
						if !ok || told.Outcome != tt.outcome || told.Key != op.Key() {
							t.Errorf("error %v, want an *OperationError of key %s with outcome %v", err, op.Key(), tt.outcome)
						}
					case err != nil:
						t.Fatalf("error %v, want status %d", err, tt.status)
					default:
						if resp.StatusCode != tt.status {
							t.Errorf("status %d, want %d", resp.StatusCode, tt.status)
						}
						if _, err := io.ReadAll(resp.Body); err != nil {
							t.Errorf("body: %v", err)
						}
						resp.Body.Close()
						if from, ok := oncehttp.OperationFrom(resp); !ok || from.Outcome != tt.outcome || from.Key != op.Key() {
							t.Errorf("OperationFrom = %+v, %v", from, ok)
						}
					}
					if n := b.wire(); n != tt.attempts {
						t.Errorf("%d attempts on the wire, want %d", n, tt.attempts)
					}
					if n := len(b.server.Effects()); n != tt.effects {
						t.Errorf("%d effects, want %d", n, tt.effects)
					}
					for _, a := range b.server.Attempts() {
						if a.Key != op.Key() || string(a.Body) != "order=1" {
							t.Errorf("attempt with key %q and body %q", a.Key, a.Body)
						}
					}
				})
			})
		}
	}
}

// TestBadInputIsRefusedBeforeAnythingIsSent: each with words that say what to do.
func TestBadInputIsRefusedBeforeAnythingIsSent(t *testing.T) {
	tests := []struct {
		name   string
		change func(*http.Request) *http.Request
		is     error
		says   string
	}{
		{"relative URL", func(r *http.Request) *http.Request { r.URL = &url.URL{Path: "/v1"}; return r }, nil, "unsupported protocol scheme"},
		{"scheme", func(r *http.Request) *http.Request { r.URL.Scheme = "ftp"; return r }, nil, `scheme "ftp"`},
		{"no host", func(r *http.Request) *http.Request { r.URL.Host = ""; return r }, nil, "no Host"},
		{"nil URL", func(r *http.Request) *http.Request { r.URL = nil; return r }, nil, "nil Request.URL"},
		{"header name", func(r *http.Request) *http.Request { r.Header["a b"] = []string{"x"}; return r }, nil, "a b"},
		{"header value", func(r *http.Request) *http.Request { r.Header["A"] = []string{"x\ny"}; return r }, nil, `"A"`},
		{"long key", func(r *http.Request) *http.Request {
			r.Header.Set("Idempotency-Key", strings.Repeat("k", 256))
			return r
		}, oncehttp.ErrKeyInvalid, "256 characters, want 1 to 255"},
		{"key with a space", func(r *http.Request) *http.Request { r.Header.Set("Idempotency-Key", "a b"); return r }, oncehttp.ErrKeyInvalid, "visible ASCII"},
		{"empty key", func(r *http.Request) *http.Request { r.Header.Set("Idempotency-Key", ""); return r }, oncehttp.ErrKeyInvalid, "0 characters"},
		{"two keys", func(r *http.Request) *http.Request { r.Header["Idempotency-Key"] = []string{"a", "b"}; return r }, oncehttp.ErrKeyInvalid, "2 values"},
		{"announced body too large", func(r *http.Request) *http.Request { r.ContentLength = 2 << 20; return r }, oncehttp.ErrBodyTooLarge, "MaxBodyBytes"},
		{"body too large", func(r *http.Request) *http.Request {
			r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(make([]byte, 1<<20+1))), -1
			return r
		}, oncehttp.ErrBodyTooLarge, "MaxBodyBytes"},
		{"body shorter than announced", func(r *http.Request) *http.Request { r.ContentLength = 100; return r }, nil, "ContentLength=100"},
		{"invalid key from Start", func(r *http.Request) *http.Request {
			ctx, _ := oncehttp.Start(r.Context(), oncehttp.Op{Key: "ümlaut"})
			return r.WithContext(ctx)
		}, oncehttp.ErrKeyInvalid, "visible ASCII"},
	}
	for form, via := range forms {
		for _, tt := range tests {
			t.Run(form+"/"+tt.name, func(t *testing.T) {
				inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
					req := tt.change(b.request(t.Context(), "1"))
					body := &countingBody{Reader: req.Body}
					req.Body = body
					_, err := via(b.client, req)
					if err == nil || !strings.Contains(err.Error(), tt.says) || tt.is != nil && !errors.Is(err, tt.is) {
						t.Errorf("error %v, want %v that says %q", err, tt.is, tt.says)
					}
					if n := b.wire() + len(b.server.Unsent()); n != 0 {
						t.Errorf("%d attempts", n)
					}
					if n := body.closed.Load(); n != 1 {
						t.Errorf("body was closed %d times", n)
					}
					if counts, _ := b.store.Counts(t.Context()); counts != (oncehttp.Counts{}) {
						t.Errorf("stored: %+v", counts)
					}
				})
			})
		}
	}
}

type countingBody struct {
	io.Reader
	closed atomic.Int32
}

func (b *countingBody) Close() error { b.closed.Add(1); return nil }

func TestContradictoryOptionsAreNamed(t *testing.T) {
	ours, err := oncehttp.New(oncehttp.NewMemoryStore(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	tests := []struct {
		says string
		opts oncehttp.Options
	}{
		{"MaxAttempts", oncehttp.Options{MaxAttempts: -1}},
		{"BackoffCap", oncehttp.Options{BackoffBase: time.Second, BackoffCap: time.Millisecond}},
		{"Burst", oncehttp.Options{Burst: 5}},
		{"RateLimit", oncehttp.Options{RateLimit: -1}},
		{"MaxBodyBytes", oncehttp.Options{MaxBodyBytes: -1}},
		{"SealingKeys[0]", oncehttp.Options{SealingKeys: [][]byte{{1, 2}}}},
		{"Unlisted", oncehttp.Options{Unlisted: 7}},
		{"no Hosts", oncehttp.Options{Providers: []oncehttp.Provider{{Name: "x"}}}},
		{"too short", oncehttp.Options{Providers: []oncehttp.Provider{{Name: "x", Hosts: []string{"x"}, Window: time.Minute}}}},
		{"another oncehttp.Client", oncehttp.Options{HTTPClient: ours.StandardClient()}},
	}
	for _, tt := range tests {
		if _, err := oncehttp.New(oncehttp.NewMemoryStore(), &tt.opts); err == nil || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("New: %v, want an error that names %s", err, tt.says)
		}
	}
	if _, err := oncehttp.New(nil, nil); err == nil {
		t.Error("New took a nil store")
	}
	if _, err := ours.Resume(t.Context(), oncehttp.Handler{}); err == nil || !strings.Contains(err.Error(), "Settled") {
		t.Errorf("Resume took a handler without Settled: %v", err)
	}
}

// TestAThousandCallersOfOneKeyShareOneRequest, also when the first one leaves.
func TestAThousandCallersOfOneKeyShareOneRequest(t *testing.T) {
	for _, cancelled := range []bool{false, true} {
		t.Run(fmt.Sprintf("first leaves=%v", cancelled), func(t *testing.T) {
			inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
				b.server.Script(oncehttptest.Slow(time.Second))
				first, cancel := context.WithCancel(t.Context())
				defer cancel()
				var answers sync.Map
				var wg sync.WaitGroup
				ask := func(ctx context.Context, i int) {
					resp, err := b.client.Do(b.request(ctx, "1", "Idempotency-Key", "k"))
					if err != nil {
						answers.Store(i, err)
						return
					}
					body, _ := io.ReadAll(resp.Body)
					resp.Body.Close()
					answers.Store(i, resp.Status+string(body))
				}
				wg.Go(func() { ask(first, 0) })
				synctest.Wait()
				for i := 1; i < 1000; i++ {
					wg.Go(func() { ask(t.Context(), i) })
				}
				synctest.Wait()
				if cancelled {
					cancel()
				}
				wg.Wait()
				want, _ := answers.Load(999)
				for i := range 1000 {
					got, _ := answers.Load(i)
					if i == 0 && cancelled {
						err, _ := got.(error)
						told, ok := errors.AsType[*oncehttp.OperationError](err)
						if !ok || told.Outcome != oncehttp.Unknown || !errors.Is(err, context.Canceled) {
							t.Errorf("who left was told %v", got)
						}
						continue
					}
					if got != want || !strings.HasPrefix(fmt.Sprint(got), "200 OK{") {
						t.Fatalf("caller %d got %v, want %v", i, got, want)
					}
				}
				if b.wire() != 1 {
					t.Errorf("%d requests on the wire", b.wire())
				}
				b.wantEffects("1")
			})
		})
	}
}

func TestTheSameKeyWithAnotherBodyIsNeverSent(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		if _, err := b.charge(t.Context(), "k", "1"); err != nil {
			t.Fatal(err)
		}
		_, err := b.charge(t.Context(), "k", "2")
		if !errors.Is(err, oncehttp.ErrKeyReused) {
			t.Errorf("error %v, want ErrKeyReused", err)
		}
		if b.wire() != 1 {
			t.Errorf("%d requests on the wire", b.wire())
		}
		b.wantEffects("1")
	})
}

// TestCallersSeeTheirOwnTruth: Timeout, context and url.Error, as net/http has them.
func TestErrorsAreThoseOfNetHTTP(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Stall(-1))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start := time.Now()
		_, err := b.client.Do(b.request(ctx, "1"))
		u, ok := errors.AsType[*url.Error](err)
		if !ok || !u.Timeout() || u.Op != "Post" || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v, want a *url.Error that is a timeout", err)
		}
		if d := time.Since(start); d != time.Second {
			t.Errorf("returned after %v, want 1s", d)
		}
		b.server.Script(oncehttptest.Stall(-1))
		cause := errors.New("shop closes")
		ctx2, cancel2 := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Second, func() { cancel2(cause) })
		if _, err = b.client.Do(b.request(ctx2, "2")); !errors.Is(err, cause) {
			t.Errorf("error %v, want the context's cause", err)
		}
	})
}
