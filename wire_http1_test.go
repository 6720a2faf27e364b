package oncehttp_test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// onlyReader hides what else a reader is: its length is unknown, and it cannot
// be had again.
type onlyReader struct{ io.Reader }

// readRequest reads a request by hand, as text, its body up to the announced
// length.
func readRequest(r *bufio.Reader) (*http.Request, []byte, error) {
	req, err := http.ReadRequest(r)
	if err != nil {
		return nil, nil, err
	}
	body, err := io.ReadAll(req.Body)
	return req, body, err
}

// answers answers one request per connection with raw bytes, in turn; the last
// for ever.
func (w *wire) answers(raw ...string) (string, *watchedListener) {
	return w.accept(func(n int, c net.Conn) {
		req, body, err := readRequest(bufio.NewReader(c))
		if err != nil {
			return
		}
		w.saw("heard %s %q", req.Method, body)
		_, _ = io.WriteString(c, raw[min(n, len(raw))-1])
	})
}

// reset ends a connection with a reset.
func reset(c net.Conn) { _ = c.(*watchedTCP).SetLinger(0) }

const ok = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"

// eachMethod tries methods, with a body where they have one.
func (w *wire) eachMethod(url string, methods ...string) {
	for _, m := range methods {
		if m == "GET" || m == "HEAD" {
			w.tryShort(w.request(m, url, nil))
		} else {
			w.tryShort(w.request(m, url, strings.NewReader("body of "+m)))
		}
	}
}

func TestRequestsLookLikeThoseOfNetHTTP(t *testing.T) {
	echo := func(w *wire) string {
		url, _ := w.serve(func(rw http.ResponseWriter, r *http.Request) {
			w.heard(r)
			rw.Header()["X-Multi"] = []string{"a", "b"}
			fmt.Fprintf(rw, "%s of %d", r.Method, r.ContentLength)
		})
		return url
	}
	bodies := map[string]func() io.Reader{
		"none": func() io.Reader { return nil }, "NoBody": func() io.Reader { return http.NoBody },
		"empty":             func() io.Reader { return strings.NewReader("") },
		"string":            func() io.Reader { return strings.NewReader("string") },
		"unknown":           func() io.Reader { return onlyReader{strings.NewReader("of unknown length")} },
		"unknown and empty": func() io.Reader { return onlyReader{strings.NewReader("")} },
	}
	var scenes []scene
	for _, method := range []string{"GET", "HEAD", "OPTIONS", "POST", "PATCH", "PUT", "DELETE", "PROPFIND"} {
		for name, body := range bodies {
			scenes = append(scenes, scene{name: method + "/body=" + name, play: func(w *wire) {
				w.try(w.request(method, echo(w)+"/a%2Fb?q=%20&r", body(), "X-Multi", "1", "X-Multi", "2"))
			}})
		}
	}
	playAll(t, append(scenes,
		scene{name: "header", play: func(w *wire) {
			req := w.request("POST", echo(w), strings.NewReader("x"), "User-Agent", "", "Accept-Encoding", "identity", "Cookie", "a=b")
			req.Host, req.Close = "other.example", true
			req.Header["lower-case"] = []string{"1"}
			w.try(req)
		}},
		scene{name: "userinfo", play: func(w *wire) {
			w.try(w.request("POST", strings.Replace(echo(w), "://", "://user:pass@", 1), nil))
		}},
		scene{name: "chunked by wish", play: func(w *wire) {
			req := w.request("PUT", echo(w), strings.NewReader("known"))
			req.TransferEncoding = []string{"chunked"}
			w.try(req)
		}},
		scene{name: "trailers", play: func(w *wire) {
			url, _ := w.serve(func(rw http.ResponseWriter, r *http.Request) {
				w.saw("announced %v", r.Trailer)
				w.heard(r)
				rw.Header().Set("Trailer", "X-Sum")
				io.WriteString(rw, "body")
				rw.(http.Flusher).Flush()
				rw.Header().Set("X-Sum", "2")
				rw.Header().Set(http.TrailerPrefix+"X-Late", "3")
			})
			req := w.request("POST", url, onlyReader{strings.NewReader("body")})
			req.Trailer = http.Header{"X-Sum": {"1"}}
			w.try(req)
		}},
		scene{name: "early hints", play: func(w *wire) {
			url, _ := w.serve(func(rw http.ResponseWriter, r *http.Request) {
				rw.Header().Set("Link", "</style.css>; rel=preload")
				rw.WriteHeader(http.StatusEarlyHints)
				rw.WriteHeader(http.StatusProcessing)
				io.WriteString(rw, "body")
			})
			req := w.request("GET", url, nil)
			w.try(req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{
				Got1xxResponse: func(code int, header textproto.MIMEHeader) error { w.saw("got %d %v", code, header); return nil },
			})))
		}},
		scene{name: "early hints that are refused", play: func(w *wire) {
			url, _ := w.serve(func(rw http.ResponseWriter, r *http.Request) { rw.WriteHeader(http.StatusEarlyHints) })
			req := w.request("POST", url, nil)
			w.try(req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{
				Got1xxResponse: func(int, textproto.MIMEHeader) error { return http.ErrAbortHandler },
			})))
		}},
	))
}

// TestHooksFireAsWithNetHTTP: a program's own httptrace sees one attempt as
// before. Some are of goroutines that do not wait for one another.
func TestHooksFireAsWithNetHTTP(t *testing.T) {
	playAll(t, []scene{{name: "POST", play: func(w *wire) {
		url, _ := w.serve(func(rw http.ResponseWriter, r *http.Request) { w.heard(r) })
		for range 2 {
			wrote := make(chan struct{})
			req := w.request("POST", url, strings.NewReader("x"))
			w.try(req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{
				GetConn:              func(string) { w.saw("get") },
				GotConn:              func(info httptrace.GotConnInfo) { w.saw("got, reused %v", info.Reused) },
				WroteHeaderField:     func(name string, v []string) { w.saw("wrote %s %q", name, v) },
				WroteRequest:         func(info httptrace.WroteRequestInfo) { w.saw("wrote %v", info.Err); close(wrote) },
				GotFirstResponseByte: func() { w.saw("first byte") },
			})))
			<-wrote
		}
		slices.Sort(w.seen)
	}}})
}

func TestExpectContinueIsNetHTTPs(t *testing.T) {
	expect := func(w *wire, method, url string) *http.Request {
		return w.request(method, url, strings.NewReader("announced"), "Expect", "100-continue")
	}
	// refuse answers before it has seen the body. What came of each connection is
	// noted at the end, in their order.
	refuse := func(w *wire, status ...string) (url string, end func()) {
		seen := make([]string, len(status)+1)
		url, l := w.accept(func(n int, c net.Conn) {
			r := bufio.NewReader(c)
			req, err := http.ReadRequest(r)
			switch {
			case err != nil:
				return
			case n > len(seen):
				w.Errorf("connection %d", n)
			case n == len(seen):
				io.WriteString(c, "HTTP/1.1 100 Continue\r\n\r\n")
				body, err := io.ReadAll(req.Body)
				seen[n-1] = fmt.Sprintf("continued with %q, %v", body, err)
				io.WriteString(c, ok)
			default:
				fmt.Fprintf(c, "HTTP/1.1 %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", status[n-1])
				body, _ := io.ReadAll(r)
				seen[n-1] = fmt.Sprintf("refused with %s, then came %q", status[n-1], body)
			}
		})
		return url, func() {
			w.settles(func() string { return unless(l.open.Load() == 0, "a connection is open") })
			for _, line := range seen {
				w.saw("%s", line)
			}
		}
	}
	playAll(t, []scene{
		{name: "continue", play: func(w *wire) {
			w.transport.ExpectContinueTimeout = time.Minute
			url, _ := w.serve(func(rw http.ResponseWriter, r *http.Request) { w.heard(r) })
			w.try(expect(w, "POST", url))
		}},
		{name: "final status", play: func(w *wire) {
			w.transport.ExpectContinueTimeout = time.Minute
			url, end := refuse(w, "417 No")
			w.tryShort(expect(w, "POST", url))
			end()
		}},
		{name: "timeout", play: func(w *wire) {
			w.transport.ExpectContinueTimeout = time.Second
			url, _ := w.answers("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
			start := time.Now()
			w.tryShort(expect(w, "POST", url))
			w.saw("after %v", time.Since(start))
		}, fake: true},
		{name: "PUT refused for now", play: func(w *wire) {
			w.transport.ExpectContinueTimeout = time.Minute
			url, end := refuse(w, "503 Later")
			w.tryShort(expect(w, "PUT", url))
			end()
		}, better: []string{`200 "ok"`, `refused with 503 Later, then came ""`, `continued with "announced", <nil>`}},
		{name: "POST refused for now", play: func(w *wire) {
			w.transport.ExpectContinueTimeout = time.Minute
			url, end := refuse(w, "503 Later")
			w.tryShort(expect(w, "POST", url))
			end()
		}},
	})
	playKeyed(t, scene{name: "keyed POST refused for now", play: func(w *wire) {
		w.transport.ExpectContinueTimeout = time.Minute
		url, end := refuse(w, "503 Later", "408 Later")
		req := expect(w, "POST", url)
		req.Header.Set("Idempotency-Key", "k")
		w.tryShort(req)
		end()
	}, better: []string{`200 "ok"`, `refused with 503 Later, then came ""`, `refused with 408 Later, then came ""`, `continued with "announced", <nil>`}})
}

func unless(ok bool, fault string) string {
	if ok {
		return ""
	}
	return fault
}

// TestAnEarlyAnswerEndsAnUpload: the server answers while the body is sent, and
// closes.
func TestAnEarlyAnswerEndsAnUpload(t *testing.T) {
	early := func(w *wire, status string) string {
		url, _ := w.accept(func(n int, c net.Conn) {
			r := bufio.NewReader(c)
			req, err := http.ReadRequest(r)
			if err != nil {
				return
			}
			io.CopyN(io.Discard, req.Body, 64<<10)
			if n > 1 {
				io.Copy(io.Discard, req.Body)
				io.WriteString(c, ok)
				return
			}
			fmt.Fprintf(c, "HTTP/1.1 %s\r\nContent-Length: 5\r\nConnection: close\r\n\r\nearly", status)
			io.Copy(io.Discard, r) // a close with unread bytes would be a reset
		})
		return url
	}
	upload := func(method, status string) func(w *wire) {
		return func(w *wire) {
			w.tryShort(w.request(method, early(w, status), bytes.NewReader(make([]byte, 900<<10))))
		}
	}
	playAll(t, []scene{
		{name: "POST 413", play: upload("POST", "413 Too Large")},
		{name: "PUT 413", play: upload("PUT", "413 Too Large")},
		{name: "POST 503", play: upload("POST", "503 Later")},
		{name: "PUT 503", play: upload("PUT", "503 Later"), better: []string{`200 "ok"`}},
		{name: "endless PUT 503", play: func(w *wire) {
			url := early(w, "503 Later")
			r, pw := io.Pipe()
			go func() {
				for buf := make([]byte, 32<<10); ; {
					if _, err := pw.Write(buf); err != nil {
						return
					}
				}
			}()
			w.tryShort(w.request("PUT", url, r))
		}},
	})
	playKeyed(t, scene{name: "keyed POST 413", play: func(w *wire) {
		url := early(w, "413 Too Large")
		w.tryShort(w.request("POST", url, bytes.NewReader(make([]byte, 900<<10)), "Idempotency-Key", "k"))
	}, better: []string{`413 "early"`}})
	playKeyed(t, scene{name: "keyed POST 503", play: func(w *wire) {
		url := early(w, "503 Later")
		w.tryShort(w.request("POST", url, bytes.NewReader(make([]byte, 900<<10)), "Idempotency-Key", "k"))
	}, better: []string{`200 "ok"`}})
}

func TestResponsesAreNetHTTPs(t *testing.T) {
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	io.WriteString(z, strings.Repeat("zip", 100))
	z.Close()
	gz := fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%s", zipped.Len(), zipped.String())
	responses := map[string]string{
		"announced":         "HTTP/1.1 200 Fine\r\nContent-Length: 4\r\nA: 1\r\na: 2\r\n\r\nbody",
		"empty":             "HTTP/1.1 204 No Content\r\n\r\n",
		"not modified":      "HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\n\r\n",
		"chunked":           "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n",
		"trailers":          "HTTP/1.1 200 OK\r\nTrailer: X\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\nX: 1\r\n\r\n",
		"close-delimited":   "HTTP/1.1 200 OK\r\n\r\nbody",
		"HTTP/1.0":          "HTTP/1.0 200 OK\r\n\r\nbody",
		"gzip":              gz,
		"gzip cut":          gz[:len(gz)-9],
		"gzip broken":       strings.Replace(gz, "\r\n\r\n\x1f", "\r\n\r\nX", 1),
		"cut":               "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nbody",
		"cut in a chunk":    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nbody",
		"cut after a chunk": "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n",
		"broken chunk":      "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
		"1xx, then 200":     "HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
		"404":               "HTTP/1.1 404 Nope\r\nContent-Length: 4\r\n\r\nnone",
		"unknown status":    "HTTP/1.1 299 \r\nContent-Length: 0\r\n\r\n",
		"more than said":    "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nbody",
	}
	var scenes []scene
	for name, raw := range responses {
		for _, method := range []string{"GET", "POST", "PUT"} {
			scenes = append(scenes, scene{name: name + "/" + method, play: func(w *wire) {
				url, _ := w.answers(raw)
				w.try(w.request(method, url, nil))
			}})
		}
	}
	playAll(t, append(scenes,
		scene{name: "explicit Accept-Encoding", play: func(w *wire) {
			url, _ := w.answers(gz)
			w.try(w.request("GET", url, nil, "Accept-Encoding", "gzip"))
		}},
		scene{name: "HEAD", play: func(w *wire) {
			url, _ := w.answers("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n")
			w.try(w.request("HEAD", url, nil))
		}},
	))
	for name, raw := range responses {
		want := ""
		switch {
		case strings.HasPrefix(name, "cut"), strings.HasPrefix(name, "broken"), name == "gzip cut", name == "gzip broken":
			want = "sent again" // an answer that was cut off is none
		}
		playKeyed(t, scene{name: "keyed/" + name, play: func(w *wire) {
			url, l := w.answers(raw, ok)
			resp, err := w.do(w.request("POST", url, nil, "Idempotency-Key", "k"))
			if err != nil {
				w.Fatal(err)
			}
			got := answerOf(resp)
			if sent := l.accepted.Load(); want != "" {
				if sent != 2 || !strings.Contains(got, `body "ok" of 2 then nil`) {
					w.Errorf("sent %d times, answered %s", sent, got)
				}
				return
			}
			bare := &http.Client{Transport: &http.Transport{DisableKeepAlives: false}}
			defer bare.CloseIdleConnections()
			again, _ := w.answers(raw)
			resp, err = bare.Do(w.request("POST", again, nil))
			if err != nil {
				w.Fatal(err)
			}
			if oracle := answerOf(resp); got != oracle {
				w.Errorf("answered\n\t%s\nwant\n\t%s", got, oracle)
			}
		}})
	}
}

func TestAFaultOfTheConnectionIsNetHTTPs(t *testing.T) {
	// faulty has a fault at the first request of every method.
	faulty := func(w *wire, fault func(c net.Conn)) string {
		met := make(map[string]bool)
		url, _ := w.accept(func(_ int, c net.Conn) {
			req, body, err := readRequest(bufio.NewReader(c))
			if err != nil {
				return
			}
			w.saw("heard %s %q", req.Method, body)
			w.mu.Lock()
			again := met[req.Method]
			met[req.Method] = true
			w.mu.Unlock()
			if again {
				io.WriteString(c, ok)
				return
			}
			fault(c)
		})
		return url
	}
	noAnswer := func(fault func(c net.Conn)) func(w *wire) {
		return func(w *wire) { w.eachMethod(faulty(w, fault), "GET", "PUT") }
	}
	retried := []string{`heard GET ""`, `heard GET ""`, `200 "ok"`, `heard PUT "body of PUT"`, `heard PUT "body of PUT"`, `200 "ok"`}
	closes := func(c net.Conn) {}
	half := func(c net.Conn) { io.WriteString(c, "HTTP/1.1 200 O") }
	garbage := func(c net.Conn) { io.WriteString(c, "SSH-2.0-OpenSSH\r\n") }
	mid := func(c net.Conn) { io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nbody") }
	huge := func(_ int, c net.Conn) {
		readRequest(bufio.NewReader(c))
		fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nX: %s\r\n\r\n", strings.Repeat("x", 1<<20))
		io.Copy(io.Discard, c)
	}
	const hugeError = `"Get \"http://ADDR\": net/http: HTTP/1.x transport connection broken: net/http: server response headers exceeded 262144 bytes; aborted" (*url.Error, is [], timeout false)`
	playAll(t, []scene{
		{name: "closed without answer", play: noAnswer(closes), better: retried},
		{name: "closed in the status line", play: noAnswer(half), better: retried},
		{name: "no HTTP", play: noAnswer(garbage), better: retried},
		{name: "huge header to a GET", play: func(w *wire) {
			w.transport.MaxResponseHeaderBytes = 256 << 10
			url, l := w.accept(huge)
			_, err := w.do(w.request("GET", url, nil))
			w.saw("%s after %d", errText(err), l.accepted.Load())
		}, better: []string{hugeError + " after 4"}},
		{name: "POST closed without answer", play: func(w *wire) { w.eachMethod(faulty(w, closes), "POST") }},
		{name: "POST, no HTTP", play: func(w *wire) { w.eachMethod(faulty(w, garbage), "POST") }},
		{name: "cut in the body", play: func(w *wire) { w.eachMethod(faulty(w, mid), "GET", "PUT", "POST") }},
		{name: "reset without answer", play: func(w *wire) { w.eachMethod(faulty(w, reset), "POST") }},
		{name: "GET reset without answer", play: noAnswer(reset), better: retried},
		{name: "reset in the body", play: func(w *wire) {
			read := make(chan struct{})
			url := faulty(w, func(c net.Conn) { mid(c); <-read; reset(c) })
			resp, err := w.do(w.request("GET", url, nil))
			if err != nil {
				w.Fatal(err)
			}
			defer resp.Body.Close()
			body := make([]byte, 4)
			_, err = io.ReadFull(resp.Body, body)
			w.saw("%q %v", body, err)
			close(read)
			_, err = resp.Body.Read(body)
			w.saw("reset %v", err != nil && strings.Contains(errText(err), "ECONNRESET"))
		}},
		{name: "huge header", play: func(w *wire) {
			w.transport.MaxResponseHeaderBytes = 256 << 10
			url, l := w.accept(huge)
			w.eachMethod(url, "POST")
			w.saw("%d", l.accepted.Load())
		}},
	})
	for name, fault := range map[string]func(net.Conn){"closed": closes, "half": half, "garbage": garbage, "cut": mid, "reset": reset} {
		playKeyed(t, scene{name: "keyed/" + name, play: func(w *wire) {
			w.tryShort(w.request("POST", faulty(w, fault), strings.NewReader("x"), "Idempotency-Key", "k"))
		}, better: []string{`heard POST "x"`, `heard POST "x"`, `200 "ok"`}})
	}
}

// TestADeadKeepAliveIsNoFailure: the server closes a connection that is used
// again at that moment.
func TestADeadKeepAliveIsNoFailure(t *testing.T) {
	dead := func(w *wire) string {
		url, _ := w.accept(func(n int, c net.Conn) {
			r := bufio.NewReader(c)
			for i := range 2 {
				req, body, err := readRequest(r)
				if err != nil {
					return
				}
				if n == 1 && i == 1 {
					w.saw("dead at %s %q", req.Method, body)
					return
				}
				w.saw("heard %s %q", req.Method, body)
				io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
			}
		})
		return url
	}
	second := func(method string) func(w *wire) {
		return func(w *wire) { w.eachMethod(dead(w), "HEAD", method) }
	}
	playAll(t, []scene{
		{name: "GET", play: second("GET")},
		{name: "POST", play: second("POST")},
		{name: "PUT", play: second("PUT"), better: []string{`heard HEAD ""`, `200 ""`, `dead at PUT "body of PUT"`, `heard PUT "body of PUT"`, `200 ""`}},
	})
	for name, body := range map[string]string{"no body": "", "body": "x"} {
		playKeyed(t, scene{name: "keyed POST, " + name, play: func(w *wire) {
			url := dead(w)
			w.tryShort(w.request("HEAD", url, nil))
			w.tryShort(w.request("POST", url, strings.NewReader(body), "Idempotency-Key", "k"))
		}, better: []string{`heard HEAD ""`, `200 ""`, fmt.Sprintf(`dead at POST %q`, body), fmt.Sprintf(`heard POST %q`, body), `200 ""`}})
	}
}

// TestAKeyedPostWithoutBodyIsNotChunked: some servers answer 411 to that.
func TestAKeyedPostWithoutBodyIsNotChunked(t *testing.T) {
	for name, body := range map[string]func() io.Reader{
		"nil": func() io.Reader { return nil }, "NoBody": func() io.Reader { return http.NoBody },
		"empty": func() io.Reader { return strings.NewReader("") }, "unknown and empty": func() io.Reader { return onlyReader{strings.NewReader("")} },
	} {
		playKeyed(t, scene{name: name, play: func(w *wire) {
			var raw bytes.Buffer
			url, _ := w.accept(func(n int, c net.Conn) {
				_, _, err := readRequest(bufio.NewReader(io.TeeReader(c, &raw)))
				w.saw("%v, announced as empty %v, chunked %v", err, strings.Contains(raw.String(), "\r\nContent-Length: 0\r\n"), strings.Contains(raw.String(), "Transfer-Encoding"))
				io.WriteString(c, ok)
			})
			w.tryShort(w.request("POST", url, body(), "Idempotency-Key", "k"))
		}, better: []string{"<nil>, announced as empty true, chunked false", `200 "ok"`}})
	}
}

// TestARefusedConnectionIsTriedAgain: nothing was sent, so that a POST is, too.
func TestARefusedConnectionIsTriedAgain(t *testing.T) {
	refused := func(times int) func(w *wire, methods ...string) {
		return func(w *wire, methods ...string) {
			closed := w.listener()
			closed.Close()
			url, _ := w.answers(ok)
			dials := 0
			w.transport.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
				if dials++; dials <= times {
					w.saw("refused")
					addr = closed.Addr().String()
				}
				return new(net.Dialer).DialContext(ctx, network, addr)
			}
			w.eachMethod(url, methods...)
		}
	}
	playAll(t, []scene{
		{name: "GET", play: func(w *wire) { refused(3)(w, "GET") }, better: []string{"refused", "refused", "refused", `heard GET ""`, `200 "ok"`}},
		{name: "POST, of which nothing was sent", play: func(w *wire) { refused(2)(w, "POST") }, better: []string{"refused", "refused", `heard POST "body of POST"`, `200 "ok"`}},
		{name: "POST that cannot be had again", play: func(w *wire) {
			w.transport.DialContext = func(context.Context, string, string) (net.Conn, error) {
				return nil, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
			}
			w.try(w.request("POST", "http://127.0.0.1:1", onlyReader{strings.NewReader("x")}))
		}},
	})
	// For ever: the error is still net/http's.
	var bare, ours string
	onWire(t, "net/http", scene{}, func(w *wire) { refused(9)(w, "GET"); bare = w.seen[len(w.seen)-1] })
	for form := range forms {
		onWire(t, form, scene{}, func(w *wire) {
			refused(9)(w, "GET")
			if ours = w.seen[len(w.seen)-1]; ours != bare || len(w.seen) != 5 {
				w.Errorf("saw %q, want the error %q after 4 dials", w.seen, bare)
			}
		})
	}
}
