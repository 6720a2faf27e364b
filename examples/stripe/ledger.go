package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"

	"github.com/oncehttp/oncehttp"
)

// A ledger is a file with a line for each order: its outcome, and the
// PaymentIntent or Stripe's reason.
type ledger struct {
	file *os.File
	out  io.Writer // gets each line as well; nil means nothing does

	mu    sync.Mutex        // guards the following, and writes
	lines map[string]string // by order
}

func openLedger(path string, out io.Writer) (*ledger, error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	text, err := io.ReadAll(file)
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	l := &ledger{file: file, out: out, lines: make(map[string]string)}
	for line := range strings.Lines(string(text)) {
		order, _, _ := strings.Cut(line, " ")
		l.lines[order] = strings.TrimSuffix(line, "\n")
	}
	return l, nil
}

func (l *ledger) has(order string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lines[order] != ""
}

// record is repeatable: after a crash, it may be given the same result again.
func (l *ledger) record(order string, outcome oncehttp.Outcome, result string) error {
	line := fmt.Sprintf("%s %v %s", order, outcome, result)
	l.mu.Lock()
	defer l.mu.Unlock()
	if known := l.lines[order]; known != "" {
		if known != line {
			return fmt.Errorf("the ledger has %q, and now it is %q", known, line)
		}
		return nil
	}
	if _, err := fmt.Fprintln(l.file, line); err != nil {
		return err
	}
	if err := l.file.Sync(); err != nil {
		return err
	}
	l.lines[order] = line
	if l.out != nil {
		fmt.Fprintln(l.out, line)
	}
	return nil
}

func (l *ledger) Close() error { return l.file.Close() }
