package oncehttp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"time"
)

// Options configure a [Client]. The zero value, or a nil *Options, is the
// recommended configuration. Options are copied; what they point to must not be
// changed afterwards.
type Options struct {
	// HTTPClient sends the attempts: its Transport, Jar, CheckRedirect and
	// Timeout are used as http.Client would. nil means http.DefaultTransport
	// and nothing else; never http.DefaultClient, which may be replaced by
	// this client.
	HTTPClient *http.Client

	// Authorize adds what the store does not keep, before every attempt of an
	// operation, redirects to other origins excepted: credentials are never
	// stored, so a resumed operation needs it unless the Transport
	// authorizes. It knows the operation and so its tenant. It must not
	// change method, URL, body, key, or what belongs to the fingerprint. For
	// a provider with an Account, it is called once more beforehand, with a
	// copy that has no body and is not sent, to learn the account.
	Authorize func(context.Context, Info, *http.Request) error

	Providers []Provider // tried before the built-in ones
	Unlisted  Unlisted   // what happens to hosts without a provider

	MaxAttempts    int           // attempts per call, the first one included; 0 means 4, 1 means no retry
	AttemptTimeout time.Duration // of keyed attempts, until the buffered answer is complete; 0 means the provider's, or 30 s; negative means none
	BackoffBase    time.Duration // of the full jitter between attempts; 0 means 500 ms
	BackoffCap     time.Duration // longest backoff; 0 means 30 s
	MaxRetryAfter  time.Duration // longest Retry-After that is waited for; 0 means 1 min. A longer one ends the call. With a 429 or 503 it pauses the host, for up to half as long again

	Budget    *Budget  // of retries, per origin; nil means the default
	Breaker   *Breaker // per origin; nil means the default
	RateLimit float64  // attempts per second and origin, where the provider has no limit; 0 means none
	Burst     int      // attempts at once under RateLimit; 0 means 1 s worth of them

	MaxBodyBytes     int64 // longest body of a keyed request, which is kept in memory and in the store; 0 means 1 MiB, more than 1 GiB means 1 GiB
	MaxResponseBytes int64 // longest answer of a keyed request that is buffered and stored; 0 means 1 MiB, more than 1 GiB means 1 GiB. A longer one streams

	// SealingKeys encrypt requests, answers and metadata in the store. The
	// first seals, all of them open: rotate by putting a new one in front.
	// 32 bytes each. nil means that they are stored in the clear.
	SealingKeys [][]byte

	// StoredHeaders are headers to store although their names look like
	// credentials; WithheldHeaders are headers not to store although they do
	// not. By default, a header is withheld if its name contains
	// authorization, cookie, token, secret, api-key, apikey, signature,
	// session, password or credential.
	StoredHeaders, WithheldHeaders []string

	Trace  *Trace       // hooks for every operation; nil means none
	Logger *slog.Logger // nil means silence

	now func() time.Time    // wall clock; nil means time.Now. For tests that step it
	rnd func(n int64) int64 // uniform in [0, n); nil means math/rand/v2. For seeded tests
}

// Unlisted says what happens to POST and PATCH requests to hosts that no
// provider matches.
type Unlisted uint8

const (
	// KeyUnlisted gives them keys: whoever makes a client for a host says
	// that the host deduplicates.
	KeyUnlisted Unlisted = iota
	// OnlyGivenKeys leaves them as they are, of any size, streaming and
	// unstored, unless the request has a key of its own or comes from Start.
	// For replacing http.DefaultClient.
	OnlyGivenKeys
)

// Defaults of Options.
const (
	defaultMaxAttempts    = 4                      // go-retryablehttp's and stripe-go's order of magnitude
	defaultAttemptTimeout = 30 * time.Second       // http.Client has none; AWS SDKs and browsers are near
	defaultBackoffBase    = 500 * time.Millisecond // stripe-go's minNetworkRetriesDelay
	defaultBackoffCap     = 30 * time.Second       // go-retryablehttp's RetryWaitMax
	defaultMaxRetryAfter  = time.Minute
	defaultMaxBody        = 1 << 20
	largestBody           = 1 << 30 // bbolt's values are less than 2 GiB
)

// withDefaults returns checked options with every default filled in.
func (o *Options) withDefaults() (Options, error) {
	var r Options
	if o != nil {
		r = *o
		r.Providers = slices.Clone(r.Providers)
		r.StoredHeaders, r.WithheldHeaders = slices.Clone(r.StoredHeaders), slices.Clone(r.WithheldHeaders)
	}
	for name, v := range map[string]int64{
		"MaxAttempts": int64(r.MaxAttempts), "BackoffBase": int64(r.BackoffBase), "BackoffCap": int64(r.BackoffCap),
		"MaxRetryAfter": int64(r.MaxRetryAfter), "Burst": int64(r.Burst), "MaxBodyBytes": r.MaxBodyBytes,
		"MaxResponseBytes": r.MaxResponseBytes,
	} {
		if v < 0 {
			return r, fmt.Errorf("oncehttp: Options.%s is negative", name)
		}
	}
	r.MaxAttempts = cmp.Or(r.MaxAttempts, defaultMaxAttempts)
	r.BackoffBase = cmp.Or(r.BackoffBase, defaultBackoffBase)
	r.BackoffCap = cmp.Or(r.BackoffCap, max(defaultBackoffCap, r.BackoffBase))
	r.MaxRetryAfter = cmp.Or(r.MaxRetryAfter, defaultMaxRetryAfter)
	r.MaxBodyBytes = min(cmp.Or(r.MaxBodyBytes, defaultMaxBody), largestBody)
	r.MaxResponseBytes = min(cmp.Or(r.MaxResponseBytes, defaultMaxBody), largestBody)
	if r.rnd == nil {
		r.rnd = rand.Int64N
	}
	switch {
	case r.BackoffCap < r.BackoffBase:
		return r, fmt.Errorf("oncehttp: Options.BackoffCap (%v) is less than BackoffBase (%v)", r.BackoffCap, r.BackoffBase)
	case r.RateLimit < 0:
		return r, errors.New("oncehttp: Options.RateLimit is negative")
	case r.RateLimit == 0 && r.Burst > 0:
		return r, errors.New("oncehttp: Options.Burst is set without RateLimit")
	case r.Unlisted > OnlyGivenKeys:
		return r, fmt.Errorf("oncehttp: Options.Unlisted has no value %d", r.Unlisted)
	}
	if err := r.Budget.validate(); err != nil {
		return r, err
	}
	if err := r.Breaker.validate(); err != nil {
		return r, err
	}
	for i := range r.Providers {
		p := &r.Providers[i]
		if err := p.check(); err != nil {
			return r, err
		}
		if timeout := r.attemptTimeout(p); p.resendFor(timeout) <= 0 {
			return r, fmt.Errorf("oncehttp: provider %q: Window (%v) is too short for AttemptTimeout (%v)", p.Name, p.window(), timeout)
		}
	}
	return r, nil
}

// attemptTimeout returns the timeout of a keyed attempt; 0 means none.
func (o *Options) attemptTimeout(p *Provider) time.Duration {
	return max(0, cmp.Or(o.AttemptTimeout, p.AttemptTimeout, defaultAttemptTimeout))
}

// withheld reports whether a header carries credentials, and is not stored.
func (c *Client) withheld(p *Provider, name string) bool {
	return !strings.EqualFold(name, p.header()) && c.opts.secret(name)
}

// secret reports whether a header's name says credential.
func (o *Options) secret(name string) bool {
	has := func(list []string) bool {
		return slices.ContainsFunc(list, func(n string) bool { return strings.EqualFold(n, name) })
	}
	return has(o.WithheldHeaders) || credentialName(name) && !has(o.StoredHeaders)
}
