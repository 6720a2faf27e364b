package oncehttptest

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptrace"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"github.com/oncehttp/oncehttp"
)

// A Check says how [CheckServer] asks a server.
type Check struct {
	// NewRequest makes a write request that does no harm where it is sent,
	// with its credentials. The key goes in as it is given, where the server
	// looks for it; with an empty key, none does, and a header that is left
	// empty is not sent. The payload depends on n, from 1 on, and on nothing
	// else: equal for equal n, another for another n.
	NewRequest func(ctx context.Context, key string, n int) (*http.Request, error)

	// Client sends the requests; nil means a plain [http.Client]. Redirects
	// are not followed. Not an [oncehttp.Client]: it would answer itself.
	Client *http.Client

	// ID returns what names the effect in the body of an answer, empty if
	// nothing does. nil means the field id of a JSON object.
	ID func(body []byte) string

	Keyless bool // also ask without a key
	Quoted  bool // also ask with the key in quotes, as the IETF draft has it
}

// A Report is what [CheckServer] has found out.
type Report struct {
	Repeated   Finding // the same request again has the same answer, and no second effect
	Changed    Finding // another payload under a key is refused
	Concurrent Finding // two at once have one effect
	Keyless    Finding // a request without a key is refused, or accepted
	Quoted     Finding // a key in quotes is the same key, or another, or refused

	// ReplayedHeader is the header that was "true" in a repeated answer and
	// not in the first; empty if there was none. See
	// [oncehttp.Provider.ReplayedHeader].
	ReplayedHeader string
}

// A Finding is what was found out about one question.
type Finding struct {
	Verdict Verdict
	Status  int    // of the answer in question, of two at once the one that was not accepted; 0 if there was none
	Text    string // what was seen
}

// A Verdict says whether a server does what it should.
type Verdict uint8

const (
	Untold Verdict = iota // not asked, or the answers do not tell
	Right                 // it does
	Wrong                 // it does not
)

func (v Verdict) String() string {
	switch v {
	case Right:
		return "right"
	case Wrong:
		return "WRONG"
	}
	return "untold"
}

// OK reports whether nothing is wrong, and the answers told that a key has one
// effect and one payload: Repeated, Changed and Concurrent are right.
func (r Report) OK() bool {
	return r.Repeated.Verdict == Right && r.Changed.Verdict == Right && r.Concurrent.Verdict == Right &&
		r.Keyless.Verdict != Wrong && r.Quoted.Verdict != Wrong
}

// String returns a table with a line for each question.
func (r Report) String() string {
	var out strings.Builder
	table := tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
	for _, line := range []struct {
		question string
		Finding
	}{
		{"same key, same request", r.Repeated},
		{"same key, other payload", r.Changed},
		{"same key, two at once", r.Concurrent},
		{"no key", r.Keyless},
		{"key in quotes", r.Quoted},
	} {
		fmt.Fprintf(table, "%s\t%v\t%s\n", line.question, line.Verdict, line.Text)
	}
	if r.ReplayedHeader == "" {
		fmt.Fprintf(table, "mark of a replay\t\tno header\n")
	} else {
		fmt.Fprintf(table, "mark of a replay\t\t%s: true\n", r.ReplayedHeader)
	}
	fmt.Fprintf(table, "window\t%v\thow long a key is remembered takes that long to see\n", Untold)
	table.Flush()
	return out.String()
}

// CheckServer asks a real server, such as a provider's sandbox or a staging
// host, whether it deduplicates. It sends, each once and with keys of its own:
//
//  1. payload 1 under a key, then the same again,
//  2. payload 2 under that key, unless the answer was another the second time,
//  3. payload 3 under another key, twice at once,
//  4. with Check.Keyless, payload 4 without a key,
//  5. with Check.Quoted, payload 1 under the first key in quotes, unless as in 2.
//
// These have two effects on a server that deduplicates (Keyless and Quoted may
// add one each), and on no server more than one for each request: nothing is
// retried, and each request has a connection of its own, so that net/http does
// not send it again either. Answers are read up to 1 MiB.
//
// What the answers do not show is [Untold]: two equal answers prove nothing
// unless something in them names the effect, see Check.ID, or marks a replay.
// One pair is not every pair: a server that is right here may still lose a race,
// or forget its keys in a restart.
//
// An error means that nothing can be told: the first request was not accepted
// with a 2xx, Check.NewRequest does not do as it should, or ctx ended. The
// effects may be there all the same.
func CheckServer(ctx context.Context, c Check) (Report, error) {
	k := &checker{Check: c, ctx: ctx, client: http.Client{}}
	if c.Client != nil {
		k.client = *c.Client
	}
	k.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	if k.ID == nil {
		k.ID = jsonID
	}
	var report Report
	err := k.prepare()
	if err == nil {
		report, err = k.ask()
	}
	if err == nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return Report{}, fmt.Errorf("oncehttptest: check: %w", err)
	}
	return report, nil
}

type checker struct {
	Check
	ctx    context.Context
	client http.Client
	key    string // of payloads 1 and 2
}

// prepare checks NewRequest before anything is sent.
func (k *checker) prepare() error {
	k.key = oncehttp.NewKey()
	var payloads [3]string
	for i, n := range []int{1, 1, 2} {
		req, err := k.request(k.ctx, k.key, n)
		if err != nil {
			return err
		}
		var body []byte
		if req.Body != nil {
			body, err = io.ReadAll(req.Body)
			if err = errors.Join(err, req.Body.Close()); err != nil {
				return err
			}
		}
		payloads[i] = fmt.Sprintf("%s %s\n%s", req.Method, req.URL, body)
		carries := strings.Contains(payloads[i], k.key)
		for _, values := range req.Header {
			carries = carries || slices.Contains(values, k.key)
		}
		if !carries {
			return errors.New("Check.NewRequest does not put the key into the request")
		}
	}
	switch {
	case payloads[0] != payloads[1]:
		return errors.New("Check.NewRequest makes different payloads for the same n")
	case payloads[0] == payloads[2]:
		return errors.New("Check.NewRequest makes the same payload for different n")
	}
	return nil
}

func (k *checker) request(ctx context.Context, key string, n int) (*http.Request, error) {
	req, err := k.NewRequest(ctx, key, n)
	if err != nil {
		return nil, fmt.Errorf("Check.NewRequest: %w", err)
	}
	if req.Context() == context.Background() {
		req = req.WithContext(ctx)
	}
	if key == "" {
		maps.DeleteFunc(req.Header, func(_ string, values []string) bool {
			return len(values) == 1 && values[0] == ""
		})
	}
	req.Close = true // net/http sends a request again only on a connection that was used before
	return req, nil
}

// ask asks all questions, then looks at the answers.
func (k *checker) ask() (r Report, err error) {
	first := k.send(k.ctx, k.key, 1)
	switch {
	case first.err != nil:
		return r, fmt.Errorf("the first request: %w", first.err)
	case !first.accepted():
		return r, fmt.Errorf("the first request was answered %v", first)
	}
	again := k.send(k.ctx, k.key, 1)
	relation := k.compare(first, again)
	worthIt := relation == oneEffect || relation == equal // to ask more about this key
	var other, keyless, quoted reply
	if worthIt {
		other = k.send(k.ctx, k.key, 2)
	}
	a, b := k.pair()
	if k.Keyless {
		keyless = k.send(k.ctx, "", 4)
	}
	if worthIt && k.Quoted {
		quoted = k.send(k.ctx, strconv.Quote(k.key), 1)
	}

	if id := k.id(first); id == k.id(a) || id == k.id(b) {
		k.ID = func([]byte) string { return "" } // it names something else than the effect
	}
	r = Report{Repeated: k.repeated(first, again), Concurrent: k.concurrent(a, b)}
	r.Changed = Finding{Text: "not asked"}
	r.Keyless, r.Quoted = r.Changed, r.Changed
	if worthIt {
		r.Changed = k.changed(first, other)
	}
	if k.Keyless {
		r.Keyless = k.keyless(keyless)
	}
	if worthIt && k.Quoted {
		r.Quoted = k.quoted(first, quoted)
	}
	r.ReplayedHeader = cmp.Or(replayMark(first, again), replayMark(a, b), replayMark(b, a))
	return r, nil
}

// pair sends two requests at once: neither goes on from its connection before the
// other has one, too, if that does not take long.
func (k *checker) pair() (a, b reply) {
	var missing atomic.Int32
	missing.Store(2)
	met, key := make(chan struct{}), oncehttp.NewKey()
	var done sync.WaitGroup
	for _, answer := range []*reply{&a, &b} {
		done.Go(func() {
			arrive := sync.OnceFunc(func() {
				if missing.Add(-1) == 0 {
					close(met)
				}
			})
			defer arrive() // if there was no connection, or no hook
			ctx := httptrace.WithClientTrace(k.ctx, &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) {
				arrive()
				select {
				case <-met:
				case <-k.ctx.Done():
				case <-time.After(5 * time.Second): // a Transport with one connection per host
				}
			}})
			*answer = k.send(ctx, key, 3)
		})
	}
	done.Wait()
	return a, b
}

const setID = "nothing shows how many effects there were: set Check.ID"

func (k *checker) repeated(first, again reply) Finding {
	f := Finding{Status: again.status}
	switch relation := k.compare(first, again); {
	case again.err != nil || again.busy():
		f.Text = fmt.Sprintf("the second time: %v", again)
	case !again.accepted():
		f.Verdict, f.Text = Wrong, fmt.Sprintf("refused with %v: the answer is not given again", again)
	case relation == twoEffects:
		f.Verdict, f.Text = Wrong, fmt.Sprintf("executed twice: %s, then %s", k.name(first), k.name(again))
	case relation == different:
		f.Verdict, f.Text = Wrong, "another answer the second time, and "+setID
	case relation == equal:
		f.Text = "the same answer, but " + setID
	case first.equal(again):
		f.Verdict, f.Text = Right, "one effect, the same answer: "+k.name(again)
	default:
		f.Verdict, f.Text = Right, fmt.Sprintf("one effect, but not the same answer, byte for byte: %s", k.name(again))
	}
	return f
}

func (k *checker) changed(first, other reply) Finding {
	f := Finding{Status: other.status}
	switch {
	case other.err != nil || other.busy():
		f.Text = other.String()
	case !other.accepted():
		f.Verdict, f.Text = Right, fmt.Sprintf("refused with %v", other)
	case k.compare(first, other) == twoEffects:
		f.Verdict, f.Text = Wrong, fmt.Sprintf("executed: %s, then %s", k.name(first), k.name(other))
	case first.equal(other):
		f.Verdict, f.Text = Wrong, "given the answer to the first payload: its caller takes it for done"
	default:
		f.Verdict, f.Text = Wrong, fmt.Sprintf("accepted with %v", other)
	}
	return f
}

func (k *checker) concurrent(a, b reply) Finding {
	if !a.accepted() {
		a, b = b, a // b is the one that was not accepted, if any
	}
	f := Finding{Status: b.status}
	switch relation := k.compare(a, b); {
	case !a.accepted():
		f.Text = fmt.Sprintf("neither was accepted: %v and %v", b, a)
	case b.err != nil || b.busy():
		f.Text = fmt.Sprintf("one was accepted, the other: %v", b)
	case !b.accepted():
		f.Verdict, f.Text = Right, fmt.Sprintf("one effect, %s; the other was refused with %v", k.name(a), b)
	case relation == twoEffects:
		f.Verdict, f.Text = Wrong, fmt.Sprintf("both were executed: %s and %s", k.name(a), k.name(b))
	case relation == different:
		f.Verdict, f.Text = Wrong, "two answers, and "+setID
	case relation == equal:
		f.Text = "the same answer, but " + setID
	default:
		f.Verdict, f.Text = Right, fmt.Sprintf("one effect, %s; the other has waited, or came when the first was done", k.name(a))
	}
	return f
}

func (k *checker) keyless(a reply) Finding {
	f := Finding{Verdict: Right, Status: a.status}
	switch {
	case a.err != nil || a.status == http.StatusTooManyRequests:
		f.Verdict, f.Text = Untold, a.String()
	case a.accepted():
		f.Text = fmt.Sprintf("accepted with %v: a key is not required", a)
	case a.status >= 500:
		f.Verdict, f.Text = Wrong, fmt.Sprintf("fails with %v", a)
	default:
		f.Text = fmt.Sprintf("refused with %v: a key is required", a)
	}
	return f
}

func (k *checker) quoted(first, a reply) Finding {
	f := Finding{Verdict: Right, Status: a.status}
	relation := k.compare(first, a)
	switch {
	case a.err != nil || a.status == http.StatusTooManyRequests:
		f.Verdict, f.Text = Untold, a.String()
	case a.status >= 500:
		f.Verdict, f.Text = Wrong, fmt.Sprintf("fails with %v: send it bare", a)
	case !a.accepted():
		f.Text = fmt.Sprintf("refused with %v: send it bare", a)
	case relation == twoEffects || relation == different:
		f.Text = "taken for another key: send it in one form only"
	case relation == oneEffect:
		f.Text = "the same key as without them"
	default:
		f.Verdict, f.Text = Untold, "accepted, but "+setID
	}
	return f
}

// A relation is what two answers tell of their effects.
type relation uint8

const (
	untold     relation = iota // nothing: one of them is no success
	equal                      // nothing: they are the same
	different                  // nothing, but that they are not the same
	oneEffect                  // they have one effect together
	twoEffects                 // each has its own
)

func (k *checker) compare(a, b reply) relation {
	if !a.accepted() || !b.accepted() {
		return untold
	}
	switch x, y := k.id(a), k.id(b); {
	case x != "" && x == y:
		return oneEffect
	case x != "" && y != "":
		return twoEffects
	case replayMark(a, b) != "" || replayMark(b, a) != "":
		return oneEffect
	case a.equal(b):
		return equal
	}
	return different
}

// name names an answer's effect for the report.
func (k *checker) name(a reply) string {
	if id := k.id(a); id != "" {
		return "id " + strconv.Quote(id)
	}
	return a.String()
}

// id returns the name of an answer's effect, empty if it has none.
func (k *checker) id(a reply) string {
	if !a.accepted() {
		return ""
	}
	return k.ID(a.body)
}

// jsonID returns the field id of a JSON object, empty if there is none.
func jsonID(body []byte) string {
	var object map[string]json.RawMessage
	if json.Unmarshal(body, &object) != nil {
		return ""
	}
	var text *string
	if id := object["id"]; json.Unmarshal(id, &text) != nil {
		return string(id) // a number
	}
	if text == nil {
		return ""
	}
	return *text
}

// A reply is what came back for one request.
type reply struct {
	status int
	header http.Header
	body   []byte
	err    error
}

const longestReply = 1 << 20

func (k *checker) send(ctx context.Context, key string, n int) reply {
	req, err := k.request(ctx, key, n)
	if err != nil {
		return reply{err: err}
	}
	resp, err := k.client.Do(req)
	if err != nil {
		return reply{err: err}
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, longestReply+1))
	if err == nil && len(body) > longestReply {
		err = fmt.Errorf("an answer longer than %d bytes", longestReply)
	}
	return reply{resp.StatusCode, resp.Header, body, err}
}

func (a reply) accepted() bool { return a.err == nil && a.status/100 == 2 }

func (a reply) equal(b reply) bool { return a.status == b.status && bytes.Equal(a.body, b.body) }

// busy reports an answer that says nothing about the request.
func (a reply) busy() bool { return a.status == http.StatusTooManyRequests || a.status >= 500 }

func (a reply) String() string {
	if a.err != nil {
		return a.err.Error()
	}
	return strings.TrimSpace(fmt.Sprint(a.status, " ", http.StatusText(a.status)))
}

// replayMark returns the header that is true in the second answer and not in the
// first.
func replayMark(first, second reply) string {
	is := func(a reply, name string) bool { v, _ := strconv.ParseBool(a.header.Get(name)); return v }
	var marks []string
	for name := range second.header {
		if strings.EqualFold(second.header.Get(name), "true") && !is(first, name) {
			marks = append(marks, name)
		}
	}
	if len(marks) == 0 {
		return ""
	}
	return slices.Min(marks)
}
