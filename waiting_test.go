package oncehttp_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// How long a client waits, and for what it does not, seen from outside: when
// requests are on the wire, and when callers are told.

// A line is a network without delay. It answers with what answer makes of a
// request, and remembers when each was on the wire.
type line struct {
	answer func(*http.Request) (*http.Response, error)

	mu   sync.Mutex // guards the following
	sent []sending
}

type sending struct {
	host, path, method, key string
	at                      time.Time
}

func (l *line) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		io.Copy(io.Discard, r.Body)
		r.Body.Close()
	}
	l.mu.Lock()
	l.sent = append(l.sent, sending{r.URL.Host, r.URL.Path, r.Method, r.Header.Get("Idempotency-Key"), time.Now()})
	l.mu.Unlock()
	return l.answer(r)
}

// times returns when requests to a host or path were on the wire, after start.
func (l *line) times(where string, start time.Time) (after []time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.sent {
		if s.host == where || s.path == where {
			after = append(after, s.at.Sub(start))
		}
	}
	return after
}

func answer(status int, body string, header ...string) *http.Response {
	resp := &http.Response{
		Status: fmt.Sprint(status), StatusCode: status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{}, ContentLength: int64(len(body)), Body: io.NopCloser(strings.NewReader(body)),
	}
	for i := 0; i < len(header); i += 2 {
		resp.Header.Add(header[i], header[i+1])
	}
	return resp
}

// once answers first to the first request of each host and path, then with 200.
func once(first func(*http.Request) *http.Response) func(*http.Request) (*http.Response, error) {
	var seen sync.Map
	return func(r *http.Request) (*http.Response, error) {
		if _, again := seen.LoadOrStore(r.URL.Host+r.URL.Path, true); !again {
			return first(r), nil
		}
		return answer(200, "done"), nil
	}
}

// onLine runs a test on fake time with a client over a line.
func onLine(t *testing.T, opts *oncehttp.Options, reply func(*http.Request) (*http.Response, error), test func(t *testing.T, c *oncehttp.Client, l *line)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		l := &line{answer: reply}
		o := *opts
		var inner http.Client
		if o.HTTPClient != nil {
			inner = *o.HTTPClient
		}
		inner.Transport = l
		o.HTTPClient = &inner
		c, err := oncehttp.New(oncehttp.NewMemoryStore(), &o)
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}()
		time.Sleep(400*time.Millisecond + 700) // nothing depends on full seconds
		test(t, c, l)
	})
}

func newRequest(t *testing.T, ctx context.Context, method, url string) *http.Request {
	t.Helper()
	var body io.Reader
	if method == http.MethodPost {
		body = strings.NewReader("x")
	}
	req, err := http.NewRequestWithContext(ctx, method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	return req
}

// The least and the most that can be drawn.
func least(int64) int64  { return 0 }
func most(n int64) int64 { return n - 1 }

// kinds are an unkeyed request and an operation.
var kinds = []string{http.MethodGet, http.MethodPost}

// TestOneTimeoutForRedirectsAndRetries: http.Client.Timeout is for all of a
// request, whatever layers of it take their time, and whether or not the
// transport says to which request its response belongs.
func TestOneTimeoutForRedirectsAndRetries(t *testing.T) {
	for _, tt := range []struct {
		name   string
		says   bool // the transport sets Response.Request
		status int  // 0: an error
	}{
		{"redirects", true, 302},
		{"redirects of a transport that is silent about them", false, 302},
		{"failures", true, 503},
		{"errors", true, 0},
	} {
		for _, method := range kinds {
			opts := &oncehttp.Options{HTTPClient: &http.Client{Timeout: 10 * time.Second}}
			slow := func(r *http.Request) (*http.Response, error) {
				select {
				case <-time.After(4 * time.Second):
				case <-r.Context().Done():
					return nil, context.Cause(r.Context())
				}
				status := tt.status
				switch {
				case status == 0:
					return nil, io.ErrUnexpectedEOF
				case status == 302 && r.Method == http.MethodPost:
					status = 303 // its GET is followed
				}
				resp := answer(status, "", "Location", r.URL.Path+"x")
				if tt.says {
					resp.Request = r
				}
				return resp, nil
			}
			t.Run(method+"/"+tt.name, func(t *testing.T) {
				onLine(t, opts, slow, func(t *testing.T, c *oncehttp.Client, l *line) {
					start := time.Now()
					resp, err := c.Do(newRequest(t, t.Context(), method, host+"/"))
					if err == nil {
						resp.Body.Close()
					}
					// One that failed comes back before a wait that would be too long.
					if took := time.Since(start); took > 10*time.Second || took < 8*time.Second || len(l.sent) > 3 {
						t.Errorf("came back after %v and %d requests: %v", took, len(l.sent), err)
					}
					if u, ok := errors.AsType[*url.Error](err); tt.status == 302 && (!ok || !u.Timeout()) {
						t.Errorf("told %v, want a timeout", err)
					}
				})
			})
		}
	}
}

// TestAWindowThatClosesBeforeRetryAfterIsTold: a server that asks for more time
// than the window leaves does not make an operation disappear.
func TestAWindowThatClosesBeforeRetryAfterIsTold(t *testing.T) {
	for _, after := range []string{"172800", "9223372037", strings.Repeat("9", 400), "Fri, 31 Dec 9999 23:59:59 GMT"} {
		t.Run(after[:min(len(after), 20)], func(t *testing.T) {
			atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
				d.leavePending("A")
				d.api.Script(oncehttptest.Status(503, "Retry-After", after))
				r := d.resume()
				info, _ := d.lookup("A")
				if r.Pending != 1 || r.NextDue.Before(info.ResendUntil) || r.NextDue.Sub(info.ResendUntil) > time.Second {
					t.Errorf("%+v, want the operation pending until its window closes at %v", r.Summary, info.ResendUntil)
				}
				d.wantWire(2, "at first")
				time.Sleep(time.Until(info.ResendUntil) - time.Second)
				if r := d.resume(); len(r.unknown) != 0 || r.NextDue.Sub(info.ResendUntil) > time.Second {
					t.Errorf("a second before the window closes: %v, %+v", r.unknown, r.Summary)
				}
				time.Sleep(2 * time.Second)
				if r := d.resume(); fmt.Sprint(r.unknown) != "[A window closed]" || !r.Done() {
					t.Errorf("when the window has closed: %v, %+v", r.unknown, r.Summary)
				}
				d.wantWire(2, "in all")
			})
		})
	}
}

// pauseSpread is the part of a pause over which those come back who waited for it.
const pauseSpread = 4

// TestEveryTooManyRequestsPausesItsHost, also the answer to a request that is not
// retried.
func TestEveryTooManyRequestsPausesItsHost(t *testing.T) {
	for _, status := range []int{408, 429, 500, 503} {
		for _, tt := range []struct {
			name string
			send func(ctx context.Context) *http.Request
			opts oncehttp.Options
		}{
			{"GET", func(ctx context.Context) *http.Request { return newRequest(t, ctx, "GET", host+"/first") }, oncehttp.Options{MaxAttempts: 1}},
			{"operation", func(ctx context.Context) *http.Request { return newRequest(t, ctx, "POST", host+"/first") }, oncehttp.Options{MaxAttempts: 1}},
			{"POST without key", func(ctx context.Context) *http.Request {
				return newRequest(t, oncehttp.WithoutKey(ctx), "POST", host+"/first")
			}, oncehttp.Options{}},
			{"provider says stop", func(ctx context.Context) *http.Request { return newRequest(t, ctx, "POST", host+"/first") }, oncehttp.Options{
				Providers: []oncehttp.Provider{{Hosts: []string{"api.example.com"}, Judge: func(*http.Response, []byte) oncehttp.Verdict { return oncehttp.Stop }}},
			}},
		} {
			t.Run(fmt.Sprint(tt.name, "/", status), func(t *testing.T) {
				busy := func(*http.Request) *http.Response { return answer(status, "busy", "Retry-After", "30") }
				onLine(t, tt.opts.WithRand(least), once(busy), func(t *testing.T, c *oncehttp.Client, l *line) {
					start := time.Now()
					resp, err := c.Do(tt.send(t.Context()))
					if err != nil || resp.StatusCode != status || time.Since(start) != 0 {
						t.Fatalf("%v, %v after %v", resp, err, time.Since(start))
					}
					if resp, err := c.Get(host + "/second"); err != nil {
						t.Fatal(resp, err)
					}
					want := time.Duration(0)
					if status == 429 || status == 503 {
						want = 30 * time.Second
					}
					if got := l.times("/second", start); len(got) < 1 || got[0] != want {
						t.Errorf("the next request was on the wire after %v, want %v", got, want)
					}
				})
			})
		}
	}
}

// TestAReplayedAnswerPausesNothing: its Retry-After was meant for another time.
func TestAReplayedAnswerPausesNothing(t *testing.T) {
	busy := func(*http.Request) *http.Response {
		return answer(503, "", "Retry-After", "30", "Idempotent-Replayed", "true")
	}
	onLine(t, &oncehttp.Options{}, once(busy), func(t *testing.T, c *oncehttp.Client, l *line) {
		start := time.Now()
		for _, path := range []string{"/first", "/first"} {
			if _, err := c.Do(newRequest(t, t.Context(), "POST", host+path)); err != nil {
				t.Fatal(err)
			}
		}
		if took := time.Since(start); took != 0 {
			t.Errorf("the second request waited %v", took)
		}
	})
}

// TestNoWaitIsBegunForAPauseThatOutlastsTheDeadline: the answer is still there to
// be had, and no retry is charged.
func TestNoWaitIsBegunForAPauseThatOutlastsTheDeadline(t *testing.T) {
	for _, method := range kinds {
		t.Run(method, func(t *testing.T) {
			reply := func(r *http.Request) (*http.Response, error) {
				if r.URL.Path == "/pause" {
					return answer(503, "", "Retry-After", "50"), nil
				}
				time.Sleep(2 * time.Second)
				return answer(500, "this happened"), nil
			}
			onLine(t, &oncehttp.Options{}, reply, func(t *testing.T, c *oncehttp.Client, l *line) {
				start := time.Now()
				var other sync.WaitGroup
				other.Go(func() {
					time.Sleep(time.Second)
					ctx, cancel := context.WithTimeout(t.Context(), time.Second)
					defer cancel()
					c.Do(newRequest(t, ctx, "GET", host+"/pause"))
				})
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
				defer cancel()
				resp, err := c.Do(newRequest(t, ctx, method, host+"/"))
				if err != nil {
					t.Fatalf("told %v after %v", err, time.Since(start))
				}
				body, err := io.ReadAll(resp.Body)
				if took := time.Since(start); took != 2*time.Second || resp.StatusCode != 500 || string(body) != "this happened" || err != nil {
					t.Errorf("%d %q, %v after %v; want the 500 at once", resp.StatusCode, body, err, took)
				}
				other.Wait()
			})
		})
	}
}

// TestAStoredAnswerWaitsForNoHost: what needs no network needs no permission, and
// takes nobody's turn.
func TestAStoredAnswerWaitsForNoHost(t *testing.T) {
	for _, tt := range []struct {
		name            string
		opts            oncehttp.Options
		occupy          func(b *bench)
		atLeast, atMost time.Duration // that another operation waits
	}{
		{"paused", oncehttp.Options{MaxAttempts: 1}, (*bench).pauseHost, 50 * time.Second, 50 * time.Second * (pauseSpread + 1) / pauseSpread},
		{"busy", oncehttp.Options{RateLimit: 1. / 60, Burst: 1}, func(*bench) {}, time.Minute, time.Minute},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, tt.opts, func(t *testing.T, b *bench) {
				first, err := b.charge(t.Context(), "k", "1")
				if err != nil {
					t.Fatal(err)
				}
				tt.occupy(b)
				start := time.Now()
				for range 10 {
					again, err := b.charge(t.Context(), "k", "1")
					if err != nil || !again.Replayed || again.Outcome != oncehttp.Succeeded || again.Metadata["order"] != "1" {
						t.Fatalf("told %+v, %v", again, err)
					}
				}
				if resp, err := b.client.Redrive(t.Context(), first.ID); err != nil || resp.StatusCode != 200 {
					t.Errorf("Redrive: %v, %v", resp, err)
				}
				if took := time.Since(start); took != 0 {
					t.Errorf("the stored answer took %v", took)
				}
				if _, err := b.charge(t.Context(), "other", "2"); err != nil {
					t.Fatal(err)
				}
				if took := time.Since(start); took < tt.atLeast || took > tt.atMost {
					t.Errorf("another operation took %v, want %v to %v", took, tt.atLeast, tt.atMost)
				}
				b.wantEffects("1", "2")
			})
		})
	}
}
