package oncehttp

import (
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"maps"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
)

// An Op describes a logical operation to [Start]. The zero value is a new
// operation with a fresh key.
type Op struct {
	// Key is the idempotency key: 1 to 255 visible ASCII characters (fewer
	// for some providers). Empty means a fresh one, from [NewKey]. A key
	// that names the business intent, such as one from [KeyFor], finds the
	// operation again even if the store is lost.
	Key string

	// Scope separates tenants that share an origin and a key. Empty means
	// that the scope is derived: the provider's account plus a keyed digest
	// of the credentials in the request, so that one tenant never gets
	// another's answer. State it when credentials are rotated during the
	// life of a key.
	Scope string

	// Metadata is stored with the operation and given back in [Info]: what
	// a handler needs to record the answer, such as an order id.
	Metadata map[string]string

	// NoAck says that nobody will call [Operation.Ack]: the operation is
	// acknowledged as soon as its answer is recorded.
	NoAck bool
}

// Start begins a logical operation. The context it returns is good for exactly
// one keyed request, sent directly or by any SDK that passes its context on:
// the first POST, PATCH, PUT or DELETE takes the operation; GET and the like
// pass it by. The operation's key wins over one in the request's header.
//
// Whoever starts an operation acknowledges its answer with [Operation.Ack] once
// the answer is recorded on the caller's side. An answer that is not acknowledged
// is handed over again: by [Client.Resume] in this process when ctx has ended, or
// in the next. So give Start a context that ends when the caller is done:
//
//	ctx, cancel := context.WithCancel(ctx)
//	defer cancel()
//
// A caller whose context ends before there is an answer is told that the outcome
// is unknown, and Resume does not send what somebody was told about. To end a
// program, call [Client.Shutdown] rather than cancel the contexts: it leaves the
// operations of Start pending, to be resumed.
func Start(ctx context.Context, op Op) (context.Context, *Operation) {
	o := &Operation{op: op, given: op.Key != "", ctx: ctx}
	o.op.Metadata = maps.Clone(op.Metadata)
	if op.Key == "" {
		o.op.Key = NewKey()
	}
	o.info = Info{ID: ID{Key: o.op.Key}, Metadata: o.op.Metadata}
	return context.WithValue(ctx, operationKey{}, o), o
}

// An Operation is the handle of one logical operation, made by [Start]. Its
// methods are safe for concurrent use.
type Operation struct {
	op    Op              // as given, with the key filled in; not changed
	given bool            // the key was given
	ctx   context.Context // given to Start; its end lets Resume hand the answer over

	mu     sync.Mutex // guards the following
	info   Info       // as last told
	client *Client    // set when a request takes the operation
	rec    *Record    // the stored answer, for Ack; nil if there is none

	acking sync.Mutex // one Ack at a time
}

// Key returns the idempotency key.
func (o *Operation) Key() string { return o.op.Key }

// Info returns what is known of the operation now.
func (o *Operation) Info() Info {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.info
}

// Ack acknowledges the answer: the caller has recorded it, and the operation
// need not be handed over again. Acknowledging again changes nothing. It is an
// error that matches [ErrNotAnswered] if there is no answer to acknowledge.
//
// With a store that supports it, Ack takes part in the transaction that ctx
// carries. If that is rolled back, the answer is not acknowledged, whatever
// [Operation.Info] says: call Ack again. After the client was closed, it is an
// error that matches [ErrClosed]; the answer is handed over again by the next.
func (o *Operation) Ack(ctx context.Context) error {
	o.acking.Lock()
	defer o.acking.Unlock()
	o.mu.Lock()
	client, rec, info := o.client, o.rec, o.info
	o.mu.Unlock()
	switch {
	case rec == nil && info.Acked: // of itself: plain callers share the operation
		return nil
	case rec == nil:
		return fmt.Errorf("%w (outcome %v): nothing to acknowledge", ErrNotAnswered, info.Outcome)
	}
	if err := client.ack(ctx, *rec); err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.rec == rec {
		o.info.Acked = true
	}
	return nil
}

// tell records what the caller of a request is told.
func (o *Operation) tell(c *Client, info Info, rec *Record) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.client, o.info, o.rec = c, info, rec
}

// take binds the handle to the client whose request takes it, and reports
// whether it was free.
func (o *Operation) take(c *Client) (first bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	first = o.client == nil
	o.client = c
	return first
}

// Info describes an operation.
type Info struct {
	ID
	Method   string
	URL      string            // without userinfo
	Metadata map[string]string // of [Op]; shared, not to be changed

	Outcome Outcome
	Reason  Reason // why the outcome is Unknown
	Detail  string // the last error, for people; no header, body, userinfo or query value is in it

	Status      int  // HTTP status of the last answer; 0 means none
	Attempts    int  // so far, also in earlier processes, also those that did not reach the server
	Replayed    bool // the answer came from the store; nothing was sent for it
	NotRecorded bool // the answer could not be recorded; a restart will ask for it again
	Acked       bool

	FirstSent   time.Time // zero means that nothing was sent
	ResendUntil time.Time // no attempt starts after it
	NotBefore   time.Time // the server asked not to come back before; zero means that it did not
}

type (
	operationKey  struct{} // context key of *Operation; a nil one hides an outer one
	withoutKeyKey struct{}
)

// WithoutKey returns a context whose requests are sent without an idempotency
// key, whatever their method and header, and retried only if that is safe.
func WithoutKey(ctx context.Context) context.Context {
	return context.WithValue(ctx, withoutKeyKey{}, true)
}

// operationFrom returns the handle that the context carries, or nil.
func operationFrom(ctx context.Context) *Operation {
	o, _ := ctx.Value(operationKey{}).(*Operation)
	return o
}

// NewKey returns a fresh idempotency key: a random UUID of version 7. Keys made
// one after another are in order, which the store likes.
func NewKey() string { return uuid.Must(uuid.NewV7()).String() }

// keySpace is the version 5 UUID of the module's URL: the namespace of KeyFor.
var keySpace = uuid.NewSHA1(uuid.NameSpaceURL, []byte("https://github.com/oncehttp/oncehttp"))

// KeyFor returns the idempotency key of a business intent: the same UUID of
// version 5 for the same parts, for ever. Use it to name the step of a saga, as
// in KeyFor("order", "4711", "capture"): such a key survives the loss of the
// store. Parts are not joined: KeyFor("ab") and KeyFor("a", "b") differ.
//
// Do not derive a key from the body of the request: two equal orders would
// become one.
func KeyFor(parts ...string) string {
	var name []byte
	for _, p := range parts {
		name = binary.AppendUvarint(name, uint64(len(p)))
		name = append(name, p...)
	}
	return uuid.NewSHA1(keySpace, name).String()
}

// maxKey is the length that Stripe documents, and the longest that any known
// provider takes.
const maxKey = 255

// checkKey reports why a key cannot be sent, in words that do not contain it.
func checkKey(key string, longest int) error {
	if len(key) < 1 || len(key) > longest {
		return fmt.Errorf("%w: %d characters, want 1 to %d", ErrKeyInvalid, len(key), longest)
	}
	for i := range len(key) {
		if key[i] <= ' ' || key[i] > '~' {
			return fmt.Errorf("%w: character %d is not visible ASCII", ErrKeyInvalid, i+1)
		}
	}
	return nil
}

// originOf returns scheme://host[:port] in its shortest lower-case form.
func originOf(u *url.URL) string { return string(appendOrigin(nil, u)) }

// appendOrigin appends what originOf returns.
func appendOrigin(b []byte, u *url.URL) []byte {
	scheme, host := strings.ToLower(u.Scheme), strings.ToLower(u.Host)
	switch scheme {
	case "https":
		host = strings.TrimSuffix(host, ":443")
	case "http":
		host = strings.TrimSuffix(host, ":80")
	}
	b = append(b, scheme...)
	b = append(b, "://"...)
	return append(b, strings.TrimSuffix(host, ":")...)
}

// requestURL returns the URL without what is never stored, compared or told:
// userinfo and fragment.
func requestURL(u *url.URL) string {
	if u.User == nil && u.Fragment == "" {
		return u.String()
	}
	c := *u
	c.User, c.Fragment, c.RawFragment = nil, "", ""
	return c.String()
}

// A digester makes the digests that are keyed with the store's secret, so that
// they tell nothing to those who have the store's content alone.
type digester struct {
	idle sync.Pool // of *digest: to make one costs more than to use it
}

// A digest is an HMAC with SHA-256 of length-prefixed fields, so that they cannot
// run together.
type digest struct {
	hash.Hash
	buf []byte // what is not yet written to the hash
}

func newDigester(secret [32]byte) *digester {
	return &digester{sync.Pool{New: func() any { return &digest{Hash: hmac.New(sha256.New, secret[:])} }}}
}

// begin returns a digest of a kind, which end gives back.
func (d *digester) begin(kind string) *digest {
	h := d.idle.Get().(*digest)
	h.Reset()
	h.buf = h.buf[:0]
	h.field(kind)
	return h
}

func (d *digester) end(h *digest) (sum [32]byte) {
	h.Write(h.buf)
	copy(sum[:], h.Sum(h.buf[:0]))
	d.idle.Put(h)
	return sum
}

func (h *digest) field(s string) {
	h.buf = binary.BigEndian.AppendUint64(h.buf, uint64(len(s)))
	h.buf = append(h.buf, s...)
}

// last adds a field that is not copied.
func (h *digest) last(b []byte) {
	h.buf = binary.BigEndian.AppendUint64(h.buf, uint64(len(b)))
	h.Write(h.buf)
	h.Write(b)
	h.buf = h.buf[:0]
}

// fingerprint is the digest of what must not change under a key: method, URL,
// Host, media type, body and the provider's headers. A multipart boundary is
// not part of it: the standard library makes a new one for every attempt.
func (d *digester) fingerprint(p *Provider, req *http.Request, url string, body []byte) [32]byte {
	h := d.begin("request")
	h.field(req.Method)
	h.field(url)
	h.field(hostOverride(req))
	mediaType, body := withoutBoundary(req.Header.Get("Content-Type"), body)
	h.field(mediaType)
	for _, name := range p.FingerprintHeaders {
		h.field(strings.Join(valuesOf(req.Header, name), "\n"))
	}
	h.last(body)
	return d.end(h)
}

// hostOverride returns the request's Host where it is not the URL's.
func hostOverride(req *http.Request) string {
	if req.Host == req.URL.Host {
		return ""
	}
	return req.Host
}

func withoutBoundary(contentType string, body []byte) (string, []byte) {
	if len(contentType) < len("multipart/") || !strings.EqualFold(contentType[:len("multipart/")], "multipart/") {
		return contentType, body
	}
	mediaType, params, err := mime.ParseMediaType(contentType)
	if err != nil || params["boundary"] == "" {
		return contentType, body
	}
	blanked := strings.ReplaceAll(string(body), "--"+params["boundary"], "--")
	delete(params, "boundary")
	return mime.FormatMediaType(mediaType, params), []byte(blanked)
}

// scope returns the request's scope in the store: the provider's account and
// the stated scope, or, where none is stated, a digest of the credentials.
func (d *digester) scope(account string, req *http.Request, stated string, secret func(name string) bool) string {
	if stated != "" {
		return account + "|scope:" + stated
	}
	var names []string
	for name := range req.Header {
		if secret(name) && name != "Cookie" { // cookies change between requests of one caller
			names = append(names, name)
		}
	}
	if len(names) == 0 && req.URL.User == nil {
		return account + "|"
	}
	slices.Sort(names)
	h := d.begin("credentials")
	for _, name := range names {
		h.field(name)
		h.field(strings.Join(req.Header[name], "\n"))
	}
	if req.URL.User != nil && req.Header.Get("Authorization") == "" {
		h.field(req.URL.User.String())
	}
	sum := d.end(h)
	return account + "|cred:" + hex.EncodeToString(sum[:16])
}

// accountOf returns the account part of a scope.
func accountOf(scope string) string {
	account, _, _ := strings.Cut(scope, "|")
	return account
}

// checkRequest reports why a keyed request cannot be sent, before anything else
// is done with it.
func checkRequest(req *http.Request) error {
	switch {
	case req.URL == nil:
		return errors.New("oncehttp: nil Request.URL")
	case req.URL.Scheme != "http" && req.URL.Scheme != "https":
		return fmt.Errorf("oncehttp: unsupported protocol scheme %q, want http or https", req.URL.Scheme)
	case req.URL.Host == "":
		return errors.New("oncehttp: no Host in request URL, want an absolute URL")
	case strings.ContainsFunc(req.Method, notToken):
		return fmt.Errorf("oncehttp: invalid method %q", req.Method)
	}
	return cmp.Or(checkHeader(req.Header), checkHeader(req.Trailer))
}

// notToken reports whether a character cannot be part of a method or of a
// header's name: RFC 9110, section 5.6.2.
func notToken(r rune) bool {
	return r <= ' ' || r > '~' || strings.ContainsRune(`"(),/:;<=>?@[\]{}`, r)
}

// checkHeader reports a header that net/http would refuse to send, without
// telling its value.
func checkHeader(header http.Header) error {
	for name, values := range header {
		if name == "" || strings.ContainsFunc(name, notToken) {
			return fmt.Errorf("oncehttp: invalid header name %q", name)
		}
		for _, v := range values {
			if strings.ContainsFunc(v, func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }) {
				return fmt.Errorf("oncehttp: invalid value of header %q", name)
			}
		}
	}
	return nil
}
