package main

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-github/v88/github"
)

// A server answers requests in memory, on fake time, with one status after another.
type server struct {
	statuses []int
	requests []*http.Request
	times    []time.Time
}

func (s *server) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			return nil, err
		}
		r.Body.Close()
	}
	s.requests, s.times = append(s.requests, r), append(s.times, time.Now())
	status, body := http.StatusOK, `[{"number":7,"title":"a bug"}]`
	if n := len(s.requests); n <= len(s.statuses) {
		status, body = s.statuses[n-1], `{"message":"busy"}`
	}
	resp := &http.Response{
		Status: fmt.Sprint(status, " ", http.StatusText(status)), StatusCode: status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(strings.NewReader(body)), Request: r,
	}
	if status == http.StatusTooManyRequests { // GitHub's secondary rate limit
		resp.Header.Set("Retry-After", "7")
	}
	return resp, nil
}

func with(t *testing.T, statuses []int, test func(t *testing.T, s *server, api *github.Client)) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{statuses: statuses}
		api, done, err := connect(s)
		if err != nil {
			t.Fatal(err)
		}
		test(t, s, api)
		if err := done(); err != nil {
			t.Error(err)
		}
	})
}

func TestReadsAreRetried(t *testing.T) {
	with(t, []int{502, 503}, func(t *testing.T, s *server, api *github.Client) {
		var out bytes.Buffer
		if err := report(t.Context(), &out, api, "o", "r"); err != nil || out.String() != "#7 a bug\n" {
			t.Errorf("%q, %v", out.String(), err)
		}
		if len(s.requests) != 3 {
			t.Errorf("%d requests, want 3", len(s.requests))
		}
	})
}

func TestTheSecondaryRateLimitIsKept(t *testing.T) {
	with(t, []int{429}, func(t *testing.T, s *server, api *github.Client) {
		if err := report(t.Context(), io.Discard, api, "o", "r"); err != nil || len(s.times) != 2 {
			t.Fatalf("%v after %d requests", err, len(s.times))
		}
		if wait := s.times[1].Sub(s.times[0]); wait < 7*time.Second || wait > 15*time.Second {
			t.Errorf("came back after %v, want 7 s and a little", wait)
		}
	})
}

// What creates something goes out once, without a key.
func TestAPostIsSentOnce(t *testing.T) {
	with(t, []int{502}, func(t *testing.T, s *server, api *github.Client) {
		title := "another bug"
		_, resp, err := api.Issues.Create(t.Context(), "o", "r", &github.IssueRequest{Title: &title})
		if err == nil || resp == nil || resp.StatusCode != 502 {
			t.Errorf("%v, %v", resp, err)
		}
		if len(s.requests) != 1 || s.requests[0].Header.Get("Idempotency-Key") != "" {
			t.Errorf("%d requests, the first with %v", len(s.requests), s.requests[0].Header)
		}
	})
}
