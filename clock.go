package oncehttp

import (
	"sync"
	"time"
)

// A clock tells a time that never goes back, also across restarts: the wall
// clock's, or the store's mark plus the monotonic time since it was read,
// whichever is later. A clock set back therefore never reopens a window.
type clock struct {
	wall func() time.Time // nil but for tests that step it

	mu     sync.Mutex // guards the following
	mark   time.Time  // latest time told or read from the store
	read   time.Time  // when mark was set, with monotonic reading
	jumped time.Time  // when the wall clock was last seen more than an hour ahead of mark
}

// What counts as a jump of the clock, and how long after one nothing is purged.
const (
	clockJump  = time.Hour
	clockSlack = time.Minute
	purgeRest  = 10 * time.Minute
)

func newClock(wall func() time.Time) *clock {
	return &clock{wall: wall, read: time.Now()}
}

// start sets the mark from the store's session.
func (c *clock) start(mark time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mark, c.read = mark, time.Now()
}

// now returns the time in UTC, cut to the microsecond as stores keep it.
func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.nowLocked()
}

// wallAt returns what the wall clock shows, in UTC, at the time now: time.Now reads
// both clocks at once.
func (c *clock) wallAt(now time.Time) time.Time {
	if c.wall != nil {
		now = c.wall()
	}
	return now.UTC().Round(0)
}

func (c *clock) nowLocked() time.Time {
	mono := time.Now()
	marked := c.mark.Add(mono.Sub(c.read))
	wall := c.wallAt(mono)
	if wall.After(marked) {
		if wall.Sub(marked) > clockJump {
			c.jumped = mono
		}
		c.mark, c.read = wall, mono
		return wall.Truncate(time.Microsecond)
	}
	return marked.Truncate(time.Microsecond)
}

// trusted reports whether the clock is good enough to purge by: not ahead of
// the wall clock, and not just after a jump.
func (c *clock) trusted() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.nowLocked()
	if now.Sub(c.wallAt(time.Now())) > clockSlack {
		return false
	}
	return c.jumped.IsZero() || time.Since(c.jumped) > purgeRest
}

// A timeline cuts time into ticks of equal length, for counts that expire. It
// does not go back: a time before the latest counts as that.
type timeline struct {
	width  time.Duration // of a tick
	start  time.Time     // beginning of tick 0: the first time
	latest time.Time
	tick   int64 // of latest
}

// advance moves to now and returns how many ticks have begun meanwhile.
func (l *timeline) advance(now time.Time) int64 {
	if l.start.IsZero() {
		l.start, l.latest = now, now
	}
	if !now.After(l.latest) {
		return 0
	}
	l.latest = now
	before := l.tick
	l.tick = int64(now.Sub(l.start) / l.width)
	return l.tick - before
}
