//go:build !unix || solaris || aix

package oncehttp

import "os"

// unlock does nothing: closing the file releases the lock.
func unlock(*os.File) error { return nil }
