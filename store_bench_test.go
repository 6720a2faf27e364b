package oncehttp

import (
	"bytes"
	"context"
	"fmt"
	"path/filepath"
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
