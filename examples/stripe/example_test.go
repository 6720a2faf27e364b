package main

import (
	"context"
	"log"
	"os"

	"github.com/oncehttp/oncehttp"
	"github.com/stripe/stripe-go/v84"
)

// The whole of what a program that already uses stripe-go has to change.
func Example() {
	key := os.Getenv("STRIPE_API_KEY")
	client, err := oncehttp.Open("operations.db", nil)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	api := stripe.NewClient(key, stripe.WithBackends(stripe.NewBackendsWithConfig(&stripe.BackendConfig{
		HTTPClient:        client.StandardClient(),
		MaxNetworkRetries: stripe.Int64(0), // the client's attempts are enough
	})))

	if _, err := api.V1PaymentIntents.Create(context.Background(), paymentFor("A-1")); err != nil {
		log.Print(err)
	}
}
