package oncehttp

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/bbolt"
)

// scale returns how many operations the tests and benchmarks of large stores
// have: that of the environment variable ONCEHTTP_SCALE, or what is given.
func scale(tb testing.TB, otherwise int) int {
	n, err := strconv.Atoi(cmp.Or(os.Getenv("ONCEHTTP_SCALE"), strconv.Itoa(otherwise)))
	if err != nil || n < 1000 {
		tb.Fatalf("ONCEHTTP_SCALE=%q, want a number from 1000 on", os.Getenv("ONCEHTTP_SCALE"))
	}
	return n
}

// A filler writes records by the thousand, in large transactions.
type filler struct {
	tb    testing.TB
	s     *BoltStore
	group []*boltWrite
	size  int // of a group
}

func (f *filler) add(apply func(*boltTx) error, size int) {
	f.group = append(f.group, &boltWrite{apply: apply, size: size})
	if len(f.group) >= f.size {
		f.flush()
	}
}

func (f *filler) flush() {
	f.tb.Helper()
	f.s.commit(f.group, nil)
	for _, w := range f.group {
		if w.err != nil {
			f.tb.Fatal(w.err)
		}
	}
	f.group = f.group[:0]
}

func (f *filler) begin(rec Record) {
	w := newBoltPut(&rec, true)
	f.add(func(t *boltTx) error { _, err := t.begin(w); return err }, w.size())
}

func (f *filler) save(rec Record) {
	w := newBoltPut(&rec, false)
	f.add(func(t *boltTx) error { return t.save(w) }, w.size())
}

// fill opens a store, lets a function write to it, and closes it.
func fillStore(tb testing.TB, path string, groupSize int, write func(f *filler)) {
	tb.Helper()
	s := openBolt(tb, path)
	s.db.NoSync = true
	f := &filler{tb: tb, s: s, size: groupSize}
	write(f)
	f.flush()
	if err := cmp.Or(s.file.Sync(), s.Close()); err != nil {
		tb.Fatal(err)
	}
}

const scaleOrigin = "https://api.example.com"

// pendingRecord returns the record of an operation with a body of 1 KiB that the
// end of its process interrupted.
func pendingRecord(tb testing.TB, path string) Record {
	tb.Helper()
	var c *Client
	c, err := Open(path, &Options{HTTPClient: &http.Client{Transport: fakeAPI(func(req *http.Request) (*http.Response, error) {
		go c.Close()
		<-req.Context().Done()
		return nil, req.Context().Err()
	})}})
	if err != nil {
		tb.Fatal(err)
	}
	ctx, op := Start(tb.Context(), Op{Key: scaleKey(0)})
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, scaleOrigin+"/v1/charges", bytes.NewReader(make([]byte, 1024)))
	if err != nil {
		tb.Fatal(err)
	}
	if resp, err := c.Do(req); err == nil {
		resp.Body.Close()
	}
	if op.Info().Outcome != Undecided {
		tb.Fatalf("an interrupted operation is %v", op.Info().Outcome)
	}
	c.Close()
	s := openBolt(tb, path)
	defer s.Close()
	rec, err := s.Get(tb.Context(), op.Info().ID)
	if err != nil {
		tb.Fatal(err)
	}
	return *rec
}

// scaleKey returns keys in order, as those of NewKey are.
func scaleKey(i int) string { return fmt.Sprintf("0197%032x", i) }

type fakeAPI func(*http.Request) (*http.Response, error)

func (f fakeAPI) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

// fillPending makes a file with n pending operations.
func fillPending(tb testing.TB, path string, n int) {
	tb.Helper()
	rec := pendingRecord(tb, path)
	seal := &sealer{} // nothing is sealed
	plain, err := seal.open(rec.ID, "request", rec.Request)
	if err != nil {
		tb.Fatal(err)
	}
	request, err := decodeRequest(plain)
	if err != nil {
		tb.Fatal(err)
	}
	fillStore(tb, path, 10_000, func(f *filler) {
		for i := 1; i < n; i++ {
			next := rec
			next.Key = scaleKey(i)
			request.Header.Set("Idempotency-Key", next.Key)
			next.Request = seal.seal(next.ID, "request", &request)
			f.begin(next)
		}
	})
}

func TestManyPending(t *testing.T) {
	n := 2000
	if !testing.Short() {
		n = scale(t, 200_000)
	}
	path := filepath.Join(t.TempDir(), "once.db")
	fillPending(t, path, n)
	hold := Handler{
		Before:  func(context.Context, Info) Decision { return Hold },
		Settled: func(context.Context, Info, *http.Response) error { return nil },
	}

	t.Run("opening does not read them", func(t *testing.T) {
		if info, err := os.Stat(path); err != nil || info.Size() < 2*checkSize {
			t.Skip("small files are checked", err)
		}
		if allocs := testing.AllocsPerRun(1, func() { openBolt(t, path).Close() }); allocs > 1000 {
			t.Errorf("%v allocations", allocs)
		}
	})

	t.Run("a pass needs little memory", func(t *testing.T) {
		c, err := New(openBolt(t, path), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		var most uint64
		var m runtime.MemStats
		calls, h := 0, hold
		var mu sync.Mutex
		h.Before = func(context.Context, Info) Decision {
			mu.Lock()
			defer mu.Unlock()
			if calls++; calls%500 == 0 {
				runtime.ReadMemStats(&m)
				most = max(most, m.HeapAlloc)
			}
			return Hold
		}
		runtime.GC()
		runtime.GC() // empties pools, too
		runtime.ReadMemStats(&m)
		before := m.HeapAlloc
		sum, err := c.Resume(t.Context(), h)
		if err != nil || sum.Held != n || calls != n {
			t.Errorf("%+v, %v, and %d calls; want %d held", sum, err, calls, n)
		}
		t.Logf("%d MiB of heap before, %d MiB at most", before>>20, most>>20)
		if most > before+64<<20 {
			t.Errorf("%d MiB of heap for a pass over %d operations, want less than 64", (most-before)>>20, n)
		}
	})

	t.Run("a listing holds no transaction", func(t *testing.T) {
		s := openBolt(t, path)
		c, err := New(s, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		i := 0
		for _, err := range c.Operations(t.Context(), Filter{}) {
			if i++; err != nil || i > 5*resumePage {
				break
			}
			if open := s.db.Stats().OpenTxN; open != 0 {
				t.Fatalf("%d transactions are open in the loop", open)
			}
			if i != resumePage+1 {
				continue
			}
			s.db.NoSync = true
			var before int64
			for k := range 300 {
				other := boltRec(fmt.Sprint("z", k))
				mustBegin(t, s, other)
				if err := s.Delete(t.Context(), other); err != nil {
					t.Fatal(err)
				}
				if before == 0 {
					before = s.extent
				}
			}
			if grown := s.extent - before; grown > 1<<20 {
				t.Errorf("%d bytes more are used after 600 commits during a listing", grown)
			}
		}
		if err != nil || i != 5*resumePage+1 {
			t.Errorf("%d listed, %v", i, err)
		}
	})

	for _, c := range []struct {
		name string
		opts Options
		time time.Duration
		most int // requests in that time
	}{
		{"workers", Options{}, 10 * time.Second, resumeWorkers * 100},
		{"rate limit", Options{RateLimit: 20, Burst: 5}, 10 * time.Second, 205},
		{"pause", Options{}, 15 * time.Second, resumeWorkers * 95}, // 5 s of it at least, 9 s at most
	} {
		t.Run("a restart is no storm/"+c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				time.Sleep(time.Until(scaleTime(t, path)))
				store := &listCounter{BoltStore: openBolt(t, path)}
				store.db.NoSync = true
				a := &slowAPI{pauseAt: map[string]int{"pause": 100}[c.name]}
				opts := c.opts
				opts.HTTPClient = &http.Client{Transport: a}
				client, err := New(store, &opts)
				if err != nil {
					t.Fatal(err)
				}
				a.onFirst = func() {
					if lists := store.lists.Load(); lists > resumeAhead/resumePage+2 {
						t.Errorf("%d pages were listed before the first request", lists)
					}
				}
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				time.AfterFunc(c.time, cancel)
				a.began = time.Now()
				h := hold
				h.Before = nil
				sum, _ := client.Resume(ctx, h)
				t.Logf("%d requests, %+v", len(a.sent), sum)
				switch {
				case len(a.sent) < c.most/3 || len(a.sent) > c.most:
					t.Errorf("%d requests in %v, want about %d and no more", len(a.sent), c.time, c.most)
				case a.sent[0] > 100*time.Millisecond:
					t.Errorf("the first request was sent after %v", a.sent[0])
				case a.most > resumeWorkers:
					t.Errorf("%d requests at once", a.most)
				}
				for _, at := range a.sent {
					if a.paused > 0 && at > a.paused && at < a.paused+pauseFor {
						t.Errorf("a request %v after the host asked for a pause of %v", at-a.paused, pauseFor)
						break
					}
				}
				if err := client.Close(); err != nil {
					t.Error(err)
				}
				store.Close()
			})
		})
	}
}

// scaleTime returns when the operations of a file began.
func scaleTime(t *testing.T, path string) time.Time {
	s := openBolt(t, path)
	defer s.Close()
	return s.committedState().mark.Add(time.Second)
}

// A listCounter counts the pages that are listed.
type listCounter struct {
	*BoltStore
	lists atomic.Int64
}

func (l *listCounter) List(ctx context.Context, after uint64, n int) ([]Record, error) {
	l.lists.Add(1)
	return l.BoltStore.List(ctx, after, n)
}

const pauseFor = 5 * time.Second

// A slowAPI takes 100 ms for each answer, and remembers when it was asked.
type slowAPI struct {
	began   time.Time
	onFirst func()
	pauseAt int // the request that is answered with the wish for a pause

	mu     sync.Mutex // guards the following
	sent   []time.Duration
	paused time.Duration
	now    int // requests
	most   int
}

func (a *slowAPI) RoundTrip(req *http.Request) (*http.Response, error) {
	a.mu.Lock()
	a.sent = append(a.sent, time.Since(a.began))
	nth := len(a.sent)
	a.now++
	a.most = max(a.most, a.now)
	a.mu.Unlock()
	if nth == 1 {
		a.onFirst()
	}
	time.Sleep(100 * time.Millisecond)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.now--
	resp := &http.Response{StatusCode: http.StatusOK, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: make(http.Header), Body: http.NoBody, Request: req}
	if nth == a.pauseAt {
		a.paused = time.Since(a.began)
		resp.StatusCode = http.StatusServiceUnavailable
		resp.Header.Set("Retry-After", fmt.Sprint(pauseFor.Seconds()))
	}
	return resp, nil
}

// Who waits for a commit waits for that of one batch at the most.
func TestPurgeDropsInSmallBatches(t *testing.T) {
	n := 3000
	if !testing.Short() {
		n = scale(t, 200_000) / 10
	}
	now := time.Now()
	path := filepath.Join(t.TempDir(), "once.db")
	fillStore(t, path, 10_000, func(f *filler) {
		rec := boltRec("")
		for i := range n {
			rec.Key, rec.Outcome, rec.Acked, rec.Request = scaleKey(i), Undecided, false, []byte("request")
			f.begin(rec)
			rec.Outcome, rec.Acked, rec.Request, rec.KeepUntil = Succeeded, true, nil, now
			f.save(rec)
		}
	})
	s := openBolt(t, path)
	s.db.NoSync = true
	last, commits := 0, countCommits(s, nil)
	count := s.commitTx
	s.commitTx = func(tx *bbolt.Tx) error {
		next := n
		if at := tx.Bucket(bucketMeta).Get(metaPurge); at != nil {
			id, err := decodeID(at)
			if _, scanErr := fmt.Sscanf(id.Key, "0197%x", &next); err != nil || scanErr != nil {
				t.Error(err, scanErr)
			}
		}
		if next-last > purgePage {
			t.Errorf("%d records are dropped in one commit", next-last)
		}
		last = next
		return count(tx)
	}
	dropped, done, err := s.Purge(t.Context(), now.Add(time.Second), math.MaxInt)
	if dropped != n || !done || err != nil || *commits < n/purgePage {
		t.Errorf("%d of %d dropped in %d commits, done: %v, %v", dropped, n, *commits, done, err)
	}
}

// A file is as large as what is in it, and not as what was.
func TestFileStaysSmall(t *testing.T) {
	const live, limit = 1000, 8 << 20
	n := 20_000
	if !testing.Short() {
		n = scale(t, 200_000)
	}
	path := filepath.Join(t.TempDir(), "once.db")
	fillStore(t, path, 100, func(f *filler) { churn(f, n, live) })
	s := openBolt(t, path)
	info, err := s.file.Stat()
	if err != nil || info.Size() > limit && runtime.GOOS != "windows" {
		t.Errorf("the file has %d bytes after %d operations, %v", info.Size(), n, err)
	}
	if counts, _ := s.Counts(t.Context()); counts.Pending != live {
		t.Errorf("%+v, want %d pending", counts, live)
	}
	t.Logf("%d bytes", info.Size())
}

// churn begins and finishes n operations of 1 KiB, and leaves some.
func churn(f *filler, n, live int) {
	f.tb.Helper()
	rec := boltRec("")
	request, answer := make([]byte, 1024), make([]byte, 400)
	for i := range n + live {
		rec.Key, rec.Outcome, rec.Acked, rec.Request, rec.Answer = scaleKey(i), Undecided, false, request, nil
		f.begin(rec)
		if i >= live {
			rec.Key, rec.Outcome, rec.Acked, rec.Request, rec.Answer, rec.KeepUntil = scaleKey(i-live), Succeeded, true, nil, answer, rec.Updated
			f.save(rec)
		}
		if i%1000 == 999 {
			f.flush()
			for done := false; !done; {
				var err error
				if _, done, err = f.s.Purge(context.Background(), rec.Updated.Add(time.Second), 1000); err != nil {
					f.tb.Fatal(err)
				}
			}
		}
	}
}
