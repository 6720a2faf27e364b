package oncehttp_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp"
)

// keyed gives a request its key.
func keyed(newRequest func(*trial) *http.Request) func(*trial) *http.Request {
	return edited(newRequest, func(r *http.Request) { r.Header.Set("Idempotency-Key", "k") })
}

// fulfilKeyed runs clauses on operations. The oracle is still a bare client that
// sends the same request, key included; what differs is the price of a key, and
// stated.
func fulfilKeyed(t *testing.T, clauses []clause) {
	for _, c := range clauses {
		t.Run(c.name, func(t *testing.T) {
			want := try(t, c, bare, oncehttp.KeyUnlisted)
			for _, who := range []string{ours, std} {
				compare(t, who, want, try(t, c, who, oncehttp.KeyUnlisted), c.differs)
			}
		})
	}
}

func TestOperationsAreSentAsNetHTTPWouldButBuffered(t *testing.T) {
	mark := func(text string) map[string]string { return map[string]string{"response's request": text} }
	const asked = "POST " + site + `/x [Idempotency-Key=["k"]] same false body true`
	fulfilKeyed(t, []clause{
		{name: "POST", run: sends(keyed(post)), differs: mark(asked)},
		{name: "streaming is sent with its length", run: sends(keyed(streaming)), differs: with(mark(asked),
			"request 1", `POST /x at a.example.com:80 for a.example.com, [Accept-Encoding=["gzip"] Content-Length=["7"] Idempotency-Key=["k"] User-Agent=["Go-http-client/1.1"]], length 7 [] close false, body "order=1" <nil>`)},
		{name: "no body", run: sends(keyed(edited(post, func(r *http.Request) { r.Body, r.GetBody, r.ContentLength = nil, nil, 0 }))),
			differs: mark("POST " + site + `/x [Idempotency-Key=["k"]] same false body false`)},
		{name: "NoBody", run: sends(keyed(edited(post, func(r *http.Request) { r.Body, r.GetBody, r.ContentLength = http.NoBody, nil, 0 }))), differs: mark(asked)},
		{name: "an empty body has a length", run: sends(keyed(edited(streaming, func(r *http.Request) { r.Body = io.NopCloser(strings.NewReader("")) }))), differs: with(mark(asked),
			"request 1", `POST /x at a.example.com:80 for a.example.com, [Accept-Encoding=["gzip"] Content-Length=["0"] Idempotency-Key=["k"] User-Agent=["Go-http-client/1.1"]], length 0 [] close false, body "" <nil>`)},
		{name: "GET", run: sends(keyed(get)), differs: mark("GET " + site + `/x?q=1 [Idempotency-Key=["k"]] same false body false`)},
		{name: "Host, userinfo, Close", run: sends(keyed(edited(get, func(r *http.Request) { r.Host, r.Close = "b.example.com", true }))),
			differs: mark("GET " + site + `/x?q=1 [Idempotency-Key=["k"]] same false body false`)},
		{name: "a header of several values, and no user agent", run: sends(keyed(edited(get, func(r *http.Request) {
			r.Header["x-lower"], r.Header["X-Many"], r.Header["User-Agent"] = []string{"1"}, []string{"1", "2"}, nil
		}))), differs: mark("GET " + site + `/x?q=1 [Idempotency-Key=["k"] User-Agent=[] X-Many=["1" "2"] x-lower=["1"]] same false body false`)},
		{
			name: "the transport has no way to send it again by itself", config: func(x *trial) {
				rt := x.hc.Transport
				x.hc.Transport = roundTripper(func(r *http.Request) (*http.Response, error) {
					x.note("GetBody", "%v", r.GetBody != nil)
					return rt.RoundTrip(r)
				})
			},
			run: sends(keyed(post)), differs: with(mark(asked), "GetBody", "false"),
		},
		{
			name: "a body that breaks is not sent", run: sends(keyed(edited(streaming, func(r *http.Request) {
				r.Body = io.NopCloser(io.MultiReader(strings.NewReader("part"), readFunc(func() error { return errBroken })))
			}))),
			differs: map[string]string{
				"error":     "url.Error{Post " + site + "/x} timeout false temporary false: oncehttp: operation k: outcome not sent after 0 attempts: broken, is broken",
				"request 1": "",
			},
		},
	})
}

func TestOperationsAreRefusedAsNetHTTPDoesButNotSent(t *testing.T) {
	refused := func(url, why string) map[string]string {
		return map[string]string{"error": "url.Error{Post " + url + "} timeout false temporary false: oncehttp: operation k: outcome not sent after 0 attempts: " + why}
	}
	edit := func(f func(r *http.Request)) func(*trial) { return sends(keyed(edited(post, f))) }
	answered := map[string]string{"answer": "", "closing": "", "header": "", "length": "", "response's request": "", "status": "", "trailer": "", "request 1": ""}
	fulfilKeyed(t, []clause{
		{name: "nil URL", run: edit(func(r *http.Request) { r.URL = nil })},
		{name: "RequestURI", run: edit(func(r *http.Request) { r.RequestURI = "/x" })},
		{name: "no host", run: edit(func(r *http.Request) { r.URL.Host = "" }), differs: refused("http:///x", "no Host in request URL, want an absolute URL")},
		{name: "scheme", run: edit(func(r *http.Request) { r.URL.Scheme = "ftp" }), differs: refused("ftp://a.example.com/x", `unsupported protocol scheme "ftp", want http or https`)},
		{name: "method", run: edit(func(r *http.Request) { r.Method = "POST " }), differs: map[string]string{
			"error": "url.Error{Post  " + site + `/x} timeout false temporary false: oncehttp: operation k: outcome not sent after 0 attempts: invalid method "POST "`}},
		{name: "header", run: edit(func(r *http.Request) { r.Header["X"] = []string{"a\nb"} }), differs: refused(site+"/x", `invalid value of header "X"`)},
		{
			name: "larger than MaxBodyBytes", config: func(x *trial) { x.opts.MaxBodyBytes = 6 }, run: sends(keyed(post)),
			differs: with(refused(site+"/x", "request body is larger than MaxBodyBytes (7 > 6); raise Options.MaxBodyBytes, or send it WithoutKey"), pairs(answered)...),
		},
		{
			name: "larger than MaxBodyBytes, streaming", config: func(x *trial) { x.opts.MaxBodyBytes = 6 }, run: sends(keyed(streaming)),
			differs: with(refused(site+"/x", "request body is larger than MaxBodyBytes (> 6); raise Options.MaxBodyBytes, or send it WithoutKey"), pairs(answered)...),
		},
		{name: "as large as MaxBodyBytes", config: func(x *trial) { x.opts.MaxBodyBytes = 7 }, run: sends(keyed(post)),
			differs: map[string]string{"response's request": "POST " + site + `/x [Idempotency-Key=["k"]] same false body true`}},
		{name: "length that is not the body's", run: edit(func(r *http.Request) { r.ContentLength = 9 }), serve: serving(func(_ http.ResponseWriter, r *http.Request) { stall(r) }),
			differs: with(refused(site+"/x", "ContentLength=9 with body of 7 bytes"), "request 1", "")},
	})
}

// pairs returns a map as [with] wants it.
func pairs(m map[string]string) (list []string) {
	for k, v := range m {
		list = append(list, k, v)
	}
	return list
}

func TestAnswersOfOperationsAreBuffered(t *testing.T) {
	const request = "POST " + site + `/x [Idempotency-Key=["k"]] same false body true`
	is := func(more ...string) map[string]string {
		return with(map[string]string{"response's request": request}, more...)
	}
	fulfilKeyed(t, []clause{
		{name: "204", serve: serving(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(204) }), run: sends(keyed(post)), differs: is()},
		{name: "201 at a relative place", serve: serving(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Location", "/x/1")
			w.WriteHeader(201)
		}), run: sends(keyed(post)), differs: is()},
		{name: "402", serve: serving(func(w http.ResponseWriter, r *http.Request) { http.Error(w, "no money", http.StatusPaymentRequired) }), run: sends(keyed(post)), differs: is()},
		{name: "gzip", serve: serving(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			w.Write([]byte("\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff\x01\x02\x00\xfd\xffok\x47\xdd\xdc\x79\x02\x00\x00\x00"))
		}), run: sends(keyed(post)), differs: is()},
		{name: "chunked, trailer", serve: serving(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Trailer", "X-Sum")
			for range 3 {
				io.WriteString(w, "part ")
				w.(http.Flusher).Flush()
			}
			w.Header().Set("X-Sum", "7")
		}), run: sends(keyed(post)), differs: is()},
		{name: "longer than MaxResponseBytes streams", config: func(x *trial) { x.opts.MaxResponseBytes = 100 }, serve: serving(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Trailer", "X-Sum")
			io.WriteString(w, strings.Repeat("x", 10_000))
			w.Header().Set("X-Sum", "7")
		}), run: sends(keyed(post)), differs: is()},
		{name: "event stream", serve: serving(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, "data: 1\n\n")
		}), run: sends(keyed(post)), differs: is()},
		{
			name: "usable for ever, connection free at once", serve: serving(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, strings.Repeat("x", 10_000)) }),
			run: func(x *trial) {
				req := keyed(post)(x).WithContext(x.reused(x.ctx))
				first, err := x.client.Do(req)
				if err != nil {
					x.t.Fatal(err)
				}
				x.do(get(x).WithContext(x.reused(x.ctx)))
				x.see(req, first, err)
			},
			differs: map[string]string{
				"connection (2)":         "reused true", // the bare client's is still occupied by the answer
				"response's request (2)": request,
			},
		},
		{name: "a body that breaks is asked for again", serve: func(x *trial, n int, w http.ResponseWriter, r *http.Request) {
			if n == 1 && x.who != bare {
				w.Header().Set("Content-Length", "9")
				io.WriteString(w, "par")
				w.(http.Flusher).Flush()
				hangUp()
			}
			io.WriteString(w, "whole")
		}, run: sends(keyed(post)), differs: is("elapsed", "1s", "request 2", "= request 1")},
	})
}

func TestRedirectsOfOperationsStayWithTheOperation(t *testing.T) {
	const (
		from = "POST " + site + `/x [Idempotency-Key=["k"]] same false body true`
		went = "POST " + site + `/next [Idempotency-Key=["k"]] same false body true`
	)
	unfollowed := func(status int, location string) map[string]string {
		return map[string]string{
			"answer": `"moved", none`, "status": fmt.Sprintf("%d %s HTTP/1.1", status, http.StatusText(status)), "request 2": "", "response's request": from,
			"length": "5 [] uncompressed false close false", "header": fmt.Sprintf(`[Content-Length=["5"] Content-Type=["text/plain; charset=utf-8"] Location=[%q]]`, location),
		}
	}
	check := func(err error) func(*trial) {
		return func(x *trial) {
			x.hc.CheckRedirect = func(req *http.Request, via []*http.Request) error {
				x.note("CheckRedirect", "%s %v via %d, response %d", req.Method, req.URL, len(via), req.Response.StatusCode)
				return err
			}
		}
	}
	var clauses []clause
	for _, status := range []int{301, 302} {
		for _, location := range []string{site + "/next", "http://b.example.org/next"} {
			d := unfollowed(status, location)
			clauses = append(clauses, clause{name: fmt.Sprintf("%d to %s is told, not followed", status, location), serve: redirecting(status, location), run: sends(keyed(post)), differs: d})
		}
	}
	for _, status := range []int{307, 308} {
		d := unfollowed(status, "http://b.example.org/next")
		clauses = append(clauses,
			clause{name: fmt.Sprintf("%d within the origin is followed, as one operation", status), serve: redirecting(status, "/next"), run: sends(keyed(post)),
				differs: map[string]string{"response's request": went, "request 2": secondTo("/next"), "body 1": "closed 1 times", "body 2": ""}},
			clause{name: fmt.Sprintf("%d to another origin is told, not followed", status), serve: redirecting(status, "http://b.example.org/next"), run: sends(keyed(post)), differs: d},
		)
	}
	fulfilKeyed(t, append(clauses,
		clause{
			name: "303 is an answer, and its GET has no key", serve: redirecting(303, "/next"), run: sends(keyed(post)),
			differs: map[string]string{
				"request 2":          `GET /next at a.example.com:80 for a.example.com, [Accept-Encoding=["gzip"] Referer=["` + site + `/x"] User-Agent=["Go-http-client/1.1"]], length 0 [] close false, body "" <nil>`,
				"response's request": `GET ` + site + `/next [Referer=["` + site + `/x"]] same false body false after ` + from,
			},
		},
		clause{name: "CheckRedirect is asked inside", config: check(nil), serve: redirecting(307, "/next"), run: sends(keyed(post)),
			differs: map[string]string{"response's request": went, "request 2": secondTo("/next"), "body 1": "closed 1 times", "body 2": ""}},
		clause{name: "CheckRedirect's refusal leaves the answer", config: check(errBroken), serve: redirecting(307, "/next"), run: sends(keyed(post)), differs: map[string]string{
			"error": "none", "answer": `"moved", none`, "trailer": "[]", "closing": "<nil>", "response's request": from,
		}},
	))
}

func secondTo(path string) string {
	return `POST ` + path + ` at a.example.com:80 for a.example.com, [Accept-Encoding=["gzip"] Content-Length=["7"] Idempotency-Key=["k"] User-Agent=["Go-http-client/1.1"]], length 7 [] close false, body "order=1" <nil>`
}

// A keyed request that its caller leaves is told as unknown; besides, its error
// is the bare client's.
func TestContextsEndOperationsAsInNetHTTP(t *testing.T) {
	stalls := serving(func(_ http.ResponseWriter, r *http.Request) { stall(r) })
	told := map[string]string{
		"cancel":                 "context canceled, is context canceled",
		"cancel with cause":      "shop closes, is shop closes",
		"deadline":               "context deadline exceeded, is context deadline exceeded",
		"deadline with cause":    "shop closes, is shop closes",
		"cause above a deadline": "shop closes, is shop closes",
	}
	long := strings.Repeat("x", 10_000)
	var clauses []clause
	for _, e := range endings {
		text := fmt.Sprintf("url.Error{Post %s/x} timeout %v temporary false: oncehttp: operation k: outcome unknown after 1 attempts: %s", site, e.name == "deadline", told[e.name])
		for _, c := range forEachEnding(clause{name: "waits for the answer", serve: stalls, differs: map[string]string{"error": text}}, keyed(post)) {
			if strings.HasSuffix(c.name, ", "+e.name) {
				clauses = append(clauses, c)
			}
		}
	}
	fulfilKeyed(t, append(clauses,
		clause{
			name: "Client.Timeout", config: func(x *trial) { x.hc.Timeout, x.timeout = 5*time.Second, true }, serve: stalls, run: sends(keyed(post)),
			differs: map[string]string{"error": "url.Error{Post " + site + "/x} timeout true temporary true: oncehttp: operation k: outcome unknown after 1 attempts: " +
				"Client.Timeout, is context deadline exceeded"},
		},
		clause{
			name: "the deprecated Cancel", serve: stalls, run: func(x *trial) {
				cancel := make(chan struct{})
				x.after(5*time.Second, func() { close(cancel) })
				req := keyed(post)(x)
				//lint:ignore SA1019 it is what this is about
				req.Cancel = cancel
				x.do(req)
			},
			differs: map[string]string{"error": "url.Error{Post " + site + "/x} timeout false temporary false: oncehttp: operation k: outcome unknown after 1 attempts: net/http: request canceled"},
		},
		clause{
			name:  "cancelled after the answer, which is whole",
			serve: serving(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, long) }),
			run: func(x *trial) {
				ctx, cancel := context.WithCancel(x.ctx)
				req := keyed(post)(x).WithContext(ctx)
				resp, err := x.client.Do(req)
				cancel()
				synctest.Wait()
				x.see(req, resp, err)
			},
			differs: map[string]string{
				"answer":             fmt.Sprintf("%q, none", long),
				"response's request": "POST " + site + `/x [Idempotency-Key=["k"]] same false body true`,
			},
		},
		clause{
			name: "AttemptTimeout", config: func(x *trial) { x.opts.AttemptTimeout = 5 * time.Second }, serve: func(x *trial, n int, w http.ResponseWriter, r *http.Request) {
				if n == 1 && x.who != bare {
					stall(r)
				}
			}, run: sends(keyed(post)),
			differs: map[string]string{"elapsed": "6s", "request 2": "= request 1", "response's request": "POST " + site + `/x [Idempotency-Key=["k"]] same false body true`},
		},
	))
}
