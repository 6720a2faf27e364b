package oncehttp

import (
	"fmt"
	"runtime"
	"testing"
)

func TestFileHasHeadroom(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("bbolt makes the file as large as its mapping there")
	}
	s := newBolt(t)
	for i := range 20 {
		r := boltRec(fmt.Sprint("key", i))
		r.Request = make([]byte, 1<<20)
		mustBegin(t, s, r)
		if _, err := s.Get(t.Context(), r.ID); err != nil { // sees how much of the file is used
			t.Fatal(err)
		}
		if info, err := s.file.Stat(); err != nil || info.Size() < s.extent+headroom*3/4 { // what is on the same page is written anew
			t.Fatalf("%d bytes of %d are used (%v), want about %d in reserve", s.extent, info.Size(), err, headroom)
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
