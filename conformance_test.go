package oncehttp_test

import (
	"path/filepath"
	"sync"
	"testing"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

func TestBoltStoreConforms(t *testing.T) {
	oncehttptest.TestKeyStore(t, func(t *testing.T, dir string) oncehttp.KeyStore {
		s, err := oncehttp.OpenBolt(filepath.Join(dir, "once.db"))
		if err != nil {
			t.Fatal(err)
		}
		return s
	})
}

func TestMemoryStoreConforms(t *testing.T) {
	var seen sync.Map
	oncehttptest.TestKeyStore(t, func(t *testing.T, dir string) oncehttp.KeyStore {
		if _, again := seen.LoadOrStore(dir, true); again {
			return nil
		}
		return oncehttp.NewMemoryStore()
	})
}
