package oncehttp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/hashicorp/go-retryablehttp"
)

// A Client sends requests so that one logical operation has one effect. It is
// used in place of an [http.Client]; see the package comment. Its methods are
// safe for concurrent use. It must be closed.
type Client struct {
	opts     Options // with defaults
	store    KeyStore
	ownStore bool // Close closes the store
	session  Session
	digest   *digester
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
	telling map[ID]bool              // operations whose Unknown handler is being called
	epoch   uint64                   // the last that began a record
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
// caller's to close, after the client. An opened store serves one client at a
// time: clients are told apart by the store's session.
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
		flights: make(map[ID]*flight), telling: make(map[ID]bool), held: make(map[ID][]context.Context),
	}
	if c.seal, err = newSealer(o.SealingKeys); err != nil {
		return nil, err
	}
	if c.session, err = store.Session(context.Background(), c.clock.wallAt(time.Now())); err != nil {
		return nil, err
	}
	c.digest = newDigester(c.session.Secret)
	c.clock.start(c.session.Mark)
	c.started = c.clock.now()
	if o.Trace != nil {
		c.traces = append(c.traces, o.Trace)
	}
	if o.Logger != nil {
		c.traces = append(c.traces, logTrace(o.Logger))
	}
	inner := *cmp.Or(o.HTTPClient, &http.Client{}) // a copy: theirs may be replaced by ours
	c.inner = &inner
	if c.base = c.inner.Transport; c.base == nil {
		c.base = http.DefaultTransport
	}
	if _, ours := c.base.(*transport); ours {
		return nil, errors.New("oncehttp: Options.HTTPClient sends through another oncehttp.Client")
	}
	c.limits = newLimits(c.limitsOf)
	c.loop = newLoop(c)
	c.std = &http.Client{Transport: &transport{c}, CheckRedirect: c.checkRedirect, Jar: c.inner.Jar}
	go c.purge()
	return c, nil
}

// StandardClient returns an [http.Client] that sends through c, for SDKs and
// for replacing [http.DefaultClient]. Its Timeout is zero, because c itself keeps
// that of [Options.HTTPClient]; one that is set is kept as well, but its error
// does not tell what became of an operation.
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
	if _, direct := operationBehind(req.Response); direct && req.Response.StatusCode != http.StatusSeeOther {
		closeBody(req) // of a request that nobody will send
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
	for _, p := range builtinByDomain[domain(u.Hostname())] {
		if p.matches(u) {
			return p
		}
	}
	return &unlisted
}

// providerOf returns the provider of a record's request.
func (c *Client) providerOf(rec *Record) *Provider {
	meta, _ := c.openMeta(rec)
	return c.providerAt(meta.URL)
}

func (c *Client) providerAt(rawURL string) *Provider {
	if u, err := url.Parse(rawURL); err == nil {
		return c.provider(u)
	}
	return &unlisted
}

// limitsFor returns the limits of a URL's origin, which must be released.
func (c *Client) limitsFor(u *url.URL) *hostLimits {
	var buf [64]byte // of most origins
	origin := appendOrigin(buf[:0], u)
	if h := c.limits.known(origin); h != nil {
		return h
	}
	return c.limits.get(string(origin))
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
// the store. It waits for what it cuts off, so a Transport must honour its
// requests' contexts; and it must not be called from a handler or a hook.
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
	if first {
		_ = c.keepMark() // the next opening knows a little less
	}
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
		if err := c.keepMark(); err != nil {
			c.traces.storeFailedAside(Info{}, err)
		}
		for done := false; !done && c.clock.trusted() && !c.isClosing(); {
			var err error
			if _, done, err = c.store.Purge(context.Background(), c.clock.now(), purgeBatch); err != nil {
				c.traces.storeFailedAside(Info{}, err)
				break
			}
		}
	}
}

// keepMark renews the store's mark of the clock.
func (c *Client) keepMark() error {
	_, _, err := c.store.Purge(context.Background(), c.clock.now(), 0)
	return err
}
