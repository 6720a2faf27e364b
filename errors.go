package oncehttp

import (
	"errors"
	"time"
)

// Errors of a request that was refused before anything was sent. Each comes
// inside an [*OperationError].
var (
	ErrKeyInvalid    = errors.New("oncehttp: invalid idempotency key")
	ErrKeyReused     = errors.New("oncehttp: idempotency key was used for a different request")
	ErrScope         = errors.New("oncehttp: idempotency key was used under another account or with other credentials")
	ErrBodyTooLarge  = errors.New("oncehttp: request body exceeds MaxBodyBytes")
	ErrInProgress    = errors.New("oncehttp: operation is in progress elsewhere")
	ErrWindowClosed  = errors.New("oncehttp: the server may have forgotten the idempotency key")
	ErrNoCredentials = errors.New("oncehttp: the operation had credentials and now has none")
	ErrMismatch      = errors.New("oncehttp: request differs from its record")
	ErrCircuitOpen   = errors.New("oncehttp: circuit breaker is open")
	ErrClosed        = errors.New("oncehttp: client is closed")
	ErrNotRetained   = errors.New("oncehttp: operation succeeded earlier and its answer was not retained")
)

// Errors of a request that was sent, or may have been.
var (
	ErrAnswerLost = errors.New("oncehttp: answer was cut off")
)

// Errors of a [KeyStore].
var (
	// ErrStoreFailed: the write was not done, and nothing was sent.
	ErrStoreFailed = errors.New("oncehttp: key store failed")
	// ErrStoreUncertain: the write may or may not have been done. The store
	// accepts no more writes until it is opened again.
	ErrStoreUncertain = errors.New("oncehttp: key store failed at an unknown point and is closed for writing")
	ErrStoreLocked    = errors.New("oncehttp: key store is in use by another process")
	ErrStoreReplaced  = errors.New("oncehttp: key store's file was deleted or replaced")
	ErrStoreVersion   = errors.New("oncehttp: key store has a format this version does not know")
	ErrDamaged        = errors.New("oncehttp: key store is damaged")
	ErrFenced         = errors.New("oncehttp: operation was taken over by another owner")
	ErrNotFound       = errors.New("oncehttp: no such operation")
)

var _ time.Time
