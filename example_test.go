package oncehttp_test

import (
	"context"
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
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// api is a Stripe-style server; in the examples, it is reached without network.
func api(faults ...oncehttptest.Fault) *oncehttp.Options {
	server := oncehttptest.New(oncehttptest.Charges())
	server.Script(faults...)
	return &oncehttp.Options{HTTPClient: &http.Client{Transport: server.Transport()}}
}

// tempFile is where a program would name its own file, and its removal.
func tempFile() (path string, remove func()) {
	dir, err := os.MkdirTemp("", "oncehttp")
	if err != nil {
		log.Fatal(err)
	}
	return filepath.Join(dir, "operations.db"), func() { os.RemoveAll(dir) }
}

// The client is used as one of net/http. Here, the first response is lost after
// the server has charged; the retry under the same key gets the same charge.
func Example() {
	path, remove := tempFile()
	defer remove()
	client, err := oncehttp.Open(path, api(oncehttptest.DropResponse()))
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	resp, err := client.PostForm("https://api.stripe.com/v1/charges", url.Values{"order": {"4711"}})
	if err != nil {
		log.Fatal(err)
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	info, _ := oncehttp.OperationFrom(resp)
	fmt.Println(string(body))
	fmt.Println(info.Outcome, "after", info.Attempts, "attempts")
	// Output:
	// {"id":"ch_1","object":"charge","order":"4711","status":"succeeded"}
	// succeeded after 2 attempts
}

// Start tells the outcome, and keeps the answer until it is acknowledged.
func ExampleStart() {
	path, remove := tempFile()
	defer remove()
	client, err := oncehttp.Open(path, api(oncehttptest.Status(402)))
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	ctx, op := oncehttp.Start(context.Background(), oncehttp.Op{
		Key:      oncehttp.KeyFor("order", "4711", "charge"),
		Metadata: map[string]string{"order": "4711"},
	})
	req, err := http.NewRequestWithContext(ctx, "POST", "https://api.stripe.com/v1/charges", strings.NewReader("order=4711"))
	if err != nil {
		log.Fatal(err)
	}
	resp, err := client.Do(req) // or any SDK, on client.StandardClient(), that passes ctx on
	if err == nil {
		defer resp.Body.Close()
	}

	switch op.Info().Outcome {
	case oncehttp.Succeeded, oncehttp.Rejected:
		fmt.Println(op.Info().Outcome, resp.StatusCode) // record it, then acknowledge
		if err := op.Ack(ctx); err != nil {
			log.Fatal(err)
		}
	case oncehttp.NotSent:
		fmt.Println("nothing has happened and nothing will:", err)
	default:
		fmt.Println("it may have happened; the same key continues it:", err)
	}
	// Output:
	// rejected 402
}

// A program that died between the answer and its own records is handed the
// answer again when it has been restarted.
func ExampleClient_Resume() {
	path, remove := tempFile()
	defer remove()
	options := api()
	client, err := oncehttp.Open(path, options)
	if err != nil {
		log.Fatal(err)
	}
	ctx, _ := oncehttp.Start(context.Background(), oncehttp.Op{Metadata: map[string]string{"order": "4711"}})
	req, _ := http.NewRequestWithContext(ctx, "POST", "https://api.stripe.com/v1/charges", strings.NewReader("order=4711"))
	if _, err := client.Do(req); err != nil {
		log.Fatal(err)
	}
	client.Close() // and the answer was never recorded

	if client, err = oncehttp.Open(path, options); err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	sum, err := client.Resume(context.Background(), oncehttp.Handler{
		Settled: func(_ context.Context, info oncehttp.Info, resp *http.Response) error {
			body, err := io.ReadAll(resp.Body)
			fmt.Println("order", info.Metadata["order"], info.Outcome, string(body))
			return err // nil acknowledges
		},
	})
	fmt.Println(sum.Settled, "settled", err)
	// Output:
	// order 4711 succeeded {"id":"ch_1","object":"charge","order":"4711","status":"succeeded"}
	// 1 settled <nil>
}

// The same business intent has the same key, for ever.
func ExampleKeyFor() {
	fmt.Println(oncehttp.KeyFor("order", "4711", "capture"))
	fmt.Println(oncehttp.KeyFor("order", "4711", "capture") == oncehttp.KeyFor("order", "4711capture"))
	// Output:
	// cf3a3a6f-d320-5e1d-b976-8ac1a78a17ee
	// false
}

// What needs a decision is listed, and decided by a person or the program.
func ExampleClient_Operations() {
	drop := oncehttptest.DropResponse()
	options := api(drop)
	options.MaxAttempts = 1
	path, remove := tempFile()
	defer remove()
	client, err := oncehttp.Open(path, options)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	ctx := context.Background()
	if _, err := client.PostForm("https://api.stripe.com/v1/charges", url.Values{"order": {"4711"}}); err != nil {
		fmt.Println("no answer")
	}

	for info, err := range client.Operations(ctx, oncehttp.Filter{Outcomes: []oncehttp.Outcome{oncehttp.Unknown}}) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(info.Method, info.URL, info.Outcome, info.Reason)
		resp, err := client.Redrive(ctx, info.ID) // the same request, the same key
		if err != nil {
			log.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		fmt.Println(string(body))
	}
	// Output:
	// no answer
	// POST https://api.stripe.com/v1/charges unknown gave up
	// {"id":"ch_1","object":"charge","order":"4711","status":"succeeded"}
}

// A provider that is not built in is declared once.
func ExampleProvider() {
	client, err := oncehttp.New(oncehttp.NewMemoryStore(), &oncehttp.Options{
		Providers: []oncehttp.Provider{{
			Name:   "my bank",
			Hosts:  []string{"*.bank.example"},
			Header: "X-Request-Id",
			MaxKey: 64,
			Window: 6 * time.Hour, // what it publishes
		}},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	req, _ := http.NewRequest("POST", "https://pay.bank.example/transfers", strings.NewReader("{}"))
	req.Header.Set("X-Request-Id", strings.Repeat("k", 65))
	_, err = client.Do(req)
	fmt.Println(err)
	// Output:
	// Post "https://pay.bank.example/transfers": oncehttp: operation kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk: outcome not sent after 0 attempts: invalid idempotency key: 65 characters, want 1 to 64
}
