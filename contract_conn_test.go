package oncehttp_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// What a retry leaves behind: the answer that is not told is read up to a bound
// and closed, so that its connection is used again.
func TestRetriesKeepTheirConnections(t *testing.T) {
	failing := func(length int) func(*trial, int, http.ResponseWriter, *http.Request) {
		return func(x *trial, n int, w http.ResponseWriter, r *http.Request) {
			if n > 1 || x.who == bare {
				io.WriteString(w, "ok")
				return
			}
			w.WriteHeader(503)
			io.WriteString(w, strings.Repeat("x", length))
		}
	}
	traced := func(newRequest func(*trial) *http.Request) func(*trial) {
		return func(x *trial) { x.do(newRequest(x).WithContext(x.reused(x.ctx))) }
	}
	another := func(reused bool) map[string]string {
		return map[string]string{"elapsed": "1s", "request 2": "= request 1", "connection (2)": fmt.Sprint("reused ", reused)}
	}
	fulfil(t, []clause{
		{name: "no answer", serve: failing(0), run: traced(get), differs: another(true)},
		{name: "short answer", serve: failing(1000), run: traced(get), differs: another(true)},
		{name: "short answer, PUT", serve: failing(1000), run: traced(put), differs: with(another(true), "body 2", "closed 1 times")},
		{name: "long answer", serve: failing(100_000), run: traced(get), differs: another(false)},
		{
			name: "answer that does not end", run: traced(get), differs: another(false),
			serve: func(x *trial, n int, w http.ResponseWriter, r *http.Request) {
				if n > 1 || x.who == bare {
					io.WriteString(w, "ok")
					return
				}
				w.WriteHeader(503)
				for range 100 {
					io.WriteString(w, strings.Repeat("x", 1000))
					w.(http.Flusher).Flush()
				}
			},
		},
		{name: "the last answer is told, whole", serve: func(x *trial, n int, w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(503)
			io.WriteString(w, strings.Repeat("x", 10_000))
		}, run: sends(get), differs: retried(3)},
		{name: "the last answer of a PUT is told", serve: serving(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(500) }), run: sends(put),
			differs: with(retried(3), "body 2", "closed 1 times", "body 3", "closed 1 times")},
		{name: "no retry without the body", serve: serving(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(500) }),
			run: sends(edited(streaming, func(r *http.Request) { r.Method = "PUT" }))},
		{name: "no retry of a POST", serve: serving(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(503) }), run: sends(post)},
		{
			name: "a body that cannot be had again", serve: serving(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(503) }),
			run: sends(edited(put, func(r *http.Request) { r.GetBody = func() (io.ReadCloser, error) { return nil, errBroken } })),
			differs: map[string]string{
				"elapsed": "1s", "error": "url.Error{Put " + site + "/x} timeout false temporary false: broken, == broken", "answer": "", "closing": "",
				"header": "", "length": "", "response's request": "", "status": "", "trailer": "",
			},
		},
		{name: "giving up on one host leaves the others' connections", serve: func(x *trial, n int, w http.ResponseWriter, r *http.Request) {
			if r.Host != "a.example.com" {
				hangUp()
			}
		}, run: func(x *trial) {
			x.do(get(x).WithContext(x.reused(x.ctx)))
			x.do(edited(get, func(r *http.Request) { r.URL.Host, r.Host = "b.example.org", "" })(x))
			x.do(get(x).WithContext(x.reused(x.ctx)))
		}, differs: map[string]string{"elapsed": "2s", "request 3": "= request 2", "request 4": "= request 2", "request 5": "= request 1"}},
		{name: "a transport that cannot close idle connections", config: through(func(r *http.Request) (*http.Response, error) { return nil, errBroken }), run: func(x *trial) {
			x.client.CloseIdleConnections()
		}},
		{name: "CloseIdleConnections reaches the transport", config: func(x *trial) { x.hc.Transport = closer{x} }, run: func(x *trial) {
			x.client.CloseIdleConnections()
		}},
	})
}

type closer struct{ x *trial }

func (closer) RoundTrip(*http.Request) (*http.Response, error) { return nil, errBroken }
func (c closer) CloseIdleConnections()                         { c.x.note("idle connections", "closed") }

// What is refused has its body closed once, and says why.
func TestWhatIsRefusedHasItsBodyClosed(t *testing.T) {
	unsent := func(more ...string) map[string]string {
		return with(map[string]string{
			"answer": "", "closing": "", "header": "", "length": "", "response's request": "", "status": "", "trailer": "", "request 1": "",
		}, more...)
	}
	text := func(method, url, why string) string {
		return "url.Error{" + method + " " + url + "} timeout false temporary false: " + why
	}
	closed := func(x *trial) {
		if x.once != nil {
			x.once.Close()
		}
	}
	fulfil(t, []clause{
		{name: "client is closed, GET", run: func(x *trial) { closed(x); x.do(get(x)) }, differs: unsent("error", text("Get", site+"/x?q=1", "oncehttp: client is closed"))},
		{name: "client is closed, POST", run: func(x *trial) { closed(x); x.do(post(x)) }, differs: unsent("error", text("Post", site+"/x", "oncehttp: client is closed"))},
		{
			name: "breaker is open", config: func(x *trial) {
				x.opts.Breaker = &oncehttp.Breaker{MinRequests: 1, Consecutive: 1}
			},
			serve: func(_ *trial, n int, _ http.ResponseWriter, _ *http.Request) {
				if n == 1 {
					hangUp()
				}
			},
			run: func(x *trial) {
				x.do(streaming(x))
				x.do(post(x))
			},
			differs: map[string]string{
				"error (2)": text("Post", site+"/x", "oncehttp: circuit breaker is open for "+site+" until 2000-01-01T00:00:30.000Z"),
				"answer":    "", "closing": "", "header": "", "length": "", "response's request": "", "status": "", "trailer": "", "request 2": "",
			},
		},
		{
			name: "invalid requests say nothing of the host", config: func(x *trial) { x.opts.Breaker = &oncehttp.Breaker{MinRequests: 1, Consecutive: 1} },
			run: func(x *trial) {
				for range 3 {
					x.do(edited(get, func(r *http.Request) { r.Header["X"] = []string{"a\nb"} })(x))
				}
				x.do(get(x))
			},
		},
		{
			name: "closed while it waits", config: func(x *trial) { x.opts.BackoffBase, x.opts.BackoffCap = time.Minute, time.Minute },
			serve: func(x *trial, n int, w http.ResponseWriter, r *http.Request) {
				if x.who != bare {
					w.WriteHeader(503)
				}
			},
			run: func(x *trial) {
				x.after(time.Second, func() { closed(x) })
				x.do(put(x))
			},
			differs: map[string]string{
				"elapsed": "1s", "error": text("Put", site+"/x", "oncehttp: client is closed"),
				"answer": "", "closing": "", "header": "", "length": "", "response's request": "", "status": "", "trailer": "",
			},
		},
	})
}

// StandardClient is a copy: what a program sets on its own is its own.
func TestTheStandardClientIsACopy(t *testing.T) {
	inBubble(t, oncehttp.Options{Unlisted: oncehttp.OnlyGivenKeys}, func(t *testing.T, b *bench) {
		one, two := b.client.StandardClient(), b.client.StandardClient()
		if one == two || one.Transport != two.Transport {
			t.Errorf("%p and %p", one, two)
		}
		one.Transport, one.Timeout, one.Jar = nil, time.Second, nil
		one.CheckRedirect = func(*http.Request, []*http.Request) error { return errBroken }
		for _, c := range []sender{two, b.client, b.client.StandardClient()} {
			resp, err := c.Get(host + "/v1/charges")
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
		}
		changed := *b.client.StandardClient()
		resp, err := changed.Get(host + "/v1/charges") // a copy of the copy
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
	})
}

// http.DefaultClient is what programs replace; and what they send meanwhile, in
// many goroutines, goes on.
func TestManyGoroutinesShareTheClient(t *testing.T) {
	fulfil(t, []clause{{
		name:  "at once",
		serve: serving(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, r.URL.Path) }),
		run: func(x *trial) {
			var all sync.WaitGroup
			answers := make([]string, 30)
			for i := range answers {
				all.Go(func() {
					ctx, cancel := context.WithTimeout(x.ctx, time.Minute)
					defer cancel()
					body := strings.NewReader("")
					req, _ := http.NewRequestWithContext(ctx, []string{"GET", "POST", "PUT"}[i%3], fmt.Sprint(site, "/", i), body)
					resp, err := x.client.Do(req)
					if err != nil {
						x.t.Error(err)
						return
					}
					b, _ := io.ReadAll(resp.Body)
					resp.Body.Close()
					answers[i] = string(b)
				})
			}
			all.Wait()
			x.note("answers", "%q", answers)
			x.mu.Lock()
			x.wire = nil // in no order
			x.mu.Unlock()
		},
	}})
}

// HTTP/2 has a Transport of its own, and needs a socket.
func TestHTTP2IsThatOfNetHTTP(t *testing.T) {
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		w.Header().Set("Trailer", "X-Sum")
		fmt.Fprintf(w, "%s %s %d %q %v", r.Method, r.Proto, r.ContentLength, body, err)
		w.Header().Set("X-Sum", "7")
	}))
	server.EnableHTTP2 = true
	server.StartTLS()
	defer server.Close()
	once, err := oncehttp.New(oncehttptest.NewStore(), &oncehttp.Options{HTTPClient: server.Client(), Unlisted: oncehttp.OnlyGivenKeys})
	if err != nil {
		t.Fatal(err)
	}
	defer once.Close()
	if resp, err := server.Client().Get(server.URL); err == nil { // which makes the connection
		resp.Body.Close()
	}
	for name, newRequest := range requests {
		texts := map[string]string{}
		for who, client := range map[string]sender{bare: server.Client(), ours: once, std: once.StandardClient()} {
			x := &trial{t: t, ctx: newStrictContext()}
			req := newRequest(x)
			req.URL, _ = req.URL.Parse(server.URL)
			req.Host = ""
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(resp.Body)
			texts[who] = fmt.Sprint(resp.Status, resp.Proto, resp.ContentLength, resp.Request == req, string(body), err, resp.Trailer, resp.TLS != nil, resp.Body.Close())
		}
		if texts[ours] != texts[bare] || texts[std] != texts[bare] {
			t.Errorf("%s: %q", name, texts)
		}
	}
}
