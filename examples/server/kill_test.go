//go:build unix

package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

const (
	roleInEnv = "ONCEHTTP_EXAMPLE_ROLE"
	dirInEnv  = "ONCEHTTP_EXAMPLE_DIR"
	urlInEnv  = "ONCEHTTP_EXAMPLE_URL"
)

// TestMain is the main function of the server and of the shop as well, which are
// run, and killed, as processes of their own.
func TestMain(m *testing.M) {
	var err error
	switch dir := os.Getenv(dirInEnv); os.Getenv(roleInEnv) {
	case "server":
		var l net.Listener
		if l, err = net.FileListener(os.NewFile(3, "listener")); err == nil {
			err = serve(context.Background(), l, dir)
		}
	case "shop":
		err = pay(context.Background(), os.Stdin, os.Stdout, dir, os.Getenv(urlInEnv))
	default:
		os.Exit(m.Run())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// A child is one life of the server or of the shop.
type child struct {
	*exec.Cmd
	log bytes.Buffer
	out io.Reader
	in  io.WriteCloser
}

func start(t *testing.T, role, dir, url string, files ...*os.File) *child {
	t.Helper()
	c := &child{Cmd: exec.Command(os.Args[0])}
	c.Env = append(os.Environ(), roleInEnv+"="+role, dirInEnv+"="+dir, urlInEnv+"="+url)
	c.ExtraFiles = files
	c.Stderr = &c.log
	var err error
	if c.in, err = c.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if c.out, err = c.StdoutPipe(); err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Process.Kill(); c.Wait() })
	return c
}

// kill ends a child by SIGKILL, before which it must have lived.
func (c *child) kill(t *testing.T) {
	t.Helper()
	c.Process.Kill()
	c.Wait()
	if status, ok := c.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
		t.Fatalf("it had ended by itself: %v\n%s", c.ProcessState, &c.log)
	}
}

// A queue hands orders to the shop, and hands them again to its next life until
// it has said that they are paid. Used by one goroutine at a time.
type queue struct {
	made int
	open map[string]bool
	paid []string
}

const openOrders = 16 // at a time

func (q *queue) next() string {
	q.made++
	order := fmt.Sprintf("A-%d", q.made)
	q.open[order] = true
	return order
}

// feed works on a life's pipes until it is dead, or there is nothing left to pay.
// It sends a value for each order that was paid.
func (q *queue) feed(c *child, drain <-chan struct{}, paid chan<- struct{}) (done chan struct{}) {
	done = make(chan struct{})
	go func() {
		defer close(done)
		defer c.in.Close()
		for order := range q.open {
			fmt.Fprintln(c.in, order)
		}
		said := bufio.NewScanner(c.out)
		for {
			for len(q.open) < openOrders && !isClosed(drain) {
				fmt.Fprintln(c.in, q.next())
			}
			if len(q.open) == 0 || !said.Scan() {
				return
			}
			if order := said.Text(); q.open[order] {
				delete(q.open, order)
				q.paid = append(q.paid, order)
				select {
				case paid <- struct{}{}:
				default: // nobody counts that far
				}
			}
		}
	}()
	return done
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// TestBothHalvesSurviveKill: the shop and the server are killed alternately, at
// random moments. Each order is charged once, and has one answer, the same in the
// shop's ledger and at the server.
func TestBothHalvesSurviveKill(t *testing.T) {
	kills, seed := 100, uint64(1)
	if testing.Short() {
		kills = 10
	}
	rng := rand.New(rand.NewPCG(seed, 0))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	socket, err := l.(*net.TCPListener).File() // outlives the server, as systemd's would
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	url := "http://" + l.Addr().String() + "/charges"
	bank, office := t.TempDir(), t.TempDir()

	q := &queue{open: make(map[string]bool)}
	drain, paid := make(chan struct{}), make(chan struct{}, 1000)
	server, shop := start(t, "server", bank, "", socket), start(t, "shop", office, url)
	fed := q.feed(shop, drain, paid)
	fail := func(what string) {
		t.Helper()
		for _, c := range []*child{shop, server} {
			c.Process.Kill()
			c.Wait() // its log is complete
		}
		t.Fatalf("%s\nshop: %s\nserver: %s", what, &shop.log, &server.log)
	}
	wait := func(c, over <-chan struct{}, what string) {
		t.Helper()
		select {
		case <-c:
		case <-over:
			fail("the shop has ended before " + what)
		case <-time.After(time.Minute):
			fail("within a minute, not " + what)
		}
	}
	for i := range kills {
		for range 1 + rng.IntN(6) {
			wait(paid, fed, "an order was paid")
		}
		<-time.After(time.Duration(rng.Int64N(int64(5 * time.Millisecond))))
		if i%2 == 0 {
			shop.kill(t)
			wait(fed, nil, "the dead shop's last word")
			shop = start(t, "shop", office, url)
			fed = q.feed(shop, drain, paid)
		} else {
			server.kill(t)
			server = start(t, "server", bank, "", socket)
		}
	}
	close(drain)
	wait(fed, nil, "all orders were paid")
	if err := shop.Wait(); err != nil {
		t.Fatalf("the shop: %v\n%s", err, &shop.log)
	}

	book, err := openLedger(filepath.Join(office, "ledger"))
	if err != nil {
		t.Fatal(err)
	}
	defer book.file.Close()
	for order, answer := range book.answers {
		if again := ask(t, url, order); again != answer {
			t.Errorf("%s was answered %s, and on being asked again %s", order, answer, again)
		}
	}
	server.kill(t)
	s, err := openServer(filepath.Join(bank, "server.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer s.db.Close()
	charged := s.charged(t)
	for order, n := range charged {
		if n != 1 {
			t.Errorf("%s was charged %d times", order, n)
		}
	}
	if len(q.paid) != q.made || len(charged) != q.made || len(book.answers) != q.made {
		t.Errorf("of %d orders, %d were paid, %d are charged, %d in the ledger", q.made, len(q.paid), len(charged), len(book.answers))
	}
	t.Logf("%d orders, %d kills", q.made, kills)
}

// ask asks the server once more, without the client.
func ask(t *testing.T, url, order string) string {
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(bodyFor(order)))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer shop-token")
	req.Header.Set(keyHeader, keyFor(order))
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if resp.Header.Get("Idempotent-Replayed") != "true" {
		t.Errorf("%s is not answered from the store: %s", order, resp.Status)
	}
	return line(resp.StatusCode, resp.Header, body)
}
