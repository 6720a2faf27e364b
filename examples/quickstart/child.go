package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// childEnv is the environment variable that makes the program the child: a job.
const childEnv = "ONCEHTTP_QUICKSTART_CHILD"

// A job is what a child has to do: to charge order-0001 up to the number of
// orders, and to record each charge in the ledger. Children that are started
// again get the same job.
type job struct {
	Contender string
	URL       string // of the API
	Dir       string // for the ledger and for the contender's own files
	Orders    int
	Workers   int           // orders charged at once
	Window    time.Duration // for which the API says that it remembers keys
	Verbose   bool
}

func (j job) String() string {
	b, err := json.Marshal(j)
	if err != nil {
		panic(err) // strings and numbers
	}
	return string(b)
}

func (j job) order(n int) string { return fmt.Sprintf("order-%04d", n) }

func (j job) file(name string) string { return filepath.Join(j.Dir, name) }

func (j job) logger() *slog.Logger {
	if !j.Verbose {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(os.Stderr, nil)).With("who", j.Contender)
}

// A charger charges orders: a contender at work in a child.
type charger interface {
	// resume finishes what an earlier process, or an earlier pass, began.
	resume(context.Context) error
	// begun reports whether an order is none of charge's business, because it
	// was begun before.
	begun(ctx context.Context, order string) (bool, error)
	// charge charges an order and records it in the ledger.
	charge(ctx context.Context, order string) error
	io.Closer
}

// childMain is the main function of the child.
func childMain(spec string) (status int) {
	go func() { // the parent is gone, or was never there
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(1)
	}()
	var j job
	err := json.Unmarshal([]byte(spec), &j)
	if err == nil {
		err = j.run(context.Background())
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "quickstart: child: %s: %v\n", j.Contender, err)
		return 1
	}
	return 0
}

// run makes passes through the orders until a pass has nothing left to do.
func (j job) run(ctx context.Context) (err error) {
	book, err := openLedger(j.file("ledger"))
	if err != nil {
		return err
	}
	defer book.Close()
	c, err := contenderOf(j.Contender).open(j, book)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	for {
		failed, err := j.pass(ctx, c, book)
		if err != nil || failed == 0 {
			return err
		}
		j.logger().Info("another pass", "failed", failed)
		time.Sleep(100 * time.Millisecond)
	}
}

// pass resumes what was begun, and charges what is not in the ledger.
func (j job) pass(ctx context.Context, c charger, book *ledger) (failed int64, err error) {
	if err := c.resume(ctx); err != nil {
		return 0, err
	}
	var workers sync.WaitGroup
	var failures atomic.Int64
	orders := make(chan string)
	for range j.Workers {
		workers.Go(func() {
			for order := range orders {
				if err := c.charge(ctx, order); err != nil {
					failures.Add(1)
					j.logger().Info("failed", "order", order, "error", err)
				}
			}
		})
	}
	for n := 1; n <= j.Orders && err == nil; n++ {
		order := j.order(n)
		known := book.has(order)
		if !known {
			known, err = c.begun(ctx, order)
		}
		if !known && err == nil {
			orders <- order
		}
	}
	close(orders)
	workers.Wait()
	return failures.Load(), err
}

// newCharge is the request that charges an order, the same for all.
func (j job) newCharge(ctx context.Context, order string) (*http.Request, error) {
	body := fmt.Sprintf(`{"amount":4200,"currency":"eur","order":%q}`, order)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, j.URL+"/v1/charges", strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	authorize(req)
	return req, nil
}

func authorize(req *http.Request) { req.Header.Set("Authorization", "Bearer sk_test_quickstart") }

// lookUp asks the API for the charge of an order. The id is empty if there is
// none.
func (j job) lookUp(ctx context.Context, client interface {
	Do(*http.Request) (*http.Response, error)
}, order string) (id string, err error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, j.URL+"/v1/charges?order="+order, nil)
	if err != nil {
		return "", err
	}
	authorize(req)
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return "", errors.New(resp.Status)
	}
	var list struct{ Data []struct{ ID string } }
	if err := json.NewDecoder(resp.Body).Decode(&list); err != nil || len(list.Data) == 0 {
		return "", err
	}
	return list.Data[0].ID, nil
}

// chargeOf returns the charge in an answer.
func chargeOf(answer io.Reader) (id string, err error) {
	var charge struct{ ID string }
	err = json.NewDecoder(answer).Decode(&charge)
	return charge.ID, err
}
