//go:build linux

package torture

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// A Disk knows, operation after operation, what is on the disk for certain, and
// what may or may not be: a power failure leaves some image of that.
//
// What is certain: what was written to a file before a sync of it that has
// returned without error, and the names in a directory likewise. All else may
// have reached the disk or not, in any order; a write in part, by sectors; a
// length without the data; a name without the file's content.
//
// After a sync that failed, the kernel takes what it has for clean: a part of it
// has reached the disk, and the rest never will.
type Disk struct {
	names   map[string]uint64
	files   map[uint64]*file
	pending map[uint64][]Op
	moves   []Op // of names

	// SkipSync says which syncs are left out, given what is not synced yet:
	// for tests of the tests. nil leaves out none.
	SkipSync func(sync Op, pending []Op) bool
}

func NewDisk() *Disk {
	return &Disk{names: make(map[string]uint64), files: make(map[uint64]*file), pending: make(map[uint64][]Op)}
}

const sectorSize = 512

type page [blockSize]byte

// A file's pages are shared with its copies, and never written to: they are
// replaced. A nil one is zeros.
type file struct {
	size  int64
	pages []*page
}

func (f *file) clone() *file { return &file{f.size, slices.Clone(f.pages)} }

func (f *file) resize(size int64) {
	n := int((size + blockSize - 1) / blockSize)
	if n < len(f.pages) {
		f.pages = f.pages[:n:n]
	}
	for len(f.pages) < n {
		f.pages = append(f.pages, nil)
	}
	if tail := size % blockSize; size < f.size && tail > 0 && f.pages[n-1] != nil {
		p := *f.pages[n-1]
		clear(p[tail:])
		f.pages[n-1] = &p
	}
	f.size = size
}

func (f *file) write(data []byte, off int64) {
	if end := off + int64(len(data)); end > f.size {
		f.resize(end)
	}
	for len(data) > 0 {
		i, at := off/blockSize, off%blockSize
		var p page
		if old := f.pages[i]; old != nil && (at > 0 || len(data) < blockSize) {
			p = *old
		}
		n := copy(p[at:], data)
		f.pages[i] = &p
		data, off = data[n:], off+int64(n)
	}
}

func (f *file) bytes() []byte {
	b := make([]byte, f.size)
	for i, p := range f.pages {
		if p != nil {
			copy(b[i*blockSize:], p[:])
		}
	}
	return b
}

// do does an operation on a file. tear, if it is not nil, says which sectors of
// a write are done.
func (f *file) do(op Op, tear func() bool) {
	switch {
	case op.Kind == Size:
		f.resize(op.Size)
	case op.Kind == Reserve:
		f.resize(max(f.size, op.Size))
	case tear == nil:
		f.write(op.Data, op.Off)
	default:
		if end := op.Off + int64(len(op.Data)); end > f.size && tear() {
			f.resize(end)
		}
		for at := 0; at < len(op.Data); {
			n := min(len(op.Data)-at, sectorSize-int(op.Off+int64(at))%sectorSize)
			if tear() {
				f.write(op.Data[at:at+n], op.Off+int64(at))
			}
			at += n
		}
	}
}

func move(names map[string]uint64, op Op) {
	switch op.Kind {
	case Create, Link:
		names[op.Name] = op.Ino
	case Unlink:
		delete(names, op.Name)
	case Rename:
		delete(names, op.Name)
		names[op.To] = op.Ino
	}
}

// Do takes note of an operation.
func (d *Disk) Do(op Op, rnd *rand.Rand) {
	switch op.Kind {
	case Create:
		d.files[op.Ino] = &file{}
		d.moves = append(d.moves, op)
	case Link, Unlink, Rename:
		d.moves = append(d.moves, op)
	case Write, Size, Reserve:
		if op.Err != 0 {
			return
		}
		d.pending[op.Ino] = append(d.pending[op.Ino], op)
	case SyncDir:
		if op.Err != 0 || d.SkipSync != nil && d.SkipSync(op, nil) {
			return
		}
		for _, m := range d.moves {
			move(d.names, m)
		}
		d.moves = nil
	case Sync:
		if d.SkipSync != nil && d.SkipSync(op, d.pending[op.Ino]) {
			return
		}
		f := d.files[op.Ino].clone()
		if op.Err == 0 {
			for _, w := range d.pending[op.Ino] {
				f.do(w, nil)
			}
			delete(d.pending, op.Ino)
		} else {
			some(f, d.pending[op.Ino], rnd)
			d.pending[op.Ino] = slices.DeleteFunc(d.pending[op.Ino], func(w Op) bool { return w.Kind == Write })
		}
		d.files[op.Ino] = f
	}
}

// some does some of the operations on a file.
func some(f *file, ops []Op, rnd *rand.Rand) {
	if len(ops) == 0 {
		return
	}
	ops = slices.Clone(ops)
	var tear func() bool
	switch rnd.IntN(8) {
	case 0: // none
		return
	case 1: // all
	case 2: // only the last ones
		ops = ops[rnd.IntN(len(ops)):]
	case 3: // all but one
		i := rnd.IntN(len(ops))
		ops = slices.Delete(ops, i, i+1)
	case 4: // only one
		ops = []Op{ops[rnd.IntN(len(ops))]}
	case 5, 6: // any, in any order
		rnd.Shuffle(len(ops), func(i, j int) { ops[i], ops[j] = ops[j], ops[i] })
		ops = ops[:rnd.IntN(len(ops)+1)]
	default: // any, in any order, by sectors
		rnd.Shuffle(len(ops), func(i, j int) { ops[i], ops[j] = ops[j], ops[i] })
		share := rnd.Float64()
		tear = func() bool { return rnd.Float64() < share }
	}
	for _, op := range ops {
		f.do(op, tear)
	}
}

// An Image is the content of a directory.
type Image map[string]*file

// Crash returns an image that a power failure may leave now.
func (d *Disk) Crash(rnd *rand.Rand) Image {
	names := maps.Clone(d.names)
	moves := slices.Clone(d.moves)
	switch rnd.IntN(4) {
	case 0:
		moves = nil
	case 1:
	default:
		rnd.Shuffle(len(moves), func(i, j int) { moves[i], moves[j] = moves[j], moves[i] })
		moves = moves[:rnd.IntN(len(moves)+1)]
	}
	for _, op := range moves {
		move(names, op)
	}
	return d.image(names, func(f *file, ops []Op) { some(f, ops, rnd) })
}

// Kill returns what programs see: the death of a process loses nothing.
func (d *Disk) Kill() Image {
	names := maps.Clone(d.names)
	for _, op := range d.moves {
		move(names, op)
	}
	return d.image(names, func(f *file, ops []Op) {
		for _, op := range ops {
			f.do(op, nil)
		}
	})
}

func (d *Disk) image(names map[string]uint64, do func(*file, []Op)) Image {
	image, done := make(Image), make(map[uint64]*file)
	for _, name := range slices.Sorted(maps.Keys(names)) {
		ino := names[name]
		if done[ino] == nil {
			done[ino] = d.files[ino].clone()
			do(done[ino], d.pending[ino])
		}
		image[name] = done[ino]
	}
	return image
}

// Clone returns a copy of d that can go on by itself.
func (d *Disk) Clone() *Disk {
	c := &Disk{names: maps.Clone(d.names), files: maps.Clone(d.files), pending: make(map[uint64][]Op), moves: slices.Clone(d.moves)}
	for ino, ops := range d.pending {
		c.pending[ino] = slices.Clone(ops)
	}
	return c
}

// Files returns the content.
func (i Image) Files() map[string][]byte {
	files := make(map[string][]byte)
	for name, f := range i {
		files[name] = f.bytes()
	}
	return files
}

// WriteTo writes the files into an empty directory. Pages of zeros are holes.
func (i Image) WriteTo(dir string) error {
	for name, f := range i {
		if err := f.writeTo(filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

func (f *file) writeTo(path string) (err error) {
	out, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if closed := out.Close(); err == nil {
			err = closed
		}
	}()
	if err := out.Truncate(f.size); err != nil {
		return err
	}
	for i, p := range f.pages {
		if p == nil || bytes.Equal(p[:], zeros[:]) {
			continue
		}
		if _, err := out.WriteAt(p[:min(blockSize, f.size-int64(i)*blockSize)], int64(i)*blockSize); err != nil {
			return err
		}
	}
	return nil
}

var zeros page

func (i Image) String() string {
	var list []string
	for _, name := range slices.Sorted(maps.Keys(i)) {
		list = append(list, fmt.Sprintf("%s: %d bytes", name, i[name].size))
	}
	return strings.Join(list, ", ")
}
