package oncehttp_test

import (
	"context"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// What the documents say, where no other test does. Their code runs here, too.

func (b *bench) till() *till {
	return &till{
		client: b.client, log: log.New(io.Discard, "", 0),
		record: func(context.Context, string, oncehttp.Outcome, *http.Response) error { return nil },
	}
}

// operate calls the operators' page and returns what it says.
func (b *bench) operate(method, path string) string {
	w := httptest.NewRecorder()
	admin(b.client).ServeHTTP(w, httptest.NewRequestWithContext(b.t.Context(), method, path, nil))
	return w.Body.String()
}

func (b *bench) wantOpen(pending, unknown, unacknowledged int) {
	b.t.Helper()
	s, err := b.client.Stats(b.t.Context())
	if err != nil || s.Counts != (oncehttp.Counts{Pending: pending, Unknown: unknown, Unacknowledged: unacknowledged}) {
		b.t.Errorf("open: %+v, %v", s.Counts, err)
	}
}

func TestDocsOperatorsPage(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.lost("k1", "1")
		b.lost("k2", "2")
		b.lost("k3", "3")
		b.lost("k4", "4")
		if page := b.operate("GET", "/operations"); strings.Count(page, "unknown gave up") != 4 {
			t.Errorf("lists %s", page)
		}
		for _, path := range []string{"k1/redrive", "k2/succeeded", "k3/rejected", "k4/forget"} {
			if page := b.operate("POST", "/operations/"+path); page != "error: <nil>\n" {
				t.Errorf("%s: %s", path, page)
			}
		}
		if page := b.operate("POST", "/operations/k5/redrive"); !strings.Contains(page, "0 operations") {
			t.Errorf("of an unknown key: %s", page)
		}
		// The answer of an operation of Start goes on to a handler.
		b.wantOpen(0, 0, 1)
		if orders, _ := b.resume(); !slices.Equal(orders, []string{"1"}) {
			t.Errorf("handed over %v", orders)
		}
		b.wantOpen(0, 0, 0)
		shop := b.till()
		if id, err := shop.lookup(t.Context(), "k2"); err != nil || id.Key != "k2" {
			t.Errorf("looked up %v, %v", id, err)
		}
	})
}

func TestDocsRedriveOfAPlainRequestIsItsCallers(t *testing.T) {
	inBubble(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.DropResponse())
		b.client.Do(b.request(t.Context(), "1"))
		for info := range b.client.Operations(t.Context(), oncehttp.Filter{}) {
			if err := b.till().redrive(t.Context(), info.ID); err != nil {
				t.Error(err)
			}
		}
		time.Sleep(time.Second) // until the success, which nobody waits for, is written
		b.wantOpen(0, 0, 0)
	})
}

func TestDocsStoredFailureNeedsANewKey(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Stored500())
		info, _ := b.charge(t.Context(), "k", "1")
		if info.Reason != oncehttp.ReasonStored {
			t.Errorf("%v", info.Reason)
		}
		resp, err := b.client.Redrive(t.Context(), info.ID)
		if again, _ := oncehttp.OperationFrom(resp); err != nil || again.Reason != oncehttp.ReasonStored {
			t.Errorf("redriven: %+v, %v", again, err)
		}
		if err := b.client.Resolve(t.Context(), info.ID, oncehttp.Rejected); err != nil {
			t.Error(err)
		}
		if again, _ := b.charge(t.Context(), "k", "1"); again.Reason != oncehttp.ReasonStored {
			t.Errorf("the same key after it was resolved: %+v", again)
		}
		b.wantEffects("1")
	})
}

func TestDocsAfterTheWindowOnlyADecisionHelps(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		id := b.lost("k", "1")
		wire := b.wire()
		time.Sleep(24 * time.Hour)
		if _, err := b.client.Redrive(t.Context(), id); !errors.Is(err, oncehttp.ErrWindowClosed) {
			t.Errorf("Redrive: %v", err)
		}
		b.resume()
		b.wantOpen(0, 1, 0)
		time.Sleep(30 * 24 * time.Hour)
		b.wantOpen(0, 1, 0)
		if b.wire() != wire {
			t.Error("sent")
		}
		if err := b.client.Resolve(t.Context(), id, oncehttp.Rejected); err != nil {
			t.Error(err)
		}
		start := time.Now()
		info, err := b.charge(t.Context(), "k", "1")
		if err != nil || info.Outcome != oncehttp.Succeeded || info.FirstSent.Before(start.Truncate(time.Microsecond)) {
			t.Errorf("the same key after it was resolved: %+v, %v", info, err)
		}
	})
}

func TestDocsUnknownHandler(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		told := 0
		pass := func() {
			_, err := b.client.Resume(t.Context(), oncehttp.Handler{
				Settled: func(context.Context, oncehttp.Info, *http.Response) error { return nil },
				Unknown: func(context.Context, oncehttp.Info) error { told++; return nil },
			})
			if err != nil {
				t.Error(err)
			}
		}
		wantTold := func(when string, want int) {
			t.Helper()
			if pass(); told != want {
				t.Errorf("%s: told %d times, want %d", when, told, want)
			}
		}
		b.lost("k", "1")
		wantTold("in the process whose caller was told", 0)
		time.Sleep(25 * time.Hour)
		wantTold("there, after the window", 0)
		b.restart()
		wantTold("in the next", 1)
		wantTold("there, again", 1)
	})
}

func TestDocsAskAgain(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.lost("k", "1")
		h := askAgain()
		h.Settled = func(context.Context, oncehttp.Info, *http.Response) error { return nil }
		if sum, err := b.client.Resume(t.Context(), h); err != nil || sum.Settled != 1 {
			t.Errorf("%+v, %v", sum, err)
		}
		b.server.Script(oncehttptest.Stored500())
		b.charge(t.Context(), "k2", "2")
		wire := b.wire()
		if sum, err := b.client.Resume(t.Context(), h); err != nil || b.wire() != wire {
			t.Errorf("%+v, %v", sum, err)
		}
		b.wantEffects("1", "2")
	})
}

func TestDocsAlerts(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		want := func(want ...string) {
			t.Helper()
			got := alerts(t.Context(), b.client, time.Now())
			for i := range got {
				got[i], _, _ = strings.Cut(got[i], ":")
			}
			if !slices.Equal(got, want) {
				t.Errorf("alerts %v, want %v", got, want)
			}
		}
		want()
		b.lost("k", "1")
		want("ticket")
		time.Sleep(18 * time.Hour)
		want("page", "ticket")
		time.Sleep(12 * time.Hour)
		want("ticket")
		b.pending("k2", "2")
		want("page", "ticket")
	})
}

// caller is an SDK that refuses orders without a number.
type caller struct{ b *bench }

func (c caller) Charge(ctx context.Context, order string) (string, error) {
	if order == "" {
		return "", errors.New("no order")
	}
	resp, err := c.b.client.StandardClient().Do(c.b.request(ctx, order))
	if err != nil {
		return "", errors.New("some text") // many do not wrap
	}
	defer resp.Body.Close()
	return "id", nil
}

func TestDocsThroughAnSDK(t *testing.T) {
	inBubble(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, b *bench) {
		shop := b.till()
		if err := shop.throughSDK(t.Context(), caller{b}, "1"); err != nil {
			t.Error(err)
		}
		if err := shop.throughSDK(t.Context(), caller{b}, ""); err == nil || err.Error() != "no order" {
			t.Errorf("refused by the SDK: %v", err)
		}
		b.server.Script(oncehttptest.DropResponse())
		if err := shop.throughSDK(t.Context(), caller{b}, "2"); err == nil || !strings.Contains(err.Error(), "order 2 is unknown (gave up)") {
			t.Errorf("without answer: %v", err)
		}
	})
}

func TestDocsUsedUpAttemptsAreNoError(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Status(503), oncehttptest.Status(503), oncehttptest.Status(503), oncehttptest.Status(503))
		resp, err := b.client.Do(b.request(t.Context(), "1"))
		if err != nil || resp.StatusCode != 503 {
			t.Fatalf("%v, %v", resp, err)
		}
		if err := b.till().usedUp(resp); err == nil || !strings.Contains(err.Error(), "gave up (all attempts made)") {
			t.Errorf("told %v", err)
		}
	})
}

func TestDocsTimeoutOfTheOuterClient(t *testing.T) {
	for _, inner := range []bool{true, false} {
		opts := oncehttp.Options{}
		inBubble(t, opts, func(t *testing.T, b *bench) {
			if inner {
				b.close()
				b.opts.HTTPClient.Timeout = time.Second
				b.open()
			}
			b.server.Script(oncehttptest.Stall(-1))
			std := b.client.StandardClient()
			if !inner {
				std.Timeout = time.Second
			}
			ctx, op := oncehttp.Start(t.Context(), oncehttp.Op{Key: "k"})
			_, err := std.Do(b.request(ctx, "1"))
			u, _ := errors.AsType[*url.Error](err)
			_, told := errors.AsType[*oncehttp.OperationError](err) // of the outer one, net/http may have lost it
			if inner && !told || u == nil || !u.Timeout() {
				t.Errorf("inner %v: %v", inner, err)
			}
			if op.Info().Outcome != oncehttp.Unknown {
				t.Errorf("inner %v: %+v", inner, op.Info())
			}
		})
	}
}

func TestDocsTheBrowserGoesAway(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		b.server.Script(oncehttptest.Hold(10 * time.Second))
		gone, leave := context.WithTimeout(t.Context(), time.Second)
		defer leave()
		r := httptest.NewRequestWithContext(gone, "POST", "/orders/1/pay", nil)
		r.SetPathValue("order", "1")
		w := httptest.NewRecorder()
		pay(b.client).ServeHTTP(w, r)
		if w.Code != http.StatusOK {
			t.Errorf("%d %s", w.Code, w.Body)
		}
		b.wantEffects("1")
	})
}

func TestDocsRotatedCredentials(t *testing.T) {
	secret := "old"
	opts := oncehttp.Options{Authorize: tenantOptions(func(string) (string, error) { return secret, nil }).Authorize}
	inBubble(t, opts, func(t *testing.T, b *bench) {
		derived := b.lost("k", "1", "Authorization", "Bearer old")
		send := func() (oncehttp.Info, error) {
			ctx, op := b.till().forTenant(t.Context(), "t", "2")
			_, err := b.client.Do(b.request(ctx, "2", "Authorization", "Bearer "+secret))
			return op.Info(), err
		}
		for range 4 {
			b.server.Script(oncehttptest.DropRequest())
		}
		if info, _ := send(); info.Outcome != oncehttp.Unknown {
			t.Errorf("%+v", info)
		}
		secret = "new"
		if info, err := send(); err != nil || info.Outcome != oncehttp.Succeeded || info.Attempts != 5 {
			t.Errorf("with a stated scope: %+v, %v", info, err)
		}
		if _, err := b.send(t.Context(), "k", "1", "Authorization", "Bearer new"); !errors.Is(err, oncehttp.ErrScope) {
			t.Errorf("with a derived scope: %v", err)
		}
		if _, err := b.client.Redrive(t.Context(), derived); err != nil {
			t.Errorf("redriven: %v", err)
		}
	})
}

func TestDocsSealingKeysAreRotated(t *testing.T) {
	old, new := make([]byte, 32), []byte(strings.Repeat("n", 32))
	inBubble(t, oncehttp.Options{SealingKeys: [][]byte{old}}, func(t *testing.T, b *bench) {
		b.pending("k", "1")
		b.opts.SealingKeys = [][]byte{new}
		b.restart()
		if _, sum := b.resume(); sum.Failed != 1 {
			t.Errorf("without the old key: %+v", sum)
		}
		b.opts.SealingKeys = sealingOptions(new, old).SealingKeys
		b.restart()
		if orders, sum := b.resume(); len(orders) != 1 {
			t.Errorf("with both: %v, %+v", orders, sum)
		}
	})
}

func TestDocsGracefulEnd(t *testing.T) {
	server := oncehttptest.New(oncehttptest.Charges())
	defer server.Close()
	store := oncehttptest.NewStore()
	client, err := oncehttp.New(store, &oncehttp.Options{HTTPClient: &http.Client{Transport: server.Transport()}})
	if err != nil {
		t.Fatal(err)
	}
	server.Script(oncehttptest.Stall(-1))
	ctx, sigterm := context.WithCancel(t.Context())
	told := make(chan oncehttp.Outcome)
	go func() {
		ctx, op := oncehttp.Start(t.Context(), oncehttp.Op{})
		req, _ := http.NewRequestWithContext(oncehttp.WithTrace(ctx, &oncehttp.Trace{AttemptStart: func(oncehttp.AttemptInfo) { sigterm() }}),
			"POST", host+"/v1/charges", strings.NewReader("order=1"))
		client.Do(req)
		told <- op.Info().Outcome
	}()
	start := time.Now()
	err = serve(ctx, &http.Server{Addr: "127.0.0.1:0"}, client, oncehttp.Handler{
		Settled: func(context.Context, oncehttp.Info, *http.Response) error { return nil },
	}, 100*time.Millisecond)
	if outcome := <-told; outcome != oncehttp.Undecided || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, %v", outcome, err)
	}
	if d := time.Since(start); d > 10*time.Second { // the attempt alone would take 30 s
		t.Errorf("took %v", d)
	}
}

func TestDocsWaitForAPredecessor(t *testing.T) {
	path, remove := tempFile()
	defer remove()
	first, err := oncehttp.Open(path, nil)
	if err != nil {
		t.Fatal(err)
	}
	ended, stop := context.WithCancel(t.Context())
	stop()
	if _, err := open(ended, path, nil); !errors.Is(err, oncehttp.ErrStoreLocked) {
		t.Errorf("%v, want ErrStoreLocked", err)
	}
	go first.Close()
	second, err := open(t.Context(), path, nil)
	if err != nil {
		t.Fatal(err)
	}
	second.Close()
}

func TestDocsCharge(t *testing.T) {
	inBubble(t, oncehttp.Options{MaxAttempts: 1}, func(t *testing.T, b *bench) {
		shop := b.till()
		if err := shop.charge(t.Context(), order{"1"}); err != nil {
			t.Error(err)
		}
		b.wantOpen(0, 0, 0)
		b.server.Script(oncehttptest.DropResponse())
		if err := shop.charge(t.Context(), order{"2"}); err == nil {
			t.Error("no error")
		}
		shop.why(errors.New("other"))
		if err := shop.list(t.Context()); err != nil {
			t.Error(err)
		}
		id, err := shop.lookup(t.Context(), oncehttp.KeyFor("order", "2"))
		if err == nil {
			err = shop.resolve(t.Context(), id)
		}
		if err != nil {
			t.Error(err)
		}
		req := b.request(t.Context(), "3")
		for range 2 {
			req.Body = io.NopCloser(strings.NewReader("order=3"))
			if _, err := shop.job(t.Context(), "3", req); err != nil {
				t.Error(err)
			}
		}
		b.wantEffects("1", "2", "3")
	})
}

var _ = []any{(*till).finish, (*till).run}

// The look-up of the page tells what it finds, and nothing while it may be too early.
func TestDocsLookUp(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		s := b.till()
		var payment string
		var down error
		var recorded []string
		s.paymentOf = func(context.Context, string) (string, error) { return payment, down }
		s.paid = func(_ context.Context, order, id string) error {
			recorded = append(recorded, order+" paid as "+id)
			return nil
		}
		s.failed = func(_ context.Context, order string) error {
			recorded = append(recorded, order+" failed")
			return nil
		}
		look := func(order string) oncehttp.Outcome {
			o, _ := s.lookUp().Reconcile(t.Context(), b.known(order))
			return o
		}
		b.lost("1", "1")
		b.lost("2", "2")
		if o := look("1"); o != oncehttp.Unknown {
			t.Errorf("before the window's end: %v", o)
		}
		payment = "py_1"
		if o := look("1"); o != oncehttp.Succeeded {
			t.Errorf("found: %v", o)
		}
		time.Sleep(25 * time.Hour)
		payment, down = "", io.ErrUnexpectedEOF
		if o := look("2"); o != oncehttp.Unknown {
			t.Errorf("provider down: %v", o)
		}
		if down = nil; look("2") != oncehttp.Rejected {
			t.Error("after the window's end it is not rejected")
		}
		if want := []string{"1 paid as py_1", "2 failed"}; !slices.Equal(recorded, want) {
			t.Errorf("recorded %q, want %q", recorded, want)
		}
	})
}
