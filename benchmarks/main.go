// Benchmarks measures oncehttp beside its peers, prints how it does against its
// targets, and writes docs/performance.md and docs/performance.svg.
//
//	cd benchmarks && go run .
//
// Contenders take turns in every round, each opened afresh, and ratios are taken
// within a round: what slows the machine down slows both.
package main

import (
	"cmp"
	"flag"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"slices"
	"time"
)

var (
	rounds  = flag.Int("rounds", 9, "how often each contender has its turn")
	turn    = flag.Duration("time", time.Second, "how long a turn is")
	scratch = flag.String("dir", "", "`directory` of the files that are written; empty means the system's temporary one")
	out     = flag.String("out", "../docs", "`directory` of performance.md and performance.svg")
	own     = flag.Int("own", 3, "runs of the library's own benchmarks of scale; 0 means none")
	ownSize = flag.Int("records", 1_000_000, "records of those")
	quick   = flag.Bool("quick", false, "one round of short turns, to see that everything works; writes to a temporary directory")
)

func main() {
	log.SetFlags(0)
	flag.Parse()
	if err := run(); err != nil {
		log.Fatal(err)
	}
}

func run() error {
	idleHosts, inFlight := 20_000, 2000
	if *quick {
		*rounds, *turn, *own = 1, 20*time.Millisecond, 0
		idleHosts, inFlight = 1000, 100
		dir, err := os.MkdirTemp("", "oncehttp-performance-")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		page, err := os.ReadFile(filepath.Join(*out, pageName))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, pageName), page, 0o644); err != nil {
			return err
		}
		*out = dir
	}
	facts, err := machine(cmp.Or(*scratch, os.TempDir()))
	if err != nil {
		return err
	}
	all, err := groups()
	if err != nil {
		return err
	}
	r := make(results)
	var host, operation, bareOperation []float64
	for i := range *rounds {
		if err := round(i, all, r); err != nil {
			return err
		}
		h, err := perHost(idleHosts)
		if err != nil {
			return err
		}
		o, err := perOperation(inFlight, durable)
		if err != nil {
			return err
		}
		b, err := perOperation(inFlight, bareClient)
		if err != nil {
			return err
		}
		host, operation, bareOperation = append(host, h), append(operation, o), append(bareOperation, b)
		log.Printf("round %d of %d", i+1, *rounds)
	}
	var scale []benchmarks
	for i := range *own {
		b, err := ownBenchmarks(*ownSize)
		if err != nil {
			return err
		}
		scale = append(scale, b)
		log.Printf("the library's own benchmarks %d of %d", i+1, *own)
	}
	rows := slices.Concat(targetRows(r), scaleRows(scale), []row{
		{work: "memory of an idle host", want: 1, atMost: true, unit: " KiB", values: host},
		{work: "memory of an operation in flight, without its body", against: fmt.Sprintf("(`http.Client`: %s KiB)", digits(median(bareOperation))), want: 8, atMost: true, unit: " KiB", values: operation},
	})
	text := report(facts, all, r, rows)
	fmt.Print(text)
	if err := drawScaling(r, filepath.Join(*out, "performance.svg")); err != nil {
		return err
	}
	return writePage(filepath.Join(*out, pageName), text)
}

// round gives every contender its turn, for every number of callers. Every other
// round goes the other way round.
func round(i int, all []group, r results) error {
	for _, g := range all {
		contenders := slices.Clone(g.contenders)
		if i%2 == 1 {
			slices.Reverse(contenders)
		}
		for _, callers := range g.callers {
			for _, c := range contenders {
				s, err := measure(c, callers, *turn, g.timed)
				if err != nil {
					return fmt.Errorf("%s: %w", g.name, err)
				}
				k := key{g.name, callers, c.name}
				r[k] = append(r[k], s)
			}
		}
	}
	return nil
}
