package oncehttp

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"time"
)

// What every store of this package decides alike, whatever it keeps its records
// in.

// clockBehind is how far the wall clock may be behind a store's mark before a
// new era begins: more than NTP ever steps a clock that it keeps, less than a
// window's reserve.
const clockBehind = time.Minute

// admits says whether rec may replace or delete stored: nil, [ErrFenced] or
// [ErrInProgress]. alive reports whether an owner other than the session that
// writes is alive; nil means that none is, as where a store has one session at
// a time.
func admits(stored, rec *Record, alive func(owner string) bool) error {
	switch {
	case stored.Epoch == rec.Epoch && stored.Owner == rec.Owner:
		return nil
	case stored.Epoch+1 != rec.Epoch:
		return ErrFenced
	case stored.Owner != "" && stored.Owner != rec.Owner && alive != nil && alive(stored.Owner):
		return ErrInProgress
	}
	return nil
}

// inTheWay reports whether stored keeps rec from beginning.
func inTheWay(stored, rec *Record) bool {
	if stored.ID == rec.ID {
		return true
	}
	return rec.KeyGiven && stored.Key == rec.Key && stored.Origin == rec.Origin &&
		!(stored.ScopeStated && rec.ScopeStated)
}

// open counts n more open records of the outcome.
func (c *Counts) open(o Outcome, n int) {
	switch o {
	case Undecided:
		c.Pending += n
	case Unknown:
		c.Unknown += n
	case Succeeded, Rejected:
		c.Unacknowledged += n
	}
}

// due reports whether what is kept until a time may be dropped. The zero time
// means for ever.
func due(until, now time.Time) bool { return !until.IsZero() && now.After(until) }

// outdated reports whether Purge has to renew a store's mark.
func outdated(mark, now time.Time, open Counts) bool {
	return open.Pending+open.Unknown > 0 && now.Sub(mark) > clockBehind
}

// steppedBack reports whether now is too far behind the mark.
func steppedBack(mark, now time.Time) bool { return mark.Sub(now) > clockBehind }

// latest returns the later one of two times.
func latest(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// keptTime returns t as a store keeps it: in UTC, cut to the microsecond.
func keptTime(t time.Time) time.Time { return time.UnixMicro(t.UnixMicro()).UTC() }

// kept returns a copy of r as a store keeps it, sharing nothing with it.
func (r *Record) kept() *Record {
	c := *r
	c.own()
	return &c
}

// own makes r share nothing with the record that it was copied from.
func (r *Record) own() {
	for _, t := range r.times() {
		*t = keptTime(*t)
	}
	r.Meta, r.Request, r.Answer = bytes.Clone(r.Meta), bytes.Clone(r.Request), bytes.Clone(r.Answer)
}

// newOwner returns a name for an opening of a store that no other has.
func newOwner() string {
	var b [16]byte
	rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}
