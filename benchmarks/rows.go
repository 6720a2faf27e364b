package main

import (
	"fmt"
	"slices"
	"strconv"
	"time"
)

// A key names what is measured once in every round.
type key struct {
	group     string
	callers   int
	contender string
}

type results map[key][]sample // by round

// each returns a figure of every round.
func (r results) each(k key, figure func(sample) float64) []float64 {
	var all []float64
	for _, s := range r[k] {
		all = append(all, figure(s))
	}
	return all
}

// compare returns the ratio of a figure of two contenders, round by round.
func (r results) compare(group string, callers int, of, to string, figure func(sample) float64) []float64 {
	ratios := r.each(key{group, callers, of}, figure)
	for i, v := range r.each(key{group, callers, to}, figure) {
		ratios[i] /= v
	}
	return ratios
}

// median returns the middle of values, or the mean of the two in the middle.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

func rate(s sample) float64    { return s.rate() }
func nanos(s sample) float64   { return s.took.Seconds() * 1e9 / float64(s.ops) }
func allocs(s sample) float64  { return s.allocs }
func commits(s sample) float64 { return s.commits }
func p50(s sample) float64     { return float64(s.p50) / float64(time.Microsecond) }
func p99(s sample) float64     { return float64(s.p99) / float64(time.Microsecond) }

// A row is a target and what was measured.
type row struct {
	work, against string
	callers       int // 0: does not apply
	want          float64
	atMost        bool
	reported      bool   // no more than an expectation
	unit          string // of want and values
	values        []float64
}

func (r row) met() string {
	switch {
	case len(r.values) == 0:
		return "not measured"
	case r.reported:
		return "reported"
	case r.atMost && median(r.values) <= r.want, !r.atMost && median(r.values) >= r.want:
		return "yes"
	}
	return "**no**"
}

func (r row) cells() []string {
	bound := "at least "
	if r.reported {
		bound = "about "
	} else if r.atMost {
		bound = "at most "
	}
	callers, middle, spread := "", "", ""
	if r.callers > 0 {
		callers = strconv.Itoa(r.callers)
	}
	if len(r.values) > 0 {
		middle = digits(median(r.values)) + r.unit
		spread = digits(slices.Min(r.values)) + " to " + digits(slices.Max(r.values))
	}
	return []string{r.work, callers, r.against, bound + strconv.FormatFloat(r.want, 'g', -1, 64) + r.unit, middle, spread, r.met()}
}

// digits formats with three significant digits, at least.
func digits(v float64) string {
	switch {
	case v >= 100 || v == 0:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case v >= 10:
		return strconv.FormatFloat(v, 'f', 1, 64)
	case v >= .1:
		return strconv.FormatFloat(v, 'f', 2, 64)
	}
	return strconv.FormatFloat(v, 'f', 3, 64)
}

// targetRows returns the rows of the contenders that took turns.
func targetRows(r results) []row {
	var rows []row
	// More is better: rates of ours in times of the other's.
	for _, t := range []struct {
		work, against, group, to string
		callers                  []int
		want                     []float64
	}{
		{"operation in the store", "`db.Update` per step", storeWork, updateName, everyLoad, []float64{1.6, 7, 25, 60}},
		{"operation in the store", "`db.Batch` per step", storeWork, batchName, everyLoad, []float64{40, 20, 12, 8}},
		{"operation in the store", "raw file", storeWork, limitName, everyLoad, []float64{.38, .38, .30, .25}},
		{"POST, server takes 20 ms", "without a store", slowPost, memoryName, everyLoad, []float64{.9, .9, .9, .8}},
		{"POST, loopback", "`http.Client`", instantPost, bareName, []int{64}, []float64{.6}},
		{"POST, loopback", "composition, `db.Update`", instantPost, byUpdateName, []int{64}, []float64{15}},
		{"POST, loopback", "composition, `db.Batch`", instantPost, byBatchName, []int{64}, []float64{5}},
	} {
		for i, callers := range t.callers {
			rows = append(rows, row{work: t.work, against: t.against, callers: callers, want: t.want[i], unit: "x",
				values: r.compare(t.group, callers, oursName, t.to, rate)})
		}
	}
	for i, want := range []float64{2, .5, .07, .018} {
		values := r.each(key{storeWork, everyLoad[i], oursName}, commits)
		for j := range values {
			values[j] *= 2 // bbolt syncs the pages, then the header
		}
		rows = append(rows, row{work: "operation in the store", against: "fdatasyncs of each", callers: everyLoad[i], want: want, reported: true, values: values})
	}
	more := r.each(key{plainGet, 1, oursName}, allocs)
	for i, bare := range r.each(key{plainGet, 1, bareName}, allocs) {
		more[i] -= bare
	}
	return append(rows,
		row{work: "GET, in memory: time", against: "`http.Client`", callers: 1, want: 1.5, atMost: true, unit: "x", values: r.compare(plainGet, 1, oursName, bareName, nanos)},
		row{work: "GET, in memory: allocations more", against: "`http.Client`", callers: 1, want: 3, atMost: true, values: more},
		row{work: "POST, in memory: time", against: "go-retryablehttp", callers: 1, want: 1, atMost: true, unit: "x", values: r.compare(memoryPost, 1, oursName, retryableName, nanos)},
		row{work: "POST, in memory: time", against: "failsafehttp", callers: 1, want: 1, atMost: true, unit: "x", values: r.compare(memoryPost, 1, oursName, failsafeName, nanos)},
	)
}

// A figure of a benchmark of the library.
type figure struct{ of, unit string }

// scaleRows returns the rows of the library's own benchmarks, whose lines of one
// run after the other are in out.
func scaleRows(runs []benchmarks) []row {
	ratio := func(over, under figure) (values []float64) {
		for _, b := range runs {
			if o, u := b[over.of][over.unit], b[under.of][under.unit]; o > 0 && u > 0 {
				values = append(values, o/u)
			}
		}
		return values
	}
	begin := func(store, than string) []float64 {
		return ratio(figure{"BeginIn", store + "-µs"}, figure{"BeginIn", than + "-µs"})
	}
	value := func(unit, of string, scale float64) (values []float64) {
		for _, b := range runs {
			if v := b[of][unit]; v > 0 {
				values = append(values, v*scale)
			}
		}
		return values
	}
	return []row{
		{work: "Begin, 1,000,000 pending", against: "none", callers: 1, want: 1.3, atMost: true, unit: "x", values: begin("pending", "empty")},
		{work: "Begin, behind 1,000,000 done", against: "none", callers: 1, want: 1.3, atMost: true, unit: "x", values: begin("done", "empty")},
		{work: "1,000 pending found behind 1,000,000 done", against: "full scan", want: .1, atMost: true, unit: "x", values: ratio(figure{"FindPending/list", "ns/op"}, figure{"FindPending/scan", "ns/op"})},
		{work: "1,000 pending found behind 1,000,000 done", against: "", want: 10, atMost: true, unit: " ms", values: value("ns/op", "FindPending/list", 1e-6)},
		{work: "commit after 1,000,000 operations, 1,000 live", against: "start, as many live", callers: 1, want: 1.1, atMost: true, unit: "x", values: begin("churned", "live")},
		{work: "put after a backlog of 1,000,000 has drained", against: "steady state, as many live", callers: 1, want: 1.2, atMost: true, unit: "x", values: begin("drained", "live")},
		{work: "cold open of that file, closed", against: "", want: 1, atMost: true, unit: " s", values: value("ns/op", "OpenLarge/drained/killed=false/cold=true", 1e-9)},
		{work: "cold open of that file, killed", against: "", want: 1, atMost: true, unit: " s", values: value("ns/op", "OpenLarge/drained/killed=true/cold=true", 1e-9)},
	}
}

// perSecond formats a rate.
func perSecond(v float64) string {
	if v >= 10_000 {
		return fmt.Sprintf("%.1f k", v/1000)
	}
	return digits(v)
}
