package oncehttptest

import (
	"context"
	"errors"
	"reflect"
	"testing"
	"time"

	"github.com/oncehttp/oncehttp"
)

// TestKeyStore tests that a store keeps what [oncehttp.KeyStore] promises, and
// [oncehttp.LazyStore] if it is one.
//
// open returns an empty store for a directory it has not seen before, which it
// may ignore or use as a name. Called again with that directory, after the store
// has been closed, it returns a new opening of the same store, or nil if the
// store does not outlive its Close; what needs that is then left out.
func TestKeyStore(t *testing.T, open func(t *testing.T, dir string) oncehttp.KeyStore) {
	outlives := outlivesClose(t, open)
	for _, test := range []struct {
		promise string
		run     func(*storeTest)
	}{
		{"Begin is durable", testBeginDurable},
		{"Begin returns the record in its way", testBeginExisting},
		{"Begin minds other scopes unless both were stated", testBeginScopes},
		{"IDs are told apart", testIDs},
		{"Save compares epoch and owner", testSaveCompares},
		{"Save of what does not exist is ErrNotFound", testSaveNotFound},
		{"Save replaces all but nil parts", testSaveParts},
		{"Ack closes", testAck},
		{"Save without Acked opens again", testReopened},
		{"Delete needs epoch and owner, and no record", testDelete},
		{"Find returns all IDs of a key", testFind},
		{"List returns open records in order, page by page, without bodies", testList},
		{"Counts counts open records", testCounts},
		{"Purge drops what is due and nothing else", testPurge},
		{"Purge goes on where it stopped", testPurgeRounds},
		{"SaveSoon keeps order and is durable after Close", testSaveSoon},
		{"Session is the same for an opening, and new for the next", testSession},
		{"A clock behind the mark begins an era", testEras},
		{"Times are kept to the microsecond", testTimes},
		{"Opaque parts are kept to the byte", testOpaque},
		{"Slices are the caller's", testSlices},
		{"One Begin wins", testBeginRace},
		{"Operations do not disturb one another", testConcurrent},
		{"An ended context writes nothing", testContext},
		{"A closed store refuses", testClosed},
	} {
		t.Run(test.promise, func(t *testing.T) {
			st := &storeTest{T: t, dir: t.TempDir(), open: open, outlives: outlives, ctx: t.Context()}
			if st.s = open(t, st.dir); st.s == nil {
				t.Fatal("open returned no store")
			}
			t.Cleanup(func() {
				if err := st.s.Close(); err != nil {
					t.Errorf("Close: %v", err)
				}
			})
			test.run(st)
		})
	}
}

// outlivesClose reports whether a store can be opened again.
func outlivesClose(t *testing.T, open func(*testing.T, string) oncehttp.KeyStore) bool {
	dir := t.TempDir()
	for range 2 {
		s := open(t, dir)
		if s == nil {
			return false
		}
		if err := s.Close(); err != nil {
			t.Fatalf("Close of a new store: %v", err)
		}
	}
	return true
}

// A storeTest is the test of one promise with a store of its own.
type storeTest struct {
	*testing.T
	s        oncehttp.KeyStore
	dir      string
	open     func(*testing.T, string) oncehttp.KeyStore
	outlives bool // the store outlives its Close
	ctx      context.Context
}

// reopen closes the store and opens it again, if it outlives that; else it does
// nothing.
func (t *storeTest) reopen() {
	t.Helper()
	if !t.outlives {
		return
	}
	if err := t.s.Close(); err != nil {
		t.Fatalf("Close: %v", err)
	}
	if t.s = t.open(t.T, t.dir); t.s == nil {
		t.Fatal("open returned no store, but did for another directory")
	}
}

// base is when everything happens in the tests, with more precision than is
// kept.
var base = time.Date(2026, 5, 4, 3, 2, 1, 123456789, time.UTC)

// sample returns a record with something in every field but Acked.
func sample(key string) oncehttp.Record {
	return oncehttp.Record{
		ID:    oncehttp.ID{Key: key, Origin: "https://api.example.com", Scope: "acct_1"},
		Epoch: 7, Owner: "owner", Era: 3,
		Outcome: oncehttp.Undecided, Told: true,
		KeyGiven: true, ScopeStated: true, AckDue: true, Uncertain: true,
		Attempts: 2, Claims: 1, Status: 503,
		FirstSent: base, ResendUntil: base.Add(time.Hour), NotBefore: base.Add(time.Second), RestUntil: base.Add(2 * time.Second),
		Updated: base.Add(time.Minute), AnswerUntil: base.Add(2 * time.Hour), KeepUntil: base.Add(3 * time.Hour),
		Fingerprint: [32]byte{1, 2, 3, 31: 32},
		Meta:        []byte("meta of " + key), Request: []byte("request of " + key),
	}
}

// kept returns r as a store returns it: with its times cut.
func kept(r oncehttp.Record) *oncehttp.Record {
	for _, t := range []*time.Time{&r.FirstSent, &r.ResendUntil, &r.NotBefore, &r.RestUntil, &r.Updated, &r.AnswerUntil, &r.KeepUntil} {
		*t = t.UTC().Truncate(time.Microsecond)
	}
	return &r
}

func (t *storeTest) begin(r oncehttp.Record) {
	t.Helper()
	if existing, err := t.s.Begin(t.ctx, r); err != nil || existing != nil {
		t.Fatalf("Begin of %q: existing %+v, error %v; want neither", r.Key, existing, err)
	}
}

func (t *storeTest) save(r oncehttp.Record) {
	t.Helper()
	if err := t.s.Save(t.ctx, r); err != nil {
		t.Fatalf("Save of %q: %v", r.Key, err)
	}
}

func (t *storeTest) ack(r oncehttp.Record) {
	t.Helper()
	if err := t.s.Ack(t.ctx, r); err != nil {
		t.Fatalf("Ack of %q: %v", r.Key, err)
	}
}

func (t *storeTest) get(id oncehttp.ID) *oncehttp.Record {
	t.Helper()
	r, err := t.s.Get(t.ctx, id)
	if err != nil {
		t.Fatalf("Get of %q: %v", id.Key, err)
	}
	return r
}

// holds checks that the store has r, whatever its Seq.
func (t *storeTest) holds(r oncehttp.Record) {
	t.Helper()
	got := t.get(r.ID)
	want := kept(r)
	want.Seq = got.Seq
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("stored is\n%+v, want\n%+v", got, want)
	}
}

// missing checks that the store has no such record.
func (t *storeTest) missing(id oncehttp.ID) {
	t.Helper()
	if r, err := t.s.Get(t.ctx, id); !errors.Is(err, oncehttp.ErrNotFound) {
		t.Fatalf("Get of %q: %+v, %v, want ErrNotFound", id.Key, r, err)
	}
}

// list returns all open records, read in pages of n.
func (t *storeTest) list(n int) (all []oncehttp.Record) {
	t.Helper()
	for after := uint64(0); ; {
		page, err := t.s.List(t.ctx, after, n)
		if err != nil {
			t.Fatalf("List: %v", err)
		}
		if len(page) > n {
			t.Fatalf("List returned %d records, asked for %d", len(page), n)
		}
		if len(page) == 0 {
			return all
		}
		for _, r := range page {
			if r.Seq <= after {
				t.Fatalf("List returned Seq %d after %d", r.Seq, after)
			}
			after = r.Seq
		}
		all = append(all, page...)
	}
}

func (t *storeTest) listed() (keys []string) {
	t.Helper()
	for _, r := range t.list(100) {
		keys = append(keys, r.Key)
	}
	return keys
}

func (t *storeTest) counts(pending, unknown, unacknowledged int) {
	t.Helper()
	got, err := t.s.Counts(t.ctx)
	want := oncehttp.Counts{Pending: pending, Unknown: unknown, Unacknowledged: unacknowledged}
	if err != nil || got != want {
		t.Fatalf("Counts: %+v, %v, want %+v", got, err, want)
	}
}
