package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
)

// A ledger is the shop's own record: a file with a line for each order, on the
// disk before record returns.
type ledger struct {
	mu      sync.Mutex // guards the following
	file    *os.File
	answers map[string]string // by order
}

// openLedger opens a ledger. A last line without its end was never recorded.
func openLedger(path string) (*ledger, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	text, err := io.ReadAll(file)
	if err != nil {
		return nil, err
	}
	text = text[:bytes.LastIndexByte(text, '\n')+1]
	if err := file.Truncate(int64(len(text))); err != nil {
		return nil, err
	}
	if _, err := file.Seek(int64(len(text)), io.SeekStart); err != nil {
		return nil, err
	}
	l := &ledger{file: file, answers: make(map[string]string)}
	for line := range strings.Lines(string(text)) {
		order, answer, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		if _, twice := l.answers[order]; twice {
			return nil, fmt.Errorf("%s: %s has two lines", path, order)
		}
		l.answers[order] = answer
	}
	return l, nil
}

func (l *ledger) has(order string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, ok := l.answers[order]
	return ok
}

var errOtherAnswer = errors.New("another answer than before")

// record records an answer, once.
func (l *ledger) record(order, answer string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if known, ok := l.answers[order]; ok {
		if known != answer {
			return fmt.Errorf("%w: %s was answered %s, and now %s", errOtherAnswer, order, known, answer)
		}
		return nil
	}
	if _, err := fmt.Fprintf(l.file, "%s %s\n", order, answer); err != nil {
		return err
	}
	if err := l.file.Sync(); err != nil {
		return err
	}
	l.answers[order] = answer
	return nil
}
