package oncehttp_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// Histories of Resolve, Ack and Run that went wrong once.

// Resolve overruled what the server had decided: by a slip of a person, a charge
// that had succeeded could be sent again.
func TestWhatTheServerDecidedIsNotResolved(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		acked, err := b.do(t.Context(), "k", "1")
		if err != nil {
			t.Fatal(err)
		}
		open, _ := b.charge(t.Context(), "open", "2")
		time.Sleep(time.Second)
		for _, id := range []oncehttp.ID{acked.ID, open.ID} {
			if err := b.client.Resolve(t.Context(), id, oncehttp.Rejected); err == nil {
				t.Errorf("%s became a rejection", id.Key)
			}
			if err := b.client.Resolve(t.Context(), id, oncehttp.Succeeded); err != nil {
				t.Errorf("%s: %v", id.Key, err)
			}
		}
		if orders, _ := b.resume(); len(orders) > 0 {
			t.Errorf("handed over %v", orders)
		}
	})
}

// endingList ends a context with the last listing of a pass.
type endingList struct {
	oncehttp.LazyStore
	end func()
}

func (s *endingList) List(ctx context.Context, after uint64, n int) ([]oncehttp.Record, error) {
	list, err := s.LazyStore.List(ctx, after, n)
	s.end()
	return list, errors.Join(err, errors.New("disk"))
}

// Run returned nil, or its store's error, when its context ended with a pass.
func TestRunReturnsTheCauseWheneverItsContextEnds(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		cause := errors.New("deploy")
		ctx, cancel := context.WithCancelCause(t.Context())
		b.close()
		b.store.LazyStore = &endingList{b.store.LazyStore, func() { cancel(cause) }}
		b.open()
		if err := b.client.Run(ctx, oncehttp.Handler{Settled: takes}); err != cause {
			t.Errorf("Run returned %v, want the cause itself", err)
		}
	})
}

// Run returned a joined error, and at the first one of its store.
func TestRunEndsByItsContextAlone(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.charge(t.Context(), "k", "1")
		b.restart()
		b.close()
		b.store.LazyStore = &failingList{LazyStore: b.store.LazyStore}
		b.open()
		cause := errors.New("deploy")
		ctx, cancel := context.WithCancelCause(t.Context())
		err := b.client.Run(ctx, oncehttp.Handler{Settled: func(context.Context, oncehttp.Info, *http.Response) error {
			time.AfterFunc(time.Hour, func() { cancel(cause) })
			return nil
		}})
		if err != cause {
			t.Errorf("Run returned %v, want the cause itself", err)
		}
		if _, err = b.client.Resume(ctx, oncehttp.Handler{Settled: takes}); err != cause {
			t.Errorf("Resume returned %v, want the cause itself", err)
		}
	})
}

// failingList is a store that cannot list at first.
type failingList struct {
	oncehttp.LazyStore
	failed bool
}

func (s *failingList) List(ctx context.Context, after uint64, n int) ([]oncehttp.Record, error) {
	if !s.failed {
		s.failed = true
		return nil, oncehttp.ErrStoreFailed
	}
	return s.LazyStore.List(ctx, after, n)
}

// An operation whose handler failed, and whose record could not be written then,
// counted twice.
func TestAnOperationFailsOnce(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.charge(t.Context(), "k", "1")
		b.restart()
		sum := b.pass(oncehttp.Handler{Settled: func(context.Context, oncehttp.Info, *http.Response) error {
			b.store.before = func(string, oncehttp.Record) error { return oncehttp.ErrStoreFailed }
			return errors.New("ledger is down")
		}})
		if b.store.before = nil; sum.Failed != 1 {
			t.Errorf("%+v", sum)
		}
	})
}

// The client was closed while a plain Do and a Start waited, and the Start had
// been told: the operation stayed pending, and was sent days later.
func TestWhatSomebodyWasToldDoesNotStayPending(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Stall(-1))
		ctx, leave := context.WithCancel(t.Context())
		var calls sync.WaitGroup
		calls.Go(func() { b.charge(ctx, "k", "1") })
		synctest.Wait()
		calls.Go(func() {
			if info, err := b.do(t.Context(), "k", "1"); info.Outcome != oncehttp.Unknown || !errors.Is(err, oncehttp.ErrClosed) {
				t.Errorf("told %v, %v", info.Outcome, err)
			}
		})
		synctest.Wait()
		leave()
		synctest.Wait()
		b.restart()
		calls.Wait()
		b.resume()
		if info := b.known("k"); info.Outcome != oncehttp.Unknown || b.wire() != 1 {
			t.Errorf("is %v, %d on the wire", info.Outcome, b.wire())
		}
	})
}

// Start's wish to acknowledge outlived the acknowledgement of its rejection: the
// answer of a plain Do under the key waited for an Ack that nobody would do.
func TestAnAcknowledgedRejectionNeedsNoFurtherAck(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Status(402))
		ctx, op := oncehttp.Start(t.Context(), oncehttp.Op{Key: "k"})
		b.client.Do(b.request(ctx, "1"))
		if err := op.Ack(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := b.do(t.Context(), "k", "1"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		if info := b.known("k"); info.Outcome != oncehttp.Succeeded || !info.Acked {
			t.Errorf("is %+v", info)
		}
	})
}

// An answer is handed over when none of those who have it is left. The contexts
// of the earlier were overwritten by the later, and who came while the answer was
// being written was not counted.
func TestAnAnswerIsHeldForAllWhoHaveIt(t *testing.T) {
	stay := map[string]func(b *bench, ended context.Context) (op *oncehttp.Operation){
		"the first": func(b *bench, ended context.Context) *oncehttp.Operation {
			ctx, op := oncehttp.Start(b.t.Context(), oncehttp.Op{Key: "k"})
			b.hear(b.client.Do(b.request(ctx, "1")))
			b.charge(ended, "k", "1")
			return op
		},
		"who came during the write": func(b *bench, ended context.Context) (op *oncehttp.Operation) {
			var calls sync.WaitGroup
			b.store.before = func(write string, rec oncehttp.Record) error {
				if write == "save" && rec.Outcome == oncehttp.Succeeded {
					calls.Go(func() {
						var ctx context.Context
						ctx, op = oncehttp.Start(b.t.Context(), oncehttp.Op{Key: "k"})
						b.hear(b.client.Do(b.request(ctx, "1")))
					})
					time.Sleep(time.Second)
				}
				return nil
			}
			b.charge(ended, "k", "1")
			calls.Wait()
			b.store.before = nil
			return op
		},
	}
	for name, stay := range stay {
		t.Run(name, func(t *testing.T) {
			inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
				ctx, end := context.WithCancel(t.Context())
				op := stay(b, ctx)
				end()
				if orders, sum := b.resume(); len(orders) > 0 || sum.Held != 1 {
					t.Errorf("handed over %v, %+v", orders, sum)
				}
				if err := op.Ack(t.Context()); err != nil {
					t.Error(err)
				}
				if infos, _ := b.client.Lookup(t.Context(), "k"); len(infos) != 1 || !infos[0].Acked || b.wire() != 1 {
					t.Errorf("%+v, %d on the wire", infos, b.wire())
				}
			})
		})
	}
}

// What was held of a forgotten operation was held of the next one with its ID, and
// the handle of the forgotten one could acknowledge the next one's answer.
func TestTheHandleOfAForgottenOperationHasNothing(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		ctx, old := oncehttp.Start(t.Context(), oncehttp.Op{Key: "k"})
		b.hear(b.client.Do(b.request(ctx, "1")))
		if err := b.client.Forget(t.Context(), old.Info().ID); err != nil {
			t.Fatal(err)
		}
		ctx, end := context.WithCancel(t.Context())
		if info, err := b.charge(ctx, "k", "1"); err != nil || info.Acked {
			t.Fatalf("told %+v, %v", info, err)
		}
		if err := old.Ack(t.Context()); err == nil {
			t.Error("the first handle acknowledged the second operation")
		}
		end()
		if orders, sum := b.resume(); len(orders) != 1 {
			t.Errorf("handed over %v, %+v", orders, sum)
		}
	})
}

// A rejection that could not be recorded was told as unknown, and could be
// acknowledged all the same.
func TestWhatIsToldAsUnknownIsNotAcknowledged(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Status(402))
		b.store.LazyStore.(*oncehttptest.Store).Fail("Save", 1, nil)
		ctx, op := oncehttp.Start(t.Context(), oncehttp.Op{Key: "k"})
		b.hear(b.client.Do(b.request(ctx, "1")))
		if err := op.Ack(t.Context()); op.Info().Outcome != oncehttp.Unknown || !errors.Is(err, oncehttp.ErrNotAnswered) {
			t.Errorf("told %+v; Ack: %v", op.Info(), err)
		}
	})
}

// Ack kept the handle locked during the store's write: Info waited for it, and a
// store that asked for it for ever.
func TestInfoDoesNotWaitForAck(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		ctx, op := oncehttp.Start(t.Context(), oncehttp.Op{Key: "k"})
		b.hear(b.client.Do(b.request(ctx, "1")))
		b.store.before = func(write string, _ oncehttp.Record) error {
			if write == "ack" && op.Info().Acked {
				t.Error("acknowledged while it is being written")
			}
			return nil
		}
		if err := op.Ack(t.Context()); err != nil || !op.Info().Acked {
			t.Errorf("%v, %+v", err, op.Info())
		}
	})
}

// An Ack whose transaction was rolled back could not be repeated.
func TestAckAfterARollback(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.close()
		rolledBack := &rollback{LazyStore: b.store.LazyStore}
		b.store.LazyStore = rolledBack
		b.open()
		ctx, op := oncehttp.Start(t.Context(), oncehttp.Op{Key: "k"})
		b.hear(b.client.Do(b.request(ctx, "1")))
		for _, want := range []bool{false, true, true} {
			if err := op.Ack(t.Context()); err != nil {
				t.Error(err)
			}
			if info := b.known("k"); info.Acked != want {
				t.Errorf("acknowledged: %v, want %v", info.Acked, want)
			}
		}
	})
}

// rollback is a store whose first Ack is undone by the caller's transaction.
type rollback struct {
	oncehttp.LazyStore
	done bool
}

func (s *rollback) Ack(ctx context.Context, rec oncehttp.Record) error {
	if !s.done {
		s.done = true
		return nil
	}
	return s.LazyStore.Ack(ctx, rec)
}

// An operation of the store that cannot be sent again says why: its request is
// dropped with the acknowledgement.
func TestRedriveOfAnAcknowledgedOperation(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Status(402))
		info, _ := b.do(t.Context(), "k", "1")
		time.Sleep(time.Second)
		_, err := b.client.Redrive(t.Context(), info.ID)
		if !errors.Is(err, oncehttp.ErrNotRetained) || b.wire() != 1 {
			t.Errorf("error %v, %d on the wire", err, b.wire())
		}
		if _, err := b.client.Redrive(t.Context(), oncehttp.ID{Key: "nobody"}); !errors.Is(err, oncehttp.ErrNotFound) {
			t.Errorf("error %v, want ErrNotFound", err)
		}
	})
}

// An answer that was too long to be kept is handed over with a body that says so,
// and never with an empty one.
func TestAnAnswerThatWasNotKeptIsNeverEmpty(t *testing.T) {
	inBubble(t, oncehttp.Options{MaxResponseBytes: 10}, func(t *testing.T, b *bench) {
		b.charge(t.Context(), "k", "1")
		b.restart()
		b.pass(oncehttp.Handler{Settled: func(_ context.Context, info oncehttp.Info, resp *http.Response) error {
			if body, err := io.ReadAll(resp.Body); !errors.Is(err, oncehttp.ErrNotRetained) || resp.StatusCode != 200 || !strings.HasPrefix(info.Key, "k") {
				t.Errorf("handed over %d %q, %v", resp.StatusCode, body, err)
			}
			return nil
		}})
	})
}
