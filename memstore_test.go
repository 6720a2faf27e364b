package oncehttp

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

func TestMemoryStoreListsAndCountsAfterManyChanges(t *testing.T) {
	s := NewMemoryStore()
	ctx := t.Context()
	random := rand.New(rand.NewPCG(9, 10))
	for i := range 2000 {
		r := boltRec(fmt.Sprint("k", random.IntN(100)))
		r.Outcome = []Outcome{Undecided, Succeeded, Rejected, Unknown}[random.IntN(4)]
		switch random.IntN(4) {
		case 0:
			s.Begin(ctx, r)
		case 1:
			s.Save(ctx, r)
		case 2:
			s.Ack(ctx, r)
		case 3:
			s.Delete(ctx, r)
		}
		if i%50 != 0 {
			continue
		}
		var want Counts
		open := 0
		for _, r := range s.records {
			if !r.Acked {
				want.open(r.Outcome, 1)
				open++
			}
		}
		if got, err := s.Counts(ctx); err != nil || got != want {
			t.Fatalf("counts %+v, %v, want %+v", got, err, want)
		}
		list, err := s.List(ctx, 0, 1000)
		if err != nil || len(list) != open {
			t.Fatalf("%d records listed, %v, want %d", len(list), err, open)
		}
		if len(s.open) > 2*open+64 {
			t.Fatalf("%d records are remembered for listing, %d are open", len(s.open), open)
		}
	}
}
