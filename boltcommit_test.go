package oncehttp

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/bbolt"
)

// countCommits makes the store count its commits, and call before at each.
func countCommits(s *BoltStore, before func(n int)) (commits *int) {
	commits = new(int)
	s.commitTx = func(tx *bbolt.Tx) error {
		*commits++
		if before != nil {
			before(*commits)
		}
		return tx.Commit()
	}
	return commits
}

func TestWritersShareACommit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newBolt(t)
		release := make(chan bool)
		commits := countCommits(s, func(n int) {
			if n == 1 {
				<-release
			}
		})
		var group sync.WaitGroup
		begin := func(key string) {
			group.Go(func() {
				if existing, err := s.Begin(t.Context(), boltRec(key)); existing != nil || err != nil {
					t.Errorf("Begin of %s: %+v, %v", key, existing, err)
				}
			})
		}
		begin("first")
		synctest.Wait()
		for i := range 64 {
			begin(fmt.Sprint(i))
		}
		synctest.Wait()
		close(release)
		group.Wait()
		if *commits != 2 {
			t.Errorf("%d commits, want 2", *commits)
		}
		if counts, _ := s.Counts(t.Context()); counts.Pending != 65 {
			t.Errorf("%d pending, want 65", counts.Pending)
		}
		s.Close()
	})
}

// What comes while the leader puts its group into pages is committed with it, and
// one of those that fails half-way takes no other with it.
func TestWritesJoinAGroupUntilItIsCommitted(t *testing.T) {
	for _, faulty := range []bool{false, true} {
		t.Run(fmt.Sprint("faulty=", faulty), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newBolt(t)
				commits := countCommits(s, nil)
				release := make(chan bool)
				var group sync.WaitGroup
				group.Go(func() {
					err := s.write(t.Context(), func(tx *boltTx) error {
						<-release
						tx.put(tx.meta, []byte("test"), nil)
						return nil
					})
					if err != nil {
						t.Error(err)
					}
				})
				synctest.Wait()
				const n = 2*maxGroup - 1 // with the first write, two whole groups
				told := 0
				for i := range n {
					rec := boltRec(fmt.Sprint(i))
					w := newBoltPut(&rec, true)
					s.writeSoon(&boltWrite{apply: func(tx *boltTx) error {
						if _, err := tx.begin(w); err != nil {
							return err
						}
						if faulty && i == 10 {
							tx.fault = errors.New("half-way")
						}
						return tx.fault
					}, done: func(err error) {
						if failed := err != nil; failed != (faulty && i == 10) || told != i {
							t.Errorf("write %d, told as the %d.: %v", i, told, err)
						}
						told++
					}})
				}
				synctest.Wait()
				close(release)
				group.Wait()
				synctest.Wait()
				time.Sleep(idleFlush)
				synctest.Wait()
				if *commits != 2 || told != n {
					t.Errorf("%d commits, %d told; want 2 and %d", *commits, told, n)
				}
				checkCounts(t, s)
				s.Close()
			})
		})
	}
}

func TestLongQueueIsCommittedInBoundedGroupsAndOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newBolt(t)
		r := boltRec("k")
		mustBegin(t, s, r)
		release := make(chan bool)
		commits := countCommits(s, func(n int) {
			if n == 1 {
				<-release
			}
		})
		go s.Save(t.Context(), r)
		synctest.Wait()
		var told []int
		for i := range 3 * maxGroup {
			r.Attempts = i
			s.SaveSoon(r, func(err error) {
				if err != nil {
					t.Error(err)
				}
				told = append(told, i)
			})
		}
		r.Attempts = -1
		saved := make(chan error)
		go func() { saved <- s.Save(t.Context(), r) }()
		synctest.Wait()
		close(release)
		if err := <-saved; err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if *commits != 1+3+1 {
			t.Errorf("%d commits, want 5", *commits)
		}
		if len(told) != 3*maxGroup || !slices.IsSorted(told) {
			t.Errorf("%d lazy writes told, in order: %v", len(told), slices.IsSorted(told))
		}
		if got, _ := s.Get(t.Context(), r.ID); got.Attempts != -1 {
			t.Errorf("%d attempts, want those of the last write", got.Attempts)
		}
		s.Close()
	})
}

func TestLazyWriteAloneIsCommittedWhenIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newBolt(t)
		r := boltRec("k")
		mustBegin(t, s, r)
		commits := countCommits(s, nil)
		start := time.Now()
		done := make(chan error)
		r.Attempts = 1
		s.SaveSoon(r, func(err error) { done <- err })
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took != idleFlush {
			t.Errorf("took %v, want %v", took, idleFlush)
		}

		// With company it does not wait.
		start = time.Now()
		r.Attempts = 2
		s.SaveSoon(r, func(err error) { done <- err })
		mustBegin(t, s, boltRec("other"))
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took != 0 || *commits != 2 {
			t.Errorf("took %v and %d commits, want none and 2 in all", took, *commits)
		}
		s.Close() // the bubble fails if anything is left running
	})
}

func TestContextEndingInTheQueueWithdraws(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newBolt(t)
		release := make(chan bool)
		countCommits(s, func(n int) {
			if n == 1 {
				<-release
			}
		})
		begin := func(ctx context.Context, key string) chan error {
			done := make(chan error, 1)
			go func() {
				_, err := s.Begin(ctx, boltRec(key))
				done <- err
			}()
			synctest.Wait()
			return done
		}
		cause := errors.New("the cause")
		running, cancelRunning := context.WithCancelCause(t.Context())
		waiting, cancelWaiting := context.WithCancelCause(t.Context())
		a, b, c := begin(running, "running"), begin(waiting, "waiting"), begin(t.Context(), "patient")
		cancelRunning(cause)
		cancelWaiting(cause)
		if err := <-b; err != cause {
			t.Errorf("a Begin that has not begun: %v, want the context's cause", err)
		}
		synctest.Wait()
		select {
		case err := <-a:
			t.Errorf("a Begin that has begun was not waited for: %v", err)
		default:
		}
		close(release)
		if err := <-a; err != nil {
			t.Errorf("a Begin that has begun: %v", err)
		}
		if err := <-c; err != nil {
			t.Errorf("a Begin behind one that was withdrawn: %v", err)
		}
		if _, err := s.Get(t.Context(), boltRec("waiting").ID); !errors.Is(err, ErrNotFound) {
			t.Errorf("the withdrawn Begin: %v, want ErrNotFound", err)
		}
		s.Close()
	})
}

func TestFailedCommitChangesNothingAndTheNextWorks(t *testing.T) {
	s := newBolt(t)
	full := errors.New("no space left on device")
	s.commitTx = func(tx *bbolt.Tx) error { return full }
	_, err := s.Begin(t.Context(), boltRec("a"))
	if !errors.Is(err, ErrStoreFailed) || !errors.Is(err, full) || errors.Is(err, ErrStoreUncertain) {
		t.Errorf("Begin: %v, want ErrStoreFailed and its cause", err)
	}
	if _, err := s.Get(t.Context(), boltRec("a").ID); !errors.Is(err, ErrNotFound) {
		t.Errorf("Get: %v, want ErrNotFound", err)
	}
	s.commitTx = (*bbolt.Tx).Commit
	mustBegin(t, s, boltRec("a"))
	checkCounts(t, s)
}

func TestUncertainCommitClosesTheStoreForWriting(t *testing.T) {
	s := newBolt(t)
	s.commitTx = func(tx *bbolt.Tx) error {
		return errors.Join(tx.Commit(), errors.New("the last sync failed"))
	}
	if _, err := s.Begin(t.Context(), boltRec("a")); !errors.Is(err, ErrStoreUncertain) || errors.Is(err, ErrStoreFailed) {
		t.Errorf("Begin: %v, want ErrStoreUncertain and not ErrStoreFailed", err)
	}
	if _, err := s.Begin(t.Context(), boltRec("b")); !errors.Is(err, ErrStoreFailed) {
		t.Errorf("next Begin: %v, want ErrStoreFailed", err)
	}
	if _, err := s.Get(t.Context(), boltRec("a").ID); err != nil {
		t.Errorf("reading: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	again := openBolt(t, s.path)
	mustBegin(t, again, boltRec("b"))
	checkCounts(t, again)
}

func TestPanicInCommitIsAnError(t *testing.T) {
	s := newBolt(t)
	mustBegin(t, s, boltRec("a"))
	s.commitTx = func(tx *bbolt.Tx) error { panic("page 7 already freed") }
	if _, err := s.Begin(t.Context(), boltRec("b")); !errors.Is(err, ErrStoreFailed) || !errors.Is(err, ErrDamaged) {
		t.Errorf("Begin: %v, want ErrStoreFailed and ErrDamaged", err)
	}
	s.commitTx = (*bbolt.Tx).Commit
	if _, err := s.Begin(t.Context(), boltRec("b")); !errors.Is(err, ErrStoreFailed) {
		t.Errorf("next Begin: %v, want ErrStoreFailed", err)
	}
	if _, err := s.Get(t.Context(), boltRec("a").ID); err != nil {
		t.Errorf("reading: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	mustBegin(t, openBolt(t, s.path), boltRec("b"))
}

func TestFaultOfOneWriteSparesItsGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newBolt(t)
		release := make(chan bool)
		countCommits(s, func(n int) {
			if n == 1 {
				<-release
			}
		})
		results := make(map[string]error)
		var mu sync.Mutex
		var group sync.WaitGroup
		run := func(name string, do func() error) {
			group.Go(func() {
				err := do()
				mu.Lock()
				results[name] = err
				mu.Unlock()
			})
			synctest.Wait()
		}
		begin := func(key string) func() error {
			return func() error { _, err := s.Begin(t.Context(), boltRec(key)); return err }
		}
		run("first", begin("first"))
		run("good", begin("good"))
		run("panics", func() error {
			return s.write(t.Context(), func(tx *boltTx) error {
				tx.put(tx.meta, []byte("half"), []byte("done"))
				panic("a damaged page")
			})
		})
		run("faulty", func() error {
			return s.write(t.Context(), func(tx *boltTx) error {
				tx.put(tx.meta, []byte("half"), []byte("done"))
				tx.put(tx.meta, nil, nil) // an empty key is refused
				return nil
			})
		})
		run("last", begin("last"))
		close(release)
		group.Wait()
		for _, name := range []string{"first", "good", "last"} {
			if results[name] != nil {
				t.Errorf("%s: %v", name, results[name])
			}
		}
		for _, name := range []string{"panics", "faulty"} {
			if !errors.Is(results[name], ErrStoreFailed) {
				t.Errorf("%s: %v, want ErrStoreFailed", name, results[name])
			}
		}
		s.read(t.Context(), func(tx *boltTx) error {
			if tx.meta.Get([]byte("half")) != nil {
				t.Error("half a write was committed")
			}
			return nil
		})
		checkCounts(t, s)
		s.Close()
	})
}

// An answer for which there is no room takes no other one with it.
func TestWriteWithoutRoomSparesItsGroup(t *testing.T) {
	for _, full := range []error{syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG} {
		for _, tooLarge := range [][]int{{0}, {3}, {9}, {2, 3}, {0, 5, 9}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}} {
			t.Run(fmt.Sprint(full, tooLarge), func(t *testing.T) {
				s := newBolt(t)
				var group []*boltWrite
				var all []Record
				for i := range 10 {
					r := boltRec(fmt.Sprint(i))
					mustBegin(t, s, r)
					r.Outcome, r.Answer, r.AckDue = Succeeded, []byte("answer"), true
					if slices.Contains(tooLarge, i) {
						r.Answer = make([]byte, 50_000)
					}
					all = append(all, r)
					w := newBoltPut(&r, false)
					group = append(group, &boltWrite{apply: func(t *boltTx) error { return t.save(w) }})
				}
				tries := 0
				s.commitTx = func(tx *bbolt.Tx) error {
					tries++
					c := tx.Bucket(bucketOpen).Cursor()
					for k, v := c.First(); k != nil; k, v = c.Next() {
						if len(v) > 50_000 {
							return &os.PathError{Op: "write", Path: s.path, Err: full}
						}
					}
					return tx.Commit()
				}
				s.commit(group, nil)
				for i, w := range group {
					want := slices.Contains(tooLarge, i)
					if got := errors.Is(w.err, ErrStoreFailed) && errors.Is(w.err, full); got != want || !want && w.err != nil {
						t.Errorf("write %d: %v, want it to fail: %v", i, w.err, want)
					}
					got, err := s.Get(t.Context(), all[i].ID)
					if stored := err == nil && got.Outcome == Succeeded; err != nil || stored == want {
						t.Errorf("write %d: %v, %v; want it stored: %v", i, got.Outcome, err, !want)
					}
				}
				if tries >= 2*len(group) {
					t.Errorf("%d tries of %d writes", tries, len(group))
				}
				checkCounts(t, s)
			})
		}
	}
}

// A part of which nobody knows whether it was done ends the writing, for the
// other parts, too.
func TestNothingIsWrittenAfterAnUncertainPart(t *testing.T) {
	s := newBolt(t)
	tries := 0
	s.commitTx = func(tx *bbolt.Tx) error {
		if tries++; tries == 1 {
			return syscall.ENOSPC
		}
		panic("page 7 already freed")
	}
	var group []*boltWrite
	for i := range 2 {
		rec := boltRec(fmt.Sprint(i))
		w := newBoltPut(&rec, true)
		group = append(group, &boltWrite{apply: func(t *boltTx) error { _, err := t.begin(w); return err }})
	}
	s.commit(group, nil)
	if tries != 2 || !errors.Is(group[0].err, ErrStoreFailed) || !errors.Is(group[1].err, ErrStoreFailed) {
		t.Errorf("%d tries, %v, %v; want 2, and ErrStoreFailed", tries, group[0].err, group[1].err)
	}
}

// What may have been done is not done again in parts, and a disk that does not
// work is not tried a thousand times.
func TestOnlyMissingRoomDividesAGroup(t *testing.T) {
	for _, c := range []struct {
		name   string
		commit func(*bbolt.Tx) error
		want   error
	}{
		{"disk fails", func(tx *bbolt.Tx) error { return syscall.EIO }, ErrStoreFailed},
		{"done, and told as without room", func(tx *bbolt.Tx) error { return errors.Join(tx.Commit(), syscall.ENOSPC) }, ErrStoreUncertain},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newBolt(t)
			tries := 0
			s.commitTx = func(tx *bbolt.Tx) error { tries++; return c.commit(tx) }
			var group []*boltWrite
			for i := range 10 {
				rec := boltRec(fmt.Sprint(i))
				w := newBoltPut(&rec, true)
				group = append(group, &boltWrite{begins: true, apply: func(t *boltTx) error { _, err := t.begin(w); return err }})
			}
			s.commit(group, nil)
			for i, w := range group {
				if !errors.Is(w.err, c.want) {
					t.Errorf("write %d: %v, want %v", i, w.err, c.want)
				}
			}
			if tries != 1 {
				t.Errorf("%d tries, want 1", tries)
			}
		})
	}
}
