package oncehttp_test

import (
	"encoding/json"
	"go/parser"
	"go/token"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestUsersLinkOnlyWhatIsPromised: every dependency of the root module lands in
// every user's binary.
func TestUsersLinkOnlyWhatIsPromised(t *testing.T) {
	allowed := []string{
		"github.com/oncehttp/oncehttp",
		"github.com/hashicorp/go-retryablehttp", // the loop of the attempts
		"github.com/hashicorp/go-cleanhttp",     // comes with it
		"github.com/sony/gobreaker/v2",          // the circuit breaker
		"golang.org/x/time",                     // floor of the budget, rate limit
		"go.etcd.io/bbolt",                      // the key store
		"golang.org/x/sys",                      // comes with it
		"github.com/google/uuid",                // keys
	}
	out, err := exec.Command("go", "list", "-deps", "-json=ImportPath,Standard,Module", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	linked := map[string]bool{}
	for d := json.NewDecoder(strings.NewReader(string(out))); d.More(); {
		var p struct {
			ImportPath string
			Standard   bool
			Module     *struct{ Path string }
		}
		if err := d.Decode(&p); err != nil {
			t.Fatal(err)
		}
		switch {
		case p.Standard && (p.ImportPath == "testing" || strings.HasPrefix(p.ImportPath, "testing/")):
			t.Errorf("links %s", p.ImportPath)
		case p.Standard:
		case !slices.Contains(allowed, p.Module.Path):
			t.Errorf("links %s of %s", p.ImportPath, p.Module.Path)
		default:
			linked[p.Module.Path] = true
		}
	}
	for _, m := range allowed {
		if !linked[m] {
			t.Errorf("does not link %s: the rule is stale", m)
		}
	}
}

// TestEachDependencyHasItsFiles: who wants to replace one knows where to look.
func TestEachDependencyHasItsFiles(t *testing.T) {
	rules := []struct {
		path, reason string
		files        []string
	}{
		{"github.com/hashicorp/go-retryablehttp", "the loop is asked for in client.go and made in retry.go", []string{"client.go", "retry.go"}},
		{"github.com/sony/gobreaker/v2", "one breaker per host", []string{"breaker.go"}},
		{"golang.org/x/time/rate", "the budget's floor and the rate limit", []string{"budget.go", "limits.go"}},
		{"github.com/google/uuid", "keys are made in one place", []string{"operation.go"}},
		{"go.etcd.io/bbolt", "the file of the key store", []string{"bolt*.go"}},
		{"go.etcd.io/bbolt/errors", "the file of the key store", []string{"bolt*.go"}},
		{"log", "only log/slog", nil},
		{"math/rand", "math/rand/v2", nil},
		{"encoding/gob", "never in a stored format", nil},
		{"unsafe", "not needed", nil},
		{"net/http", "limits and stores know nothing of HTTP", []string{
			"admin.go", "attempt.go", "begin.go", "client.go", "errors.go", "flight.go", "handle.go", "judge.go", "operation.go",
			"options.go", "prepare.go", "provider.go", "providers.go", "resumption.go",
			"resume.go", "retry.go", "retryafter.go", "settle.go", "stored.go", "transport.go", "verdicts.go",
		}},
	}
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, imported := range parsed.Imports {
			for _, rule := range rules {
				if imported.Path.Value != `"`+rule.path+`"` {
					continue
				}
				if !slices.ContainsFunc(rule.files, func(pattern string) bool { ok, _ := filepath.Match(pattern, file); return ok }) {
					t.Errorf("%s imports %s: %s", file, rule.path, rule.reason)
				}
			}
		}
	}
}
