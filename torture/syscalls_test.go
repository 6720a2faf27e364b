//go:build linux

package torture

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/internal/reliability"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// How the program that dies is started: what it does, where its files are, and
// whom it pays through.
const (
	cashierEnv    = "ONCEHTTP_TORTURE_CASHIER" // "charge" or "resume"; else this is no cashier
	cashierDir    = "ONCEHTTP_TORTURE_DIR"
	cashierServer = "ONCEHTTP_TORTURE_SERVER"
)

const cashierOrders = 12

// The system calls that a kill can hit: all that touch the store, the ledger and
// the connections.
var deadlyCalls = []string{
	"openat", "flock", "fallocate", "ftruncate", "pwrite64", "fsync", "fdatasync", "linkat", "renameat", "unlinkat",
	"socket", "connect", "write", "read", "shutdown", "close",
}

// TestKilledInSystemCalls records the system calls of a program that charges
// orders, and of one that resumes, and kills them at their entry, one after the
// other: SIGKILL from strace, so that the call is not made. The last life runs to
// its end. Whatever the lives before came to, each order that was recorded, or
// reached the server, was charged once, and is in the ledger.
func TestKilledInSystemCalls(t *testing.T) {
	strace, err := exec.LookPath("strace")
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal("strace is not installed")
		}
		skippedCalls = err
		t.Skip(err)
	}
	v := &verdict{Result: reliability.Result{Class: "kill -9 at the entry of system calls", How: "strace, at points of a recorded run; resumed, killed again, resumed"}}

	whole := newCashier(t, strace)
	charging := whole.record(t, "charge")
	whole.end(t)
	var resuming []point
	for n := 8; len(resuming) < 50; n++ { // of a life that left something to be resumed
		if n > 40 {
			t.Fatalf("only %d points of a resumption: %v", len(resuming), resuming)
		}
		half := newCashier(t, strace)
		half.live(t, "charge", point{"fdatasync", n})
		resuming = half.record(t, "resume")
		half.end(t)
	}
	rnd := rand.New(rand.NewPCG(*seed, 7))
	points := make([]point, amount(160, 600)) // evenly, from all kinds
	for i := range points {
		points[i] = charging[i*len(charging)/len(points)]
	}
	var mu sync.Mutex
	deaths := make(map[string]int)
	inFlight, died, rounds := 0, 0, amount(5, 50)
	for range rounds {
		var lives sync.WaitGroup
		slots := make(chan bool, 4)
		for _, p := range points {
			again := resuming[rnd.IntN(len(resuming))]
			slots <- true
			lives.Go(func() {
				defer func() { <-slots }()
				c := newCashier(t, strace)
				defer c.end(t)
				first := c.live(t, "charge", p)
				open := c.server.Attempts()
				second := c.live(t, "resume", again)
				c.finish(t)
				c.judge(t, v)
				mu.Lock()
				defer mu.Unlock()
				if first {
					deaths["charge: "+p.call]++
					inFlight += min(1, len(open)-len(c.inLedgerBefore))
				}
				if second {
					deaths["resume: "+again.call]++
				}
				if v.Cases++; first || second {
					died++
				}
			})
		}
		lives.Wait()
	}
	t.Logf("%d points of %d recorded, and %d of a resumption; %d of %d histories with a death: %v; %d with an order on the wire that was not in the ledger",
		len(points), len(charging), len(resuming), died, v.Cases, deaths, inFlight)
	if len(charging) < 50 {
		t.Errorf("only %d points of a life that charges: %v", len(charging), charging)
	}
	if died < v.Cases*3/4 { // threads share the calls out anew each time
		t.Errorf("only %d deaths in %d histories", died, v.Cases)
	}
	for _, call := range []string{"pwrite64", "fdatasync", "write", "read", "connect"} {
		if deaths["charge: "+call] == 0 && !testing.Short() { // which has few points
			t.Errorf("nobody died in %s", call)
		}
	}
	if inFlight == 0 {
		t.Error("no death came between a charge and its record")
	}
	reliability.Report(t, v.Result)
}

var skippedCalls error

// A point is the nth of a system call's entries in one thread: strace counts by
// thread.
type point struct {
	call string
	n    int
}

// A cashier is a program whose lives share a store, a ledger and a server.
type cashier struct {
	strace, dir    string
	server         *oncehttptest.Server
	listener       *httptest.Server
	inLedgerBefore []string // after the first life
}

func newCashier(t *testing.T, strace string) *cashier {
	t.Helper()
	c := &cashier{strace: strace, dir: t.TempDir(), server: oncehttptest.New(oncehttptest.Charges())}
	c.listener = httptest.NewServer(c.server)
	return c
}

// end removes what a cashier has left: there are tens of thousands in a long run.
func (c *cashier) end(t *testing.T) {
	t.Helper()
	c.listener.Close()
	if err := os.RemoveAll(c.dir); err != nil {
		t.Error(err)
	}
}

// command returns a life of the program, under strace with options.
func (c *cashier) command(t *testing.T, what string, options ...string) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	args := append([]string{"-f", "-qq", "-e", "signal=none", "-o", filepath.Join(c.dir, "strace.log")}, options...)
	cmd := exec.CommandContext(t.Context(), c.strace, append(args, self)...)
	if len(options) == 0 {
		cmd = exec.CommandContext(t.Context(), self)
	}
	cmd.Env = append(os.Environ(), cashierEnv+"="+what, cashierDir+"="+c.dir, cashierServer+"="+c.listener.URL)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	return cmd, &out
}

// record runs a life to its end and returns the points at which it could be killed.
func (c *cashier) record(t *testing.T, what string) (points []point) {
	t.Helper()
	cmd, out := c.command(t, what, "-e", "trace="+strings.Join(deadlyCalls, ","))
	if err := cmd.Run(); err != nil {
		t.Fatalf("under strace: %v\n%s", err, out)
	}
	log, err := os.Open(filepath.Join(c.dir, "strace.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	made := make(map[string]map[string]int) // by call and thread
	for lines := bufio.NewScanner(log); lines.Scan(); {
		thread, rest, _ := strings.Cut(lines.Text(), " ")
		call, _, ok := strings.Cut(strings.TrimSpace(rest), "(")
		if !ok || !slices.Contains(deadlyCalls, call) {
			continue
		}
		if made[call] == nil {
			made[call] = make(map[string]int)
		}
		made[call][thread]++
	}
	for _, call := range deadlyCalls {
		most := 0
		for _, n := range made[call] {
			most = max(most, n)
		}
		for n := range most {
			points = append(points, point{call, n + 1})
		}
	}
	return points
}

// live runs a life that is killed at a point, and reports whether it died there;
// threads share the calls out anew each time.
func (c *cashier) live(t *testing.T, what string, p point) (died bool) {
	t.Helper()
	cmd, out := c.command(t, what, "-e", "trace="+p.call, "-e", "inject="+p.call+":signal=SIGKILL:when="+strconv.Itoa(p.n))
	err := cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() && status.Signal() == syscall.SIGKILL {
			died = true
		}
	}
	if err != nil && !died {
		t.Errorf("%s, to be killed in %s/%d: %v\n%s", what, p.call, p.n, err, out)
	}
	if what == "charge" {
		c.inLedgerBefore = c.lines(t, "ledger")
	}
	return died
}

// finish runs the last life.
func (c *cashier) finish(t *testing.T) {
	t.Helper()
	cmd, out := c.command(t, "resume")
	if err := cmd.Run(); err != nil {
		t.Errorf("the last life: %v\n%s", err, out)
	}
}

// lines returns the lines of the ledger, "ORDER OUTCOME", or those of another
// file. The last may be torn, and is left out.
func (c *cashier) lines(t *testing.T, file string) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(c.dir, file))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	lines := strings.Split(string(text), "\n")
	return lines[:len(lines)-1]
}

func (c *cashier) judge(t *testing.T, v *verdict) {
	t.Helper()
	ledger, begun, effects := c.lines(t, "ledger"), c.lines(t, "begun"), c.server.EffectsByBody()
	sent := make(map[string]bool)
	for _, a := range c.server.Attempts() {
		sent[string(a.Body)] = true
	}
	for i := range cashierOrders {
		order := fmt.Sprint("order-", i)
		n := effects["order="+order]
		told := slices.Contains(ledger, order+" succeeded")
		switch {
		case n > 1:
			v.fail(t, &v.Twice, "%s was charged %d times", order, n)
		case n == 0 && sent["order="+order]:
			v.fail(t, &v.Lost, "%s was sent and is not charged", order)
		case n == 0 && slices.Contains(begun, order):
			v.fail(t, &v.Lost, "%s was recorded and is not charged", order)
		case n == 1 && !told:
			v.fail(t, &v.Lost, "%s was charged and is not in the ledger", order)
		case n == 0 && told:
			v.fail(t, &v.ToldFalsely, "%s is in the ledger and was not charged", order)
		}
	}
	for _, line := range ledger {
		if !strings.HasSuffix(line, " succeeded") {
			v.fail(t, &v.ToldFalsely, "the ledger says %q", line)
		}
	}
}

// cash is the program that dies. It resumes what is unfinished, and then, perhaps,
// charges orders, three at a time.
func cash(what, dir, server string) (err error) {
	ledger, err := os.OpenFile(filepath.Join(dir, "ledger"), os.O_APPEND|os.O_CREATE|os.O_WRONLY|os.O_SYNC, 0o600)
	if err != nil {
		return err
	}
	begun, err := os.OpenFile(filepath.Join(dir, "begun"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	write := func(order string, outcome oncehttp.Outcome) error {
		_, err := fmt.Fprintf(ledger, "%s %v\n", order, outcome)
		return err
	}
	client, err := oncehttp.Open(filepath.Join(dir, "operations.db"), &oncehttp.Options{
		BackoffBase: time.Millisecond,
		BackoffCap:  time.Millisecond,
		Trace:       &oncehttp.Trace{Begun: func(info oncehttp.Info) { fmt.Fprintln(begun, info.Metadata["order"]) }},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, client.Close()) }()
	for done := false; !done; {
		sum, err := client.Resume(context.Background(), oncehttp.Handler{
			Settled: func(_ context.Context, info oncehttp.Info, _ *http.Response) error {
				return write(info.Metadata["order"], info.Outcome)
			},
		})
		if err != nil {
			return err
		}
		if sum.Unknown+sum.Failed > 0 {
			return fmt.Errorf("resumed: %+v", sum)
		}
		if done = sum.Done(); !done {
			time.Sleep(10 * time.Millisecond)
		}
	}
	if what != "charge" {
		return nil
	}
	errs := make(chan error, cashierOrders)
	slots := make(chan bool, 3)
	for i := range cashierOrders {
		slots <- true
		go func() {
			defer func() { <-slots }()
			errs <- func() error {
				order := fmt.Sprint("order-", i)
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				ctx, op := oncehttp.Start(ctx, oncehttp.Op{Key: oncehttp.KeyFor("order", order), Metadata: map[string]string{"order": order}})
				req, err := http.NewRequestWithContext(ctx, http.MethodPost, server+"/v1/charges", strings.NewReader("order="+order))
				if err != nil {
					return err
				}
				resp, err := client.Do(req)
				if err != nil {
					return err
				}
				resp.Body.Close()
				if err := write(order, op.Info().Outcome); err != nil {
					return err
				}
				return op.Ack(ctx)
			}()
		}()
	}
	for range cashierOrders {
		err = errors.Join(err, <-errs)
	}
	return err
}
