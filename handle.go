package oncehttp

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"
)

// reconcileRest is how long an operation rests that was looked up in vain.
const reconcileRest = time.Minute

// place names where credentials are refused or missing.
func place(id ID) string { return id.Origin + " " + id.Scope }

// handle finishes one operation, as far as that is possible.
func (p *pass) handle(rec Record) {
	p.mu.Lock()
	ended := p.ended[place(rec.ID)]
	p.mu.Unlock()
	if ended && !rec.Outcome.answered() {
		p.postponed(p.c.clock.now().Add(postponeBase))
		return
	}
	f, err := p.c.fromStore(p.ctx, &rec)
	if err != nil {
		p.failed(&rec, err)
		return
	}
	f.resumed, f.exclusive = true, true
	if d, ok := p.ctx.Deadline(); ok {
		f.deadline = d
	} else {
		f.endless = true
	}
	defer f.limits.release(time.Now())
	defer f.cancel(nil)
	if !p.c.enter(f) {
		p.count(func(s *Summary) { s.Held++ })
		return
	}
	defer f.land(false)
	// What was listed may be settled, held or told since: only the record as
	// it is now counts, as nobody else can change it any more.
	now, err := p.c.store.Get(p.ctx, rec.ID)
	switch {
	case errors.Is(err, ErrNotFound) && rec.Reason == ReasonUnreadable: // it is there, and not under its ID
		p.failed(&rec, fmt.Errorf("%w: it is not found under its own identity", ErrDamaged))
		return
	case errors.Is(err, ErrNotFound), err == nil && (now.Acked || now.Fingerprint != rec.Fingerprint):
		return
	case err != nil:
		p.unreadable(f, err)
		return
	}
	rec = *now
	rec.Request, rec.Answer = nil, nil
	f.take(rec)
	if !p.due(&rec) {
		return
	}
	if rec.Outcome.answered() {
		if rec.Claims >= poisonLimit {
			p.tell(f) // its handler kills the process
			return
		}
		p.handOver(f, now)
		return
	}
	if !p.decide(f, &rec) {
		return
	}
	if err := f.load(now); err != nil {
		p.unreadable(f, err)
		return
	}
	p.send(f)
}

// decide asks what becomes of an unfinished operation; it reports whether it is
// to be sent.
func (p *pass) decide(f *flight, rec *Record) bool {
	pending := rec.Outcome == Undecided
	rule, err := NoReason, error(nil)
	switch {
	case p.c.windowClosed(rec):
		rule, err = p.c.closedBy(rec)
	case pending && rec.Claims >= poisonLimit:
		rule, err = ReasonPoison, fmt.Errorf("the process died %d times while working on the operation", rec.Claims)
	}
	if rule != NoReason {
		if pending {
			p.makeUnknown(f, rule, err)
		} else {
			p.tell(f)
		}
		return false
	}
	decision := Hold
	if pending {
		decision = Send
	}
	if p.h.Before != nil {
		if err := p.protect(func() error { decision = p.h.Before(f.handlerContext(p.ctx), f.info()); return nil }); err != nil {
			p.failed(rec, err)
			return false
		}
	}
	switch {
	case decision == Send && rec.NotBefore.After(p.c.clock.now()): // the server asked for it
		p.postponed(rec.NotBefore)
	case decision == Send:
		return true
	case decision == Abandon && pending:
		p.makeUnknown(f, ReasonAbandoned, errors.New("abandoned"))
	case pending:
		p.count(func(s *Summary) { s.Held++ })
	default:
		p.tell(f)
	}
	return false
}

// send claims an operation, sends it, and hands its answer over.
func (p *pass) send(f *flight) {
	a := f.newCall()
	if err := a.admit(f.ctx); err != nil { // the host rests: so does the operation
		due := p.c.clock.now().Add(postponeBase)
		if open, ok := errors.AsType[*CircuitOpenError](err); ok && !open.Until.IsZero() {
			due = p.c.clock.now().Add(time.Until(open.Until))
		}
		p.postponed(due)
		return
	}
	defer a.permit.done(ignored)
	a.repeat = f.rec.Updated.After(p.c.started) // this process has sent it already
	if a.repeat && !f.limits.budget.withdraw(time.Now()) {
		p.postponed(p.c.clock.now().Add(postponeBase))
		return
	}
	if err := f.claim(); err != nil {
		p.notMine(&f.rec, err)
		return
	}
	func() {
		defer f.rescue()
		f.exchange(a)
	}()
	switch res := &f.res; {
	case res.panic != nil:
		p.failed(&f.rec, fmt.Errorf("%v", res.panic))
		if f.rec.Outcome == Unknown {
			p.tell(f)
		}
	case res.info.NotRecorded:
		p.failed(&f.rec, errors.New(res.info.Detail))
	case f.rec.Outcome.answered():
		p.deliver(f)
	case f.rec.Outcome == Unknown:
		p.tell(f)
	default:
		if a.verdict.reason == ReasonRefused || errors.Is(a.last.err, ErrNoCredentials) {
			p.end(f.id)
		}
		p.postponed(p.c.dueAt(&f.rec))
	}
}

// end ends the pass for an origin and scope: what is wrong with one operation's
// credentials there is wrong with all.
func (p *pass) end(id ID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.ended[place(id)] {
		p.ended[place(id)] = true
		p.sum.Ended = append(p.sum.Ended, id.Origin)
	}
}

// notMine counts an operation that could not be claimed.
func (p *pass) notMine(rec *Record, err error) {
	if errors.Is(err, ErrInProgress) || errors.Is(err, ErrFenced) || errors.Is(err, ErrNotFound) {
		p.count(func(s *Summary) { s.Held++ })
		return
	}
	p.failed(rec, err)
}

// handOver gives an answer that is already stored to the handler.
func (p *pass) handOver(f *flight, now *Record) {
	f.rec = *now
	if err := f.claim(); err != nil {
		p.notMine(&f.rec, err)
		return
	}
	f.rec.Answer = now.Answer // for Ack, which keeps it for a while
	res := result{info: f.info()}
	res.info.Replayed = true
	answer, err := p.c.answerOf(now)
	switch {
	case err == nil:
		res.resp, res.body = answer.response(), answer.Body
	case errors.Is(err, ErrNotRetained): // its body is an error, never empty
		answer.Status = now.Status
		res.resp = answer.response()
		res.stream = &stream{Reader: notRetained{err}, connBody: connBody{http.NoBody}, end: f.cancel}
	default:
		p.failed(now, err)
		return
	}
	f.res = res
	p.deliver(f)
}

// deliver gives the answer of a flight to the handler, and acknowledges it.
func (p *pass) deliver(f *flight) {
	rec := f.rec
	resp, err := f.res.response(f.template)
	if err == nil {
		err = p.protect(func() error { return p.h.Settled(f.handlerContext(p.ctx), f.res.info, resp) })
		resp.Body.Close()
	}
	if err == nil {
		if err = p.c.ack(f.writes(), rec); err == nil {
			p.count(func(s *Summary) { s.Settled++ })
			return
		}
	}
	again := f.next(rec.Outcome)
	again.Status = rec.Status
	again.Epoch++
	again.Owner, again.Claims = "", 0
	again.RestUntil = f.c.clock.now().Add(postponeBase)
	again.Answer = nil // stays as stored
	p.failed(&rec, errors.Join(err, p.c.store.Save(f.writes(), again)))
	p.count(func(s *Summary) { s.NextDue = earliest(s.NextDue, again.RestUntil) })
}

// makeUnknown ends a pending operation by a rule, and tells the handler.
func (p *pass) makeUnknown(f *flight, reason Reason, cause error) {
	if err := f.claim(); err != nil {
		p.notMine(&f.rec, err)
		return
	}
	f.giveUp(reason, cause)
	if f.res.info.NotRecorded {
		p.failed(&f.rec, cause)
		return
	}
	p.tell(f)
}

// tell lets the handler look an unknown operation up, and tells it, unless it has
// found out.
func (p *pass) tell(f *flight) {
	reconciles, tells := p.reconciles(&f.rec), p.tells(&f.rec)
	// A handler that kills the process, too, is called no more.
	if !reconciles && !tells || f.rec.Claims >= 2*poisonLimit || !p.c.beginTelling(f.id) {
		p.count(func(s *Summary) { s.Unknown++ })
		return
	}
	defer p.c.endTelling(f.id)
	owner := f.rec.Owner
	claimed := f.next(f.rec.Outcome)
	claimed.Reason, claimed.Uncertain, claimed.Attempts = f.rec.Reason, f.rec.Uncertain, f.rec.Attempts
	claimed.Epoch++
	claimed.Owner, claimed.Claims = p.c.session.Owner, claimed.Claims+1
	if err := p.c.store.Save(f.writes(), claimed); err != nil {
		p.count(func(s *Summary) { s.Unknown++ })
		p.notMine(&f.rec, err)
		return
	}
	f.take(claimed)
	info := f.info()
	if f.rec.Outcome.answered() {
		info.Reason = ReasonPoison
	}
	f.land(false) // the handler may resolve, redrive or forget it
	found, told := Unknown, false
	var failed error
	if reconciles {
		found, failed = p.reconcile(info)
	}
	if tells && failed == nil && found == Unknown {
		failed = p.protect(func() error { return p.h.Unknown(p.ctx, info) })
		told = failed == nil
	}
	err := p.c.exclusively(f.writes(), f.id, func(rec Record) error {
		switch {
		case rec.Acked || rec.Epoch != f.rec.Epoch+1: // the handler has decided
			return nil
		case found != Unknown:
			return p.c.resolve(f.writes(), rec, found)
		}
		rec.Request, rec.Answer = nil, nil
		rec.Claims-- // only a death counts
		if rec.Told = told; !told {
			rest := postponeBase
			if reconciles {
				rest = reconcileRest
			}
			if rec.Owner = ""; !tells { // its caller was told by this process, which that shows
				rec.Owner = owner
			}
			rec.RestUntil = p.c.clock.now().Add(rest)
			p.count(func(s *Summary) { s.NextDue = earliest(s.NextDue, rec.RestUntil) })
		}
		return p.c.store.Save(f.writes(), rec)
	})
	p.count(func(s *Summary) {
		if found != Unknown && err == nil {
			s.Reconciled++
		} else {
			s.Unknown++
		}
	})
	switch {
	case failed != nil:
		p.failed(&f.rec, errors.Join(failed, err))
	case err != nil:
		p.notMine(&f.rec, err)
	}
}

// reconcile asks what became of an operation.
func (p *pass) reconcile(info Info) (found Outcome, err error) {
	err = p.protect(func() (err error) { found, err = p.h.Reconcile(p.ctx, info); return err })
	if err == nil && found != Unknown && !found.answered() {
		err = fmt.Errorf("oncehttp: Handler.Reconcile returned %v, want Succeeded, Rejected or Unknown", found)
	}
	if err != nil {
		found = Unknown
	}
	return found, err
}

// beginTelling reserves the call of the Unknown handler, which runs while the
// operation is in nobody's hands, for one pass at a time.
func (c *Client) beginTelling(id ID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.telling[id] {
		return false
	}
	c.telling[id] = true
	return true
}

func (c *Client) endTelling(id ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.telling, id)
}

type handlerKey struct{} // context key of the ID whose handler is called

// handlerContext returns the context for a handler that must not wait for its
// own operation.
func (f *flight) handlerContext(ctx context.Context) context.Context {
	return context.WithValue(ctx, handlerKey{}, f.id)
}

// unreadable sets an operation aside whose record cannot be read. A missing
// sealing key is a matter of configuration: the operation stays as it is.
func (p *pass) unreadable(f *flight, err error) {
	if errors.Is(err, ErrDamaged) && f.rec.Outcome == Undecided {
		p.makeUnknown(f, ReasonUnreadable, err)
		return
	}
	p.failed(&f.rec, err)
}

// notRetained is the body of an answer whose body was not kept.
type notRetained struct{ err error }

func (n notRetained) Read([]byte) (int, error) { return 0, n.err }

// protect calls user code. Its panic is an error, and so is its end of the
// goroutine, which is therefore one of its own.
func (p *pass) protect(f func() error) error {
	err := errors.New("oncehttp: handler ended its goroutine")
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if v := recover(); v != nil {
				err = fmt.Errorf("oncehttp: handler panicked: %v", v)
			}
		}()
		err = f()
	}()
	<-done
	return err
}
