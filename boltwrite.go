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
// answer, unless it is short, into bucket answers.
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
	entryAcked                    // then: the record, with its answer if it has one
	entryAnswered                 // then: the record, which has its answer in bucket answers
)

// An answer of up to shortAnswer bytes is in its entry, which saves a commit two
// pages of bucket answers; a longer one would make looking identities up, and
// writing one beside it, slower.
const shortAnswer = 1 << 10

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
	return newPart(e).appendTo(nil)
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
	atKey, atSeq              *bbolt.Cursor // of keys and open, for lookUp

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
	t.keys.FillPercent = 0.7                             // keys that NewKey made ascend, those of KeyFor do not
	t.atKey, t.atSeq = t.keys.Cursor(), t.open.Cursor()
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

// lookUp is bbolt's Get, with a cursor that is used again.
func lookUp(c *bbolt.Cursor, key []byte) []byte {
	k, v := c.Seek(key)
	if !bytes.Equal(k, key) {
		return nil
	}
	return v
}

// A boltRecord is a record as found in the file. Its parts are in the memory of
// the transaction.
type boltRecord struct {
	Record
	entry           byte
	request, answer part
}

// find returns the record of an identity, or nil. With an error that matches
// [ErrDamaged] it returns what is known of it: its entry, and its Seq or 0. Strings
// that are as in like are not made anew.
func (t *boltTx) find(id []byte, like *Record) (*boltRecord, error) {
	value := lookUp(t.atKey, id)
	if value == nil {
		return nil, nil
	}
	found := new(boltRecord)
	if len(value) == 0 {
		return found, fmt.Errorf("%w: an entry is empty", ErrDamaged)
	}
	found.entry, value = value[0], value[1:]
	var seq uint64
	switch {
	case found.entry == entryOpen && len(value) == 8:
		seq = binary.BigEndian.Uint64(value)
		if value = lookUp(t.atSeq, value); value == nil {
			found.Seq = seq
			return found, fmt.Errorf("%w: a record is missing", ErrDamaged)
		}
	case found.entry == entryAcked, found.entry == entryAnswered:
	default:
		return found, fmt.Errorf("%w: an entry cannot be decoded", ErrDamaged)
	}
	found.ID, found.Owner = like.ID, like.Owner
	request, answer, err := found.decodeHead(value)
	if err == nil && (!encodes(id, found.ID) || found.Acked == (found.entry == entryOpen) || seq != 0 && found.Seq != seq) {
		err = errMisplaced
	}
	if err != nil {
		found.Record = Record{Seq: seq}
		return found, err
	}
	found.request, found.answer = request, answer
	if found.entry == entryAnswered {
		found.answer = storedPart(t.answers.Get(seqKey(found.Seq)))
	}
	return found, nil
}

var errMisplaced = fmt.Errorf("%w: a record is in the wrong place", ErrDamaged)

// whole returns the found record with all its parts, sharing nothing with the
// transaction.
func (f *boltRecord) whole() (r *Record, err error) {
	r = &f.Record
	if r.Request, err = f.request.open("request"); err != nil {
		return nil, err
	}
	if r.Answer, err = f.answer.open("answer"); err != nil {
		return nil, err
	}
	return r, nil
}

// A boltPut is a record that is to be written. What can be encoded before it is
// known what is stored is encoded by whoever asks for the write, so that the one
// goroutine that writes has less to do.
type boltPut struct {
	*Record
	id              []byte
	request, answer part
	value           []byte // entry and record
	apart           []byte // answer for bucket answers
}

// newBoltPut returns the write of rec, which it keeps: as a new record, or in the
// place of another.
func newBoltPut(rec *Record, begins bool) *boltPut {
	w := &boltPut{Record: rec, id: encodeID(rec.ID), request: newPart(rec.Request), answer: newPart(rec.Answer)}
	if begins || rec.Acked {
		w.encode(w.request, w.answer)
	}
	return w
}

func (w *boltPut) encode(request, answer part) {
	entry := entryOpen
	if w.Acked {
		request, entry = part{}, entryAcked
		if len(answer.content)+checksumSize > shortAnswer {
			w.apart, answer, entry = answer.appendTo(nil), part{}, entryAnswered
		}
	}
	const head = 256 // about, with checksums
	w.value = append(make([]byte, 0, head+len(w.id)+len(w.Meta)+len(request.content)+len(answer.content)), entry)
	w.value = appendRecord(w.value, w.Record, request, answer)
}

// size returns about how many bytes are stored of it, and by bbolt with it.
func (w *boltPut) size() int {
	const others = 400 + 2*checksumSize
	return others + len(w.Meta) + len(w.request.content) + len(w.answer.content)
}

// begin stores a new record, or returns the one in its way.
func (t *boltTx) begin(w *boltPut) (existing *Record, err error) {
	found, err := t.find(w.id, w.Record)
	if err != nil {
		return nil, err
	}
	if found != nil {
		return found.whole()
	}
	if w.KeyGiven {
		prefix := encodePrefix(w.Key, w.Origin)
		err := each(t.keys, prefix, func(k, _ []byte) (more bool, err error) {
			if !bytes.HasPrefix(k, prefix) {
				return false, nil
			}
			other, err := t.find(k, w.Record)
			if err == nil && inTheWay(&other.Record, w.Record) {
				existing, err = other.whole()
			}
			return existing == nil, err
		})
		if err != nil || existing != nil {
			return existing, err
		}
	}
	t.store(w, nil)
	return nil, nil
}

// save replaces a record. A damaged one has nothing left to compare with, and is
// replaced whatever it was.
func (t *boltTx) save(w *boltPut) error {
	found, err := t.find(w.id, w.Record)
	if found == nil {
		return ErrNotFound
	}
	if err == nil {
		if err := admits(&found.Record, w.Record, nil); err != nil {
			return err
		}
	}
	if !w.Acked {
		request, answer := w.request, w.answer
		if request.isNil() {
			request = found.request
		}
		if answer.isNil() {
			answer = found.answer
		}
		w.encode(request, answer)
	}
	t.store(w, found)
	if err != nil {
		t.recount()
	}
	return t.fault
}

// store writes a record in the place of found, which may be nil.
func (t *boltTx) store(w *boltPut, found *boltRecord) {
	w.Seq = 0
	if found != nil && (w.Acked || found.entry == entryOpen) {
		w.Seq = found.Seq
	}
	if w.Seq == 0 {
		t.state.seq++
		w.Seq = t.state.seq
	}
	setSeq(w.value[1:], w.Seq)
	t.state.mark = latest(t.state.mark, keptTime(w.Updated))

	// All is encoded: nothing of it is in the memory of what is removed now.
	open := found != nil && found.entry == entryOpen
	switch {
	case w.Acked:
		t.remove(found)
		t.put(t.keys, w.id, w.value)
		if w.apart != nil {
			t.put(t.answers, seqKey(w.Seq), w.apart)
		}
		return
	case open: // its entry stays
		t.state.counts.open(found.Outcome, -1)
	default:
		t.remove(found)
		t.put(t.keys, w.id, openEntry(w.Seq))
	}
	t.put(t.open, seqKey(w.Seq), w.value[1:])
	t.state.counts.open(w.Outcome, 1)
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
	found, err := t.find(id, rec)
	if found == nil {
		return nil
	}
	if err == nil {
		_, err = found.whole()
	}
	if err == nil {
		if err := admits(&found.Record, rec, nil); err != nil {
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
		found, err := t.find(id, &Record{})
		if found == nil || err != nil || found.entry == entryOpen {
			continue
		}
		switch {
		case due(found.KeepUntil, now):
			t.remove(found)
			t.delete(t.keys, id)
			dropped++
		case (found.entry == entryAnswered || !found.answer.isNil()) && due(found.AnswerUntil, now):
			t.remove(found)
			t.put(t.keys, id, appendRecord([]byte{entryAcked}, &found.Record, part{}, part{}))
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
		case !bytes.Equal(lookUp(t.atKey, encodeID(r.ID)), openEntry(seq)): // who asks for it by its ID does not get it
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
// own, or an open one under none: who looks for it would be told that there is none,
// and it would be sent anew.
func checkIdentities(tx *bbolt.Tx) error {
	t, err := newBoltTx(tx, boltState{})
	if err != nil {
		return err
	}
	open := 0
	err = each(t.keys, nil, func(k, v []byte) (more bool, err error) {
		if len(v) == 9 && v[0] == entryOpen {
			v = lookUp(t.atSeq, v[1:])
			open++
		} else if len(v) > 0 {
			v = v[1:]
		}
		if r, _, _, err := decodeHead(v); err == nil && !encodes(k, r.ID) {
			return false, errMisplaced
		}
		return true, nil
	})
	if err != nil {
		return err
	}
	state, err := decodeState(t.meta.Get(metaState))
	if err != nil {
		return err
	}
	if n := state.counts.Pending + state.counts.Unknown + state.counts.Unacknowledged; open < n {
		return fmt.Errorf("%w: of %d open records, %d are found", ErrDamaged, n, open)
	}
	return nil
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

// openEntry returns the entry of an open record.
func openEntry(seq uint64) []byte {
	return binary.BigEndian.AppendUint64(append(make([]byte, 0, 9), entryOpen), seq)
}
