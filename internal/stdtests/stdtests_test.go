//go:build stdtests

// Package stdtests runs net/http's own tests on our client: a client that can
// take the place of http.DefaultClient must pass what that passes.
//
//	go test -tags stdtests ./internal/stdtests
//
// The tests are compiled from GOROOT, as "go test net/http" does, and nothing of
// them is kept here. An overlay changes http.Client at one place: it asks for
// another client to send a request through. The same binary is run with http.Client
// itself first: a test that does not pass then, or sends nothing through a client,
// does not count.
package stdtests

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/oncehttp/oncehttp/internal/stdtests/swap"
)

var through = flag.String("through", "oncehttp", "the client to test; retryablehttp is only reported, for comparison")

// A suite is the tests of one package of the standard library.
type suite struct {
	path    string
	edits   []edit
	atLeast int      // tests that must have counted
	retried []string // tests that a retry disturbs: they are run on a client that makes one attempt
	never   []never
}

// An edit replaces a text that occurs exactly once in a file of the package.
type edit struct{ file, old, new string }

// A never is a test that cannot pass on our client, on purpose.
type never struct{ test, why string }

// The client is swapped where all requests begin. The tests demand that clients
// leave no goroutine behind, so ours are closed before they look.
var suites = []suite{
	{
		path: "net/http",
		edits: []edit{
			{"main_test.go", "v := m.Run()\n", "v := m.Run()\n\tswap.Close()\n"},
			{"main_test.go", "func afterTest(t testing.TB) {\n", "func afterTest(t testing.TB) {\n\tswap.Close()\n"},
			{"main_test.go", "import (\n", "import (\n\t" + importSwap + "\n"},
			{"clientserver_test.go", "\t\tsynctest.Test(t, func(t *testing.T) {\n", "\t\tsynctest.Test(t, func(t *testing.T) {\n\t\t\tt.Cleanup(swap.Close)\n"},
			{"clientserver_test.go", "import (\n", "import (\n\t" + importSwap + "\n"},
		},
		atLeast: 680,
		retried: []string{
			// Their server fails, and expects that it is asked only once.
			"TestCancelRequestWhenSharingConnection", "TestDontCacheBrokenHTTP2Conn", "TestOnProxyConnectResponse",
			"TestProxyWithInfiniteHeader", "TestServerKeepAliveAfterWriteError", "TestTimeoutHandler",
			"TestTimeoutHandlerContextCanceled", "TestTimeoutHandlerRaceHeaderTimeout", "TestTimeoutHandlerSuperfluousLogs",
			"TestTransportProxyConnectHeader", "TestTransportProxyGetConnectHeader", "TestTransportResponseHeaderTimeout",
			"TestWriteDeadlineEnforcedPerStream", "TestWriteHeader0",
			// They use Transport.CancelRequest, which is deprecated. Its error has neither
			// type nor value, so that it cannot be told from one that may go away.
			"TestTransportCancelRequestInDial", "TestTransportCancelRequestInDo", "TestTransportCancelRequestWithBodyInDo",
		},
		never: []never{
			{"TestTransportCancelRequestWithBody/h1/TransportCancel", "Transport.CancelRequest, which is deprecated, must be given the same *Request as RoundTrip; a POST that may be sent again is sent as a copy, which httptrace watches"},
			{"TestAltProtoCancellation", "its RoundTripper ignores the context and knows Request.Cancel only, which is deprecated"},
		},
	},
	{path: "net/http/httptest", atLeast: 18},
	{
		path: "net/http/httputil", atLeast: 36,
		retried: []string{"TestReverseProxyCancellation", "TestReverseProxy_CopyBuffer"},
	},
}

const (
	importSwap = `swap "github.com/oncehttp/oncehttp/stdtestsswap"` // where the tests may import it

	useSwap = "if ClientUnderTest != nil {\n\t\tc = ClientUnderTest(c)\n\t}\n"
	doFunc  = "func (c *Client) do(req *Request) (retres *Response, reterr error) {\n"
	idle    = "func (c *Client) CloseIdleConnections() {\n"
)

var hook = []edit{
	{"client.go", doFunc, "// ClientUnderTest returns the client to use for another.\nvar ClientUnderTest func(*Client) *Client\n\n" + doFunc + "\t" + useSwap},
	{"client.go", idle, idle + "\t" + useSwap},
}

func TestStandardLibrary(t *testing.T) {
	for _, s := range suites {
		t.Run(strings.ReplaceAll(s.path, "/", "."), s.run)
	}
}

func (s *suite) run(t *testing.T) {
	src := filepath.Join(goroot(t), "src")
	if _, err := os.Stat(filepath.Join(src, "net/http/client_test.go")); err != nil {
		t.Skipf("SKIPPED: GOROOT has no sources: %v", err)
	}
	overlay := s.overlay(t, src)
	bare := s.test(t, overlay, "net/http", nil, nil)
	for _, test := range s.retried {
		if !slices.Contains(tops(bare.sent), test) {
			t.Errorf("%s is listed, but sends nothing through a client", test)
		}
	}
	counted := make(map[string]bool)
	for test := range bare.sent {
		if why := s.excluded(test, &bare); why != "" {
			t.Logf("not counted: %s: %s", test, why)
		} else {
			counted[test] = true
		}
	}
	ours := s.testOn(t, overlay, *through, tops(counted))
	failed := ours.notPassed(counted)
	report := *through != "oncehttp"
	if len(failed) > 0 && !report { // some of them depend on the load of the machine
		t.Logf("again, by themselves: %s", strings.Join(tops(failed), " "))
		ours.add(s.testOn(t, overlay, *through, tops(failed)))
		failed = ours.notPassed(failed)
	}

	t.Logf("%s: of %d tests that send through a client and pass on http.Client, %d pass on %s", s.path, len(counted), len(counted)-len(failed), *through)
	if report {
		t.Logf("failed: %s", strings.Join(slices.Sorted(maps.Keys(failed)), " "))
		return
	}
	for _, test := range slices.Sorted(maps.Keys(failed)) {
		t.Errorf("%s: %s\n%s", test, cmp.Or(ours.result[test], "not run"), ours.output[test])
	}
	if ours.failure != "" && bare.failure == "" {
		t.Errorf("%s as a whole: %s", s.path, ours.failure)
	}
	if len(counted) < s.atLeast {
		t.Errorf("only %d tests counted, want at least %d", len(counted), s.atLeast)
	}
}

// excluded says why a test does not count; empty means that it does.
func (s *suite) excluded(test string, bare *results) string {
	for _, n := range s.never {
		if *through == "oncehttp" && (test == n.test || strings.HasPrefix(test, n.test+"/")) {
			return n.why
		}
	}
	if r := bare.result[test]; r != "pass" {
		return r + " on http.Client itself"
	}
	return ""
}

// testOn runs tests on a client that is put in http.Client's place.
func (s *suite) testOn(t *testing.T, overlay, through string, tests []string) results {
	t.Helper()
	if through != "oncehttp" {
		return s.test(t, overlay, through, tests, nil)
	}
	var retrying, once, skipped []string
	for _, test := range tests {
		if slices.Contains(s.retried, test) {
			once = append(once, test)
		} else {
			retrying = append(retrying, test)
		}
	}
	for _, n := range s.never {
		skipped = append(skipped, n.test)
	}
	r := newResults()
	if retrying != nil {
		r.add(s.test(t, overlay, through, retrying, skipped))
	}
	if once != nil {
		r.add(s.test(t, overlay, through+swap.Once, once, skipped))
	}
	return r
}

// overlay writes the files that replace others of the standard library.
func (s *suite) overlay(t *testing.T, src string) string {
	t.Helper()
	dir := t.TempDir()
	replace := make(map[string]string)
	change := func(pkg string, edits []edit) {
		texts := make(map[string]string)
		for _, e := range edits {
			if texts[e.file] == "" {
				text, err := os.ReadFile(filepath.Join(src, pkg, e.file))
				if err != nil {
					t.Fatal(err)
				}
				texts[e.file] = string(text)
			}
			if n := strings.Count(texts[e.file], e.old); n != 1 {
				t.Fatalf("%s/%s has %q %d times, want once: net/http has changed, see the edits above", pkg, e.file, e.old, n)
			}
			texts[e.file] = strings.Replace(texts[e.file], e.old, e.new, 1)
		}
		for file, text := range texts {
			replace[filepath.Join(src, pkg, file)] = write(t, dir, file, text)
		}
	}
	change("net/http", hook)
	change(s.path, s.edits)
	use := fmt.Sprintf("package %s_test\n\nimport (\n\t%q\n\t%s\n)\n\nfunc init() { http.ClientUnderTest = swap.Client }\n", filepath.Base(s.path), "net/http", importSwap)
	replace[filepath.Join(src, s.path, "zz_stdtests_test.go")] = write(t, dir, "zz_stdtests_test.go", use)
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	replace[filepath.Join(here, "../../stdtestsswap/swap.go")] = filepath.Join(here, "swap/swap.go")
	js, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		t.Fatal(err)
	}
	return write(t, dir, "overlay.json", string(js))
}

func write(t *testing.T, dir, name, text string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// Results are what came of the tests of a package.
type results struct {
	result  map[string]string // pass, fail or skip; "died" if the process ended in it
	sent    map[string]bool   // tests that sent a request through a client
	output  map[string]string
	failure string // of the package, if it is not that of a test
}

func newResults() results {
	return results{result: make(map[string]string), sent: make(map[string]bool), output: make(map[string]string)}
}

// notPassed returns the tests that did not pass, or sent nothing.
func (r *results) notPassed(tests map[string]bool) map[string]bool {
	failed := make(map[string]bool)
	for test := range tests {
		if r.result[test] != "pass" || !r.sent[test] {
			failed[test] = true
		}
	}
	return failed
}

func (r *results) add(other results) {
	maps.Copy(r.result, other.result)
	maps.Copy(r.sent, other.sent)
	maps.Copy(r.output, other.output)
	r.failure = cmp.Or(r.failure, other.failure)
}

// test runs tests of the package through a client; nil names mean all. A test may
// end the process: as long as there are failures, those not yet begun are run.
func (s *suite) test(t *testing.T, overlay, through string, names, skipped []string) results {
	t.Helper()
	r := newResults()
	for {
		args := []string{"test", "-json", "-vet=off", "-count=1", "-timeout=2m", "-overlay", overlay}
		if names != nil {
			args = append(args, "-run", anyOf(names))
		}
		if skip := append(tops(r.result), skipped...); len(skip) > 0 {
			args = append(args, "-skip", anyOf(skip))
		}
		cmd := exec.CommandContext(t.Context(), "go", append(args, s.path)...)
		cmd.Env = append(os.Environ(), swap.Env+"="+through)
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		begun := len(r.result)
		library, _ := strings.CutSuffix(through, swap.Once)
		r.read(t, out, library)
		switch {
		case len(r.result) == 0:
			t.Fatalf("%s: %v\n%s", s.path, err, out)
		case err == nil, len(r.result) == begun:
			return r
		case !slices.ContainsFunc(slices.Collect(maps.Values(r.result)), func(r string) bool { return r == "fail" || r == "died" }):
			r.failure = r.output[""] // such as a goroutine that is left at the end
			return r
		}
	}
}

// read adds the events of a run on a library's client.
func (r *results) read(t *testing.T, events []byte, library string) {
	t.Helper()
	lines := bufio.NewScanner(bytes.NewReader(events))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e struct{ Action, Test, Output string }
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			t.Fatalf("%v: %s", err, lines.Bytes())
		}
		switch e.Action {
		case "run":
			r.result[e.Test] = "died"
		case "pass", "fail", "skip":
			if e.Test != "" {
				r.result[e.Test] = e.Action
			}
		case "output":
			if strings.TrimSpace(e.Output) == swap.Sent+library {
				r.sent[e.Test] = true
			} else {
				r.output[e.Test] += e.Output
			}
		}
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
}

// tops returns the names of the top-level tests among or above the tests.
func tops[V any](tests map[string]V) []string {
	var names []string
	for test := range tests {
		top, _, _ := strings.Cut(test, "/")
		names = append(names, top)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// anyOf returns a pattern, as of go test -run, that matches the tests.
func anyOf(tests []string) string {
	patterns := make([]string, len(tests))
	for i, test := range tests {
		patterns[i] = "^" + strings.ReplaceAll(regexp.QuoteMeta(test), "/", "$/^") + "$"
	}
	return strings.Join(patterns, "|")
}

// goroot returns where the go command has the standard library.
func goroot(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}
