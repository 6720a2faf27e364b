//go:build unix

package oncehttp_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/internal/reliability"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// These tests kill real processes, with a real store and real sockets, at every
// point of an operation's way, and demand of the processes that follow that
// each order is charged once. The program that dies is in crash_child_test.go.

// The points of a call and of a resumed operation, in their order.
var (
	callPoints = []string{
		"before Begin", "inside Begin", "after Begin",
		"dialling", "connected", "request half written", "request written", "answer's header read", "answer's body half read",
		"before the answer is stored", "inside the answer's commit", "answer stored",
		"before the answer is stored lazily", "answer stored lazily",
		"before the ledger", "ledger written", "before Ack", "inside Ack", "acknowledged",
	}
	resumePoints = []string{
		"before the claim", "inside the claim", "claimed",
		"dialling", "connected", "request half written", "request written", "answer's header read", "answer's body half read",
		"before the answer is stored", "inside the answer's commit", "answer stored",
		"handler called", "ledger written", "before Ack", "inside Ack", "acknowledged",
	}
)

func TestOneEffectWhereverACallIsKilled(t *testing.T) {
	deaths := make(deathCount)
	t.Run("points", func(t *testing.T) {
		for _, point := range callPoints {
			for n := 1; n <= times(4); n++ {
				death := life{Kill: "call: " + point, Nth: n, Background: n == 2}
				crash(t, &deaths, fmt.Sprintf("%s/%d", point, n), death)
			}
		}
	})
	deaths.check(t, "call: ", callPoints)
	reportKills(t, "kill -9 at each step of a call", "real processes and sockets; the next life resumes", len(callPoints)*times(4))
}

func TestOneEffectWhereverResumeIsKilled(t *testing.T) {
	deaths := make(deathCount)
	t.Run("points", func(t *testing.T) {
		for _, point := range resumePoints {
			for n := 1; n <= times(4); n++ {
				// The life before leaves operations that were sent, or, at
				// times, answers that were not acknowledged.
				before := life{Kill: "call: request written", Nth: 2 + n}
				if n == 2 {
					before = life{Kill: "call: before Ack", Nth: 1}
				}
				crash(t, &deaths, fmt.Sprintf("%s/%d", point, n), before, life{Kill: "resume: " + point, Nth: n})
			}
		}
	})
	deaths.check(t, "resume: ", resumePoints)
	reportKills(t, "kill -9 at each step of a resumption", "after a life that was killed in a call", len(resumePoints)*times(4))
}

func TestOneEffectWhenKilledAgainAndAgain(t *testing.T) {
	deaths := make(deathCount)
	t.Run("seeds", func(t *testing.T) {
		for seed := range times(30) {
			rng := rand.New(rand.NewPCG(uint64(seed), 1))
			var lives []life
			for i := range 2 + rng.IntN(3) {
				l := life{Kill: "resume: " + resumePoints[rng.IntN(len(resumePoints))], Nth: 1 + rng.IntN(3), Background: rng.IntN(2) == 0}
				if i == 0 || rng.IntN(4) == 0 {
					l.Kill = "call: " + callPoints[rng.IntN(len(callPoints))]
				}
				lives = append(lives, l)
			}
			crash(t, &deaths, fmt.Sprint(seed), lives...)
		}
	})
	reportKills(t, "kill -9 again and again", "two to four lives, each killed at a random step", times(30))
}

func TestOneEffectWhenKilledAtAnyMoment(t *testing.T) {
	deaths := make(deathCount)
	t.Run("seeds", func(t *testing.T) {
		for seed := range times(30) {
			rng := rand.New(rand.NewPCG(uint64(seed), 2))
			var lives []life
			for range 3 {
				lives = append(lives, life{After: time.Duration(rng.ExpFloat64() * float64(15*time.Millisecond)), Background: rng.IntN(2) == 0})
			}
			crash(t, &deaths, fmt.Sprint(seed), lives...)
		}
	})
	deaths.check(t, "any ", []string{"moment"})
	reportKills(t, "kill -9 at any moment", "three lives, each killed after a random time", times(30))
}

// reportKills reports histories, each of which has failed its test if a promise was
// broken.
func reportKills(t *testing.T, class, how string, histories int) {
	t.Helper()
	reliability.Report(t, reliability.Result{Class: class, How: how, Cases: histories})
}

// TestPoisonedOperationIsSetAside: an operation that is the death of its process
// does not hold up the others, and not for ever.
func TestPoisonedOperationIsSetAside(t *testing.T) {
	if testing.Short() {
		t.Skip("ten processes")
	}
	t.Parallel()
	h := newHistory(t, 4)
	l := life{Poison: "order-1", Orders: 4}
	for n := 1; ; n++ {
		if n > 8 {
			t.Fatal("the eighth life still died of the poisoned operation")
		}
		if l.Number = n; !h.live(t, l) {
			break
		}
		h.inspect(t, n)
	}
	paid := make(map[string]int)
	var unknown []string
	for _, e := range readJournal(h.dir) {
		switch e.verb {
		case "paid":
			paid[e.args[0]]++
		case "unknown":
			unknown = append(unknown, strings.Join(e.args, " "))
		}
	}
	effects := h.server.EffectsByBody()
	for i, want := range []int{1, 0, 1, 1} {
		order := fmt.Sprintf("order-%d", i)
		if got := effects[bodyOf(order)]; got != want {
			t.Errorf("%s has %d effects, want %d", order, got, want)
		}
		if got := paid[order]; min(got, 1) != want {
			t.Errorf("%s is %d times in the ledger", order, got)
		}
	}
	if !slices.Equal(unknown, []string{"order-1 poison"}) {
		t.Errorf("handler was told of %q, want order-1 poison", unknown)
	}
}

// times is how often something is repeated.
func times(n int) int {
	if testing.Short() {
		return 1
	}
	return n
}

// deathCount counts deaths by point.
type deathCount map[string]int

var deathsMu sync.Mutex // guards all of them

func (d deathCount) check(t *testing.T, prefix string, points []string) {
	t.Helper()
	deathsMu.Lock()
	defer deathsMu.Unlock()
	for _, p := range points {
		if strings.HasPrefix(p, "inside ") && testing.Short() {
			continue // once is not enough to be sure to hit a commit
		}
		if d[prefix+p] == 0 && !t.Failed() {
			t.Errorf("nobody was killed at %q", prefix+p)
		}
	}
	t.Logf("killed: %v", d)
}

const shopOrders = 6

// crash lets the lives follow one another, and then one that is not killed.
func crash(t *testing.T, deaths *deathCount, name string, lives ...life) {
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		h := newHistory(t, shopOrders)
		for i, l := range append(lives, life{}) {
			l.Number, l.Orders = i+1, shopOrders
			killed := h.live(t, l)
			h.inspect(t, l.Number)
			if l.Kill == "" && l.After == 0 && killed {
				t.Fatal("was killed without having been told to")
			}
		}
		h.check(t)
		deathsMu.Lock()
		defer deathsMu.Unlock()
		for _, e := range readJournal(h.dir) {
			if e.verb == "killed" {
				(*deaths)[strings.Join(e.args, " ")]++
			}
		}
	})
}

// A history is a sequence of lives that share a store, a journal and a server.
type history struct {
	dir    string
	orders int
	server *oncehttptest.Server
	url    string
	seed   uint64

	begun map[string]bool // keys that had a record at some life's end
	acked map[string]int  // life at whose end an order was first acknowledged
}

func newHistory(t *testing.T, orders int) *history {
	h := &history{
		dir: t.TempDir(), orders: orders, server: oncehttptest.New(oncehttptest.Charges()),
		begun: make(map[string]bool), acked: make(map[string]int),
	}
	for _, b := range []byte(t.Name()) {
		h.seed = h.seed*31 + uint64(b)
	}
	// The network is not perfect either.
	h.server.FaultFunc(func(a oncehttptest.Attempt) oncehttptest.Fault {
		switch {
		case a.N == 1 && bytes.Contains(a.Body, []byte("order-1")):
			return oncehttptest.DropResponse()
		case a.N == 1 && bytes.Contains(a.Body, []byte("order-2")):
			return oncehttptest.Slow(40 * time.Millisecond)
		case a.N <= 2 && bytes.Contains(a.Body, []byte("order-3")):
			return oncehttptest.Status(http.StatusServiceUnavailable)
		case a.N == 2 && bytes.Contains(a.Body, []byte("order-4")):
			return oncehttptest.TruncateResponse(9)
		}
		return oncehttptest.Fault{}
	})
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// Whatever arrives, if only half of it, was recorded before.
		key := r.Header.Get("Idempotency-Key")
		if r.Method == http.MethodPost && !slices.ContainsFunc(readJournal(h.dir), func(e event) bool {
			return (e.verb == "begun" || e.verb == "taken") && e.args[0] == key
		}) {
			t.Errorf("key %s is on the wire before its record was durable", key)
		}
		h.server.ServeHTTP(w, r)
	}))
	h.url = front.URL
	t.Cleanup(func() {
		h.server.Close()
		front.Close()
		if t.Failed() {
			text, _ := os.ReadFile(filepath.Join(h.dir, "journal"))
			t.Logf("journal:\n%s", text)
			for _, a := range h.server.Attempts() {
				t.Logf("wire: %s %s %s %v %d", a.Key, a.Body, a.Fault, a.Action, a.Status)
			}
		}
	})
	return h
}

// live runs the shop for one life. It returns true if it was killed.
func (h *history) live(t *testing.T, l life) bool {
	t.Helper()
	l.Dir, l.URL, l.Seed = h.dir, h.url, h.seed
	text, err := json.Marshal(l)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), lifeInEnv+"="+string(text), "GORACE=atexit_sleep_ms=0")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGQUIT) } // its stacks tell where it hangs
	cmd.WaitDelay = 5 * time.Second
	err = cmd.Run()
	if bytes.Contains(out.Bytes(), []byte("DATA RACE")) {
		t.Fatalf("life %d: %s", l.Number, out.Bytes())
	}
	if err == nil {
		return false
	}
	if s, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && s.Signaled() && s.Signal() == syscall.SIGKILL && ctx.Err() == nil {
		return true
	}
	t.Fatalf("life %d %+v: %v\n%s", l.Number, l, err, out.Bytes())
	return false
}

// inspect looks at the store after a life. Everything that was on the wire must
// be in it, and what is acknowledged must be in the ledger.
func (h *history) inspect(t *testing.T, life int) {
	t.Helper()
	path := filepath.Join(h.dir, "store.db")
	attempts := h.server.Attempts()
	if _, err := os.Stat(path); os.IsNotExist(err) && len(attempts) == 0 {
		return // killed before the store was there
	}
	store, err := oncehttp.OpenBolt(path)
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	records := func(key string) (list []oncehttp.Record) {
		ids, err := store.Find(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		for _, id := range ids {
			rec, err := store.Get(t.Context(), id)
			if err != nil {
				t.Fatal(err)
			}
			list = append(list, *rec)
		}
		return list
	}
	for _, a := range attempts {
		if n := len(records(a.Key)); n != 1 {
			t.Errorf("key %s of %s was on the wire, and has %d records after life %d", a.Key, a.Body, n, life)
		}
	}
	paid := make(map[string]bool)
	for _, e := range readJournal(h.dir) {
		switch e.verb {
		case "paid":
			paid[e.args[0]] = true
		case "start":
			order, key := e.args[0], e.args[1]
			for _, rec := range records(key) {
				h.begun[key] = true
				if rec.Acked && h.acked[order] == 0 {
					h.acked[order] = life
				}
			}
		}
	}
	for order := range h.acked {
		if !paid[order] && !plain(order) {
			t.Errorf("%s is acknowledged after life %d, and not in the ledger", order, life)
		}
	}
}

// plain reports whether an order is charged by a plain Do, which has nobody to
// acknowledge its answer.
func plain(order string) bool {
	var i int
	fmt.Sscanf(order, "order-%d", &i)
	return i%3 == 2
}

func bodyOf(order string) string { return `{"order":"` + order + `"}` }

// check demands that, at the end, every order was charged once, under one key,
// and is in the ledger with the answer to that.
func (h *history) check(t *testing.T) {
	t.Helper()
	h.server.Wait()
	charges := h.charges(t)
	effects := h.server.EffectsByBody()
	keys := make(map[string]map[string]bool) // by body
	for _, a := range h.server.Attempts() {
		if a.Method != http.MethodPost || a.Partial {
			continue
		}
		body := string(a.Body)
		if keys[body] == nil {
			keys[body] = make(map[string]bool)
		}
		keys[body][a.Key] = true
		if a.Action == oncehttptest.Mismatch || a.Account != shopSecret {
			t.Errorf("key %s was sent with another payload or other credentials: %+v", a.Key, a)
		}
	}
	paid := make(map[string][]event) // the ledger
	for _, e := range readJournal(h.dir) {
		switch e.verb {
		case "violation", "unknown":
			t.Errorf("life %d: %s", e.life, strings.Join(e.args, " "))
		case "paid":
			order, id := e.args[0], e.args[1]
			if before := paid[order]; len(before) > 0 && before[len(before)-1].life == e.life {
				t.Errorf("%s was handed over twice in life %d", order, e.life)
			}
			if acked := h.acked[order]; acked != 0 && acked < e.life && !plain(order) {
				t.Errorf("%s was acknowledged in life %d and handed over again in life %d", order, acked, e.life)
			}
			paid[order] = append(paid[order], e)
			if want := charges[order]; len(want) != 1 || id != want[0] {
				t.Errorf("%s: the ledger has charge %s, the server %v", order, id, want)
			}
		}
	}
	for i := range h.orders {
		order := fmt.Sprintf("order-%d", i)
		if n := effects[bodyOf(order)]; n != 1 {
			t.Errorf("%s has %d effects, want 1", order, n)
		}
		if n := len(keys[bodyOf(order)]); n != 1 {
			t.Errorf("%s was on the wire with %d keys, want 1", order, n)
		}
		if len(paid[order]) == 0 {
			t.Errorf("%s is not in the ledger", order)
		}
	}
	// What was recorded was not forgotten: each key that ever had a record was
	// sent. (An order's second key would show above.)
	sent := make(map[string]bool)
	for _, a := range h.server.Attempts() {
		sent[a.Key] = true
	}
	for key := range h.begun {
		if !sent[key] {
			t.Errorf("key %s had a record, and was never sent", key)
		}
	}
	h.checkNothingOpen(t)
}

// checkNothingOpen demands that every operation was acknowledged.
func (h *history) checkNothingOpen(t *testing.T) {
	t.Helper()
	store, err := oncehttp.OpenBolt(filepath.Join(h.dir, "store.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	open, err := store.List(t.Context(), 0, 100)
	if err != nil {
		t.Fatal(err)
	}
	for _, rec := range open {
		t.Errorf("key %s is still open: %v, acked %v", rec.Key, rec.Outcome, rec.Acked)
	}
}

// charges returns the ids of the charges by order.
func (h *history) charges(t *testing.T) map[string][]string {
	t.Helper()
	resp, err := http.Get(h.url + "/v1/charges")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var list struct{ Data []struct{ ID, Order string } }
	if err := json.NewDecoder(resp.Body).Decode(&list); err != nil {
		t.Fatal(err)
	}
	ids := make(map[string][]string)
	for _, c := range list.Data {
		ids[c.Order] = append(ids[c.Order], c.ID)
	}
	return ids
}
