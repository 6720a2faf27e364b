package oncehttp

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"go.etcd.io/bbolt"

	"github.com/oncehttp/oncehttp/internal/reliability"
)

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
			_, err = s.Get(t.Context(), boltRec("b").ID)
			if inPlace := name == "restored in place"; errors.Is(err, ErrStoreReplaced) != inPlace || !inPlace && err != nil {
				t.Errorf("Get of what is not in the old file: %v", err)
			}
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

// TestEveryPageHasItsPlace: a page that leads to another than it should, be it a
// whole one, hides records. Who asks for one of them would be told that there is
// none, and it would be sent anew.
func TestEveryPageHasItsPlace(t *testing.T) {
	cases := 0
	for _, unsynced := range []bool{false, true} {
		good := filled(t, unsynced)
		path := filepath.Join(t.TempDir(), "once.db")
		pointers := pagePointers(t, good)
		if len(pointers) < 20 {
			t.Fatalf("%d pointers", len(pointers))
		}
		leads := func(at int) uint64 { return binary.NativeEndian.Uint64(good[at:]) }
		inUse := make(map[uint64]bool) // the others are free, or part of a longer page
		for _, at := range pointers {
			inUse[leads(at)] = true
		}
		random, one := rand.New(rand.NewPCG(13, 14)), 2
		if testing.Short() {
			one = 16
		}
		for _, at := range pointers {
			for to := range uint64(len(good) / os.Getpagesize()) {
				if to == leads(at) || !inUse[to] && random.IntN(32) > 0 || random.IntN(one) > 0 {
					continue
				}
				cases++
				bad := bytes.Clone(good)
				binary.NativeEndian.PutUint64(bad[at:], to)
				if err := os.WriteFile(path, bad, 0o600); err != nil {
					t.Fatal(err)
				}
				s, err := OpenBolt(path)
				if err == nil && unsynced { // which pages are free is not known: acknowledged records may be hidden
					for i := range filledRecords {
						if _, err := s.Get(t.Context(), filledRecord(i).ID); errors.Is(err, ErrNotFound) && !filledAcked(i) {
							t.Errorf("byte %d of page %d made to lead to page %d: record %d is gone", at%os.Getpagesize(), at/os.Getpagesize(), to, i)
							break
						}
					}
				} else if !errors.Is(err, ErrDamaged) {
					t.Errorf("byte %d of page %d made to lead to page %d: %v, want ErrDamaged", at%os.Getpagesize(), at/os.Getpagesize(), to, err)
				}
				if err == nil {
					s.Close()
				}
			}
		}
	}
	reliability.Report(t, reliability.Result{Class: "damaged file, pointers", How: "a page made to lead to another than it should", Cases: cases, About: true})
}

// pagePointers returns where in a file a page in use leads to another one.
func pagePointers(t *testing.T, file []byte) (at []int) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "once.db")
	if err := os.WriteFile(path, file, 0o600); err != nil {
		t.Fatal(err)
	}
	s := openBolt(t, path)
	defer s.Close()
	header, _, err := s.metaPage(s.last)
	if err != nil {
		t.Fatal(err)
	}
	var collect func(page int, outer bool)
	collect = func(page int, outer bool) {
		page *= s.pageSize
		number := func(i int) int { return int(binary.NativeEndian.Uint32(file[page+i:])) }
		leaf := binary.NativeEndian.Uint16(file[page+8:]) == leafPage
		for i := range int(binary.NativeEndian.Uint16(file[page+10:])) {
			element := pageHeader + pageElement*i
			id := element + 8
			switch {
			case leaf && !outer:
				return
			case leaf: // a bucket, after its name
				id = element + number(element+4) + number(element+8)
			}
			if to := int(binary.NativeEndian.Uint64(file[page+id:])); to != 0 {
				at = append(at, page+id)
				collect(to, outer && !leaf)
			}
		}
	}
	collect(int(binary.NativeEndian.Uint64(header)), true)
	return at
}

const filledRecords = 300

func filledRecord(i int) Record { return boltRec(fmt.Sprint("key", i)) }

func filledAcked(i int) bool { return i%3 == 0 }

// filled returns the content of a file with open and acknowledged records.
// unsynced leaves out which pages are free, as after a crash.
func filled(t *testing.T, unsynced bool) []byte {
	t.Helper()
	s := newBolt(t)
	err := s.write(t.Context(), func(tx *boltTx) error {
		for i := range filledRecords {
			r := filledRecord(i)
			r.Request = make([]byte, i*20)
			tx.begin(newBoltPut(&r, true))
			if r.Acked = filledAcked(i); r.Acked {
				r.Answer = []byte("answer")
				tx.save(newBoltPut(&r, false))
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if unsynced {
		s.commitTx = func(tx *bbolt.Tx) error {
			s.db.NoFreelistSync = true
			return tx.Commit()
		}
	}
	mustBegin(t, s, boltRec("one more"))
	if _, err := s.Find(t.Context(), ""); err != nil { // sees how much of the file is used
		t.Fatal(err)
	}
	b, err := os.ReadFile(s.path)
	if err != nil {
		t.Fatal(err)
	}
	return b[:s.extent]
}

func TestFileThatCannotBeOpenedIsLeftAsItIs(t *testing.T) {
	good := filled(t, false)
	edited := func(edit func(b []byte) []byte) []byte { return edit(bytes.Clone(good)) }
	foreign := filepath.Join(t.TempDir(), "foreign.db")
	var zipped bytes.Buffer
	w := gzip.NewWriter(&zipped)
	_, _ = w.Write(good)
	_ = w.Close()
	count := reliability.Result{Class: "files that are no store", How: "empty, text, gzip, another program's, a later format, cut"}
	for _, test := range []struct {
		name    string
		content []byte
		want    error
	}{
		{"gzip", zipped.Bytes(), ErrDamaged},
		{"empty", []byte{}, ErrDamaged},
		{"text", []byte(strings.Repeat("not a database\n", 2000)), ErrDamaged},
		{"short text", []byte("hello"), ErrDamaged},
		{"zeros", make([]byte, 1<<16), ErrDamaged},
		{"both metas zeroed", edited(func(b []byte) []byte { clear(b[:8192]); return b }), ErrDamaged},
		{"cut to half", edited(func(b []byte) []byte { return b[:len(b)/2&^4095] }), ErrDamaged},
		{"cut to the metas", edited(func(b []byte) []byte { return b[:8192] }), ErrDamaged},
		{"cut to one page", edited(func(b []byte) []byte { return b[:4096] }), ErrDamaged},
		{"all but the metas zeroed", edited(func(b []byte) []byte { clear(b[8192:]); return b }), ErrDamaged},
		{"another program's", bboltFile(t, foreign, func(tx *bbolt.Tx) error {
			_, err := tx.CreateBucket([]byte("theirs"))
			return err
		}), ErrStoreVersion},
		{"a later format", bboltFile(t, foreign+"2", func(tx *bbolt.Tx) error {
			meta, err := tx.CreateBucket(bucketMeta)
			return errors.Join(err, meta.Put(metaFormat, binary.BigEndian.AppendUint32(nil, storeFormat+1)))
		}), ErrStoreVersion},
	} {
		path := filepath.Join(t.TempDir(), "once.db")
		if err := os.WriteFile(path, test.content, 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := OpenBolt(path)
		if err == nil {
			s.Close()
		}
		if !errors.Is(err, test.want) || !strings.Contains(fmt.Sprint(err), path) {
			t.Errorf("%s: %v, want %v and the file's name", test.name, err, test.want)
		}
		if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, test.content) {
			t.Errorf("%s: the file was changed (%v)", test.name, err)
		}
		if entries, err := os.ReadDir(filepath.Dir(path)); err != nil || len(entries) != 1 {
			t.Errorf("%s: left in the directory: %v, %v", test.name, entries, err)
		}
		count.Cases++
	}
	reliability.Report(t, count)
}

func bboltFile(t *testing.T, path string, fill func(*bbolt.Tx) error) []byte {
	t.Helper()
	db, err := bbolt.Open(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	err = errors.Join(db.Update(fill), db.Close())
	b, readErr := os.ReadFile(path)
	if err := errors.Join(err, readErr); err != nil {
		t.Fatal(err)
	}
	return b
}

func TestPathThatIsNoFileIsRefused(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	good := filled(t, false)
	refused := map[string]string{ // path and what the error says
		"":                             "empty path",
		dir:                            "is a directory",
		in("missing") + "/once.db":     "no such file",
		in("dangling"):                 "no such file",
		in("to a directory"):           "is a directory",
		in("itself"):                   "it cannot be opened",
		os.DevNull:                     "not a regular file",
		filepath.Join(dir, "once\x00"): "it cannot be opened",
	}
	for link, to := range map[string]string{"dangling": in("nowhere"), "to a directory": dir, "itself": in("itself")} {
		if err := os.Symlink(to, in(link)); err != nil {
			t.Skip(err)
		}
	}
	if err := os.WriteFile(in("read-only"), good, 0o400); err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() > 0 { // root may write it
		refused[in("read-only")] = "it cannot be opened for writing"
	}
	if err := exec.Command("mkfifo", in("fifo")).Run(); err == nil {
		refused[in("fifo")] = "not a regular file"
	}
	if l, err := net.Listen("unix", in("s")); err == nil {
		defer l.Close()
		refused[in("s")] = "not a regular file"
	}
	count := reliability.Result{Class: "paths that are no file", How: "directory, links, FIFO, socket, device"}
	for path, hint := range refused {
		s, err := OpenBolt(path)
		if err == nil {
			s.Close()
		}
		if runtime.GOOS != "windows" && (!errors.Is(err, ErrStoreFailed) || !strings.Contains(err.Error(), hint)) {
			t.Errorf("OpenBolt(%q): %v, want ErrStoreFailed and %q", path, err, hint)
		}
		count.Cases++
	}
	reliability.Report(t, count)
}

// Kubernetes gives files to a volume's group, at each mount.
func TestSharedFileBecomesPrivate(t *testing.T) {
	s := newBolt(t)
	mustBegin(t, s, boltRec("a"))
	s.Close()
	for _, mode := range []os.FileMode{0o640, 0o604, 0o620, 0o602, 0o610, 0o666, 0o777} {
		if err := os.Chmod(s.path, mode); err != nil {
			t.Fatal(err)
		}
		s = openBolt(t, s.path)
		if info, err := os.Stat(s.path); err != nil || runtime.GOOS != "windows" && info.Mode().Perm() != 0o600 {
			t.Errorf("mode %v, %v", info.Mode(), err)
		}
		if _, err := s.Get(t.Context(), boltRec("a").ID); err != nil {
			t.Error(err)
		}
		s.Close()
	}
}

func TestLinkedFileIsOpened(t *testing.T) {
	s := newBolt(t)
	mustBegin(t, s, boltRec("a"))
	s.Close()
	link := s.path + ".link"
	if err := os.Symlink(s.path, link); err != nil {
		t.Skip(err)
	}
	linked := openBolt(t, link)
	mustBegin(t, linked, boltRec("b"))
	if _, err := OpenBolt(s.path); !errors.Is(err, ErrStoreLocked) {
		t.Errorf("opened by its other name: %v, want ErrStoreLocked", err)
	}
}

// TestDamagedFileNeverEndsTheProcess damages files at random: whatever happens
// is an error of the store, and the process goes on.
func TestDamagedFileNeverEndsTheProcess(t *testing.T) {
	for _, unsynced := range []bool{false, true} {
		good := filled(t, unsynced)
		random := rand.New(rand.NewPCG(7, 8))
		refused, failed := 0, 0
		for range 25 {
			b := bytes.Clone(good)
			for range 1 + random.IntN(20) {
				at := random.IntN(len(b))
				switch random.IntN(3) {
				case 0:
					b[at] ^= 1 << random.IntN(8)
				case 1: // a page's header, mostly
					b[at&^4095+random.IntN(64)] = byte(random.Uint32())
				case 2:
					clear(b[at:min(at+random.IntN(3000), len(b))])
				}
			}
			path := filepath.Join(t.TempDir(), "once.db")
			if err := os.WriteFile(path, b, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := useFile(path); err != nil {
				failed++
			}
			if s, err := OpenBolt(path); err != nil {
				refused++
			} else {
				s.Close()
			}
		}
		t.Logf("unsynced %v: of %d damaged files %d had errors, %d could not be opened afterwards", unsynced, 25, failed, refused)
	}
	reliability.Report(t, reliability.Result{Class: "damaged file, at random", How: "bits, headers of pages and runs of zeros, with and without a list of free pages", Cases: 50})
}

// useFile does what there is to do with a store, and returns the errors.
func useFile(path string) error {
	ctx := context.Background()
	s, err := OpenBolt(path)
	if err != nil {
		return typed(err)
	}
	var errs []error
	add := func(err error) { errs = append(errs, typed(err)) }
	_, err = s.List(ctx, 0, 1000)
	add(err)
	for i := range 300 {
		r := boltRec(fmt.Sprint("key", i))
		_, err := s.Get(ctx, r.ID)
		add(err)
		if i%30 == 0 {
			_, err = s.Begin(ctx, boltRec(fmt.Sprint("new", i)))
			add(err)
			add(s.Save(ctx, r))
			_, err = s.Find(ctx, r.Key)
			add(err)
			add(s.Delete(ctx, r))
		}
	}
	_, _, err = s.Purge(ctx, boltRec("").Updated.AddDate(1, 0, 0), 1000)
	add(err)
	s.Close()
	return errors.Join(errs...)
}

// typed panics on an error that a caller could not tell.
func typed(err error) error {
	for _, kind := range []error{nil, ErrDamaged, ErrStoreFailed, ErrStoreVersion, ErrStoreUncertain, ErrNotFound, ErrFenced} {
		if errors.Is(err, kind) {
			return err
		}
	}
	panic(err)
}

func TestFileCutShortWhileOpenIsAnError(t *testing.T) {
	for _, size := range []int64{0, 4096, 8192, 5 * 4096} {
		path := filepath.Join(t.TempDir(), "once.db")
		if err := os.WriteFile(path, filled(t, false), 0o600); err != nil {
			t.Fatal(err)
		}
		s := openBolt(t, path)
		if err := os.Truncate(path, size); err != nil {
			t.Skip(err)
		}
		if _, err := s.Get(t.Context(), boltRec("key1").ID); !errors.Is(err, ErrDamaged) {
			t.Errorf("Get from %d bytes: %v, want ErrDamaged", size, err)
		}
		if _, err := s.Begin(t.Context(), boltRec("new")); !errors.Is(err, ErrDamaged) || !errors.Is(err, ErrStoreFailed) {
			t.Errorf("Begin in %d bytes: %v, want ErrDamaged and ErrStoreFailed", size, err)
		}
		s.Close()
	}
}

// A page that counts one element less, or more, than it has is whole but for
// that, and would hide a record.
func TestPageWithAWrongCountIsNoticed(t *testing.T) {
	good := filled(t, false)
	path := filepath.Join(t.TempDir(), "once.db")
	if err := os.WriteFile(path, good, 0o600); err != nil {
		t.Fatal(err)
	}
	s := openBolt(t, path)
	root, _, err := s.metaPage(s.last)
	inUse := newPageCheck(s.file, s.pageSize, s.extent)
	if err := errors.Join(err, inUse.bucket(root, true), s.Close()); err != nil {
		t.Fatal(err)
	}
	size := uint64(s.pageSize)
	for id := range inUse.seen {
		flags, count := binary.NativeEndian.Uint16(good[id*size+8:]), binary.NativeEndian.Uint16(good[id*size+10:])
		if binary.NativeEndian.Uint64(good[id*size:]) != id || flags != leafPage || count == 0 {
			continue
		}
		b := bytes.Clone(good)
		binary.NativeEndian.PutUint16(b[id*size+10:], count-1)
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if s, err := OpenBolt(path); !errors.Is(err, ErrDamaged) {
			t.Errorf("page %d of %d elements with one less: %v, want ErrDamaged", id, count, err)
			if err == nil {
				s.Close()
			}
		}
	}
}

// A commit frees the pages of the old list of free pages; if that was damaged
// meanwhile, it would go on for hours, and free what is in use.
func TestDamagedFreelistIsNotBelieved(t *testing.T) {
	for name, damage := range map[string]func(page []byte){
		"endless":      func(page []byte) { binary.NativeEndian.PutUint32(page[12:], 1<<32-1) },
		"a page more":  func(page []byte) { binary.NativeEndian.PutUint32(page[12:], 1) },
		"another page": func(page []byte) { binary.NativeEndian.PutUint64(page, 3) },
		"zeroed":       func(page []byte) { clear(page) },
		"no freelist":  func(page []byte) { binary.NativeEndian.PutUint16(page[8:], leafPage) },
	} {
		path := filepath.Join(t.TempDir(), "once.db")
		if err := os.WriteFile(path, filled(t, false), 0o600); err != nil {
			t.Fatal(err)
		}
		s := openBolt(t, path)
		for i := range 4 { // the list moves to a page that was free, with others behind it
			mustBegin(t, s, boltRec(fmt.Sprint("moves", i)))
		}
		_, freelist, err := s.metaPage(s.last)
		page := make([]byte, s.pageSize)
		_, readErr := s.file.ReadAt(page, int64(freelist)*int64(s.pageSize))
		damage(page)
		f, openErr := os.OpenFile(path, os.O_WRONLY, 0)
		if err := errors.Join(err, readErr, openErr); err != nil {
			t.Fatal(err)
		}
		_, err = f.WriteAt(page, int64(freelist)*int64(s.pageSize))
		if err := errors.Join(err, f.Close()); err != nil {
			t.Skip(err)
		}
		for range 2 {
			if _, err := s.Begin(t.Context(), boltRec("new")); !errors.Is(err, ErrDamaged) || !errors.Is(err, ErrStoreFailed) {
				t.Errorf("%s: %v, want ErrDamaged and ErrStoreFailed", name, err)
			}
		}
		if _, err := s.Get(t.Context(), boltRec("key1").ID); err != nil {
			t.Errorf("%s: what is there cannot be read: %v", name, err)
		}
		s.Close()
	}
}

// Who lists goes on behind the last Seq of a page: one that goes back would let
// him list for ever.
func TestRecordsOutOfOrderAreNotListedForEver(t *testing.T) {
	path := filepath.Join(t.TempDir(), "once.db")
	if err := os.WriteFile(path, filled(t, false), 0o600); err != nil {
		t.Fatal(err)
	}
	s := openBolt(t, path)
	defer s.Close()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for from, seq := 0, seqKey(50); ; { // in bucket open the record follows its Seq
		i := bytes.Index(b[from:], append(seq, recordVersion))
		if i < 0 {
			break
		}
		if _, err := f.WriteAt(make([]byte, 8), int64(from+i)); err != nil {
			t.Skip(err)
		}
		from += i + 1
	}
	var after uint64
	for range 1000 {
		list, err := s.List(t.Context(), after, 7)
		if err != nil {
			if !errors.Is(err, ErrDamaged) {
				t.Errorf("List: %v, want ErrDamaged", err)
			}
			return
		}
		if len(list) == 0 {
			t.Fatal("the damage was not met")
		}
		after = list[len(list)-1].Seq
	}
	t.Error("the listing has no end")
}

func TestDamagedRecordIsTellableAndReplaceable(t *testing.T) {
	s := newBolt(t)
	for _, key := range []string{"a", "bad head", "bad body", "z"} {
		mustBegin(t, s, boltRec(key))
	}
	damage := func(key string, offset func(v []byte) int) {
		t.Helper()
		err := s.write(t.Context(), func(tx *boltTx) error {
			seq := tx.keys.Get(encodeID(boltRec(key).ID))[1:]
			v := bytes.Clone(tx.open.Get(seq))
			v[offset(v)] ^= 1
			tx.put(tx.open, bytes.Clone(seq), v)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	damage("bad head", func([]byte) int { return recordPrefix + 1 })
	damage("bad body", func(v []byte) int { return len(v) - checksumSize - 1 })
	bad := boltRec("bad head")

	if _, err := s.Get(t.Context(), bad.ID); !errors.Is(err, ErrDamaged) {
		t.Errorf("Get: %v, want ErrDamaged", err)
	}
	if _, err := s.Get(t.Context(), boltRec("bad body").ID); !errors.Is(err, ErrDamaged) {
		t.Errorf("Get with a damaged body: %v, want ErrDamaged", err)
	}
	if existing, err := s.Begin(t.Context(), bad); !errors.Is(err, ErrDamaged) || existing != nil {
		t.Errorf("Begin over it: %+v, %v, want ErrDamaged", existing, err)
	}
	list, err := s.List(t.Context(), 0, 10)
	if err != nil || len(list) != 4 {
		t.Fatalf("List: %+v, %v", list, err)
	}
	if got := list[1]; got.ID != bad.ID || got.Outcome != Unknown || got.Reason != ReasonUnreadable {
		t.Errorf("listed as %+v", got)
	}
	if list[2].Key != "bad body" {
		t.Errorf("a damaged body hides its record: %+v", list[2])
	}
	bad.Outcome = Unknown
	if err := s.Save(t.Context(), bad); err != nil {
		t.Errorf("Save over it: %v", err)
	}
	checkDamaged := boltRec("bad body")
	if err := s.Delete(t.Context(), checkDamaged); err != nil {
		t.Errorf("Delete with a damaged body: %v", err)
	}
	checkCounts(t, s)
}

// Else its key could never be used again, and every pass would fail at it.
func TestWhatCannotBeReadCanBeForgotten(t *testing.T) {
	s := newBolt(t)
	c, err := New(s, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for what, offset := range map[string]func(v []byte) int{
		"head": func([]byte) int { return recordPrefix + 1 },
		"body": func(v []byte) int { return len(v) - checksumSize - 1 },
	} {
		bad := boltRec(what)
		mustBegin(t, s, bad)
		err := s.write(t.Context(), func(tx *boltTx) error {
			seq := tx.keys.Get(encodeID(bad.ID))[1:]
			v := bytes.Clone(tx.open.Get(seq))
			v[offset(v)] ^= 1
			tx.put(tx.open, bytes.Clone(seq), v)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Resolve(t.Context(), bad.ID, Succeeded); !errors.Is(err, ErrDamaged) {
			t.Errorf("Resolve with a damaged %s: %v, want ErrDamaged", what, err)
		}
		infos, err := c.Lookup(t.Context(), bad.Key)
		if len(infos) != 1 || infos[0].ID != bad.ID || infos[0].Reason != ReasonUnreadable || !errors.Is(err, ErrDamaged) {
			t.Errorf("Lookup with a damaged %s: %+v, %v", what, infos, err)
		}
		if err := c.Forget(t.Context(), bad.ID); err != nil {
			t.Errorf("Forget with a damaged %s: %v", what, err)
		}
		mustBegin(t, s, bad)
		if err := c.store.Delete(t.Context(), Record{ID: bad.ID}); !errors.Is(err, ErrFenced) {
			t.Errorf("a new record of the key is deleted without its epoch: %v", err)
		}
	}
	checkCounts(t, s)
}

// A file too large to be checked at opening says so when the record is listed: it
// is not passed over as one that is gone.
func TestRecordThatIsNotFoundUnderItsKeyIsNotPassedOver(t *testing.T) {
	s := newBolt(t)
	c, err := New(s, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, key := range []string{"a", "lost", "z"} {
		mustBegin(t, s, boltRec(key))
	}
	err = s.write(t.Context(), func(tx *boltTx) error {
		id, other := encodeID(boltRec("lost").ID), encodeID(boltRec("lose").ID)
		entry := bytes.Clone(tx.keys.Get(id))
		tx.delete(tx.keys, id)
		tx.put(tx.keys, other, entry)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	list, err := s.List(t.Context(), 0, 10)
	if err != nil || len(list) != 3 || list[1].ID != boltRec("lost").ID || list[1].Reason != ReasonUnreadable || list[0].Reason != NoReason || list[2].Reason != NoReason {
		t.Errorf("List: %+v, %v; want the one in the middle unreadable", list, err)
	}
	sum, err := c.Resume(t.Context(), Handler{
		Settled: func(context.Context, Info, *http.Response) error { return nil },
		Unknown: func(context.Context, Info) error { return nil },
	})
	if err != nil || sum.Failed == 0 {
		t.Errorf("Resume: %+v, %v; want a failure", sum, err)
	}
	s.Close()
	if _, err := OpenBolt(s.path); !errors.Is(err, ErrDamaged) {
		t.Errorf("OpenBolt: %v, want ErrDamaged", err)
	}
}
