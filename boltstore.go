package oncehttp

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/bbolt"
)

// A BoltStore is a [KeyStore] in a file, for one process at a time. Writes that
// come at the same time share a commit.
//
// On a full disk, Begin fails with [ErrStoreFailed], and the other writes go on:
// the file has a few MiB in reserve for them.
//
// The file is a bbolt database. Bytes of deleted records stay in it until their
// place is used again.
type BoltStore struct {
	path     string // absolute
	file     *os.File
	info     os.FileInfo // of file
	db       *bbolt.DB
	pageSize int
	owner    string
	secret   [32]byte
	opened   boltState // at opening

	mu      sync.Mutex   // guards the following
	queue   []*boltWrite // writes that wait for a group, in order
	leading bool         // somebody commits a group, or was told to
	idle    *time.Timer  // runs flush; set if queue has nothing but lazy writes
	told    []*boltWrite // lazy writes that are done, for tell
	telling bool         // tell runs
	state   boltState    // as last committed
	broken  error        // not nil: the store is closed for writing
	closed  bool
	crowded bool // several have waited for the last group; read and written by who leads
	last    int  // id of the last transaction; written by who leads, who may read it without mu
	longest int  // no record in the file has more bytes, or maxHeadroom suffices for it; as last

	// commitTx commits a transaction: tests make it slow, and make it fail.
	// Written once before the first write.
	commitTx func(*bbolt.Tx) error

	sessionMu sync.Mutex // guards session
	session   *Session

	purgeMu sync.Mutex // guards purgeAt; held during Purge
	purgeAt []byte     // identity at which Purge goes on; nil: at the first

	txMu   sync.Mutex                // held while a transaction begins
	extent int64                     // guarded by txMu: the file has been seen to need this many bytes
	wedged atomic.Pointer[boltError] // bbolt panicked with its locks held and must not be called again
}

var _ LazyStore = (*BoltStore)(nil)

// Session implements [KeyStore].
func (s *BoltStore) Session(ctx context.Context, now time.Time) (Session, error) {
	s.sessionMu.Lock()
	defer s.sessionMu.Unlock()
	if s.session != nil {
		return *s.session, nil
	}
	session := Session{Owner: s.owner, Secret: s.secret, Mark: s.opened.mark, Era: s.opened.era}
	if steppedBack(session.Mark, now) {
		session.Mark, session.Era, session.SteppedBack = keptTime(now), session.Era+1, true
		err := s.write(ctx, func(t *boltTx) error {
			t.state.mark, t.state.era, t.changed = session.Mark, session.Era, true
			return nil
		})
		if err != nil {
			return Session{}, err
		}
	} else if err := s.usable(ctx); err != nil {
		return Session{}, err
	}
	s.session = &session
	return session, nil
}

// Begin implements [KeyStore].
func (s *BoltStore) Begin(ctx context.Context, rec Record) (existing *Record, err error) {
	w := newBoltPut(&rec, true)
	err = s.enqueue(ctx, &boltWrite{begins: true, size: w.size(), apply: func(t *boltTx) (err error) {
		existing, err = t.begin(w)
		return err
	}})
	if err != nil {
		return nil, s.named(err)
	}
	return existing, nil
}

// Save implements [KeyStore].
func (s *BoltStore) Save(ctx context.Context, rec Record) error {
	w := newBoltPut(&rec, false)
	return s.named(s.enqueue(ctx, &boltWrite{size: w.size(), apply: func(t *boltTx) error { return t.save(w) }}))
}

// SaveSoon implements [LazyStore].
func (s *BoltStore) SaveSoon(rec Record, done func(error)) {
	if !rec.Acked { // it is encoded later
		rec.own()
	}
	w := newBoltPut(&rec, false)
	s.writeSoon(&boltWrite{size: w.size(), apply: func(t *boltTx) error { return t.save(w) }, done: done})
}

// Ack implements [KeyStore]. It takes part in no transaction of the caller's.
func (s *BoltStore) Ack(ctx context.Context, rec Record) error {
	rec.Acked = true
	return s.Save(ctx, rec)
}

// Delete implements [KeyStore].
func (s *BoltStore) Delete(ctx context.Context, rec Record) error {
	return s.named(s.write(ctx, func(t *boltTx) error { return t.drop(&rec) }))
}

// Get implements [KeyStore].
func (s *BoltStore) Get(ctx context.Context, id ID) (rec *Record, err error) {
	err = s.read(ctx, func(t *boltTx) error {
		found, err := t.find(encodeID(id), &Record{ID: id})
		if err != nil {
			return err
		}
		if found == nil {
			return ErrNotFound
		}
		rec, err = found.whole()
		return err
	})
	return rec, err
}

// Find implements [KeyStore].
func (s *BoltStore) Find(ctx context.Context, key string) (ids []ID, err error) {
	err = s.read(ctx, func(t *boltTx) error {
		prefix := encodePrefix(key)
		return each(t.keys, prefix, func(k, _ []byte) (more bool, err error) {
			if !bytes.HasPrefix(k, prefix) {
				return false, nil
			}
			id, err := decodeID(k)
			ids = append(ids, id)
			return true, err
		})
	})
	return ids, err
}

// listPage is the most that one List returns, so that its transaction is short:
// pages freed while one is open cannot be used again.
const listPage = 256

// List implements [KeyStore]. A record that cannot be decoded is listed as
// [Unknown] with [ReasonUnreadable], its ID and Seq, and nothing else.
func (s *BoltStore) List(ctx context.Context, after uint64, n int) (list []Record, err error) {
	err = s.read(ctx, func(t *boltTx) (err error) {
		list, err = t.list(after, min(n, listPage))
		return err
	})
	return list, err
}

// Counts implements [KeyStore].
func (s *BoltStore) Counts(ctx context.Context) (Counts, error) {
	if err := s.usable(ctx); err != nil {
		return Counts{}, err
	}
	return s.committedState().counts, nil
}

// What Purge looks at and drops in one transaction, and how long an identity
// may be to be remembered in the file.
const (
	purgePage     = 256
	purgeAtMaxLen = 512
)

// Purge implements [KeyStore]. It looks at records in the order of their IDs.
func (s *BoltStore) Purge(ctx context.Context, now time.Time, n int) (dropped int, done bool, err error) {
	s.purgeMu.Lock()
	defer s.purgeMu.Unlock()
	if state := s.committedState(); outdated(state.mark, now, state.counts) {
		err := s.write(ctx, func(t *boltTx) error {
			t.state.mark, t.changed = latest(t.state.mark, keptTime(now)), true
			return nil
		})
		if err != nil {
			return 0, false, err
		}
	}
	for n > 0 && !done {
		ids, looked, next, err := s.purgeable(ctx, now, min(n, purgePage))
		if err != nil {
			return dropped, false, err
		}
		if len(ids) > 0 {
			count := 0
			err = s.write(ctx, func(t *boltTx) error {
				if count = t.purge(ids, now); count > 0 {
					if len(next) > 0 && len(next) <= purgeAtMaxLen {
						t.put(t.meta, metaPurge, next)
					} else {
						t.delete(t.meta, metaPurge)
					}
				}
				return nil
			})
			if err != nil {
				return dropped, false, err
			}
			dropped += count
		}
		s.purgeAt, n, done = next, n-looked, next == nil
	}
	return dropped, done, nil
}

// purgeable looks at up to n records from purgeAt on. It returns those of which
// something is due, how many it looked at, and where to go on; nil: the round is
// complete.
func (s *BoltStore) purgeable(ctx context.Context, now time.Time, n int) (ids [][]byte, looked int, next []byte, err error) {
	err = s.read(ctx, func(t *boltTx) error {
		return each(t.keys, s.purgeAt, func(k, v []byte) (more bool, err error) {
			if looked == n {
				next = bytes.Clone(k)
				return false, nil
			}
			looked++
			if len(v) > 0 && v[0] != entryOpen {
				r, _, short, err := decodeHead(v[1:])
				answered := !short.isNil() || v[0] == entryAnswered
				if err == nil && (due(r.KeepUntil, now) || answered && due(r.AnswerUntil, now)) {
					ids = append(ids, bytes.Clone(k))
				}
			}
			return true, nil
		})
	})
	return ids, looked, next, err
}

// Backup writes a copy of the file to w, as it was after one commit, while the
// store is in use. The copy can be opened like any other file.
//
// Meanwhile, pages that become free are not used again, so the file grows by what
// is written; and when it grows much, all wait for the end. So w should be a local
// file, not a connection. The error is that of the store, of w, or the cause of
// ctx.
func (s *BoltStore) Backup(ctx context.Context, w io.Writer) error {
	return s.read(ctx, func(t *boltTx) error {
		var failed error // bbolt keeps only the text of some
		_, err := t.meta.Tx().WriteTo(writerFunc(func(b []byte) (n int, err error) {
			if failed = context.Cause(ctx); failed == nil {
				n, failed = w.Write(b)
			}
			return n, failed
		}))
		return cmp.Or(failed, err)
	})
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

// Close implements [KeyStore].
func (s *BoltStore) Close() error {
	flushed := &boltWrite{apply: func(*boltTx) error { return nil }, wake: make(chan bool, 1)}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	broken := s.broken != nil // all that is queued will be told so
	s.closed = true
	s.queue = append(s.queue, flushed)
	lead := !s.leading
	s.leading = true
	s.mu.Unlock()
	if lead {
		s.lead(flushed)
	}
	err := s.wait(context.Background(), flushed) // everything queued before it is done, nothing comes after it
	if broken {
		err = nil
	}
	return errors.Join(err, s.closeFile())
}

// closeFile closes the file after the last write. If which pages are free was
// not written with the last commit, it is now, so that the next opening is fast.
func (s *BoltStore) closeFile() error {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	if s.db.NoFreelistSync && s.broken == nil && s.checkInPlace() == nil {
		s.db.NoFreelistSync = false
		if tx, err := s.beginTx(true); err == nil {
			guard(tx.Commit) // if it fails, nothing is lost but time
			s.endTx(tx)
		}
	}
	if s.wedged.Load() != nil {
		return s.abandon()
	}
	return guard(s.db.Close)
}

// abandon closes the file without bbolt. It stays mapped, which would keep it
// locked as long as the process lives.
func (s *BoltStore) abandon() error {
	return errors.Join(unlock(s.file), s.file.Close())
}

// read runs f in a short transaction. f copies what it keeps.
func (s *BoltStore) read(ctx context.Context, f func(*boltTx) error) error {
	if err := s.usable(ctx); err != nil {
		return err
	}
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	s.mu.Lock()
	last := s.last
	s.mu.Unlock()
	tx, err := s.beginTx(false)
	if err != nil {
		return err
	}
	defer s.endTx(tx)
	if tx.ID() < last { // an older file in its place would deny what this one holds
		return s.breakOff(s.notAsLeft())
	}
	return s.named(guard(func() error {
		t, err := newBoltTx(tx, boltState{})
		if err != nil {
			return err
		}
		return f(t)
	}))
}

// usable returns why nothing can be asked of the store, or nil.
func (s *BoltStore) usable(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return s.failure(nil, "closed", ErrStoreFailed)
	}
	return nil
}

// refusalLocked returns why nothing can be written, or nil.
func (s *BoltStore) refusalLocked() error {
	if s.closed {
		return s.failure(nil, "closed", ErrStoreFailed)
	}
	return s.broken
}

func (s *BoltStore) committedState() boltState {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state
}

// beginTx begins a transaction. A file that was cut short is told here, before
// bbolt touches what is not there any more.
func (s *BoltStore) beginTx(writable bool) (tx *bbolt.Tx, err error) {
	s.txMu.Lock()
	defer s.txMu.Unlock()
	if wedged := s.wedged.Load(); wedged != nil {
		return nil, wedged
	}
	info, err := s.file.Stat()
	if err != nil {
		return nil, s.failure(err, "closed", ErrStoreFailed)
	}
	if info.Size() < s.extent {
		return nil, s.failure(nil, fmt.Sprintf("it was cut short to %d bytes; restore it from a backup", info.Size()), ErrDamaged, ErrStoreFailed)
	}
	err = guard(func() (err error) {
		tx, err = s.db.Begin(writable)
		return err
	})
	if err != nil {
		failed := s.failure(err, "it cannot be read", ErrStoreFailed)
		if isPanic(err) {
			s.wedged.Store(failed)
		}
		return nil, failed
	}
	s.extent = max(s.extent, tx.Size())
	return tx, nil
}

// endTx ends a transaction that is not, or not yet, committed. tx may be nil or
// at its end already.
func (s *BoltStore) endTx(tx *bbolt.Tx) {
	if tx == nil || s.wedged.Load() != nil {
		return
	}
	if err := guard(tx.Rollback); isPanic(err) {
		s.wedged.Store(s.failure(err, "it cannot be read", ErrStoreFailed))
	}
}
