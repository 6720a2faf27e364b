package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"sync"
)

// A ledger is the program's own record: a file with a line for each order, on the
// disk before record returns. A last line without its end does not count.
type ledger struct {
	mu   sync.Mutex // held while the file is read or written
	path string
}

// record records an order. What is recorded already stays as it is.
func (l *ledger) record(order, text string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	lines, err := l.read()
	if _, known := lines[order]; known || err != nil {
		return err
	}
	file, err := os.OpenFile(l.path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(file, "%s %s\n", order, text)
	return errors.Join(err, file.Sync(), file.Close())
}

func (l *ledger) has(order string) (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	lines, err := l.read()
	_, known := lines[order]
	return known, err
}

func (l *ledger) read() (map[string]string, error) {
	text, err := os.ReadFile(l.path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	lines := make(map[string]string)
	for line := range strings.Lines(string(text)) {
		if order, rest, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " "); ok && strings.HasSuffix(line, "\n") {
			lines[order] = rest
		}
	}
	return lines, nil
}
