package oncehttp_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"testing/iotest"
	"time"

	"github.com/oncehttp/oncehttp"
)

// site is where the requests of the contract go.
const site = "http://a.example.com"

// serving makes a handler of a clause of one that does the same for every
// request.
func serving(h http.HandlerFunc) func(*trial, int, http.ResponseWriter, *http.Request) {
	return func(_ *trial, _ int, w http.ResponseWriter, r *http.Request) { h(w, r) }
}

// sends makes a clause's run of one request.
func sends(make func(x *trial) *http.Request) func(*trial) {
	return func(x *trial) { x.do(make(x)) }
}

func get(x *trial) *http.Request { return x.request("GET", site+"/x?q=1", nil) }

func post(x *trial) *http.Request {
	return x.request("POST", site+"/x", strings.NewReader("order=1"))
}

// streaming is a POST whose body can be had once, and whose length is unknown.
func streaming(x *trial) *http.Request {
	return x.request("POST", site+"/x", io.MultiReader(strings.NewReader("order=1")))
}

// edited returns a request after an edit.
func edited(make func(x *trial) *http.Request, edit func(r *http.Request)) func(x *trial) *http.Request {
	return func(x *trial) *http.Request {
		r := make(x)
		edit(r)
		return r
	}
}

// through sets the transport of a clause's clients.
func through(rt func(r *http.Request) (*http.Response, error)) func(*trial) {
	return func(x *trial) { x.hc.Transport = roundTripper(rt) }
}

func TestRequestsAreSentAsNetHTTPSendsThem(t *testing.T) {
	var clauses []clause
	for _, method := range []string{"", "GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE", "POST", "PATCH", "CONNECT", "get", "PROPFIND"} {
		clauses = append(clauses,
			clause{name: "method " + method, run: sends(func(x *trial) *http.Request { return edited(get, func(r *http.Request) { r.Method = method })(x) })},
			clause{name: "method " + method + " with a body", run: sends(func(x *trial) *http.Request { return edited(post, func(r *http.Request) { r.Method = method })(x) })},
		)
	}
	kinds := map[string]func(*trial) *http.Request{
		"streaming":                streaming,
		"no body, length 0":        edited(post, func(r *http.Request) { r.Body, r.GetBody, r.ContentLength = nil, nil, 0 }),
		"NoBody":                   edited(post, func(r *http.Request) { r.Body, r.GetBody, r.ContentLength = http.NoBody, nil, 0 }),
		"length -1, no GetBody":    edited(post, func(r *http.Request) { r.GetBody, r.ContentLength = nil, -1 }),
		"length 0, with a body":    edited(post, func(r *http.Request) { r.ContentLength = 0 }),
		"empty body, length 0":     edited(streaming, func(r *http.Request) { r.Body = io.NopCloser(strings.NewReader("")) }),
		"no body, length stated":   edited(post, func(r *http.Request) { r.Body, r.GetBody = nil, nil }),
		"chunked":                  edited(post, func(r *http.Request) { r.TransferEncoding = []string{"chunked"} }),
		"length in the header":     edited(post, func(r *http.Request) { r.Header.Set("Content-Length", "3") }),
		"trailer":                  edited(streaming, func(r *http.Request) { r.Trailer = http.Header{"X-Sum": {"7"}} }),
		"expect":                   edited(post, func(r *http.Request) { r.Header.Set("Expect", "100-continue") }),
		"close":                    edited(get, func(r *http.Request) { r.Close = true }),
		"host":                     edited(get, func(r *http.Request) { r.Host = "b.example.com" }),
		"nil header":               edited(get, func(r *http.Request) { r.Header = nil }),
		"nil header, POST":         edited(post, func(r *http.Request) { r.Header = nil }),
		"header, not canonical":    edited(get, func(r *http.Request) { r.Header["x-lower"] = []string{"1", "2"} }),
		"no user agent":            edited(get, func(r *http.Request) { r.Header["User-Agent"] = nil }),
		"encoding asked for":       edited(get, func(r *http.Request) { r.Header.Set("Accept-Encoding", "gzip") }),
		"userinfo":                 edited(get, func(r *http.Request) { r.URL.User = url.UserPassword("me", "p:w") }),
		"userinfo, authorization":  edited(get, func(r *http.Request) { r.URL.User = url.User("me"); r.Header.Set("Authorization", "Bearer x") }),
		"fragment, escapes":        edited(get, func(r *http.Request) { r.URL, _ = url.Parse(site + "/a%2Fb/../c%20d?x=%41&&;#frag") }),
		"opaque URL":               edited(get, func(r *http.Request) { r.URL.Opaque = "//a.example.com/%2F/" }),
		"international host":       edited(get, func(r *http.Request) { r.URL.Host = "bücher.example:8080" }),
		"https":                    edited(get, func(r *http.Request) { r.URL.Scheme = "https" }),
		"scheme in capitals":       edited(get, func(r *http.Request) { r.URL.Scheme = "HTTP" }),
		"cookie by hand":           edited(get, func(r *http.Request) { r.AddCookie(&http.Cookie{Name: "a", Value: "1"}) }),
		"the server's Form":        edited(post, func(r *http.Request) { r.Form = url.Values{"a": {"1"}} }),
		"proto 1.0":                edited(get, func(r *http.Request) { r.Proto, r.ProtoMajor, r.ProtoMinor = "HTTP/1.0", 1, 0 }),
		"made by hand, no context": func(*trial) *http.Request { return &http.Request{URL: &url.URL{Scheme: "http", Host: "a.example.com"}} },
	}
	for _, name := range slices.Sorted(maps.Keys(kinds)) {
		clauses = append(clauses, clause{name: name, run: sends(kinds[name])})
	}
	fulfil(t, append(clauses,
		clause{name: "Get", run: func(x *trial) {
			resp, err := x.client.Get(site + "/x")
			x.see(nil, resp, err)
		}},
		clause{name: "Head", run: func(x *trial) {
			resp, err := x.client.Head(site + "/x")
			x.see(nil, resp, err)
		}},
		clause{name: "Post", run: func(x *trial) {
			resp, err := x.client.Post(site+"/x", "text/plain", x.watch(io.NopCloser(strings.NewReader("order=1"))))
			x.see(nil, resp, err)
		}},
		clause{name: "PostForm", run: func(x *trial) {
			resp, err := x.client.PostForm(site+"/x", url.Values{"b": {"2"}, "a": {"1"}})
			x.see(nil, resp, err)
		}},
		clause{name: "Get of no URL", run: func(x *trial) {
			for _, send := range []func(string) (*http.Response, error){x.client.Get, x.client.Head} {
				resp, err := send(":no url")
				x.see(nil, resp, err)
			}
			resp, err := x.client.Post(":no url", "", nil)
			x.see(nil, resp, err)
		}},
		clause{name: "in turn on one connection", run: func(x *trial) {
			for range 3 {
				x.do(get(x).WithContext(x.reused(x.ctx)))
			}
			x.client.CloseIdleConnections()
			x.do(get(x).WithContext(x.reused(x.ctx)))
		}},
		clause{name: "all the hooks of httptrace", run: func(x *trial) {
			var seen []string
			saw := func(what string) { seen = append(seen, what) }
			trace := &httptrace.ClientTrace{
				GetConn: func(hostPort string) { saw("GetConn " + hostPort) }, GotConn: func(httptrace.GotConnInfo) { saw("GotConn") },
				WroteHeaders: func() { saw("WroteHeaders") },
				WroteRequest: func(i httptrace.WroteRequestInfo) { saw(fmt.Sprint("WroteRequest ", i.Err)) },
				WroteHeaderField: func(k string, v []string) {
					if k != "User-Agent" { // some orders are those of a map
						saw("field " + k)
					}
				},
			}
			req := post(x)
			x.do(req.WithContext(httptrace.WithClientTrace(req.Context(), trace)))
			slices.Sort(seen)
			x.note("hooks", "%q", seen)
		}},
		clause{name: "one request, many times at once", run: func(x *trial) {
			req := x.request("GET", site+"/x", nil)
			req.Header.Set("X-Own", "1")
			before := requestText(req)
			var all sync.WaitGroup
			for range 20 {
				all.Go(func() {
					resp, err := x.client.Do(req)
					if err != nil {
						x.t.Error(err)
						return
					}
					_, _ = io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				})
			}
			all.Wait()
			x.note("request is", "the same: %v", requestText(req) == before)
		}},
		clause{name: "one request, again and again", run: func(x *trial) {
			req := get(x)
			for range 3 {
				x.do(req)
			}
		}},
	))
}

func TestWhatNetHTTPRefusesIsRefusedTheSame(t *testing.T) {
	tests := map[string]func(r *http.Request){
		"nil URL":             func(r *http.Request) { r.URL = nil },
		"empty URL":           func(r *http.Request) { r.URL = &url.URL{} },
		"no host":             func(r *http.Request) { r.URL.Host = "" },
		"no host but Host":    func(r *http.Request) { r.URL.Host, r.Host = "", "a.example.com" },
		"scheme":              func(r *http.Request) { r.URL.Scheme = "ftp" },
		"no scheme":           func(r *http.Request) { r.URL.Scheme = "" },
		"method":              func(r *http.Request) { r.Method = "BAD METHOD" },
		"header name":         func(r *http.Request) { r.Header["Bad Name"] = []string{"1"} },
		"header value":        func(r *http.Request) { r.Header["X"] = []string{"a\nb"} },
		"header value, DEL":   func(r *http.Request) { r.Header["X"] = []string{"a\x7fb"} },
		"header value, UTF-8": func(r *http.Request) { r.Header["X"] = []string{"ü"} },
		"trailer":             func(r *http.Request) { r.Trailer = http.Header{"Bad Name": {"1"}} },
		"RequestURI":          func(r *http.Request) { r.RequestURI = "/x" },
		"port":                func(r *http.Request) { r.URL.Host = "a.example.com:x" },
		"password in error":   func(r *http.Request) { r.URL.User = url.UserPassword("me", "secret"); r.URL.Scheme = "ftp" },
	}
	var clauses []clause
	for _, name := range slices.Sorted(maps.Keys(tests)) {
		for _, make := range []func(*trial) *http.Request{get, post, put} {
			method := make(&trial{t: t, ctx: newStrictContext()}).Method
			clauses = append(clauses, clause{name: name + ", " + method, run: sends(edited(make, tests[name]))})
		}
	}
	fulfil(t, clauses)
}

func put(x *trial) *http.Request {
	return x.request("PUT", site+"/x", strings.NewReader("order=1"))
}

func TestResponsesAreThoseOfNetHTTP(t *testing.T) {
	answers := map[string]http.HandlerFunc{
		"200":       func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "ok") },
		"201 empty": func(w http.ResponseWriter, r *http.Request) { w.Header().Set("Location", "/x/1"); w.WriteHeader(201) },
		"204":       func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(204) },
		"304": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Etag", `"1"`)
			w.Header().Set("Content-Length", "99")
			w.WriteHeader(304)
		},
		"401": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("WWW-Authenticate", "Basic")
			w.WriteHeader(401)
		},
		"404":                 func(w http.ResponseWriter, r *http.Request) { http.NotFound(w, r) },
		"409":                 func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(409) },
		"300 without a place": func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(300) },
		"length, no body":     func(w http.ResponseWriter, r *http.Request) { w.Header().Set("Content-Length", "0") },
		"chunked": func(w http.ResponseWriter, r *http.Request) {
			for range 3 {
				io.WriteString(w, "part ")
				w.(http.Flusher).Flush()
			}
		},
		"trailer": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Trailer", "X-Sum")
			io.WriteString(w, "ok")
			w.Header().Set("X-Sum", "7")
		},
		"gzip": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			w.Write([]byte("\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff\x01\x02\x00\xfd\xffok\x47\xdd\xdc\x79\x02\x00\x00\x00"))
		},
		"gzip, broken": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			io.WriteString(w, "this is no gzip")
		},
		"large": func(w http.ResponseWriter, r *http.Request) {
			w.Write(bytes.Repeat([]byte("x"), 100_000))
		},
		"close":         func(w http.ResponseWriter, r *http.Request) { w.Header().Set("Connection", "close") },
		"several lines": func(w http.ResponseWriter, r *http.Request) { w.Header()["X-Many"] = []string{"1", "2"} },
		"early hints": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Link", "</a>")
			w.WriteHeader(103)
			w.WriteHeader(200)
		},
		"event stream": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, "data: 1\n\n")
		},
		"JSON that does not parse": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			io.WriteString(w, "{")
		},
		"cut off": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", "9")
			io.WriteString(w, "par")
			w.(http.Flusher).Flush()
			hangUp()
		},
		"cut off, chunked": func(w http.ResponseWriter, r *http.Request) {
			io.WriteString(w, "par")
			w.(http.Flusher).Flush()
			hangUp()
		},
		"replayed, in progress": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Idempotent-Replayed", "true")
			w.WriteHeader(409)
		},
		"cookies": func(w http.ResponseWriter, r *http.Request) {
			http.SetCookie(w, &http.Cookie{Name: "a", Value: "1"})
			io.WriteString(w, r.Header.Get("Cookie"))
		},
		"hijacked, without length": func(w http.ResponseWriter, r *http.Request) {
			conn, _, _ := w.(http.Hijacker).Hijack()
			io.WriteString(conn, "HTTP/1.1 200 Fine\r\nX-A: 1\r\n\r\nuntil the end")
			conn.Close()
		},
		"HTTP/1.0": func(w http.ResponseWriter, r *http.Request) {
			conn, _, _ := w.(http.Hijacker).Hijack()
			io.WriteString(conn, "HTTP/1.0 200\r\nContent-Length: 2\r\n\r\nok")
			conn.Close()
		},
	}
	var clauses []clause
	for _, name := range slices.Sorted(maps.Keys(answers)) {
		for _, method := range []string{"GET", "HEAD", "POST"} {
			clauses = append(clauses, clause{
				name: name + ", " + method, serve: serving(answers[name]),
				run: sends(edited(get, func(r *http.Request) { r.Method = method })),
			})
		}
	}
	fulfil(t, append(clauses,
		clause{
			name: "101",
			serve: serving(func(w http.ResponseWriter, r *http.Request) {
				conn, buf, _ := w.(http.Hijacker).Hijack()
				io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n")
				line, _ := buf.ReadString('\n')
				io.WriteString(conn, line)
				conn.Close()
			}),
			run: func(x *trial) {
				req := get(x)
				req.Header.Set("Connection", "upgrade")
				req.Header.Set("Upgrade", "echo")
				resp, err := x.client.Do(req)
				if err != nil {
					x.t.Fatal(err)
				}
				w, ok := resp.Body.(io.Writer)
				x.note("writer", "%v", ok)
				if ok {
					io.WriteString(w, "hello\n")
				}
				x.see(req, resp, err)
			},
		},
		clause{
			name: "informational, told to httptrace",
			serve: serving(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Link", "</a>")
				w.WriteHeader(103)
			}),
			run: func(x *trial) {
				trace := &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
					x.note("informational", "%d %v", code, h)
					return nil
				}}
				x.do(get(x).WithContext(httptrace.WithClientTrace(x.ctx, trace)))
			},
		},
		clause{
			name:  "usable until closed",
			serve: serving(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, strings.Repeat("x", 10_000)) }),
			run: func(x *trial) {
				resp, err := x.client.Do(get(x))
				if err != nil {
					x.t.Fatal(err)
				}
				time.Sleep(24 * time.Hour)
				n, err := io.CopyN(io.Discard, resp.Body, 5000)
				x.note("first half", "%d, %v", n, err)
				x.note("closed", "%v %v", resp.Body.Close(), resp.Body.Close())
				_, err = resp.Body.Read(make([]byte, 1))
				x.note("read after that", "%v", err)
			},
		},
	))
}

// refusal is the error of a dialer, with facts to be asked for.
type refusal struct{ timeout bool }

func (r *refusal) Error() string   { return "refused" }
func (r *refusal) Timeout() bool   { return r.timeout }
func (r *refusal) Temporary() bool { return true }

// dialing makes a clause's network fail at every connection.
func dialing(err error) func(*trial) {
	return func(x *trial) { x.net.dialed = func(context.Context, int, string) error { return err } }
}

func TestErrorsOfAttemptsAreThoseOfNetHTTP(t *testing.T) {
	hangsUp := serving(func(http.ResponseWriter, *http.Request) { hangUp() })
	stalls := serving(func(_ http.ResponseWriter, r *http.Request) { stall(r) })
	garbage := serving(func(w http.ResponseWriter, r *http.Request) {
		conn, _, _ := w.(http.Hijacker).Hijack()
		io.WriteString(conn, "garbage\r\n\r\n")
		conn.Close()
	})
	brokenBody := edited(post, func(r *http.Request) {
		r.Body, r.GetBody, r.ContentLength = io.NopCloser(iotest.ErrReader(errBroken)), nil, -1
	})
	short := func(r *http.Request) { r.ContentLength, r.GetBody = 99, nil }
	long := func(r *http.Request) { r.ContentLength, r.GetBody = 3, nil }
	plainTLS := func(x *trial) {
		x.hc.Transport.(*http.Transport).DialTLSContext = nil
		x.net.server.Handler = nil // unreached: the handshake is no request
	}
	https := edited(post, func(r *http.Request) { r.URL.Scheme = "https" })
	fulfil(t, []clause{
		{name: "EOF, POST", serve: hangsUp, run: sends(post)},
		{name: "EOF, streaming", serve: hangsUp, run: sends(streaming)},
		{name: "EOF, GET", serve: hangsUp, run: sends(get), differs: retried(3)},
		{name: "EOF, PUT", serve: hangsUp, run: sends(put), differs: with(retried(3), "body 2", "closed 1 times", "body 3", "closed 1 times")},
		{name: "EOF, PUT that streams", serve: hangsUp, run: sends(edited(streaming, func(r *http.Request) { r.Method = "PUT" }))},
		{name: "garbage, POST", serve: garbage, run: sends(post)},
		{name: "garbage, GET", serve: garbage, run: sends(get), differs: retried(3)},
		{name: "refused, GET", config: dialing(&refusal{}), run: sends(get), differs: retried3Unsent()},
		{name: "refused, POST", config: dialing(&refusal{}), run: sends(post), differs: with(retried3Unsent(), "body 2", "closed 1 times", "body 3", "closed 1 times")},
		{name: "refused, streaming", config: dialing(&refusal{}), run: sends(streaming)},
		{name: "dial timeout, GET", config: dialing(&refusal{timeout: true}), run: sends(get), differs: retried3Unsent()},
		{name: "no such host", config: dialing(&net.DNSError{Err: "no such host", Name: "a.example.com", IsNotFound: true}), run: sends(get)},
		{name: "body breaks", run: sends(brokenBody)},
		{name: "body too short", serve: stalls, run: sends(edited(post, short))},
		{name: "body too long", serve: stalls, run: sends(edited(post, long))},
		{name: "HTTP to HTTPS", config: plainTLS, run: sends(https)},
		{
			name: "no retry left in the budget", config: func(x *trial) {
				x.opts.Budget = &oncehttp.Budget{Ratio: -1, MinPerSecond: -1}
				dialing(&refusal{timeout: true})(x)
			}, run: sends(get),
		},
		{
			name: "no retry before the deadline", config: dialing(&refusal{timeout: true}),
			run: func(x *trial) {
				ctx, cancel := context.WithTimeout(x.ctx, time.Second/2)
				defer cancel()
				x.do(get(x).WithContext(ctx))
			},
		},
		{
			name: "answer that comes before the body is read",
			serve: serving(func(w http.ResponseWriter, r *http.Request) {
				http.Error(w, "too large", http.StatusRequestEntityTooLarge)
			}),
			run: sends(edited(streaming, func(r *http.Request) { r.Body = io.NopCloser(strings.NewReader(strings.Repeat("x", 300_000))) })),
		},
	})
}

// retried3Unsent are the differences of a request that fails three times before
// it is sent.
func retried3Unsent() map[string]string { return map[string]string{"elapsed": "2s"} }

func TestTransportsAreTreatedAsByNetHTTP(t *testing.T) {
	stalls := serving(func(_ http.ResponseWriter, r *http.Request) { stall(r) })
	answer := func(r *http.Request, body io.ReadCloser, length int64) *http.Response {
		return &http.Response{StatusCode: 200, Status: "200 OK", Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: http.Header{}, Body: body, ContentLength: length, Request: r}
	}
	elsewhere, _ := http.NewRequest("GET", "http://elsewhere.example.com/", nil)
	closes := func(rt func(r *http.Request) (*http.Response, error)) func(*trial) {
		return through(func(r *http.Request) (*http.Response, error) {
			if r.Body != nil {
				r.Body.Close()
			}
			return rt(r)
		})
	}
	fulfil(t, []clause{
		{name: "neither response nor error", config: closes(func(*http.Request) (*http.Response, error) { return nil, nil }), run: sends(post)},
		{name: "neither response nor error, GET", config: closes(func(*http.Request) (*http.Response, error) { return nil, nil }), run: sends(get)},
		{name: "both response and error", config: closes(func(r *http.Request) (*http.Response, error) { return answer(r, http.NoBody, 0), errBroken }), run: sends(post)},
		{name: "no body", config: closes(func(r *http.Request) (*http.Response, error) { return answer(r, nil, 0), nil }), run: sends(get)},
		{name: "no body, length unknown", config: closes(func(r *http.Request) (*http.Response, error) { return answer(r, nil, -1), nil }), run: sends(get)},
		{name: "no body, but a length", config: closes(func(r *http.Request) (*http.Response, error) { return answer(r, nil, 3), nil }), run: sends(get)},
		{name: "no body, but a length, HEAD", config: closes(func(r *http.Request) (*http.Response, error) { return answer(r, nil, 3), nil }), run: sends(edited(get, func(r *http.Request) { r.Method = "HEAD" }))},
		{name: "no header", config: closes(func(r *http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: 200, Body: http.NoBody, Request: r}, nil
		}), run: sends(get)},
		{name: "another request", config: closes(func(r *http.Request) (*http.Response, error) {
			return answer(elsewhere, http.NoBody, 0), nil
		}), run: sends(post)},
		{name: "no request", config: closes(func(r *http.Request) (*http.Response, error) { return answer(nil, http.NoBody, 0), nil }), run: sends(post)},
		{name: "panics", config: closes(func(*http.Request) (*http.Response, error) { panic(errBroken) }), run: func(x *trial) { x.panicking(func() { x.do(get(x)) }) }},
		{name: "panics, POST", config: through(func(*http.Request) (*http.Response, error) { panic(errBroken) }), run: func(x *trial) { x.panicking(func() { x.do(post(x)) }) }},
		{name: "body breaks", config: closes(func(r *http.Request) (*http.Response, error) {
			return answer(r, io.NopCloser(iotest.ErrReader(errBroken)), -1), nil
		}), run: sends(get)},
		{name: "body that does not close", config: closes(func(r *http.Request) (*http.Response, error) { return answer(r, doesNotClose{}, -1), nil }), run: sends(get)},
		{
			name: "what it is given", config: func(x *trial) {
				rt := x.hc.Transport
				x.hc.Transport = roundTripper(func(r *http.Request) (*http.Response, error) {
					x.note("given", "%s %v %s, length %d %v, body %v, GetBody %v, header nil %v", r.Method, r.URL, headerText(r.Header), r.ContentLength, r.TransferEncoding, r.Body != nil, r.GetBody != nil, r.Header == nil)
					return rt.RoundTrip(r)
				})
			},
			run: func(x *trial) {
				for _, make := range []func(*trial) *http.Request{get, post, put, streaming, edited(get, func(r *http.Request) { r.Header = nil })} {
					x.do(make(x))
				}
			},
		},
		{
			name: "registered protocols", config: func(x *trial) {
				tr := x.hc.Transport.(*http.Transport)
				tr.RegisterProtocol("file", http.NewFileTransportFS(fstest.MapFS{"a.txt": {Data: []byte("file")}}))
				tr.RegisterProtocol("shop", roundTripper(func(r *http.Request) (*http.Response, error) {
					body, _ := io.ReadAll(sentBody(r.Body))
					sentBody(r.Body).Close()
					return answer(r, io.NopCloser(strings.NewReader(r.Method+" "+string(body))), -1), nil
				}))
			},
			run: func(x *trial) {
				for _, make := range []func(*trial) *http.Request{get, post} {
					for _, u := range []string{"file:///a.txt", "file:///none", "shop://here/x", "none:x"} {
						x.do(edited(make, func(r *http.Request) { r.URL, _ = url.Parse(u) })(x))
					}
				}
			},
		},
		{
			name: "nothing of a registered protocol, in time", config: func(x *trial) {
				x.hc.Timeout = time.Minute
				x.hc.Transport.(*http.Transport).RegisterProtocol("shop", roundTripper(func(r *http.Request) (*http.Response, error) { return nil, nil }))
				x.hc.Transport.(*http.Transport).RegisterProtocol("less", roundTripper(func(r *http.Request) (*http.Response, error) {
					return answer(r, nil, 0), nil
				}))
			},
			run: func(x *trial) {
				x.do(edited(get, func(r *http.Request) { r.URL.Scheme = "less" })(x))
				x.do(edited(get, func(r *http.Request) { r.URL.Scheme = "shop" })(x))
				time.Sleep(time.Minute) // net/http's timer goes on until then
			},
		},
		{
			name: "503 of a registered protocol is not retried", config: func(x *trial) {
				x.hc.Transport.(*http.Transport).RegisterProtocol("shop", roundTripper(func(r *http.Request) (*http.Response, error) {
					resp := answer(r, http.NoBody, 0)
					resp.StatusCode = 503
					return resp, nil
				}))
			},
			run: sends(edited(get, func(r *http.Request) { r.URL.Scheme = "shop" })),
		},
		{name: "Transport's own timeout", config: func(x *trial) { x.hc.Transport.(*http.Transport).ResponseHeaderTimeout = time.Minute },
			serve: stalls, run: sends(post)},
	})
}

// sentBody returns a request's body, also if it has none.
func sentBody(b io.ReadCloser) io.ReadCloser {
	if b == nil {
		return http.NoBody
	}
	return b
}

type doesNotClose struct{}

func (doesNotClose) Read([]byte) (int, error) { return 0, io.EOF }
func (doesNotClose) Close() error             { return errBroken }
