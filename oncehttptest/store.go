package oncehttptest

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/oncehttp/oncehttp"
)

// lazyAfter is how long a [Store] puts off a lazy write that no other write
// takes along, as the store of oncehttp.OpenBolt does.
const lazyAfter = 2 * time.Millisecond

// A Store is an [oncehttp.LazyStore] in memory that can crash, for tests of what
// a program makes of its operations after a restart. It starts no goroutine that
// waits, and works inside a testing/synctest bubble, on fake time.
//
// What is written by SaveSoon is not durable, and not visible, before the next
// other write, or 2 ms have passed, or Close.
type Store struct {
	// Before and After, if not nil, are called before and after each Begin,
	// Save, SaveSoon, Ack and Delete, named by op, with the record that was
	// handed over and no lock held: they may call anything, [Store.Crash]
	// too. If Before crashes the store, the write is not done; if After does,
	// it is, but reports that it was not. After a SaveSoon comes when it is
	// durable, before its done is called. After does not come after writes
	// that failed. Set them before the first use.
	Before, After func(op string, rec oncehttp.Record)

	mu      sync.Mutex // guards the following
	durable *table
	lazy    []lazyWrite
	timer   *time.Timer // flushes lazy; set while there are any
	owner   string
	mark    time.Time // at opening
	session *oncehttp.Session
	faults  []*storeFault
	ended   error // closed or crashed
	refuses error // closed for writing
}

type lazyWrite struct {
	rec  oncehttp.Record
	done func(error)
	err  error
}

// A storeFault makes a write fail.
type storeFault struct {
	op        string
	n         int // calls until it fails; 1: the next one
	err       error
	uncertain bool
	written   bool // if uncertain: the write is done
}

var _ oncehttp.LazyStore = (*Store)(nil)

// NewStore returns an empty store.
func NewStore() *Store { return openStore(newTable()) }

func openStore(t *table) *Store { return &Store{durable: t, mark: t.mark, owner: newOwner()} }

// Crash ends the store as the death of its process would, and returns what the
// next process opens: a store with what was durable, without hooks and faults,
// and with another [oncehttp.Session.Owner]. Every call to the old one fails
// with [oncehttp.ErrStoreFailed] from now on, and so are lazy writes told that
// were not durable yet, so that a client that uses it can be shut down. Crash
// after Close is opening again.
func (s *Store) Crash() *Store {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended == nil {
		s.ended = fmt.Errorf("%w: it has crashed", oncehttp.ErrStoreFailed)
	}
	lost := s.takeLocked()
	for i := range lost {
		lost[i].err = s.ended
	}
	s.tell(lost)
	return openStore(s.durable.clone())
}

// Fail makes the n-th of the next writes fail with err, undone. n is 1 for the
// next one; op is "Begin", "Save", "SaveSoon", "Ack", "Delete", or "" for any of
// them. What is returned matches [oncehttp.ErrStoreFailed] and err, which may be
// nil.
func (s *Store) Fail(op string, n int, err error) {
	s.fault(&storeFault{op: op, n: n, err: err})
}

// FailUncertain makes the n-th of the next writes fail with an error that
// matches [oncehttp.ErrStoreUncertain]. written says whether it is done all the
// same. The store accepts no more writes then; [Store.Crash] opens it again. n
// and op are as for [Store.Fail].
func (s *Store) FailUncertain(op string, n int, written bool) {
	s.fault(&storeFault{op: op, n: n, uncertain: true, written: written})
}

func (s *Store) fault(f *storeFault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = append(s.faults, f)
}

// write does one durable write, and those that were put off before it.
func (s *Store) write(ctx context.Context, op string, rec oncehttp.Record, do func(*table) error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if s.Before != nil {
		s.Before(op, rec)
	}
	s.mu.Lock()
	flushed := s.flushLocked()
	err := s.doLocked(op, do)
	s.mu.Unlock()
	s.tell(flushed)
	if err != nil || s.After == nil {
		return err
	}
	s.After(op, rec)
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ended
}

// doLocked does one write, or lets it fail.
func (s *Store) doLocked(op string, do func(*table) error) error {
	if err := s.refusalLocked(); err != nil {
		return err
	}
	f := s.faultLocked(op)
	if f == nil {
		return do(s.durable)
	}
	if !f.uncertain {
		if f.err == nil {
			return fmt.Errorf("%w: a fault of the test", oncehttp.ErrStoreFailed)
		}
		return fmt.Errorf("%w: %w", oncehttp.ErrStoreFailed, f.err)
	}
	if f.written {
		if err := do(s.durable); err != nil {
			return err
		}
	}
	s.refuses = fmt.Errorf("%w: closed for writing", oncehttp.ErrStoreFailed)
	return oncehttp.ErrStoreUncertain
}

// faultLocked counts a write, and returns its fault, if it has one.
func (s *Store) faultLocked(op string) (due *storeFault) {
	for _, f := range s.faults {
		if f.op != "" && f.op != op {
			continue
		}
		if f.n--; f.n == 0 && due == nil {
			due = f
		}
	}
	return due
}

func (s *Store) refusalLocked() error {
	if s.ended != nil {
		return s.ended
	}
	return s.refuses
}

// takeLocked takes the lazy writes out of the store.
func (s *Store) takeLocked() []lazyWrite {
	lazy := s.lazy
	s.lazy = nil
	if s.timer != nil {
		s.timer.Stop()
		s.timer = nil
	}
	return lazy
}

// flushLocked does the lazy writes.
func (s *Store) flushLocked() []lazyWrite {
	lazy := s.takeLocked()
	for i := range lazy {
		w := &lazy[i]
		w.err = s.doLocked("SaveSoon", func(t *table) error { return t.save(w.rec, nobody) })
	}
	return lazy
}

// tell tells how lazy writes have ended, in order, from another goroutine.
func (s *Store) tell(lazy []lazyWrite) {
	if len(lazy) == 0 {
		return
	}
	go func() {
		for _, w := range lazy {
			if w.err == nil && s.After != nil {
				s.After("SaveSoon", w.rec)
			}
			w.done(w.err)
		}
	}()
}

// nobody is alive but the one session that writes.
func nobody(string) bool { return false }

// read reads what is durable.
func (s *Store) read(ctx context.Context, do func(*table)) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended == nil {
		do(s.durable)
	}
	return s.ended
}

// Session implements [oncehttp.KeyStore].
func (s *Store) Session(ctx context.Context, now time.Time) (oncehttp.Session, error) {
	var session oncehttp.Session
	err := s.read(ctx, func(t *table) {
		if s.session == nil {
			session := t.session(s.owner, s.mark, now)
			s.session = &session
		}
		session = *s.session
	})
	return session, err
}

// Begin implements [oncehttp.KeyStore].
func (s *Store) Begin(ctx context.Context, rec oncehttp.Record) (existing *oncehttp.Record, err error) {
	err = s.write(ctx, "Begin", rec, func(t *table) error {
		existing = t.begin(rec)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return existing, nil
}

// Save implements [oncehttp.KeyStore].
func (s *Store) Save(ctx context.Context, rec oncehttp.Record) error {
	return s.write(ctx, "Save", rec, func(t *table) error { return t.save(rec, nobody) })
}

// SaveSoon implements [oncehttp.LazyStore].
func (s *Store) SaveSoon(rec oncehttp.Record, done func(error)) {
	if s.Before != nil {
		s.Before("SaveSoon", rec)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.refusalLocked(); err != nil {
		s.tell([]lazyWrite{{done: done, err: err}})
		return
	}
	s.lazy = append(s.lazy, lazyWrite{rec: copied(rec), done: done})
	if s.timer == nil {
		s.timer = time.AfterFunc(lazyAfter, s.flush)
	}
}

func (s *Store) flush() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tell(s.flushLocked())
}

// Ack implements [oncehttp.KeyStore]. It takes part in no transaction of the
// caller's.
func (s *Store) Ack(ctx context.Context, rec oncehttp.Record) error {
	rec.Acked = true
	return s.write(ctx, "Ack", rec, func(t *table) error { return t.save(rec, nobody) })
}

// Delete implements [oncehttp.KeyStore].
func (s *Store) Delete(ctx context.Context, rec oncehttp.Record) error {
	return s.write(ctx, "Delete", rec, func(t *table) error { return t.delete(rec, nobody) })
}

// Get implements [oncehttp.KeyStore].
func (s *Store) Get(ctx context.Context, id oncehttp.ID) (rec *oncehttp.Record, err error) {
	err = s.read(ctx, func(t *table) { rec = t.get(id) })
	if err == nil && rec == nil {
		err = oncehttp.ErrNotFound
	}
	return rec, err
}

// Find implements [oncehttp.KeyStore].
func (s *Store) Find(ctx context.Context, key string) (ids []oncehttp.ID, err error) {
	err = s.read(ctx, func(t *table) { ids = t.find(key) })
	return ids, err
}

// List implements [oncehttp.KeyStore].
func (s *Store) List(ctx context.Context, after uint64, n int) (list []oncehttp.Record, err error) {
	err = s.read(ctx, func(t *table) { list = t.list(after, n) })
	return list, err
}

// Counts implements [oncehttp.KeyStore].
func (s *Store) Counts(ctx context.Context) (counts oncehttp.Counts, err error) {
	err = s.read(ctx, func(t *table) { counts = t.counts() })
	return counts, err
}

// Purge implements [oncehttp.KeyStore].
func (s *Store) Purge(ctx context.Context, now time.Time, n int) (dropped int, done bool, err error) {
	if ctx.Err() != nil {
		return 0, false, context.Cause(ctx)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.refusalLocked(); err != nil {
		return 0, false, err
	}
	s.tell(s.flushLocked())
	dropped, done = s.durable.purge(now, n)
	return dropped, done, nil
}

// Close implements [oncehttp.KeyStore].
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended == nil {
		s.tell(s.flushLocked())
		s.ended = fmt.Errorf("%w: it is closed", oncehttp.ErrStoreFailed)
	}
	return nil
}
