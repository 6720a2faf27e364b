package main

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
)

// BenchmarkContenders measures each contender by itself. What is to be compared
// is better measured in turns: go run .
func BenchmarkContenders(b *testing.B) {
	all, err := groups()
	if err != nil {
		b.Fatal(err)
	}
	for _, g := range all {
		for _, c := range g.contenders {
			for _, callers := range g.callers {
				b.Run(fmt.Sprintf("%s/%s/callers=%d", g.name, c.name, callers), func(b *testing.B) { benchmark(b, c, callers) })
			}
		}
	}
}

func benchmark(b *testing.B, c contender, callers int) {
	o, done, err := openIn(c, callers)
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := done(); err != nil {
			b.Error(err)
		}
	}()
	b.ReportAllocs()
	if callers == 1 {
		for b.Loop() {
			if err := o.do(); err != nil {
				b.Fatal(err)
			}
		}
	} else {
		var next atomic.Int64
		var group sync.WaitGroup
		b.ResetTimer()
		for range callers {
			group.Go(func() {
				for next.Add(1) <= int64(b.N) {
					if err := o.do(); err != nil {
						b.Error(err)
						return
					}
				}
			})
		}
		group.Wait()
	}
	if o.finish != nil {
		if err := o.finish(); err != nil {
			b.Error(err)
		}
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "ops/s")
}
