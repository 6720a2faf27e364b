package oncehttp_test

import (
	"bytes"
	"io"
	"net/http"
	"testing"

	"github.com/oncehttp/oncehttp"
)

// allocs returns how many allocations an exchange takes.
func allocs(t *testing.T, do func(*http.Request) (*http.Response, error), request func() *http.Request) int {
	t.Helper()
	return int(testing.AllocsPerRun(2000, func() {
		resp, err := do(request())
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}))
}

// memoryClient is a client with the defaults, a memory store and an instant
// transport.
func memoryClient(t *testing.T) *oncehttp.Client {
	t.Helper()
	c, err := oncehttp.New(oncehttp.NewMemoryStore(), &oncehttp.Options{HTTPClient: &http.Client{Transport: instant}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// TestUnkeyedRequestsAllocateLittle: what needs no operation pays for none, with
// budget and breaker on.
func TestUnkeyedRequestsAllocateLittle(t *testing.T) {
	if oncehttp.RaceEnabled() {
		t.Skip("the race detector allocates, too")
	}
	req, err := http.NewRequest("GET", "https://api.example.com/v1/charges", nil)
	if err != nil {
		t.Fatal(err)
	}
	same := func() *http.Request { return req }
	bare := allocs(t, (&http.Client{Transport: instant}).Do, same)
	if ours := allocs(t, memoryClient(t).Do, same); ours > bare+3 {
		t.Errorf("a GET takes %d allocations, a bare http.Client's %d: want at most 3 more", ours, bare)
	} else {
		t.Logf("a GET takes %d allocations, a bare http.Client's %d", ours, bare)
	}
}

// TestOperationsAllocateNoMore than they did. Who makes it less lowers the limit.
func TestOperationsAllocateNoMore(t *testing.T) {
	if oncehttp.RaceEnabled() {
		t.Skip("the race detector allocates, too")
	}
	const limit = 90
	body := bytes.Repeat([]byte("x"), 500)
	ours := allocs(t, memoryClient(t).Do, func() *http.Request {
		req, err := http.NewRequest("POST", "https://api.example.com/v1/charges", bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		return req
	})
	if ours > limit {
		t.Errorf("a keyed POST takes %d allocations, want at most %d", ours, limit)
	} else {
		t.Logf("a keyed POST takes %d allocations", ours)
	}
}
