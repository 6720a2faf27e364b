package oncehttp

import (
	"cmp"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"time"

	"go.etcd.io/bbolt"
	bbolterrors "go.etcd.io/bbolt/errors"
)

const (
	storeFormat = 1 // of the file; see boltwrite.go

	// minPageSize is the smallest page of any system Go runs on. A file has at
	// least two.
	minPageSize = 4096

	// lockWait is how long OpenBolt waits for another process that has the
	// file: enough for a predecessor that is about to exit.
	lockWait = 500 * time.Millisecond

	// mapSize is how much of the address space the file gets at first. Only
	// when it outgrows that do writers wait for readers.
	mapSize = 64 << 20

	// checkSize is up to which size all pages of a file are checked at
	// opening, with the identities in it, for some 50 ms.
	checkSize = 32 << 20
)

// OpenBolt opens the key store in the file at path, or creates it, readable for
// its owner only, in a directory that exists.
//
// The error matches [ErrStoreLocked] if another process, or this one, has it
// open; [ErrStoreVersion] if the file belongs to another program or to a later
// version; [ErrDamaged] if it is no key store or not a whole one, which includes
// an empty file: it would be taken for a store that has forgotten everything.
// Else it matches [ErrStoreFailed]. A file that cannot be opened is left as it is;
// from one that is opened, what others than its owner may do with it is taken away.
func OpenBolt(path string) (*BoltStore, error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	s := &BoltStore{owner: newOwner(), commitTx: (*bbolt.Tx).Commit}
	var err error
	if path == "" {
		return nil, fmt.Errorf("%w: OpenBolt with an empty path", ErrStoreFailed)
	}
	if s.path, err = filepath.Abs(path); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStoreFailed, err)
	}
	if _, err := os.Stat(s.path); errors.Is(err, fs.ErrNotExist) {
		if err := s.create(); err != nil {
			return nil, s.failure(err, "it cannot be created", ErrStoreFailed)
		}
	}
	if err := s.checkFile(); err != nil {
		return nil, err
	}
	if err := s.examine(); err != nil {
		return nil, err
	}
	if err := s.open(&bbolt.Options{NoFreelistSync: true}); err != nil { // nothing is written yet
		return nil, err
	}
	err = s.load()
	if err == nil {
		err = s.keepPrivate()
	}
	if err == nil {
		err = s.harden()
	}
	if err != nil {
		return nil, errors.Join(err, guard(s.db.Close))
	}
	return s, nil
}

// create makes a new file aside and gives it its name when it is whole, so that
// no crash leaves half a store. If another process was faster, its file stays.
func (s *BoltStore) create() error {
	dir := filepath.Dir(s.path)
	f, err := os.CreateTemp(dir, "."+filepath.Base(s.path)+".new*") // with mode 0600
	if err != nil {
		return err
	}
	temp := f.Name()
	defer os.Remove(temp)
	if err := f.Close(); err != nil {
		return err
	}
	db, err := bbolt.Open(temp, 0o600, &bbolt.Options{FreelistType: bbolt.FreelistMapType})
	if err != nil {
		return err
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		for _, name := range [][]byte{bucketKeys, bucketOpen, bucketAnswers, bucketMeta} {
			if _, err := tx.CreateBucket(name); err != nil {
				return err
			}
		}
		secret := make([]byte, len(s.secret))
		rand.Read(secret) // never fails
		state := boltState{era: 1}
		meta := tx.Bucket(bucketMeta)
		return cmp.Or(
			meta.Put(metaFormat, binary.BigEndian.AppendUint32(nil, storeFormat)),
			meta.Put(metaSecret, newPart(secret).appendTo(nil)),
			meta.Put(metaState, state.encode()),
		)
	})
	if err = errors.Join(err, db.Sync(), db.Close()); err != nil {
		return err
	}
	// A link, unlike a renaming, never replaces a file that is there by now.
	if err := os.Link(temp, s.path); err != nil && !errors.Is(err, fs.ErrExist) {
		if err := os.Rename(temp, s.path); err != nil { // no links in this file system
			return err
		}
	}
	return syncDir(dir)
}

// keepPrivate takes away what others may do with the file. Kubernetes lets a
// volume's group have every file of it, at each mount.
func (s *BoltStore) keepPrivate() error {
	info, err := s.file.Stat()
	if err == nil && info.Mode().Perm()&0o077 != 0 && runtime.GOOS != "windows" {
		err = s.file.Chmod(0o600)
	}
	if err != nil {
		return s.failure(err, "others can use what it holds; chmod 600 it", ErrStoreFailed)
	}
	return nil
}

// harden makes durable what was found, before anything is built on it. A process
// that was killed in a commit, or while it created the file, has left that in the
// system's memory, and perhaps not on the disk: the next commit may use pages that
// only the last state on the disk needs, and would leave nothing whole if the
// power failed. The page that makes the last commit visible is written again,
// since a sync that has failed once does not try again what it has failed to do.
func (s *BoltStore) harden() error {
	page, at := make([]byte, s.pageSize), int64(s.last%2*s.pageSize)
	_, err := s.file.ReadAt(page, at)
	if err == nil {
		_, err = s.file.WriteAt(page, at)
	}
	if err == nil {
		err = s.file.Sync()
	}
	if err == nil {
		err = syncName(s.path)
	}
	if err != nil {
		return s.failure(err, "it cannot be made durable", ErrStoreFailed)
	}
	return nil
}

// syncName makes the name of a file durable that was found. In a directory that
// we may not read, it is somebody else's.
func syncName(path string) error {
	path, err := filepath.EvalSymlinks(path)
	if err == nil {
		err = syncDir(filepath.Dir(path))
	}
	if errors.Is(err, fs.ErrPermission) {
		return nil
	}
	return err
}

// syncDir makes a new name in a directory durable.
func syncDir(dir string) error {
	if runtime.GOOS == "windows" {
		return nil // directories cannot be synced there
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// checkFile refuses what should not even be opened.
func (s *BoltStore) checkFile() error {
	info, err := os.Stat(s.path)
	switch {
	case err != nil:
		return s.failure(err, "it cannot be opened", ErrStoreFailed)
	case info.IsDir():
		return s.failure(nil, "is a directory; name a file in it", ErrStoreFailed)
	case !info.Mode().IsRegular():
		return s.failure(nil, "is not a regular file", ErrStoreFailed)
	case info.Size() == 0:
		return s.failure(nil, "is empty; remove it if it never held anything, else restore it from a backup", ErrDamaged)
	case info.Size() < 2*minPageSize:
		return s.failure(nil, "is no key store, or was cut short; restore it from a backup", ErrDamaged)
	}
	return nil
}

// open opens the file with bbolt.
func (s *BoltStore) open(opts *bbolt.Options) error {
	opts.Timeout = lockWait
	opts.FreelistType = bbolt.FreelistMapType
	opts.OpenFile = func(name string, flag int, mode os.FileMode) (*os.File, error) {
		f, err := os.OpenFile(name, flag&^os.O_CREATE, mode)
		s.file = f
		return f, err
	}
	if runtime.GOOS != "windows" { // where the file would be made as large
		opts.InitialMmapSize = mapSize
	}
	s.file, s.db = nil, nil
	err := guard(func() (err error) {
		s.db, err = bbolt.Open(s.path, 0o600, opts)
		return err
	})
	if isPanic(err) && s.file != nil { // bbolt did not close it
		s.abandon()
	}
	switch {
	case err == nil:
	case errors.Is(err, bbolterrors.ErrTimeout):
		return s.failure(nil, "stop the process that has it open, or use another file", ErrStoreLocked)
	case errors.Is(err, bbolterrors.ErrVersionMismatch):
		return s.failure(err, "is not a bbolt database that can be read", ErrStoreVersion)
	case errors.Is(err, bbolterrors.ErrInvalid), errors.Is(err, bbolterrors.ErrChecksum), isPanic(err):
		return s.failure(err, "is no key store, or damaged beyond use; restore it from a backup", ErrDamaged)
	case s.file == nil:
		return s.failure(err, "it cannot be opened for writing", ErrStoreFailed)
	default:
		return s.failure(err, "it cannot be opened", ErrStoreFailed)
	}
	s.db.AllocSize = 0 // makeRoom does it; what bbolt adds by itself has no place on the disk yet
	s.pageSize = s.db.Info().PageSize
	return nil
}

// examine looks at the file without writing, so that one that is not ours, or
// not whole, is left as it is.
func (s *BoltStore) examine() error {
	if err := s.open(&bbolt.Options{ReadOnly: true}); err != nil {
		return err
	}
	err := guard(func() error {
		tx, err := s.db.Begin(false)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		return s.examineTx(tx)
	})
	if isPanic(err) {
		err = s.failure(err, "restore it from a backup", ErrDamaged)
	}
	return errors.Join(err, guard(s.db.Close))
}

func (s *BoltStore) examineTx(tx *bbolt.Tx) error {
	info, err := s.file.Stat()
	if err != nil {
		return s.failure(err, "it cannot be read", ErrStoreFailed)
	}
	if info.Size() < tx.Size() {
		return s.failure(nil, fmt.Sprintf("it has only %d bytes of %d; restore it from a backup", info.Size(), tx.Size()), ErrDamaged)
	}
	meta := tx.Bucket(bucketMeta)
	if meta == nil || len(meta.Get(metaFormat)) != 4 {
		return s.failure(nil, "is a database of another program; name another file", ErrStoreVersion)
	}
	if format := binary.BigEndian.Uint32(meta.Get(metaFormat)); format != storeFormat {
		return s.failure(nil, fmt.Sprintf("has format %d, and this version knows %d; use a later version", format, storeFormat), ErrStoreVersion)
	}
	return s.checkPages(tx)
}

// checkPages checks all pages of a file, if it is small, or if bbolt reads them
// all anyhow, since which ones are free was not written.
func (s *BoltStore) checkPages(tx *bbolt.Tx) error {
	root, freelist, err := s.metaPage(tx.ID())
	if err != nil || freelist != noFreelist && tx.Size() > checkSize {
		s.longest = maxHeadroom // perhaps
		return err
	}
	check := newPageCheck(s.file, s.pageSize, tx.Size())
	err = check.bucket(root, true)
	s.longest = check.longest
	if err == nil && freelist != noFreelist {
		err = check.freelist(freelist)
	}
	if err == nil {
		err = checkIdentities(tx)
	}
	if err != nil {
		return s.failure(err, "restore it from a backup", ErrDamaged)
	}
	return nil
}

// metaPage returns the root bucket of the last transaction, and the page of the
// list of free pages. Its meta page says that, which bbolt does not show: after a
// page header it has magic, version, page size and flags (4 bytes each), and then
// these two.
func (s *BoltStore) metaPage(txid int) (root []byte, freelist uint64, err error) {
	var b [bucketHeader + 8]byte
	if _, err := s.file.ReadAt(b[:], int64(txid%2*s.pageSize+pageHeader+4*4)); err != nil {
		return nil, 0, s.failure(err, "it cannot be read", ErrStoreFailed)
	}
	return b[:bucketHeader], binary.NativeEndian.Uint64(b[bucketHeader:]), nil
}

// load reads what the store needs to know of its file.
func (s *BoltStore) load() (err error) {
	if s.info, err = s.file.Stat(); err != nil {
		return s.failure(err, "it cannot be read", ErrStoreFailed)
	}
	tx, err := s.beginTx(false)
	if err != nil {
		return err
	}
	defer s.endTx(tx)
	err = guard(func() error {
		t, err := newBoltTx(tx, boltState{})
		if err != nil {
			return err
		}
		if s.state, err = decodeState(t.meta.Get(metaState)); err != nil {
			return err
		}
		secret, ok := checked(t.meta.Get(metaSecret))
		if !ok || len(secret) != len(s.secret) {
			return fmt.Errorf("%w: its secret cannot be read", ErrDamaged)
		}
		copy(s.secret[:], secret)
		s.purgeAt = append([]byte(nil), t.meta.Get(metaPurge)...)
		return nil
	})
	if err != nil {
		return s.failure(err, "restore it from a backup", ErrDamaged)
	}
	s.opened, s.last = s.state, tx.ID()
	_, freelist, err := s.metaPage(s.last)
	s.db.NoFreelistSync = freelist == noFreelist
	return err
}
