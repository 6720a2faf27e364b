package oncehttptest_test

import (
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
