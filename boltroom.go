package oncehttp

import (
	"os"
	"runtime"

	"go.etcd.io/bbolt"
)

// On a full disk, nothing new is begun, and what was sent can still be answered,
// given up and acknowledged: nothing is begun unless so much of the file, beyond
// its last page in use, has its place on the disk. Without it, a page that is used
// for the first time finds no place when its record may already be on the wire.
//
// A group that finds no room is committed in parts (see BoltStore.commit), and
// what one part has written anew leaves its old pages to the next: so that only
// answers need room, and the page of one record, with up to three others on it
// (bbolt does not divide them). That one is written anew when the record is begun
// and when it is answered.
const (
	answerRoom  = 2 << 20 // for the longest answer by the default limits, or for a thousand of 1 KiB
	pageRecords = 4
	maxHeadroom = 8 << 20 // suffices for the answer to the longest request by the default limits

	// How much a file grows at a time besides: enough that its new length, which
	// has to be synced, is a small part of the cost, and not much of a small file.
	minGrow   = 1 << 20
	maxGrow   = 8 << 20
	growShare = 16 // of the file
)

// headroom returns how much must be left, if the longest record has so many
// bytes.
func headroom(longest int) int64 {
	return min(maxHeadroom, answerRoom+2*pageRecords*int64(longest))
}

// A room is what a group of writes needs of the file.
type room struct {
	writes  int
	size    int64 // bytes that are stored, about
	longest int   // of them for one write
	has     int64 // bytes of the file, as last seen

	used, free int // pages at the beginning of the transaction
}

func (s *BoltStore) newRoom(tx *bbolt.Tx) *room {
	r := new(room)
	r.used, r.free = s.usedPages(tx)
	return r
}

// makeRoom makes the file grow, if there is not enough room for a group of writes,
// those that have come to it now among them, and the headroom. A file system that
// copies what is written, or compresses it, promises less by that.
func (s *BoltStore) makeRoom(tx *bbolt.Tx, r *room, came []*boltWrite) error {
	if runtime.GOOS == "windows" { // where bbolt makes the file as large as its mapping
		return nil
	}
	r.writes += len(came)
	for _, w := range came {
		r.size, r.longest = r.size+int64(w.size), max(r.longest, w.size)
	}
	anew := min(2*r.writes, r.used) // pages that others are on, too; in place of free ones, as far as there are
	need := tx.Size() + int64(max(0, anew-r.free)*s.pageSize) + r.size + headroom(max(s.longest, r.longest))
	if r.has >= need {
		return nil
	}
	info, err := s.file.Stat()
	if err != nil {
		return s.failure(err, "it cannot be read", ErrStoreFailed)
	}
	if r.has = info.Size(); r.has >= need {
		return nil
	}
	grow := min(max(need/growShare, minGrow), maxGrow)
	if err = reserve(s.file, info.Size(), need+grow); err != nil {
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

// usedPages returns how many pages of the file are in use, and how many are free.
func (s *BoltStore) usedPages(tx *bbolt.Tx) (used, free int) {
	stats := s.db.Stats()
	free = stats.FreePageN + stats.PendingPageN
	return int(tx.Size()/int64(s.pageSize)) - free, free
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
