package oncehttp_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/oncehttp/oncehttp"
)

// certificate returns a self-signed one.
func (w *wire) certificate(name string, until time.Time) tls.Certificate {
	w.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		w.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: until.Add(-24 * time.Hour), NotAfter: until,
	}
	if name == "127.0.0.1" {
		template.DNSNames, template.IPAddresses = nil, []net.IP{net.IPv4(127, 0, 0, 1)}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		w.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		w.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
}

// TestADistrustedServerIsNotAskedAgain: a TLS handshake that fails for good is
// made once, told as net/http does, and sends nothing.
func TestADistrustedServerIsNotAskedAgain(t *testing.T) {
	secure := func(name string, until time.Time, trusted bool) func(w *wire) (string, *watchedListener) {
		return func(w *wire) (string, *watchedListener) {
			cert := w.certificate(name, until)
			if trusted {
				w.trust(cert.Leaf)
			}
			return w.serve(func(http.ResponseWriter, *http.Request) { w.saw("heard") }, func(s *httptest.Server) {
				s.TLS = &tls.Config{Certificates: []tls.Certificate{cert}}
				s.StartTLS()
			})
		}
	}
	servers := map[string]func(w *wire) (string, *watchedListener){
		"unknown authority": secure("127.0.0.1", time.Now().Add(time.Hour), false),
		"expired":           secure("127.0.0.1", time.Unix(1e9, 0), true),
		"of another host":   secure("example.com", time.Now().Add(time.Hour), true),
		"speaks no TLS": func(w *wire) (string, *watchedListener) {
			u, l := w.serve(func(http.ResponseWriter, *http.Request) {})
			return strings.Replace(u, "http:", "https:", 1), l
		},
	}
	for name, start := range servers {
		play := func(w *wire, header ...string) error {
			u, l := start(w)
			_, err := w.do(w.request("POST", u, strings.NewReader("x"), header...))
			if n := l.accepted.Load(); n != 1 {
				w.Errorf("%d connections", n)
			}
			return err
		}
		playAll(t, []scene{
			{name: name + "/POST", play: func(w *wire) { w.saw("%s", errText(play(w))) }},
			{name: name + "/GET", play: func(w *wire) {
				u, l := start(w)
				w.try(w.request("GET", u, nil))
				w.saw("%d connections", l.accepted.Load())
			}},
		})
		playKeyed(t, scene{name: name + "/keyed POST", play: func(w *wire) {
			err := play(w, "Idempotency-Key", "k")
			told, ok := errors.AsType[*oncehttp.OperationError](err)
			if !ok || told.Outcome != oncehttp.NotSent {
				w.Errorf("told %v", err)
			}
			_, distrusted := errors.AsType[*tls.CertificateVerificationError](err)
			if mismatch := errors.Is(err, http.ErrSchemeMismatch); mismatch == distrusted {
				w.Errorf("told %v", err)
			}
			if s := w.stored(); s != "" {
				w.Errorf("stored %s", s)
			}
		}})
	}
}
