//go:build linux

package torture

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"syscall"
	"testing"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/internal/reliability"
)

// TestReadErrors: the file is mapped into memory, so a page that cannot be read
// is a fault of the processor, wherever the page is touched. It is told as an
// error, and nothing is lost.
func TestReadErrors(t *testing.T) {
	fs := start(t)
	images := amount(400, 10_000)
	v := &verdict{Result: reliability.Result{Class: "pages that cannot be read", How: "EIO in page faults of a running process", About: true}}
	var lines []*line
	uses := map[string]func(*trial, string) error{
		"charge": func(r *trial, _ string) error {
			_, err := r.call(r.client, plan{order: order{Name: "charged"}})
			return err
		},
		"charge again": func(r *trial, key string) error {
			_, err := r.call(r.client, plan{order: order{Name: "left"}, Key: key, NoAck: true})
			return err
		},
		"look up": func(r *trial, key string) error {
			_, err := r.client.Lookup(context.Background(), key)
			return err
		},
		"list": func(r *trial, _ string) error {
			for _, err := range r.client.Operations(context.Background(), oncehttp.Filter{}) {
				if err != nil {
					return err
				}
			}
			return nil
		},
		"resume": func(r *trial, _ string) error {
			sum, err := r.client.Resume(context.Background(), oncehttp.Handler{
				Settled: func(_ context.Context, info oncehttp.Info, _ *http.Response) error {
					r.add(Event{What: Acking, Key: info.Key})
					return nil
				},
			})
			if err == nil && sum.Failed > 0 {
				err = oncehttp.ErrStoreFailed
			}
			return err
		},
		"close": func(r *trial, _ string) error { return r.client.Close() },
	}
	hits := 0
	for name, use := range uses {
		for nth := 1; nth <= 8; nth++ {
			r := &trial{t: t, fs: fs, v: v, name: fmt.Sprintf("%s, page %d", name, nth), free: -1, seen: new([kinds]int)}
			r.faults = []Fault{{Kind: Read, Nth: nth, Times: -1, Errno: syscall.EIO}}
			l := &line{name: r.name, disk: NewDisk(), facts: make(facts), begin: base}
			l.history = record(t, fs, nil, nil, base, func(s *shop) {
				r.shop = s
				if s.open() != nil {
					return
				}
				key := oncehttp.KeyFor("left")
				for i := range 30 {
					s.charge(plan{order: order{Name: fmt.Sprint("before", i)}, NoAck: i%2 == 0})
				}
				s.charge(plan{order: order{Name: "left"}, Key: key, NoAck: true})
				r.arm()
				if err := fs.Drop(); err != nil {
					t.Fatal(err)
				}
				err := use(r, key)
				_, _, n, logErr := fs.Log()
				if logErr != nil {
					t.Fatal(logErr)
				}
				if n > 0 {
					hits++
				}
				if err != nil && !errors.Is(err, oncehttp.ErrStoreFailed) && !errors.Is(err, oncehttp.ErrStoreUncertain) && !errors.Is(err, oncehttp.ErrDamaged) {
					r.fail("an error of no kind: %v", err)
				}
				r.mend()
				s.close()
				if r.reopen() {
					r.prove("restarted", false)
					s.resume()
				}
			})
			r.check(l.history)
			v.Cases++
			lines = append(lines, l)
		}
	}
	if hits < len(uses) {
		t.Errorf("only %d faults in %d lives", hits, len(lines))
	}
	t.Logf("%d lives, faults in %d", len(lines), hits)
	judgeAll(t, v, lines, images)
	reliability.Report(t, v.Result)
}
