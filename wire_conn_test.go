package oncehttp_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oncehttp/oncehttp"
)

// TestAProxyIsNetHTTPs, and its credentials are nobody's business.
func TestAProxyIsNetHTTPs(t *testing.T) {
	const secret = "hunter2"
	// through puts a proxy before the transport, and demands its credentials.
	through := func(w *wire, handle http.HandlerFunc) *watchedListener {
		u, l := w.serve(func(rw http.ResponseWriter, r *http.Request) {
			_, password, _ := (&http.Request{Header: http.Header{"Authorization": r.Header["Proxy-Authorization"]}}).BasicAuth()
			w.saw("proxy heard %s %s, password %v", r.Method, r.RequestURI, password == secret)
			handle(rw, r)
		})
		proxy, err := url.Parse(u)
		if err != nil {
			w.Fatal(err)
		}
		proxy.User = url.UserPassword("user", secret)
		w.transport.Proxy = http.ProxyURL(proxy)
		return l
	}
	// turns answers with the statuses in turn, then with 200, as a plain proxy.
	turns := func(status ...int) http.HandlerFunc {
		n := 0
		return func(rw http.ResponseWriter, r *http.Request) {
			if n++; n <= len(status) {
				rw.WriteHeader(status[n-1])
				return
			}
			io.WriteString(rw, "through")
		}
	}
	// tunnel is a proxy of CONNECT, that refuses with the statuses first.
	tunnel := func(w *wire, status ...int) http.HandlerFunc {
		n := 0
		return func(rw http.ResponseWriter, r *http.Request) {
			if n++; n <= len(status) {
				rw.WriteHeader(status[n-1])
				return
			}
			far, err := net.Dial("tcp", r.RequestURI)
			if err != nil {
				w.Error(err)
				return
			}
			near, rest, err := http.NewResponseController(rw).Hijack()
			if err != nil {
				w.Error(err)
				return
			}
			defer near.Close()
			defer far.Close()
			io.WriteString(near, "HTTP/1.1 200 OK\r\n\r\n")
			var both sync.WaitGroup
			both.Go(func() { io.Copy(far, rest); far.(*net.TCPConn).CloseWrite() })
			both.Go(func() { io.Copy(near, far); near.(*watchedTCP).CloseWrite() })
			both.Wait()
		}
	}
	plain := func(method string, status ...int) func(w *wire) {
		return func(w *wire) {
			through(w, turns(status...))
			w.try(w.request(method, "http://example.com/a?b", strings.NewReader("x")))
		}
	}
	secured := func(method string, protocol string, status ...int) func(w *wire) {
		return func(w *wire) {
			u, _ := w.serve(func(rw http.ResponseWriter, r *http.Request) { w.heard(r) }, w.withTLS(protocol))
			through(w, tunnel(w, status...))
			w.tryShort(w.request(method, u, strings.NewReader("x")))
		}
	}
	again := `proxy heard GET http://example.com/a?b, password true`
	playAll(t, []scene{
		{name: "GET", play: plain("GET")},
		{name: "POST", play: plain("POST")},
		{name: "407", play: plain("GET", 407, 407)},
		{name: "POST 502", play: plain("POST", 502)},
		{name: "GET 502", play: func(w *wire) {
			through(w, turns(502))
			w.tryShort(w.request("GET", "http://example.com/a?b", nil))
		}, better: []string{again, again, `200 "through"`}},
		{name: "tunnel", play: secured("POST", "")},
		{name: "tunnel of HTTP/2", play: secured("POST", "h2")},
		{name: "tunnel refused, POST", play: secured("POST", "", 502)},
		{name: "tunnel refused, GET", play: func(w *wire) {
			u, _ := w.serve(func(rw http.ResponseWriter, r *http.Request) { io.WriteString(rw, "through") }, w.withTLS())
			through(w, tunnel(w, 502))
			w.tryShort(w.request("GET", u, nil))
		}, better: []string{"proxy heard CONNECT ADDR, password true", "proxy heard CONNECT ADDR, password true", `200 "through"`}},
		{name: "nobody there", play: func(w *wire) {
			l := w.listener()
			l.Close()
			w.transport.Proxy = http.ProxyURL(&url.URL{Scheme: "http", Host: l.Addr().String(), User: url.UserPassword("user", secret)})
			w.tryShort(w.request("POST", "http://example.com/", onlyReader{strings.NewReader("x")}))
		}},
	})
	for name, s := range map[string]struct {
		tunnel  bool
		status  []int
		outcome oncehttp.Outcome
	}{
		"through": {false, nil, oncehttp.Succeeded}, "407": {false, []int{407}, oncehttp.Rejected}, "502": {false, []int{502}, oncehttp.Succeeded},
		"502, then 407": {false, []int{502, 407}, oncehttp.Unknown}, "502 for ever": {false, []int{502, 502, 502, 502}, oncehttp.Unknown},
		"tunnel": {true, nil, oncehttp.Succeeded}, "tunnel refused": {true, []int{502}, oncehttp.Succeeded},
		"tunnel refused for ever": {true, []int{407, 407, 407, 407}, oncehttp.Unknown},
	} {
		playKeyed(t, scene{name: "keyed/" + name, play: func(w *wire) {
			target, heard := "http://example.com", 0
			if s.tunnel {
				target, _ = w.serve(func(rw http.ResponseWriter, r *http.Request) { heard++ }, w.withTLS())
				through(w, tunnel(w, s.status...))
			} else {
				through(w, turns(s.status...))
			}
			target = strings.Replace(target, "://", "://me:"+secret+"@", 1)
			ctx, op := oncehttp.Start(w.Context(), oncehttp.Op{Key: "k"})
			resp, err := w.do(w.request("POST", target, strings.NewReader("x"), "Proxy-Authorization", "Basic "+secret).WithContext(ctx))
			if err == nil {
				io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
			info := op.Info()
			if info.Outcome != s.outcome || s.tunnel && s.outcome == oncehttp.Succeeded && heard != 1 {
				w.Errorf("told %v, %v, heard %d times", info.Outcome, err, heard)
			}
			for _, text := range []string{fmt.Sprint(err), fmt.Sprintf("%+v", info), w.stored()} {
				if strings.Contains(text, secret) {
					w.Errorf("tells the password: %s", text)
				}
			}
		}})
	}
}

// TestAnUpgradedConnectionIsTheCallers: in both directions, half closed, and for
// longer than an attempt may take.
func TestAnUpgradedConnectionIsTheCallers(t *testing.T) {
	upgrade := func(header ...string) func(w *wire) {
		return func(w *wire) {
			u, _ := w.serve(func(rw http.ResponseWriter, r *http.Request) {
				c, rest, err := http.NewResponseController(rw).Hijack()
				if err != nil {
					w.Error(err)
					return
				}
				defer c.Close()
				io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\nhello\n")
				for {
					line, err := rest.ReadString('\n')
					if err != nil {
						io.WriteString(c, "bye\n")
						return
					}
					io.WriteString(c, "echo "+line)
				}
			})
			resp, err := w.do(w.request("POST", u, nil, append(header, "Connection", "upgrade", "Upgrade", "echo")...))
			if err != nil {
				w.Fatal(err)
			}
			defer resp.Body.Close()
			resp.Header.Del("Date")
			w.saw("%s %v", resp.Status, resp.Header)
			conn, ok := resp.Body.(duplex)
			if !ok {
				w.Fatalf("the body is a %T, which cannot be written and half closed", resp.Body)
			}
			r := bufio.NewReader(conn)
			for _, line := range []string{"one\n", "two\n"} {
				got, err := r.ReadString('\n')
				w.saw("read %q, %v", got, err)
				if w.fake {
					time.Sleep(time.Hour) // of the bubble
				}
				_, err = io.WriteString(conn, line)
				w.saw("wrote %v", err)
			}
			got, err := r.ReadString('\n')
			w.saw("read %q, %v", got, err)
			if w.fake {
				return // a pipe cannot be half closed
			}
			w.saw("half closed %v", conn.CloseWrite())
			rest, err := io.ReadAll(r)
			w.saw("read %q, %v", rest, err)
		}
	}
	quick := oncehttp.Options{AttemptTimeout: time.Second}
	playAll(t, []scene{
		{name: "on a socket", play: upgrade()},
		{name: "for hours", play: upgrade(), opts: quick, fake: true},
	})
	var bare []string
	for _, fake := range []bool{false, true} {
		s := scene{name: fmt.Sprintf("keyed/for hours=%v", fake), play: upgrade("Idempotency-Key", "k"), opts: quick, fake: fake}
		onWire(t, "net/http", s, func(w *wire) { s.play(w); bare = w.seen })
		s.better = bare
		playKeyed(t, s)
	}
}

// TestEventsArriveAsTheyAreSent: no buffering, and no timeout but the caller's.
func TestEventsArriveAsTheyAreSent(t *testing.T) {
	events := func(method, contentType string, header ...string) func(w *wire) {
		return func(w *wire) {
			next := make(chan string)
			u, _ := w.serve(func(rw http.ResponseWriter, r *http.Request) {
				rw.Header().Set("Content-Type", contentType)
				rw.(http.Flusher).Flush()
				for event := range next {
					fmt.Fprintf(rw, "data: %s\n\n", event)
					rw.(http.Flusher).Flush()
				}
			})
			resp, err := w.do(w.request(method, u, nil, header...))
			if err != nil {
				w.Fatal(err)
			}
			defer resp.Body.Close()
			w.saw("%s %d", resp.Status, resp.ContentLength)
			for _, event := range []string{"one", "two", "three"} {
				if w.fake {
					time.Sleep(time.Hour) // of the bubble
				}
				next <- event
				got := make([]byte, 64)
				n, err := resp.Body.Read(got) // before the next is sent
				w.saw("%q %v", got[:n], err)
			}
			close(next)
			rest, err := io.ReadAll(resp.Body)
			w.saw("%q %v", rest, err)
		}
	}
	quick := oncehttp.Options{AttemptTimeout: time.Second}
	playAll(t, []scene{
		{name: "GET", play: events("GET", "text/event-stream")},
		{name: "GET for hours", play: events("GET", "text/event-stream"), opts: quick, fake: true},
		{name: "POST for hours", play: events("POST", "application/json"), opts: quick, fake: true},
		{name: "long poll", play: func(w *wire) {
			u, _ := w.serve(func(rw http.ResponseWriter, r *http.Request) {
				time.Sleep(time.Hour) // of the bubble
				io.WriteString(rw, "at last")
			})
			start := time.Now()
			for _, method := range []string{"GET", "POST"} {
				w.try(w.request(method, u, nil))
				w.saw("after %v", time.Since(start))
			}
		}, opts: quick, fake: true},
		{name: "a byte a minute", play: func(w *wire) {
			u, _ := w.accept(func(_ int, c net.Conn) {
				readRequest(bufio.NewReader(c))
				for _, b := range []byte(ok) {
					time.Sleep(time.Minute) // of the bubble
					c.Write([]byte{b})
				}
			})
			start := time.Now()
			w.try(w.request("GET", u, nil))
			w.saw("after %v", time.Since(start))
		}, opts: quick, fake: true},
	})
	stream := []string{"200 OK -1", `"data: one\n\n" <nil>`, `"data: two\n\n" <nil>`, `"data: three\n\n" <nil>`, `"" <nil>`}
	playKeyed(t, scene{name: "keyed", play: events("POST", "text/event-stream; charset=utf-8", "Idempotency-Key", "k"), better: stream})
	playKeyed(t, scene{name: "keyed for hours", play: events("POST", "text/event-stream", "Idempotency-Key", "k"), better: stream, opts: quick, fake: true})
}

// TestTheWaitBetweenAttemptsHoldsNoConnection: another request has it meanwhile.
func TestTheWaitBetweenAttemptsHoldsNoConnection(t *testing.T) {
	for _, size := range []int{0, 100, 1 << 20} {
		for _, header := range [][]string{nil, {"Idempotency-Key", "k"}} {
			playKeyed(t, scene{name: fmt.Sprintf("%d bytes/keyed=%v", size, header != nil), fake: true, play: func(w *wire) {
				w.transport.MaxConnsPerHost = 1
				waiting := make(chan struct{})
				n := 0
				u, _ := w.serve(func(rw http.ResponseWriter, r *http.Request) {
					if r.URL.Path == "/waits" {
						if n++; n == 1 {
							rw.Header().Set("Retry-After", "30")
							rw.WriteHeader(500)
							rw.Write(make([]byte, size))
							close(waiting)
						}
					}
				})
				start := time.Now()
				done := make(chan time.Duration)
				go func() {
					w.tryShort(w.request("PUT", u+"/waits", nil, header...))
					done <- time.Since(start)
				}()
				<-waiting
				w.tryShort(w.request("GET", u+"/other", nil))
				if d := time.Since(start); d >= time.Second {
					w.Errorf("the other request waited for %v", d)
				}
				if d := <-done; d < 30*time.Second {
					w.Errorf("was tried again after %v", d)
				}
			}, better: []string{`200 ""`, `200 ""`}})
		}
	}
}

// TestConnectionsAreUsedAgain: a retry costs a connection only if its answer was
// too long to be read.
func TestConnectionsAreUsedAgain(t *testing.T) {
	for _, header := range [][]string{nil, {"Idempotency-Key", "k"}} {
		keyed := fmt.Sprintf("keyed=%v", header != nil)
		for _, tt := range []struct {
			name        string
			size        int
			setup       func(tr *http.Transport)
			connections int64
		}{
			{"empty", 0, nil, 1},
			{"short", 4 << 10, nil, 1},
			{"long", 2 << 20, nil, 4},
			{"empty, one connection", 0, func(tr *http.Transport) { tr.MaxConnsPerHost = 1 }, 1},
			{"long, one connection", 2 << 20, func(tr *http.Transport) { tr.MaxConnsPerHost = 1 }, 4},
			{"no keep-alives", 0, func(tr *http.Transport) { tr.DisableKeepAlives = true }, 4},
		} {
			playKeyed(t, scene{name: tt.name + "/" + keyed, play: func(w *wire) {
				if tt.setup != nil {
					tt.setup(w.transport)
				}
				other, idle := w.serve(func(http.ResponseWriter, *http.Request) {})
				w.tryShort(w.request("GET", other, nil))
				var n atomic.Int32
				u, l := w.serve(func(rw http.ResponseWriter, r *http.Request) {
					if n.Add(1) < 4 {
						rw.WriteHeader(503)
						rw.Write(make([]byte, tt.size))
					}
				})
				w.tryShort(w.request("PUT", u, strings.NewReader("x"), header...))
				w.tryShort(w.request("GET", other, nil))
				if got := l.accepted.Load(); got != tt.connections {
					w.Errorf("%d connections for 4 attempts, want %d", got, tt.connections)
				}
				if got := idle.accepted.Load(); got != 1 && !w.transport.DisableKeepAlives {
					w.Errorf("the idle connection to another host was lost")
				}
			}, better: []string{`200 ""`, `200 ""`, `200 ""`}})
		}
		playKeyed(t, scene{name: "giving up/" + keyed, play: func(w *wire) {
			other, idle := w.serve(func(http.ResponseWriter, *http.Request) {})
			w.tryShort(w.request("GET", other, nil))
			u, l := w.serve(func(rw http.ResponseWriter, r *http.Request) {
				rw.WriteHeader(503)
				io.WriteString(rw, "down")
			})
			w.tryShort(w.request("PUT", u, nil, header...))
			w.tryShort(w.request("GET", other, nil))
			w.saw("%d and %d connections", l.accepted.Load(), idle.accepted.Load())
		}, better: []string{`200 ""`, `503 "down"`, `200 ""`, "1 and 1 connections"}})
		playKeyed(t, scene{name: "one connection for many/" + keyed, play: func(w *wire) {
			w.transport.MaxConnsPerHost = 1
			var n atomic.Int32
			u, l := w.serve(func(rw http.ResponseWriter, r *http.Request) {
				if n.Add(1)%2 == 1 && n.Load() < 16 {
					rw.WriteHeader(503)
				}
			})
			var all sync.WaitGroup
			for i := range 8 {
				all.Go(func() {
					req := w.request("PUT", fmt.Sprint(u, "/", i), nil)
					if header != nil {
						req.Header.Set(header[0], fmt.Sprint(i))
					}
					resp, err := w.do(req)
					if err != nil {
						w.Error(err)
						return
					}
					resp.Body.Close()
				})
			}
			all.Wait()
			w.saw("%d connections", l.accepted.Load())
		}, better: []string{"1 connections"}})
	}
}

// TestACancelledRequestLeavesNothing: neither while it waits for its answer, nor
// in the middle of its body.
func TestACancelledRequestLeavesNothing(t *testing.T) {
	var scenes []scene
	for _, protocol := range []string{"", "h2"} {
		for _, part := range []bool{false, true} {
			play := func(header ...string) func(w *wire) {
				return func(w *wire) {
					entered := make(chan struct{})
					u, _ := w.serve(func(rw http.ResponseWriter, r *http.Request) {
						rw.Header().Set("Content-Type", "text/event-stream")
						if part {
							io.WriteString(rw, "part")
							rw.(http.Flusher).Flush()
						}
						close(entered)
						<-r.Context().Done()
					}, func(s *httptest.Server) {
						if protocol == "h2" { // in 1.1, the closing of TLS would let the server end its answer in time
							w.withTLS(protocol)(s)
						}
					})
					ctx, cancel := context.WithCancel(w.Context())
					defer cancel()
					if !part {
						go func() { <-entered; cancel() }()
					}
					req := w.request("POST", u, nil, header...)
					resp, err := w.do(req.WithContext(ctx))
					if !part {
						w.saw("canceled %v", errors.Is(err, context.Canceled))
						return
					}
					if err != nil {
						w.Fatal(err)
					}
					defer resp.Body.Close()
					got := make([]byte, 4)
					_, err = io.ReadFull(resp.Body, got)
					w.saw("%q %v", got, err)
					cancel()
					_, err = io.ReadAll(resp.Body)
					w.saw("canceled %v", errors.Is(err, context.Canceled))
				}
			}
			name := fmt.Sprintf("protocol %q/in the body=%v", protocol, part)
			want := []string{"canceled true"}
			if part {
				want = []string{`"part" <nil>`, "canceled true"}
			}
			scenes = append(scenes, scene{name: name, play: play()})
			playKeyed(t, scene{name: "keyed/" + name, play: play("Idempotency-Key", "k"), better: want})
		}
	}
	playAll(t, scenes)
}
