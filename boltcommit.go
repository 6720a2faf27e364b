package oncehttp

import (
	"context"
	"errors"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"syscall"
	"time"

	"go.etcd.io/bbolt"
)

// A commit costs two syncs of the file, whatever it holds, so writes are
// committed in groups. There is no timer for them and no goroutine: a writer
// that finds nobody leading leads. It commits all writes that are queued, and those
// that come while it puts them into pages, in one transaction; those that come
// during the syncs queue up, and it passes the lead on to one of them. Lazy writes
// ride along. When no more come, a leader lets those run who were told of the last
// commit, if they were several: they may come with their next write. That makes
// groups half as large again, or more.
const (
	maxGroup  = 1024                 // writes in one transaction
	idleFlush = 2 * time.Millisecond // until lazy writes that nobody takes along are committed
	yields    = 4                    // of a leader to its company; more did not make groups larger
	longYield = time.Millisecond     // after that long, it waits no longer: others need the processors
)

// A boltWrite is one queued write.
type boltWrite struct {
	apply  func(*boltTx) error // may be called more than once; the last call counts
	begins bool                // a new operation: not done unless there is headroom
	size   int                 // of what it stores, in bytes; about
	err    error               // its outcome; written by the leader before it tells
	wake   chan bool           // the writer waits here: true tells it to lead, false that it is done; nil if lazy
	done   func(error)         // called when it is done, if lazy

	taken bool // guarded by BoltStore.mu: its group has begun
	leads bool // guarded by BoltStore.mu: it was told to lead, and does not yet
}

// write queues a write and waits for it.
func (s *BoltStore) write(ctx context.Context, apply func(*boltTx) error) error {
	return s.enqueue(ctx, &boltWrite{apply: apply})
}

func (s *BoltStore) enqueue(ctx context.Context, w *boltWrite) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	w.wake = make(chan bool, 1)
	s.mu.Lock()
	if err := s.refusalLocked(); err != nil {
		s.mu.Unlock()
		return err
	}
	s.queue = append(s.queue, w)
	lead := !s.leading
	s.leading = true
	s.mu.Unlock()
	if lead {
		s.lead(w)
	}
	return s.wait(ctx, w)
}

func (s *BoltStore) wait(ctx context.Context, w *boltWrite) error {
	ended := ctx.Done()
	for {
		select {
		case lead := <-w.wake:
			if !lead {
				return w.err
			}
			s.lead(w)
		case <-ended:
			if s.withdraw(w) {
				return context.Cause(ctx)
			}
			ended = nil // it has begun, and is waited for
		}
	}
}

// withdraw takes a write back, unless it has begun.
func (s *BoltStore) withdraw(w *boltWrite) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w.taken {
		return false
	}
	s.queue = slices.DeleteFunc(s.queue, func(q *boltWrite) bool { return q == w })
	if w.leads {
		s.passOnLocked()
	}
	return true
}

// writeSoon queues a lazy write.
func (s *BoltStore) writeSoon(w *boltWrite) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w.err = s.refusalLocked(); w.err != nil {
		s.tellLocked([]*boltWrite{w})
		return
	}
	s.queue = append(s.queue, w)
	if !s.leading {
		s.leading = true
		s.passOnLocked()
	}
}

// lead commits a group and passes the lead on. by, which may be nil, is the
// write whose writer does it.
func (s *BoltStore) lead(by *boltWrite) {
	s.mu.Lock()
	if by != nil {
		by.leads = false
	}
	if s.idle != nil {
		s.idle.Stop()
		s.idle = nil
	}
	s.mu.Unlock()

	yielded, begun := 0, time.Time{}
	group := s.commit(s.take(maxGroup), func(n int) []*boltWrite {
		for {
			group := s.take(maxGroup - n)
			if len(group) > 0 || !s.crowded || yielded == yields || n == maxGroup {
				return group
			}
			if yielded == 0 {
				begun = time.Now()
			} else if time.Since(begun) > longYield {
				return nil
			}
			runtime.Gosched()
			yielded++
		}
	})

	s.mu.Lock()
	s.crowded = s.tellLocked(group) > 1
	s.passOnLocked()
	s.mu.Unlock()
}

// take takes up to n writes from the queue.
func (s *BoltStore) take(n int) []*boltWrite {
	s.mu.Lock()
	defer s.mu.Unlock()
	n = min(n, len(s.queue))
	if n == 0 {
		return nil
	}
	group := slices.Clone(s.queue[:n])
	s.queue = slices.Delete(s.queue, 0, n)
	for _, w := range group {
		w.taken = true
	}
	return group
}

// passOnLocked ends a lead, and makes sure that what is queued is committed: by
// the first writer that waits, or, if there are only lazy writes, soon.
func (s *BoltStore) passOnLocked() {
	for _, w := range s.queue {
		if w.wake != nil {
			w.leads = true
			w.wake <- true // there is room: nothing else is told before it has led
			return
		}
	}
	switch {
	case len(s.queue) >= maxGroup:
		go s.lead(nil)
		return
	case len(s.queue) > 0 && s.idle == nil:
		s.idle = time.AfterFunc(idleFlush, s.flush)
	}
	s.leading = false
}

// flush commits the lazy writes that nobody took along.
func (s *BoltStore) flush() {
	s.mu.Lock()
	idle := !s.leading && len(s.queue) > 0
	if idle {
		s.leading = true
	}
	s.mu.Unlock()
	if idle {
		s.lead(nil)
	}
}

// tellLocked tells the writers of a group that it is done, and returns how many
// have waited. Those of lazy writes are told in order, by a goroutine that lives as
// long as there is something to tell: a leader may hold locks that they want.
func (s *BoltStore) tellLocked(group []*boltWrite) (waited int) {
	for _, w := range group {
		if w.wake != nil {
			w.wake <- false
			waited++
		} else {
			s.told = append(s.told, w)
		}
	}
	if len(s.told) > 0 && !s.telling {
		s.telling = true
		go s.tell()
	}
	return waited
}

func (s *BoltStore) tell() {
	for {
		s.mu.Lock()
		told := s.told
		s.told = nil
		s.telling = len(told) > 0
		s.mu.Unlock()
		if len(told) == 0 {
			return
		}
		for _, w := range told {
			w.done(w.err)
		}
	}
}

func fail(group []*boltWrite, err error) {
	for _, w := range group {
		w.err = err
	}
}

// commit commits a group in one transaction. A write whose own changes fail
// half-way is left out, and the rest is done again without it. If there is no room
// for all, each half is committed for itself, and so on: one answer that finds no
// place takes no other with it. more, which may be nil, says what has come since,
// to a group of n: it is committed, too. commit returns all.
func (s *BoltStore) commit(group []*boltWrite, more func(n int) []*boltWrite) (all []*boltWrite) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	all, group = group, slices.Clone(group)
	for len(group) > 0 {
		came, faulty, err := s.try(group, more)
		all, group, more = append(all, came...), append(group, came...), nil
		switch half := len(group) / 2; {
		case faulty >= 0:
			group[faulty].err = err
			group = slices.Delete(group, faulty, faulty+1)
		case half > 0 && noRoom(err):
			s.commit(group[:half], nil)
			group = group[half:]
		case err != nil:
			fail(group, err)
			return all
		default:
			return all
		}
	}
	return all
}

// noRoom reports whether a commit is known not to have been done, because the
// disk, a quota or a limit of the process leaves no room.
func noRoom(err error) bool {
	full := errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || errors.Is(err, syscall.EFBIG)
	return full && errors.Is(err, ErrStoreFailed)
}

// try commits a group, and what more says. It returns what that was, the index of a
// write because of which nothing was done, or -1, and the error that concerns it,
// or all.
func (s *BoltStore) try(group []*boltWrite, more func(n int) []*boltWrite) (came []*boltWrite, faulty int, err error) {
	s.mu.Lock()
	broken := s.broken
	s.mu.Unlock()
	if broken != nil {
		return came, -1, broken
	}
	if err := s.checkInPlace(); err != nil {
		return came, -1, err
	}
	tx, err := s.beginTx(true)
	if err != nil {
		return came, -1, err
	}
	defer s.endTx(tx)
	if tx.ID() != s.last+1 {
		return came, -1, s.breakOff(s.notAsLeft())
	}
	var t *boltTx
	err = guard(func() (err error) {
		t, err = newBoltTx(tx, s.committedState())
		return err
	})
	if err != nil {
		return came, -1, s.failure(err, "it cannot be written", ErrStoreFailed)
	}
	wanted := s.newRoom(tx)
	full := s.makeRoom(tx, wanted, group)
	for i := 0; ; i++ {
		if i == len(group) && more != nil {
			if next := more(i); len(next) > 0 {
				came, group = append(came, next...), append(group, next...)
				full = s.makeRoom(tx, wanted, next)
			}
		}
		if i == len(group) {
			break
		}
		w := group[i]
		if full != nil && w.begins {
			w.err = full
			continue
		}
		err := guard(func() error {
			w.err = w.apply(t)
			return t.fault
		})
		if err != nil {
			return came, i, s.failure(err, "writing a record failed", ErrStoreFailed)
		}
	}
	if !t.changed {
		return came, -1, nil
	}
	err = guard(func() error {
		t.put(t.meta, metaState, t.state.encode())
		return t.fault
	})
	if err != nil {
		return came, -1, s.failure(err, "writing its state failed", ErrStoreFailed)
	}
	if err := s.checkFreelist(tx); err != nil {
		return came, -1, s.breakOff(s.failure(err, "it was damaged while it was open; restore it from a backup", ErrDamaged, ErrStoreFailed))
	}
	s.setFreelistSync(tx)
	id := tx.ID()
	if err := guard(func() error { return s.commitTx(tx) }); err != nil {
		return came, -1, s.commitFailed(tx, err)
	}
	s.mu.Lock()
	s.last, s.state, s.longest = id, t.state, max(s.longest, t.longest)
	s.mu.Unlock()
	return came, -1, nil
}

// commitFailed returns the error of a commit that failed: whether it was done
// shows in the id of the transaction that is visible. After a panic, what bbolt
// has in memory is not trusted any more.
func (s *BoltStore) commitFailed(tx *bbolt.Tx, cause error) error {
	s.endTx(tx)
	read, err := s.beginTx(false)
	if err != nil || read.ID() != s.last {
		s.endTx(read)
		return s.breakOff(s.failure(cause, "commit", ErrStoreUncertain))
	}
	s.endTx(read)
	failed := s.failure(cause, "commit", ErrStoreFailed)
	if isPanic(cause) {
		return s.breakOff(failed)
	}
	return failed
}

// checkFreelist returns an error if the pages on which free pages are listed
// cannot be told.
func (s *BoltStore) checkFreelist(tx *bbolt.Tx) error {
	_, freelist, err := s.metaPage(s.last)
	if err != nil || freelist == noFreelist {
		return err
	}
	return newPageCheck(s.file, s.pageSize, tx.Size()).freelistHeader(freelist)
}

// checkInPlace returns an error if the file that is written is no longer the
// one that the next process would open.
func (s *BoltStore) checkInPlace() error {
	info, err := os.Stat(s.path)
	if err != nil && !os.IsNotExist(err) {
		return s.failure(err, "it cannot be looked up", ErrStoreFailed)
	}
	if err != nil || !os.SameFile(info, s.info) {
		return s.breakOff(s.failure(nil, "what would be written now would be lost; put it back, or restart to begin anew", ErrStoreReplaced, ErrStoreFailed))
	}
	return nil
}

// notAsLeft is the error of a file in which the last transaction is another one
// than the last of this process.
func (s *BoltStore) notAsLeft() *boltError {
	return s.failure(nil, "it is not as this process left it; restart, to open what is there now", ErrStoreReplaced, ErrStoreFailed)
}

// breakOff closes the store for writing, and returns err, the reason.
func (s *BoltStore) breakOff(err *boltError) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.broken == nil {
		kinds := slices.DeleteFunc(slices.Clone(err.kinds), func(kind error) bool {
			return kind == ErrStoreUncertain || kind == ErrStoreFailed
		})
		s.broken = s.failure(nil, "closed for writing, because earlier: "+err.what(), append(kinds, ErrStoreFailed)...)
	}
	return err
}

// Which free pages a file has is either written with every commit, which costs
// 8 bytes for each, or found out at opening by reading all pages in use. It is
// written, unless there are many free pages, as after a backlog was worked off,
// and few in use.
const (
	manyFreePages = 4096 // 32 KiB in every commit, which is not felt beside two syncs
	fewUsedShare  = 4    // pages in use are few if there are this many times as many free ones
)

func (s *BoltStore) setFreelistSync(tx *bbolt.Tx) {
	used, free := s.usedPages(tx)
	s.db.NoFreelistSync = free > manyFreePages && used < free/fewUsedShare
}
