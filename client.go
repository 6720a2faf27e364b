package oncehttp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-retryablehttp"
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
	// change method, URL, body, key, or what belongs to the fingerprint.
	Authorize func(context.Context, Info, *http.Request) error

	Providers []Provider // tried before the built-in ones
	Unlisted  Unlisted   // what happens to hosts without a provider

	MaxAttempts    int           // attempts per call, the first one included; 0 means 4, 1 means no retry
	AttemptTimeout time.Duration // of keyed attempts, until the buffered answer is complete; 0 means the provider's, or 30 s; negative means none
	BackoffBase    time.Duration // of the full jitter between attempts; 0 means 500 ms
	BackoffCap     time.Duration // longest backoff; 0 means 30 s
	MaxRetryAfter  time.Duration // longest Retry-After that is waited for; 0 means 1 min. A longer one ends the call

	Budget    *Budget  // of retries, per origin; nil means the default
	Breaker   *Breaker // per origin; nil means the default
	RateLimit float64  // attempts per second and origin, where the provider has no limit; 0 means none
	Burst     int      // attempts at once under RateLimit; 0 means 1 s worth of them

	MaxBodyBytes     int64 // longest body of a keyed request, which is kept in memory and in the store; 0 means 1 MiB
	MaxResponseBytes int64 // longest answer of a keyed request that is buffered and stored; 0 means 1 MiB. A longer one streams

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
)

// withDefaults returns checked options with every default filled in.
func (o *Options) withDefaults() (Options, error) {
	var r Options
	if o != nil {
		r = *o
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
	r.MaxBodyBytes = cmp.Or(r.MaxBodyBytes, defaultMaxBody)
	r.MaxResponseBytes = cmp.Or(r.MaxResponseBytes, defaultMaxBody)
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

// secret reports whether a header is withheld from the store.
func (o *Options) secret(name string) bool {
	has := func(list []string) bool {
		for _, n := range list {
			if strings.EqualFold(n, name) {
				return true
			}
		}
		return false
	}
	return has(o.WithheldHeaders) || credentialName(name) && !has(o.StoredHeaders)
}

// A Client sends requests so that one logical operation has one effect. It is
// used in place of an [http.Client]; see the package comment. Its methods are
// safe for concurrent use. It must be closed.
type Client struct {
	opts     Options // with defaults
	store    KeyStore
	ownStore bool // Close closes the store
	session  Session
	digest   digester
	seal     *sealer
	clock    *clock
	started  time.Time // by clock
	limits   *limits
	inner    *http.Client // the user's
	base     http.RoundTripper
	std      *http.Client
	loop     *retryablehttp.Client
	traces   tracer

	closing chan struct{} // closed when Shutdown or Close begins: waits end
	stopped chan struct{} // closed when the background work has ended

	mu      sync.Mutex               // guards the following
	flights map[ID]*flight           // operations in flight here, until their last write is durable
	held    map[ID][]context.Context // answers that wait for Operation.Ack, until the context has ended
	idle    chan struct{}            // closed when closing and no flight is left; nil before closing
}

// Open returns a client that keeps its operations in a bbolt file, which is
// created with mode 0600 if it does not exist. nil options mean the
// recommended ones.
//
// Only one process can hold a file: a second one gets [ErrStoreLocked].
func Open(path string, opts *Options) (*Client, error) {
	store, err := OpenBolt(path)
	if err != nil {
		return nil, err
	}
	c, err := New(store, opts)
	if err != nil {
		return nil, errors.Join(err, store.Close())
	}
	c.ownStore = true
	return c, nil
}

// New returns a client that keeps its operations in store, which stays the
// caller's to close, after the client.
func New(store KeyStore, opts *Options) (*Client, error) {
	if store == nil {
		return nil, errors.New("oncehttp: New with a nil KeyStore")
	}
	o, err := opts.withDefaults()
	if err != nil {
		return nil, err
	}
	c := &Client{
		opts: o, store: store, clock: newClock(o.now),
		closing: make(chan struct{}), stopped: make(chan struct{}),
		flights: make(map[ID]*flight), held: make(map[ID][]context.Context),
	}
	if c.seal, err = newSealer(o.SealingKeys); err != nil {
		return nil, err
	}
	if c.session, err = store.Session(context.Background(), c.clock.wall().UTC()); err != nil {
		return nil, err
	}
	c.digest = digester{c.session.Secret}
	c.clock.start(c.session.Mark)
	c.started = c.clock.now()
	if o.Trace != nil {
		c.traces = append(c.traces, o.Trace)
	}
	if o.Logger != nil {
		c.traces = append(c.traces, logTrace(o.Logger))
	}
	c.inner = cmp.Or(o.HTTPClient, &http.Client{})
	if c.base = c.inner.Transport; c.base == nil {
		c.base = http.DefaultTransport
	}
	if _, ours := c.base.(*transport); ours {
		return nil, errors.New("oncehttp: Options.HTTPClient sends through another oncehttp.Client")
	}
	c.limits = newLimits(c.limitsOf)
	c.loop = newLoop(c)
	c.std = &http.Client{Transport: &transport{c}, CheckRedirect: c.checkRedirect, Jar: c.inner.Jar, Timeout: c.inner.Timeout}
	go c.purge()
	return c, nil
}

// StandardClient returns an [http.Client] that sends through c, for SDKs and
// for replacing [http.DefaultClient].
func (c *Client) StandardClient() *http.Client {
	std := *c.std
	return &std
}

// Do sends a request as [http.Client.Do] does. If the request is an operation,
// it returns when the operation is settled: with its answer, with the last
// response if it gave up, or with an error that wraps an [*OperationError].
// [OperationFrom] and the handle of [Start] tell the outcome.
func (c *Client) Do(req *http.Request) (*http.Response, error) { return c.std.Do(req) }

// Get is [http.Client.Get].
func (c *Client) Get(url string) (*http.Response, error) { return c.std.Get(url) }

// Head is [http.Client.Head].
func (c *Client) Head(url string) (*http.Response, error) { return c.std.Head(url) }

// Post is [http.Client.Post], as an operation with a fresh key.
func (c *Client) Post(url, contentType string, body io.Reader) (*http.Response, error) {
	return c.std.Post(url, contentType, body)
}

// PostForm is [http.Client.PostForm], as an operation with a fresh key.
func (c *Client) PostForm(url string, data url.Values) (*http.Response, error) {
	return c.std.PostForm(url, data)
}

// CloseIdleConnections is [http.Client.CloseIdleConnections].
func (c *Client) CloseIdleConnections() { c.std.CloseIdleConnections() }

// checkRedirect is the CheckRedirect of the outer http.Client: the user's for
// unkeyed requests and for the GET after a 303. All other redirects of an
// operation were followed by the operation, or must not be.
func (c *Client) checkRedirect(req *http.Request, via []*http.Request) error {
	if _, keyed := OperationFrom(req.Response); keyed && req.Response.StatusCode != http.StatusSeeOther {
		return http.ErrUseLastResponse
	}
	return consult(c.inner, req, via)
}

// consult asks a client's CheckRedirect, or net/http's default policy.
func consult(client *http.Client, req *http.Request, via []*http.Request) error {
	if client.CheckRedirect != nil {
		return client.CheckRedirect(req, via)
	}
	if len(via) >= maxRedirects {
		return fmt.Errorf("stopped after %d redirects", maxRedirects)
	}
	return nil
}

const maxRedirects = 10 // net/http's default

// provider returns the provider of a URL.
func (c *Client) provider(u *url.URL) *Provider {
	for i := range c.opts.Providers {
		if c.opts.Providers[i].matches(u) {
			return &c.opts.Providers[i]
		}
	}
	for _, p := range builtinProviders {
		if p.matches(u) {
			return p
		}
	}
	return &unlisted
}

// providerOf returns the provider of a record's request.
func (c *Client) providerOf(rec *Record) *Provider {
	if meta, err := c.openMeta(rec); err == nil {
		if u, err := url.Parse(meta.URL); err == nil {
			return c.provider(u)
		}
	}
	return &unlisted
}

// limitsOf returns the limits of an origin. Providers of one host share the rate
// limit of the first that has one.
func (c *Client) limitsOf(origin string) hostConfig {
	cfg := hostConfig{
		Budget: c.opts.Budget, Breaker: c.opts.Breaker, Rate: c.opts.RateLimit, Burst: c.opts.Burst, Rand: c.opts.rnd,
		OnChange: func(origin, from, to string) {
			c.traces.breaker(BreakerInfo{Origin: origin, From: from, To: to})
		},
	}
	if u, err := url.Parse(origin); err == nil {
		for i := range c.opts.Providers {
			if p := &c.opts.Providers[i]; p.RateLimit > 0 && p.matchesHost(u.Hostname()) {
				cfg.Rate, cfg.Burst = p.RateLimit, p.Burst
				break
			}
		}
	}
	return cfg
}

// Shutdown closes the client gracefully. New requests are refused with
// [ErrClosed], waits between attempts end at once, and attempts that are on the
// wire may finish until ctx ends; then they are cut off. Operations of [Start]
// and of [Client.Resume] that are interrupted stay pending and will be resumed;
// others become unknown. When Shutdown returns, everything is durable.
//
// It returns ctx's cause if it had to cut off attempts, or the error of closing
// the store.
func (c *Client) Shutdown(ctx context.Context) error {
	c.mu.Lock()
	first := c.idle == nil
	if first {
		c.idle = make(chan struct{})
		close(c.closing)
		if len(c.flights) == 0 {
			close(c.idle)
		}
	}
	idle := c.idle
	c.mu.Unlock()

	var err error
	select {
	case <-idle:
	case <-ctx.Done():
		select {
		case <-idle: // both: nothing is cut off
		default:
			err = context.Cause(ctx)
			c.cutOff()
			<-idle
		}
	}
	<-c.stopped
	if first && c.ownStore {
		err = errors.Join(err, c.store.Close())
	}
	return err
}

// Close is [Client.Shutdown] without patience: attempts on the wire are cut
// off.
func (c *Client) Close() error {
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(ErrClosed)
	if err := c.Shutdown(ctx); !errors.Is(err, ErrClosed) {
		return err
	}
	return nil
}

// cutOff ends all attempts on the wire.
func (c *Client) cutOff() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, f := range c.flights {
		f.cancel(ErrClosed)
	}
}

func (c *Client) isClosing() bool {
	select {
	case <-c.closing:
		return true
	default:
		return false
	}
}

// How often the background purge looks, and at how many records at once.
const (
	purgeEvery = time.Minute
	purgeBatch = 1000
)

// purge drops, in the background, what need not be kept any longer.
func (c *Client) purge() {
	defer close(c.stopped)
	ticker := time.NewTicker(purgeEvery)
	defer ticker.Stop()
	for {
		select {
		case <-c.closing:
			return
		case <-ticker.C:
		}
		for done := false; !done && c.clock.trusted() && !c.isClosing(); {
			var err error
			if _, done, err = c.store.Purge(context.Background(), c.clock.now(), purgeBatch); err != nil {
				c.traces.storeFailed(Info{}, err)
				break
			}
		}
	}
}
