package oncehttp_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// An ending is a context of a request and how it ends.
type ending struct {
	name string
	ctx  func(x *trial) (context.Context, func()) // the func releases it
}

// endings end after 5 s, in every way that there is.
var endings = []ending{
	{"cancel", func(x *trial) (context.Context, func()) {
		ctx, cancel := context.WithCancel(x.ctx)
		x.after(5*time.Second, cancel)
		return ctx, cancel
	}},
	{"cancel with cause", func(x *trial) (context.Context, func()) {
		ctx, cancel := context.WithCancelCause(x.ctx)
		x.after(5*time.Second, func() { cancel(errCause) })
		return ctx, func() { cancel(nil) }
	}},
	{"deadline", func(x *trial) (context.Context, func()) {
		return releasable(context.WithTimeout(x.ctx, 5*time.Second))
	}},
	{"deadline with cause", func(x *trial) (context.Context, func()) {
		return releasable(context.WithTimeoutCause(x.ctx, 5*time.Second, errCause))
	}},
	{"cause above a deadline", func(x *trial) (context.Context, func()) {
		ctx, cancel := context.WithCancelCause(x.ctx)
		x.after(5*time.Second, func() { cancel(errCause) })
		return releasable(context.WithTimeout(ctx, time.Hour))
	}},
}

func releasable(ctx context.Context, cancel context.CancelFunc) (context.Context, func()) {
	return ctx, cancel
}

// forEachEnding makes a clause for each way in which a context ends.
func forEachEnding(c clause, make func(x *trial) *http.Request) (clauses []clause) {
	for _, e := range endings {
		c := c
		c.name += ", " + e.name
		c.run = func(x *trial) {
			ctx, release := e.ctx(x)
			defer release()
			x.do(make(x).WithContext(ctx))
		}
		clauses = append(clauses, c)
	}
	return clauses
}

func TestContextsEndRequestsAsInNetHTTP(t *testing.T) {
	stalls := serving(func(_ http.ResponseWriter, r *http.Request) { stall(r) })
	stallsInBody := serving(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "part")
		w.(http.Flusher).Flush()
		stall(r)
	})
	// Attempts fail at once, as long as there is a wait to be interrupted: the
	// oracle is a bare client that waits for its answer meanwhile.
	whileWaiting := func(fail func(w http.ResponseWriter)) func(*trial, int, http.ResponseWriter, *http.Request) {
		return func(x *trial, n int, w http.ResponseWriter, r *http.Request) {
			if x.who == bare {
				stall(r)
			}
			fail(w)
		}
	}
	slow := func(x *trial) { x.opts.BackoffBase, x.opts.BackoffCap = time.Minute, time.Minute }
	slowDial := func(x *trial) {
		x.net.dialed = func(ctx context.Context, _ int, _ string) error {
			<-ctx.Done()
			return ctx.Err()
		}
	}
	slowly := func(x *trial) *http.Request {
		r, w := io.Pipe()
		x.after(10*time.Second, func() { w.CloseWithError(errBroken) })
		req := streaming(x)
		req.Body = x.watch(r)
		return req
	}

	var clauses []clause
	for name, make := range requests {
		clauses = append(clauses, forEachEnding(clause{name: name + " waits for the answer", serve: stalls}, make)...)
		clauses = append(clauses, forEachEnding(clause{name: name + " reads the answer", serve: stallsInBody}, make)...)
		clauses = append(clauses, forEachEnding(clause{name: name + " dials", config: slowDial}, make)...)
	}
	clauses = append(clauses, forEachEnding(clause{name: "the body blocks"}, slowly)...)
	for _, e := range endings {
		if strings.HasPrefix(e.name, "deadline") {
			continue // a wait that is longer than that is not begun
		}
		for name, fail := range map[string]func(http.ResponseWriter){
			"after a 503": func(w http.ResponseWriter) { w.WriteHeader(503) },
			"after EOF":   func(http.ResponseWriter) { hangUp() },
		} {
			clauses = append(clauses, clause{
				name: "GET waits for another attempt " + name + ", " + e.name, config: slow, serve: whileWaiting(fail),
				run: func(x *trial) {
					ctx, release := e.ctx(x)
					defer release()
					x.do(get(x).WithContext(ctx))
				},
			})
		}
	}
	for name, e := range map[string]func(ctx context.Context) (context.Context, func()){
		"cancelled": func(ctx context.Context) (context.Context, func()) {
			ctx, cancel := context.WithCancel(ctx)
			cancel()
			return ctx, cancel
		},
		"cancelled with cause": func(ctx context.Context) (context.Context, func()) {
			ctx, cancel := context.WithCancelCause(ctx)
			cancel(errCause)
			return ctx, func() {}
		},
		"past its deadline": func(ctx context.Context) (context.Context, func()) {
			return releasable(context.WithTimeout(ctx, -time.Second))
		},
	} {
		for method, make := range requests {
			clauses = append(clauses, clause{name: method + " with a context that is " + name, run: func(x *trial) {
				ctx, release := e(x.ctx)
				defer release()
				x.do(make(x).WithContext(ctx))
			}})
		}
	}
	fulfil(t, append(clauses,
		clause{name: "cancelled after the answer", run: func(x *trial) {
			ctx, cancel := context.WithCancel(x.ctx)
			req := get(x).WithContext(ctx)
			resp, err := x.client.Do(req)
			cancel()
			synctest.Wait()
			x.see(req, resp, err)
		}},
		clause{
			name: "a deadline ends the retries", serve: serving(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(503) }),
			run: func(x *trial) {
				ctx, cancel := context.WithTimeout(x.ctx, 1500*time.Millisecond)
				defer cancel()
				x.do(get(x).WithContext(ctx))
			},
			differs: map[string]string{"elapsed": "1s", "request 2": "= request 1"},
		},
	))
}

// What the host asks for, or its rate allows, is waited for: then the context
// ends the wait as it would have ended the request.
func TestContextsEndWaitsForAHost(t *testing.T) {
	var clauses []clause
	for _, e := range endings {
		if strings.HasPrefix(e.name, "deadline") {
			continue // TestAWaitPastTheDeadlineIsATimeout
		}
		for name, make := range requests {
			run := func(x *trial) {
				x.do(get(x))
				ctx, release := e.ctx(x)
				defer release()
				x.do(make(x).WithContext(ctx))
			}
			unsent := map[string]string{"request 2": ""}
			clauses = append(clauses,
				clause{
					name: "pause, " + name + ", " + e.name, run: run, differs: unsent,
					config: func(x *trial) { x.opts.MaxAttempts = 1 },
					serve: func(x *trial, n int, w http.ResponseWriter, r *http.Request) {
						w.Header().Set("Retry-After", "30")
						w.WriteHeader(503)
						stallAfterFirst(n, r)
					},
				},
				clause{
					name: "rate, " + name + ", " + e.name, run: run, differs: unsent, config: rarely,
					serve: func(_ *trial, n int, _ http.ResponseWriter, r *http.Request) { stallAfterFirst(n, r) },
				},
			)
		}
	}
	fulfil(t, clauses)
}

// requests are one of each kind: without body, with one that can be had again or
// not, idempotent or not.
var requests = map[string]func(*trial) *http.Request{"GET": get, "POST": post, "PUT": put, "streaming": streaming}

// rarely lets a request go every 100 s.
func rarely(x *trial) { x.opts.RateLimit, x.opts.Burst = 0.01, 1 }

func stallAfterFirst(n int, r *http.Request) {
	if n > 1 {
		stall(r)
	}
}

// What cannot end before the deadline is refused at once: a timeout, early.
func TestAWaitPastTheDeadlineIsATimeout(t *testing.T) {
	fulfil(t, []clause{{
		name: "rate", config: rarely,
		serve: func(_ *trial, n int, _ http.ResponseWriter, r *http.Request) { stallAfterFirst(n, r) },
		run: func(x *trial) {
			x.do(get(x))
			ctx, cancel := context.WithTimeout(x.ctx, 5*time.Second)
			defer cancel()
			x.do(post(x).WithContext(ctx))
		},
		differs: map[string]string{
			"error (2)": "url.Error{Post " + site + "/x} timeout true temporary false: oncehttp: the wait would not end before the deadline: " +
				site + " is not free until 2000-01-01T00:01:40Z",
			"elapsed": "0s", "request 2": "",
		},
	}})
}

func TestClientTimeoutIsThatOfNetHTTP(t *testing.T) {
	stalls := serving(func(_ http.ResponseWriter, r *http.Request) { stall(r) })
	timeout := func(x *trial) { x.hc.Timeout, x.timeout = 5*time.Second, true }
	over := func(rt func(r *http.Request) (*http.Response, error)) func(*trial) {
		return func(x *trial) {
			timeout(x)
			x.hc.Transport = roundTripper(rt)
		}
	}
	redirects := func(x *trial, n int, w http.ResponseWriter, r *http.Request) {
		select {
		case <-time.After(2 * time.Second):
			http.Redirect(w, r, "/next", http.StatusFound)
		case <-r.Context().Done():
		}
	}
	var clauses []clause
	for name, make := range requests {
		clauses = append(clauses,
			clause{name: name + ", before the answer", config: timeout, serve: stalls, run: sends(make)},
			clause{name: name + ", in time", config: timeout, run: sends(make)},
			clause{name: name + ", an error in time", config: func(x *trial) {
				timeout(x)
				dialing(&net.DNSError{Err: "no such host", IsNotFound: true})(x)
			}, run: sends(make)},
			clause{name: name + ", across redirects", config: timeout, serve: redirects, run: sends(make)},
			clause{name: name + ", dialling", config: func(x *trial) {
				timeout(x)
				x.net.dialed = func(ctx context.Context, _ int, _ string) error { <-ctx.Done(); return ctx.Err() }
			}, run: sends(make)},
			clause{
				name: name + ", in the answer", config: timeout, run: sends(make),
				serve: serving(func(w http.ResponseWriter, r *http.Request) {
					io.WriteString(w, "part")
					w.(http.Flusher).Flush()
					stall(r)
				}),
			},
		)
	}
	for _, e := range endings {
		clauses = append(clauses, clause{name: "longer than the context, " + e.name, config: func(x *trial) { x.hc.Timeout = time.Minute }, serve: stalls, run: func(x *trial) {
			ctx, release := e.ctx(x)
			defer release()
			x.do(get(x).WithContext(ctx))
		}})
	}
	fulfil(t, append(clauses,
		clause{name: "a transport with an error of its own", config: over(func(r *http.Request) (*http.Response, error) {
			<-r.Context().Done()
			return nil, errBroken
		}), run: sends(get), differs: map[string]string{
			"error": "url.Error{Get " + site + "/x?q=1} timeout true temporary true: broken (Client.Timeout exceeded while awaiting headers), net.Error timeout true, temporary true, is context deadline exceeded, is broken",
		}},
		clause{name: "a body with an error of its own", config: over(func(r *http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: 200, Header: http.Header{}, Request: r, Body: readFunc(func() error { <-r.Context().Done(); return errBroken })}, nil
		}), run: sends(get), differs: map[string]string{
			"answer": `"", broken (Client.Timeout or context cancellation while reading body), net.Error timeout true, temporary true, is context deadline exceeded, is broken`,
		}},
		clause{name: "redirects of a transport that names no request", config: over(func(r *http.Request) (*http.Response, error) {
			select {
			case <-time.After(2 * time.Second):
			case <-r.Context().Done():
				return nil, r.Context().Err()
			}
			return &http.Response{StatusCode: 302, Header: http.Header{"Location": {"/next"}}, Body: http.NoBody}, nil
		}), run: sends(get)},
		clause{
			name: "longer than a transport's own for each attempt", config: func(x *trial) {
				x.hc.Timeout, x.timeout = 9*time.Second, true
				rt := x.hc.Transport
				x.hc.Transport = roundTripper(func(r *http.Request) (*http.Response, error) {
					ctx, cancel := context.WithTimeout(r.Context(), 3*time.Second)
					resp, err := rt.RoundTrip(r.WithContext(ctx))
					x.after(3*time.Second, cancel)
					return resp, err
				})
			}, serve: redirects, run: sends(post),
		},
		clause{name: "response kept for long after", config: timeout, run: func(x *trial) {
			req := get(x)
			resp, err := x.client.Do(req)
			time.Sleep(time.Minute)
			x.see(req, resp, err)
		}},
		clause{name: "of a response that breaks in time", config: timeout, run: sends(get), serve: serving(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", "9")
			io.WriteString(w, "par")
			w.(http.Flusher).Flush()
			hangUp()
		})},
		clause{name: "across retries", config: timeout, serve: func(x *trial, n int, w http.ResponseWriter, r *http.Request) {
			if n == 2 || x.who == bare {
				stall(r)
			}
			w.WriteHeader(503)
		}, run: sends(get), differs: map[string]string{"request 2": "= request 1"}},
		clause{name: "set on the standard client", serve: stalls, run: func(x *trial) {
			x.timeout = true
			if hc, ok := x.client.(*http.Client); ok {
				hc.Timeout = 5 * time.Second
			} else { // Client has none of its own
				hc := x.once.StandardClient()
				hc.Timeout = 5 * time.Second
				x.client = hc
			}
			x.do(get(x))
			x.do(post(x))
		}},
	))
}

func TestClientTimeoutSaysSo(t *testing.T) {
	network := newPipeNet(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/body" {
			io.WriteString(w, "part")
			w.(http.Flusher).Flush()
		}
		stall(r)
	}))
	defer network.server.Close()
	hc := &http.Client{Transport: &http.Transport{DialContext: network.dial}, Timeout: 50 * time.Millisecond}
	defer hc.CloseIdleConnections()
	once, err := oncehttp.New(oncehttptest.NewStore(), &oncehttp.Options{HTTPClient: hc, Unlisted: oncehttp.OnlyGivenKeys})
	if err != nil {
		t.Fatal(err)
	}
	defer once.Close()
	for who, client := range map[string]sender{bare: hc, ours: once, std: once.StandardClient()} {
		_, err := client.Get(site)
		if got, want := errorText(err), "url.Error{Get "+site+"} timeout true temporary true: "+awaitingHeaders+", net.Error timeout true, temporary true, is context deadline exceeded"; got != want {
			t.Errorf("%s: %s", who, got)
		}
		resp, err := client.Get(site + "/body")
		if err != nil {
			continue // the machine is slow
		}
		_, err = io.ReadAll(resp.Body)
		if got, want := errorText(err), readingBody+", net.Error timeout true, temporary true, is context deadline exceeded"; got != want {
			t.Errorf("%s: %s", who, got)
		}
		resp.Body.Close()
	}
}

type readFunc func() error

func (f readFunc) Read([]byte) (int, error) { return 0, f() }
func (readFunc) Close() error               { return nil }

func TestTheDeprecatedCancelIsHonoured(t *testing.T) {
	cancelling := func(newRequest func(x *trial) *http.Request) func(*trial) {
		return func(x *trial) {
			cancel := make(chan struct{})
			x.after(5*time.Second, func() { close(cancel) })
			req := newRequest(x)
			//lint:ignore SA1019 it is what this is about
			req.Cancel = cancel
			x.do(req)
		}
	}
	stalls := serving(func(_ http.ResponseWriter, r *http.Request) { stall(r) })
	fulfil(t, []clause{
		{name: "waits for the answer, GET", serve: stalls, run: cancelling(get)},
		{name: "waits for the answer, POST", serve: stalls, run: cancelling(post)},
		{name: "reads the answer", serve: serving(func(w http.ResponseWriter, r *http.Request) {
			io.WriteString(w, "part")
			w.(http.Flusher).Flush()
			stall(r)
		}), run: cancelling(get)},
		{name: "in time", run: cancelling(get)},
		{
			name: "waits for another attempt", config: func(x *trial) { x.opts.BackoffBase, x.opts.BackoffCap = time.Minute, time.Minute },
			serve: func(x *trial, n int, w http.ResponseWriter, r *http.Request) {
				if x.who == bare {
					stall(r)
				}
				w.WriteHeader(503)
			},
			run: cancelling(get),
		},
		{
			name: "waits for the host", config: func(x *trial) { x.opts.RateLimit, x.opts.Burst = 0.01, 1 },
			serve: func(x *trial, n int, w http.ResponseWriter, r *http.Request) { stallAfterFirst(n, r) },
			run: func(x *trial) {
				x.do(post(x))
				cancelling(post)(x)
			},
			differs: map[string]string{"request 2": ""},
		},
	})
}
