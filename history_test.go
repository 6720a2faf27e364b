package oncehttp_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// The histories that would charge twice, lose an operation, or tell a caller
// something false, each found by attacking the rules on paper.

// The breaker opens after Begin, through others: the operation ends as unknown,
// with its last response, and its permit is returned.
func TestBreakerOpensAfterBegin(t *testing.T) {
	opts := oncehttp.Options{Breaker: &oncehttp.Breaker{MinRequests: 3, Consecutive: 3}, BackoffBase: 10 * time.Second, BackoffCap: 10 * time.Second}
	opts = *opts.WithRand(func(n int64) int64 { return n - 1 }) // the longest backoff
	inBubble(t, opts, func(t *testing.T, b *bench) {
		b.server.ScriptFor(oncehttptest.ByBody("order=1"), oncehttptest.Status(503))
		for _, o := range []string{"2", "3", "4"} {
			b.server.ScriptFor(oncehttptest.ByBody("order="+o), oncehttptest.Status(500), oncehttptest.Status(500))
		}
		told := make(chan oncehttp.Info)
		go func() {
			info, err := b.charge(t.Context(), "", "1")
			if !errors.Is(err, oncehttp.ErrCircuitOpen) && err != nil {
				t.Errorf("error %v", err)
			}
			told <- info
		}()
		synctest.Wait() // in its backoff now
		for _, o := range []string{"2", "3"} {
			go b.charge(t.Context(), "", o)
		}
		synctest.Wait()
		if info := <-told; info.Outcome != oncehttp.Unknown {
			t.Errorf("told %v, want unknown", info.Outcome)
		}
		before := b.wire()
		if info, err := b.charge(t.Context(), "", "5"); !errors.Is(err, oncehttp.ErrCircuitOpen) || info.Outcome != oncehttp.NotSent {
			t.Errorf("with the breaker open: %v, %v", info.Outcome, err)
		}
		if b.wire() != before {
			t.Error("sent with the breaker open")
		}
		time.Sleep(time.Minute) // half-open: the probe must not be wedged
		if info, err := b.charge(t.Context(), "", "6"); err != nil {
			t.Errorf("the probe: %v, %v", info.Outcome, err)
		}
	})
}

// The context ends while Begin commits: not sent, and nothing is left.
func TestContextEndsInTheCommit(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		ctx, cancel := context.WithCancel(t.Context())
		b.store.after = func(write string, _ oncehttp.Record) error {
			if write == "begin" {
				cancel()
				time.Sleep(time.Millisecond)
			}
			return nil
		}
		info, err := b.charge(ctx, "k", "1")
		if info.Outcome != oncehttp.NotSent || !errors.Is(err, context.Canceled) {
			t.Errorf("told %v, %v, want not sent", info.Outcome, err)
		}
		if infos, err := b.client.Lookup(t.Context(), "k"); len(infos) > 0 || err != nil {
			t.Errorf("left behind: %v, %v", infos, err)
		}
		if orders, _ := b.resume(); len(orders) > 0 || b.wire() > 0 {
			t.Errorf("sent after all: %v, %d on the wire", orders, b.wire())
		}
	})
}

// A claimed operation gets its former state back if the context ends while the
// claim commits.
func TestContextEndsInTheCommitOfAClaim(t *testing.T) {
	inBubble(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.DropResponse())
		first, _ := b.charge(t.Context(), "k", "1")
		ctx, cancel := context.WithCancel(t.Context())
		b.store.after = func(write string, rec oncehttp.Record) error {
			if write == "save" && rec.Outcome == oncehttp.Undecided {
				cancel()
				time.Sleep(time.Millisecond)
			}
			return nil
		}
		time.Sleep(time.Hour)
		if _, err := b.charge(ctx, "k", "1"); !errors.Is(err, context.Canceled) {
			t.Errorf("error %v", err)
		}
		b.store.after = nil
		infos, err := b.client.Lookup(t.Context(), "k")
		if err != nil || len(infos) != 1 || infos[0].Outcome != oncehttp.Unknown || !infos[0].FirstSent.Equal(first.FirstSent) {
			t.Errorf("now %+v, %v; was %+v", infos, err, first)
		}
		if b.wire() != 1 {
			t.Errorf("%d on the wire", b.wire())
		}
	})
}

// Told 503, the caller pays anew under a fresh key; a restart must not send the
// first operation as well.
func TestWhatWasToldAsFailedIsNotResumed(t *testing.T) {
	inBubble(t, oncehttp.Options{MaxAttempts: 2}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Status(503), oncehttptest.Status(503))
		resp, err := b.client.Do(b.request(t.Context(), "1"))
		if err != nil || resp.StatusCode != 503 {
			t.Fatalf("%v, %v, want the 503", resp, err)
		}
		if resp, err = b.client.Do(b.request(t.Context(), "1")); err != nil || resp.StatusCode != 200 {
			t.Fatalf("%v, %v", resp, err)
		}
		b.restart()
		if orders, _ := b.resume(); len(orders) > 0 {
			t.Errorf("resumed %v", orders)
		}
		b.wantEffects("1")
	})
}

// leavePending begins an operation whose server never answers, and restarts.
func (b *bench) leavePending(ctx context.Context, key, order string, header ...string) {
	b.t.Helper()
	ctx, op := oncehttp.Start(ctx, oncehttp.Op{Key: key, Metadata: map[string]string{"order": order}})
	stalled := make(chan struct{})
	go func() {
		defer close(stalled)
		_, err := b.client.Do(b.request(ctx, order, header...))
		if !errors.Is(err, oncehttp.ErrClosed) || op.Info().Outcome != oncehttp.Undecided {
			b.t.Errorf("interrupted: %v, outcome %v", err, op.Info().Outcome)
		}
	}()
	synctest.Wait()
	b.restart()
	<-stalled
}

// A deploy with a wrong API key must not reject what may have been charged.
func TestWrongAPIKeyBeforeResumeRejectsNothing(t *testing.T) {
	token := "Bearer right"
	opts := oncehttp.Options{Authorize: func(_ context.Context, _ oncehttp.Info, r *http.Request) error {
		r.Header.Set("Authorization", token)
		return nil
	}}
	inBubble(t, opts, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Hold(-1), oncehttptest.Unauthorized())
		b.server.Account = func(http.Header) string { return "" }
		b.leavePending(t.Context(), "k", "1", "Authorization", token)
		token = "Bearer wrong"
		orders, sum := b.resume()
		if len(orders) > 0 || sum.Pending != 1 || len(sum.Ended) != 1 {
			t.Errorf("handed over %v, %+v; want it pending", orders, sum)
		}
		token = "Bearer right"
		time.Sleep(time.Minute)
		if orders, sum = b.resume(); len(orders) != 1 {
			t.Errorf("handed over %v, %+v", orders, sum)
		}
		b.wantEffects("1")
	})
}

// Resumed without the credentials that it had, an operation is not sent.
func TestNothingIsResumedWithoutItsCredentials(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Hold(-1))
		b.leavePending(t.Context(), "k", "1", "Authorization", "Bearer secret")
		orders, sum := b.resume()
		if len(orders) > 0 || b.wire() != 1 || sum.Pending != 1 {
			t.Errorf("handed over %v, %d on the wire, %+v", orders, b.wire(), sum)
		}
	})
}

// The process dies between the answer and its recording: the server replays.
func TestDiedBetweenAnswerAndRecording(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.store.before = func(write string, rec oncehttp.Record) error {
			if write == "save" {
				return oncehttp.ErrStoreFailed
			}
			return nil
		}
		info, err := b.charge(t.Context(), "k", "1")
		if err != nil || info.Outcome != oncehttp.Succeeded || !info.NotRecorded {
			t.Errorf("told %+v, %v; want success, not recorded", info, err)
		}
		b.store.before = nil
		b.restart()
		if orders, sum := b.resume(); len(orders) != 1 {
			t.Errorf("handed over %v, %+v", orders, sum)
		}
		if b.wire() != 2 {
			t.Errorf("%d on the wire", b.wire())
		}
		b.wantEffects("1")
	})
}

// A rejection that could not be recorded is never told as one: a restart sends
// the operation again, and it may succeed.
func TestARejectionThatIsNotRecordedIsNotToldAsOne(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Status(422))
		b.store.before = func(write string, rec oncehttp.Record) error {
			if write == "save" {
				return oncehttp.ErrStoreFailed
			}
			return nil
		}
		info, err := b.charge(t.Context(), "k", "1")
		if err != nil || info.Outcome != oncehttp.Unknown || !info.NotRecorded || info.Status != 422 {
			t.Errorf("told %+v, %v", info, err)
		}
	})
}

// Two tenants choose the same key: neither gets the other's answer.
func TestTwoTenantsOneKey(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		if _, err := b.charge(t.Context(), "k", "1", "Authorization", "Bearer a"); err != nil {
			t.Fatal(err)
		}
		_, err := b.charge(t.Context(), "k", "1", "Authorization", "Bearer b")
		if !errors.Is(err, oncehttp.ErrScope) || b.wire() != 1 {
			t.Errorf("error %v, %d on the wire; want ErrScope", err, b.wire())
		}
		for _, scope := range []string{"a", "b"} { // stated, they are two operations
			ctx, op := oncehttp.Start(t.Context(), oncehttp.Op{Key: "k2", Scope: scope})
			resp, err := b.client.Do(b.request(ctx, scope, "Authorization", "Bearer "+scope))
			if err != nil || op.Info().Replayed {
				t.Errorf("scope %s: %v, %+v", scope, err, op.Info())
				continue
			}
			body, _ := io.ReadAll(resp.Body)
			if !bytes.Contains(body, []byte(`"order":"`+scope+`"`)) {
				t.Errorf("scope %s got %s", scope, body)
			}
		}
	})
}

// A success that is told but not yet durable is asked for again.
func TestSuccessNotYetFlushedIsAskedForAgain(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.store.hold = true
		for range 2 {
			resp, err := b.client.Do(b.request(t.Context(), "1", "Idempotency-Key", "k"))
			if err != nil || resp.StatusCode != 200 {
				t.Fatalf("%v, %v", resp, err)
			}
		}
		if b.wire() != 1 {
			t.Errorf("%d on the wire", b.wire())
		}
		b.store.release()
		time.Sleep(time.Second)
		resp, err := b.client.Do(b.request(t.Context(), "1", "Idempotency-Key", "k"))
		if err != nil {
			t.Fatal(err)
		}
		if info, _ := oncehttp.OperationFrom(resp); !info.Replayed || b.wire() != 1 {
			t.Errorf("%+v, %d on the wire", info, b.wire())
		}
		b.wantEffects("1")
	})
}

// A 307 to another origin takes neither key nor body nor bearer with it.
func TestRedirectToAnotherOriginLeaksNothing(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Redirect(307, "https://evil.example.com/v1/charges"))
		resp, err := b.client.Do(b.request(t.Context(), "1", "Authorization", "Bearer secret"))
		if err != nil || resp.StatusCode != 307 || resp.Header.Get("Location") == "" {
			t.Errorf("%v, %v; want the 307", resp, err)
		}
		for _, a := range b.server.Attempts() {
			if a.Host != "api.example.com" {
				t.Errorf("sent to %s", a.Host)
			}
		}
	})
}

// The GET after a 303 carries no key, and the operation is told from its
// response.
func TestSeeOtherIsAnAnswer(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Redirect(303, "/v1/charges"))
		resp, err := b.client.Do(b.request(t.Context(), "1", "Idempotency-Key", "k"))
		if err != nil || resp.StatusCode != 200 {
			t.Fatalf("%v, %v", resp, err)
		}
		if info, ok := oncehttp.OperationFrom(resp); !ok || info.Outcome != oncehttp.Succeeded || info.Key != "k" {
			t.Errorf("OperationFrom: %+v, %v", info, ok)
		}
		get := b.server.Attempts()[1]
		if get.Method != "GET" || get.Key != "" {
			t.Errorf("followed by %s with key %q", get.Method, get.Key)
		}
	})
}

// The clock is a year ahead for a minute: nothing of before or of meanwhile is
// sent outside of its window, and time goes on afterwards.
func TestClockAYearAheadForAMinute(t *testing.T) {
	var ahead atomic.Int64
	opts := *oncehttp.Options{}.WithClock(func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) })
	inBubble(t, opts, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Hold(-1), oncehttptest.Hold(-1))
		b.leavePending(t.Context(), "before", "1")
		ahead.Store(int64(365 * 24 * time.Hour))
		b.leavePending(t.Context(), "meanwhile", "2")
		time.Sleep(time.Minute)
		ahead.Store(0)
		b.restart()
		var reasons []oncehttp.Reason
		sum, err := b.client.Resume(t.Context(), oncehttp.Handler{
			Settled: func(context.Context, oncehttp.Info, *http.Response) error { t.Error("settled"); return nil },
			Unknown: func(_ context.Context, i oncehttp.Info) error { reasons = append(reasons, i.Reason); return nil },
		})
		if err != nil || sum.Unknown != 2 || b.wire() != 2 {
			t.Errorf("%+v, %v, %v, %d on the wire; want both unknown", sum, err, reasons, b.wire())
		}
		if _, err := b.charge(t.Context(), "after", "3"); err != nil {
			t.Error(err)
		}
		time.Sleep(25 * time.Hour)
		if _, err := b.charge(t.Context(), "before", "1"); !errors.Is(err, oncehttp.ErrWindowClosed) {
			t.Errorf("error %v, want ErrWindowClosed", err)
		}
	})
}

// A process in which nothing happens knows at its next start how late it was: a
// clock that goes back meanwhile does not reopen a window.
func TestAQuietStoreNoticesTheClockGoingBack(t *testing.T) {
	var back atomic.Int64
	opts := *oncehttp.Options{}.WithClock(func() time.Time { return time.Now().Add(-time.Duration(back.Load())) })
	inBubble(t, opts, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Hold(-1))
		b.leavePending(t.Context(), "k", "1")
		time.Sleep(23 * time.Hour) // and nothing is written
		b.close()
		b.store.LazyStore = b.store.LazyStore.(*oncehttptest.Store).Crash()
		back.Store(int64(3 * time.Hour))
		b.open()
		time.Sleep(2 * time.Hour) // the server has forgotten the key
		if orders, sum := b.resume(); len(orders) > 0 || sum.Unknown != 1 || b.wire() != 1 {
			t.Errorf("%v, %+v, %d on the wire; want it unknown", orders, sum, b.wire())
		}
		b.wantEffects("1")
	})
}

// A close-delimited answer over TLS is cut short: net/http sees a clean end.
func TestCloseDelimitedTLSAnswerCutShort(t *testing.T) {
	const answer = `{"id":"ch_1","object":"charge"}`
	n := 0
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n++
		conn, buf, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		body := answer
		if n == 1 {
			body = answer[:10]
		}
		buf.WriteString("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n" + body)
		buf.Flush()
	}))
	defer server.Close()
	c, err := oncehttp.New(oncehttp.NewMemoryStore(), &oncehttp.Options{HTTPClient: server.Client(), BackoffBase: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	resp, err := c.Post(server.URL, "text/plain", strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(resp.Body)
	if string(body) != answer || n != 2 {
		t.Errorf("got %q after %d attempts", body, n)
	}
}

// A custom transport that fires no hooks counts as having sent.
func TestTransportWithoutHooksCountsAsSent(t *testing.T) {
	refuse := &net.OpError{Op: "dial", Err: errors.New("refused")}
	transport := roundTripper(func(r *http.Request) (*http.Response, error) {
		r.Body.Close()
		return nil, refuse
	})
	opts := oncehttp.Options{HTTPClient: &http.Client{Transport: transport}, MaxAttempts: 1}
	inBubble(t, opts, func(t *testing.T, b *bench) {
		info, err := b.charge(t.Context(), "k", "1")
		if info.Outcome != oncehttp.Unknown || !errors.Is(err, refuse) {
			t.Errorf("told %v, %v; want unknown", info.Outcome, err)
		}
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// net/http resends a POST without body on a dead keep-alive by itself: with the
// same key, and counted.
func TestBodylessPostOnADeadKeepAlive(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Fault{}, oncehttptest.DeadKeepAlive())
		var op *oncehttp.Operation
		for range 2 {
			var ctx context.Context
			ctx, op = oncehttp.Start(t.Context(), oncehttp.Op{})
			req, _ := http.NewRequestWithContext(ctx, "POST", host+"/v1/charges/ch_1/capture", nil)
			resp, err := b.client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
		keys := map[string]int{}
		for _, a := range b.server.Attempts() {
			keys[a.Key]++
			if len(a.Body) > 0 || a.Header.Get("Transfer-Encoding") != "" {
				t.Errorf("sent with a body: %+v", a)
			}
		}
		if len(keys) != 2 || op.Info().Attempts != keys[op.Key()]+len(b.server.Unsent()) {
			t.Errorf("keys %v, %d unsent; told %d attempts", keys, len(b.server.Unsent()), op.Info().Attempts)
		}
	})
}

// A request that is made below, such as one for a token, does not run under the
// payment's handle.
func TestHandleDoesNotReachRequestsBelow(t *testing.T) {
	var b *bench
	token := roundTripper(func(r *http.Request) (*http.Response, error) {
		if strings.HasSuffix(r.URL.Path, "/charges") {
			req, _ := http.NewRequestWithContext(r.Context(), "POST", host+"/token", strings.NewReader("grant"))
			resp, err := b.client.Do(req)
			if err != nil {
				return nil, err
			}
			resp.Body.Close()
		}
		return b.server.Transport().RoundTrip(r)
	})
	inBubble(t, oncehttp.Options{HTTPClient: &http.Client{Transport: token}}, func(t *testing.T, inner *bench) {
		b = inner
		info, err := b.charge(t.Context(), "k", "1")
		if err != nil || info.Outcome != oncehttp.Succeeded {
			t.Fatalf("%+v, %v", info, err)
		}
		for _, a := range b.server.Attempts() {
			if (a.Key == "k") != (a.Path == "/v1/charges") {
				t.Errorf("%s under key %q", a.Path, a.Key)
			}
		}
	})
}

// The same against net/http itself, on a socket: its own resend and our retry
// carry one key, and both are counted.
func TestDeadKeepAliveOnASocket(t *testing.T) {
	for name, body := range map[string]io.Reader{"without body": nil, "with body": strings.NewReader("order=1")} {
		t.Run(name, func(t *testing.T) {
			var mu sync.Mutex
			var keys []string
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				mu.Lock()
				defer mu.Unlock()
				keys = append(keys, r.Header.Get("Idempotency-Key"))
				if len(r.TransferEncoding) > 0 {
					t.Errorf("sent as %v", r.TransferEncoding)
				}
				if len(keys) == 2 { // on the connection of the first
					panic(http.ErrAbortHandler)
				}
			}))
			defer server.Close()
			server.Config.ErrorLog = log.New(io.Discard, "", 0)
			c, err := oncehttp.New(oncehttp.NewMemoryStore(), &oncehttp.Options{HTTPClient: server.Client(), BackoffBase: time.Millisecond})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			post := func(key string) oncehttp.Info {
				ctx, op := oncehttp.Start(t.Context(), oncehttp.Op{Key: key, NoAck: true})
				req, _ := http.NewRequestWithContext(ctx, "POST", server.URL, body)
				resp, err := c.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				resp.Body.Close()
				return op.Info()
			}
			post("first")
			if s, ok := body.(*strings.Reader); ok {
				s.Seek(0, io.SeekStart)
			}
			info := post("second")
			mu.Lock()
			defer mu.Unlock()
			if want := []string{"first", "second", "second"}; !slices.Equal(keys, want) || info.Attempts != 2 || info.Outcome != oncehttp.Succeeded {
				t.Errorf("keys %v, told %+v; want keys %v", keys, info, want)
			}
		})
	}
}
