package main

import (
	"bytes"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
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
	down    func()                 // called for each request, which is answered 503; nil if the server is up
	charged map[string]bool        // orders that were charged at least once
	flying  map[*http.Request]bool // requests that have arrived and are not answered
	marks   []int                  // numbers of charged orders at which the child is killed
	kill    func()                 // sends the child its SIGKILL; nil without a child
	struck  *strike                // the kill that the child of now has got; nil if none
}

// A strike is what the server saw of a kill.
type strike struct {
	at      time.Time
	charged int             // orders that were charged by then
	flying  []*http.Request // requests that had arrived by then and were not answered
	hit     int             // those of them that the child died without an answer to
	dead    chan struct{}   // closed when the child is dead
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
		oncehttptest.DropRequest():                   0.06, // the connection is reset, nothing was executed
		oncehttptest.DropResponse():                  0.10, // it was executed, the connection is reset
		oncehttptest.TruncateResponse(20):            0.06, // it was executed, the answer ends in its middle
		oncehttptest.Status(503):                     0.06,
		oncehttptest.Status(429, "Retry-After", "1"): 0.01,
	}}
}

var outageFault = oncehttptest.Status(503)

// A client stays away from the end of a key's window by a minute, for clocks and
// delays, and the time of an attempt. So the window stated here is usable for
// 1 s. The server of the late restart forgets its keys after 2 s instead, which
// spares the reader the minute.
const (
	attemptTimeout = 5 * time.Second
	statedWindow   = time.Second + time.Minute + attemptTimeout
	realWindow     = 2 * time.Second
)

// silentFaults are the faults of the late restart: the first attempt to charge
// an order is executed, and never answered.
func silentFaults() faults {
	return faults{window: realWindow, choose: func(a oncehttptest.Attempt) oncehttptest.Fault {
		if a.N == 1 && a.Method == http.MethodPost {
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
		case s.down != nil:
			s.down()
			return outageFault
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
		if k := s.struck; k != nil && r.Context().Err() != nil && slices.Contains(k.flying, r) {
			k.hit++ // nobody was there any more to be answered
		}
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
	if k := s.strike(orderOf(body)); k != nil {
		<-k.dead
	}
}

// strike counts a charge, and has the child killed if that makes a mark.
func (s *server) strike(order string) *strike {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.charged[order] = true
	if len(s.marks) == 0 || len(s.charged) < s.marks[0] || s.kill == nil || s.struck != nil {
		return nil
	}
	s.marks = s.marks[1:]
	s.struck = &strike{at: time.Now(), charged: len(s.charged), flying: slices.Collect(maps.Keys(s.flying)), dead: make(chan struct{})}
	s.kill()
	return s.struck
}

// born tells how to kill the child that was started.
func (s *server) born(kill func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kill, s.struck = kill, nil
}

// died tells that the child is dead. It returns the kill, or nil if the child
// ended by itself.
func (s *server) died() *strike {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.struck
	s.kill, s.struck = nil, nil
	if k != nil {
		for _, r := range k.flying {
			if s.flying[r] {
				k.hit++
			}
		}
		close(k.dead)
	}
	return k
}

// outage takes the server down until d after the first request, and calls back
// then with the number of requests.
func (s *server) outage(d time.Duration, back func(requests int)) {
	first := sync.OnceFunc(func() {
		time.AfterFunc(d, func() {
			s.mu.Lock()
			s.down = nil
			s.mu.Unlock()
			back(len(s.api.Attempts()))
		})
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	s.down = first
}

// orderOf returns the order that a request is about.
func orderOf(body []byte) string {
	var req struct{ Order string }
	_ = json.Unmarshal(body, &req) // what cannot be read has no order
	return req.Order
}
