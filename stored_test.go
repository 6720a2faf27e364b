package oncehttp

import (
	"bytes"
	"encoding/hex"
	"errors"
	"net/http"
	"reflect"
	"testing"
)

var storedID = ID{Key: "k", Origin: "https://api.stripe.com", Scope: "live//|"}

func TestStoredPartsComeBackAsTheyWere(t *testing.T) {
	meta := storedMeta{Method: "POST", URL: "https://x/?q=1", Host: "h", Metadata: map[string]string{"a": "1", "": "", "ü": "\x00"}, Detail: "d"}
	if got, err := decodeMeta(encoded(&meta)); err != nil || !reflect.DeepEqual(got, meta) {
		t.Errorf("%+v, %v; want %+v", got, err, meta)
	}
	request := storedRequest{Header: http.Header{"A": {"1", "2"}, "B": {""}}, Withheld: []string{"Authorization"}, HasBody: true, Body: []byte{0, 1, 255}}
	if got, err := decodeRequest(encoded(&request)); err != nil || !reflect.DeepEqual(got, request) {
		t.Errorf("%+v, %v; want %+v", got, err, request)
	}
	answer := storedAnswer{Status: 402, Proto: "HTTP/2.0", Header: http.Header{"A": {"1"}}, HasBody: true, Body: []byte("body")}
	if got, err := decodeAnswer(encoded(&answer)); err != nil || !reflect.DeepEqual(got, answer) {
		t.Errorf("%+v, %v; want %+v", got, err, answer)
	}
}

// The parts are written by one version and read by all later ones.
func TestStoredPartsHaveTheFormatOfVersion1(t *testing.T) {
	request := storedRequest{Header: http.Header{"A": {"1"}}, Withheld: []string{"C"}, HasBody: true, Body: []byte("b")}
	if got, want := encoded(&request), "\x01\x01A\x01\x011\x01\x01C\x01\x01b"; string(got) != want {
		t.Errorf("request %q, want %q", got, want)
	}
	answer := storedAnswer{Status: 200, Proto: "P", Header: http.Header{"A": {"1"}}, HasBody: true, Body: []byte("b")}
	if got, want := encoded(&answer), "\xc8\x01\x01P\x01\x01A\x01\x011\x01\x01b"; string(got) != want {
		t.Errorf("answer %q, want %q", got, want)
	}
	meta := storedMeta{Method: "M", URL: "U", Host: "H", Metadata: map[string]string{"b": "2", "a": "1"}, Detail: "D"}
	if got, want := encoded(&meta), "\x01M\x01U\x01H\x02\x01a\x011\x01b\x012\x01D"; string(got) != want {
		t.Errorf("meta %q, want %q", got, want)
	}
	plain := &sealer{}
	if got, want := plain.seal(storedID, "request", rawPart("part")), "\x01\x70\xfe\x7f\x5epart"; string(got) != want {
		t.Errorf("plain part %q, want %q", got, want)
	}
}

// sealedFormat1 is "part", sealed as a request of storedID under a key of 32 ones.
const sealedFormat1 = "0272cd6e8422c407fb6e84aa49bdbc1db1721cc6632ec58916a7e4ac48d315e675f628d739b1efcb0b"

func TestSealedPartsOfVersion1AreReadable(t *testing.T) {
	sealed, err := hex.DecodeString(sealedFormat1)
	if err != nil {
		t.Fatal(err)
	}
	if part, err := testSealer(t, 1).open(storedID, "request", sealed); err != nil || string(part) != "part" {
		t.Errorf("%q, %v", part, err)
	}
}

func FuzzStoredParts(f *testing.F) {
	f.Add(encoded(&storedRequest{Header: http.Header{"A": {"1"}}, Body: []byte("b")}))
	f.Add(encoded(&storedAnswer{Status: 200, Header: http.Header{"A": {"1"}}, Body: []byte("b")}))
	f.Add(encoded(&storedMeta{Method: "POST", Metadata: map[string]string{"a": "b"}}))
	f.Add(bytes.Repeat([]byte{255}, 20))
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := decodeRequest(b); err == nil {
			for _, name := range r.Withheld { // never stored
				delete(r.Header, name)
			}
			if again, err := decodeRequest(encoded(&r)); err != nil || !reflect.DeepEqual(again, r) {
				t.Errorf("request %+v came back as %+v, %v", r, again, err)
			}
		} else if !errors.Is(err, ErrDamaged) {
			t.Error(err)
		}
		if a, err := decodeAnswer(b); err == nil {
			if again, err := decodeAnswer(encoded(&a)); err != nil || !reflect.DeepEqual(again, a) {
				t.Errorf("answer %+v came back as %+v, %v", a, again, err)
			}
		}
		if m, err := decodeMeta(b); err == nil {
			if again, err := decodeMeta(encoded(&m)); err != nil || !reflect.DeepEqual(again, m) {
				t.Errorf("meta %+v came back as %+v, %v", m, again, err)
			}
		}
		for _, s := range []*sealer{{}, testSealer(t, 1)} {
			if part, err := s.open(storedID, "request", b); err != nil && !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrSealed) {
				t.Errorf("open: %q, %v", part, err)
			}
		}
	})
}

// testSealer returns a sealer with the keys that the bytes stand for.
func testSealer(t *testing.T, keys ...byte) *sealer {
	t.Helper()
	var ring [][]byte
	for _, k := range keys {
		ring = append(ring, bytes.Repeat([]byte{k}, 32))
	}
	s, err := newSealer(ring)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestSealedPartsTellNothingAndCannotBeMoved(t *testing.T) {
	secret := []byte("card=4242424242424242")
	s := testSealer(t, 1)
	sealed := s.seal(storedID, "request", rawPart(secret))
	if bytes.Contains(sealed, secret[:6]) {
		t.Errorf("%q is in the clear", sealed)
	}
	if bytes.Equal(sealed, s.seal(storedID, "request", rawPart(secret))) {
		t.Error("sealing twice gives the same bytes")
	}
	if part, err := s.open(storedID, "request", sealed); err != nil || !bytes.Equal(part, secret) {
		t.Errorf("%q, %v", part, err)
	}
	if part, err := testSealer(t, 2, 1).open(storedID, "request", sealed); err != nil || !bytes.Equal(part, secret) {
		t.Errorf("after rotation: %q, %v", part, err)
	}
	if _, err := testSealer(t, 2).open(storedID, "request", sealed); !errors.Is(err, ErrSealed) {
		t.Errorf("without the key: %v", err)
	}
	if _, err := s.open(storedID, "answer", sealed); !errors.Is(err, ErrDamaged) {
		t.Errorf("as another field: %v", err)
	}
	other := storedID
	other.Key = "other"
	if _, err := s.open(other, "request", sealed); !errors.Is(err, ErrDamaged) {
		t.Errorf("in another operation: %v", err)
	}
	for i := range sealed {
		bad := bytes.Clone(sealed)
		bad[i] ^= 1
		if _, err := s.open(storedID, "request", bad); err == nil {
			t.Errorf("byte %d may be changed", i)
		}
	}
	plain := (&sealer{}).seal(storedID, "request", rawPart(secret))
	if part, err := s.open(storedID, "request", plain); err != nil || !bytes.Equal(part, secret) {
		t.Errorf("stored before sealing was switched on: %q, %v", part, err)
	}
	for i := range plain {
		bad := bytes.Clone(plain)
		bad[i] ^= 1
		if _, err := (&sealer{}).open(storedID, "request", bad); err == nil {
			t.Errorf("byte %d of a plain part may be changed", i)
		}
	}
}

func TestCredentialsAreWithheldByName(t *testing.T) {
	o := &Options{StoredHeaders: []string{"X-Session-Hint"}, WithheldHeaders: []string{"X-Pin"}}
	for _, name := range []string{"Authorization", "Proxy-Authorization", "Cookie", "X-Api-Key", "Apikey", "X-Auth-Token", "Client-Secret", "X-Signature", "Session-Id", "X-Password", "X-Pin", "x-pin"} {
		if !o.secret(name) {
			t.Errorf("%s is stored", name)
		}
	}
	for _, name := range []string{"Content-Type", "Stripe-Version", "Stripe-Account", "Idempotency-Key", "X-Session-Hint", "User-Agent"} {
		if o.secret(name) {
			t.Errorf("%s is withheld", name)
		}
	}
}

func encoded(part sealable) []byte {
	var e encoder
	part.appendTo(&e)
	return e
}

type rawPart []byte

func (p rawPart) size() int { return len(p) }

func (p rawPart) appendTo(e *encoder) { *e = append(*e, p...) }
