package oncehttp

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"sync"
	"time"
)

// A Decision says what becomes of an unfinished operation.
type Decision uint8

const (
	Hold    Decision = iota // leave it as it is
	Send                    // send it, with its key; not after its window
	Abandon                 // never send it by itself: a pending operation becomes unknown
)

// A Handler finishes operations. Its functions are called concurrently, one at
// a time for each operation, and must be repeatable: after a crash they are
// called again. An error or a panic concerns its operation alone.
type Handler struct {
	// Before is asked before anything of an unfinished operation is sent. nil
	// means: Send what nobody was told about, Hold what a caller was told
	// about (outcome Unknown).
	Before func(context.Context, Info) Decision

	// Settled is given each answer that was not acknowledged, also those
	// that were stored before a crash. Its nil return acknowledges the
	// answer; after an error it is handed over again, later. The response's
	// body need not be closed. Settled must not be nil.
	Settled func(context.Context, Info, *http.Response) error

	// Unknown is told, until it returns nil once, of each operation that
	// needs a decision: by [Client.Redrive], [Client.Resolve] or
	// [Client.Forget]. Operations whose caller was told by this process are
	// left out. nil means that nobody is told; see [Client.Operations].
	Unknown func(context.Context, Info) error
}

// A Summary counts what a pass did.
type Summary struct {
	Settled int       // answers given to the handler and acknowledged
	Pending int       // operations that stay unfinished: due later, or without answer
	Held    int       // operations that the handler holds, or that are in use
	Unknown int       // operations that need a decision
	Failed  int       // operations whose handler failed, or that could not be read or written
	Ended   []string  // origins at which credentials were refused or missing: see Stats and the log
	NextDue time.Time // when the next pending operation is due; zero means that none is
}

// Limits of a pass.
const (
	resumePage    = 256              // records listed at once
	resumeWorkers = 8                // operations at once, per origin
	resumeSpread  = time.Second      // over which the workers of an origin start
	poisonAlone   = 2                // unclean claims after which an operation runs alone and last
	poisonLimit   = 5                // after which it is not sent any more
	runEvery      = 30 * time.Second // how long Run rests at the most
)

// Resume makes one pass over the unfinished operations: it sends those that
// nobody was told about, with their keys, and gives their answers, and those
// that were not acknowledged, to the handler. It leaves alone what is in flight
// in this process, and the answers of [Start] until their context has ended.
//
// Limits, pauses and backoff hold as for other requests. An operation without
// answer stays pending for a later pass. Errors of single operations are
// counted and logged; the error returned is that of the store, or the cause of
// ctx.
func (c *Client) Resume(ctx context.Context, h Handler) (Summary, error) {
	if h.Settled == nil {
		return Summary{}, errors.New("oncehttp: Handler.Settled is nil: nobody would record the answers")
	}
	p := &pass{c: c, h: h, ctx: ctx, began: c.clock.now(), queues: make(map[string]chan Record), ended: make(map[string]bool)}
	err := p.run()
	return p.sum, err
}

// Run calls [Client.Resume] whenever something is due, until ctx ends or the
// client is closed, and returns the cause.
func (c *Client) Run(ctx context.Context, h Handler) error {
	for {
		sum, err := c.Resume(ctx, h)
		if err != nil {
			return err
		}
		rest := runEvery
		if !sum.NextDue.IsZero() {
			rest = min(rest, max(0, sum.NextDue.Sub(c.clock.now())))
		}
		timer := time.NewTimer(max(rest, 10*time.Millisecond))
		select {
		case <-timer.C:
		case <-ctx.Done():
		case <-c.closing:
		}
		timer.Stop()
	}
}

// A pass is one run of Resume.
type pass struct {
	c     *Client
	h     Handler
	ctx   context.Context
	began time.Time

	queues  map[string]chan Record // by origin
	late    []Record               // suspects: to be run alone, at the end
	workers sync.WaitGroup

	mu    sync.Mutex // guards the following
	sum   Summary
	ended map[string]bool // origin and scope at which the pass has ended
}

func (p *pass) run() error {
	err := p.dispatch()
	for _, q := range p.queues {
		close(q)
	}
	p.workers.Wait()
	for _, rec := range p.late {
		if err == nil && p.stopped() == nil {
			p.handle(rec)
		}
	}
	return errors.Join(err, p.stopped())
}

// stopped returns why the pass must end, or nil.
func (p *pass) stopped() error {
	if p.c.isClosing() {
		return ErrClosed
	}
	if p.ctx.Err() != nil {
		return context.Cause(p.ctx)
	}
	return nil
}

// dispatch lists the open records, oldest first, and gives them to the workers
// of their origins.
func (p *pass) dispatch() error {
	var after uint64
	for p.stopped() == nil {
		page, err := p.c.store.List(p.ctx, after, resumePage)
		if err != nil {
			return err
		}
		older := false
		for _, rec := range page {
			after = rec.Seq
			older = older || !rec.FirstSent.After(p.began)
			switch {
			case p.c.isFlying(rec.ID):
				p.count(func(s *Summary) { s.Held++ })
			case !p.due(&rec):
			case rec.Claims >= poisonAlone:
				p.late = append(p.late, rec)
			default:
				p.give(rec)
			}
		}
		if !older { // the rest has begun during the pass
			return nil
		}
	}
	return nil
}

// due reports whether a record is for this pass.
func (p *pass) due(rec *Record) bool {
	c := p.c
	switch {
	case rec.Outcome.answered() && c.isHeld(rec.ID):
		p.count(func(s *Summary) { s.Held++ })
		return false
	case rec.Outcome == Unknown && p.h.Before == nil && !p.tells(rec):
		p.count(func(s *Summary) { s.Held++ })
		return false
	case rec.Outcome != Unknown && rec.NotBefore.After(c.clock.now()):
		p.postponed(rec.NotBefore)
		return false
	}
	return true
}

// answered reports whether the server has decided.
func (o Outcome) answered() bool { return o == Succeeded || o == Rejected }

// tells reports whether the handler is to be told of an unknown operation: not
// again, and not if a caller in this process was.
func (p *pass) tells(rec *Record) bool {
	toldHere := rec.Owner == p.c.session.Owner && rec.Reason == ReasonGaveUp
	return p.h.Unknown != nil && !rec.Told && !toldHere
}

func (p *pass) count(f func(*Summary)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f(&p.sum)
}

func (p *pass) failed(rec *Record, err error) {
	p.count(func(s *Summary) { s.Failed++ })
	p.c.traces.storeFailed(Info{ID: rec.ID, Outcome: rec.Outcome, Detail: detail(err)}, err)
}

func (p *pass) postponed(until time.Time) {
	p.count(func(s *Summary) {
		s.Pending++
		if s.NextDue.IsZero() || until.Before(s.NextDue) {
			s.NextDue = until
		}
	})
}

// give hands a record to a worker of its origin, and waits while they are busy.
func (p *pass) give(rec Record) {
	q := p.queues[rec.Origin]
	if q == nil {
		q = make(chan Record)
		p.queues[rec.Origin] = q
		for i := range resumeWorkers {
			p.workers.Go(func() { p.work(q, i) })
		}
	}
	select {
	case q <- rec:
	case <-p.ctx.Done():
	case <-p.c.closing:
	}
}

// work handles the records of one origin. The first worker starts at once, the
// others spread over resumeSpread, so that a restart is no storm.
func (p *pass) work(q chan Record, i int) {
	if i > 0 {
		timer := time.NewTimer(uniform(resumeSpread, p.c.opts.rnd))
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-p.ctx.Done():
		case <-p.c.closing:
		}
	}
	for rec := range q {
		if p.stopped() == nil {
			p.handle(rec)
		}
	}
}

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
	f, err := p.c.resumption(p.ctx, &rec)
	if err != nil {
		p.failed(&rec, err)
		return
	}
	defer f.limits.release()
	defer f.cancel(nil)
	if !p.c.enter(f) {
		p.count(func(s *Summary) { s.Held++ })
		return
	}
	defer f.landOnce()
	// What was listed may be settled, held or told since: only the record as
	// it is now counts, as nobody else can change it any more.
	now, err := p.c.store.Get(p.ctx, rec.ID)
	switch {
	case errors.Is(err, ErrNotFound), err == nil && now.Acked:
		return
	case err != nil:
		p.unreadable(f, err)
		return
	case now.Epoch != rec.Epoch || now.Outcome != rec.Outcome || now.NotBefore != rec.NotBefore:
		rec = *now
		rec.Request, rec.Answer = nil, nil
		f.take(rec)
	}
	if !p.due(&rec) {
		return
	}
	if rec.Outcome.answered() {
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
	case rec.Era != p.c.session.Era:
		rule, err = ReasonClock, fmt.Errorf("the clock went back: %w", ErrWindowClosed)
	case p.c.windowClosed(rec):
		rule, err = ReasonWindow, ErrWindowClosed
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
		if err := p.protect(func() error { decision = p.h.Before(p.ctx, f.info()); return nil }); err != nil {
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
	permit, err := a.admit(f.ctx)
	if err != nil { // the host rests: so does the operation
		due := p.c.clock.now().Add(postponeBase)
		if open, ok := errors.AsType[*CircuitOpenError](err); ok && !open.Until.IsZero() {
			due = p.c.clock.now().Add(time.Until(open.Until))
		}
		p.postponed(due)
		return
	}
	a.permit = permit
	defer func() { a.permit.done(ignored) }()
	if retry := f.rec.Updated.After(p.c.started); !retry { // the first sending of this process
		f.limits.budget.deposit(time.Now())
	} else if !f.limits.budget.withdraw(time.Now()) {
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
		p.postponed(f.rec.NotBefore)
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
		res.stream = &stream{Reader: notRetained{err}, body: http.NoBody, end: f.cancel}
	default:
		p.failed(now, err)
		return
	}
	f.publish(res)
	p.deliver(f)
}

// deliver gives the answer of a flight to the handler, and acknowledges it.
func (p *pass) deliver(f *flight) {
	rec := f.rec
	resp, err := f.res.response(f.template)
	if err == nil {
		err = p.protect(func() error { return p.h.Settled(p.ctx, f.res.info, resp) })
		resp.Body.Close()
	}
	if err == nil {
		if err = p.c.ack(f.writes(), rec); err == nil {
			p.count(func(s *Summary) { s.Settled++ })
			return
		}
	}
	p.failed(&rec, err)
	again := f.next(rec.Outcome)
	again.Status = rec.Status
	again.Epoch++
	again.Owner, again.Claims = "", 0
	again.NotBefore = f.c.clock.now().Add(postponeBase)
	again.Answer = nil // stays as stored
	if err := p.c.store.Save(f.writes(), again); err != nil {
		p.failed(&rec, err)
	}
	p.count(func(s *Summary) { s.NextDue = earliest(s.NextDue, again.NotBefore) })
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

// tell tells the handler of an unknown operation.
func (p *pass) tell(f *flight) {
	p.count(func(s *Summary) { s.Unknown++ })
	if !p.tells(&f.rec) {
		return
	}
	if err := p.protect(func() error { return p.h.Unknown(p.ctx, f.info()) }); err != nil {
		p.failed(&f.rec, err)
		return
	}
	told := f.rec
	told.Told = true
	told.Epoch++
	told.Owner = p.c.session.Owner
	told.Updated = p.c.clock.now()
	if err := p.c.store.Save(f.writes(), told); err != nil {
		p.notMine(&f.rec, err)
	}
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

// protect calls user code; its panic is an error.
func (p *pass) protect(f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("oncehttp: handler panicked: %v", v)
		}
	}()
	return f()
}

func earliest(a, b time.Time) time.Time {
	if a.IsZero() || b.Before(a) {
		return b
	}
	return a
}

// resumption makes the flight of a record from a listing: it knows what the
// operation is, not yet its request.
func (c *Client) resumption(ctx context.Context, rec *Record) (*flight, error) {
	f := &flight{
		c: c, id: rec.ID, fingerprint: rec.Fingerprint, rec: *rec, before: rec.Attempts,
		resumed: true, fromStore: true, waiters: 1, trace: c.tracerFor(ctx), answered: make(chan struct{}),
	}
	meta, err := c.openMeta(rec)
	if err != nil {
		return nil, err
	}
	u, err := url.Parse(meta.URL)
	if err != nil {
		return nil, fmt.Errorf("%w: URL", ErrDamaged)
	}
	f.meta = meta
	f.p = c.provider(u)
	f.ctx, f.cancel = context.WithCancelCause(withoutHandle(ctx))
	f.template = (&http.Request{
		Method: meta.Method, URL: u, Host: meta.Host, Header: make(http.Header),
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
	}).WithContext(f.ctx)
	if f.template.Host == "" {
		f.template.Host = u.Host
	}
	if f.deadline, f.endless = ctx.Deadline(); true {
		f.endless = !f.endless
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
	f.template.Header = r.Header
	f.template = f.newTemplate(f.template, rec.Key)
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

// landOnce lands a resumed flight, and tells those who joined it.
func (f *flight) landOnce() {
	select {
	case <-f.answered:
	default:
		f.publish(result{info: f.info(), err: fmt.Errorf("%w: it is being resumed", ErrInProgress)})
	}
	f.land()
}
