//go:build unix

package oncehttp_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/internal/reliability"
)

// A store belongs to one process, and to the file at its path. The other process
// is the test binary, executed again with a role in its environment.
const ownerRole, ownerPath = "ONCEHTTP_TEST_OWNER", "ONCEHTTP_TEST_OWNER_PATH"

func init() {
	role := os.Getenv(ownerRole)
	if role == "" {
		return
	}
	if role != "idle" {
		if _, err := oncehttp.Open(os.Getenv(ownerPath), nil); err != nil {
			fmt.Println("refused:", errors.Is(err, oncehttp.ErrStoreLocked))
			os.Exit(0)
		}
	}
	if role == "parent" {
		child := ownerProcess("idle", "")
		if err := child.Start(); err != nil {
			panic(err)
		}
		fmt.Println(child.Process.Pid)
	}
	fmt.Println("ready")
	time.Sleep(time.Minute) // it is killed long before
	os.Exit(0)
}

func ownerProcess(role, path string) *exec.Cmd {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), ownerRole+"="+role, ownerPath+"="+path)
	return cmd
}

// startOwner starts a process and returns its lines of output up to "ready".
func startOwner(t *testing.T, role, path string) (lines []string, kill func()) {
	t.Helper()
	cmd := ownerProcess(role, path)
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	kill = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	t.Cleanup(kill)
	for s := bufio.NewScanner(out); s.Scan() && s.Text() != "ready"; {
		lines = append(lines, s.Text())
	}
	return lines, kill
}

func TestASecondProcessIsLockedOutUntilTheFirstIsDead(t *testing.T) {
	count := reliability.Result{Class: "a second process", How: "the file is opened by two, the first is killed"}
	for range heavy(1, 10) {
		path := filepath.Join(t.TempDir(), "once.db")
		_, kill := startOwner(t, "owner", path)
		if c, err := oncehttp.Open(path, nil); !errors.Is(err, oncehttp.ErrStoreLocked) || !strings.Contains(err.Error(), path) {
			t.Errorf("opened while another process has it: %v, %v", c, err)
		}
		kill()
		c, err := oncehttp.Open(path, nil)
		if err != nil {
			t.Fatalf("after its death: %v", err)
		}
		if lines, _ := startOwner(t, "owner", path); strings.Join(lines, "") != "refused: true" {
			t.Errorf("the other process: %q", lines)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		count.Cases++
	}
	reliability.Report(t, count)
}

// TestAChildThatOutlivesItsParentDoesNotKeepTheFile: what a program executes does
// not inherit the file, nor its lock.
func TestAChildThatOutlivesItsParentDoesNotKeepTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "once.db")
	lines, kill := startOwner(t, "parent", path)
	if len(lines) != 1 {
		t.Fatalf("the parent: %q", lines)
	}
	child, err := strconv.Atoi(lines[0])
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Kill(child, syscall.SIGKILL)
	kill()
	if err := syscall.Kill(child, 0); err != nil {
		t.Fatalf("the child is dead as well: %v", err)
	}
	c, err := oncehttp.Open(path, nil)
	if err != nil {
		t.Fatalf("the child keeps it: %v", err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	reliability.Report(t, reliability.Result{Class: "a child that outlives its parent", How: "executed by the process that has the file, which is killed", Cases: 1})
}

// replacements are what may happen to a file under a running client. old is an
// earlier content of it.
var replacements = map[string]func(path string, old []byte) error{
	"deleted":      func(path string, _ []byte) error { return os.Remove(path) },
	"renamed":      func(path string, _ []byte) error { return os.Rename(path, path+".away") },
	"renamed over": func(path string, old []byte) error { return renameOver(path, old) },
	"renamed over by itself": func(path string, _ []byte) error {
		b, err := os.ReadFile(path)
		return errors.Join(err, renameOver(path, b))
	},
	"renamed over by nothing": func(path string, _ []byte) error { return renameOver(path, nil) },
	"a directory instead": func(path string, _ []byte) error {
		return errors.Join(os.Remove(path), os.Mkdir(path, 0o700))
	},
	"its directory renamed": func(path string, _ []byte) error {
		return os.Rename(filepath.Dir(path), filepath.Dir(path)+".away")
	},
	"restored in place": func(path string, old []byte) error { return os.WriteFile(path, old, 0o600) },
	"restored in place, not cut": func(path string, old []byte) error {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = f.Write(old)
		return errors.Join(err, f.Close())
	},
	"emptied":          func(path string, _ []byte) error { return os.Truncate(path, 0) },
	"cut to its heads": func(path string, _ []byte) error { return os.Truncate(path, int64(metaPages*pageBytes)) },
	"written over": func(path string, old []byte) error {
		return os.WriteFile(path, bytes.Repeat([]byte{7}, len(old)), 0o600)
	},
	"cut and as long": func(path string, old []byte) error {
		return errors.Join(os.Truncate(path, 0), os.Truncate(path, int64(len(old))))
	},
	"an earlier head":   func(path string, old []byte) error { return writeAt(path, old[:metaPages*pageBytes]) },
	"a text in its way": func(path string, _ []byte) error { return writeAt(path, []byte(strings.Repeat("text\n", 5000))) },
}

func renameOver(path string, content []byte) error {
	return errors.Join(os.WriteFile(path+".new", content, 0o600), os.Rename(path+".new", path))
}

func writeAt(path string, b []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(b, 0)
	return errors.Join(err, f.Close())
}

// TestNothingIsSentWhenTheFileIsNoLongerOurs: what would be recorded would be
// lost, and what was recorded since is denied by an older file.
func TestNothingIsSentWhenTheFileIsNoLongerOurs(t *testing.T) {
	count := reliability.Result{Class: "files replaced under a running client", How: "deleted, renamed, renamed over, restored in place, cut, written over"}
	for name, replace := range replacements {
		synctest.Test(t, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "store")
			if err := os.Mkdir(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, "once.db")
			l := &ledger{sent: make(map[string]int)}
			c, err := ledgerClient(path, l, oncehttp.Options{MaxAttempts: 1})
			if err != nil {
				t.Fatal(err)
			}
			charge := func(order string) { // and wait for its answer's record
				t.Helper()
				if _, _, err := chargeAt(t.Context(), c, order); err != nil {
					t.Fatalf("%s: %v", name, err)
				}
			}
			charge("first")
			old, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			for _, order := range []string{"a", "b", "c"} { // not in the old file
				charge(order)
			}
			if err := replace(path, old); err != nil {
				t.Fatal(err)
			}
			for range 2 {
				for order, sent := range map[string]int{"first": 1, "a": 1, "b": 1, "c": 1, "new": 0} {
					op, _, err := chargeAt(t.Context(), c, order)
					told := op.Info().Outcome
					switch {
					case err == nil && order == "new":
						t.Errorf("%s: a new order was taken", name)
						count.Lost++
					case err == nil: // told again what was told before
					case !errors.Is(err, oncehttp.ErrStoreReplaced) && !errors.Is(err, oncehttp.ErrDamaged) && !errors.Is(err, oncehttp.ErrStoreFailed):
						t.Errorf("%s, %s: %v", name, order, err)
					case order != "new" && told == oncehttp.NotSent:
						t.Errorf("%s, %s: told not sent: %v", name, order, err)
						count.ToldFalsely++
					}
					if l.sent[order] != sent {
						t.Errorf("%s: %s was sent %d times", name, order, l.sent[order])
						count.Twice++
					}
				}
			}
			_ = c.Close() // whatever it says, it ends
			count.Cases++
		})
	}
	reliability.Report(t, count)
}

// TestAnAnswerThatFindsNoFileIsToldAsNotRecorded: what is on the wire when the
// file goes is still answered.
func TestAnAnswerThatFindsNoFileIsToldAsNotRecorded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "once.db")
		l := &ledger{sent: make(map[string]int)}
		c, err := ledgerClient(path, l, oncehttp.Options{Trace: &oncehttp.Trace{
			AttemptStart: func(oncehttp.AttemptInfo) {
				if err := os.Remove(path); err != nil {
					t.Error(err)
				}
			},
		}})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		op, body, err := chargeAt(t.Context(), c, "order")
		if info := op.Info(); err != nil || body != "answer of order" || !info.NotRecorded || info.Outcome != oncehttp.Succeeded {
			t.Errorf("told %q, %v, %+v", body, err, info)
		}
		if err := op.Ack(t.Context()); !errors.Is(err, oncehttp.ErrStoreFailed) {
			t.Errorf("Ack: %v", err)
		}
		if l.sent["order"] != 1 {
			t.Errorf("sent %d times", l.sent["order"])
		}
	})
}
