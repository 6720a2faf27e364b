// Resume is the shortest honest program to begin with. It charges the orders
// that it is given, and what a crash, a SIGKILL or a SIGTERM leaves unfinished is
// finished at the next start, with the same -url and -dir:
//
//	go run ./examples/resume -url https://api.example.com/v1/charges -dir /var/lib/shop A-1 A-2
//
// Without -url it charges a few orders in a demonstration of its own; see demo.go.
package main

import (
	"context"
	"encoding/json"
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

// A shop charges orders.
type shop struct {
	client *oncehttp.Client
	book   *ledger // what was charged
	url    string
	log    *log.Logger
}

// run charges orders and finishes what earlier runs began, until nothing is left
// to do or ctx ends.
func run(ctx context.Context, out io.Writer, dir, url string, orders []string) error {
	client, err := oncehttp.Open(filepath.Join(dir, "operations.db"), &oncehttp.Options{Authorize: authorize})
	if err != nil {
		return err
	}
	s := &shop{client, &ledger{path: filepath.Join(dir, "ledger")}, url, log.New(out, "", 0)}

	// Not ctx: its end would tell the callers that their outcome is unknown.
	// Shutdown leaves what it interrupts pending, to be resumed.
	work := context.Background()
	var running sync.WaitGroup
	running.Go(func() {
		_ = client.Run(work, oncehttp.Handler{Settled: s.settled, Unknown: s.unknown}) // until Shutdown
	})
	ctx, cancel := context.WithCancel(ctx)
	running.Go(func() {
		defer cancel()
		for _, order := range orders {
			if ctx.Err() != nil {
				return
			}
			if err := s.charge(work, order); err != nil {
				s.log.Printf("%s: %v", order, err)
			}
		}
		s.await(ctx)
	})
	<-ctx.Done()
	late, stop := context.WithTimeout(context.Background(), 10*time.Second) // for the attempts on the wire
	defer stop()
	err = client.Shutdown(late)
	running.Wait()
	return err
}

// charge charges an order, once: its key names the order, so that doing it again
// goes on with the same operation.
func (s *shop) charge(ctx context.Context, order string) error {
	if charged, err := s.book.has(order); charged || err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // an answer that is not acknowledged by then is for Run
	ctx, op := oncehttp.Start(ctx, oncehttp.Op{
		Key:      oncehttp.KeyFor("charge", order),
		Metadata: map[string]string{"order": order}, // for settled, after a restart
	})
	body := strings.NewReader(fmt.Sprintf(`{"order":%q}`, order))
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url, body)
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
	return op.Ack(ctx) // recorded: it need not be handed over again
}

// settled records an answer, whether charge got it or Run. It is repeatable, as a
// handler must be: after a crash, it may be given the same answer again.
func (s *shop) settled(_ context.Context, info oncehttp.Info, resp *http.Response) error {
	order, text := info.Metadata["order"], "rejected"
	switch info.Outcome {
	case oncehttp.Rejected:
	case oncehttp.Succeeded:
		var charge struct{ ID string }
		if err := json.NewDecoder(resp.Body).Decode(&charge); err != nil {
			return err
		}
		text = charge.ID
	default: // charge has used up its attempts
		return fmt.Errorf("outcome %v, status %s", info.Outcome, resp.Status)
	}
	if err := s.book.record(order, text); err != nil {
		return err
	}
	s.log.Printf("%s: %s", order, text)
	return nil
}

// unknown is told of what only a person can decide: see Client.Redrive, Resolve
// and Forget.
func (s *shop) unknown(_ context.Context, info oncehttp.Info) error {
	s.log.Printf("%s: please look it up: %v (key %s)", info.Metadata["order"], info.Reason, info.Key)
	return nil
}

// await returns when nothing is left that is finished without being asked.
func (s *shop) await(ctx context.Context) {
	for ctx.Err() == nil {
		if stats, err := s.client.Stats(ctx); err != nil || stats.Pending+stats.Unacknowledged == 0 {
			return
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}
