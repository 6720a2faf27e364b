package oncehttp_test

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// inBody is a provider that looks for the key in the body.
var inBody = oncehttp.Provider{Name: "in body", Hosts: []string{"body.example.com"}, BodyField: "idempotency_key", MaxKey: 45}

const inBodyURL = "https://body.example.com/v2/payments"

// A provider's key in the body is the caller's: the request goes out as it was
// given, to the byte, and is an operation exactly if the key is there.
func TestKeyInBody(t *testing.T) {
	const keyed = `{"idempotency_key":"order-1","amount":1}`
	tests := []struct {
		name, method, contentType, body string
		attempts                        int // that reach the wire, where each answer is lost
		key                             string
	}{
		{"key", "POST", "application/json", keyed, 4, "order-1"},
		{"key, charset", "POST", "application/json; charset=utf-8", keyed, 4, "order-1"},
		{"key, +json", "POST", "application/vnd.x+json", keyed, 4, "order-1"},
		{"key, PUT", "PUT", "application/json", keyed, 4, "order-1"},
		{"none", "POST", "application/json", `{"amount":1}`, 1, ""},
		{"null", "POST", "application/json", `{"idempotency_key":null}`, 1, ""},
		{"empty", "POST", "application/json", `{"idempotency_key":""}`, 1, ""},
		{"a number", "POST", "application/json", `{"idempotency_key":1}`, 1, ""},
		{"further down", "POST", "application/json", `{"order":{"idempotency_key":"x"}}`, 1, ""},
		{"another case", "POST", "application/json", `{"Idempotency_Key":"x"}`, 1, ""},
		{"no object", "POST", "application/json", `["idempotency_key"]`, 1, ""},
		{"not JSON", "POST", "application/json", `{"idempotency_key":"x"`, 1, ""},
		{"another type", "POST", "text/plain", keyed, 1, ""},
		{"no body", "POST", "application/json", "", 1, ""},
		{"none, PUT", "PUT", "application/json", `{"amount":1}`, 4, ""},
		{"GET", "GET", "", "", 4, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, oncehttp.Options{Providers: []oncehttp.Provider{inBody}}, func(t *testing.T, b *bench) {
				for range 8 {
					b.server.Script(oncehttptest.DropResponse())
				}
				var body io.Reader
				if tt.body != "" {
					body = strings.NewReader(tt.body)
				}
				req, err := http.NewRequestWithContext(t.Context(), tt.method, inBodyURL, body)
				if err != nil {
					t.Fatal(err)
				}
				if tt.contentType != "" {
					req.Header.Set("Content-Type", tt.contentType)
				}
				_, err = b.client.Do(req)
				if n := b.wire(); n != tt.attempts {
					t.Errorf("%d attempts on the wire, want %d", n, tt.attempts)
				}
				for _, a := range b.server.Attempts() {
					if a.Key != "" || string(a.Body) != tt.body {
						t.Errorf("header %q and body %q on the wire, want none and %q", a.Key, a.Body, tt.body)
					}
				}
				opErr, ok := errors.AsType[*oncehttp.OperationError](err)
				if ok != (tt.key != "") || ok && (opErr.Key != tt.key || opErr.Outcome != oncehttp.Unknown) {
					t.Errorf("error %v, want of key %q", err, tt.key)
				}
			})
		})
	}
}

// What cannot be an operation is refused before anything is sent: Start without
// its key in the body, a key that is too long, a body that is.
func TestKeyInBodyIsChecked(t *testing.T) {
	tests := []struct {
		name, op, body string
		want           error
	}{
		{"Start, key missing", "mine", `{"amount":1}`, oncehttp.ErrKeyInvalid},
		{"Start, another key", "mine", `{"idempotency_key":"other"}`, oncehttp.ErrKeyInvalid},
		{"Start, no JSON", "mine", `key=mine`, oncehttp.ErrKeyInvalid},
		{"too long a key", "", `{"idempotency_key":"` + strings.Repeat("k", 46) + `"}`, oncehttp.ErrKeyInvalid},
		{"too long a body", "", `{"idempotency_key":"k","x":"` + strings.Repeat("x", 1<<20) + `"}`, oncehttp.ErrBodyTooLarge},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, oncehttp.Options{Providers: []oncehttp.Provider{inBody}}, func(t *testing.T, b *bench) {
				ctx, op := t.Context(), (*oncehttp.Operation)(nil)
				if tt.op != "" {
					ctx, op = oncehttp.Start(ctx, oncehttp.Op{Key: tt.op})
				}
				body := &countingBody{Reader: strings.NewReader(tt.body)}
				req, _ := http.NewRequestWithContext(ctx, "POST", inBodyURL, body)
				req.Header.Set("Content-Type", "application/json")
				_, err := b.client.Do(req)
				opErr, ok := errors.AsType[*oncehttp.OperationError](err)
				if !errors.Is(err, tt.want) || !ok || opErr.Outcome != oncehttp.NotSent || b.wire() != 0 {
					t.Errorf("%v, %d on the wire; want %v, not sent", err, b.wire(), tt.want)
				}
				if op != nil && op.Info().Outcome != oncehttp.NotSent {
					t.Errorf("the handle tells %v", op.Info().Outcome)
				}
				if n := body.closed.Load(); n != 1 {
					t.Errorf("body closed %d times", n)
				}
			})
		})
	}
}

// With Start, the operation is resumed from the store with the key where it was.
func TestKeyInBodyIsResumed(t *testing.T) {
	inBubble(t, oncehttp.Options{Providers: []oncehttp.Provider{inBody}, MaxAttempts: 1}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.DropResponse())
		ctx, op := oncehttp.Start(t.Context(), oncehttp.Op{Metadata: map[string]string{"order": "1"}})
		body := `{"amount":1,"idempotency_key":"` + op.Key() + `"}`
		req, _ := http.NewRequestWithContext(ctx, "POST", inBodyURL, strings.NewReader(body))
		req.Header.Set("Content-Type", "application/json")
		if _, err := b.client.Do(req); err == nil || op.Info().Outcome != oncehttp.Unknown {
			t.Fatalf("%v, %v", err, op.Info().Outcome)
		}
		resp, err := b.client.Redrive(t.Context(), op.Info().ID)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		attempts := b.server.Attempts()
		if len(attempts) != 2 || string(attempts[0].Body) != body || string(attempts[1].Body) != body || attempts[1].Key != "" {
			t.Errorf("%d attempts, the last %q with header %q", len(attempts), attempts[len(attempts)-1].Body, attempts[len(attempts)-1].Key)
		}
	})
}

// A provider that is configured anew looks for the key elsewhere: what was sent
// before is not sent again, as the server would not know it.
func TestKeyStaysWhereItWas(t *testing.T) {
	host := []string{"body.example.com"}
	providers := map[string]oncehttp.Provider{
		"header":       {Name: "1", Hosts: host},
		"other header": {Name: "2", Hosts: host, Header: "X-Request-Id"},
		"quoted":       {Name: "3", Hosts: host, Quoted: true},
		"body":         inBody,
		"no keys":      {Name: "4", Hosts: host, NoKeys: true},
	}
	for from, before := range providers {
		for to, after := range providers {
			if from == to || before.NoKeys {
				continue
			}
			body := `{"amount":1}`
			if before.BodyField != "" {
				body = `{"amount":1,"idempotency_key":"order-1"}`
			}
			t.Run(from+" to "+to, func(t *testing.T) {
				inBubble(t, oncehttp.Options{Providers: []oncehttp.Provider{before}, MaxAttempts: 1}, func(t *testing.T, b *bench) {
					b.server.Script(oncehttptest.DropResponse())
					send := func() (*oncehttp.Operation, error) {
						ctx, op := oncehttp.Start(t.Context(), oncehttp.Op{Key: "order-1"})
						req, _ := http.NewRequestWithContext(ctx, "POST", inBodyURL, strings.NewReader(body))
						req.Header.Set("Content-Type", "application/json")
						resp, err := b.client.Do(req)
						if err == nil {
							resp.Body.Close()
						}
						return op, err
					}
					op, _ := send()
					b.reopen(func(o *oncehttp.Options) { o.Providers = []oncehttp.Provider{after} })
					time.Sleep(time.Minute)
					if _, err := b.client.Redrive(t.Context(), op.Info().ID); !errors.Is(err, oncehttp.ErrMismatch) {
						t.Errorf("Redrive: %v", err)
					}
					_, err := send()
					want := oncehttp.ErrMismatch
					switch {
					case after.BodyField != "":
						want = oncehttp.ErrKeyInvalid
					case after.NoKeys:
						want = oncehttp.ErrNoKeys
					}
					if !errors.Is(err, want) {
						t.Errorf("Do: %v, want %v", err, want)
					}
					if n := b.wire(); n != 1 {
						t.Errorf("%d attempts on the wire, want the first alone", n)
					}
				})
			})
		}
	}
}
