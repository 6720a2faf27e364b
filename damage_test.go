package oncehttp_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/bbolt"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/internal/reliability"
)

// These tests damage the file of a store, between two processes and under a
// running one, and use it all the same: what comes of it is an error of a kind
// that a program can tell, never a second request for what has its answer, never
// an operation that has vanished, never the end of the process.

// A ledger is an API that charges orders and remembers what was sent. It does
// not deduplicate: a second request for an order is a second charge.
type ledger struct {
	mu    sync.Mutex
	sent  map[string]int // requests by order
	stuck bool           // requests get no answer before their context ends
	lost  bool           // answers are lost
}

func (l *ledger) RoundTrip(req *http.Request) (*http.Response, error) {
	b, err := io.ReadAll(req.Body)
	if err != nil {
		return nil, err
	}
	req.Body.Close()
	order := string(b)
	l.mu.Lock()
	l.sent[order]++
	stuck, lost := l.stuck, l.lost
	l.mu.Unlock()
	switch {
	case stuck:
		<-req.Context().Done()
		return nil, context.Cause(req.Context())
	case lost:
		return nil, io.ErrUnexpectedEOF
	}
	status := http.StatusOK
	if strings.HasPrefix(order, "rejected") {
		status = http.StatusBadRequest
	}
	return &http.Response{
		StatusCode: status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: http.Header{"Content-Type": {"text/plain"}},
		Body: io.NopCloser(strings.NewReader("answer of " + order)), ContentLength: int64(len("answer of " + order)), Request: req,
	}, nil
}

// damageOrders are the operations of a store that is damaged, by what they are.
var damageOrders = map[string]int{"acked": 24, "rejected": 4, "waiting": 8, "unknown": 8, "pending": 12}

func orderNames(kind string) (names []string) {
	for i := range damageOrders[kind] {
		names = append(names, fmt.Sprintf("%s-%02d%s", kind, i, strings.Repeat(".", i*i*17%900)))
	}
	return names
}

func keyOfOrder(order string) string {
	name, _, _ := strings.Cut(order, ".")
	return "key-" + name
}

func ledgerClient(path string, l *ledger, opts oncehttp.Options) (*oncehttp.Client, error) {
	opts.HTTPClient = &http.Client{Transport: l}
	return oncehttp.Open(path, &opts)
}

// chargeAt charges an order under its key and returns what its caller is told.
func chargeAt(ctx context.Context, c *oncehttp.Client, order string) (*oncehttp.Operation, string, error) {
	ctx, op := oncehttp.Start(ctx, oncehttp.Op{Key: keyOfOrder(order), Metadata: map[string]string{"order": order}})
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://api.test/charges", strings.NewReader(order))
	if err != nil {
		return op, "", err
	}
	resp, err := c.Do(req)
	if err != nil {
		return op, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return op, string(b), err
}

// storeImage returns the file of a process that died while it had operations of
// every kind. It must be called in a bubble; those that use the image begin at the
// same time.
func storeImage(t *testing.T, opts oncehttp.Options) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "once.db")
	l := &ledger{sent: make(map[string]int)}
	opts.MaxAttempts = 1
	c, err := ledgerClient(path, l, opts)
	if err != nil {
		t.Fatal(err)
	}
	ctx, leave := context.WithCancel(t.Context())
	for _, kind := range []string{"acked", "rejected", "waiting", "unknown"} {
		l.lost = kind == "unknown"
		for _, order := range orderNames(kind) {
			op, _, err := chargeAt(ctx, c, order)
			if kind == "acked" || kind == "rejected" {
				err = op.Ack(ctx)
			}
			if err != nil && kind != "unknown" {
				t.Fatal(err)
			}
		}
	}
	l.lost, l.stuck = false, true
	var calls sync.WaitGroup
	for _, order := range orderNames("pending") {
		calls.Go(func() { _, _, _ = chargeAt(ctx, c, order) })
		synctest.Wait() // one after the other, so that the image is the same each time
	}
	image := usedPart(t, path)
	leave()
	calls.Wait()
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	return image
}

// usedPart returns the file of a store without the room at its end.
func usedPart(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	copied := filepath.Join(t.TempDir(), "copy.db")
	if err := os.WriteFile(copied, b, 0o600); err != nil {
		t.Fatal(err)
	}
	db, err := bbolt.Open(copied, 0o600, &bbolt.Options{ReadOnly: true, Timeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	err = db.View(func(tx *bbolt.Tx) error { b = b[:tx.Size()]; return nil })
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// A damageJudge uses damaged stores and counts what became of them.
type damageJudge struct {
	t      *testing.T
	good   []byte
	opts   oncehttp.Options
	tried  int // also those that are left out with -short
	result reliability.Result

	spared string // order of the last commit, which may be gone
	blind  bool   // what is not found may have been there: only errors are judged, and the file at the next start
	from   int    // so many cases are left out

	refused, failed, unharmed int // stores that did not open, in which something failed, in which nothing did
}

// atRest judges a file that is opened damaged.
func (j *damageJudge) atRest(name string, content []byte) {
	j.t.Helper()
	j.use(name, content, nil)
}

// use judges a file. If damage is not nil, it is called with the file's path when
// the file is open.
func (j *damageJudge) use(name string, content []byte, damage func(path string)) {
	t := j.t
	t.Helper()
	if j.tried++; j.tried <= j.from || testing.Short() && j.tried%6 != 1 {
		return
	}
	j.result.Cases++
	dir := j.dir()
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "once.db")
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	if j.blind {
		fmt.Printf("case %d %s\n", j.tried, path) // should this process end of it
	}
	l := &ledger{sent: make(map[string]int)}
	c, err := ledgerClient(path, l, j.opts)
	if err != nil {
		j.refused++
		j.wantTyped(name, path, err, true)
		after, readErr := os.ReadFile(path)
		if readErr != nil || !bytes.Equal(after, content) {
			t.Errorf("%s: a file that does not open was changed (%v)", name, readErr)
		}
		if entries, _ := os.ReadDir(dir); len(entries) != 1 {
			t.Errorf("%s: left in the directory: %v", name, entries)
		}
		return
	}
	if damage != nil {
		damage(path)
	}
	if j.work(name, path, c, l) {
		j.unharmed++
	} else {
		j.failed++
	}
	_ = c.Close()
	if j.blind {
		j.reopen(name, path)
	}
}

// dir returns a new directory, in memory where there is a file system for that:
// nothing here depends on what a disk does.
func (j *damageJudge) dir() string {
	j.t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "oncehttp")
	if err != nil {
		dir, err = os.MkdirTemp(j.t.TempDir(), "")
	}
	if err != nil {
		j.t.Fatal(err)
	}
	return dir
}

// work does with a client what there is to do, and reports whether all went well.
func (j *damageJudge) work(name, path string, c *oncehttp.Client, l *ledger) (well bool) {
	ctx := context.Background()
	well = true
	failed := func(err error) {
		well = false
		j.wantTyped(name, path, err, false)
	}
	accounted := make(map[string]bool) // orders that somebody is told about
	unclear := 0                       // operations of which only that they are there is told
	var mu sync.Mutex
	sum, err := c.Resume(ctx, oncehttp.Handler{
		Settled: func(_ context.Context, info oncehttp.Info, resp *http.Response) error {
			b, err := io.ReadAll(resp.Body)
			mu.Lock()
			defer mu.Unlock()
			order := info.Metadata["order"]
			if err == nil && string(b) != "answer of "+order {
				j.broken(&j.result.ToldFalsely, "%s: %s was handed over %q", name, order, b)
			}
			accounted[keyOfOrder(order)] = true
			return nil
		},
		Unknown: func(_ context.Context, info oncehttp.Info) error {
			mu.Lock()
			defer mu.Unlock()
			accounted[info.Key] = true
			return nil
		},
	})
	if err != nil {
		failed(err)
		unclear = len(orderNames("pending")) + len(orderNames("waiting"))
	}
	well = well && sum.Failed == 0
	for info, err := range c.Operations(ctx, oncehttp.Filter{}) {
		if err != nil {
			failed(err)
			if info.Key == "" {
				unclear++
			}
		}
		accounted[info.Key] = true
		if info.Key == "" {
			unclear++
		}
	}
	for _, kind := range []string{"pending", "waiting"} {
		for _, order := range orderNames(kind) {
			if accounted[keyOfOrder(order)] || order == j.spared {
				continue
			}
			if _, err := c.Lookup(ctx, keyOfOrder(order)); err != nil {
				failed(err)
				continue
			}
			if unclear--; unclear < 0 {
				j.broken(&j.result.Lost, "%s: %.12s is gone, and nothing says so", name, order)
			}
		}
	}
	for _, kind := range []string{"waiting", "unknown"} {
		for _, order := range orderNames(kind) {
			if l.sent[order] > 0 {
				j.broken(&j.result.Twice, "%s: %.12s was sent by Resume", name, order)
			}
		}
	}
	for _, kind := range []string{"acked", "waiting", "pending"} {
		for _, order := range orderNames(kind) {
			before := l.sent[order]
			op, body, err := chargeAt(ctx, c, order)
			switch {
			case err != nil:
				failed(err)
				if op.Info().Outcome == oncehttp.NotSent {
					j.broken(&j.result.ToldFalsely, "%s: %.12s was told not sent: %v", name, order, err)
				}
			case body != "answer of "+order:
				j.broken(&j.result.ToldFalsely, "%s: %.12s was told %q", name, order, body)
			}
			if answered := kind != "pending" || before > 0; answered && l.sent[order] > before {
				j.broken(&j.result.Twice, "%s: %.12s had its answer, and was sent again", name, order)
			}
		}
	}
	op, _, err := chargeAt(ctx, c, "new")
	if err != nil {
		failed(err)
		if l.sent["new"] > 0 && op.Info().Outcome == oncehttp.NotSent {
			j.broken(&j.result.ToldFalsely, "%s: a new order was sent, and told not sent: %v", name, err)
		}
	}
	if _, err := c.Stats(ctx); err != nil {
		failed(err)
	}
	return well
}

// broken counts a broken promise.
func (j *damageJudge) broken(n *int, format string, args ...any) {
	j.t.Helper()
	if !j.blind {
		*n++
		j.t.Errorf(format, args...)
	}
}

// wantTyped demands that an error is of a kind that a program can tell, and, if it
// is about the whole file, that it names it.
func (j *damageJudge) wantTyped(name, path string, err error, whole bool) {
	j.t.Helper()
	kinds := []error{oncehttp.ErrDamaged, oncehttp.ErrStoreFailed, oncehttp.ErrStoreVersion, oncehttp.ErrStoreUncertain, oncehttp.ErrStoreReplaced, oncehttp.ErrNotRetained, oncehttp.ErrSealed}
	if !slices.ContainsFunc(kinds, func(kind error) bool { return errors.Is(err, kind) }) {
		j.t.Errorf("%s: %v is of no kind that can be told", name, err)
	}
	remedy := []string{"restore it", "name another", "use a later", "remove it"}
	if whole && (!strings.Contains(err.Error(), path) || !slices.ContainsFunc(remedy, func(s string) bool { return strings.Contains(err.Error(), s) })) {
		j.t.Errorf("%s: %q names no file, or nothing to do", name, err)
	}
}

// report counts the cases of a class.
func (j *damageJudge) report(class, how string) {
	j.t.Helper()
	j.t.Logf("%s: %d did not open, %d had errors, %d were as before", class, j.refused, j.failed, j.unharmed)
	j.result.Class, j.result.How = class, how
	reliability.Report(j.t, j.result)
}

func skipWhereMapped(t testing.TB) {
	if runtime.GOOS == "windows" {
		t.Skip("files that are mapped cannot be damaged there")
	}
}

// withDamage runs a test in a bubble, with a store to be damaged.
func withDamage(t *testing.T, test func(t *testing.T, j *damageJudge, random *rand.Rand)) {
	skipWhereMapped(t)
	synctest.Test(t, func(t *testing.T) {
		opts := oncehttp.Options{MaxAttempts: 1, Breaker: &oncehttp.Breaker{Disabled: true}}
		j := &damageJudge{t: t, good: storeImage(t, opts), opts: opts}
		j.atRest("as it was", j.good)
		if j.unharmed != 1 {
			t.Fatal("the store does not work before it is damaged")
		}
		test(t, j, rand.New(rand.NewPCG(11, 12)))
	})
}

var pageBytes = os.Getpagesize()

// A pageDamage is a way to spoil a page.
type pageDamage struct {
	name  string
	spoil func(page, file []byte, random *rand.Rand)
}

var wholePages = []pageDamage{
	{"zeroed", func(page, _ []byte, _ *rand.Rand) { clear(page) }},
	{"random", func(page, _ []byte, random *rand.Rand) { randomFill(page, random) }},
	{"another page", func(page, file []byte, random *rand.Rand) {
		at := random.IntN(len(file)/pageBytes) * pageBytes
		copy(page, bytes.Clone(file[at:at+pageBytes]))
	}},
	{"shifted by a byte", func(page, _ []byte, _ *rand.Rand) { copy(page[1:], bytes.Clone(page)) }},
}

// exchange exchanges two neighbours of a page's elements: only their order is wrong,
// and who looks for one of them does not find it.
func exchange(page, _ []byte, random *rand.Rand) {
	field := func(at int) int { return int(binary.NativeEndian.Uint32(page[at:])) }
	flags, count := binary.NativeEndian.Uint16(page[8:]), int(binary.NativeEndian.Uint16(page[10:]))
	if flags != 1 && flags != 2 || count < 2 { // neither branch nor leaf
		return
	}
	position, sizes := 0, []int{4} // in a branch's element
	if flags == 2 {
		position, sizes = 4, []int{8, 12}
	}
	first := 16 + 16*random.IntN(count-1)
	second := first + 16
	length := func(element int) (n int) {
		for _, at := range sizes {
			n += field(element + at)
		}
		return n
	}
	from, a, b := first+field(first+position), length(first), length(second)
	if from+a+b > len(page) { // on the next pages
		return
	}
	copy(page[from:], slices.Concat(page[from+a:from+a+b], page[from:from+a]))
	copy(page[first:], slices.Concat(page[second:second+16], page[first:first+16]))
	binary.NativeEndian.PutUint32(page[first+position:], uint32(from-first))
	binary.NativeEndian.PutUint32(page[second+position:], uint32(from+b-second))
}

var partsOfPages = []pageDamage{
	{"elements exchanged", exchange},
	{"half random", func(page, _ []byte, random *rand.Rand) { randomFill(page[len(page)/2:], random) }},
	// A page without elements says nothing of those that it had.
	{"emptied", func(page, _ []byte, _ *rand.Rand) { clear(page[10:12]) }},
	{"sector zeroed", func(page, _ []byte, random *rand.Rand) {
		at := random.IntN(len(page)/512) * 512
		clear(page[at : at+512])
	}},
}

func randomFill(b []byte, random *rand.Rand) {
	for i := range b {
		b[i] = byte(random.Uint32())
	}
}

// metaPages are the pages that say what the file is. With one of them damaged,
// bbolt goes back to the other, which is one commit older: what was in the last
// commit is forgotten, and nothing in the file tells that from a commit that was
// cut off before anybody relied on it.
const metaPages = 2

func TestADamagedHeadCostsNoMoreThanTheLastCommit(t *testing.T) {
	withDamage(t, func(t *testing.T, j *damageJudge, random *rand.Rand) {
		pending := orderNames("pending")
		j.spared = pending[len(pending)-1] // begun last
		for range heavy(3, 20) {
			for head := range metaPages {
				for _, d := range append(wholePages, partsOfPages...) {
					file := bytes.Clone(j.good)
					d.spoil(file[head*pageBytes:(head+1)*pageBytes], j.good, random)
					j.atRest(fmt.Sprintf("head %d %s", head, d.name), file)
				}
			}
		}
		if j.refused > 0 {
			t.Errorf("%d files did not open because of one head", j.refused)
		}
		j.report("damaged file, one head", "zeroed, overwritten, in part; the last commit may be gone")
	})
}

func TestDamagedPagesAreNoticed(t *testing.T) {
	withDamage(t, func(t *testing.T, j *damageJudge, random *rand.Rand) {
		for range heavy(1, 4) {
			for at := metaPages * pageBytes; at < len(j.good); at += pageBytes {
				for _, d := range append(wholePages, partsOfPages...) {
					file := bytes.Clone(j.good)
					d.spoil(file[at:at+pageBytes], j.good, random)
					j.atRest(fmt.Sprintf("page %d %s", at/pageBytes, d.name), file)
				}
			}
		}
		j.report("damaged file, pages", "each page zeroed, overwritten at random, by another, in part")
	})
}

func TestCutFilesAreNoticed(t *testing.T) {
	withDamage(t, func(t *testing.T, j *damageJudge, random *rand.Rand) {
		for at := 0; at < len(j.good); at += pageBytes {
			for _, n := range []int{at - 1, at, at + 1} {
				if n >= 0 {
					j.atRest(fmt.Sprintf("cut to %d", n), j.good[:n])
				}
			}
		}
		for range heavy(100, 1000) {
			n := random.IntN(len(j.good))
			j.atRest(fmt.Sprintf("cut to %d", n), j.good[:n])
		}
		if j.refused != j.result.Cases-1 {
			t.Errorf("%d cut files of %d were opened", j.result.Cases-1-j.refused, j.result.Cases-1)
		}
		j.report("damaged file, cut short", "cut at, before and behind every page, and at random")
	})
}

// heavy returns how often a test does what it repeats: less with -short.
func heavy(short, long int) int {
	if testing.Short() {
		return short
	}
	return long
}

func TestDamagedBytesAreNoticed(t *testing.T) {
	withDamage(t, func(t *testing.T, j *damageJudge, random *rand.Rand) {
		for range heavy(200, 1500) {
			file := bytes.Clone(j.good)
			at := metaPages*pageBytes + random.IntN(len(file)-metaPages*pageBytes)
			file[at] ^= 1 << random.IntN(8)
			j.atRest(fmt.Sprintf("byte %d of page %d flipped", at%pageBytes, at/pageBytes), file)
		}
		j.report("damaged file, bits", "one bit anywhere but in the two heads")
	})
}

// recordPlaces returns where in the file the records with a part of this text
// are: those of pages in use, and copies on freed pages.
func recordPlaces(file []byte, text string) (at []int) {
	for from := 0; ; {
		i := bytes.Index(file[from:], []byte(text))
		if i < 0 {
			return at
		}
		at = append(at, from+i)
		from += i + 1
	}
}

// TestADamagedRecordHarmsNoOther damages records in all their places, and uses
// the others.
func TestADamagedRecordHarmsNoOther(t *testing.T) {
	withDamage(t, func(t *testing.T, j *damageJudge, random *rand.Rand) {
		for _, kind := range []string{"acked", "waiting", "unknown", "pending"} {
			for _, order := range orderNames(kind) {
				name, _, _ := strings.Cut(order, ".")
				for part, text := range map[string]string{"head or request": name, "answer": "answer of " + name, "meta": "order\x00"} {
					places := recordPlaces(j.good, text)
					if len(places) == 0 {
						continue
					}
					file := bytes.Clone(j.good)
					for _, at := range places {
						if i := at - len("key-"); i >= 0 && string(file[i:at]) == "key-" {
							continue // of an identity
						}
						file[at+random.IntN(len(text))] ^= 0x20
					}
					j.atRest(fmt.Sprintf("%s of %s", part, name), file)
				}
			}
		}
		if j.refused > 0 {
			t.Errorf("%d files did not open because of one record", j.refused)
		}
		j.report("damaged records", "a byte of the request, answer or metadata of each")
	})
}

// These damage pages in the page cache, from which the client reads them. A page
// that is another one is noticed whenever it is read. One whose beginning is whole
// may hide what it holds: pages have no checksums. Then what is demanded is that
// the process goes on.
func TestPagesReplacedUnderARunningClientAreNoticed(t *testing.T) {
	withDamage(t, func(t *testing.T, j *damageJudge, random *rand.Rand) {
		damageWhileOpen(t, j, random, heavy(1, 3), wholePages)
		j.report("pages replaced under a running client", "zeroed, random, another page, in memory that is mapped to the file")
	})
}

// damageFrom is set for a process that damages parts of pages: after how many cases
// it begins. Such damage may make bbolt write a page that is in use a second time,
// and then go round in circles, with more memory for each round. Nobody can stop
// it, so each case is judged in a process that may end of it.
const (
	damageFrom = "ONCEHTTP_TEST_DAMAGE_FROM"
	outgrown   = 3 // its exit code
)

// TestPartsOfPagesDamagedUnderARunningClient: what is noticed is an error of a kind
// that can be told, and the next process either refuses the file or can use it.
func TestPartsOfPagesDamagedUnderARunningClient(t *testing.T) {
	if from, err := strconv.Atoi(os.Getenv(damageFrom)); err == nil {
		go endWhenOutgrown()
		withDamage(t, func(t *testing.T, j *damageJudge, random *rand.Rand) {
			j.blind, j.from = true, from
			damageWhileOpen(t, j, random, heavy(1, 5), partsOfPages)
		})
		return
	}
	skipWhereMapped(t)
	result := reliability.Result{
		Class: "parts of pages damaged under a running client",
		How:   "half a page at random, a sector zeroed; judged: panic, kinds of errors, the file at the next start",
	}
	ended := 0
	for from := 0; ; ended++ {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", fmt.Sprintf("-test.short=%t", testing.Short()))
		cmd.Env = append(os.Environ(), damageFrom+"="+strconv.Itoa(from))
		out, err := cmd.CombinedOutput()
		var path string
		for line := range strings.Lines(string(out)) {
			if _, err := fmt.Sscanf(line, "case %d %s", &from, &path); err == nil {
				result.Cases++
			}
		}
		if err == nil {
			break
		}
		if path == "" || cmd.ProcessState.ExitCode() != outgrown && !bytes.Contains(out, []byte("fatal error: stack overflow")) {
			t.Fatalf("%v\n%s", err, out)
		}
		j := &damageJudge{t: t}
		j.reopen(fmt.Sprintf("case %d", from), path)
		os.RemoveAll(filepath.Dir(path))
	}
	t.Logf("%d processes ended of it", ended)
	reliability.Report(t, result)
}

func endWhenOutgrown() {
	debug.SetMaxStack(64 << 20)
	heap := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	for ; ; time.Sleep(time.Millisecond) {
		if metrics.Read(heap); heap[0].Value.Uint64() > 512<<20 {
			os.Exit(outgrown)
		}
	}
}

// reopen opens a file that was damaged under another process, and reads what is
// in it.
func (j *damageJudge) reopen(name, path string) {
	c, err := ledgerClient(path, &ledger{sent: make(map[string]int)}, j.opts)
	if err != nil {
		j.wantTyped(name+", opened again", path, err, true)
		return
	}
	for _, err := range c.Operations(context.Background(), oncehttp.Filter{}) {
		if err != nil {
			j.wantTyped(name+", opened again", path, err, false)
		}
	}
	if err := c.Close(); err != nil {
		j.t.Errorf("%s, opened again: Close: %v", name, err)
	}
}

func damageWhileOpen(t *testing.T, j *damageJudge, random *rand.Rand, rounds int, damages []pageDamage) {
	for round := range rounds {
		for at := 0; at < len(j.good); at += pageBytes {
			for _, d := range damages {
				name := fmt.Sprintf("page %d %s, round %d", at/pageBytes, d.name, round)
				j.use(name, j.good, func(path string) {
					f, err := os.OpenFile(path, os.O_RDWR, 0)
					if err != nil {
						t.Fatal(err)
					}
					defer f.Close()
					page := bytes.Clone(j.good[at : at+pageBytes])
					d.spoil(page, j.good, random)
					if _, err := f.WriteAt(page, int64(at)); err != nil {
						t.Fatal(err)
					}
				})
			}
		}
	}
}

// FuzzWholeFile changes bytes of a store, three of the input for each: the place
// and what is put there.
func FuzzWholeFile(f *testing.F) {
	skipWhereMapped(f)
	for _, at := range []uint32{0, 16, 40, 4096 + 16, 2 * 4096, 3*4096 + 10, 5*4096 + 100, 9*4096 + 12} {
		f.Add(append(binary.BigEndian.AppendUint32(nil, at), 0xff))
	}
	f.Add([]byte{0, 0, 0x20, 0x08, 1, 0, 0, 0x20, 0x0a, 200})
	var once sync.Once
	var good []byte
	f.Fuzz(func(t *testing.T, edits []byte) {
		synctest.Test(t, func(t *testing.T) {
			opts := oncehttp.Options{MaxAttempts: 1, Breaker: &oncehttp.Breaker{Disabled: true}}
			once.Do(func() { good = storeImage(t, opts) })
			file := bytes.Clone(good)
			for ; len(edits) >= 5; edits = edits[5:] {
				file[int(binary.BigEndian.Uint32(edits))%len(file)] = edits[4]
			}
			path := filepath.Join(t.TempDir(), "once.db")
			if err := os.WriteFile(path, file, 0o600); err != nil {
				t.Fatal(err)
			}
			j := &damageJudge{t: t}
			l := &ledger{sent: make(map[string]int)}
			c, err := ledgerClient(path, l, opts)
			if err != nil {
				j.wantTyped("fuzzed", path, err, false)
				if after, readErr := os.ReadFile(path); readErr != nil || !bytes.Equal(after, file) {
					t.Errorf("a file that does not open was changed (%v)", readErr)
				}
				return
			}
			defer c.Close()
			for info, err := range c.Operations(t.Context(), oncehttp.Filter{}) {
				if err != nil {
					j.wantTyped(info.Key, path, err, false)
				}
			}
			for _, order := range []string{"new", orderNames("acked")[3], orderNames("pending")[3]} {
				if _, _, err := chargeAt(t.Context(), c, order); err != nil {
					j.wantTyped(order, path, err, false)
				}
			}
			settled := func(context.Context, oncehttp.Info, *http.Response) error { return nil }
			if _, err := c.Resume(t.Context(), oncehttp.Handler{Settled: settled}); err != nil {
				j.wantTyped("Resume", path, err, false)
			}
		})
	})
}
