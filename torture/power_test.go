//go:build linux

package torture

import (
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/oncehttp/oncehttp/internal/reliability"
)

var (
	long = flag.Bool("long", false, "a hundred thousand images")
	seed = flag.Uint64("seed", 1, "of everything that is left to chance")
)

// amount returns how much there is of something in the quick and in the long set;
// an eighth of the quick one with -short.
func amount(quick, longer int) int {
	switch {
	case *long:
		return longer
	case testing.Short():
		return (quick + 7) / 8
	}
	return quick
}

// base is where fake time begins, and a little later.
var base = time.Date(2000, 1, 1, 0, 10, 0, 0, time.UTC)

// A line is a history with what was before it.
type line struct {
	name  string
	disk  *Disk
	facts facts
	begin time.Time
	history
}

// A moment is the world between two events of a line.
type moment struct {
	n     int // events before it
	disk  *Disk
	facts facts
	ran   map[string]order
	now   time.Time
}

// walk calls visit at every moment of a line.
func (l *line) walk(rnd *rand.Rand, visit func(*moment)) {
	m := &moment{disk: l.disk.Clone(), facts: l.facts.clone(), ran: make(map[string]order), now: l.begin}
	maps.Copy(m.ran, l.server)
	m.disk.SkipSync = skipSync()
	for i, e := range l.events {
		m.n = i + 1
		if e.Op != nil {
			m.disk.Do(*e.Op, rnd)
		} else {
			m.facts.note(e)
			m.now = e.Time
			if e.What == Effect {
				m.ran[e.Key] = e.Order
			}
		}
		visit(m)
	}
}

const mutantEnv = "ONCEHTTP_TORTURE_MUTANT"

// skipSync returns what leaves out syncs, to prove that the tests notice.
func skipSync() func(Op, []Op) bool {
	visible := func(pending []Op) bool { return slices.ContainsFunc(pending, Op.visible) }
	n := 0
	switch os.Getenv(mutantEnv) {
	case "skip syncs":
		return func(Op, []Op) bool { n++; return n%2 == 0 }
	case "skip meta syncs":
		return func(_ Op, pending []Op) bool { return visible(pending) }
	case "skip data syncs":
		return func(_ Op, pending []Op) bool { return !visible(pending) }
	}
	return nil
}

// willRun returns the keys that the server executes after an event.
func (l *line) willRun(after int) map[string]bool {
	keys := make(map[string]bool)
	for _, e := range l.events[after:] {
		if e.Op == nil && e.What == Effect {
			keys[e.Key] = true
		}
	}
	return keys
}

// scratch returns a directory for images, in memory where there is one.
func scratch(t *testing.T) string {
	if _, err := os.Stat("/dev/shm"); err != nil {
		return t.TempDir()
	}
	dir, err := os.MkdirTemp("/dev/shm", "torture")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// judgeAll judges images of all lines, about n in all.
func judgeAll(t *testing.T, v *verdict, lines []*line, n int) {
	total := 0
	for _, l := range lines {
		total += len(l.events)
	}
	share := float64(n) / float64(total)
	t.Run("images", func(t *testing.T) {
		for i, l := range lines {
			t.Run(l.name, func(t *testing.T) {
				t.Parallel()
				rnd := rand.New(rand.NewPCG(*seed, uint64(i)))
				dir := scratch(t)
				l.walk(rnd, func(m *moment) {
					k := int(share)
					if rnd.Float64() < share-float64(k) {
						k++
					}
					for i := range k {
						if v.hopeless() {
							return
						}
						s := &scene{
							name:  fmt.Sprintf("%s, seed %d, event %d, image %d", l.name, *seed, m.n, i),
							image: m.disk.Crash(rnd), facts: m.facts, ran: maps.Clone(m.ran), now: m.now, rnd: rnd, dir: dir, verdict: v,
						}
						s.arrivals(l.willRun(m.n))
						s.judge(t)
					}
				})
			})
		}
	})
}

// grow makes lines of which each begins where the power failed, or the process
// was killed, at some moment of one of the lines.
func grow(t *testing.T, fs *FS, lines []*line, n int, kill bool, rnd *rand.Rand) (grown []*line) {
	for i := range n {
		l := lines[rnd.IntN(len(lines))]
		name := fmt.Sprintf("p%d-", i)
		if kill {
			name = fmt.Sprintf("k%d-", i)
		}
		grown = append(grown, l.child(t, fs, name, 1+rnd.IntN(len(l.events)), kill, rnd, trade(rnd, name, 9)))
	}
	return grown
}

// child makes a line that begins where another one was cut off after some events:
// by a failure of power, or by the death of the process alone.
func (l *line) child(t *testing.T, fs *FS, name string, events int, kill bool, rnd *rand.Rand, live func(*shop)) (next *line) {
	l.walk(rnd, func(m *moment) {
		if m.n != events {
			return
		}
		next = &line{name: fmt.Sprintf("%s, power fails at %d, %s", l.name, events, name), disk: NewDisk(), facts: m.facts.clone(), begin: m.now}
		var image Image
		if kill {
			next.name = fmt.Sprintf("%s, killed at %d, %s", l.name, events, name)
			next.disk = m.disk.Clone()
			image = m.disk.Kill()
		} else {
			image = m.disk.Crash(rnd)
		}
		s := &scene{facts: next.facts, ran: maps.Clone(m.ran), rnd: rnd}
		s.arrivals(l.willRun(events))
		for key := range s.ran {
			next.facts.of(key).ran = true
		}
		next.facts.cut()
		next.history = record(t, fs, image.Files(), s.ran, m.now, live)
		next.join(len(image))
	})
	return next
}

// publishes reports whether an event makes a commit visible.
func (e Event) publishes() bool { return e.Op != nil && e.Op.visible() }

// visible reports whether an operation writes one of the two pages by which a
// commit becomes visible.
func (op Op) visible() bool {
	return op.Kind == Write && op.Off < 2*blockSize && max(int64(len(op.Data)), op.Size) <= blockSize
}

// links reports whether an event gives the file its name.
func (e Event) links() bool { return e.Op != nil && e.Op.Kind == Link }

// join makes the recorded events go on with the line's disk: if that is empty,
// all of the files that the file system was given are on it; else, they are those
// that the system had in memory, and not all of it is on the disk.
func (l *line) join(files int) {
	empty := len(l.disk.files) == 0
	names := maps.Clone(l.disk.names)
	for _, op := range l.disk.moves {
		move(names, op)
	}
	inos := make(map[uint64]uint64) // of the disk, by the recorded ones
	var kept []Event
	for setup := 3*files + 1; len(l.events) > 0; l.events = l.events[1:] {
		e := l.events[0]
		switch {
		case e.Op != nil && setup > 0:
			if setup--; empty {
				l.disk.Do(*e.Op, nil)
			} else if e.Op.Kind == Create {
				inos[e.Op.Ino] = names[e.Op.Name]
			}
			continue
		case e.Op != nil:
			if ino, ok := inos[e.Op.Ino]; ok {
				e.Op.Ino = ino
			}
		}
		kept = append(kept, e)
	}
	l.events = kept
}

func TestPowerFailure(t *testing.T) {
	fs := start(t)
	histories, children, images := amount(4, 20), amount(16, 400), amount(6000, 200_000)
	rnd := rand.New(rand.NewPCG(*seed, 0))
	v := &verdict{Result: reliability.Result{Class: "power failure", How: "images of the disk: what was not synced is there or not, in any order, by sectors", About: true}}
	begin := time.Now()
	var lines []*line
	for i := range histories {
		prefix := fmt.Sprintf("h%d-", i)
		l := &line{name: prefix + "trade", disk: NewDisk(), facts: make(facts), begin: base}
		l.history = record(t, fs, nil, nil, base, trade(rnd, prefix, 24))
		lines = append(lines, l)
	}
	lines = append(lines, &line{name: "purge", disk: NewDisk(), facts: make(facts), begin: base, history: record(t, fs, nil, nil, base, purging(rnd))})
	grown := grow(t, fs, lines, children/2, true, rnd)
	grown = append(grown, grow(t, fs, append(lines, grown...), children/2, false, rnd)...)
	events := 0
	for _, l := range append(lines, grown...) {
		events += len(l.events)
		for _, e := range l.events {
			if e.What == Failed && e.Op == nil {
				t.Errorf("%s: %s: %v", l.name, e.Key, e.Err)
			}
		}
	}
	t.Logf("recorded %d histories with %d events in %v", len(lines)+len(grown), events, time.Since(begin))
	judgeAll(t, v, append(lines, grown...), images)
	reliability.Report(t, v.Result)
}

// TestKilledAndThenWithoutPower: what a process that is killed leaves in the
// system's memory is not on the disk, and the next one builds on it.
func TestKilledAndThenWithoutPower(t *testing.T) {
	fs := start(t)
	charges, images := amount(3, 12), amount(3000, 50_000)
	rnd := rand.New(rand.NewPCG(*seed, 1))
	v := &verdict{Result: reliability.Result{Class: "killed in a commit, then power failure", How: "as above, with the memory of the system at the kill", About: true}}
	charge := func(name string, n int) func(*shop) {
		return func(s *shop) {
			if s.open() != nil {
				return
			}
			for i := range n {
				s.charge(draw(rnd, fmt.Sprint(name, i)))
			}
			s.resume()
		}
	}
	l := &line{name: "life", disk: NewDisk(), facts: make(facts), begin: base}
	l.history = record(t, fs, nil, nil, base, charge("a", charges))
	var lines []*line
	for i, e := range l.events {
		if e.publishes() || e.links() {
			lines = append(lines, l.child(t, fs, fmt.Sprintf("#%d", len(lines)), i+1, true, rnd, charge(fmt.Sprintf("b%d-", i), 2)))
		}
	}
	judgeAll(t, v, lines, images)
	reliability.Report(t, v.Result)
}

// purging is a life in which records are dropped.
func purging(rnd *rand.Rand) func(*shop) {
	return func(s *shop) {
		if s.open() != nil {
			return
		}
		for _, batch := range []string{"old", "new"} {
			for i := range 6 {
				s.charge(plan{order: order{Name: fmt.Sprint(batch, i)}, Plain: i%2 == 0})
			}
			s.rest(50 * time.Hour)
		}
		s.charge(draw(rnd, "last"))
	}
}
