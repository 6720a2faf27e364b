package oncehttp_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// Histories of Resume, Redrive and the handlers that went wrong once.

// A readSpy lets something happen when a store has read, before the client sees
// what.
type readSpy struct {
	oncehttp.LazyStore
	listed, got func() // called once
}

// spyReads puts a readSpy under the client; restart cannot be used after it.
func (b *bench) spyReads() *readSpy {
	s := &readSpy{LazyStore: b.store.LazyStore}
	b.store.LazyStore = s
	return s
}

func (s *readSpy) List(ctx context.Context, after uint64, n int) ([]oncehttp.Record, error) {
	list, err := s.LazyStore.List(ctx, after, n)
	if f := s.listed; f != nil {
		s.listed = nil
		f()
	}
	return list, err
}

func (s *readSpy) Get(ctx context.Context, id oncehttp.ID) (*oncehttp.Record, error) {
	rec, err := s.LazyStore.Get(ctx, id)
	if f := s.got; f != nil {
		s.got = nil
		f()
	}
	return rec, err
}

// takes is a Settled that takes every answer.
func takes(context.Context, oncehttp.Info, *http.Response) error { return nil }

// pass makes one pass with a handler.
func (b *bench) pass(h oncehttp.Handler) oncehttp.Summary {
	b.t.Helper()
	if h.Settled == nil {
		h.Settled = takes
	}
	sum, err := b.client.Resume(b.t.Context(), h)
	if err != nil {
		b.t.Error(err)
	}
	return sum
}

// leaveUnknown makes an operation of an earlier process whose outcome is unknown.
func (b *bench) leaveUnknown(key, order string) oncehttp.ID {
	b.t.Helper()
	b.server.ScriptFor(oncehttptest.ByKey(key), oncehttptest.DropResponse())
	info, err := b.charge(b.t.Context(), key, order)
	if info.Outcome != oncehttp.Unknown {
		b.t.Fatalf("told %v, %v", info.Outcome, err)
	}
	b.restart()
	return info.ID
}

// Resume acted on the record as it was listed: it sent what a caller had been
// told was unknown since, and sent again what had succeeded.
func TestResumeSendsNothingThatWasToldSinceItWasListed(t *testing.T) {
	for want, fault := range map[oncehttp.Outcome]oncehttptest.Fault{
		oncehttp.Unknown:   oncehttptest.Hold(time.Second).With(oncehttptest.TruncateResponse(3)),
		oncehttp.Succeeded: oncehttptest.Hold(time.Second),
	} {
		t.Run(want.String(), func(t *testing.T) {
			inBubble(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, b *bench) {
				spy := b.spyReads()
				b.server.Script(fault)
				told := make(chan oncehttp.Info, 1)
				go func() {
					info, _ := b.charge(t.Context(), "k", "1")
					told <- info
				}()
				synctest.Wait()
				spy.listed = func() {
					if info := <-told; info.Outcome != want {
						t.Errorf("told %v, want %v", info.Outcome, want)
					}
				}
				orders, sum := b.resume()
				if len(orders) > 0 || b.wire() != 1 || b.known("k").Outcome != want {
					t.Errorf("handed over %v, %+v; %d on the wire, now %v", orders, sum, b.wire(), b.known("k").Outcome)
				}
			})
		})
	}
}

// Redrive acted on the record that it read before it had the operation: what a
// Do had finished and acknowledged meanwhile was sent again.
func TestRedriveSendsNothingThatSucceededMeanwhile(t *testing.T) {
	inBubble(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, b *bench) {
		id := b.leaveUnknown("k", "1")
		spy := b.spyReads()
		spy.got = func() {
			if _, err := b.do(t.Context(), "k", "1"); err != nil {
				t.Error(err)
			}
			time.Sleep(time.Second)
		}
		b.client.Redrive(t.Context(), id)
		if info := b.known("k"); info.Outcome != oncehttp.Succeeded || b.wire() != 2 {
			t.Errorf("is %v, %d on the wire", info.Outcome, b.wire())
		}
	})
}

// An operation was forgotten, and its key used for another, between two readings
// of its record: the URL of the one went out with the body of the other.
func TestTwoOperationsAreNeverMixed(t *testing.T) {
	send := map[string]func(b *bench, spy *readSpy, meanwhile func(), id oncehttp.ID){
		"Redrive": func(b *bench, spy *readSpy, meanwhile func(), id oncehttp.ID) {
			spy.got = meanwhile
			b.client.Redrive(b.t.Context(), id)
		},
		"Resume": func(b *bench, spy *readSpy, meanwhile func(), id oncehttp.ID) {
			spy.listed = meanwhile
			b.pass(oncehttp.Handler{Before: func(context.Context, oncehttp.Info) oncehttp.Decision { return oncehttp.Send }})
		},
	}
	for name, send := range send {
		t.Run(name, func(t *testing.T) {
			inBubble(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, b *bench) {
				id := b.leaveUnknown("k", "1")
				send(b, b.spyReads(), func() {
					if err := b.client.Forget(t.Context(), id); err != nil {
						t.Error(err)
					}
					b.server.Script(oncehttptest.DropRequest())
					req := b.request(t.Context(), "2", "Idempotency-Key", "k")
					req.URL.Path = "/v1/refunds"
					b.client.Do(req)
				}, id)
				for _, a := range b.server.Attempts() {
					if (a.Path == "/v1/charges") != (string(a.Body) == "order=1") {
						t.Errorf("sent %q to %s", a.Body, a.Path)
					}
				}
			})
		})
	}
}

// A request for an operation that Resume had in hand joined it, and shared what
// came of it: "in progress", no answer at all, a panic, or "unknown" of what was
// sent for days after. It waits now, and then goes its own way.
func TestARequestThatMeetsResumeGoesItsOwnWay(t *testing.T) {
	slow := func(context.Context, oncehttp.Info, *http.Response) error { time.Sleep(time.Second); return nil }
	tests := map[string]struct {
		fault    oncehttptest.Fault
		handler  oncehttp.Handler
		wire     int
		replayed bool
	}{
		"and is postponed": {oncehttptest.Stall(time.Second).With(oncehttptest.Status(500)), oncehttp.Handler{}, 3, false},
		"and is held": {oncehttptest.Fault{}, oncehttp.Handler{Before: func(context.Context, oncehttp.Info) oncehttp.Decision {
			time.Sleep(time.Second)
			return oncehttp.Hold
		}}, 2, false},
		"and is handed over": {oncehttptest.Fault{}, oncehttp.Handler{Settled: slow}, 2, true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			inBubble(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, b *bench) {
				b.server.Script(oncehttptest.Stall(-1), tt.fault)
				b.leavePending(t.Context(), "k", "1")
				var pass sync.WaitGroup
				pass.Go(func() { b.pass(tt.handler) })
				synctest.Wait()
				info, err := b.do(t.Context(), "k", "1")
				if err != nil || info.Replayed != tt.replayed || b.wire() != tt.wire {
					t.Errorf("told %+v, %v; %d on the wire, want %d", info, err, b.wire(), tt.wire)
				}
				pass.Wait()
				b.wantEffects("1")
			})
		})
	}
	t.Run("and leaves", func(t *testing.T) {
		inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
			b.server.Script(oncehttptest.Stall(-1), oncehttptest.Slow(5*time.Second))
			b.leavePending(t.Context(), "k", "1")
			var pass sync.WaitGroup
			pass.Go(func() {
				if orders, sum := b.resume(); len(orders) != 1 {
					t.Errorf("handed over %v, %+v", orders, sum)
				}
			})
			synctest.Wait()
			info, err := b.do(b.within(time.Second), "k", "1")
			if info.Outcome != oncehttp.Undecided || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("told %v, %v, want that it is pending", info.Outcome, err)
			}
			pass.Wait()
			b.wantEffects("1")
		})
	})
}

// The Unknown handler could do none of what it is for: the operation was in
// flight while it ran.
func TestTheUnknownHandlerMayDecide(t *testing.T) {
	decide := map[string]func(t *testing.T, b *bench, ctx context.Context, id oncehttp.ID) error{
		"Resolve": func(t *testing.T, b *bench, ctx context.Context, id oncehttp.ID) error {
			return b.client.Resolve(ctx, id, oncehttp.Succeeded)
		},
		"Forget": func(t *testing.T, b *bench, ctx context.Context, id oncehttp.ID) error {
			return b.client.Forget(ctx, id)
		},
		"Redrive": func(t *testing.T, b *bench, ctx context.Context, id oncehttp.ID) error {
			resp, err := b.client.Redrive(ctx, id)
			if err == nil {
				resp.Body.Close()
			}
			return err
		},
	}
	for name, decide := range decide {
		t.Run(name, func(t *testing.T) {
			inBubble(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, b *bench) {
				id := b.leaveUnknown("k", "1")
				calls := 0
				h := oncehttp.Handler{Unknown: func(ctx context.Context, info oncehttp.Info) error {
					calls++
					return decide(t, b, ctx, info.ID)
				}}
				if sum := b.pass(h); sum.Failed != 0 || calls != 1 {
					t.Errorf("%+v after %d calls", sum, calls)
				}
				if b.pass(h); calls != 1 {
					t.Errorf("was told of it again")
				}
				infos, err := b.client.Lookup(t.Context(), id.Key)
				if decided := name == "Forget" && len(infos) == 0 || len(infos) == 1 && infos[0].Outcome == oncehttp.Succeeded; err != nil || !decided {
					t.Errorf("now %+v, %v", infos, err)
				}
			})
		})
	}
}

// The other handlers have the operation in hand: who asked for it with their
// context waited for itself. Settled may still ask for the answer.
func TestAHandlerDoesNotWaitForItsOwnOperation(t *testing.T) {
	inBubble(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, b *bench) {
		b.leaveUnknown("k", "1")
		start, asked := time.Now(), 0
		ask := func(ctx context.Context, id oncehttp.ID, answered bool) {
			asked++
			_, redrive := b.hear(b.client.Redrive(ctx, id))
			_, do := b.do(ctx, "k", "1")
			resolve, forget := b.client.Resolve(ctx, id, oncehttp.Rejected), b.client.Forget(ctx, id)
			for i, err := range []error{redrive, do, resolve, forget} {
				if refused := errors.Is(err, oncehttp.ErrInProgress); refused == (answered && i < 2) {
					t.Errorf("answered=%v: error %v", answered, err)
				}
			}
			if other, err := b.do(ctx, "other", "2"); err != nil {
				t.Errorf("another operation: %v, %v", other.Outcome, err)
			}
		}
		sum := b.pass(oncehttp.Handler{
			Before: func(ctx context.Context, info oncehttp.Info) oncehttp.Decision {
				ask(ctx, info.ID, false)
				return oncehttp.Send
			},
			Settled: func(ctx context.Context, info oncehttp.Info, _ *http.Response) error {
				ask(ctx, info.ID, true)
				return nil
			},
		})
		if sum.Settled != 1 || asked != 2 || time.Since(start) != 0 {
			t.Errorf("%+v, asked %d times, after %v", sum, asked, time.Since(start))
		}
		b.wantEffects("1", "2")
	})
}

// Two passes told the same operation at the same time.
func TestTwoPassesTellOfAnOperationOnce(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Stored500())
		b.charge(t.Context(), "k", "1")
		var calls atomic.Int32
		h := oncehttp.Handler{Unknown: func(context.Context, oncehttp.Info) error {
			calls.Add(1)
			time.Sleep(time.Second)
			return nil
		}}
		var passes sync.WaitGroup
		for range 3 {
			passes.Go(func() { b.pass(h) })
			synctest.Wait()
		}
		if passes.Wait(); calls.Load() != 1 {
			t.Errorf("told %d times", calls.Load())
		}
	})
}

// A handler that is the death of its process every time was called for ever.
func TestAPoisonedUnknownHandlerIsNotCalledForEver(t *testing.T) {
	inBubble(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, b *bench) {
		b.leaveUnknown("k", "1")
		calls := 0
		for range 20 {
			store := b.store.LazyStore.(*oncehttptest.Store)
			var next *oncehttptest.Store
			b.client.Resume(t.Context(), oncehttp.Handler{Settled: takes, Unknown: func(context.Context, oncehttp.Info) error {
				calls++
				next = store.Crash()
				return nil
			}})
			b.close()
			if next == nil {
				next = store.Crash()
			}
			b.store.LazyStore = next
			b.open()
		}
		if calls == 0 || calls > 10 || b.known("k").Outcome != oncehttp.Unknown {
			t.Errorf("called %d times, now %+v", calls, b.known("k"))
		}
	})
}

// Its failures were taken for deaths: after the tenth it was never called again.
func TestAnUnknownHandlerIsCalledUntilItSucceeds(t *testing.T) {
	inBubble(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, b *bench) {
		b.leaveUnknown("k", "1")
		calls := 0
		h := oncehttp.Handler{Unknown: func(context.Context, oncehttp.Info) error {
			if calls++; calls <= 20 {
				return errors.New("pager is down")
			}
			return nil
		}}
		for range 30 {
			b.pass(h)
			time.Sleep(time.Minute)
		}
		if calls != 21 {
			t.Errorf("called %d times, want 21", calls)
		}
	})
}

// A program that makes passes until there is nothing to do never came to an end
// while one operation was unknown.
func TestPassesAreDoneWhenOnlyAPersonCanGoOn(t *testing.T) {
	inBubble(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, b *bench) {
		b.leaveUnknown("k", "1")
		for _, tt := range []struct {
			handler func(context.Context, oncehttp.Info) error
			done    bool
		}{
			{nil, true},
			{func(context.Context, oncehttp.Info) error { return errors.New("pager is down") }, false},
			{func(context.Context, oncehttp.Info) error { return errors.New("not called: it rests") }, false},
			{nil, true},
		} {
			sum := b.pass(oncehttp.Handler{Unknown: tt.handler})
			if sum.Done() != tt.done || sum.NextDue.IsZero() != tt.done {
				t.Errorf("%+v, want done %v", sum, tt.done)
			}
		}
		time.Sleep(time.Minute)
		for i := range 3 { // told once
			sum := b.pass(oncehttp.Handler{Unknown: func(context.Context, oncehttp.Info) error { return nil }})
			if !sum.Done() || sum.Unknown != 1 {
				t.Errorf("pass %d: %+v", i, sum)
			}
		}
	})
}

// Each handler that ended its goroutine took a worker with it, and the ninth was
// waited for in vain.
func TestAHandlerThatEndsItsGoroutineConcernsItsOperationAlone(t *testing.T) {
	for name, end := range map[string]func(){"Goexit": runtime.Goexit, "panic": func() { panic("handler") }} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, b *bench) {
				const n = 12
				for i := range n {
					b.charge(t.Context(), fmt.Sprint("answered-", i), fmt.Sprint(i))
				}
				b.leaveUnknown("unknown", "u")
				sum := b.pass(oncehttp.Handler{
					Settled: func(context.Context, oncehttp.Info, *http.Response) error { end(); return nil },
					Unknown: func(context.Context, oncehttp.Info) error { end(); return nil },
				})
				if sum.Failed != n+1 || sum.Settled != 0 {
					t.Errorf("%+v", sum)
				}
				time.Sleep(time.Minute)
				if orders, sum := b.resume(); len(orders) != n {
					t.Errorf("then handed over %v, %+v", orders, sum)
				}
			})
		})
	}
}

// A hook that panicked in a pass was the end of the process.
func TestHooksThatPanicDoNotStopAPass(t *testing.T) {
	var panics atomic.Bool
	hook := func() {
		if panics.Load() {
			panic("hook")
		}
	}
	opts := oncehttp.Options{
		MaxAttempts: 2, Breaker: &oncehttp.Breaker{MinRequests: 1, Consecutive: 1},
		Trace: &oncehttp.Trace{
			Begun: func(oncehttp.Info) { hook() }, AttemptStart: func(oncehttp.AttemptInfo) { hook() }, AttemptDone: func(oncehttp.AttemptInfo) { hook() },
			Retry: func(oncehttp.RetryInfo) { hook() }, Settled: func(oncehttp.Info) { hook() }, StoreFailed: func(oncehttp.Info, error) { hook() },
			Breaker: func(oncehttp.BreakerInfo) { hook() },
		},
	}
	for name, begin := range map[string]func(b *bench){
		"pending":       func(b *bench) { b.leavePending(b.t.Context(), "k", "1") },
		"window closed": func(b *bench) { b.leavePending(b.t.Context(), "k", "1"); time.Sleep(48 * time.Hour) },
		"answered":      func(b *bench) { b.server.Script(); b.charge(b.t.Context(), "k", "1"); b.restart() },
		"store": func(b *bench) {
			b.leavePending(b.t.Context(), "k", "1")
			b.store.before = func(string, oncehttp.Record) error { return oncehttp.ErrStoreFailed }
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, opts, func(t *testing.T, b *bench) {
				if name != "answered" {
					b.server.Script(oncehttptest.Stall(-1), oncehttptest.Status(500), oncehttptest.Status(500))
				}
				begin(b)
				panics.Store(true)
				b.pass(oncehttp.Handler{})
				if err := b.client.Shutdown(b.within(time.Minute)); err != nil {
					t.Error(err)
				}
				panics.Store(false)
				b.store.before = nil
				if info := b.known("k"); name == "answered" && info.Outcome != oncehttp.Succeeded || info.Outcome == oncehttp.Rejected {
					t.Errorf("now %+v", info)
				}
			})
		})
	}
}

// The listing waited for the workers of a host that hangs: the operations of all
// others waited for its timeouts.
func TestAHostThatHangsDoesNotHoldUpTheOthers(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.server.FaultFunc(func(oncehttptest.Attempt) oncehttptest.Fault { return oncehttptest.Stall(-1) })
		var calls sync.WaitGroup
		for i := range 40 {
			ctx, _ := oncehttp.Start(t.Context(), oncehttp.Op{})
			req := b.request(ctx, fmt.Sprint(i))
			if i < 39 {
				req.URL.Host, req.Host = "hangs.example.com", "hangs.example.com"
			}
			calls.Go(func() { b.client.Do(req) })
			synctest.Wait()
		}
		b.restart()
		calls.Wait()
		b.server.FaultFunc(func(a oncehttptest.Attempt) oncehttptest.Fault {
			if a.Host == "hangs.example.com" {
				return oncehttptest.Stall(-1)
			}
			return oncehttptest.Fault{}
		})
		start := time.Now()
		var took time.Duration
		b.pass(oncehttp.Handler{Settled: func(_ context.Context, info oncehttp.Info, _ *http.Response) error {
			took = time.Since(start)
			return nil
		}})
		if b.wantEffects("39"); took > time.Second {
			t.Errorf("the other host's operation was settled after %v", took)
		}
	})
}

// The rest that Resume gives to an operation was told, and obeyed, as the
// server's wish: when the credentials were mended, Redrive was refused.
func TestTheRestOfResumeIsNotTheServersWish(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Stall(-1))
		b.leavePending(t.Context(), "k", "1")
		b.server.FaultFunc(func(oncehttptest.Attempt) oncehttptest.Fault { return oncehttptest.Unauthorized() })
		for range 40 {
			b.resume()
			time.Sleep(time.Minute)
		}
		b.server.FaultFunc(nil)
		info, start := b.known("k"), time.Now()
		resp, err := b.client.Redrive(t.Context(), info.ID)
		if err != nil || !info.NotBefore.IsZero() || time.Since(start) != 0 {
			t.Fatalf("error %v after %v; not before %v", err, time.Since(start), info.NotBefore)
		}
		resp.Body.Close()
	})
}

// An interrupted operation forgot that the server had asked for an hour: Resume
// sent it at once.
func TestAnInterruptedOperationRemembersRetryAfter(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Stall(time.Second).With(oncehttptest.Status(503, "Retry-After", "3600")))
		var call sync.WaitGroup
		call.Go(func() {
			if info, err := b.charge(t.Context(), "k", "1"); info.Outcome != oncehttp.Undecided {
				t.Errorf("told %v, %v", info.Outcome, err)
			}
		})
		synctest.Wait()
		if err := b.client.Shutdown(t.Context()); err != nil {
			t.Error(err)
		}
		call.Wait()
		b.restart()
		if orders, sum := b.resume(); len(orders) > 0 || sum.Pending != 1 || time.Until(sum.NextDue) < 59*time.Minute {
			t.Errorf("handed over %v, %+v", orders, sum)
		}
		if info := b.known("k"); info.Attempts != 1 || info.Status != 503 {
			t.Errorf("is %+v", info)
		}
	})
}

// A time that the server had asked for lay months ahead when the clock was set
// right: the operation waited for it, instead of being unknown.
func TestAnOperationOfAnEarlierEraWaitsForNoTime(t *testing.T) {
	var ahead atomic.Int64
	opts := *oncehttp.Options{}.WithClock(func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) })
	inBubble(t, opts, func(t *testing.T, b *bench) {
		ahead.Store(int64(8 * 30 * 24 * time.Hour))
		b.server.Script(oncehttptest.Status(503, "Retry-After", "50"))
		b.leavePending(t.Context(), "k", "1")
		ahead.Store(0)
		b.restart()
		var reasons []oncehttp.Reason
		b.pass(oncehttp.Handler{Unknown: func(_ context.Context, info oncehttp.Info) error {
			reasons = append(reasons, info.Reason)
			return nil
		}})
		if !slices.Equal(reasons, []oncehttp.Reason{oncehttp.ReasonClock}) {
			t.Errorf("told of %v, want the clock", reasons)
		}
	})
}

// Refused, Redrive told "not sent" of an operation whose record it had read.
func TestARefusedRedriveTellsWhatIsKnown(t *testing.T) {
	for name, refuse := range map[string]func(b *bench) context.Context{
		"paused": func(b *bench) context.Context { b.pauseHost(); return b.within(5 * time.Second) },
		"closed": func(b *bench) context.Context { b.close(); return b.t.Context() },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, b *bench) {
				b.server.Script(oncehttptest.DropResponse())
				info, _ := b.charge(t.Context(), "", "1")
				if again, err := b.hear(b.client.Redrive(refuse(b), info.ID)); again.Outcome != oncehttp.Unknown {
					t.Errorf("told %v, %v", again.Outcome, err)
				}
			})
		})
	}
}

// Redrive of a rejection whose window had closed opened the record, was refused,
// and left it as unknown.
func TestARejectionIsRedrivenInANewWindow(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Status(402))
		first, _ := b.charge(t.Context(), "k", "1")
		time.Sleep(48 * time.Hour)
		info, err := b.hear(b.client.Redrive(t.Context(), first.ID))
		if info.Outcome != oncehttp.Succeeded || !info.FirstSent.After(first.ResendUntil) {
			t.Errorf("told %+v, %v", info, err)
		}
		b.wantEffects("1")
	})
}

// Who leaves a Redrive to others read what its flight was about to write.
func TestLeavingARedriveReadsNothingOfItsFlight(t *testing.T) {
	inBubble(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, b *bench) {
		id := b.leaveUnknown("k", "1")
		spy := b.spyReads()
		var calls sync.WaitGroup
		for _, ctx := range []context.Context{t.Context(), b.within(time.Second)} {
			spy.got = func() { // of Redrive; the flight reads the record again
				spy.got = func() { time.Sleep(time.Second) }
			}
			calls.Go(func() {
				info, err := b.hear(b.client.Redrive(ctx, id))
				if err != nil && !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("told %v, %v", info.Outcome, err)
				}
			})
			synctest.Wait()
		}
		calls.Wait()
	})
}
