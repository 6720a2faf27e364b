package oncehttp

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"net/http"
	"net/url"
	"strings"
	"testing"
)

// Keys made by one version must be found by the next.
func TestKeyForNeverChanges(t *testing.T) {
	for want, parts := range map[string][]string{
		"cf3a3a6f-d320-5e1d-b976-8ac1a78a17ee": {"order", "4711", "capture"},
	} {
		if got := KeyFor(parts...); got != want {
			t.Errorf("KeyFor(%q) = %s, want %s", parts, got, want)
		}
	}
	seen := map[string]string{}
	for _, parts := range [][]string{nil, {""}, {"", ""}, {"ab"}, {"a", "b"}, {"b", "a"}, {"a", "b", ""}, {strings.Repeat("a", 128)}} {
		key := KeyFor(parts...)
		if other, ok := seen[key]; ok {
			t.Errorf("%q and %s have the same key", parts, other)
		}
		seen[key] = strings.Join(parts, ",")
	}
}

func TestFreshKeysAreOrdered(t *testing.T) {
	last := NewKey()
	for range 10_000 {
		key := NewKey()
		if key <= last || len(key) != 36 {
			t.Fatalf("%s after %s", key, last)
		}
		last = key
	}
}

func post(t *testing.T, rawURL, contentType string, header ...string) *http.Request {
	t.Helper()
	req, err := http.NewRequest("POST", rawURL, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", contentType)
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	return req
}

// The fingerprint covers what must not change under a key, and nothing else.
func TestFingerprintCoversWhatMustNotChange(t *testing.T) {
	d := newDigester([32]byte{1})
	base := func() (*http.Request, string) {
		return post(t, "https://api.stripe.com/v1/charges?a=1", "application/x-www-form-urlencoded", "Stripe-Account", "acct_1"), "order=1"
	}
	req, body := base()
	want := d.fingerprint(&Stripe, req, requestURL(req.URL), []byte(body))
	same := map[string]func(*http.Request, *string){
		"nothing":        func(*http.Request, *string) {},
		"Stripe-Version": func(r *http.Request, _ *string) { r.Header.Set("Stripe-Version", "2026-01-01") },
		"Authorization":  func(r *http.Request, _ *string) { r.Header.Set("Authorization", "Bearer rotated") },
		"userinfo":       func(r *http.Request, _ *string) { r.URL.User = url.UserPassword("a", "b") },
		"fragment":       func(r *http.Request, _ *string) { r.URL.Fragment = "f" },
		"key":            func(r *http.Request, _ *string) { r.Header.Set("Idempotency-Key", "other") },
	}
	different := map[string]func(*http.Request, *string){
		"method":         func(r *http.Request, _ *string) { r.Method = "PATCH" },
		"path":           func(r *http.Request, _ *string) { r.URL.Path = "/v1/refunds" },
		"query":          func(r *http.Request, _ *string) { r.URL.RawQuery = "a=2" },
		"host":           func(r *http.Request, _ *string) { r.URL.Host = "api.example.com"; r.Host = r.URL.Host },
		"Host":           func(r *http.Request, _ *string) { r.Host = "other" },
		"Content-Type":   func(r *http.Request, _ *string) { r.Header.Set("Content-Type", "application/json") },
		"Stripe-Account": func(r *http.Request, _ *string) { r.Header.Set("Stripe-Account", "acct_2") },
		"body":           func(_ *http.Request, b *string) { *b += "0" },
	}
	for name, change := range same {
		req, body := base()
		change(req, &body)
		if d.fingerprint(&Stripe, req, requestURL(req.URL), []byte(body)) != want {
			t.Errorf("%s changes the fingerprint", name)
		}
	}
	for name, change := range different {
		req, body := base()
		change(req, &body)
		if d.fingerprint(&Stripe, req, requestURL(req.URL), []byte(body)) == want {
			t.Errorf("%s does not change the fingerprint", name)
		}
	}
	if newDigester([32]byte{2}).fingerprint(&Stripe, req, requestURL(req.URL), []byte(body)) == want {
		t.Error("the fingerprint is not keyed")
	}
}

// Fingerprint and scope are in every record: they must stay the same as long as
// the format does.
func TestDigestsAreThoseOfFormat1(t *testing.T) {
	digest := func(fields ...string) []byte {
		h := hmac.New(sha256.New, append([]byte{1}, make([]byte, 31)...))
		for _, f := range fields {
			h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(f))))
			h.Write([]byte(f))
		}
		return h.Sum(nil)
	}
	d := newDigester([32]byte{1})
	req := post(t, "https://user:pw@api.stripe.com/v1/charges?a=1#f", "text/plain", "Stripe-Account", "acct_1", "X-Token", "t")
	for range 2 { // the second time with what the first has left behind
		sum := d.fingerprint(&Stripe, req, requestURL(req.URL), []byte("order=1"))
		if want := digest("request", "POST", "https://api.stripe.com/v1/charges?a=1", "", "text/plain", "acct_1", "", "order=1"); !bytes.Equal(sum[:], want) {
			t.Errorf("fingerprint %x, want %x", sum, want)
		}
		want := "a|cred:" + hex.EncodeToString(digest("credentials", "X-Token", "t", "user:pw")[:16])
		if got := d.scope("a", req, "", (&Options{}).secret); got != want {
			t.Errorf("scope %s, want %s", got, want)
		}
	}
}

// mime/multipart makes a new boundary for every attempt of an SDK.
func TestMultipartBoundaryIsNotPartOfTheFingerprint(t *testing.T) {
	d := newDigester([32]byte{})
	form := func(boundary, value string) [32]byte {
		body := "--" + boundary + "\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\n" + value + "\r\n--" + boundary + "--\r\n"
		req := post(t, "https://x/", "multipart/form-data; boundary="+boundary)
		return d.fingerprint(&unlisted, req, requestURL(req.URL), []byte(body))
	}
	if form("aaaa", "v") != form("bbbb", "v") {
		t.Error("another boundary, another fingerprint")
	}
	if form("aaaa", "v") == form("aaaa", "w") {
		t.Error("another value, the same fingerprint")
	}
}

func TestScopeSeparatesAccounts(t *testing.T) {
	d := newDigester([32]byte{1})
	o := &Options{}
	scope := func(stated string, header ...string) string {
		req := post(t, "https://api.stripe.com/v1/charges", "", header...)
		return d.scope(Stripe.account(req.Header), req, stated, o.secret)
	}
	live := scope("", "Authorization", "Bearer sk_live_abc")
	seen := map[string]bool{}
	for _, s := range []string{
		live, scope("", "Authorization", "Bearer sk_live_other"), scope("", "Authorization", "Bearer sk_test_abc"),
		scope("", "Authorization", "Bearer sk_live_abc", "Stripe-Account", "acct_1"), scope(""),
		scope("a", "Authorization", "Bearer sk_live_abc"), scope("b", "Authorization", "Bearer sk_live_abc"),
	} {
		if seen[s] {
			t.Errorf("scope %q twice", s)
		}
		seen[s] = true
		if strings.Contains(s, "abc") {
			t.Errorf("scope %q has a credential in it", s)
		}
	}
	if live != scope("", "Authorization", "Bearer sk_live_abc", "Cookie", "changes=1") {
		t.Error("cookies change the scope")
	}
	if scope("a", "Authorization", "Bearer sk_live_abc") != scope("a", "Authorization", "Bearer sk_live_rotated") {
		t.Error("rotated credentials change a stated scope")
	}
	if accountOf(live) != "live//" || accountOf(scope("x")) != "//" {
		t.Errorf("accounts %q and %q", accountOf(live), accountOf(scope("x")))
	}
}

func TestOriginIsCanonical(t *testing.T) {
	for raw, want := range map[string]string{
		"https://API.stripe.com/v1": "https://api.stripe.com",
		"https://a:443/":            "https://a",
		"http://a:80":               "http://a",
		"http://a:443":              "http://a:443",
		"HTTPS://a:8443":            "https://a:8443",
		"https://[::1]:443":         "https://[::1]",
	} {
		u, err := url.Parse(raw)
		if err != nil {
			t.Fatal(err)
		}
		if got := originOf(u); got != want {
			t.Errorf("originOf(%s) = %s, want %s", raw, got, want)
		}
	}
}
