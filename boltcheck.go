package oncehttp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// A pageCheck reads all pages in use of a bbolt database, without bbolt. If
// which pages are free was not written, bbolt reads them all at opening, in a
// goroutine of its own: nobody could recover from what it does at a damaged one.
// It is therefore kept from files in which it would find one.
//
// Numbers in pages are in the byte order of the machine. A page begins with its
// id (8 bytes), flags and count of elements (2 each), and the number of pages
// that belong to it besides (4). Then come the elements:
//
//	branch: position from here, size of key (4 each), id of page (8)
//	leaf:   flags, position from here, size of key, size of value (4 each)
//
// A bucket is a leaf's value: id of its root page, sequence (8 each), and, if
// the id is 0, a page without id.
type pageCheck struct {
	file     io.ReaderAt
	pageSize uint64
	pages    uint64 // so many pages are used, or free
	seen     map[uint64]bool
}

const (
	pageHeader   = 16
	pageElement  = 16
	bucketHeader = 16
	branchPage   = 1
	leafPage     = 2
	bucketFlag   = 1 // of a leaf's element
)

var errPages = errors.New("pages in use cannot be read")

// bucket checks the pages of a bucket, given as its header and what follows.
// outer says that it has buckets and nothing else.
func (c *pageCheck) bucket(header []byte, outer bool) error {
	if len(header) < bucketHeader {
		return errPages
	}
	if root := binary.NativeEndian.Uint64(header); root != 0 {
		return c.tree(root, nil, nil, outer)
	}
	return c.page(header[bucketHeader:], nil, nil, outer)
}

// tree checks the page with an id and those below it. Their keys are at least
// from, if it is not nil, and less than to, if that is not.
func (c *pageCheck) tree(id uint64, from, to []byte, outer bool) error {
	if id < 2 || id >= c.pages || c.seen[id] {
		return fmt.Errorf("%w: %d", errPages, id)
	}
	var header [pageHeader]byte
	if _, err := c.file.ReadAt(header[:], int64(id*c.pageSize)); err != nil {
		return err
	}
	more := uint64(binary.NativeEndian.Uint32(header[12:]))
	if binary.NativeEndian.Uint64(header[:]) != id || more >= c.pages-id {
		return fmt.Errorf("%w: %d", errPages, id)
	}
	for i := range more + 1 {
		if c.seen[id+i] {
			return fmt.Errorf("%w: %d", errPages, id+i)
		}
		c.seen[id+i] = true
	}
	page := make([]byte, (1+more)*c.pageSize)
	if _, err := c.file.ReadAt(page, int64(id*c.pageSize)); err != nil {
		return err
	}
	return c.page(page, from, to, outer)
}

func (c *pageCheck) page(page, from, to []byte, outer bool) error {
	if len(page) < pageHeader {
		return errPages
	}
	flags, count := binary.NativeEndian.Uint16(page[8:]), int(binary.NativeEndian.Uint16(page[10:]))
	if flags != branchPage && flags != leafPage || count*pageElement > len(page)-pageHeader || flags == branchPage && count == 0 {
		return errPages
	}
	number := func(i, at int) uint64 {
		return uint64(binary.NativeEndian.Uint32(page[pageHeader+i*pageElement+at:]))
	}
	// data returns n bytes after skip bytes from the position of an element,
	// whose offset is where the position is counted from.
	data := func(i int, position, skip, n uint64) ([]byte, bool) {
		begin := uint64(pageHeader+i*pageElement) + position + skip
		if begin > uint64(len(page)) || n > uint64(len(page))-begin {
			return nil, false
		}
		return page[begin : begin+n], true
	}
	keys := make([][]byte, count)
	for i := range keys {
		position, size := number(i, 0), number(i, 4)
		if flags == leafPage {
			position, size = number(i, 4), number(i, 8)
		}
		key, ok := data(i, position, 0, size)
		inOrder := i == 0 && bytes.Compare(from, key) <= 0 || i > 0 && bytes.Compare(keys[i-1], key) < 0
		if !ok || !inOrder || to != nil && bytes.Compare(key, to) >= 0 {
			return errPages
		}
		keys[i] = key
	}
	for i := range keys {
		if flags == branchPage {
			end := to
			if i+1 < count {
				end = keys[i+1]
			}
			id := binary.NativeEndian.Uint64(page[pageHeader+i*pageElement+8:])
			if err := c.tree(id, keys[i], end, outer); err != nil {
				return err
			}
			continue
		}
		value, ok := data(i, number(i, 4), number(i, 8), number(i, 12))
		if !ok || (number(i, 0)&bucketFlag != 0) != outer {
			return errPages
		}
		if outer {
			if err := c.bucket(value, false); err != nil {
				return err
			}
		}
	}
	return nil
}
