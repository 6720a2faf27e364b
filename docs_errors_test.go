package oncehttp_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// An errorCase is one way to a documented error of a request.
type errorCase struct {
	name    string // as docs/errors.md has it
	err     error
	outcome oncehttp.Outcome
	opts    oncehttp.Options
	provoke func(b *bench) (*http.Response, error)
}

// send sends a charge as an operation.
func (b *bench) send(ctx context.Context, key, order string, header ...string) (*http.Response, error) {
	ctx, _ = oncehttp.Start(ctx, oncehttp.Op{Key: key})
	return b.client.Do(b.request(ctx, order, header...))
}

// whileSent calls f in a moment, while an attempt is on the wire.
func whileSent(f func()) { time.AfterFunc(time.Millisecond, f) }

// failing makes the store fail the writes of a kind.
func failing(kind string, err error) func(string, oncehttp.Record) error {
	return func(write string, _ oncehttp.Record) error {
		if write == kind {
			return err
		}
		return nil
	}
}

var errorCases = []errorCase{
	{"ErrKeyInvalid", oncehttp.ErrKeyInvalid, oncehttp.NotSent, oncehttp.Options{}, func(b *bench) (*http.Response, error) {
		return b.send(b.t.Context(), "order 1", "1")
	}},
	{"ErrNoKeys", oncehttp.ErrNoKeys, oncehttp.NotSent, oncehttp.Options{}, func(b *bench) (*http.Response, error) {
		ctx, _ := oncehttp.Start(b.t.Context(), oncehttp.Op{})
		req, _ := http.NewRequestWithContext(ctx, "POST", "https://api.twilio.com/2010-04-01/Messages.json", nil)
		return b.client.Do(req)
	}},
	{"ErrKeyReused", oncehttp.ErrKeyReused, oncehttp.NotSent, oncehttp.Options{}, func(b *bench) (*http.Response, error) {
		b.lost("k", "1")
		return b.send(b.t.Context(), "k", "2")
	}},
	{"ErrScope", oncehttp.ErrScope, oncehttp.NotSent, oncehttp.Options{}, func(b *bench) (*http.Response, error) {
		b.send(b.t.Context(), "k", "1", "Authorization", "Bearer old")
		return b.send(b.t.Context(), "k", "1", "Authorization", "Bearer new")
	}},
	{"ErrBodyTooLarge", oncehttp.ErrBodyTooLarge, oncehttp.NotSent, oncehttp.Options{MaxBodyBytes: 3}, func(b *bench) (*http.Response, error) {
		return b.send(b.t.Context(), "k", "1")
	}},
	{"ErrInProgress", oncehttp.ErrInProgress, oncehttp.Undecided, oncehttp.Options{}, func(b *bench) (resp *http.Response, err error) {
		b.store.LazyStore = b.store.LazyStore.(*oncehttptest.Store)
		b.pending("k", "1")
		b.client.Resume(b.t.Context(), oncehttp.Handler{
			Before: func(ctx context.Context, _ oncehttp.Info) oncehttp.Decision {
				resp, err = b.send(ctx, "k", "1")
				return oncehttp.Hold
			},
			Settled: func(context.Context, oncehttp.Info, *http.Response) error { return nil },
		})
		return resp, err
	}},
	{"ErrWindowClosed", oncehttp.ErrWindowClosed, oncehttp.Unknown, oncehttp.Options{}, func(b *bench) (*http.Response, error) {
		b.lost("k", "1")
		time.Sleep(24 * time.Hour)
		return b.send(b.t.Context(), "k", "1")
	}},
	{"ErrNoCredentials", oncehttp.ErrNoCredentials, oncehttp.Unknown, oncehttp.Options{}, func(b *bench) (*http.Response, error) {
		b.server.Script(oncehttptest.DropResponse(), oncehttptest.DropResponse(), oncehttptest.DropResponse(), oncehttptest.DropResponse())
		info, _ := b.charge(b.t.Context(), "k", "1", "Authorization", "Bearer b")
		return b.client.Redrive(b.t.Context(), info.ID)
	}},
	{"ErrMismatch", oncehttp.ErrMismatch, oncehttp.NotSent, oncehttp.Options{Authorize: func(_ context.Context, _ oncehttp.Info, req *http.Request) error {
		req.URL.Path += "/other"
		return nil
	}}, func(b *bench) (*http.Response, error) { return b.send(b.t.Context(), "k", "1") }},
	{"ErrMismatch", oncehttp.ErrMismatch, oncehttp.Unknown, oncehttp.Options{Authorize: func(_ context.Context, info oncehttp.Info, req *http.Request) error {
		if info.Attempts > 0 {
			req.Method = http.MethodPut
		}
		return nil
	}}, func(b *bench) (*http.Response, error) { return b.client.Redrive(b.t.Context(), b.lost("k", "1")) }},
	{"ErrCircuitOpen", oncehttp.ErrCircuitOpen, oncehttp.NotSent, oncehttp.Options{MaxAttempts: 1, Breaker: &oncehttp.Breaker{MinRequests: 1, Consecutive: 1}}, func(b *bench) (*http.Response, error) {
		b.lost("k", "1")
		return b.send(b.t.Context(), "k2", "2")
	}},
	{"ErrCircuitOpen", oncehttp.ErrCircuitOpen, oncehttp.Unknown, oncehttp.Options{Breaker: &oncehttp.Breaker{MinRequests: 1, Consecutive: 1}}, func(b *bench) (*http.Response, error) {
		b.server.Script(oncehttptest.DropResponse())
		return b.send(b.t.Context(), "k", "1")
	}},
	{"ErrBudgetExhausted", oncehttp.ErrBudgetExhausted, oncehttp.NotSent, oncehttp.Options{Budget: &oncehttp.Budget{MinPerSecond: -1}}, func(b *bench) (*http.Response, error) {
		b.server.Script(oncehttptest.DialError(nil))
		return b.send(b.t.Context(), "k", "1")
	}},
	{"ErrBudgetExhausted", oncehttp.ErrBudgetExhausted, oncehttp.Unknown, oncehttp.Options{Budget: &oncehttp.Budget{MinPerSecond: -1}}, func(b *bench) (*http.Response, error) {
		b.server.Script(oncehttptest.DropResponse())
		return b.send(b.t.Context(), "k", "1")
	}},
	{"ErrWaitTooLong", oncehttp.ErrWaitTooLong, oncehttp.NotSent, oncehttp.Options{MaxAttempts: 1}, func(b *bench) (*http.Response, error) {
		b.server.Script(oncehttptest.Status(503, "Retry-After", "30"))
		b.send(b.t.Context(), "k", "1")
		ctx, cancel := context.WithTimeout(b.t.Context(), time.Second)
		defer cancel()
		return b.send(ctx, "k2", "2")
	}},
	{"ErrWaitTooLong", oncehttp.ErrWaitTooLong, oncehttp.Unknown, oncehttp.Options{BackoffBase: time.Minute}, func(b *bench) (*http.Response, error) {
		b.server.Script(oncehttptest.DropResponse())
		ctx, cancel := context.WithTimeout(b.t.Context(), time.Millisecond)
		defer cancel()
		return b.send(ctx, "k", "1")
	}},
	{"ErrClosed", oncehttp.ErrClosed, oncehttp.NotSent, oncehttp.Options{}, func(b *bench) (*http.Response, error) {
		b.client.Close()
		return b.send(b.t.Context(), "k", "1")
	}},
	{"ErrClosed", oncehttp.ErrClosed, oncehttp.Undecided, oncehttp.Options{}, func(b *bench) (*http.Response, error) {
		b.server.Script(oncehttptest.Stall(-1))
		whileSent(func() { b.client.Close() })
		return b.send(b.t.Context(), "k", "1")
	}},
	{"ErrClosed", oncehttp.ErrClosed, oncehttp.Unknown, oncehttp.Options{}, func(b *bench) (*http.Response, error) {
		b.server.Script(oncehttptest.Stall(-1))
		whileSent(func() { b.client.Close() })
		return b.client.Do(b.request(b.t.Context(), "1"))
	}},
	{"ErrNotFollowed", oncehttp.ErrNotFollowed, oncehttp.Unknown, oncehttp.Options{}, func(b *bench) (*http.Response, error) {
		b.server.Script(oncehttptest.Redirect(302, "/v1/charges/ch_1"))
		other := &http.Client{Transport: b.client.StandardClient().Transport}
		return other.Do(b.request(b.t.Context(), "1"))
	}},
	{"ErrNotFollowed", oncehttp.ErrNotFollowed, oncehttp.Rejected, oncehttp.Options{}, func(b *bench) (*http.Response, error) {
		b.server.Script(oncehttptest.Redirect(307, "https://other.example.com/"))
		other := &http.Client{Transport: b.client.StandardClient().Transport}
		req := b.request(b.t.Context(), "1")
		return other.Do(req)
	}},
	{"ErrAnswerLost", oncehttp.ErrAnswerLost, oncehttp.Unknown, oncehttp.Options{MaxAttempts: 1}, func(b *bench) (*http.Response, error) {
		b.server.Script(oncehttptest.TruncateResponse(3))
		return b.send(b.t.Context(), "k", "1")
	}},
	{"ErrNotRetained", oncehttp.ErrNotRetained, oncehttp.Succeeded, oncehttp.Options{MaxResponseBytes: 1}, func(b *bench) (*http.Response, error) {
		b.send(b.t.Context(), "k", "1")
		return b.send(b.t.Context(), "k", "1")
	}},
	{"ErrStoreFailed", oncehttp.ErrStoreFailed, oncehttp.NotSent, oncehttp.Options{}, func(b *bench) (*http.Response, error) {
		b.store.before = failing("begin", oncehttp.ErrStoreFailed)
		return b.send(b.t.Context(), "k", "1")
	}},
	{"ErrStoreFailed", oncehttp.ErrStoreFailed, oncehttp.Unknown, oncehttp.Options{MaxAttempts: 1}, func(b *bench) (*http.Response, error) {
		b.store.before = failing("save", oncehttp.ErrStoreFailed)
		b.server.Script(oncehttptest.DropResponse())
		return b.send(b.t.Context(), "k", "1")
	}},
	{"ErrStoreUncertain", oncehttp.ErrStoreUncertain, oncehttp.Unknown, oncehttp.Options{}, func(b *bench) (*http.Response, error) {
		b.store.before = failing("begin", oncehttp.ErrStoreUncertain)
		return b.send(b.t.Context(), "k", "1")
	}},
	{"ErrStoreReplaced", oncehttp.ErrStoreReplaced, oncehttp.NotSent, oncehttp.Options{}, func(b *bench) (*http.Response, error) {
		b.store.before = failing("begin", fmt.Errorf("%w: %w", oncehttp.ErrStoreReplaced, oncehttp.ErrStoreFailed))
		return b.send(b.t.Context(), "k", "1")
	}},
	{"ErrSealed", oncehttp.ErrSealed, oncehttp.Succeeded, oncehttp.Options{SealingKeys: [][]byte{make([]byte, 32)}}, func(b *bench) (*http.Response, error) {
		b.send(b.t.Context(), "k", "1")
		b.opts.SealingKeys = nil
		b.restart()
		return b.send(b.t.Context(), "k", "1")
	}},
	{"context.Canceled", context.Canceled, oncehttp.NotSent, oncehttp.Options{}, func(b *bench) (*http.Response, error) {
		ctx, cancel := context.WithCancel(b.t.Context())
		cancel()
		return b.send(ctx, "k", "1")
	}},
	{"context.Canceled", context.Canceled, oncehttp.Unknown, oncehttp.Options{}, func(b *bench) (*http.Response, error) {
		b.server.Script(oncehttptest.Stall(-1))
		ctx, cancel := context.WithCancel(b.t.Context())
		defer cancel()
		whileSent(cancel)
		return b.send(ctx, "k", "1")
	}},
	{"context.DeadlineExceeded", context.DeadlineExceeded, oncehttp.Unknown, oncehttp.Options{AttemptTimeout: time.Second, MaxAttempts: 1}, func(b *bench) (*http.Response, error) {
		b.server.Script(oncehttptest.Stall(-1))
		return b.send(b.t.Context(), "k", "1")
	}},
}

// TestErrorsComeAsDocumented provokes each error of a request, and compares what
// its caller is told with docs/errors.md; and the other way round.
func TestErrorsComeAsDocumented(t *testing.T) {
	rows := tableRows(t, "docs/errors.md")
	seen := make(map[string][]string) // outcomes by name
	for _, c := range errorCases {
		outcome := c.outcome.String()
		seen[c.name] = append(seen[c.name], outcome)
		t.Run(c.name+", "+outcome, func(t *testing.T) {
			if rows[c.name] == nil || !slices.Contains(strings.Split(rows[c.name][1], ", "), outcome) {
				t.Errorf("docs/errors.md does not say that %s comes with the outcome %q", c.name, outcome)
			}
			inBubble(t, c.opts, func(t *testing.T, b *bench) {
				_, err := c.provoke(b)
				op, ok := errors.AsType[*oncehttp.OperationError](err)
				if !errors.Is(err, c.err) || !ok || op.Outcome != c.outcome {
					t.Errorf("told %v, want %v and the outcome %v", err, c.err, c.outcome)
				}
			})
		})
	}
	for name, row := range rows {
		if len(row) != 4 || !strings.HasPrefix(name, "Err") && !strings.HasPrefix(name, "context.") {
			continue
		}
		for outcome := range strings.SplitSeq(row[1], ", ") {
			documented := slices.Contains([]string{"not sent", "unknown", "undecided", "succeeded", "rejected"}, outcome)
			if documented && !slices.Contains(seen[name], outcome) {
				t.Errorf("docs/errors.md says that %s comes with the outcome %q, and no test shows it", name, outcome)
			}
		}
	}
}
