package oncehttp_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
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

// Histories that went wrong once: here, what callers were told. What was on the
// wire, Resume and Redrive, and acknowledgements are in the files beside.

// hear returns what a caller without a handle is told.
func (b *bench) hear(resp *http.Response, err error) (oncehttp.Info, error) {
	b.t.Helper()
	if err == nil {
		resp.Body.Close()
		info, _ := oncehttp.OperationFrom(resp)
		return info, nil
	}
	told, ok := errors.AsType[*oncehttp.OperationError](err)
	if !ok {
		b.t.Errorf("error %v, want an *OperationError", err)
		return oncehttp.Info{}, err
	}
	return oncehttp.Info{ID: oncehttp.ID{Key: told.Key}, Outcome: told.Outcome, Attempts: told.Attempts}, err
}

// do charges an order without a handle, under a key in the header.
func (b *bench) do(ctx context.Context, key, order string) (oncehttp.Info, error) {
	b.t.Helper()
	return b.hear(b.client.Do(b.request(ctx, order, "Idempotency-Key", key)))
}

// known returns what is known of the only operation with a key.
func (b *bench) known(key string) oncehttp.Info {
	b.t.Helper()
	infos, err := b.client.Lookup(b.t.Context(), key)
	if err != nil || len(infos) != 1 {
		b.t.Fatalf("operations with key %s: %v, %v", key, infos, err)
	}
	return infos[0]
}

// reopen restarts with other options.
func (b *bench) reopen(change func(*oncehttp.Options)) {
	b.t.Helper()
	change(&b.opts)
	b.restart()
}

// through restarts with a transport in front of the server's.
func (b *bench) through(f func(r *http.Request, next http.RoundTripper) (*http.Response, error)) {
	b.t.Helper()
	next := b.server.Transport()
	b.reopen(func(o *oncehttp.Options) {
		o.HTTPClient = &http.Client{Transport: roundTripper(func(r *http.Request) (*http.Response, error) { return f(r, next) })}
	})
}

// pauseHost makes the server ask for a pause of 50 s. No attempt may be retried.
func (b *bench) pauseHost() {
	b.t.Helper()
	b.server.ScriptFor(isGet, oncehttptest.Status(503, "Retry-After", "50"))
	if resp, err := b.client.Get(host + "/v1/charges"); err != nil || resp.StatusCode != 503 {
		b.t.Fatalf("%v, %v", resp, err)
	}
}

func isGet(a oncehttptest.Attempt) bool { return a.Method == "GET" }

// within returns a context of the test that ends after d.
func (b *bench) within(d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(b.t.Context(), d)
	b.t.Cleanup(cancel)
	return ctx
}

// late is a transport that takes a minute to notice that its request is over.
func late(r *http.Request) (*http.Response, error) {
	<-r.Context().Done()
	time.Sleep(time.Minute)
	return nil, context.Cause(r.Context())
}

// A request that is refused before it begins was told "not sent, and never will
// be", although an earlier one with its key had been sent: who believed it paid
// again under another key.
func TestARefusalNeverTellsNotSentOfWhatWasSent(t *testing.T) {
	opts := oncehttp.Options{MaxAttempts: 1, Breaker: &oncehttp.Breaker{MinRequests: 3, Consecutive: 3}}
	earlier := map[oncehttp.Outcome]func(t *testing.T, b *bench){
		oncehttp.NotSent: func(*testing.T, *bench) {}, // nothing
		oncehttp.Unknown: func(t *testing.T, b *bench) {
			b.server.Script(oncehttptest.DropResponse())
			b.charge(t.Context(), "k", "1")
		},
		oncehttp.Undecided: func(t *testing.T, b *bench) {
			b.server.Script(oncehttptest.Hold(-1))
			b.leavePending(t.Context(), "k", "1")
		},
		oncehttp.Succeeded: func(t *testing.T, b *bench) { b.charge(t.Context(), "k", "1") },
	}
	refusals := map[string]func(b *bench, req *http.Request) *http.Request{
		"paused": func(b *bench, req *http.Request) *http.Request {
			b.pauseHost()
			return req.WithContext(b.within(5 * time.Second))
		},
		"breaker": func(b *bench, req *http.Request) *http.Request {
			b.server.Script(oncehttptest.Status(500), oncehttptest.Status(500), oncehttptest.Status(500))
			for range 3 {
				b.client.Get(host + "/v1/charges")
			}
			return req
		},
		"context": func(b *bench, req *http.Request) *http.Request {
			ctx, cancel := context.WithCancel(req.Context())
			b.store.before = func(string, oncehttp.Record) error {
				cancel()
				time.Sleep(time.Second)
				return nil
			}
			return req.WithContext(ctx)
		},
		"store": func(b *bench, req *http.Request) *http.Request {
			b.store.before = func(string, oncehttp.Record) error { return oncehttp.ErrStoreFailed }
			return req
		},
		"body": func(b *bench, req *http.Request) *http.Request {
			req.ContentLength = 2 << 20
			return req
		},
		"closed": func(b *bench, req *http.Request) *http.Request {
			b.close()
			return req
		},
		"store closed": func(b *bench, req *http.Request) *http.Request {
			b.close()
			b.store.Close()
			return req
		},
	}
	for outcome, begin := range earlier {
		for name, refuse := range refusals {
			t.Run(fmt.Sprintf("%v/%s", outcome, name), func(t *testing.T) {
				inBubble(t, opts, func(t *testing.T, b *bench) {
					begin(t, b)
					req := refuse(b, b.request(t.Context(), "1", "Idempotency-Key", "k"))
					before, want := b.wire(), outcome
					if name == "store closed" { // nobody can tell any more
						want = oncehttp.Unknown
					}
					info, err := b.hear(b.client.Do(req))
					if info.Outcome != want {
						t.Errorf("told %v, %v; want %v", info.Outcome, err, want)
					}
					// What has succeeded needs nothing of what was refused.
					replayed := want == oncehttp.Succeeded && name != "body"
					if replayed != (err == nil) || info.Replayed != replayed {
						t.Errorf("replayed %v, %v", info.Replayed, err)
					}
					if b.wire() != before {
						t.Error("sent")
					}
				})
			})
		}
	}
}

// A handle's second request was told "not sent", and the handle with it, because
// its key was fresh.
func TestAHandleIsNeverToldNotSentOfItsFirstRequest(t *testing.T) {
	t.Run("refused", func(t *testing.T) {
		inBubble(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, b *bench) {
			b.server.Script(oncehttptest.DropResponse())
			ctx, op := oncehttp.Start(t.Context(), oncehttp.Op{})
			b.client.Do(b.request(ctx, "1"))
			b.pauseHost()
			ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
			defer cancel()
			info, err := b.hear(b.client.Do(b.request(ctx, "1")))
			if info.Outcome != oncehttp.Unknown || op.Info().Outcome != oncehttp.Unknown {
				t.Errorf("told %v, %v; the handle says %v", info.Outcome, err, op.Info().Outcome)
			}
		})
	})
	t.Run("of another body", func(t *testing.T) {
		inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
			b.server.Script(oncehttptest.Slow(time.Second))
			ctx, op := oncehttp.Start(t.Context(), oncehttp.Op{Key: "k"})
			go b.client.Do(b.request(ctx, "1"))
			synctest.Wait()
			if _, err := b.client.Do(b.request(ctx, "2")); !errors.Is(err, oncehttp.ErrKeyReused) {
				t.Errorf("error %v, want ErrKeyReused", err)
			}
			if o := op.Info().Outcome; o == oncehttp.NotSent {
				t.Errorf("the handle says %v while its request is on the wire", o)
			}
			time.Sleep(2 * time.Second)
			if o := op.Info().Outcome; o != oncehttp.Succeeded {
				t.Errorf("the handle says %v afterwards", o)
			}
		})
	})
	t.Run("that waits for the first to land", func(t *testing.T) {
		inBubble(t, oncehttp.Options{HTTPClient: &http.Client{Transport: roundTripper(late)}, MaxAttempts: 1}, func(t *testing.T, b *bench) {
			ctx, op := oncehttp.Start(t.Context(), oncehttp.Op{})
			var calls sync.WaitGroup
			for range 2 {
				calls.Go(func() {
					ctx, cancel := context.WithTimeout(ctx, time.Second)
					defer cancel()
					info, err := b.hear(b.client.Do(b.request(ctx, "1")))
					if info.Outcome == oncehttp.NotSent || op.Info().Outcome == oncehttp.NotSent {
						t.Errorf("told %v, %v; the handle says %v", info.Outcome, err, op.Info().Outcome)
					}
				})
				time.Sleep(2 * time.Second) // the first is being given up
			}
			calls.Wait()
		})
	})
}

// A refusal told whatever operation the key named: that of another tenant, whose
// "succeeded" it became, or that of another body.
func TestARefusalTellsNothingOfAnotherRequest(t *testing.T) {
	t.Run("of another tenant", func(t *testing.T) {
		inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
			ctx, _ := oncehttp.Start(t.Context(), oncehttp.Op{Key: "k", Scope: "a"})
			req := b.request(ctx, "1")
			req.URL.RawQuery = "secret=of-a"
			if _, err := b.hear(b.client.Do(req)); err != nil {
				t.Fatal(err)
			}
			ctx, op := oncehttp.Start(t.Context(), oncehttp.Op{Key: "k", Scope: "b"})
			req = b.request(ctx, "1")
			req.ContentLength = 2 << 20
			info, err := b.hear(b.client.Do(req))
			if info.Outcome != oncehttp.NotSent || strings.Contains(fmt.Sprintf("%+v", op.Info()), "secret") {
				t.Errorf("told %v, %v; the handle says %+v", info.Outcome, err, op.Info())
			}
		})
	})
	t.Run("of another body", func(t *testing.T) {
		inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
			b.charge(t.Context(), "k", "1")
			b.store.before = func(string, oncehttp.Record) error { return oncehttp.ErrStoreFailed }
			if info, err := b.do(t.Context(), "k", "2"); info.Outcome != oncehttp.NotSent {
				t.Errorf("told %v, %v", info.Outcome, err)
			}
		})
	})
}

// A write that may have been done was told as if it had not: a refusal stood in
// the result, and a pending operation in the store.
func TestAnUncertainWriteIsToldAsUnknown(t *testing.T) {
	crashing := func(b *bench) *oncehttptest.Store { return b.store.LazyStore.(*oncehttptest.Store) }
	reject := func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Status(402))
		if info, err := b.do(t.Context(), "k", "1"); info.Outcome != oncehttp.Rejected {
			t.Fatalf("told %v, %v", info.Outcome, err)
		}
	}
	tests := map[string]struct {
		prepare func(t *testing.T, b *bench) context.Context
		want    oncehttp.Outcome
	}{
		"begin": {func(t *testing.T, b *bench) context.Context {
			crashing(b).FailUncertain("Begin", 1, false)
			return t.Context()
		}, oncehttp.Unknown},
		"begin that is visible": {func(t *testing.T, b *bench) context.Context {
			crashing(b).FailUncertain("Begin", 1, true)
			return t.Context()
		}, oncehttp.Unknown},
		"begin of what has succeeded": {func(t *testing.T, b *bench) context.Context {
			b.charge(t.Context(), "k", "1")
			crashing(b).FailUncertain("Begin", 1, false)
			return t.Context()
		}, oncehttp.Succeeded},
		"taking over": {func(t *testing.T, b *bench) context.Context {
			reject(t, b)
			crashing(b).FailUncertain("Save", 1, true)
			return t.Context()
		}, oncehttp.Unknown},
		"giving back": {func(t *testing.T, b *bench) context.Context {
			reject(t, b)
			ctx, cancel := context.WithCancel(t.Context())
			crashing(b).Fail("Save", 2, nil)
			b.store.after = func(write string, _ oncehttp.Record) error {
				if write == "save" { // the taking over
					cancel()
					time.Sleep(time.Second)
				}
				return nil
			}
			return ctx
		}, oncehttp.Unknown},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
				ctx, op := oncehttp.Start(tt.prepare(t, b), oncehttp.Op{Key: "k"})
				before := b.wire()
				_, err := b.hear(b.client.Do(b.request(ctx, "1")))
				if info := op.Info(); info.Outcome != tt.want || info.NotRecorded != (tt.want == oncehttp.Unknown) || b.wire() != before {
					t.Errorf("told %+v, %v, %d more on the wire; want %v", info, err, b.wire()-before, tt.want)
				}
			})
		})
	}
}

// net/http sends a request without body again by itself, within one attempt of
// ours. The refusal of the second copy was taken for the answer to the first.
func TestARefusalAfterNetHTTPsOwnResendIsNoRejection(t *testing.T) {
	for _, status := range []int{401, 404, 409, 422} {
		inBubble(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, b *bench) {
			b.server.Script(oncehttptest.Fault{}, oncehttptest.DeadKeepAlive(), oncehttptest.Status(status))
			b.charge(t.Context(), "", "1") // leaves a connection
			ctx, op := oncehttp.Start(t.Context(), oncehttp.Op{})
			req, _ := http.NewRequestWithContext(ctx, "POST", host+"/v1/charges/ch_1/capture", nil)
			_, err := b.hear(b.client.Do(req))
			if info := op.Info(); info.Outcome != oncehttp.Unknown || info.Status != status || info.Attempts != 2 {
				t.Errorf("%d: told %+v, %v", status, info, err)
			}
		})
	}
}

// The connections of a token request that Options.Authorize sends with its
// context were counted as the operation's own, and made its rejection unknown.
func TestRequestsOfAuthorizeAreNoAttempts(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.reopen(func(o *oncehttp.Options) {
			o.Authorize = func(ctx context.Context, _ oncehttp.Info, _ *http.Request) error {
				for range 2 {
					req, _ := http.NewRequestWithContext(ctx, "GET", host+"/token", nil)
					resp, err := b.server.Transport().RoundTrip(req)
					if err != nil {
						return err
					}
					resp.Body.Close()
				}
				return nil
			}
		})
		b.server.ScriptFor(oncehttptest.ByKey("k"), oncehttptest.Status(422))
		if info, err := b.charge(t.Context(), "k", "1"); info.Outcome != oncehttp.Rejected || info.Attempts != 1 {
			t.Errorf("told %+v, %v", info, err)
		}
	})
}

// A followed redirect is an exchange, also by a path that fires no hooks: a
// refused connection after it is no proof that nothing was sent.
func TestNotSentIsNotToldAfterARedirect(t *testing.T) {
	inBubble(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.NoHooks().With(oncehttptest.Redirect(307, "/v2")), oncehttptest.DialError(nil))
		if info, err := b.charge(t.Context(), "k", "1"); info.Outcome != oncehttp.Unknown {
			t.Errorf("told %v, %v", info.Outcome, err)
		}
	})
}

// 429 says that nothing ran, also when the server adds that it is not to be
// retried: the 401 that comes next is a rejection.
func TestATooManyRequestsThatStopsSaysThatNothingRan(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Status(429, "Stripe-Should-Retry", "false"), oncehttptest.Unauthorized())
		for _, want := range []oncehttp.Outcome{oncehttp.Unknown, oncehttp.Rejected} {
			req := b.request(t.Context(), "1", "Idempotency-Key", "k")
			req.URL.Host, req.Host = "api.stripe.com", "api.stripe.com"
			if info, err := b.hear(b.client.Do(req)); info.Outcome != want {
				t.Errorf("told %+v, %v; want %v", info, err, want)
			}
		}
	})
}

// The last waiter left between a response that settles nothing and its record:
// there was neither a response nor an error to tell, and the caller panicked.
func TestWhoLeavesWithAnAnswerThatSettlesNothingIsTold(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		ctx, cancel := context.WithCancel(t.Context())
		b.reopen(func(o *oncehttp.Options) {
			o.Trace = &oncehttp.Trace{AttemptDone: func(oncehttp.AttemptInfo) { cancel(); time.Sleep(time.Second) }}
		})
		b.server.Script(oncehttptest.Redirect(302, "/there"))
		if info, err := b.do(ctx, "k", "1"); info.Outcome != oncehttp.Unknown || !errors.Is(err, context.Canceled) {
			t.Errorf("told %v, %v", info.Outcome, err)
		}
	})
}

// The flight was still there for a moment after it had told its callers: who
// came back at once was told the same again, and nothing was sent.
func TestWhoComesBackAtOnceBeginsAnew(t *testing.T) {
	opts := oncehttp.Options{MaxAttempts: 1, Breaker: &oncehttp.Breaker{Disabled: true}}
	inBubble(t, opts, func(t *testing.T, b *bench) {
		b.server.FaultFunc(func(oncehttptest.Attempt) oncehttptest.Fault { return oncehttptest.DropRequest() })
		const n = 300
		var busy sync.WaitGroup
		busy.Go(func() { // makes it likely that the client's lock is waited for
			for range n {
				b.do(lingering{t.Context()}, "other", "2")
			}
		})
		for range n {
			b.do(t.Context(), "k", "1")
		}
		busy.Wait()
		if b.wire() != 2*n {
			t.Errorf("%d of %d calls were sent", b.wire(), 2*n)
		}
	})
}

// lingering is a context that takes its time.
type lingering struct{ context.Context }

func (c lingering) Deadline() (time.Time, bool) {
	for range 20 {
		runtime.Gosched()
	}
	return c.Context.Deadline()
}

// A caller whose context has ended was told so by chance, although the answer
// was there.
func TestAnAnswerThatIsThereIsTold(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.store.hold = true // the flight stays until its lazy write is done
		if _, err := b.do(t.Context(), "k", "1"); err != nil {
			t.Fatal(err)
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		for range 30 {
			if info, err := b.do(ended, "k", "1"); info.Outcome != oncehttp.Succeeded {
				t.Fatalf("told %v, %v", info.Outcome, err)
			}
		}
		b.store.release()
		synctest.Wait()
	})
}

// A caller that came when the last one had just left was told the other's end of
// context, and nothing was tried for it.
func TestWhoComesAfterTheLastHasLeftBeginsAnew(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		var calls atomic.Int32
		b.through(func(r *http.Request, next http.RoundTripper) (*http.Response, error) {
			if calls.Add(1) == 1 {
				return late(r)
			}
			return next.RoundTrip(r)
		})
		var first sync.WaitGroup
		first.Go(func() { b.do(b.within(time.Second), "k", "1") })
		time.Sleep(2 * time.Second)
		if info, err := b.do(t.Context(), "k", "1"); err != nil {
			t.Errorf("told %v, %v", info.Outcome, err)
		}
		first.Wait()
		b.wantEffects("1")
	})
}

// What was sent before a panic was forgotten by it, and the 401 that came next
// taken for a rejection of all.
func TestAPanicDoesNotForgetWhatWasSent(t *testing.T) {
	places := map[string]func(b *bench, panics *atomic.Bool){
		"transport": func(b *bench, panics *atomic.Bool) {
			b.through(func(r *http.Request, next http.RoundTripper) (*http.Response, error) {
				resp, err := next.RoundTrip(r)
				if panics.Load() {
					panic("transport")
				}
				return resp, err
			})
		},
		"hook": func(b *bench, panics *atomic.Bool) {
			b.server.Script(oncehttptest.DropResponse())
			b.reopen(func(o *oncehttp.Options) {
				o.Trace = &oncehttp.Trace{AttemptDone: func(oncehttp.AttemptInfo) {
					if panics.Load() {
						panic("hook")
					}
				}}
			})
		},
	}
	for name, place := range places {
		t.Run(name, func(t *testing.T) {
			inBubble(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, b *bench) {
				var panics atomic.Bool
				place(b, &panics)
				panics.Store(true)
				func() {
					defer func() {
						if v := fmt.Sprint(recover()); !strings.HasPrefix(v, name) {
							t.Errorf("the caller's panic is %q", v)
						}
					}()
					b.do(t.Context(), "k", "1")
				}()
				panics.Store(false)
				b.server.Script(oncehttptest.Unauthorized())
				info, err := b.do(t.Context(), "k", "1")
				if info.Outcome != oncehttp.Unknown || info.Attempts != 2 {
					t.Errorf("told %+v, %v", info, err)
				}
				b.wantEffects("1")
			})
		})
	}
}

// A hook that panicked when the success was durable made it unknown again: a
// plain one in no list, one of Start to be sent again.
func TestAPanicOfTheSettledHookLeavesTheRecord(t *testing.T) {
	for _, started := range []bool{true, false} {
		t.Run(fmt.Sprintf("Start=%v", started), func(t *testing.T) {
			opts := oncehttp.Options{Trace: &oncehttp.Trace{Settled: func(oncehttp.Info) { panic("metrics") }}}
			inBubble(t, opts, func(t *testing.T, b *bench) {
				func() {
					defer func() {
						if recover() == nil {
							t.Error("the panic was swallowed")
						}
					}()
					if started {
						b.charge(t.Context(), "k", "1")
					} else {
						b.do(t.Context(), "k", "1")
					}
				}()
				time.Sleep(time.Second)
				if info := b.known("k"); info.Outcome != oncehttp.Succeeded || info.Acked == started {
					t.Errorf("is %+v", info)
				}
			})
		})
	}
}

// A hook that panics about a lazy write kept the operation in flight for ever,
// and Shutdown with it.
func TestAPanicAboutALazyWriteDoesNotHoldUpShutdown(t *testing.T) {
	opts := oncehttp.Options{Trace: &oncehttp.Trace{StoreFailed: func(oncehttp.Info, error) { panic("pager") }}}
	inBubble(t, opts, func(t *testing.T, b *bench) {
		b.close()
		b.store.LazyStore = failsSoon{b.store.LazyStore}
		b.open()
		if info, err := b.do(t.Context(), "k", "1"); info.Outcome != oncehttp.Succeeded {
			t.Errorf("told %v, %v", info.Outcome, err)
		}
		if err := b.client.Shutdown(b.within(time.Minute)); err != nil {
			t.Error(err)
		}
	})
}

// failsSoon is a store whose lazy writes fail.
type failsSoon struct{ oncehttp.LazyStore }

func (s failsSoon) SaveSoon(_ oncehttp.Record, done func(error)) {
	go func() {
		defer func() { recover() }()
		done(oncehttp.ErrStoreFailed)
	}()
}

// net/http does not send such a request either.
func TestNothingIsSentForWhoHasLeftBefore(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		lost := b.lost("k", "1")
		wire := b.wire()
		cause := errors.New("shop closes")
		ctx, leave := context.WithCancelCause(t.Context())
		leave(cause)
		for i := range 200 {
			if info, err := b.charge(ctx, fmt.Sprint("new-", i), "2"); !errors.Is(err, cause) || info.Outcome != oncehttp.NotSent {
				t.Fatalf("%d: told %v, %v", i, info.Outcome, err)
			}
			if info, err := b.charge(ctx, "k", "1"); !errors.Is(err, cause) || info.Outcome != oncehttp.Unknown {
				t.Fatalf("%d: of an unknown operation, told %v, %v", i, info.Outcome, err)
			}
			if _, err := b.client.Redrive(ctx, lost); !errors.Is(err, cause) {
				t.Fatalf("%d: Redrive: %v", i, err)
			}
		}
		if b.wire() != wire {
			t.Errorf("%d requests were sent", b.wire()-wire)
		}
	})
}

// TestWhatCannotBeReadIsNotToldAsNotSent: Begin met a damaged record, and that may
// be the key's own.
func TestWhatCannotBeReadIsNotToldAsNotSent(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.store.before = func(write string, _ oncehttp.Record) error {
			if write == "begin" {
				return fmt.Errorf("%w: a record is in the wrong place", oncehttp.ErrDamaged)
			}
			return nil
		}
		info, err := b.charge(t.Context(), "chosen", "1")
		if info.Outcome != oncehttp.Unknown || !errors.Is(err, oncehttp.ErrDamaged) {
			t.Errorf("told %v, %v", info.Outcome, err)
		}
		if resp, err := b.client.Do(b.request(t.Context(), "1")); err == nil {
			resp.Body.Close()
			t.Error("sent without a record")
		} else if failed, _ := errors.AsType[*oncehttp.OperationError](err); failed.Outcome != oncehttp.NotSent {
			t.Errorf("a fresh key was told %v", failed.Outcome)
		}
		if b.wire() > 0 {
			t.Error("sent without a record")
		}
	})
}
