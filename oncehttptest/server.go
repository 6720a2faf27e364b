package oncehttptest

import (
	"context"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"
)

// A Server gives a handler the idempotency of Stripe's API. It is made by [New]
// or [Start], is safe for concurrent use, and is both an [http.Handler] and,
// through [Server.Transport], a network without sockets.
//
// Per account and key, the first request runs the handler, and its answer is
// stored and replayed, byte for byte and with the header
// "Idempotent-Replayed: true", until the window has passed since the request
// was received. Meanwhile the same key
//
//   - with another method, path, query or body gets 400 idempotency_error,
//   - while the handler still runs gets 409 idempotency_key_in_use.
//
// A handler runs to its end even if the client leaves; its request's context
// ends with [Server.Close] only. Its answer is complete before the first byte
// goes out: nothing streams. A handler that panics has failed with 500, stored
// like any other; with [http.ErrAbortHandler], the connection is reset too.
//
// The exported fields are set before the first request.
type Server struct {
	// URL is the base of the real server, without a trailing slash; set by
	// [Start], empty from [New].
	URL string

	// KeyHeader carries the idempotency key; "" means Idempotency-Key. A
	// request without it runs the handler each time. Keys are taken as they
	// are, up to 255 bytes; longer ones get 400.
	KeyHeader string

	// Window is for how long a key is remembered, from its first receipt by
	// time.Now; 0 means 24 h, below 0 that no finished key is remembered: a
	// server that ignores them.
	Window time.Duration

	// Safe are the methods that run the handler without key and effect; nil
	// means GET, HEAD, OPTIONS and TRACE.
	Safe []string

	// Unstored are the statuses by which the handler says that it refused
	// before doing anything: no effect is counted, nothing stored. nil means
	// 401 and 429.
	Unstored []int

	// Account tells whose keys a request uses; nil means the Authorization
	// header, and Stripe-Account, if present, after a line feed.
	Account func(http.Header) string

	// NoHooks makes Transport one that fires no httptrace hooks.
	NoHooks bool

	handler http.Handler

	mu       sync.Mutex // guards what follows
	idle     *sync.Cond // L is &mu; busy fell to 0
	busy     int        // attempts being served, the late ones included
	closed   bool
	cancels  map[*entry]context.CancelFunc // of the attempts being served
	listener *httptest.Server              // nil from New
	keys     map[accountKey]*record
	schedule schedule
	offered  int // requests seen, for Attempt.Seq
	bodies   map[[32]byte]int
	keyed    map[accountKey]int
	attempts []*entry
	unsent   []*entry
	effects  []Effect
	conns    map[string]int // idle connections of Transport by host
}

// An Action is what was done with an attempt.
type Action string

const (
	Pending   Action = "pending"    // nothing yet: stalled, delayed or being executed
	Executed  Action = "executed"   // the handler ran; see Effects
	Replayed  Action = "replayed"   // answered from the store
	Conflict  Action = "conflict"   // 409: the key was in use
	Mismatch  Action = "mismatch"   // 400: the key belongs to another payload
	Refused   Action = "refused"    // answered at the door by a fault, a bad key, or a handler with an Unstored status
	Dropped   Action = "dropped"    // nothing executed, nothing answered
	PassedOn  Action = "passed on"  // a Safe method: the handler ran, without effect
	NotDialed Action = "not dialed" // there was no connection; see Unsent
)

// An Attempt is one request on the wire. Body and Header must not be modified.
type Attempt struct {
	Seq     int         // 1 for the first request that the server was offered
	N       int         // 1 for the first attempt with this account, method, path and body
	KeyN    int         // 1 for the first attempt with this account and key; 0 without a key
	Time    time.Time   // when its last byte arrived, or it broke off
	Account string      // see Server.Account
	Key     string      // "" if it had none
	Method  string      // in capitals
	Host    string      // as sent
	Path    string      // with query
	Header  http.Header // as received
	Body    []byte      // what arrived
	Partial bool        // only a part arrived
	Fault   Fault       // what happened to it
	Action  Action      // what was done with it
	Status  int         // what was answered, if the answer was not lost; 0 if there was none
	Gone    bool        // the client had left before there was an answer
}

// An Effect is one run of the handler by something other than a safe method.
// Body must not be modified.
type Effect struct {
	Account string    // see Server.Account
	Key     string    // "" if it had none
	Method  string    // in capitals
	Path    string    // with query
	Body    []byte    // of the request
	Time    time.Time // when the handler was called
	Status  int       // what was stored
}

// entry is an attempt in the log. Server.mu guards Action, Status and Gone;
// the rest is written before the entry is published.
type entry struct{ Attempt }

// New makes a Server around h, which is the effect. Nothing listens: use
// [Server.Transport], or serve it as the [http.Handler] it is.
func New(h http.Handler) *Server {
	s := &Server{handler: h, cancels: map[*entry]context.CancelFunc{}}
	s.idle = sync.NewCond(&s.mu)
	s.resetLocked()
	return s
}

// Start is [New] with a real server on a loopback socket, at URL, closed with
// the test. It does not work inside a testing/synctest bubble.
func Start(t testing.TB, h http.Handler) *Server {
	t.Helper()
	s := New(h)
	s.listener = httptest.NewServer(s)
	s.URL = s.listener.URL
	t.Cleanup(s.Close)
	return s
}

// Attempts are the requests that reached the server in whole or in part, in
// the order in which they did.
func (s *Server) Attempts() []Attempt { return s.log(&s.attempts) }

// Unsent are the requests given to [Server.Transport] of which no byte left:
// DialError, or broken off before. Their Body is what had been read of it.
func (s *Server) Unsent() []Attempt { return s.log(&s.unsent) }

func (s *Server) log(entries *[]*entry) []Attempt {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []Attempt
	for _, e := range *entries {
		out = append(out, e.Attempt)
	}
	return out
}

// Effects are what ran, in the order in which it finished. An effect is there
// before any byte of its answer.
func (s *Server) Effects() []Effect {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.effects)
}

// EffectsByBody counts the effects by the body of their request.
func (s *Server) EffectsByBody() map[string]int {
	out := map[string]int{}
	for _, e := range s.Effects() {
		out[string(e.Body)]++
	}
	return out
}

// Reset forgets keys, effects, attempts and faults, not the settings. What is
// still being executed ends up among the effects afterwards: see [Server.Wait].
func (s *Server) Reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.resetLocked()
}

func (s *Server) resetLocked() {
	s.keys, s.schedule = map[accountKey]*record{}, schedule{}
	s.offered, s.bodies, s.keyed = 0, map[[32]byte]int{}, map[accountKey]int{}
	s.attempts, s.unsent, s.effects = nil, nil, nil
	s.conns = map[string]int{}
}

// Wait returns when no attempt is being served any more, the delayed ones
// included.
func (s *Server) Wait() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.busy > 0 {
		s.idle.Wait()
	}
}

// Close ends the server: connections are reset, delayed requests that have not
// been executed never will be, handlers have their contexts ended and are
// waited for. Requests that come later find the connection refused (on a
// server not made by Start: reset). In a bubble, Close is what ends a test
// that leaves a Delay or a Stall behind.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	var cancels []context.CancelFunc
	for _, cancel := range s.cancels {
		cancels = append(cancels, cancel)
	}
	s.mu.Unlock()
	for _, cancel := range cancels {
		cancel()
	}
	s.Wait()
	if s.listener != nil {
		s.listener.Close()
	}
}

// attempt describes a request as the server sees it.
func (s *Server) attempt(r *http.Request) Attempt {
	account := r.Header.Get("Authorization")
	if on := r.Header.Get("Stripe-Account"); on != "" {
		account += "\n" + on
	}
	if s.Account != nil {
		account = s.Account(r.Header)
	}
	return Attempt{
		Account: account,
		Key:     r.Header.Get(s.keyHeader()),
		Method:  r.Method,
		Host:    r.Host,
		Path:    r.URL.RequestURI(),
		Header:  r.Header.Clone(),
		Action:  Pending,
	}
}

// number gives an attempt whose body is known its place in the counts.
func (s *Server) number(a *Attempt) {
	sum := identity(a.Account, a.Method, a.Path, a.Body)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.offered++
	s.bodies[sum]++
	a.Seq, a.N, a.Time = s.offered, s.bodies[sum], time.Now()
	if a.Key != "" {
		k := accountKey{a.Account, a.Key}
		s.keyed[k]++
		a.KeyN = s.keyed[k]
	}
}

// enter puts a numbered attempt into a log, one of the two of s.
func (s *Server) enter(log *[]*entry, a Attempt) *entry {
	e := &entry{a}
	s.mu.Lock()
	defer s.mu.Unlock()
	*log = append(*log, e)
	return e
}

func (s *Server) note(e *entry, action Action, status int, gone bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e.Action, e.Status, e.Gone = action, status, gone
}

// begin registers an attempt as being served. The context ends with the
// server; done must be called. Not ok means that the server is closed.
func (s *Server) begin(parent context.Context, e *entry) (ctx context.Context, done func(), ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, nil, false
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(parent))
	s.busy++
	s.cancels[e] = cancel
	return ctx, func() {
		cancel()
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.cancels, e)
		if s.busy--; s.busy == 0 {
			s.idle.Broadcast()
		}
	}, true
}
