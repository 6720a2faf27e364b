package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/oncehttptest"
	"github.com/stripe/stripe-go/v84"
)

var update = flag.Bool("update", false, "write the table of README.md")

// A situation is what an API does to one call.
type situation struct {
	name      string
	script    []oncehttptest.Fault
	method    string // the payment method; empty means one that pays
	failing   *stripeError
	cancelled time.Duration // when the caller's context is; 0 means never

	alone, ours seen
}

// seen is what was seen of a call: on the wire, by the caller, and afterwards.
type seen struct {
	attempts, keys int
	least, most    time.Duration // that the call took
	err            string
	info           string // of the operation
	again          int    // PaymentIntents, when a caller with an error has called again
}

// Full jitter is up to 500 ms, then up to 1 s. stripe-go's first wait is 500 ms.
const wait1, wait2 = 500 * time.Millisecond, 1500 * time.Millisecond

// atTheDoor is a refusal with Stripe's body, before anything is executed.
func atTheDoor(e stripeError, header ...string) oncehttptest.Fault {
	body, err := json.Marshal(e.body())
	if err != nil {
		panic(err)
	}
	return oncehttptest.Answer(e.Status, string(body), append([]string{"Content-Type", "application/json", "Request-Id", requestID}, header...)...)
}

var (
	inUse       = stripeError{Status: 409, Type: "idempotency_error", Code: "idempotency_key_in_use", Message: "There is currently another in-progress request using this Idempotent Key."}
	rateLimited = stripeError{Status: 429, Type: "invalid_request_error", Code: "rate_limit", Message: "Request rate limit exceeded."}
	lockTimeout = stripeError{Status: 429, Type: "invalid_request_error", Code: "lock_timeout", Message: "This object cannot be accessed right now because another API request or Stripe process is currently accessing it."}
	broken      = stripeError{Status: 500, Type: "api_error", Message: "An unknown error occurred."}
	unavailable = stripeError{Status: 503, Type: "api_error", Message: "Stripe is currently unavailable."}
)

var situations = []situation{
	{
		name:  "200",
		alone: seen{attempts: 1, keys: 1, again: 1},
		ours:  seen{attempts: 1, keys: 1, again: 1, info: "succeeded"},
	}, {
		name: "402, declined", method: "pm_card_visa_chargeDeclined",
		alone: seen{attempts: 1, keys: 1, err: "402 card_declined"},
		ours:  seen{attempts: 1, keys: 1, err: "402 card_declined", info: "rejected"},
	}, {
		name: "409, key in use", script: []oncehttptest.Fault{atTheDoor(inUse)},
		alone: seen{attempts: 1, keys: 1, err: "409 idempotency_key_in_use", again: 1},
		ours:  seen{attempts: 2, keys: 1, most: wait1, again: 1, info: "succeeded"},
	}, {
		name: "429, Retry-After: 2", script: []oncehttptest.Fault{atTheDoor(rateLimited, "Retry-After", "2")},
		alone: seen{attempts: 1, keys: 1, err: "429 rate_limit", again: 1},
		ours:  seen{attempts: 2, keys: 1, least: 2 * time.Second, most: 3500 * time.Millisecond, again: 1, info: "succeeded"},
	}, {
		name: "429, lock_timeout", script: []oncehttptest.Fault{atTheDoor(lockTimeout)},
		alone: seen{attempts: 2, keys: 1, least: wait1, most: wait1, again: 1},
		ours:  seen{attempts: 2, keys: 1, most: wait1, again: 1, info: "succeeded"},
	}, {
		name: "500 after the payment, stored", failing: &broken,
		alone: seen{attempts: 1, keys: 1, err: "500 api_error", again: 2},
		ours:  seen{attempts: 2, keys: 1, most: wait1, err: "500 api_error", again: 1, info: "unknown: stored failure"},
	}, {
		name: "500, not stored", script: []oncehttptest.Fault{atTheDoor(broken)},
		alone: seen{attempts: 1, keys: 1, err: "500 api_error", again: 1},
		ours:  seen{attempts: 2, keys: 1, most: wait1, again: 1, info: "succeeded"},
	}, {
		name: "503, twice, Stripe-Should-Retry: true", script: []oncehttptest.Fault{atTheDoor(unavailable, "Stripe-Should-Retry", "true"), atTheDoor(unavailable, "Stripe-Should-Retry", "true")},
		alone: seen{attempts: 1, keys: 1, err: "503 api_error", again: 1},
		ours:  seen{attempts: 3, keys: 1, most: wait2, again: 1, info: "succeeded"},
	}, {
		name: "answer cut off, once", script: []oncehttptest.Fault{oncehttptest.TruncateResponse(40)},
		alone: seen{attempts: 2, keys: 1, least: wait1, most: wait1, again: 1},
		ours:  seen{attempts: 2, keys: 1, most: wait1, again: 1, info: "succeeded"},
	}, {
		name: "no answer", script: []oncehttptest.Fault{oncehttptest.Hold(-1)},
		alone: seen{attempts: 2, keys: 1, least: 80*time.Second + wait1, most: 80*time.Second + wait1, again: 1},
		ours:  seen{attempts: 2, keys: 1, least: 80 * time.Second, most: 80*time.Second + wait1, again: 1, info: "succeeded"},
	}, {
		name: "no answer, cancelled after 1 s", script: []oncehttptest.Fault{oncehttptest.Hold(-1)}, cancelled: time.Second,
		alone: seen{attempts: 1, keys: 1, least: time.Second, most: time.Second, err: "context canceled", again: 2},
		ours:  seen{attempts: 1, keys: 1, least: time.Second, most: time.Second, err: "context canceled", info: "unknown: gave up", again: 1},
	}, {
		// A backoff that is over by then has a probability of 2 in a million.
		name: "connection reset, cancelled while it waits", script: []oncehttptest.Fault{oncehttptest.DropResponse()}, cancelled: time.Microsecond,
		alone: seen{attempts: 1, keys: 1, least: wait1, most: wait1, err: "context canceled", again: 2},
		ours:  seen{attempts: 1, keys: 1, least: time.Microsecond, most: time.Microsecond, err: "context canceled", info: "unknown: gave up", again: 1},
	},
}

// A caller is stripe-go in one of the two columns. info is nil for stripe-go alone.
type caller func(ctx context.Context, method string) (info *oncehttp.Info, err error)

func alone(_ *testing.T, b *bank) caller {
	api := apiOver(&stripe.BackendConfig{HTTPClient: &http.Client{Transport: b.Transport(), Timeout: 80 * time.Second}}) // stripe-go's own timeout
	return func(ctx context.Context, method string) (*oncehttp.Info, error) {
		_, err := api.V1PaymentIntents.Create(ctx, payBy(method))
		return nil, err
	}
}

func onOurTransport(t *testing.T, b *bank) caller {
	client, err := oncehttp.New(oncehttptest.NewStore(), &oncehttp.Options{HTTPClient: &http.Client{Transport: b.Transport()}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	api := apiOver(&stripe.BackendConfig{HTTPClient: client.StandardClient(), MaxNetworkRetries: stripe.Int64(0)})
	return func(ctx context.Context, method string) (*oncehttp.Info, error) {
		ctx, op := oncehttp.Start(ctx, oncehttp.Op{Key: oncehttp.KeyFor("order", "A-1")})
		_, err := api.V1PaymentIntents.Create(ctx, payBy(method))
		info := op.Info()
		return &info, err
	}
}

func apiOver(backend *stripe.BackendConfig) *stripe.Client {
	backend.LeveledLogger = &stripe.LeveledLogger{Level: stripe.LevelNull}
	return stripe.NewClient("sk_test_x", stripe.WithBackends(stripe.NewBackendsWithConfig(backend)))
}

func payBy(method string) *stripe.PaymentIntentCreateParams {
	params := paymentFor("A-1")
	params.PaymentMethod = stripe.String(cmp.Or(method, "pm_card_visa"))
	return params
}

// look makes one call in a situation, and a second one if that ends in an error.
// It returns what was seen, with least as what the call took.
func look(t *testing.T, s situation, by func(*testing.T, *bank) caller) (saw seen) {
	synctest.Test(t, func(t *testing.T) {
		b := newBank()
		var over atomic.Bool // the first call; the second one meets no fault
		b.ScriptFor(func(oncehttptest.Attempt) bool { return !over.Load() }, s.script...)
		b.failing = func(r *http.Request) *stripeError {
			failing := s.failing
			s.failing = nil // once
			return failing
		}
		call := by(t, b)
		ctx, cancel := context.WithCancel(t.Context())
		if s.cancelled > 0 {
			time.AfterFunc(s.cancelled, cancel)
		}
		start := time.Now()
		info, err := call(ctx, s.method)
		saw.least = time.Since(start)
		cancel()
		saw.err = describe(err)
		if info != nil {
			if saw.info = info.Outcome.String(); info.Reason != oncehttp.NoReason {
				saw.info += ": " + info.Reason.String()
			}
		}
		keys := map[string]bool{}
		for _, a := range b.Attempts() {
			keys[a.Key] = true
		}
		saw.attempts, saw.keys = len(b.Attempts()), len(keys)
		if err != nil {
			over.Store(true)
			call(t.Context(), s.method)
		}
		saw.again = len(b.made())
		b.Close()
	})
	return saw
}

// describe names an error of stripe-go's: Stripe's own by status and code, others
// by their cause.
func describe(err error) string {
	var said *stripe.Error
	var op *oncehttp.OperationError
	var sent *url.Error
	switch {
	case err == nil:
		return ""
	case errors.As(err, &said):
		return fmt.Sprint(said.HTTPStatusCode, " ", cmp.Or(string(said.Code), string(said.Type)))
	case errors.As(err, &op):
		err = op.Err
	case errors.As(err, &sent):
		err = sent.Err
	}
	return err.Error()
}

func (want seen) check(t *testing.T, saw seen) {
	t.Helper()
	took := saw.least
	saw.least, saw.most = want.least, want.most
	if saw != want {
		t.Errorf("saw  %+v\nwant %+v", saw, want)
	}
	if took < want.least || took > want.most {
		t.Errorf("took %v, not %v to %v", took, want.least, want.most)
	}
}

// TestTable: what stripe-go does alone, and what on our transport. README.md says
// the same.
func TestTable(t *testing.T) {
	var table strings.Builder
	table.WriteString("\n| | | attempts | keys | time | the caller's error | `op.Info()` | called again |\n|---|---|---|---|---|---|---|---|\n")
	for _, s := range situations {
		t.Run(s.name, func(t *testing.T) {
			t.Run("alone", func(t *testing.T) { s.alone.check(t, look(t, s, alone)) })
			t.Run("ours", func(t *testing.T) { s.ours.check(t, look(t, s, onOurTransport)) })
		})
		table.WriteString(s.alone.row(s.name, "alone") + s.ours.row("", "ours"))
	}
	if t.Failed() {
		return
	}
	const begin, end = "<!-- table -->\n", "<!-- end -->"
	page, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	head, rest, _ := strings.Cut(string(page), begin)
	_, tail, ok := strings.Cut(rest, end)
	if !ok {
		t.Fatal("README.md has no place for the table")
	}
	if want := []byte(head + begin + table.String() + "\n" + end + tail); bytes.Equal(page, want) {
		return
	} else if !*update {
		t.Errorf("README.md does not have this table; write it with -update\n%s", &table)
	} else if err := os.WriteFile("README.md", want, 0o644); err != nil {
		t.Error(err)
	}
}

func (s seen) row(name, who string) string {
	took := "at once"
	switch {
	case s.most < time.Millisecond:
	case s.least == s.most:
		took = s.most.String()
	case s.least > 0:
		took = fmt.Sprintf("%v to %v", s.least, s.most)
	default:
		took = fmt.Sprintf("up to %v", s.most)
	}
	again := "one"
	switch s.again {
	case 0:
		again = "none"
	case 2:
		again = "**two**"
	}
	return fmt.Sprintf("| %s | %s | %d | %d | %s | %s | %s | %s |\n", name, who, s.attempts, s.keys, took, cmp.Or(s.err, "none"), cmp.Or(s.info, "–"), again)
}
