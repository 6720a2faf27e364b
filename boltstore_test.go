package oncehttp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/bbolt"
)

func openBolt(t testing.TB, path string) *BoltStore {
	t.Helper()
	s, err := OpenBolt(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func newBolt(t testing.TB) *BoltStore {
	t.Helper()
	return openBolt(t, filepath.Join(t.TempDir(), "once.db"))
}

func boltRec(key string) Record {
	return Record{
		ID: ID{Key: key, Origin: "https://api.example.com"}, Epoch: 1, Owner: "owner",
		Updated: time.Date(2026, 5, 4, 3, 2, 1, 0, time.UTC), Request: []byte("request of " + key),
	}
}

func mustBegin(t testing.TB, s KeyStore, r Record) {
	t.Helper()
	if existing, err := s.Begin(context.Background(), r); existing != nil || err != nil {
		t.Fatalf("Begin of %q: %+v, %v", r.Key, existing, err)
	}
}

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

func TestReplacedFileIsNotWritten(t *testing.T) {
	for name, replace := range map[string]func(path string, old []byte) error{
		"deleted": func(path string, old []byte) error { return os.Remove(path) },
		"renamed over": func(path string, old []byte) error {
			return errors.Join(os.WriteFile(path+"2", old, 0o600), os.Rename(path+"2", path))
		},
		"restored in place": func(path string, old []byte) error { return os.WriteFile(path, old, 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			if runtime.GOOS == "windows" {
				t.Skip("open files cannot be replaced there")
			}
			s := newBolt(t)
			mustBegin(t, s, boltRec("a"))
			old, err := os.ReadFile(s.path)
			if err != nil {
				t.Fatal(err)
			}
			mustBegin(t, s, boltRec("b"))
			if err := replace(s.path, old); err != nil {
				t.Fatal(err)
			}
			before, _ := os.ReadFile(s.path)
			for range 2 {
				if _, err := s.Begin(t.Context(), boltRec("c")); !errors.Is(err, ErrStoreReplaced) || !errors.Is(err, ErrStoreFailed) {
					t.Errorf("Begin: %v, want ErrStoreReplaced", err)
				}
			}
			if err := s.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
			if after, _ := os.ReadFile(s.path); !bytes.Equal(before, after) {
				t.Error("the file was written")
			}
		})
	}
}

func TestSecondOpeningIsLockedOut(t *testing.T) {
	s := newBolt(t)
	if _, err := OpenBolt(s.path); !errors.Is(err, ErrStoreLocked) {
		t.Errorf("second OpenBolt: %v, want ErrStoreLocked", err)
	}
	mustBegin(t, s, boltRec("a"))
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	openBolt(t, s.path)
}

func TestOneOfManyCreatesTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "once.db")
	var group sync.WaitGroup
	var mu sync.Mutex
	var opened []*BoltStore
	for range 8 {
		group.Go(func() {
			s, err := OpenBolt(path)
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				opened = append(opened, s)
			} else if !errors.Is(err, ErrStoreLocked) {
				t.Errorf("OpenBolt: %v", err)
			}
		})
	}
	group.Wait()
	if len(opened) != 1 {
		t.Fatalf("%d have it open, want 1", len(opened))
	}
	mustBegin(t, opened[0], boltRec("a")) // it is the file at path
	opened[0].Close()
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(entries) != 1 {
		t.Errorf("left in the directory: %v, %v", entries, err)
	}
	if info, _ := os.Stat(path); runtime.GOOS != "windows" && info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, want 0600", info.Mode())
	}
}

func TestCountsAreThoseOfAScan(t *testing.T) {
	s := newBolt(t)
	random := rand.New(rand.NewPCG(5, 6))
	records := make([]Record, 20)
	for i := range records {
		records[i] = boltRec(fmt.Sprint(i))
	}
	ctx := t.Context()
	for range 600 {
		r := &records[random.IntN(len(records))]
		r.Outcome = []Outcome{Undecided, Succeeded, Rejected, Unknown}[random.IntN(4)]
		r.KeepUntil = r.Updated
		r.Answer = nil
		if random.IntN(2) == 0 {
			r.Answer = []byte("answer")
		}
		var err error
		switch random.IntN(6) {
		case 0, 1:
			_, err = s.Begin(ctx, *r)
		case 2:
			err = s.Save(ctx, *r)
		case 3:
			err = s.Ack(ctx, *r)
		case 4:
			err = s.Delete(ctx, *r)
		case 5:
			_, _, err = s.Purge(ctx, r.Updated.Add(time.Hour), 3)
		}
		if err != nil && !errors.Is(err, ErrNotFound) {
			t.Fatal(err)
		}
	}
	checkCounts(t, s)
	s.Close()
	checkCounts(t, openBolt(t, s.path))
}

// checkCounts compares the counts with a scan, and looks for what is left over.
func checkCounts(t *testing.T, s *BoltStore) {
	t.Helper()
	err := s.read(context.Background(), func(tx *boltTx) error {
		if got, want := s.committedState().counts, tx.recount(); got != want {
			t.Errorf("counts %+v, a scan says %+v", got, want)
		}
		open, answered := 0, 0
		err := tx.keys.ForEach(func(id, entry []byte) error {
			switch entry[0] {
			case entryOpen:
				open++
			case entryAnswered:
				answered++
			}
			found, err := tx.find(id)
			if err == nil {
				_, err = found.whole()
			}
			return err
		})
		if n := tx.open.Stats().KeyN; n != open {
			t.Errorf("%d records in open, %d entries", n, open)
		}
		if n := tx.answers.Stats().KeyN; n != answered {
			t.Errorf("%d answers, %d entries", n, answered)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

func TestFreelistIsWrittenWhileSmallAndAfterClose(t *testing.T) {
	s := newBolt(t)
	const backlog = 3 * manyFreePages / 2
	all := func(do func(*boltTx, Record)) {
		t.Helper()
		err := s.write(t.Context(), func(tx *boltTx) error {
			for i := range backlog {
				do(tx, boltRec(fmt.Sprint(i)))
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	body := newPart(make([]byte, 5000)) // two pages
	all(func(tx *boltTx, r Record) { tx.begin(&r, body, nil) })
	mustBegin(t, s, boltRec("a"))
	if s.db.NoFreelistSync {
		t.Error("not written with a full file")
	}
	all(func(tx *boltTx, r Record) { tx.drop(&r) })
	for i := range 3 { // free pages are counted at the end of a transaction
		mustBegin(t, s, boltRec(fmt.Sprint("b", i)))
	}
	if !s.db.NoFreelistSync {
		t.Errorf("written with an empty file, %d pages free", s.db.Stats().FreePageN)
	}
	crashed, err := os.ReadFile(s.path)
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	for _, when := range []string{"after Close", "after a crash"} {
		if when == "after a crash" {
			if err := os.WriteFile(s.path, crashed, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		s := openBolt(t, s.path)
		synced, err := s.freelistSynced(s.last)
		if err != nil || synced != (when == "after Close") {
			t.Errorf("%s: synced %v, %v", when, synced, err)
		}
		checkCounts(t, s)
		mustBegin(t, s, boltRec("c"+when))
		s.Close()
	}
}

// format1 is what testdata/format1.db holds. Change neither: a later version
// must read it.
func format1() (open, answered, outcome Record) {
	open = *goldenRecord()
	open.ID.Key, open.Seq = "open", 1
	answered = open
	answered.ID.Key, answered.Seq, answered.Outcome, answered.Reason = "answered", 2, Succeeded, NoReason
	answered.Answer = bytes.Repeat([]byte("answer "), 1000)
	outcome = answered
	outcome.ID.Key, outcome.Seq, outcome.Answer = "outcome", 3, nil
	return open, answered, outcome
}

var format1Secret = [32]byte([]byte("a secret that is 32 bytes long.."))

const format1File = "testdata/format1.db"

func TestFormat1Readable(t *testing.T) {
	b, err := os.ReadFile(format1File)
	if errors.Is(err, fs.ErrNotExist) {
		writeFormat1(t)
		t.Fatalf("%s was missing, and was written", format1File)
	}
	path := filepath.Join(t.TempDir(), "once.db")
	if err := errors.Join(err, os.WriteFile(path, b, 0o600)); err != nil {
		t.Fatal(err)
	}
	s := openBolt(t, path)
	checkCounts(t, s)
	session, err := s.Session(t.Context(), goldenRecord().Updated)
	if err != nil || session.Secret != format1Secret || session.Era != 1 || !session.Mark.Equal(goldenRecord().Updated) {
		t.Errorf("session: %+v, %v", session, err)
	}
	open, answered, outcome := format1()
	for _, want := range []Record{open, answered, outcome} {
		if want.Key != open.Key {
			want.Acked, want.Request = true, nil
		}
		if got, err := s.Get(t.Context(), want.ID); err != nil || !reflect.DeepEqual(got, &want) {
			t.Errorf("%s:\n%+v, %v, want\n%+v", want.Key, got, err, want)
		}
	}
	if list, err := s.List(t.Context(), 0, 10); err != nil || len(list) != 1 || list[0].Key != open.Key {
		t.Errorf("listed: %+v, %v", list, err)
	}
	mustBegin(t, s, boltRec("new"))
}

func writeFormat1(t *testing.T) {
	s := newBolt(t)
	open, answered, outcome := format1()
	for _, r := range []Record{open, answered, outcome} {
		mustBegin(t, s, r)
		if r.Key == open.Key {
			continue
		}
		if err := s.Ack(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	err := s.write(t.Context(), func(tx *boltTx) error {
		tx.put(tx.meta, metaSecret, newPart(format1Secret[:]))
		return nil
	})
	size := s.extent
	if err := errors.Join(err, s.Close(), os.Truncate(s.path, size)); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(s.path)
	if err := errors.Join(err, os.MkdirAll(filepath.Dir(format1File), 0o755), os.WriteFile(format1File, b, 0o644)); err != nil {
		t.Fatal(err)
	}
}
