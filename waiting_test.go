package oncehttp_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/big"
	"math/rand/v2"
	"net/http"
	"net/url"
	"regexp"
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
	mu     sync.Mutex // guards the following
	answer func(*http.Request) (*http.Response, error)
	sent   []sending
}

// set changes what answers, and returns what did before.
func (l *line) set(answer func(*http.Request) (*http.Response, error)) (before func(*http.Request) (*http.Response, error)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before, l.answer = l.answer, answer
	return before
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
	answer := l.answer
	l.mu.Unlock()
	return answer(r)
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

// pauseDelay is the part of a pause by which it may last longer than asked for,
// pauseSpread the one over which those come back who waited for it.
const (
	pauseDelay  = 2
	pauseSpread = 4
)

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
		{"paused", oncehttp.Options{MaxAttempts: 1}, (*bench).pauseHost, 50 * time.Second, 50*time.Second + 50*time.Second/pauseDelay + 50*time.Second/pauseSpread},
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

// asks are what a server may say in a header, and how long a client has to wait
// then; negative: as if nothing had been said. Relative dates are made by ask.
var asks = []struct {
	name   string
	header []string
	wait   time.Duration
}{
	{"nothing", nil, -1},
	{"zero", []string{"Retry-After", "0"}, 0},
	{"seconds", []string{"Retry-After", "7"}, 7 * time.Second},
	{"as long as is allowed", []string{"Retry-After", "60"}, time.Minute},
	{"a second longer", []string{"Retry-After", "61"}, 61 * time.Second},
	{"fraction", []string{"Retry-After", "1.001"}, 2 * time.Second},
	{"fraction that makes it too long", []string{"Retry-After", "60.0000000001"}, 61 * time.Second},
	{"spaces", []string{"Retry-After", " \t 9\t "}, 9 * time.Second},
	{"several lines", []string{"Retry-After", "3", "Retry-After", "-8", "Retry-After", "12", "Retry-After", "soon"}, 12 * time.Second},
	{"several lines, one hostile", []string{"Retry-After", "3", "Retry-After", "9223372037"}, forever},
	{"several values in a line", []string{"Retry-After", "3, 5"}, -1},
	{"milliseconds", []string{"Retry-After-Ms", "1500"}, 1500 * time.Millisecond},
	{"milliseconds and seconds", []string{"Retry-After-Ms", "1500", "Retry-After", "2"}, 1500 * time.Millisecond},
	{"bad milliseconds and seconds", []string{"Retry-After-Ms", "-1500", "Retry-After", "2"}, 2 * time.Second},
	{"milliseconds without end", []string{"Retry-After-Ms", strings.Repeat("9", 400)}, forever},
	{"overflows when multiplied", []string{"Retry-After", "9223372037"}, forever},
	{"overflows to a small number", []string{"Retry-After", "18446744074"}, forever},
	{"beyond uint64", []string{"Retry-After", "18446744073709551617"}, forever},
	{"100 kB of digits", []string{"Retry-After", strings.Repeat("1", 100_000)}, forever},
	{"100 kB of zeros", []string{"Retry-After", strings.Repeat("0", 100_000) + "4"}, 4 * time.Second},
	{"100 kB of fraction", []string{"Retry-After", "4." + strings.Repeat("0", 100_000) + "1"}, 5 * time.Second},
	{"100 kB of nothing", []string{"Retry-After", strings.Repeat(" ", 100_000)}, -1},
	{"negative", []string{"Retry-After", "-1"}, -1},
	{"very negative", []string{"Retry-After", "-9223372037"}, -1},
	{"minus zero", []string{"Retry-After", "-0"}, -1},
	{"exponent", []string{"Retry-After", "1e400"}, -1},
	{"infinity", []string{"Retry-After", "Inf"}, -1},
	{"not a number", []string{"Retry-After", "NaN"}, -1},
	{"empty", []string{"Retry-After", ""}, -1},
	{"text", []string{"Retry-After", "in a while"}, -1},
	{"bytes", []string{"Retry-After", "\x80\xff5"}, -1},
	{"date before all time", []string{"Retry-After", "Sat, 01 Jan 0000 00:00:00 GMT"}, -1},
	{"date long ago", []string{"Retry-After", "Thu, 01 Jan 1970 00:00:00 GMT"}, -1},
	{"date at the end of time", []string{"Retry-After", "Fri, 31 Dec 9999 23:59:59 GMT"}, forever},
	{"date beyond the end of time", []string{"Retry-After", "Fri, 31 Dec 10000 23:59:59 GMT"}, -1},
	{"date with its Date", []string{"Retry-After", "Sun, 06 Nov 1994 08:49:47 GMT", "Date", "Sun, 06 Nov 1994 08:49:37 GMT"}, 10 * time.Second},
	{"two-digit year with its Date", []string{"Retry-After", "Sunday, 06-Nov-94 08:49:47 GMT", "Date", "Sun, 06 Nov 1994 08:49:37 GMT"}, 10 * time.Second},
	{"asctime with its Date", []string{"Retry-After", "Sun Nov  6 08:49:47 1994", "Date", "Sun, 06 Nov 1994 08:49:37 GMT"}, 10 * time.Second},
	{"date before its Date", []string{"Retry-After", "Sun, 06 Nov 1994 08:49:36 GMT", "Date", "Sun, 06 Nov 1994 08:49:37 GMT"}, -1},
	{"Date before all time", []string{"Retry-After", "Sun, 06 Nov 1994 08:49:47 GMT", "Date", "Sat, 01 Jan 0000 00:00:00 GMT"}, forever},
	{"Date at the end of time", []string{"Retry-After", "Sun, 06 Nov 1994 08:49:47 GMT", "Date", "Fri, 31 Dec 9999 23:59:59 GMT"}, -1},
	{"Date before all time, date at its end", []string{"Retry-After", "Fri, 31 Dec 9999 23:59:59 GMT", "Date", "Sat, 01 Jan 0000 00:00:00 GMT"}, forever},
	{"Date does not concern seconds", []string{"Retry-After", "5", "Date", "Fri, 31 Dec 9999 23:59:59 GMT"}, 5 * time.Second},
	{"date with a Date that is none", []string{"Retry-After", "Sat, 01 Jan 2000 00:00:09 GMT", "Date", "yesterday"}, 9 * time.Second},
	{"date alone", []string{"Retry-After", "Sat, 01 Jan 2000 00:00:09 GMT"}, 9 * time.Second},
	{"two-digit year alone", []string{"Retry-After", "Saturday, 01-Jan-00 00:00:09 GMT"}, 9 * time.Second},
	{"asctime alone", []string{"Retry-After", "Sat Jan  1 00:00:09 2000"}, 9 * time.Second},
}

const forever = time.Duration(1<<63 - 1) // as long as a Duration goes

// TestRetryAfterThroughTheClient: whatever a server says, the next attempt is not
// before what it asked for and not after that and the jitter; where that is more
// than MaxRetryAfter, or than the caller has, the answer is there at once.
func TestRetryAfterThroughTheClient(t *testing.T) {
	const jitter = 500 * time.Millisecond // the most after a first attempt
	statuses := []int{429, 500, 408, 503}
	if testing.Short() {
		statuses = statuses[:2]
	}
	for _, method := range kinds {
		for _, status := range statuses {
			for _, draw := range []string{"least", "most"} {
				t.Run(fmt.Sprint(method, "/", status, "/", draw), func(t *testing.T) {
					for i := range asks {
						ask, asked := &asks[i], max(0, asks[i].wait)
						rnd, extra := least, time.Duration(0)
						if draw == "most" {
							rnd, extra = most, jitter
							if asked <= time.Minute && (status == 429 || status == 503) {
								extra += asked / pauseDelay // the end of the host's pause
							}
						}
						busy := func(*http.Request) *http.Response { return answer(status, "busy", ask.header...) }

						// Nobody is in a hurry.
						onLine(t, (&oncehttp.Options{}).WithRand(rnd), once(busy), func(t *testing.T, c *oncehttp.Client, l *line) {
							w := converse(t, t.Context(), c, method)
							if asked > time.Minute {
								w.wantAtOnce(ask.name, status, asked)
								return
							}
							if w.status != 200 || w.err != nil {
								t.Errorf("%s: told %d, %v", ask.name, w.status, w.err)
							}
							got := l.times("api.example.com", w.start)
							wantWait(t, ask.name, got, max(asked+extra, oncehttp.LeastWait))
						})

						// The caller's time ends when the wait would.
						limit := min(asked, time.Hour) + extra
						if limit == 0 {
							continue
						}
						for _, by := range []string{"context", "Timeout"} {
							opts := &oncehttp.Options{HTTPClient: &http.Client{}}
							if by == "Timeout" {
								opts.HTTPClient.Timeout = limit
							}
							onLine(t, opts.WithRand(rnd), once(busy), func(t *testing.T, c *oncehttp.Client, l *line) {
								ctx := t.Context()
								if by == "context" {
									var cancel context.CancelFunc
									ctx, cancel = context.WithTimeout(ctx, limit)
									defer cancel()
								}
								converse(t, ctx, c, method).wantAtOnce(ask.name+" until the deadline of the "+by, status, ask.wait)
							})
						}
					}
				})
			}
		}
	}
}

// A conversation is one request and what its caller was told.
type conversation struct {
	t       *testing.T
	start   time.Time
	took    time.Duration
	status  int
	body    string
	err     error
	info    oncehttp.Info
	isKeyed bool
}

func converse(t *testing.T, ctx context.Context, c *oncehttp.Client, method string) conversation {
	t.Helper()
	w := conversation{t: t, start: time.Now()}
	resp, err := c.Do(newRequest(t, ctx, method, host+"/"))
	w.took, w.err = time.Since(w.start), err
	if err != nil {
		return w
	}
	body, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	w.status, w.body, w.err = resp.StatusCode, string(body), err
	w.info, w.isKeyed = oncehttp.OperationFrom(resp)
	return w
}

// wantAtOnce fails unless the caller has the first response, readable and at
// once, and an operation remembers what the server asked for.
func (w conversation) wantAtOnce(name string, status int, asked time.Duration) {
	w.t.Helper()
	if w.took != 0 || w.status != status || w.body != "busy" || w.err != nil {
		w.t.Errorf("%s: %d %q, %v after %v; want %d at once", name, w.status, w.body, w.err, w.took, status)
	}
	if !w.isKeyed {
		return
	}
	if w.info.Outcome != oncehttp.Unknown || w.info.Attempts != 1 {
		w.t.Errorf("%s: told %v after %d attempts", name, w.info.Outcome, w.info.Attempts)
	}
	switch rest := w.info.NotBefore.Sub(w.start.Truncate(time.Microsecond)); {
	case asked < 0 && !w.info.NotBefore.IsZero(),
		asked >= 0 && asked < forever-time.Minute && rest != asked,
		asked >= forever-time.Minute && rest < forever-2*time.Minute: // the jitter was taken off
		w.t.Errorf("%s: not before %v from now, want %v", name, rest, asked)
	}
}

func wantWait(t *testing.T, name string, sent []time.Duration, want time.Duration) {
	t.Helper()
	if len(sent) != 2 || sent[0] != 0 {
		t.Errorf("%s: on the wire after %v, want two attempts", name, sent)
		return
	}
	if sent[1] != want {
		t.Errorf("%s: came back after %v, want %v", name, sent[1], want)
	}
}

// FuzzRetryAfterThroughTheClient lets a server send any header that net/http
// reads, and holds the client to what asked says of it.
func FuzzRetryAfterThroughTheClient(f *testing.F) {
	for i := range asks {
		var head strings.Builder
		for h := asks[i].header; len(h) > 0; h = h[2:] {
			if len(h[1]) < 1000 {
				fmt.Fprintf(&head, "%s: %s\r\n", h[0], h[1])
			}
		}
		f.Add([]byte(head.String()), uint8(i), int64(i)*int64(time.Second), uint64(i)<<60)
	}
	for limit := range int64(4) { // as short as the loop's own wait
		f.Add([]byte{}, uint8(limit), limit, uint64(0))
		f.Add([]byte{}, uint8(limit), limit, uint64(1))
	}
	f.Fuzz(func(t *testing.T, head []byte, form uint8, limit int64, draw uint64) {
		raw := append([]byte("HTTP/1.1 200 OK\r\n"), head...)
		parsed, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(append(raw, "\r\n"...))), nil)
		if err != nil {
			return
		}
		method, status := kinds[form&1], []int{408, 429, 500, 503}[form>>1&3]
		busy := func(*http.Request) *http.Response {
			resp := answer(status, "busy")
			resp.Header = parsed.Header
			return resp
		}
		opts := oncehttp.Options{MaxAttempts: 2}
		rnd := func(n int64) int64 { return int64(draw % uint64(n)) }
		onLine(t, opts.WithRand(rnd), once(busy), func(t *testing.T, c *oncehttp.Client, l *line) {
			ctx := t.Context()
			left := forever
			if limit > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, time.Duration(limit))
				defer cancel()
				left = time.Duration(limit)
			}
			wait, said := asked(parsed.Header, time.Now())
			extra := 500 * time.Millisecond // jitter
			if wait <= time.Minute && (status == 429 || status == 503) {
				extra += wait / pauseDelay // the end of the host's pause
			}
			w := converse(t, ctx, c, method)
			sent := l.times("api.example.com", w.start)
			switch {
			case w.err != nil || w.took < 0 || w.took > left || len(sent) == 0 || sent[0] != 0:
				t.Fatalf("%d, %v after %v, on the wire after %v", w.status, w.err, w.took, sent)
			case len(sent) == 1:
				if wait <= time.Minute && wait+extra < left {
					t.Fatalf("did not come back, though asked to wait for %v of %v", wait, left)
				}
				if !said {
					wait = -1
				}
				w.wantAtOnce("of "+left.String(), status, wait)
			case sent[1] < wait || sent[1]-wait > extra || wait > time.Minute || sent[1] >= left || w.took != sent[1] || w.status != 200:
				t.Fatalf("came back after %v and was told %d, asked to wait for %v, of %v", sent[1], w.status, wait, left)
			}
		})
	})
}

// asked says for how long a header asks to wait. It is a second opinion, by other
// means than the library's: decimal numbers are those that math/big reads.
func asked(h http.Header, now time.Time) (wait time.Duration, said bool) {
	decimal := func(name string, unit int64) {
		for _, v := range h.Values(name) {
			if v = strings.TrimSpace(v); !decimalNumber.MatchString(v) {
				continue
			}
			n, _ := new(big.Rat).SetString(v)
			up := new(big.Int).Add(n.Num(), new(big.Int).Sub(n.Denom(), big.NewInt(1)))
			d := forever
			if up.Div(up, n.Denom()).Mul(up, big.NewInt(unit)); up.IsInt64() {
				d = time.Duration(up.Int64())
			}
			wait, said = max(wait, d), true
		}
	}
	if decimal("Retry-After-Ms", int64(time.Millisecond)); said {
		return wait, true
	}
	decimal("Retry-After", int64(time.Second))
	if date, err := http.ParseTime(strings.TrimSpace(h.Get("Date"))); err == nil {
		now = date
	}
	for _, v := range h.Values("Retry-After") {
		at, err := http.ParseTime(strings.TrimSpace(v))
		if d := at.Sub(now.Truncate(time.Microsecond)); err == nil && d >= 0 {
			if d > forever-time.Second {
				d = forever
			} else if part := d % time.Second; part > 0 {
				d += time.Second - part
			}
			wait, said = max(wait, d), true
		}
	}
	return wait, said
}

var decimalNumber = regexp.MustCompile(`^[0-9]+([.][0-9]+)?$`)

// TestAPauseIsOfOneHost: its requests of every kind wait, also those that wait
// for something else already; other origins do not notice.
func TestAPauseIsOfOneHost(t *testing.T) {
	first := func(r *http.Request) *http.Response {
		switch r.URL.Path {
		case "/pause":
			return answer(429, "", "Retry-After", "20")
		case "/failing":
			return answer(500, "")
		}
		return answer(200, "")
	}
	opts := oncehttp.Options{BackoffBase: 5 * time.Second, MaxAttempts: 2}
	onLine(t, opts.WithRand(least), once(first), func(t *testing.T, c *oncehttp.Client, l *line) {
		var calls sync.WaitGroup
		send := func(method, url string) {
			calls.Go(func() {
				if resp, err := c.Do(newRequest(t, t.Context(), method, url)); err != nil {
					t.Errorf("%s %s: %v, %v", method, url, resp, err)
				}
			})
		}
		start := time.Now()
		send("GET", host+"/pause")
		synctest.Wait()
		for _, method := range []string{"GET", "PUT", "POST"} {
			send(method, host+"/held")
		}
		for _, other := range []string{"http://api.example.com/other", "https://api.example.com:8443/other", "https://api2.example.com/other"} {
			send("GET", other)
			send("POST", other)
		}
		calls.Wait()
		if got, want := fmt.Sprint(l.times("/held", start)), "[20s 20s 20s]"; got != want {
			t.Errorf("the host's requests went out after %s, want %s", got, want)
		}
		if got, want := fmt.Sprint(l.times("/other", start)), "[0s 0s 0s 0s 0s 0s]"; got != want {
			t.Errorf("those of others after %s, want %s", got, want)
		}
	})
	onLine(t, opts.WithRand(most), once(first), func(t *testing.T, c *oncehttp.Client, l *line) {
		start := time.Now()
		var calls sync.WaitGroup
		calls.Go(func() { c.Get(host + "/failing") }) // comes back after 5 s
		time.Sleep(2 * time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		c.Do(newRequest(t, ctx, "GET", host+"/pause"))
		calls.Wait()
		if got, want := fmt.Sprint(l.times("/failing", start)), "[0s 37s]"; got != want { // 2 s, the pause, its delay, its spread
			t.Errorf("requests on the wire after %s, want %s", got, want)
		}
	})
}

// TestAPauseEndsGradually: those who gathered do not all come at once.
func TestAPauseEndsGradually(t *testing.T) {
	opts := oncehttp.Options{MaxAttempts: 1}
	r := rand.New(rand.NewPCG(1, 2))
	var mu sync.Mutex
	rnd := func(n int64) int64 {
		mu.Lock()
		defer mu.Unlock()
		return r.Int64N(n)
	}
	pause := func(*http.Request) *http.Response { return answer(503, "", "Retry-After", "40") }
	onLine(t, opts.WithRand(rnd), once(pause), func(t *testing.T, c *oncehttp.Client, l *line) {
		start := time.Now()
		c.Get(host + "/first")
		s, err := c.Stats(t.Context())
		if err != nil || len(s.Hosts) != 1 {
			t.Fatal(s, err)
		}
		end := s.Hosts[0].PausedUntil.Sub(start)
		if end < 40*time.Second || end > 40*time.Second+40*time.Second/pauseDelay {
			t.Errorf("paused for %v", end)
		}
		answered := answer(200, "")
		l.set(func(*http.Request) (*http.Response, error) { a := *answered; return &a, nil })
		var calls sync.WaitGroup
		for i := range 500 {
			calls.Go(func() {
				time.Sleep(time.Duration(i) * 70 * time.Millisecond)
				resp, err := c.Do(newRequest(t, t.Context(), kinds[i%2], host+"/held"))
				if err != nil || resp.StatusCode != 200 {
					t.Error(resp, err)
				}
			})
		}
		calls.Wait()
		var each [10]int // second after the pause
		for _, at := range l.times("/held", start) {
			after := at - end
			if after < 0 || after > 40*time.Second/pauseSpread {
				t.Fatalf("on the wire %v after the pause", after)
			}
			each[min(int(after/time.Second), 9)]++
		}
		for _, n := range each {
			if n < 20 || n > 85 { // 50 ± 5 standard deviations
				t.Errorf("in each second after the pause: %v, want about 50", each)
				break
			}
		}
	})
}

// TestAPauseIsBounded by MaxRetryAfter, whatever a server asks for.
func TestAPauseIsBounded(t *testing.T) {
	for _, after := range []string{"61", "3600", "9223372037", strings.Repeat("9", 1000), "Fri, 31 Dec 9999 23:59:59 GMT"} {
		for limit, want := range map[time.Duration]time.Duration{0: time.Minute, 5 * time.Second: 5 * time.Second} {
			opts := oncehttp.Options{MaxRetryAfter: limit}
			pause := func(*http.Request) *http.Response { return answer(503, "", "Retry-After", after) }
			onLine(t, opts.WithRand(least), once(pause), func(t *testing.T, c *oncehttp.Client, l *line) {
				start := time.Now()
				c.Get(host + "/first")
				l.set(func(*http.Request) (*http.Response, error) { return answer(200, ""), nil })
				for _, method := range kinds {
					if _, err := c.Do(newRequest(t, t.Context(), method, host+"/held")); err != nil {
						t.Error(err)
					}
				}
				if got := l.times("/held", start); len(got) != 2 || got[0] != want {
					t.Errorf("Retry-After: %.20s holds requests back for %v, want %v", after, got, want)
				}
			})
		}
	}
}

// TestAPauseThatOutlastsTheDeadlineIsToldAtOnce, and nothing is stored for it.
func TestAPauseThatOutlastsTheDeadlineIsToldAtOnce(t *testing.T) {
	pause := func(*http.Request) *http.Response { return answer(503, "", "Retry-After", "50") }
	for _, timeout := range []time.Duration{0, 50 * time.Second} {
		opts := oncehttp.Options{MaxAttempts: 1, HTTPClient: &http.Client{Timeout: timeout}}
		onLine(t, opts.WithRand(least), once(pause), func(t *testing.T, c *oncehttp.Client, l *line) {
			start := time.Now()
			c.Get(host + "/first")
			for _, method := range kinds {
				ctx, cancel := context.WithTimeout(t.Context(), 50*time.Second)
				if timeout > 0 {
					cancel()
					ctx, cancel = context.WithCancel(t.Context())
				}
				_, err := c.Do(newRequest(t, ctx, method, host+"/held"))
				cancel()
				u, ok := errors.AsType[*url.Error](err)
				if took := time.Since(start); took != 0 || !errors.Is(err, oncehttp.ErrWaitTooLong) || !ok || !u.Timeout() {
					t.Errorf("%s: told %v after %v, want ErrWaitTooLong at once", method, err, took)
				}
				if told, ok := errors.AsType[*oncehttp.OperationError](err); ok != (method == "POST") || ok && told.Outcome != oncehttp.NotSent {
					t.Errorf("%s: told %v", method, err)
				}
			}
			if s, err := c.Stats(t.Context()); err != nil || s.Counts != (oncehttp.Counts{}) {
				t.Errorf("stored: %+v, %v", s.Counts, err)
			}
			time.Sleep(50 * time.Second)
			start = time.Now()
			c.Get(host + "/held")
			if got := l.times("/held", start); len(got) != 1 || got[0] != 0 {
				t.Errorf("after the pause, on the wire after %v", got)
			}
		})
	}
}
