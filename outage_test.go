package oncehttp_test

import (
	"fmt"
	"net/http"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/oncehttp/oncehttp"
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
	l.answer = func(r *http.Request) (*http.Response, error) {
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
	}
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
