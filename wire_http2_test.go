package oncehttp_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oncehttp/oncehttp"
)

// A frameConn is the server's side of an HTTP/2 connection, written by hand. It
// reads no header: bodies tell requests apart.
type frameConn struct {
	net.Conn
	mu   sync.Mutex
	deaf bool // does not answer pings
}

// Types and codes of RFC 9113.
const (
	frameData, frameHeaders, frameReset, frameSettings, framePing, frameGoAway = 0, 1, 3, 4, 6, 7
	flagAck, flagEndStream, flagEndHeaders                                     = 1, 1, 4
	codeInternal, codeRefused                                                  = 2, 7
)

func (c *frameConn) write(kind, flags byte, stream uint32, payload []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	b := binary.BigEndian.AppendUint32(nil, uint32(len(payload)))[1:]
	b = append(b, kind, flags)
	b = binary.BigEndian.AppendUint32(b, stream)
	_, _ = c.Write(append(b, payload...))
}

func (c *frameConn) reset(stream, code uint32) {
	c.write(frameReset, 0, stream, binary.BigEndian.AppendUint32(nil, code))
}

func (c *frameConn) goAway(last, code uint32) {
	c.write(frameGoAway, 0, 0, binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, last), code))
}

// begin sends a status, and the beginning of a body.
func (c *frameConn) begin(stream uint32, status, body string) {
	c.write(frameHeaders, flagEndHeaders, stream, append([]byte{8, 3}, status...)) // :status, as a literal
	c.write(frameData, 0, stream, []byte(body))
}

func (c *frameConn) answer(stream uint32, status, body string) {
	c.begin(stream, status, body)
	c.write(frameData, flagEndStream, stream, nil)
}

// serve reads frames, and calls handle with every complete request, until that
// hangs up. The rest is read then: a close with unread bytes would be a reset.
func (c *frameConn) serve(handle func(stream uint32, body []byte) (hangUp bool)) {
	preface := make([]byte, len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
	if _, err := io.ReadFull(c, preface); err != nil {
		return
	}
	c.write(frameSettings, 0, 0, nil)
	bodies := make(map[uint32][]byte)
	for {
		var head [9]byte
		if _, err := io.ReadFull(c, head[:]); err != nil {
			return
		}
		payload := make([]byte, int(head[0])<<16|int(head[1])<<8|int(head[2]))
		if _, err := io.ReadFull(c, payload); err != nil {
			return
		}
		kind, flags, stream := head[3], head[4], binary.BigEndian.Uint32(head[5:])
		switch {
		case kind == frameSettings && flags&flagAck == 0:
			c.write(frameSettings, flagAck, 0, nil)
		case kind == framePing && flags&flagAck == 0 && !c.deaf:
			c.write(framePing, flagAck, 0, payload)
		case kind == frameData:
			bodies[stream] = append(bodies[stream], payload...)
		}
		if (kind == frameData || kind == frameHeaders) && flags&flagEndStream != 0 && handle(stream, bodies[stream]) {
			_ = c.Conn.(interface{ CloseWrite() error }).CloseWrite()
			_, _ = io.Copy(io.Discard, c)
			return
		}
	}
}

// frames starts a server of HTTP/2, over TLS or in the clear. The faults deal
// with its first requests, in turn; all others are answered.
func (w *wire) frames(clear bool, faults ...func(c *frameConn, stream uint32) (hangUp bool)) (string, *atomic.Int32) {
	requests := new(atomic.Int32)
	var config *tls.Config
	protocols := new(http.Protocols)
	w.transport.Protocols = protocols
	if clear {
		protocols.SetUnencryptedHTTP2(true)
	} else {
		protocols.SetHTTP2(true)
		s := httptest.NewUnstartedServer(nil) // for its certificate
		s.StartTLS()
		w.trust(s.Certificate())
		config = &tls.Config{Certificates: s.TLS.Certificates, NextProtos: []string{"h2"}}
		s.Close()
	}
	url, _ := w.accept(func(_ int, c net.Conn) {
		if config != nil {
			c = tls.Server(c, config)
			defer c.Close()
		}
		f := &frameConn{Conn: c}
		f.serve(func(stream uint32, body []byte) bool {
			if n := int(requests.Add(1)); n <= len(faults) {
				return faults[n-1](f, stream)
			}
			f.answer(stream, "200", "answer to "+string(body))
			return false
		})
	})
	if clear {
		return url, requests
	}
	return strings.Replace(url, "http:", "https:", 1), requests
}

// TestAFaultOfHTTP2IsNetHTTPs: what the server says was not processed, net/http
// sends again by itself, if it can. What may have been, we send again if it is
// idempotent, or keyed.
func TestAFaultOfHTTP2IsNetHTTPs(t *testing.T) {
	type fault struct {
		name   string
		play   func(c *frameConn, stream uint32) bool
		resent bool // by net/http
		body   bool // the answer had begun: the reader of an unkeyed one sees it
	}
	faults := []fault{
		{"none", func(c *frameConn, s uint32) bool { c.answer(s, "200", "first"); return false }, false, true},
		{"refused", func(c *frameConn, s uint32) bool { c.reset(s, codeRefused); return false }, true, false},
		{"going away, not processed", func(c *frameConn, s uint32) bool { c.goAway(0, 0); return true }, true, false},
		{"going away, then answered", func(c *frameConn, s uint32) bool {
			c.goAway(s, 0)
			c.answer(s, "200", "first")
			return false
		}, false, true},
		{"going away, processed", func(c *frameConn, s uint32) bool { c.goAway(s, 0); return true }, false, false},
		{"going away with an error", func(c *frameConn, s uint32) bool { c.goAway(s, codeInternal); return true }, false, false},
		{"reset without answer", func(c *frameConn, s uint32) bool { c.reset(s, codeInternal); return false }, false, false},
		{"reset in the body", func(c *frameConn, s uint32) bool {
			c.begin(s, "200", "part")
			c.reset(s, codeInternal)
			return false
		}, false, true},
		{"closed without answer", func(c *frameConn, s uint32) bool { return true }, false, false},
		{"closed in the body", func(c *frameConn, s uint32) bool { c.begin(s, "200", "part"); return true }, false, true},
		{"503", func(c *frameConn, s uint32) bool { c.answer(s, "503", "later"); return false }, false, false},
		{"silent", func(c *frameConn, s uint32) bool { c.deaf = true; return false }, false, false},
	}
	for _, clear := range []bool{false, true} {
		for _, f := range faults {
			if testing.Short() && !clear && !f.resent {
				continue // TLS takes its time
			}
			name := map[bool]string{false: "TLS", true: "clear"}[clear] + "/" + f.name
			start := func(w *wire) (string, *atomic.Int32) {
				if f.name == "silent" {
					w.transport.HTTP2 = &http.HTTP2Config{SendPingTimeout: 20 * time.Millisecond, PingTimeout: 20 * time.Millisecond}
				}
				return w.frames(clear, f.play)
			}
			var scenes []scene
			for _, method := range []string{"GET", "PUT", "POST"} {
				body := ""
				if method != "GET" {
					body = "body"
				}
				s := scene{name: name + "/" + method, play: func(w *wire) {
					url, requests := start(w)
					w.tryShort(w.request(method, url, strings.NewReader(body)))
					w.saw("sent %d times", requests.Load())
				}}
				if method != "POST" && !f.resent && !f.body {
					s.better = []string{fmt.Sprintf("200 %.20q", "answer to "+body), "sent 2 times"}
				}
				scenes = append(scenes, s)
			}
			playAll(t, scenes)
			for body, kind := range map[string]string{"": "without body", "body": "with a body"} {
				playKeyed(t, scene{name: name + "/keyed POST " + kind, play: func(w *wire) {
					url, requests := start(w)
					ctx, op := oncehttp.Start(w.Context(), oncehttp.Op{})
					resp, err := w.do(w.request("POST", url, strings.NewReader(body)).WithContext(ctx))
					if err != nil {
						w.Fatal(err)
					}
					got, err := io.ReadAll(resp.Body)
					resp.Body.Close()
					want, sent := "answer to "+body, 2
					if first := f.name == "none" || f.name == "going away, then answered"; first {
						want, sent = "first", 1
					}
					if err != nil || string(got) != want || int(requests.Load()) != sent {
						w.Errorf("answered %q, %v, sent %d times; want %q, sent %d times", got, err, requests.Load(), want, sent)
					}
					if info := op.Info(); info.Outcome != oncehttp.Succeeded || info.Attempts != sent {
						w.Errorf("told %v after %d attempts, want %d", info.Outcome, info.Attempts, sent)
					}
				}})
			}
		}
	}
}

// TestHTTP2SendsNothingAfterTheWindow: net/http's own resend of a keyed request
// without body meets the window when it has its connection.
func TestHTTP2SendsNothingAfterTheWindow(t *testing.T) {
	for _, clear := range []bool{false, true} {
		for name, body := range map[string]string{"without body": "", "with a body": "body"} {
			for fault, refuse := range map[string]func(*frameConn, uint32) bool{
				"refused":    func(c *frameConn, s uint32) bool { c.reset(s, codeRefused); return false },
				"going away": func(c *frameConn, s uint32) bool { c.goAway(0, 0); return true },
			} {
				var ahead atomic.Int64
				opts := oncehttp.Options{}.WithClock(func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) })
				playKeyed(t, scene{name: fmt.Sprintf("clear=%v/%s/%s", clear, name, fault), opts: *opts, play: func(w *wire) {
					url, requests := w.frames(clear, func(c *frameConn, s uint32) bool {
						ahead.Add(int64(24 * time.Hour))
						return refuse(c, s)
					})
					ctx, op := oncehttp.Start(w.Context(), oncehttp.Op{})
					_, err := w.do(w.request("POST", url, strings.NewReader(body)).WithContext(ctx))
					if !errors.Is(err, oncehttp.ErrWindowClosed) || requests.Load() != 1 {
						w.Errorf("sent %d times, error %v", requests.Load(), err)
					}
					if info := op.Info(); info.Outcome != oncehttp.Unknown {
						w.Errorf("told %v", info.Outcome)
					}
				}})
			}
		}
	}
}

// TestAClosedWindowLeavesOtherStreams that share the connection.
func TestAClosedWindowLeavesOtherStreams(t *testing.T) {
	var ahead atomic.Int64
	opts := oncehttp.Options{}.WithClock(func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) })
	playKeyed(t, scene{name: "TLS", opts: *opts, play: func(w *wire) {
		var stream func(end string)
		url, _ := w.frames(false, func(c *frameConn, s uint32) bool {
			c.begin(s, "200", "be")
			stream = func(end string) { c.write(frameData, flagEndStream, s, []byte(end)) }
			return false
		}, func(c *frameConn, s uint32) bool {
			ahead.Add(int64(24 * time.Hour))
			c.reset(s, codeRefused)
			return false
		})
		resp, err := w.do(w.request("GET", url, nil))
		if err != nil {
			w.Fatal(err)
		}
		defer resp.Body.Close()
		if _, err := w.do(w.request("POST", url, nil, "Idempotency-Key", "k")); !errors.Is(err, oncehttp.ErrWindowClosed) {
			w.Errorf("error %v", err)
		}
		stream("gun")
		body, err := io.ReadAll(resp.Body)
		w.saw("%q %v", body, err)
	}, better: []string{`"begun" <nil>`}})
}

// withH2C makes a server speak HTTP/2 in the clear, and the wire's transport, too.
func (w *wire) withH2C(s *httptest.Server) {
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	s.Config.Protocols, w.transport.Protocols = protocols, protocols
}

// TestHTTP2IsNetHTTPs on servers that do nothing wrong.
func TestHTTP2IsNetHTTPs(t *testing.T) {
	setups := map[string]func(w *wire) func(*httptest.Server){
		"TLS":     func(w *wire) func(*httptest.Server) { return w.withTLS("h2") },
		"clear":   func(w *wire) func(*httptest.Server) { return w.withH2C },
		"1.1 TLS": func(w *wire) func(*httptest.Server) { return w.withTLS() },
	}
	for name, setup := range setups {
		echo := func(w *wire) (string, *watchedListener) {
			return w.serve(func(rw http.ResponseWriter, r *http.Request) {
				w.heard(r)
				rw.Header().Set("Trailer", "X-Sum")
				rw.WriteHeader(http.StatusEarlyHints)
				fmt.Fprintf(rw, "%s of %d", r.Method, r.ContentLength)
				rw.(http.Flusher).Flush()
				rw.Header().Set("X-Sum", "2")
			}, setup(w))
		}
		var scenes []scene
		for _, method := range []string{"GET", "HEAD", "POST", "PUT"} {
			scenes = append(scenes, scene{name: name + "/" + method, play: func(w *wire) {
				url, l := echo(w)
				for range 2 {
					w.try(w.request(method, url+"/a%2Fb?q=%20", strings.NewReader("body"), "X-Multi", "1", "X-Multi", "2", "Expect", "100-continue"))
				}
				req := w.request(method, url, onlyReader{strings.NewReader("body of unknown length")})
				req.Trailer = http.Header{"X-Sum": {"1"}}
				w.try(req)
				if name != "clear" { // there, net/http itself has one or two
					w.saw("%d connections", l.accepted.Load())
				}
			}})
		}
		playAll(t, append(scenes,
			scene{name: name + "/aborted by its handler", play: func(w *wire) {
				url, _ := w.serve(func(rw http.ResponseWriter, r *http.Request) {
					io.WriteString(rw, "part")
					rw.(http.Flusher).Flush()
					panic(http.ErrAbortHandler)
				}, setup(w))
				w.tryShort(w.request("GET", url, nil))
			}},
			scene{name: name + "/shut down while it answers", play: func(w *wire) {
				var server *httptest.Server
				entered, answer := make(chan struct{}), make(chan struct{})
				url, _ := w.serve(func(rw http.ResponseWriter, r *http.Request) {
					close(entered)
					<-answer
					io.WriteString(rw, "answered")
				}, setup(w), func(s *httptest.Server) { server = s })
				down := make(chan error)
				go func() {
					<-entered
					server.Config.RegisterOnShutdown(func() { close(answer) })
					down <- server.Config.Shutdown(context.Background())
				}()
				w.tryShort(w.request("POST", url, strings.NewReader("x")))
				w.idle()
				w.saw("%v", <-down)
			}},
			scene{name: name + "/in both directions at once", play: func(w *wire) {
				url, _ := w.serve(func(rw http.ResponseWriter, r *http.Request) {
					_ = http.NewResponseController(rw).EnableFullDuplex()
					rw.(http.Flusher).Flush()
					io.Copy(flushed{rw}, r.Body)
				}, setup(w))
				r, pw := io.Pipe()
				resp, err := w.do(w.request("POST", url, r))
				if err != nil {
					w.Fatal(err)
				}
				defer resp.Body.Close()
				for _, word := range []string{"one", "two"} {
					io.WriteString(pw, word)
					got := make([]byte, 3)
					_, err := io.ReadFull(resp.Body, got)
					w.saw("%q %v", got, err)
				}
				pw.Close()
				rest, err := io.ReadAll(resp.Body)
				w.saw("%q %v", rest, err)
			}},
		))
		if name == "1.1 TLS" {
			continue
		}
		// Of fifty at once, none is lost or sent twice; over TLS, they share a connection.
		concurrent := func(header ...string) func(w *wire) {
			return func(w *wire) {
				var heard sync.Map
				first := make(chan struct{})
				url, l := w.serve(func(rw http.ResponseWriter, r *http.Request) {
					body, _ := io.ReadAll(r.Body)
					if _, twice := heard.LoadOrStore(r.Header.Get("Idempotency-Key")+string(body), true); twice {
						w.Errorf("heard %q twice", body)
					}
					if string(body) != "0" {
						<-first // until all are there
					}
					rw.Write(body)
				}, setup(w))
				w.tryShort(w.request("POST", url, strings.NewReader("0"), header...))
				var all sync.WaitGroup
				for i := range 50 {
					all.Go(func() {
						req := w.request("POST", url, strings.NewReader(fmt.Sprint(i+1)))
						if len(header) > 0 {
							req.Header.Set(header[0], fmt.Sprint(header[1], i+1))
						}
						resp, err := w.do(req)
						if err != nil {
							w.Error(err)
							return
						}
						defer resp.Body.Close()
						if body, err := io.ReadAll(resp.Body); err != nil || string(body) != fmt.Sprint(i+1) {
							w.Errorf("answered %q, %v", body, err)
						}
					})
				}
				w.settles(func() string {
					n := 0
					heard.Range(func(any, any) bool { n++; return true })
					return unless(n == 51, fmt.Sprintf("heard %d", n))
				})
				close(first)
				all.Wait()
				if n := l.accepted.Load(); n != 1 && name == "TLS" {
					w.Errorf("%d connections", n)
				}
			}
		}
		playAll(t, []scene{{name: name + "/fifty at once", play: concurrent()}})
		playKeyed(t, scene{name: name + "/fifty keyed at once", play: concurrent("Idempotency-Key", "k"), better: []string{`200 "0"`}})
	}
}

// flushed is a response that is sent as it is written.
type flushed struct{ http.ResponseWriter }

func (f flushed) Write(p []byte) (int, error) {
	n, err := f.ResponseWriter.Write(p)
	f.ResponseWriter.(http.Flusher).Flush()
	return n, err
}

// TestAKeyedRequestLooksTheSameOverHTTP2: one key, the body whole, its length
// announced.
func TestAKeyedRequestLooksTheSameOverHTTP2(t *testing.T) {
	for name, body := range map[string]func() io.Reader{
		"nil":     func() io.Reader { return nil },
		"string":  func() io.Reader { return strings.NewReader("body") },
		"unknown": func() io.Reader { return onlyReader{bytes.NewReader([]byte("body"))} },
	} {
		want := "heard key [k], length 4, body \"body\""
		if name == "nil" {
			want = "heard key [k], length 0, body \"\""
		}
		playKeyed(t, scene{name: name, play: func(w *wire) {
			w.transport.ExpectContinueTimeout = time.Minute
			url, _ := w.serve(func(rw http.ResponseWriter, r *http.Request) {
				body, _ := io.ReadAll(r.Body)
				w.saw("heard key %v, length %d, body %q", r.Header["Idempotency-Key"], r.ContentLength, body)
				if len(w.seen) < 3 {
					rw.WriteHeader(503)
				}
			}, w.withTLS("h2"))
			w.tryShort(w.request("POST", url, body(), "Idempotency-Key", "k", "Expect", "100-continue"))
		}, better: []string{want, want, want, `200 ""`}})
	}
}
