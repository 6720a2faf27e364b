package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
)

// A ledger is the caller's own record of what was charged: lines of a key and a
// text, each durable before record returns. Every contender uses the same.
type ledger struct {
	mu    sync.Mutex // guards the following
	file  *os.File
	lines map[string]string
}

// openLedger opens a ledger. A last line without its end was being written when
// the process died: it does not count, and is removed.
func openLedger(path string) (*ledger, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	l := &ledger{file: file, lines: make(map[string]string)}
	size := int64(0)
	for r := bufio.NewReader(file); ; {
		line, err := r.ReadString('\n')
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, errors.Join(err, file.Close())
		}
		size += int64(len(line))
		key, text, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		l.lines[key] = text
	}
	if err := file.Truncate(size); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	if _, err := file.Seek(size, io.SeekStart); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return l, nil
}

// record records a line durably. It can be repeated: the first line of a key
// stays. That is all that a handler of oncehttp has to be able to.
func (l *ledger) record(key, text string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, known := l.lines[key]; known {
		return nil
	}
	if _, err := fmt.Fprintf(l.file, "%s %s\n", key, text); err != nil {
		return err
	}
	if err := l.file.Sync(); err != nil {
		return err
	}
	l.lines[key] = text
	return nil
}

func (l *ledger) has(key string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, ok := l.lines[key]
	return ok
}

func (l *ledger) Close() error { return l.file.Close() }
