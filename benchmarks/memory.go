package main

import (
	"errors"
	"fmt"
	"net/http"
	"runtime"
	"sync"
)

// inUse returns the bytes of heap and stacks that are in use after a collection.
func inUse() float64 {
	runtime.GC()
	runtime.GC() // what had a finalizer
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc + m.StackInuse)
}

// perHost returns the KiB that a host takes that was asked once and is idle.
func perHost(hosts int) (float64, error) {
	m, err := inMemory(setting{}, roundTripper(answerAtOnce))
	if err != nil {
		return 0, err
	}
	before := inUse()
	for i := range hosts {
		n := network{url: fmt.Sprintf("https://%d.example.com/", i)}
		get, err := n.get(m.send)
		if err == nil {
			err = get()
		}
		if err != nil {
			return 0, errors.Join(err, m.close())
		}
	}
	each := (inUse() - before) / float64(hosts) / 1024
	return each, m.close()
}

// perOperation returns the KiB that an operation takes whose attempt is under
// way, goroutine and stack included, the body's 500 B not.
func perOperation(operations int, by maker) (each float64, err error) {
	release := make(chan struct{})
	var sent, ended sync.WaitGroup
	sent.Add(operations)
	waiting := roundTripper(func(r *http.Request) (*http.Response, error) {
		sent.Done()
		<-release
		return answerAtOnce(r)
	})
	_, done, err := openIn(contender{open: func(s setting) (*opened, error) {
		m, err := by(s, waiting)
		if err != nil {
			return nil, err
		}
		post := instant.post(m.send, !m.keyed)
		errs := make(chan error, operations)
		before := inUse()
		for range operations {
			ended.Go(func() { errs <- post() })
		}
		sent.Wait()
		each = (inUse()-before)/float64(operations)/1024 - float64(len(payload))/1024
		close(release)
		ended.Wait()
		close(errs)
		var failed error
		for err := range errs {
			failed = errors.Join(failed, err)
		}
		return &opened{close: m.close}, failed
	}}, operations)
	if err != nil {
		return 0, err
	}
	return each, done()
}
