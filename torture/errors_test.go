//go:build linux

package torture

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/internal/reliability"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// A trial is a life with faults, in which one thing happens after the other.
type trial struct {
	*shop
	t      *testing.T
	fs     *FS
	v      *verdict
	name   string
	faults []Fault
	free   int64
	seen   *[kinds]int // operations until the disk was mended
}

// arm makes the disk fail; mend mends it.
func (r *trial) arm() {
	if err := r.fs.Arm(r.free, r.faults...); err != nil {
		r.t.Fatal(err)
	}
}

func (r *trial) mend() {
	if r.seen == nil {
		_, counts, _, err := r.fs.Log()
		if err != nil {
			r.t.Fatal(err)
		}
		r.seen = &counts
	}
	if err := r.fs.Arm(-1); err != nil {
		r.t.Fatal(err)
	}
}

func (r *trial) fail(format string, args ...any) {
	r.t.Helper()
	r.v.fail(r.t, &r.v.ToldFalsely, "%s: %s", r.name, fmt.Sprintf(format, args...))
}

// reopen opens the client, with the disk mended if need be.
func (r *trial) reopen() bool {
	if r.open() == nil {
		return true
	}
	r.mend()
	if err := r.open(); err != nil {
		r.v.fail(r.t, &r.v.Unreadable, "%s: does not open again: %v", r.name, err)
		return false
	}
	return true
}

// live is the life: the faults may hit anything from the creation of the file to
// its second opening.
func (r *trial) live(s *shop) {
	r.shop = s
	r.arm()
	if !r.reopen() {
		return
	}
	orders := []plan{
		{order: order{Name: "started"}},
		{order: order{Name: "declined", Decline: true}, Key: oncehttp.KeyFor("declined")},
		{order: order{Name: "plain", Pad: strings.Repeat("x", 5000)}, Plain: true},
		{order: order{Name: "lost"}, Faults: []oncehttptest.Fault{oncehttptest.DropResponse(), oncehttptest.DropRequest(), oncehttptest.DropRequest()}},
		{order: order{Name: "not sent"}, Faults: []oncehttptest.Fault{oncehttptest.DialError(nil), oncehttptest.DialError(nil), oncehttptest.DialError(nil)}},
		{order: order{Name: "retried"}, Key: oncehttp.KeyFor("retried"), Plain: true, Faults: []oncehttptest.Fault{oncehttptest.DropResponse()}},
		{order: order{Name: "left"}, NoAck: true},
	}
	for _, p := range orders {
		r.charge(p)
	}
	s.close()
	if !r.reopen() {
		return
	}
	s.resume()
	r.charge(plan{order: order{Name: "later"}})
	r.mend()
	r.prove("mended", r.uncertain())
	s.close()
	if !r.reopen() {
		return
	}
	r.prove("restarted", false)
	s.resume()
}

// uncertain reports whether the store of the present client has told that a
// write may have been done.
func (r *trial) uncertain() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	uncertain := false
	for _, e := range r.events {
		uncertain = e.What != Opened && (uncertain || errors.Is(e.Err, oncehttp.ErrStoreUncertain))
	}
	return uncertain
}

// prove demands that the client works, or, if it may be closed for writing, that
// it either works or says so, and sends nothing.
func (r *trial) prove(name string, closed bool) {
	info, err := r.call(r.client, plan{order: order{Name: name}})
	switch {
	case err == nil && info.Outcome == oncehttp.Succeeded && !info.NotRecorded:
	case closed && errors.Is(err, oncehttp.ErrStoreFailed) && info.Outcome == oncehttp.NotSent:
	default:
		r.fail("%s: %v, %v", name, info.Outcome, err)
	}
}

// check demands of what happened what the design says of a commit that fails.
func (r *trial) check(h history) {
	known := make(map[string]bool) // keys that were on the wire
	var meta, uncertain bool       // the last write was one by which a commit becomes visible
	var failed *Op                 // the last operation that failed
	for _, e := range h.events {
		if e.Op != nil {
			if e.Op.Kind == Write {
				meta = e.Op.visible()
			}
			if e.Op.Err != 0 {
				failed = e.Op
			}
			continue
		}
		if errors.Is(e.Err, oncehttp.ErrStoreUncertain) {
			if uncertain = true; failed == nil || !meta && failed.Kind != Read {
				r.fail("%v is uncertain after %+v", e.Err, failed)
			}
		}
		if e.Err != nil && e.What == Failed && !errors.Is(e.Err, oncehttp.ErrStoreFailed) && !errors.Is(e.Err, oncehttp.ErrStoreUncertain) &&
			!errors.Is(e.Err, oncehttp.ErrDamaged) && !errors.Is(e.Err, oncehttp.ErrClosed) {
			r.fail("an error of no kind: %v", e.Err)
		}
		switch e.What {
		case Opened:
			uncertain = false
		case Wire:
			if uncertain && !known[e.Key] {
				r.fail("%s was sent although the store is closed for writing", e.Order.Name)
			}
			known[e.Key] = true
		case Told:
			if e.Outcome == oncehttp.Rejected && e.Lost {
				r.fail("%s is told as rejected although that is not recorded", e.Order.Name)
			}
		}
	}
}

// try records a life with faults.
func try(t *testing.T, fs *FS, v *verdict, name string, free int64, faults ...Fault) *line {
	r := &trial{t: t, fs: fs, v: v, name: name, faults: faults, free: free}
	l := &line{name: name, disk: NewDisk(), facts: make(facts), begin: base}
	l.history = record(t, fs, nil, nil, base, r.live)
	r.check(l.history)
	return l
}

func TestDiskErrors(t *testing.T) {
	fs := start(t)
	images := amount(2500, 60_000)
	v := &verdict{Result: reliability.Result{Class: "errors of the disk", How: "EIO, ENOSPC, EDQUOT, EFBIG, EROFS and short writes at every operation on the file", About: true}}
	counts := dryRun(t, fs)
	t.Logf("without faults: %v", counts)
	var lines []*line
	add := func(every int, f Fault) {
		if testing.Short() {
			every *= 5
		}
		for k := 1; k <= counts[f.Kind]; k++ {
			if f.Nth = k; *long || (k+int(*seed))%every == 0 {
				lines = append(lines, try(t, fs, v, f.String(), -1, f))
			}
		}
	}
	for _, kind := range []Kind{Write, Sync, SyncDir, Create, Link, Unlink, Open, Size, Reserve} {
		add(1, Fault{Kind: kind, Errno: syscall.EIO})
	}
	for _, errno := range []syscall.Errno{syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG, syscall.EROFS} {
		add(9, Fault{Kind: Write, Errno: errno})
		add(9, Fault{Kind: Size, Errno: errno})
		add(9, Fault{Kind: Reserve, Errno: errno})
	}
	add(3, Fault{Kind: Write, Short: true})
	add(3, Fault{Kind: Write, Errno: syscall.EIO, Done: true})
	add(3, Fault{Kind: Sync, Errno: syscall.EIO, Done: true})
	add(5, Fault{Kind: Sync, Errno: syscall.EIO, Times: 2})
	add(7, Fault{Kind: Write, Errno: syscall.ENOSPC, Times: -1})
	add(7, Fault{Kind: Write, Errno: syscall.EROFS, Times: -1})
	add(7, Fault{Kind: Sync, Errno: syscall.EIO, Times: -1})
	add(1, Fault{Kind: Read, Errno: syscall.EIO})
	add(3, Fault{Kind: Read, Errno: syscall.EIO, Times: -1})
	add(5, Fault{Kind: Stat, Errno: syscall.EIO})
	t.Logf("%d lives with faults", len(lines))
	v.Cases += len(lines)
	judgeAll(t, v, lines, images)
	reliability.Report(t, v.Result)
}

// TestSyncFailsAndThenThePower: after a sync that failed, the kernel does not try
// again; the next opening finds in memory what may never reach the disk.
func TestSyncFailsAndThenThePower(t *testing.T) {
	fs := start(t)
	images := amount(3000, 50_000)
	v := &verdict{Result: reliability.Result{Class: "a sync fails, then power failure", How: "the program is restarted after the error, and goes on with what the system has in memory", About: true}}
	var lines []*line
	for k, more := 1, true; more; k++ {
		l := &line{disk: NewDisk(), facts: make(facts), begin: base}
		l.history = record(t, fs, nil, nil, base, func(s *shop) {
			if err := fs.Arm(-1, Fault{Kind: Sync, Nth: k, Errno: syscall.EIO}); err != nil {
				t.Fatal(err)
			}
			for i := range 2 {
				err := s.open()
				if err != nil {
					err = s.open()
				}
				if err != nil {
					v.fail(t, &v.Unreadable, "sync %d: does not open again", k)
					return
				}
				for j := range 2 {
					s.charge(plan{order: order{Name: fmt.Sprint(i, j)}})
				}
				s.close()
			}
		})
		_, _, hits, err := fs.Log()
		if err != nil {
			t.Fatal(err)
		}
		if more = hits > 0; more {
			for i := range 4 { // what reaches the disk is left to chance
				again := *l
				again.name = fmt.Sprintf("sync %d, #%d", k, i)
				lines = append(lines, &again)
			}
		}
	}
	judgeAll(t, v, lines, images)
	reliability.Report(t, v.Result)
}

// dryRun counts what a life without faults does while there may be some.
func dryRun(t *testing.T, fs *FS) [kinds]int {
	r := &trial{t: t, fs: fs, v: &verdict{}, name: "no fault", free: -1}
	record(t, fs, nil, nil, base, r.live)
	if t.Failed() {
		t.FailNow()
	}
	return *r.seen
}
