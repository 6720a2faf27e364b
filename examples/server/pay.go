package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/oncehttp/oncehttp"
)

// A shop pays orders.
type shop struct {
	client *oncehttp.Client
	book   *ledger
	url    string

	mu  sync.Mutex // guards out
	out io.Writer  // gets a line for each order that was paid
}

// pay pays the orders that come in, a line each, until they end or ctx does. An
// order that was not said to be paid may come again, in another process, too.
func pay(ctx context.Context, in io.Reader, out io.Writer, dir, url string) error {
	book, err := openLedger(filepath.Join(dir, "ledger"))
	if err != nil {
		return err
	}
	defer book.file.Close()
	client, err := oncehttp.Open(filepath.Join(dir, "operations.db"), &oncehttp.Options{
		Authorize: func(_ context.Context, _ oncehttp.Info, req *http.Request) error {
			req.Header.Set("Authorization", "Bearer shop-token")
			return nil
		},
		// The server is in the next room, and restarts in no time.
		BackoffBase: 20 * time.Millisecond,
		Breaker:     &oncehttp.Breaker{OpenFor: time.Second},
	})
	if err != nil {
		return err
	}
	s := &shop{client: client, book: book, url: url, out: out}

	orders := make(chan string)
	go func() {
		defer close(orders)
		for lines := bufio.NewScanner(in); lines.Scan(); {
			select {
			case orders <- lines.Text():
			case <-ctx.Done():
				return
			}
		}
	}()
	var running, paying sync.WaitGroup
	running.Go(func() {
		_ = client.Run(context.Background(), oncehttp.Handler{Settled: s.settled}) // until Shutdown
	})
	for range 8 {
		paying.Go(func() {
			for order := range orders {
				for err := s.charge(order); err != nil && ctx.Err() == nil; err = s.charge(order) {
					log.Printf("%s: %v", order, err)
					time.Sleep(100 * time.Millisecond)
				}
			}
		})
	}
	paying.Wait()
	err = client.Shutdown(context.Background())
	running.Wait()
	return err
}

// charge pays an order, once, however often it is called.
func (s *shop) charge(order string) error {
	if s.book.has(order) {
		return s.paid(order)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ctx, op := oncehttp.Start(ctx, oncehttp.Op{
		Key:      keyFor(order), // the same order, the same key
		Metadata: map[string]string{"order": order},
	})
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url, strings.NewReader(bodyFor(order)))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := s.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := s.settled(ctx, op.Info(), resp); err != nil {
		return err
	}
	return op.Ack(ctx)
}

func keyFor(order string) string  { return oncehttp.KeyFor("order", order) }
func bodyFor(order string) string { return fmt.Sprintf(`{"order":%q,"amount":4200}`, order) }

// settled records an answer, whether charge got it or Run.
func (s *shop) settled(_ context.Context, info oncehttp.Info, resp *http.Response) error {
	if info.Outcome != oncehttp.Succeeded && info.Outcome != oncehttp.Rejected {
		return fmt.Errorf("outcome %v, status %s", info.Outcome, resp.Status)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	order := info.Metadata["order"]
	err = s.book.record(order, line(resp.StatusCode, resp.Header, body))
	if errors.Is(err, errOtherAnswer) {
		log.Fatal(err) // whatever is done now may be wrong
	}
	if err != nil {
		return err
	}
	return s.paid(order)
}

func line(status int, h http.Header, body []byte) string {
	return fmt.Sprintf("%d %s %q", status, h.Get("Location"), body)
}

func (s *shop) paid(order string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, err := fmt.Fprintln(s.out, order)
	return err
}
