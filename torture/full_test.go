//go:build linux

package torture

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/internal/reliability"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// crowd is a life in which the disk becomes full while requests are on their
// way. Nothing new may be sent then; what was sent is answered, given up,
// resumed and acknowledged as ever.
func (r *trial) crowd(s *shop) {
	r.shop = s
	if s.open() != nil {
		return
	}
	s.charge(plan{order: order{Name: "first"}})
	var held []plan
	for i := range 8 {
		p := plan{order: order{Name: fmt.Sprint("held", i), Decline: i == 3, Pad: strings.Repeat("h", 100_000)}, Plain: i == 4, NoAck: i == 5}
		p.Faults = []oncehttptest.Fault{oncehttptest.Slow(10 * time.Second)}
		switch i {
		case 6:
			p.Faults = []oncehttptest.Fault{oncehttptest.Stall(10 * time.Second).With(oncehttptest.DropRequest()), oncehttptest.DropRequest(), oncehttptest.DropRequest()}
		case 7:
			p.Faults = []oncehttptest.Fault{oncehttptest.SlowDial(10 * time.Second).With(oncehttptest.DialError(nil)), oncehttptest.DialError(nil), oncehttptest.DialError(nil)}
		}
		held = append(held, p)
	}
	var all sync.WaitGroup
	all.Go(func() { s.charge(held...) })
	time.Sleep(time.Second)
	r.arm()
	refused := 0
	for i := 0; refused == 0; i++ {
		p := plan{order: order{Name: fmt.Sprint("filler", i), Pad: strings.Repeat("f", 400_000)}, NoAck: true}
		info, err := s.call(s.client, p)
		switch {
		case err == nil && info.Outcome == oncehttp.Succeeded && !info.NotRecorded && i < 1000:
		case errors.Is(err, oncehttp.ErrStoreFailed) && info.Outcome == oncehttp.NotSent:
			refused = i + 1
		default:
			r.fail("%s: %v, %v", p.Name, info.Outcome, err)
			refused = -1
		}
	}
	r.t.Logf("%s: full after %d orders", r.name, refused)
	all.Wait()
	s.resume()
	for i := range 3 {
		r.prove(fmt.Sprint("perhaps", i), true)
	}
	s.close()
	if s.open() != nil { // on the full disk
		return
	}
	s.resume()
	r.prove("again", true)
	r.mend()
	r.prove("mended", false)
}

func TestFullDisk(t *testing.T) {
	fs := start(t)
	images := amount(30, 3000)
	v := &verdict{Result: reliability.Result{Class: "full disk", How: "no room left while requests are on their way, and many are begun", About: true}}
	var lines []*line
	for _, free := range []int64{0, 1 << 20, 9 << 20} {
		for _, sparse := range []bool{false, true} {
			if testing.Short() && free > 0 {
				continue
			}
			name, faults := fmt.Sprintf("%d bytes left", free), []Fault(nil)
			if sparse {
				name, faults = name+", no fallocate", []Fault{{Kind: Reserve, Errno: syscall.EOPNOTSUPP, Nth: 1, Times: -1}}
			}
			r := &trial{t: t, fs: fs, v: v, name: name, free: free, faults: faults, seen: new([kinds]int)}
			l := &line{name: name, disk: NewDisk(), facts: make(facts), begin: base}
			l.history = record(t, fs, nil, nil, base, func(s *shop) {
				if sparse {
					r.free = -1
					r.arm()
					r.free = free
				}
				r.crowd(s)
			})
			r.check(l.history)
			for _, e := range l.events {
				switch {
				case e.Op != nil:
				case e.Lost:
					r.fail("%s is not recorded", e.Key)
				case e.What == Failed && (!strings.Contains(e.Err.Error(), "nothing new is begun") || !errors.Is(e.Err, oncehttp.ErrStoreFailed)):
					r.fail("%v", e.Err)
				}
			}
			v.Cases++
			lines = append(lines, l)
		}
	}
	judgeAll(t, v, lines, images)
	reliability.Report(t, v.Result)
}
