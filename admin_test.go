package oncehttp_test

import (
	"testing"
	"time"

	"github.com/oncehttp/oncehttp"
)

// Somebody who has to decide needs to know by when.
func TestStatsTellWhenTheNextWindowCloses(t *testing.T) {
	inBubble(t, oncehttp.Options{}, func(t *testing.T, b *bench) {
		closes := func() time.Time {
			s, err := b.client.Stats(t.Context())
			if err != nil {
				t.Error(err)
			}
			return s.WindowClose
		}
		if got := closes(); !got.IsZero() {
			t.Errorf("with nothing open: %v", got)
		}
		first := time.Now()
		b.lost("k", "1") // unknown
		if got := time.Until(closes()); got > 23*time.Hour+30*time.Minute || got < 23*time.Hour {
			t.Errorf("of an unknown operation: in %v", got)
		}
		time.Sleep(time.Hour)
		second := time.Now()
		b.pending("k2", "2")
		if got := closes(); got.Sub(first) > 23*time.Hour+31*time.Minute {
			t.Errorf("of two: %v after the first", got.Sub(first))
		}
		time.Sleep(23 * time.Hour)
		if got := closes(); got.Sub(second) < 23*time.Hour {
			t.Errorf("of the second: %v after it began", got.Sub(second))
		}
		time.Sleep(time.Hour)
		if got := closes(); !got.IsZero() {
			t.Errorf("with all windows closed: %v", got)
		}
	})
}
