package main

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/oncehttp/oncehttp"
)

// TestCommitsAreCounted: as many as were made, by a file that is still open.
func TestCommitsAreCounted(t *testing.T) {
	file := filepath.Join(t.TempDir(), "operations.db")
	store, err := oncehttp.OpenBolt(file)
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	before, err := lastTx(file)
	if err != nil {
		t.Fatal(err)
	}
	for range 10 {
		rec := oncehttp.Record{ID: oncehttp.ID{Key: oncehttp.NewKey(), Origin: origin}, Epoch: 1, Owner: "owner"}
		if _, err := store.Begin(t.Context(), rec); err != nil {
			t.Fatal(err)
		}
	}
	if after, err := lastTx(file); after-before != 10 || err != nil {
		t.Errorf("%d commits were counted (%v), want 10", after-before, err)
	}
}

// TestRawLogWritesAll: the limit does not win by leaving out.
func TestRawLogWritesAll(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	l, err := openLog(path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var group sync.WaitGroup
	for range 64 {
		group.Go(func() {
			for range 10 {
				if err := l.append("key", []byte("begun"), true); err != nil {
					t.Error(err)
				}
				if err := l.append("key", []byte("done"), false); err != nil {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
	if err := l.flush(); err != nil {
		t.Fatal(err)
	}
	written, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if begun, done := strings.Count(string(written), "keybegun"), strings.Count(string(written), "keydone"); begun != 640 || done != 640 {
		t.Errorf("%d and %d records were written, want 640 of each", begun, done)
	}
}

func TestTargetsAreJudged(t *testing.T) {
	for _, tt := range []struct {
		row  row
		want string
	}{
		{row{want: 2}, "not measured"},
		{row{want: 2, values: []float64{1, 9, 2}}, "yes"},
		{row{want: 2, values: []float64{1, 9, 1.9}}, "**no**"},
		{row{want: 2, atMost: true, values: []float64{1, 9, 2}}, "yes"},
		{row{want: 2, atMost: true, values: []float64{1, 9, 2.1}}, "**no**"},
		{row{want: 2, reported: true, values: []float64{1}}, "reported"},
	} {
		if got := tt.row.met(); got != tt.want {
			t.Errorf("%v of %v, at most %t: %s, want %s", tt.row.values, tt.row.want, tt.row.atMost, got, tt.want)
		}
	}
}

func TestBenchmarksAreRead(t *testing.T) {
	b := parseBenchmarks("goos: linux\nBenchmarkBeginIn/pending-2   \t 123\t  456 ns/op\t 12.5 MiB\t 300 p50-µs\nPASS\n")
	if f := b["BeginIn/pending"]; f["ns/op"] != 456 || f["MiB"] != 12.5 || f["p50-µs"] != 300 {
		t.Errorf("%v", b)
	}
}
