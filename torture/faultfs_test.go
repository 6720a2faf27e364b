//go:build linux

package torture

import (
	"fmt"
	"os"
	"testing"
)

func TestMain(m *testing.M) {
	if what := os.Getenv(cashierEnv); what != "" {
		if err := cash(what, os.Getenv(cashierDir), os.Getenv(cashierServer)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	Serve()
	code := m.Run()
	if skipped != nil { // testing says that with -v only
		fmt.Fprintln(os.Stderr, "SKIPPED, nothing was tested: no FUSE file system can be mounted:", skipped)
	}
	if skippedCalls != nil {
		fmt.Fprintln(os.Stderr, "SKIPPED, nothing was killed in system calls:", skippedCalls)
	}
	os.Exit(code)
}

var skipped error

// start mounts a file system, or skips the test where there are none.
func start(t *testing.T) *FS {
	t.Helper()
	fs, err := Start(t.TempDir())
	if err != nil {
		_, noDevice := os.Stat("/dev/fuse")
		if os.Getenv("CI") == "true" && noDevice == nil {
			t.Fatalf("there is /dev/fuse, and yet: %v", err)
		}
		skipped = err
		t.Skip(err)
	}
	t.Cleanup(func() {
		if err := fs.Close(); err != nil {
			t.Error(err)
		}
	})
	return fs
}
