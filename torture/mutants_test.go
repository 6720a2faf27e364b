//go:build linux && mutants

package torture

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// A mutant is a change of the library, or of the disk, and a test that must
// fail then.
type mutant struct {
	name   string
	edits  []edit
	env    string
	killer string
}

// An edit replaces a text that occurs exactly once in a file of the library.
type edit struct{ file, old, new string }

var mutants = []mutant{
	{name: "nothing is synced", killer: "TestPowerFailure", edits: []edit{{
		"boltopen.go", "s.pageSize = s.db.Info().PageSize", "s.db.NoSync = true\n\ts.pageSize = s.db.Info().PageSize",
	}}},
	{name: "the disk leaves out every second sync", killer: "TestPowerFailure", env: mutantEnv + "=skip syncs"},
	{name: "the disk leaves out the syncs of commits' last pages", killer: "TestPowerFailure", env: mutantEnv + "=skip meta syncs"},
	{name: "the disk leaves out the syncs of commits' first pages", killer: "TestPowerFailure", env: mutantEnv + "=skip data syncs"},
	{name: "sent before the commit", killer: "TestPowerFailure", edits: []edit{{
		"begin.go", "existing, err := c.store.Begin(f.ctx, rec)", "var existing *Record\n\tvar err error\n\tgo c.store.Begin(f.ctx, rec)",
	}}},
	{name: "sent before the commit, and killed", killer: "TestKilledInSystemCalls", edits: []edit{{
		"begin.go", "existing, err := c.store.Begin(f.ctx, rec)", "var existing *Record\n\tvar err error\n\tgo c.store.Begin(f.ctx, rec)",
	}}},
	{name: "acknowledged before the handler has recorded it", killer: "TestKilledInSystemCalls", edits: []edit{{
		"handle.go", "\tif err == nil {\n\t\terr = p.protect(func() error { return p.h.Settled", "\tif err == nil {\n\t\t_ = p.c.ack(f.writes(), rec)\n\t\terr = p.protect(func() error { return p.h.Settled",
	}}},
	{name: "success is told before it is durable", killer: "TestPowerFailure", edits: []edit{{
		"settle.go", "if lazy := rec.Outcome == Succeeded && !rec.AckDue; lazy {", "if rec.Outcome == Succeeded {",
	}}},
	{name: "rejected is stored lazily", killer: "TestPowerFailure", edits: []edit{{
		"settle.go", "if lazy := rec.Outcome == Succeeded && !rec.AckDue; lazy {", "if !rec.AckDue {",
	}}},
	{name: "unknown is stored lazily", killer: "TestPowerFailure", edits: []edit{{
		"settle.go", "\terr := f.c.store.Save(f.writes(), rec)\n\tf.rec = rec\n\tres := f.res\n",
		"\tvar err error\n\tf.c.saveSoon(rec, func(error) {})\n\tf.rec = rec\n\tres := f.res\n",
	}}},
	{name: "not sent is told before the record is removed", killer: "TestPowerFailure", edits: []edit{{
		"settle.go", "if err := f.c.store.Delete(f.writes(), rec); err != nil {", "go f.c.store.Delete(f.writes(), rec)\n\tif err := error(nil); err != nil {",
	}}},
	{name: "acknowledged lazily", killer: "TestPowerFailure", edits: []edit{{
		"settle.go", "err := c.store.Ack(ctx, rec)", "var err error\n\tlazily := rec\n\tlazily.Acked = true\n\tc.saveSoon(lazily, func(error) {})",
	}}},
	{name: "the new file's name is not synced", killer: "TestPowerFailure", edits: []edit{
		{"boltopen.go", "return syncDir(dir)", "return nil"},
		{"boltopen.go", "err = syncName(s.path)", "err = nil"},
	}},
	{name: "the new file gets its name before it is synced", killer: "TestPowerFailure", edits: []edit{
		{"boltopen.go", "bbolt.Options{FreelistType: bbolt.FreelistMapType})", "bbolt.Options{FreelistType: bbolt.FreelistMapType, NoSync: true, NoGrowSync: true})"},
		{"boltopen.go", "db.Sync(), ", ""},
		{"boltopen.go", "err = s.harden()", "err = nil"},
	}},
	{name: "a commit that was found is not made durable", killer: "TestKilledAndThenWithoutPower", edits: []edit{{
		"boltopen.go", "\tif err == nil {\n\t\terr = s.file.Sync()\n\t}\n\tif err == nil {\n\t\terr = syncName(s.path)", "\tif err == nil {\n\t\terr = syncName(s.path)",
	}}},
	{name: "a name that was found is not made durable", killer: "TestKilledAndThenWithoutPower", edits: []edit{{
		"boltopen.go", "err = syncName(s.path)", "err = nil",
	}}},
	{name: "a commit whose sync has failed is only synced again", killer: "TestSyncFailsAndThenThePower", edits: []edit{{
		"boltopen.go", "\tif err == nil {\n\t\t_, err = s.file.WriteAt(page, at)\n\t}\n", "",
	}}},
	{name: "sent although Begin failed", killer: "TestDiskErrors", edits: []edit{{
		"begin.go", "case err != nil:\n\t\tf.beginFailed(&rec, err)", "case err != nil && false:\n\t\tf.beginFailed(&rec, err)",
	}}},
	{name: "the store goes on after a commit of which nobody knows", killer: "TestDiskErrors", edits: []edit{{
		"boltcommit.go", "return s.breakOff(s.failure(cause, \"commit\", ErrStoreUncertain))", "s.last = read.ID()\n\t\treturn s.failure(cause, \"commit\", ErrStoreFailed)",
	}}},
	{name: "a rejection is told although it is not recorded", killer: "TestDiskErrors", edits: []edit{{
		"settle.go", "if res.info.Outcome == Rejected {", "if false {",
	}}},
	{name: "a file that could not be read stays locked", killer: "TestDiskErrors", edits: []edit{{
		"boltstore.go", "errors.Join(unlock(s.file), s.file.Close())", "s.file.Close()",
	}}},
	{name: "a page that cannot be read is the end of the process", killer: "TestReadErrors", edits: []edit{{
		"boltcommit.go", "\tdefer debug.SetPanicOnFault(debug.SetPanicOnFault(true))\n", "\t_ = debug.SetPanicOnFault\n",
	}}},
	{name: "no headroom", killer: "TestFullDisk", edits: []edit{{
		"boltroom.go", " + headroom(max(s.longest, r.longest))", "",
	}}},
	{name: "the file grows as a hole", killer: "TestFullDisk", edits: []edit{{
		"boltroom.go", "if err = reserve(s.file, info.Size(), need+grow); err != nil {", "if err = s.file.Truncate(need + grow); err != nil {",
	}}},
	{name: "begun without headroom", killer: "TestFullDisk", edits: []edit{{
		"boltcommit.go", "if full != nil && w.begins {", "if false {",
	}}},
}

func TestMutantsAreNoticed(t *testing.T) {
	start(t) // or skip
	dir := t.TempDir()
	for _, pattern := range []string{"go.mod", "go.sum", "*.go", "oncehttptest/*.go", "internal/reliability/*.go", "torture/go.*", "torture/*.go"} {
		paths, err := filepath.Glob(filepath.Join("..", pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			name, err := filepath.Rel("..", path)
			if err != nil {
				t.Fatal(err)
			}
			text, err := os.ReadFile(path)
			to := filepath.Join(dir, name)
			if err := errors.Join(err, os.MkdirAll(filepath.Dir(to), 0o700), os.WriteFile(to, text, 0o600)); err != nil {
				t.Fatal(err)
			}
		}
	}
	all := append([]mutant{{name: "none", killer: "TestPowerFailure|TestKilledAndThenWithoutPower|TestSyncFailsAndThenThePower|TestDiskErrors|TestReadErrors|TestFullDisk|TestKilledInSystemCalls"}}, mutants...)
	for _, m := range all {
		t.Run(m.name, func(t *testing.T) {
			out, err := m.run(t, dir)
			if _, failed := errors.AsType[*exec.ExitError](err); err != nil && !failed {
				t.Fatalf("%v\n%s", err, out)
			}
			noticed := err != nil && (strings.Contains(out, "--- FAIL: "+m.killer+" ") || strings.Contains(out, "unexpected fault address"))
			if m.name == "none" && err != nil {
				t.Fatalf("the tests fail without any mutation:\n%s", out)
			} else if m.name != "none" && !noticed {
				t.Errorf("%s did not notice:\n%s", m.killer, out[max(0, len(out)-3000):])
			}
		})
	}
}

// run builds the tests with the mutant and runs its killer.
func (m mutant) run(t *testing.T, dir string) (out string, err error) {
	t.Helper()
	tmp := t.TempDir()
	edited := make(map[string]string)
	for _, e := range m.edits {
		text, ok := edited[e.file]
		if !ok {
			b, err := os.ReadFile(filepath.Join(dir, e.file))
			if err != nil {
				t.Fatal(err)
			}
			text = string(b)
		}
		if n := strings.Count(text, e.old); n != 1 {
			t.Fatalf("found %d times in %s, want once: %s", n, e.file, e.old)
		}
		edited[e.file] = strings.Replace(text, e.old, e.new, 1)
	}
	replace := make(map[string]string)
	for name, text := range edited {
		replace[filepath.Join(dir, name)] = filepath.Join(tmp, name)
		if err := os.WriteFile(filepath.Join(tmp, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	b, err := json.Marshal(map[string]any{"Replace": replace})
	overlay := filepath.Join(tmp, "overlay.json")
	if err := errors.Join(err, os.WriteFile(overlay, b, 0o600)); err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(tmp, "torture.test")
	compile := exec.CommandContext(t.Context(), "go", "test", "-c", "-vet=off", "-overlay", overlay, "-o", bin, ".")
	compile.Dir = filepath.Join(dir, "torture")
	if out, err := compile.CombinedOutput(); err != nil {
		t.Fatalf("does not build: %v\n%s", err, out)
	}
	run := exec.CommandContext(t.Context(), bin, "-test.timeout=5m", "-test.run=^("+m.killer+")$", fmt.Sprint("-seed=", *seed))
	run.Dir = tmp
	run.Env = append(os.Environ(), m.env)
	b, err = run.CombinedOutput()
	return string(b), err
}
