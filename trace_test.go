package oncehttp_test

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/oncehttp/oncehttp"
)

// Run has no other way to say why nothing is finished.
func TestWhatStaysPendingIsLogged(t *testing.T) {
	var log bytes.Buffer
	opts := oncehttp.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))} // from Info on, as slog's default
	inBubble(t, opts, func(t *testing.T, b *bench) {
		b.pending("k", "1", "Authorization", "Bearer b")
		log.Reset()
		if _, sum := b.resume(); sum.Pending != 1 {
			t.Errorf("%+v, want it pending", sum)
		}
		for _, want := range []string{"outcome=undecided", "set Options.Authorize"} {
			if !strings.Contains(log.String(), want) {
				t.Errorf("log %q, want %q in it", &log, want)
			}
		}
	})
}
