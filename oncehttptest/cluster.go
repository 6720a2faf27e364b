package oncehttptest

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/oncehttp/oncehttp"
)

// A Cluster is a key store that several clients use at the same time, modelled
// on a table in a shared database: each client has a lease that its heartbeat
// renews, and owns its operations for as long as that is good. It is for tests
// of several replicas of a program, and shows what such a store has to do.
type Cluster struct {
	ttl time.Duration

	mu     sync.Mutex // guards the following, and the ClusterStores' fields
	table  *table
	leases map[string]*lease // by owner
}

// A lease is one client's. Its heartbeat needs no goroutine: it is good until
// it is given back, or ttl after the last beat.
type lease struct {
	beats bool
	until time.Time // if it does not beat; zero: given back
}

// NewCluster returns an empty store. ttl is how long a client is taken to be
// alive after its last heartbeat; it makes a difference only after
// [ClusterStore.StopHeartbeat].
func NewCluster(ttl time.Duration) *Cluster {
	return &Cluster{ttl: ttl, table: newTable(), leases: make(map[string]*lease)}
}

// Store returns a new client's opening of the store.
func (c *Cluster) Store() *ClusterStore {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := &ClusterStore{c: c, owner: newOwner(), mark: c.table.mark, lease: &lease{beats: true}}
	c.leases[s.owner] = s.lease
	return s
}

// aliveLocked reports whether an owner's lease is good.
func (c *Cluster) aliveLocked(owner string) bool {
	l := c.leases[owner]
	return l != nil && (l.beats || time.Now().Before(l.until))
}

// A ClusterStore is one client's opening of a [Cluster].
type ClusterStore struct {
	c       *Cluster
	owner   string
	mark    time.Time // at opening
	lease   *lease
	session *oncehttp.Session
	closed  bool
}

var _ oncehttp.KeyStore = (*ClusterStore)(nil)

// StopHeartbeat lets the client's lease run out, as if its process had died or
// lost its connection. It can still write what nobody has taken over.
func (s *ClusterStore) StopHeartbeat() {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if s.lease.beats {
		s.lease.beats, s.lease.until = false, time.Now().Add(s.c.ttl)
	}
}

// do runs f in a transaction.
func (s *ClusterStore) do(ctx context.Context, f func(*table) error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if s.closed {
		return fmt.Errorf("%w: it is closed", oncehttp.ErrStoreFailed)
	}
	return f(s.c.table)
}

// elsewhere reports whether an owner is alive that is another client.
func (s *ClusterStore) elsewhere(owner string) bool {
	return owner != s.owner && s.c.aliveLocked(owner)
}

// Session implements [oncehttp.KeyStore].
func (s *ClusterStore) Session(ctx context.Context, now time.Time) (session oncehttp.Session, err error) {
	err = s.do(ctx, func(t *table) error {
		if s.session == nil {
			session := t.session(s.owner, s.mark, now)
			s.session = &session
		}
		session = *s.session
		return nil
	})
	return session, err
}

// Begin implements [oncehttp.KeyStore].
func (s *ClusterStore) Begin(ctx context.Context, rec oncehttp.Record) (existing *oncehttp.Record, err error) {
	err = s.do(ctx, func(t *table) error {
		existing = t.begin(rec)
		return nil
	})
	return existing, err
}

// Save implements [oncehttp.KeyStore].
func (s *ClusterStore) Save(ctx context.Context, rec oncehttp.Record) error {
	return s.do(ctx, func(t *table) error { return t.save(rec, s.elsewhere) })
}

// Ack implements [oncehttp.KeyStore]. It takes part in no transaction of the
// caller's.
func (s *ClusterStore) Ack(ctx context.Context, rec oncehttp.Record) error {
	rec.Acked = true
	return s.Save(ctx, rec)
}

// Delete implements [oncehttp.KeyStore].
func (s *ClusterStore) Delete(ctx context.Context, rec oncehttp.Record) error {
	return s.do(ctx, func(t *table) error { return t.delete(rec, s.elsewhere) })
}

// Get implements [oncehttp.KeyStore].
func (s *ClusterStore) Get(ctx context.Context, id oncehttp.ID) (rec *oncehttp.Record, err error) {
	err = s.do(ctx, func(t *table) error {
		if rec = t.get(id); rec == nil {
			return oncehttp.ErrNotFound
		}
		return nil
	})
	return rec, err
}

// Find implements [oncehttp.KeyStore].
func (s *ClusterStore) Find(ctx context.Context, key string) (ids []oncehttp.ID, err error) {
	err = s.do(ctx, func(t *table) error {
		ids = t.find(key)
		return nil
	})
	return ids, err
}

// List implements [oncehttp.KeyStore].
func (s *ClusterStore) List(ctx context.Context, after uint64, n int) (list []oncehttp.Record, err error) {
	err = s.do(ctx, func(t *table) error {
		list = t.list(after, n)
		return nil
	})
	return list, err
}

// Counts implements [oncehttp.KeyStore]. They are those of all clients.
func (s *ClusterStore) Counts(ctx context.Context) (counts oncehttp.Counts, err error) {
	err = s.do(ctx, func(t *table) error {
		counts = t.counts()
		return nil
	})
	return counts, err
}

// Purge implements [oncehttp.KeyStore]. All clients share a round.
func (s *ClusterStore) Purge(ctx context.Context, now time.Time, n int) (dropped int, done bool, err error) {
	err = s.do(ctx, func(t *table) error {
		dropped, done = t.purge(now, n)
		return nil
	})
	return dropped, done, err
}

// Close implements [oncehttp.KeyStore]. It gives the lease back.
func (s *ClusterStore) Close() error {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	s.closed = true
	s.lease.beats, s.lease.until = false, time.Time{}
	return nil
}
