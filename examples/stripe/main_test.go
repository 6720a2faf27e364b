package main

import (
	"net/http"
	"net/http/httptest"
	"os/exec"
	"strings"
	"testing"
)

func TestOnlyTestKeysAreUsed(t *testing.T) {
	for _, key := range []string{"sk_live_abc", "rk_live_abc", "pk_test_abc", "0123abc"} {
		err := config{key: key, dir: t.TempDir()}.run(t.Context(), []string{"A-1"})
		if err == nil || strings.Contains(err.Error(), key) {
			t.Errorf("%s: %v", key, err)
		}
		if live := strings.Contains(key, "_live_"); live && !strings.Contains(err.Error(), "live key") {
			t.Errorf("%s: %v", key, err)
		}
	}
	for _, key := range []string{"sk_test_abc", "rk_test_abc"} {
		if err := checkKey(key); err != nil {
			t.Errorf("%s: %v", key, err)
		}
	}
}

// The program as a user runs it: what was not recorded is found at the next run.
func TestEachOrderIsPaidOnce(t *testing.T) {
	b := newBank()
	server := httptest.NewServer(b)
	defer server.Close()
	defer b.Close()
	var out strings.Builder
	c := config{key: "sk_test_x", url: server.URL, dir: t.TempDir(), out: &out}
	s, err := c.open()
	if err != nil {
		t.Fatal(err)
	}
	s.file.Close() // the ledger fails after the payment
	if err := s.pay(t.Context(), "A-1"); err == nil {
		t.Error("paid without ledger")
	}
	s.Close()
	for range 2 {
		if err := c.run(t.Context(), []string{"A-1", "A-2"}); err != nil {
			t.Error(err)
		}
	}
	if want := "A-1 succeeded pi_1\nA-2 succeeded pi_2\n"; out.String() != want {
		t.Errorf("printed %q, want %q", &out, want)
	}
	if n := len(b.made()); n != 2 {
		t.Errorf("%d PaymentIntents", n)
	}
}

// A decline is recorded, and acknowledged.
func TestADeclineIsAnAnswer(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		declined.write(w)
	}))
	defer server.Close()
	var out strings.Builder
	c := config{key: "sk_test_x", url: server.URL, dir: t.TempDir(), out: &out}
	for range 2 {
		if err := c.run(t.Context(), []string{"A-1"}); err != nil {
			t.Error(err)
		}
	}
	s, err := c.open()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if stats, err := s.client.Stats(t.Context()); err != nil || stats.Unacknowledged != 0 {
		t.Errorf("%+v, %v", stats.Counts, err)
	}
	if want := "A-1 rejected card_declined\n"; out.String() != want {
		t.Errorf("printed %q, want %q", &out, want)
	}
}

func TestDemo(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the program")
	}
	t.Setenv("STRIPE_API_KEY", "")
	out, err := exec.Command("go", "run", ".").Output()
	if want := "killed; PaymentIntents made: 1\nA-1 succeeded pi_1\nPaymentIntents made: 1\n"; err != nil || string(out) != want {
		t.Errorf("printed %q, %v; want %q", out, err, want)
	}
}
