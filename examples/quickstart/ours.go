package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/oncehttp/oncehttp"
)

const oursName = "oncehttp"

// ours charges orders with oncehttp.
type ours struct {
	job      job
	book     *ledger
	reported *ledger // operations that Handler.Unknown was told of
	client   *oncehttp.Client
}

func openOurs(j job, book *ledger) (charger, error) {
	reported, err := openLedger(j.file("reported"))
	if err != nil {
		return nil, err
	}
	api := oncehttp.Stripe // an API that behaves as Stripe's, on another host
	api.Hosts, api.PathPrefix = []string{"127.0.0.1"}, ""
	api.AttemptTimeout = attemptTimeout
	api.Window = j.Window

	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConnsPerHost = j.Workers
	client, err := oncehttp.Open(j.file("operations.db"), &oncehttp.Options{
		HTTPClient: &http.Client{Transport: transport},
		Providers:  []oncehttp.Provider{api},
		// Credentials are not stored: an operation that is resumed gets them here.
		Authorize: func(_ context.Context, _ oncehttp.Info, req *http.Request) error {
			authorize(req)
			return nil
		},
		// The recommended values are nil and zero. These are for a demonstration
		// that is over soon, and the same for all contenders.
		MaxAttempts: maxAttempts,
		BackoffBase: backoffBase,
		BackoffCap:  backoffCap,
		Breaker:     &oncehttp.Breaker{OpenFor: time.Second},
		Logger:      j.logger(),
	})
	if err != nil {
		return nil, errors.Join(err, reported.Close())
	}
	return &ours{j, book, reported, client}, nil
}

// charge charges an order that was never begun. Its key names what is to be
// done: the same order always gets the same key.
func (o *ours) charge(ctx context.Context, order string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // an answer that is not acknowledged by then is for resume
	ctx, op := oncehttp.Start(ctx, oncehttp.Op{
		Key:      oncehttp.KeyFor("order", order),
		Metadata: map[string]string{"order": order},
	})
	req, err := o.job.newCharge(ctx, order)
	if err != nil {
		return err
	}
	resp, err := o.client.Do(req)
	if err != nil {
		return err // not sent; or begun, and resume has it
	}
	defer resp.Body.Close()
	if err := o.settled(ctx, op.Info(), resp); err != nil {
		return err
	}
	return op.Ack(ctx) // from here on, the operation is not handed over again
}

// settled records an answer, whoever hands it over: charge, or after a crash
// Resume. It may be called again for the same operation.
func (o *ours) settled(_ context.Context, info oncehttp.Info, resp *http.Response) error {
	order := info.Metadata["order"]
	switch info.Outcome {
	case oncehttp.Succeeded:
		id, err := chargeOf(resp.Body)
		if err != nil {
			return err
		}
		return o.book.record(order, id)
	case oncehttp.Rejected:
		return o.book.record(order, resp.Status)
	}
	return fmt.Errorf("%s: outcome %v after %s", order, info.Outcome, resp.Status)
}

// resume finishes what was begun: what a dead process has left, and, because
// Before says so, what this one has given up. It returns when nothing is left
// that could be sent.
func (o *ours) resume(ctx context.Context) error {
	handler := oncehttp.Handler{
		Before: func(_ context.Context, info oncehttp.Info) oncehttp.Decision {
			switch info.Reason {
			case oncehttp.NoReason, oncehttp.ReasonGaveUp:
				return oncehttp.Send
			}
			return oncehttp.Hold
		},
		Settled: o.settled,
		Unknown: o.unknown,
	}
	for {
		sum, err := o.client.Resume(ctx, handler)
		if err != nil {
			return err
		}
		o.job.logger().Info("resumed", "summary", fmt.Sprintf("%+v", sum))
		if sum.Done() {
			return nil
		}
		if !sleep(ctx, max(10*time.Millisecond, time.Until(sum.NextDue))) {
			return context.Cause(ctx)
		}
	}
}

// unknown is told of what must not be sent any more: it looks up what became of
// it. What it does not find is left for a person to decide.
func (o *ours) unknown(ctx context.Context, info oncehttp.Info) error {
	order := info.Metadata["order"]
	if err := o.reported.record(order, info.Reason.String()); err != nil {
		return err
	}
	id, err := o.job.lookUp(ctx, o.client, order)
	if err != nil || id == "" {
		return err
	}
	if err := o.book.record(order, id); err != nil {
		return err
	}
	return o.client.Resolve(ctx, info.ID, oncehttp.Succeeded)
}

// begun reports whether the client knows an order's operation. Then it is
// finished, or resume has it, or a person.
func (o *ours) begun(ctx context.Context, order string) (bool, error) {
	known, err := o.client.Lookup(ctx, oncehttp.KeyFor("order", order))
	return len(known) > 0, err
}

func (o *ours) Close() error { return errors.Join(o.client.Close(), o.reported.Close()) }
