package oncehttp

import (
	"encoding/binary"
	"fmt"
	"net/http"
	"slices"
	"strings"
)

// The parts of a record that only the client reads, in the order in which they
// are written. Their encoding is part of format 1: a list of length-prefixed
// fields, to which later versions may append.

// storedMeta says what an operation is, without its content.
type storedMeta struct {
	Method, URL, Host string
	Metadata          map[string]string
	Detail            string // last error, for people
}

// storedRequest is what a resumed attempt sends.
type storedRequest struct {
	Header   http.Header
	Withheld []string // names of headers that carry credentials; those in Header are not stored
	HasBody  bool
	Body     []byte
}

// storedAnswer is the answer that settled the operation.
type storedAnswer struct {
	Status  int
	Proto   string
	Header  http.Header
	HasBody bool // false: the body was not kept
	Body    []byte
}

// size is about how many bytes appendTo appends.
func (m *storedMeta) size() int { return 64 + len(m.URL) + 32*len(m.Metadata) + len(m.Detail) }

func (m *storedMeta) appendTo(e *encoder) {
	e.string(m.Method)
	e.string(m.URL)
	e.string(m.Host)
	e.uint(len(m.Metadata))
	var buf [16]string
	names := buf[:0]
	for name := range m.Metadata {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		e.string(name)
		e.string(m.Metadata[name])
	}
	e.string(m.Detail)
}

func decodeMeta(b []byte) (m storedMeta, err error) {
	d := decoder{b: b}
	m.Method, m.URL, m.Host = d.string(), d.string(), d.string()
	if n := d.count(); n > 0 {
		m.Metadata = make(map[string]string, n)
		for range n {
			k := d.string()
			m.Metadata[k] = d.string()
		}
	}
	m.Detail = d.string()
	return m, d.failed("meta")
}

func (r *storedRequest) size() int { return 256 + len(r.Body) }

func (r *storedRequest) appendTo(e *encoder) {
	e.header(r.Header, r.Withheld)
	e.strings(r.Withheld)
	e.bool(r.HasBody)
	e.bytes(r.Body)
}

func decodeRequest(b []byte) (r storedRequest, err error) {
	d := decoder{b: b}
	r.Header = d.header()
	r.Withheld = d.strings()
	r.HasBody = d.bool()
	r.Body = d.bytes()
	return r, d.failed("request")
}

func (a *storedAnswer) size() int { return 512 + len(a.Body) }

func (a *storedAnswer) appendTo(e *encoder) {
	e.uint(a.Status)
	e.string(a.Proto)
	e.header(a.Header, nil)
	e.bool(a.HasBody)
	e.bytes(a.Body)
}

func decodeAnswer(b []byte) (a storedAnswer, err error) {
	d := decoder{b: b}
	a.Status = d.uint()
	a.Proto = d.string()
	a.Header = d.header()
	a.HasBody = d.bool()
	a.Body = d.bytes()
	return a, d.failed("answer")
}

type encoder []byte

func (e *encoder) uint(n int) { *e = binary.AppendUvarint(*e, uint64(n)) }

func (e *encoder) bool(v bool) {
	if v {
		e.uint(1)
	} else {
		e.uint(0)
	}
}

func (e *encoder) string(s string) {
	e.uint(len(s))
	*e = append(*e, s...)
}

func (e *encoder) bytes(b []byte) {
	e.uint(len(b))
	*e = append(*e, b...)
}

func (e *encoder) strings(list []string) {
	e.uint(len(list))
	for _, s := range list {
		e.string(s)
	}
}

// header appends all but the headers in without.
func (e *encoder) header(h http.Header, without []string) {
	var buf [16]string
	names := buf[:0]
	for name := range h {
		if !slices.Contains(without, name) {
			names = append(names, name)
		}
	}
	slices.Sort(names) // the encoding depends on the content alone
	e.uint(len(names))
	for _, name := range names {
		e.string(name)
		e.strings(h[name])
	}
}

// A decoder reads what an encoder wrote. After the first fault it returns zero
// values.
type decoder struct {
	b   []byte
	bad bool
}

func (d *decoder) uint() int {
	n, size := binary.Uvarint(d.b)
	if d.bad || size <= 0 || n > 1<<40 {
		d.bad = true
		return 0
	}
	d.b = d.b[size:]
	return int(n)
}

// count reads a number of items, each of which takes at least one byte.
func (d *decoder) count() int {
	n := d.uint()
	if n > len(d.b) {
		d.bad = true
		return 0
	}
	return n
}

func (d *decoder) bool() bool { return d.uint() == 1 }

func (d *decoder) bytes() []byte {
	n := d.count()
	b := d.b[:n:n]
	d.b = d.b[n:]
	return b
}

func (d *decoder) string() string { return string(d.bytes()) }

func (d *decoder) strings() []string {
	n := d.count()
	if n == 0 {
		return nil
	}
	list := make([]string, 0, n)
	for range n {
		list = append(list, d.string())
	}
	return list
}

func (d *decoder) header() http.Header {
	n := d.count()
	h := make(http.Header, n)
	for range n {
		name := d.string()
		h[name] = d.strings()
	}
	return h
}

func (d *decoder) failed(what string) error {
	if d.bad {
		return fmt.Errorf("%w: %s cannot be decoded", ErrDamaged, what)
	}
	return nil
}

// credentialWords are the parts of header names that say credential. A header
// is not stored if its name contains one.
var credentialWords = []string{
	"authorization", "cookie", "token", "secret", "api-key", "apikey", "signature", "session", "password", "credential",
}

// credentialName reports whether a header of this name carries credentials.
func credentialName(name string) bool {
	name = strings.ToLower(name)
	return slices.ContainsFunc(credentialWords, func(w string) bool { return strings.Contains(name, w) })
}
