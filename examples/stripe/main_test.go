package main

import (
	"bytes"
	"fmt"
	"net/http"
	"testing"

	"github.com/oncehttp/oncehttp/oncehttptest"
)

func TestEachOrderIsPaidOnce(t *testing.T) {
	t.Chdir(t.TempDir())
	stripe := oncehttptest.New(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"id":"pi_1","object":"payment_intent"}`)
	}))
	stripe.Script(oncehttptest.DropResponse())
	var out bytes.Buffer
	for range 2 {
		if err := run(&out, "sk_test_x", stripe.Transport(), []string{"A-1"}); err != nil {
			t.Error(err)
		}
	}
	if want := "order A-1 succeeded pi_1\norder A-1 succeeded pi_1\n"; out.String() != want {
		t.Errorf("printed %q, want %q", &out, want)
	}
	if n := len(stripe.Effects()); n != 1 {
		t.Errorf("paid %d times", n)
	}
}
