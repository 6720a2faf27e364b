package oncehttp_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp"
)

// fixture returns a published answer. Its file begins with where it is from and
// what of it is published.
func fixture(t *testing.T, name string) (resp *http.Response, body string) {
	t.Helper()
	text := readPage(t, filepath.Join("testdata", "providers", filepath.FromSlash(name)+".http"))
	for strings.HasPrefix(text, "# ") {
		_, text, _ = strings.Cut(text, "\n")
	}
	resp, err := http.ReadResponse(bufio.NewReader(strings.NewReader(text)), nil)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	body = strings.TrimSuffix(string(b), "\n")
	resp.Body, resp.ContentLength = io.NopCloser(strings.NewReader(body)), int64(len(body))
	return resp, body
}

var errLost = errors.New("connection reset")

// A player is a transport that answers from a list, with errLost for nil, and then
// with 200.
type player struct {
	answers  []*http.Response
	requests []*http.Request
	bodies   []string
	times    []time.Time
}

func (p *player) RoundTrip(r *http.Request) (*http.Response, error) {
	body := []byte{}
	if r.Body != nil {
		body, _ = io.ReadAll(r.Body)
		r.Body.Close()
	}
	p.requests, p.bodies, p.times = append(p.requests, r), append(p.bodies, string(body)), append(p.times, time.Now())
	if len(p.answers) == 0 {
		return &http.Response{
			Status: "200 OK", StatusCode: 200, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Request: r,
			Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(bytes.NewReader([]byte("{}"))), ContentLength: 2,
		}, nil
	}
	resp := p.answers[0]
	p.answers = p.answers[1:]
	if resp == nil {
		return nil, errLost
	}
	resp.Request = r
	return resp, nil
}

// perform sends an operation under key through a client of its own, and returns
// what is told. The key goes where the provider wants it.
func perform(t *testing.T, p *player, url, field, key string) (info oncehttp.Info, body string, err error) {
	t.Helper()
	client, err := oncehttp.New(oncehttp.NewMemoryStore(), &oncehttp.Options{HTTPClient: &http.Client{Transport: p}})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	ctx, op := oncehttp.Start(t.Context(), oncehttp.Op{Key: key})
	text := `{"amount":1}`
	if field != "" {
		text = fmt.Sprintf(`{"amount":1,%q:%q}`, field, op.Key())
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err == nil {
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		body = string(b)
	}
	return op.Info(), body, err
}

// TestPublishedAnswersAreUnderstood: what providers publish that they answer, to a
// first attempt and to one after an attempt whose answer was lost.
func TestPublishedAnswersAreUnderstood(t *testing.T) {
	type told struct {
		outcome oncehttp.Outcome
		reason  oncehttp.Reason
		more    int // attempts after the answer
	}
	var (
		retried  = told{oncehttp.Succeeded, 0, 1}
		success  = told{oncehttp.Succeeded, 0, 0}
		rejected = told{oncehttp.Rejected, 0, 0}
		conflict = told{oncehttp.Unknown, oncehttp.ReasonConflict, 0}
		unclear  = told{oncehttp.Unknown, oncehttp.ReasonAmbiguous, 0}
		door     = told{oncehttp.Unknown, oncehttp.ReasonRefused, 0}
		gaveUp   = told{oncehttp.Unknown, oncehttp.ReasonGaveUp, 0}
	)
	const square, plaid = "https://connect.squareup.com/v2/payments", "https://production.plaid.com/transfer/authorization/create"
	tests := []struct {
		fixture      string
		url          string
		first, later told
		wait         time.Duration // at least, before the next attempt
	}{
		{"stripe/other-payload", "https://api.stripe.com/v1/charges", conflict, conflict, 0},
		{"adyen/in-progress-409", "https://checkout-test.adyen.com/v71/payments", retried, retried, 0},
		{"adyen/in-progress-422", "https://1797a841fbb37ca7-AdyenDemo-checkout-live.adyenpayments.com/checkout/v71/payments", retried, retried, 0},
		{"adyen/transient-503", "https://checkout-test.adyen.com/v71/payments", retried, retried, 0},
		{"adyen/not-transient", "https://checkout-test.adyen.com/v71/payments", gaveUp, gaveUp, 0},
		{"paypal/in-progress", "https://api-m.paypal.com/v2/payments/authorizations/0VF/capture", retried, retried, 0},
		{"paypal/previously-used", "https://api-m.sandbox.paypal.com/v3/vault/payment-tokens", conflict, conflict, 0},
		{"checkout/concurrent", "https://api.sandbox.checkout.com/payments", retried, retried, 30 * time.Second},
		{"checkout/concurrent", "https://vkuhvk4v.api.checkout.com/payments/pay_1/captures", retried, retried, 30 * time.Second},
		{"checkout/concurrent", "https://transfers.checkout.com/transfers", retried, retried, 30 * time.Second},
		{"gocardless/already-created", "https://api.gocardless.com/payments", success, success, 0},
		{"gocardless/validation-failed", "https://api-sandbox.gocardless.com/payments", rejected, unclear, 0},
		{"increase/already-used", "https://api.increase.com/account_transfers", conflict, conflict, 0},
		{"increase/invalid-operation", "https://sandbox.increase.com/account_transfers", rejected, retried, 0},
		{"truelayer/key-in-use", "https://api.truelayer.com/v3/payments", retried, retried, 0},
		{"truelayer/conflict", "https://api.truelayer-sandbox.com/v3/payments", retried, retried, 0},
		{"truelayer/key-reuse", "https://api.truelayer.com/v3/payments", conflict, conflict, 0},
		{"truelayer/provider-error", "https://api.truelayer.com/v3/payments", retried, retried, 0},
		{"mercadopago/conflict", "https://api.mercadopago.com/v1/advanced_payments", retried, retried, 0},
		{"mercadopago/bad-request", "https://api.mercadopago.com/v1/advanced_payments", rejected, unclear, 0},
		{"mercadopago/key-already-used", "https://api.mercadopago.com/v1/orders", conflict, conflict, 0},
		{"mercadopago/key-locked", "https://api.mercadopago.com/v1/orders", retried, retried, 0},
		{"razorpay/key-missing", "https://api.razorpay.com/v1/payouts", rejected, unclear, 0},
		{"chargebee/not-found", "https://acme-test.chargebee.com/api/v2/subscriptions", rejected, door, 0},
		{"chargebee/not-found-replayed", "https://acme-test.chargebee.com/api/v2/subscriptions", rejected, rejected, 0},
		{"qonto/error", "https://thirdparty.qonto.com/v2/sepa/transfers", rejected, unclear, 0},
		{"dwolla/created", "https://api-sandbox.dwolla.com/transfers", success, success, 0},
		{"dwolla/in-progress", "https://api.dwolla.com/transfers", retried, retried, 0},
		{"square/key-reused", square, conflict, conflict, 0},
		{"square/insufficient-funds", square, rejected, unclear, 0},
		{"plaid/invalid-request", plaid, rejected, unclear, 0},
	}
	used := []string{"worldpay/in-progress"} // of TestWorldpayIsSentOnce
	for _, tt := range tests {
		used = append(used, tt.fixture)
		field := ""
		if tt.url == square || tt.url == plaid {
			field = "idempotency_key"
		}
		for _, earlier := range []bool{false, true} {
			want, name, before := tt.first, "first", 0
			if earlier {
				want, name, before = tt.later, "later", 1
			}
			t.Run(tt.fixture+"/"+name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					resp, published := fixture(t, tt.fixture)
					p := &player{answers: []*http.Response{resp}}
					if earlier {
						p.answers = []*http.Response{nil, resp}
					}
					info, body, err := perform(t, p, tt.url, field, "")
					if err != nil {
						t.Fatal(err)
					}
					if got := (told{info.Outcome, info.Reason, len(p.requests) - before - 1}); got != want {
						t.Errorf("told %v, want %v", got, want)
					}
					if want.more == 0 && (body != published || info.Status != resp.StatusCode) {
						t.Errorf("the caller got %d %q", info.Status, body)
					}
					if n := len(p.times); want.more > 0 && n > before+1 && p.times[before+1].Sub(p.times[before]) < tt.wait {
						t.Errorf("waited %v, want %v", p.times[before+1].Sub(p.times[before]), tt.wait)
					}
				})
			})
		}
	}
	err := filepath.WalkDir("testdata/providers", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, _ := filepath.Rel(filepath.Join("testdata", "providers"), path)
		if name := strings.TrimSuffix(filepath.ToSlash(rel), ".http"); !slices.Contains(used, name) {
			t.Errorf("%s is in no test", path)
		}
		if text := readPage(t, path); !strings.HasPrefix(text, "# Source: ") || !strings.Contains(text, "\n# Published: ") {
			t.Errorf("%s does not say where it is from and what of it is published", path)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// TestKeysGoWhereProvidersWantThem, no longer and no later than they take them.
// The numbers are those of their pages, or less.
func TestKeysGoWhereProvidersWantThem(t *testing.T) {
	tests := []struct {
		url, header, field string
		longest            int
		window             time.Duration
	}{
		{"https://api.stripe.com/v1/charges", "Idempotency-Key", "", 255, 24 * time.Hour},
		{"https://api.stripe.com/v2/core/accounts", "Idempotency-Key", "", 255, 30 * 24 * time.Hour},
		{"https://pal-test.adyen.com/pal/servlet/Payment/v68/authorise", "Idempotency-Key", "", 64, 7 * 24 * time.Hour},
		{"https://api-m.paypal.com/v2/checkout/orders", "Paypal-Request-Id", "", 108, 3 * time.Hour},
		{"https://api.sandbox.paypal.com/v1/payments/payouts", "Paypal-Request-Id", "", 108, 3 * time.Hour},
		{"https://api.checkout.com/payments", "Cko-Idempotency-Key", "", 36, 24 * time.Hour},
		{"https://transfers.sandbox.checkout.com/transfers", "Cko-Idempotency-Key", "", 36, 24 * time.Hour},
		{"https://api.gocardless.com/payments", "Idempotency-Key", "", 36, 24 * time.Hour},
		{"https://api.increase.com/ach_transfers", "Idempotency-Key", "", 200, 24 * time.Hour},
		{"https://api.truelayer.com/v3/payments", "Idempotency-Key", "", 36, 6 * time.Hour},
		{"https://api.mercadopago.com/v1/payments", "X-Idempotency-Key", "", 36, 30 * time.Minute},
		{"https://api.razorpay.com/v1/payouts", "X-Payout-Idempotency", "", 36, 7 * 24 * time.Hour},
		{"https://acme.chargebee.com/api/v2/customers", "Chargebee-Idempotency-Key", "", 100, 30 * time.Minute},
		{"https://thirdparty-sandbox.staging.qonto.co/v2/sepa/transfers", "X-Qonto-Idempotency-Key", "", 36, 30 * time.Minute},
		{"https://api.dwolla.com/transfers", "Idempotency-Key", "", 36, 24 * time.Hour},
		{"https://connect.squareupsandbox.com/v2/payments", "", "idempotency_key", 45, 30 * time.Minute},
		{"https://sandbox.plaid.com/transfer/authorization/create", "", "idempotency_key", 50, 48 * time.Hour},
	}
	for _, tt := range tests {
		t.Run(tt.url, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				key := strings.Repeat("k", tt.longest)
				p := &player{}
				info, _, err := perform(t, p, tt.url, tt.field, key)
				if err != nil {
					t.Fatal(err)
				}
				for name, values := range p.requests[0].Header {
					if slices.Contains(values, key) != (name == tt.header) || strings.Contains(name, "Idempotency") && name != tt.header {
						t.Errorf("header %s: %q", name, values)
					}
				}
				if tt.header != "" && p.requests[0].Header.Get(tt.header) != key {
					t.Errorf("%s is %q", tt.header, p.requests[0].Header.Get(tt.header))
				}
				if tt.field != "" && !strings.Contains(p.bodies[0], key) {
					t.Errorf("body %s", p.bodies[0])
				}
				margin := max(tt.window/48, 90*time.Second)
				if strings.Contains(tt.url, "stripe") {
					margin = max(tt.window/48, 140*time.Second)
				}
				if got := info.ResendUntil.Sub(info.FirstSent); got != tt.window-margin {
					t.Errorf("sent again for %v, want %v", got, tt.window-margin)
				}
				if _, _, err := perform(t, p, tt.url, tt.field, key+"k"); !errors.Is(err, oncehttp.ErrKeyInvalid) {
					t.Errorf("a key of %d characters: %v", tt.longest+1, err)
				}
			})
		})
	}
}

// TestWhatTakesNoKeyIsSentOnce: other endpoints of a provider, and other methods,
// are not taken for operations.
func TestWhatTakesNoKeyIsSentOnce(t *testing.T) {
	for _, tt := range []struct{ method, url string }{
		{"POST", "https://api.checkout.com/instruments"},
		{"POST", "https://api.sandbox.checkout.com/tokens"},
		{"POST", "https://api.razorpay.com/v1/orders"},
		{"POST", "https://secure.worldpay.com/jsp/merchant/xml/paymentService.jsp"},
		{"POST", "https://secure-test.worldpay.com/jsp/merchant/xml/paymentService.jsp"},
		{"POST", "https://access.worldpay.com/payments/authorizations"},
		{"POST", "https://api.twilio.com/2010-04-01/Accounts/AC1/Messages.json"},
		{"POST", "https://connect.squareup.com/oauth2/token"},
		{"POST", "https://production.plaid.com/accounts/get"},
		{"PATCH", "https://management-test.adyen.com/v3/merchants/1"},
		{"PATCH", "https://api-m.paypal.com/v2/checkout/orders/1"},
		{"PATCH", "https://api.increase.com/accounts/1"},
		{"PATCH", "https://thirdparty.qonto.com/v2/beneficiaries"},
	} {
		t.Run(tt.method+" "+tt.url, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := &player{answers: []*http.Response{nil}}
				client, err := oncehttp.New(oncehttp.NewMemoryStore(), &oncehttp.Options{HTTPClient: &http.Client{Transport: p}})
				if err != nil {
					t.Fatal(err)
				}
				defer client.Close()
				req, _ := http.NewRequestWithContext(t.Context(), tt.method, tt.url, strings.NewReader(`{"amount":1}`))
				req.Header.Set("Content-Type", "application/json")
				if _, err := client.Do(req); !errors.Is(err, errLost) || len(p.requests) != 1 {
					t.Errorf("%v, %d attempts", err, len(p.requests))
				}
				if h := p.requests[0].Header; len(h) != 1 {
					t.Errorf("header %v", h)
				}
			})
		})
	}
}

// TestWorldpayIsSentOnce: its answers are handed over as they are.
func TestWorldpayIsSentOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answer, published := fixture(t, "worldpay/in-progress")
		p := &player{answers: []*http.Response{answer}}
		client, err := oncehttp.New(oncehttp.NewMemoryStore(), &oncehttp.Options{HTTPClient: &http.Client{Transport: p}})
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		resp, err := client.Post("https://secure-test.worldpay.com/jsp/merchant/xml/paymentService.jsp", "text/xml", strings.NewReader("<paymentService/>"))
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if _, ok := oncehttp.OperationFrom(resp); ok || err != nil || string(body) != published || len(p.requests) != 1 {
			t.Errorf("%s, %v, %d attempts", body, err, len(p.requests))
		}
	})
}

// TestTransientErrorsHadNoEffect: what is refused after an answer of Adyen's with
// transient-error: true is refused; after one without, nobody knows.
func TestTransientErrorsHadNoEffect(t *testing.T) {
	for transient, want := range map[bool]oncehttp.Outcome{true: oncehttp.Rejected, false: oncehttp.Unknown} {
		synctest.Test(t, func(t *testing.T) {
			resp, _ := fixture(t, "adyen/transient-503")
			if !transient {
				resp.Header.Del("Transient-Error")
			}
			refusal := &http.Response{StatusCode: 401, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: http.Header{}, Body: http.NoBody}
			p := &player{answers: []*http.Response{resp, refusal}}
			info, _, err := perform(t, p, "https://checkout-test.adyen.com/v71/payments", "", "")
			if err != nil || info.Outcome != want || len(p.requests) != 2 {
				t.Errorf("transient=%v: %v, %v, %d attempts", transient, info.Outcome, err, len(p.requests))
			}
		})
	}
}
