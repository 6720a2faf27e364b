//go:build linux

package torture

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// The shop is the program whose machine loses its power: it charges orders, as
// users of the library do, on a file system that records what is done to it.

// A What is something that happened, other than on the file system.
type What uint8

const (
	Begun   What = iota // a caller asks for the operation
	Wire                // an attempt may reach the server from now on
	WireEnd             // and does not any more, unless it has
	Effect              // the server has executed the operation
	Told                // a caller, or a hook, was told Outcome
	Acking              // a caller or a handler is about to acknowledge
	Acked               // and knows that it is acknowledged
	Handed              // a handler is given the answer
	Failed              // an error of the store; Err
	Opened              // the client, anew
	Moment              // nothing; for its time
)

// An Event is something that happened. Op is set if it was on the file system.
type Event struct {
	Stamp   uint64
	Op      *Op
	What    What
	Key     string
	Order   order
	Plain   bool // with Begun and Wire: nobody will acknowledge
	Outcome oncehttp.Outcome
	Lost    bool // with Told: not recorded, and said so
	Err     error
	Time    time.Time
}

// An order is what an operation is about, and the body of its request.
type order struct {
	Name    string `json:"order"`
	Decline bool   `json:"decline,omitempty"`
	Pad     string `json:"pad,omitempty"`
}

func (o order) body() string {
	b, err := json.Marshal(o)
	if err != nil {
		panic(err)
	}
	return string(b)
}

func orderOf(body []byte) (o order) {
	json.Unmarshal(body, &o)
	return o
}

// answer is what the payment API answers.
func (o order) answer() (status int, body string) {
	if o.Decline {
		return http.StatusPaymentRequired, `{"error":"declined ` + o.Name + `"}`
	}
	return http.StatusOK, `{"id":"ch_` + o.Name + `"}`
}

const (
	payURL = "https://api.shop.test/v1/charges"
	secret = "Bearer sk_test"
)

// newServer returns the payment API. ran is called when it executes something.
func newServer(ran func(key string, o order)) *oncehttptest.Server {
	return oncehttptest.New(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		o := orderOf(b)
		ran(r.Header.Get("Idempotency-Key"), o)
		status, body := o.answer()
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		io.WriteString(w, body)
	}))
}

// post sends a request to a server as an attempt does.
func post(server http.RoundTripper, key, body string) error {
	req, err := http.NewRequest(http.MethodPost, payURL, strings.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", secret)
	req.Header.Set("Idempotency-Key", key)
	resp, err := server.RoundTrip(req)
	if err != nil {
		return err
	}
	io.Copy(io.Discard, resp.Body)
	return resp.Body.Close()
}

// A plan is an order and how it is charged.
type plan struct {
	order
	Key    string               // "": a fresh one
	Plain  bool                 // by a plain Do
	NoAck  bool                 // the answer is not acknowledged
	Cancel bool                 // the caller leaves during the second attempt
	Twice  bool                 // asked for again, with the same key
	Faults []oncehttptest.Fault // of the attempts
}

// A shop is one life of the program.
type shop struct {
	t      *testing.T
	path   string
	stamps *Stamps
	server *oncehttptest.Server
	client *oncehttp.Client

	mu     sync.Mutex // guards the following
	events []Event
	plans  map[string]plan
	tries  map[string]int // attempts by order
}

func newShop(t *testing.T, stamps *Stamps, dir string) *shop {
	s := &shop{t: t, path: filepath.Join(dir, "once.db"), stamps: stamps, plans: make(map[string]plan), tries: make(map[string]int)}
	s.server = newServer(func(key string, o order) { s.add(Event{What: Effect, Key: key, Order: o}) })
	s.server.FaultFunc(func(a oncehttptest.Attempt) oncehttptest.Fault {
		s.mu.Lock()
		defer s.mu.Unlock()
		if faults := s.plans[orderOf(a.Body).Name].Faults; a.N <= len(faults) {
			return faults[a.N-1]
		}
		return oncehttptest.Fault{}
	})
	return s
}

func (s *shop) add(e Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e.Stamp, e.Time = s.stamps.Next(), time.Now()
	s.events = append(s.events, e)
}

// RoundTrip is the way to the server.
func (s *shop) RoundTrip(req *http.Request) (*http.Response, error) {
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return nil, err
	}
	req = req.Clone(req.Context())
	req.Body = io.NopCloser(bytes.NewReader(body))
	o, key := orderOf(body), req.Header.Get("Idempotency-Key")
	s.mu.Lock()
	p := s.plans[o.Name]
	n := s.tries[o.Name]
	s.tries[o.Name]++
	s.mu.Unlock()
	if n < len(p.Faults) && strings.Contains(p.Faults[n].String(), "DialError") {
		return s.server.Transport().RoundTrip(req)
	}
	s.add(Event{What: Wire, Key: key, Order: o, Plain: p.Plain})
	defer s.add(Event{What: WireEnd, Key: key, Order: o})
	return s.server.Transport().RoundTrip(req)
}

// options are those of a client that reaches a server by a transport.
func options(rt http.RoundTripper) *oncehttp.Options {
	return &oncehttp.Options{
		HTTPClient: &http.Client{Transport: rt}, MaxAttempts: 3, BackoffBase: time.Millisecond, BackoffCap: time.Millisecond,
		Breaker: &oncehttp.Breaker{Disabled: true}, Budget: &oncehttp.Budget{Disabled: true},
		Providers: []oncehttp.Provider{{Name: "shop", Hosts: []string{"api.shop.test"}, StoredRefusals: []int{http.StatusPaymentRequired}}},
		Authorize: func(_ context.Context, _ oncehttp.Info, req *http.Request) error {
			req.Header.Set("Authorization", secret)
			return nil
		},
	}
}

// open opens the client. It returns the store's error.
func (s *shop) open() error {
	opts := options(s)
	opts.Trace = &oncehttp.Trace{
		Settled: func(info oncehttp.Info) {
			s.add(Event{What: Told, Key: info.Key, Outcome: info.Outcome, Lost: info.NotRecorded})
		},
		StoreFailed: func(info oncehttp.Info, err error) { s.add(Event{What: Failed, Key: info.Key, Err: err}) },
	}
	var err error
	if s.client, err = oncehttp.Open(s.path, opts); err != nil {
		s.add(Event{What: Failed, Err: err})
		return err
	}
	s.add(Event{What: Opened})
	return nil
}

func (s *shop) close() {
	if s.client != nil {
		if err := s.client.Close(); err != nil {
			s.add(Event{What: Failed, Err: err})
		}
	}
}

// charge charges orders, up to 8 at a time.
func (s *shop) charge(plans ...plan) {
	var all sync.WaitGroup
	slots := make(chan bool, 8)
	client := s.client
	for _, p := range plans {
		s.mu.Lock()
		s.plans[p.Name] = p
		s.mu.Unlock()
		slots <- true
		all.Go(func() {
			defer func() { <-slots }()
			s.call(client, p)
			if p.Twice {
				s.call(client, p)
			}
		})
	}
	all.Wait()
}

// call charges one order and acknowledges the answer. It returns what it came to.
func (s *shop) call(client *oncehttp.Client, p plan) (oncehttp.Info, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if p.Cancel {
		time.AfterFunc(20*time.Second, cancel)
	}
	var op *oncehttp.Operation
	if !p.Plain {
		ctx, op = oncehttp.Start(ctx, oncehttp.Op{Key: p.Key, Scope: "shop", Metadata: map[string]string{"order": p.Name}})
	}
	key := p.Key
	if op != nil {
		key = op.Key()
	}
	s.add(Event{What: Begun, Key: key, Order: p.order, Plain: p.Plain})
	info, err := charge(ctx, client, op, key, p.order)
	s.add(Event{What: Told, Key: cmp.Or(info.Key, key), Order: p.order, Outcome: info.Outcome, Lost: info.NotRecorded, Err: err})
	if op == nil || p.NoAck || info.Outcome != oncehttp.Succeeded && info.Outcome != oncehttp.Rejected {
		return info, err
	}
	s.add(Event{What: Acking, Key: key})
	if ackErr := op.Ack(context.WithoutCancel(ctx)); ackErr != nil {
		s.add(Event{What: Failed, Key: key, Err: ackErr})
	} else {
		s.add(Event{What: Acked, Key: key})
	}
	return info, err
}

// charge sends one request, and returns what its caller knows then.
func charge(ctx context.Context, client *oncehttp.Client, op *oncehttp.Operation, key string, o order) (oncehttp.Info, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, payURL, strings.NewReader(o.body()))
	if err != nil {
		return oncehttp.Info{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", secret)
	if op == nil && key != "" {
		req.Header.Set("Idempotency-Key", key)
	}
	resp, err := client.Do(req)
	var info oncehttp.Info
	switch failed, ok := errors.AsType[*oncehttp.OperationError](err); {
	case op != nil:
		info = op.Info()
	case ok:
		info.Key, info.Outcome = failed.Key, failed.Outcome
		info.NotRecorded = failed.Outcome == oncehttp.Unknown && (errors.Is(err, oncehttp.ErrStoreUncertain) || errors.Is(err, oncehttp.ErrStoreFailed))
	case err == nil:
		info, _ = oncehttp.OperationFrom(resp)
	}
	if err != nil {
		return info, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if info.Outcome == oncehttp.Succeeded || info.Outcome == oncehttp.Rejected {
		if status, want := o.answer(); err == nil && (status != resp.StatusCode || want != string(body)) {
			err = fmt.Errorf("%w: %d %q", errAnswer, resp.StatusCode, body)
		}
	}
	return info, err
}

var errAnswer = errors.New("this is not the answer to the order")

// resume makes passes until nothing is left to do, or an error.
func (s *shop) resume() {
	for range 10 {
		sum, err := s.client.Resume(context.Background(), oncehttp.Handler{
			Settled: func(_ context.Context, info oncehttp.Info, _ *http.Response) error {
				s.add(Event{What: Handed, Key: info.Key})
				s.add(Event{What: Acking, Key: info.Key})
				return nil
			},
			Unknown: func(context.Context, oncehttp.Info) error { return nil },
		})
		if err != nil {
			s.add(Event{What: Failed, Err: err})
			return
		}
		if sum.Pending+sum.Failed == 0 {
			return
		}
		time.Sleep(2 * time.Second)
	}
}

// rest lets time pass.
func (s *shop) rest(d time.Duration) {
	for ; d > 0; d -= 10 * time.Minute {
		time.Sleep(min(d, 10*time.Minute))
		s.add(Event{What: Moment})
	}
}

// A history is what happened on a disk, in order. Two lives follow one another
// if the second begins where the first was cut off.
type history struct {
	events []Event
	server map[string]order // executed before the first event, by key
}

// record lets a shop live on a fresh directory of the file system with files,
// and returns what happened.
func record(t *testing.T, fs *FS, files map[string][]byte, server map[string]order, now time.Time, live func(*shop)) history {
	t.Helper()
	dir, err := fs.Reset(files)
	if err != nil {
		t.Fatal(err)
	}
	var s *shop
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(now))
		s = newShop(t, fs.Stamps, dir)
		for key, o := range server {
			if err := post(s.server.Transport(), key, o.body()); err != nil {
				t.Fatal(err)
			}
		}
		s.events = nil
		s.add(Event{What: Moment})
		live(s)
		s.close()
		s.server.Close()
	})
	log, _, _, err := fs.Log()
	if err != nil {
		t.Fatal(err)
	}
	h := history{events: s.events, server: server}
	for _, op := range log {
		h.events = append(h.events, Event{Stamp: op.Stamp, Op: &op})
	}
	slices.SortFunc(h.events, func(a, b Event) int { return cmp.Compare(a.Stamp, b.Stamp) })
	return h
}

// trade is a life in which everything happens.
func trade(rnd *rand.Rand, prefix string, n int) func(*shop) {
	plans := make([]plan, n)
	for i := range plans {
		plans[i] = draw(rnd, fmt.Sprint(prefix, i))
	}
	return func(s *shop) {
		if s.open() != nil {
			return
		}
		s.resume()
		third := len(plans) / 3
		s.charge(plans[:third]...)
		s.resume()
		s.charge(plans[third : 2*third]...)
		s.close()
		if s.open() != nil {
			return
		}
		var all sync.WaitGroup
		all.Go(func() { s.charge(plans[2*third:]...) })
		time.Sleep(time.Duration(1+rnd.IntN(20)) * time.Millisecond)
		s.close() // whatever is under way
		all.Wait()
		if s.open() != nil {
			return
		}
		s.resume()
	}
}

// draw makes a plan at random.
func draw(rnd *rand.Rand, name string) plan {
	p := plan{order: order{Name: name, Decline: rnd.IntN(6) == 0}}
	if rnd.IntN(3) == 0 {
		p.Pad = strings.Repeat("x", rnd.IntN(9000))
	}
	switch rnd.IntN(4) {
	case 0:
		p.Key = oncehttp.KeyFor(name)
	case 1:
		p.Key, p.Plain = oncehttp.KeyFor(name), true
	case 2:
		p.Plain = true
	}
	p.NoAck = rnd.IntN(6) == 0
	p.Twice = p.Key != "" && rnd.IntN(4) == 0
	times := func(f oncehttptest.Fault, n int) {
		for range n {
			p.Faults = append(p.Faults, f)
		}
	}
	switch rnd.IntN(10) {
	case 0: // not sent
		times(oncehttptest.DialError(nil), 3)
	case 1: // unknown
		times(oncehttptest.DropRequest(), 3)
	case 2: // unknown, and done
		times(oncehttptest.DropResponse(), 3)
	case 3:
		times(oncehttptest.DropResponse(), 1)
	case 4:
		times(oncehttptest.Status(http.StatusServiceUnavailable), 1+rnd.IntN(2))
	case 5:
		times(oncehttptest.Hold(time.Minute), 1)
		p.Cancel = true
	case 6:
		times(oncehttptest.DialError(nil), 1)
		times(oncehttptest.Slow(10*time.Millisecond), 1)
	}
	return p
}
