//go:build unix

package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/oncehttp/oncehttp"
)

const urlInEnv = "ONCEHTTP_EXAMPLE_URL"

// TestMain is the main function of a shop as well, which is run, and killed, as a
// process of its own. It pays the orders up to the number in its argument.
func TestMain(m *testing.M) {
	url := os.Getenv(urlInEnv)
	if url == "" {
		os.Exit(m.Run())
	}
	if err := payAll(config{key: "sk_test_kill", url: url, dir: os.Args[1]}, os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

const workers = 4

func payAll(c config, number string) error {
	var n int
	if _, err := fmt.Sscan(number, &n); err != nil {
		return err
	}
	s, err := c.open()
	if err != nil {
		return err
	}
	if err := s.resume(context.Background()); err != nil {
		return err
	}
	orders := make(chan string)
	failed := make(chan error, n)
	var paying sync.WaitGroup
	for range workers {
		paying.Go(func() {
			for order := range orders {
				if err := s.pay(context.Background(), order); err != nil {
					failed <- err
				}
			}
		})
	}
	for i := range n {
		order := fmt.Sprint("A-", i)
		// What an earlier life has begun is resume's: nothing else may finish it here.
		known, err := s.client.Lookup(context.Background(), oncehttp.KeyFor("order", order))
		if err != nil {
			return err
		}
		if len(known) == 0 {
			orders <- order
		}
	}
	close(orders)
	paying.Wait()
	close(failed)
	if err := <-failed; err != nil {
		return err
	}
	return s.Close()
}

// When a shop is killed, counted in requests of its life that have arrived.
type kill struct {
	at    int
	point int           // of that request
	after time.Duration // the answer of that request, for a killing at any time
}

const (
	beforeEffect = iota
	beforeAnswer
	anyTime
)

// A killer stands before a bank, and kills the shop.
type killer struct {
	*bank

	mu     sync.Mutex // guards the following
	plan   *kill      // of this life; nil means that it lives
	seen   int        // requests of this life
	shop   *os.Process
	dead   chan struct{}
	flying map[*http.Request]bool // requests that have arrived and are not answered
	caught int                    // of flying, when the kill came
}

func (k *killer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	k.mu.Lock()
	k.seen++
	plan, dead := k.plan, k.dead
	mine := plan != nil && k.seen == plan.at
	k.flying[r] = true
	k.mu.Unlock()
	defer func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		delete(k.flying, r)
	}()
	if mine && plan.point == beforeEffect {
		k.strike()
		<-dead
	}
	if !mine || plan.point != beforeAnswer {
		k.bank.ServeHTTP(w, r)
	} else {
		answer := httptest.NewRecorder()
		k.bank.ServeHTTP(answer, r) // made and stored; the answer stays here
		k.strike()
		<-dead
	}
	if mine && plan.point == anyTime {
		time.AfterFunc(plan.after, k.strike)
	}
}

// strike kills the shop, and counts what it was waiting for.
func (k *killer) strike() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.shop.Signal(syscall.SIGKILL)
	k.caught = len(k.flying)
}

// TestOneEachThroughKills: a shop that pays with stripe-go is killed again and
// again, while requests are on their way. Each order has one PaymentIntent, which
// is in the ledger, and is acknowledged.
func TestOneEachThroughKills(t *testing.T) {
	kills, seed := 50, uint64(1)
	if testing.Short() {
		kills = 8
	}
	rng := rand.New(rand.NewPCG(seed, 0))
	plans, orders := make([]kill, kills), workers
	for i := range plans {
		p := kill{at: 1 + workers + rng.IntN(6), point: rng.IntN(3), after: time.Duration(rng.Int64N(int64(3 * time.Millisecond)))}
		if i%4 == 3 {
			p.at = 1 // while what the last life has left is resumed, but never twice on end: five times would be poison
		}
		plans[i] = p
		orders += p.at + 2*workers // more than a life can pay
	}
	k := &killer{bank: newBank(), flying: make(map[*http.Request]bool)}
	server := httptest.NewServer(k)
	defer server.Close()
	defer k.Close()
	dir := t.TempDir()

	live := func(plan *kill) (*os.ProcessState, string) {
		cmd := exec.Command(os.Args[0], dir, fmt.Sprint(orders))
		cmd.Env = append(os.Environ(), urlInEnv+"="+server.URL)
		said, err := os.CreateTemp(t.TempDir(), "")
		if err != nil {
			t.Fatal(err)
		}
		defer said.Close()
		cmd.Stdout, cmd.Stderr = said, said
		k.mu.Lock()
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		k.plan, k.seen, k.caught, k.shop, k.dead = plan, 0, 0, cmd.Process, make(chan struct{})
		k.mu.Unlock()
		timeout := time.AfterFunc(time.Minute, func() { cmd.Process.Signal(syscall.SIGABRT) }) // it says where it hangs
		defer timeout.Stop()
		cmd.Wait()
		close(k.dead)
		if _, err := said.Seek(0, io.SeekStart); err != nil {
			t.Fatal(err)
		}
		log, err := io.ReadAll(said)
		if err != nil {
			t.Fatal(err)
		}
		return cmd.ProcessState, string(log)
	}
	hits := 0
	for i, plan := range plans {
		state, log := live(&plan)
		if status, ok := state.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
			t.Fatalf("life %d was to be killed, and ended by itself: %v\n%s", i, state, log)
		}
		k.mu.Lock()
		if k.caught > 0 {
			hits++
		}
		k.mu.Unlock()
	}
	if state, log := live(nil); !state.Success() {
		t.Fatalf("the last life: %v\n%s", state, log)
	}
	if hits == 0 {
		t.Error("no kill has hit a request that was sent and not answered")
	}

	made := map[string][]string{}
	for _, i := range k.made() {
		made[i.Metadata["order"]] = append(made[i.Metadata["order"]], i.ID)
	}
	s, err := config{key: "sk_test_kill", url: server.URL, dir: dir}.open()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for i := range orders {
		order := fmt.Sprint("A-", i)
		if ids := made[order]; len(ids) != 1 || s.lines[order] != order+" succeeded "+ids[0] {
			t.Errorf("order %s has PaymentIntents %v, and in the ledger %q", order, ids, s.lines[order])
		}
	}
	if len(made) != orders || len(s.lines) != orders {
		t.Errorf("%d orders; %d were paid, %d are in the ledger", orders, len(made), len(s.lines))
	}
	stats, err := s.client.Stats(t.Context())
	if err != nil || stats.Pending+stats.Unacknowledged+stats.Unknown != 0 {
		t.Errorf("left open: %+v, %v", stats.Counts, err)
	}
	resent := len(k.Attempts()) - orders
	t.Logf("%d orders, %d kills, %d of them while a request was sent and not answered, %d requests sent again", orders, kills, hits, resent)
}
