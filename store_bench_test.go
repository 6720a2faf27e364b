package oncehttp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/bbolt"
)

// BenchmarkStore measures whole operations as a client writes them: a Begin that
// is waited for, and an acknowledged success that rides along.
func BenchmarkStore(b *testing.B) {
	for _, writers := range []int{1, 8, 64, 256} {
		b.Run(fmt.Sprintf("bolt/writers=%d", writers), func(b *testing.B) {
			s, err := OpenBolt(filepath.Join(b.TempDir(), "once.db"))
			if err != nil {
				b.Fatal(err)
			}
			commits := 0 // one at a time
			s.commitTx = func(tx *bbolt.Tx) error {
				commits++
				return tx.Commit()
			}
			benchmarkStore(b, s, writers)
			b.ReportMetric(float64(commits)/float64(b.N), "commits/op")
		})
	}
	for _, writers := range []int{1, 8, 64, 256} {
		b.Run(fmt.Sprintf("memory/writers=%d", writers), func(b *testing.B) {
			benchmarkStore(b, NewMemoryStore(), writers)
		})
	}
}

func benchmarkStore(b *testing.B, s KeyStore, writers int) {
	ctx := context.Background()
	c := &Client{store: s}
	body, answer := bytes.Repeat([]byte("r"), 800), bytes.Repeat([]byte("a"), 400)
	var next atomic.Int64
	var lazy, group sync.WaitGroup
	operation := func(i int64) {
		r := Record{
			ID:    ID{Key: fmt.Sprintf("%016x", i), Origin: "https://api.example.com", Scope: "acct_1"},
			Epoch: 1, Owner: "owner", Updated: time.Now(), Meta: body[:100], Request: body,
		}
		if existing, err := s.Begin(ctx, r); existing != nil || err != nil {
			b.Errorf("Begin: %v, %v", existing, err)
			return
		}
		r.Outcome, r.Acked, r.Answer, r.Request, r.Meta = Succeeded, true, answer, nil, nil
		lazy.Add(1)
		c.saveSoon(r, func(err error) {
			defer lazy.Done()
			if err != nil {
				b.Error(err)
			}
		})
	}
	b.ResetTimer()
	start := time.Now()
	for range writers {
		group.Go(func() {
			for {
				i := next.Add(1)
				if i > int64(b.N) {
					return
				}
				operation(i)
			}
		})
	}
	group.Wait()
	lazy.Wait()
	b.ReportMetric(float64(b.N)/time.Since(start).Seconds(), "ops/s")
	b.StopTimer()
	if err := s.Close(); err != nil {
		b.Fatal(err)
	}
}

// The benchmarks of large stores have 100,000 operations, or as many as the
// environment variable ONCEHTTP_SCALE says.
const benchScale = 100_000

// A largeStore is a file, made once, of which each benchmark uses a copy.
type largeStore struct {
	name string
	fill func(f *filler, n int)
}

var largeStores = []largeStore{
	{"empty", func(*filler, int) {}},
	{"live", func(f *filler, _ int) { churn(f, 0, benchLive) }},
	{"pending", func(f *filler, n int) {
		rec := boltRec("")
		rec.Request = make([]byte, 1024)
		for i := range n {
			rec.Key = scaleKey(i)
			f.begin(rec)
		}
	}},
	{"done", fillDone},
	{"churned", func(f *filler, n int) { churn(f, n, benchLive) }},
	{"drained", func(f *filler, n int) { fillDrained(f, n, benchLive) }},
}

// fillDrained leaves what n operations that piled up and were worked off leave, and
// some pending ones.
func fillDrained(f *filler, n, pending int) {
	rec := boltRec("")
	request := make([]byte, 1024)
	for i := range n + pending {
		rec.Key, rec.Request = scaleKey(i), request
		f.begin(rec)
	}
	for i := range n {
		rec.Key, rec.Outcome, rec.Acked, rec.Request, rec.KeepUntil = scaleKey(i), Succeeded, true, nil, rec.Updated
		f.save(rec)
	}
	f.flush()
	if _, done, err := f.s.Purge(context.Background(), rec.Updated.Add(time.Second), math.MaxInt); !done || err != nil {
		f.tb.Fatal(done, err)
	}
}

const benchLive = 1000 // pending operations in stores that have some left

// fillDone leaves n acknowledged operations, and some pending ones among the last.
func fillDone(f *filler, n int) {
	rec := boltRec("")
	request, answer := make([]byte, 1024), make([]byte, 400)
	for i := range n + benchLive {
		rec.Key, rec.Outcome, rec.Acked, rec.Request, rec.Answer = scaleKey(i), Undecided, false, request, nil
		f.begin(rec)
		if i < n {
			rec.Outcome, rec.Acked, rec.Request, rec.Answer = Succeeded, true, nil, answer
			f.save(rec)
		}
	}
}

// largeStoreFile makes the file of a large store.
func largeStoreFile(b *testing.B, name string) string {
	b.Helper()
	path := filepath.Join(b.TempDir(), "once.db")
	for _, l := range largeStores {
		if l.name == name {
			n := scale(b, benchScale)
			fillStore(b, path, 1000, func(f *filler) { l.fill(f, n) })
			return path
		}
	}
	b.Fatal(name)
	return ""
}

// BenchmarkBeginIn measures a lone writer's Begin, of 1 KiB, in stores that hold a
// lot, or have held it: by turns, so that what else the disk does concerns all of
// them. Its metrics are the medians.
func BenchmarkBeginIn(b *testing.B) {
	stores := make([]*BoltStore, len(largeStores))
	for i, l := range largeStores {
		stores[i] = openBolt(b, largeStoreFile(b, l.name))
	}
	took := make([][]time.Duration, len(stores))
	rec := boltRec("")
	rec.Request = make([]byte, 1024)
	i := 10_000_000
	for b.Loop() {
		i++
		rec.Key = scaleKey(i)
		for k, s := range stores {
			begin := time.Now()
			mustBegin(b, s, rec)
			took[k] = append(took[k], time.Since(begin))
			if err := s.Delete(b.Context(), rec); err != nil { // so that it stays as it is
				b.Fatal(err)
			}
		}
	}
	for k, l := range largeStores {
		slices.Sort(took[k])
		b.ReportMetric(float64(took[k][len(took[k])/2].Microseconds()), l.name+"-µs")
	}
}

// BenchmarkFindPending measures how long it takes to list 1,000 pending operations
// behind many that are done, and to look at all instead.
func BenchmarkFindPending(b *testing.B) {
	path := largeStoreFile(b, "done")
	s := openBolt(b, path)
	b.Run("list", func(b *testing.B) {
		for b.Loop() {
			found, after := 0, uint64(0)
			for {
				page, err := s.List(b.Context(), after, listPage)
				if err != nil {
					b.Fatal(err)
				}
				if len(page) == 0 {
					break
				}
				found, after = found+len(page), page[len(page)-1].Seq
			}
			if found != benchLive {
				b.Fatal(found)
			}
		}
	})
	b.Run("scan", func(b *testing.B) {
		for b.Loop() {
			found := 0
			err := s.read(b.Context(), func(t *boltTx) error {
				return t.keys.ForEach(func(id, _ []byte) error {
					r, err := t.find(id, &Record{})
					if err == nil && !r.Acked {
						found++
					}
					return err
				})
			})
			if err != nil || found != benchLive {
				b.Fatal(found, err)
			}
		}
	})
}

// BenchmarkOpenLarge measures opening, with the file in memory and without, after
// a proper end and after the death of the process.
func BenchmarkOpenLarge(b *testing.B) {
	for _, l := range largeStores {
		files := make(map[bool]string) // by killed
		for _, killed := range []bool{false, true} {
			for _, cold := range []bool{false, true} {
				b.Run(fmt.Sprintf("%s/killed=%v/cold=%v", l.name, killed, cold), func(sub *testing.B) {
					if len(files) == 0 {
						files[false] = largeStoreFile(b, l.name)
						files[true] = files[false] + ".killed"
						s := openBolt(sub, files[false])
						for i := range 3 {
							mustBegin(sub, s, boltRec(fmt.Sprint("last", i)))
						}
						copyFile(sub, files[true], files[false]) // as it is before Close
						s.Close()
					}
					for sub.Loop() {
						sub.StopTimer()
						if cold && !dropCache(sub, files[killed]) {
							sub.Skip("not on this system")
						}
						sub.StartTimer()
						s, err := OpenBolt(files[killed])
						if err != nil {
							sub.Fatal(err)
						}
						sub.StopTimer()
						s.Close()
						sub.StartTimer()
					}
				})
			}
		}
	}
}

func copyFile(tb testing.TB, to, from string) {
	tb.Helper()
	in, err := os.Open(from)
	if err != nil {
		tb.Fatal(err)
	}
	defer in.Close()
	out, err := os.Create(to)
	if err != nil {
		tb.Fatal(err)
	}
	_, err = io.Copy(out, in)
	if err := errors.Join(err, out.Sync(), out.Close()); err != nil {
		tb.Fatal(err)
	}
}
