package oncehttp_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// Which requests are operations: the table of the design, row by row.
func TestWhichRequestsAreOperations(t *testing.T) {
	drop := oncehttptest.DropRequest()
	refused := oncehttptest.DialError(nil)
	odd := func(r *http.Request) *http.Request { r.Header["idempotency-KEY"] = []string{"odd"}; return r } // as net/http sends it
	own := func(r *http.Request) *http.Request { r.Header.Set("Idempotency-Key", "own"); return r }
	start := func(r *http.Request) *http.Request {
		ctx, _ := oncehttp.Start(r.Context(), oncehttp.Op{Key: "start", NoAck: true})
		return r.WithContext(ctx)
	}
	both := func(r *http.Request) *http.Request { return start(own(r)) }
	without := func(r *http.Request) *http.Request { return r.WithContext(oncehttp.WithoutKey(r.Context())) }
	const stripe, twilio = "https://api.stripe.com/v1/x", "https://api.twilio.com/2010/x"
	const fresh = "fresh"
	tests := []struct {
		name     string
		unlisted oncehttp.Unlisted
		method   string
		url      string
		change   func(*http.Request) *http.Request
		fault    oncehttptest.Fault
		key      string // on the wire
		attempts int    // on the wire; 1: was not retried
	}{
		{"POST", 0, "POST", host, nil, drop, fresh, 2},
		{"PATCH", 0, "PATCH", host, nil, drop, fresh, 2},
		{"POST, own key", 0, "POST", host, own, drop, "own", 2},
		{"POST, own key, odd case", 0, "POST", host, odd, drop, "odd", 2},
		{"POST, Start over odd case", 0, "POST", host, func(r *http.Request) *http.Request { return start(odd(r)) }, drop, "start", 2},
		{"POST, without key, odd case", 0, "POST", host, func(r *http.Request) *http.Request { return without(odd(r)) }, drop, "", 1},
		{"POST, Start", 0, "POST", host, start, drop, "start", 2},
		{"POST, Start wins over the header", 0, "POST", host, both, drop, "start", 2},
		{"PUT, Start", 0, "PUT", host, start, drop, "start", 2},
		{"DELETE, own key", 0, "DELETE", host, own, drop, "own", 2},
		{"GET, own key", 0, "GET", host, own, drop, "own", 2},
		{"PUT", 0, "PUT", host, nil, drop, "", 2},
		{"DELETE", 0, "DELETE", host, nil, drop, "", 2},
		{"GET", 0, "GET", host, nil, drop, "", 2},
		{"HEAD", 0, "HEAD", host, nil, drop, "", 2},
		{"OPTIONS", 0, "OPTIONS", host, nil, drop, "", 2},
		{"TRACE", 0, "TRACE", host, nil, drop, "", 2},
		{"GET passes Start by", 0, "GET", host, start, drop, "", 2},
		{"POST, WithoutKey", 0, "POST", host, without, drop, "", 1},
		{"POST, WithoutKey, not sent", 0, "POST", host, without, refused, "", 1},
		{"POST to Twilio", 0, "POST", twilio, nil, drop, "", 1},
		{"POST to Twilio, not sent", 0, "POST", twilio, nil, refused, "", 1},
		{"POST, unlisted", oncehttp.OnlyGivenKeys, "POST", host, nil, drop, "", 1},
		{"POST, unlisted, own key", oncehttp.OnlyGivenKeys, "POST", host, own, drop, "own", 2},
		{"POST, unlisted, Start", oncehttp.OnlyGivenKeys, "POST", host, start, drop, "start", 2},
		{"POST, listed", oncehttp.OnlyGivenKeys, "POST", stripe, nil, drop, fresh, 2},
		{"DELETE, Stripe v2", 0, "DELETE", "https://api.stripe.com/v2/x", nil, drop, fresh, 2},
		{"DELETE, Stripe v1", 0, "DELETE", stripe, nil, drop, "", 2},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, oncehttp.Options{Unlisted: tt.unlisted}, func(t *testing.T, b *bench) {
				b.server.Script(tt.fault)
				req, err := http.NewRequestWithContext(t.Context(), tt.method, tt.url, strings.NewReader("order=1"))
				if err != nil {
					t.Fatal(err)
				}
				if tt.method == "GET" || tt.method == "HEAD" || tt.method == "TRACE" {
					req.Body, req.GetBody, req.ContentLength = nil, nil, 0
				}
				if tt.change != nil {
					req = tt.change(req)
				}
				resp, err := b.client.Do(req)
				if err == nil {
					resp.Body.Close()
				}
				if n := b.wire(); n != tt.attempts {
					t.Errorf("%d attempts on the wire, want %d", n, tt.attempts)
				}
				keyed := tt.key != ""
				for _, a := range b.server.Attempts() {
					if tt.key == fresh && len(a.Key) != 36 || tt.key != fresh && a.Key != tt.key {
						t.Errorf("key %q on the wire, want %q", a.Key, tt.key)
					}
					for name := range a.Header {
						if strings.EqualFold(name, "Idempotency-Key") && (!keyed || name != "Idempotency-Key") {
							t.Errorf("header %s on the wire", name)
						}
					}
				}
				if retried := tt.attempts == 2 || tt.fault == refused; retried != (err == nil) {
					t.Errorf("error %v", err)
				}
				if resp != nil {
					if info, ok := oncehttp.OperationFrom(resp); ok != keyed {
						t.Errorf("OperationFrom: %+v, %v", info, ok)
					}
				}
			})
		})
	}
}

// Start on a provider that never deduplicates cannot keep its promise, and says so.
func TestStartIsRefusedWhereThereAreNoKeys(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		ctx, op := oncehttp.Start(t.Context(), oncehttp.Op{})
		req, _ := http.NewRequestWithContext(ctx, "POST", "https://api.twilio.com/2010/x", strings.NewReader("To=1"))
		_, err := b.client.Do(req)
		if !errors.Is(err, oncehttp.ErrNoKeys) || op.Info().Outcome != oncehttp.NotSent || b.wire() != 0 {
			t.Errorf("%v, %v, %d on the wire", err, op.Info().Outcome, b.wire())
		}
	})
}

// Credentials, and with them the account, may come from Authorize alone.
func TestAuthorizeTellsTheAccount(t *testing.T) {
	token := "sk_test_1"
	opts := oncehttp.Options{Authorize: func(_ context.Context, _ oncehttp.Info, r *http.Request) error {
		r.Header.Set("Authorization", "Bearer "+token)
		return nil
	}}
	inBubble(t, opts, func(t *testing.T, b *bench) {
		do := func(key string) (*oncehttp.Operation, error) {
			ctx, op := oncehttp.Start(t.Context(), oncehttp.Op{Key: key})
			req, _ := http.NewRequestWithContext(ctx, "POST", "https://api.stripe.com/v1/charges", strings.NewReader("order=1"))
			_, err := b.client.Do(req)
			return op, err
		}
		if op, err := do("k"); err != nil || op.Info().Outcome != oncehttp.Succeeded {
			t.Errorf("%v, %v", op.Info(), err)
		}
		token = "sk_test_rotated"
		if op, err := do("k"); err != nil || !op.Info().Replayed {
			t.Errorf("after a rotation: %v, %v", op.Info(), err)
		}
		token = "sk_live_1"
		if _, err := do("k"); !errors.Is(err, oncehttp.ErrScope) || b.wire() != 1 {
			t.Errorf("in live mode: %v, %d on the wire", err, b.wire())
		}
	})
}

// What the provider knows of how long a request runs there, counts like a
// Retry-After: also for a 409 that an earlier attempt explains, and up to
// MaxRetryAfter.
func TestInFlightIsWaitedFor(t *testing.T) {
	conflict := oncehttptest.Status(http.StatusConflict)
	judge := func(r *http.Response, _ []byte) oncehttp.Verdict {
		if r.StatusCode == http.StatusConflict {
			return oncehttp.InFlight
		}
		return oncehttp.NoVerdict
	}
	for _, tt := range []struct {
		name   string
		judge  func(*http.Response, []byte) oncehttp.Verdict
		faults []oncehttptest.Fault
		wait   time.Duration // before the last attempt; 0: there is no other
	}{
		{"verdict", judge, []oncehttptest.Fault{conflict}, 20 * time.Second},
		{"409 after a lost answer", nil, []oncehttptest.Fault{oncehttptest.DropResponse(), conflict}, 20 * time.Second},
		{"the server asks for more", judge, []oncehttptest.Fault{oncehttptest.Status(http.StatusConflict, "Retry-After", "40")}, 40 * time.Second},
		{"the server asks for less", judge, []oncehttptest.Fault{oncehttptest.Status(http.StatusConflict, "Retry-After", "1")}, 20 * time.Second},
		{"longer than MaxRetryAfter", judge, []oncehttptest.Fault{conflict}, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			opts := oncehttp.Options{Providers: []oncehttp.Provider{{Name: "x", Hosts: []string{"api.example.com"}, Judge: tt.judge, InFlightWait: 20 * time.Second}}}
			if tt.wait == 0 {
				opts.MaxRetryAfter = 10 * time.Second
			}
			inBubble(t, *opts.WithRand(func(int64) int64 { return 0 }), func(t *testing.T, b *bench) {
				b.server.Script(tt.faults...)
				start := time.Now()
				info, err := b.charge(t.Context(), "k", "1")
				if err != nil || (info.Outcome == oncehttp.Succeeded) != (tt.wait > 0) || time.Since(start).Round(time.Millisecond) != tt.wait {
					t.Errorf("%v, %v after %v", info.Outcome, err, time.Since(start))
				}
				if tt.wait == 0 && info.NotBefore.Sub(start) != 20*time.Second {
					t.Errorf("not before %v", info.NotBefore)
				}
			})
		})
	}
}

// A quoted key is a String of RFC 9651: quotation mark and backslash are escaped,
// nothing else is, and there is nothing around it. An SDK may set it bare.
func TestQuotedKeysAreStructuredFieldStrings(t *testing.T) {
	quoted := oncehttp.Provider{Name: "x", Hosts: []string{"api.example.com"}, Quoted: true, MaxKey: 10}
	tests := []struct {
		name, start, header string // the caller's
		key, wire           string // key "" means that it is refused
	}{
		{"of Start", "order-1", "", "order-1", `"order-1"`},
		{"of Start, with a quotation mark", `a"b`, "", `a"b`, `"a\"b"`},
		{"of Start, with a backslash", `a\b`, "", `a\b`, `"a\\b"`},
		{"of Start, ends with a backslash", `a\`, "", `a\`, `"a\\"`},
		{"of Start, as long as may be", `""""""""""`, "", `""""""""""`, `"` + strings.Repeat(`\"`, 10) + `"`},
		{"of Start, too long", `"""""""""""`, "", "", ""},
		{"of Start, wins", "order-1", `"x`, "order-1", `"order-1"`},
		{"bare", "", "order-1", "order-1", `"order-1"`},
		{"bare, with a quotation mark", "", `a"b`, `a"b`, `"a\"b"`},
		{"string", "", `"order-1"`, "order-1", `"order-1"`},
		{"string, escaped", "", `"a\"\\b"`, `a"\b`, `"a\"\\b"`},
		{"string, escaped backslash before its end", "", `"a\\"`, `a\`, `"a\\"`},
		{"string, empty", "", `""`, "", ""},
		{"quotation mark alone", "", `"`, "", ""},
		{"without its end", "", `"a`, "", ""},
		{"its end escaped", "", `"a\"`, "", ""},
		{"quotation mark within", "", `"a"b"`, "", ""},
		{"another escape", "", `"a\b"`, "", ""},
		{"with parameters", "", `"a";b=1`, "", ""},
		{"two", "", `"a", "b"`, "", ""},
		{"not ASCII", "", `"\u00fc"`, "", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, oncehttp.Options{Providers: []oncehttp.Provider{quoted}}, func(t *testing.T, b *bench) {
				ctx, told := t.Context(), func() string { return "" }
				if tt.start != "" {
					c, op := oncehttp.Start(ctx, oncehttp.Op{Key: tt.start, NoAck: true})
					ctx, told = c, op.Key
				}
				req := b.request(ctx, "1")
				if tt.header != "" {
					req.Header.Set("Idempotency-Key", tt.header)
				}
				b.server.Script(oncehttptest.DropResponse())
				resp, err := b.client.Do(req)
				if tt.key == "" {
					if !errors.Is(err, oncehttp.ErrKeyInvalid) || b.wire() != 0 {
						t.Errorf("%v, %d on the wire", err, b.wire())
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				resp.Body.Close()
				info, _ := oncehttp.OperationFrom(resp)
				if info.Key != tt.key || tt.start != "" && told() != tt.key {
					t.Errorf("key %q, want %q", info.Key, tt.key)
				}
				if b.wire() != 2 {
					t.Errorf("%d attempts, want 2", b.wire())
				}
				for _, a := range b.server.Attempts() {
					if got := a.Header.Values("Idempotency-Key"); len(got) != 1 || got[0] != tt.wire {
						t.Errorf("on the wire: %q, want %q", got, tt.wire)
					}
				}
			})
		})
	}
}
