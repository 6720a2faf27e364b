package oncehttp

import (
	"context"
	"time"
)

// An ID identifies an operation in a [KeyStore]. Two operations are the same
// exactly when their IDs are equal.
type ID struct {
	Key    string // idempotency key, as sent
	Origin string // scheme://host, lower case, with the port where it is not the scheme's default
	Scope  string // account within the origin; see [Op.Scope]. May be empty
}

// An Outcome is what is known about the effect of an operation. It is also the
// state of a [Record].
type Outcome uint8

const (
	// Undecided: no answer yet, and nobody was told anything. The
	// operation is pending; these, and only these, [Client.Resume] sends
	// without being asked.
	Undecided Outcome = iota
	// Succeeded: the server accepted the operation.
	Succeeded
	// Rejected: the server refused the operation; it had no effect.
	Rejected
	// NotSent: provably no byte was written, and none will be. Never
	// stored: a record that was never sent does not exist.
	NotSent
	// Unknown: the operation may have had its effect. A caller was told, or
	// a rule stopped us; a person or the program decides.
	Unknown
)

// A Reason says why an operation's outcome is [Unknown].
type Reason uint8

const (
	NoReason         Reason = iota
	ReasonGaveUp            // its caller was told that there was no answer: attempts, time or budget ran out
	ReasonStored            // the server replays a stored failure (Stripe stores 500s): reconcile
	ReasonConflict          // the server knows the key with another payload
	ReasonRefused           // refused at the door (401, 403, …) after an attempt whose effect is unknown
	ReasonAmbiguous         // an answer that says nothing about an earlier attempt, or nothing at all
	ReasonWindow            // unanswered until the server may have forgotten the key
	ReasonClock             // the clock went back while the operation was unanswered: its window cannot be told
	ReasonPoison            // the process died five times while working on it
	ReasonAbandoned         // [Handler.Before] said [Abandon]
	ReasonUnreadable        // its record cannot be read (damaged, or sealed with a missing key)
)

// A Record is what a [KeyStore] keeps of one operation. Its opaque parts are
// encoded, checksummed and, on demand, sealed by the client before the store
// sees them; they must be kept to the byte. All times are in UTC and cut to
// the microsecond.
type Record struct {
	ID

	// Seq orders records by their Begin. The store assigns it, starting
	// with 1; what a caller of the store puts here is ignored.
	Seq uint64

	// Epoch counts the owners of the record, Owner names the present one
	// ([Session.Owner]); empty means that nobody works on it. A write is
	// accepted if it has the stored epoch and owner, or the epoch after it,
	// which takes the record over.
	Epoch uint64
	Owner string

	// Era is the [Session.Era] of the Begin. An unanswered record of an
	// earlier era has an unknown window.
	Era uint64

	Outcome Outcome
	Reason  Reason // only with Unknown
	Acked   bool   // settled and acknowledged: no longer open, no longer listed
	Told    bool   // [Handler.Unknown] has been told

	KeyGiven    bool // the key was chosen by the caller, not made for this operation
	ScopeStated bool // Scope was stated by the caller, not derived
	AckDue      bool // somebody has to acknowledge the answer
	Uncertain   bool // some attempt may have reached the server

	Attempts int // HTTP exchanges so far
	Claims   int // claims by Resume that have not ended cleanly
	Status   int // HTTP status of the last answer; 0 means none

	FirstSent   time.Time // beginning of the window
	ResendUntil time.Time // no attempt starts after it
	NotBefore   time.Time // the server asked not to come back before; zero means that it did not
	RestUntil   time.Time // Resume leaves the operation alone until then; zero means that it need not
	Updated     time.Time // of this write; also the store's mark of the wall clock
	AnswerUntil time.Time // Answer may be dropped after it; zero means keep
	KeepUntil   time.Time // an acknowledged record may be dropped after it; zero means keep

	Fingerprint [32]byte // keyed digest of what must not change under a key

	Meta    []byte // opaque: method, URL, metadata, last error. Small
	Request []byte // opaque: header and body; nil once acknowledged
	Answer  []byte // opaque: status, header and body; nil means not retained
}

// A Session is one opening of a [KeyStore] by one process.
type Session struct {
	Owner       string    // names this opening; never used again
	Secret      [32]byte  // made at random with the store, the same for ever: the key of all digests
	Mark        time.Time // the latest Updated of any durable record, at opening; zero for a new store
	Era         uint64    // see [Record.Era]
	SteppedBack bool      // this opening found the clock behind the mark and began a new era
}

// A KeyStore remembers operations. It is implemented by the bbolt file of
// [OpenBolt], by [NewMemoryStore], and by anything that passes
// oncehttptest.TestKeyStore: the interface is meant to fit a shared database
// with several clients as well as a file with one.
//
// A nil error means: done as asked, and durable unless said otherwise. An error
// means that nothing was changed, with one exception: an error that matches
// [ErrStoreUncertain] leaves open which; the store then refuses all further
// writes with errors that match [ErrStoreFailed].
//
// A context that ends before a write has begun makes it fail with the context's
// cause; a write that has begun is waited for.
//
// All methods are safe for concurrent use. The client never has two writes of
// one ID under way at once, but for Ack, which may come at any time. A store keeps no reference to a record's slices
// after it returns, and what it returns is the caller's.
type KeyStore interface {
	// Session returns this opening's session. Called again, it returns the
	// same session. now is the wall clock's time: if it is behind the mark by
	// more than a minute, the first call begins a new era, durably, and the
	// mark starts anew at now.
	Session(ctx context.Context, now time.Time) (Session, error)

	// Begin stores a new record, durably and in a transaction of its own,
	// unless one is in its way: the record of the same ID, or, where rec's
	// key was given, a record of the same key and origin under another scope
	// unless both scopes were stated. Begin then changes nothing and returns
	// that one.
	Begin(ctx context.Context, rec Record) (existing *Record, err error)

	// Save replaces the record of the same ID, durably and in a transaction
	// of its own. The stored record must have rec's epoch and owner, or the
	// epoch before rec's. Else the error is [ErrFenced]; it is
	// [ErrInProgress] if the epoch before rec's has another owner that is
	// alive, and [ErrNotFound] if there is no such record. With Acked false,
	// a nil Request and a nil Answer leave the stored ones as they are. An
	// acknowledged record that is saved with Acked false is open again, with
	// a new Seq.
	Save(ctx context.Context, rec Record) error

	// Ack is Save with rec.Acked set. It alone may take part in a
	// transaction that ctx carries, by a convention of the store.
	Ack(ctx context.Context, rec Record) error

	// Delete removes the record of rec's ID, under Save's conditions; one
	// that cannot be decoded, without. No such record is no error.
	Delete(ctx context.Context, rec Record) error

	// Get returns a record with all its parts, or [ErrNotFound]. A record
	// that cannot be decoded is [ErrDamaged].
	Get(ctx context.Context, id ID) (*Record, error)

	// Find returns the IDs of all records with the key.
	Find(ctx context.Context, key string) ([]ID, error)

	// List returns up to n open records (not acknowledged) with Seq greater
	// than after, in the order of Seq, without Request and Answer. Fewer
	// than n does not mean that there are no more; none does. It reads in
	// one short transaction.
	List(ctx context.Context, after uint64, n int) ([]Record, error)

	// Counts returns the number of open records by outcome. It is cheap.
	Counts(ctx context.Context) (Counts, error)

	// Purge drops, durably, what may be dropped at the time now: answers
	// after their AnswerUntil, acknowledged records after their KeepUntil.
	// It looks at no more than n records, going on where the last call
	// stopped, and returns how many it dropped something of. done says that
	// the round through all records is complete. Open records are not
	// touched.
	//
	// While there are open records without answer, Purge, also with n 0,
	// makes now the store's mark, durably, if it is more than a minute after
	// it: a store in which nothing happens must notice, too, when it is
	// opened next, that the clock went back.
	Purge(ctx context.Context, now time.Time, n int) (dropped int, done bool, err error)

	// Close makes all saved records durable and ends the session. The
	// second call does nothing.
	Close() error
}

// A LazyStore is a KeyStore that can put a write off until it costs nothing.
type LazyStore interface {
	KeyStore

	// SaveSoon is Save, but returns at once. The write rides with the next
	// group that is committed, at the latest after a few milliseconds of
	// idleness. done is called, from another goroutine, when it is durable
	// or has failed; done must not block. Writes of one ID keep their order.
	SaveSoon(rec Record, done func(error))
}

// Counts are numbers of open records.
type Counts struct {
	Pending        int // Undecided
	Unknown        int
	Unacknowledged int // Succeeded or Rejected, and waiting for their acknowledgement
}
