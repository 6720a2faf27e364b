package oncehttp

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"slices"
	"time"
)

// A Filter selects operations. The zero value selects all that are open.
type Filter struct {
	Outcomes []Outcome // nil means every outcome
	Origin   string    // scheme://host; empty means every origin
}

// Operations lists the open operations, oldest first: pending, unknown, and
// those whose answer was not acknowledged. The loop's body may use the client;
// what changes meanwhile may be listed as it was. After an error of the store
// the listing ends; one of a single operation is given with what is known of it.
func (c *Client) Operations(ctx context.Context, filter Filter) iter.Seq2[Info, error] {
	return func(yield func(Info, error) bool) {
		var after uint64
		for {
			page, err := c.store.List(ctx, after, resumePage)
			if err != nil {
				yield(Info{}, err)
				return
			}
			if len(page) == 0 {
				return
			}
			for i := range page {
				rec := &page[i]
				after = rec.Seq
				if filter.Outcomes != nil && !slices.Contains(filter.Outcomes, rec.Outcome) || filter.Origin != "" && filter.Origin != rec.Origin {
					continue
				}
				meta, err := c.openMeta(rec)
				if !yield(infoOf(rec, &meta), err) {
					return
				}
			}
		}
	}
}

// Lookup returns the operations with a key: usually one, none if the key is not
// known, several if it was used with several origins or scopes. Of an
// acknowledged operation, only its outcome is kept. The error is of the store, or
// of operations that cannot be read: these are returned with what is known.
func (c *Client) Lookup(ctx context.Context, key string) ([]Info, error) {
	ids, err := c.store.Find(ctx, key)
	if err != nil {
		return nil, err
	}
	var infos []Info
	for _, id := range ids {
		rec, getErr := c.store.Get(ctx, id)
		switch {
		case errors.Is(getErr, ErrNotFound): // meanwhile
			continue
		case errors.Is(getErr, ErrDamaged):
			rec = &Record{ID: id, Outcome: Unknown, Reason: ReasonUnreadable}
		case getErr != nil:
			return nil, getErr
		}
		meta, metaErr := c.openMeta(rec)
		infos = append(infos, infoOf(rec, &meta))
		err = errors.Join(err, getErr, metaErr)
	}
	return infos, err
}

// Redrive sends an open operation again, with its stored request and its key,
// as [Client.Do] with the same request would: within its window, and if it was
// not answered. The answer of an operation from [Start] or [Client.Resume] stays
// to be acknowledged by a handler.
//
// The error is an [*OperationError], or that of reading the record:
// [ErrNotFound], [ErrDamaged], [ErrSealed].
func (c *Client) Redrive(ctx context.Context, id ID) (*http.Response, error) {
	rec, err := c.store.Get(ctx, id)
	if err != nil {
		return nil, err
	}
	f, err := c.fromStore(context.WithoutCancel(ctx), rec)
	if err != nil {
		return nil, err
	}
	return c.fly(f, f.template.WithContext(ctx), chosenKey{key: id.Key}, f.takeOver)
}

// takeOver takes the operation over as its record is now.
func (f *flight) takeOver(a *call) bool {
	old, err := f.c.store.Get(f.writes(), f.id)
	if err == nil && old.Acked {
		err = fmt.Errorf("%w: the request of an acknowledged operation is not kept", ErrNotRetained)
	}
	if err == nil && old.Fingerprint != f.fingerprint {
		err = fmt.Errorf("%w: it was forgotten, and its key is used anew", ErrNotFound)
	}
	if err == nil {
		err = f.load(old)
	}
	if err != nil {
		f.conclude(f.notBegun(err))
		return false
	}
	return f.found(a, old, *old)
}

// Resolve decides, on the word of a person or of a look-up at the provider, what
// became of an open operation: [Succeeded] or [Rejected]. It is acknowledged with
// that. After Succeeded, the key is not sent again while the outcome is kept;
// after Rejected, a request with the key is sent again. What the server has
// decided cannot be resolved otherwise.
func (c *Client) Resolve(ctx context.Context, id ID, outcome Outcome) error {
	if !outcome.answered() {
		return fmt.Errorf("oncehttp: cannot resolve an operation as %v, want Succeeded or Rejected", outcome)
	}
	return c.exclusively(ctx, id, func(rec Record) error { return c.resolve(ctx, rec, outcome) })
}

// resolve writes what somebody found out of an operation that was taken over.
func (c *Client) resolve(ctx context.Context, rec Record, outcome Outcome) error {
	switch {
	case rec.Outcome == outcome && rec.Acked:
		return nil
	case rec.Outcome.answered() && rec.Outcome != outcome:
		return fmt.Errorf("oncehttp: the server has decided the operation (%v); it cannot be resolved otherwise", rec.Outcome)
	}
	if rec.Outcome != outcome { // what is stored may be the answer of an earlier refusal
		rec.Answer, rec.Status = nil, 0
	}
	rec.Outcome, rec.Reason = outcome, NoReason
	c.acknowledged(&rec, c.providerOf(&rec))
	return c.store.Save(ctx, rec)
}

// Forget deletes an operation, whatever its state, also one whose record cannot
// be read. A later request with its key is a new operation: the server may still
// know the key.
func (c *Client) Forget(ctx context.Context, id ID) error {
	err := c.exclusively(ctx, id, func(rec Record) error { return c.store.Delete(ctx, rec) })
	if errors.Is(err, ErrDamaged) { // a readable one that took its place has another epoch, and stays
		err = c.store.Delete(ctx, Record{ID: id})
	}
	return err
}

// exclusively gives a record, taken over in the next epoch, to a function that
// writes it, while no flight can have it.
func (c *Client) exclusively(ctx context.Context, id ID, write func(Record) error) error {
	f := newFlight(c)
	f.id, f.exclusive, f.cancel = id, true, func(error) {}
	if !c.enter(f) {
		if c.isClosing() {
			return ErrClosed
		}
		return fmt.Errorf("%w: it is in flight here", ErrInProgress)
	}
	defer f.land(false)
	rec, err := c.store.Get(ctx, id)
	if err != nil {
		return err
	}
	rec.Epoch++
	rec.Owner = c.session.Owner
	rec.Updated = c.clock.now()
	if err := write(*rec); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.held, id)
	return nil
}

// Stats is the state of a client, for metrics and alarms.
type Stats struct {
	Counts
	InFlight    int         // operations this process works on
	Oldest      time.Time   // first sending of the oldest open operation; zero means that there is none
	WindowClose time.Time   // when the next unanswered operation can no longer be sent, among the 256 oldest; zero means that there is none
	Hosts       []HostStats // hosts used lately, in no order
}

// HostStats is the state of the limits of one origin.
type HostStats struct {
	Origin      string
	Breaker     string    // closed, open, half-open or disabled
	OpenUntil   time.Time // zero unless the breaker is open
	PausedUntil time.Time // zero unless the server asked for a pause
}

// Stats returns the state of the client. It reads a little of the store.
func (c *Client) Stats(ctx context.Context) (Stats, error) {
	var s Stats
	var err error
	if s.Counts, err = c.store.Counts(ctx); err != nil {
		return s, err
	}
	oldest, err := c.store.List(ctx, 0, resumePage)
	if err != nil {
		return s, err
	}
	for i := range oldest {
		rec := &oldest[i]
		s.Oldest = earliest(s.Oldest, rec.FirstSent)
		if !rec.Outcome.answered() && !c.windowClosed(rec) {
			s.WindowClose = earliest(s.WindowClose, rec.ResendUntil)
		}
	}
	c.mu.Lock()
	s.InFlight = len(c.flights)
	c.mu.Unlock()
	for _, h := range c.limits.stats() {
		s.Hosts = append(s.Hosts, HostStats{Origin: h.Origin, Breaker: h.Breaker, OpenUntil: h.OpenUntil, PausedUntil: h.PausedUntil})
	}
	return s, nil
}
