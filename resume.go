package oncehttp

import (
	"context"
	"errors"
	"net/http"
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
// called again. An error or a panic concerns its operation alone. They must not
// close the client.
type Handler struct {
	// Before is asked before anything of an unfinished operation is sent; the
	// operation is in its pass's hands meanwhile, and a request for it waits,
	// or, with Before's context, is refused. nil
	// means: Send what nobody was told about, Hold what a caller was told
	// about (outcome Unknown).
	Before func(context.Context, Info) Decision

	// Settled is given each answer that was not acknowledged, also those
	// that were stored before a crash. Its nil return acknowledges the
	// answer; after an error it is handed over again, later. The response's
	// body need not be closed. Settled must not be nil.
	Settled func(context.Context, Info, *http.Response) error

	// Reconcile looks an operation up at the provider, by the ids in its
	// metadata, and returns what became of it: Succeeded or Rejected, which
	// is recorded as by [Client.Resolve], or Unknown if that cannot be told.
	// It is asked about each operation whose outcome is unknown, before
	// Unknown is told of it, and again later if it fails, or if nobody is
	// told. What it finds is for it to record on the caller's side. An
	// attempt may still be running at the provider: that nothing is found
	// there means Rejected only after Info.ResendUntil. nil means that
	// nobody knows.
	Reconcile func(context.Context, Info) (Outcome, error)

	// Unknown is told, until it returns nil once, of each operation that
	// needs a decision: by [Client.Redrive], [Client.Resolve] or
	// [Client.Forget], which it may call. Operations are left out whose
	// caller was told by this process that there is no answer. An answer
	// with [ReasonPoison] is one whose handling killed the process five
	// times. nil means that nobody is told; see [Client.Operations].
	Unknown func(context.Context, Info) error
}

// A Summary counts what a pass did.
type Summary struct {
	Settled    int       // answers given to the handler and acknowledged
	Reconciled int       // unknown operations that Reconcile has decided
	Pending    int       // operations that stay unfinished: due later, or without answer
	Held       int       // operations that the handler holds, or that are in use
	Unknown    int       // operations that need a decision
	Failed     int       // operations whose handler failed, or that could not be read or written
	Ended      []string  // origins at which credentials were refused or missing: see Stats and the log
	NextDue    time.Time // when the next pending operation is due; zero means that none is
}

// Done reports whether a further pass would have nothing to do, unless somebody
// decides what is unknown.
func (s Summary) Done() bool { return s.Pending+s.Held+s.Failed == 0 }

// Limits of a pass.
const (
	resumeAhead   = 4096             // operations that wait for a worker
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
	p := &pass{c: c, h: h, ctx: ctx, began: c.clock.now(), queues: make(map[string]*queue), slots: make(chan struct{}, resumeAhead), ended: make(map[string]bool)}
	err := p.run()
	if err == nil {
		err = p.stopped()
	}
	return p.sum, err
}

// Run calls [Client.Resume] at once, whenever something is due, and at least
// every 30 s, until ctx ends or the client is closed, and returns the cause.
// Errors of the store are logged and traced.
func (c *Client) Run(ctx context.Context, h Handler) error {
	for {
		sum, err := c.Resume(ctx, h)
		stopped := c.whyStopped(ctx) // perhaps since the pass has ended
		switch {
		case h.Settled == nil:
			return err
		case stopped != nil:
			return stopped
		case err != nil:
			c.traces.storeFailed(Info{}, err)
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

	queues  map[string]*queue // by origin
	slots   chan struct{}     // one for each record in a queue
	late    []Record          // suspects: to be run alone, at the end
	workers sync.WaitGroup

	mu    sync.Mutex // guards the following
	sum   Summary
	ended map[string]bool // origin and scope at which the pass has ended
}

func (p *pass) run() error {
	err := p.dispatch()
	for _, q := range p.queues {
		close(q.records)
	}
	p.workers.Wait()
	for _, rec := range p.late {
		if err == nil && p.stopped() == nil {
			p.attend(rec)
		}
	}
	return err
}

// stopped returns why the pass must end, or nil.
func (p *pass) stopped() error { return p.c.whyStopped(p.ctx) }

func (c *Client) whyStopped(ctx context.Context) error {
	if c.isClosing() {
		return ErrClosed
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
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
	case p.h.Before == nil && (rec.Outcome == Unknown || rec.Outcome.answered() && rec.Claims >= poisonLimit) && !p.tells(rec) && !p.reconciles(rec):
		p.count(func(s *Summary) {
			again := p.resting(rec) && !rec.Told && (p.h.Unknown != nil || p.h.Reconcile != nil)
			if again { // its handler is called again
				s.NextDue = earliest(s.NextDue, rec.RestUntil)
			}
			if again && p.h.Unknown != nil && !p.toldHere(rec) { // for it has failed
				s.Held++
			} else {
				s.Unknown++
			}
		})
		return false
	case rec.Outcome != Unknown && c.dueAt(rec).After(c.clock.now()):
		p.postponed(c.dueAt(rec))
		return false
	}
	return true
}

// dueAt returns until when a pass leaves a record alone: as long as it rests, and
// as the server asked for; but not beyond the window of a pending operation, at
// whose end somebody must be told. Times of another era say nothing.
func (c *Client) dueAt(rec *Record) time.Time {
	due := later(rec.NotBefore, rec.RestUntil)
	switch end := rec.ResendUntil.Add(time.Microsecond); {
	case rec.Era != c.session.Era:
		return time.Time{}
	case rec.Outcome == Undecided && end.Before(due):
		return end
	}
	return due
}

// answered reports whether the server has decided.
func (o Outcome) answered() bool { return o == Succeeded || o == Rejected }

// tells reports whether the handler is to be told of an unknown operation: not
// again, and not if a caller in this process was.
func (p *pass) tells(rec *Record) bool {
	return p.h.Unknown != nil && !rec.Told && !p.toldHere(rec) && !p.resting(rec)
}

// toldHere reports whether the caller of an unknown operation was told so by this
// process.
func (p *pass) toldHere(rec *Record) bool {
	return rec.Owner == p.c.session.Owner && rec.Reason == ReasonGaveUp
}

// reconciles reports whether the handler is to look an unknown operation up: not
// after somebody was told of it.
func (p *pass) reconciles(rec *Record) bool {
	return p.h.Reconcile != nil && rec.Outcome == Unknown && !rec.Told && !p.resting(rec)
}

// resting reports whether a record rests after a handler's failure. Times of
// another era say nothing.
func (p *pass) resting(rec *Record) bool {
	return rec.Era == p.c.session.Era && rec.RestUntil.After(p.c.clock.now())
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

// give hands a record to the workers of its origin. It does not wait for them
// but when resumeAhead records wait in all: a host that hangs does not hold up
// the others.
func (p *pass) give(rec Record) {
	select {
	case p.slots <- struct{}{}:
	case <-p.ctx.Done():
		return
	case <-p.c.closing:
		return
	}
	q := p.queues[rec.Origin]
	if q == nil {
		q = &queue{records: make(chan *Record, resumeAhead), done: make(chan struct{})}
		p.queues[rec.Origin] = q
	}
	q.records <- &rec // there is room: who has a slot
	if q.workers < resumeWorkers {
		first := q.workers == 0
		q.workers++
		p.workers.Go(func() { p.work(q, first) })
	}
}

// A queue holds the records of one origin for its workers.
type queue struct {
	records chan *Record
	workers int           // of the dispatcher
	done    chan struct{} // closed when nothing is left
	finish  sync.Once
}

// work handles the records of one origin. The first worker starts at once, the
// others spread over resumeSpread, so that a restart is no storm.
func (p *pass) work(q *queue, first bool) {
	if !first {
		timer := time.NewTimer(uniform(resumeSpread, p.c.opts.rnd))
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-q.done:
		case <-p.ctx.Done():
		case <-p.c.closing:
		}
	}
	for rec := range q.records {
		<-p.slots
		if p.stopped() == nil {
			p.attend(*rec)
		}
	}
	q.finish.Do(func() { close(q.done) })
}

// attend handles a record. Hooks that panic concern its operation alone.
func (p *pass) attend(rec Record) {
	err := p.protect(func() error { p.handle(rec); return nil })
	if err != nil {
		_ = p.protect(func() error { p.failed(&rec, err); return nil })
	}
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

func earliest(a, b time.Time) time.Time {
	if a.IsZero() || b.Before(a) {
		return b
	}
	return a
}
