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
)

var (
	modelHistoryFlag   = flag.Uint64("history", 0, "live through the history of this seed only")
	modelScriptFlag    = flag.String("script", "", "live through the history in this file only")
	modelHistoriesFlag = flag.Int("histories", 0, "how many histories to live through; 0 means 10000, 500 with -short")
	modelFromFlag      = flag.Uint64("from", 1, "first seed")
	modelAllFlag       = flag.Bool("all", false, "go on after a failure, and print how often each occurs")
)

// coverage counts what happened.
type modelCoverage map[string]int

func (c modelCoverage) hit(what string) { c[what]++ }

// TestHistories lives through random histories and checks the promises of the
// package comment in each. A failure prints its seed and a shrunken script: see
// -history, -script and regressions.
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
		if failure := liveThrough(t, h, modelCoverage{}); failure != "" {
			t.Fatal(failure)
		}
		return
	}
	if *modelHistoryFlag != 0 {
		h := generateHistory(*modelHistoryFlag)
		if failure := liveThrough(t, h, modelCoverage{}); failure != "" {
			reportHistory(t, h, failure)
		}
		return
	}
	n := *modelHistoriesFlag
	if n == 0 {
		n = 10_000
		if testing.Short() {
			n = 500
		}
	}
	total := modelCoverage{}
	kinds := map[string][]uint64{}
	var next atomic.Uint64
	var mu sync.Mutex // guards total and kinds
	var failed atomic.Bool
	t.Run("workers", func(t *testing.T) {
		for range runtime.GOMAXPROCS(0) {
			t.Run("", func(t *testing.T) {
				t.Parallel()
				cover := modelCoverage{}
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
				mu.Lock()
				defer mu.Unlock()
				for what, hits := range cover {
					total[what] += hits
				}
			})
		}
	})
	for _, kind := range slices.Sorted(maps.Keys(kinds)) {
		t.Errorf("%d times: %s: histories %v", len(kinds[kind]), kind, kinds[kind][:min(6, len(kinds[kind]))])
	}
	if !t.Failed() && !testing.Short() && *modelHistoriesFlag == 0 {
		checkModelCoverage(t, total)
	}
	if testing.Verbose() {
		for _, what := range slices.Sorted(maps.Keys(total)) {
			fmt.Printf("%8d %s\n", total[what], what)
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

// report prints a failing history after shrinking it.
func reportHistory(t *testing.T, h *modelHistory, failure string) {
	t.Helper()
	small, why, runs := shrinkHistory(t, h, failure)
	t.Errorf("history %d: %s\nshrunken in %d runs to %d of %d steps, which give\n%s\n\n%s", h.Seed, failure, runs, len(small.Steps), len(h.Steps), why, small)
}

// shrink drops and simplifies steps as long as the history still breaks the same
// promise in the same way.
func shrinkHistory(t *testing.T, h *modelHistory, failure string) (*modelHistory, string, int) {
	kind := kindOfModelFailure(failure)[:len("promise 1")]
	runs := 0
	begun := time.Now()
	try := func(c *modelHistory) bool {
		if runs++; runs > 400 || time.Since(begun) > 20*time.Second {
			return false
		}
		f := liveThrough(t, c, modelCoverage{})
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

// simplifications are the same step with less in it.
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

// TestRegressions lives through the histories that once failed.
func TestOldFailures(t *testing.T) {
	for name, script := range oldFailures {
		t.Run(name, func(t *testing.T) {
			h, err := parseModelHistory(script)
			if err != nil {
				t.Fatal(err)
			}
			if failure := liveThrough(t, h, modelCoverage{}); failure != "" {
				t.Errorf("%s\n%s", failure, h)
			}
		})
	}
}

var oldFailures = map[string]string{}

func checkModelCoverage(t *testing.T, total modelCoverage) {
	for what, least := range minimumHits {
		if total[what] < least {
			t.Errorf("coverage: %d × %s, want at least %d", total[what], what, least)
		}
	}
}

var minimumHits = map[string]int{}
