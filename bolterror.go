package oncehttp

import (
	"errors"
	"fmt"
)

// A boltError is an error of a file. Its text begins with that of the first of
// its kinds.
type boltError struct {
	kinds []error // it matches all of them
	file  string
	text  string // what happened, and what to do
	cause error  // may be nil
}

func (e *boltError) Error() string {
	return fmt.Sprintf("%v: %s: %s", e.kinds[0], e.file, e.what())
}

// what returns what happened.
func (e *boltError) what() string {
	if e.cause == nil {
		return e.text
	}
	return e.text + ": " + e.cause.Error()
}

func (e *boltError) Unwrap() []error {
	if e.cause == nil {
		return e.kinds
	}
	return append(e.kinds[:len(e.kinds):len(e.kinds)], e.cause)
}

// failure returns an error that concerns the store's file.
func (s *BoltStore) failure(cause error, text string, kinds ...error) *boltError {
	return &boltError{kinds: kinds, file: s.path, text: text, cause: cause}
}

// named adds the file's name to an error that does not have it and of which it
// is a part.
func (s *BoltStore) named(err error) error {
	if _, ok := errors.AsType[*boltError](err); !ok && errors.Is(err, ErrDamaged) {
		return fmt.Errorf("%w (%s)", err, s.path)
	}
	return err
}

// A boltPanic is what bbolt, or reading memory that is mapped to a file, ended
// with: it does so when the file is damaged.
type boltPanic struct{ value any }

func (p *boltPanic) Error() string { return fmt.Sprintf("%v", p.value) }

// Is makes a panic match [ErrDamaged].
func (p *boltPanic) Is(target error) bool { return target == ErrDamaged }

func isPanic(err error) bool {
	_, ok := errors.AsType[*boltPanic](err)
	return ok
}

// guard calls f and returns its panic as an error.
func guard(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &boltPanic{p}
		}
	}()
	return f()
}
