package oncehttp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// A pageCheck reads all pages in use of a bbolt database, without bbolt, which
// trusts them: a damaged one makes it panic, also in a goroutine of its own where
// nobody can recover, overwrite others, or fill the memory. It is therefore kept
// from files in which it would find one.
//
// Numbers in pages are in the byte order of the machine. A page begins with its
// id (8 bytes), flags and count of elements (2 each), and the number of pages
// that belong to it besides (4). Then come the elements:
//
//	branch: position from here, size of key (4 each), id of page (8)
//	leaf:   flags, position from here, size of key, size of value (4 each)
//
// A bucket is a leaf's value: id of its root page, sequence (8 each), and, if
// the id is 0, a page without id. The list of free pages is one page, with their
// ids (8 bytes each); if count is 0xffff, with their number before them.
type pageCheck struct {
	file     io.ReaderAt
	pageSize uint64
	pages    uint64 // so many pages are used, or free
	seen     map[uint64]bool
	longest  int // bytes of a bucket's page with those that belong to it
}

func newPageCheck(file io.ReaderAt, pageSize int, size int64) *pageCheck {
	return &pageCheck{file: file, pageSize: uint64(pageSize), pages: uint64(size) / uint64(pageSize)}
}

const (
	pageHeader   = 16
	pageElement  = 16
	bucketHeader = 16
	branchPage   = 0x01
	leafPage     = 0x02
	freelistPage = 0x10
	bucketFlag   = 1         // of a leaf's element
	noFreelist   = 1<<64 - 1 // as a page's id
	metaPages    = 2         // the first ones: in use, and no part of a tree
)

var errPages = errors.New("a page in use is damaged")

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
	page, err := c.read(id)
	if err != nil {
		return err
	}
	c.longest = max(c.longest, len(page))
	return c.page(page, from, to, outer)
}

// freelist checks the list of free pages, after all pages in use: each other page
// is on it. One that is neither in use nor free was in use, and what leads there now
// leads elsewhere.
func (c *pageCheck) freelist(id uint64) error {
	page, err := c.read(id)
	if err != nil {
		return err
	}
	flags, count := binary.NativeEndian.Uint16(page[8:]), uint64(binary.NativeEndian.Uint16(page[10:]))
	ids := page[pageHeader:]
	if count == 0xffff {
		count, ids = binary.NativeEndian.Uint64(ids), ids[8:]
	}
	if flags != freelistPage || count > uint64(len(ids)/8) {
		return fmt.Errorf("%w: %d", errPages, id)
	}
	for i := range count {
		free := binary.NativeEndian.Uint64(ids[i*8:])
		if free < metaPages || free >= c.pages || c.seen[free] {
			return fmt.Errorf("%w: %d", errPages, free)
		}
		c.seen[free] = true
	}
	if uint64(len(c.seen)) != c.pages-metaPages {
		return fmt.Errorf("%w: %d pages lead nowhere", errPages, c.pages-metaPages-uint64(len(c.seen)))
	}
	return nil
}

// read returns a page with those that belong to it, which must be the first use
// of all of them.
func (c *pageCheck) read(id uint64) ([]byte, error) {
	_, more, err := c.header(id)
	if err != nil {
		return nil, err
	}
	if c.seen == nil {
		c.seen = make(map[uint64]bool)
	}
	for i := range more + 1 {
		if c.seen[id+i] {
			return nil, fmt.Errorf("%w: %d", errPages, id)
		}
		c.seen[id+i] = true
	}
	page := make([]byte, (1+more)*c.pageSize)
	_, err = c.file.ReadAt(page, int64(id*c.pageSize))
	return page, err
}

// header returns the header of a page, and how many pages belong to it besides.
func (c *pageCheck) header(id uint64) (header [pageHeader]byte, more uint64, err error) {
	if id < metaPages || id >= c.pages {
		return header, 0, fmt.Errorf("%w: %d", errPages, id)
	}
	if _, err := c.file.ReadAt(header[:], int64(id*c.pageSize)); err != nil {
		return header, 0, err
	}
	more = uint64(binary.NativeEndian.Uint32(header[12:]))
	if binary.NativeEndian.Uint64(header[:]) != id || more >= c.pages-id {
		return header, 0, fmt.Errorf("%w: %d", errPages, id)
	}
	return header, more, nil
}

// freelistHeader checks how long the list of free pages says that it is. A commit
// frees the pages of the list before, and believes that, be it 16 TiB.
func (c *pageCheck) freelistHeader(id uint64) error {
	header, more, err := c.header(id)
	if err != nil {
		return err
	}
	count := uint64(binary.NativeEndian.Uint16(header[10:]))
	if count == 0xffff {
		count = c.pages
	}
	// The pages it is on were still free when their number was chosen.
	longest := (pageHeader + 8*(1+count+1+more)) / c.pageSize
	if binary.NativeEndian.Uint16(header[8:]) != freelistPage || more > longest {
		return fmt.Errorf("%w: %d", errPages, id)
	}
	return nil
}

func (c *pageCheck) page(page, from, to []byte, outer bool) error {
	if len(page) < pageHeader {
		return errPages
	}
	flags, count := binary.NativeEndian.Uint16(page[8:]), int(binary.NativeEndian.Uint16(page[10:]))
	if flags != branchPage && flags != leafPage || count*pageElement > len(page)-pageHeader {
		return errPages
	}
	if count == 0 && (flags == branchPage || from != nil) { // only a bucket's own page may be empty
		return errPages
	}
	number := func(i, at int) uint64 {
		return uint64(binary.NativeEndian.Uint32(page[pageHeader+i*pageElement+at:]))
	}
	// data returns n bytes that are skip bytes after the position of an element.
	data := func(i int, position, skip, n uint64) ([]byte, bool) {
		begin := uint64(pageHeader+i*pageElement) + position + skip
		if begin > uint64(len(page)) || n > uint64(len(page))-begin {
			return nil, false
		}
		return page[begin : begin+n], true
	}
	keys := make([][]byte, count)
	next := uint64(count * pageElement) // where the data begin, without a gap: one less or more in count shows
	for i := range keys {
		position, size, value := number(i, 0), number(i, 4), uint64(0)
		if flags == leafPage {
			position, size, value = number(i, 4), number(i, 8), number(i, 12)
		}
		if uint64(i*pageElement)+position != next {
			return errPages
		}
		next += size + value
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
