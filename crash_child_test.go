//go:build unix

package oncehttp_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/oncehttp/oncehttp"
)

// The shop is a program that charges orders and is killed: the test binary,
// executed again with a life in its environment. It knows no more of the
// library than any other program. Where it dies is decided by what it hands to
// the library from outside: the store, the connections, the handler.

// A life is one run of the shop, up to its end or its death.
type life struct {
	Dir        string        // of the store and the journal
	URL        string        // of the payment API
	Number     int           // of this life, beginning with 1
	Orders     int           // to be charged
	Kill       string        // point at which it dies; empty means that it lives
	Nth        int           // dies at the nth time that the point is reached
	After      time.Duration // dies so long after its start, wherever it is; 0 means by Kill
	Seed       uint64        // of what is left to chance
	Background bool          // Client.Run goes on beside the calls
	Poison     string        // order whose handler or attempt is the death of the process
}

const lifeInEnv = "ONCEHTTP_TEST_LIFE"

func init() {
	if text := os.Getenv(lifeInEnv); text != "" {
		var l life
		if err := json.Unmarshal([]byte(text), &l); err != nil {
			panic(err)
		}
		if err := newShop(l).live(); err != nil {
			fmt.Fprintln(os.Stderr, "shop:", err)
			os.Exit(3)
		}
		os.Exit(0)
	}
}

// A shop charges orders. How an order is charged follows from its number.
type shop struct {
	life
	*journal
	client *oncehttp.Client
	rng    *rand.Rand // guarded by mu

	mu      sync.Mutex
	reached map[string]int           // times by point
	took    map[string]time.Duration // last duration of a commit, by kind
	durable map[string]bool          // keys whose record this process has written
	claims  map[oncehttp.ID]int      // as last written by this process
	phase   string                   // call or resume
}

func newShop(l life) *shop {
	return &shop{
		life: l, journal: openJournal(l.Dir, l.Number), rng: rand.New(rand.NewPCG(l.Seed, uint64(l.Number))),
		reached: make(map[string]int), took: make(map[string]time.Duration), durable: make(map[string]bool), claims: make(map[oncehttp.ID]int),
		phase: "call",
	}
}

// chance returns a number in [0, 1).
func (s *shop) chance() float64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rng.Float64()
}

// live is the shop's main function.
func (s *shop) live() error {
	if s.After > 0 {
		time.AfterFunc(s.After, func() { s.die("any moment") })
	}
	bolt, err := oncehttp.OpenBolt(filepath.Join(s.Dir, "store.db"))
	if err != nil {
		return err
	}
	dialer := &net.Dialer{}
	network := &http.Transport{MaxIdleConnsPerHost: s.Orders, DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		s.point("dialling")
		conn, err := dialer.DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		s.point("connected")
		return &shopConn{Conn: conn, shop: s}, nil
	}}
	opts := oncehttp.Options{
		HTTPClient:  &http.Client{Transport: shopTransport{s, network}},
		BackoffBase: 8 * time.Millisecond, BackoffCap: 100 * time.Millisecond, MaxAttempts: 10,
		Authorize: func(_ context.Context, _ oncehttp.Info, req *http.Request) error {
			req.Header.Set("Authorization", shopSecret)
			return nil
		},
		Trace: &oncehttp.Trace{StoreFailed: func(info oncehttp.Info, err error) { s.log("violation", info.Key, "store:", err) }},
	}
	spread := func(n int64) int64 {
		if n >= int64(time.Second) { // over which the workers of Resume start
			n /= 100
		}
		return int64(s.chance() * float64(n))
	}
	if s.client, err = oncehttp.New(shopStore{bolt, s}, opts.WithRand(spread)); err != nil {
		return err
	}
	if s.Number > 1 {
		if err := s.resume(); err != nil {
			return err
		}
	}
	if err := s.charge(); err != nil {
		return err
	}
	if err := s.resume(); err != nil { // what a call left behind
		return err
	}
	return errors.Join(s.client.Close(), bolt.Close())
}

const shopSecret = "Bearer sk_test_shop"

// charge charges all orders that are neither in the ledger nor among the
// operations.
func (s *shop) charge() error {
	s.enter("call")
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	if s.Background {
		all.Go(func() { s.client.Run(ctx, s.handler()) })
	}
	var calls sync.WaitGroup
	done := s.done(ctx)
	for i := range s.Orders {
		if order := fmt.Sprintf("order-%d", i); !done[order] {
			calls.Go(func() { s.call(ctx, i, order) })
		}
	}
	calls.Wait()
	cancel()
	all.Wait()
	return nil
}

// call charges one order.
//
//	i%3 == 0: Start with a key that names the order
//	i%3 == 1: Start with a fresh key, through an http.Client
//	i%3 == 2: a plain Do with a key of its own in the header
func (s *shop) call(ctx context.Context, i int, order string) {
	if named := oncehttp.KeyFor(order, "charge"); i%3 == 0 && s.Number > 1 {
		// All that was begun has been resumed, so this was not.
		if known, err := s.client.Lookup(ctx, named); err != nil || len(known) != 0 {
			s.log("violation", order, "was lost:", known, err)
			return
		}
	}
	var op *oncehttp.Operation
	do := s.client.Do
	key := ""
	switch i % 3 {
	case 0:
		ctx, op = oncehttp.Start(ctx, oncehttp.Op{Key: oncehttp.KeyFor(order, "charge"), Metadata: map[string]string{"order": order}})
	case 1:
		ctx, op = oncehttp.Start(ctx, oncehttp.Op{Metadata: map[string]string{"order": order}})
		do = s.client.StandardClient().Do
	case 2:
		key = oncehttp.KeyFor(order, "charge")
	}
	if op != nil {
		key = op.Key()
	}
	s.log("start", order, key)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL+"/v1/charges", strings.NewReader(`{"order":"`+order+`"}`))
	if err != nil {
		panic(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", shopSecret)
	if op == nil {
		req.Header.Set("Idempotency-Key", key)
	}
	resp, err := do(req)
	if err != nil {
		s.log("violation", order, "call:", err)
		return
	}
	defer resp.Body.Close()
	s.point("before the ledger")
	if err := s.pay(order, resp); err != nil {
		s.log("violation", order, "call:", err)
		return
	}
	if op == nil {
		return
	}
	if err := op.Ack(ctx); err != nil {
		s.log("violation", order, "ack:", err)
	}
}

// pay writes an order into the ledger, durably.
func (s *shop) pay(order string, resp *http.Response) error {
	var charge struct{ ID, Order string }
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = errors.New(resp.Status)
	}
	if err == nil {
		err = json.Unmarshal(body, &charge)
	}
	if err != nil || charge.Order != order {
		return fmt.Errorf("answer %q: %w", body, err)
	}
	s.log("paid", order, charge.ID)
	err = s.file.Sync()
	s.point("ledger written")
	return err
}

// resume finishes what former lives have left.
func (s *shop) resume() error {
	s.enter("resume")
	ctx := context.Background()
	for {
		if _, err := s.client.Resume(ctx, s.handler()); err != nil {
			return err
		}
		open := 0
		for info, err := range s.client.Operations(ctx, oncehttp.Filter{}) {
			if err != nil {
				return err
			}
			if info.Outcome != oncehttp.Unknown { // unknown ones are in the journal
				open++
			}
		}
		if open == 0 {
			return nil
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func (s *shop) handler() oncehttp.Handler {
	return oncehttp.Handler{
		Settled: func(_ context.Context, info oncehttp.Info, resp *http.Response) error {
			s.point("handler called")
			order := info.Metadata["order"]
			if order == "" { // plain ones have no metadata
				for i := range s.Orders {
					if o := fmt.Sprintf("order-%d", i); oncehttp.KeyFor(o, "charge") == info.Key {
						order = o
					}
				}
			}
			if err := s.pay(order, resp); err != nil {
				s.log("violation", order, "handler:", err)
				return err
			}
			return nil
		},
		Unknown: func(_ context.Context, info oncehttp.Info) error {
			s.log("unknown", info.Metadata["order"], info.Reason)
			return nil
		},
	}
}

func (s *shop) enter(phase string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.phase = phase
}

// armed counts that a point is reached, and reports whether it is the time to
// die, and the point's full name.
func (s *shop) armed(point string) (string, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	point = s.phase + ": " + point
	s.reached[point]++
	return point, s.Kill == point && s.reached[point] == s.Nth
}

func (s *shop) point(name string) {
	if full, armed := s.armed(name); armed {
		s.die(full)
	}
}

// die kills the process.
func (s *shop) die(point string) {
	s.log("killed", point)
	syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

// commit does a write, with points before, inside and after it.
func (s *shop) commit(before, inside, after string, write func() error) error {
	s.point(before)
	full, armed := s.armed(inside)
	var done atomic.Bool
	start := time.Now()
	if armed {
		s.mu.Lock()
		d := s.took[before]
		s.mu.Unlock()
		if d == 0 {
			d = time.Millisecond
		}
		d = time.Duration(float64(d) * s.chance())
		go func() {
			for time.Since(start) < d { // sleeping is not as exact
			}
			if done.Load() {
				full += ", too late"
			}
			s.die(full)
		}()
	}
	err := write()
	done.Store(true)
	if armed {
		select {}
	}
	s.mu.Lock()
	s.took[before] = time.Since(start)
	s.mu.Unlock()
	if err == nil {
		s.point(after)
	}
	return err
}

// shopStore dies around writes, and notes which keys have a durable record.
type shopStore struct {
	oncehttp.LazyStore
	shop *shop
}

func (s shopStore) Begin(ctx context.Context, rec oncehttp.Record) (existing *oncehttp.Record, err error) {
	err = s.shop.commit("before Begin", "inside Begin", "after Begin", func() error {
		existing, err = s.LazyStore.Begin(ctx, rec)
		if err == nil && existing == nil {
			s.shop.note(rec, "begun")
		}
		return err
	})
	return existing, err
}

func (s shopStore) Save(ctx context.Context, rec oncehttp.Record) error {
	save := func() error {
		err := s.LazyStore.Save(ctx, rec)
		if err == nil {
			s.shop.note(rec, "taken")
		}
		return err
	}
	switch {
	case s.shop.isClaim(rec):
		return s.shop.commit("before the claim", "inside the claim", "claimed", save)
	case rec.Outcome == oncehttp.Succeeded && !rec.Acked:
		return s.shop.commit("before the answer is stored", "inside the answer's commit", "answer stored", save)
	}
	return save()
}

func (s shopStore) SaveSoon(rec oncehttp.Record, done func(error)) {
	if rec.Outcome != oncehttp.Succeeded {
		s.LazyStore.SaveSoon(rec, done)
		return
	}
	s.shop.point("before the answer is stored lazily")
	s.LazyStore.SaveSoon(rec, func(err error) {
		s.shop.point("answer stored lazily")
		done(err)
	})
}

func (s shopStore) Ack(ctx context.Context, rec oncehttp.Record) error {
	return s.shop.commit("before Ack", "inside Ack", "acknowledged", func() error { return s.LazyStore.Ack(ctx, rec) })
}

// isClaim reports whether a write is a claim by Resume.
func (s *shop) isClaim(rec oncehttp.Record) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	claim := rec.Claims > s.claims[rec.ID]
	s.claims[rec.ID] = rec.Claims
	return claim
}

// note logs the first write of a key's record by this process.
func (s *shop) note(rec oncehttp.Record, verb string) {
	s.mu.Lock()
	first := !s.durable[rec.Key]
	s.durable[rec.Key] = true
	s.mu.Unlock()
	if first {
		s.log(verb, rec.Key)
	}
}

// shopTransport sees a request before anything of it has left.
type shopTransport struct {
	shop *shop
	base *http.Transport
}

func (t shopTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	key := req.Header.Get("Idempotency-Key")
	t.shop.mu.Lock()
	durable := t.shop.durable[key]
	t.shop.mu.Unlock()
	if !durable {
		t.shop.log("violation", key, "is sent before its record was durable")
	}
	if poison := t.shop.Poison; poison != "" {
		body, _ := io.ReadAll(req.Body)
		if bytes.Contains(body, []byte(`"`+poison+`"`)) {
			t.shop.die("poison")
		}
		req = req.Clone(req.Context())
		req.Body = io.NopCloser(bytes.NewReader(body))
	}
	return t.base.RoundTrip(req)
}

// shopConn dies within requests and answers.
type shopConn struct {
	net.Conn
	shop  *shop
	point string // at which to die instead of reading on
}

func (c *shopConn) Write(p []byte) (int, error) {
	if !bytes.HasPrefix(p, []byte("POST ")) {
		return c.Conn.Write(p)
	}
	if full, armed := c.shop.armed("request half written"); armed {
		c.Conn.Write(p[:1+int(c.shop.chance()*float64(len(p)-1))])
		c.shop.die(full)
	}
	n, err := c.Conn.Write(p)
	c.shop.point("request written")
	return n, err
}

func (c *shopConn) Read(p []byte) (int, error) {
	if c.point != "" {
		c.shop.die(c.point)
	}
	n, err := c.Conn.Read(p)
	if !bytes.HasPrefix(p[:n], []byte("HTTP/1.1 200")) {
		return n, err
	}
	header := bytes.Index(p[:n], []byte("\r\n\r\n")) + 4
	if full, armed := c.shop.armed("answer's header read"); armed {
		c.point, n = full, header
	}
	if full, armed := c.shop.armed("answer's body half read"); armed {
		c.point, n = full, header+int(c.shop.chance()*float64(n-header))
	}
	return n, err
}

// A journal is the shop's diary: one line for each thing that happened, in
// order, across all lives. Its lines "paid" are the ledger.
type journal struct {
	file *os.File
	life int
}

func openJournal(dir string, life int) *journal {
	f, err := os.OpenFile(filepath.Join(dir, "journal"), os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600)
	if err != nil {
		panic(err)
	}
	return &journal{f, life}
}

func (j *journal) log(verb string, args ...any) {
	line := fmt.Sprintln(append([]any{j.life, verb}, args...)...)
	if _, err := j.file.WriteString(line); err != nil {
		panic(err)
	}
}

// done returns the orders that need no call: those in the ledger, and those
// whose operation waits for a decision.
func (s *shop) done(ctx context.Context) map[string]bool {
	done := make(map[string]bool)
	for _, e := range readJournal(s.Dir) {
		if e.verb == "paid" {
			done[e.args[0]] = true
		}
	}
	for info, err := range s.client.Operations(ctx, oncehttp.Filter{}) {
		if err != nil {
			s.log("violation", "-", "operations:", err)
		}
		done[info.Metadata["order"]] = true
	}
	return done
}

// An event is a line of the journal.
type event struct {
	life int
	verb string
	args []string
}

func readJournal(dir string) (events []event) {
	text, err := os.ReadFile(filepath.Join(dir, "journal"))
	if err != nil && !os.IsNotExist(err) {
		panic(err)
	}
	for line := range strings.Lines(string(text)) {
		var e event
		fields := strings.Fields(line)
		fmt.Sscan(fields[0], &e.life)
		e.verb, e.args = fields[1], fields[2:]
		events = append(events, e)
	}
	return events
}
