package oncehttp

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"time"
)

// A record is encoded, in format 1, as
//
//	version   1 byte: recordVersion
//	size      4 bytes, big-endian: length of the head
//	head      everything but the content of Request and Answer
//	checksum  4 bytes: CRC-32C of all that comes before
//	request   its bytes and their CRC-32C; nothing if it is nil
//	answer    likewise
//
// The head says how long the other two are, so a listing never touches the
// pages they are on. It begins with Seq, 8 bytes, big-endian, which the store
// assigns when the rest is encoded already. The other numbers are varints, times
// are microseconds since 1970, and a string, an opaque part or a part's length is
// preceded by, or given as, its length; opaque ones and lengths of parts plus one,
// since nil, 0, differs from empty.
const recordVersion = 1

const (
	recordPrefix = 1 + 4 // version and size
	seqSize      = 8
	checksumSize = 4
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// A part is an opaque part of a record with its checksum. A nil one has nil
// content.
type part struct {
	content []byte
	sum     uint32
}

func newPart(content []byte) part {
	return part{content, crc32.Checksum(content, castagnoli)}
}

// storedPart returns the part that was stored as b: its content and its checksum.
func storedPart(b []byte) part {
	n := len(b) - checksumSize
	if n < 0 {
		return part{b[:0], 1} // not intact: the checksum of nothing is 0
	}
	return part{b[:n:n], binary.BigEndian.Uint32(b[n:])}
}

func (p part) isNil() bool { return p.content == nil }

func (p part) intact() bool { return crc32.Checksum(p.content, castagnoli) == p.sum }

// open returns a copy of the content.
func (p part) open(what string) ([]byte, error) {
	if p.isNil() {
		return nil, nil
	}
	if !p.intact() {
		return nil, fmt.Errorf("%w: checksum of a record's %s is wrong", ErrDamaged, what)
	}
	return append([]byte{}, p.content...), nil
}

// appendTo appends the part as it is stored.
func (p part) appendTo(b []byte) []byte {
	if p.isNil() {
		return b
	}
	return binary.BigEndian.AppendUint32(append(b, p.content...), p.sum)
}

// length returns the length of p as a head gives it.
func (p part) length() uint64 {
	if p.isNil() {
		return 0
	}
	return uint64(len(p.content)) + 1
}

// checked cuts off the checksum that ends b and compares it.
func checked(b []byte) ([]byte, bool) {
	p := storedPart(b)
	if !p.intact() {
		return nil, false
	}
	return p.content, true
}

// appendRecord appends r with the given parts instead of its Request and Answer.
func appendRecord(b []byte, r *Record, request, answer part) []byte {
	at := len(b)
	e := headEncoder(append(b, recordVersion, 0, 0, 0, 0)) // and its size
	e = append(e, make([]byte, seqSize)...)
	e.text(r.Key)
	e.text(r.Origin)
	e.text(r.Scope)
	e.number(r.Epoch)
	e.text(r.Owner)
	e.number(r.Era)
	e = append(e, byte(r.Outcome), byte(r.Reason))
	var flags uint64
	for i, set := range r.flags() {
		if *set {
			flags |= 1 << i
		}
	}
	e.number(flags)
	e.signed(int64(r.Attempts))
	e.signed(int64(r.Claims))
	e.signed(int64(r.Status))
	for _, t := range r.times() {
		e.signed(t.UnixMicro())
	}
	e = append(e, r.Fingerprint[:]...)
	e.opaque(r.Meta)
	e.number(request.length())
	e.number(answer.length())
	binary.BigEndian.PutUint32(e[at+1:], uint32(len(e)-at-recordPrefix))
	e = append(e, make([]byte, checksumSize)...)
	setSeq(e[at:], r.Seq)
	return answer.appendTo(request.appendTo(e))
}

// setSeq gives an encoded record another Seq.
func setSeq(b []byte, seq uint64) {
	binary.BigEndian.PutUint64(b[recordPrefix:], seq)
	end := recordPrefix + binary.BigEndian.Uint32(b[1:])
	binary.BigEndian.PutUint32(b[end:], crc32.Checksum(b[:end], castagnoli))
}

// decodeHead decodes all but Request and Answer, which it returns as parts that
// refer to b.
func decodeHead(b []byte) (r *Record, request, answer part, err error) {
	r = new(Record)
	request, answer, err = r.decodeHead(b)
	if err != nil {
		return nil, part{}, part{}, err
	}
	return r, request, answer, nil
}

// decodeHead decodes into r. Strings that r has already are not made anew.
func (r *Record) decodeHead(b []byte) (request, answer part, err error) {
	damaged := func(detail string) (part, part, error) {
		return part{}, part{}, fmt.Errorf("%w: a record %s", ErrDamaged, detail)
	}
	if len(b) < recordPrefix {
		return damaged("is cut short")
	}
	if b[0] != recordVersion {
		return damaged(fmt.Sprintf("is of version %d", b[0]))
	}
	size := uint64(binary.BigEndian.Uint32(b[1:]))
	if size < seqSize || size > uint64(len(b)-recordPrefix) || uint64(len(b)-recordPrefix)-size < checksumSize {
		return damaged("is cut short")
	}
	end := recordPrefix + int(size)
	if _, ok := checked(b[:end+checksumSize]); !ok {
		return damaged("has a wrong checksum")
	}

	d := headDecoder{b: b[recordPrefix+seqSize : end]}
	r.Seq = binary.BigEndian.Uint64(b[recordPrefix:])
	r.Key, r.Origin, r.Scope = d.text(r.Key), d.text(r.Origin), d.text(r.Scope)
	r.Epoch, r.Owner, r.Era = d.number(), d.text(r.Owner), d.number()
	r.Outcome, r.Reason = Outcome(d.byte()), Reason(d.byte())
	flags := d.number()
	for i, set := range r.flags() {
		*set = flags>>i&1 != 0
	}
	r.Attempts, r.Claims, r.Status = int(d.signed()), int(d.signed()), int(d.signed())
	for _, t := range r.times() {
		*t = time.UnixMicro(d.signed()).UTC()
	}
	copy(r.Fingerprint[:], d.bytes(uint64(len(r.Fingerprint))))
	r.Meta = d.opaque()
	lengths := [2]uint64{d.number(), d.number()}
	if d.bad || len(d.b) != 0 {
		return damaged("cannot be decoded")
	}

	rest := b[end+checksumSize:]
	var parts [2]part
	for i, n := range lengths {
		if n == 0 {
			continue
		}
		n-- // see part.length
		if n > uint64(len(rest)) || uint64(len(rest))-n < checksumSize {
			return damaged("is cut short")
		}
		cut := int(n) + checksumSize
		parts[i], rest = storedPart(rest[:cut]), rest[cut:]
	}
	if len(rest) != 0 {
		return damaged("is longer than it should be")
	}
	return parts[0], parts[1], nil
}

// decodeRecord decodes a record with all its parts, all of them copied.
func decodeRecord(b []byte) (*Record, error) {
	r, request, answer, err := decodeHead(b)
	if err != nil {
		return nil, err
	}
	if r.Request, err = request.open("request"); err != nil {
		return nil, err
	}
	if r.Answer, err = answer.open("answer"); err != nil {
		return nil, err
	}
	return r, nil
}

// flags returns r's booleans in the order of their bits.
func (r *Record) flags() [6]*bool {
	return [...]*bool{&r.Acked, &r.Told, &r.KeyGiven, &r.ScopeStated, &r.AckDue, &r.Uncertain}
}

// times returns r's times in the order in which they are written.
func (r *Record) times() [7]*time.Time {
	return [...]*time.Time{&r.FirstSent, &r.ResendUntil, &r.NotBefore, &r.RestUntil, &r.Updated, &r.AnswerUntil, &r.KeepUntil}
}

type headEncoder []byte

func (e *headEncoder) number(n uint64) { *e = binary.AppendUvarint(*e, n) }

func (e *headEncoder) signed(n int64) { *e = binary.AppendVarint(*e, n) }

func (e *headEncoder) text(s string) {
	e.number(uint64(len(s)))
	*e = append(*e, s...)
}

func (e *headEncoder) opaque(b []byte) {
	if b == nil {
		e.number(0)
		return
	}
	e.number(uint64(len(b)) + 1)
	*e = append(*e, b...)
}

// A headDecoder reads what a headEncoder wrote. After the first fault it
// returns zero values.
type headDecoder struct {
	b   []byte
	bad bool
}

func (d *headDecoder) number() uint64 {
	n, size := binary.Uvarint(d.b)
	d.skip(size)
	if d.bad {
		return 0
	}
	return n
}

func (d *headDecoder) signed() int64 {
	n, size := binary.Varint(d.b)
	d.skip(size)
	if d.bad {
		return 0
	}
	return n
}

func (d *headDecoder) skip(size int) {
	if size <= 0 {
		d.bad, d.b = true, nil
		return
	}
	d.b = d.b[size:]
}

// bytes returns the next n bytes, not copied.
func (d *headDecoder) bytes(n uint64) []byte {
	if n > uint64(len(d.b)) {
		d.bad, d.b = true, nil
		return nil
	}
	b := d.b[:n]
	d.b = d.b[n:]
	return b
}

func (d *headDecoder) byte() byte {
	if b := d.bytes(1); b != nil {
		return b[0]
	}
	return 0
}

func (d *headDecoder) text(like string) string {
	b := d.bytes(d.number())
	if string(b) == like { // compared without an allocation
		return like
	}
	return string(b)
}

func (d *headDecoder) opaque() []byte {
	n := d.number()
	if n == 0 {
		return nil
	}
	return append([]byte{}, d.bytes(n-1)...)
}

// encodeID returns an ID as the key of a bucket: key, origin and scope, each but
// the last followed by a zero byte. Bytes that would be taken for an end are
// escaped, so any string is safe; real keys have none.
func encodeID(id ID) []byte {
	return appendID(make([]byte, 0, len(id.Key)+len(id.Origin)+len(id.Scope)+2), id)
}

func appendID(b []byte, id ID) []byte {
	b = append(appendEscaped(b, id.Key), 0)
	b = append(appendEscaped(b, id.Origin), 0)
	return appendEscaped(b, id.Scope)
}

// encodes reports whether b is the encoded id.
func encodes(b []byte, id ID) bool {
	var buf [192]byte // on the stack
	return bytes.Equal(appendID(buf[:0], id), b)
}

// encodePrefix returns what the encoded IDs with these beginnings begin with.
func encodePrefix(fields ...string) []byte {
	var b []byte
	for _, s := range fields {
		b = append(appendEscaped(b, s), 0)
	}
	return b
}

func appendEscaped(b []byte, s string) []byte {
	for i := range len(s) {
		if s[i] <= 1 {
			return appendEscaped(append(append(b, s[:i]...), 1, s[i]+1), s[i+1:])
		}
	}
	return append(b, s...)
}

func decodeID(b []byte) (ID, error) {
	var fields [3][]byte
	n := 0
	for i := 0; i < len(b); i++ {
		switch c := b[i]; {
		case c == 0 && n < 2:
			n++
		case c == 0, c == 1 && (i+1 == len(b) || b[i+1] < 1 || b[i+1] > 2):
			return ID{}, fmt.Errorf("%w: an identity cannot be decoded", ErrDamaged)
		case c == 1:
			i++
			fields[n] = append(fields[n], b[i]-1)
		default:
			fields[n] = append(fields[n], c)
		}
	}
	if n != 2 {
		return ID{}, fmt.Errorf("%w: an identity cannot be decoded", ErrDamaged)
	}
	return ID{Key: string(fields[0]), Origin: string(fields[1]), Scope: string(fields[2])}, nil
}
