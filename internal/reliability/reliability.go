// Package reliability collects what the tests of faults have counted, for the
// table in docs/reliability.md.
package reliability

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
)

// OutEnv names the environment variable with the file that results are appended
// to; if it is not set, they are only logged.
const OutEnv = "ONCEHTTP_RELIABILITY"

// A Result is what one test counted of one class of faults.
type Result struct {
	Test  string // that counted; set by Report
	Class string // as in the table, such as "power failure, images of the disk"
	How   string // how the faults are made, in a few words
	Cases int    // histories, each judged by itself
	About bool   // Cases depends on how threads were scheduled, by less than a half

	Twice       int // operations charged more than once
	Lost        int // operations neither charged nor told, or whose recorded answer is gone
	Unreadable  int // stores that did not open, or records that could not be read, without need
	Panics      int
	ToldFalsely int // callers who were told something that was not, or did not stay, true
}

// Bad reports whether a promise was broken.
func (r Result) Bad() bool {
	return r.Twice+r.Lost+r.Unreadable+r.Panics+r.ToldFalsely > 0
}

// Report fails the test if a promise was broken or nothing was tried, and else
// adds the result to the table's data.
func Report(t testing.TB, r Result) {
	t.Helper()
	t.Logf("%s: %d cases", r.Class, r.Cases)
	if r.Cases == 0 {
		t.Errorf("%s: no case was tried", r.Class)
	}
	if r.Bad() {
		t.Errorf("%s: %+v", r.Class, r)
	}
	path := os.Getenv(OutEnv)
	if path == "" || t.Failed() || testing.Short() { // a short run counts less
		return
	}
	r.Test, _, _ = strings.Cut(t.Name(), "/")
	line, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(append(line, '\n')); err != nil {
		t.Fatal(err)
	}
}
