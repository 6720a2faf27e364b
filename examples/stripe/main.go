// Stripe is a program that pays orders with stripe-go. Each order is paid once,
// and what a crash leaves unfinished is finished at the next start:
//
//	STRIPE_KEY=sk_test_… go run . A-1 A-2
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"

	"github.com/oncehttp/oncehttp"
	"github.com/stripe/stripe-go/v84"
)

func main() {
	if err := run(os.Stdout, os.Getenv("STRIPE_KEY"), nil, os.Args[1:]); err != nil {
		log.Fatal(err)
	}
}

// run finishes what an earlier run began, and pays orders. The transport is for
// tests; nil means the network.
func run(out io.Writer, key string, transport http.RoundTripper, orders []string) error {
	client, err := oncehttp.Open("operations.db", &oncehttp.Options{
		HTTPClient: &http.Client{Transport: transport},
		Authorize: func(_ context.Context, _ oncehttp.Info, req *http.Request) error { // for what is resumed
			req.Header.Set("Authorization", "Bearer "+key)
			return nil
		},
	})
	if err != nil {
		return err
	}
	defer client.Close()

	api := stripe.NewClient(key, stripe.WithBackends(stripe.NewBackendsWithConfig(&stripe.BackendConfig{
		HTTPClient:        client.StandardClient(),
		MaxNetworkRetries: stripe.Int64(0), // the client's attempts are enough
	})))

	_, err = client.Resume(context.Background(), oncehttp.Handler{
		Settled: func(_ context.Context, info oncehttp.Info, resp *http.Response) error {
			var intent stripe.PaymentIntent
			if err := json.NewDecoder(resp.Body).Decode(&intent); err != nil {
				return err
			}
			fmt.Fprintln(out, "finished", info.Metadata["order"], info.Outcome, intent.ID) // record it: once for each order
			return nil
		},
	})
	if err != nil {
		return err
	}
	for _, order := range orders {
		if err := pay(out, api, order); err != nil {
			fmt.Fprintln(out, err)
		}
	}
	return nil
}

// pay pays an order, once, however often it is called.
func pay(out io.Writer, api *stripe.Client, order string) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ctx, op := oncehttp.Start(ctx, oncehttp.Op{
		Key:      oncehttp.KeyFor("order", order), // the same order, the same key
		Metadata: map[string]string{"order": order},
	})
	intent, err := api.V1PaymentIntents.Create(ctx, &stripe.PaymentIntentCreateParams{
		Amount: stripe.Int64(1000), Currency: stripe.String("eur"),
	})
	outcome := op.Info().Outcome
	if outcome == oncehttp.Succeeded && err == nil || outcome == oncehttp.Rejected {
		fmt.Fprintln(out, "order", order, outcome, intent.ID) // record it; then:
		return op.Ack(ctx)
	}
	return fmt.Errorf("order %s is %v: %w", order, outcome, err)
}
