package oncehttp

import (
	"errors"
	"os"
	"syscall"
)

// reserve makes a file longer, with a place on the disk. It is written, too: a
// sync that is the first to write to a place goes through the file system's
// journal, and takes up to twice as long.
func reserve(f *os.File, from, to int64) error {
	err := syscall.Fallocate(int(f.Fd()), 0, from, to-from) // first: told at once that there is no room, it takes none
	if err != nil && !errors.Is(err, syscall.EOPNOTSUPP) && !errors.Is(err, syscall.ENOSYS) {
		return err
	}
	return fill(f, from, to)
}
