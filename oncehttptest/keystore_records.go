package oncehttptest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"

	"github.com/oncehttp/oncehttp"
)

// The promises of TestKeyStore about single records and their listing.

func testBeginDurable(t *storeTest) {
	r := sample("k")
	r.Answer = []byte("answer")
	t.begin(r)
	t.holds(r)
	t.reopen()
	t.holds(r)
}

func testBeginExisting(t *storeTest) {
	r := sample("k")
	t.begin(r)
	second := r
	second.Fingerprint[0]++
	second.Request = []byte("another")
	second.Epoch, second.Owner = 1, "another"
	existing, err := t.s.Begin(t.ctx, second)
	if err != nil || existing == nil {
		t.Fatalf("second Begin: %+v, %v", existing, err)
	}
	want := kept(r)
	want.Seq = existing.Seq
	if !reflect.DeepEqual(existing, want) {
		t.Fatalf("existing is\n%+v, want\n%+v", existing, want)
	}
	t.holds(r)

	r.Outcome, r.Answer = oncehttp.Succeeded, []byte("answer")
	t.ack(r)
	existing, err = t.s.Begin(t.ctx, second)
	if err != nil || existing == nil || !existing.Acked || string(existing.Answer) != "answer" {
		t.Fatalf("Begin over an acknowledged record: %+v, %v", existing, err)
	}
}

func testBeginScopes(t *storeTest) {
	n := 0
	for _, test := range []struct {
		first, second, given bool // first, second: scope stated
		conflict             bool
	}{
		{first: false, second: false, given: true, conflict: true},
		{first: false, second: true, given: true, conflict: true},
		{first: true, second: false, given: true, conflict: true},
		{first: true, second: true, given: true, conflict: false},
		{first: false, second: false, given: false, conflict: false},
	} {
		n++
		a := sample(fmt.Sprint("k", n))
		a.Scope, a.ScopeStated, a.KeyGiven = "a", test.first, test.given
		t.begin(a)
		b := a
		b.Scope, b.ScopeStated = "b", test.second
		existing, err := t.s.Begin(t.ctx, b)
		if err != nil {
			t.Fatalf("%+v: %v", test, err)
		}
		if conflict := existing != nil; conflict != test.conflict {
			t.Errorf("%+v: existing %+v", test, existing)
			continue
		}
		if test.conflict {
			if existing.ID != a.ID || string(existing.Request) != string(a.Request) {
				t.Errorf("%+v: returned %+v, want the whole first record", test, existing)
			}
			t.missing(b.ID)
			continue
		}
		t.holds(a)
		t.holds(b)
	}
	other := sample("k1")
	other.Origin, other.Scope, other.ScopeStated = "https://elsewhere.example.com", "b", false
	t.begin(other) // another origin is another key
}

func testIDs(t *storeTest) {
	ids := []oncehttp.ID{
		{Key: "a", Origin: "b", Scope: "c"}, {Key: "ab", Origin: "", Scope: "c"}, {Key: "a", Origin: "bc", Scope: ""},
		{Key: "a\x00b", Origin: "", Scope: "c"}, {Key: "a", Origin: "b\x00", Scope: "c"}, {Key: "a", Origin: "b", Scope: "\x00c"},
		{Key: "a\x01", Origin: "b", Scope: "c"}, {Key: "a\x01\x01", Origin: "b", Scope: "c"}, {Key: "a\x00", Origin: "b", Scope: "c"},
		{Key: "a\xff", Origin: "b", Scope: "c"}, {Key: "A", Origin: "b", Scope: "c"}, {},
	}
	for i, id := range ids {
		r := sample("")
		r.ID, r.KeyGiven, r.Status = id, false, i
		t.begin(r)
	}
	for i, id := range ids {
		if r := t.get(id); r.ID != id || r.Status != i {
			t.Errorf("Get of %+v returned %+v with status %d, want %d", id, r.ID, r.Status, i)
		}
	}
}

func testSaveCompares(t *storeTest) {
	for i, test := range []struct {
		epoch uint64 // stored is 7
		owner string // stored is "owner"
		want  error
	}{
		{7, "owner", nil},
		{7, "other", oncehttp.ErrFenced},
		{7, "", oncehttp.ErrFenced},
		{8, "owner", nil},
		{8, "other", nil},
		{8, "", nil},
		{6, "owner", oncehttp.ErrFenced},
		{9, "owner", oncehttp.ErrFenced},
		{0, "owner", oncehttp.ErrFenced},
	} {
		for _, op := range []struct {
			name string
			do   func(context.Context, oncehttp.Record) error
		}{{"Save", t.s.Save}, {"Ack", t.s.Ack}, {"Delete", t.s.Delete}} {
			r := sample(fmt.Sprint(op.name, i))
			t.begin(r)
			w := r
			w.Epoch, w.Owner, w.Attempts = test.epoch, test.owner, 100
			if err := op.do(t.ctx, w); !errors.Is(err, test.want) {
				t.Errorf("%s with epoch %d and owner %q over 7 and owner: %v, want %v", op.name, test.epoch, test.owner, err, test.want)
				continue
			}
			switch {
			case test.want != nil:
				t.holds(r)
			case op.name == "Delete":
				t.missing(r.ID)
			case op.name == "Save":
				t.holds(w)
			}
		}
	}

	r := sample("taken over")
	t.begin(r)
	taken := r
	taken.Epoch, taken.Owner = 8, "heir"
	t.save(taken)
	for _, op := range []func(context.Context, oncehttp.Record) error{t.s.Save, t.s.Ack, t.s.Delete} {
		if err := op(t.ctx, r); !errors.Is(err, oncehttp.ErrFenced) {
			t.Errorf("write of the former owner: %v, want ErrFenced", err)
		}
	}
	t.holds(taken)
	t.reopen()
	t.holds(taken)
}

func testSaveNotFound(t *storeTest) {
	r := sample("k")
	if err := t.s.Save(t.ctx, r); !errors.Is(err, oncehttp.ErrNotFound) {
		t.Errorf("Save: %v, want ErrNotFound", err)
	}
	if err := t.s.Ack(t.ctx, r); !errors.Is(err, oncehttp.ErrNotFound) {
		t.Errorf("Ack: %v, want ErrNotFound", err)
	}
	t.missing(r.ID)
	if keys := t.listed(); len(keys) != 0 {
		t.Errorf("listed: %q", keys)
	}
}

func testSaveParts(t *storeTest) {
	r := sample("k")
	r.Answer = []byte("first answer")
	t.begin(r)
	seq := t.get(r.ID).Seq

	w := r
	w.Request, w.Answer, w.Meta = nil, nil, nil
	w.Attempts, w.Told = 3, false
	t.save(w)
	w.Request, w.Answer = r.Request, r.Answer // as they were
	t.holds(w)

	w.Request, w.Answer, w.Meta = []byte("new request"), []byte{}, []byte("new meta")
	t.save(w)
	t.holds(w)
	if got := t.get(r.ID).Seq; got != seq {
		t.Errorf("Save changed Seq from %d to %d", seq, got)
	}
	t.reopen()
	t.holds(w)
}

func testAck(t *storeTest) {
	r, other := sample("k"), sample("other")
	t.begin(r)
	t.begin(other)
	r.Outcome, r.Status, r.Answer = oncehttp.Succeeded, 201, []byte("answer")
	t.save(r)
	t.ack(r)
	acked := r
	acked.Acked, acked.Request = true, nil
	t.holds(acked)
	if keys := t.listed(); !slices.Equal(keys, []string{"other"}) {
		t.Errorf("listed after Ack: %q", keys)
	}
	t.counts(1, 0, 0)

	acked.Answer = nil // with Acked set, nil is nil
	acked.Status = 202
	t.save(acked)
	t.holds(acked)
	t.reopen()
	t.holds(acked)
	t.counts(1, 0, 0)
}

func testReopened(t *storeTest) {
	first, second := sample("first"), sample("second")
	t.begin(first)
	t.begin(second)
	first.Outcome, first.Answer = oncehttp.Rejected, []byte("no")
	t.ack(first)

	again := first
	again.Epoch, again.Owner, again.Outcome = 8, "heir", oncehttp.Undecided
	again.Request, again.Answer = []byte("once more"), nil
	t.save(again)
	again.Answer = first.Answer // nil leaves it
	t.holds(again)
	if keys := t.listed(); !slices.Equal(keys, []string{"second", "first"}) {
		t.Errorf("listed: %q, want the reopened one last", keys)
	}
	t.counts(2, 0, 0)
	t.ack(again)
	t.counts(1, 0, 0)
}

func testDelete(t *storeTest) {
	open, acked := sample("open"), sample("acked")
	t.begin(open)
	t.begin(acked)
	acked.Outcome, acked.Answer = oncehttp.Succeeded, []byte("answer")
	t.ack(acked)
	for _, r := range []oncehttp.Record{open, acked} {
		for range 2 { // the second finds nothing
			if err := t.s.Delete(t.ctx, r); err != nil {
				t.Fatalf("Delete of %q: %v", r.Key, err)
			}
			t.missing(r.ID)
		}
	}
	t.counts(0, 0, 0)
	t.begin(acked) // free again
	t.reopen()
	t.missing(open.ID)
}

func testFind(t *storeTest) {
	var want []oncehttp.ID
	for _, scope := range []string{"", "a", "b"} {
		for _, origin := range []string{"http://x", "http://y"} {
			r := sample("k")
			r.Origin, r.Scope = origin, scope
			t.begin(r)
			want = append(want, r.ID)
			if scope == "a" {
				r.Outcome = oncehttp.Succeeded
				t.ack(r)
			}
		}
	}
	for _, key := range []string{"k2", "kk", "", "K"} {
		t.begin(sample(key))
	}
	got, err := t.s.Find(t.ctx, "k")
	if err != nil {
		t.Fatal(err)
	}
	order := func(a, b oncehttp.ID) int { return bytes.Compare(fmt.Append(nil, a), fmt.Append(nil, b)) }
	slices.SortFunc(got, order)
	slices.SortFunc(want, order)
	if !slices.Equal(got, want) {
		t.Errorf("Find returned %+v, want %+v", got, want)
	}
	if got, err := t.s.Find(t.ctx, "none"); err != nil || len(got) != 0 {
		t.Errorf("Find of an unknown key: %+v, %v", got, err)
	}
}

func testList(t *storeTest) {
	var want []string
	for i := range 30 {
		r := sample(fmt.Sprintf("k%02d", 99-i)) // not in the order of keys
		r.Answer = []byte("answer")
		t.begin(r)
		switch i % 3 {
		case 0:
			r.Outcome = oncehttp.Unknown
			t.save(r)
		case 1:
			t.ack(r)
			continue
		}
		want = append(want, r.Key)
	}
	for _, n := range []int{1, 7, 1000} {
		var keys []string
		for _, r := range t.list(n) {
			keys = append(keys, r.Key)
			full := t.get(r.ID)
			if r.Request != nil || r.Answer != nil {
				t.Fatalf("List returned a body: %+v", r)
			}
			full.Request, full.Answer = nil, nil
			if !reflect.DeepEqual(&r, full) {
				t.Fatalf("listed is\n%+v, want\n%+v", r, full)
			}
		}
		if !slices.Equal(keys, want) {
			t.Fatalf("in pages of %d: %q, want %q", n, keys, want)
		}
	}
	if page, err := t.s.List(t.ctx, 0, 0); err != nil || len(page) != 0 {
		t.Errorf("List of 0: %d records, %v", len(page), err)
	}
	if page, err := t.s.List(t.ctx, 1<<64-1, 10); err != nil || len(page) != 0 {
		t.Errorf("List after the last possible: %d records, %v", len(page), err)
	}
	t.reopen()
	if keys := t.listed(); !slices.Equal(keys, want) {
		t.Errorf("after opening again: %q, want %q", keys, want)
	}
}

func testCounts(t *storeTest) {
	t.counts(0, 0, 0)
	outcomes := []oncehttp.Outcome{oncehttp.Undecided, oncehttp.Unknown, oncehttp.Succeeded, oncehttp.Rejected}
	var records []oncehttp.Record
	for _, from := range outcomes {
		for _, to := range outcomes {
			r := sample(fmt.Sprint(from, "-", to))
			r.Outcome = from
			t.begin(r)
			r.Outcome = to
			records = append(records, r)
		}
	}
	t.counts(4, 4, 8)
	for i, r := range records {
		t.save(r)
		if i == 6 { // of the four that were unknown, one has still to change
			t.counts(2, 3, 11)
		}
	}
	t.counts(4, 4, 8)
	t.reopen()
	t.counts(4, 4, 8)
	for _, r := range records[:4] {
		t.ack(r)
	}
	t.counts(3, 3, 6)
	for _, r := range records[:8] {
		if err := t.s.Delete(t.ctx, r); err != nil {
			t.Fatal(err)
		}
	}
	t.counts(2, 2, 4)
}
