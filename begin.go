package oncehttp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"time"
)

// run is the way of an operation: admission, Begin, attempts, settlement. It
// reads from top to bottom like the promise: no byte before the record, nothing
// told before it is durable.
//
// A redriven operation comes from the store, and its record is taken over instead.
func (f *flight) run(begin func(*call) bool) {
	defer f.limits.release(time.Now())
	defer func() {
		if f.res.stream == nil {
			f.cancel(nil)
		}
	}()
	defer f.rescue()

	if old := f.succeededBefore(); old != nil {
		f.conclude(f.replayed(old))
		return
	}
	a := f.newCall()
	if err := a.admit(f.ctx); err != nil {
		f.conclude(f.notBegun(err))
		return
	}
	defer a.permit.done(ignored)
	if begin(a) {
		f.exchange(a)
	}
}

// succeededBefore returns the record of an operation that has its answer, which
// needs no admission. It looks only if admission may have to wait: else the
// record is found by Begin.
func (f *flight) succeededBefore() *Record {
	if f.fresh || !f.limits.mayWait() {
		return nil
	}
	old, err := f.c.store.Get(f.writes(), f.id)
	if err != nil || old.Outcome != Succeeded || old.Fingerprint != f.fingerprint {
		return nil
	}
	f.keepMetadata(old)
	return old
}

// exchange sends the operation, whose record is durable, and settles it.
func (f *flight) exchange(a *call) {
	f.trace.begun(f)
	a.attempt(f.ctx)
	if a.verdict.next == again {
		a.retry(f.ctx)
	}
	f.settle(a)
}

func (f *flight) newCall() *call {
	return &call{
		c: f.c, p: f.p, limits: f.limits, trace: f.trace, flight: f,
		info: AttemptInfo{Key: f.rec.Key, Method: f.meta.Method, Origin: f.rec.Origin},
	}
}

// rescue settles the operation of a flight whose user code panicked, or ended
// the goroutine: what was sent is unknown. The panic goes on in the callers.
func (f *flight) rescue() {
	if f.isAnswered() {
		return
	}
	v := recover()
	if v != nil {
		v = fmt.Sprintf("%v\n\n%s", v, debug.Stack())
	} else {
		v = "oncehttp: a hook or the transport ended the operation's goroutine"
	}
	defer func() {
		_ = recover() // of a hook that panics always
		if f.isAnswered() {
			return
		}
		res := f.res
		if res.info.ID != f.id {
			res.info = f.info()
			res.unsure()
		}
		res.panic, res.stream = v, nil // nobody gets to close it
		f.conclude(&res)
	}()
	switch {
	case f.rec.Epoch == 0: // not begun
		f.res = *f.notBegun(errPanicked)
	case f.rec.Outcome != Undecided, f.res.info.ID == f.id: // recorded: what was to be told stays true
	default:
		f.earlier, f.sent = true, true
		f.res = result{panic: v}
		f.giveUp(ReasonGaveUp, errPanicked)
	}
}

func (f *flight) isAnswered() bool {
	select {
	case <-f.answered:
		return true
	default:
		return false
	}
}

var errPanicked = errors.New("oncehttp: a hook or the transport panicked")

// begin makes the operation's record durable. It returns false if there is
// nothing to send: then it has concluded the flight.
func (f *flight) begin(a *call) bool {
	c := f.c
	now := c.clock.now()
	rec := f.rec
	rec.Epoch, rec.Owner, rec.Era = c.firstEpoch(now), c.session.Owner, c.session.Era
	rec.FirstSent, rec.Updated = now, now
	rec.ResendUntil = now.Add(f.p.resendFor(c.opts.attemptTimeout(f.p)))
	rec.AckDue = f.ackDue()
	f.sealRequest(&rec)

	existing, err := c.store.Begin(f.ctx, rec)
	switch {
	case err != nil:
		f.beginFailed(&rec, err)
		return false
	case existing != nil:
		return f.found(a, existing, rec)
	}
	f.take(rec)
	f.created = true
	if f.ctx.Err() != nil { // ended while Begin committed: undo it
		f.remove(context.Cause(f.ctx))
		return false
	}
	return true
}

// firstEpoch returns an epoch for a new record that none before had: the handle
// of an operation that was forgotten must not acknowledge the next one's answer.
func (c *Client) firstEpoch(now time.Time) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.epoch = max(c.epoch+1, uint64(now.UnixMicro()))
	return c.epoch
}

// sealRequest puts the request into the record. Credentials stay out.
func (f *flight) sealRequest(rec *Record) {
	var withheld []string
	for name := range f.template.Header {
		if f.c.withheld(f.p, name) {
			withheld = append(withheld, name)
		}
	}
	slices.Sort(withheld)
	request := storedRequest{Header: f.template.Header, Withheld: withheld, HasBody: f.hasBody, Body: f.body}
	rec.Request = f.c.seal.seal(rec.ID, "request", &request)
	rec.Meta = f.c.seal.seal(rec.ID, "meta", &f.meta)
}

// beginFailed concludes a flight whose record could not be written. Nothing was
// sent; but if the store cannot tell whether the record is there, it may come
// back, and that is no "not sent".
func (f *flight) beginFailed(asked *Record, err error) {
	res := f.notBegun(err)
	ours := res.info.Outcome == Undecided && res.info.FirstSent.Equal(asked.FirstSent) // visible, and perhaps not durable
	if errors.Is(err, ErrStoreUncertain) && (ours || res.info.Outcome == NotSent) {
		res.unsure()
		res.err = fmt.Errorf("%w; the operation may be resumed when it is opened again", err)
	}
	if f.ctx.Err() == nil {
		f.trace.storeFailed(res.info, err)
	}
	f.conclude(res)
}

// notBegun is the result of a request that did nothing. It is "not sent" only if
// its key has no earlier record, which an earlier attempt may stand behind. If
// that has the answer, nothing needs to be sent.
func (f *flight) notBegun(err error) *result {
	if f.fresh {
		return f.refused(err)
	}
	old, getErr := f.c.store.Get(context.Background(), f.id)
	read := f.fingerprint != [32]byte{} // else the request may be that of the record
	switch {
	case getErr == nil && read && old.Fingerprint != f.fingerprint: // another request's: this one never ran
		return f.refused(err)
	case getErr == nil && read && old.Outcome == Succeeded:
		f.keepMetadata(old)
		return f.replayed(old)
	case getErr == nil:
		if m, err := f.c.openMeta(old); err == nil && old.Meta != nil {
			f.meta = m
		}
		return f.asBefore(old, err)
	}
	res := f.refused(err)
	switch {
	case !errors.Is(getErr, ErrNotFound):
		res.unsure()
		res.err = fmt.Errorf("%w (nothing was sent now; whether the key was used before cannot be told: %w)", err, getErr)
	case errors.Is(err, ErrDamaged): // what cannot be read may be its record
		res.unsure()
	}
	return res
}

// unsure marks a result whose record cannot be told: a restart may resume it.
func (res *result) unsure() {
	res.info.Outcome, res.info.Reason, res.info.NotRecorded = Unknown, ReasonGaveUp, true
	res.info.Acked, res.info.Replayed, res.rec = false, false, nil
}

// take makes rec the flight's record, as it is in the store.
func (f *flight) take(rec Record) {
	rec.Request, rec.Answer = nil, nil // nil leaves the stored ones as they are
	f.rec, f.earlier, f.before = rec, rec.Uncertain, rec.Attempts
}

// found decides what becomes of a request whose key has a record.
func (f *flight) found(a *call, old *Record, asked Record) bool {
	c := f.c
	switch {
	case old.ID != asked.ID:
		f.conclude(f.refused(ErrScope))
		return false
	case old.Fingerprint != asked.Fingerprint:
		f.conclude(f.refused(fmt.Errorf("%w: method, URL, body or a header that matters differs", ErrKeyReused)))
		return false
	}
	f.keepMetadata(old)
	closed := c.windowClosed(old)
	switch {
	case old.Outcome == Succeeded:
		f.replay(old)
		return false
	case old.Outcome != Rejected && closed:
		f.expired(old)
		return false
	}
	asked.Uncertain = old.Outcome == Undecided || old.Outcome == Unknown && old.Uncertain
	asked.NotBefore = old.NotBefore
	if closed { // of a refusal: a new window begins
		now := c.clock.now()
		asked.FirstSent, asked.ResendUntil, asked.Era = now, now.Add(f.p.resendFor(c.opts.attemptTimeout(f.p))), c.session.Era
		asked.NotBefore = time.Time{}
	} else {
		asked.FirstSent, asked.ResendUntil, asked.Era = old.FirstSent, old.ResendUntil, old.Era
	}
	asked.Outcome, asked.Reason, asked.Told, asked.Acked = Undecided, NoReason, false, false
	asked.Epoch, asked.Owner, asked.Updated = old.Epoch+1, c.session.Owner, c.clock.now()
	asked.Attempts = old.Attempts
	asked.KeyGiven = asked.KeyGiven || old.KeyGiven
	asked.AckDue = asked.AckDue || old.AckDue && !old.Acked
	if !f.fromStore {
		if err := f.keepRequest(old); err != nil {
			f.conclude(f.asBefore(old, err))
			return false
		}
		f.sealRequest(&asked)
	}

	if err := f.waitUntil(a, asked.NotBefore); err != nil {
		f.conclude(f.asBefore(old, err))
		return false
	}
	if err := c.store.Save(f.ctx, asked); err != nil {
		res := f.asBefore(old, err)
		if errors.Is(err, ErrStoreUncertain) {
			res.unsure()
		}
		f.conclude(res)
		return false
	}
	f.take(asked)
	if f.ctx.Err() != nil {
		f.restore(old, context.Cause(f.ctx))
		return false
	}
	return true
}

// windowClosed reports whether the server may have forgotten the key of an
// operation without answer.
func (c *Client) windowClosed(rec *Record) bool {
	return c.clock.now().After(rec.ResendUntil) || rec.Era != c.session.Era
}

// keepMetadata takes the metadata from the record, unless there is new.
func (f *flight) keepMetadata(old *Record) {
	if m, err := f.c.openMeta(old); err == nil && f.meta.Metadata == nil {
		f.meta.Metadata = m.Metadata
	}
}

// keepRequest takes the body from the record: one key, one body, to the byte. It
// can differ in a multipart boundary. And the key must go where it went before:
// elsewhere the server would not know it.
func (f *flight) keepRequest(old *Record) error {
	part, err := f.c.seal.open(old.ID, "request", old.Request)
	if err != nil || part == nil {
		return nil
	}
	r, err := decodeRequest(part)
	switch {
	case err != nil:
		return nil
	case !f.p.carries(old.Key, r.Header, r.Body):
		return fmt.Errorf("%w: its key was sent elsewhere in the request; has the provider been changed?", ErrMismatch)
	case !bytes.Equal(r.Body, f.body):
		f.body = r.Body
		f.template.ContentLength = int64(len(r.Body))
		f.template.Header.Set("Content-Type", r.Header.Get("Content-Type"))
	}
	return nil
}

// waitUntil waits for the time that the server asked for in an earlier answer,
// if that is near. The permit is returned meanwhile.
func (f *flight) waitUntil(a *call, t time.Time) error {
	wait := t.Sub(f.c.clock.now())
	if t.IsZero() || wait <= 0 {
		return nil
	}
	if deadline := f.until(); wait > f.c.opts.MaxRetryAfter || !deadline.IsZero() && time.Until(deadline) <= wait {
		return fmt.Errorf("%w: the server asked not to come back before %v", ErrWaitTooLong, t.Format(time.RFC3339))
	}
	a.permit.done(ignored)
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return a.admit(f.ctx)
	case <-f.ctx.Done():
		return context.Cause(f.ctx)
	case <-f.c.closing:
		return ErrClosed
	}
}

// replay tells the answer of an operation that has succeeded. Nothing is sent.
func (f *flight) replay(old *Record) {
	if whole, err := f.c.store.Get(f.writes(), old.ID); err == nil {
		old = whole
	}
	f.conclude(f.replayed(old))
}

// replayed is the result that a record's answer makes.
func (f *flight) replayed(old *Record) *result {
	res := &result{info: infoOf(old, &f.meta)}
	res.info.Replayed = true
	answer, err := f.c.answerOf(old)
	if res.err = err; err == nil {
		res.resp, res.body = answer.response(), answer.Body
	}
	if !old.Acked {
		res.rec = old
	}
	return res
}

// expired ends a request for an operation whose window is closed. One that
// nobody was told about is unknown from now on.
func (f *flight) expired(old *Record) {
	reason, err := f.c.closedBy(old)
	if old.Outcome == Undecided {
		f.take(*old)
		f.rec.Epoch++
		f.rec.Owner = f.c.session.Owner
		f.earlier = true
		f.giveUp(reason, err)
		return
	}
	f.conclude(f.asBefore(old, err))
}

// closedBy says why the window of an operation is closed.
func (c *Client) closedBy(rec *Record) (Reason, error) {
	if rec.Era != c.session.Era {
		return ReasonClock, fmt.Errorf("the clock went back: %w", ErrWindowClosed)
	}
	return ReasonWindow, ErrWindowClosed
}

// restore gives a record that was taken over the state it had.
func (f *flight) restore(old *Record, cause error) {
	back := *old
	back.Epoch, back.Owner, back.Updated = f.rec.Epoch+1, "", f.c.clock.now()
	res := f.asBefore(old, cause)
	if err := f.c.store.Save(f.writes(), back); err != nil {
		res.unsure()
		res.err = fmt.Errorf("%w (not recorded, so it may be resumed: %w)", cause, err)
		f.trace.storeFailed(res.info, err)
	}
	f.conclude(res)
}

// refused is the result of a request that was refused before anything was sent.
func (f *flight) refused(err error) *result {
	return &result{err: err, info: Info{
		ID: f.id, Method: f.meta.Method, URL: f.meta.URL, Metadata: f.meta.Metadata, Outcome: NotSent, Detail: detail(err),
	}}
}

// asBefore is the result of a request that left its operation as it was.
func (f *flight) asBefore(old *Record, err error) *result {
	info := infoOf(old, &f.meta)
	info.Detail = detail(err)
	return &result{info: info, err: err}
}
