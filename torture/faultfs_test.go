//go:build linux

package torture

import (
	"os"
	"testing"
)

func TestMain(m *testing.M) {
	Serve()
	os.Exit(m.Run())
}

// start mounts a file system, or skips the test where there are none.
func start(t *testing.T) *FS {
	t.Helper()
	fs, err := Start(t.TempDir())
	if err != nil {
		_, noDevice := os.Stat("/dev/fuse")
		if os.Getenv("CI") == "true" && noDevice == nil {
			t.Fatalf("there is /dev/fuse, and yet: %v", err)
		}
		t.Skipf("SKIPPED, nothing is tested here: no FUSE file system can be mounted: %v", err)
	}
	t.Cleanup(func() {
		if err := fs.Close(); err != nil {
			t.Error(err)
		}
	})
	return fs
}
