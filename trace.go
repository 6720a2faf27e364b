package oncehttp

import (
	"context"
	"log/slog"
	"time"
)

// A Trace is a set of hooks that are called during operations. Any may be nil.
// They are called from the goroutine that runs the operation, never under a
// lock, and may call the client back, but not wait for that operation: it goes
// on when they return. As with httptrace, hooks may be called after the
// request's caller has left. Their panic goes on in the callers, if there are
// any.
//
// Requests without a key have only the hooks of attempts and retries.
type Trace struct {
	Begun        func(Info)        // the record is durable; nothing is sent yet
	AttemptStart func(AttemptInfo) // the attempt is about to be sent
	AttemptDone  func(AttemptInfo) // the attempt has its answer or error
	Retry        func(RetryInfo)   // another attempt will follow after a wait
	Settled      func(Info)        // the operation is settled for now; what its callers are told
	StoreFailed  func(Info, error) // a write failed; the request's outcome tells what follows
	Breaker      func(BreakerInfo) // a circuit breaker changed its state
}

// AttemptInfo describes one HTTP exchange.
type AttemptInfo struct {
	Key      string // empty for an unkeyed request
	Method   string
	Origin   string
	Attempt  int           // of this call, beginning with 1
	Status   int           // 0 before the answer, and after an error
	Err      error         // of the transport, or ErrAnswerLost
	Duration time.Duration // 0 before the answer
}

// RetryInfo describes a wait.
type RetryInfo struct {
	Key     string
	Origin  string
	Attempt int // the one that failed
	Wait    time.Duration
	Status  int   // of the failed attempt
	Err     error // of the failed attempt
}

// BreakerInfo describes a change of a circuit breaker.
type BreakerInfo struct {
	Origin   string
	From, To string // closed, half-open, open
}

type traceKey struct{} // context key of []*Trace, innermost first

// WithTrace returns a context whose operations call the trace's hooks, before
// those of an outer WithTrace and of [Options.Trace].
func WithTrace(ctx context.Context, t *Trace) context.Context {
	outer, _ := ctx.Value(traceKey{}).([]*Trace)
	return context.WithValue(ctx, traceKey{}, append([]*Trace{t}, outer...))
}

// tracer calls the hooks of several traces.
type tracer []*Trace

// tracerFor returns the hooks for a request: the context's, then the client's.
func (c *Client) tracerFor(ctx context.Context) tracer {
	inner, _ := ctx.Value(traceKey{}).([]*Trace)
	if len(inner) == 0 {
		return c.traces
	}
	return append(tracer(inner[:len(inner):len(inner)]), c.traces...)
}

func (t tracer) begun(f *flight) {
	for _, tr := range t {
		if tr.Begun != nil {
			tr.Begun(f.info())
		}
	}
}

func (t tracer) attemptStart(i AttemptInfo) {
	for _, tr := range t {
		if tr.AttemptStart != nil {
			tr.AttemptStart(i)
		}
	}
}

func (t tracer) attemptDone(i AttemptInfo) {
	for _, tr := range t {
		if tr.AttemptDone != nil {
			tr.AttemptDone(i)
		}
	}
}

func (t tracer) retry(i RetryInfo) {
	for _, tr := range t {
		if tr.Retry != nil {
			tr.Retry(i)
		}
	}
}

func (t tracer) settled(i Info) {
	for _, tr := range t {
		if tr.Settled != nil {
			tr.Settled(i)
		}
	}
}

func (t tracer) storeFailed(i Info, err error) {
	for _, tr := range t {
		if tr.StoreFailed != nil {
			tr.StoreFailed(i, err)
		}
	}
}

// storeFailedAside is storeFailed for a write that nobody waits for. The hooks may
// take their time, and their panic is not the end of the process.
func (t tracer) storeFailedAside(i Info, err error) {
	go func() {
		defer func() { _ = recover() }()
		t.storeFailed(i, err)
	}()
}

func (t tracer) breaker(i BreakerInfo) {
	for _, tr := range t {
		if tr.Breaker != nil {
			tr.Breaker(i)
		}
	}
}

// logTrace is the trace behind [Options.Logger].
func logTrace(log *slog.Logger) *Trace {
	return &Trace{
		Retry: func(i RetryInfo) {
			log.Info("retrying", "key", i.Key, "origin", i.Origin, "attempt", i.Attempt, "wait", i.Wait, "status", i.Status, "error", detail(i.Err))
		},
		Settled: func(i Info) {
			level := slog.LevelDebug
			switch i.Outcome {
			case Unknown:
				level = slog.LevelWarn
			case Undecided: // it stays pending, and the detail says why
				level = slog.LevelInfo
			}
			log.Log(context.Background(), level, "operation settled", "key", i.Key, "origin", i.Origin, "outcome", i.Outcome.String(),
				"reason", i.Reason.String(), "status", i.Status, "attempts", i.Attempts, "detail", i.Detail)
		},
		StoreFailed: func(i Info, err error) {
			log.Error("key store failed", "key", i.Key, "origin", i.Origin, "error", detail(err))
		},
		Breaker: func(i BreakerInfo) {
			log.Warn("circuit breaker", "origin", i.Origin, "from", i.From, "to", i.To)
		},
	}
}
