//go:build unix && !solaris && !aix

package oncehttp

import (
	"os"
	"syscall"
)

// unlock releases the lock that bbolt has on a file.
func unlock(f *os.File) error { return syscall.Flock(int(f.Fd()), syscall.LOCK_UN) }
