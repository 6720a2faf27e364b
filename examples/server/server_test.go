package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/oncehttp/oncehttp/oncehttptest"
	bolt "go.etcd.io/bbolt"
)

func newServer(t *testing.T) *server {
	t.Helper()
	s, err := openServer(filepath.Join(t.TempDir(), "server.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.db.Close() })
	return s
}

// charged returns how often each order was charged.
func (s *server) charged(t *testing.T) map[string]int {
	t.Helper()
	orders := make(map[string]int)
	err := s.db.View(func(tx *bolt.Tx) error {
		return tx.Bucket(chargesBucket).ForEach(func(_, text []byte) error {
			var c charge
			err := json.Unmarshal(text, &c)
			orders[c.Order]++
			return err
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	return orders
}

// ask sends a request; header is pairs of name and value.
func (s *server) ask(body string, header ...string) *httptest.ResponseRecorder {
	req := httptest.NewRequest("POST", "/charges", strings.NewReader(body))
	req.Header.Set("Authorization", "Bearer shop-token")
	for i := 0; i < len(header); i += 2 {
		if header[i] == "Authorization" {
			req.Header.Del(header[i])
		}
		req.Header.Add(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	s.ServeHTTP(w, req)
	return w
}

const keyHeader = "Idempotency-Key"

func TestRefusedAtTheDoorIsNotStored(t *testing.T) {
	s := newServer(t)
	for _, test := range []struct {
		body   string
		header []string
		status int
	}{
		{bodyFor("1"), nil, 400},
		{bodyFor("1"), []string{keyHeader, ""}, 400},
		{bodyFor("1"), []string{keyHeader, `""`}, 400},
		{bodyFor("1"), []string{keyHeader, strings.Repeat("k", 256)}, 400},
		{bodyFor("1"), []string{keyHeader, "k", keyHeader, "l"}, 400},
		{bodyFor("1"), []string{keyHeader, "k", "Authorization", "Bearer stolen"}, 401},
		{`{"order":""}`, []string{keyHeader, "k"}, 400},
		{strings.Repeat(" ", maxBody+1), []string{keyHeader, "k"}, 413},
		{bodyFor("1"), []string{keyHeader, "k"}, 201},
		{bodyFor("2"), []string{keyHeader, strings.Repeat("k", 255)}, 201},
	} {
		if w := s.ask(test.body, test.header...); w.Code != test.status || w.Header().Get("Idempotent-Replayed") != "" {
			t.Errorf("%.50q: %d, want %d", test.header, w.Code, test.status)
		}
	}
	if got := fmt.Sprint(s.charged(t)); got != "map[1:1 2:1]" {
		t.Errorf("charged %s", got)
	}
}

func TestSameAnswerAgain(t *testing.T) {
	s := newServer(t)
	for _, test := range []struct {
		body   string
		status int
	}{{bodyFor("1"), 201}, {`{"order":"2","amount":2000000}`, 402}} {
		first := s.ask(test.body, keyHeader, test.body)
		for _, key := range []string{test.body, quoted(test.body)} {
			again := s.ask(test.body, keyHeader, key)
			mark := again.Header().Get("Idempotent-Replayed")
			again.Header().Del("Idempotent-Replayed")
			if first.Code != test.status || again.Code != first.Code || !bytes.Equal(again.Body.Bytes(), first.Body.Bytes()) ||
				fmt.Sprint(again.Header()) != fmt.Sprint(first.Header()) || mark != "true" {
				t.Errorf("%s: %v, then %v, mark %q", key, first, again, mark)
			}
		}
	}
	if got := fmt.Sprint(s.charged(t)); got != "map[1:1]" {
		t.Errorf("charged %s", got)
	}
}

func quoted(key string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(key) + `"`
}

func TestOtherRequestUnderAKeyIsRefused(t *testing.T) {
	s := newServer(t)
	s.ask(bodyFor("1"), keyHeader, "k")
	if w := s.ask(bodyFor("2"), keyHeader, "k"); w.Code != 422 {
		t.Error(w)
	}
	if w := s.ask(bodyFor("2"), keyHeader, "k", "Authorization", "Bearer other-token"); w.Code != 201 {
		t.Error("of another account:", w)
	}
}

func TestInFlightIsAConflict(t *testing.T) {
	s := newServer(t)
	if !s.claim("shop\x00k") {
		t.Fatal("not claimed")
	}
	if w := s.ask(bodyFor("1"), keyHeader, "k"); w.Code != 409 || w.Header().Get("Retry-After") == "" {
		t.Error(w)
	}
	s.release("shop\x00k")
	if w := s.ask(bodyFor("1"), keyHeader, "k"); w.Code != 201 {
		t.Error(w)
	}
}

func TestFailureInTheMiddleLeavesNothing(t *testing.T) {
	s := newServer(t)
	lost := errors.New("lost")
	for range 2 {
		_, _, err := s.once("shop\x00k", [32]byte{}, func(tx *bolt.Tx) (answer, error) {
			if _, err := (charge{Order: "1", Amount: 1}).create(tx); err != nil {
				t.Fatal(err)
			}
			return answer{}, lost
		})
		if !errors.Is(err, lost) {
			t.Error(err)
		}
	}
	if got := s.charged(t); len(got) != 0 {
		t.Errorf("charged %v", got)
	}
}

func TestForgottenAfterTheWindow(t *testing.T) {
	s := newServer(t)
	s.ask(bodyFor("1"), keyHeader, "k")
	keys := func() (n int) {
		if err := s.forget(); err != nil {
			t.Fatal(err)
		}
		_ = s.db.View(func(tx *bolt.Tx) error { n = tx.Bucket(keysBucket).Stats().KeyN; return nil })
		return n
	}
	if n := keys(); n != 1 {
		t.Errorf("%d keys", n)
	}
	s.window = time.Nanosecond
	s.ask(bodyFor("1"), keyHeader, "k")
	if got := fmt.Sprint(s.charged(t)); got != "map[1:2]" {
		t.Errorf("charged %s", got)
	}
	if n := keys(); n != 0 {
		t.Errorf("%d keys", n)
	}
}

func TestCheckServerFindsNoFault(t *testing.T) {
	s := newServer(t)
	srv := httptest.NewServer(s)
	defer srv.Close()
	report, err := oncehttptest.CheckServer(t.Context(), oncehttptest.Check{
		NewRequest: func(ctx context.Context, key string, n int) (*http.Request, error) {
			req, err := http.NewRequestWithContext(ctx, "POST", srv.URL+"/charges", strings.NewReader(bodyFor(fmt.Sprint("check-", n))))
			if err != nil {
				return nil, err
			}
			req.Header.Set("Authorization", "Bearer shop-token")
			req.Header.Set("Idempotency-Key", key)
			return req, nil
		},
		Keyless: true,
		Quoted:  true,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%v", report)
	if !report.OK() || report.Changed.Status != 422 || report.Keyless.Status != 400 || report.Quoted.Verdict != oncehttptest.Right ||
		report.ReplayedHeader != "Idempotent-Replayed" {
		t.Error("is not as it should be")
	}
	if got := fmt.Sprint(s.charged(t)); got != "map[check-1:1 check-3:1]" {
		t.Errorf("charged %s", got)
	}
}
