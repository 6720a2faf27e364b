//go:build linux && (amd64 || arm64)

package oncehttp

import (
	"os"
	"syscall"
	"testing"
)

// dropCache makes the system forget what it has of a file in memory.
func dropCache(tb testing.TB, path string) bool {
	tb.Helper()
	f, err := os.Open(path)
	if err != nil {
		tb.Fatal(err)
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		tb.Fatal(err)
	}
	const dontNeed = 4
	_, _, errno := syscall.Syscall6(syscall.SYS_FADVISE64, f.Fd(), 0, 0, dontNeed, 0, 0)
	if errno != 0 {
		tb.Fatal(errno)
	}
	return true
}
