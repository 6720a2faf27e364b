package oncehttp_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/oncehttp/oncehttp"
)

// documents are README.md and the pages of docs.
func documents(t *testing.T) []string {
	t.Helper()
	pages, err := filepath.Glob("docs/*.md")
	if err != nil || len(pages) == 0 {
		t.Fatalf("no pages in docs: %v", err)
	}
	return append(pages, "README.md")
}

func readPage(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return strings.ReplaceAll(string(text), "\r\n", "\n") // as git gives it to Windows
}

// tableRows returns the cells of all rows of all tables of a page, by the name in
// the first cell that is in backquotes. A name has one row.
func tableRows(t *testing.T, file string) map[string][]string {
	t.Helper()
	rows := make(map[string][]string)
	for line := range strings.Lines(readPage(t, file)) {
		line = strings.TrimSpace(line)
		if !strings.HasPrefix(line, "|") || strings.HasPrefix(line, "|--") {
			continue
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		m := regexp.MustCompile("^`([^`]+)`").FindStringSubmatch(cells[0])
		if m == nil {
			continue
		}
		if rows[m[1]] != nil {
			t.Errorf("%s: %s has two rows", file, m[1])
		}
		rows[m[1]] = cells
	}
	return rows
}

func TestDefaultsAreAsDocumented(t *testing.T) {
	const file = "docs/defaults.md"
	rows := tableRows(t, file)
	defaults := oncehttp.Defaults()
	for name, value := range defaults {
		if rows[name] == nil {
			t.Errorf("%s has no row for %s", file, name)
		} else if rows[name][1] != value {
			t.Errorf("%s says %s is %s; it is %s", file, name, rows[name][1], value)
		}
	}
	for name := range rows {
		if _, ok := defaults[name]; !ok {
			t.Errorf("%s has a row for %s, which is no default", file, name)
		}
	}
	text := readPage(t, file)
	for of, v := range map[string]any{"": oncehttp.Options{}, "Budget.": oncehttp.Budget{}, "Breaker.": oncehttp.Breaker{}, "Provider.": oncehttp.Provider{}} {
		for _, field := range reflect.VisibleFields(reflect.TypeOf(v)) {
			if field.IsExported() && !strings.Contains(text, "`"+of+field.Name+"`") {
				t.Errorf("%s says nothing of %s%s", file, of, field.Name)
			}
		}
	}
}

// declared returns the exported names of the package that a filter selects.
func declared(t *testing.T, want func(name string, value ast.Expr, typ ast.Expr) bool) (names []string) {
	t.Helper()
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range parsed.Decls {
			decl, ok := d.(*ast.GenDecl)
			if !ok {
				continue
			}
			var typ ast.Expr // carried on from the line before, as in a list of constants
			for _, spec := range decl.Specs {
				switch s := spec.(type) {
				case *ast.ValueSpec:
					if s.Type != nil || len(s.Values) > 0 {
						typ = s.Type
					}
					for i, name := range s.Names {
						var value ast.Expr
						if i < len(s.Values) {
							value = s.Values[i]
						}
						if name.IsExported() && want(name.Name, value, typ) {
							names = append(names, name.Name)
						}
					}
				case *ast.TypeSpec:
					if s.Name.IsExported() && want(s.Name.Name, nil, nil) {
						names = append(names, s.Name.Name)
					}
				}
			}
		}
	}
	return names
}

func TestEveryErrorIsDocumented(t *testing.T) {
	rows := tableRows(t, "docs/errors.md")
	errors := declared(t, func(name string, _, _ ast.Expr) bool {
		return strings.HasPrefix(name, "Err") || strings.HasSuffix(name, "Error")
	})
	for _, name := range errors {
		if rows[name] == nil {
			t.Errorf("docs/errors.md has no row for %s", name)
		}
	}
	if len(errors) < 25 {
		t.Errorf("found only %v", errors)
	}
	for name := range rows {
		if strings.HasPrefix(name, "Err") && !slices.Contains(errors, name) {
			t.Errorf("docs/errors.md has a row for %s, which does not exist", name)
		}
	}
}

func TestEveryReasonIsDocumented(t *testing.T) {
	reasons := declared(t, func(_ string, _, typ ast.Expr) bool {
		id, ok := typ.(*ast.Ident)
		return ok && id.Name == "Reason"
	})
	if len(reasons) < 11 {
		t.Errorf("found only %v", reasons)
	}
	rows, page := tableRows(t, "docs/errors.md"), readPage(t, "docs/unknown-operations.md")
	for i, name := range reasons {
		text := oncehttp.Reason(i).String() // they are declared in the order of their values
		if rows[name] == nil || rows[name][1] != text {
			t.Errorf("docs/errors.md has no row for %s with the text %q", name, text)
		}
		if i > 0 && !strings.Contains(page, "\n### "+strings.ToUpper(text[:1])+text[1:]+"\n\n`"+name+"`") {
			t.Errorf("docs/unknown-operations.md has no section %q that begins with `%s`", text, name)
		}
	}
}

// slug is the anchor that GitHub gives a heading.
func slug(heading string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == ' ':
			return '-'
		case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
			return unicode.ToLower(r)
		}
		return -1
	}, heading)
}

func TestLinksOfTheDocumentsLead(t *testing.T) {
	code := regexp.MustCompile("(?ms)^```.*?^```$|`[^`\n]*`")
	link := regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading := regexp.MustCompile(`(?m)^#+ (.*)$`)
	linked := map[string]bool{"README.md": true}
	for _, file := range documents(t) {
		for _, m := range link.FindAllStringSubmatch(code.ReplaceAllString(readPage(t, file), ""), -1) {
			target, anchor, _ := strings.Cut(m[1], "#")
			if strings.Contains(target, "://") {
				continue
			}
			path := file
			if target != "" {
				path = filepath.Join(filepath.Dir(file), target)
			}
			if _, err := os.Stat(path); err != nil {
				t.Errorf("%s links to %s: %v", file, m[1], err)
				continue
			}
			linked[path] = true
			if anchor == "" {
				continue
			}
			headings := heading.FindAllStringSubmatch(readPage(t, path), -1)
			if !slices.ContainsFunc(headings, func(h []string) bool { return slug(h[1]) == anchor }) {
				t.Errorf("%s links to %s, which has no such heading", file, m[1])
			}
		}
	}
	for _, file := range documents(t) {
		if !linked[filepath.FromSlash(file)] {
			t.Errorf("nothing links to %s", file)
		}
	}
}

// TestCodeOfTheDocumentsCompiles: each block of Go is a run of lines of a file
// that is compiled.
func TestCodeOfTheDocumentsCompiles(t *testing.T) {
	var sources [][]string
	err := filepath.WalkDir(".", func(path string, _ fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".go") {
			sources = append(sources, strings.Split(readPage(t, path), "\n"))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	blocks := 0
	for _, file := range documents(t) {
		for _, m := range regexp.MustCompile("(?ms)^```go\n(.*?)^```$").FindAllStringSubmatch(readPage(t, file), -1) {
			blocks++
			block := strings.Split(strings.TrimSuffix(m[1], "\n"), "\n")
			most := 0
			for _, source := range sources {
				most = max(most, longestRun(source, block))
			}
			if most < len(block) {
				t.Errorf("%s: in no file that is compiled:\n%s", file, strings.Join(block[:most+1], "\n"))
			}
		}
	}
	if blocks < 10 {
		t.Errorf("found only %d blocks", blocks)
	}
}

// longestRun returns how many lines of a block, from its first on, stand one after
// another in a source, indented as the first one is.
func longestRun(source, block []string) (most int) {
	for start := range source {
		indent, ok := strings.CutSuffix(source[start], block[0])
		if !ok || strings.Trim(indent, "\t") != "" {
			continue
		}
		n := 0
		for n < len(block) && start+n < len(source) && (source[start+n] == indent+block[n] || block[n] == "" && source[start+n] == "") {
			n++
		}
		most = max(most, n)
	}
	return most
}

// TestReadmeHasTheDefaults: its short table is that of docs/defaults.md.
func TestReadmeHasTheDefaults(t *testing.T) {
	page, d := readPage(t, "README.md"), oncehttp.Defaults()
	for _, want := range []string{
		fmt.Sprintf("| %s, full jitter: `random(0, min(%s, %s · 2ⁿ))`; Retry-After honoured up to %s |", d["MaxAttempts"], d["BackoffCap"], d["BackoffBase"], d["MaxRetryAfter"]),
		fmt.Sprintf("| %s, Stripe %s; keyed requests only |", d["AttemptTimeout"], d["Stripe.AttemptTimeout"]),
		fmt.Sprintf("over %s, and %s/s with bursts of %s |", d["Budget.Window"], d["Budget.MinPerSecond"], d["Budget.Burst"]),
		fmt.Sprintf("| %s requests in %s, over half failed and the last %s, or %[1]s in a row and no success for 1 s; open %[4]s; one probe |", d["Breaker.MinRequests"], d["Breaker.Window"], d["Breaker.Consecutive"], d["Breaker.OpenFor"]),
		fmt.Sprintf("| Stripe v1 %s, v2 %s, unlisted hosts %s: ", d["Stripe.Window"], d["StripeV2.Window"], d["Provider.Window"]),
		fmt.Sprintf("| %s each way;", d["MaxBodyBytes"]),
	} {
		if !strings.Contains(page, want) {
			t.Errorf("README.md does not say %q", want)
		}
	}
}
