package oncehttp_test

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/oncehttp/oncehttp"
)

// The Go code of README.md and docs is cut from this file, so that it compiles;
// docs_test.go sees to it. What can run, runs here.

func swap(form url.Values) error {
	client, err := oncehttp.Open("operations.db", nil) // was: client := http.DefaultClient
	if err != nil {
		return err
	}
	defer client.Close()

	resp, err := client.PostForm("https://api.stripe.com/v1/charges", form) // as with net/http
	if err == nil {
		resp.Body.Close()
	}
	return err
}

var _ = swap

type order struct{ ID string }

func (o order) form() io.Reader { return strings.NewReader("order=" + o.ID) }

// A till is the program around the code of the documents.
type till struct {
	client *oncehttp.Client
	db     *sql.DB
	log    *log.Logger
	record func(ctx context.Context, order string, outcome oncehttp.Outcome, resp *http.Response) error
	ticket func(ctx context.Context, info oncehttp.Info) error

	paymentOf func(ctx context.Context, order string) (id string, err error)
	paid      func(ctx context.Context, order, id string) error
	failed    func(ctx context.Context, order string) error
}

func (s *till) charge(ctx context.Context, order order) error {
	client, record := s.client, s.record
	req, err := http.NewRequest(http.MethodPost, host+"/v1/charges", order.form())
	if err != nil {
		return err
	}

	// Start names the operation; the first write request sent with ctx takes it,
	// directly or through an SDK.
	ctx, op := oncehttp.Start(ctx, oncehttp.Op{
		Key:      oncehttp.KeyFor("order", order.ID), // the same intent, the same key
		Metadata: map[string]string{"order": order.ID},
	})
	resp, err := client.Do(req.WithContext(ctx))
	switch info := op.Info(); info.Outcome {
	case oncehttp.Succeeded, oncehttp.Rejected: // the server has decided: record it, then acknowledge
		if err == nil {
			err = errors.Join(record(ctx, order.ID, info.Outcome, resp), resp.Body.Close())
		}
		if err == nil {
			err = op.Ack(ctx)
		}
	case oncehttp.NotSent: // no byte was written, and none will be
	case oncehttp.Unknown: // it may have happened; the same key continues it
	case oncehttp.Undecided: // the client was closed: it will be resumed
	}
	return err
}

func (s *till) finish(ctx context.Context) error {
	client, record := s.client, s.record
	err := client.Run(ctx, oncehttp.Handler{
		Settled: func(ctx context.Context, info oncehttp.Info, resp *http.Response) error {
			return record(ctx, info.Metadata["order"], info.Outcome, resp) // nil acknowledges
		},
	})
	return err
}

func (s *till) why(err error) {
	log := s.log
	if op, ok := errors.AsType[*oncehttp.OperationError](err); ok { // through the *url.Error, too
		log.Printf("key %s: %v after %d attempts: %v", op.Key, op.Outcome, op.Attempts, op.Err)
	}
	if open, ok := errors.AsType[*oncehttp.CircuitOpenError](err); ok {
		log.Printf("%s is down; not before %v", open.Host, open.Until)
	}
	if errors.Is(err, oncehttp.ErrKeyReused) {
		log.Print("this key was used for another request")
	}
}

// sdk is any client library that passes its context on.
type sdk interface {
	Charge(ctx context.Context, order string) (id string, err error)
}

func (s *till) throughSDK(ctx context.Context, api sdk, order string) error {
	ctx, op := oncehttp.Start(ctx, oncehttp.Op{Key: oncehttp.KeyFor("order", order)})
	id, err := api.Charge(ctx, order) // an SDK on client.StandardClient()
	info := op.Info()
	switch {
	case info.FirstSent.IsZero() && info.Outcome == oncehttp.Undecided:
		return err // the SDK refused it: no request was made
	case info.Outcome == oncehttp.Unknown:
		return fmt.Errorf("order %s is unknown (%v): %w", order, info.Reason, err)
	}
	s.log.Printf("order %s: %v, status %d, %s", order, info.Outcome, info.Status, id)
	return err
}

func (s *till) usedUp(resp *http.Response) error {
	if info, ok := oncehttp.OperationFrom(resp); ok && info.Outcome == oncehttp.Unknown {
		return fmt.Errorf("status %s settles nothing: %v (%s)", resp.Status, info.Reason, info.Detail)
	}
	return nil
}

func (s *till) list(ctx context.Context) error {
	client, log := s.client, s.log
	for info, err := range client.Operations(ctx, oncehttp.Filter{}) { // all that are open, oldest first
		if err != nil {
			return err
		}
		log.Printf("%s %s %s: %v (%v), %d attempts since %v, can be sent until %v: %s",
			info.Key, info.Method, info.URL, info.Outcome, info.Reason, info.Attempts,
			info.FirstSent, info.ResendUntil, info.Detail)
	}
	return nil
}

func (s *till) lookup(ctx context.Context, key string) (oncehttp.ID, error) {
	client := s.client
	infos, err := client.Lookup(ctx, key) // also what is acknowledged
	if err != nil || len(infos) != 1 {
		return oncehttp.ID{}, fmt.Errorf("%d operations with this key: %w", len(infos), err)
	}
	id := infos[0].ID
	return id, nil
}

func (s *till) redrive(ctx context.Context, id oncehttp.ID) error {
	client, log := s.client, s.log
	resp, err := client.Redrive(ctx, id) // the stored request, its key, at once
	if err != nil {
		return err // an *OperationError, without a *url.Error around it
	}
	defer resp.Body.Close()
	info, _ := oncehttp.OperationFrom(resp)
	log.Print(resp.Status, info.Outcome, info.Reason)
	return nil
}

func (s *till) resolve(ctx context.Context, id oncehttp.ID) error {
	client := s.client
	err := client.Resolve(ctx, id, oncehttp.Succeeded) // the provider has it
	return err
}

// admin serves the operators, on a port that is not public. The file belongs to
// this process: no other can look into it.
func admin(client *oncehttp.Client) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /operations", func(w http.ResponseWriter, r *http.Request) {
		for info, err := range client.Operations(r.Context(), oncehttp.Filter{}) {
			fmt.Fprintln(w, info.Key, info.Outcome, info.Reason, "attempts", info.Attempts, "until",
				info.ResendUntil.Format(time.RFC3339), info.Method, info.URL, info.Metadata, info.Detail, err)
		}
	})
	mux.HandleFunc("POST /operations/{key}/{action}", func(w http.ResponseWriter, r *http.Request) {
		ctx := context.WithoutCancel(r.Context()) // who leaves does not interrupt it
		infos, err := client.Lookup(ctx, r.PathValue("key"))
		if len(infos) != 1 {
			http.Error(w, fmt.Sprint(len(infos), " operations with this key; error ", err), http.StatusConflict)
			return
		}
		id := infos[0].ID
		switch r.PathValue("action") {
		case "redrive":
			_, err = client.Redrive(ctx, id)
		case "succeeded":
			err = client.Resolve(ctx, id, oncehttp.Succeeded)
		case "rejected":
			err = client.Resolve(ctx, id, oncehttp.Rejected)
		case "forget":
			err = client.Forget(ctx, id)
		default:
			http.NotFound(w, r)
			return
		}
		fmt.Fprintln(w, "error:", err)
	})
	return mux
}

func (s *till) run(ctx context.Context) error {
	client := s.client
	err := client.Run(ctx, oncehttp.Handler{
		Settled: s.settled,
		Unknown: func(ctx context.Context, info oncehttp.Info) error {
			return s.ticket(ctx, info) // until it returns nil once
		},
	})
	return err
}

func (s *till) lookUp() oncehttp.Handler {
	return oncehttp.Handler{
		Reconcile: func(ctx context.Context, info oncehttp.Info) (oncehttp.Outcome, error) {
			id, err := s.paymentOf(ctx, info.Metadata["order"]) // at the provider: by metadata, or by the key
			switch {
			case err != nil:
				return oncehttp.Unknown, err // looked up again in a minute; nobody is told yet
			case id != "":
				return oncehttp.Succeeded, s.paid(ctx, info.Metadata["order"], id)
			case time.Now().After(info.ResendUntil.Add(time.Hour)):
				return oncehttp.Rejected, s.failed(ctx, info.Metadata["order"]) // and it never will be there
			}
			return oncehttp.Unknown, nil // an attempt may still be running
		},
		Settled: s.settled,
		Unknown: s.ticket,
	}
}

func askAgain() oncehttp.Handler {
	handler := oncehttp.Handler{
		Before: func(_ context.Context, info oncehttp.Info) oncehttp.Decision {
			if info.Outcome == oncehttp.Unknown && info.Reason != oncehttp.ReasonGaveUp {
				return oncehttp.Hold // for a person
			}
			return oncehttp.Send
		},
	}
	return handler
}

// alerts returns what somebody should be told, now.
func alerts(ctx context.Context, client *oncehttp.Client, now time.Time) (alerts []string) {
	s, err := client.Stats(ctx)
	if err != nil {
		return []string{"page: the store cannot be read: " + err.Error()}
	}
	if left := s.WindowClose.Sub(now); !s.WindowClose.IsZero() && left < 6*time.Hour {
		alerts = append(alerts, fmt.Sprintf("page: in %v an operation can no longer be sent", left))
	}
	if age := now.Sub(s.Oldest); s.Pending+s.Unacknowledged > 0 && age > time.Hour {
		alerts = append(alerts, fmt.Sprintf("page: the oldest operation is open for %v", age))
	}
	if s.Unknown > 0 {
		alerts = append(alerts, fmt.Sprintf("ticket: %d operations need a decision", s.Unknown))
	}
	return alerts
}

// serve runs until ctx ends. An error says that something was cut off; it will be
// resumed.
func serve(ctx context.Context, srv *http.Server, client *oncehttp.Client, h oncehttp.Handler, grace time.Duration) error {
	ctx, fail := context.WithCancelCause(ctx)
	var running sync.WaitGroup
	running.Go(func() {
		if err := srv.ListenAndServe(); err != http.ErrServerClosed {
			fail(err)
		}
	})
	running.Go(func() { _ = client.Run(context.Background(), h) }) // not ctx: client.Shutdown ends it
	<-ctx.Done()

	within := func(part time.Duration, shutdown func(context.Context) error) error {
		ctx, stop := context.WithTimeout(context.Background(), part)
		defer stop()
		return shutdown(ctx)
	}
	err := errors.Join(
		within(grace*6/10, srv.Shutdown),    // takes nothing new; what it has may finish
		within(grace*3/10, client.Shutdown), // ends waits at once, then cuts off attempts; all is durable
		within(grace/10, srv.Shutdown),      // who was cut off answers its own caller
	)
	running.Wait()
	return err
}

func pay(client *oncehttp.Client) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		// Not r.Context(): it ends when the browser goes away, and then the payment is
		// told as unknown, and nothing finishes it by itself.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), time.Minute)
		defer cancel()
		ctx, op := oncehttp.Start(ctx, oncehttp.Op{Key: oncehttp.KeyFor("order", r.PathValue("order"))})
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, host+"/v1/charges", strings.NewReader("order="+r.PathValue("order")))
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		resp, err := client.Do(req)
		if err == nil {
			resp.Body.Close()
		}
		if op.Info().Outcome != oncehttp.Succeeded {
			http.Error(w, op.Info().Outcome.String(), http.StatusServiceUnavailable)
		}
	}
}

// open waits for a predecessor that still has the file.
func open(ctx context.Context, path string, opts *oncehttp.Options) (*oncehttp.Client, error) {
	for {
		client, err := oncehttp.Open(path, opts) // waits for half a second itself
		if !errors.Is(err, oncehttp.ErrStoreLocked) || ctx.Err() != nil {
			return client, err
		}
	}
}

func (s *till) settled(ctx context.Context, info oncehttp.Info, resp *http.Response) error {
	var charge struct{ ID string }
	if info.Outcome == oncehttp.Succeeded {
		if err := json.NewDecoder(resp.Body).Decode(&charge); err != nil {
			return err // it is handed over again
		}
	}
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	res, err := tx.ExecContext(ctx, `
		INSERT INTO charges (operation, order_id, outcome, charge_id) VALUES ($1, $2, $3, $4)
		ON CONFLICT (operation) DO UPDATE SET outcome = excluded.outcome, charge_id = excluded.charge_id
		WHERE charges.outcome = 'rejected' AND excluded.outcome = 'succeeded'`,
		info.Key, info.Metadata["order"], info.Outcome.String(), charge.ID)
	if err != nil {
		return err
	}
	if n, err := res.RowsAffected(); err != nil || n == 0 {
		return err // nothing new: what follows was done then
	}
	if info.Outcome == oncehttp.Succeeded {
		if _, err := tx.ExecContext(ctx, `UPDATE orders SET paid = true WHERE id = $1`, info.Metadata["order"]); err != nil {
			return err
		}
	}
	return tx.Commit() // nil acknowledges
}

func (s *till) job(ctx context.Context, jobID string, req *http.Request) (*http.Response, error) {
	client := s.client
	// The job's id, not the try's: every try continues one operation.
	ctx, op := oncehttp.Start(ctx, oncehttp.Op{Key: oncehttp.KeyFor("job", jobID)})
	resp, err := client.Do(req.WithContext(ctx))
	_ = op
	return resp, err
}

func (s *till) forTenant(ctx context.Context, tenant, order string) (context.Context, *oncehttp.Operation) {
	ctx, op := oncehttp.Start(ctx, oncehttp.Op{
		Key:      oncehttp.KeyFor("tenant", tenant, "order", order),
		Scope:    tenant, // stated: it stays the same when the credentials change
		Metadata: map[string]string{"tenant": tenant, "order": order},
	})
	return ctx, op
}

func tenantOptions(secretOf func(tenant string) (string, error)) *oncehttp.Options {
	options := &oncehttp.Options{
		Authorize: func(_ context.Context, info oncehttp.Info, req *http.Request) error {
			secret, err := secretOf(info.Metadata["tenant"])
			if err == nil {
				req.Header.Set("Authorization", "Bearer "+secret)
			}
			return err
		},
	}
	return options
}

func sealingOptions(newKey, oldKey []byte) *oncehttp.Options {
	options := &oncehttp.Options{SealingKeys: [][]byte{newKey, oldKey}} // the first seals, all open
	return options
}

func ownProviders() *oncehttp.Options {
	ledger := oncehttp.Provider{
		Name:   "ledger", // for messages
		Hosts:  []string{"ledger.internal", "*.ledger.example.com"},
		Header: "X-Request-Id",
		Window: 2 * time.Hour, // what its operators publish
		Judge: func(resp *http.Response, body []byte) oncehttp.Verdict {
			if resp.StatusCode == http.StatusConflict && bytes.Contains(body, []byte("in_progress")) {
				return oncehttp.InFlight // wait, then ask again
			}
			return oncehttp.NoVerdict // the status decides
		},
	}
	payments := oncehttp.PayPal // a copy that knows more of one API
	payments.PathPrefix, payments.Window = "/v2/payments/", 45*24*time.Hour
	options := &oncehttp.Options{Providers: []oncehttp.Provider{ledger, payments}}
	return options
}

func worldpayWithKeys() oncehttp.Provider {
	worldpay := oncehttp.Worldpay // of a merchant for whom keys were enabled
	worldpay.NoKeys, worldpay.MaxKey, worldpay.Window = false, 36, 24*time.Hour
	return worldpay
}

var _, _ = ownProviders, worldpayWithKeys
