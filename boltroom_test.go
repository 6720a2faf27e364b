package oncehttp

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"testing"
)

// What is in the file beyond its last page in use when an operation is begun must
// do for its answer: on a full disk, there is nothing else.
func TestHeadroomSufficesForTheAnswers(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("bbolt makes the file as large as its mapping there")
	}
	for _, c := range []struct {
		pending, request int
		answered         int // one after the other
		answer           int
	}{
		{pending: 1, request: 100, answered: 1, answer: 1 << 20},
		{pending: 1, request: 1 << 20, answered: 1, answer: 1 << 20},
		{pending: 3, request: 1 << 20, answered: 1, answer: 1 << 20},
		{pending: 4, request: 1 << 20, answered: 1, answer: 1 << 20},
		{pending: 7, request: 1 << 20, answered: 1, answer: 1 << 20},
		{pending: 10, request: 300 << 10, answered: 10, answer: 100 << 10},
		{pending: 300, request: 10 << 10, answered: 1, answer: 1 << 20},
		{pending: 1000, request: 1 << 10, answered: 1, answer: 1 << 20},
		{pending: 1000, request: 1 << 10, answered: 1000, answer: 1 << 10},
		{pending: 1000, request: 100, answered: 1000, answer: 1 << 10},
	} {
		for _, reopened := range []bool{false, true} {
			if testing.Short() && c.pending >= 300 && (reopened || c.answered == 1) {
				continue
			}
			t.Run(fmt.Sprintf("%+v,reopened=%v", c, reopened), func(t *testing.T) {
				s := newBolt(t)
				s.db.NoSync = true // thousands of commits
				begin := func(i, request int) {
					r := boltRec(fmt.Sprint("key", i))
					r.Request = make([]byte, request)
					mustBegin(t, s, r)
				}
				for i := range c.pending - 1 {
					begin(i, c.request)
				}
				last := c.request
				if reopened { // as restored, without reserve; what is there already is longer
					last = 1
					if _, err := s.Get(t.Context(), boltRec("key0").ID); err != nil && !errors.Is(err, ErrNotFound) {
						t.Fatal(err)
					}
					s.Close()
					if err := os.Truncate(s.path, s.extent); err != nil {
						t.Fatal(err)
					}
					s = openBolt(t, s.path)
					s.db.NoSync = true
				}
				begin(c.pending-1, last)
				info, err := s.file.Stat()
				if err != nil {
					t.Fatal(err)
				}
				for i := range c.answered {
					r := boltRec(fmt.Sprint("key", c.pending-1-i))
					r.Outcome, r.Answer, r.AckDue = Succeeded, make([]byte, c.answer), true
					if err := s.Save(t.Context(), r); err != nil {
						t.Fatal(err)
					}
				}
				if _, err := s.Get(t.Context(), boltRec("key0").ID); err != nil { // sees how much of the file is used
					t.Fatal(err)
				}
				if s.extent > info.Size() {
					t.Errorf("%d bytes were needed, and the file had %d when the last operation was begun", s.extent, info.Size())
				}
			})
		}
	}
}

func TestFilledFileHasZeros(t *testing.T) {
	s := newBolt(t)
	mustBegin(t, s, boltRec("a"))
	info, err := s.file.Stat()
	if err != nil {
		t.Fatal(err)
	}
	size := info.Size() + 300<<10
	if err := fill(s.file, info.Size(), size); err != nil {
		t.Error(err)
	}
	if info, err := s.file.Stat(); err != nil || info.Size() != size {
		t.Errorf("the file has %d bytes (%v), want %d", info.Size(), err, size)
	}
	mustBegin(t, s, boltRec("b"))
}
