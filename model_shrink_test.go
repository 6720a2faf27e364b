package oncehttp_test

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oncehttp/oncehttp/internal/reliability"
)

var (
	modelHistoryFlag   = flag.Uint64("history", 0, "live through the history of this seed only")
	modelScriptFlag    = flag.String("history.script", "", "live through the history in this file only")
	modelHistoriesFlag = flag.Int("history.n", 0, "how many histories to live through; 0 means 20000, 500 with -short")
	modelFromFlag      = flag.Uint64("history.from", 1, "first seed")
	modelAllFlag       = flag.Bool("history.all", false, "go on after a failure, and print how often each occurs")
)

// A modelCoverage counts what happened.
type modelCoverage struct {
	mu   sync.Mutex
	hits map[string]int
}

func newModelCoverage() *modelCoverage { return &modelCoverage{hits: make(map[string]int)} }

func (c *modelCoverage) hit(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hits[what]++
}

// add adds what another one counted, which is not in use any more.
func (c *modelCoverage) add(other *modelCoverage) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for what, hits := range other.hits {
		c.hits[what] += hits
	}
}

// TestHistories lives through random histories and checks the promises of the
// package comment in each. A failure prints its seed and a shrunken script: see
// -history, -history.script and oldFailures.
func TestHistories(t *testing.T) {
	if *modelScriptFlag != "" {
		script, err := os.ReadFile(*modelScriptFlag)
		if err != nil {
			t.Fatal(err)
		}
		h, err := parseModelHistory(string(script))
		if err != nil {
			t.Fatal(err)
		}
		if failure := liveThrough(t, h, newModelCoverage()); failure != "" {
			t.Fatal(failure)
		}
		return
	}
	if *modelHistoryFlag != 0 {
		h := generateHistory(*modelHistoryFlag)
		if failure := liveThrough(t, h, newModelCoverage()); failure != "" {
			reportHistory(t, h, failure)
		}
		return
	}
	n := *modelHistoriesFlag
	if n == 0 {
		n = 20_000
		if testing.Short() {
			n = 500
		}
	}
	total := newModelCoverage()
	kinds := map[string][]uint64{}
	var next atomic.Uint64
	var mu sync.Mutex // guards kinds
	var failed atomic.Bool
	t.Run("workers", func(t *testing.T) {
		for range runtime.GOMAXPROCS(0) {
			t.Run("", func(t *testing.T) {
				t.Parallel()
				cover := newModelCoverage()
				for !failed.Load() {
					i := next.Add(1) - 1
					if i >= uint64(n) {
						break
					}
					h := generateHistory(*modelFromFlag + i)
					failure := liveThrough(t, h, cover)
					if failure == "" {
						continue
					}
					if *modelAllFlag {
						mu.Lock()
						kind := kindOfModelFailure(failure)
						kinds[kind] = append(kinds[kind], h.Seed)
						mu.Unlock()
						continue
					}
					if !failed.Swap(true) {
						reportHistory(t, h, failure)
					}
				}
				total.add(cover)
			})
		}
	})
	for _, kind := range slices.Sorted(maps.Keys(kinds)) {
		t.Errorf("%d times: %s: histories %v", len(kinds[kind]), kind, kinds[kind][:min(6, len(kinds[kind]))])
	}
	if !t.Failed() && !testing.Short() && *modelHistoriesFlag == 0 {
		checkModelCoverage(t, total, n)
	}
	reliability.Report(t, reliability.Result{Class: "histories on fake time, against a model", How: "random calls, crashes, faults, clocks, decisions, hooks", Cases: n})
	if testing.Verbose() {
		for _, what := range slices.Sorted(maps.Keys(total.hits)) {
			fmt.Printf("%8d %s\n", total.hits[what], what)
		}
	}
}

var failureParts = regexp.MustCompile(`<[^>]*>|https?://[^" ]*|operation [^ ]*|[0-9]+`)

// kindOfModelFailure is a failure without what differs between histories.
func kindOfModelFailure(failure string) string {
	promise, rest, ok := strings.Cut(failure, ": after ")
	if !ok {
		return strings.SplitN(failure, "\n", 2)[0]
	}
	_, rest, _ = strings.Cut(rest, ": ")
	rest, _, _ = strings.Cut(rest, "\n")
	rest = failureParts.ReplaceAllString(rest, "…")
	var b strings.Builder
	for _, r := range rest {
		if r == '(' || r == '{' {
			break
		}
		b.WriteRune(r)
	}
	return promise + ": " + b.String()
}

// reportHistory prints a failing history after shrinking it.
func reportHistory(t *testing.T, h *modelHistory, failure string) {
	t.Helper()
	small, why, runs := shrinkHistory(t, h, failure)
	t.Errorf("history %d: %s\nshrunken in %d runs to %d of %d steps, which give\n%s\n\n%s", h.Seed, failure, runs, len(small.Steps), len(h.Steps), why, small)
}

// shrinkHistory drops and simplifies steps as long as the history still breaks the same
// promise in the same way.
func shrinkHistory(t *testing.T, h *modelHistory, failure string) (*modelHistory, string, int) {
	kind := kindOfModelFailure(failure)[:len("promise 1")]
	runs := 0
	begun := time.Now()
	try := func(c *modelHistory) bool {
		if runs++; runs > 400 || time.Since(begun) > 20*time.Second {
			return false
		}
		f := liveThrough(t, c, newModelCoverage())
		if !strings.HasPrefix(f, kind) {
			return false
		}
		h, failure = c, f
		return true
	}
	with := func(steps []modelStep) *modelHistory {
		c := *h
		c.Steps = steps
		return &c
	}
	for again := true; again; {
		again = false
		for n := max(1, len(h.Steps)/2); n >= 1; n /= 2 {
			for i := 0; i+n <= len(h.Steps); {
				if try(with(slices.Delete(slices.Clone(h.Steps), i, i+n))) {
					again = true
				} else {
					i++
				}
			}
		}
		for i := range h.Steps {
			for _, simpler := range simplerSteps(h.Steps[i]) {
				steps := slices.Clone(h.Steps)
				steps[i] = simpler
				if try(with(steps)) {
					again = true
					break
				}
			}
		}
	}
	return h, failure, runs
}

// simplerSteps are the same step with less in it.
func simplerSteps(s modelStep) (all []modelStep) {
	add := func(change func(*modelStep)) {
		c := s
		c.Faults = slices.Clone(s.Faults)
		change(&c)
		all = append(all, c)
	}
	for i, f := range s.Faults {
		if i == len(s.Faults)-1 {
			add(func(c *modelStep) { c.Faults = c.Faults[:i] })
		} else if f != "none" {
			add(func(c *modelStep) { c.Faults[i] = "none" })
		}
	}
	for _, field := range []func(*modelStep) *modelDuration{
		func(c *modelStep) *modelDuration { return &c.Limit }, func(c *modelStep) *modelDuration { return &c.Cancel }, func(c *modelStep) *modelDuration { return &c.Apart },
		func(c *modelStep) *modelDuration { return &c.Ack }, func(c *modelStep) *modelDuration { return &c.End },
	} {
		if *field(&s) != 0 && !(s.Do == "shutdown" || s.Do == "run") {
			add(func(c *modelStep) { *field(c) = 0 })
		}
	}
	if s.Callers > 0 {
		add(func(c *modelStep) { c.Callers = 0 })
	}
	if s.Before != "" {
		add(func(c *modelStep) { c.Before = "" })
	}
	if s.Do == "resume" && s.Settled != "ok" {
		add(func(c *modelStep) { c.Settled = "ok" })
	}
	if s.Do == "resume" && s.Unknown != "" {
		add(func(c *modelStep) { c.Unknown = "" })
	}
	return all
}

func stacksOfAll() []byte {
	buf := make([]byte, 1<<20)
	return buf[:runtime.Stack(buf, true)]
}

// TestOldFailures lives through the histories that once failed.
func TestOldFailures(t *testing.T) {
	for name, script := range oldFailures {
		t.Run(name, func(t *testing.T) {
			h, err := parseModelHistory(script)
			if err != nil {
				t.Fatal(err)
			}
			if failure := liveThrough(t, h, newModelCoverage()); failure != "" {
				t.Errorf("%s\n%s", failure, h)
			}
		})
	}
}

// oldFailures are histories that once broke a promise, by what was wrong. They
// were found by TestHistories and shrunken.
var oldFailures = map[string]string{
	"Resume sends what was listed, and told to be unknown since": `
		{"seed":630,"profile":"stripe","breaker":"quick"}
		{"do":"send","wait":"1m21.637839951s","op":2,"as":"keynoack","variant":1,"cancel":"726.272µs"}
		{"do":"send","wait":"2.782669ms","op":3,"as":"key"}
		{"do":"send","wait":"89.464803ms","op":65,"as":"plain","limit":"1.786358ms","faults":["409"]}
		{"do":"resume","wait":"1.499436ms","settled":"ok"}`,
	"Resume sends what was listed, and rejected since": `
		{"seed":103,"profile":"stripe"}
		{"do":"send","wait":"1.942218ms","op":9,"as":"key","faults":["hold","hold"]}
		{"do":"send","wait":"2.959249ms","op":10,"as":"key","faults":["lost"]}
		{"do":"crash","wait":"8.446167ms","down":"1.915947713s"}
		{"do":"resume","wait":"72.867002ms","settled":"ok"}
		{"do":"send","wait":"5.021857ms","op":10,"as":"header"}`,
	"Resume sends what was listed, and succeeded since": `
		{"seed":3295,"profile":"stripe","budget":"none"}
		{"do":"send","wait":"216.867µs","op":1,"as":"key"}
		{"do":"send","wait":"2.198176ms","op":2,"as":"key","faults":["hold"]}
		{"do":"crash","wait":"36.751303ms","down":"1.132434707s"}
		{"do":"resume","wait":"102.918506ms","settled":"slow"}
		{"do":"send","wait":"1.980282ms","op":2,"as":"keynoack"}`,
	"not sent is told of a redriven operation while its host rests": `
		{"seed":2898,"profile":"default"}
		{"do":"send","wait":"579.265µs","op":65,"as":"plain","faults":["429"]}
		{"do":"crash","wait":"26.366455ms","down":"30.184316823s"}
		{"do":"send","wait":"199.687379ms","op":11,"as":"keynoack","faults":["503-long"]}
		{"do":"redrive","wait":"693.832889ms","op":65,"cancel":"1.320393ms"}`,
	"the success of another request with the key is told when Begin fails": `
		{"seed":2182,"profile":"default"}
		{"do":"send","wait":"3.687595ms","op":3,"as":"key","variant":1}
		{"do":"store","wait":"6.829116ms","n":1,"write":"Begin","how":"fail"}
		{"do":"send","wait":"2.48465522s","op":3,"as":"key"}`,
	"an answer waits for a time that a clock set back has moved away": `
		{"seed":1449,"profile":"stripe"}
		{"do":"send","wait":"2.833983ms","op":3,"as":"header"}
		{"do":"clock","wait":"15m12.391021619s","shift":"-9035h36m35.620617822s"}
		{"do":"send","wait":"63.740538ms","op":67,"as":"start"}
		{"do":"resume","wait":"1m14.518293828s","settled":"mix"}`,
	"who leaves a resumed operation is told unknown, and Resume goes on": `
		{"seed":1640,"profile":"short"}
		{"do":"send","wait":"153.968µs","op":3,"as":"header","cancel":"109.470644ms","faults":["stored-503","delay-forever"]}
		{"do":"resume","wait":"1.337581ms","settled":"ok"}
		{"do":"resume","wait":"1m18.586931104s","before":"mix","settled":"ok"}
		{"do":"redrive","wait":"63.971764ms","op":3,"limit":"422.603088ms"}`,
	"a joiner gets the end of another caller's context": `
		{"seed":1030,"profile":"default"}
		{"do":"send","wait":"5.801847ms","op":2,"as":"header"}
		{"do":"send","wait":"1.092565ms","op":3,"as":"key","scope":"shop","callers":2,"apart":"1.695976ms","limit":"730.604µs"}`,
	"Ack acknowledges a rejection that was not recorded": `
		{"seed":4828,"profile":"stripe","breaker":"quick"}
		{"do":"store","wait":"1h23m17.774293568s","n":1,"write":"Save","how":"fail"}
		{"do":"send","wait":"1h38m53.62599416s","op":10,"as":"key"}`,
	"a joiner of an answer that is being written is not waited for": `
		{"seed":7071,"profile":"default"}
		{"do":"send","wait":"171.337684ms","op":2,"as":"key","scope":"shop"}
		{"do":"resume","wait":"2.834454ms","settled":"ok"}
		{"do":"send","wait":"1.106265ms","op":2,"as":"key","scope":"shop","ack":"40.766878792s"}
		{"do":"resume","wait":"1.010086725s","settled":"ok"}`,
	"the last caller who got an answer is waited for, and not the first": `
		{"seed":18238,"profile":"default","budget":"tight","breaker":"quick"}
		{"do":"send","wait":"59.124276161s","op":2,"as":"key","ack":"59.142773593s"}
		{"do":"send","wait":"80.371135ms","op":2,"as":"key"}
		{"do":"resume","wait":"21.520201ms","settled":"ok"}`,
	"an uncertain Begin makes a recorded success unknown": `
		{"seed":9283,"profile":"default"}
		{"do":"store","wait":"1.195703317s","n":4,"write":"Begin","how":"kept"}
		{"do":"send","wait":"6.407424ms","op":1,"as":"key","callers":2,"apart":"1.519279398s","ack":"1.543418ms"}
		{"do":"send","wait":"1.070823406s","op":67,"as":"start"}`,
	"an uncertain takeover of a rejection is unknown and acknowledged": `
		{"seed":14109,"profile":"default","budget":"tight"}
		{"do":"send","wait":"1.592536837s","op":3,"as":"key","faults":["dial-timeout","429-long"]}
		{"do":"resolve","wait":"17h45m41.950790387s","op":3}
		{"do":"store","wait":"34.881534719s","n":2,"how":"lost"}
		{"do":"send","wait":"37.01287ms","op":3,"as":"key"}`,
	"a former rejection is replayed as the success that was resolved": `
		{"seed":105116,"profile":"default","budget":"none","breaker":"quick"}
		{"do":"send","wait":"6.080926ms","op":1,"as":"header","faults":["400","cut"]}
		{"do":"send","wait":"56.238664139s","op":1,"as":"header","callers":2,"apart":"1.251619132s"}
		{"do":"resolve","wait":"2.895342ms","op":1}`,
	"who waits for an operation that is given up is told that it will be resumed": `
		{"seed":155977,"profile":"stripe"}
		{"do":"send","wait":"40.657384618s","op":3,"as":"header","variant":1,"callers":2,"apart":"1.129697ms","limit":"1.094788ms"}`,
	"a handler that returns errors is not called any more": `
		{"seed":5624,"profile":"default"}
		{"do":"send","wait":"193.298659ms","op":66,"as":"start","faults":["stored-500"]}
		{"do":"close","wait":"100.880707ms","down":"3.027962501s"}
		{"do":"run","wait":"7.119705ms","limit":"4m35.387685817s","settled":"fail","unknown":"fail"}`,
}

// checkModelCoverage checks that n histories went everywhere.
func checkModelCoverage(t *testing.T, total *modelCoverage, n int) {
	for name := range modelFaults {
		if hits, least := total.hits["fault "+name], n/100; hits < least {
			t.Errorf("coverage: %d attempts had the fault %q, want at least %d", hits, name, least)
		}
	}
	for what, least := range minimumHits {
		least = least * n / 10_000
		if hits := total.hits[what]; hits < least {
			t.Errorf("coverage: %d times %q, want at least %d", hits, what, least)
		}
	}
}

// minimumHits is how often things must happen in 10,000 histories, about a third
// of how often they do.
var minimumHits = map[string]int{
	"ErrAnswerLost":                           50,
	"ErrCircuitOpen":                          180,
	"ErrClosed":                               200,
	"ErrKeyReused":                            110,
	"ErrNotRetained":                          110,
	"ErrScope":                                600,
	"ErrStoreFailed":                          130,
	"ErrStoreUncertain":                       40,
	"ErrWaitTooLong":                          200,
	"ErrWindowClosed":                         400,
	"acknowledged":                            2000,
	"attempt: ErrAnswerLost":                  200,
	"attempt: ErrClosed":                      1700,
	"attempt: ErrMismatch":                    13,
	"attempt: ErrNoCredentials":               12,
	"before: abandon":                         1400,
	"before: hold":                            1400,
	"before: panic":                           1700,
	"before: send":                            1700,
	"crash at after Ack":                      20,
	"crash at after Begin":                    160,
	"crash at after Delete":                   5,
	"crash at after Save":                     150,
	"crash at after SaveSoon":                 50,
	"crash at answer":                         200,
	"crash at before Ack":                     20,
	"crash at before Begin":                   150,
	"crash at before Delete":                  5,
	"crash at before Save":                    190,
	"crash at before SaveSoon":                50,
	"crash at begun":                          200,
	"crash at handler":                        80,
	"crash at send":                           300,
	"crash now":                               1500,
	"creds bad":                               300,
	"creds good":                              300,
	"creds live":                              80,
	"creds none":                              170,
	"creds rotated":                           140,
	"forgotten":                               200,
	"handed over without network":             3000,
	"handed rejected":                         2000,
	"handed succeeded":                        3000,
	"handed unknown (abandoned)":              600,
	"handed unknown (ambiguous answer)":       200,
	"handed unknown (clock went back)":        50,
	"handed unknown (conflicting payload)":    10,
	"handed unknown (gave up)":                2000,
	"handed unknown (poison)":                 100,
	"handed unknown (refused at the door)":    90,
	"handed unknown (stored failure)":         120,
	"handed unknown (window closed)":          300,
	"kind big":                                300,
	"kind bodyless":                           300,
	"kind charge":                             11000,
	"kind declined":                           300,
	"kind invalid":                            300,
	"kind put":                                300,
	"kind see-other":                          300,
	"nothing > pending":                       12000,
	"pending > nothing":                       400,
	"pending > rejected":                      700,
	"pending > rejected acked":                600,
	"pending > succeeded":                     4000,
	"pending > succeeded acked":               2000,
	"pending > unknown (abandoned)":           400,
	"pending > unknown (ambiguous answer)":    200,
	"pending > unknown (clock went back)":     40,
	"pending > unknown (conflicting payload)": 12,
	"pending > unknown (gave up)":             3000,
	"pending > unknown (poison)":              80,
	"pending > unknown (refused at the door)": 100,
	"pending > unknown (stored failure)":      130,
	"pending > unknown (window closed)":       200,
	"redriven":                                600,
	"rejected > nothing":                      19,
	"rejected > pending":                      60,
	"rejected > rejected acked":               600,
	"rejected acked > pending":                70,
	"resolved":                                120,
	"resumed":                                 3000,
	"retry":                                   4000,
	"shutdown cuts off":                       30,
	"step clock":                              500,
	"step close":                              500,
	"step crash":                              4000,
	"step creds":                              1000,
	"step forget":                             600,
	"step redrive":                            1100,
	"step resolve":                            500,
	"step resume":                             6000,
	"step run":                                600,
	"step send":                               14000,
	"step shutdown":                           500,
	"step store":                              800,
	"store fail":                              400,
	"store failed":                            1000,
	"store kept":                              190,
	"store lost":                              200,
	"succeeded > nothing":                     80,
	"succeeded > succeeded acked":             4000,
	"told not recorded":                       140,
	"told not sent":                           1400,
	"told rejected":                           1400,
	"told succeeded":                          5000,
	"told succeeded replayed":                 600,
	"told undecided":                          160,
	"told unknown (ambiguous answer)":         190,
	"told unknown (clock went back)":          7,
	"told unknown (conflicting payload)":      10,
	"told unknown (gave up)":                  2000,
	"told unknown (none)":                     1300,
	"told unknown (refused at the door)":      110,
	"told unknown (stored failure)":           90,
	"told unknown (window closed)":            50,
	"unkeyed":                                 10,
	"unknown (abandoned) > pending":           20,
	"unknown (abandoned) > unknown (abandoned) told":                     400,
	"unknown (abandoned) told > pending":                                 30,
	"unknown (ambiguous answer) > nothing":                               6,
	"unknown (ambiguous answer) > pending":                               40,
	"unknown (ambiguous answer) > unknown (ambiguous answer) told":       170,
	"unknown (ambiguous answer) told > pending":                          8,
	"unknown (clock went back) > unknown (clock went back) told":         40,
	"unknown (conflicting payload) > unknown (conflicting payload) told": 9,
	"unknown (gave up) > nothing":                                        110,
	"unknown (gave up) > pending":                                        600,
	"unknown (gave up) > rejected acked":                                 13,
	"unknown (gave up) > succeeded acked":                                30,
	"unknown (gave up) > unknown (gave up) told":                         2000,
	"unknown (gave up) told > pending":                                   30,
	"unknown (poison) > unknown (poison) told":                           70,
	"unknown (refused at the door) > pending":                            20,
	"unknown (refused at the door) > unknown (refused at the door) told": 70,
	"unknown (stored failure) > pending":                                 20,
	"unknown (stored failure) > unknown (stored failure) told":           90,
	"unknown (window closed) > unknown (window closed) told":             200,
	"wrong credentials":                                                  600,
}
