package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"net/http"
	"strconv"
	"time"
)

// A contender is a way to write the child.
type contender struct {
	name string
	open func(j job, book *ledger) (charger, error)
}

// contenders are in the order of the table. All have the same attempts, backoff,
// timeout and ledger.
var contenders = []contender{
	{"no key", byHand(func(string) string { return "" })},
	{"key per call", byHand(func(string) string { return rand.Text() })},
	{"key = order id", byHand(func(order string) string { return order })},
	{oursName, openOurs},
}

func contenderOf(name string) contender {
	for _, c := range contenders {
		if c.name == name {
			return c
		}
	}
	panic("no contender " + name)
}

// Of every contender.
const (
	maxAttempts = 4
	backoffBase = 50 * time.Millisecond
	backoffCap  = time.Second
)

// handMade is a careful retry loop around http.Client. After a restart, it sends
// every order that is not in the ledger: it cannot know which ones were begun.
type handMade struct {
	job    job
	book   *ledger
	client *http.Client
	key    func(order string) string // of a call; empty means none
}

// byHand makes the contenders that differ in their key alone.
func byHand(key func(order string) string) func(job, *ledger) (charger, error) {
	return func(j job, book *ledger) (charger, error) {
		transport := http.DefaultTransport.(*http.Transport).Clone()
		transport.MaxIdleConnsPerHost = j.Workers
		return &handMade{j, book, &http.Client{Transport: transport, Timeout: attemptTimeout}, key}, nil
	}
}

func (h *handMade) resume(context.Context) error { return nil }

func (h *handMade) begun(context.Context, string) (bool, error) { return false, nil }

func (h *handMade) charge(ctx context.Context, order string) error {
	answer, err := h.send(ctx, order, h.key(order))
	if err != nil {
		return err
	}
	id, err := chargeOf(bytes.NewReader(answer))
	if err != nil {
		return err
	}
	return h.book.record(order, id)
}

// send makes up to maxAttempts attempts, with full jitter between them.
func (h *handMade) send(ctx context.Context, order, key string) (answer []byte, err error) {
	for n := range maxAttempts {
		var after time.Duration
		var retry bool
		if answer, after, retry, err = h.attempt(ctx, order, key); err == nil || !retry {
			return answer, err
		}
		if n < maxAttempts-1 {
			ceiling := min(backoffCap, backoffBase<<n)
			if !sleep(ctx, after+mathrand.N(ceiling)) {
				return nil, context.Cause(ctx)
			}
		}
	}
	return nil, err
}

// attempt makes one attempt. An answer that is not complete is none.
func (h *handMade) attempt(ctx context.Context, order, key string) (answer []byte, after time.Duration, retry bool, err error) {
	req, err := h.job.newCharge(ctx, order)
	if err != nil {
		return nil, 0, false, err
	}
	if key != "" {
		req.Header.Set("Idempotency-Key", key)
	}
	resp, err := h.client.Do(req)
	if err != nil {
		return nil, 0, true, err
	}
	defer resp.Body.Close()
	if answer, err = io.ReadAll(resp.Body); err != nil {
		return nil, 0, true, err
	}
	if resp.StatusCode/100 == 2 {
		return answer, 0, false, nil
	}
	if seconds, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil {
		after = time.Duration(seconds) * time.Second
	}
	switch s := resp.StatusCode; {
	case s == http.StatusTooManyRequests, s == http.StatusConflict, s >= 500:
		retry = true
	}
	return nil, after, retry, fmt.Errorf("%s: %s", resp.Status, answer)
}

func (h *handMade) Close() error {
	h.client.CloseIdleConnections()
	return nil
}
