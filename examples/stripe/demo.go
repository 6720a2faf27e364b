package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strconv"
	"sync"

	"github.com/oncehttp/oncehttp/oncehttptest"
)

// demo pays an order at a local server that answers as Stripe does, in a process
// that is killed before it has recorded the answer, and then in another one.
func demo(ctx context.Context, orders []string) error {
	if len(orders) == 0 {
		orders = []string{"A-1"}
	}
	dir, err := os.MkdirTemp("", "stripe-example-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	self, err := os.Executable()
	if err != nil {
		return err
	}
	bank := newBank()
	server := httptest.NewServer(bank)
	defer server.Close()
	defer bank.Close()
	shop := func(args ...string) error {
		cmd := exec.CommandContext(ctx, self, append([]string{"-url", server.URL, "-dir", dir}, args...)...)
		cmd.Env = append(os.Environ(), "STRIPE_API_KEY=sk_test_demo")
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		return cmd.Run()
	}
	if err := shop(append([]string{"-die"}, orders...)...); err == nil {
		return errors.New("the first process was not killed")
	}
	fmt.Println("killed; PaymentIntents made:", len(bank.made()))
	if err := shop(orders...); err != nil {
		return err
	}
	fmt.Println("PaymentIntents made:", len(bank.made()))
	return nil
}

// A bank makes PaymentIntents as Stripe does.
type bank struct {
	*oncehttptest.Server
	failing func(r *http.Request) *stripeError // after the payment was made; nil means that nothing fails

	mu      sync.Mutex // guards the following
	intents []intent
}

// An intent is what matters here of a PaymentIntent.
type intent struct {
	ID                 string            `json:"id"`
	Object             string            `json:"object"`
	Amount             int64             `json:"amount"`
	AmountReceived     int64             `json:"amount_received"`
	CaptureMethod      string            `json:"capture_method"`
	ClientSecret       string            `json:"client_secret"`
	ConfirmationMethod string            `json:"confirmation_method"`
	Created            int64             `json:"created"`
	Currency           string            `json:"currency"`
	LatestCharge       string            `json:"latest_charge"`
	Livemode           bool              `json:"livemode"`
	Metadata           map[string]string `json:"metadata"`
	PaymentMethod      string            `json:"payment_method"`
	PaymentMethodTypes []string          `json:"payment_method_types"`
	Status             string            `json:"status"`
}

// A stripeError is the error in an answer of Stripe's.
type stripeError struct {
	Status        int    `json:"-"`
	Type          string `json:"type"`
	Code          string `json:"code,omitempty"`
	DeclineCode   string `json:"decline_code,omitempty"`
	DocURL        string `json:"doc_url,omitempty"`
	Message       string `json:"message"`
	RequestLogURL string `json:"request_log_url,omitempty"`
}

func newBank() *bank {
	b := &bank{}
	b.Server = oncehttptest.New(http.HandlerFunc(b.serve))
	return b
}

// made returns the PaymentIntents that were made.
func (b *bank) made() []intent {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]intent(nil), b.intents...)
}

// serve runs once for each key.
func (b *bank) serve(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost || r.URL.Path != "/v1/payment_intents" {
		(&stripeError{Status: 404, Type: "invalid_request_error", Message: "Unrecognized request URL."}).write(w)
		return
	}
	amount, err := strconv.ParseInt(r.PostFormValue("amount"), 10, 64)
	if err != nil {
		(&stripeError{Status: 400, Type: "invalid_request_error", Code: "parameter_invalid_integer", Message: "Invalid integer: amount"}).write(w)
		return
	}
	if r.PostFormValue("payment_method") == "pm_card_visa_chargeDeclined" {
		declined.write(w)
		return
	}
	i := b.create(amount, r)
	if b.failing != nil {
		if e := b.failing(r); e != nil {
			e.write(w)
			return
		}
	}
	write(w, http.StatusOK, i)
}

func (b *bank) create(amount int64, r *http.Request) intent {
	b.mu.Lock()
	defer b.mu.Unlock()
	id := fmt.Sprintf("pi_%d", len(b.intents)+1)
	i := intent{
		ID: id, Object: "payment_intent", Amount: amount, AmountReceived: amount, CaptureMethod: "automatic",
		ClientSecret: id + "_secret_x", ConfirmationMethod: "automatic", Created: 1767225600,
		Currency: r.PostFormValue("currency"), LatestCharge: "ch_" + id[len("pi_"):],
		Metadata:      map[string]string{"order": r.PostFormValue("metadata[order]")},
		PaymentMethod: r.PostFormValue("payment_method"), PaymentMethodTypes: []string{"card"}, Status: "succeeded",
	}
	b.intents = append(b.intents, i)
	return i
}

var declined = &stripeError{
	Status: 402, Type: "card_error", Code: "card_declined", DeclineCode: "generic_decline",
	DocURL: "https://docs.stripe.com/error-codes/card-declined", Message: "Your card was declined.",
}

func (e *stripeError) write(w http.ResponseWriter) { write(w, e.Status, e.body()) }

func (e *stripeError) body() any {
	full := *e
	full.RequestLogURL = "https://dashboard.stripe.com/test/logs/" + requestID + "?t=1767225600"
	return map[string]any{"error": full}
}

const requestID = "req_1aBcDeFgHiJkLm"

func write(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Request-Id", requestID)
	w.Header().Set("Stripe-Version", "2026-01-28.clover")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(v)
}
