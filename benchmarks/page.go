package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
)

// The page, and what is between its hand-written parts.
const (
	pageName   = "performance.md"
	begin, end = "<!-- measured, by go run . in benchmarks: -->\n", "<!-- end of what is measured -->\n"
)

// writePage replaces what was measured in a page.
func writePage(file, text string) error {
	page, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	before, rest, ok := strings.Cut(string(page), begin)
	_, after, complete := strings.Cut(rest, end)
	if !ok || !complete {
		return errors.New(file + ": has no place for what was measured")
	}
	return os.WriteFile(file, []byte(before+begin+text+end+after), 0o644)
}

// report returns what was measured, in Markdown.
func report(facts []string, all []group, r results, rows []row) string {
	var b strings.Builder
	fmt.Fprintf(&b, "Measured on: %s. Rounds: %d, turns of %v. Runs of the benchmarks of scale: %d, with %d records.\n\n", strings.Join(facts, "; "), *rounds, *turn, *own, *ownSize)
	b.WriteString("## Targets\n\n")
	line(&b, "work", "callers", "against", "target", "median", "spread", "met")
	line(&b, "---", "---", "---", "---", "---", "---", "---")
	for _, row := range rows {
		line(&b, row.cells()...)
	}
	b.WriteString("\n## Rates\n\nOperations per second, medians.\n\n")
	perLoad(&b, all, r, func(k key) string { return perSecond(median(r.each(k, rate))) })
	b.WriteString("\n## Latency\n\nMicroseconds of a whole operation, p50 / p99, medians of the rounds.\n\n")
	perLoad(&b, all, r, func(k key) string { return digits(median(r.each(k, p50))) + " / " + digits(median(r.each(k, p99))) })
	b.WriteString("\nOne caller's unkeyed GETs on the same client, while 256 others POST or nobody does.\n\n")
	line(&b, "GETs", "p50, µs", "p99, µs")
	line(&b, "---", "---", "---")
	for _, g := range all {
		for _, c := range g.contenders {
			if k := (key{g.name, 1, c.name}); g.name == besideGet {
				line(&b, c.name, digits(median(r.each(k, p50))), digits(median(r.each(k, p99))))
			}
		}
	}
	b.WriteString("\n## In memory\n\nOne caller, a transport that answers at once.\n\n")
	line(&b, "work", "contender", "ns", "allocations")
	line(&b, "---", "---", "---", "---")
	for _, g := range all {
		for _, c := range g.contenders {
			if k := (key{g.name, 1, c.name}); !g.timed {
				line(&b, g.name, c.name, digits(median(r.each(k, nanos))), digits(median(r.each(k, allocs))))
			}
		}
	}
	b.WriteString("\n")
	return b.String()
}

// perLoad writes a table of what was measured under every number of callers.
func perLoad(b *strings.Builder, all []group, r results, cell func(key) string) {
	line(b, "work", "contender", "1 caller", "8", "64", "256")
	line(b, "---", "---", "---", "---", "---", "---")
	for _, g := range all {
		if len(g.callers) != len(everyLoad) {
			continue
		}
		for _, c := range g.contenders {
			cells := []string{g.name, c.name}
			for _, callers := range g.callers {
				cells = append(cells, cell(key{g.name, callers, c.name}))
			}
			line(b, cells...)
		}
	}
}

func line(b *strings.Builder, cells ...string) {
	fmt.Fprintf(b, "| %s |\n", strings.Join(cells, " | "))
}
