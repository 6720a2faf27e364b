package oncehttp_test

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"

	"github.com/oncehttp/oncehttp"
)

// wireZeros is a body of n bytes that takes no memory.
type wireZeros struct{ n int64 }

func (z *wireZeros) Read(p []byte) (int, error) {
	if z.n == 0 {
		return 0, io.EOF
	}
	p = p[:min(int64(len(p)), z.n)]
	clear(p)
	z.n -= int64(len(p))
	return len(p), nil
}

func (z *wireZeros) Close() error { return nil }

// swallow is a transport that reads the body of a request, and answers with one
// as long.
type swallow struct{ buf []byte }

func (s swallow) RoundTrip(req *http.Request) (*http.Response, error) {
	n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{req.Body}, s.buf)
	req.Body.Close()
	return &http.Response{
		StatusCode: 200, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: http.Header{}, ContentLength: n, Body: &wireZeros{n}, Request: req,
	}, err
}

// allocated is what f allocates, in bytes.
func allocated(f func()) int64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return int64(after.TotalAlloc - before.TotalAlloc)
}

// TestLargeBodiesStream: without a key, they go through unread, in both
// directions, whatever their length.
func TestLargeBodiesStream(t *testing.T) {
	size := int64(2<<30 + 1)
	if testing.Short() {
		size = 64 << 20
	}
	opts := wireOptions(oncehttp.Options{HTTPClient: &http.Client{Transport: swallow{make([]byte, 64<<10)}}})
	client, err := oncehttp.New(oncehttp.NewMemoryStore(), &opts)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	buf := make([]byte, 64<<10)
	for form, via := range forms {
		for _, method := range []string{"POST", "PUT"} {
			used := allocated(func() {
				req, err := http.NewRequest(method, host, &wireZeros{size})
				if err != nil {
					t.Fatal(err)
				}
				resp, err := via(client, req)
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{resp.Body}, buf)
				if n != size || err != nil || resp.ContentLength != size {
					t.Errorf("%s %s: %d bytes, announced %d, %v", form, method, n, resp.ContentLength, err)
				}
			})
			if used > 1<<20 {
				t.Errorf("%s %s: allocated %d bytes for bodies of %d", form, method, used, size)
			}
		}
	}
}

// TestLargeBodiesStreamOnTheWire, of known length and of unknown.
func TestLargeBodiesStreamOnTheWire(t *testing.T) {
	size := int64(64 << 20)
	if testing.Short() {
		size = 8 << 20
	}
	for _, protocol := range []string{"1.1", "h2c"} {
		for _, length := range []int64{size, -1} {
			if testing.Short() && (protocol == "h2c") != (length < 0) {
				continue
			}
			var bare int64
			play := func(w *wire) {
				setup := func(*httptest.Server) {}
				if protocol == "h2c" {
					setup = w.withH2C
				}
				url, _ := w.serve(func(rw http.ResponseWriter, r *http.Request) {
					n, err := io.Copy(io.Discard, r.Body)
					w.saw("heard %d of %d, %v", n, r.ContentLength, err)
					io.CopyN(rw, &wireZeros{size}, size)
				}, setup)
				used := allocated(func() {
					req := w.request("POST", url, &wireZeros{size})
					req.ContentLength = length
					resp, err := w.do(req)
					if err != nil {
						w.Fatal(err)
					}
					defer resp.Body.Close()
					n, err := io.Copy(io.Discard, resp.Body)
					w.saw("got %d of %d, %v", n, resp.ContentLength, err)
				})
				if !w.ours {
					bare = used
				} else if used > bare+size*3/4 {
					w.Errorf("allocated %d bytes, net/http %d", used, bare)
				}
			}
			playAll(t, []scene{{name: fmt.Sprintf("%s/length %d", protocol, length), play: play}})
		}
	}
}

// TestALongAnswerOfAKeyedRequestStreams behind what was read of it, and one that
// is cut off then is the reader's to see.
func TestALongAnswerOfAKeyedRequestStreams(t *testing.T) {
	for _, announced := range []bool{true, false} {
		for _, cut := range []bool{false, true} {
			want := []string{"4194304 bytes, then nil"}
			if cut {
				want = []string{`2097152 bytes, then "unexpected EOF" (*errors.errorString, is [UnexpectedEOF], timeout false)`}
			}
			playKeyed(t, scene{name: fmt.Sprintf("announced=%v/cut=%v", announced, cut), play: func(w *wire) {
				url, _ := w.serve(func(rw http.ResponseWriter, r *http.Request) {
					if announced {
						rw.Header().Set("Content-Length", fmt.Sprint(4<<20))
					}
					rw.Write(make([]byte, 2<<20))
					if rw.(http.Flusher).Flush(); cut {
						panic(http.ErrAbortHandler)
					}
					rw.Write(make([]byte, 2<<20))
				})
				resp, err := w.do(w.request("POST", url, strings.NewReader("x"), "Idempotency-Key", "k"))
				if err != nil {
					w.Fatal(err)
				}
				body, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				w.saw("%d bytes, then %s", len(body), errText(err))
			}, better: want})
		}
	}
}

// TestAKeyedRequestWithTrailersIsRefused: they cannot be stored, and were lost.
func TestAKeyedRequestWithTrailersIsRefused(t *testing.T) {
	playKeyed(t, scene{name: "trailers", play: func(w *wire) {
		url, l := w.serve(func(rw http.ResponseWriter, r *http.Request) { w.heard(r) })
		req := w.request("POST", url, onlyReader{bytes.NewReader([]byte("body"))}, "Idempotency-Key", "k")
		req.Trailer = http.Header{"X-Sum": nil}
		_, err := w.do(req)
		if err == nil || !strings.Contains(err.Error(), "trailers") || l.accepted.Load() != 0 {
			w.Errorf("error %v after %d connections", err, l.accepted.Load())
		}
		req = w.request("POST", url, onlyReader{bytes.NewReader([]byte("body"))})
		req.Trailer = http.Header{"X-Sum": {"1"}}
		w.tryShort(req.WithContext(oncehttp.WithoutKey(w.Context())))
		if !strings.Contains(w.seen[0], "X-Sum:[1]") {
			w.Errorf("saw %s", w.seen)
		}
	}})
}
