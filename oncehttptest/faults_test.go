package oncehttptest_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/oncehttp/oncehttp/oncehttptest"
)

func isReset(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.EPIPE)
}

// TestFaults sends one broken attempt, then one without a fault.
func TestFaults(t *testing.T) {
	const full = "run 1 \x00\xff"
	const d = 30 * time.Millisecond
	code := func(want int) func(reply) bool { return func(r reply) bool { return r.err == nil && r.code == want } }
	broken := func(r reply) bool { return isReset(r.err) }
	whole := func(r reply) bool { return r.code == 200 && r.err == nil && r.body == full }
	ran, dropped, refused := oncehttptest.Executed, oncehttptest.Dropped, oncehttptest.Refused
	for _, c := range []struct {
		fault   oncehttptest.Fault
		ok      func(reply) bool
		effects int
		action  oncehttptest.Action
	}{
		{oncehttptest.Fault{}, whole, 1, ran},
		{oncehttptest.DropRequest(), broken, 0, dropped},
		{oncehttptest.DropRequestAfter(2), broken, 0, dropped},
		{oncehttptest.DropRequestAfter(-1), broken, 0, dropped},
		{oncehttptest.DropResponse(), broken, 1, ran},
		{oncehttptest.TruncateResponse(3), func(r reply) bool { return r.body == "run" && errors.Is(r.err, io.ErrUnexpectedEOF) }, 1, ran},
		{oncehttptest.TruncateResponse(-1), func(r reply) bool { return r.body == full[:len(full)-1] && r.err != nil }, 1, ran},
		{oncehttptest.TruncateResponse(0), func(r reply) bool { return r.code == 200 && r.body == "" && errors.Is(r.err, io.ErrUnexpectedEOF) }, 1, ran},
		{oncehttptest.CutResponse(3), func(r reply) bool { return r.err == nil && r.body == "run" && r.header.Get("Content-Length") == "" }, 1, ran},
		{oncehttptest.CutResponse(99), whole, 1, ran},
		{oncehttptest.StallBody(3, d), whole, 1, ran},
		{oncehttptest.Stall(d), whole, 1, ran},
		{oncehttptest.Slow(d), whole, 1, ran},
		{oncehttptest.Delay(d), whole, 1, ran},
		{oncehttptest.Hold(d), whole, 1, ran},
		{oncehttptest.NoHooks(), whole, 1, ran},
		{oncehttptest.Stored500(), code(500), 1, ran},
		{oncehttptest.Stored(402), code(402), 1, ran},
		{oncehttptest.Unstored500(), code(500), 0, refused},
		{oncehttptest.Unauthorized(), code(401), 0, refused},
		{oncehttptest.Redirect(307, "/elsewhere"), func(r reply) bool { return r.code == 307 && r.header.Get("Location") == "/elsewhere" }, 0, refused},
		{oncehttptest.Status(503, "Retry-After", "2"), func(r reply) bool {
			return r.code == 503 && r.header.Get("Retry-After") == "2" && strings.Contains(r.body, `"api_error"`)
		}, 0, refused},
		{oncehttptest.Answer(502, "<html>"), func(r reply) bool { return r.code == 502 && r.body == "<html>" }, 0, refused},
	} {
		t.Run(c.fault.String(), func(t *testing.T) {
			onBoth(t, numbered, func(t *testing.T, n network) {
				n.Script(c.fault)
				if r := n.post(t, "k", "body"); !c.ok(r) {
					t.Fatalf("got %+v", r)
				}
				n.wantEffects(t, c.effects)
				n.wantActions(t, c.action)
				if a := n.Attempts()[0]; a.Fault != c.fault || a.Partial != strings.Contains(c.fault.String(), "After(") {
					t.Fatalf("%+v", a)
				}
				again := n.post(t, "k", "body")
				stored := c.effects == 1
				if again.err != nil || stored != (again.header.Get("Idempotent-Replayed") == "true") {
					t.Fatalf("then: %+v", again)
				}
				n.wantEffects(t, 1)
				if want := n.Effects()[0].Status; again.code != want {
					t.Fatalf("then: %d, want %d", again.code, want)
				}
			})
		})
	}
}

func TestDelayedRequestIsExecutedAfterTheClientHasLeft(t *testing.T) {
	for _, f := range []oncehttptest.Fault{oncehttptest.Delay(400 * time.Millisecond), oncehttptest.Slow(400 * time.Millisecond)} {
		t.Run(f.String(), func(t *testing.T) {
			onBoth(t, numbered, func(t *testing.T, n network) {
				n.Script(f)
				ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
				defer cancel()
				if r := n.send(ctx, "POST", "/", "k", "a"); !errors.Is(r.err, context.DeadlineExceeded) {
					t.Fatalf("%+v", r)
				}
				n.wantEffects(t, 0)
				n.wantActions(t, oncehttptest.Pending)
				n.Wait()
				n.wantEffects(t, 1)
				if a := n.Attempts()[0]; a.Action != oncehttptest.Executed || !a.Gone {
					t.Fatalf("%+v", a)
				}
				n.send(t.Context(), "POST", "/", "k", "a").want(t, 200, "run 1")
			})
		})
	}
}

func TestLateRequestIsExecutedAfterItsConnectionWasReset(t *testing.T) {
	onBoth(t, numbered, func(t *testing.T, n network) {
		n.Script(oncehttptest.Late(200 * time.Millisecond))
		if r := n.post(t, "k", "a"); !isReset(r.err) {
			t.Fatalf("%+v", r)
		}
		n.wantEffects(t, 0)
		n.post(t, "k", "a").want(t, 200, "run 1") // overtakes it
		n.Wait()
		n.wantEffects(t, 1)
		n.wantActions(t, oncehttptest.Replayed, oncehttptest.Executed)
	})
}

func TestStalledRequestIsNotExecutedOnceTheClientHasLeft(t *testing.T) {
	onBoth(t, numbered, func(t *testing.T, n network) {
		n.Script(oncehttptest.Stall(-1), oncehttptest.Hold(-1), oncehttptest.StallBody(2, -1))
		for i, effects := range []int{0, 1, 1} {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			if r := n.send(ctx, "POST", "/", "k", "a"); !errors.Is(r.err, context.DeadlineExceeded) || i == 2 && r.body != "ru" {
				t.Fatalf("%d: %+v", i, r)
			}
			cancel()
			n.Wait()
			n.wantEffects(t, effects)
		}
		n.wantActions(t, oncehttptest.Dropped, oncehttptest.Executed, oncehttptest.Replayed)
	})
}

func TestHandlerThatPanicsHasFailedForGood(t *testing.T) {
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch b, _ := io.ReadAll(r.Body); string(b) {
		case "abort":
			panic(http.ErrAbortHandler)
		case "exit":
			runtime.Goexit() // as t.Fatal does
		}
		panic("a bug")
	})
	onBoth(t, always(h), func(t *testing.T, n network) {
		n.post(t, "k", "a").want(t, 500, "handler panicked: a bug")
		n.post(t, "k", "a").want(t, 500, "a bug")
		for _, body := range []string{"abort", "exit"} {
			if r := n.post(t, body, body); !isReset(r.err) {
				t.Fatalf("%+v", r)
			}
			n.post(t, body, body).want(t, 500, "api_error")
		}
		n.wantEffects(t, 3)
	})
}

func TestLargeBodiesAreKeptWhole(t *testing.T) {
	big := strings.Repeat("0123456789abcdef", 1<<19/16*4) // 2 MiB
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.Copy(w, r.Body) })
	onBoth(t, always(h), func(t *testing.T, n network) {
		for range 2 {
			if r := n.post(t, "k", big); r.err != nil || r.body != big {
				t.Fatalf("%d bytes, %v", len(r.body), r.err)
			}
		}
		n.Script(oncehttptest.TruncateResponse(1 << 20))
		if r := n.post(t, "k", big); !errors.Is(r.err, io.ErrUnexpectedEOF) || len(r.body) != 1<<20 {
			t.Fatalf("%d bytes, %v", len(r.body), r.err)
		}
		if e := n.Effects(); len(e) != 1 || !bytes.Equal(e[0].Body, []byte(big)) {
			t.Fatal("not one effect of the whole body")
		}
	})
}

func TestPartOfARequestIsSeenAndNotExecuted(t *testing.T) {
	onBoth(t, numbered, func(t *testing.T, n network) {
		part := strings.Repeat("x", 100_000)
		cause := errors.New("source broke")
		body := io.MultiReader(strings.NewReader(part), readerFunc(func([]byte) (int, error) { return 0, cause }))
		req, err := http.NewRequest("POST", n.base, body)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Idempotency-Key", "k")
		if _, err := n.client.Do(req); !errors.Is(err, cause) {
			t.Fatal(err)
		}
		n.Wait()
		for len(n.Attempts()) == 0 { // the socket's server learns of it in its own time
			time.Sleep(time.Millisecond)
		}
		n.Wait()
		if a := n.Attempts()[0]; !a.Partial || len(a.Body) == 0 || len(a.Body) > len(part) || a.Key != "k" {
			t.Fatalf("%d bytes, %s", len(a.Body), a.Action)
		}
		n.wantEffects(t, 0)
	})
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

func TestCloseEndsWhatIsUnderWay(t *testing.T) {
	var inside chan struct{} // made in the bubble
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		close(inside)
		<-r.Context().Done()
	})
	onBoth(t, always(h), func(t *testing.T, n network) {
		inside = make(chan struct{})
		n.ScriptFor(oncehttptest.ByBody("delayed"), oncehttptest.Delay(-1))
		n.ScriptFor(oncehttptest.ByBody("slow"), oncehttptest.Slow(time.Hour))
		replies := make(chan reply)
		for _, body := range []string{"delayed", "slow", "blocked"} {
			go func() { replies <- n.post(t, body, body) }()
		}
		for len(n.Attempts()) < 3 {
			time.Sleep(time.Millisecond)
		}
		<-inside
		n.Close()
		for range 3 {
			if r := <-replies; !isReset(r.err) && r.code != 200 {
				t.Errorf("%d, %v", r.code, r.err)
			}
		}
		if got := n.EffectsByBody(); len(got) != 1 || got["blocked"] != 1 {
			t.Fatalf("effects %v", got)
		}
		if r := n.post(t, "k", "after"); r.err == nil || n.memory && !errors.Is(r.err, syscall.ECONNREFUSED) {
			t.Fatalf("%+v", r)
		}
	})
}

func TestHTTP2AttemptsMeetTheSameFaults(t *testing.T) {
	s := oncehttptest.New(numbered())
	ts := httptest.NewUnstartedServer(s)
	ts.EnableHTTP2 = true
	ts.StartTLS()
	defer ts.Close()
	n := network{s, ts.Client(), ts.URL, false}
	s.Script(oncehttptest.DropRequest(), oncehttptest.DropResponse(), oncehttptest.TruncateResponse(2), oncehttptest.CutResponse(2), oncehttptest.Late(time.Millisecond))
	for range 3 {
		if r := n.post(t, "k", "a"); r.err == nil {
			t.Fatalf("%+v", r)
		}
	}
	n.post(t, "k", "a").want(t, 200, "ru")
	if r := n.post(t, "k2", "a"); r.err == nil {
		t.Fatalf("%+v", r)
	}
	s.Wait()
	n.wantEffects(t, 2)
	n.wantActions(t, oncehttptest.Dropped, oncehttptest.Executed, oncehttptest.Replayed, oncehttptest.Replayed, oncehttptest.Executed)
}
