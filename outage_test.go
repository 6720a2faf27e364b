package oncehttp_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// What a client does to a host that is down, or that can take only so much,
// through Client.Do.

// A load is traffic at a constant rate, and what of it reached the wire: by the
// time since the start, first attempts and retries.
type load struct {
	client *oncehttp.Client
	line   *line
	start  time.Time

	mu      sync.Mutex // guards the following
	seen    map[string]bool
	first   []time.Duration
	retries []time.Duration
	good    []time.Duration // begin of requests that came to 200
	bad     []time.Duration // begin of all others
}

// observe puts a load between a line and what it answers.
func observe(l *line, c *oncehttp.Client, reply func(*http.Request) (*http.Response, error)) *load {
	d := &load{client: c, line: l, start: time.Now(), seen: make(map[string]bool)}
	l.set(func(r *http.Request) (*http.Response, error) {
		at := time.Since(d.start)
		d.mu.Lock()
		if d.seen[r.URL.Path] {
			d.retries = append(d.retries, at)
		} else {
			d.seen[r.URL.Path] = true
			d.first = append(d.first, at)
		}
		d.mu.Unlock()
		return reply(r)
	})
	return d
}

// send makes n requests, one every 1/rate seconds, and waits until the last one
// has begun. Every methods[i mod len] is a request's.
func (d *load) send(t *testing.T, calls *sync.WaitGroup, n, rate int, methods ...string) {
	begin := time.Now()
	for i := range n {
		time.Sleep(time.Until(begin.Add(time.Duration(i) * time.Second / time.Duration(rate))))
		method := methods[i%len(methods)]
		req := newRequest(t, t.Context(), method, fmt.Sprintf("%s/%s/%d/%d", host, method, begin.UnixNano(), i))
		calls.Go(func() {
			at := time.Since(d.start)
			resp, err := d.client.Do(req)
			d.mu.Lock()
			defer d.mu.Unlock()
			if err == nil && resp.StatusCode == 200 {
				d.good = append(d.good, at)
			} else {
				d.bad = append(d.bad, at)
			}
		})
	}
}

// within counts the times in [from, to).
func within(times []time.Duration, from, to time.Duration) (n int) {
	for _, at := range times {
		if from <= at && at < to {
			n++
		}
	}
	return n
}

// down answers with failures from one time after the load's start to another.
func down(start time.Time, from, to time.Duration) func(*http.Request) (*http.Response, error) {
	return func(*http.Request) (*http.Response, error) {
		if at := time.Since(start); from <= at && at < to {
			return answer(503, ""), nil
		}
		return answer(200, ""), nil
	}
}

func noBreaker() *oncehttp.Options {
	return &oncehttp.Options{Breaker: &oncehttp.Breaker{Disabled: true}}
}

// outageRate is how many requests a second the tests of outages make.
func outageRate() int {
	if testing.Short() {
		return 100
	}
	return 1000
}

// TestRetriesInAnOutageAreATenth: of the first attempts, plus the floor; the floor
// and the tenth are used, no first attempt is refused, and afterwards all is as
// before.
func TestRetriesInAnOutageAreATenth(t *testing.T) {
	const from, to, end = 15 * time.Second, 75 * time.Second, 90 * time.Second
	for name, methods := range map[string][]string{"GET": {"GET"}, "POST": {"POST"}, "both": {"GET", "POST"}} {
		t.Run(name, func(t *testing.T) {
			if testing.Short() && len(methods) == 1 {
				t.Skip("both are enough")
			}
			onLine(t, noBreaker(), nil, func(t *testing.T, c *oncehttp.Client, l *line) {
				d := observe(l, c, down(time.Now(), from, to))
				n := outageRate() * int(end/time.Second)
				var calls sync.WaitGroup
				d.send(t, &calls, n, outageRate(), methods...)
				calls.Wait()

				if got := within(d.first, 0, end); got != n {
					t.Errorf("%d of %d first attempts were on the wire", got, n)
				}
				retries := within(d.retries, from, to)
				most := within(d.first, from-10*time.Second, to)/10 + 10*60 + 20
				least := within(d.first, from, to)/10 + 10*55 // the last retries are on their way when it ends
				if retries > most || retries < least {
					t.Errorf("%d retries in the outage, want %d to %d", retries, least, most)
				}
				if n := within(d.retries, 0, from) + within(d.retries, to+5*time.Second, end+time.Minute); n != 0 {
					t.Errorf("%d retries while there was nothing to retry", n)
				}
				if n := within(d.bad, 0, from-5*time.Second) + within(d.bad, to, end); n != 0 || within(d.good, to, end) != outageRate()*int((end-to)/time.Second) {
					t.Errorf("%d requests failed while the host was up", n)
				}
			})
		})
	}
}

// TestLittleTrafficHasAllItsRetries, one request a minute.
func TestLittleTrafficHasAllItsRetries(t *testing.T) {
	reply := func(*http.Request) (*http.Response, error) { return answer(503, ""), nil }
	onLine(t, noBreaker(), nil, func(t *testing.T, c *oncehttp.Client, l *line) {
		d := observe(l, c, reply)
		var calls sync.WaitGroup
		for range 20 {
			d.send(t, &calls, 1, 1, "GET")
			d.send(t, &calls, 1, 1, "POST")
			time.Sleep(time.Minute)
		}
		calls.Wait()
		if len(d.first) != 40 || len(d.retries) != 3*40 {
			t.Errorf("%d first attempts and %d retries, want 3 for each", len(d.first), len(d.retries))
		}
	})
}

// What Resume sends of an operation is a first attempt once in a process: the passes
// after that retry, and must not multiply the load of a server that fails.
func TestLaterPassesDrawOnTheBudget(t *testing.T) {
	const burst = 2
	opts := oncehttp.Options{MaxAttempts: 1, Budget: &oncehttp.Budget{Ratio: -1, MinPerSecond: 1e-9, Burst: burst}}
	inBubble(t, opts, func(t *testing.T, b *bench) {
		b.pending("k", "1")
		time.Sleep(time.Second)
		before := b.wire()
		for pass := 1; pass <= 3*burst; pass++ {
			b.server.Script(oncehttptest.DropResponse())
			_, sum := b.resume()
			if sent, want := b.wire()-before, min(pass, 1+burst); sent != want || sum.Pending != 1 {
				t.Errorf("pass %d: %d attempts in all, want %d; %+v", pass, sent, want, sum)
			}
			time.Sleep(25 * time.Minute) // longer than anything rests
		}
	})
}

// TestHostsDoNotShareABudget: one that is hammered leaves a thousand others theirs.
func TestHostsDoNotShareABudget(t *testing.T) {
	reply := func(*http.Request) (*http.Response, error) { return answer(503, ""), nil }
	onLine(t, noBreaker(), reply, func(t *testing.T, c *oncehttp.Client, l *line) {
		start := time.Now()
		const hosts = 1000
		var calls sync.WaitGroup
		for i := range 500 {
			calls.Go(func() { c.Do(newRequest(t, t.Context(), kinds[i%2], "https://hammered.example/")) })
		}
		for i := range hosts {
			calls.Go(func() { c.Do(newRequest(t, t.Context(), kinds[i%2], fmt.Sprintf("https://%d.example/other", i))) })
		}
		calls.Wait()
		if got := len(l.times("/other", start)); got != 4*hosts {
			t.Errorf("%d requests to %d hosts, want 4 to each", got, hosts)
		}
		if got := len(l.times("hammered.example", start)); got > 500+500/10+20+10*int(time.Since(start)/time.Second+1) {
			t.Errorf("%d requests to the one that is hammered", got)
		}
	})
}

// TestAMillionHostsTakeLittleMemory, through the client.
func TestAMillionHostsTakeLittleMemory(t *testing.T) {
	hosts, most := 1_000_000, uint64(64<<20)
	if testing.Short() {
		hosts, most = 25_000, 20<<20
	}
	c, err := oncehttp.New(oncehttp.NewMemoryStore(), &oncehttp.Options{HTTPClient: &http.Client{Transport: instant}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	for i := range hosts {
		resp, err := c.Get(fmt.Sprintf("https://%d.example/", i))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
	}
	if grown := heap() - before; int64(grown) > int64(most) {
		t.Errorf("the heap grew by %d MiB for %d hosts", grown>>20, hosts)
	}
	runtime.KeepAlive(c)
}

// TestADeadHostIsLeftAlone: fewer than 2 % of the first attempts in an outage of a
// minute reach the host, also where it was well until then, and soon after it is
// found alive.
func TestADeadHostIsLeftAlone(t *testing.T) {
	const openFor = 30 * time.Second
	for _, rate := range slices.Compact([]int{100, outageRate()}) {
		for _, well := range []time.Duration{0, 15 * time.Second} {
			t.Run(fmt.Sprintf("%d a second, well for %v", rate, well), func(t *testing.T) {
				onLine(t, &oncehttp.Options{}, nil, func(t *testing.T, c *oncehttp.Client, l *line) {
					from, to, end := well, well+time.Minute, well+105*time.Second
					d := observe(l, c, down(time.Now(), from, to))
					var calls sync.WaitGroup
					d.send(t, &calls, rate*int(end/time.Second), rate, kinds...)
					calls.Wait()

					if n := within(d.first, from, to); n >= rate*60*2/100 || n < 1 {
						t.Errorf("%d of %d first attempts reached the dead host", n, rate*60)
					}
					if n := len(d.first) + len(d.bad); n < rate*int(end/time.Second) {
						t.Errorf("%d of %d requests are accounted for", n, rate*int(end/time.Second))
					}
					back := to + openFor + 2*time.Second/time.Duration(rate)
					if n := within(d.bad, back, end); n != 0 || within(d.good, back, end) == 0 {
						t.Errorf("%d requests failed although the host had been up for %v", n, back-to)
					}
				})
			})
		}
	}
}

// trip makes the breaker of the host open, by requests that fail.
func trip(t *testing.T, c *oncehttp.Client, l *line) {
	t.Helper()
	before := l.set(func(*http.Request) (*http.Response, error) { return nil, io.ErrUnexpectedEOF })
	for i := range 20 { // or one less, if another has ended
		req := newRequest(t, oncehttp.WithoutKey(t.Context()), http.MethodPost, fmt.Sprint(host, "/trip/", i))
		if _, err := c.Do(req); err == nil {
			t.Fatal("it did not fail")
		}
	}
	l.set(before)
	wantBreaker(t, c, "open")
}

func wantBreaker(t *testing.T, c *oncehttp.Client, want string) {
	t.Helper()
	s, err := c.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range s.Hosts {
		if h.Origin == host && h.Breaker != want {
			t.Errorf("the breaker is %s, want %s", h.Breaker, want)
		}
	}
}

// TestNoProbeWedgesTheBreaker: whatever becomes of it, the next request closes the
// breaker at once, or after OpenFor if the probe has not come back.
func TestNoProbeWedgesTheBreaker(t *testing.T) {
	panics := func(*http.Request) (*http.Response, error) { panic("transport") }
	hangs := func(r *http.Request) (*http.Response, error) { // and does not care
		time.Sleep(time.Hour)
		return nil, io.ErrUnexpectedEOF
	}
	waits := func(r *http.Request) (*http.Response, error) {
		<-r.Context().Done()
		return nil, context.Cause(r.Context())
	}
	cancelled := func(t *testing.T) context.Context {
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		return ctx
	}
	hooked := func(tr *oncehttp.Trace) func(*testing.T) context.Context {
		return func(t *testing.T) context.Context { return oncehttp.WithTrace(t.Context(), tr) }
	}
	goexit := func(*http.Request) (*http.Response, error) { runtime.Goexit(); return nil, nil }
	endless := func(header ...string) func(*http.Request) (*http.Response, error) {
		return func(*http.Request) (*http.Response, error) {
			resp := answer(200, "", header...)
			resp.Body, _ = io.Pipe()
			resp.ContentLength = -1
			return resp, nil
		}
	}
	for _, tt := range []struct {
		name   string
		answer func(*http.Request) (*http.Response, error) // nil: 200
		ctx    func(*testing.T) context.Context            // nil: the test's
		header []string
		begin  error // of the store
		lost   bool  // the probe has not come back
		posts  bool  // operations only
	}{
		{name: "cancelled", answer: waits, ctx: cancelled},
		{name: "cancelled, and the transport does not care", answer: hangs, ctx: cancelled, lost: true},
		{name: "429", answer: func(*http.Request) (*http.Response, error) { return answer(429, ""), nil }},
		{name: "transport panics", answer: panics},
		{name: "transport ends the goroutine", answer: goexit},
		{name: "hook panics before", ctx: hooked(&oncehttp.Trace{AttemptStart: func(oncehttp.AttemptInfo) { panic("hook") }})},
		{name: "hook panics after", ctx: hooked(&oncehttp.Trace{AttemptDone: func(oncehttp.AttemptInfo) { panic("hook") }})},
		{name: "hook panics at Begin", ctx: hooked(&oncehttp.Trace{Begun: func(oncehttp.Info) { panic("hook") }}), posts: true},
		{name: "body is abandoned", answer: endless("Content-Type", "text/event-stream")},
		{name: "store fails", begin: errors.New("disk full"), posts: true},
		{name: "key is reused", header: []string{"Idempotency-Key", "taken"}, posts: true},
		{name: "key is invalid", header: []string{"Idempotency-Key", "a b"}, posts: true},
	} {
		for _, method := range kinds {
			if tt.posts && method != http.MethodPost {
				continue
			}
			t.Run(tt.name+"/"+method, func(t *testing.T) {
				l := &line{answer: func(*http.Request) (*http.Response, error) { return answer(200, "done"), nil }}
				opts := oncehttp.Options{MaxAttempts: 1, AttemptTimeout: -1, HTTPClient: &http.Client{Transport: l}}
				inBubble(t, opts, func(t *testing.T, b *bench) {
					if _, err := b.charge(t.Context(), "taken", "1"); err != nil {
						t.Fatal(err)
					}
					trip(t, b.client, l)
					time.Sleep(30 * time.Second)
					wantBreaker(t, b.client, "half-open")

					good := l.set(tt.answer)
					if tt.answer == nil {
						l.set(good)
					}
					ctx := t.Context()
					if tt.ctx != nil {
						ctx = tt.ctx(t)
					}
					if tt.begin != nil {
						b.store.LazyStore.(*oncehttptest.Store).Fail("Begin", 1, tt.begin)
					}
					req := newRequest(t, ctx, method, host+"/probe")
					for h := tt.header; len(h) > 0; h = h[2:] {
						req.Header.Set(h[0], h[1])
					}
					var probe sync.WaitGroup
					probe.Go(func() {
						defer func() { recover() }()
						b.client.Do(req)
					})
					time.Sleep(2 * time.Second)
					l.set(good)
					if tt.lost {
						if _, err := b.client.Get(host + "/early"); !errors.Is(err, oncehttp.ErrCircuitOpen) {
							t.Errorf("while the probe is out: %v, want ErrCircuitOpen", err)
						}
						time.Sleep(28 * time.Second)
					}
					resp, err := b.client.Do(newRequest(t, t.Context(), method, host+"/next"))
					if err != nil || resp.StatusCode != 200 {
						t.Errorf("the next request: %v, %v", resp, err)
					}
					wantBreaker(t, b.client, "closed")
					probe.Wait()
					wantBreaker(t, b.client, "closed")
				})
			})
		}
	}
}

// TestAPanickingBreakerHookDoesNotWedgeTheBreaker, at whichever change.
func TestAPanickingBreakerHookDoesNotWedgeTheBreaker(t *testing.T) {
	for _, at := range []string{"open", "half-open", "closed"} {
		for _, method := range kinds {
			t.Run(at+"/"+method, func(t *testing.T) {
				opts := &oncehttp.Options{MaxAttempts: 1, Trace: &oncehttp.Trace{Breaker: func(i oncehttp.BreakerInfo) {
					if i.To == at {
						panic("hook")
					}
				}}}
				var sick atomic.Bool
				reply := func(*http.Request) (*http.Response, error) {
					if sick.Load() {
						return answer(503, ""), nil
					}
					return answer(200, ""), nil
				}
				onLine(t, opts, reply, func(t *testing.T, c *oncehttp.Client, l *line) {
					send := func() (err error) {
						defer func() {
							if v := recover(); v != nil {
								err = errors.New("panicked")
							}
						}()
						_, err = c.Do(newRequest(t, t.Context(), method, host+"/"))
						return err
					}
					sick.Store(true)
					for range 20 {
						_ = send()
					}
					wantBreaker(t, c, "open")
					sick.Store(false)
					time.Sleep(30 * time.Second)
					_ = send()                   // may panic, and be lost
					time.Sleep(30 * time.Second) // and that is all that it costs
					_ = send()
					if err := send(); err != nil {
						t.Errorf("told %v", err)
					}
					wantBreaker(t, c, "closed")
				})
			})
		}
	}
}

// TestBreakerHooksMayUseTheClient, for the same host too.
func TestBreakerHooksMayUseTheClient(t *testing.T) {
	var c *oncehttp.Client
	var told []string
	opts := &oncehttp.Options{MaxAttempts: 1, Trace: &oncehttp.Trace{Breaker: func(i oncehttp.BreakerInfo) {
		_, err := c.Stats(context.Background())
		same, errSame := c.Get(host + "/from-hook")
		if same != nil {
			errSame = errors.New(same.Status)
		}
		if _, other := c.Post("https://other.example/", "text/plain", nil); err != nil || errors.Is(other, oncehttp.ErrCircuitOpen) {
			told = append(told, fmt.Sprint(err, other))
		}
		told = append(told, fmt.Sprintf("%s to %s: %v", i.From, i.To, errors.Is(errSame, oncehttp.ErrCircuitOpen)))
	}}}
	onLine(t, opts, func(*http.Request) (*http.Response, error) { return answer(200, ""), nil }, func(t *testing.T, client *oncehttp.Client, l *line) {
		c = client
		trip(t, c, l)
		time.Sleep(30 * time.Second)
		if _, err := c.Post(host+"/probe", "text/plain", nil); err != nil {
			t.Error(err)
		}
		wantBreaker(t, c, "closed")
		// In a hook of half-open, its own probe is out.
		if want := "[closed to open: true open to half-open: true half-open to closed: false]"; fmt.Sprint(told) != want {
			t.Errorf("told %v, want %s", told, want)
		}
	})
}

// TestAHalfOpenBreakerLetsOneThrough, of however many that come.
func TestAHalfOpenBreakerLetsOneThrough(t *testing.T) {
	for _, well := range []bool{true, false} {
		onLine(t, &oncehttp.Options{}, nil, func(t *testing.T, c *oncehttp.Client, l *line) {
			trip(t, c, l)
			time.Sleep(30 * time.Second)
			l.set(func(*http.Request) (*http.Response, error) {
				time.Sleep(time.Second)
				if !well {
					return answer(503, ""), nil
				}
				return answer(200, ""), nil
			})
			start := time.Now()
			var calls sync.WaitGroup
			var refused atomic.Int32
			for i := range 200 {
				calls.Go(func() {
					_, err := c.Do(newRequest(t, t.Context(), kinds[i%2], host+"/crowd"))
					if open, ok := errors.AsType[*oncehttp.CircuitOpenError](err); ok && open.Until.Equal(start.Add(30*time.Second)) {
						refused.Add(1)
					}
				})
			}
			calls.Wait()
			if n := len(l.times("/crowd", start)); n != 1 || refused.Load() != 199 {
				t.Errorf("%d probes, %d refused", n, refused.Load())
			}
			if s, err := c.Stats(t.Context()); err != nil || s.Pending != 0 || s.Unknown > 1 {
				t.Errorf("those who were refused left records: %+v, %v", s.Counts, err)
			}
			wantBreaker(t, c, map[bool]string{true: "closed", false: "open"}[well])
		})
	}
}

// TestNoRetryIsWaitedForThatMeetsAnOpenBreaker: the answer is there at once.
func TestNoRetryIsWaitedForThatMeetsAnOpenBreaker(t *testing.T) {
	for _, method := range kinds {
		slow := func(*http.Request) (*http.Response, error) {
			time.Sleep(time.Second)
			return answer(503, "busy"), nil
		}
		onLine(t, &oncehttp.Options{}, slow, func(t *testing.T, c *oncehttp.Client, l *line) {
			var call sync.WaitGroup
			call.Go(func() {
				w := converse(t, t.Context(), c, method)
				if w.took != time.Second || w.status != 503 || w.body != "busy" || w.err != nil {
					t.Errorf("told %d %q, %v after %v", w.status, w.body, w.err, w.took)
				}
			})
			synctest.Wait()
			trip(t, c, l)
			call.Wait()
		})
	}
}

// TestLateResultsDoNotReopenTheBreaker: what failed slowly says nothing of a host
// that has recovered.
func TestLateResultsDoNotReopenTheBreaker(t *testing.T) {
	onLine(t, &oncehttp.Options{MaxAttempts: 1, AttemptTimeout: -1}, nil, func(t *testing.T, c *oncehttp.Client, l *line) {
		reply := func(r *http.Request) (*http.Response, error) {
			if r.URL.Path == "/slow" {
				time.Sleep(time.Minute)
				return nil, io.ErrUnexpectedEOF
			}
			return answer(200, ""), nil
		}
		l.set(reply)
		var calls sync.WaitGroup
		for i := range 40 {
			calls.Go(func() { c.Do(newRequest(t, t.Context(), kinds[i%2], host+"/slow")) })
		}
		synctest.Wait()
		trip(t, c, l)
		time.Sleep(30 * time.Second)
		if _, err := c.Get(host + "/probe"); err != nil {
			t.Fatal(err)
		}
		calls.Wait()
		wantBreaker(t, c, "closed")
		if _, err := c.Get(host + "/after"); err != nil {
			t.Error(err)
		}
	})
}

// TestAPassAgainstADeadHostIsAFewProbes: what it leaves pending is sent when the
// host is back.
func TestAPassAgainstADeadHostIsAFewProbes(t *testing.T) {
	const n = 200
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		stall := oncehttptest.Stall(-1)
		b.server.FaultFunc(func(oncehttptest.Attempt) oncehttptest.Fault { return stall })
		crash := func() {
			var calls sync.WaitGroup
			for i := range n {
				calls.Go(func() { b.charge(t.Context(), fmt.Sprint("k", i), fmt.Sprint(i)) })
			}
			synctest.Wait()
			b.restart()
			calls.Wait()
		}
		crash()
		b.server.FaultFunc(func(oncehttptest.Attempt) oncehttptest.Fault { return oncehttptest.Status(503) })
		before := b.wire()
		_, sum := b.resume()
		// 20 open the breaker; the other workers' attempts are on the wire by then.
		if wire := b.wire() - before; wire < 20 || wire > 28 || sum.Pending != n || sum.Unknown+sum.Failed != 0 {
			t.Errorf("%d requests, %+v", wire, sum)
		}
		for range 10 {
			before = b.wire()
			time.Sleep(31 * time.Second)
			if _, sum := b.resume(); b.wire()-before != 1 || sum.Pending != n {
				t.Errorf("a later pass: %d requests, %+v", b.wire()-before, sum)
			}
		}
		b.server.FaultFunc(nil)
		time.Sleep(15 * time.Minute)
		settled, orders := 0, []string{}
		for range 3 { // what met the probe of another worker is left for the next pass
			o, _ := b.resume()
			settled, orders = settled+len(o), append(orders, o...)
			time.Sleep(2 * time.Second)
		}
		if settled != n {
			t.Errorf("%d of %d operations were settled", settled, n)
		}
		b.wantEffects(orders...)
	})
}

// A meter is a server's own token bucket: rate requests a second, so many at once.
// It answers 429 to what comes faster.
type meter struct {
	rate, burst float64

	mu      sync.Mutex // guards the following
	tokens  float64    // as of the last request
	last    time.Time
	refused int
}

// a time that is rounded to the nanosecond may be this early, in tokens.
const rounding = 1e-6

func (m *meter) admits() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	if m.last.IsZero() {
		m.tokens = m.burst
	}
	m.tokens = min(m.burst, m.tokens+m.rate*now.Sub(m.last).Seconds())
	if m.last = now; m.tokens < 1-rounding {
		m.refused++
		return false
	}
	m.tokens--
	return true
}

// metered is a client that knows the limit of the server: 100 requests a second.
func metered(t *testing.T, opts oncehttp.Options, reply func(*http.Request) (*http.Response, error), test func(t *testing.T, c *oncehttp.Client, l *line)) {
	t.Helper()
	m := &meter{rate: 100, burst: 100}
	opts.Providers = []oncehttp.Provider{{Name: "metered", Hosts: []string{"api.example.com"}, RateLimit: 100}}
	onLine(t, &opts, func(r *http.Request) (*http.Response, error) {
		if !m.admits() {
			return answer(429, "slow down"), nil
		}
		return reply(r)
	}, func(t *testing.T, c *oncehttp.Client, l *line) {
		test(t, c, l)
		if m.refused > 0 {
			t.Errorf("the server refused %d of %d requests", m.refused, len(l.sent))
		}
	})
}

func fine(*http.Request) (*http.Response, error) { return answer(200, ""), nil }

// TestNoRequestIsTooMany: 200 callers at once, again and again, never meet the
// limit of a server that the client knows; and they use it to the full.
func TestNoRequestIsTooMany(t *testing.T) {
	const callers, each = 200, 5
	busy := func(path string, header ...string) func(*http.Request) (*http.Response, error) {
		return once(func(r *http.Request) *http.Response {
			if strings.HasSuffix(r.URL.Path, path) {
				return answer(503, "", header...)
			}
			return answer(200, "")
		})
	}
	for _, tt := range []struct {
		name  string
		reply func(*http.Request) (*http.Response, error)
		wire  int           // requests, in all
		more  time.Duration // than they take at the server's rate
	}{
		{"fine", fine, callers * each, 0},
		{"retries", busy("/0"), callers * (each + 1), time.Second},
		{"pauses", busy("50/0", "Retry-After", "3"), callers*each + 2, 9 * time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			opts := oncehttp.Options{Budget: &oncehttp.Budget{Disabled: true}, Breaker: &oncehttp.Breaker{Disabled: true}}
			metered(t, opts, tt.reply, func(t *testing.T, c *oncehttp.Client, l *line) {
				start := time.Now()
				var calls sync.WaitGroup
				for i := range callers {
					calls.Go(func() {
						for j := range each {
							resp, err := c.Do(newRequest(t, t.Context(), kinds[i%2], fmt.Sprintf("%s/%d/%d", host, i, j)))
							if err != nil || resp.StatusCode != 200 {
								t.Errorf("%v, %v", resp, err)
							}
						}
					})
				}
				calls.Wait()
				if n := len(l.sent); n != tt.wire {
					t.Errorf("%d requests, want %d", n, tt.wire)
				}
				least := time.Duration(tt.wire-100)*time.Second/100 - time.Microsecond
				if took := time.Since(start); took < least || took > least+tt.more+time.Millisecond {
					t.Errorf("%d requests took %v, want %v and up to %v more", tt.wire, took, least, tt.more)
				}
			})
		})
	}
}

// queue begins n requests, one after the other at the same time, and returns when
// each of them was on the wire.
func queue(t *testing.T, calls *sync.WaitGroup, c *oncehttp.Client, l *line, n int, ctx func(i int) context.Context) (at func() map[string]time.Duration) {
	start := time.Now()
	for i := range n {
		req := newRequest(t, ctx(i), kinds[i%2], fmt.Sprint(host, "/", i))
		calls.Go(func() { c.Do(req) })
		synctest.Wait()
	}
	return func() map[string]time.Duration {
		l.mu.Lock()
		defer l.mu.Unlock()
		at := make(map[string]time.Duration)
		for _, s := range l.sent {
			at[s.path] = s.at.Sub(start)
		}
		return at
	}
}

// TestTurnsAreInTheOrderOfTheCalls: nobody waits for more than those who came
// before.
func TestTurnsAreInTheOrderOfTheCalls(t *testing.T) {
	metered(t, oncehttp.Options{}, fine, func(t *testing.T, c *oncehttp.Client, l *line) {
		var calls sync.WaitGroup
		at := queue(t, &calls, c, l, 300, func(int) context.Context { return t.Context() })
		calls.Wait()
		got := at()
		for i := range 300 {
			want := time.Duration(max(0, i-99)) * 10 * time.Millisecond
			if d := got[fmt.Sprint("/", i)] - want; d.Abs() > time.Microsecond {
				t.Errorf("request %d was on the wire after %v, want %v", i, want+d, want)
			}
		}
	})
}

// TestAPauseHoldsThoseWhoWaitForTheirTurn: they have others after it, at the same
// rate.
func TestAPauseHoldsThoseWhoWaitForTheirTurn(t *testing.T) {
	reply := func(r *http.Request) (*http.Response, error) {
		if r.URL.Path == "/150" { // its turn is after 510 ms
			return answer(503, "", "Retry-After", "20"), nil
		}
		return answer(200, ""), nil
	}
	metered(t, oncehttp.Options{MaxAttempts: 1}, reply, func(t *testing.T, c *oncehttp.Client, l *line) {
		var calls sync.WaitGroup
		at := queue(t, &calls, c, l, 300, func(int) context.Context { return t.Context() })
		calls.Wait()
		var during, after int
		for path, sent := range at() {
			switch {
			case sent <= 510*time.Millisecond+time.Microsecond:
			case sent < 20510*time.Millisecond:
				during++
				t.Errorf("%s was on the wire after %v", path, sent)
			default:
				after++
			}
		}
		if during+after != 149 {
			t.Errorf("%d waited", during+after)
		}
	})
}

// TestWhoCannotWaitTakesNoTurn: a turn that comes too late is refused at once, and
// the next caller has it.
func TestWhoCannotWaitTakesNoTurn(t *testing.T) {
	metered(t, oncehttp.Options{}, fine, func(t *testing.T, c *oncehttp.Client, l *line) {
		var calls sync.WaitGroup
		at := queue(t, &calls, c, l, 200, func(int) context.Context { return t.Context() }) // the next turn is in 1.01 s
		start := time.Now()
		for i := range 100 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			_, err := c.Do(newRequest(t, ctx, kinds[i%2], host+"/hurried"))
			cancel()
			if took := time.Since(start); took != 0 || !errors.Is(err, oncehttp.ErrWaitTooLong) {
				t.Fatalf("told %v after %v, want ErrWaitTooLong at once", err, took)
			}
			if told, ok := errors.AsType[*oncehttp.OperationError](err); ok && told.Outcome != oncehttp.NotSent {
				t.Errorf("told %v", told)
			}
		}
		if _, err := c.Get(host + "/next"); err != nil {
			t.Fatal(err)
		}
		calls.Wait()
		if d := at()["/next"] - 1010*time.Millisecond; d.Abs() > time.Microsecond {
			t.Errorf("the next had its turn %v later", d)
		}
		if n := len(l.times("/hurried", start)); n != 0 {
			t.Errorf("%d of those that were refused were sent", n)
		}
	})
}

// TestWhoLeavesGivesTheTurnBack, unless somebody behind has a turn that was reckoned
// with it: then nobody's turn changes.
func TestWhoLeavesGivesTheTurnBack(t *testing.T) {
	metered(t, oncehttp.Options{}, fine, func(t *testing.T, c *oncehttp.Client, l *line) {
		contexts := make([]context.Context, 200)
		leave := make([]context.CancelFunc, 200)
		for i := range contexts {
			contexts[i], leave[i] = context.WithCancel(t.Context())
			defer leave[i]()
		}
		var calls sync.WaitGroup
		at := queue(t, &calls, c, l, 200, func(i int) context.Context { return contexts[i] })
		time.Sleep(105 * time.Millisecond)
		for i := 199; i >= 150; i-- { // from behind
			leave[i]()
			synctest.Wait()
		}
		leave[120]() // from the middle
		if _, err := c.Get(host + "/next"); err != nil {
			t.Fatal(err)
		}
		calls.Wait()
		got := at()
		if d := got["/next"] - 510*time.Millisecond; d.Abs() > 10*time.Millisecond+time.Microsecond {
			t.Errorf("the next had its turn after %v, want that of the first who left", 510*time.Millisecond+d)
		}
		for i := range 200 {
			sent, ok := got[fmt.Sprint("/", i)]
			want := time.Duration(max(0, i-99)) * 10 * time.Millisecond
			if left := i == 120 || i >= 150; ok == left || !left && (sent-want).Abs() > time.Microsecond {
				t.Errorf("request %d was on the wire after %v (%v), want %v", i, sent, ok, want)
			}
		}
	})
}

// TestAPassKeepsTheRateLimit, together with the requests of others.
func TestAPassKeepsTheRateLimit(t *testing.T) {
	const n = 300
	m := &meter{rate: 100, burst: 100}
	opts := oncehttp.Options{
		RateLimit: 100, MaxAttempts: 2,
		Budget: &oncehttp.Budget{Disabled: true}, Breaker: &oncehttp.Breaker{Disabled: true},
	}
	inBubble(t, opts, func(t *testing.T, b *bench) {
		b.server.FaultFunc(func(oncehttptest.Attempt) oncehttptest.Fault { return oncehttptest.Stall(-1) })
		var calls sync.WaitGroup
		for i := range n {
			calls.Go(func() { b.charge(t.Context(), fmt.Sprint("k", i), fmt.Sprint(i)) })
		}
		time.Sleep(10 * time.Second)
		b.restart()
		calls.Wait()
		b.server.FaultFunc(func(oncehttptest.Attempt) oncehttptest.Fault {
			if !m.admits() {
				return oncehttptest.Status(429)
			}
			return oncehttptest.Fault{}
		})
		for i := range 100 {
			calls.Go(func() {
				if _, err := b.charge(t.Context(), fmt.Sprint("new", i), fmt.Sprint("new", i)); err != nil {
					t.Error(err)
				}
			})
		}
		start := time.Now()
		orders, sum := b.resume()
		calls.Wait()
		if len(orders) != n || sum.Pending+sum.Failed > 0 || m.refused > 0 {
			t.Errorf("%d of %d operations were settled, %d requests refused: %+v", len(orders), n, m.refused, sum)
		}
		if took := time.Since(start) + time.Microsecond; took < n*time.Second/100 || took > n*time.Second/100+time.Second {
			t.Errorf("%d requests took %v", n+100, took)
		}
	})
}
