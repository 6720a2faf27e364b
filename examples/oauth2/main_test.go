package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/oncehttp/oncehttp"
	"golang.org/x/oauth2/clientcredentials"
)

// An api is a token server and an API that takes its tokens, each once issued.
type api struct {
	mu       sync.Mutex
	tokens   int
	requests []*http.Request // for tokens
	paid     []string        // "TOKEN KEY" of each charge that arrived
	hold     chan bool       // the next charge waits for its client to leave
}

func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if r.URL.Path == "/oauth/token" {
		a.tokens++
		a.requests = append(a.requests, r)
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"access_token":"secret-token-%d","token_type":"Bearer"}`, a.tokens)
		return
	}
	a.paid = append(a.paid, strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")+" "+r.Header.Get("Idempotency-Key"))
	if hold := a.hold; hold != nil {
		a.hold = nil
		close(hold)
		<-r.Context().Done()
		return
	}
	fmt.Fprint(w, `{"id":"ch_1"}`)
}

// A payment that a crash interrupts is resumed with a token of its own, under the
// same key; the requests for tokens have no key.
func TestTokensComeBackOnResume(t *testing.T) {
	a := &api{hold: make(chan bool)}
	held := a.hold
	server := httptest.NewServer(a)
	defer server.Close()
	config := &clientcredentials.Config{ClientID: "id", ClientSecret: "client-secret", TokenURL: server.URL + "/oauth/token"}
	path := filepath.Join(t.TempDir(), "operations.db")

	first, err := open(path, server.URL, config)
	if err != nil {
		t.Fatal(err)
	}
	stopped := make(chan error)
	go func() { stopped <- first.pay(t.Context(), "A-1") }()
	<-held
	ended, end := context.WithCancel(t.Context())
	end() // at once: what runs is cut off
	_ = first.client.Shutdown(ended)
	if err := <-stopped; !errors.Is(err, oncehttp.ErrClosed) {
		t.Fatalf("interrupted: %v", err)
	}
	_ = first.client.Close()

	second, err := open(path, server.URL, config)
	if err != nil {
		t.Fatal(err)
	}
	defer second.client.Close()
	var ledger bytes.Buffer
	if err := second.resume(t.Context(), &ledger); err != nil {
		t.Fatal(err)
	}
	if got := ledger.String(); got != "A-1 succeeded\n" {
		t.Errorf("the ledger says %q", got)
	}
	key := oncehttp.KeyFor("order", "A-1")
	if want := []string{"secret-token-1 " + key, "secret-token-2 " + key}; fmt.Sprint(a.paid) != fmt.Sprint(want) {
		t.Errorf("charges arrived as %q, want %q", a.paid, want)
	}
	if len(a.requests) != 2 {
		t.Errorf("%d requests for tokens, want one of each process", len(a.requests))
	}
	for _, r := range a.requests {
		if key := r.Header.Get("Idempotency-Key"); key != "" {
			t.Errorf("a token was asked for under the key %s", key)
		}
	}
	var operations int
	for range second.client.Operations(t.Context(), oncehttp.Filter{}) {
		operations++
	}
	if operations != 0 {
		t.Errorf("%d operations are open", operations)
	}
	file, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, secret := range []string{"secret-token", "client-secret"} {
		if bytes.Contains(file, []byte(secret)) {
			t.Errorf("%s is in the file", secret)
		}
	}
}

func TestPay(t *testing.T) {
	a := &api{}
	server := httptest.NewServer(a)
	defer server.Close()
	config := &clientcredentials.Config{ClientID: "id", ClientSecret: "secret", TokenURL: server.URL + "/oauth/token"}
	p, err := open(filepath.Join(t.TempDir(), "operations.db"), server.URL, config)
	if err != nil {
		t.Fatal(err)
	}
	defer p.client.Close()
	for range 2 {
		if err := p.pay(t.Context(), "A-1"); err != nil {
			t.Error(err)
		}
	}
	if len(a.paid) != 1 {
		t.Errorf("%d charges arrived, want 1: the second asks for the same", len(a.paid))
	}
}
