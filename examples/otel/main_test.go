package main

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/oncehttp/oncehttp"
	"go.opentelemetry.io/otel/attribute"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

// failing answers with 503 twice, then with 200.
type failing struct{ calls int }

func (f *failing) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			return nil, err
		}
		r.Body.Close()
	}
	f.calls++
	status := http.StatusServiceUnavailable
	if f.calls > 2 {
		status = http.StatusOK
	}
	return &http.Response{
		StatusCode: status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: http.Header{},
		Body: io.NopCloser(strings.NewReader("{}")), Request: r,
	}, nil
}

// One span around the operation, and in it one around each of three attempts.
func TestSpans(t *testing.T) {
	for _, method := range []string{"POST", "GET"} {
		t.Run(method, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				spans := tracetest.NewInMemoryExporter()
				tp := sdk.NewTracerProvider(sdk.WithSyncer(spans))
				client, done, err := instrumented(oncehttp.NewMemoryStore(), &failing{}, tp)
				if err != nil {
					t.Fatal(err)
				}
				req, err := http.NewRequestWithContext(t.Context(), method, "https://api.example.com/v1/charges", strings.NewReader("order=A-1"))
				if err != nil {
					t.Fatal(err)
				}
				resp, err := client.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := io.Copy(io.Discard, resp.Body); err != nil {
					t.Error(err)
				}
				resp.Body.Close()
				if err := done(); err != nil {
					t.Error(err)
				}

				var above tracetest.SpanStub
				var below []tracetest.SpanStub
				for _, s := range spans.GetSpans() {
					switch s.Name {
					case "operation " + method:
						if above.Name != "" {
							t.Error("a second span above")
						}
						above = s
					case "attempt " + method:
						below = append(below, s)
					default:
						t.Errorf("span %s", s.Name)
					}
				}
				if above.Name == "" || len(below) != 3 {
					t.Fatalf("%d spans below, and above %q; want 3 and one", len(below), above.Name)
				}
				for i, want := range []int64{503, 503, 200} {
					if got := status(below[i]); got != want {
						t.Errorf("attempt %d has status %d, want %d", i+1, got, want)
					}
					if below[i].Parent.SpanID() != above.SpanContext.SpanID() {
						t.Errorf("attempt %d is not in the operation's span", i+1)
					}
				}
				if got := status(above); got != 200 {
					t.Errorf("the operation has status %d", got)
				}
			})
		})
	}
}

func status(s tracetest.SpanStub) int64 {
	for _, a := range s.Attributes {
		if a.Key == attribute.Key("http.response.status_code") {
			return a.Value.AsInt64()
		}
	}
	return 0
}
