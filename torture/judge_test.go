//go:build linux

package torture

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/internal/reliability"
)

// A fact is what is known of an operation at some moment by those outside of
// the store: its callers, and the wire.
type fact struct {
	order  order
	plain  bool // asked for by a plain Do
	wired  bool // some attempt may have reached the server
	wiring int  // attempts under way
	ran    bool // the server has executed it
	asked  bool // by a caller that is not told yet

	told    bool // since it was last asked for
	outcome oncehttp.Outcome
	lost    bool // what was told is not recorded, and was said so
	at      time.Time
	acking  bool // somebody has begun to acknowledge it
	acked   bool // and knows that it is
}

func (k *fact) String() string {
	is := []string{k.order.Name}
	for what, yes := range map[string]bool{"plain": k.plain, "wired": k.wired, "ran": k.ran, "asked": k.asked, "acking": k.acking, "acked": k.acked, "not recorded": k.lost} {
		if yes {
			is = append(is, what)
		}
	}
	if k.told {
		is = append(is, fmt.Sprintf("told %v at %v", k.outcome, k.at))
	}
	return strings.Join(is, ", ")
}

type facts map[string]*fact // by key

func (f facts) clone() facts {
	c := make(facts, len(f))
	for key, fact := range f {
		copied := *fact
		c[key] = &copied
	}
	return c
}

func (f facts) of(key string) *fact {
	if f[key] == nil {
		f[key] = &fact{}
	}
	return f[key]
}

// note takes note of an event.
func (f facts) note(e Event) {
	if e.Key == "" {
		return
	}
	k := f.of(e.Key)
	if e.Order.Name != "" {
		k.order = e.Order
	}
	switch e.What {
	case Begun:
		k.plain, k.asked, k.told, k.acked = e.Plain, true, false, false
	case Wire:
		k.wired = true
		k.wiring++
		if e.Plain && !k.told { // with a fresh key, which nobody knew before
			k.plain, k.asked = true, true
		}
	case WireEnd:
		k.wiring--
	case Effect:
		k.ran = true
	case Told:
		if e.Order.Name == "" && e.Outcome == oncehttp.Succeeded && k.plain {
			return // by a hook: its caller may still be told otherwise
		}
		k.told, k.outcome, k.lost, k.at = true, e.Outcome, e.Lost, e.Time
		if e.Order.Name != "" {
			k.asked = false
		}
	case Acking:
		k.acking = true
	case Acked:
		k.acked = true
	}
}

// cut ends the process: who was not told will not be.
func (f facts) cut() {
	for _, k := range f {
		k.asked, k.wiring = false, 0
	}
}

// A verdict counts broken promises.
type verdict struct {
	mu sync.Mutex // guards the result
	reliability.Result
	shown int
}

func (v *verdict) fail(t *testing.T, count *int, format string, args ...any) {
	t.Helper()
	v.mu.Lock()
	defer v.mu.Unlock()
	*count++
	if v.shown++; v.shown <= 20 {
		t.Errorf(format, args...)
	}
}

// hopeless reports whether more cases would say nothing more.
func (v *verdict) hopeless() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.shown > 20
}

func (v *verdict) count() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.Cases++
}

// A scene is the world at one moment of a history.
type scene struct {
	name    string
	image   Image
	facts   facts
	ran     map[string]order // by the server, by key
	arrive  []string         // keys of requests that arrive after the restart
	now     time.Time
	rnd     *rand.Rand
	dir     string // empty
	verdict *verdict
}

// arrivals decides what becomes of requests that are on their way: they are
// lost, have just arrived, or arrive after the restart. willRun are those that
// the server did execute later.
func (s *scene) arrivals(willRun map[string]bool) {
	for _, key := range slices.Sorted(maps.Keys(s.facts)) {
		k := s.facts[key]
		if k.ran || !k.wired || k.wiring == 0 && !willRun[key] {
			continue
		}
		switch s.rnd.IntN(3) {
		case 0:
			s.ran[key] = k.order
		case 1:
			s.arrive = append(s.arrive, key)
		}
	}
}

// judge opens the image as the next process does, and demands the promises.
func (s *scene) judge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := s.verdict
		v.count()
		defer func() {
			if p := recover(); p != nil {
				v.fail(t, &v.Panics, "%s: panic: %v", s.name, p)
			}
		}()
		time.Sleep(time.Until(s.now) + time.Duration(s.rnd.Int64N(int64(3*time.Second))))
		path := filepath.Join(s.dir, "once.db")
		if err := s.image.WriteTo(s.dir); err != nil {
			t.Fatal(err)
		}
		defer func() {
			entries, _ := os.ReadDir(s.dir)
			for _, e := range entries {
				os.Remove(filepath.Join(s.dir, e.Name()))
			}
		}()
		store, err := oncehttp.OpenBolt(path)
		if err != nil {
			v.fail(t, &v.Unreadable, "%s: the store does not open: %v (%v)", s.name, err, s.image)
			return
		}
		records := s.records(t, store)
		s.after(t, store, records)
		if err := store.Close(); err != nil {
			v.fail(t, &v.Unreadable, "%s: closing: %v", s.name, err)
		}
	})
}

// records reads the records of all keys, and compares them with the facts.
func (s *scene) records(t *testing.T, store *oncehttp.BoltStore) map[string]*oncehttp.Record {
	v := s.verdict
	records := make(map[string]*oncehttp.Record)
	for key, k := range s.facts {
		say := func(count *int, format string, args ...any) {
			t.Helper()
			v.fail(t, count, "%s: %v: %s", s.name, k, fmt.Sprintf(format, args...))
		}
		ids, err := store.Find(t.Context(), key)
		if err != nil || len(ids) > 1 {
			say(&v.Unreadable, "found %v, %v", ids, err)
			continue
		}
		var rec *oncehttp.Record
		if len(ids) == 1 {
			if rec, err = store.Get(t.Context(), ids[0]); err != nil {
				say(&v.Unreadable, "%v", err)
				continue
			}
			records[key] = rec
		}
		purged := k.told && s.now.Sub(k.at) > 47*time.Hour
		told := k.told && !k.asked && !k.lost
		switch {
		case rec == nil && told && k.outcome == oncehttp.NotSent, rec == nil && purged:
		case rec == nil && (k.wired || k.ran):
			say(&v.Lost, "was on the wire, and has no record")
		case rec == nil && told && k.outcome != oncehttp.Undecided:
			say(&v.Lost, "has no record")
		case rec == nil || !told:
		case k.outcome == oncehttp.NotSent:
			say(&v.ToldFalsely, "there is a record, %v, of what was told as not sent", rec.Outcome)
		case k.outcome == oncehttp.Succeeded && k.plain:
		case (k.outcome == oncehttp.Succeeded || k.outcome == oncehttp.Rejected || k.outcome == oncehttp.Unknown) && rec.Outcome != k.outcome:
			say(&v.ToldFalsely, "recorded is %v", rec.Outcome)
		case k.acked && !rec.Acked:
			say(&v.ToldFalsely, "the acknowledgement is lost")
		case rec.Acked && !k.acking && !k.plain:
			say(&v.Lost, "acknowledged by nobody")
		}
	}
	return records
}

// after restarts the program, and demands that it finishes what was begun.
func (s *scene) after(t *testing.T, store *oncehttp.BoltStore, records map[string]*oncehttp.Record) {
	v := s.verdict
	effects := make(map[string]map[string]int) // by order and key
	var mu sync.Mutex                          // guards effects, and the two below
	var reasons []string
	settled, unknown := make(map[string]int), make(map[string]int)
	server := newServer(func(key string, o order) {
		mu.Lock()
		defer mu.Unlock()
		if effects[o.Name] == nil {
			effects[o.Name] = make(map[string]int)
		}
		effects[o.Name][key]++
	})
	defer server.Close()
	for key, o := range s.ran {
		if err := post(server.Transport(), key, o.body()); err != nil {
			t.Fatal(err)
		}
	}
	before := len(server.Attempts())
	client, err := oncehttp.New(store, options(server.Transport()))
	if err != nil {
		v.fail(t, &v.Unreadable, "%s: no client: %v", s.name, err)
		return
	}
	defer client.Close()
	handler := oncehttp.Handler{
		Settled: func(_ context.Context, info oncehttp.Info, resp *http.Response) error {
			mu.Lock()
			defer mu.Unlock()
			settled[info.Key]++
			if k := s.facts[info.Key]; k != nil && k.order.Name != "" {
				if status, _ := k.order.answer(); status != resp.StatusCode {
					v.fail(t, &v.ToldFalsely, "%s: %s is handed over with %d", s.name, k.order.Name, resp.StatusCode)
				}
			}
			return nil
		},
		Unknown: func(_ context.Context, info oncehttp.Info) error {
			mu.Lock()
			defer mu.Unlock()
			unknown[info.Key]++
			reasons = append(reasons, fmt.Sprint(info.Key, info.Reason, info.Detail))
			return nil
		},
	}
	done := false
	var last oncehttp.Summary
	for pass := 0; pass < 8 && !done; pass++ {
		sum, err := client.Resume(t.Context(), handler)
		if err != nil || sum.Failed > 0 {
			v.fail(t, &v.Unreadable, "%s: resume: %+v, %v", s.name, sum, err)
			return
		}
		last = sum
		if done = sum.Pending+sum.Failed == 0; !done { // held are those that were told as unknown before

			time.Sleep(2 * time.Second)
		}
	}
	if !done {
		v.fail(t, &v.Lost, "%s: Resume does not come to an end: %+v", s.name, last)
	}
	sent := make(map[string]int)
	for _, a := range server.Attempts()[before:] {
		sent[a.Key]++
	}
	for key, k := range s.facts {
		rec := records[key]
		say := func(count *int, format string, args ...any) {
			t.Helper()
			v.fail(t, count, "%s: %v: %s", s.name, k, fmt.Sprintf(format, args...))
		}
		want := func(wire bool, handed, told int) {
			t.Helper()
			if wire != (sent[key] > 0) {
				count := &v.ToldFalsely
				if wire {
					count = &v.Lost
				}
				say(count, "Resume sent it %d times", sent[key])
			}
			if settled[key] != handed {
				say(&v.Lost, "handed over %d times, want %d", settled[key], handed)
			}
			if unknown[key] != told {
				say(&v.Lost, "told as unknown %d times, want %d (%v)", unknown[key], told, reasons)
			}
		}
		switch {
		case rec == nil || rec.Acked:
			want(false, 0, 0)
		case rec.Outcome == oncehttp.Undecided:
			want(true, 1, 0)
		case rec.Outcome == oncehttp.Unknown && !rec.Told:
			want(false, 0, 1)
		case rec.Outcome == oncehttp.Unknown:
			want(false, 0, 0)
		default:
			want(false, 1, 0)
		}
	}
	s.again(t, client)
	for _, key := range s.arrive { // late
		if err := post(server.Transport(), key, s.facts[key].order.body()); err != nil {
			t.Fatal(err)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	for name, keys := range effects {
		total := 0
		for _, n := range keys {
			total += n
		}
		if total > 1 {
			v.fail(t, &v.Twice, "%s: %s was charged %d times: %v", s.name, name, total, keys)
		}
	}
}

// again asks for some of the operations anew, under the keys that they have.
func (s *scene) again(t *testing.T, client *oncehttp.Client) {
	v := s.verdict
	for _, key := range slices.Sorted(maps.Keys(s.facts)) {
		k := s.facts[key]
		if key != oncehttp.KeyFor(k.order.Name) || s.rnd.IntN(4) > 0 || k.told && s.now.Sub(k.at) > 40*time.Hour {
			continue
		}
		ctx, op := oncehttp.Start(t.Context(), oncehttp.Op{Key: key, Scope: "shop"})
		if k.plain {
			op = nil
			ctx = t.Context()
		}
		info, err := charge(ctx, client, op, key, k.order)
		want := oncehttp.Succeeded
		if k.order.Decline {
			want = oncehttp.Rejected
		}
		if info.Outcome != want || err != nil {
			v.fail(t, &v.ToldFalsely, "%s: %v: asked for again: %v, %v", s.name, k, info.Outcome, err)
		}
	}
}
