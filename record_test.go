package oncehttp

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"hash/crc32"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/oncehttp/oncehttp/internal/reliability"
)

// goldenRecord has something else in every field.
func goldenRecord() *Record {
	at := func(n int64) time.Time { return time.UnixMicro(1_780_000_000_000_000 + n).UTC() }
	return &Record{
		ID:  ID{Key: "key", Origin: "https://api.example.com", Scope: "acct_1"},
		Seq: 300, Epoch: 2, Owner: "owner", Era: 3,
		Outcome: Unknown, Reason: ReasonStored, Told: true, ScopeStated: true, Uncertain: true,
		Attempts: 4, Claims: 5, Status: 500,
		FirstSent: at(1), ResendUntil: at(2), NotBefore: at(3), RestUntil: at(6), Updated: at(4), AnswerUntil: time.Time{}, KeepUntil: at(5),
		Fingerprint: [32]byte{0: 0xaa, 31: 0xbb},
		Meta:        []byte("meta"), Request: []byte("request"), Answer: []byte{},
	}
}

// golden is goldenRecord in format 1, for ever.
const golden = `
	010000009a000000000000012c036b65791768747470733a2f2f6170692e6578616d706c652e636f6d06616363745f3102
	056f776e65720304022a080ae80782809abbd1b9a90684809abbd1b9a90686809abbd1b9a9068c809abbd1b9a90688809a
	bbd1b9a906ffffddf2dfffdfdc018a809abbd1b9a906aa0000000000000000000000000000000000000000000000000000
	00000000bb056d65746108018cb0045f72657175657374eef21ead00000000`

func encodeWhole(r *Record) []byte {
	return appendRecord(nil, r, newPart(r.Request), newPart(r.Answer))
}

func TestRecordEncodingIsFormat1(t *testing.T) {
	want := strings.Join(strings.Fields(golden), "")
	if got := hex.EncodeToString(encodeWhole(goldenRecord())); got != want {
		t.Errorf("encoded:\n%s\nwant:\n%s\nA change needs a new recordVersion, and a decoder of this one.", got, want)
	}
	b, err := hex.DecodeString(want)
	if err != nil {
		t.Fatal(err)
	}
	got, err := decodeRecord(b)
	if err != nil || !reflect.DeepEqual(got, goldenRecord()) {
		t.Errorf("decoded: %+v, %v", got, err)
	}
}

func TestEveryFieldOfARecordIsKept(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		want := randomRecord(random)
		got, err := decodeRecord(encodeWhole(want))
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("decoded %+v, %v\nwant %+v", got, err, want)
		}
	}
}

// randomRecord fills all fields by reflection, so that a new one is not
// forgotten.
func randomRecord(random *rand.Rand) *Record {
	r := new(Record)
	v := reflect.ValueOf(r).Elem()
	for _, field := range v.Fields() {
		switch f := field.Addr().Interface().(type) {
		case *ID:
			*f = ID{randomText(random), randomText(random), randomText(random)}
		case *time.Time:
			*f = time.UnixMicro(random.Int64N(1<<53) - 1<<52).UTC()
		case *[32]byte:
			for i := range f {
				f[i] = byte(random.Uint32())
			}
		case *[]byte:
			if random.IntN(4) > 0 {
				*f = []byte(randomText(random))
			}
		case *string:
			*f = randomText(random)
		case *bool:
			*f = random.IntN(2) == 0
		case *uint64:
			*f = random.Uint64() >> random.IntN(64)
		case *int:
			*f = random.IntN(1000) - 10
		case *Outcome:
			*f = Outcome(random.Uint32())
		case *Reason:
			*f = Reason(random.Uint32())
		default:
			panic("Record has a field of a new type")
		}
	}
	return r
}

func randomText(random *rand.Rand) string {
	b := make([]byte, random.IntN(40))
	for i := range b {
		b[i] = byte(random.Uint32())
	}
	return string(b)
}

func TestEveryDamagedBitIsSeen(t *testing.T) {
	whole := encodeWhole(goldenRecord())
	for i := range len(whole) * 8 {
		b := bytes.Clone(whole)
		b[i/8] ^= 1 << (i % 8)
		if r, err := decodeRecord(b); !errors.Is(err, ErrDamaged) {
			t.Errorf("bit %d of byte %d changed: %+v, %v, want ErrDamaged", i%8, i/8, r, err)
		}
	}
	for n := range whole {
		if _, err := decodeRecord(whole[:n]); !errors.Is(err, ErrDamaged) {
			t.Errorf("cut to %d bytes: %v, want ErrDamaged", n, err)
		}
	}
	if _, err := decodeRecord(append(whole, 0)); !errors.Is(err, ErrDamaged) {
		t.Errorf("one byte more: %v, want ErrDamaged", err)
	}
	reliability.Report(t, reliability.Result{Class: "damaged records, decoded", How: "each bit flipped, cut at each byte", Cases: len(whole)*9 + 1})
}

func TestDamagedBodyDoesNotHideItsHead(t *testing.T) {
	b := encodeWhole(goldenRecord())
	b[bytes.Index(b, []byte("request"))]++
	r, _, _, err := decodeHead(b)
	if err != nil || r.Key != "key" {
		t.Errorf("head: %+v, %v", r, err)
	}
}

func TestIDsSortByKeyOriginAndScope(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	seen := make(map[string]ID)
	for range 10_000 {
		short := func() string { return strings.Repeat(string(rune(random.IntN(3))), random.IntN(3)) }
		id := ID{short(), short(), short()}
		b := encodeID(id)
		if back, err := decodeID(b); err != nil || back != id {
			t.Fatalf("decoded %+v, %v, want %+v", back, err, id)
		}
		if other, ok := seen[string(b)]; ok && other != id {
			t.Fatalf("%+v and %+v are encoded alike", id, other)
		}
		seen[string(b)] = id
		for _, prefix := range [][]byte{encodePrefix(id.Key), encodePrefix(id.Key, id.Origin)} {
			if !bytes.HasPrefix(b, prefix) {
				t.Fatalf("%q does not begin with %q", b, prefix)
			}
		}
	}
	if got := string(encodeID(ID{"k", "https://x", "s"})); got != "k\x00https://x\x00s" {
		t.Errorf("an ordinary ID is encoded as %q", got)
	}
}

func FuzzRecord(f *testing.F) {
	f.Add(encodeWhole(goldenRecord()), false)
	f.Add(encodeWhole(new(Record)), true)
	f.Add([]byte{recordVersion, 0xff, 0xff, 0xff, 0xff}, true)
	f.Fuzz(func(t *testing.T, b []byte, repair bool) {
		if repair { // let more than checksums be tested
			repairChecksums(b)
		}
		r, err := decodeRecord(b)
		if err != nil {
			if !errors.Is(err, ErrDamaged) {
				t.Fatalf("%v is not ErrDamaged", err)
			}
		} else if again, err := decodeRecord(encodeWhole(r)); err != nil || !reflect.DeepEqual(again, r) {
			t.Fatalf("decoded %+v, encoded and decoded again %+v, %v", r, again, err)
		}
		if id, err := decodeID(b); err == nil && !bytes.Equal(encodeID(id), b) {
			t.Fatalf("%q is decoded as %+v", b, id)
		}
		if s, err := decodeState(b); err == nil {
			if again, err := decodeState(s.encode()); err != nil || again != s {
				t.Fatalf("state %+v, again %+v, %v", s, again, err)
			}
		}
	})
}

func repairChecksums(b []byte) {
	repair := func(from, to int) {
		if from <= to && to+checksumSize <= len(b) {
			binary.BigEndian.PutUint32(b[to:], crc32.Checksum(b[from:to], castagnoli))
		}
	}
	if len(b) < recordPrefix+checksumSize {
		return
	}
	size := int(binary.BigEndian.Uint32(b[1:])) % (len(b) - recordPrefix - checksumSize + 1)
	binary.BigEndian.PutUint32(b[1:], uint32(size))
	b[0] = recordVersion
	repair(0, recordPrefix+size)
	repair(recordPrefix+size+checksumSize, len(b)-checksumSize)
}
