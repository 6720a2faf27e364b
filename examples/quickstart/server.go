package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"time"

	"github.com/oncehttp/oncehttp/oncehttptest"
)

// A server is a Stripe-style API on a loopback socket: it charges orders, once
// for each Idempotency-Key, and replays its answers for as long as it remembers
// the key. It knows how many orders have been charged, and kills the child when
// told so.
type server struct {
	api     *oncehttptest.Server
	http    *httptest.Server
	url     string
	charges http.Handler

	mu      sync.Mutex             // guards the following
	down    bool                   // everything is answered 503
	charged map[string]bool        // orders that were charged at least once
	flying  map[*http.Request]bool // requests that have arrived and are not answered
	marks   []int                  // numbers of charged orders at which the child is killed
	kill    func()                 // kills the child and returns when it is dead; nil without a child
	killing bool                   // the child of this life has been killed
	kills   []kill
}

// A kill is what the server saw of one.
type kill struct {
	charged int // orders that were charged by then
	hit     int // requests that had arrived, and were not answered when the child was dead
}

// faults are what goes wrong between the child and the API. Attempts are told
// apart by order and number, so that every contender meets the same ones.
type faults struct {
	seed   uint64
	rates  map[oncehttptest.Fault]float64
	choose func(oncehttptest.Attempt) oncehttptest.Fault // nil means by rates alone
	window time.Duration                                 // for which keys are remembered; 0 means 24 h
}

// stormFaults are the faults of the storm.
func stormFaults(seed uint64) faults {
	return faults{seed: seed, rates: map[oncehttptest.Fault]float64{
		oncehttptest.DropRequest():                    0.06, // the connection is reset, nothing was executed
		oncehttptest.DropResponse():                   0.10, // it was executed, the connection is reset
		oncehttptest.TruncateResponse(20):             0.06, // it was executed, the answer ends in its middle
		oncehttptest.Status(503):                      0.06,
		oncehttptest.Status(429, "Retry-After", "1"): 0.02,
	}}
}

// A client stays away from the end of a key's window by a minute, for clocks and
// delays, and the time of an attempt; so a window that is 2 s longer than that is
// usable for 2 s. The server of the late restart forgets its keys after 3 s
// instead, which spares the reader a minute.
const (
	attemptTimeout = 5 * time.Second
	statedWindow   = time.Minute + attemptTimeout + 2*time.Second
	realWindow     = 3 * time.Second
)

// silentFaults are the faults of the late restart: the first attempt of each
// order is executed, and never answered.
func silentFaults() faults {
	return faults{window: realWindow, choose: func(a oncehttptest.Attempt) oncehttptest.Fault {
		if a.N == 1 {
			return oncehttptest.Hold(-1)
		}
		return oncehttptest.Fault{}
	}}
}

func startServer(f faults, marks []int) *server {
	s := &server{charges: oncehttptest.Charges(), charged: make(map[string]bool), flying: make(map[*http.Request]bool), marks: marks}
	s.api = oncehttptest.New(http.HandlerFunc(s.charge))
	s.api.Window = f.window
	s.api.Random(f.seed, f.rates)
	s.api.FaultFunc(func(a oncehttptest.Attempt) oncehttptest.Fault {
		s.mu.Lock()
		defer s.mu.Unlock()
		switch {
		case s.down:
			return oncehttptest.Status(503)
		case f.choose != nil:
			return f.choose(a)
		}
		return oncehttptest.Fault{}
	})
	s.http = httptest.NewServer(http.HandlerFunc(s.serve))
	s.url = s.http.URL
	return s
}

func (s *server) close() {
	s.api.Close()
	s.http.Close()
}

// serve is every request: it knows which ones are not answered yet.
func (s *server) serve(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	s.flying[r] = true
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.flying, r)
	}()
	s.api.ServeHTTP(w, r)
}

// charge is the effect: what runs once for each key. At a mark, the child dies
// after the charge was made, and before its answer leaves.
func (s *server) charge(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	time.Sleep(10 * time.Millisecond) // the bank
	r.Body = io.NopCloser(bytes.NewReader(body))
	s.charges.ServeHTTP(w, r)

	s.mu.Lock()
	s.charged[orderOf(body)] = true
	kill := s.kill
	if len(s.marks) == 0 || len(s.charged) < s.marks[0] || kill == nil || s.killing {
		s.mu.Unlock()
		return
	}
	s.killing = true
	s.marks = s.marks[1:]
	flying := make([]*http.Request, 0, len(s.flying))
	for r := range s.flying {
		flying = append(flying, r)
	}
	charged := len(s.charged)
	s.mu.Unlock()

	kill()

	s.mu.Lock()
	defer s.mu.Unlock()
	hit := 0
	for _, r := range flying {
		if s.flying[r] {
			hit++
		}
	}
	s.kills = append(s.kills, struct{ charged, hit int }{charged, hit})
}

// orderOf returns the order that a request is about.
func orderOf(body []byte) string {
	var req struct{ Order string }
	_ = json.Unmarshal(body, &req) // what cannot be read has no order
	return req.Order
}

// setKill tells how to kill the child, nil when it has ended; then it reports
// whether the server had it killed.
func (s *server) setKill(kill func()) (killed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	killed = s.killing
	s.kill, s.killing = kill, false
	return killed
}
