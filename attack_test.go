package oncehttp_test

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/internal/reliability"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// These tests are servers that mean harm, or are broken beyond belief, and callers
// by the million. What they cost is measured.

// tripFunc is an http.RoundTripper.
type tripFunc func(*http.Request) (*http.Response, error)

func (f tripFunc) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Body != nil {
		_, _ = io.Copy(io.Discard, req.Body)
		req.Body.Close()
	}
	return f(req)
}

func replyOf(req *http.Request, status int, length int64, body io.Reader, header ...string) *http.Response {
	resp := &http.Response{
		StatusCode: status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: http.Header{},
		Body: io.NopCloser(body), ContentLength: length, Request: req,
	}
	if length < 0 {
		resp.TransferEncoding = []string{"chunked"}
	}
	for i := 0; i < len(header); i += 2 {
		resp.Header.Add(header[i], header[i+1])
	}
	return resp
}

// A heapWatch sees how much more of the heap is in use than at its start.
type heapWatch struct {
	start uint64
	peak  atomic.Uint64
}

func watchHeap() *heapWatch {
	runtime.GC()
	w := &heapWatch{}
	w.start = w.inUse()
	return w
}

func (*heapWatch) inUse() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// look measures what is in use now, with what waits for the collector.
func (w *heapWatch) look() {
	now := w.inUse()
	for {
		peak := w.peak.Load()
		if now <= peak || w.peak.CompareAndSwap(peak, now) {
			return
		}
	}
}

// more returns by how much the heap had grown at the most.
func (w *heapWatch) more() int64 { return int64(w.peak.Load()) - int64(w.start) }

// kept returns by how much the heap has grown for good.
func (w *heapWatch) kept() int64 {
	runtime.GC()
	runtime.GC()
	return int64(w.inUse()) - int64(w.start)
}

// endless is a body of n zeros that looks at the heap on the way.
type endless struct {
	n     int64
	watch *heapWatch
}

func (e *endless) Read(p []byte) (int, error) {
	if e.n <= 0 {
		return 0, io.EOF
	}
	n := min(int64(len(p)), e.n)
	clear(p[:n])
	if (e.n-n)>>25 != e.n>>25 { // every 32 MiB
		e.watch.look()
	}
	e.n -= n
	return int(n), nil
}

func TestAnswersOfAnyLengthTakeNoMemory(t *testing.T) {
	length := int64(heavy(256<<20, 10<<30))
	count := reliability.Result{Class: "endless answers", How: "10 GiB, announced or not, to keyed and unkeyed requests"}
	for _, announced := range []bool{true, false} {
		for _, method := range []string{http.MethodPost, http.MethodGet} {
			watch := watchHeap()
			calls := 0
			c, err := oncehttp.New(oncehttp.NewMemoryStore(), &oncehttp.Options{HTTPClient: &http.Client{Transport: tripFunc(func(req *http.Request) (*http.Response, error) {
				calls++
				n := int64(-1)
				if announced {
					n = length
				}
				return replyOf(req, 200, n, &endless{length, watch}), nil
			})}})
			if err != nil {
				t.Fatal(err)
			}
			ask := func() (*http.Response, error) {
				req, err := http.NewRequestWithContext(t.Context(), method, "https://api.test/", nil)
				if err != nil {
					t.Fatal(err)
				}
				if method == http.MethodPost {
					req.Header.Set("Idempotency-Key", "key")
				}
				return c.Do(req)
			}
			resp, err := ask()
			if err != nil {
				t.Fatal(err)
			}
			n, err := io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
			if n != length || err != nil || watch.more() > 32<<20 {
				t.Errorf("%s, announced %v: read %d, %v, with %d MiB", method, announced, n, err, watch.more()>>20)
			}
			if method == http.MethodPost {
				if _, err := ask(); !errors.Is(err, oncehttp.ErrNotRetained) || calls != 1 {
					t.Errorf("asked again: %v, %d calls, want ErrNotRetained", err, calls)
				}
			}
			if err := c.Close(); err != nil {
				t.Error(err)
			}
			count.Cases++
		}
	}
	reliability.Report(t, count)
}

// TestAGzipBombIsNotUnpackedIntoMemory: MaxResponseBytes is of what it unpacks to.
func TestAGzipBombIsNotUnpackedIntoMemory(t *testing.T) {
	size := int64(heavy(16<<20, 1<<30))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Encoding", "gzip")
		z := gzip.NewWriter(w)
		_, _ = io.CopyN(z, zeros{}, size)
		z.Close()
	}))
	defer server.Close()
	c, err := oncehttp.New(oncehttp.NewMemoryStore(), &oncehttp.Options{HTTPClient: &http.Client{Transport: &http.Transport{}}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	watch := watchHeap()
	resp, err := c.Post(server.URL, "text/plain", strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	watch.look()
	defer resp.Body.Close()
	n, err := io.Copy(io.Discard, io.TeeReader(resp.Body, looker{watch}))
	if n != size || err != nil || watch.more() > min(32<<20, size) {
		t.Errorf("read %d of %d, %v, with %d MiB", n, size, err, watch.more()>>20)
	}
	reliability.Report(t, reliability.Result{Class: "gzip bombs", How: "1 GiB of zeros, on a socket", Cases: 1})
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// A looker looks at the heap while something is copied.
type looker struct{ watch *heapWatch }

func (l looker) Write(p []byte) (int, error) {
	if p[0] == 0 && len(p)%4096 == 0 && time.Now().UnixNano()%64 == 0 {
		l.watch.look()
	}
	return len(p), nil
}

// A drip is a body that gives one byte a minute, for ever.
type drip struct{ ctx context.Context }

func (d drip) Read(p []byte) (int, error) {
	select {
	case <-time.After(time.Minute):
		p[0] = ' '
		return 1, nil
	case <-d.ctx.Done():
		return 0, context.Cause(d.ctx)
	}
}

func TestAServerThatDripsIsNotWaitedForForEver(t *testing.T) {
	count := reliability.Result{Class: "one byte a minute", How: "answers that never end, to keyed and unkeyed requests and streams"}
	for name, test := range map[string]struct {
		method string
		header []string
		within time.Duration // the call
		reads  time.Duration // of the body, by the caller's deadline; 0: there is no body
	}{
		"keyed":              {method: http.MethodPost, within: 4*30*time.Second + 4*30*time.Second},
		"keyed event stream": {method: http.MethodPost, header: []string{"Content-Type", "text/event-stream"}, within: time.Second, reads: time.Hour},
		"unkeyed":            {method: http.MethodGet, within: time.Second, reads: time.Hour},
	} {
		synctest.Test(t, func(t *testing.T) {
			attempts := 0
			c, err := oncehttp.New(oncehttptest.NewStore(), &oncehttp.Options{HTTPClient: &http.Client{Transport: tripFunc(func(req *http.Request) (*http.Response, error) {
				attempts++
				return replyOf(req, 200, -1, drip{req.Context()}, test.header...), nil
			})}})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			defer cancel()
			req, err := http.NewRequestWithContext(ctx, test.method, "https://api.test/", nil)
			if err != nil {
				t.Fatal(err)
			}
			start := time.Now()
			resp, err := c.Do(req)
			if took := time.Since(start); took > test.within || attempts > 4 {
				t.Errorf("%s: %d attempts in %v", name, attempts, took)
			}
			if (err == nil) != (test.reads > 0) {
				t.Errorf("%s: %v", name, err)
			}
			if err == nil {
				n, err := io.Copy(io.Discard, resp.Body)
				if took := time.Since(start); took != test.reads || !errors.Is(err, context.DeadlineExceeded) || n < 50 {
					t.Errorf("%s: read %d bytes in %v, %v", name, n, took, err)
				}
				resp.Body.Close()
			}
			count.Cases++
		})
	}
	reliability.Report(t, count)
}

// TestARetryAfterOfYearsStopsNothingElse: it ends the call at once, is remembered
// for its operation, and pauses the host for no more than MaxRetryAfter.
func TestARetryAfterOfYearsStopsNothingElse(t *testing.T) {
	count := reliability.Result{Class: "Retry-After of years", How: "seconds, dates and milliseconds, as large as can be written"}
	for _, header := range [][2]string{
		{"Retry-After", "315360000"}, {"Retry-After", "9223372036"}, {"Retry-After", "9223372036854775807"}, {"Retry-After", "99999999999999999999999"},
		{"Retry-After", "Fri, 31 Dec 9999 23:59:59 GMT"}, {"retry-after-ms", "9223372036854775807"}, {"retry-after-ms", "1e300"},
	} {
		atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
			d.api.ScriptFor(oncehttptest.ByBody("A"), oncehttptest.Status(503, header[0], header[1]))
			start := time.Now()
			d.charge(t.Context(), "A")
			if w := d.charge(t.Context(), "B"); w.Outcome != oncehttp.Succeeded || time.Since(start) > 3*time.Minute {
				t.Errorf("%v: another order was told %v after %v", header, w.Outcome, time.Since(start))
			}
			d.wantEffects(d.api.EffectsByBody()[`{"order":"A"}`] + 1)
			count.Cases++
		})
	}
	reliability.Report(t, count)
}

func TestRedirectsEnd(t *testing.T) {
	for name, test := range map[string]struct {
		status   int
		location func(n int) string
		most     int // requests
	}{
		"307 to itself":            {307, func(int) string { return "/" }, 10},
		"307 to ever new ones":     {307, func(n int) string { return "/" + strconv.Itoa(n) }, 10},
		"308 longer and longer":    {308, func(n int) string { return "/" + strings.Repeat("x", 1<<min(n, 20)) }, 10},
		"303 to itself":            {303, func(int) string { return "/" }, 11},
		"303 to ever new ones":     {303, func(n int) string { return "/" + strconv.Itoa(n) }, 11},
		"303 to a huge place":      {303, func(int) string { return "/" + strings.Repeat("x", 1<<20) }, 11},
		"307 to a huge place":      {307, func(int) string { return "https://elsewhere.test/" + strings.Repeat("x", 1<<20) }, 1},
		"302 to itself":            {302, func(int) string { return "/" }, 1},
		"307 to what is no URL":    {307, func(int) string { return "https://[::1" }, 1},
		"303 to what is no URL":    {303, func(int) string { return "https://[::1" }, 1},
		"303 to a strange scheme":  {303, func(int) string { return "gopher://x/" }, 10},
		"307 from origin to other": {307, func(n int) string { return "https://h" + strconv.Itoa(n) + ".test/" }, 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			n := 0
			var policy func(*http.Request, []*http.Request) error // nil: at most 10
			if test.status >= 307 {
				policy = func(*http.Request, []*http.Request) error { return nil }
			}
			c, err := oncehttp.New(oncehttptest.NewStore(), &oncehttp.Options{HTTPClient: &http.Client{CheckRedirect: policy, Transport: tripFunc(func(req *http.Request) (*http.Response, error) {
				n++
				if n > 1 && test.status == 303 && (req.Method != http.MethodGet || req.Header.Get("Idempotency-Key") != "") {
					t.Errorf("%s: request %d is a %s with key %q", name, n, req.Method, req.Header.Get("Idempotency-Key"))
				}
				return replyOf(req, test.status, 0, strings.NewReader(""), "Location", test.location(n)), nil
			})}})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			resp, err := c.Post("https://api.test/start", "text/plain", strings.NewReader("x"))
			if err == nil {
				resp.Body.Close()
			}
			if n > test.most {
				t.Errorf("%s: %d requests, want no more than %d; %v", name, n, test.most, err)
			}
			if op, ok := errors.AsType[*oncehttp.OperationError](err); ok && test.status == 303 && op.Outcome != oncehttp.Succeeded {
				t.Errorf("%s: told %v, but a 303 is an answer", name, op.Outcome)
			}
		})
	}
	reliability.Report(t, reliability.Result{Class: "endless redirects", How: "303, 307, 308 chains, huge and broken places", Cases: 12})
}

// TestAnswersThatAreNoneEnd lets a server write what it likes, on a socket.
func TestAnswersThatAreNoneEnd(t *testing.T) {
	manyHeaders := "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n" + strings.Repeat("X: value\r\n", 100_000) + "\r\nok"
	count := reliability.Result{Class: "answers beyond belief", How: "endless header, status line, 1xx; 100,000 headers; rubbish; on sockets"}
	for name, test := range map[string]struct {
		begin, forever string
		answered       bool
	}{
		"endless header":         {"HTTP/1.1 200 OK\r\n", "X-Header: value\r\n", false},
		"endless header line":    {"HTTP/1.1 200 OK\r\nX: ", strings.Repeat("x", 1000), false},
		"endless status line":    {"HTTP/1.1 200 ", strings.Repeat("O", 1000), false},
		"endless 1xx":            {"", "HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n", false},
		"endless 100 Continue":   {"", "HTTP/1.1 100 Continue\r\n\r\n", false},
		"no HTTP":                {strings.Repeat("rubbish ", 100), "", false},
		"a version to come":      {"HTTP/9.9 200 OK\r\n\r\n", "", true},
		"a negative length":      {"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "", false},
		"two lengths":            {"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nok", "", false},
		"an impossible length":   {"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n", "", false},
		"a length never reached": {"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nshort", "", false},
		"a chunk never reached":  {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffff\r\nshort", "", false},
		"endless chunk header":   {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "0", false},
		"a hundred thousand":     {manyHeaders, "", true},
	} {
		var served sync.WaitGroup
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		served.Go(func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				served.Go(func() {
					defer conn.Close()
					if _, err := conn.Read(make([]byte, 4096)); err != nil {
						return
					}
					_, err := io.WriteString(conn, test.begin)
					for err == nil && test.forever != "" {
						_, err = io.WriteString(conn, test.forever)
					}
				})
			}
		})
		transport := &http.Transport{DisableKeepAlives: true, MaxResponseHeaderBytes: int64(heavy(1<<20, 0))}
		c, err := oncehttp.New(oncehttptest.NewStore(), &oncehttp.Options{
			HTTPClient: &http.Client{Transport: transport}, MaxAttempts: 2, BackoffBase: 1, BackoffCap: 1, AttemptTimeout: 20 * time.Second,
		})
		if err != nil {
			t.Fatal(err)
		}
		watch := watchHeap()
		ctx, op := oncehttp.Start(t.Context(), oncehttp.Op{})
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+l.Addr().String(), strings.NewReader("x"))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := c.Do(req)
		watch.look()
		if err == nil {
			resp.Body.Close()
		}
		want := oncehttp.Unknown
		if test.answered {
			want = oncehttp.Succeeded
		}
		if got := op.Info().Outcome; got != want {
			t.Errorf("%s: told %v, %v, want %v", name, got, err, want)
			count.ToldFalsely++
		}
		if text := fmt.Sprint(err); len(text) > 10_000 {
			t.Errorf("%s: an error of %d bytes", name, len(text))
		}
		if watch.more() > 100<<20 {
			t.Errorf("%s: took %d MiB", name, watch.more()>>20)
		}
		_ = c.Close()
		_ = l.Close()
		transport.CloseIdleConnections()
		served.Wait()
		count.Cases++
	}
	reliability.Report(t, count)
}

// TestAKeyThatIsSentBackTellsNothing: a server that echoes the key, or claims
// replays, changes the outcome of nothing that it did not answer.
func TestAKeyThatIsSentBackTellsNothing(t *testing.T) {
	atDesk(t, oncehttp.Options{MaxAttempts: 2}, func(t *testing.T, d *desk) {
		d.api.Script(oncehttptest.Status(503, "Idempotency-Key", "key-B"), oncehttptest.DropRequest())
		w := d.charge(t.Context(), "A")
		d.wantOutcome(w, oncehttp.Unknown)
		if w.Key != "key-A" {
			t.Errorf("told of %s", w.Key)
		}
		d.wantOutcome(d.charge(t.Context(), "B"), oncehttp.Succeeded)
		d.wantEffects(1)
	})
}

// TestKeysByTheMillionAreForgotten: what an operation leaves in the memory of the
// client is nothing; in a store in memory, its outcome, until it is purged.
func TestKeysByTheMillionAreForgotten(t *testing.T) {
	count := reliability.Result{Class: "very many keys", How: "operations with fresh keys and handles, 64 at once, file and memory; what is kept is measured"}
	ok := tripFunc(func(req *http.Request) (*http.Response, error) {
		return replyOf(req, 200, 2, strings.NewReader("ok")), nil
	})
	for _, test := range []struct {
		name   string
		store  func() oncehttp.KeyStore
		n      int
		perKey int64 // bytes
	}{
		{"memory", func() oncehttp.KeyStore { return oncehttp.NewMemoryStore() }, heavy(3_000, 150_000), 1500},
		{"bbolt", func() oncehttp.KeyStore {
			dir := (&damageJudge{t: t}).dir()
			t.Cleanup(func() { os.RemoveAll(dir) })
			s, err := oncehttp.OpenBolt(filepath.Join(dir, "once.db"))
			if err != nil {
				t.Fatal(err)
			}
			return s
		}, heavy(3_000, 40_000), 50},
	} {
		store := test.store()
		c, err := oncehttp.New(store, &oncehttp.Options{HTTPClient: &http.Client{Transport: ok}})
		if err != nil {
			t.Fatal(err)
		}
		charge := func(n int) {
			var workers sync.WaitGroup
			var left atomic.Int64
			left.Store(int64(n))
			for range 64 {
				workers.Go(func() {
					for left.Add(-1) >= 0 {
						ctx, op := oncehttp.Start(context.Background(), oncehttp.Op{})
						req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://api.test/", strings.NewReader("x"))
						if err == nil {
							var resp *http.Response
							if resp, err = c.Do(req); err == nil {
								resp.Body.Close()
								err = op.Ack(ctx)
							}
						}
						if err != nil {
							t.Error(err)
							return
						}
					}
				})
			}
			workers.Wait()
		}
		charge(1000) // what is there once is there
		watch := watchHeap()
		charge(test.n)
		if kept := watch.kept(); kept > test.perKey*int64(test.n)+200_000 {
			t.Errorf("%s: %d operations left %d bytes, %d each", test.name, test.n, kept, kept/int64(test.n))
		} else {
			t.Logf("%s: %d operations left %d bytes, %d each", test.name, test.n, kept, kept/int64(test.n))
		}
		if err := errors.Join(c.Close(), store.Close()); err != nil {
			t.Error(err)
		}
		count.Cases += test.n
	}
	reliability.Report(t, count)
}

// TestPurgedKeysLeaveNothing: outcomes of fresh keys are kept for two windows.
func TestPurgedKeysLeaveNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := oncehttp.NewMemoryStore()
		c, err := oncehttp.New(store, &oncehttp.Options{HTTPClient: &http.Client{Transport: tripFunc(func(req *http.Request) (*http.Response, error) {
			return replyOf(req, 200, 2, strings.NewReader("ok")), nil
		})}})
		if err != nil {
			t.Fatal(err)
		}
		charge := func(n int) (keys []string) {
			for range n {
				resp, err := c.Post("https://api.test/", "text/plain", strings.NewReader("x"))
				if err != nil {
					t.Fatal(err)
				}
				resp.Body.Close()
				info, _ := oncehttp.OperationFrom(resp)
				keys = append(keys, info.Key)
			}
			return keys
		}
		charge(100)
		watch := watchHeap()
		n := heavy(300, 5000)
		keys := charge(n)
		time.Sleep(49 * time.Hour)
		for _, key := range keys[:100] {
			if infos, err := c.Lookup(t.Context(), key); err != nil || len(infos) > 0 {
				t.Fatalf("still there: %+v, %v", infos, err)
			}
		}
		keys = nil
		if kept := watch.kept(); kept > int64(n)*20+1<<20 { // maps do not shrink
			t.Errorf("%d purged operations left %d bytes", n, kept)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
}
