package oncehttp_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"time"

	"github.com/oncehttp/oncehttp/oncehttptest"
)

// A history is what happens to a client, its callers, its store, its clock and
// its server, from an empty store on. It is made from a seed, and can be written
// down and read again, one step a line.
type modelHistory struct {
	Seed    uint64      `json:"seed"`              // of everything random within the steps
	Profile string      `json:"profile"`           // one of modelProfiles
	Budget  string      `json:"budget,omitempty"`  // one of modelBudgets
	Breaker string      `json:"breaker,omitempty"` // one of modelBreakers
	Steps   []modelStep `json:"-"`
}

// A step is what happens next. Which fields count depends on Do.
type modelStep struct {
	Do   string        `json:"do"`             // see modelWorld.step
	Wait modelDuration `json:"wait,omitempty"` // before the step

	Op      int           `json:"op,omitempty"`      // the operation it is about; its kind is Op%16, see kindOfOrderOrder
	As      string        `json:"as,omitempty"`      // send: plain, header, start, noack, key, keynoack
	Variant int           `json:"variant,omitempty"` // send: of the body
	Mode    string        `json:"mode,omitempty"`    // send: account; "" is test, else live or b
	Scope   string        `json:"scope,omitempty"`   // send: Op.Scope
	Callers int           `json:"callers,omitempty"` // send: in addition to the first one
	Apart   modelDuration `json:"apart,omitempty"`   // send: time between callers
	Limit   modelDuration `json:"limit,omitempty"`   // deadline after so long; 0 means none
	Cancel  modelDuration `json:"cancel,omitempty"`  // context cancelled after so long; 0 means not
	Ack     modelDuration `json:"ack,omitempty"`     // acknowledged so long after the answer; 0 means never
	End     modelDuration `json:"end,omitempty"`     // unacknowledged: the context of Start ends so long after the answer
	Faults  []string      `json:"faults,omitempty"`  // of the next attempts of the operation; see modelFaults

	Before  string `json:"before,omitempty"`  // resume, run: the Handler; see modelProc.handler
	Settled string `json:"settled,omitempty"` //
	Unknown string `json:"unknown,omitempty"` //

	N     int           `json:"n,omitempty"`     // crash: events until it happens, 0 means now; store: the n-th write from now
	Down  modelDuration `json:"down,omitempty"`  // crash, close, shutdown: until the restart
	Write string        `json:"write,omitempty"` // store: which kind of write fails; "" is any
	How   string        `json:"how,omitempty"`   // store: fail, lost or kept; creds: good, rotated, bad, none or live
	Shift modelDuration `json:"shift,omitempty"` // clock: added to the wall clock
}

// modelDuration is a time.Duration that is readable in JSON.
type modelDuration time.Duration

func (d modelDuration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

func (d *modelDuration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	*d = modelDuration(v)
	return err
}

// String returns the script of the history.
func (h *modelHistory) String() string {
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.Encode(h)
	for i := range h.Steps {
		enc.Encode(&h.Steps[i])
	}
	return b.String()
}

// parseModelHistory reads a script.
func parseModelHistory(script string) (*modelHistory, error) {
	h := new(modelHistory)
	dec := json.NewDecoder(strings.NewReader(script))
	dec.DisallowUnknownFields()
	if err := dec.Decode(h); err != nil {
		return nil, err
	}
	for dec.More() {
		var s modelStep
		if err := dec.Decode(&s); err != nil {
			return nil, fmt.Errorf("step %d: %w", len(h.Steps)+1, err)
		}
		h.Steps = append(h.Steps, s)
	}
	return h, nil
}

// A profile is a provider with its server.
type modelProfile struct {
	base    string        // URL
	window  time.Duration // of the server; also the provider's
	timeout time.Duration // of an attempt
	long    bool          // its reserve covers faults of minutes
}

var modelProfiles = map[string]modelProfile{
	"default": {"https://api.example.test", 24 * time.Hour, 30 * time.Second, true},
	"stripe":  {"https://api.stripe.com/v1", 24 * time.Hour, 80 * time.Second, true},
	"short":   {"https://short.example.test", 15 * time.Minute, 20 * time.Second, false},
}

var errModelNoSuchHost = &net.DNSError{Err: "no such host", Name: "api.example.test", IsNotFound: true}

// modelFaults are what can happen to an attempt, by name.
var modelFaults = map[string]oncehttptest.Fault{
	"none":             {},
	"dial":             oncehttptest.DialError(nil),
	"nxdomain":         oncehttptest.DialError(errModelNoSuchHost),
	"dial-other":       oncehttptest.DialError(errors.New("a proxy said no")),
	"slow-dial":        oncehttptest.SlowDial(3 * time.Second),
	"dial-timeout":     oncehttptest.SlowDial(2 * time.Minute),
	"nohooks-dial":     oncehttptest.NoHooks().With(oncehttptest.DialError(nil)),
	"nohooks-lost":     oncehttptest.NoHooks().With(oncehttptest.DropResponse()),
	"drop":             oncehttptest.DropRequest(),
	"drop-head":        oncehttptest.DropRequestAfter(-1),
	"drop-body":        oncehttptest.DropRequestAfter(5),
	"dead-conn":        oncehttptest.DeadKeepAlive(),
	"stall":            oncehttptest.Stall(7 * time.Second),
	"silence":          oncehttptest.Stall(-1),
	"delay":            oncehttptest.Delay(2 * time.Second),
	"delay-long":       oncehttptest.Delay(19 * time.Second),
	"delay-timeout":    oncehttptest.Delay(10 * time.Minute),
	"delay-forever":    oncehttptest.Delay(-1),
	"late":             oncehttptest.Late(time.Second),
	"late-long":        oncehttptest.Late(18 * time.Second),
	"late-minutes":     oncehttptest.Late(9 * time.Minute),
	"401":              oncehttptest.Unauthorized(),
	"403":              oncehttptest.Status(403),
	"404":              oncehttptest.Status(404),
	"400":              oncehttptest.Status(400),
	"408":              oncehttptest.Status(408),
	"409":              oncehttptest.Status(409),
	"429":              oncehttptest.Status(429, "Retry-After", "2"),
	"429-long":         oncehttptest.Status(429, "Retry-After", "150"),
	"lock-timeout":     oncehttptest.Answer(429, `{"error":{"type":"invalid_request_error","code":"lock_timeout"}}`, "Content-Type", "application/json"),
	"500":              oncehttptest.Unstored500(),
	"502":              oncehttptest.Status(502),
	"503":              oncehttptest.Status(503),
	"503-later":        oncehttptest.Status(503, "Retry-After", "3"),
	"503-long":         oncehttptest.Status(503, "Retry-After", "100"),
	"should-retry":     oncehttptest.Status(400, "Stripe-Should-Retry", "true"),
	"should-not-retry": oncehttptest.Status(503, "Stripe-Should-Retry", "false"),
	"302":              oncehttptest.Redirect(302, "/elsewhere"),
	"307":              oncehttptest.Redirect(307, ""), // to where it was sent: see modelWorld.fault
	"308-away":         oncehttptest.Redirect(308, "https://elsewhere.test/"),
	"slow":             oncehttptest.Slow(4 * time.Second),
	"slow-minutes":     oncehttptest.Slow(3 * time.Minute),
	"stored-500":       oncehttptest.Stored500(),
	"stored-503":       oncehttptest.Stored(503),
	"hold":             oncehttptest.Hold(3 * time.Second),
	"hold-minutes":     oncehttptest.Hold(3 * time.Minute),
	"lost":             oncehttptest.DropResponse(),
	"truncated":        oncehttptest.TruncateResponse(3),
	"cut":              oncehttptest.CutResponse(-2),
	"stalled-body":     oncehttptest.StallBody(4, 2*time.Minute),
}

// Those that follow one another are drawn alike; those that reach the server
// without an answer make the interesting histories.
var modelDeck = []string{
	"dial", "dial", "dial", "nxdomain", "dial-other", "slow-dial", "dial-timeout", "nohooks-dial", "nohooks-lost",
	"drop", "drop", "drop-head", "drop-body", "dead-conn", "stall", "silence", "delay", "delay-long", "delay-timeout", "delay-forever",
	"late", "late-long", "late-minutes", "401", "403", "404", "400", "408", "409", "409", "429", "429", "429-long", "lock-timeout",
	"500", "500", "502", "503", "503", "503-later", "503-long", "should-retry", "should-not-retry", "302", "307", "308-away",
	"slow", "slow", "slow-minutes", "stored-500", "stored-503", "hold", "hold-minutes",
	"lost", "lost", "lost", "truncated", "cut", "stalled-body", "none", "none", "none", "none",
}

// modelLongFaults outlast the reserve of a short window.
var modelLongFaults = map[string]bool{"delay-timeout": true, "late-minutes": true}

// kindOfOrder says what the server does with an operation.
func kindOfOrder(op int) string {
	switch op % 16 {
	case 10:
		return "declined" // 402, stored
	case 11:
		return "invalid" // 422, stored
	case 12:
		return "see-other" // charged, 303
	case 13:
		return "big" // charged, with a body that is not buffered
	case 14:
		return "bodyless" // charged, of a POST without body
	case 15:
		return "put" // charged, of a PUT
	}
	return "charge"
}

// A generator draws a history.
type historyGenerator struct {
	*rand.Rand
	h     *modelHistory
	fresh int // next operation with a fresh key
}

func generateHistory(seed uint64) *modelHistory {
	g := &historyGenerator{Rand: rand.New(rand.NewPCG(seed, 0x6f6e6365)), h: &modelHistory{Seed: seed}, fresh: 64}
	g.h.Profile = pickOne(g, "default", "default", "default", "stripe", "stripe", "short", "short")
	g.h.Budget = pickOne(g, "", "", "", "", "none", "tight")
	g.h.Breaker = pickOne(g, "", "", "", "quick")
	switch x := g.IntN(100); {
	case x < 4:
		g.poison()
	case x < 12:
		g.backlog()
	case x < 20:
		g.window()
	case x < 26:
		g.strangers()
	default:
		g.mixed()
	}
	return g.h
}

func pickOne[T any](g *historyGenerator, of ...T) T { return of[g.IntN(len(of))] }

func (g *historyGenerator) chance(percent int) bool { return g.IntN(100) < percent }

func (g *historyGenerator) upTo(d time.Duration) modelDuration {
	return modelDuration(1 + g.Int64N(int64(d)))
}

func (g *historyGenerator) add(s modelStep) { g.h.Steps = append(g.h.Steps, s) }

// wait is the time between two steps: mostly such that they overlap.
func (g *historyGenerator) wait() modelDuration {
	window := modelProfiles[g.h.Profile].window
	switch x := g.IntN(100); {
	case x < 40:
		return g.upTo(8 * time.Millisecond)
	case x < 60:
		return g.upTo(200 * time.Millisecond)
	case x < 78:
		return g.upTo(3 * time.Second)
	case x < 90:
		return g.upTo(90 * time.Second)
	case x < 95:
		return g.upTo(window / 8)
	case x < 97:
		return modelDuration(window) - modelDuration(window/16) + g.upTo(window/8) // about its end
	default:
		return g.upTo(window + window/8)
	}
}

func (g *historyGenerator) down() modelDuration {
	if g.chance(85) {
		return g.upTo(5 * time.Second)
	}
	return g.wait()
}

func (g *historyGenerator) mixed() {
	if g.chance(10) {
		g.creds()
	}
	g.send()
	for n := 4 + g.IntN(11); len(g.h.Steps) < n; {
		switch x := g.IntN(100); {
		case x < 38:
			g.send()
		case x < 56:
			g.resume()
		case x < 59:
			g.add(modelStep{Do: "run", Wait: g.wait(), Limit: g.upTo(5 * time.Minute), Before: g.before(), Settled: g.settled(), Unknown: g.unknown()})
		case x < 74:
			g.crash()
		case x < 77:
			g.add(modelStep{Do: "close", Wait: g.wait(), Down: g.down()})
		case x < 80:
			g.add(modelStep{Do: "shutdown", Wait: g.wait(), Limit: g.upTo(10 * time.Second), Down: g.down()})
		case x < 84:
			g.store()
		case x < 87:
			g.creds()
		case x < 89:
			g.add(modelStep{Do: "clock", Wait: g.wait(), Shift: g.shift()})
		case x < 94:
			g.add(modelStep{Do: "redrive", Wait: g.wait(), Op: g.any(), Limit: g.limit(), Cancel: g.limit()})
		case x < 97:
			g.add(modelStep{Do: "resolve", Wait: g.wait(), Op: g.any()})
		default:
			g.add(modelStep{Do: "forget", Wait: g.wait(), Op: g.any()})
		}
	}
}

// poison makes the process die again and again while it works on an operation.
func (g *historyGenerator) poison() {
	s := g.newSend()
	s.Faults = []string{pickOne(g, "lost", "drop", "silence", "slow"), pickOne(g, "none", "lost", "hold"), "hold", "lost", "silence", "hold", "lost", "silence"}
	g.add(s)
	g.add(modelStep{Do: "crash", Wait: g.upTo(20 * time.Millisecond), Down: g.down()})
	for range 5 + g.IntN(3) {
		g.add(modelStep{Do: "crash", Wait: 3*modelDuration(time.Second) + g.upTo(time.Second), N: 3 + g.IntN(3), Down: g.upTo(2 * time.Second)})
		g.add(modelStep{Do: "resume", Settled: "ok", Unknown: "ok"})
		if g.chance(15) {
			g.send()
		}
	}
	g.resume()
}

// backlog gives Resume much to do while others are at work.
func (g *historyGenerator) backlog() {
	for i := range 3 + g.IntN(8) {
		s := g.newSend()
		s.Wait = g.upTo(3 * time.Millisecond)
		s.As, s.Op, s.Mode, s.Scope = pickOne(g, "plain", "start", "start", "key"), i+1, "", ""
		if s.As == "plain" || s.As == "start" {
			s.Op = g.freshOp()
		}
		s.Limit, s.Cancel, s.Callers, s.Variant = 0, 0, 0, 0
		s.Faults = []string{pickOne(g, "silence", "hold", "slow", "lost"), pickOne(g, "none", "hold", "slow", "stall", "lost", "401"), pickOne(g, "none", "lost")}
		g.add(s)
	}
	g.add(modelStep{Do: "crash", Wait: g.upTo(40 * time.Millisecond), Down: g.upTo(2 * time.Second)})
	for range 2 + g.IntN(4) {
		s := g.newSend()
		s.Wait = g.upTo(30 * time.Millisecond)
		s.Faults = []string{pickOne(g, "hold", "slow", "lost", "stall", "503"), pickOne(g, "none", "lost", "503")}
		g.add(s)
		if g.chance(50) {
			g.resume()
		}
	}
	g.resume()
	if g.chance(40) {
		g.crash()
		g.resume()
	}
}

// window leaves operations unfinished until the server may have forgotten their
// keys, and asks for them shortly before and after.
func (g *historyGenerator) window() {
	p := modelProfiles[g.h.Profile]
	for range 1 + g.IntN(3) {
		s := g.newSend()
		s.Wait = g.upTo(time.Minute)
		if g.chance(50) {
			s.As, s.Op = "key", 1
		}
		s.Faults = []string{pickOne(g, "lost", "silence", "503", "late", "drop"), "lost", "lost", "lost", pickOne(g, "lost", "none", "hold")}
		g.add(s)
		if g.chance(40) {
			g.crash()
		}
		if g.chance(20) {
			g.resume()
		}
	}
	if g.chance(20) {
		g.add(modelStep{Do: "clock", Wait: g.wait(), Shift: g.shift()})
	}
	g.add(modelStep{Do: "crash", Wait: modelDuration(p.window - p.window/10), N: g.IntN(3), Down: g.upTo(p.window / 20)})
	for i := range 2 + g.IntN(5) {
		if i == 1 && g.chance(40) { // back, while the process runs
			g.add(modelStep{Do: "clock", Wait: g.upTo(time.Second), Shift: -g.upTo(p.window / 4)})
		}
		switch g.IntN(6) {
		case 0, 1:
			g.resume()
		case 2:
			g.add(modelStep{Do: "redrive", Op: g.any()})
		default:
			again := g.h.Steps[0]
			again.Faults, again.Limit, again.Cancel = nil, 0, 0
			if again.As == "plain" || again.As == "start" || again.As == "noack" {
				again.Op = g.freshOp()
			}
			g.add(again)
		}
		last := &g.h.Steps[len(g.h.Steps)-1]
		last.Wait = g.upTo(p.window / 12)
	}
}

// strangers lets an operation be found by the wrong ones: by another account's
// credentials, or by another request with its key.
func (g *historyGenerator) strangers() {
	s := g.newSend()
	s.As, s.Op, s.Variant, s.Callers = pickOne(g, "header", "key"), 1+g.IntN(3), 0, 0
	if g.chance(50) {
		g.h.Profile = "stripe"
		s.Faults = []string{pickOne(g, "lost", "silence", "drop", "hold", "503"), pickOne(g, "lost", "none"), "lost", "lost"}
		g.add(s)
		g.crash()
		g.add(modelStep{Do: "creds", Wait: g.wait(), How: pickOne(g, "live", "live", "bad", "none")})
		g.resume()
		g.resume()
		g.add(modelStep{Do: "creds", Wait: g.wait(), How: "good"})
		g.resume()
		return
	}
	s.Limit, s.Cancel, s.Wait = 0, 0, g.upTo(time.Second)
	g.add(s)
	if s.Faults = nil; g.chance(50) {
		s.Scope = pickOne(g, "", "shop")
		s.Mode = pickOne(g, "", "b")
	} else {
		s.As, g.h.Steps[0].As, g.h.Steps[0].Ack = "key", "key", 0
		g.add(modelStep{Do: "forget", Wait: g.upTo(30 * time.Second), Op: s.Op})
		s.Variant = 1
	}
	s.Wait = g.upTo(time.Minute)
	g.add(s)
	g.mixed()
}

func (g *historyGenerator) freshOp() int {
	g.fresh++
	for g.fresh%16 >= 10 && g.chance(50) {
		g.fresh++
	}
	return g.fresh
}

// any is the number of an operation that was sent already.
func (g *historyGenerator) any() int {
	var ops []int
	for i := range g.h.Steps {
		if g.h.Steps[i].Do == "send" {
			ops = append(ops, g.h.Steps[i].Op)
		}
	}
	return ops[g.IntN(len(ops))]
}

func (g *historyGenerator) limit() modelDuration {
	switch x := g.IntN(100); {
	case x < 70:
		return 0
	case x < 78:
		return g.upTo(3 * time.Millisecond)
	case x < 88:
		return g.upTo(500 * time.Millisecond)
	case x < 96:
		return g.upTo(8 * time.Second)
	}
	return g.upTo(2 * time.Minute)
}

func (g *historyGenerator) send() { g.add(g.newSend()) }

func (g *historyGenerator) newSend() modelStep {
	s := modelStep{Do: "send", Wait: g.wait(), As: pickOne(g, "plain", "plain", "header", "header", "start", "start", "noack", "key", "key", "key", "keynoack")}
	if s.As == "plain" || s.As == "start" || s.As == "noack" {
		s.Op = g.freshOp()
	} else {
		s.Op = 1 + g.IntN(3)
		if g.chance(30) {
			s.Op = 10 + g.IntN(6)
		}
		if g.chance(8) {
			s.Variant = 1
		}
		if g.chance(20) {
			s.Callers = 1 + g.IntN(2)
			s.Apart = pickOne(g, g.upTo(3*time.Millisecond), g.upTo(3*time.Second))
		}
	}
	if g.chance(8) {
		s.Mode = pickOne(g, "live", "b")
	}
	if s.As == "start" || s.As == "key" || s.As == "noack" || s.As == "keynoack" {
		if g.chance(30) {
			s.Scope = "shop"
		}
	}
	if g.chance(55) {
		s.Ack = pickOne(g, g.upTo(2*time.Millisecond), g.upTo(time.Minute))
	} else {
		s.End = pickOne(g, g.upTo(2*time.Millisecond), g.upTo(time.Minute))
	}
	s.Limit, s.Cancel = g.limit(), g.limit()
	if s.Limit > 0 && g.chance(60) {
		s.Cancel = 0
	}
	if g.chance(60) {
		for range 1 + g.IntN(5) {
			f := modelDeck[g.IntN(len(modelDeck))]
			if modelLongFaults[f] && !modelProfiles[g.h.Profile].long {
				f = "lost"
			}
			s.Faults = append(s.Faults, f)
		}
		if g.chance(15) { // nothing but this
			for i := range s.Faults {
				s.Faults[i] = s.Faults[0]
			}
		}
	}
	return s
}

func (g *historyGenerator) before() string {
	return pickOne(g, "", "", "", "", "send", "hold", "abandon", "mix", "panic")
}

func (g *historyGenerator) settled() string {
	return pickOne(g, "ok", "ok", "ok", "slow", "fail", "panic", "mix")
}

func (g *historyGenerator) unknown() string { return pickOne(g, "", "ok", "ok", "fail", "slow") }

func (g *historyGenerator) resume() {
	s := modelStep{Do: "resume", Wait: g.wait(), Before: g.before(), Settled: g.settled(), Unknown: g.unknown()}
	if g.chance(15) {
		s.Limit = g.upTo(3 * time.Second)
	}
	g.add(s)
}

func (g *historyGenerator) crash() {
	s := modelStep{Do: "crash", Wait: g.wait(), Down: g.down()}
	if g.chance(70) {
		s.N = 1 + g.IntN(14)
	}
	g.add(s)
}

func (g *historyGenerator) store() {
	g.add(modelStep{
		Do: "store", Wait: g.wait(), N: 1 + g.IntN(4), Write: pickOne(g, "", "Begin", "Save", "Save", "SaveSoon", "Ack", "Delete"),
		How: pickOne(g, "fail", "fail", "lost", "kept"),
	})
}

func (g *historyGenerator) creds() {
	how := pickOne(g, "good", "rotated", "bad", "bad", "none", "live")
	if how == "live" && g.h.Profile != "stripe" {
		how = "good" // only Stripe's keys say whose they are
	}
	g.add(modelStep{Do: "creds", Wait: g.wait(), How: how})
}

func (g *historyGenerator) shift() modelDuration {
	d := pickOne(g, g.upTo(50*time.Second), g.upTo(10*time.Minute), g.upTo(4*time.Hour), g.upTo(400*24*time.Hour))
	if g.chance(50) {
		d = -d
	}
	return d
}
