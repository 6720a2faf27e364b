package oncehttp_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// One test for each promise, as small as it can be: breaking the promise in the
// code breaks the test. internal/mutants proves it.

// A desk is a client in a bubble of fake time, with its store and the API that
// it talks to.
type desk struct {
	t      *testing.T
	api    *oncehttptest.Server
	store  *oncehttptest.Store
	opts   oncehttp.Options
	client *oncehttp.Client
	clock  time.Duration       // the wall clock, against the bubble's
	ahead  atomic.Int64        // added to clock, for steps while the client reads it
	onWire func(*http.Request) // called before an attempt goes to the transport; nil: nothing

	mu    sync.Mutex
	begun int // attempts, as Options.Trace counts them

}

func atDesk(t *testing.T, opts oncehttp.Options, test func(t *testing.T, d *desk)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		d := &desk{t: t, api: oncehttptest.New(oncehttptest.Charges()), store: oncehttptest.NewStore(), opts: opts}
		d.opts.HTTPClient = &http.Client{Transport: tap{d, d.api.Transport()}}
		d.opts.Trace = &oncehttp.Trace{AttemptStart: func(oncehttp.AttemptInfo) {
			d.mu.Lock()
			defer d.mu.Unlock()
			d.begun++
		}}
		d.open()
		test(t, d)
		d.api.Close()
		d.client.Close()
	})
}

// tap lets a desk see what goes to the transport.
type tap struct {
	d    *desk
	base http.RoundTripper
}

func (t tap) RoundTrip(req *http.Request) (*http.Response, error) {
	if t.d.onWire != nil {
		t.d.onWire(req)
	}
	return t.base.RoundTrip(req)
}

func (d *desk) open() {
	d.t.Helper()
	opts := d.opts.WithClock(func() time.Time { return time.Now().Add(d.clock + time.Duration(d.ahead.Load())) })
	var err error
	if d.client, err = oncehttp.New(d.store, opts); err != nil {
		d.t.Fatal(err)
	}
}

// restart is the death of the process, and the next one.
func (d *desk) restart() {
	d.t.Helper()
	store := d.store.Crash()
	d.client.Close()
	d.store = store
	d.open()
}

func (d *desk) request(ctx context.Context, method, path, body string, header ...string) *http.Request {
	d.t.Helper()
	req, err := http.NewRequestWithContext(ctx, method, "http://api.test"+path, strings.NewReader(body))
	if err != nil {
		d.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	return req
}

// A told is what a caller was told.
type told struct {
	oncehttp.Info
	status int
	body   string
	err    error
	op     *oncehttp.Operation
}

// charge charges the order under a key of the same name, from Start.
func (d *desk) charge(ctx context.Context, order string, header ...string) told {
	d.t.Helper()
	ctx, op := oncehttp.Start(ctx, oncehttp.Op{Key: "key-" + order, Metadata: map[string]string{"order": order}})
	w := d.do(d.request(ctx, "POST", "/v1/charges", `{"order":"`+order+`"}`, header...))
	w.Info, w.op = op.Info(), op
	return w
}

func (d *desk) do(req *http.Request) (w told) {
	d.t.Helper()
	resp, err := d.client.Do(req)
	w.err = err
	if failed, ok := errors.AsType[*oncehttp.OperationError](err); ok {
		w.Outcome, w.Attempts = failed.Outcome, failed.Attempts
	}
	if err == nil {
		w.Info, _ = oncehttp.OperationFrom(resp)
		w.status = resp.StatusCode
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			d.t.Error(err)
		}
		w.body = string(b)
		resp.Body.Close()
	}
	return w
}

// leavePending lets the process die while the server is silent.
func (d *desk) leavePending(order string) {
	d.t.Helper()
	d.api.ScriptFor(oncehttptest.ByBody(order), oncehttptest.Stall(-1))
	var call sync.WaitGroup
	call.Go(func() { d.charge(d.t.Context(), order) })
	synctest.Wait()
	d.restart()
	call.Wait()
}

// A resumed is what one pass of Resume told its handler.
type resumed struct {
	settled []string // orders
	bodies  []string
	unknown []string // orders and reasons
	oncehttp.Summary
}

func (d *desk) resume() (r resumed) {
	d.t.Helper()
	var mu sync.Mutex
	sum, err := d.client.Resume(d.t.Context(), oncehttp.Handler{
		Settled: func(_ context.Context, info oncehttp.Info, resp *http.Response) error {
			b, err := io.ReadAll(resp.Body)
			mu.Lock()
			defer mu.Unlock()
			r.settled, r.bodies = append(r.settled, info.Metadata["order"]), append(r.bodies, string(b))
			return err
		},
		Unknown: func(_ context.Context, info oncehttp.Info) error {
			mu.Lock()
			defer mu.Unlock()
			r.unknown = append(r.unknown, info.Metadata["order"]+" "+info.Reason.String())
			return nil
		},
	})
	if err != nil {
		d.t.Error(err)
	}
	r.Summary = sum
	return r
}

// lookup returns the operation of an order, or false.
func (d *desk) lookup(order string) (oncehttp.Info, bool) {
	d.t.Helper()
	infos, err := d.client.Lookup(d.t.Context(), "key-"+order)
	if err != nil {
		d.t.Error(err)
	}
	if len(infos) == 0 {
		return oncehttp.Info{}, false
	}
	return infos[0], true
}

func (d *desk) wantWire(n int, when string) {
	d.t.Helper()
	if got := len(d.api.Attempts()); got != n {
		d.t.Errorf("%d requests on the wire %s, want %d", got, when, n)
		for _, a := range d.api.Attempts() {
			d.t.Logf("  %s %s %s key %q %s %v %d", a.Method, a.Host, a.Path, a.Key, a.Body, a.Action, a.Status)
		}
	}
}

func (d *desk) wantEffects(n int) {
	d.t.Helper()
	if got := len(d.api.Effects()); got != n {
		d.t.Errorf("%d effects, want %d", got, n)
	}
}

func (d *desk) wantOutcome(w told, want oncehttp.Outcome) {
	d.t.Helper()
	if w.Outcome != want {
		d.t.Errorf("told %v (%d, %v), want %v", w.Outcome, w.status, w.err, want)
	}
}

func TestOneKeyForAllAttempts(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		d.api.Script(oncehttptest.DropRequest(), oncehttptest.Status(503), oncehttptest.DropResponse())
		w := d.do(d.request(t.Context(), "POST", "/v1/charges", `{"order":"A"}`))
		d.wantOutcome(w, oncehttp.Succeeded)
		d.wantWire(4, "in all")
		for _, a := range d.api.Attempts() {
			if a.Key != w.Key || a.Key == "" || string(a.Body) != `{"order":"A"}` {
				t.Errorf("attempt with key %q and body %s, want %q and the order", a.Key, a.Body, w.Key)
			}
		}
		d.wantEffects(1)
	})
}

func TestTheSameKeyAfterARestart(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		d.leavePending("A")
		d.resume()
		d.wantWire(2, "after the restart")
		for _, a := range d.api.Attempts() {
			if a.Key != "key-A" || string(a.Body) != `{"order":"A"}` {
				t.Errorf("attempt with key %q and body %s", a.Key, a.Body)
			}
		}
		d.wantEffects(1)
	})
}

// net/http sends a request again by itself, with a second connection, if it can.
func TestEveryAttemptIsOurs(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		d.api.Script(oncehttptest.Fault{}, oncehttptest.DeadKeepAlive())
		d.charge(t.Context(), "A")
		d.wantOutcome(d.charge(t.Context(), "B"), oncehttp.Succeeded)
		d.wantWire(3, "in all")
		if d.begun != 3 {
			t.Errorf("%d attempts were made, and 3 were on the wire", d.begun)
		}
	})
}

func TestNoByteBeforeTheRecord(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		slow := func(op string, _ oncehttp.Record) {
			if op == "Begin" {
				time.Sleep(time.Second)
				d.wantWire(0, "while Begin is under way")
			}
		}
		d.store.Before, d.store.After = slow, slow
		d.onWire = func(*http.Request) {
			if rec := d.record("A"); rec.Epoch == 0 || len(rec.Request) == 0 {
				t.Errorf("to be sent with the record %+v", rec)
			}
		}
		d.charge(t.Context(), "A")
	})
}

func TestNothingIsSentWithoutARecord(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		d.store.Fail("Begin", 1, nil)
		w := d.charge(t.Context(), "A")
		d.wantOutcome(w, oncehttp.NotSent)
		if !errors.Is(w.err, oncehttp.ErrStoreFailed) {
			t.Errorf("error %v, want ErrStoreFailed", w.err)
		}
		d.wantWire(0, "without a record")
	})
}

func TestWhatWasBegunForNobodyIsUndone(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		ctx, cancel := context.WithCancel(t.Context())
		d.store.Before = func(op string, _ oncehttp.Record) {
			if op == "Begin" {
				cancel()
				time.Sleep(time.Second)
			}
		}
		d.wantOutcome(d.charge(ctx, "A"), oncehttp.NotSent)
		if info, ok := d.lookup("A"); ok {
			t.Errorf("a record was left: %+v", info)
		}
		d.wantWire(0, "of a request whose caller left")
	})
}

func TestAnswerThatWaitsForAckIsDurableWhenTold(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		d.wantOutcome(d.charge(t.Context(), "A"), oncehttp.Succeeded)
		d.restart()
		r := d.resume()
		if !slices.Equal(r.settled, []string{"A"}) || !strings.Contains(r.bodies[0], "ch_1") {
			t.Errorf("handed over: %q %q", r.settled, r.bodies)
		}
		d.wantWire(1, "for an answer that was stored")
	})
}

func TestUnknownIsDurableWhenTold(t *testing.T) {
	atDesk(t, oncehttp.Options{MaxAttempts: 2}, func(t *testing.T, d *desk) {
		d.api.Script(oncehttptest.DropResponse(), oncehttptest.DropResponse())
		d.wantOutcome(d.charge(t.Context(), "A"), oncehttp.Unknown)
		d.restart()
		d.resume()
		d.wantWire(2, "after the caller was told that it failed")
	})
}

func TestRejectionIsDurableWhenTold(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		d.api.Script(oncehttptest.Status(402))
		d.wantOutcome(d.do(d.request(t.Context(), "POST", "/v1/charges", `{"order":"A"}`)), oncehttp.Rejected)
		d.restart()
		d.resume()
		d.wantWire(1, "after the caller was told that it was rejected")
		d.wantEffects(0)
	})
}

func TestRejectionThatIsNotRecordedIsNotTold(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		d.api.Script(oncehttptest.Status(402))
		d.store.Fail("Save", 1, nil)
		w := d.charge(t.Context(), "A")
		d.wantOutcome(w, oncehttp.Unknown)
		if !w.NotRecorded {
			t.Error("not marked as not recorded")
		}
	})
}

func TestNotSentIsNeverSent(t *testing.T) {
	atDesk(t, oncehttp.Options{MaxAttempts: 2}, func(t *testing.T, d *desk) {
		d.api.Script(oncehttptest.DialError(nil), oncehttptest.DialError(nil))
		d.wantOutcome(d.charge(t.Context(), "A"), oncehttp.NotSent)
		if info, ok := d.lookup("A"); ok {
			t.Errorf("a record was left: %+v", info)
		}
		d.restart()
		d.resume()
		d.wantWire(0, "after the caller was told that nothing was sent")
	})
}

func TestNotSentNeedsEvidence(t *testing.T) {
	t.Run("no hooks", func(t *testing.T) {
		atDesk(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, d *desk) {
			d.api.Script(oncehttptest.NoHooks().With(oncehttptest.DialError(nil)))
			d.wantOutcome(d.charge(t.Context(), "A"), oncehttp.Unknown)
		})
	})
	t.Run("one attempt was sent", func(t *testing.T) {
		atDesk(t, oncehttp.Options{MaxAttempts: 2}, func(t *testing.T, d *desk) {
			d.api.Script(oncehttptest.DropResponse(), oncehttptest.DialError(nil))
			d.wantOutcome(d.charge(t.Context(), "A"), oncehttp.Unknown)
		})
	})
	t.Run("an earlier process sent it", func(t *testing.T) {
		atDesk(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, d *desk) {
			d.leavePending("A")
			d.api.Script(oncehttptest.DialError(nil))
			d.wantOutcome(d.charge(t.Context(), "A"), oncehttp.Unknown)
		})
	})
}

func TestUnknownIsNotResentByResume(t *testing.T) {
	atDesk(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, d *desk) {
		d.api.Script(oncehttptest.DropResponse())
		d.wantOutcome(d.charge(t.Context(), "A"), oncehttp.Unknown)
		d.resume()
		d.restart()
		var unknown []string
		for range 3 {
			unknown = append(unknown, d.resume().unknown...)
			time.Sleep(time.Hour)
		}
		d.wantWire(1, "without having been asked")
		if !slices.Equal(unknown, []string{"A gave up"}) {
			t.Errorf("the handler was told %q, want of A, once", unknown)
		}
	})
}

func TestUnknownIsSentAgainWhenAsked(t *testing.T) {
	atDesk(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, d *desk) {
		d.api.Script(oncehttptest.DropResponse())
		d.charge(t.Context(), "A")
		d.wantOutcome(d.charge(t.Context(), "A"), oncehttp.Succeeded)
		d.wantWire(2, "in all")
		d.wantEffects(1)
	})
}

func TestSucceededIsNotSentAgain(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		first := d.charge(t.Context(), "A")
		again := d.charge(t.Context(), "A")
		if again.body != first.body || !again.Replayed {
			t.Errorf("told %q, replayed %v; want %q, from the store", again.body, again.Replayed, first.body)
		}
		d.wantWire(1, "for a key that has succeeded")
	})
}

func TestClaimIsDurableBeforeTheResumedSend(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		d.leavePending("A")
		before := d.record("A")
		d.onWire = func(*http.Request) {
			if rec := d.record("A"); rec.Claims != before.Claims+1 || rec.Epoch != before.Epoch+1 {
				t.Errorf("on the wire with claims %d, epoch %d; before: %d, %d", rec.Claims, rec.Epoch, before.Claims, before.Epoch)
			}
		}
		d.resume()
		d.wantWire(2, "in all")
	})
}

// record returns what is durable of an order.
func (d *desk) record(order string) oncehttp.Record {
	d.t.Helper()
	ids, err := d.store.Find(context.Background(), "key-"+order)
	if err != nil || len(ids) != 1 {
		d.t.Errorf("records of %s: %v, %v", order, ids, err)
		return oncehttp.Record{}
	}
	rec, err := d.store.Get(context.Background(), ids[0])
	if err != nil {
		d.t.Error(err)
		return oncehttp.Record{}
	}
	return *rec
}

func TestPoisonIsNotSentForEver(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		d.leavePending("A")
		var unknown []string
		for n := 1; len(unknown) == 0; n++ {
			if n > 10 {
				t.Fatal("was sent ten times, and the process died ten times")
			}
			var next *oncehttptest.Store
			d.onWire = func(*http.Request) { next = d.store.Crash() }
			ctx, cancel := context.WithCancel(t.Context())
			_, err := d.client.Resume(ctx, oncehttp.Handler{
				Settled: func(context.Context, oncehttp.Info, *http.Response) error { return nil },
				Unknown: func(_ context.Context, info oncehttp.Info) error {
					unknown = append(unknown, info.Reason.String())
					return nil
				},
			})
			cancel()
			if next == nil && len(unknown) == 0 {
				t.Fatalf("neither sent nor unknown in pass %d, %v", n, err)
			}
			d.client.Close()
			if next == nil {
				next = d.store.Crash()
			}
			d.store = next
			d.open()
		}
		if !slices.Equal(unknown, []string{"poison"}) {
			t.Errorf("the handler was told %q, want poison", unknown)
		}
	})
}

// A handler that is the death of its process is not called for ever.
func TestPoisonedHandlerIsNotCalledForEver(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		d.charge(t.Context(), "A")
		d.restart()
		calls := 0
		var unknown []string
		for range 12 {
			var next *oncehttptest.Store
			d.client.Resume(t.Context(), oncehttp.Handler{
				Settled: func(context.Context, oncehttp.Info, *http.Response) error {
					calls++
					next = d.store.Crash()
					return nil
				},
				Unknown: func(_ context.Context, info oncehttp.Info) error {
					unknown = append(unknown, info.Reason.String())
					return nil
				},
			})
			d.client.Close()
			if next == nil {
				next = d.store.Crash()
			}
			d.store = next
			d.open()
		}
		if calls > 5 || !slices.Equal(unknown, []string{"poison"}) {
			t.Errorf("called %d times, and told of %q", calls, unknown)
		}
	})
}

// A pass over little work takes no longer than the work: its workers do not wait
// for their turns when nothing is left.
func TestAPassOfOneIsAsLongAsItsOperation(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		d.leavePending("A")
		start := time.Now()
		if r := d.resume(); len(r.settled) != 1 {
			t.Errorf("settled %q", r.settled)
		}
		if took := time.Since(start); took > 0 {
			t.Errorf("took %v of fake time, and the server answers at once", took)
		}
	})
}

func TestAckComesAfterTheHandler(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		d.charge(t.Context(), "A")
		d.restart()
		fail := errors.New("ledger is down")
		handed := 0
		for range 3 {
			_, err := d.client.Resume(t.Context(), oncehttp.Handler{Settled: func(context.Context, oncehttp.Info, *http.Response) error {
				handed++
				if d.record("A").Acked {
					t.Error("acknowledged while the handler ran")
				}
				err := fail
				fail = nil
				return err
			}})
			if err != nil {
				t.Error(err)
			}
			time.Sleep(time.Minute)
		}
		if handed != 2 {
			t.Errorf("handed over %d times, want twice: the handler failed once", handed)
		}
	})
}

func TestAnswerIsItsCallersUntilTheyHaveGone(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		ctx, cancel := context.WithCancel(t.Context())
		d.charge(ctx, "A")
		if r := d.resume(); len(r.settled) != 0 {
			t.Error("handed over while its caller was about to acknowledge it")
		}
		cancel()
		if r := d.resume(); len(r.settled) != 1 {
			t.Error("not handed over although its caller has gone")
		}
	})
}

func TestRefusalAtTheDoorSaysNothingOfEarlierAttempts(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		d.api.Script(oncehttptest.DropResponse(), oncehttptest.Unauthorized())
		w := d.charge(t.Context(), "A")
		d.wantOutcome(w, oncehttp.Unknown)
		if w.Reason != oncehttp.ReasonRefused || w.status != 401 {
			t.Errorf("told %v with status %d", w.Reason, w.status)
		}
		d.wantEffects(1)
	})
	t.Run("resumed", func(t *testing.T) {
		atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
			d.leavePending("A")
			d.api.Script(oncehttptest.Unauthorized())
			d.resume()
			if info, ok := d.lookup("A"); !ok || info.Outcome != oncehttp.Undecided {
				t.Errorf("is %v, want pending: nobody was told", info.Outcome)
			}
		})
	})
}

func TestFirstRefusalRejects(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		d.api.Script(oncehttptest.Unauthorized())
		d.wantOutcome(d.charge(t.Context(), "A"), oncehttp.Rejected)
		d.wantWire(1, "in all")
	})
}

func TestConflictWithOurOwnAttemptIsWaitedFor(t *testing.T) {
	atDesk(t, oncehttp.Options{AttemptTimeout: time.Second, BackoffBase: time.Second, MaxAttempts: 20}, func(t *testing.T, d *desk) {
		d.api.Script(oncehttptest.Slow(5 * time.Second))
		d.wantOutcome(d.charge(t.Context(), "A"), oncehttp.Succeeded)
		d.wantEffects(1)
	})
}

func TestStoredFailureIsNotRetried(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		d.api.Script(oncehttptest.Stored500())
		w := d.charge(t.Context(), "A")
		d.wantOutcome(w, oncehttp.Unknown)
		if w.Reason != oncehttp.ReasonStored {
			t.Errorf("told %v, want %v", w.Reason, oncehttp.ReasonStored)
		}
		d.wantWire(2, "of which the second showed that the failure is stored")
	})
}

func TestCutOffAnswerIsNoAnswer(t *testing.T) {
	for _, cut := range []oncehttptest.Fault{oncehttptest.CutResponse(9), oncehttptest.TruncateResponse(9)} {
		t.Run(cut.String(), func(t *testing.T) {
			atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
				d.api.Script(cut)
				w := d.charge(t.Context(), "A")
				if d.wantOutcome(w, oncehttp.Succeeded); !strings.HasSuffix(w.body, "}") {
					t.Errorf("told %q", w.body)
				}
				d.wantWire(2, "in all")
				d.wantEffects(1)
			})
		})
	}
}

func TestKeyIsBoundToItsRequest(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		d.charge(t.Context(), "A")
		for name, req := range map[string]*http.Request{
			"body":   d.request(t.Context(), "POST", "/v1/charges", `{"order":"B"}`),
			"URL":    d.request(t.Context(), "POST", "/v1/refunds", `{"order":"A"}`),
			"method": d.request(t.Context(), "PATCH", "/v1/charges", `{"order":"A"}`),
		} {
			req.Header.Set("Idempotency-Key", "key-A")
			if w := d.do(req); !errors.Is(w.err, oncehttp.ErrKeyReused) {
				t.Errorf("another %s: %v, want ErrKeyReused", name, w.err)
			}
		}
		d.wantWire(1, "under a key of another request")
	})
}

func TestTenantsNeverShareAnAnswer(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		a := d.charge(t.Context(), "A", "Authorization", "Bearer tenant-1")
		b := d.charge(t.Context(), "A", "Authorization", "Bearer tenant-2")
		if a.err != nil || !errors.Is(b.err, oncehttp.ErrScope) {
			t.Errorf("tenant 2 was told %d %q, %v, want ErrScope", b.status, b.body, b.err)
		}
		d.wantWire(1, "of two tenants with one key")
	})
}

func TestWhatIsSentIsWhatWasRecorded(t *testing.T) {
	for name, change := range map[string]func(*http.Request){
		"key":    func(r *http.Request) { r.Header.Set("Idempotency-Key", "another") },
		"body":   func(r *http.Request) { r.Body = io.NopCloser(strings.NewReader(`{"order":"B"}`)) },
		"URL":    func(r *http.Request) { r.URL.Path = "/v1/refunds" },
		"method": func(r *http.Request) { r.Method = "PUT" },
	} {
		t.Run(name, func(t *testing.T) {
			atDesk(t, oncehttp.Options{Authorize: func(_ context.Context, _ oncehttp.Info, r *http.Request) error {
				change(r)
				return nil
			}}, func(t *testing.T, d *desk) {
				if w := d.charge(t.Context(), "A"); !errors.Is(w.err, oncehttp.ErrMismatch) {
					t.Errorf("%v, want ErrMismatch", w.err)
				}
				d.wantWire(0, "with another "+name+" than recorded")
			})
		})
	}
}

func TestCredentialsAreNotStored(t *testing.T) {
	atDesk(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, d *desk) {
		d.api.Script(oncehttptest.DropResponse())
		d.charge(t.Context(), "A", "Authorization", "Bearer hush-hush", "X-Api-Key", "hush-hush")
		if rec := d.record("A"); bytes.Contains(fmt.Append(nil, string(rec.Request), string(rec.Meta), rec.Scope), []byte("hush")) {
			t.Error("the store has the credentials")
		}
	})
}

func TestNothingIsResumedWithoutCredentials(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		d.api.Script(oncehttptest.Stall(-1))
		var call sync.WaitGroup
		call.Go(func() { d.charge(t.Context(), "A", "Authorization", "Bearer t") })
		synctest.Wait()
		d.restart()
		call.Wait()
		r := d.resume()
		d.wantWire(1, "without the operation's credentials")
		if len(r.Ended) != 1 {
			t.Errorf("the summary does not say so: %+v", r.Summary)
		}
	})
}

func TestRetryAfterIsAMinimum(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		d.api.Script(oncehttptest.Status(503, "Retry-After", "17"))
		start := time.Now()
		d.wantOutcome(d.charge(t.Context(), "A"), oncehttp.Succeeded)
		if took := time.Since(start); took < 17*time.Second {
			t.Errorf("came back after %v, asked for 17 s", took)
		}
	})
}

// The pause that a refusal begins may last longer than the refusal says.
func TestARetryThatThePauseMakesTooLateIsNotWaitedFor(t *testing.T) {
	latest := func(n int64) int64 { return n - 1 }
	atDesk(t, *oncehttp.Options{}.WithRand(latest), func(t *testing.T, d *desk) {
		d.api.Script(oncehttptest.Status(503, "Retry-After", "10"))
		ctx, cancel := context.WithTimeout(t.Context(), 12*time.Second)
		defer cancel()
		start := time.Now()
		if w := d.charge(ctx, "A"); w.status != 503 || w.Outcome != oncehttp.Unknown {
			t.Errorf("told %d, %v, %v", w.status, w.Outcome, w.err)
		}
		if took := time.Since(start); took != 0 {
			t.Errorf("told after %v", took)
		}
		d.wantWire(1, "in the pause")
	})
}

func TestALongRetryAfterIsRemembered(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		d.api.Script(oncehttptest.Status(503, "Retry-After", "3600"))
		if w := d.charge(t.Context(), "A"); w.status != 503 || w.Outcome != oncehttp.Unknown {
			t.Errorf("told %d, %v", w.status, w.Outcome)
		}
		time.Sleep(10 * time.Minute) // longer than any pause of the host
		if w := d.charge(t.Context(), "A"); !errors.Is(w.err, oncehttp.ErrWaitTooLong) {
			t.Errorf("told %v, want ErrWaitTooLong", w.err)
		}
		d.wantWire(1, "before the time the server asked for")
		time.Sleep(time.Hour)
		d.wantOutcome(d.charge(t.Context(), "A"), oncehttp.Succeeded)
	})
}

func TestRetriesAreBoundedInAnOutage(t *testing.T) {
	atDesk(t, oncehttp.Options{Breaker: &oncehttp.Breaker{Disabled: true}}, func(t *testing.T, d *desk) {
		d.api.FaultFunc(func(oncehttptest.Attempt) oncehttptest.Fault { return oncehttptest.Status(503) })
		const n = 300
		start := time.Now()
		var calls sync.WaitGroup
		for i := range n {
			calls.Go(func() { d.charge(t.Context(), fmt.Sprint(i)) })
		}
		calls.Wait()
		// A tenth of the first attempts, 20 at once, 10 each second.
		most := n + n/10 + 20 + 10*int(time.Since(start)/time.Second+1)
		if got := len(d.api.Attempts()); got > most {
			t.Errorf("%d requests for %d operations, want at most %d", got, n, most)
		}
	})
}

func TestBreakerOpensInAnOutage(t *testing.T) {
	atDesk(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, d *desk) {
		d.trip()
		before := len(d.api.Attempts())
		w := d.charge(t.Context(), "late")
		if d.wantOutcome(w, oncehttp.NotSent); !errors.Is(w.err, oncehttp.ErrCircuitOpen) {
			t.Errorf("told %v", w.err)
		}
		d.wantWire(before, "while the breaker was open")
	})
}

// trip opens the breaker.
func (d *desk) trip() {
	d.api.FaultFunc(func(oncehttptest.Attempt) oncehttptest.Fault { return oncehttptest.Status(503) })
	for i := range 20 {
		d.charge(d.t.Context(), fmt.Sprint("trip-", i))
	}
	d.api.FaultFunc(nil)
}

func TestAbandonedProbeDoesNotBlockTheHost(t *testing.T) {
	atDesk(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, d *desk) {
		d.trip()
		time.Sleep(31 * time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		d.api.Script(oncehttptest.Stall(-1))
		d.wantOutcome(d.charge(ctx, "probe"), oncehttp.Unknown)
		d.wantOutcome(d.charge(t.Context(), "A"), oncehttp.Succeeded)
	})
}

func TestJoinersDoNotDependOnTheLeader(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		d.api.Script(oncehttptest.Stall(5 * time.Second))
		leaderCtx, leave := context.WithCancel(t.Context())
		var leader, joiner told
		var calls sync.WaitGroup
		calls.Go(func() { leader = d.charge(leaderCtx, "A") })
		synctest.Wait()
		calls.Go(func() { joiner = d.charge(t.Context(), "A") })
		synctest.Wait()
		leave()
		calls.Wait()
		d.wantOutcome(leader, oncehttp.Unknown)
		d.wantOutcome(joiner, oncehttp.Succeeded)
		d.wantWire(1, "for two callers of one key")
	})
}

// shortWindow is a provider that forgets keys after 10 min: an attempt may start
// for 8 min 30 s.
func shortWindow() oncehttp.Options {
	return oncehttp.Options{Providers: []oncehttp.Provider{{Name: "short", Hosts: []string{"api.test"}, Window: 10 * time.Minute}}}
}

func TestNothingSentAfterWindow(t *testing.T) {
	t.Run("retry", func(t *testing.T) {
		opts := shortWindow()
		opts.MaxAttempts = 30
		atDesk(t, opts, func(t *testing.T, d *desk) {
			d.api.FaultFunc(func(oncehttptest.Attempt) oncehttptest.Fault { return oncehttptest.Status(503, "Retry-After", "55") })
			start := time.Now()
			d.charge(t.Context(), "A")
			for _, a := range d.api.Attempts() {
				if late := a.Time.Sub(start); late > 8*time.Minute+30*time.Second {
					t.Errorf("an attempt after %v", late)
				}
			}
			if n := len(d.api.Attempts()); n < 5 {
				t.Errorf("only %d attempts", n)
			}
		})
	})
	t.Run("resume", func(t *testing.T) {
		atDesk(t, shortWindow(), func(t *testing.T, d *desk) {
			d.leavePending("A")
			time.Sleep(9 * time.Minute)
			r := d.resume()
			d.wantWire(1, "after the window")
			if !slices.Equal(r.unknown, []string{"A window closed"}) {
				t.Errorf("the handler was told %q", r.unknown)
			}
		})
	})
	t.Run("same key", func(t *testing.T) {
		opts := shortWindow()
		opts.MaxAttempts = 1
		atDesk(t, opts, func(t *testing.T, d *desk) {
			d.api.Script(oncehttptest.DropResponse())
			d.charge(t.Context(), "A")
			time.Sleep(9 * time.Minute)
			w := d.charge(t.Context(), "A")
			if d.wantOutcome(w, oncehttp.Unknown); !errors.Is(w.err, oncehttp.ErrWindowClosed) {
				t.Errorf("told %v", w.err)
			}
			d.wantWire(1, "after the window")
		})
	})
	t.Run("redrive", func(t *testing.T) {
		opts := shortWindow()
		opts.MaxAttempts = 1
		atDesk(t, opts, func(t *testing.T, d *desk) {
			d.api.Script(oncehttptest.DropResponse())
			w := d.charge(t.Context(), "A")
			time.Sleep(9 * time.Minute)
			if _, err := d.client.Redrive(t.Context(), w.ID); !errors.Is(err, oncehttp.ErrWindowClosed) {
				t.Errorf("told %v", err)
			}
			d.wantWire(1, "after the window")
		})
	})
	t.Run("slow dial", func(t *testing.T) {
		opts := shortWindow()
		opts.Providers[0].AttemptTimeout, opts.MaxAttempts = 4*time.Minute, 2 // resent for 5 min
		atDesk(t, opts, func(t *testing.T, d *desk) {
			d.api.Script(oncehttptest.DropResponse())
			d.onWire = func(*http.Request) {
				if len(d.api.Attempts()) == 1 {
					d.clock = 5*time.Minute + time.Second // while the connection is made
				}
			}
			d.wantOutcome(d.charge(t.Context(), "A"), oncehttp.Unknown)
			d.wantWire(1, "on a connection that was there after the window")
		})
	})
	t.Run("rate limit, transport without hooks", func(t *testing.T) {
		opts := shortWindow()
		opts.MaxAttempts, opts.RateLimit, opts.Burst = 2, 0.001, 1
		atDesk(t, opts, func(t *testing.T, d *desk) {
			d.api.NoHooks = true
			d.api.Script(oncehttptest.DropResponse())
			d.wantOutcome(d.charge(t.Context(), "A"), oncehttp.Unknown)
			d.wantWire(1, "after a wait that was longer than the window")
		})
	})
}

func TestClockStepDoesNotReopenTheWindow(t *testing.T) {
	atDesk(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, d *desk) {
		d.api.Script(oncehttptest.DropResponse())
		d.charge(t.Context(), "A")
		d.clock = 24 * time.Hour
		if w := d.charge(t.Context(), "A"); !errors.Is(w.err, oncehttp.ErrWindowClosed) {
			t.Errorf("told %v", w.err)
		}
		d.clock = time.Hour
		if w := d.charge(t.Context(), "A"); !errors.Is(w.err, oncehttp.ErrWindowClosed) {
			t.Errorf("after the clock went back, told %v", w.err)
		}
		d.wantWire(1, "after the window")
	})
	t.Run("across a restart", func(t *testing.T) {
		atDesk(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, d *desk) {
			d.leavePending("A")
			d.clock = -2 * time.Hour
			d.restart()
			if r := d.resume(); !slices.Equal(r.unknown, []string{"A clock went back"}) {
				t.Errorf("the handler was told %q", r.unknown)
			}
			if w := d.charge(t.Context(), "A"); !errors.Is(w.err, oncehttp.ErrWindowClosed) {
				t.Errorf("told %v", w.err)
			}
			d.wantWire(1, "after the clock went back")
		})
	})
}

func TestKeyStaysWithItsOrigin(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		d.api.Script(oncehttptest.Redirect(307, "http://other.test/v1/charges"))
		if w := d.charge(t.Context(), "A"); w.status != 307 {
			t.Errorf("told %d, %v, want the redirect", w.status, w.err)
		}
		d.wantWire(1, "in all")
	})
	t.Run("same origin", func(t *testing.T) {
		atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
			d.api.Script(oncehttptest.Redirect(307, "/v2/charges"))
			d.wantOutcome(d.charge(t.Context(), "A"), oncehttp.Succeeded)
			for _, a := range d.api.Attempts() {
				if a.Method != "POST" || a.Key != "key-A" {
					t.Errorf("%s with key %q", a.Method, a.Key)
				}
			}
			d.wantWire(2, "in all")
		})
	})
}

func TestOperationNeverBecomesAGet(t *testing.T) {
	for _, status := range []int{301, 302} {
		atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
			d.api.Script(oncehttptest.Redirect(status, "/v1/charges"))
			if w := d.charge(t.Context(), "A"); w.status != status || w.Outcome == oncehttp.Succeeded {
				t.Errorf("told %d, %v, want the redirect", w.status, w.Outcome)
			}
			d.wantWire(1, "in all")
		})
	}
}

func TestTokenRequestDoesNotRunUnderTheOperation(t *testing.T) {
	var d *desk
	atDesk(t, oncehttp.Options{Authorize: func(ctx context.Context, info oncehttp.Info, req *http.Request) error {
		if info.Key != "key-A" {
			return nil
		}
		w := d.do(d.request(ctx, "POST", "/oauth/token", `{"order":"token"}`))
		return w.err
	}}, func(t *testing.T, desk *desk) {
		d = desk
		d.wantOutcome(d.charge(t.Context(), "A"), oncehttp.Succeeded)
		for _, a := range d.api.Attempts() {
			if got := a.Key == "key-A"; got != (a.Path == "/v1/charges") {
				t.Errorf("%s was sent with key %q", a.Path, a.Key)
			}
		}
		d.wantWire(2, "in all")
	})
}

func TestUnkeyedPostIsNotRepeated(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		d.api.Script(oncehttptest.DropResponse())
		if w := d.do(d.request(oncehttp.WithoutKey(t.Context()), "POST", "/v1/charges", `{"order":"A"}`)); w.err == nil {
			t.Errorf("told %d", w.status)
		}
		d.wantWire(1, "of a POST without a key")
		d.wantEffects(1)
	})
}

func TestShutdownLeavesStartedOperationsPending(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		d.api.Script(oncehttptest.Status(503, "Retry-After", "30"))
		var call sync.WaitGroup
		var w told
		call.Go(func() { w = d.charge(t.Context(), "A") })
		time.Sleep(time.Second)
		if err := d.client.Shutdown(t.Context()); err != nil {
			t.Error(err)
		}
		call.Wait()
		if d.wantOutcome(w, oncehttp.Undecided); !errors.Is(w.err, oncehttp.ErrClosed) {
			t.Errorf("told %v", w.err)
		}
		d.restart()
		time.Sleep(time.Minute)
		if r := d.resume(); !slices.Equal(r.settled, []string{"A"}) {
			t.Errorf("resumed %q", r.settled)
		}
		d.wantEffects(1)
	})
}

// The success of a plain Do is durable soon after it was told. If it is lost, the
// operation is asked for again, and the server replays.
func TestLostSuccessIsReplayedNotRepeated(t *testing.T) {
	atDesk(t, oncehttp.Options{}, func(t *testing.T, d *desk) {
		w := d.do(d.request(t.Context(), "POST", "/v1/charges", `{"order":"A"}`))
		d.wantOutcome(w, oncehttp.Succeeded)
		d.restart()
		if r := d.resume(); len(r.bodies) != 1 || r.bodies[0] != w.body {
			t.Errorf("handed over %q, want %q", r.bodies, w.body)
		}
		d.wantEffects(1)
	})
}

// A record that is found under another key than its own would let its own be sent
// anew.
func TestDamagedIdentityIsNoticed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "once.db")
	store, err := oncehttp.OpenBolt(path)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 9 {
		rec := oncehttp.Record{ID: oncehttp.ID{Key: fmt.Sprint("order-", i), Origin: "https://api.example.com"}, Epoch: 1, Owner: "owner"}
		if _, err := store.Begin(t.Context(), rec); err != nil {
			t.Fatal(err)
		}
		if rec.Outcome = oncehttp.Succeeded; i%2 == 0 {
			if err := store.Ack(t.Context(), rec); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 9 {
		file := bytes.Clone(good)
		identity := fmt.Appendf(nil, "order-%d\x00", i)
		for at := bytes.Index(file, identity); at >= 0; at = bytes.Index(file, identity) {
			file[at+len("order-")-1] ^= 1 // still in order
		}
		if err := os.WriteFile(path, file, 0o600); err != nil {
			t.Fatal(err)
		}
		if store, err := oncehttp.OpenBolt(path); !errors.Is(err, oncehttp.ErrDamaged) {
			t.Errorf("OpenBolt with a damaged identity, of order-%d: %v, want ErrDamaged", i, err)
			store.Close()
		}
	}
}
