//go:build linux

package torture

import (
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

// A Kind is what an operation on a file system does.
type Kind uint8

const (
	Create  Kind = iota // Name is Ino from now on
	Write               // Data at Off
	Size                // of the file: cut short, or longer with zeros
	Reserve             // blocks for Size bytes, the file being made as long
	Sync                // of a file, also fdatasync
	SyncDir
	Link // Name is Ino, too
	Unlink
	Rename // Name to To
	Open   // not logged, like the two below: only for faults
	Read
	Stat
	kinds
)

func (k Kind) String() string {
	return [...]string{"create", "write", "truncate", "fallocate", "sync", "sync of the directory", "link", "unlink", "rename", "open", "read", "stat"}[k]
}

// An Op is one operation on the file system, as it was done. Names are those in
// the directory of the run.
type Op struct {
	Stamp    uint64 // see Stamps
	Kind     Kind
	Ino      uint64
	Name, To string
	Off      int64
	Data     []byte
	Size     int64
	Err      syscall.Errno // it failed. A sync that failed has done some of it; a write nothing, and has no Data but a Size
}

// A Fault makes operations of a kind fail: the Nth from now on, and Times-1
// more after it, or all if Times is below 0.
type Fault struct {
	Kind  Kind
	Nth   int
	Times int
	Errno syscall.Errno
	Short bool // a write: half of it is done, and the rest fails
	Done  bool // it fails, and is done all the same
}

func (f Fault) String() string {
	s := fmt.Sprintf("%v on %v %d", f.Errno, f.Kind, f.Nth)
	if f.Times < 0 {
		s += " and all that follow"
	}
	if f.Short {
		s += ", half done"
	}
	if f.Done {
		s += ", done all the same"
	}
	return s
}

// Stamps counts everything that happens, in all processes that share it: the
// order of stamps is that of time.
type Stamps struct {
	file *os.File
	last *atomic.Uint64
}

func newStamps(f *os.File) (*Stamps, error) {
	if err := f.Truncate(4096); err != nil {
		return nil, err
	}
	mem, err := syscall.Mmap(int(f.Fd()), 0, 4096, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	return &Stamps{f, (*atomic.Uint64)(unsafe.Pointer(&mem[0]))}, nil
}

// Next returns the next stamp.
func (s *Stamps) Next() uint64 { return s.last.Add(1) }

// An FS is a file system in memory that records what is done to it, and fails
// on demand. It is served by a process of its own: a program that waits in a
// page fault for a file system of its own would wait for ever whenever the
// garbage collector stops the world.
type FS struct {
	Stamps *Stamps
	mount  string
	cmd    *exec.Cmd
	conn   *os.File
	enc    *gob.Encoder
	dec    *gob.Decoder
	runs   int
}

// A request is what the file system's process is told.
type request struct {
	Reset  string            // name of a new directory, in which everything happens from now on
	Files  map[string][]byte // its content, with mode 0600
	Drop   bool              // what the kernel has in memory of the files
	Arm    bool
	Faults []Fault
	Free   int64 // bytes left on the disk; below 0: any number
}

type response struct {
	Err    string
	Log    []Op
	Counts [kinds]int // since Arm
	Hits   int        // operations that failed on purpose since Arm
}

const (
	mountEnv = "ONCEHTTP_TORTURE_MOUNT"
	ctlFD    = 3
	stampsFD = 4
)

// Start mounts a file system at an empty directory.
func Start(mount string) (*FS, error) {
	if _, err := os.Stat("/dev/fuse"); err != nil {
		return nil, err
	}
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "control"), os.NewFile(uintptr(fds[1]), "control")
	defer theirs.Close()
	shared, err := os.CreateTemp("", "stamps")
	if err != nil {
		return nil, err
	}
	os.Remove(shared.Name())
	stamps, err := newStamps(shared)
	if err != nil {
		return nil, err
	}
	f := &FS{Stamps: stamps, mount: mount, conn: ours, enc: gob.NewEncoder(ours), dec: gob.NewDecoder(ours)}
	f.cmd = exec.Command(os.Args[0])
	f.cmd.Env = append(os.Environ(), mountEnv+"="+mount)
	f.cmd.Stdout, f.cmd.Stderr = os.Stderr, os.Stderr
	f.cmd.ExtraFiles = []*os.File{theirs, shared}
	if err := f.cmd.Start(); err != nil {
		return nil, err
	}
	if _, err := f.do(request{}); err != nil { // it is mounted
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// Close unmounts the file system.
func (f *FS) Close() error {
	f.conn.Close()
	err := syscall.Unmount(f.mount, syscall.MNT_DETACH)
	if errors.Is(err, syscall.EINVAL) {
		err = nil // it has unmounted itself
	}
	f.cmd.Process.Kill()
	f.cmd.Wait()
	return err
}

func (f *FS) do(r request) (response, error) {
	var resp response
	if err := f.enc.Encode(r); err != nil {
		return resp, err
	}
	if err := f.dec.Decode(&resp); err != nil {
		return resp, fmt.Errorf("the file system's process: %w", err)
	}
	if resp.Err != "" {
		return resp, errors.New(resp.Err)
	}
	return resp, nil
}

// Reset begins a new log in a new directory with files, on a disk of endless
// size without faults, and returns the directory.
func (f *FS) Reset(files map[string][]byte) (dir string, err error) {
	f.runs++
	name := fmt.Sprintf("run%d", f.runs)
	_, err = f.do(request{Reset: name, Files: files, Arm: true, Free: -1})
	return filepath.Join(f.mount, name), err
}

// Arm sets the faults, and how many bytes are left on the disk.
func (f *FS) Arm(free int64, faults ...Fault) error {
	_, err := f.do(request{Arm: true, Faults: faults, Free: free})
	return err
}

// Drop makes the kernel forget what it has in memory of the files: they will be
// read again.
func (f *FS) Drop() error {
	_, err := f.do(request{Drop: true})
	return err
}

// Log returns what was done since Reset, how often things were done since Arm,
// and how many of them failed on purpose.
func (f *FS) Log() (log []Op, counts [kinds]int, hits int, err error) {
	resp, err := f.do(request{})
	return resp.Log, resp.Counts, resp.Hits, err
}

// Serve is the main function of the file system's process; it returns at once
// in all others.
func Serve() {
	mount := os.Getenv(mountEnv)
	if mount == "" {
		return
	}
	if err := serve(mount); err != nil {
		fmt.Fprintln(os.Stderr, "file system:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func serve(mount string) error {
	conn := os.NewFile(ctlFD, "control")
	stamps, err := newStamps(os.NewFile(stampsFD, "stamps"))
	if err != nil {
		return err
	}
	d := &disk{stamps: stamps, free: -1}
	root := &dirNode{disk: d}
	forever := time.Hour
	server, err := fs.Mount(mount, root, &fs.Options{
		EntryTimeout: &forever, AttrTimeout: &forever,
		MountOptions: fuse.MountOptions{DirectMountStrict: true, FsName: "torture", Name: "torture", DisableXAttrs: true, ExplicitDataCacheControl: true},
	})
	enc, dec := gob.NewEncoder(conn), gob.NewDecoder(conn)
	for {
		var r request
		if dec.Decode(&r) != nil {
			break
		}
		var resp response
		if err != nil {
			resp.Err = fmt.Sprintf("mount: %v", err)
		} else {
			resp = d.handle(root, r)
		}
		if enc.Encode(resp) != nil {
			break
		}
	}
	if err == nil {
		server.Unmount()
	}
	return nil
}

// A disk is the state of the file system.
type disk struct {
	stamps *Stamps
	dir    *fs.Inode // of the run; of the goroutine that handles requests

	mu     sync.Mutex // guards all of the following, and files
	log    []Op
	faults []Fault
	counts [kinds]int
	hits   int
	free   int64 // below 0: endless
	inos   uint64
}

func (d *disk) handle(root *dirNode, r request) (resp response) {
	if r.Drop {
		for _, file := range d.dir.Children() {
			file.NotifyContent(0, 0)
		}
		return resp
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if r.Reset != "" {
		ctx := context.Background()
		dir := root.NewPersistentInode(ctx, &dirNode{disk: d}, fs.StableAttr{Mode: syscall.S_IFDIR, Ino: d.nextIno()})
		root.AddChild(r.Reset, dir, true)
		d.dir = dir
		for name, content := range r.Files {
			file := &fileNode{disk: d, ino: d.nextIno(), mode: 0o600, links: 1}
			file.write(content, 0)
			dir.AddChild(name, dir.NewPersistentInode(ctx, file, file.stable()), true)
		}
		d.log = nil
		for name, content := range r.Files {
			ino := dir.GetChild(name).StableAttr().Ino
			d.record(Op{Kind: Create, Name: name, Ino: ino})
			d.record(Op{Kind: Write, Ino: ino, Data: content})
			d.record(Op{Kind: Sync, Ino: ino})
		}
		d.record(Op{Kind: SyncDir})
	}
	if r.Arm {
		d.faults, d.free, d.counts, d.hits = r.Faults, r.Free, [kinds]int{}, 0
		return resp
	}
	return response{Log: d.log, Counts: d.counts, Hits: d.hits}
}

func (d *disk) nextIno() uint64 {
	d.inos++
	return d.inos + 100
}

func (d *disk) record(op Op) {
	op.Stamp = d.stamps.Next()
	d.log = append(d.log, op)
}

// fault counts an operation and returns what befalls it, if anything.
func (d *disk) fault(k Kind) *Fault {
	d.counts[k]++
	for i := range d.faults {
		f := &d.faults[i]
		if n := d.counts[k]; f.Kind == k && n >= f.Nth && (f.Times < 0 || n < f.Nth+max(f.Times, 1)) {
			d.hits++
			return f
		}
	}
	return nil
}

// begin is fault for operations that either fail or are done.
func (d *disk) begin(k Kind) (done bool, errno syscall.Errno) {
	f := d.fault(k)
	if f == nil {
		return true, 0
	}
	return f.Done, f.Errno
}

const blockSize = 4096

// take takes blocks from the disk, if there are as many.
func (d *disk) take(bytes int64) bool {
	if d.free < 0 {
		return true
	}
	if bytes > d.free {
		d.hits++
		return false
	}
	d.free -= bytes
	return true
}

// A dirNode is the root, or the directory of a run.
type dirNode struct {
	fs.Inode
	disk *disk
}

var (
	_ fs.NodeCreater   = (*dirNode)(nil)
	_ fs.NodeLinker    = (*dirNode)(nil)
	_ fs.NodeUnlinker  = (*dirNode)(nil)
	_ fs.NodeRenamer   = (*dirNode)(nil)
	_ fs.NodeFsyncer   = (*dirNode)(nil)
	_ fs.NodeGetattrer = (*dirNode)(nil)
	_ fs.NodeStatfser  = (*dirNode)(nil)
)

func (n *dirNode) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	out.Mode = 0o700
	return 0
}

func (n *dirNode) Statfs(_ context.Context, out *fuse.StatfsOut) syscall.Errno {
	n.disk.mu.Lock()
	defer n.disk.mu.Unlock()
	out.Bsize, out.Blocks, out.Bfree, out.NameLen = blockSize, 1<<30, 1<<29, 255
	if n.disk.free >= 0 {
		out.Bfree = uint64(n.disk.free) / blockSize
	}
	out.Bavail = out.Bfree
	return 0
}

func (n *dirNode) Create(ctx context.Context, name string, _, mode uint32, out *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	n.disk.mu.Lock()
	defer n.disk.mu.Unlock()
	done, errno := n.disk.begin(Create)
	if !done {
		return nil, nil, 0, errno
	}
	file := &fileNode{disk: n.disk, ino: n.disk.nextIno(), mode: mode & 0o777, links: 1}
	n.disk.record(Op{Kind: Create, Name: name, Ino: file.ino})
	if errno != 0 {
		return nil, nil, 0, errno
	}
	file.attr(&out.Attr)
	return n.NewPersistentInode(ctx, file, file.stable()), nil, 0, 0
}

func (n *dirNode) Link(_ context.Context, target fs.InodeEmbedder, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	n.disk.mu.Lock()
	defer n.disk.mu.Unlock()
	file := target.(*fileNode)
	if n.GetChild(name) != nil {
		return nil, syscall.EEXIST
	}
	if done, errno := n.disk.begin(Link); !done || errno != 0 {
		return nil, errno
	}
	file.links++
	n.disk.record(Op{Kind: Link, Name: name, Ino: file.ino})
	file.attr(&out.Attr)
	return target.EmbeddedInode(), 0
}

func (n *dirNode) Unlink(_ context.Context, name string) syscall.Errno {
	n.disk.mu.Lock()
	defer n.disk.mu.Unlock()
	if done, errno := n.disk.begin(Unlink); !done || errno != 0 {
		return errno
	}
	file := n.GetChild(name).Operations().(*fileNode)
	if file.links--; file.links == 0 && n.disk.free >= 0 {
		n.disk.free += int64(len(file.blocks)) * blockSize
	}
	n.disk.record(Op{Kind: Unlink, Name: name})
	return 0
}

func (n *dirNode) Rename(_ context.Context, name string, _ fs.InodeEmbedder, to string, _ uint32) syscall.Errno {
	n.disk.mu.Lock()
	defer n.disk.mu.Unlock()
	if done, errno := n.disk.begin(Rename); !done || errno != 0 {
		return errno
	}
	n.disk.record(Op{Kind: Rename, Name: name, To: to, Ino: n.GetChild(name).StableAttr().Ino})
	return 0
}

func (n *dirNode) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno {
	n.disk.mu.Lock()
	defer n.disk.mu.Unlock()
	done, errno := n.disk.begin(SyncDir)
	if done {
		n.disk.record(Op{Kind: SyncDir, Err: errno})
	}
	return errno
}

// A fileNode is a file.
type fileNode struct {
	fs.Inode
	disk *disk
	ino  uint64
	mode uint32

	links  uint32
	data   []byte
	blocks map[int64]bool // that have a place on the disk
}

var (
	_ fs.NodeOpener    = (*fileNode)(nil)
	_ fs.NodeReader    = (*fileNode)(nil)
	_ fs.NodeWriter    = (*fileNode)(nil)
	_ fs.NodeFsyncer   = (*fileNode)(nil)
	_ fs.NodeGetattrer = (*fileNode)(nil)
	_ fs.NodeSetattrer = (*fileNode)(nil)
	_ fs.NodeAllocater = (*fileNode)(nil)
	_ fs.NodeFlusher   = (*fileNode)(nil)
)

func (n *fileNode) stable() fs.StableAttr { return fs.StableAttr{Mode: syscall.S_IFREG, Ino: n.ino} }

func (n *fileNode) attr(out *fuse.Attr) {
	out.Ino, out.Mode, out.Nlink = n.ino, syscall.S_IFREG|n.mode, n.links
	out.Size, out.Blocks, out.Blksize = uint64(len(n.data)), uint64(len(n.blocks))*blockSize/512, blockSize
}

func (n *fileNode) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	n.disk.mu.Lock()
	defer n.disk.mu.Unlock()
	if _, errno := n.disk.begin(Stat); errno != 0 {
		return errno
	}
	n.attr(&out.Attr)
	return 0
}

func (n *fileNode) Setattr(_ context.Context, _ fs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	n.disk.mu.Lock()
	defer n.disk.mu.Unlock()
	if mode, ok := in.GetMode(); ok {
		n.mode = mode & 0o777
	}
	if size, ok := in.GetSize(); ok {
		done, errno := n.disk.begin(Size)
		if done {
			n.resize(int64(size))
			n.disk.record(Op{Kind: Size, Ino: n.ino, Size: int64(size)})
		}
		if errno != 0 {
			return errno
		}
	}
	n.attr(&out.Attr)
	return 0
}

func (n *fileNode) Open(context.Context, uint32) (fs.FileHandle, uint32, syscall.Errno) {
	n.disk.mu.Lock()
	defer n.disk.mu.Unlock()
	_, errno := n.disk.begin(Open)
	return nil, 0, errno
}

// Flush is done at each close, and says nothing.
func (n *fileNode) Flush(context.Context, fs.FileHandle) syscall.Errno { return 0 }

func (n *fileNode) Read(_ context.Context, _ fs.FileHandle, dest []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	n.disk.mu.Lock()
	defer n.disk.mu.Unlock()
	if _, errno := n.disk.begin(Read); errno != 0 {
		return nil, errno
	}
	if off >= int64(len(n.data)) {
		return fuse.ReadResultData(nil), 0
	}
	return fuse.ReadResultData(dest[:copy(dest, n.data[off:])]), 0
}

func (n *fileNode) Write(_ context.Context, _ fs.FileHandle, data []byte, off int64) (uint32, syscall.Errno) {
	n.disk.mu.Lock()
	defer n.disk.mu.Unlock()
	f := n.disk.fault(Write)
	if f != nil && f.Short && len(data) > 1 {
		data, f = data[:len(data)/2], nil
		n.disk.faults = append(n.disk.faults, Fault{Kind: Write, Nth: n.disk.counts[Write] + 1, Errno: syscall.ENOSPC}) // the rest
	}
	if f != nil && !f.Done {
		n.disk.record(Op{Kind: Write, Ino: n.ino, Off: off, Size: int64(len(data)), Err: f.Errno})
		return 0, f.Errno
	}
	for len(data) > 0 && !n.disk.take(n.missing(off, int64(len(data)))) { // what fits
		size := int64(len(data))
		if data = data[:(size-1)/blockSize*blockSize]; len(data) == 0 {
			n.disk.record(Op{Kind: Write, Ino: n.ino, Off: off, Size: size, Err: syscall.ENOSPC})
			return 0, syscall.ENOSPC
		}
	}
	n.write(data, off)
	n.disk.record(Op{Kind: Write, Ino: n.ino, Off: off, Data: append([]byte(nil), data...)})
	if f != nil {
		n.disk.record(Op{Kind: Write, Ino: n.ino, Off: off, Size: int64(len(data)), Err: f.Errno})
		return 0, f.Errno
	}
	return uint32(len(data)), 0
}

func (n *fileNode) Allocate(_ context.Context, _ fs.FileHandle, off, size uint64, mode uint32) syscall.Errno {
	n.disk.mu.Lock()
	defer n.disk.mu.Unlock()
	if mode != 0 {
		return syscall.EOPNOTSUPP
	}
	done, errno := n.disk.begin(Reserve)
	if !done {
		return errno
	}
	if !n.disk.take(n.missing(int64(off), int64(size))) {
		return syscall.ENOSPC
	}
	end := int64(off + size)
	n.resize(max(end, int64(len(n.data))))
	n.place(int64(off), int64(size))
	n.disk.record(Op{Kind: Reserve, Ino: n.ino, Size: end})
	return errno
}

func (n *fileNode) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno {
	n.disk.mu.Lock()
	defer n.disk.mu.Unlock()
	done, errno := n.disk.begin(Sync)
	if done && errno != 0 { // it has reached the disk, and nobody knows
		n.disk.record(Op{Kind: Sync, Ino: n.ino})
	}
	n.disk.record(Op{Kind: Sync, Ino: n.ino, Err: errno})
	return errno
}

// missing returns how many bytes of new blocks a range needs.
func (n *fileNode) missing(off, size int64) (bytes int64) {
	for b := off / blockSize; b*blockSize < off+size; b++ {
		if !n.blocks[b] {
			bytes += blockSize
		}
	}
	return bytes
}

func (n *fileNode) place(off, size int64) {
	if n.blocks == nil {
		n.blocks = make(map[int64]bool)
	}
	for b := off / blockSize; b*blockSize < off+size; b++ {
		n.blocks[b] = true
	}
}

func (n *fileNode) resize(size int64) {
	for b := range n.blocks {
		if b*blockSize >= size {
			delete(n.blocks, b)
			if n.disk.free >= 0 {
				n.disk.free += blockSize
			}
		}
	}
	if size <= int64(len(n.data)) {
		n.data = n.data[:size]
		return
	}
	if int64(cap(n.data)) >= size {
		old := len(n.data)
		n.data = n.data[:size]
		clear(n.data[old:])
		return
	}
	n.data = append(make([]byte, 0, size+size/2), n.data...)[:size]
}

func (n *fileNode) write(data []byte, off int64) {
	if end := off + int64(len(data)); end > int64(len(n.data)) {
		n.resize(end)
	}
	n.place(off, int64(len(data)))
	copy(n.data[off:], data)
}
