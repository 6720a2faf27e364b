package oncehttp_test

import (
	"container/heap"
	"fmt"
	"math"
	"math/rand/v2"
	"path/filepath"
	"testing"
	"time"

	"github.com/oncehttp/oncehttp"
)

// The comparison of backoffs in Marc Brooker's "Exponential Backoff And Jitter",
// AWS Architecture Blog, 2015, after github.com/aws-samples/aws-arch-backoff-simulator:
// clients that all begin at once want to write one row, each once. A write
// succeeds if nobody has written since the client's read; else the client waits
// and reads again. Messages take a normally distributed time.
const (
	occDelay, occDeviation = 10 * time.Millisecond, 2 * time.Millisecond
	occBase, occCap        = 5 * time.Millisecond, 2 * time.Second
)

// An occBackoff returns the wait after failure n, counted from 1. It belongs to
// one client.
type occBackoff func(n int) time.Duration

var occBackoffs = []struct {
	name string
	make func(r *rand.Rand) occBackoff
}{
	{"none", func(*rand.Rand) occBackoff {
		return func(int) time.Duration { return 0 }
	}},
	{"exponential", func(*rand.Rand) occBackoff { return occExponential }},
	{"equal jitter", func(r *rand.Rand) occBackoff {
		return func(n int) time.Duration {
			half := occExponential(n) / 2
			return half + time.Duration(r.Int64N(int64(half)+1))
		}
	}},
	{"decorrelated jitter", func(r *rand.Rand) occBackoff {
		last := occBase
		return func(int) time.Duration {
			last = min(occCap, occBase+time.Duration(r.Int64N(int64(3*last-occBase)+1)))
			return last
		}
	}},
	{"full jitter", func(r *rand.Rand) occBackoff {
		return func(n int) time.Duration { return oncehttp.FullJitter(n, occBase, occCap, r.Int64N) }
	}},
}

func occExponential(n int) time.Duration {
	return time.Duration(min(float64(occCap), math.Ldexp(float64(occBase), n)))
}

// An occEvent is the arrival of a message.
type occEvent struct {
	at     time.Duration
	arrive func(now time.Duration)
}

type occQueue []occEvent

func (q occQueue) Len() int           { return len(q) }
func (q occQueue) Less(i, j int) bool { return q[i].at < q[j].at }
func (q occQueue) Swap(i, j int)      { q[i], q[j] = q[j], q[i] }
func (q *occQueue) Push(e any)        { *q = append(*q, e.(occEvent)) }
func (q *occQueue) Pop() any {
	e := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return e
}

// occContend returns how many writes were tried until every client had its own,
// and when that was. As in the article, they are the calls.
func occContend(clients int, backoff func(*rand.Rand) occBackoff, r *rand.Rand) (calls int, took time.Duration) {
	var queue occQueue
	version := 0
	send := func(now time.Duration, arrive func(now time.Duration)) {
		delay := math.Abs(float64(occDelay) + r.NormFloat64()*float64(occDeviation))
		heap.Push(&queue, occEvent{now + time.Duration(delay), arrive})
	}
	for range clients {
		wait := backoff(r)
		failures := 0
		var read func(now time.Duration)
		read = func(now time.Duration) {
			send(now, func(now time.Duration) { // at the server
				seen := version
				send(now, func(now time.Duration) { // at the client
					send(now, func(now time.Duration) { // at the server
						calls++
						ok := seen == version
						if ok {
							version++
						}
						send(now, func(now time.Duration) { // at the client
							if !ok {
								failures++
								read(now + wait(failures))
							}
						})
					})
				})
			})
		}
		read(0)
	}
	for len(queue) > 0 {
		e := heap.Pop(&queue).(occEvent)
		took = e.at
		e.arrive(e.at)
	}
	return calls, took
}

// An occResult is the mean of several runs.
type occResult struct{ calls, seconds float64 }

func occMean(clients, runs int) map[string]occResult {
	means := make(map[string]occResult)
	for i, b := range occBackoffs {
		var sum occResult
		for run := range runs {
			calls, took := occContend(clients, b.make, rand.New(rand.NewPCG(uint64(run), uint64(i))))
			sum.calls += float64(calls)
			sum.seconds += took.Seconds()
		}
		means[b.name] = occResult{sum.calls / float64(runs), sum.seconds / float64(runs)}
	}
	return means
}

// TestFullJitterNeedsTheFewestCalls holds what the article says of 100 clients:
// without jitter, exponential backoff needs more than twice the calls and far more
// time; of the jittered ones, equal jitter takes longer for as much work, and
// decorrelated jitter does more work in a little less time. In parentheses, what
// 100 runs of each came to.
func TestFullJitterNeedsTheFewestCalls(t *testing.T) {
	results := occMean(100, 8)
	for name, r := range results {
		t.Logf("%-20s %5.0f calls, %5.2f s", name, r.calls, r.seconds)
	}
	full := results["full jitter"] // (798 calls, 5.1 s)
	for _, tt := range []struct {
		than           string
		calls, seconds float64 // of full jitter, at most, in parts of the other's
	}{
		{"none", .5, math.Inf(1)},        // (0.33, 2.5: whoever never waits is done first)
		{"exponential", .6, .25},         // (0.43, 0.08)
		{"equal jitter", 1.1, .95},       // (0.98, 0.78)
		{"decorrelated jitter", .9, 1.3}, // (0.79, 1.11)
	} {
		other := results[tt.than]
		if c, s := full.calls/other.calls, full.seconds/other.seconds; c > tt.calls || s > tt.seconds {
			t.Errorf("compared with %s, full jitter needs %.2f of the calls and %.2f of the time, want at most %v and %v", tt.than, c, s, tt.calls, tt.seconds)
		}
	}
}

// TestBackoffData writes the means of 100 runs to the directory of -storm.out.
func TestBackoffData(t *testing.T) {
	if *stormOut == "" {
		t.Skip("writes a file to the directory of -storm.out")
	}
	out := newStormFile(t, filepath.Join(*stormOut, "backoff.csv"), "backoff", "clients", "calls", "seconds")
	for clients := 10; clients <= 200; clients += 10 {
		means := occMean(clients, 100)
		for _, b := range occBackoffs {
			out.w.Write([]string{b.name, fmt.Sprint(clients), fmt.Sprintf("%.1f", means[b.name].calls), fmt.Sprintf("%.3f", means[b.name].seconds)})
		}
	}
}
