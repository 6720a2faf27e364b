//lint:file-ignore SA1019 Request.Cancel is deprecated, and in use.

package oncehttp_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// What net/http's own tests found in a client that takes http.DefaultClient's
// place; see internal/stdtests.

// reader is a body that cannot be had again: http.NewRequest does not know it.
type reader struct{ io.Reader }

// dropIn replaces the client's transport, and has it leave POSTs as they are.
func (b *bench) dropIn(timeout time.Duration, rt roundTripper) {
	b.reopen(func(o *oncehttp.Options) {
		o.HTTPClient, o.Unlisted = &http.Client{Transport: rt, Timeout: timeout}, oncehttp.OnlyGivenKeys
	})
}

// A request whose Request.Cancel the caller had closed was sent again.
func TestACancelledRequestIsNotSentAgain(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		sent := 0
		untilCancelled := func(req *http.Request) (*http.Response, error) {
			sent++
			<-req.Cancel
			return nil, errors.New("request canceled")
		}
		busy := func(req *http.Request) (*http.Response, error) {
			sent++
			return &http.Response{StatusCode: 503, Header: http.Header{"Retry-After": {"30"}}, Request: req}, nil
		}
		for _, c := range []struct {
			name, method string
			send         roundTripper
			key          string
		}{
			{"on the wire", http.MethodGet, untilCancelled, ""},
			{"while it waits for the next attempt", http.MethodGet, busy, ""},
			{"of an operation", http.MethodPost, busy, "k"},
		} {
			sent = 0
			b.dropIn(0, c.send)
			cancel := make(chan struct{})
			time.AfterFunc(time.Second, func() { close(cancel) })
			req, err := http.NewRequestWithContext(t.Context(), c.method, host+"/v1/charges", nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Cancel = cancel
			if c.key != "" {
				req.Header.Set("Idempotency-Key", c.key)
			}
			start := time.Now()
			resp, err := b.client.Do(req)
			if err == nil {
				resp.Body.Close()
			}
			if sent != 1 || time.Since(start) != time.Second {
				t.Errorf("%s: sent %d times, over after %v, with %v", c.name, sent, time.Since(start), err)
			}
		}
	})
}

// The caller's cancellation counted as a failure of the host.
func TestACancelledRequestIsNoFailureOfTheHost(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.dropIn(0, func(req *http.Request) (*http.Response, error) {
			<-req.Cancel
			return nil, errors.New("request canceled")
		})
		cancel := make(chan struct{})
		close(cancel)
		for range 100 {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, host, nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Cancel = cancel
			if _, err := b.client.Do(req); errors.Is(err, oncehttp.ErrCircuitOpen) {
				t.Error(err)
				return
			}
		}
	})
}

// A request that can be sent only once reached the transport as a copy, and the
// response to any POST named one.
func TestAStreamReachesTheTransportAsItIs(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		var got *http.Request
		b.dropIn(0, func(req *http.Request) (*http.Response, error) {
			got = req
			return b.server.Transport().RoundTrip(req)
		})
		for _, body := range []io.Reader{reader{strings.NewReader("order=1")}, strings.NewReader("order=2"), nil} {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, host+"/v1/charges", body)
			if err != nil {
				t.Fatal(err)
			}
			resp, err := b.client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.Request != req {
				t.Errorf("%T: the response names another request", body)
			}
			if _, once := body.(reader); once && got != req {
				t.Errorf("%T: the transport got another request", body)
			}
		}
	})
}

// The timeout of http.Client was no net.Error when it struck while the body was
// read, and over HTTP/2 it had nobody's name.
func TestATimeoutInTheBodyIsThatOfNetHTTP(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		overHTTP2 := func(req *http.Request) (*http.Response, error) {
			r, w := io.Pipe()
			context.AfterFunc(req.Context(), func() { w.CloseWithError(req.Context().Err()) })
			return &http.Response{StatusCode: 200, Body: r, Request: req}, nil
		}
		for _, rt := range []roundTripper{b.server.Transport().RoundTrip, overHTTP2} {
			b.server.Script(oncehttptest.StallBody(3, time.Minute))
			b.dropIn(3*time.Second, rt)
			resp, err := b.client.Get(host + "/v1/charges")
			if err != nil {
				t.Fatal(err)
			}
			_, err = io.ReadAll(resp.Body)
			resp.Body.Close()
			if n, ok := err.(net.Error); !ok || !n.Timeout() || !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "Client.Timeout") {
				t.Errorf("the body ended with %T: %v", err, err)
			}
		}
	})
}
