// Otel shows where spans come from: OpenTelemetry's transport above the client
// makes one for each operation, below it one for each attempt.
package main

import (
	"context"
	"log"
	"net/http"
	"os"
	"strings"

	"github.com/oncehttp/oncehttp"
	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/trace"
)

func main() {
	store, err := oncehttp.OpenBolt("operations.db")
	if err != nil {
		log.Fatal(err)
	}
	defer store.Close()
	client, done, err := instrumented(store, http.DefaultTransport, otel.GetTracerProvider())
	if err != nil {
		log.Fatal(err)
	}
	defer done()
	ctx, op := oncehttp.Start(context.Background(), oncehttp.Op{})
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, os.Getenv("API")+"/v1/charges", strings.NewReader("order=A-1"))
	if err != nil {
		log.Fatal(err)
	}
	resp, err := client.Do(req)
	if err != nil {
		log.Fatal(err)
	}
	resp.Body.Close()
	log.Println(op.Info().Outcome, op.Ack(ctx))
}

// instrumented returns a client with a span around each operation, and one around
// each attempt.
func instrumented(store oncehttp.KeyStore, base http.RoundTripper, tp trace.TracerProvider) (_ *http.Client, done func() error, err error) {
	attempts := otelhttp.NewTransport(base, otelhttp.WithTracerProvider(tp), named("attempt"))
	client, err := oncehttp.New(store, &oncehttp.Options{HTTPClient: &http.Client{Transport: attempts}})
	if err != nil {
		return nil, nil, err
	}
	std := client.StandardClient()
	std.Transport = otelhttp.NewTransport(std.Transport, otelhttp.WithTracerProvider(tp), named("operation"))
	return std, client.Close, nil
}

func named(what string) otelhttp.Option {
	return otelhttp.WithSpanNameFormatter(func(_ string, r *http.Request) string { return what + " " + r.Method })
}
