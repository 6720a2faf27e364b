//go:build !linux

package oncehttp

import "os"

// reserve makes a file longer, with a place on the disk.
func reserve(f *os.File, from, to int64) error { return fill(f, from, to) }
