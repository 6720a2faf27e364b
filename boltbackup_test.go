package oncehttp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"go.etcd.io/bbolt"
)

// slowly calls before each of its writes.
type slowly struct {
	bytes.Buffer
	before func()
}

func (w *slowly) Write(b []byte) (int, error) { w.before(); return w.Buffer.Write(b) }

func TestBackupOfALiveStoreIsAStore(t *testing.T) {
	s := newBolt(t)
	const n = 300
	for i := range n {
		r := boltRec(fmt.Sprint("before", i))
		mustBegin(t, s, r)
		if r.Outcome, r.Answer = Succeeded, []byte("answer"); i%3 == 0 {
			if err := s.Ack(t.Context(), r); err != nil {
				t.Fatal(err)
			}
		}
	}
	session, err := s.Session(t.Context(), boltRec("").Updated)
	if err != nil {
		t.Fatal(err)
	}
	want := s.committedState().counts
	i := 0
	w := &slowly{before: func() { // what is written meanwhile takes no page of the copy
		for range 20 {
			i++
			mustBegin(t, s, boltRec(fmt.Sprint("meanwhile", i)))
			if err := s.Delete(t.Context(), boltRec(fmt.Sprint("before", i))); err != nil && !errors.Is(err, ErrFenced) {
				t.Fatal(err)
			}
		}
	}}
	if err := s.Backup(t.Context(), w); err != nil {
		t.Fatal(err)
	}
	if i < 60 {
		t.Fatalf("only %d writes during the backup", i)
	}
	if open := s.db.Stats().OpenTxN; open != 0 {
		t.Errorf("%d transactions are left open", open)
	}
	checkCounts(t, s)

	path := filepath.Join(t.TempDir(), "copy.db")
	if err := os.WriteFile(path, w.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	restored := openBolt(t, path)
	again, err := restored.Session(t.Context(), boltRec("").Updated)
	if err != nil || again.Secret != session.Secret || again.Owner == session.Owner {
		t.Errorf("session of the copy: %v; want the same secret and another owner", err)
	}
	if got := restored.committedState().counts; got != want {
		t.Errorf("counts of the copy %+v, want %+v", got, want)
	}
	checkCounts(t, restored)
	for i := range n {
		if got, err := restored.Get(t.Context(), boltRec(fmt.Sprint("before", i)).ID); err != nil || got.Acked != (i%3 == 0) {
			t.Errorf("record %d of the copy: %+v, %v", i, got, err)
		}
	}
	mustBegin(t, restored, boltRec("new"))
}

func TestBackupEndsWithItsContextAndItsWriter(t *testing.T) {
	s := newBolt(t)
	mustBegin(t, s, boltRec("a"))
	cause := errors.New("the cause")
	ctx, cancel := context.WithCancelCause(t.Context())
	if err := s.Backup(ctx, &slowly{before: func() { cancel(cause) }}); !errors.Is(err, cause) {
		t.Errorf("Backup with a context that ends: %v, want its cause", err)
	}
	full, err := os.OpenFile(filepath.Join(t.TempDir(), "closed"), os.O_CREATE|os.O_WRONLY, 0o600)
	if err := errors.Join(err, full.Close()); err != nil {
		t.Fatal(err)
	}
	if err := s.Backup(t.Context(), full); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Backup to a file that is closed: %v, want that", err)
	}
	if open := s.db.Stats().OpenTxN; open != 0 {
		t.Errorf("%d transactions are left open", open)
	}
	s.Close()
	if err := s.Backup(t.Context(), new(bytes.Buffer)); !errors.Is(err, ErrStoreFailed) {
		t.Errorf("Backup of a closed store: %v, want ErrStoreFailed", err)
	}
}

func TestBackupsAtTheSameTime(t *testing.T) {
	s := newBolt(t)
	var group sync.WaitGroup
	for i := range 4 {
		mustBegin(t, s, boltRec(fmt.Sprint("a", i)))
		group.Go(func() {
			if err := s.Backup(t.Context(), new(bytes.Buffer)); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
}

// What docs/operating.md says of bbolt's own tool is what this does: the command
// calls it with these arguments.
func TestCompactedFileIsTheSameStore(t *testing.T) {
	path := filepath.Join(t.TempDir(), "once.db")
	fillStore(t, path, 1000, func(f *filler) { fillDrained(f, 5000, 50) })
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	compacted := path + ".small"
	src, err := bbolt.Open(path, 0o400, &bbolt.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	dst, err := bbolt.Open(compacted, before.Mode(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(bbolt.Compact(dst, src, 64<<10), dst.Close(), src.Close()); err != nil {
		t.Fatal(err)
	}
	after, err := os.Stat(compacted)
	if err != nil || after.Size() > before.Size()/8 {
		t.Errorf("%d bytes of %d, %v", after.Size(), before.Size(), err)
	}
	a, b := openBolt(t, path), openBolt(t, compacted)
	if a.secret != b.secret || a.committedState() != b.committedState() {
		t.Errorf("state %+v, want %+v", b.committedState(), a.committedState())
	}
	checkCounts(t, b)
	for _, bucket := range [][]byte{bucketKeys, bucketOpen, bucketAnswers, bucketMeta} {
		if err := a.db.View(func(x *bbolt.Tx) error {
			return b.db.View(func(y *bbolt.Tx) error {
				c, d := x.Bucket(bucket).Cursor(), y.Bucket(bucket).Cursor()
				k, v := c.First()
				l, w := d.First()
				for ; k != nil; k, v = c.Next() {
					if !bytes.Equal(k, l) || !bytes.Equal(v, w) {
						return fmt.Errorf("%x: %x, want %x: %x", l, w, k, v)
					}
					l, w = d.Next()
				}
				if l != nil {
					return fmt.Errorf("%x is new", l)
				}
				return nil
			})
		}); err != nil {
			t.Errorf("bucket %s: %v", bucket, err)
		}
	}
	mustBegin(t, b, boltRec("new"))
}

func TestDocumentedToolIsOfOurVersion(t *testing.T) {
	mod, err := os.ReadFile("go.mod")
	if err != nil {
		t.Fatal(err)
	}
	_, version, _ := strings.Cut(string(mod), "go.etcd.io/bbolt ")
	version, _, _ = strings.Cut(version, "\n")
	text, err := os.ReadFile(filepath.Join("docs", "operating.md"))
	if command := "go.etcd.io/bbolt/cmd/bbolt@" + strings.TrimSpace(version) + " compact"; err != nil || !strings.Contains(string(text), command) {
		t.Errorf("docs/operating.md does not have %q (%v)", command, err)
	}
}
