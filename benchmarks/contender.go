package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// A contender is one way to do a piece of work. All contenders of a group do the
// same work, with the same payload, and promise what the page says they do.
type contender struct {
	name string
	open func(setting) (*opened, error)
}

// A setting is what a contender is opened in.
type setting struct {
	dir     string // empty, and the contender's own
	callers int    // that will call at once
}

// An opened contender.
type opened struct {
	do     func() error // one operation; called by several callers at once
	finish func() error // ends what do has put off; counted into the time. May be nil
	close  func() error // not counted. May be nil

	file string // a bbolt file whose commits are counted; empty means none
}

// A sample is one measurement of one contender.
type sample struct {
	ops      int
	took     time.Duration
	p50, p99 time.Duration // of one operation; 0 if the group is too fast to be timed
	allocs   float64       // of one operation
	commits  float64       // of one operation
}

func (s sample) rate() float64 { return float64(s.ops) / s.took.Seconds() }

// measure opens a contender afresh, warms it up, and has it work for d.
func measure(c contender, callers int, d time.Duration, timed bool) (s sample, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("%s, %d callers: %w", c.name, callers, err)
		}
	}()
	o, done, err := openIn(c, callers)
	if err != nil {
		return s, err
	}
	defer func() {
		if e := done(); err == nil {
			err = e
		}
	}()
	if _, err := work(o, callers, d/8, false); err != nil {
		return s, err
	}
	before, err := lastTx(o.file)
	if err != nil {
		return s, err
	}
	runtime.GC()
	var from, to runtime.MemStats
	runtime.ReadMemStats(&from)
	start := time.Now()
	took, err := work(o, callers, d, timed)
	s.took = time.Since(start)
	if err != nil {
		return s, err
	}
	runtime.ReadMemStats(&to)
	after, err := lastTx(o.file)
	if err != nil {
		return s, err
	}
	for _, t := range took {
		s.ops += t.ops
	}
	if timed {
		var all []time.Duration
		for _, t := range took {
			all = append(all, t.times...)
		}
		slices.Sort(all)
		s.p50, s.p99 = all[len(all)/2], all[len(all)*99/100]
	}
	s.allocs = float64(to.Mallocs-from.Mallocs) / float64(s.ops)
	s.commits = float64(after-before) / float64(s.ops)
	return s, nil
}

// openIn opens a contender in a directory that done removes.
func openIn(c contender, callers int) (o *opened, done func() error, err error) {
	dir, err := os.MkdirTemp(*scratch, "oncehttp-benchmark-")
	if err != nil {
		return nil, nil, err
	}
	o, err = c.open(setting{dir, callers})
	if err != nil {
		os.RemoveAll(dir)
		return nil, nil, err
	}
	return o, func() error {
		defer os.RemoveAll(dir)
		if o.close == nil {
			return nil
		}
		return o.close()
	}, nil
}

// worked is what one caller has done.
type worked struct {
	ops   int
	times []time.Duration // of every operation, if timed
}

// untimed operations are this many between two looks at the clock, which costs a
// tenth of the fastest of them.
const untimed = 64

// work has callers work for d, but for one operation each at the least.
func work(o *opened, callers int, d time.Duration, timed bool) ([]worked, error) {
	all := make([]worked, callers)
	var failed atomic.Pointer[error]
	var group sync.WaitGroup
	end := time.Now().Add(d)
	for i := range all {
		group.Go(func() {
			w := &all[i]
			for now := time.Now(); failed.Load() == nil; {
				n := 1
				if !timed && callers == 1 {
					n = untimed
				}
				for range n {
					if err := o.do(); err != nil {
						failed.CompareAndSwap(nil, &err)
						return
					}
				}
				w.ops += n
				then := now
				now = time.Now()
				if timed {
					w.times = append(w.times, now.Sub(then))
				}
				if now.After(end) {
					return
				}
			}
		})
	}
	group.Wait()
	if err := failed.Load(); err != nil {
		return nil, *err
	}
	if o.finish != nil {
		return all, o.finish()
	}
	return all, nil
}

// lastTx returns the number of the last transaction that a bbolt file has seen
// committed. Of two headers, the one with the higher number is in force.
func lastTx(file string) (last uint64, err error) {
	if file == "" {
		return 0, nil
	}
	f, err := os.Open(file)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	const txid = 16 + 48 // behind the page's header: magic, version, page size, flags, root (16 bytes), freelist, end
	for header := range int64(2) {
		var b [8]byte
		if _, err := f.ReadAt(b[:], header*int64(os.Getpagesize())+txid); err != nil {
			return 0, err
		}
		last = max(last, binary.NativeEndian.Uint64(b[:]))
	}
	return last, nil
}
