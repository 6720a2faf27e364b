package main

import (
	"os"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	if spec := os.Getenv(childEnv); spec != "" { // the test binary is its own child
		os.Exit(childMain(spec))
	}
	os.Exit(m.Run())
}

// small runs a scenario for all contenders.
func small(t *testing.T, s scenario) map[string]result {
	t.Helper()
	t.Parallel()
	s.dir, s.verbose = t.TempDir(), testing.Verbose()
	rows, err := s.run(t.Context(), t.Output())
	if err != nil {
		t.Fatal(err)
	}
	if err := (results{s.name: rows}).verdict([]scenario{s}); err != nil {
		t.Error(err)
	}
	for name, r := range rows {
		if r.never+r.missing > 0 {
			t.Errorf("%s: never charged or not in the ledger: %+v", name, r)
		}
	}
	return rows
}

// The duplicates of those who do it otherwise show that the weather is bad: the
// kills alone charge at least one order twice each.
func TestNobodyChargedTwiceInStorm(t *testing.T) {
	const kills = 2
	rows := small(t, storm(1, 40, kills))
	for name, r := range rows {
		if r.hit != kills {
			t.Errorf("%s: %d of %d kills hit a request on the wire", name, r.hit, kills)
		}
	}
	if r := rows["key per call"]; r.twice < kills {
		t.Errorf("key per call: %d orders charged twice, want at least %d, those of the kills", r.twice, kills)
	}
	if r := rows["no key"]; r.twice <= kills {
		t.Errorf("no key: %d orders charged twice, want more than %d: answers were lost, too", r.twice, kills)
	}
	if r := rows["key = order id"]; r.twice != 0 {
		t.Errorf("key = order id: %d orders charged twice, want none", r.twice)
	}
}

func TestNothingSentAfterWindow(t *testing.T) {
	s := afterWindow(3)
	for name, r := range small(t, s) {
		if name != oursName && (r.twice != s.orders || r.late != s.orders) {
			t.Errorf("%s: %d orders charged twice, %d sent again, want %d: has the server not forgotten them?", name, r.twice, r.late, s.orders)
		}
	}
}

func TestOutageBounded(t *testing.T) {
	s := outage(60, 2*time.Second)
	for name, r := range small(t, s) {
		if name != oursName && r.inOutage < s.orders {
			t.Errorf("%s: %d requests during the outage: that was none", name, r.inOutage)
		}
	}
}
