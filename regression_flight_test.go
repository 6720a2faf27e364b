package oncehttp_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// Histories that went wrong once: here, of callers that share an operation, of
// hooks that end it, and of answers that stream.

// eventStream answers as a stream of events with a body.
func eventStream(status int, body io.ReadCloser) *http.Response {
	resp := answer(status, "", "Content-Type", "text/event-stream")
	resp.Body, resp.ContentLength = body, -1
	return resp
}

// A caller without a deadline that had joined one with a deadline was held to
// that, also when it had passed.
func TestACallerWithoutDeadlineIsNotHeldToAnothers(t *testing.T) {
	inBubble(t, oncehttp.Options{RateLimit: 1, Burst: 1}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Delay(4 * time.Second).With(oncehttptest.Status(500)))
		var first sync.WaitGroup
		first.Go(func() { b.do(b.within(3*time.Second), "k", "1") })
		time.Sleep(time.Second)
		if info, err := b.do(t.Context(), "k", "1"); info.Outcome != oncehttp.Succeeded {
			t.Errorf("told %+v, %v", info, err)
		}
		first.Wait()
	})
}

// A caller that left while the client, which closes, wrote down that nobody was
// told anything, was told that the outcome is unknown; the next client sent it.
func TestWhoLeavesAClosingClientIsToldWhatBecomesOfTheOperation(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Stall(-1))
		saves := make(chan struct{})
		ctx, leave := context.WithCancel(t.Context())
		var all sync.WaitGroup
		for _, ctx := range []context.Context{ctx, t.Context()} {
			all.Go(func() {
				if info, err := b.charge(ctx, "k", "1"); info.Outcome != oncehttp.Undecided || !errors.Is(err, oncehttp.ErrClosed) {
					t.Errorf("told %v, %v", info.Outcome, err)
				}
			})
		}
		synctest.Wait()
		b.store.before = func(string, oncehttp.Record) error { <-saves; return nil }
		all.Go(func() { b.client.Close() })
		synctest.Wait()
		leave()
		synctest.Wait()
		close(saves)
		all.Wait()
		b.store.before = nil
		b.restart()
		if info := b.known("k"); info.Outcome != oncehttp.Undecided {
			t.Errorf("is %v", info.Outcome)
		}
	})
}

// The second request under a handle told it, when it left, what had become of
// the first, which was still waiting.
func TestOnlyTheFirstRequestUnderAHandleTellsItThatItLeft(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Delay(5 * time.Second))
		ctx, op := oncehttp.Start(t.Context(), oncehttp.Op{})
		var first sync.WaitGroup
		first.Go(func() { b.client.Do(b.request(ctx, "1")) })
		synctest.Wait()
		short, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		if _, err := b.client.Do(b.request(short, "1")); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("told %v", err)
		}
		if info := op.Info(); info.Outcome != oncehttp.Undecided {
			t.Errorf("while the first waits, the handle says %v", info.Outcome)
		}
		first.Wait()
		if err := op.Ack(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// Hooks that end their goroutine, as tests that fail do, left the callers waiting
// for ever if the last one did, too.
func TestHooksThatEndTheirGoroutineLeaveNobodyWaiting(t *testing.T) {
	end := func() { runtime.Goexit() }
	for name, trace := range map[string]*oncehttp.Trace{
		"Settled": {Settled: func(oncehttp.Info) { end() }},
		"all": {
			Begun:       func(oncehttp.Info) { end() },
			AttemptDone: func(oncehttp.AttemptInfo) { end() },
			Settled:     func(oncehttp.Info) { end() },
		},
		"after the attempt": {AttemptDone: func(oncehttp.AttemptInfo) { end() }, Settled: func(oncehttp.Info) { end() }},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, oncehttp.Options{Trace: trace}, func(t *testing.T, b *bench) {
				told := make(chan any, 1)
				go func() {
					defer func() { told <- recover() }()
					b.do(t.Context(), "k", "1")
				}()
				select {
				case v := <-told:
					if v == nil {
						t.Error("the caller was told an answer")
					}
				case <-time.After(time.Hour):
					t.Fatal("the caller waits")
				}
			})
		})
	}
}

// An answer that streams kept its connection for ever if the hook panicked that
// was told of it: nobody had the body.
func TestAPanicOfTheSettledHookFreesTheStream(t *testing.T) {
	opts := oncehttp.Options{Trace: &oncehttp.Trace{Settled: func(oncehttp.Info) { panic("metrics") }}}
	inBubble(t, opts, func(t *testing.T, b *bench) {
		var attempt context.Context
		b.through(func(r *http.Request, _ http.RoundTripper) (*http.Response, error) {
			attempt = r.Context()
			return eventStream(200, io.NopCloser(strings.NewReader("data: 1"))), nil
		})
		func() {
			defer func() { _ = recover() }()
			b.do(t.Context(), "k", "1")
		}()
		synctest.Wait()
		if attempt.Err() == nil {
			t.Error("the attempt's context has not ended")
		}
	})
}

// A 503 that streams, and says nothing, was read for ever before the retry: its
// attempt had no timeout any more.
func TestAStreamThatIsRetriedIsNotRead(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		var n atomic.Int32
		b.through(func(r *http.Request, next http.RoundTripper) (*http.Response, error) {
			if n.Add(1) > 1 {
				return next.RoundTrip(r)
			}
			silent, w := io.Pipe()
			context.AfterFunc(r.Context(), func() { w.CloseWithError(context.Cause(r.Context())) })
			return eventStream(503, silent), nil
		})
		if info, err := b.do(b.within(time.Minute), "k", "1"); info.Outcome != oncehttp.Succeeded {
			t.Errorf("told %+v, %v", info, err)
		}
	})
}

// A hook that was told of a write that nobody waited for, and panicked, was the
// end of the process; one that took its time held up all that came after.
func TestHooksOfWritesThatNobodyWaitsForStandAlone(t *testing.T) {
	for name, hook := range map[string]func(){"panic": func() { panic("hook") }, "Goexit": runtime.Goexit, "hang": func() { time.Sleep(time.Hour) }} {
		t.Run(name, func(t *testing.T) {
			var told atomic.Int32
			opts := oncehttp.Options{Trace: &oncehttp.Trace{StoreFailed: func(oncehttp.Info, error) { told.Add(1); hook() }}}
			inBubble(t, opts, func(t *testing.T, b *bench) {
				b.store.LazyStore.(*oncehttptest.Store).Fail("SaveSoon", 1, errors.New("disk full"))
				if info, err := b.do(t.Context(), "k", "1"); info.Outcome != oncehttp.Succeeded {
					t.Errorf("told %+v, %v", info, err)
				}
				b.store.noPurge.Store(true)
				time.Sleep(61 * time.Second) // the purge
				b.store.noPurge.Store(false)
				if n := told.Load(); n < 2 {
					t.Errorf("told of %d failures", n)
				}
				start := time.Now()
				if err := b.client.Shutdown(t.Context()); err != nil || time.Since(start) > 0 {
					t.Errorf("Shutdown took %v: %v", time.Since(start), err)
				}
				time.Sleep(time.Hour) // the hooks end
			})
		})
	}
}

// A caller who came too late for a stream looked at its trailer while the one who
// had it read.
func TestNobodyLooksAtAStreamThatAnotherReads(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.through(func(r *http.Request, _ http.RoundTripper) (*http.Response, error) {
			time.Sleep(time.Second)
			body, w := io.Pipe()
			resp := eventStream(200, body)
			resp.Trailer = http.Header{"X-Sum": nil}
			go func() {
				io.WriteString(w, "data: 1")
				resp.Trailer["X-Sum"] = []string{"1"} // as net/http does
				w.Close()
			}()
			return resp, nil
		})
		var callers sync.WaitGroup
		var read atomic.Int32
		for range 8 {
			callers.Go(func() {
				resp, err := b.client.Do(b.request(t.Context(), "1", "Idempotency-Key", "k"))
				switch {
				case err == nil:
					io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
					if resp.Trailer.Get("X-Sum") == "1" {
						read.Add(1)
					}
				case !errors.Is(err, oncehttp.ErrNotRetained):
					t.Error(err)
				}
			})
		}
		callers.Wait()
		if n := read.Load(); n != 1 {
			t.Errorf("%d callers have read the stream", n)
		}
	})
}

// A transport that hedges comes back with its second connection when the attempt
// is over, and the record is written.
func TestAConnectionThatComesLateMeetsNoWrite(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		var hedges sync.WaitGroup
		b.through(func(r *http.Request, next http.RoundTripper) (*http.Response, error) {
			trace := httptrace.ContextClientTrace(r.Context())
			hedges.Go(func() {
				conn, _ := net.Pipe()
				trace.GotConn(httptrace.GotConnInfo{Conn: conn})
			})
			return next.RoundTrip(r)
		})
		b.charge(t.Context(), "k", "1")
		hedges.Wait()
		b.wantEffects("1")
	})
}

// A request that was refused before it began told nothing of what it was: the
// record of an acknowledged operation has no such thing any more, and that of an
// answered one was not asked.
func TestARefusalTellsWhichOperationItIs(t *testing.T) {
	for name, first := range map[string]oncehttptest.Fault{"rejected": oncehttptest.Status(422), "succeeded": {}} {
		t.Run(name, func(t *testing.T) {
			opts := oncehttp.Options{MaxAttempts: 1, Breaker: &oncehttp.Breaker{MinRequests: 3, Consecutive: 3}}
			inBubble(t, opts, func(t *testing.T, b *bench) {
				b.server.Script(first, oncehttptest.Status(500), oncehttptest.Status(500), oncehttptest.Status(500))
				op := oncehttp.Op{Key: "k", NoAck: name == "rejected"}
				if name == "succeeded" {
					b.charge(t.Context(), "k", "1")
				} else {
					b.do(t.Context(), "k", "1")
					op.Metadata = map[string]string{"order": "1"}
				}
				for range 3 {
					b.charge(t.Context(), "", "2")
				}
				ctx, handle := oncehttp.Start(t.Context(), op)
				_, err := b.client.Do(b.request(ctx, "1"))
				info := handle.Info()
				if info.Outcome.String() != name || info.Method != "POST" || info.URL == "" || info.Metadata["order"] != "1" {
					t.Errorf("told %+v, %v", info, err)
				}
			})
		})
	}
}

// A hook that panicked when it was told that an operation stays pending, or that
// it was not sent, made it unknown: no later pass sent it.
func TestAPanicOfTheSettledHookLeavesWhatIsPending(t *testing.T) {
	var panics atomic.Bool
	opts := oncehttp.Options{MaxAttempts: 1, Trace: &oncehttp.Trace{Settled: func(oncehttp.Info) {
		if panics.Load() {
			panic("metrics")
		}
	}}}
	for name, settle := range map[string]func(b *bench){
		"postponed": func(b *bench) {
			b.server.Script(oncehttptest.Stall(-1), oncehttptest.Status(500))
			b.leavePending(b.t.Context(), "k", "1")
			panics.Store(true)
			b.pass(oncehttp.Handler{})
		},
		"interrupted": func(b *bench) {
			b.server.Script(oncehttptest.Stall(-1))
			panics.Store(true)
			closed := make(chan error)
			time.AfterFunc(time.Second, func() { closed <- b.client.Close() })
			func() {
				defer func() { _ = recover() }()
				b.charge(b.t.Context(), "k", "1")
			}()
			<-closed
			b.restart()
		},
		"not sent": func(b *bench) {
			b.reopen(func(o *oncehttp.Options) {
				o.Trace = &oncehttp.Trace{Settled: o.Trace.Settled, StoreFailed: func(i oncehttp.Info, err error) { b.t.Errorf("told %+v, %v", i, err) }}
			})
			b.server.Script(oncehttptest.DialError(nil))
			panics.Store(true)
			func() {
				defer func() { _ = recover() }()
				b.do(b.t.Context(), "k", "1")
			}()
			panics.Store(false)
			b.server.Script(oncehttptest.Stall(-1))
			b.leavePending(b.t.Context(), "k", "1") // it is a new operation
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, opts, func(t *testing.T, b *bench) {
				panics.Store(false)
				settle(b)
				panics.Store(false)
				if info := b.known("k"); info.Outcome != oncehttp.Undecided {
					t.Errorf("is %+v", info)
				}
			})
		})
	}
}

// After a panic, the handle said "undecided", which means that the operation will
// be resumed; and an answer that was there could not be acknowledged.
func TestAPanicIsToldToTheHandle(t *testing.T) {
	boom := func() { panic("hook") }
	probe := oncehttp.Trace{Breaker: func(i oncehttp.BreakerInfo) {
		if i.To == "half-open" {
			boom()
		}
	}}
	for name, tt := range map[string]struct {
		trace oncehttp.Trace
		first []oncehttptest.Fault
		want  oncehttp.Outcome
	}{
		"at admission, without record": {probe, nil, oncehttp.NotSent},
		"at admission, after a try":    {probe, []oncehttptest.Fault{oncehttptest.DropResponse()}, oncehttp.Unknown},
		"at admission, answered":       {probe, []oncehttptest.Fault{{}}, oncehttp.Succeeded},
		"before the attempt":           {oncehttp.Trace{AttemptStart: func(oncehttp.AttemptInfo) { boom() }}, nil, oncehttp.Unknown},
		"after the attempt":            {oncehttp.Trace{AttemptDone: func(oncehttp.AttemptInfo) { boom() }}, nil, oncehttp.Unknown},
		"when it is settled":           {oncehttp.Trace{Settled: func(oncehttp.Info) { boom() }}, nil, oncehttp.Succeeded},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, b *bench) {
				b.server.Script(tt.first...)
				if len(tt.first) > 0 {
					b.charge(t.Context(), "k", "1")
				}
				b.reopen(func(o *oncehttp.Options) {
					o.Breaker = &oncehttp.Breaker{MinRequests: 1, Consecutive: 1}
					o.Trace = &tt.trace
				})
				if tt.trace.Breaker != nil {
					b.server.ScriptFor(isGet, oncehttptest.Status(500))
					b.client.Get(host + "/v1/charges")
					time.Sleep(30 * time.Second) // the next is a probe
				}
				ctx, op := oncehttp.Start(t.Context(), oncehttp.Op{Key: "k"})
				func() {
					defer func() {
						if recover() == nil {
							t.Error("the panic was swallowed")
						}
					}()
					b.client.Do(b.request(ctx, "1"))
				}()
				if info := op.Info(); info.Outcome != tt.want || info.Key != "k" || info.Method != "POST" {
					t.Errorf("told %+v, want %v", info, tt.want)
				}
				if err := op.Ack(t.Context()); (err == nil) != (tt.want == oncehttp.Succeeded) {
					t.Error(err)
				}
			})
		})
	}
}

// An account whose header was not in its canonical form, which net/http sends as
// it is, was no account: one tenant was given the answer of another.
func TestTheAccountIsReadWhateverTheCaseOfItsHeader(t *testing.T) {
	inBubble(t, oncehttp.Options{Providers: []oncehttp.Provider{{
		Hosts: []string{"api.example.com"}, FingerprintHeaders: []string{"X-Tenant"},
		Account: func(h http.Header) string { return h.Get("X-Account") },
	}}}, func(t *testing.T, b *bench) {
		for _, name := range []string{"x-account", "x-tenant"} {
			send := func(value string) error {
				req := b.request(t.Context(), "1", "Idempotency-Key", name)
				req.Header[name] = []string{value}
				resp, err := b.client.Do(req)
				if err == nil {
					resp.Body.Close()
				}
				return err
			}
			if err := send("a"); err != nil {
				t.Error(err)
			}
			if err := send("b"); !errors.Is(err, oncehttp.ErrScope) && !errors.Is(err, oncehttp.ErrKeyReused) {
				t.Errorf("%s b was given the answer of a: %v", name, err)
			}
		}
	})
}
