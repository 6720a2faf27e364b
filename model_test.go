package oncehttp_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// The six promises of the package, as what the model checks. A seventh is what
// any code promises: no panic, no hang, no error that blames the wrong one.
const (
	durableFirst     = 1 // nothing on the wire without a durable, pending record
	oneRequestPerKey = 2 // one key, one request
	notForgotten     = 3 // what is unfinished is found again; what is finished is left alone
	nothingLate      = 4 // nothing is sent when the server may have forgotten the key; one effect
	boundedRetries   = 5 // retries are
	truthTold        = 6 // what was told is so, and stays so
	soundCode        = 7
)

// A world is one history being lived through, in a bubble of its own.
type modelWorld struct {
	h       *modelHistory
	profile modelProfile
	server  *oncehttptest.Server
	cover   *modelCoverage
	calls   sync.WaitGroup // everything the steps have started

	rngMu sync.Mutex // guards rng
	rng   *rand.Rand

	mu      sync.Mutex // guards the following
	failure string     // the first one
	proc    *modelProc
	store   *oncehttptest.Store // of the next process
	down    time.Duration       // until then
	offset  time.Duration       // of the wall clock
	creds   string              // how requests are authorized; see modelStep.How
	orders  map[string]*modelOrder
	rows    map[oncehttp.ID]*modelRow
	wire    map[string]string // what went over the wire under a key
	forgot  map[string]bool   // keys that were forgotten on demand
	stepped time.Duration     // sum of the steps of the clock
	skewed  bool              // a process has started since the clock was stepped by too much
	calm    bool              // the history is over: no more faults
}

// An order is one logical operation of the program under test.
type modelOrder struct {
	token         string // operation / variant / mode
	op, variant   int
	mode          string
	method, url   string
	body          string
	kind          string
	faults        []string
	accounts      []string       // with which it was asked for
	charges       map[string]int // by account
	resolved      bool           // somebody said what became of it
	forgotten     bool
	windowFrom    time.Time // the first time it was handed to the transport
	sends, may    int       // how often it was, and may have been
	redirects     int
	asking        int // callers that wait for it now
	askedIn       *modelProc
	toldIn        *modelProc
	told          oncehttp.Outcome // last, without any asking since; Undecided means nothing
	mayAck, acked bool
	decided       bool // Before said Send
	holders       []*modelHolder
	heard         bool // somebody was told what became of it
	waiting       bool // a caller of Start has its answer, and was to acknowledge it
}

// A holder is a caller of Start who has the answer and may still acknowledge it.
type modelHolder struct {
	p     *modelProc
	ctx   context.Context
	since time.Time
}

// A row is a record as it is durable.
type modelRow struct {
	rec   oncehttp.Record
	token string
	auth  string // with which it was sent first
	gone  bool
}

// A proc is one life of the process.
type modelProc struct {
	w      *modelWorld
	store  *oncehttptest.Store
	client *oncehttp.Client
	ctx    context.Context // ends with the process
	cancel context.CancelCauseFunc
	start  time.Time

	// Guarded by world.mu.
	crashAt int // events until it crashes; 0 means that it does not
	dead    bool
	closed  bool
	resumes int // passes that run
	firsts  int // first attempts
	retries int
	faulty  bool                   // a write was made to fail
	writing map[oncehttp.ID]string // writes under way
}

var errModelCrashed = errors.New("the process has crashed")

// liveThrough lives through a history and returns what went wrong, or "".
func liveThrough(t *testing.T, h *modelHistory, cover *modelCoverage) (failure string) {
	defer func() {
		if v := recover(); v != nil {
			failure = fmt.Sprintf("promise %d: %v", soundCode, v)
		}
	}()
	synctest.Test(t, func(*testing.T) {
		w := newModelWorld(h, cover)
		defer func() { failure = w.failure }()
		w.run()
	})
	return failure
}

func newModelWorld(h *modelHistory, cover *modelCoverage) *modelWorld {
	w := &modelWorld{
		h: h, profile: modelProfiles[h.Profile], cover: cover, creds: "good",
		rng:    rand.New(rand.NewPCG(h.Seed, 0x68747470)),
		orders: make(map[string]*modelOrder), rows: make(map[oncehttp.ID]*modelRow),
		wire: make(map[string]string), forgot: make(map[string]bool), store: oncehttptest.NewStore(),
	}
	w.server = oncehttptest.New(http.HandlerFunc(w.serve))
	w.server.Window = w.profile.window
	w.server.Account = modelAccount
	w.server.FaultFunc(w.fault)
	return w
}

// fail notes the first thing that went wrong.
func (w *modelWorld) fail(promise int, format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.failLocked(promise, format, args...)
}

func (w *modelWorld) failLocked(promise int, format string, args ...any) {
	if w.failure == "" {
		at := time.Since(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC))
		w.failure = fmt.Sprintf("promise %d: after %v: ", promise, at) + fmt.Sprintf(format, args...)
	}
}

func (w *modelWorld) failed() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.failure != ""
}

// rnd is uniform in [0, n).
func (w *modelWorld) rnd(n int64) int64 {
	w.rngMu.Lock()
	defer w.rngMu.Unlock()
	return w.rng.Int64N(n)
}

// pause sleeps for up to d. What happens at the same time happens in no order,
// so everything takes its own time.
func (w *modelWorld) pause(d time.Duration) { time.Sleep(time.Duration(1 + w.rnd(int64(d)))) }

func (w *modelWorld) wall() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return time.Now().Add(w.offset)
}

// modelAccount is the server's: API keys of the same letters are of one account.
func modelAccount(h http.Header) string {
	switch h.Get("Authorization") {
	case "Bearer sk_test_1", "Bearer sk_test_2":
		return "test"
	case "Bearer sk_live_1", "Bearer sk_live_2":
		return "live"
	case "Bearer sk_test_b1", "Bearer sk_test_b2":
		return "b"
	}
	return ""
}

// authorization is what the program deployed now sends for an account.
func (w *modelWorld) authorization(mode string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	key := map[string]string{"test": "sk_test_", "live": "sk_live_", "b": "sk_test_b"}[mode]
	switch w.creds {
	case "good":
		return "Bearer " + key + "1"
	case "rotated":
		return "Bearer " + key + "2"
	case "bad":
		return "Bearer " + key + "wrong"
	case "live":
		return "Bearer sk_live_1"
	}
	return ""
}

const modelTokenHeader = "X-Order"

// orderOf returns the order of a step's caller.
func (w *modelWorld) orderOf(op, variant int, mode string) *modelOrder {
	if mode == "" {
		mode = "test"
	}
	if kindOfOrder(op) == "bodyless" {
		variant = 0 // there is nothing to differ in
	}
	token := fmt.Sprintf("order<%d/%d/%s>", op, variant, mode)
	w.mu.Lock()
	defer w.mu.Unlock()
	o := w.orders[token]
	if o == nil {
		w.cover.hit("kind " + kindOfOrder(op))
		o = &modelOrder{token: token, op: op, variant: variant, mode: mode, method: http.MethodPost, kind: kindOfOrder(op), charges: make(map[string]int)}
		o.url = fmt.Sprintf("%s/orders/%s/%d", w.profile.base, mode, op)
		o.body = fmt.Sprintf(`{"order":%d,"variant":%d}`, op, variant)
		switch o.kind {
		case "bodyless":
			o.body = ""
		case "put":
			o.method = http.MethodPut
		}
		w.orders[token] = o
	}
	return o
}

// tokenInRequest finds an order's token in a stored request.
func tokenInRequest(request []byte) string {
	i := bytes.Index(request, []byte("order<"))
	if i < 0 {
		return ""
	}
	token, _, _ := bytes.Cut(request[i:], []byte(">"))
	return string(token) + ">"
}

// The server.

// fault is what happens to an attempt.
func (w *modelWorld) fault(a oncehttptest.Attempt) oncehttptest.Fault {
	if a.Key == "" {
		return oncehttptest.Fault{}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	o := w.orders[a.Header.Get(modelTokenHeader)]
	if o == nil {
		return oncehttptest.Fault{}
	}
	name := "none"
	if len(o.faults) > 0 {
		name, o.faults = o.faults[0], o.faults[1:]
	}
	w.cover.hit("fault " + name)
	if a.Account == "" && (name == "none" || !o.breaksLine(name)) {
		w.cover.hit("wrong credentials")
		return oncehttptest.Unauthorized()
	}
	if name == "307" {
		o.redirects++
		return oncehttptest.Redirect(307, a.Path)
	}
	return modelFaults[name]
}

// breaksLine reports whether a fault comes before the server looks at a request.
func (o *modelOrder) breaksLine(name string) bool {
	return strings.Contains(name, "dial") || strings.HasPrefix(name, "drop") || name == "nxdomain" || name == "silence"
}

// serve is the effect.
func (w *modelWorld) serve(rw http.ResponseWriter, r *http.Request) {
	token := r.Header.Get(modelTokenHeader)
	w.mu.Lock()
	o := w.orders[token]
	w.mu.Unlock()
	rw.Header().Set("Content-Type", "application/json")
	switch {
	case r.Method == http.MethodGet:
		if r.Header.Get("Idempotency-Key") != "" {
			w.fail(oneRequestPerKey, "the GET after a 303 has a key")
		}
	case o == nil:
		w.fail(oneRequestPerKey, "a request without its header: %v", r.Header)
	case o.kind == "declined":
		rw.WriteHeader(http.StatusPaymentRequired)
		fmt.Fprintf(rw, `{"error":{"type":"card_error","code":"card_declined","message":%q}}`, token)
		return
	case o.kind == "invalid":
		rw.WriteHeader(http.StatusUnprocessableEntity)
		fmt.Fprintf(rw, `{"error":{"type":"invalid_request_error","message":%q}}`, token)
		return
	default:
		w.charged(o, modelAccount(r.Header))
	}
	if o != nil && o.kind == "see-other" && r.Method != http.MethodGet {
		rw.Header().Set("Location", o.url+"/receipt")
		rw.WriteHeader(http.StatusSeeOther)
	}
	fill := ""
	if o != nil && o.kind == "big" {
		fill = strings.Repeat("x", 3*modelMaxResponse)
	}
	fmt.Fprintf(rw, `{"object":"charge","order":"%s","fill":"%s"}`, token, fill)
}

const modelMaxResponse = 1 << 10

// charged notes an effect.
func (w *modelWorld) charged(o *modelOrder, account string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	o.charges[account]++
	if n := o.charges[account]; n > 1 && !o.forgotten && !w.skewed {
		w.failLocked(nothingLate, "%s had its effect %d times", o.token, n)
	}
	if o.told == oncehttp.Rejected || o.told == oncehttp.NotSent {
		if !o.forgotten && len(o.accounts) == 1 {
			w.failLocked(truthTold, "%s had its effect although its caller was told that it was %v", o.token, o.told)
		}
	}
}

// effects counts the effects of an order, with whatever account. What a caller
// is told is about one account: it is compared only if there is no other.
func (o *modelOrder) effects() (n int) {
	for _, c := range o.charges {
		n += c
	}
	return n
}

// answers reports whether a body is the answer of the order, and whole.
func (o *modelOrder) answers(body string) bool {
	return o.kind == "see-other" || strings.Contains(body, o.token) && (strings.HasSuffix(body, "}") || o.kind == "big")
}

// reached counts the attempts of an order that reached the server.
func (w *modelWorld) reached(o *modelOrder) (n int) {
	for _, a := range w.server.Attempts() {
		if a.Key != "" && a.Header.Get(modelTokenHeader) == o.token {
			n++
		}
	}
	return n
}

// The process.

// up returns the running process, starting one if there is none.
func (w *modelWorld) up() *modelProc {
	w.mu.Lock()
	p, down := w.proc, w.down
	if p != nil && !p.dead && !p.closed {
		w.mu.Unlock()
		return p
	}
	w.mu.Unlock()
	time.Sleep(down)

	w.mu.Lock()
	p = &modelProc{w: w, store: w.store, start: time.Now(), writing: make(map[oncehttp.ID]string)}
	p.ctx, p.cancel = context.WithCancelCause(context.Background())
	if w.stepped > w.profile.window/200 {
		w.skewed = true
	}
	w.mu.Unlock()
	w.resync(p.store)
	p.store.Before, p.store.After = p.before, p.after
	opts := oncehttp.Options{
		HTTPClient: &http.Client{Transport: modelGate{p}}, Authorize: p.authorize, MaxResponseBytes: modelMaxResponse,
		Budget: modelBudgets[w.h.Budget], Breaker: modelBreakers[w.h.Breaker],
		Providers: []oncehttp.Provider{{
			Name: "short", Hosts: []string{"short.example.test"}, Window: modelProfiles["short"].window, AttemptTimeout: modelProfiles["short"].timeout,
		}},
		Trace: &oncehttp.Trace{Begun: p.begun, AttemptStart: p.attemptStart, AttemptDone: p.attemptDone, Retry: p.retry, StoreFailed: p.storeFailed},
	}
	client, err := oncehttp.New(modelStore{p.store, p}, (*opts.WithClock(w.wall)).WithRand(w.rnd))
	if err != nil {
		w.fail(notForgotten, "opening the client: %v", err)
		panic(err)
	}
	open := make(map[oncehttp.ID]bool)
	for i, err := range client.Operations(p.ctx, oncehttp.Filter{}) {
		if err != nil {
			w.fail(notForgotten, "Operations after a restart: %v", err)
		}
		open[i.ID] = true
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, r := range w.rows {
		if !r.gone && !r.rec.Acked && !open[id] {
			w.failLocked(notForgotten, "%s (%s) is not found after a restart", r.token, stateOfRecord(&r.rec))
		}
	}
	p.client = client
	w.proc = p
	for _, o := range w.orders {
		o.asking, o.askedIn, o.decided = 0, nil, false
	}
	return p
}

var modelBudgets = map[string]*oncehttp.Budget{
	"": nil, "none": {Ratio: -1, MinPerSecond: -1}, "tight": {Ratio: 0.5, MinPerSecond: 0.1, Burst: 2},
}

var modelBreakers = map[string]*oncehttp.Breaker{"": nil, "quick": {MinRequests: 3, FailureRatio: 0.4, Consecutive: 3, OpenFor: 5 * time.Second}}

// resync reads what a crash left.
func (w *modelWorld) resync(s *oncehttptest.Store) {
	ctx := context.Background()
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, r := range w.rows {
		rec, err := s.Get(ctx, id)
		switch {
		case err == nil:
			if r.gone {
				r.token, r.auth = tokenInRequest(rec.Request), ""
			}
			r.rec, r.gone = *rec, false
			if o := w.orders[r.token]; o != nil && rec.Acked && !rec.AckDue {
				o.heard = true // its call was just returning
			}
		case r.gone || r.rec.Acked || w.forgot[id.Key]: // purged, or forgotten
			r.gone = true
		case w.orders[r.token] != nil && w.reached(w.orders[r.token]) == 0: // removed: it was never sent
			r.gone = true
		default:
			w.failLocked(notForgotten, "the record of %s is not there after a restart", r.token)
		}
	}
	list, err := s.List(ctx, 0, 1000)
	if err != nil {
		w.failLocked(notForgotten, "List: %v", err)
	}
	for _, head := range list {
		if w.rows[head.ID] == nil {
			if rec, err := s.Get(ctx, head.ID); err == nil {
				w.rows[head.ID] = &modelRow{rec: *rec, token: tokenInRequest(rec.Request)}
			}
		}
	}
}

// event is a point at which the process may crash. It reports whether it is
// alive, after the event.
func (p *modelProc) event(kind string) bool {
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	if p.crashAt > 0 && !p.dead {
		if p.crashAt--; p.crashAt == 0 {
			p.w.cover.hit("crash at " + kind)
			p.killLocked()
		}
	}
	return !p.dead
}

func (p *modelProc) isOver() bool {
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	return p.dead || p.closed
}

func (p *modelProc) wasFaulty() bool {
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	return p.faulty
}

func (p *modelProc) isDead() bool {
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	return p.dead
}

// killLocked ends the process: its connections break, nothing it does from now
// on reaches anybody. What is left of it ends by itself, soon.
func (p *modelProc) killLocked() {
	if p.dead {
		return
	}
	p.dead = true
	p.w.store = p.store.Crash()
	p.cancel(errModelCrashed)
	p.w.calls.Go(func() {
		if err := p.client.Close(); err != nil {
			p.w.fail(soundCode, "Close after a crash: %v", err)
		}
	})
}

// close ends the process in order.
func (p *modelProc) close(limit time.Duration, down time.Duration) {
	w := p.w
	var err error
	if limit == 0 {
		err = p.client.Close()
	} else {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		err = p.client.Shutdown(ctx)
		cancel()
		if errors.Is(err, context.DeadlineExceeded) {
			w.cover.hit("shutdown cuts off")
			err = nil
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if p.dead { // meanwhile
		return
	}
	if err != nil {
		w.failLocked(soundCode, "closing: %v", err)
	}
	// Everything is durable now: the crash of the store takes nothing away.
	// Callers hear of the end in the same instant.
	p.closed = true
	w.store, w.down = p.store.Crash(), down
	records := make(map[string]int)
	for _, r := range w.rows {
		records[r.token]++
	}
	for id, r := range w.rows {
		rec, err := w.store.Get(context.Background(), id)
		if o := w.orders[r.token]; o != nil && records[r.token] == 1 && err == nil && o.told == oncehttp.Succeeded && o.toldIn == p && o.asking == 0 && rec.Outcome == oncehttp.Undecided && !p.faulty {
			w.failLocked(notForgotten, "the success of %s is lost by Shutdown", o.token)
		}
	}
	w.mu.Unlock()
	time.Sleep(time.Nanosecond)
	w.mu.Lock()
	p.dead = true
	p.cancel(errModelCrashed)
}

func (p *modelProc) authorize(_ context.Context, i oncehttp.Info, r *http.Request) error {
	w := p.w
	if r.Header.Get("Authorization") != "" {
		return nil
	}
	mode := strings.Split(strings.TrimPrefix(i.URL, w.profile.base), "/")[2]
	w.mu.Lock()
	calm := w.calm
	w.mu.Unlock()
	if calm && w.h.Profile == "stripe" { // then each operation gets what it began with
		if mode = strings.Split(i.Scope, "/")[0]; mode == "" {
			return nil
		}
		if strings.HasPrefix(i.URL, w.profile.base+"/orders/b/") && mode == "test" {
			mode = "b"
		}
	}
	if auth := w.authorization(mode); auth != "" {
		r.Header.Set("Authorization", auth)
	}
	return nil
}

// modelStore is a store that takes its time to read, as one on a disk.
type modelStore struct {
	*oncehttptest.Store
	p *modelProc
}

// only notes a write of an ID, until the function it returns is called. The
// contract allows one at a time, beside what callers acknowledge.
func (s modelStore) only(op string, id oncehttp.ID) func() {
	w := s.p.w
	w.mu.Lock()
	defer w.mu.Unlock()
	if other := s.p.writing[id]; other != "" && !s.p.dead {
		w.failLocked(soundCode, "%s of %s during its %s", op, id.Key, other)
	}
	s.p.writing[id] = op
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(s.p.writing, id)
	}
}

func (s modelStore) Begin(ctx context.Context, rec oncehttp.Record) (*oncehttp.Record, error) {
	defer s.only("Begin", rec.ID)()
	return s.Store.Begin(ctx, rec)
}

func (s modelStore) Save(ctx context.Context, rec oncehttp.Record) error {
	defer s.only("Save", rec.ID)()
	return s.Store.Save(ctx, rec)
}

func (s modelStore) Delete(ctx context.Context, rec oncehttp.Record) error {
	defer s.only("Delete", rec.ID)()
	return s.Store.Delete(ctx, rec)
}

func (s modelStore) Get(ctx context.Context, id oncehttp.ID) (*oncehttp.Record, error) {
	rec, err := s.Store.Get(ctx, id)
	s.p.w.pause(100 * time.Microsecond)
	return rec, err
}

func (s modelStore) List(ctx context.Context, after uint64, n int) ([]oncehttp.Record, error) {
	list, err := s.Store.List(ctx, after, n)
	s.p.w.pause(300 * time.Microsecond)
	return list, err
}

// before and after are what happens around a write.
func (p *modelProc) before(op string, _ oncehttp.Record) {
	p.event("before " + op)
	if op != "SaveSoon" {
		p.w.pause(600 * time.Microsecond)
	}
}

func (p *modelProc) after(op string, rec oncehttp.Record) {
	p.wrote(op, rec)
	p.event("after " + op)
	if op != "SaveSoon" {
		p.w.pause(300 * time.Microsecond)
	}
}

// wrote notes what is durable now.
func (p *modelProc) wrote(op string, rec oncehttp.Record) {
	w := p.w
	cur, err := p.store.Get(context.Background(), rec.ID)
	w.mu.Lock()
	defer w.mu.Unlock()
	if p.dead || err != nil && !errors.Is(err, oncehttp.ErrNotFound) {
		return // see resync
	}
	r := w.rows[rec.ID]
	if r == nil {
		if cur == nil {
			return
		}
		r = &modelRow{token: tokenInRequest(cur.Request), gone: true}
		w.rows[rec.ID] = r
	}
	from, to := "nothing", "nothing"
	if r.gone && cur != nil { // begun again
		r.token, r.auth = tokenInRequest(cur.Request), ""
	}
	if !r.gone {
		from = stateOfRecord(&r.rec)
	}
	if cur != nil {
		to = stateOfRecord(cur)
	}
	if from != to {
		w.cover.hit(from + " > " + to)
	}
	o := w.orders[r.token]
	if from == "nothing" && o != nil && w.reached(o) == 0 {
		o.windowFrom = time.Time{} // what was handed to the transport never left
	}
	switch {
	case cur == nil:
		if o != nil && !r.gone && !w.forgot[rec.Key] && o.sends > 0 && w.reached(o) > 0 {
			w.failLocked(notForgotten, "the record of %s, which was sent, was deleted", r.token)
		}
	case w.skewed:
	case from == "succeeded" && to == "pending" || from == "succeeded acked" && to != from && !cur.Acked:
		w.failLocked(notForgotten, "%s, whose success was recorded, is %s", r.token, to)
	case from == "pending" && to == "unknown (gave up)" && o != nil && (o.asking == 0 || o.askedIn != p) && !p.faulty:
		w.failLocked(notForgotten, "%s is given up, and nobody asked for it", r.token)
	case cur.Acked && !r.rec.Acked && cur.AckDue && o != nil && !o.mayAck && !o.resolved && !w.forgot[rec.Key]:
		w.failLocked(notForgotten, "%s was acknowledged by nobody (%s)", r.token, op)
	}
	if o != nil && cur != nil {
		o.acked = cur.Acked
		o.heard = o.heard || cur.Acked && !cur.AckDue // its call was just returning
		if from == "rejected" && to == "pending" {    // asked for again
			o.waiting, o.holders = false, nil
		}
		if cur.Claims > r.rec.Claims {
			o.may++
		}
	}
	if r.gone = cur == nil; !r.gone {
		r.rec = *cur
	}
}

func stateOfRecord(r *oncehttp.Record) string {
	s := r.Outcome.String()
	switch {
	case r.Outcome == oncehttp.Undecided:
		s = "pending"
	case r.Outcome == oncehttp.Unknown:
		s += " (" + r.Reason.String() + ")"
		if r.Told {
			s += " told"
		}
	}
	if r.Acked {
		s += " acked"
	}
	return s
}

func (p *modelProc) begun(i oncehttp.Info) { p.event("begun") }

func (p *modelProc) attemptStart(i oncehttp.AttemptInfo) {
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	if i.Attempt > 4 {
		p.w.failLocked(boundedRetries, "attempt %d of one call", i.Attempt)
	}
	if i.Attempt == 1 {
		p.firsts++
	}
}

// attemptDone is a hook of the user's that takes its time.
func (p *modelProc) attemptDone(i oncehttp.AttemptInfo) {
	for name, sentinel := range modelSentinels {
		if errors.Is(i.Err, sentinel) {
			p.w.mu.Lock()
			p.w.cover.hit("attempt: " + name)
			p.w.mu.Unlock()
		}
	}
	p.w.pause(2 * time.Millisecond)
}

func (p *modelProc) retry(i oncehttp.RetryInfo) {
	w := p.w
	w.mu.Lock()
	defer w.mu.Unlock()
	p.retries++
	b := oncehttp.Budget{Ratio: 0.1, MinPerSecond: 10, Burst: 20}
	if set := modelBudgets[w.h.Budget]; set != nil {
		b = *set
	}
	most := max(0, b.Ratio)*float64(p.firsts) + max(0, b.MinPerSecond)*time.Since(p.start).Seconds() + float64(b.Burst)
	if float64(p.retries) > most && !p.dead {
		w.failLocked(boundedRetries, "%d retries of %d first attempts in %v", p.retries, p.firsts, time.Since(p.start))
	}
	w.cover.hit("retry")
}

func (p *modelProc) storeFailed(oncehttp.Info, error) {
	if !p.isDead() {
		p.w.cover.hit("store failed")
	}
}

// A gate is the network of a process, which ends with it.
type modelGate struct{ p *modelProc }

func (g modelGate) RoundTrip(req *http.Request) (*http.Response, error) {
	p := g.p
	closeBody := func() {
		if req.Body != nil {
			req.Body.Close()
		}
	}
	if !p.event("send") {
		closeBody()
		return nil, errModelCrashed
	}
	if req.Header.Get("Idempotency-Key") != "" {
		p.sends(req)
	}
	ctx, cancel := context.WithCancelCause(req.Context())
	context.AfterFunc(p.ctx, func() { cancel(errModelCrashed) })
	resp, err := p.w.server.Transport().RoundTrip(req.WithContext(ctx))
	timer := time.NewTimer(time.Duration(1 + p.w.rnd(int64(4*time.Millisecond))))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		if err == nil {
			resp.Body.Close()
		}
		return nil, context.Cause(ctx)
	}
	if !p.event("answer") {
		if err == nil {
			resp.Body.Close()
		}
		return nil, errModelCrashed
	}
	return resp, err
}

// sends checks a keyed request that is handed to the transport.
func (p *modelProc) sends(req *http.Request) {
	w := p.w
	key, token := req.Header.Get("Idempotency-Key"), req.Header.Get(modelTokenHeader)
	body := ""
	if req.Body != nil {
		b, err := io.ReadAll(req.Body)
		if err != nil {
			w.fail(soundCode, "reading the body: %v", err)
		}
		body = string(b)
		req.Body = io.NopCloser(bytes.NewReader(b))
	}
	var pending strings.Builder
	ctx := context.Background()
	ids, _ := p.store.Find(ctx, key)
	var rec *oncehttp.Record
	for _, id := range ids {
		if r, err := p.store.Get(ctx, id); err == nil {
			pending.WriteString(" " + stateOfRecord(r))
			if r.Outcome == oncehttp.Undecided && tokenInRequest(r.Request) == token {
				rec = r
			}
		}
	}

	session, _ := p.store.Session(ctx, time.Time{}) // the one there is

	w.mu.Lock()
	defer w.mu.Unlock()
	if p.dead {
		return
	}
	o := w.orders[token]
	if o == nil {
		w.failLocked(oneRequestPerKey, "%s %s without its header", req.Method, req.URL)
		return
	}
	o.sends++
	if rec != nil {
		if r := w.rows[rec.ID]; r != nil && r.auth == "" {
			r.auth = cmp.Or(req.Header.Get("Authorization"), "none")
		}
	}
	if rec == nil {
		w.failLocked(durableFirst, "%s is sent, and its record is:%s", token, pending.String())
		return
	}
	if req.Method != o.method || req.URL.String() != o.url || body != o.body {
		w.failLocked(oneRequestPerKey, "%s is sent as %s %s %q", token, req.Method, req.URL, body)
	}
	at := modelAccount(req.Header)
	if was := w.wire[key+" "+at]; was != "" && was != token && !w.forgot[key] && !w.skewed && w.reached(w.orders[was]) > 0 {
		w.failLocked(oneRequestPerKey, "the key of %s is used for %s", was, token)
	}
	w.wire[key+" "+at] = token
	if at != "" && !slices.Contains(o.accounts, at) {
		w.failLocked(oneRequestPerKey, "%s is sent for account %q, and was asked for with %q", token, at, o.accounts)
	}

	now := time.Now()
	if wall := now.Add(w.offset); wall.After(rec.ResendUntil) {
		w.failLocked(nothingLate, "%s is sent at %v, after %v", token, wall, rec.ResendUntil)
	}
	if rec.Era != session.Era {
		w.failLocked(nothingLate, "%s is sent in era %d, and was begun in era %d", token, session.Era, rec.Era)
	}
	if o.windowFrom.IsZero() {
		o.windowFrom = now
	}
	if late := now.Sub(o.windowFrom); late > w.profile.window-w.profile.timeout && !w.skewed && !o.forgotten && len(o.accounts) == 1 {
		w.failLocked(nothingLate, "%s is sent %v after it was first sent", token, late)
	}
	if o.sends > o.may*4+o.redirects && !o.forgotten {
		w.failLocked(boundedRetries, "%s is sent for the %d-th time, having been asked for or claimed %d times", token, o.sends, o.may)
	}
	if o.asking == 0 {
		switch {
		case p.resumes == 0:
			w.failLocked(truthTold, "%s is sent, and nobody asked for it", token)
		case o.told != oncehttp.Undecided && o.told != oncehttp.Succeeded && !o.decided && !o.forgotten: // a success may be lost, and is replayed
			w.failLocked(truthTold, "%s is sent by Resume although its caller was told that it was %v", token, o.told)
		default:
			w.cover.hit("resumed")
		}
	}
}

// The callers.

// ask begins a call that asks for an order.
func (w *modelWorld) ask(p *modelProc, o *modelOrder, account string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if p.dead {
		return
	}
	if o.told == oncehttp.Rejected || o.told == oncehttp.NotSent {
		o.windowFrom = time.Time{} // the key may begin anew
	}
	o.told, o.waiting = oncehttp.Undecided, o.waiting && o.told != oncehttp.Rejected
	o.may++
	if account == "" {
		if account = o.mode; w.h.Profile == "stripe" && w.creds == "none" {
			account = "none" // of which nothing can be told
		}
	}
	if !slices.Contains(o.accounts, account) {
		o.accounts = append(o.accounts, account)
	}
	if o.askedIn != p {
		o.asking, o.askedIn = 0, p
	}
	o.asking++
}

// A modelAnswer is what a call came to.
type modelAnswer struct {
	info oncehttp.Info
	err  error
	body string
	same func(*modelRow) bool // whether a record is of the operation that was asked for; nil: whichever has its order
}

// hear ends a call: what its caller was told is checked, and kept in mind.
func (w *modelWorld) hear(p *modelProc, o *modelOrder, ctx context.Context, a modelAnswer) {
	reached, row := 0, w.rowOf(p, o)
	other := false
	if a.info.Outcome == oncehttp.NotSent {
		reached = w.reached(o)
		other = a.same != nil && (row == nil && (reached > 0 || p.wasFaulty()) || row != nil && !a.same(row))
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if o.askedIn == p {
		o.asking--
	}
	if p.dead {
		return
	}
	outcome := a.info.Outcome
	what := outcome.String()
	if outcome == oncehttp.Unknown {
		what += " (" + a.info.Reason.String() + ")"
	}
	if a.info.Replayed {
		what += " replayed"
	}
	w.cover.hit("told " + what)
	for name, sentinel := range modelSentinels {
		if errors.Is(a.err, sentinel) {
			w.cover.hit(name)
		}
	}
	if a.info.NotRecorded {
		w.cover.hit("told not recorded")
	}
	if (isIn(a.err, context.Canceled) || isIn(a.err, context.DeadlineExceeded)) && ctx.Err() == nil && !p.closed {
		w.failLocked(soundCode, "%s: its context is alive, and its error is %v", o.token, a.err)
	}
	if errors.Is(a.err, oncehttp.ErrScope) || errors.Is(a.err, oncehttp.ErrKeyReused) || o.forgotten || other || outcome == oncehttp.NotSent && len(o.accounts) > 1 {
		return // nothing is told about the operation that has the key
	}
	o.heard = true
	quiet := o.asking == 0 && p.resumes == 0 && row != nil && !a.info.NotRecorded && !p.closed
	state := ""
	if row != nil {
		state = stateOfRecord(&row.rec)
	}
	switch outcome {
	case oncehttp.Succeeded:
		if o.effects() == 0 && !o.resolved {
			w.failLocked(truthTold, "%s succeeded without effect (%v)", o.token, a.err)
		}
		if a.err == nil && !o.answers(a.body) {
			w.failLocked(truthTold, "%s was answered with %q", o.token, a.body)
		}
		if quiet && row.rec.AckDue && row.rec.Outcome != outcome {
			w.failLocked(truthTold, "%s was told to have succeeded; its record is %s", o.token, state)
		}
	case oncehttp.Rejected:
		if o.effects() > 0 && len(o.accounts) == 1 && !w.skewed {
			w.failLocked(truthTold, "%s had its effect, and was told to be rejected (%v)", o.token, a.err)
		}
		if quiet && row.rec.Outcome != outcome {
			w.failLocked(truthTold, "%s was told to be rejected; its record is %s", o.token, state)
		}
	case oncehttp.NotSent:
		if reached > 0 {
			w.failLocked(truthTold, "%s reached the server %d times, and was told not to be sent: %v", o.token, reached, a.err)
		}
		if quiet && !row.gone && !row.rec.Acked && row.rec.Owner != "" {
			w.failLocked(truthTold, "%s was told not to be sent (%v); its record is %s", o.token, a.err, state)
		}
	case oncehttp.Unknown:
		if quiet && row.rec.Outcome != outcome {
			w.failLocked(truthTold, "%s was told to be unknown (%v); its record is %s", o.token, a.err, state)
		}
	case oncehttp.Undecided:
		if a.err == nil {
			w.failLocked(truthTold, "%s was answered, and is undecided", o.token)
		}
		if quiet && (row.gone || row.rec.Outcome != oncehttp.Undecided) {
			w.failLocked(truthTold, "%s was told to be resumed (%v); its record is %s", o.token, a.err, state)
		}
		return
	}
	if o.asking == 0 && !a.info.NotRecorded {
		o.told, o.toldIn = outcome, p
		if p.resumes == 0 {
			o.decided = false
		}
	}
}

// isIn reports whether target itself is in the tree of err: a timeout of an
// attempt only says that it is a DeadlineExceeded.
func isIn(err, target error) bool {
	switch e := err.(type) {
	case nil:
		return false
	case interface{ Unwrap() error }:
		return isIn(e.Unwrap(), target)
	case interface{ Unwrap() []error }:
		return slices.ContainsFunc(e.Unwrap(), func(err error) bool { return isIn(err, target) })
	}
	return err == target
}

var modelSentinels = map[string]error{
	"ErrKeyReused": oncehttp.ErrKeyReused, "ErrScope": oncehttp.ErrScope, "ErrInProgress": oncehttp.ErrInProgress,
	"ErrWindowClosed": oncehttp.ErrWindowClosed, "ErrNoCredentials": oncehttp.ErrNoCredentials, "ErrCircuitOpen": oncehttp.ErrCircuitOpen,
	"ErrWaitTooLong": oncehttp.ErrWaitTooLong, "ErrClosed": oncehttp.ErrClosed, "ErrAnswerLost": oncehttp.ErrAnswerLost,
	"ErrNotRetained": oncehttp.ErrNotRetained, "ErrStoreFailed": oncehttp.ErrStoreFailed, "ErrStoreUncertain": oncehttp.ErrStoreUncertain,
	"ErrMismatch": oncehttp.ErrMismatch,
}

// rowOf returns the only durable record of an order, or nil if there are none or
// several.
func (w *modelWorld) rowOf(p *modelProc, o *modelOrder) *modelRow {
	w.mu.Lock()
	defer w.mu.Unlock()
	var found *modelRow
	for id, r := range w.rows {
		if r.token != o.token {
			continue
		}
		if found != nil {
			return nil
		}
		found = &modelRow{token: r.token, auth: r.auth}
		rec, err := p.store.Get(context.Background(), id)
		if found.gone = err != nil; !found.gone {
			found.rec = *rec
		}
	}
	return found
}

// keyed finds what a call says about its operation, in the ways it may say it.
func (w *modelWorld) keyed(resp *http.Response, err error, op *oncehttp.Operation) (a modelAnswer) {
	a.err = err
	if err != nil {
		oe, ok := errors.AsType[*oncehttp.OperationError](err)
		if !ok {
			w.fail(truthTold, "an error without its operation: %v", err)
			return a
		}
		a.info = oncehttp.Info{Outcome: oe.Outcome, NotRecorded: errors.Is(err, oncehttp.ErrStoreFailed) || errors.Is(err, oncehttp.ErrStoreUncertain)}
	} else {
		b, readErr := io.ReadAll(resp.Body)
		resp.Body.Close()
		if readErr == nil {
			a.body = string(b)
		} else {
			a.err = readErr
		}
		info, ok := oncehttp.OperationFrom(resp)
		if !ok {
			w.fail(truthTold, "a response without its operation: %v", resp.Status)
		}
		a.info = info
	}
	if op != nil {
		info := op.Info()
		if info.Outcome != a.info.Outcome {
			w.fail(truthTold, "the handle says %v, the call %v (%v)", info.Outcome, a.info.Outcome, err)
		}
		a.info = info
	}
	return a
}

// guard runs what must not panic.
func (w *modelWorld) guard(f func()) {
	defer func() {
		if v := recover(); v != nil {
			w.fail(soundCode, "panic: %v\n%s", v, debug.Stack())
		}
	}()
	f()
}

func (w *modelWorld) send(p *modelProc, s *modelStep, o *modelOrder) {
	ctx, cancel := context.WithCancel(p.ctx)
	defer cancel()
	startCtx, endStart := context.WithCancel(p.ctx)
	defer endStart()
	if s.Cancel > 0 {
		defer time.AfterFunc(time.Duration(s.Cancel), cancel).Stop()
	}
	var op *oncehttp.Operation
	key := ""
	switch s.As {
	case "header", "key", "keynoack":
		key = "key-" + strconv.Itoa(o.op)
	}
	switch s.As {
	case "start", "noack", "key", "keynoack":
		noAck := s.As == "noack" || s.As == "keynoack"
		startCtx, op = oncehttp.Start(startCtx, oncehttp.Op{Key: key, Scope: s.Scope, NoAck: noAck, Metadata: map[string]string{"order": o.token}})
		ctx, cancel = context.WithCancel(startCtx)
		defer cancel()
		if s.Cancel > 0 {
			defer time.AfterFunc(time.Duration(s.Cancel), cancel).Stop()
		}
	}
	if s.Limit > 0 {
		ctx, cancel = context.WithTimeout(ctx, time.Duration(s.Limit))
		defer cancel()
	}
	var body io.Reader
	if o.body != "" {
		body = strings.NewReader(o.body)
	}
	req, err := http.NewRequestWithContext(ctx, o.method, o.url, body)
	if err != nil {
		panic(err)
	}
	req.Header.Set(modelTokenHeader, o.token)
	if o.body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	if s.As == "header" {
		req.Header.Set("Idempotency-Key", key)
	}
	auth := p.w.authorization(o.mode)
	if auth != "" {
		req.Header.Set("Authorization", auth)
	}
	keyed := key != "" || op != nil || o.method == http.MethodPost
	if !keyed {
		p.w.plain(p, o, req)
		return
	}
	p.w.ask(p, o, modelAccount(req.Header))
	p.w.guard(func() {
		resp, err := p.client.Do(req)
		a := p.w.keyed(resp, err, op)
		a.same = func(r *modelRow) bool {
			stated := op != nil && s.Scope != ""
			return r.rec.ScopeStated == stated && (stated || r.auth == cmp.Or(auth, "none"))
		}
		p.w.hear(p, o, ctx, a)
		if op != nil && !p.isDead() {
			p.w.finish(p, s, o, op, startCtx, a)
		}
	})
}

// plain sends a request without key, which is not an operation.
func (w *modelWorld) plain(p *modelProc, o *modelOrder, req *http.Request) {
	w.cover.hit("unkeyed")
	req.Method = http.MethodGet
	req.Body, req.GetBody, req.ContentLength = nil, nil, 0
	w.guard(func() {
		if resp, err := p.client.Do(req); err == nil {
			io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
	})
}

// finish acknowledges the answer of an operation, or leaves it to Resume.
func (w *modelWorld) finish(p *modelProc, s *modelStep, o *modelOrder, op *oncehttp.Operation, startCtx context.Context, a modelAnswer) {
	info := a.info
	settled := info.Outcome == oncehttp.Succeeded || info.Outcome == oncehttp.Rejected
	noAck := s.As == "noack" || s.As == "keynoack"
	if !settled {
		if err := op.Ack(p.ctx); !errors.Is(err, oncehttp.ErrNotAnswered) && !p.isDead() {
			w.fail(truthTold, "%s is %v, and Ack says %v", o.token, info.Outcome, err)
		}
		return
	}
	holder := &modelHolder{p, startCtx, time.Now()}
	if !noAck && !info.Acked && !info.NotRecorded && a.err == nil {
		w.mu.Lock()
		o.holders = append(o.holders, holder)
		o.waiting = !p.dead
		w.mu.Unlock()
	}
	if s.Ack == 0 {
		time.Sleep(time.Duration(s.End))
		return
	}
	time.Sleep(time.Duration(s.Ack))
	w.mu.Lock()
	o.mayAck, o.waiting = true, false
	w.mu.Unlock()
	err := op.Ack(p.ctx)
	w.mu.Lock()
	o.holders = slices.DeleteFunc(o.holders, func(h *modelHolder) bool { return h.ctx == startCtx })
	w.mu.Unlock()
	if err == nil && !p.isDead() {
		w.mu.Lock()
		w.cover.hit("acknowledged")
		w.mu.Unlock()
	}
}

// The handlers.

// handler makes the Handler of a pass.
func (p *modelProc) handler(s *modelStep, since time.Time) oncehttp.Handler {
	w := p.w
	h := oncehttp.Handler{Settled: func(ctx context.Context, i oncehttp.Info, resp *http.Response) error {
		return p.settled(s.Settled, since, i, resp)
	}}
	if s.Before != "" {
		h.Before = func(ctx context.Context, i oncehttp.Info) oncehttp.Decision { return p.decide(s.Before, i) }
	}
	if s.Unknown != "" {
		h.Unknown = func(ctx context.Context, i oncehttp.Info) error {
			if !p.event("handler") {
				return errModelCrashed
			}
			o := w.byInfo(p, i)
			w.mu.Lock()
			defer w.mu.Unlock()
			w.cover.hit("handed unknown (" + i.Reason.String() + ")")
			if i.Outcome != oncehttp.Unknown && i.Reason != oncehttp.ReasonPoison { // an answer whose handler kills
				w.failLocked(truthTold, "Unknown is told of %s, which is %v", o.token, i.Outcome)
			}
			if o.asking == 0 {
				o.told = oncehttp.Unknown
			}
			o.heard = true
			if s.Unknown == "fail" {
				return errors.New("the handler failed")
			}
			if s.Unknown == "slow" {
				w.mu.Unlock()
				w.pause(5 * time.Second)
				w.mu.Lock()
			}
			return nil
		}
	}
	return h
}

func (p *modelProc) decide(mode string, i oncehttp.Info) oncehttp.Decision {
	w := p.w
	if !p.event("handler") {
		return oncehttp.Hold
	}
	o := w.byInfo(p, i)
	if mode == "mix" {
		mode = []string{"send", "hold", "abandon", "panic"}[w.rnd(4)]
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cover.hit("before: " + mode)
	switch mode {
	case "send":
		o.told, o.decided = oncehttp.Undecided, true // asked
		return oncehttp.Send
	case "abandon":
		return oncehttp.Abandon
	case "panic":
		panic("the handler's Before panics")
	}
	return oncehttp.Hold
}

func (p *modelProc) settled(mode string, since time.Time, i oncehttp.Info, resp *http.Response) error {
	w := p.w
	if !p.event("handler") {
		return errModelCrashed
	}
	o := w.byInfo(p, i)
	b, readErr := io.ReadAll(resp.Body)
	w.mu.Lock()
	defer w.mu.Unlock()
	if p.dead {
		return errModelCrashed
	}
	w.cover.hit("handed " + i.Outcome.String())
	if i.Replayed {
		w.cover.hit("handed over without network")
	}
	switch {
	case i.Outcome != oncehttp.Succeeded && i.Outcome != oncehttp.Rejected:
		w.failLocked(truthTold, "Settled is given %s, which is %v", o.token, i.Outcome)
	case o.forgotten:
	case o.acked:
		w.failLocked(notForgotten, "%s is handed over although it was acknowledged", o.token)
	case i.Outcome == oncehttp.Succeeded && o.effects() == 0 && !o.resolved:
		w.failLocked(truthTold, "%s is handed over as succeeded without effect", o.token)
	case i.Outcome == oncehttp.Rejected && o.effects() > 0 && len(o.accounts) == 1:
		w.failLocked(truthTold, "%s had its effect, and is handed over as rejected", o.token)
	case readErr == nil && i.Outcome == oncehttp.Succeeded && !o.answers(string(b)):
		w.failLocked(truthTold, "%s is handed over with %q", o.token, b)
	}
	for _, h := range o.holders {
		if h.p == p && h.ctx.Err() == nil && h.since.Before(since) && !o.forgotten {
			w.failLocked(notForgotten, "%s is handed over although its caller has the answer and its context is alive", o.token)
		}
	}
	if o.asking == 0 {
		o.told = i.Outcome
	}
	if mode == "mix" {
		mode = []string{"ok", "fail", "panic", "slow"}[w.rnd(4)]
	}
	switch mode {
	case "fail":
		return errors.New("the handler failed")
	case "panic":
		panic("the handler's Settled panics")
	case "slow":
		w.mu.Unlock()
		w.pause(5 * time.Second)
		alive := p.event("handler")
		w.mu.Lock()
		if !alive {
			return errModelCrashed
		}
	}
	o.mayAck, o.heard, o.waiting = true, true, false
	return nil
}

// byInfo returns the order of an operation.
func (w *modelWorld) byInfo(p *modelProc, i oncehttp.Info) *modelOrder {
	w.mu.Lock()
	defer w.mu.Unlock()
	if r := w.rows[i.ID]; r != nil && w.orders[r.token] != nil {
		return w.orders[r.token]
	}
	if rec, err := p.store.Get(context.Background(), i.ID); err == nil { // its Begin was said to have failed
		if o := w.orders[tokenInRequest(rec.Request)]; o != nil {
			return o
		}
	}
	w.failLocked(soundCode, "an operation that nobody has begun: %+v", i)
	return &modelOrder{}
}

// resume makes a pass, or lets passes be made for a while.
func (w *modelWorld) resume(p *modelProc, s *modelStep) {
	ctx, cancel := context.WithCancel(p.ctx)
	defer cancel()
	if s.Limit > 0 {
		ctx, cancel = context.WithTimeout(ctx, time.Duration(s.Limit))
		defer cancel()
	}
	w.mu.Lock()
	p.resumes++
	w.mu.Unlock()
	w.guard(func() {
		var err error
		if h := p.handler(s, time.Now()); s.Do == "run" {
			err = p.client.Run(ctx, h)
		} else {
			_, err = p.client.Resume(ctx, h)
		}
		if err != nil && !p.isDead() && ctx.Err() == nil && !errors.Is(err, oncehttp.ErrClosed) && !errors.Is(err, oncehttp.ErrStoreFailed) {
			w.fail(soundCode, "%s: %v", s.Do, err)
		}
	})
	w.mu.Lock()
	p.resumes--
	w.mu.Unlock()
}

// ids returns the open operations of an order.
func (w *modelWorld) ids(p *modelProc, op int) (infos []oncehttp.Info) {
	suffix := "/" + strconv.Itoa(op)
	for i, err := range p.client.Operations(p.ctx, oncehttp.Filter{}) {
		if err != nil {
			if !p.isOver() {
				w.fail(soundCode, "Operations: %v", err)
			}
			return nil
		}
		if strings.HasSuffix(i.URL, suffix) {
			infos = append(infos, i)
		}
	}
	return infos
}

func (w *modelWorld) redrive(p *modelProc, s *modelStep) {
	for _, i := range w.ids(p, s.Op) {
		ctx, cancel := context.WithCancel(p.ctx)
		if s.Limit > 0 {
			ctx, cancel = context.WithTimeout(ctx, time.Duration(s.Limit))
		}
		if s.Cancel > 0 {
			time.AfterFunc(time.Duration(s.Cancel), cancel)
		}
		o := w.byInfo(p, i)
		w.ask(p, o, "")
		w.guard(func() {
			resp, err := p.client.Redrive(ctx, i.ID)
			_, told := errors.AsType[*oncehttp.OperationError](err)
			if err != nil && !told { // of the store, or meanwhile acknowledged
				w.mu.Lock()
				defer w.mu.Unlock()
				if o.askedIn == p {
					o.asking--
				}
				return
			}
			w.cover.hit("redriven")
			w.hear(p, o, ctx, w.keyed(resp, err, nil))
		})
		cancel()
	}
}

// resolve says what a look at the provider shows: the effect, or after a while
// in which nothing can still be under way, that there is none.
func (w *modelWorld) resolve(p *modelProc, s *modelStep) {
	for _, i := range w.ids(p, s.Op) {
		o := w.byInfo(p, i)
		outcome := oncehttp.Rejected
		w.mu.Lock()
		if o.effects() > 0 {
			outcome = oncehttp.Succeeded
		} else if i.Outcome == oncehttp.Undecided || time.Since(o.windowFrom) < time.Hour {
			w.mu.Unlock()
			continue
		}
		o.resolved = true
		w.mu.Unlock()
		if err := p.client.Resolve(p.ctx, i.ID, outcome); err == nil && !p.isDead() {
			w.cover.hit("resolved")
			if outcome == oncehttp.Rejected {
				w.mu.Lock()
				o.windowFrom = time.Time{}
				w.mu.Unlock()
			}
		}
	}
}

func (w *modelWorld) forget(p *modelProc, s *modelStep) {
	for _, i := range w.ids(p, s.Op) {
		o := w.byInfo(p, i)
		w.mu.Lock()
		for _, other := range w.orders {
			other.forgotten = other.forgotten || other.op == o.op
		}
		w.forgot[i.Key] = true
		w.mu.Unlock()
		if err := p.client.Forget(p.ctx, i.ID); err == nil && !p.isDead() {
			w.cover.hit("forgotten")
		}
	}
}

// The steps.

func (w *modelWorld) run() {
	defer w.end()
	for i := range w.h.Steps {
		if w.failed() {
			return
		}
		s := &w.h.Steps[i]
		time.Sleep(time.Duration(s.Wait) + 1)
		w.cover.hit("step " + s.Do)
		w.step(s)
	}
	w.settleDown()
}

func (w *modelWorld) step(s *modelStep) {
	switch s.Do {
	case "clock":
		w.mu.Lock()
		w.offset += time.Duration(s.Shift)
		w.stepped += time.Duration(max(s.Shift, -s.Shift))
		if w.stepped > 24*time.Hour { // outcomes may be purged
			w.skewed = true
		}
		w.mu.Unlock()
		return
	case "creds":
		w.mu.Lock()
		w.creds = s.How
		w.mu.Unlock()
		w.cover.hit("creds " + s.How)
		return
	}
	p := w.up()
	switch s.Do {
	case "send":
		for c := range s.Callers + 1 {
			o := w.orderOf(s.Op, s.Variant, s.Mode)
			w.mu.Lock()
			if c == 0 {
				o.faults = append(o.faults, s.Faults...)
			}
			w.mu.Unlock()
			w.calls.Go(func() {
				time.Sleep(time.Duration(c) * time.Duration(s.Apart))
				w.send(p, s, o)
			})
		}
	case "resume", "run":
		w.calls.Go(func() { w.resume(p, s) })
	case "redrive":
		w.calls.Go(func() { w.redrive(p, s) })
	case "resolve":
		w.calls.Go(func() { w.resolve(p, s) })
	case "forget":
		w.calls.Go(func() { w.forget(p, s) })
	case "crash":
		w.mu.Lock()
		defer w.mu.Unlock()
		w.down = time.Duration(s.Down)
		if p.dead {
			return
		}
		if p.crashAt = s.N; s.N == 0 {
			w.cover.hit("crash now")
			p.killLocked()
		}
	case "close":
		p.close(0, time.Duration(s.Down))
	case "shutdown":
		p.close(time.Duration(s.Limit), time.Duration(s.Down))
	case "store":
		w.cover.hit("store " + s.How)
		w.mu.Lock()
		p.faulty = true
		w.mu.Unlock()
		if s.How == "fail" {
			p.store.Fail(s.Write, s.N, nil)
		} else {
			p.store.FailUncertain(s.Write, s.N, s.How == "kept")
		}
	default:
		w.fail(soundCode, "no such step: %q", s.Do)
	}
}

// settleDown ends all trouble, restarts, and lets Resume finish everything.
func (w *modelWorld) settleDown() {
	time.Sleep(time.Millisecond) // the last step has begun
	w.mu.Lock()
	w.calm, w.creds = true, "good"
	for _, o := range w.orders {
		o.faults = nil
	}
	p := w.proc
	if p != nil {
		p.crashAt = 0
	}
	w.mu.Unlock()
	time.Sleep(11 * time.Minute) // what is delayed arrives, callers come back
	if p != nil && !p.isDead() {
		p.close(time.Minute, time.Second)
	}
	if !w.wait(20 * time.Minute) {
		w.fail(soundCode, "something is still running 20 min after the end")
		panic("hang\n" + string(stacksOfAll()))
	}
	p = w.up()
	for range 40 {
		if w.failed() || w.finished(p, false) {
			break
		}
		time.Sleep(3 * time.Minute)
	}
	time.Sleep(time.Minute)
	if !w.failed() {
		w.reckon(p)
	}
	p.close(time.Minute, 0)
}

// finished makes a pass, and reports whether nothing is left to do for another.
func (w *modelWorld) finished(p *modelProc, all bool) bool {
	w.resume(p, &modelStep{Do: "resume", Settled: "ok", Unknown: "ok"})
	ctx := context.Background()
	counts, err := p.store.Counts(ctx)
	list, err2 := p.store.List(ctx, 0, 1000)
	if err := errors.Join(err, err2); err != nil {
		w.fail(soundCode, "reading the store: %v", err)
	}
	for i := range list { // what began without credentials waits for the end of its window
		rec := &list[i]
		if rec.Outcome == oncehttp.Succeeded && rec.Told { // its handler has killed the process too often
			counts.Unacknowledged--
		}
		if w.h.Profile == "stripe" && rec.Outcome == oncehttp.Undecided && strings.HasPrefix(rec.Scope, "/") && !all {
			counts.Pending--
		}
	}
	return counts.Pending == 0 && counts.Unacknowledged == 0
}

// reckon looks at what is left in the end.
func (w *modelWorld) reckon(p *modelProc) {
	ctx := context.Background()
	if !w.finished(p, false) {
		list, _ := p.store.List(ctx, 0, 1000)
		w.fail(notForgotten, "unfinished after 40 passes: %+v", list)
	}
	if !w.finished(p, true) {
		time.Sleep(w.profile.window)
		if !w.finished(p, true) {
			w.fail(notForgotten, "unfinished after the end of the window")
		}
	}
	list, err := p.store.List(ctx, 0, 1000)
	if err != nil {
		w.fail(soundCode, "List: %v", err)
	}
	for i := range list {
		if rec := &list[i]; !rec.Told && (rec.Outcome != oncehttp.Unknown || rec.Owner != "" && rec.Reason != oncehttp.ReasonGaveUp) {
			w.fail(notForgotten, "%s is left as %s", w.rows[rec.ID].token, stateOfRecord(rec))
		}
	}
	w.resync(p.store)
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, o := range w.orders {
		if (o.told == oncehttp.Rejected || o.told == oncehttp.NotSent) && o.effects() > 0 && !o.forgotten && !w.skewed && len(o.accounts) == 1 {
			w.failLocked(truthTold, "%s had its effect, and was told to be %v", o.token, o.told)
		}
		if o.forgotten || o.resolved || w.skewed {
			continue
		}
		if o.effects() > 0 && !o.heard {
			w.failLocked(notForgotten, "%s had its effect, and nobody has heard of it", o.token)
		}
		if o.waiting {
			w.failLocked(notForgotten, "%s was not acknowledged, and not handed over", o.token)
		}
	}
}

// wait waits until everything that was started has ended.
func (w *modelWorld) wait(limit time.Duration) bool {
	ended := make(chan struct{})
	go func() {
		w.calls.Wait()
		close(ended)
	}()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-ended:
		return true
	case <-timer.C:
		return false
	}
}

// end stops what still runs.
func (w *modelWorld) end() {
	w.mu.Lock()
	if p := w.proc; p != nil && !p.dead && !p.closed {
		p.killLocked()
	}
	w.mu.Unlock()
	w.server.Close()
	w.calls.Wait()
	time.Sleep(time.Second)
}
