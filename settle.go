package oncehttp

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"
)

// How long acknowledged operations are kept: answers, so that a second request
// with the key can be answered; outcomes, so that it is not sent.
const (
	keepAnswer    = time.Hour
	keepGivenKey  = 90 * 24 * time.Hour
	keepFreshKeys = 2 // windows
)

// judge classifies an exchange and remembers what it means for later ones.
func (f *flight) judge(x exchange) judgement {
	f.earlier = f.earlier || x.resent
	j := judge(f.p, x, f.earlier)
	f.earlier = f.earlier || j.uncertain
	f.sent = f.sent || !x.refused && !x.notSent
	return j
}

// settle records what the attempts came to, durably where a loss would make a
// lie of what is told, and tells it.
func (f *flight) settle(a *call) {
	closed := errors.Is(a.why, ErrClosed) || errors.Is(context.Cause(f.ctx), ErrClosed)
	switch {
	case a.verdict.next == settle:
		f.answer(a)
	case f.created && !f.sent:
		f.remove(a.err())
	case errors.Is(a.last.err, ErrWindowClosed), errors.Is(a.why, ErrWindowClosed) && f.resumed:
		a.drain()
		f.giveUp(ReasonWindow, a.err())
	case f.resumed && (a.verdict.next == again || a.verdict.reason == ReasonRefused || a.verdict.reason == ReasonGaveUp):
		f.postpone(a)
	case closed && f.nobodyTold():
		a.drain()
		f.rec.NotBefore, f.rec.Status = a.notBefore, a.last.status()
		f.release(f.next(Undecided), fmt.Errorf("%w; the operation will be resumed", ErrClosed))
	default:
		f.unsettled(a)
	}
}

// answer records the answer that settles the operation.
func (f *flight) answer(a *call) {
	c, x := f.c, &a.last
	rec := f.next(a.verdict.outcome)
	rec.Status = x.status()
	rec.AckDue = f.ackDue()
	if rec.AckDue || rec.KeyGiven {
		kept := storedAnswer{Status: rec.Status, Proto: x.resp.Proto, Header: x.resp.Header.Clone(), HasBody: !x.streams, Body: x.body}
		kept.Header.Del("Set-Cookie")
		rec.Answer = c.seal.seal(rec.ID, "answer", &kept)
	}
	res := result{resp: x.resp, body: x.body, url: x.url}
	if x.streams {
		res.stream = x.resp.Body.(*stream)
	}
	if rec.AckDue {
		waiting := rec
		res.rec = &waiting
	} else {
		c.acknowledged(&rec, f.p)
	}
	f.rec = rec
	if lazy := rec.Outcome == Succeeded && !rec.AckDue; lazy {
		f.res = res
		f.res.info = f.info()
		f.c.saveSoon(rec, func(err error) {
			f.land(false)
			if err != nil { // it stays pending: sent again within the window, and replayed by the server
				f.trace.storeFailedAside(infoOf(&f.rec, &storedMeta{}), err)
			}
		})
		f.trace.settled(f.res.info)
		close(f.answered)
		return
	}
	err := c.store.Save(f.writes(), rec)
	res.info = f.info()
	if err != nil {
		f.notRecorded(&res, err)
	}
	f.tell(&res)
}

// tell concludes a flight that is recorded. The hook comes first: who is told
// may rely on it.
func (f *flight) tell(res *result) {
	f.res = *res
	f.trace.settled(res.info)
	f.conclude(res)
}

// notRecorded marks the result of an answer that could not be recorded: it
// reaches the caller, but a rejection may not stand, because a restart sends the
// operation again.
func (f *flight) notRecorded(res *result, err error) {
	res.info.NotRecorded = true
	res.info.Acked = false
	res.info.Detail = detail(err)
	if res.info.Outcome == Rejected {
		res.info.Outcome, res.info.Reason, res.rec = Unknown, ReasonGaveUp, nil
	}
	f.trace.storeFailed(res.info, err)
}

// remove deletes the record of an operation that was provably never sent.
func (f *flight) remove(cause error) {
	rec := f.next(Undecided)
	if err := f.c.store.Delete(f.writes(), rec); err != nil {
		res := result{info: f.info(), err: fmt.Errorf("%w (and its record could not be removed: %w)", cause, err)}
		res.info.Outcome, res.info.Reason = Unknown, ReasonGaveUp
		f.notRecorded(&res, err)
		f.tell(&res)
		return
	}
	res := f.refused(cause)
	res.info.Attempts = f.made
	f.tell(res)
}

// unsettled ends an operation without an answer: its callers are told so.
func (f *flight) unsettled(a *call) {
	reason := ReasonGaveUp
	if a.verdict.next == stop {
		reason = a.verdict.reason
	}
	f.rec.NotBefore = a.notBefore
	f.rec.Status = a.last.status()
	left := f.ctx.Err() != nil || errors.Is(a.why, ErrClosed)
	if a.last.resp != nil && !a.drained && !left {
		f.res.resp, f.res.body, f.res.url = a.last.resp, a.last.body, a.last.url
		if a.last.streams {
			f.res.stream = a.last.resp.Body.(*stream)
		}
		f.giveUp(reason, a.why)
		return
	}
	a.drain()
	cause := a.err()
	if f.ctx.Err() != nil {
		cause = context.Cause(f.ctx)
	}
	f.giveUp(reason, cause)
}

// giveUp makes the operation unknown, durably, and tells it. With a response in
// f.res, that is what the callers get; else the cause.
func (f *flight) giveUp(reason Reason, cause error) {
	rec := f.next(Unknown)
	rec.Reason, rec.Claims, rec.Acked = reason, 0, false
	f.meta.Detail = detail(cause)
	rec.Meta = f.c.seal.seal(rec.ID, "meta", &f.meta)
	err := f.c.store.Save(f.writes(), rec)
	f.rec = rec
	res := f.res
	res.info = f.info()
	if res.resp == nil {
		res.err = cause
	}
	if err != nil {
		f.notRecorded(&res, err)
		if res.err != nil {
			res.err = fmt.Errorf("%w (not recorded, so it may be resumed: %w)", res.err, err)
		}
	}
	f.tell(&res)
}

// How long a resumed operation without an answer rests: 1 s after its first
// attempts, twice as long after each further pass, at most 15 min; and up to
// half of that more, at random.
const (
	postponeBase = time.Second
	postponeCap  = 15 * time.Minute
)

// postpone leaves a resumed operation pending, for a later pass.
func (f *flight) postpone(a *call) {
	a.drain()
	rec := f.next(Undecided)
	passes := rec.Attempts / max(1, f.c.opts.MaxAttempts)
	rest := backoffCeiling(passes, postponeBase, postponeCap)
	rec.RestUntil = f.c.clock.now().Add(rest + uniform(rest/2, f.c.opts.rnd))
	rec.NotBefore = a.notBefore
	rec.Status = a.last.status()
	f.release(rec, a.err())
}

// release gives up the ownership of a pending operation.
func (f *flight) release(rec Record, cause error) {
	rec.Epoch++
	rec.Owner, rec.Claims = "", 0
	f.meta.Detail = detail(cause)
	rec.Meta = f.c.seal.seal(rec.ID, "meta", &f.meta)
	err := f.c.store.Save(f.writes(), rec)
	f.rec = rec
	res := result{info: f.info(), err: cause}
	if err != nil {
		f.notRecorded(&res, err)
	}
	f.tell(&res)
}

// note records, when it costs nothing, how far a call is that waits.
func (f *flight) note(a *call) {
	rec := f.next(Undecided)
	rec.NotBefore = a.notBefore
	f.c.saveSoon(rec, func(error) {}) // a loss costs a few attempts more
}

// next returns the flight's record as of now, with an outcome.
func (f *flight) next(outcome Outcome) Record {
	rec := f.rec
	rec.Outcome, rec.Reason = outcome, NoReason
	rec.Uncertain = f.earlier
	rec.Attempts = f.before + f.made + int(f.resent.Load())
	rec.Updated = f.c.clock.now()
	return rec
}

// info describes the operation as it is.
func (f *flight) info() Info { return infoOf(&f.rec, &f.meta) }

// writes returns the context of writes that must not be missing because a
// caller has left.
func (f *flight) writes() context.Context { return context.WithoutCancel(f.ctx) }

// ackDue reports whether somebody will acknowledge the answer.
func (f *flight) ackDue() bool {
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	return f.rec.AckDue || len(f.handles) > 0
}

// nobodyTold reports whether the operation may stay pending when the client is
// closed: all who wait come from Start, and none has left. If so, none can leave
// any more without being told that.
func (f *flight) nobodyTold() bool {
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	if f.plain || f.told {
		return false
	}
	f.left = true
	return true
}

// isHeld reports whether somebody in this process will acknowledge the answer.
func (c *Client) isHeld(id ID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if alive := stillAlive(c.held[id]); len(alive) > 0 {
		c.held[id] = alive
		return true
	}
	delete(c.held, id)
	return false
}

func stillAlive(list []context.Context) []context.Context {
	return slices.DeleteFunc(list, func(ctx context.Context) bool { return ctx.Err() != nil })
}

// acknowledged prepares a record for being acknowledged.
func (c *Client) acknowledged(rec *Record, p *Provider) {
	now := c.clock.now()
	rec.Acked, rec.Request, rec.Meta = true, nil, nil
	rec.Updated = now
	if rec.KeyGiven {
		rec.AnswerUntil, rec.KeepUntil = now.Add(keepAnswer), now.Add(keepGivenKey)
	} else {
		rec.Answer = nil
		rec.KeepUntil = now.Add(keepFreshKeys * p.window())
	}
}

// ack acknowledges the answer of a record.
func (c *Client) ack(ctx context.Context, rec Record) error {
	c.acknowledged(&rec, c.providerOf(&rec))
	err := c.store.Ack(ctx, rec)
	if errors.Is(err, ErrFenced) { // perhaps Resume has done it
		if now, getErr := c.store.Get(ctx, rec.ID); getErr == nil && now.Acked {
			err = nil
		}
	}
	if err != nil && c.isClosing() {
		return fmt.Errorf("%w; the answer will be handed over again: %w", ErrClosed, err)
	}
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.held, rec.ID)
	return nil
}

// saveSoon saves a record when it costs nothing, if the store knows how to.
func (c *Client) saveSoon(rec Record, done func(error)) {
	if lazy, ok := c.store.(LazyStore); ok {
		lazy.SaveSoon(rec, done)
		return
	}
	done(c.store.Save(context.Background(), rec))
}

// openMeta returns what a record says of its operation.
func (c *Client) openMeta(rec *Record) (storedMeta, error) {
	part, err := c.seal.open(rec.ID, "meta", rec.Meta)
	if err != nil || part == nil {
		return storedMeta{}, err
	}
	return decodeMeta(part)
}

// answerOf returns the answer of a record that was read with all its parts. It
// is [ErrNotRetained], with what there is, if the body was not kept.
func (c *Client) answerOf(rec *Record) (storedAnswer, error) {
	if rec.Answer == nil {
		return storedAnswer{}, fmt.Errorf("%w (outcome %v)", ErrNotRetained, rec.Outcome)
	}
	part, err := c.seal.open(rec.ID, "answer", rec.Answer)
	if err != nil {
		return storedAnswer{}, err
	}
	a, err := decodeAnswer(part)
	if err == nil && !a.HasBody {
		err = fmt.Errorf("%w: it was longer than MaxResponseBytes, or an event stream", ErrNotRetained)
	}
	return a, err
}

// response returns the answer as net/http has it, without its body.
func (a *storedAnswer) response() *http.Response {
	resp := &http.Response{
		Status: fmt.Sprintf("%d %s", a.Status, http.StatusText(a.Status)), StatusCode: a.Status,
		Proto: a.Proto, Header: a.Header, ContentLength: int64(len(a.Body)), Body: http.NoBody,
	}
	resp.ProtoMajor, resp.ProtoMinor, _ = http.ParseHTTPVersion(a.Proto)
	return resp
}
