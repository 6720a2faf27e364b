package oncehttp_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"sync"
	"testing"

	"github.com/oncehttp/oncehttp"
)

// instant is a transport that answers at once, so that what is measured is the
// client.
var instant = roundTripper(func(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		io.Copy(io.Discard, r.Body)
		r.Body.Close()
	}
	return &http.Response{
		Status: "200 OK", StatusCode: 200, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{"Content-Type": {"application/json"}}, ContentLength: 13, Request: r,
		Body: io.NopCloser(bytes.NewReader([]byte(`{"id":"ch_1"}`))),
	}, nil
})

// stores are what operations are kept in; nil means a bare http.Client.
var stores = []struct {
	name string
	open func(b *testing.B) oncehttp.KeyStore
}{
	{"bare", nil},
	{"memory", func(*testing.B) oncehttp.KeyStore { return oncehttp.NewMemoryStore() }},
	{"bbolt", func(b *testing.B) oncehttp.KeyStore {
		s, err := oncehttp.OpenBolt(filepath.Join(b.TempDir(), "operations.db"))
		if err != nil {
			b.Fatal(err)
		}
		return s
	}},
}

// benchClient returns what sends, for a store of stores.
func benchClient(b *testing.B, open func(*testing.B) oncehttp.KeyStore) func(*http.Request) (*http.Response, error) {
	bare := &http.Client{Transport: instant}
	if open == nil {
		return bare.Do
	}
	store := open(b)
	c, err := oncehttp.New(store, &oncehttp.Options{HTTPClient: bare})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := c.Close(); err != nil {
			b.Error(err)
		}
		store.Close()
	})
	return c.Do
}

// BenchmarkGet is a request without key: it must not pay for what it does not
// use.
func BenchmarkGet(b *testing.B) {
	for _, s := range stores[:2] {
		b.Run(s.name, func(b *testing.B) {
			do := benchClient(b, s.open)
			req, _ := http.NewRequest("GET", "https://api.example.com/v1/charges", nil)
			b.ReportAllocs()
			for b.Loop() {
				resp, err := do(req)
				if err != nil {
					b.Fatal(err)
				}
				resp.Body.Close()
			}
		})
	}
}

// BenchmarkPost is an operation of 500 B from the request to its answer, by
// several callers at once. The answer's record may follow lazily.
func BenchmarkPost(b *testing.B) {
	body := bytes.Repeat([]byte("x"), 500)
	for _, s := range stores {
		for _, callers := range []int{1, 8, 64, 256} {
			b.Run(fmt.Sprintf("%s/callers=%d", s.name, callers), func(b *testing.B) {
				do := benchClient(b, s.open)
				var wg sync.WaitGroup
				work := make(chan struct{})
				for range callers {
					wg.Go(func() {
						for range work {
							req, _ := http.NewRequestWithContext(context.Background(), "POST", "https://api.example.com/v1/charges", bytes.NewReader(body))
							resp, err := do(req)
							if err != nil {
								b.Error(err)
								continue
							}
							resp.Body.Close()
						}
					})
				}
				b.ReportAllocs()
				for b.Loop() {
					work <- struct{}{}
				}
				close(work)
				wg.Wait()
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "ops/s")
			})
		}
	}
}
