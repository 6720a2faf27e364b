package oncehttp_test

import (
	"context"
	"errors"
	"net/http"
	"reflect"
	"testing"
	"time"

	"github.com/oncehttp/oncehttp"
)

// lookups records the calls of a handler that looks operations up.
type lookups struct {
	finds func(oncehttp.Info) (oncehttp.Outcome, error)
	calls []string // "reconcile KEY", "unknown KEY", "settled KEY", in order
}

func (l *lookups) handler() oncehttp.Handler {
	return oncehttp.Handler{
		Settled: func(_ context.Context, info oncehttp.Info, _ *http.Response) error {
			l.calls = append(l.calls, "settled "+info.Key)
			return nil
		},
		Reconcile: func(_ context.Context, info oncehttp.Info) (oncehttp.Outcome, error) {
			l.calls = append(l.calls, "reconcile "+info.Key)
			return l.finds(info)
		},
		Unknown: func(_ context.Context, info oncehttp.Info) error {
			l.calls = append(l.calls, "unknown "+info.Key)
			return nil
		},
	}
}

func (l *lookups) want(t *testing.T, calls ...string) {
	t.Helper()
	if !reflect.DeepEqual(l.calls, calls) {
		t.Errorf("called %q, want %q", l.calls, calls)
	}
	l.calls = nil
}

func finds(o oncehttp.Outcome, err error) func(oncehttp.Info) (oncehttp.Outcome, error) {
	return func(oncehttp.Info) (oncehttp.Outcome, error) { return o, err }
}

// What a look-up finds decides the operation, for good and before a person is asked.
func TestReconcileDecides(t *testing.T) {
	for _, outcome := range []oncehttp.Outcome{oncehttp.Succeeded, oncehttp.Rejected} {
		t.Run(outcome.String(), func(t *testing.T) {
			inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
				b.lost("A", "1")
				b.restart()
				l := &lookups{finds: func(info oncehttp.Info) (oncehttp.Outcome, error) {
					if info.Outcome != oncehttp.Unknown || info.Metadata["order"] != "1" {
						t.Errorf("asked about %+v", info)
					}
					return outcome, nil
				}}
				sum := b.pass(l.handler())
				l.want(t, "reconcile A")
				if want := (oncehttp.Summary{Reconciled: 1}); !reflect.DeepEqual(sum, want) {
					t.Errorf("summary %+v, want %+v", sum, want)
				}
				if info := b.known("A"); info.Outcome != outcome || !info.Acked {
					t.Errorf("recorded as %+v", info)
				}
				b.restart()
				b.pass(l.handler())
				l.want(t)
				wire := b.wire()
				b.charge(t.Context(), "A", "1")
				if sent := b.wire() > wire; sent != (outcome == oncehttp.Rejected) {
					t.Errorf("the key is sent again: %v", sent)
				}
			})
		})
	}
}

// What a look-up cannot tell, somebody is told; what it could not look up, nobody
// is, until it can.
func TestReconcileCannotTell(t *testing.T) {
	down := errors.New("the provider is down")
	tests := []struct {
		name  string
		finds func(oncehttp.Info) (oncehttp.Outcome, error)
		told  bool
	}{
		{"unknown", finds(oncehttp.Unknown, nil), true},
		{"error", finds(oncehttp.Unknown, down), false},
		{"error and an outcome", finds(oncehttp.Succeeded, down), false},
		{"no outcome of a look-up", finds(oncehttp.NotSent, nil), false},
		{"the zero value", finds(0, nil), false},
		{"panic", func(oncehttp.Info) (oncehttp.Outcome, error) { panic("look-up") }, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
				b.lost("A", "1")
				b.restart()
				l := &lookups{finds: tt.finds}
				sum := b.pass(l.handler())
				if tt.told {
					l.want(t, "reconcile A", "unknown A")
					if !sum.Done() || sum.Unknown != 1 {
						t.Errorf("summary %+v", sum)
					}
					time.Sleep(time.Hour)
					b.pass(l.handler())
					l.want(t)
					return
				}
				l.want(t, "reconcile A")
				if sum.Failed != 1 || sum.Unknown != 1 || time.Until(sum.NextDue).Round(time.Second) != time.Minute {
					t.Errorf("summary %+v", sum)
				}
				if sum := b.pass(l.handler()); sum.Held != 1 || sum.Done() { // it rests
					t.Errorf("summary while it rests %+v", sum)
				}
				l.want(t)
				if info := b.known("A"); info.Outcome != oncehttp.Unknown || info.Reason != oncehttp.ReasonGaveUp {
					t.Errorf("recorded as %+v", info)
				}
				time.Sleep(time.Minute + time.Second)
				l.finds = finds(oncehttp.Succeeded, nil)
				b.pass(l.handler())
				l.want(t, "reconcile A")
			})
		})
	}
}

// Also an operation whose caller was told by this process is looked up; but nobody
// else is told of it.
func TestReconcileWhereTheCallerWasTold(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.lost("A", "1")
		l := &lookups{finds: finds(oncehttp.Unknown, nil)}
		for range 3 {
			if sum := b.pass(l.handler()); sum.Unknown != 1 || !sum.Done() {
				t.Errorf("summary %+v", sum)
			}
			l.want(t, "reconcile A")
			if sum := b.pass(l.handler()); sum.Unknown != 1 || !sum.Done() { // it rests
				t.Errorf("summary while it rests %+v", sum)
			}
			l.want(t)
			time.Sleep(time.Minute + time.Second)
		}
		l.finds = finds(oncehttp.Succeeded, nil)
		b.pass(l.handler())
		l.want(t, "reconcile A")
	})
}

// Every way to an unknown outcome leads to the look-up, in the same pass.
func TestReconcileIsAskedForEveryReason(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.pending("A", "1")
		time.Sleep(25 * time.Hour)
		l := &lookups{finds: func(info oncehttp.Info) (oncehttp.Outcome, error) {
			if info.Reason != oncehttp.ReasonWindow || info.ResendUntil.After(time.Now()) {
				t.Errorf("asked about %+v", info)
			}
			return oncehttp.Rejected, nil
		}}
		sum := b.pass(l.handler())
		l.want(t, "reconcile A")
		if sum.Reconciled != 1 || b.wire() != 1 {
			t.Errorf("summary %+v, %d on the wire", sum, b.wire())
		}
	})
}

// Without anybody to tell, an operation that stays unknown is looked up now and then,
// and is no reason for a further pass; once there is somebody, it is told.
func TestReconcileWithoutUnknown(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.lost("A", "1")
		b.restart()
		l := &lookups{finds: finds(oncehttp.Unknown, nil)}
		alone := l.handler()
		alone.Unknown = nil
		for range 3 {
			if sum := b.pass(alone); !sum.Done() || sum.Unknown != 1 {
				t.Errorf("summary %+v", sum)
			}
			if sum := b.pass(alone); !sum.Done() || sum.Unknown != 1 || sum.NextDue.IsZero() { // it rests
				t.Errorf("summary while it rests %+v", sum)
			}
			l.want(t, "reconcile A")
			time.Sleep(time.Minute + time.Second)
		}
		b.pass(l.handler())
		l.want(t, "reconcile A", "unknown A")
	})
}

// While it is looked up, the operation is in nobody's hands: a caller who comes with
// its key is served, and what was found then is not written over that.
func TestReconcileDoesNotOverwriteAnAnswer(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.lost("A", "1")
		b.restart()
		l := &lookups{finds: func(info oncehttp.Info) (oncehttp.Outcome, error) {
			ctx, op := oncehttp.Start(t.Context(), oncehttp.Op{Key: "A"})
			if resp, err := b.client.Do(b.request(ctx, "1")); err != nil || op.Info().Outcome != oncehttp.Succeeded {
				t.Errorf("%v, %v", op.Info().Outcome, err)
			} else {
				resp.Body.Close()
			}
			if err := op.Ack(t.Context()); err != nil {
				t.Error(err)
			}
			return oncehttp.Rejected, nil
		}}
		b.pass(l.handler())
		l.want(t, "reconcile A")
		if info := b.known("A"); info.Outcome != oncehttp.Succeeded {
			t.Errorf("recorded as %v", info.Outcome)
		}
		b.wantEffects("1")
	})
}

// A look-up that kills the process does so a few times at most.
func TestReconcileThatKills(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.lost("A", "1")
		b.restart()
		deaths := 0
		l := &lookups{finds: func(oncehttp.Info) (oncehttp.Outcome, error) {
			deaths++ // from here on, nothing is written
			b.store.before = func(string, oncehttp.Record) error { return oncehttp.ErrStoreFailed }
			return oncehttp.Unknown, errors.New("dead")
		}}
		for range 20 {
			b.pass(l.handler())
			b.store.before = nil
			b.restart()
		}
		if deaths != 10 {
			t.Errorf("the process died %d times, want 10: five for each of two rules", deaths)
		}
		if info := b.known("A"); info.Outcome != oncehttp.Unknown {
			t.Errorf("recorded as %v", info.Outcome)
		}
	})
}
