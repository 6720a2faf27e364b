package oncehttp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"
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
		tx.recount()
		if got, want := s.committedState().counts, tx.state.counts; got != want {
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
			found, err := tx.find(id, &Record{})
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

// TestAnswersOfEveryLength: short ones are in their entry, others apart, and both
// come and go with their record.
func TestAnswersOfEveryLength(t *testing.T) {
	s := newBolt(t)
	const longest = shortAnswer - checksumSize // that is short
	apart := func(want int) {
		t.Helper()
		checkCounts(t, s)
		s.read(t.Context(), func(tx *boltTx) error {
			if n := tx.answers.Stats().KeyN; n != want {
				t.Errorf("%d answers apart, want %d", n, want)
			}
			return nil
		})
	}
	lengths := []int{0, 1, longest, longest + 1, 50_000}
	record := func(n int) Record {
		r := boltRec(fmt.Sprint(n))
		r.Outcome, r.Acked, r.Answer = Succeeded, true, bytes.Repeat([]byte{'a'}, n)
		r.AnswerUntil, r.KeepUntil = r.Updated.Add(time.Hour), r.Updated.Add(2*time.Hour)
		return r
	}
	for _, n := range lengths {
		mustBegin(t, s, boltRec(fmt.Sprint(n)))
		if err := s.Save(t.Context(), record(n)); err != nil {
			t.Fatal(err)
		}
	}
	apart(2)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openBolt(t, s.path)
	for _, n := range lengths {
		if got, err := s.Get(t.Context(), record(n).ID); err != nil || !bytes.Equal(got.Answer, record(n).Answer) || got.Answer == nil {
			t.Errorf("answer of %d bytes: %+v, %v", n, got, err)
		}
	}
	for _, n := range lengths { // each takes the place of another, and comes back
		for _, other := range []int{lengths[len(lengths)-1-slices.Index(lengths, n)], n} {
			r := record(n)
			r.Answer = record(other).Answer
			if err := s.Save(t.Context(), r); err != nil {
				t.Fatal(err)
			}
			if got, err := s.Get(t.Context(), r.ID); err != nil || !bytes.Equal(got.Answer, r.Answer) {
				t.Errorf("answer of %d bytes in the place of %d: %v", other, n, err)
			}
			checkCounts(t, s)
		}
	}
	apart(2)
	now := record(0).Updated
	for _, c := range []struct {
		after   time.Duration
		dropped int
		err     error
	}{{time.Minute, 0, nil}, {61 * time.Minute, len(lengths), nil}, {62 * time.Minute, 0, nil}, {121 * time.Minute, len(lengths), ErrNotFound}} {
		dropped, _, err := s.Purge(t.Context(), now.Add(c.after), 100)
		if err != nil || dropped != c.dropped {
			t.Errorf("Purge after %v: %d, %v; want %d", c.after, dropped, err, c.dropped)
		}
		for _, n := range lengths {
			got, err := s.Get(t.Context(), record(n).ID)
			if !errors.Is(err, c.err) || err == nil && (got.Answer != nil) != (c.after == time.Minute) {
				t.Errorf("after %v, with %d bytes: %+v, %v; want %v", c.after, n, got, err, c.err)
			}
		}
		if c.after > time.Minute {
			apart(0)
		}
	}
}

func TestReadingLeavesTheFileAsItIs(t *testing.T) {
	s := newBolt(t)
	mustBegin(t, s, boltRec("a"))
	s.Close()
	before, err := os.ReadFile(s.path)
	if err != nil {
		t.Fatal(err)
	}
	s = openBolt(t, s.path)
	if _, err := s.Session(t.Context(), time.Now()); err != nil {
		t.Error(err)
	}
	if existing, err := s.Begin(t.Context(), boltRec("a")); err != nil || existing == nil {
		t.Errorf("Begin: %v, %v", existing, err)
	}
	if _, _, err := s.Purge(t.Context(), s.state.mark, 10); err != nil { // later, it would renew the mark
		t.Error(err)
	}
	s.Close()
	if after, err := os.ReadFile(s.path); err != nil || !bytes.Equal(before, after) {
		t.Errorf("the file was changed (%v)", err)
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
	all(func(tx *boltTx, r Record) {
		r.Request = make([]byte, 5000) // two pages
		tx.begin(newBoltPut(&r, true))
	})
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
		_, freelist, err := s.metaPage(s.last)
		if written := freelist != noFreelist; err != nil || written != (when == "after Close") {
			t.Errorf("%s: written %v, %v", when, written, err)
		}
		checkCounts(t, s)
		mustBegin(t, s, boltRec("c"+when))
		s.Close()
	}
}

// format1 is what testdata/format1.db holds. Change neither: a later version
// must read it.
func format1() (open, answered, short, outcome Record) {
	open = *goldenRecord()
	open.ID.Key, open.Seq = "open", 1
	answered = open
	answered.ID.Key, answered.Seq, answered.Outcome, answered.Reason = "answered", 2, Succeeded, NoReason
	answered.Answer = bytes.Repeat([]byte("answer "), 1000)
	outcome, short = answered, answered
	outcome.ID.Key, outcome.Seq, outcome.Answer = "outcome", 3, nil
	short.ID.Key, short.Seq, short.Answer = "short", 4, []byte("answer")
	return open, answered, short, outcome
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
	open, answered, short, outcome := format1()
	for _, want := range []Record{open, answered, outcome, short} {
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

// TestWhatIsWrittenIsFormat1: a change of what is written, in any bucket, needs a
// new storeFormat, and a reader of this one.
func TestWhatIsWrittenIsFormat1(t *testing.T) {
	s := newBolt(t)
	fillFormat1(t, s)
	s.Close()
	want, got := dump(t, format1File), dump(t, s.path)
	for _, place := range slices.Sorted(maps.Keys(want)) {
		if got[place] != want[place] {
			t.Errorf("%s is\n%q, in format 1\n%q", place, got[place], want[place])
		}
		delete(got, place)
	}
	for place, value := range got {
		t.Errorf("%s, %q, is not in format 1", place, value)
	}
}

// dump returns the values of a file by bucket and key.
func dump(t *testing.T, path string) map[string]string {
	t.Helper()
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	values := make(map[string]string)
	err = db.View(func(tx *bbolt.Tx) error {
		return tx.ForEach(func(name []byte, b *bbolt.Bucket) error {
			values[fmt.Sprintf("bucket %q", name)] = ""
			return b.ForEach(func(k, v []byte) error {
				values[fmt.Sprintf("bucket %q, key %q", name, k)] = string(v)
				return nil
			})
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	return values
}

func fillFormat1(t *testing.T, s *BoltStore) {
	t.Helper()
	open, answered, short, outcome := format1()
	for _, r := range []Record{open, answered, outcome, short} {
		mustBegin(t, s, r)
		if r.Key == open.Key {
			continue
		}
		if err := s.Ack(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	err := s.write(t.Context(), func(tx *boltTx) error {
		tx.put(tx.meta, metaSecret, newPart(format1Secret[:]).appendTo(nil))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func writeFormat1(t *testing.T) {
	s := newBolt(t)
	fillFormat1(t, s)
	size := s.extent
	if err := errors.Join(s.Close(), os.Truncate(s.path, size)); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(s.path)
	if err := errors.Join(err, os.MkdirAll(filepath.Dir(format1File), 0o755), os.WriteFile(format1File, b, 0o644)); err != nil {
		t.Fatal(err)
	}
}

// TestClosingUnlocksAFileThatCouldNotBeRead: what bbolt has mapped and must not be
// asked to unmap any more does not keep the file locked.
func TestClosingUnlocksAFileThatCouldNotBeRead(t *testing.T) {
	s := newBolt(t)
	mustBegin(t, s, boltRec("a"))
	s.wedged.Store(s.failure(nil, "it cannot be read", ErrStoreFailed))
	if err := s.Close(); !errors.Is(err, ErrStoreFailed) {
		t.Errorf("Close: %v, want the failure", err)
	}
	mustBegin(t, openBolt(t, s.path), boltRec("b"))
}
