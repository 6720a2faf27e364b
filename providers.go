package oncehttp

import (
	"net/http"
	"strings"
	"time"
)

// What is assumed where a provider does not say it: the shortest window that any
// of them documents, and a key that is no longer than a UUID, which fits all of
// them.
const (
	undocumentedWindow = 30 * time.Minute
	undocumentedMaxKey = 36
)

// postOnly are the keyed methods of APIs that take keys for POST alone.
var postOnly = []string{http.MethodPost}

// Stripe is the built-in provider of Stripe's API v1.
//
//   - Stored: every answer once execution began, 500 included; not a 401, a 429
//     or most 400s. A replayed 5xx is unknown: it is to be reconciled.
//   - Conflicts: 409 idempotency_key_in_use is in flight, 429 lock_timeout was
//     not executed, 400 idempotency_error is another payload. Stripe-Should-Retry
//     is obeyed both ways.
//   - Sources: https://docs.stripe.com/api/idempotent_requests (keys of up to 255
//     characters, removed after at least 24 hours, 500s stored),
//     https://docs.stripe.com/error-low-level (statuses, headers), and the
//     stripe-go client (80 s).
var Stripe = Provider{
	Name:               "Stripe v1",
	Hosts:              []string{"api.stripe.com"},
	PathPrefix:         "/v1/",
	Window:             24 * time.Hour,
	Account:            stripeAccount,
	FingerprintHeaders: []string{"Stripe-Account", "Stripe-Context"},
	Judge:              judgeStripe,
	StoredRefusals:     []int{http.StatusPaymentRequired},
	AttemptTimeout:     80 * time.Second,
}

// StripeV2 is the built-in provider of Stripe's API v2.
//
//   - Stored: successes; failed work is executed again on a retry.
//   - Conflicts: as v1.
//   - Sources: https://docs.stripe.com/api-v2-overview#idempotency (POST and
//     DELETE, 30 days).
var StripeV2 = Provider{
	Name:               "Stripe v2",
	Hosts:              []string{"api.stripe.com"},
	PathPrefix:         "/v2/",
	Methods:            []string{http.MethodPost, http.MethodDelete},
	Window:             30 * 24 * time.Hour,
	Account:            stripeAccount,
	FingerprintHeaders: []string{"Stripe-Account", "Stripe-Context"},
	Judge:              judgeStripe,
	AttemptTimeout:     80 * time.Second,
}

// Adyen is the built-in provider of Adyen's APIs. Keys are per company account
// and per region: an operation must be retried in the region it was sent to.
//
//   - Stored: the answer to the first attempt, which is replayed with the key in
//     its header Idempotency-Key.
//   - Conflicts: error 704, with 409 or 422, is in flight. transient-error: true
//     was not executed, transient-error: false is not retried.
//   - Unconfirmed: whether a refused payload is stored; after an attempt of
//     unknown effect, a 4xx is unknown.
//   - Sources: https://docs.adyen.com/development-resources/api-idempotency (POST,
//     64 characters, at least 7 days, errors; an older page had 31 days),
//     https://github.com/Adyen/adyen-go-api-library (hosts).
var Adyen = Provider{
	Name:    "Adyen",
	Hosts:   []string{"*.adyen.com", "*.adyenpayments.com"},
	Methods: postOnly,
	MaxKey:  64,
	Window:  7 * 24 * time.Hour,
	Judge:   judgeAdyen,
}

// PayPal is the built-in provider of PayPal's REST APIs. How long a key is
// remembered depends on the API: 3 hours in the vault, 6 for orders, 45 days for
// payments. This has the shortest of them; a copy with another PathPrefix and
// Window knows better. Not every API takes a key.
//
//   - Stored: the operation; the answer is its latest status, not the first one.
//   - Conflicts: issue PREVIOUS_REQUEST_IN_PROGRESS, with 409, is in flight.
//     DUPLICATE_REQUEST_ID and PAYPAL_REQUEST_ID_PREVIOUSLY_USED are another
//     payload.
//   - Unconfirmed: the length of 108 characters outside of orders and vault.
//   - Sources: https://developer.paypal.com/reference/guidelines/idempotency
//     (POST, latest status), https://developer.paypal.com/api/rest/requests/
//     (header, hosts),
//     https://github.com/paypal/paypal-rest-api-specifications (windows, length,
//     409),
//     https://developer.paypal.com/api/payment-tokens/v3/errors/paypal_request_id_previously_used.
var PayPal = Provider{
	Name:    "PayPal",
	Hosts:   []string{"api-m.paypal.com", "api-m.sandbox.paypal.com", "api.paypal.com", "api.sandbox.paypal.com"},
	Header:  "PayPal-Request-Id",
	Methods: postOnly,
	MaxKey:  108,
	Window:  3 * time.Hour,
	Judge:   judgePayPal,
}

// Checkout is the built-in provider of payments at Checkout.com. Of its other
// endpoints, /payment-contexts takes keys, too; a POST to the rest is only sent
// again if it was provably not sent.
//
//   - Stored: 2xx alone. After a 4xx or 5xx the payment is attempted again.
//   - Conflicts: 409 is in flight (until 2024 it was 429), to be retried after 30
//     seconds or more.
//   - Unconfirmed: the longest key. Older pages have 120 seconds for the window of
//     the sandbox, the current one has 24 hours.
//   - Sources: https://www.checkout.com/docs/payments/manage-payments/idempotency
//     (endpoints, header, window, what is stored, 30 s),
//     https://support.checkout.com/hc/en-us/articles/24570669653010 (409),
//     https://github.com/checkout/checkout-sdk-go (hosts).
var Checkout = Provider{
	Name:         "Checkout.com payments",
	Hosts:        checkoutHosts,
	PathPrefix:   "/payments",
	Header:       "Cko-Idempotency-Key",
	Methods:      postOnly,
	MaxKey:       undocumentedMaxKey,
	Window:       24 * time.Hour,
	Judge:        judgeConflictInFlight,
	InFlightWait: 30 * time.Second,
}

// CheckoutTransfers is the built-in provider of transfers at Checkout.com.
//
//   - Stored: as payments.
//   - Conflicts: as payments.
//   - Unconfirmed: the longest key.
//   - Sources: those of payments.
var CheckoutTransfers = Provider{
	Name:         "Checkout.com transfers",
	Hosts:        []string{"transfers.checkout.com", "transfers.sandbox.checkout.com"},
	Header:       "Cko-Idempotency-Key",
	Methods:      postOnly,
	MaxKey:       undocumentedMaxKey,
	Window:       24 * time.Hour,
	Judge:        judgeConflictInFlight,
	InFlightWait: 30 * time.Second,
}

var checkoutHosts = []string{"api.checkout.com", "*.api.checkout.com", "api.sandbox.checkout.com", "*.api.sandbox.checkout.com"}

var checkoutOther = Provider{Name: "Checkout.com", Hosts: checkoutHosts, NoKeys: true}

// GoCardless is the built-in provider of GoCardless. Endpoints that create take
// keys; actions, such as cancel, ignore them, but fail the second time.
//
//   - Stored: what was created, not the answer: a second request is answered with
//     409 and the resource's id in links.conflicting_resource_id.
//   - Conflicts: 409 idempotent_creation_conflict is already created: succeeded.
//   - Unconfirmed: the longest key. The window: the page promises one resource
//     however often a request is sent, and no end of that.
//   - Sources: https://gocardless.com/blog/idempotency-keys/ (header, POST, 409),
//     https://github.com/gocardless/gocardless-pro-ruby (reason, links, hosts).
var GoCardless = Provider{
	Name:    "GoCardless",
	Hosts:   []string{"api.gocardless.com", "api-sandbox.gocardless.com"},
	Methods: postOnly,
	MaxKey:  undocumentedMaxKey,
	Window:  24 * time.Hour,
	Judge:   judgeGoCardless,
}

// Increase is the built-in provider of Increase. Its lists can be filtered by
// idempotency_key, to find what became of an operation.
//
//   - Stored: the object created, replayed with Idempotent-Replayed: true. A
//     request that failed is executed again.
//   - Conflicts: 409 idempotency_key_already_used_error is another payload; its
//     resource_id is the object that has the key.
//   - Unconfirmed: the window. The page promises one object per key, and no end of
//     that. What a concurrent request is answered.
//   - Sources: https://increase.com/documentation/idempotency-keys (POST, 200
//     characters, replays, 409), https://increase.com/documentation/errors (types).
var Increase = Provider{
	Name:    "Increase",
	Hosts:   []string{"api.increase.com", "sandbox.increase.com"},
	Methods: postOnly,
	MaxKey:  200,
	Window:  24 * time.Hour,
	Judge:   judgeIncrease,
}

// TrueLayer is the built-in provider of TrueLayer's Payments API v3. Tl-Signature
// signs the key with the request: who signs above the client must set the header
// to the operation's key.
//
//   - Stored: the answer.
//   - Conflicts: 409 idempotency-key-concurrency-conflict is in flight, any other
//     409 conflict of requests is retried, 422 idempotency-key-reuse is another
//     payload.
//   - Unconfirmed: the longest key; the window of 6 hours is an older page's, the
//     current one has 30 days.
//   - Sources: https://docs.truelayer.com/docs/idempotency-for-payment-requests (30
//     days), https://docs.truelayer.com/docs/idempotency (6 hours),
//     https://docs.truelayer.com/docs/error-types (409, 422),
//     https://github.com/TrueLayer/truelayer-php (their bodies).
var TrueLayer = Provider{
	Name:    "TrueLayer",
	Hosts:   []string{"api.truelayer.com", "api.truelayer-sandbox.com"},
	Methods: postOnly,
	MaxKey:  undocumentedMaxKey,
	Window:  6 * time.Hour,
	Judge:   judgeTrueLayer,
}

// MercadoPago is the built-in provider of Mercado Pago. There is no sandbox host.
//
//   - Stored: what was created, which is answered again.
//   - Conflicts: 409 with cause 401001 and 423 resource_locked are in flight; 409
//     idempotency_key_already_used (orders) says that the key is known, not with
//     what: another payload.
//   - Unconfirmed: the longest key, the window, and what is stored of failures.
//   - Sources:
//     https://www.mercadopago.com.br/developers/en/docs/wallet-connect/payment-flow/idempotency/responses
//     (answers),
//     https://www.mercadopago.com.br/developers/en/news/2023/01/04/Idempotency-key-usage-will-be-mandatory
//     (header; payments and refunds),
//     https://github.com/mercadopago/devsite-docs (errors of orders).
var MercadoPago = Provider{
	Name:    "Mercado Pago",
	Hosts:   []string{"api.mercadopago.com"},
	Header:  "X-Idempotency-Key",
	Methods: postOnly,
	MaxKey:  undocumentedMaxKey,
	Window:  undocumentedWindow,
	Judge:   judgeMercadoPago,
}

// RazorpayPayouts is the built-in provider of payouts at RazorpayX. Keys are made
// of 4 to 36 letters, digits, hyphens and underscores. A POST to another path of
// Razorpay is only sent again if it was provably not sent.
//
//   - Stored: the payout; its latest state is answered.
//   - Conflicts: another payload is a 400 BAD_REQUEST_ERROR that only its
//     description tells from others: rejected at first, else unknown.
//   - Unconfirmed: what a concurrent request is answered.
//   - Sources: https://razorpay.com/docs/api/x/payout-idempotency/make-request
//     (header, length, payload), https://razorpay.com/docs/razorpayx/api/idempotency/
//     (7 days, latest state).
var RazorpayPayouts = Provider{
	Name:       "Razorpay payouts",
	Hosts:      razorpayHosts,
	PathPrefix: "/v1/payouts",
	Header:     "X-Payout-Idempotency",
	Methods:    postOnly,
	MaxKey:     36,
	Window:     7 * 24 * time.Hour,
}

var razorpayHosts = []string{"api.razorpay.com"}

var razorpayOther = Provider{Name: "Razorpay", Hosts: razorpayHosts, NoKeys: true}

// Chargebee is the built-in provider of Chargebee, of all sites. Estimates take no
// keys.
//
//   - Stored: the answer, replayed with chargebee-idempotency-replayed: true.
//   - Conflicts: another path, body or header under the key is an error.
//   - Unconfirmed: the code of that error; what a concurrent request is answered;
//     which failures are stored.
//   - Sources: https://apidocs.chargebee.com/docs/api/idempotency (POST, header, 100
//     characters, 30 minutes, replays).
var Chargebee = Provider{
	Name:           "Chargebee",
	Hosts:          []string{"*.chargebee.com"},
	Header:         "chargebee-idempotency-key",
	Methods:        postOnly,
	MaxKey:         100,
	Window:         30 * time.Minute,
	ReplayedHeader: "chargebee-idempotency-replayed",
}

// Qonto is the built-in provider of Qonto's Business API. Only the endpoints that
// document the header take keys.
//
//   - Stored: successes, also answered to another payload.
//   - Conflicts: none documented.
//   - Unconfirmed: the longest key; what a concurrent request is answered; keys of
//     PATCH.
//   - Sources: https://docs.qonto.com/get-started/general/idempotent-requests
//     (header, 30 minutes, what is stored),
//     https://docs.qonto.com/get-started/general/errors (shape of errors).
var Qonto = Provider{
	Name:    "Qonto",
	Hosts:   []string{"thirdparty.qonto.com", "thirdparty-sandbox.staging.qonto.co"},
	Header:  "X-Qonto-Idempotency-Key",
	Methods: postOnly,
	MaxKey:  undocumentedMaxKey,
	Window:  30 * time.Minute,
}

// Dwolla is the built-in provider of Dwolla.
//
//   - Stored: what was created: 201 with its Location again.
//   - Conflicts: 409 is in flight. A key belongs to its exact body: with another
//     one it is another key.
//   - Unconfirmed: the longest key; whether 409 has other meanings.
//   - Sources:
//     https://developers.dwolla.com/docs/api-reference/api-fundamentals/idempotency-key
//     (header, POST, 24 hours, 201, 409, hosts).
var Dwolla = Provider{
	Name:    "Dwolla",
	Hosts:   []string{"api.dwolla.com", "api-sandbox.dwolla.com"},
	Methods: postOnly,
	MaxKey:  undocumentedMaxKey,
	Window:  24 * time.Hour,
	Judge:   judgeConflictInFlight,
}

// Worldpay is the built-in provider of Worldpay, without keys: it takes them
// (Idempotency-Key, for 1 to 365 days) from customers for whom that was enabled,
// refuses them from others, and executes a request whose key it cannot check.
// Who has it enabled lists a Provider of their own.
//
//   - Stored: with keys enabled, the answer.
//   - Conflicts: error code 9, Request in progress, in XML with status 200.
//   - Unconfirmed: whether access.worldpay.com knows keys.
//   - Sources: https://developer.worldpay.com/docs/wpg/idempotency/ (who, window),
//     https://developer.worldpay.com/docs/wpg/troubleshoot/idempotencyerrors/
//     (errors).
var Worldpay = Provider{
	Name:   "Worldpay",
	Hosts:  []string{"secure.worldpay.com", "secure-test.worldpay.com", "access.worldpay.com", "try.access.worldpay.com"},
	NoKeys: true,
}

// Square is the built-in provider of Square. The key is a field of the body.
//
//   - Stored: the first success; what else is not documented.
//   - Conflicts: 400 IDEMPOTENCY_KEY_REUSED is another payload.
//   - Unconfirmed: the window: Square does not publish one. Payments take keys of
//     45 characters, other APIs longer ones.
//   - Sources: https://developer.squareup.com/docs/working-with-apis/idempotency,
//     https://developer.squareup.com/reference/square/payments-api/create-payment
//     (field, length),
//     https://developer.squareup.com/forums/t/how-long-are-idempotency-keys-retained-for-the-createpayment-endpoint/28303
//     (no window).
var Square = Provider{
	Name:      "Square",
	Hosts:     []string{"connect.squareup.com", "connect.squareupsandbox.com"},
	BodyField: "idempotency_key",
	MaxKey:    45,
	Window:    undocumentedWindow,
	Judge:     judgeSquare,
}

// Plaid is the built-in provider of Plaid. The key is a field of the body, and is
// unique only together with the account, the amount and the like; a declined
// authorization is not remembered.
//
//   - Stored: what was created.
//   - Conflicts: none documented.
//   - Unconfirmed: that 48 hours, which are documented for authorizations, hold for
//     all endpoints; bank transfers have 7 days.
//   - Sources: https://plaid.com/docs/api/products/transfer/initiating-transfers/
//     (field, 50 characters, 48 hours),
//     https://plaid.com/docs/bank-transfers/idempotency-and-retries (7 days,
//     uniqueness).
var Plaid = Provider{
	Name:      "Plaid",
	Hosts:     []string{"production.plaid.com", "sandbox.plaid.com"},
	BodyField: "idempotency_key",
	MaxKey:    50,
	Window:    48 * time.Hour,
}

// Twilio is the built-in provider of Twilio's API, which has no idempotency
// keys: a POST that may have been received must not be sent again.
//
//   - Stored: nothing.
//   - Conflicts: none.
//   - Sources: https://www.twilio.com/docs/usage/api.
var Twilio = Provider{Name: "Twilio", Hosts: []string{"api.twilio.com"}, NoKeys: true}

// builtinProviders are the built-in providers, those with a path before those of
// the whole host.
var builtinProviders = []*Provider{
	&Stripe, &StripeV2, &Adyen, &PayPal, &Checkout, &CheckoutTransfers, &checkoutOther, &GoCardless, &Increase, &TrueLayer,
	&MercadoPago, &RazorpayPayouts, &razorpayOther, &Chargebee, &Qonto, &Dwolla, &Worldpay, &Square, &Plaid, &Twilio,
}

// builtinByDomain are the built-in providers by the last two labels of their
// hosts, so that a request to any other host costs one look.
var builtinByDomain = func() map[string][]*Provider {
	m := make(map[string][]*Provider)
	for _, p := range builtinProviders {
		seen := make(map[string]bool)
		for _, host := range p.Hosts {
			if d := domain(host); !seen[d] {
				seen[d] = true
				m[d] = append(m[d], p)
			}
		}
	}
	return m
}()

// domain returns the last two labels of a host, in lower case.
func domain(host string) string {
	last := strings.LastIndexByte(host, '.')
	return strings.ToLower(host[strings.LastIndexByte(host[:max(last, 0)], '.')+1:])
}

// stripeAccount tells test from live mode by the API key's prefix, and the
// connected account by its headers.
func stripeAccount(h http.Header) string {
	mode := ""
	token := h.Get("Authorization")
	if user, _, ok := (&http.Request{Header: h}).BasicAuth(); ok {
		token = user
	}
	switch {
	case strings.Contains(token, "k_live_"):
		mode = "live"
	case strings.Contains(token, "k_test_"):
		mode = "test"
	}
	return mode + "/" + h.Get("Stripe-Account") + "/" + h.Get("Stripe-Context")
}
