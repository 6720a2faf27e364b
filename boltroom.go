package oncehttp

import (
	"os"
	"runtime"

	"go.etcd.io/bbolt"
)

// On a full disk, nothing new is begun, and what was sent can still be answered,
// given up and acknowledged: nothing is begun unless that much of the file, beyond
// its last page in use, has its place on the disk. Without it, a page that is used
// for the first time finds no place when its record may already be on the wire.
const (
	// headroom suffices for the answer to the longest request by the default
	// limits, 2 MiB in all, with which bbolt writes up to two records on the same
	// page anew; or for those to a thousand requests of a few KiB.
	headroom = 8 << 20

	// growSize is how much a file grows at a time besides: enough that its new
	// length, which has to be synced, is a small part of the cost.
	growSize = 4 << 20
)

// makeRoom makes the file grow, if there is not enough room for a group of writes
// and the headroom. A file system that copies what is written, or compresses it,
// promises less by that.
func (s *BoltStore) makeRoom(tx *bbolt.Tx, group []*boltWrite) error {
	if runtime.GOOS == "windows" { // where bbolt makes the file as large as its mapping
		return nil
	}
	info, err := s.file.Stat()
	if err != nil {
		return s.failure(err, "it cannot be read", ErrStoreFailed)
	}
	need := tx.Size() + headroom
	for _, w := range group {
		need += int64(w.size + 2*s.pageSize)
	}
	if info.Size() >= need {
		return nil
	}
	if err = reserve(s.file, info.Size(), need+growSize); err != nil {
		err = reserve(s.file, info.Size(), need)
	}
	if err == nil {
		err = s.file.Sync()
	}
	if err != nil {
		return s.failure(err, "it cannot grow; nothing new is begun, so that what was sent can be answered", ErrStoreFailed)
	}
	return nil
}

// fill makes a file longer with zeros, so that they have their place on the disk.
func fill(f *os.File, from, to int64) error {
	zeros := make([]byte, min(to-from, 256<<10))
	for from < to {
		n, err := f.WriteAt(zeros[:min(to-from, int64(len(zeros)))], from)
		if err != nil {
			return err
		}
		from += int64(n)
	}
	return nil
}
