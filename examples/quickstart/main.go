// Quickstart shows what oncehttp does, and what happens without it. It needs no
// set-up:
//
//	go run ./examples/quickstart
//
// A payment API on a loopback socket loses requests, loses answers, cuts answers
// short, and refuses some with 429 and 503. A child process charges 200 orders
// through it and is killed (SIGKILL) several times while its requests are on the
// wire. Afterwards the server's own log is counted by order: who was charged
// twice, who never, and whose charge is missing from the ledger. Four ways to
// write the child meet the same faults, kills, attempts and backoff:
//
//   - no key: a retry loop around http.Client
//   - key per call: what SDKs do, a fresh Idempotency-Key for each call
//   - key = order id: the honest way to do it by hand
//   - oncehttp: after a restart it does not send its orders again; it resumes
//
// To read the program, begin with ours.go, which is the one part that is meant to
// be copied.
//
//	main.go         the three scenarios, and the supervisor that restarts the child
//	server.go       the API with its faults, and the trigger of the kills
//	child.go        the child: pass by pass through its orders
//	contenders.go   the three ways to do it by hand
//	ours.go         the way with oncehttp
//	ledger.go       the file in which every contender records its charges
//	report.go       the counting, and the table
//
// The program exits with 0 only if oncehttp was perfect.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

func main() {
	if spec := os.Getenv(childEnv); spec != "" {
		os.Exit(childMain(spec))
	}
	seed := flag.Uint64("seed", 0, "repeats the faults and the kills of a run; 0 means a random one")
	orders := flag.Int("orders", 200, "number of orders, at least 40")
	verbose := flag.Bool("v", false, "show what the children say")
	flag.Parse()
	if *orders < 40 || flag.NArg() > 0 {
		flag.Usage()
		os.Exit(2)
	}
	if *seed == 0 {
		*seed = 1 + rand.Uint64N(1e6)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Stdout, *seed, *orders, *verbose); err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		stop()
		os.Exit(1)
	}
}

// run runs all scenarios and prints the table. It is an error if oncehttp was
// not perfect.
func run(ctx context.Context, out io.Writer, seed uint64, orders int, verbose bool) error {
	ctx, cancel := context.WithTimeoutCause(ctx, 2*time.Minute, errors.New("it took more than 2 minutes"))
	defer cancel()
	dir, err := os.MkdirTemp("", "oncehttp-quickstart-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)

	fmt.Fprintf(out, "quickstart -seed %d -orders %d\n", seed, orders)
	start := time.Now()
	table := make(results)
	scenarios := []scenario{storm(seed, orders, 4), afterWindow(5), outage(100, 2*time.Second)}
	for _, s := range scenarios {
		s.dir, s.verbose = filepath.Join(dir, s.name), verbose
		fmt.Fprintf(out, "\n%s: %s\n", s.name, s.about)
		if table[s.name], err = s.run(ctx, out); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	table.print(out, scenarios)
	fmt.Fprintf(out, "\nfinished in %.1f s\n", time.Since(start).Seconds())
	return table.verdict(scenarios)
}

// A scenario is what happens to every contender.
type scenario struct {
	name, about string
	orders      int
	workers     int           // orders that a child charges at once
	kills       []int         // the child is killed when so many orders have been charged
	faults      faults        // of the server
	rest        time.Duration // between a kill and the restart
	window      time.Duration // that the provider's documentation states; 0 means 24 h
	down        time.Duration // the server is down for so long, from the first request on

	dir     string // for ledgers and stores
	verbose bool
}

// storm is ordinary bad weather, and a process that dies in it.
func storm(seed uint64, orders, kills int) scenario {
	s := scenario{
		name:    "storm",
		about:   fmt.Sprintf("%d orders; about 30%% of the attempts meet a fault; the child is killed %d times", orders, kills),
		orders:  orders,
		workers: 8,
		faults:  stormFaults(seed),
	}
	rng := rand.New(rand.NewPCG(seed, 0))
	part := orders / (kills + 1)
	for i := range kills {
		s.kills = append(s.kills, part*i+part/2+rng.IntN(part/2+1))
	}
	return s
}

// afterWindow is a restart that comes so late that the server has forgotten the
// keys. All orders have been charged, and no answer was seen.
func afterWindow(orders int) scenario {
	return scenario{
		name:    "late restart",
		about:   fmt.Sprintf("%d orders are charged, the child is killed before any answer, and started again when the server has forgotten the keys", orders),
		orders:  orders,
		workers: orders,
		kills:   []int{orders},
		faults:  silentFaults(),
		rest:    realWindow + 500*time.Millisecond,
		window:  statedWindow,
	}
}

// outage is a server that is down for a while.
func outage(orders int, down time.Duration) scenario {
	return scenario{
		name:    "outage",
		about:   fmt.Sprintf("%d orders; the server answers 503 to everything for %v", orders, down),
		orders:  orders,
		workers: 8,
		down:    down,
	}
}

// run runs the scenario for all contenders at once, each with a server and a
// directory of its own.
func (s scenario) run(ctx context.Context, out io.Writer) (map[string]result, error) {
	var (
		all  sync.WaitGroup
		mu   sync.Mutex // guards the following, and out
		rows = make(map[string]result)
		errs []error
	)
	say := func(who, format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Fprintf(out, "  %-14s %s\n", who, fmt.Sprintf(format, args...))
	}
	for _, c := range contenders {
		all.Go(func() {
			r, err := s.runOne(ctx, c, func(format string, args ...any) { say(c.name, format, args...) })
			mu.Lock()
			defer mu.Unlock()
			rows[c.name] = r
			if err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", c.name, err))
			}
		})
	}
	all.Wait()
	return rows, errors.Join(errs...)
}

// runOne runs the scenario for one contender: it starts the child, and starts it
// again after each kill, until the child says that it has nothing left to do.
func (s scenario) runOne(ctx context.Context, c contender, say func(string, ...any)) (result, error) {
	start := time.Now()
	dir := filepath.Join(s.dir, c.name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return result{}, err
	}
	srv := startServer(s.faults, s.kills)
	defer srv.close()
	if s.down > 0 {
		srv.outage(s.down, func(requests int) { say("the server is back, after %d requests", requests) })
	}
	j := job{Contender: c.name, URL: srv.url, Dir: dir, Orders: s.orders, Workers: s.workers, Window: s.window, Verbose: s.verbose}
	var kills []*strike
	for {
		k, err := j.supervise(ctx, srv)
		if err != nil {
			return result{}, err
		}
		if k == nil {
			break
		}
		kills = append(kills, k)
		say("killed with %3d orders charged; requests on the wire, not answered: %d", k.charged, k.hit)
		if !sleep(ctx, s.rest) {
			return result{}, context.Cause(ctx)
		}
	}
	r, err := count(srv, j, kills)
	say("done in %.1f s, with %d requests", time.Since(start).Seconds(), r.wire)
	return r, err
}

// supervise runs one child to its end. It returns the kill that was its end, or
// nil if it had nothing left to do.
func (j job) supervise(ctx context.Context, srv *server) (*strike, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, exe)
	cmd.Env = append(os.Environ(), childEnv+"="+j.String())
	cmd.Stderr = os.Stderr
	if _, err := cmd.StdinPipe(); err != nil { // its end tells the child that we are gone
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	srv.born(func() { _ = cmd.Process.Kill() }) // SIGKILL; TerminateProcess on Windows
	err = cmd.Wait()
	k := srv.died()
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case k == nil && err != nil:
		return nil, fmt.Errorf("child: %w", err)
	}
	return k, nil
}

// sleep waits for d; it reports false if ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
