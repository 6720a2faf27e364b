package oncehttp

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
)

// fromStore makes the flight of a record. It knows what the operation is, and
// not yet its request.
func (c *Client) fromStore(ctx context.Context, rec *Record) (*flight, error) {
	meta, err := c.openMeta(rec)
	if err != nil {
		return nil, err
	}
	u, err := url.Parse(meta.URL)
	if err != nil {
		return nil, fmt.Errorf("%w: URL", ErrDamaged)
	}
	f := newFlight(c)
	f.id, f.fingerprint, f.rec, f.before, f.meta = rec.ID, rec.Fingerprint, *rec, rec.Attempts, meta
	f.fromStore, f.p, f.trace = true, c.provider(u), c.tracerFor(ctx)
	f.rec.Request, f.rec.Answer = nil, nil
	f.ctx, f.cancel = context.WithCancelCause(withoutHandle(ctx))
	f.template = &http.Request{Method: meta.Method, URL: u, Host: meta.Host}
	if f.template.Host == "" {
		f.template.Host = u.Host
	}
	f.limits = c.limits.get(rec.Origin)
	return f, nil
}

// load puts the stored request into a flight.
func (f *flight) load(rec *Record) error {
	part, err := f.c.seal.open(rec.ID, "request", rec.Request)
	if err != nil {
		return err
	}
	if part == nil {
		return fmt.Errorf("%w: the request is missing", ErrDamaged)
	}
	r, err := decodeRequest(part)
	if err != nil {
		return err
	}
	f.body, f.hasBody, f.withheld = r.Body, r.HasBody, r.Withheld
	f.template = f.newTemplate(&http.Request{Method: f.template.Method, URL: f.template.URL, Host: f.template.Host, Header: r.Header})
	return nil
}

// enter registers a flight, unless there is one of the same operation, or the
// client closes.
func (c *Client) enter(f *flight) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.flights[f.id] != nil || c.idle != nil {
		return false
	}
	c.flights[f.id] = f
	return true
}

// isFlying reports whether an operation is in flight here.
func (c *Client) isFlying(id ID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.flights[id] != nil
}

// claim takes a record over, durably: from here on, a crash counts.
func (f *flight) claim() error {
	rec := f.rec
	rec.Request, rec.Answer = nil, nil
	rec.Epoch++
	rec.Owner = f.c.session.Owner
	rec.Claims++
	rec.AckDue = true
	rec.Updated = f.c.clock.now()
	if !rec.Outcome.answered() {
		rec.Uncertain = rec.Uncertain || rec.Outcome == Undecided
		rec.Outcome, rec.Reason, rec.Told = Undecided, NoReason, false
	}
	if err := f.c.store.Save(f.writes(), rec); err != nil {
		return err
	}
	f.take(rec)
	return nil
}
