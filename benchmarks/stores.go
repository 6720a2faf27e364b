package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"go.etcd.io/bbolt"

	"github.com/oncehttp/oncehttp"
)

// What an operation stores: when it begins, and when it has succeeded.
var (
	begun  = bytes.Repeat([]byte("r"), 1024)
	answer = bytes.Repeat([]byte("a"), 400)
)

const origin = "https://api.example.com"

// ourStore is oncehttp's file: a Begin that is waited for, and a success that
// rides with the next commit.
func ourStore(s setting) (*opened, error) {
	file := filepath.Join(s.dir, "operations.db")
	store, err := oncehttp.OpenBolt(file)
	if err != nil {
		return nil, err
	}
	ctx := context.Background()
	session, err := store.Session(ctx, time.Now())
	if err != nil {
		return nil, errors.Join(err, store.Close())
	}
	var lazy sync.WaitGroup
	var mu sync.Mutex
	var failed error
	done := func(err error) {
		if err != nil {
			mu.Lock()
			failed = err
			mu.Unlock()
		}
		lazy.Done()
	}
	return &opened{
		do: func() error {
			rec := oncehttp.Record{
				ID:    oncehttp.ID{Key: oncehttp.NewKey(), Origin: origin},
				Epoch: 1, Owner: session.Owner, Era: session.Era, Updated: time.Now(),
				Meta: begun[:124], Request: begun[124:],
			}
			if existing, err := store.Begin(ctx, rec); err != nil || existing != nil {
				return fmt.Errorf("in the way: %v; %w", existing, err)
			}
			rec.Outcome, rec.Acked, rec.Answer, rec.Meta, rec.Request = oncehttp.Succeeded, true, answer, nil, nil
			lazy.Add(1)
			store.SaveSoon(rec, done)
			return nil
		},
		finish: func() error { lazy.Wait(); return failed },
		close:  store.Close,
		file:   file,
	}, nil
}

// database is a bbolt file as a user would have it, with one bucket.
type database struct {
	*bbolt.DB
	file  string
	write func(*bbolt.DB, func(*bbolt.Tx) error) error // Update or Batch
}

var records = []byte("records")

func openDatabase(s setting, write func(*bbolt.DB, func(*bbolt.Tx) error) error) (*database, error) {
	file := filepath.Join(s.dir, "records.db")
	db, err := bbolt.Open(file, 0o600, nil)
	if err != nil {
		return nil, err
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		_, err := tx.CreateBucket(records)
		return err
	})
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return &database{db, file, write}, nil
}

func (d *database) put(key string, value []byte) error {
	return d.write(d.DB, func(tx *bbolt.Tx) error { return tx.Bucket(records).Put([]byte(key), value) })
}

// bboltStore is a commit when the operation begins, and one when it has
// succeeded: with write one of (*bbolt.DB).Update and Batch.
func bboltStore(write func(*bbolt.DB, func(*bbolt.Tx) error) error) func(setting) (*opened, error) {
	return func(s setting) (*opened, error) {
		db, err := openDatabase(s, write)
		if err != nil {
			return nil, err
		}
		return &opened{
			do: func() error {
				key := oncehttp.NewKey()
				if err := db.put(key, begun); err != nil {
					return err
				}
				return db.put(key, answer)
			},
			close: db.Close,
			file:  db.file,
		}, nil
	}
}

// rawStore is the limit: a file and nothing else. Whatever waits is written with
// one write and one fdatasync.
func rawStore(s setting) (*opened, error) {
	l, err := openLog(filepath.Join(s.dir, "log"))
	if err != nil {
		return nil, err
	}
	return &opened{
		do: func() error {
			key := oncehttp.NewKey()
			if err := l.append(key, begun, true); err != nil {
				return err
			}
			return l.append(key, answer, false)
		},
		finish: l.flush,
		close:  l.Close,
	}, nil
}
