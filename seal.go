package oncehttp

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash/crc32"
)

// A sealer turns a part of a record into what the store keeps, and back. With
// no keys, the part is checksummed; with keys, it is encrypted by AES-256-GCM
// under the first of them. Parts of both kinds may stand side by side, so that
// sealing can be switched on later and keys can be rotated.
//
// Format 1:
//
//	plain:  0x01, CRC-32C of the rest, part
//	sealed: 0x02, 8 bytes of the key's SHA-256, 12 bytes nonce, ciphertext and tag
//
// The additional data of a sealed part are its version, its field and the
// identity of its operation, so that a part cannot be moved to another place.
type sealer struct{ ring []sealingKey } // written once, before the first use

type sealingKey struct {
	id   [8]byte
	aead cipher.AEAD
}

const (
	plainPart  = 0x01
	sealedPart = 0x02
)

func newSealer(keys [][]byte) (*sealer, error) {
	s := &sealer{}
	for i, key := range keys {
		if len(key) != 32 {
			return nil, fmt.Errorf("oncehttp: Options.SealingKeys[%d] has %d bytes, want 32", i, len(key))
		}
		block, err := aes.NewCipher(key)
		if err != nil {
			return nil, err
		}
		aead, err := cipher.NewGCM(block)
		if err != nil {
			return nil, err
		}
		sum := sha256.Sum256(key)
		s.ring = append(s.ring, sealingKey{[8]byte(sum[:8]), aead})
	}
	return s, nil
}

// A sealable is a part of a record before it is stored.
type sealable interface {
	size() int // about how many bytes appendTo appends
	appendTo(*encoder)
}

// seal returns the stored form of a part.
func (s *sealer) seal(id ID, field string, part sealable) []byte {
	if len(s.ring) == 0 {
		out := make(encoder, 5, 5+part.size())
		part.appendTo(&out)
		out[0] = plainPart
		binary.BigEndian.PutUint32(out[1:], crc32.Checksum(out[5:], castagnoli))
		return out
	}
	plain := make(encoder, 0, part.size())
	part.appendTo(&plain)
	key := s.ring[0]
	out := make([]byte, 21, 21+len(plain)+key.aead.Overhead())
	out[0] = sealedPart
	copy(out[1:], key.id[:])
	nonce := out[9:21]
	_, _ = rand.Read(nonce) // never fails: documented by crypto/rand
	return key.aead.Seal(out, nonce, plain, additionalData(id, field))
}

// open returns the part of a stored form: [ErrDamaged] if it was changed,
// [ErrSealed] if its key is not in the ring.
func (s *sealer) open(id ID, field string, stored []byte) ([]byte, error) {
	switch {
	case stored == nil:
		return nil, nil
	case len(stored) >= 5 && stored[0] == plainPart:
		part := stored[5:]
		if crc32.Checksum(part, castagnoli) != binary.BigEndian.Uint32(stored[1:]) {
			return nil, fmt.Errorf("%w: checksum of %s", ErrDamaged, field)
		}
		return part, nil
	case len(stored) >= 21 && stored[0] == sealedPart:
		for _, key := range s.ring {
			if !bytes.Equal(key.id[:], stored[1:9]) {
				continue
			}
			part, err := key.aead.Open(nil, stored[9:21], stored[21:], additionalData(id, field))
			if err != nil {
				return nil, fmt.Errorf("%w: seal of %s", ErrDamaged, field)
			}
			return part, nil
		}
		return nil, fmt.Errorf("%w: %s", ErrSealed, field)
	}
	return nil, fmt.Errorf("%w: form of %s", ErrDamaged, field)
}

func additionalData(id ID, field string) []byte {
	var e encoder
	e.uint(sealedPart)
	e.string(field)
	e.string(id.Key)
	e.string(id.Origin)
	e.string(id.Scope)
	return e
}
