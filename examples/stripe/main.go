// Stripe is a program that pays orders with stripe-go, each once, and finishes at
// the next start what a crash has left unfinished. Without a key it pays in a
// demonstration of its own; see demo.go.
//
//	STRIPE_API_KEY=sk_test_… go run . -die A-1   # killed when the payment was made
//	STRIPE_API_KEY=sk_test_… go run . A-1 A-2    # A-1 is found again, and paid once
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/stripe/stripe-go/v84"
)

func main() {
	c := config{key: os.Getenv("STRIPE_API_KEY"), out: os.Stdout}
	flag.StringVar(&c.dir, "dir", ".", "where operations.db and the ledger are")
	flag.StringVar(&c.url, "url", "", "of an API like Stripe's; empty means Stripe's own")
	die := flag.Bool("die", false, "be killed when the first answer arrives, before it is recorded")
	flag.Parse()
	if *die {
		c.trace = &oncehttp.Trace{AttemptDone: func(oncehttp.AttemptInfo) { killSelf() }}
	}
	run := c.run
	if c.key == "" {
		run = demo
	}
	if err := run(context.Background(), flag.Args()); err != nil {
		log.Fatal(err)
	}
}

func killSelf() {
	if self, err := os.FindProcess(os.Getpid()); err == nil && self.Kill() == nil {
		select {} // until it arrives
	}
}

type config struct {
	key, url, dir string
	out           io.Writer
	trace         *oncehttp.Trace
}

// run finishes what an earlier run has begun, and pays orders.
func (c config) run(ctx context.Context, orders []string) (err error) {
	s, err := c.open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	if err := s.resume(ctx); err != nil {
		return err
	}
	for _, order := range orders {
		err = errors.Join(err, s.pay(ctx, order))
	}
	return err
}

// A shop pays orders.
type shop struct {
	*ledger // what was paid
	client  *oncehttp.Client
	api     *stripe.Client
}

func (c config) open() (*shop, error) {
	if err := checkKey(c.key); err != nil {
		return nil, err
	}
	book, err := openLedger(filepath.Join(c.dir, "ledger"), c.out)
	if err != nil {
		return nil, err
	}
	options := &oncehttp.Options{
		Authorize: func(_ context.Context, _ oncehttp.Info, req *http.Request) error { // for what is resumed
			req.Header.Set("Authorization", "Bearer "+c.key)
			return nil
		},
		Trace: c.trace,
	}
	backend := &stripe.BackendConfig{MaxNetworkRetries: stripe.Int64(0)} // the client's attempts are enough
	if c.url != "" {
		u, err := url.Parse(c.url)
		if err != nil {
			return nil, errors.Join(err, book.Close())
		}
		likeStripe := oncehttp.Stripe // the same rules on another host
		likeStripe.Hosts = []string{u.Hostname()}
		options.Providers = []oncehttp.Provider{likeStripe}
		backend.URL = stripe.String(c.url)
	}
	client, err := oncehttp.Open(filepath.Join(c.dir, "operations.db"), options)
	if err != nil {
		return nil, errors.Join(err, book.Close())
	}
	backend.HTTPClient = client.StandardClient()
	api := stripe.NewClient(c.key, stripe.WithBackends(stripe.NewBackendsWithConfig(backend)))
	return &shop{book, client, api}, nil
}

func (s *shop) Close() error { return errors.Join(s.client.Close(), s.ledger.Close()) }

// checkKey refuses what could move real money. It does not repeat the key.
func checkKey(key string) error {
	switch {
	case strings.HasPrefix(key, "sk_test_"), strings.HasPrefix(key, "rk_test_"):
		return nil
	case strings.Contains(key, "_live_"):
		return errors.New("STRIPE_API_KEY is a live key, and this is an example: use a test key, sk_test_… or rk_test_…")
	}
	return errors.New("STRIPE_API_KEY is not a test key: it has to begin with sk_test_ or rk_test_")
}

// pay pays an order, once, however often it is called.
func (s *shop) pay(ctx context.Context, order string) error {
	if s.has(order) {
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // an answer that is not acknowledged by then is for resume
	ctx, op := oncehttp.Start(ctx, oncehttp.Op{
		Key:      oncehttp.KeyFor("order", order), // the same order, the same key
		Metadata: map[string]string{"order": order},
	})
	intent, err := s.api.V1PaymentIntents.Create(ctx, paymentFor(order))
	result := ""
	switch info := op.Info(); info.Outcome {
	case oncehttp.Succeeded:
		if err != nil { // the payment was made, and what is said of it cannot be read
			return fmt.Errorf("order %s: %w", order, err)
		}
		result = intent.ID
	case oncehttp.Rejected:
		var refusal *stripe.Error
		if !errors.As(err, &refusal) {
			return fmt.Errorf("order %s: %w", order, err)
		}
		result = cmp.Or(string(refusal.Code), string(refusal.Type))
	default: // not sent, or nobody knows: the same key goes on with it
		return fmt.Errorf("order %s is %v: %w", order, info.Outcome, err)
	}
	if err := s.record(order, op.Info().Outcome, result); err != nil {
		return err
	}
	return op.Ack(ctx)
}

func paymentFor(order string) *stripe.PaymentIntentCreateParams {
	return &stripe.PaymentIntentCreateParams{
		Amount:        stripe.Int64(4200),
		Currency:      stripe.String("eur"),
		PaymentMethod: stripe.String("pm_card_visa"),
		Confirm:       stripe.Bool(true),
		AutomaticPaymentMethods: &stripe.PaymentIntentCreateAutomaticPaymentMethodsParams{
			Enabled: stripe.Bool(true), AllowRedirects: stripe.String("never"),
		},
		Metadata: map[string]string{"order": order},
	}
}

// resume finishes what another process began. It returns when nothing is left
// that can be sent.
func (s *shop) resume(ctx context.Context) error {
	for {
		sum, err := s.client.Resume(ctx, oncehttp.Handler{Settled: s.settled, Unknown: s.unknown})
		if err != nil || sum.Done() {
			return err
		}
		switch {
		case sum.Failed > 0:
			return fmt.Errorf("answers that could not be recorded: %d", sum.Failed)
		case len(sum.Ended) > 0:
			return fmt.Errorf("credentials were refused or are missing: %v", sum.Ended)
		}
		select {
		case <-time.After(max(10*time.Millisecond, time.Until(sum.NextDue))):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// settled records an answer of Stripe's, as pay does.
func (s *shop) settled(_ context.Context, info oncehttp.Info, resp *http.Response) error {
	var answer struct {
		ID    string
		Error struct{ Code, Type string }
	}
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
		return err
	}
	return s.record(info.Metadata["order"], info.Outcome, cmp.Or(answer.ID, answer.Error.Code, answer.Error.Type))
}

// unknown is told of what only a person can decide: see Client.Redrive, Resolve
// and Forget.
func (s *shop) unknown(_ context.Context, info oncehttp.Info) error {
	log.Printf("order %s: please look it up: %v (key %s)", info.Metadata["order"], info.Reason, info.Key)
	return nil
}
