package oncehttp_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/internal/reliability"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// A clockState is what an operation is when the wall clock steps.
type clockState struct {
	name     string
	begin    func(d *desk) (land func()) // brings order A into the state; land, if not nil, ends what runs
	answered bool                        // the server has decided: no step of a clock matters
	rejected bool                        // as answered, but the same key asks again
}

var clockStates = []clockState{
	{name: "pending", begin: func(d *desk) func() { d.leavePending("A"); return nil }},
	{name: "waiting for the next attempt", begin: func(d *desk) func() {
		d.api.Script(oncehttptest.Status(503, "Retry-After", "30"))
		return d.inBackground(time.Second)
	}},
	{name: "in flight", begin: func(d *desk) func() {
		d.api.Script(oncehttptest.Stall(10 * time.Second))
		return d.inBackground(time.Second)
	}},
	{name: "unknown", begin: func(d *desk) func() {
		d.api.Script(oncehttptest.DropRequest(), oncehttptest.DropRequest())
		d.charge(d.t.Context(), "A")
		return nil
	}},
	{name: "succeeded", answered: true, begin: func(d *desk) func() { d.charge(d.t.Context(), "A"); return nil }},
	{name: "acknowledged", answered: true, begin: func(d *desk) func() {
		if err := d.charge(d.t.Context(), "A").op.Ack(d.t.Context()); err != nil {
			d.t.Error(err)
		}
		return nil
	}},
	{name: "rejected", answered: true, rejected: true, begin: func(d *desk) func() {
		d.api.Script(oncehttptest.Status(400))
		d.charge(d.t.Context(), "A")
		return nil
	}},
}

// inBackground charges order A and comes back after a while. The function that
// it returns waits for the call.
func (d *desk) inBackground(after time.Duration) func() {
	var call sync.WaitGroup
	call.Go(func() { d.charge(d.t.Context(), "A") })
	time.Sleep(after)
	synctest.Wait()
	return call.Wait
}

const year = 365 * 24 * time.Hour

// TestClockStepsCloseWindowsAndNeverOpenThem lets the wall clock step, and step
// back again, in every state of an operation, in a running process and between
// two. Real time hardly passes: a window of 24 h is closed because we cannot know
// that it is not.
func TestClockStepsCloseWindowsAndNeverOpenThem(t *testing.T) {
	count := reliability.Result{Class: "steps of the wall clock", How: "±1 s, ±2 min, ±25 h, ±1 year and back, in each state, running and between two processes"}
	for _, state := range clockStates {
		for _, step := range []time.Duration{time.Second, -time.Second, 2 * time.Minute, -2 * time.Minute, 25 * time.Hour, -25 * time.Hour, year, -year} {
			for _, restarted := range []bool{false, true} {
				name := fmt.Sprintf("%s, %v, restarted %v", state.name, step, restarted)
				count.Cases++
				atDesk(t, oncehttp.Options{MaxAttempts: 2}, func(t *testing.T, d *desk) {
					land := state.begin(d)
					before := len(d.api.Attempts())
					d.ahead.Store(int64(step))
					running := land != nil && !restarted // its own process goes on with it
					if restarted {
						d.restart()
					}
					if land != nil {
						land()
					}
					closed := step > 23*time.Hour || restarted && step < -time.Minute
					if running && state.name == "in flight" {
						closed = false // its answer has come
					}
					sent := 0 // attempts since the step
					if running && !closed && state.name != "in flight" {
						sent = 1
					}
					if got := len(d.api.Attempts()) - before; got != sent {
						t.Errorf("%s: %d attempts went on, want %d", name, got, sent)
						count.Twice++
					}

					time.Sleep(31 * time.Second) // what the server asked for
					r := d.resume()
					told := d.charge(t.Context(), "A")
					switch {
					case state.rejected:
						sent++
					case state.answered, running && !closed:
					case !closed:
						sent++ // by Resume, or by the charge, but once
					}
					if got := len(d.api.Attempts()) - before; got != sent {
						t.Errorf("%s: %d attempts after the step, want %d; resumed %+v", name, got, sent, r)
						count.Twice++
					}
					switch unanswered := closed && !state.answered; {
					case unanswered && (!errors.Is(told.err, oncehttp.ErrWindowClosed) || told.Outcome != oncehttp.Unknown),
						!unanswered && (told.Outcome != oncehttp.Succeeded || !strings.Contains(told.body, `"A"`)):
						t.Errorf("%s: told %v, %q, %v", name, told.Outcome, told.body, told.err)
						count.ToldFalsely++
					}

					// The clock comes back, here and in the next process: what
					// was told stays so, and nothing more is sent.
					d.ahead.Store(0)
					for _, when := range []string{"here", "later"} {
						again := d.charge(t.Context(), "A")
						if again.Outcome != told.Outcome || again.body != told.body {
							t.Errorf("%s: after the clock came back, %s, told %v, %v", name, when, again.Outcome, again.err)
							count.ToldFalsely++
						}
						if got := len(d.api.Attempts()) - before; got != sent {
							t.Errorf("%s: %d attempts after the clock came back, %s, want %d", name, got, when, sent)
							count.Twice++
						}
						if w := d.charge(t.Context(), "new-"+when[:4]); w.Outcome != oncehttp.Succeeded {
							t.Errorf("%s: a new order %s: %v, %v", name, when, w.Outcome, w.err)
							count.Lost++
						}
						sent++
						d.restart()
					}
				})
			}
		}
	}
	reliability.Report(t, count)
}

// TestNothingIsPurgedByAGlitch: a clock that is wrong for some minutes does not
// make a store forget what it has to keep for months.
func TestNothingIsPurgedByAGlitch(t *testing.T) {
	count := reliability.Result{Class: "glitches of the wall clock", How: "a year ahead for 1 to 9 min, then right again, while records are purged"}
	for minutes := range 9 {
		atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
			if err := d.charge(t.Context(), "A").op.Ack(t.Context()); err != nil {
				t.Fatal(err)
			}
			time.Sleep(3 * time.Minute)
			d.ahead.Store(int64(year))
			time.Sleep(time.Duration(minutes+1) * time.Minute)
			d.ahead.Store(0)
			time.Sleep(20 * time.Minute)
			if w := d.charge(t.Context(), "A"); !w.Replayed || w.Outcome != oncehttp.Succeeded {
				t.Errorf("after %d min: told %+v, %v", minutes+1, w.Info, w.err)
				count.Lost++
			}
			d.wantWire(1, "after a glitch")
			count.Cases++
		})
	}
	reliability.Report(t, count)
}

// TestTheLastSecondOfAWindow: what may reach the server before it forgets the
// key is sent, to the second, and what may not is not.
func TestTheLastSecondOfAWindow(t *testing.T) {
	count := reliability.Result{Class: "ends of windows", How: "30 min to 30 d, attempt timeouts of 1 s to 10 min, the last second and the next, by the same key, Resume, Redrive and a retry"}
	windows := []time.Duration{30 * time.Minute, time.Hour, 24 * time.Hour, 30 * 24 * time.Hour}
	for _, window := range windows[:heavy(2, 4)] { // a long one has many ticks
		for _, timeout := range []time.Duration{time.Second, 30 * time.Second, 80 * time.Second, 10 * time.Minute} {
			until := window - max(window/48, timeout+time.Minute) // as the design has it
			for by, ask := range map[string]func(d *desk) error{
				"the same key": func(d *desk) error { return d.charge(d.t.Context(), "A").err },
				"Redrive": func(d *desk) error {
					info, _ := d.lookup("A")
					resp, err := d.client.Redrive(d.t.Context(), info.ID)
					if err == nil {
						resp.Body.Close()
					}
					return err
				},
				"Resume": func(d *desk) error {
					if r := d.resume(); len(r.unknown) > 0 && r.unknown[0] == "A window closed" {
						return oncehttp.ErrWindowClosed
					}
					return nil
				},
				"a retry": nil,
			} {
				for _, late := range []time.Duration{-time.Second, 0, time.Second} {
					name := fmt.Sprintf("window %v, timeout %v, by %s, %v after its end", window, timeout, by, late)
					opts := oncehttp.Options{
						Providers:   []oncehttp.Provider{{Name: "p", Hosts: []string{"api.test"}, Window: window, AttemptTimeout: timeout}},
						MaxAttempts: 1, MaxRetryAfter: window, BackoffBase: 1, BackoffCap: 1,
					}
					want := 1
					if late <= 0 {
						want = 2
					}
					atDesk(t, opts, func(t *testing.T, d *desk) {
						count.Cases++
						var err error
						start := time.Now()
						switch {
						case by == "a retry":
							if late == 0 { // plus what backoff adds: a nanosecond
								late = -time.Millisecond
							}
							d.client.Close()
							d.store = oncehttptest.NewStore()
							d.opts.MaxAttempts = 2
							d.open()
							// The server asks to come back then; whole seconds
							// are all it can ask for.
							d.api.Script(oncehttptest.Status(500, "retry-after-ms", fmt.Sprint((until + late).Milliseconds()))) // 503 would pause the host, for longer
							err = d.charge(t.Context(), "A").err
						case by == "Resume":
							d.leavePending("A")
						default:
							d.api.Script(oncehttptest.DropRequest())
							if w := d.charge(t.Context(), "A"); !w.ResendUntil.Equal(start.Add(until)) {
								t.Errorf("%s: resent until %v after the first attempt, want %v", name, w.ResendUntil.Sub(start), until)
							}
						}
						if ask != nil {
							time.Sleep(until + late - time.Since(start))
							err = ask(d)
						}
						if got := len(d.api.Attempts()); got != want {
							t.Errorf("%s: sent %d times, want %d: %v", name, got, want, err)
							count.Twice++
						}
						if by != "a retry" && errors.Is(err, oncehttp.ErrWindowClosed) != (late > 0) {
							t.Errorf("%s: told %v", name, err)
							count.ToldFalsely++
						}
					})
				}
			}
		}
	}
	reliability.Report(t, count)
}

func TestAWindowThatNoAttemptFitsInIsRefused(t *testing.T) {
	for _, test := range []struct {
		window, timeout time.Duration
		fits            bool
	}{
		{30 * time.Minute, 28 * time.Minute, true},
		{30 * time.Minute, 29 * time.Minute, false},
		{30 * time.Minute, time.Hour, false},
		{time.Minute, time.Second, false},
		{61*time.Second + 1, time.Second, true},
	} {
		c, err := oncehttp.New(oncehttptest.NewStore(), &oncehttp.Options{
			Providers: []oncehttp.Provider{{Name: "p", Hosts: []string{"api.test"}, Window: test.window, AttemptTimeout: test.timeout}},
		})
		if err == nil {
			c.Close()
		}
		if fits := err == nil; fits != test.fits {
			t.Errorf("window %v with attempts of %v: %v", test.window, test.timeout, err)
		}
	}
}
