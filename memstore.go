package oncehttp

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"
)

// A MemoryStore is a [KeyStore] that forgets everything with its process, for
// tests, and for operations that need not outlive it.
type MemoryStore struct {
	mu      sync.Mutex            // guards the following
	records map[string]*memRecord // by their Key: the first of them
	open    []*memRecord          // in the order of Seq: the open records, and some that are no more
	gone    int                   // how many of open are no more
	counts  Counts
	seq     uint64
	session *Session
	round   []string // the keys of what Purge has still to look at in this round
	closed  bool
}

// A memRecord is a record and, since one key may be that of several operations, the
// next of those with its key.
type memRecord struct {
	Record
	next    *memRecord
	removed bool
}

func (r *memRecord) isOpen() bool { return !r.Acked && !r.removed }

var _ KeyStore = (*MemoryStore)(nil)

// NewMemoryStore returns an empty store.
func NewMemoryStore() *MemoryStore {
	return &MemoryStore{records: make(map[string]*memRecord)}
}

// findLocked returns the record of an identity, or nil.
func (s *MemoryStore) findLocked(id ID) *memRecord {
	for r := s.records[id.Key]; r != nil; r = r.next {
		if r.ID == id {
			return r
		}
	}
	return nil
}

// lock locks the store, unless ctx has ended or the store is closed.
func (s *MemoryStore) lock(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return fmt.Errorf("%w: it is closed", ErrStoreFailed)
	}
	return nil
}

// Session implements [KeyStore].
func (s *MemoryStore) Session(ctx context.Context, now time.Time) (Session, error) {
	if err := s.lock(ctx); err != nil {
		return Session{}, err
	}
	defer s.mu.Unlock()
	if s.session == nil {
		s.session = &Session{Owner: newOwner(), Era: 1}
		rand.Read(s.session.Secret[:]) // never fails
	}
	return *s.session, nil
}

// Begin implements [KeyStore].
func (s *MemoryStore) Begin(ctx context.Context, rec Record) (existing *Record, err error) {
	if err := s.lock(ctx); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	if found := s.findLocked(rec.ID); found != nil {
		return found.kept(), nil
	}
	if rec.KeyGiven {
		for r := s.records[rec.Key]; r != nil; r = r.next {
			if inTheWay(&r.Record, &rec) {
				return r.kept(), nil
			}
		}
	}
	s.putLocked(rec, nil)
	return nil, nil
}

// Save implements [KeyStore].
func (s *MemoryStore) Save(ctx context.Context, rec Record) error {
	if err := s.lock(ctx); err != nil {
		return err
	}
	defer s.mu.Unlock()
	found := s.findLocked(rec.ID)
	if found == nil {
		return ErrNotFound
	}
	if err := admits(&found.Record, &rec, nil); err != nil {
		return err
	}
	s.putLocked(rec, found)
	return nil
}

// Ack implements [KeyStore]. It takes part in no transaction of the caller's.
func (s *MemoryStore) Ack(ctx context.Context, rec Record) error {
	rec.Acked = true
	return s.Save(ctx, rec)
}

// Delete implements [KeyStore].
func (s *MemoryStore) Delete(ctx context.Context, rec Record) error {
	if err := s.lock(ctx); err != nil {
		return err
	}
	defer s.mu.Unlock()
	found := s.findLocked(rec.ID)
	if found == nil {
		return nil
	}
	if err := admits(&found.Record, &rec, nil); err != nil {
		return err
	}
	s.removeLocked(found)
	return nil
}

// putLocked keeps a copy of r in the place of found, which may be nil.
func (s *MemoryStore) putLocked(r Record, found *memRecord) {
	if r.Acked {
		r.Request = nil
	}
	r.own()
	if found != nil && !r.Acked {
		if r.Request == nil {
			r.Request = found.Request
		}
		if r.Answer == nil {
			r.Answer = found.Answer
		}
	}
	if found != nil && !found.Acked {
		s.counts.open(found.Outcome, -1)
	}
	if !r.Acked {
		s.counts.open(r.Outcome, 1)
	}
	if found != nil && (r.Acked || !found.Acked) {
		r.Seq = found.Seq
		closes := r.Acked && !found.Acked
		found.Record = r // also in open
		if closes {
			s.goneLocked()
		}
		return
	}
	s.seq++
	r.Seq = s.seq
	if found != nil { // acknowledged, and open again: a new place in open
		s.unlinkLocked(found)
	}
	stored := &memRecord{Record: r, next: s.records[r.Key]}
	s.records[r.Key] = stored
	if !r.Acked {
		s.open = append(s.open, stored)
	}
}

// unlinkLocked takes a record out of records.
func (s *MemoryStore) unlinkLocked(found *memRecord) {
	found.removed = true
	first := s.records[found.Key]
	switch {
	case first != found:
		for first.next != found {
			first = first.next
		}
		first.next = found.next
	case found.next != nil:
		s.records[found.Key] = found.next
	default:
		delete(s.records, found.Key)
	}
}

func (s *MemoryStore) removeLocked(found *memRecord) {
	s.unlinkLocked(found)
	if !found.Acked {
		s.counts.open(found.Outcome, -1)
		s.goneLocked()
	}
}

// goneLocked notes that one of open is no more, and cleans up when most are.
func (s *MemoryStore) goneLocked() {
	if s.gone++; s.gone > 32 && s.gone > len(s.open)/2 {
		s.open = slices.DeleteFunc(s.open, func(r *memRecord) bool { return !r.isOpen() })
		s.gone = 0
	}
}

// Get implements [KeyStore].
func (s *MemoryStore) Get(ctx context.Context, id ID) (*Record, error) {
	if err := s.lock(ctx); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	found := s.findLocked(id)
	if found == nil {
		return nil, ErrNotFound
	}
	return found.kept(), nil
}

// Find implements [KeyStore].
func (s *MemoryStore) Find(ctx context.Context, key string) ([]ID, error) {
	if err := s.lock(ctx); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	var ids []ID
	for r := s.records[key]; r != nil; r = r.next {
		ids = append(ids, r.ID)
	}
	return ids, nil
}

// List implements [KeyStore].
func (s *MemoryStore) List(ctx context.Context, after uint64, n int) ([]Record, error) {
	if err := s.lock(ctx); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	from, _ := slices.BinarySearchFunc(s.open, after, func(r *memRecord, after uint64) int {
		if r.Seq <= after {
			return -1
		}
		return 1
	})
	var list []Record
	for _, r := range s.open[from:] {
		if len(list) >= n {
			break
		}
		if r.isOpen() {
			r := r.Record
			r.Request, r.Answer, r.Meta = nil, nil, bytes.Clone(r.Meta)
			list = append(list, r)
		}
	}
	return list, nil
}

// Counts implements [KeyStore].
func (s *MemoryStore) Counts(ctx context.Context) (Counts, error) {
	if err := s.lock(ctx); err != nil {
		return Counts{}, err
	}
	defer s.mu.Unlock()
	return s.counts, nil
}

// Purge implements [KeyStore]. A round is through the records there were at its
// beginning.
func (s *MemoryStore) Purge(ctx context.Context, now time.Time, n int) (dropped int, done bool, err error) {
	if err := s.lock(ctx); err != nil {
		return 0, false, err
	}
	defer s.mu.Unlock()
	if len(s.round) == 0 {
		s.round = slices.Collect(maps.Keys(s.records))
	}
	n = min(max(n, 0), len(s.round))
	for _, key := range s.round[:n] {
		for r := s.records[key]; r != nil; r = r.next {
			switch {
			case !r.Acked:
			case due(r.KeepUntil, now):
				s.removeLocked(r) // its next stays
				dropped++
			case r.Answer != nil && due(r.AnswerUntil, now):
				r.Answer = nil
				dropped++
			}
		}
	}
	s.round = s.round[n:]
	return dropped, len(s.round) == 0, nil
}

// Close implements [KeyStore].
func (s *MemoryStore) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	return nil
}
