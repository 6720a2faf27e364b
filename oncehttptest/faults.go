package oncehttptest

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// A Fault is what happens to one attempt. The zero Fault is none. Faults are
// made by the functions that return one, combined by [Fault.With], compared
// by ==, and named by String.
//
// A duration below zero means without end: until the client leaves or the
// server is closed.
type Fault struct {
	// Stages in the order in which an attempt meets them.
	noHooks   bool
	slowDial  time.Duration
	dial      bool
	dialErr   error // nil: refused
	stall     time.Duration
	delay     time.Duration
	late      bool // reset at once, then delay, then execution
	drop      bool // reset before execution
	part      bool // only partN bytes of the body arrive; with drop
	partN     int
	stale     bool // with drop: the connection was a dead idle one
	code      int  // answered at the door; 0: not
	body      string
	header    string // "Name: value" joined by "\n"
	slow      time.Duration
	stored    int // status stored in place of the handler's answer; 0: none
	hold      time.Duration
	cut       cut
	cutN      int
	bodyStall time.Duration
}

// cut says what becomes of an answer on its way.
type cut uint8

const (
	cutNothing   cut = iota
	cutAll           // nothing is answered: reset
	cutTruncated     // length announced, fewer bytes sent
	cutClosed        // no length announced, fewer bytes sent, clean end
	cutStalled       // silence within the body, then the rest
)

// DialError fails the attempt before there is a connection: httptrace's
// GetConn fires and GotConn does not. A nil err means connection refused, as
// the *net.OpError of a real dialer. It needs [Server.Transport]; on a socket,
// where the connection exists already, it is DropRequest. The type of err must
// be comparable, as those of the standard library are.
func DialError(err error) Fault { return Fault{dial: true, dialErr: err} }

// SlowDial lets d pass before there is a connection (between GetConn and
// GotConn). It needs [Server.Transport].
func SlowDial(d time.Duration) Fault { return Fault{slowDial: d} }

// NoHooks hides the attempt from httptrace, as a custom transport would that
// fires no hooks. It needs [Server.Transport]; see also [Server.NoHooks].
func NoHooks() Fault { return Fault{noHooks: true} }

// DropRequest resets the connection when the request has arrived. Nothing is
// executed.
func DropRequest() Fault { return Fault{drop: true} }

// DropRequestAfter resets the connection when n bytes of the request's body
// have arrived, or, with n below zero, within the request's header. Nothing is
// executed. On a socket the client may already have written more.
func DropRequestAfter(n int) Fault { return Fault{drop: true, part: true, partN: n} }

// DeadKeepAlive is a DropRequest on what the client takes for an idle
// connection. [Server.Transport] then does what [http.Transport] does: a
// request without a body or with GetBody, of a safe method or with an
// Idempotency-Key header, is sent again at once, within the same RoundTrip,
// as an attempt of its own and with a second GotConn. On a socket it is
// DropRequest, and http.Transport decides.
func DeadKeepAlive() Fault { return Fault{drop: true, stale: true} }

// Stall keeps the client waiting for d before anything is done with the
// request. If the client leaves meanwhile, nothing is executed.
func Stall(d time.Duration) Fault { return Fault{stall: d} }

// Delay is a request that travels for d: it is received, and its key's window
// begins, that much later, whether or not the client is still there. A d
// below zero never arrives.
func Delay(d time.Duration) Fault { return Fault{delay: d} }

// Late resets the connection at once and executes the request after d all the
// same: what the client took for a failure was a delay.
func Late(d time.Duration) Fault { return Fault{late: true, delay: d} }

// Answer refuses the request at the door with the given status, body and
// header (pairs of name and value). Nothing is executed or stored.
func Answer(code int, body string, header ...string) Fault {
	if len(header)%2 != 0 {
		panic("oncehttptest: header without a value: " + header[len(header)-1])
	}
	var lines []string
	for i := 0; i < len(header); i += 2 {
		lines = append(lines, header[i]+": "+header[i+1])
	}
	return Fault{code: code, body: body, header: strings.Join(lines, "\n")}
}

// Status is [Answer] with the body that Stripe sends with this status:
//
//	Status(503, "Retry-After", "2")
func Status(code int, header ...string) Fault {
	f := Answer(code, "", header...)
	if code >= 400 {
		f.body = string(statusAnswer(code).body)
		f.header = strings.TrimSuffix("Content-Type: application/json\n"+f.header, "\n")
	}
	return f
}

// Unauthorized is Status(401): wrong credentials, nothing executed or stored.
func Unauthorized() Fault { return Status(http.StatusUnauthorized) }

// Unstored500 is Status(500): it failed before execution, and a retry will be
// executed.
func Unstored500() Fault { return Status(http.StatusInternalServerError) }

// Redirect answers with the given 3xx status and Location, at the door.
func Redirect(code int, location string) Fault { return Answer(code, "", "Location", location) }

// Slow makes the execution take d longer: the key is in use meanwhile, and the
// execution goes on if the client leaves. With d below zero it takes until the
// server is closed, and the handler is not called.
func Slow(d time.Duration) Fault { return Fault{slow: d} }

// Stored500 fails the execution when the handler has run: the effect stands,
// and a 500 is answered, stored and replayed. It says nothing about a request
// that is answered from the store.
func Stored500() Fault { return Stored(http.StatusInternalServerError) }

// Stored is Stored500 with any status.
func Stored(code int) Fault { return Fault{stored: code} }

// Hold keeps the answer back for d after execution: the effect and the stored
// answer exist, the client sees silence.
func Hold(d time.Duration) Fault { return Fault{hold: d} }

// DropResponse executes and stores, then resets the connection: nothing is
// answered.
func DropResponse() Fault { return Fault{cut: cutAll} }

// TruncateResponse executes and stores, announces the whole Content-Length and
// closes the connection after n bytes of the body: the client sees
// io.ErrUnexpectedEOF. Here, in CutResponse and in StallBody, n below zero
// counts from the end of the body, and n beyond it cuts nothing.
func TruncateResponse(n int) Fault { return Fault{cut: cutTruncated, cutN: n} }

// CutResponse executes and stores, announces no length ("Connection: close")
// and closes the connection after n bytes of the body: the client sees a clean
// io.EOF.
func CutResponse(n int) Fault { return Fault{cut: cutClosed, cutN: n} }

// StallBody executes and stores, sends the header and n bytes of the body, and
// the rest only after d.
func StallBody(n int, d time.Duration) Fault {
	return Fault{cut: cutStalled, cutN: n, bodyStall: d}
}

// With returns f with what g adds; where both speak of the same stage, g wins.
// So NoHooks().With(DropResponse()) is an answer lost under a transport
// without hooks.
func (f Fault) With(g Fault) Fault {
	f.noHooks = f.noHooks || g.noHooks
	if g.slowDial != 0 {
		f.slowDial = g.slowDial
	}
	if g.dial {
		f.dial, f.dialErr = true, g.dialErr
	}
	if g.stall != 0 {
		f.stall = g.stall
	}
	if g.late || g.delay != 0 {
		f.late, f.delay = g.late, g.delay
	}
	if g.drop {
		f.drop, f.part, f.partN, f.stale = true, g.part, g.partN, g.stale
	}
	if g.code != 0 {
		f.code, f.body, f.header = g.code, g.body, g.header
	}
	if g.slow != 0 {
		f.slow = g.slow
	}
	if g.stored != 0 {
		f.stored = g.stored
	}
	if g.hold != 0 {
		f.hold = g.hold
	}
	if g.cut != cutNothing {
		f.cut, f.cutN, f.bodyStall = g.cut, g.cutN, g.bodyStall
	}
	return f
}

// String names the fault, as in "NoHooks+Status(503)"; the zero Fault is
// "none".
func (f Fault) String() string {
	var parts []string
	add := func(on bool, format string, args ...any) {
		if on {
			parts = append(parts, fmt.Sprintf(format, args...))
		}
	}
	add(f.noHooks, "NoHooks")
	add(f.slowDial != 0, "SlowDial(%v)", f.slowDial)
	add(f.dial && f.dialErr == nil, "DialError")
	add(f.dial && f.dialErr != nil, "DialError(%v)", f.dialErr)
	add(f.stall != 0, "Stall(%v)", f.stall)
	add(f.late, "Late(%v)", f.delay)
	add(!f.late && f.delay != 0, "Delay(%v)", f.delay)
	add(f.stale, "DeadKeepAlive")
	add(f.part, "DropRequestAfter(%d)", f.partN)
	add(f.drop && !f.stale && !f.part, "DropRequest")
	if f.code != 0 {
		var detail strings.Builder
		detail.WriteString(strconv.Itoa(f.code))
		for line := range strings.SplitSeq(f.header, "\n") {
			if line != "" && line != "Content-Type: application/json" {
				detail.WriteString(", " + line)
			}
		}
		if f.code < 400 || f.body != string(statusAnswer(f.code).body) {
			detail.WriteString(fmt.Sprintf(", %q", f.body))
		}
		add(true, "Status(%s)", detail.String())
	}
	add(f.slow != 0, "Slow(%v)", f.slow)
	add(f.stored != 0, "Stored(%d)", f.stored)
	add(f.hold != 0, "Hold(%v)", f.hold)
	add(f.cut == cutAll, "DropResponse")
	add(f.cut == cutTruncated, "TruncateResponse(%d)", f.cutN)
	add(f.cut == cutClosed, "CutResponse(%d)", f.cutN)
	add(f.cut == cutStalled, "StallBody(%d, %v)", f.cutN, f.bodyStall)
	if parts == nil {
		return "none"
	}
	return strings.Join(parts, "+")
}

// answer is what a fault at the door answers.
func (f Fault) answer() *answer {
	a := &answer{code: f.code, header: http.Header{}, body: []byte(f.body)}
	for line := range strings.SplitSeq(f.header, "\n") {
		if name, value, ok := strings.Cut(line, ": "); ok {
			a.header.Add(name, value)
		}
	}
	return a
}
