package oncehttptest_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptrace"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp/oncehttptest"
)

// inMemory runs a test in a bubble, which must end without Close.
func inMemory(t *testing.T, test func(t *testing.T, n network)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := oncehttptest.New(numbered())
		test(t, network{s, &http.Client{Transport: s.Transport(), CheckRedirect: noRedirect}, "https://api.example", true})
	})
}

// traced returns a context whose hooks write into a log, and what is in it so far:
// net/http may still call hooks when it has returned.
func traced(ctx context.Context) (context.Context, func() string) {
	var mu sync.Mutex
	var log []string
	add := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		log = append(log, fmt.Sprintf(format, args...))
	}
	failed := func(err error) string {
		if err != nil {
			return " failed"
		}
		return ""
	}
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
			GetConn:              func(hostPort string) { add("GetConn") },
			ConnectStart:         func(network, addr string) { add("ConnectStart") },
			ConnectDone:          func(network, addr string, err error) { add("ConnectDone%s", failed(err)) },
			GotConn:              func(i httptrace.GotConnInfo) { add("GotConn reused=%v", i.Reused) },
			WroteHeaders:         func() { add("WroteHeaders") },
			WroteRequest:         func(i httptrace.WroteRequestInfo) { add("WroteRequest%s", failed(i.Err)) },
			GotFirstResponseByte: func() { add("GotFirstResponseByte") },
			PutIdleConn:          func(error) { add("PutIdleConn") },
		}), func() string {
			mu.Lock()
			defer mu.Unlock()
			return strings.Join(log, ", ")
		}
}

func TestHooksFireAsThoseOfHTTPTransport(t *testing.T) {
	answered := "WroteHeaders, WroteRequest, GotFirstResponseByte, PutIdleConn"
	for _, c := range []struct {
		name   string
		faults []oncehttptest.Fault // the last one is looked at
		want   string
	}{
		{"first", []oncehttptest.Fault{{}}, "GetConn, ConnectStart, ConnectDone, GotConn reused=false, " + answered},
		{"second", []oncehttptest.Fault{{}, {}}, "GetConn, GotConn reused=true, " + answered},
		{"after a reset", []oncehttptest.Fault{oncehttptest.DropResponse(), {}}, "GetConn, ConnectStart, ConnectDone, GotConn reused=false, " + answered},
		{"refused", []oncehttptest.Fault{oncehttptest.DialError(nil)}, "GetConn, ConnectStart, ConnectDone failed"},
		{"slow dial", []oncehttptest.Fault{oncehttptest.SlowDial(time.Second)}, "GetConn, ConnectStart, ConnectDone, GotConn reused=false, " + answered},
		{"reset", []oncehttptest.Fault{oncehttptest.DropRequest()}, "GetConn, ConnectStart, ConnectDone, GotConn reused=false, WroteHeaders, WroteRequest"},
		{"reset in the body", []oncehttptest.Fault{oncehttptest.DropRequestAfter(0)}, "GetConn, ConnectStart, ConnectDone, GotConn reused=false, WroteHeaders, WroteRequest failed"},
		{"reset in the header", []oncehttptest.Fault{oncehttptest.DropRequestAfter(-1)}, "GetConn, ConnectStart, ConnectDone, GotConn reused=false, WroteRequest failed"},
		{"cut", []oncehttptest.Fault{oncehttptest.CutResponse(99)}, "GetConn, ConnectStart, ConnectDone, GotConn reused=false, WroteHeaders, WroteRequest, GotFirstResponseByte"},
		{"hidden", []oncehttptest.Fault{oncehttptest.NoHooks().With(oncehttptest.DropResponse())}, ""},
	} {
		for _, early := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/early=%v", c.name, early), func(t *testing.T) {
				inMemory(t, func(t *testing.T, n network) {
					if early {
						n.ScriptFor(oncehttptest.ByBody("a"), c.faults...)
					} else {
						n.Script(c.faults...)
					}
					var log func() string
					for range c.faults {
						var ctx context.Context
						ctx, log = traced(t.Context())
						n.send(ctx, "POST", "/", "k", "a")
					}
					if got := log(); got != c.want {
						t.Fatalf("got  %s\nwant %s", got, c.want)
					}
				})
			})
		}
	}
	// The real one, over a socket, whose WroteRequest comes when it likes.
	less := func(hooks string) string { return strings.ReplaceAll(hooks, ", WroteRequest", "") }
	onBoth(t, numbered, func(t *testing.T, n network) {
		n.Script(oncehttptest.Fault{}, oncehttptest.Fault{}, oncehttptest.CutResponse(99), oncehttptest.DropRequest())
		for i, want := range []string{
			"GetConn, ConnectStart, ConnectDone, GotConn reused=false, " + answered,
			"GetConn, GotConn reused=true, " + answered,
			"GetConn, GotConn reused=true, WroteHeaders, WroteRequest, GotFirstResponseByte",
			"GetConn, ConnectStart, ConnectDone, GotConn reused=false, WroteHeaders, WroteRequest",
		} {
			ctx, log := traced(t.Context())
			n.send(ctx, "POST", "/", "k", "a")
			if got := log(); n.memory && got != want || less(got) != less(want) {
				t.Fatalf("%d: got  %s\nwant %s", i, got, want)
			}
		}
	})
	inMemory(t, func(t *testing.T, n network) {
		n.Server.NoHooks = true
		ctx, log := traced(t.Context())
		n.send(ctx, "POST", "/", "k", "a").want(t, 200)
		if log() != "" {
			t.Fatal(log())
		}
	})
}

func TestDialFailureIsNotOnTheWire(t *testing.T) {
	inMemory(t, func(t *testing.T, n network) {
		custom := errors.New("no such host")
		n.Script(oncehttptest.DialError(nil), oncehttptest.DialError(custom), oncehttptest.SlowDial(time.Hour))
		for _, want := range []error{syscall.ECONNREFUSED, custom, context.DeadlineExceeded} {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			if r := n.send(ctx, "POST", "/", "k", "a"); !errors.Is(r.err, want) {
				t.Fatalf("got %v, want %v", r.err, want)
			}
			cancel()
		}
		n.wantActions(t)
		n.wantEffects(t, 0)
		if got := n.Unsent(); len(got) != 3 || got[2].Action != oncehttptest.NotDialed || got[2].Key != "k" {
			t.Fatalf("%+v", got)
		}
	})
}

// body counts and can fail.
type body struct {
	io.Reader
	closed atomic.Int32
}

func (b *body) Close() error { b.closed.Add(1); return nil }

func TestRequestBodyIsClosedOnceWhateverHappens(t *testing.T) {
	inMemory(t, func(t *testing.T, n network) {
		canceled, cancel := context.WithCancel(t.Context())
		cancel()
		cause := errors.New("source broke")
		for _, early := range []bool{false, true} {
			if early {
				n.FaultFunc(func(oncehttptest.Attempt) oncehttptest.Fault { return oncehttptest.Fault{} })
			}
			for _, c := range []struct {
				name  string
				ctx   context.Context
				url   string
				r     io.Reader
				fault oncehttptest.Fault
			}{
				{"answered", t.Context(), "http://h", strings.NewReader("a"), oncehttptest.Fault{}},
				{"refused", t.Context(), "http://h", strings.NewReader("a"), oncehttptest.DialError(nil)},
				{"dropped", t.Context(), "http://h", strings.NewReader("a"), oncehttptest.DropRequestAfter(0)},
				{"canceled", canceled, "http://h", strings.NewReader("a"), oncehttptest.Fault{}},
				{"scheme", t.Context(), "ftp://h", strings.NewReader("a"), oncehttptest.Fault{}},
				{"broken", t.Context(), "http://h", readerFunc(func([]byte) (int, error) { return 0, cause }), oncehttptest.Fault{}},
			} {
				n.Reset()
				n.Script(c.fault)
				b := &body{Reader: c.r}
				req, err := http.NewRequestWithContext(c.ctx, "POST", c.url, b)
				if err != nil {
					t.Fatal(err)
				}
				resp, err := n.Transport().RoundTrip(req)
				if (err == nil) != (c.name == "answered") {
					t.Fatalf("%s: %v", c.name, err)
				}
				if err == nil {
					resp.Body.Close()
				}
				n.Wait()
				if got := b.closed.Load(); got != 1 {
					t.Errorf("%s, early=%v: closed %d times", c.name, early, got)
				}
			}
		}
	})
}

func TestContextEndsEveryWait(t *testing.T) {
	inMemory(t, func(t *testing.T, n network) {
		cause := errors.New("enough")
		try := func(r io.Reader) error {
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			time.AfterFunc(time.Second, func() { cancel(cause) })
			req, err := http.NewRequestWithContext(ctx, "POST", "http://h", r)
			if err != nil {
				t.Fatal(err)
			}
			start := time.Now()
			resp, err := n.Transport().RoundTrip(req)
			if err == nil {
				_, err = io.ReadAll(resp.Body)
				resp.Body.Close()
			}
			if d := time.Since(start); d != time.Second {
				t.Errorf("took %v", d)
			}
			return err
		}
		for _, f := range []oncehttptest.Fault{oncehttptest.Stall(-1), oncehttptest.Hold(time.Hour), oncehttptest.StallBody(0, -1), oncehttptest.SlowDial(-1)} {
			n.Script(f)
			if err := try(strings.NewReader("a")); !errors.Is(err, cause) {
				t.Errorf("%v: %v", f, err)
			}
		}
		pr, _ := io.Pipe() // nobody writes
		if err := try(pr); !errors.Is(err, cause) {
			t.Errorf("pipe: %v", err)
		}
	})
}

func TestConnectionClosedInGotConnSendsNothing(t *testing.T) {
	inMemory(t, func(t *testing.T, n network) {
		for _, stop := range []func(i httptrace.GotConnInfo){
			func(i httptrace.GotConnInfo) { i.Conn.Close() },
			func(i httptrace.GotConnInfo) { i.Conn.SetDeadline(time.Now()) },
		} {
			ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{GotConn: stop})
			if r := n.send(ctx, "POST", "/", "k", "a"); r.err == nil {
				t.Fatalf("%+v", r)
			}
		}
		n.wantActions(t)
		if got := len(n.Unsent()); got != 2 {
			t.Fatalf("%d unsent", got)
		}
	})
}

func TestBodyIsReadAfterGotConn(t *testing.T) {
	inMemory(t, func(t *testing.T, n network) {
		got := false
		stale := errors.New("window closed")
		ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { got = true }})
		req, err := http.NewRequestWithContext(ctx, "POST", "http://h", readerFunc(func([]byte) (int, error) {
			if got {
				return 0, stale
			}
			return 0, io.EOF
		}))
		if err != nil {
			t.Fatal(err)
		}
		n.Script(oncehttptest.SlowDial(time.Hour))
		if _, err := n.client.Do(req); !errors.Is(err, stale) {
			t.Fatal(err)
		}
		n.wantActions(t)
	})
}

func TestDeadKeepAliveIsSentAgainByTheTransportItself(t *testing.T) {
	onBoth(t, numbered, func(t *testing.T, n network) {
		for _, getBody := range []bool{true, false} {
			n.Reset()
			n.post(t, "warm", "up").want(t, 200)
			n.Script(oncehttptest.DeadKeepAlive())
			var conns atomic.Int32
			ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { conns.Add(1) }})
			req, err := http.NewRequestWithContext(ctx, "POST", n.base, strings.NewReader("a"))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Idempotency-Key", "k")
			if !getBody {
				req.GetBody = nil
			}
			resp, err := n.client.Do(req)
			if (err == nil) != getBody {
				t.Fatal(err)
			}
			if err != nil {
				continue
			}
			resp.Body.Close()
			n.wantActions(t, oncehttptest.Executed, oncehttptest.Dropped, oncehttptest.Executed)
			if conns.Load() != 2 {
				t.Fatalf("GotConn fired %d times", conns.Load())
			}
		}
	})
}

func TestScriptsComeBeforeFunctionsAndMatchesFirst(t *testing.T) {
	onBoth(t, numbered, func(t *testing.T, n network) {
		n.FaultFunc(func(a oncehttptest.Attempt) oncehttptest.Fault {
			if a.N == 3 {
				return oncehttptest.Status(503)
			}
			return oncehttptest.Fault{}
		})
		n.ScriptFor(oncehttptest.ByKey("k2"), oncehttptest.Status(402))
		n.Script(oncehttptest.Status(404), oncehttptest.Fault{})
		for i, want := range []struct {
			key  string
			code int
		}{{"k1", 404}, {"k2", 402}, {"k1", 200}, {"k1", 503}, {"k1", 200}, {"k2", 200}} {
			if r := n.post(t, want.key, want.key); r.code != want.code {
				t.Errorf("%d: got %d, want %d", i, r.code, want.code)
			}
		}
	})
}

func TestRandomFaultsRepeatWhateverTheInterleaving(t *testing.T) {
	run := func(order []int, seed uint64) (faults map[string]string) {
		faults = map[string]string{}
		inMemory(t, func(t *testing.T, n network) {
			n.Random(seed, map[oncehttptest.Fault]float64{
				oncehttptest.DropRequest(): 0.2, oncehttptest.DropResponse(): 0.2, oncehttptest.Status(503): 0.2, oncehttptest.DialError(nil): 0.2,
			})
			var wg sync.WaitGroup
			for _, i := range order {
				wg.Go(func() {
					for range 5 {
						n.post(t, fmt.Sprintf("%p", t)+fmt.Sprint(i), fmt.Sprint("order ", i)) // keys differ from run to run
					}
				})
			}
			wg.Wait()
			kinds := map[string]bool{}
			for _, a := range slices.Concat(n.Attempts(), n.Unsent()) {
				faults[fmt.Sprint(string(a.Body), a.N)] = a.Fault.String()
				kinds[a.Fault.String()] = true
			}
			if len(kinds) != 5 {
				t.Errorf("only %v", kinds)
			}
			for body, effects := range n.EffectsByBody() {
				if effects != 1 {
					t.Errorf("%s: %d effects", body, effects)
				}
			}
		})
		return faults
	}
	orders := rand.New(rand.NewPCG(1, 2)).Perm(20)
	first := run(orders, 7)
	slices.Reverse(orders)
	if again := run(orders, 7); fmt.Sprint(first) != fmt.Sprint(again) {
		t.Errorf("got %v\nthen %v", first, again)
	}
	if other := run(orders, 8); fmt.Sprint(first) == fmt.Sprint(other) {
		t.Error("another seed, the same faults")
	}
}

func TestHeadAndEmptyAnswersHaveNoBody(t *testing.T) {
	h := func() http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/empty" {
				w.WriteHeader(http.StatusNoContent)
				return
			}
			io.WriteString(w, "text")
		})
	}
	onBoth(t, h, func(t *testing.T, n network) {
		r := n.send(t.Context(), "HEAD", "/", "", "")
		if r.code != 200 || r.body != "" || r.header.Get("Content-Length") != "4" || r.err != nil {
			t.Fatalf("%+v", r)
		}
		r = n.send(t.Context(), "POST", "/empty", "k", "")
		if r.code != 204 || r.body != "" || r.err != nil || r.header.Get("Date") == "" {
			t.Fatalf("%+v", r)
		}
	})
}

func TestClientTimeoutIsATimeout(t *testing.T) {
	onBoth(t, numbered, func(t *testing.T, n network) {
		n.Script(oncehttptest.Hold(-1))
		n.client.Timeout = 200 * time.Millisecond
		r := n.post(t, "k", "a")
		var timeout interface{ Timeout() bool }
		if !errors.As(r.err, &timeout) || !timeout.Timeout() {
			t.Fatalf("%+v", r)
		}
		n.wantEffects(t, 1)
	})
}
