//go:build mutants

// Package mutants proves that the tests notice when a promise is broken: it
// breaks the library in one place after another, and demands that the tests
// that hold that promise fail. Run it with
//
//	go test -tags mutants ./internal/mutants
package mutants

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/build"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// A mutant is a change of the library, and the tests that must all fail then.
type mutant struct {
	name    string
	edits   []edit
	killers []string
}

// An edit replaces a text that occurs exactly once in the library.
type edit struct{ old, new string }

// Most killers are in these files. Where all those of a mutant are, no others are
// compiled.
var testFiles = []string{"promise_test.go", "crash_test.go", "crash_child_test.go", "export_test.go"}

// A mutant may need several edits where a promise is kept twice: what is meant
// to be sent is also compared with the record, and the window is checked again
// when the connection is there.
var (
	noWindowCheck     = edit{"if now := f.c.clock.now(); now.After(f.rec.ResendUntil) {", "if now := f.c.clock.now(); now.After(f.rec.ResendUntil) && false {"}
	noWindowAtConn    = edit{"if f.c.clock.now().After(until) {", "if until.IsZero() {"}
	noWindowForRetry  = edit{"case a.flight != nil && now.Add(a.wait).After(a.flight.rec.ResendUntil):", "case false:"}
	noWindowForStored = edit{"return c.clock.now().After(rec.ResendUntil) || rec.Era != c.session.Era", "return rec.Era != c.session.Era"}
)

var mutants = []mutant{
	// No byte before the record.
	{"sent while Begin is under way", []edit{{
		"existing, err := c.store.Begin(f.ctx, rec)",
		"var existing *Record\n\tvar err error\n\tgo c.store.Begin(f.ctx, rec)",
	}}, []string{"TestNoByteBeforeTheRecord", "TestOneEffectWhereverACallIsKilled", "TestOneEffectWhenKilledAgainAndAgain", "TestOneEffectWhenKilledAtAnyMoment"}},
	{"sent although Begin failed", []edit{{"case err != nil:\n\t\tf.beginFailed(&rec, err)", "case err != nil && false:\n\t\tf.beginFailed(&rec, err)"}}, []string{"TestNothingIsSentWithoutARecord"}},
	{"record of a Begin whose caller left is kept", []edit{
		{"if f.ctx.Err() != nil { // ended while Begin committed: undo it", "if false {"},
		{"if f.ctx.Err() != nil { // left before anything was sent", "if false {"},
	}, []string{"TestWhatWasBegunForNobodyIsUndone"}},

	// One key, one request.
	{"a fresh key for every attempt", []edit{
		{"req.Header = f.template.Header.Clone()\n", "req.Header = f.template.Header.Clone()\n\treq.Header.Set(f.p.header(), NewKey())\n"},
		{"case !f.p.carries(f.rec.Key, req.Header, f.body):", "case len(valuesOf(req.Header, f.p.header())) == 0:"},
	}, []string{"TestOneKeyForAllAttempts", "TestTheSameKeyAfterARestart"}},
	{"a fresh key when resumed", []edit{
		{"req.Header = f.template.Header.Clone()\n", "req.Header = f.template.Header.Clone()\n\tif f.resumed {\n\t\treq.Header.Set(f.p.header(), NewKey())\n\t}\n"},
		{"case !f.p.carries(f.rec.Key, req.Header, f.body):", "case len(valuesOf(req.Header, f.p.header())) == 0:"},
	}, []string{"TestTheSameKeyAfterARestart", "TestOneEffectWhereverResumeIsKilled"}},
	{"what is sent is not compared with the record", []edit{{
		"if err := f.checkOut(req, target); err != nil {",
		"if err := f.checkOut(req, target); err != nil && false {",
	}}, []string{"TestWhatIsSentIsWhatWasRecorded"}},
	{"GetBody is left on keyed requests", []edit{
		{"req.Body = f.newBody()\n\tif authorize", "req.Body = f.newBody()\n\treq.GetBody = func() (io.ReadCloser, error) { return f.newBody(), nil }\n\tif authorize"},
		{"req.ContentLength != t.ContentLength || req.GetBody != nil:", "req.ContentLength != t.ContentLength:"},
	}, []string{"TestEveryAttemptIsOurs"}},
	{"fingerprint ignores the body", []edit{{"h.last(body)\n", ""}}, []string{"TestKeyIsBoundToItsRequest"}},
	{"fingerprint is not compared", []edit{{"case old.Fingerprint != asked.Fingerprint:", "case false:"}}, []string{"TestKeyIsBoundToItsRequest"}},
	{"scope ignores the credentials", []edit{{"if len(names) == 0 && req.URL.User == nil {", "if true {"}}, []string{"TestTenantsNeverShareAnAnswer"}},
	{"a redirect to another origin is followed", []edit{{" || originOf(to) != f.rec.Origin", ""}}, []string{"TestKeyStaysWithItsOrigin"}},
	{"a redirected operation becomes a GET", []edit{{
		"if _, direct := operationBehind(req.Response); direct && req.Response.StatusCode != http.StatusSeeOther {",
		"if false {",
	}}, []string{"TestOperationNeverBecomesAGet"}},
	{"the handle reaches requests below", []edit{{
		"context.WithCancelCause(withoutHandle(context.WithoutCancel(req.Context())))",
		"context.WithCancelCause(context.WithoutCancel(req.Context()))",
	}}, []string{"TestTokenRequestDoesNotRunUnderTheOperation"}},
	{"a POST without key is repeated", []edit{{"return (s.idempotent || x.notSent) &&", "return"}}, []string{"TestUnkeyedPostIsNotRepeated"}},

	// Nothing forgotten.
	{"an answer is stored lazily although it waits for Ack", []edit{{
		"if lazy := rec.Outcome == Succeeded && !rec.AckDue; lazy {",
		"if rec.Outcome == Succeeded {",
	}}, []string{"TestAnswerThatWaitsForAckIsDurableWhenTold"}},
	{"acknowledged before the handler", []edit{{
		"err = p.protect(func() error { return p.h.Settled(f.handlerContext(p.ctx), f.res.info, resp) })",
		"p.c.ack(f.writes(), rec)\n\t\terr = p.protect(func() error { return p.h.Settled(f.handlerContext(p.ctx), f.res.info, resp) })",
	}}, []string{"TestAckComesAfterTheHandler"}},
	{"acknowledged although the handler failed", []edit{{
		"err = p.protect(func() error { return p.h.Settled(f.handlerContext(p.ctx), f.res.info, resp) })",
		"p.protect(func() error { return p.h.Settled(f.handlerContext(p.ctx), f.res.info, resp) })",
	}}, []string{"TestAckComesAfterTheHandler"}},
	{"Resume takes its caller's answer", []edit{{"rec.Outcome.answered() && c.isHeld(rec.ID):", "false:"}}, []string{"TestAnswerIsItsCallersUntilTheyHaveGone"}},
	{"what has succeeded is sent again", []edit{{"case old.Outcome == Succeeded:\n\t\tf.replay(old)\n\t\treturn false\n", ""}}, []string{"TestSucceededIsNotSentAgain", "TestHistories"}},
	{"an operation that Shutdown interrupts is told as failed", []edit{{"case closed && f.nobodyTold():", "case closed && false:"}}, []string{"TestShutdownLeavesStartedOperationsPending"}},
	{"a claim is not durable", []edit{{
		"if err := f.c.store.Save(f.writes(), rec); err != nil {\n\t\treturn err\n\t}\n\tf.take(rec)",
		"f.c.saveSoon(rec, func(error) {})\n\tf.take(rec)",
	}}, []string{"TestClaimIsDurableBeforeTheResumedSend", "TestPoisonIsNotSentForEver"}},
	{"a claim is not counted", []edit{{"rec.Claims++\n", ""}}, []string{"TestPoisonIsNotSentForEver"}},

	{"a record is under another key", []edit{{"err = checkIdentities(tx)", "_ = checkIdentities"}}, []string{"TestDamagedIdentityIsNoticed"}},
	{"a handler that kills the process is called for ever", []edit{{"if rec.Claims >= poisonLimit {", "if false {"}}, []string{"TestPoisonedHandlerIsNotCalledForEver"}},

	// Nothing late.
	{"a retry after the window", []edit{noWindowForRetry, noWindowCheck, noWindowAtConn}, []string{"TestNothingSentAfterWindow", "TestTheLastSecondOfAWindow"}},
	{"a stored operation is sent after its window", []edit{noWindowForStored, noWindowCheck, noWindowAtConn}, []string{"TestNothingSentAfterWindow"}},
	{"the window is not checked before an attempt", []edit{noWindowCheck}, []string{"TestNothingSentAfterWindow"}},
	{"the window is not checked at the connection", []edit{noWindowAtConn}, []string{"TestNothingSentAfterWindow"}},
	{"a step of the clock reopens the window", []edit{{"return marked.Truncate(time.Microsecond)", "return wall.Truncate(time.Microsecond)"}}, []string{"TestClockStepDoesNotReopenTheWindow", "TestClockStepsCloseWindowsAndNeverOpenThem"}},
	{"an earlier era's window counts", []edit{{
		"return c.clock.now().After(rec.ResendUntil) || rec.Era != c.session.Era",
		"return c.clock.now().After(rec.ResendUntil)",
	}}, []string{"TestClockStepDoesNotReopenTheWindow"}},

	// Bounded amplification.
	{"every pass is a first attempt", []edit{{"a.repeat = f.rec.Updated.After(p.c.started)", "a.repeat = false"}}, []string{"TestLaterPassesDrawOnTheBudget"}},
	{"first attempts pay for no retries", []edit{{"if a.attempts == 1 && !a.repeat {", "if false {"}}, []string{"TestRetriesInAnOutageAreATenth"}},
	{"retries pay for retries", []edit{{"if a.attempts == 1 && !a.repeat {", "if !a.repeat {"}}, []string{"TestRetriesInAnOutageAreATenth"}},
	{"the budget never refuses", []edit{{"if !a.limits.budget.withdraw(time.Now()) {", "if false {"}}, []string{"TestRetriesAreBoundedInAnOutage"}},
	{"Retry-After is ignored", []edit{
		{"after, asked = retryAfter(a.last.resp.Header, now)", "retryAfter(a.last.resp.Header, now)"},
		{"if d, asked := retryAfter(a.last.resp.Header, a.c.clock.now()); asked {", "if d, asked := retryAfter(a.last.resp.Header, a.c.clock.now()); asked && false {"},
	}, []string{"TestRetryAfterIsAMinimum", "TestALongRetryAfterIsRemembered"}},
	{"the time the server asked for is forgotten", []edit{{"if t.IsZero() || wait <= 0 {", "if true {"}}, []string{"TestALongRetryAfterIsRemembered"}},
	{"the breaker is told nothing", []edit{{"case a.last.err != nil, a.last.status() >= 500:\n\t\treturn failure", "case a.last.err != nil, a.last.status() >= 500:\n\t\treturn success"}}, []string{"TestBreakerOpensInAnOutage"}},
	{"an abandoned permit is not returned", []edit{{"func (p *permit) doneAt(h health, now time.Time) {\n", "func (p *permit) doneAt(h health, now time.Time) {\n\tif h == ignored {\n\t\treturn\n\t}\n"}}, []string{"TestAbandonedProbeDoesNotBlockTheHost"}},
	{"the leader's end is the joiners'", []edit{{
		"context.WithCancelCause(withoutHandle(context.WithoutCancel(req.Context())))",
		"context.WithCancelCause(withoutHandle(req.Context()))",
	}}, []string{"TestJoinersDoNotDependOnTheLeader"}},

	// The truth about the outcome.
	{"unknown is stored lazily", []edit{{
		"rec.Meta = f.c.seal.seal(rec.ID, \"meta\", &f.meta)\n\terr := f.c.store.Save(f.writes(), rec)\n\tf.rec = rec\n\tres := f.res\n",
		"rec.Meta = f.c.seal.seal(rec.ID, \"meta\", &f.meta)\n\tvar err error\n\tf.c.saveSoon(rec, func(error) {})\n\tf.rec = rec\n\tres := f.res\n",
	}}, []string{"TestUnknownIsDurableWhenTold"}},
	{"rejected is stored lazily", []edit{{"if lazy := rec.Outcome == Succeeded && !rec.AckDue; lazy {", "if !rec.AckDue {"}}, []string{"TestRejectionIsDurableWhenTold"}},
	{"a rejection is told although it was not recorded", []edit{{"if res.info.Outcome == Rejected {", "if false {"}}, []string{"TestRejectionThatIsNotRecordedIsNotTold"}},
	{"the record of what was not sent is kept", []edit{{
		"if err := f.c.store.Delete(f.writes(), rec); err != nil {",
		"_ = rec\n\tif err := error(nil); err != nil {",
	}}, []string{"TestNotSentIsNeverSent"}},
	{"not sent is told without evidence", []edit{{"return t.asked.Load() > 0 && t.got.Load() == 0 &&", "return t.got.Load() == 0 &&"}}, []string{"TestNotSentNeedsEvidence"}},
	{"not sent forgets the attempts before", []edit{{"f.sent = f.sent || !x.refused && !x.notSent", "f.sent = !x.refused && !x.notSent"}}, []string{"TestNotSentNeedsEvidence"}},
	{"not sent forgets earlier processes", []edit{{"case f.created && !f.sent:", "case !f.sent:"}}, []string{"TestNotSentNeedsEvidence"}},
	{"Resume sends what a caller was told had failed", []edit{{"decision := Hold\n", "decision := Send\n"}}, []string{"TestUnknownIsNotResentByResume"}},
	{"a 401 rejects what may have been charged", []edit{{"case status/100 == 4 && !earlier:", "case status/100 == 4:"}}, []string{"TestRefusalAtTheDoorSaysNothingOfEarlierAttempts"}},
	{"what an earlier process sent is forgotten", []edit{{"f.rec, f.earlier, f.before = rec, rec.Uncertain, rec.Attempts", "f.rec, f.before = rec, rec.Attempts"}}, []string{"TestRefusalAtTheDoorSaysNothingOfEarlierAttempts"}},
	{"a conflict with our own attempt is final", []edit{{"case status == http.StatusConflict && earlier:", "case false:"}}, []string{"TestConflictWithOurOwnAttemptIsWaitedFor"}},
	{"a stored failure is retried", []edit{{"case status >= 500 && p.replayed(x.resp.Header):", "case false:"}}, []string{"TestStoredFailureIsNotRetried"}},
	{"a cut answer without length is an answer", []edit{{"if err == nil && cutShort(resp, body) {", "if false {"}}, []string{"TestCutOffAnswerIsNoAnswer"}},
	{"a cut answer is an answer", []edit{{"if err != nil {\n\t\treturn exchange{err: fmt.Errorf(\"%w: %w\", ErrAnswerLost, err)", "if err != nil && false {\n\t\treturn exchange{err: fmt.Errorf(\"%w: %w\", ErrAnswerLost, err)"}}, []string{"TestCutOffAnswerIsNoAnswer", "TestAnswersThatAreNoneEnd"}},

	// Secrets.
	{"credentials are stored", []edit{{"withheld = append(withheld, name)\n", "_ = name\n"}}, []string{"TestCredentialsAreNotStored", "TestSecretsStayWhereTheyBelong"}},
	{"a resumed operation goes without its credentials", []edit{{"if len(f.withheld) > 0 && !f.authorized(req) {", "if false {"}}, []string{"TestNothingIsResumedWithoutCredentials"}},
	{"a sealed part may be another operation's", []edit{{"e.string(field)\n\te.string(id.Key)\n\te.string(id.Origin)\n\te.string(id.Scope)\n", "e.string(field)\n"}}, []string{"TestSealedPartsCannotBeExchanged"}},

	// Servers that mean harm.
	{"long answers are kept in memory", []edit{{"limit := f.c.opts.MaxResponseBytes\n", "limit := 64 * f.c.opts.MaxResponseBytes\n"}}, []string{"TestAnswersOfAnyLengthTakeNoMemory", "TestAGzipBombIsNotUnpackedIntoMemory"}},
	{"attempts have no timeout", []edit{{"timeout := f.c.opts.attemptTimeout(f.p); timeout > 0 {", "timeout := f.c.opts.attemptTimeout(f.p); timeout > time.Hour {"}}, []string{"TestAServerThatDripsIsNotWaitedForForEver"}},
	{"a host is paused as long as it likes", []edit{{"a.limits.pause(time.Now().Add(min(d, a.c.opts.MaxRetryAfter)))", "a.limits.pause(time.Now().Add(min(d, 60*a.c.opts.MaxRetryAfter)))"}}, []string{"TestARetryAfterOfYearsStopsNothingElse"}},
	{"one redirect too many is followed", []edit{{"originOf(to) != f.rec.Origin || len(via) >= maxRedirects {", "originOf(to) != f.rec.Origin || len(via) > maxRedirects {"}}, []string{"TestRedirectsEnd"}},
	{"what is acknowledged is held all the same", []edit{{"\tc.mu.Lock()\n\tdefer c.mu.Unlock()\n\tdelete(c.held, rec.ID)\n", ""}}, []string{"TestKeysByTheMillionAreForgotten"}},
	{"no host is forgotten", []edit{{"if len(l.hosts) < l.max || l.idle.next == &l.idle {", "if len(l.hosts) < 2*l.max || l.idle.next == &l.idle {"}}, []string{"TestAMillionHostsStayBounded"}},
	{"purged by a clock that has just jumped", []edit{{"return c.jumped.IsZero() || time.Since(c.jumped) > purgeRest", "return true"}}, []string{"TestNothingIsPurgedByAGlitch"}},

	// Files that are damaged, or another's.
	{"the file is not locked", []edit{{"s.db.AllocSize = 0 //", "_ = unlock(s.file)\n\ts.db.AllocSize = 0 //"}}, []string{"TestASecondProcessIsLockedOutUntilTheFirstIsDead"}},
	{"children inherit the file", []edit{
		{"\t\"runtime/debug\"\n\t\"time\"\n\n\t\"go.etcd.io/bbolt\"\n\tbbolterrors", "\t\"runtime/debug\"\n\t\"syscall\"\n\t\"time\"\n\n\t\"go.etcd.io/bbolt\"\n\tbbolterrors"},
		{"f, err := os.OpenFile(name, flag&^os.O_CREATE, mode)\n", "fd, err := syscall.Open(name, flag&^os.O_CREATE, uint32(mode))\n\t\tf := os.NewFile(uintptr(fd), name)\n"},
	}, []string{"TestAChildThatOutlivesItsParentDoesNotKeepTheFile"}},
	{"a file in its place is not noticed", []edit{{"if err != nil || !os.SameFile(info, s.info) {", "if err != nil || info == nil {"}}, []string{"TestNothingIsSentWhenTheFileIsNoLongerOurs"}},
	{"no checksums are compared", []edit{
		{"return crc32.Checksum(p.content, castagnoli) == p.sum", "return true"},
		{"if crc32.Checksum(part, castagnoli) != binary.BigEndian.Uint32(stored[1:]) {", "if false {"},
	}, []string{"TestEveryDamagedBitIsSeen", "TestDamagedBytesAreNoticed", "TestADamagedRecordHarmsNoOther"}},
	{"a short answer is kept for ever", []edit{{"(found.entry == entryAnswered || !found.answer.isNil())", "found.entry == entryAnswered"}}, []string{"TestAnswersOfEveryLength"}},
	{"pages that nothing leads to are passed over", []edit{{"if uint64(len(c.seen)) != c.pages-metaPages {", "if false {"}}, []string{"TestEveryPageHasItsPlace"}},
	{"files are opened unchecked", []edit{{"return s.checkPages(tx)", "return nil"}}, []string{"TestDamagedFileNeverEndsTheProcess"}},
	{"a later format is opened", []edit{{"format != storeFormat {", "format < storeFormat {"}}, []string{"TestFileThatCannotBeOpenedIsLeftAsItIs"}},
	{"what is no file is opened", []edit{{"case !info.Mode().IsRegular():", "case false:"}}, []string{"TestPathThatIsNoFileIsRefused"}},
}

// The killers of these do too little with -short to be sure to notice them.
var mutantsForLong = []mutant{
	{"a file that was cut is opened", []edit{{"if info.Size() < tx.Size() {", "if info.Size() < 0 {"}, {"_, err = c.file.ReadAt(page, int64(id*c.pageSize))\n\treturn page, err", "_, _ = c.file.ReadAt(page, int64(id*c.pageSize))\n\treturn page, nil"}}, []string{"TestCutFilesAreNoticed"}},
	{"open records that nothing leads to are passed over", []edit{{"state.counts.Unacknowledged; open < n {", "state.counts.Unacknowledged; open < 0*n {"}}, []string{"TestEveryPageHasItsPlace"}},
	{"a page that lost its elements is believed", []edit{{"(flags == branchPage || from != nil)", "flags == branchPage"}}, []string{"TestDamagedPagesAreNoticed"}},
	{"pages are not checked", []edit{{"return s.checkPages(tx)", "return nil"}}, []string{"TestDamagedPagesAreNoticed"}},
	{"a reader goes back to the commit before", []edit{{"if tx.ID() < last {", "if tx.ID() < 0*last {"}}, []string{"TestPagesReplacedUnderARunningClientAreNoticed"}},
	{"the head that was written first is believed", []edit{{"int64(txid%2*s.pageSize+pageHeader+4*4)", "int64(pageHeader+4*4)"}}, []string{"TestADamagedHeadCostsNoMoreThanTheLastCommit"}},
	{"a panic of the database is of no kind", []edit{{"return target == ErrDamaged", "return false"}}, []string{"TestPartsOfPagesDamagedUnderARunningClient"}},
}

func TestMutantsAreNoticed(t *testing.T) {
	lib := snapshot(t)
	sets := map[bool][]mutant{true: mutants, false: mutantsForLong} // by whether the killers run with -short
	t.Run("unmutated", func(t *testing.T) {
		bin := lib.build(t, nil, false)
		for short, list := range sets {
			var names []string
			for _, m := range list {
				names = append(names, m.killers...)
			}
			slices.Sort(names)
			names = slices.Compact(names)
			out, err := run(t, bin, names, short)
			if err != nil {
				t.Fatalf("the tests fail without any mutation: %v\n%s", err, out)
			}
			for _, name := range names {
				if !strings.Contains(out, "--- PASS: "+name+" ") {
					t.Errorf("there is no test %s", name)
				}
			}
		}
	})
	if t.Failed() {
		return
	}
	t.Run("mutated", func(t *testing.T) {
		for short, list := range sets {
			for _, m := range list {
				t.Run(m.name, func(t *testing.T) {
					t.Parallel()
					out, err := run(t, lib.build(t, m.edits, lib.inFew(m.killers)), m.killers, short)
					if _, exited := errors.AsType[*exec.ExitError](err); err != nil && !exited {
						t.Fatalf("%v\n%s", err, out)
					}
					for _, name := range m.killers {
						// One that has begun and not passed may have been the end of the process.
						if err == nil || !strings.Contains(out, "=== RUN   "+name+"\n") || strings.Contains(out, "--- PASS: "+name+" ") {
							t.Errorf("%s did not notice:\n%s", name, out)
						}
					}
				})
			}
		}
	})
}

// A library is a copy of the module's source.
type library struct {
	dir   string
	files map[string]string // by name: what can be mutated
	tests map[string]string // by name: the tests of the root package
}

func snapshot(t *testing.T) *library {
	t.Helper()
	lib := &library{dir: t.TempDir(), files: make(map[string]string), tests: make(map[string]string)}
	for _, pattern := range []string{"go.mod", "go.sum", "*.go", "oncehttptest/*.go", "internal/reliability/*.go"} {
		paths, err := filepath.Glob(filepath.Join("..", "..", pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			name, err := filepath.Rel(filepath.Join("..", ".."), path)
			if err != nil {
				t.Fatal(err)
			}
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			to := filepath.Join(lib.dir, name)
			if err := errors.Join(os.MkdirAll(filepath.Dir(to), 0o700), os.WriteFile(to, text, 0o600)); err != nil {
				t.Fatal(err)
			}
			switch {
			case filepath.Dir(name) != "." || !strings.HasSuffix(name, ".go"):
			case strings.HasSuffix(name, "_test.go"):
				lib.tests[name] = string(text)
			default:
				lib.files[name] = string(text)
			}
		}
	}
	return lib
}

// inFew reports whether all these tests are declared in testFiles.
func (lib *library) inFew(tests []string) bool {
	return !slices.ContainsFunc(tests, func(name string) bool {
		return !slices.ContainsFunc(testFiles, func(file string) bool {
			return strings.Contains(lib.tests[file], "\nfunc "+name+"(")
		})
	})
}

// build builds the tests of the library with edits; only testFiles, if few is set.
// An error of building is a fatal one: no mutant is noticed by the compiler.
func (lib *library) build(t *testing.T, edits []edit, few bool) (bin string) {
	t.Helper()
	dir := t.TempDir()
	overlay := lib.mutate(t, dir, edits, few)
	bin = filepath.Join(dir, "oncehttp.test")
	goTool := filepath.Join(build.Default.GOROOT, "bin", "go")
	if _, err := os.Stat(goTool); err != nil {
		goTool = "go"
	}
	compile := exec.CommandContext(t.Context(), goTool, "test", "-c", "-vet=off", "-gcflags=-N -l", "-ldflags=-s -w", "-overlay", overlay, "-o", bin, ".")
	compile.Dir = lib.dir
	if out, err := compile.CombinedOutput(); err != nil {
		t.Fatalf("does not build: %v\n%s", err, out)
	}
	return bin
}

func run(t *testing.T, bin string, tests []string, short bool) (out string, err error) {
	t.Helper()
	run := exec.CommandContext(t.Context(), bin, "-test.v", fmt.Sprint("-test.short=", short), "-test.timeout=90s", "-test.run=^("+strings.Join(tests, "|")+")$")
	run.Dir = filepath.Dir(bin)
	b, err := run.CombinedOutput()
	return string(b), err
}

// mutate writes the edited files and returns the name of go's overlay for them.
func (lib *library) mutate(t *testing.T, dir string, edits []edit, few bool) string {
	t.Helper()
	edited := make(map[string]string)
	for _, e := range edits {
		where, found := "", 0
		for name, text := range lib.files {
			if again, ok := edited[name]; ok {
				text = again
			}
			if n := strings.Count(text, e.old); n > 0 {
				where, found = name, found+n
			}
		}
		if found != 1 {
			t.Fatalf("found %d times, want once: %s", found, e.old)
		}
		text, ok := edited[where]
		if !ok {
			text = lib.files[where]
		}
		edited[where] = strings.Replace(text, e.old, e.new, 1)
	}
	replace := make(map[string]string)
	for name, text := range edited {
		to := filepath.Join(dir, fmt.Sprint("mutated_", name))
		if err := os.WriteFile(to, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		replace[filepath.Join(lib.dir, name)] = to
	}
	for name := range lib.tests {
		if few && !slices.Contains(testFiles, name) {
			replace[filepath.Join(lib.dir, name)] = "" // as if it were not there
		}
	}
	b, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		t.Fatal(err)
	}
	overlay := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(overlay, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return overlay
}
