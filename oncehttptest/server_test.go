package oncehttptest_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp/oncehttptest"
)

// network is a server behind one of its front ends.
type network struct {
	*oncehttptest.Server
	client *http.Client
	base   string
	memory bool
}

type reply struct {
	code   int
	header http.Header
	body   string
	err    error // of Do, or of reading the body
}

// onBoth runs a test over the in-memory transport, in a bubble, and over a
// socket.
func onBoth(t *testing.T, handler func() http.Handler, test func(t *testing.T, n network)) {
	t.Helper()
	t.Run("memory", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := oncehttptest.New(handler())
			test(t, network{s, &http.Client{Transport: s.Transport(), CheckRedirect: noRedirect}, "https://api.example", true})
			s.Close()
		})
	})
	t.Run("socket", func(t *testing.T) {
		s := oncehttptest.Start(t, handler())
		transport := &http.Transport{}
		t.Cleanup(transport.CloseIdleConnections)
		test(t, network{s, &http.Client{Transport: transport, CheckRedirect: noRedirect}, s.URL, false})
	})
}

func noRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

func always(h http.Handler) func() http.Handler { return func() http.Handler { return h } }

// numbered answers with the number of the run.
func numbered() http.Handler {
	var mu sync.Mutex
	n := 0
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		n++
		run := n
		mu.Unlock()
		w.Header().Set("X-Run", fmt.Sprint(run))
		fmt.Fprintf(w, "run %d \x00\xff", run)
	})
}

func (n network) send(ctx context.Context, method, path, key, body string, header ...string) reply {
	// A reader without GetBody: net/http must not send anything again by itself.
	req, err := http.NewRequestWithContext(ctx, method, n.base+path, io.MultiReader(strings.NewReader(body)))
	if err != nil {
		return reply{err: err}
	}
	if req.ContentLength = int64(len(body)); body == "" {
		req.Body = http.NoBody
	}
	if key != "" {
		req.Header.Set("Idempotency-Key", key)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := n.client.Do(req)
	if err != nil {
		return reply{err: err}
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return reply{resp.StatusCode, resp.Header, string(b), err}
}

func (n network) post(t *testing.T, key, body string, header ...string) reply {
	t.Helper()
	return n.send(t.Context(), "POST", "/v1/charges", key, body, header...)
}

func (n network) wantEffects(t *testing.T, want int) {
	t.Helper()
	if got := n.Effects(); len(got) != want {
		t.Fatalf("effects: got %d, want %d: %+v", len(got), want, got)
	}
}

func actions(attempts []oncehttptest.Attempt) (out []oncehttptest.Action) {
	for _, a := range attempts {
		out = append(out, a.Action)
	}
	return out
}

func (n network) wantActions(t *testing.T, want ...oncehttptest.Action) {
	t.Helper()
	if got := actions(n.Attempts()); !slices.Equal(got, want) {
		t.Fatalf("attempts: got %v, want %v", got, want)
	}
}

func (r reply) want(t *testing.T, code int, parts ...string) {
	t.Helper()
	if r.err != nil || r.code != code {
		t.Fatalf("got %d, %v, want %d: %s", r.code, r.err, code, r.body)
	}
	for _, part := range parts {
		if !strings.Contains(r.body, part) {
			t.Fatalf("body %q without %q", r.body, part)
		}
	}
}

func TestHandlerRunsOncePerKeyAndItsAnswerIsReplayedByteForByte(t *testing.T) {
	onBoth(t, numbered, func(t *testing.T, n network) {
		first := n.post(t, "k", "a=1")
		first.want(t, 200)
		if first.header.Get("Idempotent-Replayed") != "" {
			t.Fatal("first answer marked as replayed")
		}
		for range 3 {
			again := n.post(t, "k", "a=1")
			again.want(t, 200)
			if again.body != first.body || again.header.Get("X-Run") != first.header.Get("X-Run") || again.header.Get("Content-Type") != first.header.Get("Content-Type") {
				t.Fatalf("got %+v, want %+v", again, first)
			}
			if again.header.Get("Idempotent-Replayed") != "true" {
				t.Fatal("replay not marked")
			}
		}
		n.wantEffects(t, 1)
		n.wantActions(t, oncehttptest.Executed, oncehttptest.Replayed, oncehttptest.Replayed, oncehttptest.Replayed)
		e, a := n.Effects()[0], n.Attempts()[3]
		if e.Key != "k" || e.Method != "POST" || e.Path != "/v1/charges" || string(e.Body) != "a=1" || e.Status != 200 {
			t.Fatalf("effect %+v", e)
		}
		if a.Seq != 4 || a.N != 4 || a.KeyN != 4 || a.Status != 200 || string(a.Body) != "a=1" || a.Partial || a.Header.Get("Idempotency-Key") != "k" {
			t.Fatalf("attempt %+v", a)
		}
	})
}

func TestAccountsDoNotShareKeys(t *testing.T) {
	onBoth(t, numbered, func(t *testing.T, n network) {
		for range 2 {
			n.post(t, "k", "a", "Authorization", "Bearer A").want(t, 200, "run 1")
			n.post(t, "k", "b", "Authorization", "Bearer B").want(t, 200, "run 2")
			n.post(t, "k", "c", "Authorization", "Bearer A", "Stripe-Account", "acct_1").want(t, 200, "run 3")
		}
		n.wantEffects(t, 3)
	})
}

func TestConcurrentSameKeyHasOneEffectAndA409(t *testing.T) {
	var inside, leave chan struct{} // made in the bubble
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		close(inside)
		<-leave
		io.WriteString(w, "done")
	})
	onBoth(t, always(h), func(t *testing.T, n network) {
		inside, leave = make(chan struct{}), make(chan struct{})
		first := make(chan reply)
		go func() { first <- n.post(t, "k", "a") }()
		<-inside
		n.post(t, "k", "a").want(t, 409, `"type":"idempotency_error"`, `"code":"idempotency_key_in_use"`)
		n.post(t, "k", "b").want(t, 400, `"type":"idempotency_error"`)
		close(leave)
		(<-first).want(t, 200, "done")
		n.post(t, "k", "a").want(t, 200, "done")
		n.wantEffects(t, 1)
		n.wantActions(t, oncehttptest.Executed, oncehttptest.Conflict, oncehttptest.Mismatch, oncehttptest.Replayed)
	})
}

func TestAnotherPayloadUnderAKeyIsRefused(t *testing.T) {
	onBoth(t, numbered, func(t *testing.T, n network) {
		n.post(t, "k", "a").want(t, 200)
		for _, other := range [][3]string{{"POST", "/v1/charges", "b"}, {"POST", "/v1/refunds", "a"}, {"POST", "/v1/charges?x=1", "a"}, {"PUT", "/v1/charges", "a"}} {
			n.send(t.Context(), other[0], other[1], "k", other[2]).want(t, 400, `"type":"idempotency_error"`)
		}
		n.post(t, "k", "a").want(t, 200, "run 1")
		n.wantEffects(t, 1)
	})
}

func TestEveryStatusIsStoredButTheUnstored(t *testing.T) {
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var code int
		fmt.Fscan(r.Body, &code)
		w.WriteHeader(code)
	})
	onBoth(t, always(h), func(t *testing.T, n network) {
		for code, stored := range map[int]bool{200: true, 204: true, 302: true, 400: true, 401: false, 402: true, 404: true, 409: true, 429: false, 500: true, 503: true} {
			n.Reset()
			body := fmt.Sprint(code)
			n.post(t, "k", body).want(t, code)
			again := n.post(t, "k", body)
			again.want(t, code)
			if got := again.header.Get("Idempotent-Replayed") == "true"; got != stored {
				t.Errorf("%d: replayed %v", code, got)
			}
			n.wantEffects(t, map[bool]int{true: 1}[stored])
		}
	})
}

func TestKeyIsForgottenWhenTheWindowHasPassedSinceItsReceipt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, window := range []time.Duration{0, time.Minute} {
			s := oncehttptest.New(numbered())
			s.Window = window
			n := network{s, &http.Client{Transport: s.Transport()}, "http://api.example", true}
			if window == 0 {
				window = 24 * time.Hour
			}
			// Received an hour after it was sent, and slow: the window begins in between.
			s.Script(oncehttptest.Delay(time.Hour).With(oncehttptest.Slow(time.Second)))
			n.post(t, "k", "a").want(t, 200, "run 1")
			time.Sleep(window - time.Second - 1)
			n.post(t, "k", "a").want(t, 200, "run 1")
			time.Sleep(time.Nanosecond)
			n.post(t, "k", "other payload").want(t, 200, "run 2")
			time.Sleep(window - 1)
			n.post(t, "k", "other payload").want(t, 200, "run 2")
			n.wantEffects(t, 2)
		}
		s := oncehttptest.New(numbered())
		s.Window = -1
		n := network{s, &http.Client{Transport: s.Transport()}, "http://api.example", true}
		n.post(t, "k", "a").want(t, 200, "run 1")
		n.post(t, "k", "a").want(t, 200, "run 2")
	})
}

func TestWithoutAKeyEveryRequestHasItsEffect(t *testing.T) {
	onBoth(t, numbered, func(t *testing.T, n network) {
		n.post(t, "", "a").want(t, 200, "run 1")
		n.post(t, "", "a").want(t, 200, "run 2")
		n.send(t.Context(), "GET", "/", "k", "").want(t, 200, "run 3")
		n.send(t.Context(), "GET", "/", "k", "").want(t, 200, "run 4")
		n.post(t, strings.Repeat("k", 256), "a").want(t, 400, "255")
		n.wantEffects(t, 2)
		if got := n.EffectsByBody()["a"]; got != 2 {
			t.Fatalf("effects of a: %d", got)
		}
		n.wantActions(t, oncehttptest.Executed, oncehttptest.Executed, oncehttptest.PassedOn, oncehttptest.PassedOn, oncehttptest.Refused)
	})
}

func TestKeyHeaderAccountAndMethodsCanBeSet(t *testing.T) {
	onBoth(t, numbered, func(t *testing.T, n network) {
		n.KeyHeader, n.Safe, n.Unstored = "X-Request-Key", []string{"HEAD"}, []int{200}
		n.Account = func(h http.Header) string { return h.Get("X-Tenant") }
		n.post(t, "ignored", "a", "X-Request-Key", "k", "X-Tenant", "T").want(t, 200, "run 1")
		if a := n.Attempts()[0]; a.Key != "k" || a.Account != "T" || a.Action != oncehttptest.Refused {
			t.Fatalf("%+v", a)
		}
		n.Unstored = []int{}
		n.send(t.Context(), "GET", "/", "", "", "X-Request-Key", "k").want(t, 200, "run 2")
		n.send(t.Context(), "GET", "/", "", "", "X-Request-Key", "k").want(t, 200, "run 2")
		n.wantEffects(t, 1)
	})
}

func TestChargesAnswerByOrder(t *testing.T) {
	onBoth(t, oncehttptest.Charges, func(t *testing.T, n network) {
		n.post(t, "1", "order=A-1&amount=5").want(t, 200, `{"id":"ch_1","object":"charge","order":"A-1","status":"succeeded"}`)
		n.post(t, "2", ` {"order": 12345678}`).want(t, 200, `"id":"ch_2"`, `"order":"12345678"`)
		n.post(t, "3", url.Values{"metadata[order_id]": {"A-3"}}.Encode()).want(t, 200, `"order":"A-3"`)
		n.post(t, "4", "amount=5").want(t, 400, "invalid_request_error")
		n.send(t.Context(), "GET", "/v1/charges?order=A-3", "", "").want(t, 200, `{"object":"list","data":[{"id":"ch_3","object":"charge","order":"A-3","status":"succeeded"}]}`)
	})
}
