package oncehttptest

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"maps"
	"slices"
	"time"

	"github.com/oncehttp/oncehttp"
)

// A table is what the stores of this package keep, as a table of a database
// would: a row for each ID. It is written after the contract and not after the
// stores of oncehttp, so that each is a check of the other. Its user locks it.
type table struct {
	rows   map[oncehttp.ID]oncehttp.Record // slices in them are never written to
	seq    uint64
	mark   time.Time
	era    uint64
	secret [32]byte
	purged []oncehttp.ID // what purge has still to look at in this round
}

func newTable() *table {
	t := &table{rows: make(map[oncehttp.ID]oncehttp.Record), era: 1}
	rand.Read(t.secret[:]) // never fails
	return t
}

// clone returns a copy of t as it is now.
func (t *table) clone() *table {
	c := *t
	c.rows, c.purged = maps.Clone(t.rows), nil
	return &c
}

// session returns what an opening by owner at now finds, mark being that at its
// beginning.
func (t *table) session(owner string, mark, now time.Time) oncehttp.Session {
	s := oncehttp.Session{Owner: owner, Secret: t.secret, Mark: mark, Era: t.era}
	if mark.Sub(now) > time.Minute {
		t.era++
		t.mark = now.UTC().Truncate(time.Microsecond)
		s.Mark, s.Era, s.SteppedBack = t.mark, t.era, true
	}
	return s
}

// copied returns r as it is kept, sharing nothing with it.
func copied(r oncehttp.Record) oncehttp.Record {
	r = *kept(r)
	r.Meta, r.Request, r.Answer = bytes.Clone(r.Meta), bytes.Clone(r.Request), bytes.Clone(r.Answer)
	return r
}

func (t *table) get(id oncehttp.ID) *oncehttp.Record {
	row, ok := t.rows[id]
	if !ok {
		return nil
	}
	row = copied(row)
	return &row
}

func (t *table) begin(r oncehttp.Record) (existing *oncehttp.Record) {
	if existing = t.get(r.ID); existing != nil {
		return existing
	}
	if r.KeyGiven {
		for id, row := range t.rows {
			if id.Key == r.Key && id.Origin == r.Origin && !(row.ScopeStated && r.ScopeStated) {
				return t.get(id)
			}
		}
	}
	t.put(r, true)
	return nil
}

// put writes a row. fresh gives it a new Seq.
func (t *table) put(r oncehttp.Record, fresh bool) {
	r = copied(r)
	if r.Acked {
		r.Request = nil
	}
	r.Seq = t.rows[r.ID].Seq
	if fresh {
		t.seq++
		r.Seq = t.seq
	}
	if r.Updated.After(t.mark) {
		t.mark = r.Updated
	}
	t.rows[r.ID] = r
}

// check says whether r may be written over its row.
func (t *table) check(r oncehttp.Record, alive func(owner string) bool) error {
	row, ok := t.rows[r.ID]
	if !ok {
		return oncehttp.ErrNotFound
	}
	if row.Epoch == r.Epoch && row.Owner == r.Owner {
		return nil
	}
	if row.Epoch+1 != r.Epoch {
		return oncehttp.ErrFenced
	}
	if row.Owner != r.Owner && alive(row.Owner) {
		return oncehttp.ErrInProgress
	}
	return nil
}

func (t *table) save(r oncehttp.Record, alive func(owner string) bool) error {
	if err := t.check(r, alive); err != nil {
		return err
	}
	row := t.rows[r.ID]
	if !r.Acked && r.Request == nil {
		r.Request = row.Request
	}
	if !r.Acked && r.Answer == nil {
		r.Answer = row.Answer
	}
	t.put(r, row.Acked && !r.Acked)
	return nil
}

func (t *table) delete(r oncehttp.Record, alive func(owner string) bool) error {
	if _, ok := t.rows[r.ID]; !ok {
		return nil
	}
	if err := t.check(r, alive); err != nil {
		return err
	}
	delete(t.rows, r.ID)
	return nil
}

func (t *table) find(key string) (ids []oncehttp.ID) {
	for id := range t.rows {
		if id.Key == key {
			ids = append(ids, id)
		}
	}
	return ids
}

func (t *table) list(after uint64, n int) (list []oncehttp.Record) {
	for _, row := range t.rows {
		if !row.Acked && row.Seq > after {
			list = append(list, row)
		}
	}
	slices.SortFunc(list, func(a, b oncehttp.Record) int { return cmp.Compare(a.Seq, b.Seq) })
	list = slices.Clip(list[:min(max(n, 0), len(list))])
	for i := range list {
		list[i].Request, list[i].Answer, list[i].Meta = nil, nil, bytes.Clone(list[i].Meta)
	}
	return list
}

func (t *table) counts() (c oncehttp.Counts) {
	for _, row := range t.rows {
		switch {
		case row.Acked:
		case row.Outcome == oncehttp.Undecided:
			c.Pending++
		case row.Outcome == oncehttp.Unknown:
			c.Unknown++
		default:
			c.Unacknowledged++
		}
	}
	return c
}

func (t *table) purge(now time.Time, n int) (dropped int, done bool) {
	due := func(until time.Time) bool { return !until.IsZero() && now.After(until) }
	for _, row := range t.rows {
		if !row.Acked && (row.Outcome == oncehttp.Undecided || row.Outcome == oncehttp.Unknown) && now.Sub(t.mark) > time.Minute {
			t.mark = now.UTC().Truncate(time.Microsecond)
		}
	}
	if len(t.purged) == 0 {
		t.purged = slices.Collect(maps.Keys(t.rows))
	}
	n = min(max(n, 0), len(t.purged))
	for _, id := range t.purged[:n] {
		row, ok := t.rows[id]
		switch {
		case !ok || !row.Acked:
		case due(row.KeepUntil):
			delete(t.rows, id)
			dropped++
		case row.Answer != nil && due(row.AnswerUntil):
			row.Answer = nil
			t.rows[id] = row
			dropped++
		}
	}
	t.purged = t.purged[n:]
	return dropped, len(t.purged) == 0
}

// newOwner returns a name for an opening that no other has.
func newOwner() string {
	var b [16]byte
	rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}
