package main

import (
	"regexp"
	"strings"
	"testing"
)

func TestDemo(t *testing.T) {
	var out strings.Builder
	if err := demo(t.Context(), &out); err != nil {
		t.Fatal(err)
	}
	t.Log("\n" + out.String())
	want := regexp.MustCompile(`^first run, until SIGTERM
A-1: ch_1
A-2: Post "http://[^"]*": oncehttp: operation 2c3a7fa5-a66f-55e6-a17d-de13bbdbe279: outcome undecided after [0-9]+ attempts: client is closed; the operation will be resumed
second run
(A-3: ch_3\nA-2: ch_2|A-2: ch_2\nA-3: ch_3)
3 charges for 5 requests
$`)
	if !want.MatchString(out.String()) {
		t.Errorf("printed\n%s\nwant a match of\n%v", out.String(), want)
	}
}
