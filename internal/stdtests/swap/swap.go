// Package swap puts another client in the place of an http.Client. It is compiled
// into the tests of the standard library, which call it before each request.
package swap

import (
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/hashicorp/go-retryablehttp"
	"github.com/oncehttp/oncehttp"
)

// Env names the environment variable that says whose client is put in place:
// net/http, which changes nothing, oncehttp or retryablehttp.
const Env = "STDTESTS_THROUGH"

// Once, after the client's name, has it make one attempt only.
const Once = ", one attempt"

// Sent is printed for each request, with the library whose client sends it, so that
// it can be told which tests send any.
const Sent = "stdtests: a request is sent through "

// A place is an http.Client and what is used in its place.
type place struct {
	words [unsafe.Sizeof(http.Client{})]byte // of the http.Client: func fields cannot be compared
	was   http.Client                        // keeps alive what the words point to
	base  http.RoundTripper                  // http.DefaultTransport at that time

	client *http.Client
	close  func() error
}

var (
	mu     sync.Mutex // guards the following
	places = make(map[*http.Client]*place)
	inner  = make(map[*http.Client]bool) // what replacements send through
	closed []*place                      // replaced themselves, because their http.Client was changed
)

// Client returns the client that is used in place of c.
func Client(c *http.Client) *http.Client {
	if c == nil || library(c.Transport) != "net/http" {
		return c
	}
	mu.Lock()
	defer mu.Unlock()
	if inner[c] {
		return c
	}
	words := *(*[unsafe.Sizeof(http.Client{})]byte)(unsafe.Pointer(c))
	p := places[c]
	if p == nil || p.words != words || p.base != http.DefaultTransport {
		if p != nil {
			closed = append(closed, p)
		}
		p = &place{words: words, was: *c, base: http.DefaultTransport}
		p.client, p.close = replacement(os.Getenv(Env), c)
		places[c] = p
	}
	fmt.Fprintf(os.Stderr, "\n%s%s\n", Sent, library(p.client.Transport))
	return p.client
}

// library tells whose client has a transport.
func library(rt http.RoundTripper) string {
	pkg, _, _ := strings.Cut(strings.TrimPrefix(fmt.Sprintf("%T", rt), "*"), ".")
	if pkg == "oncehttp" || pkg == "retryablehttp" {
		return pkg
	}
	return "net/http"
}

func replacement(through string, c *http.Client) (*http.Client, func() error) {
	through, once := strings.CutSuffix(through, Once)
	switch through {
	case "oncehttp":
		opts := &oncehttp.Options{HTTPClient: c, Unlisted: oncehttp.OnlyGivenKeys}
		opts.BackoffBase = time.Millisecond // to wait is not the subject
		if once {
			opts.MaxAttempts = 1
		}
		client, err := oncehttp.New(oncehttp.NewMemoryStore(), opts)
		if err != nil {
			panic(err)
		}
		return client.StandardClient(), client.Close
	case "retryablehttp":
		client := retryablehttp.NewClient()
		client.Logger = nil
		client.RetryWaitMin = time.Millisecond
		if once {
			client.RetryMax = 0
		}
		below := *c
		client.HTTPClient = &below
		inner[&below] = true
		return client.StandardClient(), func() error { return nil }
	}
	return c, func() error { return nil }
}

// Close closes every client that was put in place.
func Close() {
	mu.Lock()
	defer mu.Unlock()
	for _, p := range places {
		closed = append(closed, p)
	}
	for _, p := range closed {
		if err := p.close(); err != nil {
			panic(err)
		}
	}
	closed = nil
	clear(places)
	clear(inner)
}
