package oncehttp

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A Provider says how one API treats idempotency keys. The first provider of
// [Options.Providers], then of the built-in ones (those of this package's
// variables, such as [Stripe]), that matches a request's host and path is used;
// else the defaults of the fields.
type Provider struct {
	Name string // for messages

	// Hosts are matched without regard to case and port; "*.example.com"
	// matches every host below example.com. PathPrefix restricts the match;
	// empty means every path.
	Hosts      []string
	PathPrefix string

	Header  string        // carries the key; empty means Idempotency-Key
	Quoted  bool          // send the key as a structured-field string, as the IETF draft has it; deployed servers want it bare
	Methods []string      // that get a key without being asked; nil means POST and PATCH
	MaxKey  int           // longest key; 0 means 255
	Window  time.Duration // how long the server remembers a key; 0 means 24 h

	// BodyField is the top-level field of a JSON body that carries the key,
	// for APIs that have it there and not in a header. The caller writes it,
	// with the key of [Start] if there is one; nothing is added to the
	// request. A request without it is not an operation. JSON longer than
	// Options.MaxBodyBytes is refused. Empty means that the key is in Header.
	BodyField string

	// NoKeys: the API never deduplicates. No key is made, nothing is stored,
	// and a POST is retried only if provably not sent.
	NoKeys bool

	// Account returns the account that a request acts on, such as "live" or
	// a header's value: part of the operation's identity. It must depend on
	// the header alone. nil means that there is one account.
	Account func(http.Header) string

	// FingerprintHeaders must not change under a key.
	FingerprintHeaders []string

	// Judge looks at a buffered answer before the status does. nil means
	// that the status decides.
	Judge func(resp *http.Response, body []byte) Verdict

	// StoredRefusals are 4xx statuses that the server stores and replays, so
	// that they settle the operation even after an attempt whose effect is
	// unknown.
	StoredRefusals []int

	ReplayedHeader string // "true" marks a replayed answer; empty means Idempotent-Replayed

	InFlightWait   time.Duration // before a retry after InFlight, as if the server had sent it in Retry-After; 0 means the backoff alone
	AttemptTimeout time.Duration // 0 means 30 s
	RateLimit      float64       // attempts per second; 0 means no limit
	Burst          int           // attempts at once under RateLimit; 0 means 1 s worth of them
}

// A Verdict is what a provider's answer means, where its status alone would not
// tell.
type Verdict uint8

const (
	NoVerdict      Verdict = iota // the status decides
	InFlight                      // an attempt with this key is still running there: wait, then retry
	AlreadyCreated                // an earlier attempt had its effect: succeeded
	OtherPayload                  // the key is known with another payload: unknown
	StoredFailure                 // a stored failure that retrying only replays: unknown
	NotExecuted                   // nothing was executed: retry
	Retry                         // the server asks for a retry
	Stop                          // the server asks not to retry
)

// unlisted is the provider of hosts that no other one matches.
var unlisted = Provider{Name: "default"}

func (p *Provider) matches(u *url.URL) bool {
	return strings.HasPrefix(u.Path, p.PathPrefix) && p.matchesHost(u.Hostname())
}

func (p *Provider) matchesHost(host string) bool {
	for _, pattern := range p.Hosts {
		part := host
		if suffix, ok := strings.CutPrefix(pattern, "*"); ok && len(host) > len(suffix) {
			pattern, part = suffix, host[len(host)-len(suffix):]
		}
		if len(part) == len(pattern) && strings.EqualFold(part, pattern) {
			return true
		}
	}
	return false
}

func (p *Provider) header() string {
	if p.Header == "" {
		return "Idempotency-Key"
	}
	return p.Header
}

func (p *Provider) maxKey() int {
	if p.MaxKey == 0 {
		return maxKey
	}
	return p.MaxKey
}

func (p *Provider) keys(method string) bool {
	if p.Methods == nil {
		return method == http.MethodPost || method == http.MethodPatch
	}
	return slices.Contains(p.Methods, method)
}

// carries reports whether a request carries the key where the provider looks for
// it.
func (p *Provider) carries(key string, h http.Header, body []byte) bool {
	switch {
	case p.NoKeys:
		return false
	case p.BodyField != "":
		return p.keyIn(body) == key
	}
	return slices.Equal(valuesOf(h, p.header()), []string{p.wire(key)})
}

// keyIn returns the key in a JSON body, empty if there is none.
func (p *Provider) keyIn(body []byte) (key string) {
	var fields map[string]json.RawMessage
	if json.Unmarshal(body, &fields) == nil {
		_ = json.Unmarshal(fields[p.BodyField], &key) // of another type, it is none
	}
	return key
}

// wire returns the key as it is sent: bare, or as a structured-field string (RFC
// 9651, section 4.1.6).
func (p *Provider) wire(key string) string {
	if p.Quoted {
		return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(key) + `"`
	}
	return key
}

// read returns the key of a header's value, be it as wire writes it or, for Quoted,
// bare, as SDKs do. What begins as a string and is none is refused: quoted once
// more, it would be another key.
func (p *Provider) read(value string) (string, error) {
	inner, quoted := strings.CutPrefix(value, `"`)
	if !p.Quoted || !quoted {
		return value, nil
	}
	key := strings.NewReplacer(`\\`, `\`, `\"`, `"`).Replace(strings.TrimSuffix(inner, `"`))
	if p.wire(key) != value { // a string has one form
		return "", fmt.Errorf("%w: header %s is not a structured-field string", ErrKeyInvalid, p.header())
	}
	return key, nil
}

func (p *Provider) account(h http.Header) string {
	if p.Account == nil {
		return ""
	}
	return strings.ReplaceAll(p.Account(canonical(h)), "|", "/")
}

func (p *Provider) replayed(h http.Header) bool {
	name := p.ReplayedHeader
	if name == "" {
		name = "Idempotent-Replayed"
	}
	replayed, _ := strconv.ParseBool(h.Get(name))
	return replayed
}

// defaultWindow is what most providers document.
const defaultWindow = 24 * time.Hour

func (p *Provider) window() time.Duration {
	if p.Window == 0 {
		return defaultWindow
	}
	return p.Window
}

// resendFor is how long after the first attempt another may start: the window
// less what the last attempt and two clocks' difference may take.
func (p *Provider) resendFor(attemptTimeout time.Duration) time.Duration {
	return p.window() - max(p.window()/48, attemptTimeout+time.Minute)
}

func (p *Provider) check() error {
	switch {
	case p.Window < 0 || p.MaxKey < 0 || p.InFlightWait < 0 || p.AttemptTimeout < 0 || p.RateLimit < 0 || p.Burst < 0:
		return fmt.Errorf("oncehttp: provider %q: negative Window, MaxKey, InFlightWait, AttemptTimeout, RateLimit or Burst", p.Name)
	case len(p.Hosts) == 0:
		return fmt.Errorf("oncehttp: provider %q: no Hosts", p.Name)
	case checkHeader(http.Header{p.header(): nil}) != nil:
		return fmt.Errorf("oncehttp: provider %q: invalid Header %q", p.Name, p.Header)
	}
	return nil
}
