package oncehttp_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptrace"
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

// Histories of what was on the wire, or was not, that went wrong once.

// The attempts shared the caller's URL, which is the caller's again when it has
// left: the next attempt went where that pointed by then, under the same key.
func TestARequestIsItsCallersAgainWhenItReturns(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Hold(2*time.Second).With(oncehttptest.TruncateResponse(3)), oncehttptest.Slow(time.Second))
		ctx, cancel := context.WithCancel(t.Context())
		var calls sync.WaitGroup
		calls.Go(func() {
			req := b.request(ctx, "1", "Idempotency-Key", "k")
			b.client.Do(req)
			req.URL.Path = "/v1/refunds"
			req.Header.Set("Content-Type", "text/plain")
		})
		synctest.Wait()
		calls.Go(func() {
			if _, err := b.do(t.Context(), "k", "1"); err != nil {
				t.Error(err)
			}
		})
		synctest.Wait()
		cancel()
		calls.Wait()
		for _, a := range b.server.Attempts() {
			if a.Path != "/v1/charges" || a.Header.Get("Content-Type") == "text/plain" {
				t.Errorf("sent to %s as %s", a.Path, a.Header.Get("Content-Type"))
			}
		}
	})
}

// "No limit" overflowed: requests of unknown length went out empty, and answers
// came back so.
func TestTheLargestLimitsAreNoLimits(t *testing.T) {
	opts := oncehttp.Options{MaxBodyBytes: math.MaxInt64, MaxResponseBytes: math.MaxInt64}
	inBubble(t, opts, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.CutResponse(1 << 10)) // of no announced length
		req := b.request(t.Context(), "1")
		req.Body, req.ContentLength, req.GetBody = io.NopCloser(strings.NewReader("order=1")), -1, nil
		resp, err := b.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if body, err := io.ReadAll(resp.Body); !strings.Contains(string(body), `"order":"1"`) {
			t.Errorf("answered %q, %v", body, err)
		}
		b.wantEffects("1")
	})
}

// http.Client's own timeout replaces the error by a text: neither outcome nor key
// reached the caller.
func TestTheClientsTimeoutTellsTheOutcome(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.reopen(func(o *oncehttp.Options) {
			o.HTTPClient = &http.Client{Transport: b.server.Transport(), Timeout: 3 * time.Second}
		})
		b.server.Script(oncehttptest.Hold(-1))
		start := time.Now()
		info, err := b.hear(b.client.Do(b.request(t.Context(), "1")))
		u, ok := errors.AsType[*url.Error](err)
		if !ok || !u.Timeout() || info.Outcome != oncehttp.Unknown || len(info.Key) != 36 || time.Since(start) != 3*time.Second {
			t.Errorf("after %v, told %+v, %v", time.Since(start), info, err)
		}
		b.server.Script(oncehttptest.StallBody(3, time.Minute))
		resp, err := b.client.Get(host + "/v1/charges") // it covers the body, too
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if _, err := io.ReadAll(resp.Body); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("the body ended with %v", err)
		}
	})
}

// Do did not return at the end of its context while the body was being read, and
// then told of a closed pipe.
func TestABodyThatBlocksEndsWithTheContext(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		r, w := io.Pipe()
		defer w.Close()
		req := b.request(b.within(time.Second), "1")
		req.Body, req.ContentLength = r, -1
		start := time.Now()
		info, err := b.hear(b.client.Do(req))
		u, ok := errors.AsType[*url.Error](err)
		if info.Outcome != oncehttp.NotSent || !errors.Is(err, context.DeadlineExceeded) || !ok || !u.Timeout() || time.Since(start) != time.Second {
			t.Errorf("after %v, told %v, %v", time.Since(start), info.Outcome, err)
		}
	})
}

// An Options.Authorize that read the body, to sign it, left nothing to be sent.
func TestAuthorizeMayReadTheBody(t *testing.T) {
	opts := oncehttp.Options{Authorize: func(_ context.Context, _ oncehttp.Info, r *http.Request) error {
		body, err := io.ReadAll(r.Body)
		r.Header.Set("X-Signature", fmt.Sprint(len(body)))
		return err
	}}
	inBubble(t, opts, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.DropRequest())
		if _, err := b.charge(t.Context(), "k", "1"); err != nil {
			t.Fatal(err)
		}
		for _, a := range b.server.Attempts() {
			if string(a.Body) != "order=1" || a.Header.Get("X-Signature") != "7" {
				t.Errorf("sent %q with signature %q", a.Body, a.Header.Get("X-Signature"))
			}
		}
	})
}

// The context ended between the record and the first attempt: told unknown, and
// the record was kept, of what provably was never sent.
func TestWhatEndsBeforeItsFirstAttemptWasNotSent(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		ctx, cancel := context.WithCancel(t.Context())
		b.reopen(func(o *oncehttp.Options) {
			o.Trace = &oncehttp.Trace{Begun: func(oncehttp.Info) { cancel(); time.Sleep(time.Second) }}
		})
		info, err := b.do(ctx, "k", "1")
		if infos, _ := b.client.Lookup(t.Context(), "k"); info.Outcome != oncehttp.NotSent || b.wire() != 0 || len(infos) != 0 {
			t.Errorf("told %v, %v; %d on the wire, stored %+v", info.Outcome, err, b.wire(), infos)
		}
	})
}

// Answers that are not JSON to the end, for a good reason, counted as cut off,
// and were asked for again.
func TestAnAnswerWithoutJSONIsNotCutOff(t *testing.T) {
	tests := map[string]struct {
		method string
		status int
		header http.Header
	}{
		"HEAD":    {"HEAD", 200, http.Header{}},
		"204":     {"POST", 204, http.Header{}},
		"encoded": {"POST", 200, http.Header{"Content-Encoding": {"br"}}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			transport := roundTripper(func(r *http.Request) (*http.Response, error) {
				tt.header.Set("Content-Type", "application/json")
				return &http.Response{
					StatusCode: tt.status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: tt.header,
					Body: http.NoBody, ContentLength: -1, Request: r,
				}, nil
			})
			opts := oncehttp.Options{HTTPClient: &http.Client{Transport: transport}}
			inBubble(t, opts, func(t *testing.T, b *bench) {
				req, _ := http.NewRequest(tt.method, host, nil)
				req.Header.Set("Idempotency-Key", "k")
				if info, err := b.hear(b.client.Do(req)); info.Outcome != oncehttp.Succeeded || info.Attempts != 1 {
					t.Errorf("told %+v, %v", info, err)
				}
			})
		})
	}
}

// What net/http refuses before there is a connection was tried four times, and
// with a key it ended as unknown.
func TestWhatCannotBeSentIsNotRetried(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		calls := 0
		b.through(func(r *http.Request, next http.RoundTripper) (*http.Response, error) {
			calls++
			return next.RoundTrip(r)
		})
		req := b.request(t.Context(), "1", "Idempotency-Key", "k")
		req.Method = "BAD METHOD"
		if info, err := b.hear(b.client.Do(req)); info.Outcome != oncehttp.NotSent || calls > 0 {
			t.Errorf("told %v, %v after %d attempts", info.Outcome, err, calls)
		}
		plain, _ := http.NewRequest("GET", "https:///v1", nil)
		if _, err := b.client.Do(plain); err == nil || calls > 1 {
			t.Errorf("told %v after %d attempts", err, calls)
		}
	})
}

// The error of a key showed a character of it.
func TestTheErrorOfAKeyDoesNotShowIt(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		ctx, _ := oncehttp.Start(t.Context(), oncehttp.Op{Key: "sk§"})
		_, err := b.client.Do(b.request(ctx, "1"))
		invalid := errors.Unwrap(errors.Unwrap(err)) // of the *url.Error and the *OperationError, which names it
		if !errors.Is(err, oncehttp.ErrKeyInvalid) || strings.ContainsAny(fmt.Sprint(invalid), "§Â") || strings.Contains(fmt.Sprint(invalid), "sk") {
			t.Errorf("error %v", invalid)
		}
	})
}

// WithoutKey left a key in the request's own header.
func TestWithoutKeySendsNone(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		req := b.request(oncehttp.WithoutKey(t.Context()), "1", "Idempotency-Key", "own")
		resp, err := b.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if a := b.server.Attempts(); len(a) != 1 || a[0].Key != "" || req.Header.Get("Idempotency-Key") != "own" {
			t.Errorf("sent %+v; the caller's header is %v", a, req.Header)
		}
	})
}

// A panic of the transport under a request without key lost the breaker's probe:
// the host stayed shut out.
func TestAPanicReturnsTheProbe(t *testing.T) {
	opts := oncehttp.Options{MaxAttempts: 1, Breaker: &oncehttp.Breaker{MinRequests: 1, Consecutive: 1, OpenFor: time.Minute}}
	inBubble(t, opts, func(t *testing.T, b *bench) {
		panics := false
		b.through(func(r *http.Request, next http.RoundTripper) (*http.Response, error) {
			if panics {
				panics = false
				panic("transport")
			}
			return next.RoundTrip(r)
		})
		b.server.Script(oncehttptest.Status(500))
		get := func() error {
			defer func() { recover() }()
			resp, err := b.client.Get(host + "/v1/charges")
			if err == nil {
				resp.Body.Close()
			}
			return err
		}
		get()
		if err := get(); !errors.Is(err, oncehttp.ErrCircuitOpen) {
			t.Fatalf("error %v, want ErrCircuitOpen", err)
		}
		time.Sleep(time.Minute)
		panics = true
		get()
		if err := get(); err != nil {
			t.Errorf("after the panic: %v", err)
		}
	})
}

// An attempt that is given up because its window has closed says nothing of its
// host, and opened the breaker.
func TestAClosedWindowIsNoFailureOfTheHost(t *testing.T) {
	var ahead atomic.Int64
	opts := *oncehttp.Options{
		Providers: []oncehttp.Provider{{Name: "short", Hosts: []string{"api.example.com"}, Window: 10 * time.Minute}},
		Breaker:   &oncehttp.Breaker{MinRequests: 1, Consecutive: 1},
	}.WithClock(func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) })
	inBubble(t, opts, func(t *testing.T, b *bench) {
		b.through(func(r *http.Request, next http.RoundTripper) (*http.Response, error) {
			if r.Header.Get("Idempotency-Key") == "k" {
				ahead.Store(int64(time.Hour)) // while there is no connection yet
			}
			return next.RoundTrip(r)
		})
		if _, err := b.charge(t.Context(), "k", "1"); !errors.Is(err, oncehttp.ErrWindowClosed) || b.wire() != 0 {
			t.Errorf("error %v, %d on the wire", err, b.wire())
		}
		if _, err := b.charge(t.Context(), "other", "2"); err != nil {
			t.Error(err)
		}
	})
}

// A request that waited for the time the server had asked for held the breaker's
// probe meanwhile, and then went by an admission that was a minute old.
func TestWhoWaitsForTheServerHoldsNoPermit(t *testing.T) {
	opts := oncehttp.Options{MaxAttempts: 1, Breaker: &oncehttp.Breaker{MinRequests: 3, Consecutive: 3}}
	for _, when := range []string{"half-open", "opens meanwhile"} {
		t.Run(when, func(t *testing.T) {
			inBubble(t, opts, func(t *testing.T, b *bench) {
				trip := func() {
					for i := range 3 {
						order := fmt.Sprint("trip-", i)
						b.server.ScriptFor(oncehttptest.ByBody(order), oncehttptest.Status(500))
						b.do(t.Context(), order, order)
					}
				}
				b.server.Script(oncehttptest.Status(503, "Retry-After", "59"))
				b.do(t.Context(), "k", "1")
				b.restart() // the host is not paused any more; the operation is
				if when == "half-open" {
					trip()
					time.Sleep(31 * time.Second)
				}
				var waits sync.WaitGroup
				var err error
				waits.Go(func() { _, err = b.do(t.Context(), "k", "1") })
				synctest.Wait()
				if when == "half-open" {
					if _, err := b.do(t.Context(), "probe", "2"); err != nil {
						t.Errorf("the probe: %v", err)
					}
				} else {
					time.Sleep(50 * time.Second)
					trip()
				}
				before := b.wire()
				waits.Wait()
				if open := when != "half-open"; errors.Is(err, oncehttp.ErrCircuitOpen) != open || !open && err != nil || open && b.wire() != before {
					t.Errorf("error %v, %d more on the wire", err, b.wire()-before)
				}
			})
		})
	}
}

// Without the CheckRedirect of ours, a 307 took the body to another origin, and a
// 302 became a GET that succeeded.
func TestUnderAnotherClientNoRedirectIsFollowed(t *testing.T) {
	for status, want := range map[int]oncehttp.Outcome{307: oncehttp.Rejected, 302: oncehttp.Unknown} {
		inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
			b.server.Script(oncehttptest.Redirect(status, "https://other.example.com/"))
			theirs := &http.Client{Transport: b.client.StandardClient().Transport}
			info, err := b.hear(theirs.Do(b.request(t.Context(), "1")))
			if !errors.Is(err, oncehttp.ErrNotFollowed) || info.Outcome != want || b.wire() != 1 {
				t.Errorf("%d: told %v, %v; %d on the wire", status, info.Outcome, err, b.wire())
			}
		})
	}
}

// The GET after a 303 failed, and with it the operation, as far as its caller
// could tell.
func TestTheRequestAfterASeeOtherTellsOfTheOperation(t *testing.T) {
	inBubble(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Redirect(303, "/result"), oncehttptest.DropRequest())
		info, err := b.do(t.Context(), "k", "1")
		if err == nil || info.Outcome != oncehttp.Succeeded || info.Key != "k" || b.wire() != 2 {
			t.Errorf("told %+v, %v; %d on the wire", info, err, b.wire())
		}
	})
}

// That GET took the key to another host if its header was not the usual one.
func TestTheRequestAfterASeeOtherTakesNoKeyAlong(t *testing.T) {
	opts := oncehttp.Options{Providers: []oncehttp.Provider{{Name: "p", Hosts: []string{"api.example.com"}, Header: "X-Request-Key"}}}
	inBubble(t, opts, func(t *testing.T, b *bench) {
		b.server.KeyHeader = "X-Request-Key"
		b.server.Script(oncehttptest.Redirect(303, "https://other.example.com/result"))
		if _, err := b.hear(b.client.Do(b.request(t.Context(), "1", "X-Request-Key", "k"))); err != nil {
			t.Error(err)
		}
		a := b.server.Attempts()
		if len(a) != 2 || a[0].Key != "k" || a[1].Host != "other.example.com" || a[1].Key != "" {
			t.Errorf("sent %+v", a)
		}
	})
}

// After a followed 307, a relative Location was resolved against the first URL.
func TestASeeOtherIsRelativeToWhereRedirectsLed(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Redirect(307, "/v2/charges/"), oncehttptest.Redirect(303, "result"))
		b.do(t.Context(), "k", "1")
		var paths []string
		for _, a := range b.server.Attempts() {
			paths = append(paths, a.Method+" "+a.Path)
		}
		if got := fmt.Sprint(paths); got != "[POST /v1/charges POST /v2/charges/ GET /v2/charges/result]" {
			t.Errorf("sent %s", got)
		}
	})
}

// A request made with the context of an operation's response was taken for the
// operation's own: its redirect was not followed.
func TestARequestWithTheContextOfAResponseIsItsOwn(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		resp, err := b.client.Do(b.request(t.Context(), "1"))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		b.server.Script(oncehttptest.Redirect(302, "/v1/charges"))
		next, _ := http.NewRequestWithContext(resp.Request.Context(), "GET", host+"/page/2", nil)
		resp, err = b.client.Do(next)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if _, keyed := oncehttp.OperationFrom(resp); keyed || resp.StatusCode != 200 {
			t.Errorf("status %d, keyed: %v", resp.StatusCode, keyed)
		}
	})
}

// *http.DefaultClient = *c.StandardClient(), for a client made over it, asked
// itself for its redirects until the stack ended.
func TestTheClientUnderItMayBeReplacedByIt(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		shared := &http.Client{Transport: b.server.Transport()}
		b.reopen(func(o *oncehttp.Options) { o.HTTPClient = shared })
		*shared = *b.client.StandardClient()
		b.server.Script(oncehttptest.Redirect(302, "/v1/charges"))
		resp, err := shared.Get(host + "/old")
		if err != nil || resp.StatusCode != 200 {
			t.Errorf("%v, %v", resp, err)
		}
	})
}

// A stream that nobody takes any more was not closed.
func TestAStreamThatIsGivenUpIsClosed(t *testing.T) {
	closed := &countingBody{Reader: strings.NewReader("data: 1\n\n")}
	ctx, cancel := context.WithCancel(context.Background())
	transport := roundTripper(func(r *http.Request) (*http.Response, error) {
		cancel()
		<-r.Context().Done()
		return &http.Response{StatusCode: 302, Header: http.Header{"Content-Type": {"text/event-stream"}}, Body: closed, Request: r}, nil
	})
	inBubble(t, oncehttp.Options{HTTPClient: &http.Client{Transport: transport}}, func(t *testing.T, b *bench) {
		if _, err := b.do(ctx, "k", "1"); !errors.Is(err, context.Canceled) || closed.closed.Load() != 1 {
			t.Errorf("error %v, closed %d times", err, closed.closed.Load())
		}
	})
}

// The key's header has a name that says credential: it was withheld from the
// store, and then taken for the credentials that a resumed operation lacked.
func TestTheKeysHeaderIsNoCredential(t *testing.T) {
	opts := oncehttp.Options{Providers: []oncehttp.Provider{{Name: "p", Hosts: []string{"api.example.com"}, Header: "X-Request-Token"}}}
	inBubble(t, opts, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Hold(-1))
		b.leavePending(t.Context(), "k", "1", "Authorization", "Bearer secret")
		if orders, sum := b.resume(); len(orders) > 0 || b.wire() != 1 || len(sum.Ended) != 1 {
			t.Errorf("handed over %v, %d on the wire, %+v", orders, b.wire(), sum)
		}
		// Nor is it part of the scope: in the header, it finds what Start began.
		info, err := b.hear(b.client.Do(b.request(t.Context(), "1", "X-Request-Token", "k", "Authorization", "Bearer secret")))
		if err != nil || info.Metadata["order"] != "1" || b.wire() != 2 {
			t.Errorf("told %+v, %v, %d on the wire", info, err, b.wire())
		}
	})
}

// Two requests that differ in a multipart boundary are one operation, and were
// sent as two bodies under one key.
func TestOneKeyHasOneBodyToTheByte(t *testing.T) {
	inBubble(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.DropRequest(), oncehttptest.DropRequest())
		for _, boundary := range []string{"aaaa", "bbbbbb"} {
			req := b.request(t.Context(), "1", "Idempotency-Key", "k", "Content-Type", "multipart/form-data; boundary="+boundary)
			body := "--" + boundary + "\r\n\r\nx\r\n--" + boundary + "--\r\n"
			req.Body, req.ContentLength = io.NopCloser(strings.NewReader(body)), int64(len(body))
			b.client.Do(req)
		}
		a := b.server.Attempts()
		if len(a) != 2 || string(a[0].Body) != string(a[1].Body) || a[0].Header.Get("Content-Type") != a[1].Header.Get("Content-Type") {
			t.Errorf("sent %+v", a)
		}
	})
}

// An attempt that hangs in the body of its answer times out as an attempt, not as
// a cancellation of the caller's.
func TestAnAttemptTimeoutInTheBodyIsATimeout(t *testing.T) {
	inBubble(t, oncehttp.Options{MaxAttempts: 1, AttemptTimeout: time.Second}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.StallBody(3, time.Minute))
		info, err := b.do(t.Context(), "k", "1")
		timeout, ok := errors.AsType[net.Error](err)
		if info.Outcome != oncehttp.Unknown || errors.Is(err, context.Canceled) || !ok || !timeout.Timeout() {
			t.Errorf("told %v, %v", info.Outcome, err)
		}
	})
}

// A caller's httptrace goes on seeing what happens, beside ours.
func TestTheCallersOwnTraceIsNotLost(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		var conns atomic.Int32
		ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { conns.Add(1) }})
		b.server.Script(oncehttptest.DropRequest())
		if _, err := b.do(ctx, "k", "1"); err != nil || conns.Load() != 2 {
			t.Errorf("%d connections seen, %v", conns.Load(), err)
		}
	})
}
