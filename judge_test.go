package oncehttp

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
)

// TestJudgement is the table of classification: a Stripe-like provider, and one
// about which nothing is known.
func TestJudgement(t *testing.T) {
	type want struct {
		next    next
		outcome Outcome
		reason  Reason
	}
	var (
		success  = want{settle, Succeeded, NoReason}
		rejected = want{settle, Rejected, NoReason}
		retry    = want{again, Unknown, ReasonGaveUp}
		gaveUp   = want{stop, Unknown, ReasonGaveUp}
		stored   = want{stop, Unknown, ReasonStored}
		conflict = want{stop, Unknown, ReasonConflict}
		door     = want{stop, Unknown, ReasonRefused}
		unclear  = want{stop, Unknown, ReasonAmbiguous}
	)
	const inUse = `{"error":{"type":"idempotency_error","code":"idempotency_key_in_use"}}`
	const other = `{"error":{"type":"idempotency_error"}}`
	const locked = `{"error":{"type":"invalid_request_error","code":"lock_timeout"}}`
	tests := []struct {
		p       *Provider
		status  int
		header  string // "Name: value"
		body    string
		first   want // on a first attempt
		earlier want // after an attempt whose effect is unknown
	}{
		{&unlisted, 200, "", "", success, success},
		{&unlisted, 201, "", "", success, success},
		{&unlisted, 303, "", "", success, success},
		{&unlisted, 408, "", "", retry, retry},
		{&unlisted, 429, "", "", retry, retry},
		{&unlisted, 500, "", "", retry, retry},
		{&unlisted, 503, "", "", retry, retry},
		{&unlisted, 599, "", "", retry, retry},
		{&unlisted, 500, "Idempotent-Replayed: true", "", stored, stored},
		{&unlisted, 500, "Idempotent-Replayed: false", "", retry, retry},
		{&unlisted, 402, "Idempotent-Replayed: true", "", rejected, rejected},
		{&unlisted, 400, "", "", rejected, unclear},
		{&unlisted, 402, "", "", rejected, unclear},
		{&unlisted, 409, "", "", rejected, retry},
		{&unlisted, 422, "", "", rejected, unclear},
		{&unlisted, 401, "", "", rejected, door},
		{&unlisted, 403, "", "", rejected, door},
		{&unlisted, 404, "", "", rejected, door},
		{&unlisted, 405, "", "", rejected, door},
		{&unlisted, 407, "", "", rejected, door},
		{&unlisted, 421, "", "", rejected, door},
		{&unlisted, 426, "", "", rejected, door},
		{&unlisted, 431, "", "", rejected, door},
		{&unlisted, 451, "", "", rejected, door},
		{&unlisted, 307, "", "", rejected, unclear},
		{&unlisted, 308, "", "", rejected, unclear},
		{&unlisted, 301, "", "", unclear, unclear},
		{&unlisted, 302, "", "", unclear, unclear},
		{&unlisted, 304, "", "", unclear, unclear},
		{&unlisted, 101, "", "", unclear, unclear},
		{&unlisted, 409, "", inUse, rejected, retry}, // nothing is known of this provider's codes
		{&Stripe, 402, "", "", rejected, rejected},   // stored
		{&Stripe, 400, "", "", rejected, unclear},
		{&Stripe, 409, "", inUse, retry, retry},
		{&Stripe, 429, "", locked, retry, retry},
		{&Stripe, 400, "", other, conflict, conflict},
		{&Stripe, 500, "Idempotent-Replayed: true", "", stored, stored},
		{&Stripe, 402, "Stripe-Should-Retry: true", "", retry, retry},
		{&Stripe, 200, "Stripe-Should-Retry: true", "", success, success},
		{&Stripe, 500, "Stripe-Should-Retry: false", "", gaveUp, gaveUp},
		{&Stripe, 429, "Stripe-Should-Retry: false", "", gaveUp, gaveUp},
		{&Stripe, 402, "Stripe-Should-Retry: false", "", rejected, rejected},
		{&Stripe, 409, "Stripe-Should-Retry: false", "", rejected, gaveUp},
		{&StripeV2, 500, "", "", retry, retry},
	}
	for _, tt := range tests {
		for _, earlier := range []bool{false, true} {
			h := http.Header{}
			if name, value, ok := strings.Cut(tt.header, ": "); ok {
				h.Set(name, value)
			}
			j := judge(tt.p, exchange{resp: &http.Response{StatusCode: tt.status, Header: h}, body: []byte(tt.body)}, earlier)
			wanted := tt.first
			if earlier {
				wanted = tt.earlier
			}
			if got := (want{j.next, j.outcome, j.reason}); got != wanted {
				t.Errorf("%s: %d %s %s, earlier=%v: %v, want %v", tt.p.Name, tt.status, tt.header, tt.body, earlier, got, wanted)
			}
			if j.next == again && j.uncertain != (tt.status != 429) {
				t.Errorf("%s: %d: uncertain=%v", tt.p.Name, tt.status, j.uncertain)
			}
		}
	}
}

func TestTransportErrorsAreJudgedByType(t *testing.T) {
	dial := func(err error) error { return &net.OpError{Op: "dial", Net: "tcp", Err: err} }
	tests := []struct {
		err     error
		next    next
		connect bool
	}{
		{dial(syscall.ECONNREFUSED), again, true},
		{dial(&net.DNSError{IsTemporary: true}), again, true},
		{dial(&net.DNSError{IsNotFound: true}), stop, true},
		{&net.OpError{Op: "read", Err: syscall.ECONNRESET}, again, false},
		{io.EOF, again, false},
		{io.ErrUnexpectedEOF, again, false},
		{errAttemptTimeout, again, false},
		{ErrAnswerLost, again, false},
		{context.Canceled, again, false}, // the loop stops by its context
		{&tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}}, stop, true},
		{x509.HostnameError{Certificate: &x509.Certificate{}}, stop, true},
		{tls.RecordHeaderError{}, again, true},
		{errors.New("no such host: text means nothing"), again, false},
	}
	for _, tt := range tests {
		if j := judge(&unlisted, exchange{err: tt.err}, false); j.next != tt.next || j.outcome != Unknown || !j.uncertain {
			t.Errorf("%v: %+v, want %v", tt.err, j, tt.next)
		}
		if j := judge(&unlisted, exchange{err: tt.err, notSent: true}, false); j.uncertain {
			t.Errorf("%v, not sent: uncertain", tt.err)
		}
		if connectError(tt.err) != tt.connect {
			t.Errorf("connectError(%v) = %v", tt.err, !tt.connect)
		}
	}
}

func TestResendEndsWellBeforeTheWindow(t *testing.T) {
	o := &Options{}
	if got, want := Stripe.resendFor(o.attemptTimeout(&Stripe)).String(), "23h30m0s"; got != want {
		t.Errorf("Stripe v1: %s, want %s", got, want)
	}
	short := Provider{Window: 30 * 60e9}
	if got, want := short.resendFor(o.attemptTimeout(&short)).String(), "28m30s"; got != want {
		t.Errorf("half an hour: %s, want %s", got, want)
	}
}

func TestProviderIsFoundByHostAndPath(t *testing.T) {
	c := &Client{opts: Options{Providers: []Provider{{Name: "mine", Hosts: []string{"*.stripe.com", "x"}, PathPrefix: "/v1/refunds"}}}}
	for raw, want := range map[string]string{
		"https://api.stripe.com/v1/refunds": "mine",
		"https://API.Stripe.com/v1/charges": "Stripe v1",
		"https://api.stripe.com:443/v2/x":   "Stripe v2",
		"https://stripe.com/v1/refunds":     "default",
		"https://evilstripe.com/v1/refunds": "default",
		"https://api.twilio.com/2010":       "Twilio",
		"https://x/v1/refunds/1":            "mine",
	} {
		if got := c.provider(post(t, raw, "").URL).Name; got != want {
			t.Errorf("%s: %s, want %s", raw, got, want)
		}
	}
}

// A provider is looked for at every request, also those without a key.
func TestProvidersAreFoundWithoutAllocation(t *testing.T) {
	c := &Client{}
	for _, raw := range []string{"https://api.example.com/v1/charges", "https://acme.chargebee.com/api/v2/customers", "https://[::1]:8080/"} {
		u := post(t, raw, "").URL
		if n := testing.AllocsPerRun(100, func() { c.provider(u) }); n > 0 {
			t.Errorf("%s: %v allocations", raw, n)
		}
	}
}
