package oncehttptest_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp/oncehttptest"
)

func newCharge(ctx context.Context, key string, n int) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, "POST", "https://api.example/v1/charges", strings.NewReader(fmt.Sprintf("order=check-%d", n)))
	if err == nil {
		req.Header.Set("Idempotency-Key", key)
	}
	return req, err
}

// A hasty server looks a key up, charges, and stores the answer, as one does who
// has not thought of two at once. Its faults can be switched on.
type hasty struct {
	http.Handler
	locks, anyPayload, failsOnQuotes, keyRequired, says409, latest, marks bool

	mu      sync.Mutex // guards what follows
	answers map[string]*httptest.ResponseRecorder
	idle    *sync.Cond // L is &mu; busy is false again
	busy    bool       // one is being charged, with locks
}

func (h *hasty) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	key := r.Header.Get("Idempotency-Key")
	body, _ := io.ReadAll(r.Body)
	if h.failsOnQuotes && strings.HasPrefix(key, `"`) {
		w.WriteHeader(500)
		return
	}
	if h.keyRequired && len(r.Header["Idempotency-Key"]) == 0 {
		w.WriteHeader(400)
		return
	}
	if h.locks {
		h.mu.Lock()
		for h.busy {
			h.idle.Wait()
		}
		h.busy = true
		h.mu.Unlock()
		defer func() {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.busy = false
			h.idle.Signal()
		}()
	}
	if !h.anyPayload {
		key += string(body) // another payload is another request
	}
	h.mu.Lock()
	answer := h.answers[key]
	h.mu.Unlock()
	if answer != nil && h.says409 {
		w.WriteHeader(409)
		return
	}
	if answer == nil {
		answer = httptest.NewRecorder()
		r.Body = io.NopCloser(bytes.NewReader(body))
		h.Handler.ServeHTTP(answer, r)
		h.mu.Lock()
		h.answers[key] = answer
		h.mu.Unlock()
	} else if h.marks {
		w.Header().Set("X-Replay", "True")
	}
	text := answer.Body.Bytes()
	if h.latest {
		text = bytes.TrimSuffix(text, []byte("}"))
	}
	w.Write(text)
	if h.latest {
		time.Sleep(time.Second)
		fmt.Fprintf(w, `,"time":%d}`, time.Now().Unix())
	}
}

// check runs CheckServer in a bubble. The server takes 1 s for a charge.
func check(t *testing.T, s *oncehttptest.Server, c oncehttptest.Check) (r oncehttptest.Report, err error) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		c.Client = cmp.Or(c.Client, &http.Client{Transport: s.Transport()})
		if c.NewRequest == nil {
			c.NewRequest = newCharge
		}
		r, err = oncehttptest.CheckServer(t.Context(), c)
		s.Close()
	})
	return r, err
}

// bare is a server that does nothing about keys, around a handler that may.
func bare(h http.Handler) *oncehttptest.Server {
	s := oncehttptest.New(h)
	s.KeyHeader = "None"
	return s
}

func hastily(set func(*hasty)) func(http.Handler) *oncehttptest.Server {
	return func(effect http.Handler) *oncehttptest.Server {
		h := &hasty{Handler: effect, answers: map[string]*httptest.ResponseRecorder{}}
		h.idle = sync.NewCond(&h.mu)
		set(h)
		return bare(h)
	}
}

func forgetful(h http.Handler) *oncehttptest.Server {
	s := oncehttptest.New(h)
	s.Window = -1
	return s
}

// An effect takes 1 s and is counted.
type effect struct {
	http.Handler
	n atomic.Int32
}

func (e *effect) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	e.n.Add(1)
	time.Sleep(time.Second)
	e.Handler.ServeHTTP(w, r)
}

func slow(h http.Handler) http.Handler { return &effect{Handler: h} }

// says answers every request with the same body.
func says(body string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, body) })
}

func withoutID([]byte) string { return "" }

func TestCheckServerNamesEachFault(t *testing.T) {
	const right, WRONG, untold = oncehttptest.Right, oncehttptest.Wrong, oncehttptest.Untold
	type verdicts [5]oncehttptest.Verdict // in the order of Report
	all := oncehttptest.Check{Keyless: true, Quoted: true}
	for _, test := range []struct {
		name    string
		server  func(http.Handler) *oncehttptest.Server
		effect  http.Handler
		check   oncehttptest.Check
		want    verdicts
		effects int
		says    []string
		mark    string
	}{
		{"good", oncehttptest.New, oncehttptest.Charges(), all, verdicts{right, right, right, right, right}, 4, []string{
			`one effect, the same answer: id "ch_1"`, "refused with 400 Bad Request", `one effect, id "ch_2"; the other was refused with 409 Conflict`,
			"accepted with 200 OK: a key is not required", "taken for another key",
		}, "Idempotent-Replayed"},
		{"good, asked less", oncehttptest.New, oncehttptest.Charges(), oncehttptest.Check{}, verdicts{right, right, right, untold, untold}, 2,
			[]string{"not asked"}, "Idempotent-Replayed"},
		{"good, of the mark alone", oncehttptest.New, oncehttptest.Charges(), oncehttptest.Check{ID: withoutID}, verdicts{right, right, right, untold, untold}, 2,
			[]string{"one effect, the same answer: 200 OK"}, "Idempotent-Replayed"},
		{"ignores keys", bare, oncehttptest.Charges(), all, verdicts{WRONG, untold, WRONG, right, untold}, 5,
			[]string{`executed twice: id "ch_1", then id "ch_2"`, `both were executed: id "ch_`}, ""},
		{"ignores keys, and shows no id", bare, oncehttptest.Charges(), oncehttptest.Check{ID: withoutID}, verdicts{WRONG, untold, WRONG, untold, untold}, 4,
			[]string{"another answer the second time", "two answers"}, ""},
		{"answers all alike", bare, says("ok"), oncehttptest.Check{Quoted: true}, verdicts{untold, WRONG, untold, untold, untold}, 6,
			[]string{"the same answer, but nothing shows how many effects there were: set Check.ID", "given the answer to the first payload"}, ""},
		{"its id is not the effect's", bare, says(`{"id":"acct_1"}`), all, verdicts{untold, WRONG, untold, right, untold}, 7,
			[]string{"nothing shows how many effects"}, ""},
		{"forgets at once", forgetful, oncehttptest.Charges(), all, verdicts{WRONG, untold, right, right, untold}, 4,
			[]string{`executed twice: id "ch_1", then id "ch_2"`, "the other was refused with 409"}, ""},
		{"loses the race", hastily(func(h *hasty) { h.marks = true }), oncehttptest.Charges(), all, verdicts{right, WRONG, WRONG, right, right}, 6,
			[]string{"both were executed", `executed: id "ch_1", then id "ch_2"`}, "X-Replay"},
		{"takes any payload", hastily(func(h *hasty) { h.locks, h.anyPayload = true, true }), oncehttptest.Charges(), oncehttptest.Check{}, verdicts{right, WRONG, right, untold, untold}, 2,
			[]string{"given the answer to the first payload: its caller takes it for done", "the other has waited, or came when the first was done"}, ""},
		{"fails on quotes", hastily(func(h *hasty) { h.locks, h.failsOnQuotes, h.keyRequired = true, true, true }), oncehttptest.Charges(), all, verdicts{right, WRONG, right, right, WRONG}, 3,
			[]string{"fails with 500 Internal Server Error: send it bare", "refused with 400 Bad Request: a key is required"}, ""},
		{"says only that it is done", hastily(func(h *hasty) { h.locks, h.says409 = true, true }), oncehttptest.Charges(), all, verdicts{WRONG, untold, right, right, untold}, 3,
			[]string{"refused with 409 Conflict: the answer is not given again"}, ""},
		{"tells the latest state", hastily(func(h *hasty) { h.locks, h.latest = true, true }), oncehttptest.Charges(), oncehttptest.Check{}, verdicts{right, WRONG, right, untold, untold}, 3,
			[]string{`one effect, but not the same answer, byte for byte: id "ch_1"`}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			e := &effect{Handler: test.effect}
			s := test.server(e)
			r, err := check(t, s, test.check)
			if err != nil {
				t.Fatal(err)
			}
			got := verdicts{r.Repeated.Verdict, r.Changed.Verdict, r.Concurrent.Verdict, r.Keyless.Verdict, r.Quoted.Verdict}
			if got != test.want {
				t.Errorf("verdicts %v, want %v", got, test.want)
			}
			if want := got[0] == right && got[1] == right && got[2] == right && got[3] != WRONG && got[4] != WRONG; r.OK() != want {
				t.Errorf("OK is %v", r.OK())
			}
			if n := int(e.n.Load()); n != test.effects {
				t.Errorf("%d effects, want %d", n, test.effects)
			}
			if n := len(s.Attempts()); n > 7 {
				t.Errorf("%d requests", n)
			}
			for _, text := range test.says {
				if !strings.Contains(r.String(), text) {
					t.Errorf("does not say %q", text)
				}
			}
			if r.ReplayedHeader != test.mark {
				t.Errorf("mark of a replay %q, want %q", r.ReplayedHeader, test.mark)
			}
			if t.Failed() {
				t.Logf("\n%v", r)
			}
		})
	}
}

// TestCheckServerDoesNotGuess: what is lost or refused on the way tells nothing,
// and is not sent again.
func TestCheckServerDoesNotGuess(t *testing.T) {
	none := oncehttptest.Fault{}
	for _, faults := range [][]oncehttptest.Fault{
		{none, oncehttptest.Status(503)},
		{none, oncehttptest.DropResponse()},
		{none, oncehttptest.TruncateResponse(3)},
		{none, none, oncehttptest.Status(429)},
		{none, none, none, oncehttptest.Status(503), oncehttptest.Status(503)},
		{none, none, none, none, oncehttptest.Status(500)},
	} {
		s := oncehttptest.New(slow(oncehttptest.Charges()))
		s.Script(faults...)
		r, err := check(t, s, oncehttptest.Check{})
		if err != nil || r.OK() {
			t.Errorf("%v: OK %v, %v\n%v", faults, r.OK(), err, r)
		}
		if n := len(s.Attempts()); n > 5 {
			t.Errorf("%v: %d requests", faults, n)
		}
	}
}

func TestCheckServerSaysWhyNothingCanBeTold(t *testing.T) {
	lost := errors.New("lost")
	for _, test := range []struct {
		name       string
		fault      oncehttptest.Fault
		newRequest func(context.Context, string, int) (*http.Request, error)
		want       string
		requests   int
	}{
		{"refused", oncehttptest.Unauthorized(), newCharge, "the first request was answered 401 Unauthorized", 1},
		{"redirected", oncehttptest.Redirect(307, "https://b.example/"), newCharge, "the first request was answered 307 Temporary Redirect", 1},
		{"no answer", oncehttptest.DropResponse(), newCharge, "the first request: ", 1},
		{"too long", oncehttptest.Answer(200, strings.Repeat(" ", 2<<20)), newCharge, "an answer longer than 1048576 bytes", 1},
		{"no request", oncehttptest.Fault{}, func(context.Context, string, int) (*http.Request, error) { return nil, lost }, "Check.NewRequest: lost", 0},
		{"no key", oncehttptest.Fault{}, func(ctx context.Context, _ string, n int) (*http.Request, error) { return newCharge(ctx, "mine", n) },
			"Check.NewRequest does not put the key into the request", 0},
		{"one payload", oncehttptest.Fault{}, func(ctx context.Context, key string, _ int) (*http.Request, error) { return newCharge(ctx, key, 1) },
			"Check.NewRequest makes the same payload for different n", 0},
		{"many payloads", oncehttptest.Fault{}, func() func(ctx context.Context, key string, _ int) (*http.Request, error) {
			made := 0
			return func(ctx context.Context, key string, _ int) (*http.Request, error) {
				made++
				return newCharge(ctx, key, made)
			}
		}(), "Check.NewRequest makes different payloads for the same n", 0},
	} {
		s := oncehttptest.New(oncehttptest.Charges())
		s.Script(test.fault)
		r, err := check(t, s, oncehttptest.Check{NewRequest: test.newRequest})
		if err == nil || !strings.Contains(err.Error(), test.want) || r != (oncehttptest.Report{}) {
			t.Errorf("%s: %v, %v, want %q", test.name, r, err, test.want)
		}
		if n := len(s.Attempts()); n != test.requests {
			t.Errorf("%s: %d requests, want %d", test.name, n, test.requests)
		}
	}
}

func TestCheckServerEndsWithItsContext(t *testing.T) {
	for _, forgets := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			s := oncehttptest.New(oncehttptest.Charges())
			s.Script(oncehttptest.Fault{}, oncehttptest.Stall(-1))
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			_, err := oncehttptest.CheckServer(ctx, oncehttptest.Check{
				Client: &http.Client{Transport: s.Transport()},
				NewRequest: func(ctx context.Context, key string, n int) (*http.Request, error) {
					if forgets {
						ctx = context.Background()
					}
					return newCharge(ctx, key, n)
				},
			})
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
			s.Close()
		})
	}
}

// TestCheckServerOnSockets: net/http would send again, by itself, what it loses on
// a connection that was used before.
func TestCheckServerOnSockets(t *testing.T) {
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	s := oncehttptest.Start(t, oncehttptest.Charges())
	s.Script(oncehttptest.Fault{}, oncehttptest.DropRequest())
	r, err := oncehttptest.CheckServer(t.Context(), oncehttptest.Check{
		Client: &http.Client{Transport: transport},
		NewRequest: func(ctx context.Context, key string, n int) (*http.Request, error) {
			req, err := http.NewRequestWithContext(ctx, "POST", fmt.Sprintf("%s/?order=%d", s.URL, n), strings.NewReader(fmt.Sprintf("order=%d", n)))
			if err == nil {
				req.Header.Set("Idempotency-Key", key)
			}
			return req, err
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	if n := len(s.Attempts()); n != 4 || r.Repeated.Verdict != oncehttptest.Untold || r.Concurrent.Verdict != oncehttptest.Right {
		t.Errorf("%d requests\n%v", n, r)
	}
}

// TestCheckServerMeets: the two at once are two at once, whatever the order in
// which their connections are made.
func TestCheckServerMeets(t *testing.T) {
	s := oncehttptest.New(slow(oncehttptest.Charges()))
	s.Script(oncehttptest.Fault{}, oncehttptest.Fault{}, oncehttptest.Fault{}, oncehttptest.SlowDial(3*time.Second))
	r, err := check(t, s, oncehttptest.Check{})
	if err != nil || r.Concurrent.Status != http.StatusConflict {
		t.Errorf("%v\n%v", err, r)
	}
}
