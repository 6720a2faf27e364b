package oncehttptest

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"time"
)

const (
	maxKeyBytes   = 255
	defaultWindow = 24 * time.Hour
)

type accountKey struct{ account, key string }

// record is what the server knows of one key. Guarded by Server.mu, except
// print and first, which never change.
type record struct {
	print  [32]byte // of account, method, path and body
	first  time.Time
	answer *answer // nil while the handler runs
}

// answer is a complete answer; it is never modified once stored.
type answer struct {
	code   int
	header http.Header
	body   []byte
	abort  bool // the handler wants the connection reset
}

// wire is one attempt's way back to the client.
type wire interface {
	gone() <-chan struct{}                     // closed when the client has left
	reset()                                    // ends the connection, now
	head(a *answer, length int, announce bool) // not to announce the length means to close after the body
	write(p []byte)
	end(complete bool) // not complete: the connection is closed after what was written
}

func (s *Server) keyHeader() string { return cmp.Or(s.KeyHeader, "Idempotency-Key") }

func (s *Server) safe(method string) bool {
	if s.Safe != nil {
		return slices.Contains(s.Safe, method)
	}
	return method == "GET" || method == "HEAD" || method == "OPTIONS" || method == "TRACE"
}

func (s *Server) unstored(code int) bool {
	if s.Unstored != nil {
		return slices.Contains(s.Unstored, code)
	}
	return code == http.StatusUnauthorized || code == http.StatusTooManyRequests
}

// serve takes one attempt through the stages of its fault.
func (s *Server) serve(ctx context.Context, e *entry, r *http.Request, w wire) {
	answered := false
	defer func() {
		if !answered { // also when the handler has ended its goroutine
			w.reset()
		}
	}()
	f := e.Fault
	if !pause(ctx, f.stall, w.gone()) {
		s.note(e, Dropped, 0, isClosed(w.gone()))
		return
	}
	if f.late {
		w.reset()
	}
	if !pause(ctx, f.delay, nil) || f.drop || f.dial {
		s.note(e, Dropped, 0, isClosed(w.gone()))
		return
	}
	var a *answer
	action := Refused
	if f.code != 0 {
		a = f.answer()
	} else {
		a, action = s.answer(ctx, e, r)
	}
	if a == nil {
		s.note(e, action, 0, isClosed(w.gone()))
		return
	}
	s.note(e, action, a.code, isClosed(w.gone()))
	if a.abort || !pause(ctx, f.hold, w.gone()) {
		return
	}
	answered = true
	f.deliver(ctx, a, e.Method, w)
}

// pause waits for d, and tells whether it could: not if gone or the server
// ended first.
func pause(ctx context.Context, d time.Duration, gone <-chan struct{}) bool {
	if d == 0 {
		return true
	}
	var passed <-chan time.Time
	if d > 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		passed = timer.C
	}
	select {
	case <-passed:
		return true
	case <-gone:
	case <-ctx.Done():
	}
	return false
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// answer finds the answer of an attempt by its key. It is nil if the server was
// closed first.
func (s *Server) answer(ctx context.Context, e *entry, r *http.Request) (*answer, Action) {
	if s.safe(e.Method) {
		return s.execute(ctx, e, r, nil)
	}
	if e.Key == "" {
		return s.execute(ctx, e, r, &record{})
	}
	if len(e.Key) > maxKeyBytes {
		return errorAnswer(400, "invalid_request_error", "", fmt.Sprintf("Idempotency keys are at most %d characters long.", maxKeyBytes)), Refused
	}
	id := accountKey{e.Account, e.Key}
	rec := &record{print: identity(e.Account, e.Method, e.Path, e.Body), first: time.Now()}

	s.mu.Lock()
	known := s.keys[id]
	if known != nil && known.answer != nil && rec.first.Sub(known.first) >= cmp.Or(s.Window, defaultWindow) {
		known = nil
	}
	if known == nil {
		s.keys[id] = rec
	}
	var stored *answer
	if known != nil {
		stored = known.answer
	}
	s.mu.Unlock()

	switch {
	case known == nil:
		defer func() { // no answer was stored: the key is free again
			s.mu.Lock()
			defer s.mu.Unlock()
			if rec.answer == nil && s.keys[id] == rec {
				delete(s.keys, id)
			}
		}()
		return s.execute(ctx, e, r, rec)
	case known.print != rec.print:
		return errorAnswer(400, "idempotency_error", "", "Keys for idempotent requests can only be used with the same parameters they were first used with."), Mismatch
	case stored == nil:
		return errorAnswer(409, "idempotency_error", "idempotency_key_in_use", "There is currently another in-progress request using this idempotency key."), Conflict
	}
	again := &answer{code: stored.code, header: maps.Clone(stored.header), body: stored.body}
	again.header["Idempotent-Replayed"] = []string{"true"}
	return again, Replayed
}

// execute runs the handler. What is to be stored goes into rec, together with
// the effect; nil means neither.
func (s *Server) execute(ctx context.Context, e *entry, r *http.Request, rec *record) (a *answer, action Action) {
	if !pause(ctx, e.Fault.slow, nil) {
		return nil, Dropped
	}
	started := time.Now()
	out := &recorder{header: http.Header{}}
	defer func() {
		switch p := recover(); {
		case p == http.ErrAbortHandler:
			out.answer = statusAnswer(500)
			out.answer.abort = true
		case p != nil:
			out.answer = errorAnswer(500, "api_error", "", fmt.Sprintf("handler panicked: %v", p))
		case out.answer == nil: // runtime.Goexit, t.Fatal for one
			out.answer = statusAnswer(500)
			s.note(e, Executed, 0, false)
		}
		a, action = out.answer, PassedOn
		if rec == nil {
			return
		}
		if action = Executed; e.Fault.stored != 0 {
			a = statusAnswer(e.Fault.stored)
		} else if s.unstored(a.code) {
			action = Refused
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		rec.answer = a
		s.effects = append(s.effects, Effect{e.Account, e.Key, e.Method, e.Path, e.Body, started, a.code})
	}()
	r = r.WithContext(ctx)
	r.Body = io.NopCloser(bytes.NewReader(e.Body))
	s.handler.ServeHTTP(out, r)
	out.finish()
	return out.answer, PassedOn
}

// deliver sends an answer, or what the fault leaves of it.
func (f Fault) deliver(ctx context.Context, a *answer, method string, w wire) {
	body := a.body
	if method == http.MethodHead || a.code == 204 || a.code == 304 {
		body = nil
	}
	n := f.cutN
	if n < 0 {
		n += len(body)
	}
	n = min(max(n, 0), len(body))
	switch f.cut {
	case cutAll:
		w.reset()
	case cutTruncated:
		w.head(a, len(a.body), true)
		w.write(body[:n])
		w.end(n == len(body))
	case cutClosed:
		w.head(a, len(a.body), false)
		w.write(body[:n])
		w.end(false)
	case cutStalled:
		w.head(a, len(a.body), true)
		w.write(body[:n])
		rest := pause(ctx, f.bodyStall, w.gone())
		if rest {
			w.write(body[n:])
		}
		w.end(rest)
	default:
		w.head(a, len(a.body), true)
		w.write(body)
		w.end(true)
	}
}

// recorder is the http.ResponseWriter of the handler.
type recorder struct {
	header http.Header
	sent   http.Header // header as it was when the status was written
	code   int
	body   bytes.Buffer
	answer *answer // set by finish
}

func (r *recorder) Header() http.Header { return r.header }

func (r *recorder) Flush() {}

func (r *recorder) WriteHeader(code int) {
	if r.code == 0 && code >= 200 {
		r.code, r.sent = code, r.header.Clone()
	}
}

func (r *recorder) Write(p []byte) (int, error) {
	r.WriteHeader(http.StatusOK)
	if r.code == 204 || r.code == 304 {
		return 0, http.ErrBodyNotAllowed
	}
	return r.body.Write(p)
}

func (r *recorder) finish() {
	r.WriteHeader(http.StatusOK)
	for _, name := range []string{"Content-Length", "Transfer-Encoding", "Connection"} {
		delete(r.sent, name)
	}
	if _, ok := r.sent["Content-Type"]; !ok && r.body.Len() > 0 {
		r.sent.Set("Content-Type", http.DetectContentType(r.body.Bytes()))
	}
	r.answer = &answer{code: r.code, header: r.sent, body: r.body.Bytes()}
}

// statusAnswer is what Stripe says with a status.
func statusAnswer(code int) *answer {
	text := http.StatusText(code)
	switch {
	case code == 401:
		return errorAnswer(code, "invalid_request_error", "", "Invalid API Key provided.")
	case code == 402:
		return errorAnswer(code, "card_error", "card_declined", "Your card was declined.")
	case code == 409:
		return errorAnswer(code, "idempotency_error", "idempotency_key_in_use", "There is currently another in-progress request using this idempotency key.")
	case code == 429:
		return errorAnswer(code, "invalid_request_error", "rate_limit", "Too many requests.")
	case code >= 500:
		return errorAnswer(code, "api_error", "", text)
	}
	return errorAnswer(code, "invalid_request_error", "", text)
}

// errorAnswer is an answer with Stripe's error body.
func errorAnswer(code int, kind, detail, message string) *answer {
	var body struct {
		Error struct {
			Type    string `json:"type"`
			Code    string `json:"code,omitempty"`
			Message string `json:"message"`
		} `json:"error"`
	}
	body.Error.Type, body.Error.Code, body.Error.Message = kind, detail, message
	b, err := json.Marshal(body)
	if err != nil {
		panic(err) // strings only
	}
	return &answer{code: code, header: http.Header{"Content-Type": {"application/json"}}, body: b}
}
