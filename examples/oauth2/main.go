// Oauth2 is a program that pays orders at an API which wants OAuth 2 tokens. The
// token is added below the client, attempt by attempt: it is never stored, it is
// fresh when an operation is resumed after a crash, and the request for it is no
// part of the payment.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/url"
	"os"
	"strings"

	"github.com/oncehttp/oncehttp"
	"golang.org/x/oauth2"
	"golang.org/x/oauth2/clientcredentials"
)

func main() {
	config := &clientcredentials.Config{
		ClientID: os.Getenv("CLIENT_ID"), ClientSecret: os.Getenv("CLIENT_SECRET"),
		TokenURL: os.Getenv("API") + "/oauth/token",
	}
	p, err := open("operations.db", os.Getenv("API"), config)
	if err != nil {
		log.Fatal(err)
	}
	defer p.client.Close()
	if err := p.resume(context.Background(), os.Stdout); err != nil {
		log.Fatal(err)
	}
	for _, order := range os.Args[1:] {
		if err := p.pay(context.Background(), order); err != nil {
			log.Print(err)
		}
	}
}

type payer struct {
	client *oncehttp.Client
	api    string
}

func open(path, api string, config *clientcredentials.Config) (*payer, error) {
	// The context is that of the token requests: they go through
	// http.DefaultClient, and not through the client that pays.
	tokens := config.TokenSource(context.Background())
	client, err := oncehttp.Open(path, &oncehttp.Options{
		HTTPClient: &http.Client{Transport: &oauth2.Transport{Source: tokens}},
	})
	return &payer{client, api}, err
}

// resume finishes what an earlier process began.
func (p *payer) resume(ctx context.Context, ledger io.Writer) error {
	_, err := p.client.Resume(ctx, oncehttp.Handler{
		Settled: func(_ context.Context, info oncehttp.Info, _ *http.Response) error {
			_, err := fmt.Fprintln(ledger, info.Metadata["order"], info.Outcome)
			return err // nil acknowledges: record it first, once for each order
		},
	})
	return err
}

func (p *payer) pay(ctx context.Context, order string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ctx, op := oncehttp.Start(ctx, oncehttp.Op{
		Key:      oncehttp.KeyFor("order", order),
		Scope:    "shop", // the token is not seen above the transport that adds it
		Metadata: map[string]string{"order": order},
	})
	form := url.Values{"order": {order}}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.api+"/v1/charges", strings.NewReader(form.Encode()))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	resp, err := p.client.Do(req)
	if err != nil {
		return err
	}
	resp.Body.Close()
	if outcome := op.Info().Outcome; outcome != oncehttp.Succeeded {
		return fmt.Errorf("order %s: %v, %s", order, outcome, resp.Status)
	}
	return op.Ack(ctx) // after it is recorded
}
