package oncehttp_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/internal/reliability"
)

// What a request can carry, by what becomes of it. Every value is one that can be
// found wherever it turns up.

// neverStored are headers that carry credentials, and are kept nowhere.
var neverStored = map[string]string{
	"Authorization": "Bearer hush-authorization", "Proxy-Authorization": "Basic hush-proxy", "Cookie": "sid=hush-cookie",
	"X-Api-Key": "hush-api-key", "Apikey": "hush-apikey", "X-Auth-Token": "hush-token", "X-Client-Secret": "hush-secret",
	"X-Signature": "hush-signature", "Session-Id": "hush-session", "X-Password": "hush-password", "X-Amz-Credential": "hush-credential",
	"X-Pin": "hush-pin", // by Options.WithheldHeaders
}

const (
	secretUser, secretPassword = "hush-user", "hush-userinfo" // in the URL
	secretSetCookie            = "hush-set-cookie"            // of an answer

	// The rest is part of the request or the answer, and is stored to be sent or
	// told again: in the clear, unless SealingKeys are set.
	secretQuery    = "hush-query"
	secretHost     = "hush-host-header"
	secretHeader   = "hush-header"
	secretAllowed  = "hush-allowed" // of a header that Options.StoredHeaders names
	secretBody     = "hush-body"
	secretMetadata = "hush-metadata"
	secretAnswer   = "hush-answer"
	secretReply    = "hush-reply-header"

	// These are the identity of the operation, which no sealing hides.
	openKey, openScope, openOrigin = "open-key", "open-scope", "open.test"
)

func storedSecrets() []string {
	return []string{secretQuery, secretHost, secretHeader, secretAllowed, secretBody, secretMetadata, secretAnswer, secretReply}
}

func credentials() []string {
	secrets := []string{secretUser, secretPassword, secretSetCookie}
	for _, v := range neverStored {
		secrets = append(secrets, v[strings.Index(v, "hush"):])
	}
	return secrets
}

// holds reports whether text has a secret, as it is or encoded as in a header.
func holds(text []byte, secret string) bool {
	basic := base64.StdEncoding.EncodeToString([]byte(secretUser + ":" + secretPassword))
	return bytes.Contains(text, []byte(secret)) || (secret == secretUser || secret == secretPassword) && bytes.Contains(text, []byte(basic[:20]))
}

// errTalks is in the error of a transport that quotes the URL in what it says. It
// is told as it is, but neither logged nor stored.
var errTalks = errors.New("a transport that talks")

// A vault is a client whose requests are full of secrets, and all that can be
// heard of it: its log, its hooks, its errors.
type vault struct {
	t      *testing.T
	path   string
	client *oncehttp.Client
	next   func(*http.Request) (*http.Response, error) // what becomes of attempts

	mu   sync.Mutex
	log  bytes.Buffer // of the logger
	said bytes.Buffer // traces, infos, stats and errors of the library
}

func (v *vault) Write(p []byte) (int, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.log.Write(p)
}

func (v *vault) say(what ...any) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, w := range what {
		switch x := w.(type) {
		case oncehttp.Info:
			x.URL, x.Metadata = "", nil // the caller's own, and told as such
			w = x
		case error: // around it is net/http's *url.Error, which has the URL
			if u, ok := errors.AsType[*url.Error](x); ok {
				w = u.Err
			}
			if errors.Is(x, errTalks) {
				continue
			}
		}
		fmt.Fprintf(&v.said, "%v %+v %#v\n", w, w, w)
	}
}

func (v *vault) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Body != nil {
		_, _ = io.Copy(io.Discard, req.Body)
		req.Body.Close()
	}
	return v.next(req)
}

func replyWith(status int) func(*http.Request) (*http.Response, error) {
	return func(req *http.Request) (*http.Response, error) {
		return &http.Response{
			StatusCode: status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Request: req,
			Header: http.Header{"Set-Cookie": {"jar=" + secretSetCookie}, "X-Reply": {secretReply}},
			Body:   io.NopCloser(strings.NewReader(secretAnswer)), ContentLength: -1,
		}, nil
	}
}

func newVault(t *testing.T, ring ...[]byte) *vault {
	t.Helper()
	v := &vault{t: t, path: filepath.Join(t.TempDir(), "once.db"), next: replyWith(200)}
	v.open(ring...)
	return v
}

func (v *vault) open(ring ...[]byte) {
	v.t.Helper()
	jar, err := cookiejar.New(nil)
	if err != nil {
		v.t.Fatal(err)
	}
	trace := &oncehttp.Trace{
		Begun:        func(i oncehttp.Info) { v.say(i) },
		AttemptStart: func(i oncehttp.AttemptInfo) { v.say(i) },
		AttemptDone:  func(i oncehttp.AttemptInfo) { i.Err = nil; v.say(i) }, // the transport's
		Retry:        func(i oncehttp.RetryInfo) { i.Err = nil; v.say(i) },
		Settled:      func(i oncehttp.Info) { v.say(i) },
		StoreFailed:  func(i oncehttp.Info, err error) { v.say(i, err) },
		Breaker:      func(i oncehttp.BreakerInfo) { v.say(i) },
	}
	v.client, err = oncehttp.Open(v.path, &oncehttp.Options{
		HTTPClient: &http.Client{Transport: v, Jar: jar}, MaxAttempts: 2, Trace: trace,
		Logger:        slog.New(slog.NewJSONHandler(v, &slog.HandlerOptions{Level: slog.LevelDebug - 10})),
		StoredHeaders: []string{"X-Session-Hint"}, WithheldHeaders: []string{"x-pin"}, SealingKeys: ring, MaxBodyBytes: 1000,
	})
	if err != nil {
		v.t.Fatal(err)
	}
}

// send sends a request with all secrets, under a key.
func (v *vault) send(ctx context.Context, key string, change ...func(*http.Request)) (*oncehttp.Operation, error) {
	v.t.Helper()
	ctx, op := oncehttp.Start(ctx, oncehttp.Op{Key: key, Scope: openScope, Metadata: map[string]string{"m": secretMetadata}})
	form := url.Values{"password": {secretBody}, "card[number]": {secretBody}}
	target := "https://" + secretUser + ":" + secretPassword + "@" + openOrigin + "/v1/x?api_key=" + secretQuery + "#hush-fragment"
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, target, strings.NewReader(form.Encode()))
	if err != nil {
		v.t.Fatal(err)
	}
	for name, value := range neverStored {
		req.Header.Set(name, value)
	}
	req.Header.Set("X-Note", secretHeader)
	req.Header.Set("X-Session-Hint", secretAllowed)
	req.Host = secretHost
	for _, c := range change {
		c(req)
	}
	resp, err := v.client.Do(req)
	if err == nil {
		_, _ = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	v.say(err, op.Info())
	return op, err
}

// work brings operations into every state, and provokes every error.
func (v *vault) work() {
	t, ctx := v.t, v.t.Context()
	t.Helper()
	quoting := func(req *http.Request) (*http.Response, error) {
		return nil, fmt.Errorf("%w: %w", errTalks, &url.Error{Op: "Post", URL: req.URL.String(), Err: io.ErrUnexpectedEOF})
	}
	for i, next := range []func(*http.Request) (*http.Response, error){
		replyWith(200), replyWith(303), replyWith(402), replyWith(500), replyWith(409), replyWith(302),
		func(*http.Request) (*http.Response, error) { return nil, io.ErrUnexpectedEOF }, quoting,
	} {
		for _, ack := range []bool{true, false} {
			v.next = next
			op, _ := v.send(ctx, fmt.Sprintf("%s-%d-%v", openKey, i, ack))
			if ack {
				_ = op.Ack(ctx)
			}
		}
	}
	v.next = replyWith(200)
	long := func(r *http.Request) {
		r.Body, r.ContentLength = io.NopCloser(strings.NewReader(strings.Repeat(secretBody, 200))), -1
	}
	for _, bad := range []func(*http.Request){
		long,
		func(r *http.Request) { r.Header.Set("X-Note", secretHeader+"\n") },
		func(r *http.Request) { r.Header.Set("Authorization", "Bearer hush-authorization\x00") },
		func(r *http.Request) {
			r.Body = io.NopCloser(strings.NewReader("other " + secretBody))
			r.ContentLength = -1
		}, // ErrKeyReused
		func(r *http.Request) { r.URL.RawQuery += "2" },
	} {
		if _, err := v.send(ctx, openKey+"-0-true", bad); err == nil {
			t.Error("a bad request was sent")
		}
	}
	if _, err := v.send(ctx, openKey+" and blank"); err == nil {
		t.Error("a bad key was sent")
	}
	left, leave := context.WithCancel(ctx)
	var call sync.WaitGroup
	v.next = func(req *http.Request) (*http.Response, error) {
		<-req.Context().Done()
		return nil, req.Context().Err()
	}
	call.Go(func() { _, _ = v.send(left, openKey+"-left") })
	synctest.Wait()
	leave()
	call.Wait()
	v.next = replyWith(200)
	sum, err := v.client.Resume(ctx, oncehttp.Handler{
		Settled: func(_ context.Context, i oncehttp.Info, _ *http.Response) error { v.say(i); return nil },
		Before:  func(context.Context, oncehttp.Info) oncehttp.Decision { return oncehttp.Send }, // without credentials
	})
	v.say(sum, err)
	for info, err := range v.client.Operations(ctx, oncehttp.Filter{}) {
		v.say(info, err)
		_, err = v.client.Redrive(ctx, info.ID)
		v.say(err)
	}
	stats, err := v.client.Stats(ctx)
	v.say(stats, err)
	infos, err := v.client.Lookup(ctx, openKey+"-0-true")
	v.say(err)
	for _, i := range infos {
		v.say(i, v.client.Forget(ctx, i.ID))
	}
}

func (v *vault) file() []byte {
	v.t.Helper()
	b, err := os.ReadFile(v.path)
	if err != nil {
		v.t.Fatal(err)
	}
	return b
}

func sealingKey(n byte) []byte { return bytes.Repeat([]byte{n}, 32) }

// TestSecretsStayWhereTheyBelong searches the bytes of the file, those of freed
// pages included, the log, the traces and the errors.
//
// Not protected are: the key, the origin and the scope of an operation, its
// outcome and times, in the file even when it is sealed; request and answer in a
// file that is not sealed; the URL in the *url.Error that net/http puts around an
// error, in Info.URL, and in what a transport says.
func TestSecretsStayWhereTheyBelong(t *testing.T) {
	count := reliability.Result{Class: "secrets", How: "searched in the file, the log, traces, errors, Info and Stats; plain and sealed"}
	for name, ring := range map[string][][]byte{"plain": nil, "sealed": {sealingKey(1)}} {
		synctest.Test(t, func(t *testing.T) {
			v := newVault(t, ring...)
			v.work()
			running := v.file()
			if err := v.client.Close(); err != nil {
				t.Error(err)
			}
			file := append(running, v.file()...)
			check := func(where string, text []byte, secret string, want bool) {
				t.Helper()
				count.Cases++
				if got := holds(text, secret); got != want {
					t.Errorf("%s: %s has %q: %v, want %v", name, where, secret, got, want)
					if got {
						at := bytes.Index(text, []byte(secret))
						t.Logf("%q", text[max(0, at-200):min(len(text), at+100)])
						count.ToldFalsely++
					}
				}
			}
			for _, secret := range append(credentials(), "hush-fragment") {
				check("the file", file, secret, false)
				check("the log", v.log.Bytes(), secret, false)
				check("what is told", v.said.Bytes(), secret, false)
			}
			for _, secret := range storedSecrets() {
				check("the file", file, secret, ring == nil)
				check("the log", v.log.Bytes(), secret, false)
				check("what is told", v.said.Bytes(), secret, false)
			}
			for _, open := range []string{openKey, openScope, openOrigin} {
				check("the file", file, open, true)
			}
			check("the log", v.log.Bytes(), openKey, true) // or nothing was logged
		})
	}
	reliability.Report(t, count)
}

// TestAProxysPasswordIsNotTold: it is in the URL of the transport's Proxy.
func TestAProxysPasswordIsNotTold(t *testing.T) {
	var log bytes.Buffer
	proxy := &url.URL{Scheme: "http", User: url.UserPassword(secretUser, secretPassword), Host: "127.0.0.1:1"}
	path := filepath.Join(t.TempDir(), "once.db")
	c, err := oncehttp.Open(path, &oncehttp.Options{
		HTTPClient: &http.Client{Transport: &http.Transport{Proxy: http.ProxyURL(proxy)}}, MaxAttempts: 1,
		Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.Post("https://api.test/x", "text/plain", strings.NewReader("x"))
	stats, _ := c.Stats(t.Context())
	_ = c.Close()
	file, readErr := os.ReadFile(path)
	if err == nil || readErr != nil {
		t.Fatal(err, readErr)
	}
	for where, text := range map[string][]byte{"the log": log.Bytes(), "the error": fmt.Appendf(nil, "%v %+v", err, err), "the file": file, "Stats": fmt.Appendf(nil, "%+v", stats)} {
		if holds(text, secretUser) || holds(text, secretPassword) {
			t.Errorf("%s has the proxy's password: %s", where, text)
		}
	}
}

// A sealed store is used with one ring of keys after another.
func TestSealingKeysCanBeSetLostAndRotated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one, two := sealingKey(1), sealingKey(2)
		var sent []string // keys
		v := newVault(t)
		stuck := func(req *http.Request) (*http.Response, error) {
			<-req.Context().Done()
			return nil, req.Context().Err()
		}
		begin := func(key string) {
			t.Helper()
			v.next = stuck
			var call sync.WaitGroup
			call.Go(func() {
				_, _ = v.send(t.Context(), key, func(r *http.Request) { r.Header, r.URL.User = http.Header{}, nil })
			})
			synctest.Wait()
			if err := v.client.Close(); err != nil { // it stays pending
				t.Error(err)
			}
			call.Wait()
		}
		resume := func(ring ...[]byte) oncehttp.Summary {
			t.Helper()
			v.open(ring...)
			v.next = func(req *http.Request) (*http.Response, error) {
				v.mu.Lock()
				sent = append(sent, req.Header.Get("Idempotency-Key"))
				v.mu.Unlock()
				return replyWith(200)(req)
			}
			sum, err := v.client.Resume(t.Context(), oncehttp.Handler{
				Settled: func(context.Context, oncehttp.Info, *http.Response) error { return nil },
			})
			if err != nil {
				t.Error(err)
			}
			return sum
		}
		begin("plain")
		v.open(one)
		begin("under-one")
		v.open(two, one)
		begin("under-two")

		sum := resume(two) // one is lost: what it sealed stays as it is
		slices.Sort(sent)
		if sum.Settled != 2 || sum.Failed != 1 || !slices.Equal(sent, []string{"plain", "under-two"}) {
			t.Errorf("without a key: %+v, sent %q", sum, sent)
		}
		for info, err := range v.client.Operations(t.Context(), oncehttp.Filter{}) {
			if !errors.Is(err, oncehttp.ErrSealed) || info.Key != "under-one" {
				t.Errorf("listed without its key: %+v, %v", info, err)
			}
			if _, err := v.client.Redrive(t.Context(), info.ID); !errors.Is(err, oncehttp.ErrSealed) {
				t.Errorf("redriven without its key: %v", err)
			}
		}
		if err := v.client.Close(); err != nil {
			t.Error(err)
		}
		sum = resume(two, one)
		if sum.Settled != 1 || !slices.Contains(sent, "under-one") || len(sent) != 3 {
			t.Errorf("with the key again: %+v, sent %q", sum, sent)
		}
		if err := v.client.Close(); err != nil {
			t.Error(err)
		}
	})
}

// TestSealedPartsCannotBeExchanged: who can write the file and has no key cannot
// make one operation of two.
func TestSealedPartsCannotBeExchanged(t *testing.T) {
	exchanges := map[string]func(a, b *oncehttp.Record){
		"requests":             func(a, b *oncehttp.Record) { a.Request, b.Request = b.Request, a.Request },
		"metadata":             func(a, b *oncehttp.Record) { a.Meta, b.Meta = b.Meta, a.Meta },
		"request and metadata": func(a, _ *oncehttp.Record) { a.Request, a.Meta = a.Meta, a.Request },
		"a bit of a request":   func(a, _ *oncehttp.Record) { a.Request = bytes.Clone(a.Request); a.Request[len(a.Request)-1] ^= 1 },
	}
	count := reliability.Result{Class: "sealed parts exchanged", How: "between operations and between fields, by writing the store"}
	for _, name := range slices.Sorted(maps.Keys(exchanges)) {
		synctest.Test(t, func(t *testing.T) {
			v := newVault(t, sealingKey(1))
			v.next = func(req *http.Request) (*http.Response, error) {
				<-req.Context().Done()
				return nil, req.Context().Err()
			}
			var calls sync.WaitGroup
			for _, key := range []string{"a", "b"} {
				calls.Go(func() {
					_, _ = v.send(t.Context(), key, func(r *http.Request) { r.Header, r.URL.User = http.Header{}, nil })
				})
			}
			synctest.Wait()
			if err := v.client.Close(); err != nil {
				t.Error(err)
			}
			calls.Wait()

			s, err := oncehttp.OpenBolt(v.path)
			if err != nil {
				t.Fatal(err)
			}
			var records []*oncehttp.Record
			list, err := s.List(t.Context(), 0, 10)
			for _, listed := range list {
				r, getErr := s.Get(t.Context(), listed.ID)
				err = errors.Join(err, getErr)
				records = append(records, r)
			}
			if err != nil || len(records) != 2 {
				t.Fatal(records, err)
			}
			exchanges[name](records[0], records[1])
			for _, r := range records {
				r.Epoch++
				err = errors.Join(err, s.Save(t.Context(), *r))
			}
			if err := errors.Join(err, s.Close()); err != nil {
				t.Fatal(err)
			}

			v.open(sealingKey(1))
			sent := map[string]int{}
			v.next = func(req *http.Request) (*http.Response, error) {
				v.mu.Lock()
				sent[req.Header.Get("Idempotency-Key")]++
				v.mu.Unlock()
				return replyWith(200)(req)
			}
			sum, err := v.client.Resume(t.Context(), oncehttp.Handler{
				Settled: func(context.Context, oncehttp.Info, *http.Response) error { return nil },
			})
			if err != nil || sent[records[0].Key] > 0 || sum.Failed+sum.Unknown == 0 {
				t.Errorf("%s exchanged: %+v, sent %v, %v", name, sum, sent, err)
				count.ToldFalsely++
			}
			if err := v.client.Close(); err != nil {
				t.Error(err)
			}
			count.Cases++
		})
	}
	reliability.Report(t, count)
}
