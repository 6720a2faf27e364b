package oncehttp

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"time"

	"go.etcd.io/bbolt"
)

// Format 1 of the file. A record that is open is in bucket open, under its Seq,
// so large values are appended in the order of time, and read in it. Once it is
// acknowledged, what is kept of it moves into its entry in bucket keys, and its
// answer into bucket answers.
//
//	keys     identity -> entry: a byte that says which, then the Seq or the record
//	open     Seq, big-endian -> record
//	answers  Seq, big-endian -> answer of an acknowledged record, with checksum
//	meta     "format", "secret": written once
//	         "state": boltState, written with every commit
//	         "purge": the identity at which Purge goes on; nothing: at the first
var (
	bucketKeys    = []byte("keys")
	bucketOpen    = []byte("open")
	bucketAnswers = []byte("answers")
	bucketMeta    = []byte("meta")

	metaFormat = []byte("format")
	metaSecret = []byte("secret")
	metaState  = []byte("state")
	metaPurge  = []byte("purge")
)

const (
	entryOpen     byte = 1 + iota // then: Seq, 8 bytes, of a record in bucket open
	entryAcked                    // then: the record
	entryAnswered                 // then: the record, which has its answer in bucket answers
)

// A boltState is what changes with every commit.
type boltState struct {
	seq    uint64    // last one that was assigned
	mark   time.Time // see Session.Mark
	era    uint64
	counts Counts
}

func (s *boltState) encode() []byte {
	var e headEncoder
	e.number(s.seq)
	e.signed(s.mark.UnixMicro())
	e.number(s.era)
	e.signed(int64(s.counts.Pending))
	e.signed(int64(s.counts.Unknown))
	e.signed(int64(s.counts.Unacknowledged))
	return newPart(e)
}

func decodeState(b []byte) (s boltState, err error) {
	b, ok := checked(b)
	d := headDecoder{b: b}
	s.seq, s.mark, s.era = d.number(), time.UnixMicro(d.signed()).UTC(), d.number()
	s.counts = Counts{Pending: int(d.signed()), Unknown: int(d.signed()), Unacknowledged: int(d.signed())}
	if !ok || d.bad || len(d.b) != 0 {
		return s, fmt.Errorf("%w: its state cannot be decoded", ErrDamaged)
	}
	return s, nil
}

// A boltTx is a transaction on a file of format 1. Its methods return an error
// only before they have changed anything, or with fault set.
type boltTx struct {
	keys, open, answers, meta *bbolt.Bucket

	state   boltState
	longest int // value that was put
	changed bool
	fault   error // a change failed half-way: the transaction must be rolled back
}

func newBoltTx(tx *bbolt.Tx, state boltState) (*boltTx, error) {
	t := &boltTx{state: state, keys: tx.Bucket(bucketKeys), open: tx.Bucket(bucketOpen), answers: tx.Bucket(bucketAnswers), meta: tx.Bucket(bucketMeta)}
	if t.keys == nil || t.open == nil || t.answers == nil || t.meta == nil {
		return nil, fmt.Errorf("%w: a bucket is missing", ErrDamaged)
	}
	t.open.FillPercent, t.answers.FillPercent = 1.0, 1.0 // mostly appended to
	return t, nil
}

func (t *boltTx) put(b *bbolt.Bucket, key, value []byte) {
	t.changed, t.longest = true, max(t.longest, len(value))
	if err := b.Put(key, value); err != nil && t.fault == nil {
		t.fault = err
	}
}

func (t *boltTx) delete(b *bbolt.Bucket, key []byte) {
	t.changed = true
	if err := b.Delete(key); err != nil && t.fault == nil {
		t.fault = err
	}
}

// A boltRecord is a record as found in the file. Its parts are in the memory of
// the transaction.
type boltRecord struct {
	*Record
	entry           byte
	request, answer part
}

// find returns the record of an identity, or nil. With an error that matches
// [ErrDamaged] it returns what is known of it: its entry, and its Seq or 0.
func (t *boltTx) find(id []byte) (*boltRecord, error) {
	value := t.keys.Get(id)
	if value == nil {
		return nil, nil
	}
	found := &boltRecord{Record: new(Record)}
	if len(value) == 0 {
		return found, fmt.Errorf("%w: an entry is empty", ErrDamaged)
	}
	found.entry, value = value[0], value[1:]
	var seq uint64
	switch {
	case found.entry == entryOpen && len(value) == 8:
		seq = binary.BigEndian.Uint64(value)
		found.Seq = seq
		if value = t.open.Get(value); value == nil {
			return found, fmt.Errorf("%w: a record is missing", ErrDamaged)
		}
	case found.entry == entryAcked, found.entry == entryAnswered:
	default:
		return found, fmt.Errorf("%w: an entry cannot be decoded", ErrDamaged)
	}
	r, request, answer, err := decodeHead(value)
	if err != nil {
		return found, err
	}
	if !encodes(id, r.ID) || r.Acked == (found.entry == entryOpen) || seq != 0 && r.Seq != seq {
		return found, errMisplaced
	}
	found.Record, found.request, found.answer = r, request, answer
	if found.entry == entryAnswered {
		found.answer = part(t.answers.Get(seqKey(r.Seq)))
	}
	return found, nil
}

var errMisplaced = fmt.Errorf("%w: a record is in the wrong place", ErrDamaged)

// whole returns the found record with all its parts, sharing nothing with the
// transaction.
func (f *boltRecord) whole() (r *Record, err error) {
	r = f.Record
	if r.Request, err = f.request.open("request"); err != nil {
		return nil, err
	}
	if r.Answer, err = f.answer.open("answer"); err != nil {
		return nil, err
	}
	return r, nil
}

// begin stores rec as a new record, or returns the one in its way.
func (t *boltTx) begin(rec *Record, request, answer part) (existing *Record, err error) {
	id := encodeID(rec.ID)
	found, err := t.find(id)
	if err != nil {
		return nil, err
	}
	if found != nil {
		return found.whole()
	}
	if rec.KeyGiven {
		prefix := encodePrefix(rec.Key, rec.Origin)
		err := each(t.keys, prefix, func(k, _ []byte) (more bool, err error) {
			if !bytes.HasPrefix(k, prefix) {
				return false, nil
			}
			other, err := t.find(k)
			if err == nil && inTheWay(other.Record, rec) {
				existing, err = other.whole()
			}
			return existing == nil, err
		})
		if err != nil || existing != nil {
			return existing, err
		}
	}
	t.store(id, rec, request, answer, nil)
	return nil, nil
}

// save replaces a record by rec. A damaged one has nothing left to compare
// with, and is replaced whatever it was.
func (t *boltTx) save(rec *Record, request, answer part) error {
	id := encodeID(rec.ID)
	found, err := t.find(id)
	if found == nil {
		return ErrNotFound
	}
	if err == nil {
		if err := admits(found.Record, rec, nil); err != nil {
			return err
		}
	}
	if !rec.Acked && request == nil {
		request = found.request
	}
	if !rec.Acked && answer == nil {
		answer = found.answer
	}
	t.store(id, rec, request, answer, found)
	if err != nil {
		t.recount()
	}
	return t.fault
}

// store writes rec in the place of found, which may be nil.
func (t *boltTx) store(id []byte, rec *Record, request, answer part, found *boltRecord) {
	rec.Seq = 0
	if found != nil && (rec.Acked || found.entry == entryOpen) {
		rec.Seq = found.Seq
	}
	if rec.Seq == 0 {
		t.state.seq++
		rec.Seq = t.state.seq
	}
	t.state.mark = latest(t.state.mark, keptTime(rec.Updated))

	// What is written is encoded before anything is removed, since parts may
	// be in the memory of what is.
	if !rec.Acked {
		value := encodeRecord(rec, request, answer)
		if found == nil || found.entry != entryOpen {
			t.remove(found)
			t.put(t.keys, id, append([]byte{entryOpen}, seqKey(rec.Seq)...))
		} else {
			t.state.counts.open(found.Outcome, -1)
		}
		t.put(t.open, seqKey(rec.Seq), value)
		t.state.counts.open(rec.Outcome, 1)
		return
	}
	entry := entryAcked
	if answer != nil {
		entry = entryAnswered
	}
	t.remove(found)
	t.put(t.keys, id, append([]byte{entry}, encodeRecord(rec, nil, nil)...))
	if answer != nil {
		t.put(t.answers, seqKey(rec.Seq), answer)
	}
}

// remove removes what is kept of a record outside of its entry, which it leaves
// to the caller.
func (t *boltTx) remove(found *boltRecord) {
	switch {
	case found == nil:
	case found.entry == entryOpen:
		t.delete(t.open, seqKey(found.Seq))
		t.state.counts.open(found.Outcome, -1)
	case found.entry == entryAnswered:
		t.delete(t.answers, seqKey(found.Seq))
	}
}

// drop deletes the record that rec names, if there is one; also a damaged one.
func (t *boltTx) drop(rec *Record) error {
	id := encodeID(rec.ID)
	found, err := t.find(id)
	if found == nil {
		return nil
	}
	if err == nil {
		_, err = found.whole()
	}
	if err == nil {
		if err := admits(found.Record, rec, nil); err != nil {
			return err
		}
	}
	t.remove(found)
	t.delete(t.keys, id)
	if err != nil {
		t.recount()
	}
	return t.fault
}

// purge drops what is due of the records with the identities, and returns of
// how many it dropped something.
func (t *boltTx) purge(ids [][]byte, now time.Time) (dropped int) {
	for _, id := range ids {
		found, err := t.find(id)
		if found == nil || err != nil || found.entry == entryOpen {
			continue
		}
		switch {
		case due(found.KeepUntil, now):
			t.remove(found)
			t.delete(t.keys, id)
			dropped++
		case found.entry == entryAnswered && due(found.AnswerUntil, now):
			t.remove(found)
			t.put(t.keys, id, append([]byte{entryAcked}, encodeRecord(found.Record, nil, nil)...))
			dropped++
		}
	}
	return dropped
}

// each calls f with the elements of a bucket, from a key on, as long as it wants
// more. A damaged tree may lead round in circles: keys out of order are an error.
func each(b *bbolt.Bucket, from []byte, f func(k, v []byte) (more bool, err error)) error {
	c := b.Cursor()
	var before []byte
	for k, v := c.Seek(from); k != nil; k, v = c.Next() {
		if bytes.Compare(k, from) < 0 || before != nil && bytes.Compare(k, before) <= 0 {
			return fmt.Errorf("%w: its records are out of order", ErrDamaged)
		}
		before = k
		if more, err := f(k, v); !more || err != nil {
			return err
		}
	}
	return nil
}

// list returns up to n open records after a Seq. One that is damaged is listed
// with what its place says of it.
func (t *boltTx) list(after uint64, n int) (list []Record, err error) {
	if after == math.MaxUint64 || n <= 0 {
		return nil, nil
	}
	damaged := make(map[uint64]int) // index in list by Seq
	err = each(t.open, seqKey(after+1), func(k, v []byte) (more bool, err error) {
		if len(k) != 8 {
			return true, nil
		}
		seq := binary.BigEndian.Uint64(k)
		r, _, _, err := decodeHead(v)
		switch {
		case err != nil || r.Seq != seq:
			damaged[seq] = len(list)
			r = &Record{Seq: seq, Outcome: Unknown, Reason: ReasonUnreadable}
		case !bytes.Equal(t.keys.Get(encodeID(r.ID)), append([]byte{entryOpen}, k...)): // who asks for it by its ID does not get it
			r = &Record{ID: r.ID, Seq: seq, Outcome: Unknown, Reason: ReasonUnreadable}
		}
		list = append(list, *r)
		return len(list) < n, nil
	})
	if err == nil && len(damaged) > 0 {
		err = t.identify(func(seq uint64, id ID) {
			if i, ok := damaged[seq]; ok {
				list[i].ID = id
			}
		})
	}
	if err != nil {
		return nil, err
	}
	return list, nil
}

// identify calls f with every open record's Seq and identity.
func (t *boltTx) identify(f func(uint64, ID)) error {
	return each(t.keys, nil, func(k, v []byte) (more bool, err error) {
		if len(v) == 9 && v[0] == entryOpen {
			if id, err := decodeID(k); err == nil {
				f(binary.BigEndian.Uint64(v[1:]), id)
			}
		}
		return true, nil
	})
}

// checkIdentities returns an error if a record is under another identity than its
// own: who looks for it would be told that there is none, and it would be sent
// anew.
func checkIdentities(tx *bbolt.Tx) error {
	t, err := newBoltTx(tx, boltState{})
	if err != nil {
		return err
	}
	return each(t.keys, nil, func(k, v []byte) (more bool, err error) {
		if len(v) == 9 && v[0] == entryOpen {
			v = t.open.Get(v[1:])
		} else if len(v) > 0 {
			v = v[1:]
		}
		if r, _, _, err := decodeHead(v); err == nil && !encodes(k, r.ID) {
			return false, errMisplaced
		}
		return true, nil
	})
}

// recount counts the open records by reading all of them. A damaged one is
// unknown, as it is listed.
func (t *boltTx) recount() {
	t.state.counts = Counts{}
	err := each(t.open, nil, func(_, v []byte) (more bool, err error) {
		outcome := Unknown
		if r, _, _, err := decodeHead(v); err == nil {
			outcome = r.Outcome
		}
		t.state.counts.open(outcome, 1)
		return true, nil
	})
	if t.fault == nil {
		t.fault = err
	}
}

func seqKey(seq uint64) []byte { return binary.BigEndian.AppendUint64(nil, seq) }
