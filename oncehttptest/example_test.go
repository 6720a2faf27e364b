package oncehttptest_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/oncehttp/oncehttp/oncehttptest"
)

// A client that sends again without understanding what happened is saved by
// its key.
func Example() {
	s := oncehttptest.New(oncehttptest.Charges())
	client := &http.Client{Transport: s.Transport()}

	s.Script(
		oncehttptest.Status(503, "Retry-After", "2"), // nothing happened
		oncehttptest.DropResponse(),                  // charged, and nobody knows
	)
	for range 3 {
		req, _ := http.NewRequest("POST", "https://api.example/v1/charges", strings.NewReader("order=A-1"))
		req.Header.Set("Idempotency-Key", "order A-1")
		resp, err := client.Do(req)
		if err != nil {
			fmt.Println("no answer")
			continue
		}
		body, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		fmt.Println(resp.StatusCode, resp.Header.Get("Idempotent-Replayed"), string(body))
	}
	for _, a := range s.Attempts() {
		fmt.Println(a.Fault, "-", a.Action)
	}
	fmt.Println("effects:", len(s.Effects()))

	// Output:
	// 503  {"error":{"type":"api_error","message":"Service Unavailable"}}
	// no answer
	// 200 true {"id":"ch_1","object":"charge","order":"A-1","status":"succeeded"}
	// Status(503, Retry-After: 2) - refused
	// DropResponse - executed
	// none - replayed
	// effects: 1
}

// Faults that are a function of the body and of the attempt are the same in
// every run, in whatever order the operations come.
func ExampleServer_FaultFunc() {
	s := oncehttptest.New(oncehttptest.Charges())
	s.FaultFunc(func(a oncehttptest.Attempt) oncehttptest.Fault {
		if string(a.Body) == "order=A-2" && a.N <= 2 {
			return oncehttptest.DialError(nil)
		}
		return oncehttptest.Fault{}
	})
	client := &http.Client{Transport: s.Transport()}
	for _, order := range []string{"A-1", "A-2", "A-2", "A-2"} {
		resp, err := client.Post("http://api.example", "application/x-www-form-urlencoded", strings.NewReader("order="+order))
		if err != nil {
			fmt.Println(order, "not sent")
			continue
		}
		resp.Body.Close()
		fmt.Println(order, resp.Status)
	}

	// Output:
	// A-1 200 OK
	// A-2 not sent
	// A-2 not sent
	// A-2 200 OK
}

func ExampleFault_With() {
	fmt.Println(oncehttptest.NoHooks().With(oncehttptest.Delay(time.Minute)).With(oncehttptest.DropResponse()))
	// Output: NoHooks+Delay(1m0s)+DropResponse
}

// Before a client relies on a host, somebody should ask the host.
func ExampleCheckServer() {
	staging := oncehttptest.New(oncehttptest.Charges())
	bank := oncehttptest.Slow(300 * time.Millisecond) // long enough to be met there
	staging.ScriptFor(oncehttptest.ByBody("check-3"), bank, bank)

	report, err := oncehttptest.CheckServer(context.Background(), oncehttptest.Check{
		Client: &http.Client{Transport: staging.Transport()},
		NewRequest: func(ctx context.Context, key string, n int) (*http.Request, error) {
			body := strings.NewReader(fmt.Sprintf("order=check-%d", n))
			req, err := http.NewRequestWithContext(ctx, "POST", "https://staging.example/v1/charges", body)
			if err != nil {
				return nil, err
			}
			req.Header.Set("Idempotency-Key", key)
			return req, nil
		},
		Keyless: true,
	})
	if err != nil {
		fmt.Println(err)
	}
	fmt.Println(report)
	fmt.Println("may be relied on:", report.OK())

	// Output:
	// same key, same request   right   one effect, the same answer: id "ch_1"
	// same key, other payload  right   refused with 400 Bad Request
	// same key, two at once    right   one effect, id "ch_2"; the other was refused with 409 Conflict
	// no key                   right   accepted with 200 OK: a key is not required
	// key in quotes            untold  not asked
	// mark of a replay                 Idempotent-Replayed: true
	// window                   untold  how long a key is remembered takes that long to see
	//
	// may be relied on: true
}
