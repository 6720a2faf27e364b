// Command table compares the table of docs/reliability.md with what a run of the
// tests has counted, or writes it.
//
//	ONCEHTTP_RELIABILITY=/tmp/results .ci/test
//	go run ./internal/reliability/table [-write] /tmp/results
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/oncehttp/oncehttp/internal/reliability"
)

const (
	page        = "docs/reliability.md"
	begin, end  = "<!-- table: written by internal/reliability/table -->\n", "<!-- end of table -->\n"
	headOfTable = "| fault class | how | cases | twice | lost | unreadable | panics | told falsely | a mutant that its test notices |\n" +
		"|---|---|---:|---:|---:|---:|---:|---:|---|\n"
)

func main() {
	write := flag.Bool("write", false, "write the table instead of comparing it")
	flag.Parse()
	if err := run(flag.Arg(0), *write); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(results string, write bool) error {
	rows, err := read(results)
	if err != nil {
		return err
	}
	mutants, err := mutantsByTest("internal/mutants/mutants_test.go", "torture/mutants_test.go")
	if err != nil {
		return err
	}
	text, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	head, rest, ok1 := strings.Cut(string(text), begin)
	old, tail, ok2 := strings.Cut(rest, end)
	if !ok1 || !ok2 {
		return fmt.Errorf("%s has no place for the table", page)
	}
	table, errs := headOfTable, []error(nil)
	for _, r := range rows {
		if mutants[r.Test] == "" {
			errs = append(errs, fmt.Errorf("%s: no mutant is noticed by %s", r.Class, r.Test))
		}
		about := ""
		if r.About {
			about = "about "
		}
		table += fmt.Sprintf("| %s | %s | %s%s | %d | %d | %d | %d | %d | %s |\n", r.Class, r.How, about, grouped(r.Cases),
			r.Twice, r.Lost, r.Unreadable, r.Panics, r.ToldFalsely, mutants[r.Test])
	}
	var sum reliability.Result // of cases, there is none: a host is not a power failure
	for _, r := range rows {
		sum.Twice += r.Twice
		sum.Lost += r.Lost
		sum.Unreadable += r.Unreadable
		sum.Panics += r.Panics
		sum.ToldFalsely += r.ToldFalsely
	}
	table += fmt.Sprintf("| **%d classes** | | | **%d** | **%d** | **%d** | **%d** | **%d** | |\n", len(rows),
		sum.Twice, sum.Lost, sum.Unreadable, sum.Panics, sum.ToldFalsely)
	if write {
		return errors.Join(append(errs, os.WriteFile(page, []byte(head+begin+table+end+tail), 0o644))...)
	}
	return errors.Join(append(errs, compare(old, rows))...)
}

// read returns the results of a run, those of one class added up, in the order of
// their tests' files.
func read(path string) (rows []reliability.Result, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var r reliability.Result
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			return nil, err
		}
		if r.Bad() {
			return nil, fmt.Errorf("a promise is broken: %+v", r)
		}
		i := slices.IndexFunc(rows, func(row reliability.Result) bool { return row.Class == r.Class })
		if i < 0 {
			rows = append(rows, r)
			continue
		}
		rows[i].Cases += r.Cases
	}
	if len(rows) == 0 {
		return nil, fmt.Errorf("%s has no results", path)
	}
	slices.SortStableFunc(rows, func(a, b reliability.Result) int {
		return cmp.Or(cmp.Compare(a.Test, b.Test), cmp.Compare(a.Class, b.Class))
	})
	return rows, nil
}

var (
	mutantName = regexp.MustCompile(`(?m)^\t\{(?:name: )?"([^"]+)"`)
	testName   = regexp.MustCompile(`"(Test\w+)"`)
)

// mutantsByTest returns, for each test that notices mutants, the name of the first.
func mutantsByTest(files ...string) (map[string]string, error) {
	mutants := make(map[string]string)
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		names := mutantName.FindAllSubmatchIndex(text, -1)
		for i, at := range names {
			entry := text[at[0]:]
			if i+1 < len(names) {
				entry = text[at[0]:names[i+1][0]]
			}
			for _, test := range testName.FindAllSubmatch(entry, -1) {
				if name := string(test[1]); mutants[name] == "" {
					mutants[name] = string(text[at[2]:at[3]])
				}
			}
		}
	}
	return mutants, nil
}

// compare demands of the page's table that it has the classes of the run, and no
// more cases in each; where it says "about", the run may have half of them.
func compare(table string, rows []reliability.Result) (err error) {
	listed := make(map[string]int)
	for line := range strings.Lines(table) {
		cells := strings.Split(line, " | ")
		if len(cells) < 8 || strings.HasPrefix(line, "| **") {
			continue
		}
		count := strings.TrimPrefix(strings.ReplaceAll(cells[2], ",", ""), "about ")
		if n, err := strconv.Atoi(count); err == nil {
			listed[strings.TrimPrefix(cells[0], "| ")] = n
		}
	}
	for _, r := range rows {
		n, ok := listed[r.Class]
		if !ok {
			err = errors.Join(err, fmt.Errorf("%s: not in %s; write the table anew", r.Class, page))
		}
		if r.Cases < n && !(r.About && r.Cases >= n/2) {
			err = errors.Join(err, fmt.Errorf("%s: %d cases, %s has %d", r.Class, r.Cases, page, n))
		}
		delete(listed, r.Class)
	}
	for class := range listed {
		err = errors.Join(err, fmt.Errorf("%s: not in this run", class))
	}
	return err
}

// grouped writes a number with commas.
func grouped(n int) string {
	s := strconv.Itoa(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
