package main

import (
	"errors"
	"os"
	"sync"
)

// A rawLog writes records to a file, in groups: who finds nobody writing writes
// for all who wait. It cannot be read again; it shows what the disk allows.
//
// The file is written in a circle and was written before, so that a sync has
// nothing but data to write.
type rawLog struct {
	file *os.File
	lead chan struct{} // held by who writes
	at   int64         // guarded by lead

	mu   sync.Mutex // guards next
	next *rawGroup  // whose records wait
}

type rawGroup struct {
	records []byte
	done    chan struct{} // closed when err is written, and the records are durable unless it is not nil
	err     error
}

const logSize = 16 << 20

func newGroup() *rawGroup { return &rawGroup{done: make(chan struct{})} }

func openLog(path string) (*rawLog, error) {
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	if _, err := f.Write(make([]byte, logSize)); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if err := f.Sync(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &rawLog{file: f, lead: make(chan struct{}, 1), next: newGroup()}, nil
}

// append writes a record, and waits until it is durable if wait says so. Else it
// goes with the next that waits.
func (l *rawLog) append(key string, value []byte, wait bool) error {
	l.mu.Lock()
	g := l.next
	g.records = append(append(g.records, key...), value...)
	l.mu.Unlock()
	if !wait {
		return nil
	}
	return l.wait(g)
}

func (l *rawLog) flush() error {
	l.mu.Lock()
	g := l.next
	l.mu.Unlock()
	return l.wait(g)
}

func (l *rawLog) wait(g *rawGroup) error {
	select {
	case <-g.done:
		return g.err
	case l.lead <- struct{}{}:
	}
	defer func() { <-l.lead }()
	select {
	case <-g.done:
		return g.err
	default:
	}
	l.mu.Lock()
	l.next = newGroup() // g was next: groups change under lead alone
	l.mu.Unlock()
	if l.at+int64(len(g.records)) > logSize {
		l.at = 0
	}
	if _, g.err = l.file.WriteAt(g.records, l.at); g.err == nil {
		g.err = datasync(l.file)
	}
	l.at += int64(len(g.records))
	close(g.done)
	return g.err
}

func (l *rawLog) Close() error { return l.file.Close() }
