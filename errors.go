package dlm

import (
	"errors"
	"fmt"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// The sentinels that callers match with [errors.Is]. What a backend or a
// pattern refuses on principle matches [errors.ErrUnsupported]; the errors of
// a context that ended match [context.Canceled] or [context.DeadlineExceeded].
var (
	// ErrHeld: the key is taken, or others wait for it. TryLock returns it at
	// once; AcquireLock returns it together with the context's error when the
	// context ended while waiting. The details are in a [*LockConflictError].
	ErrHeld = driver.ErrHeld
	// ErrLost: the lock ceased to be ours without being released. The details
	// are in a [*LostError].
	ErrLost = driver.ErrLost
	// ErrReleased: the caller has already released this handle.
	ErrReleased = driver.ErrReleased
	// ErrIndeterminate: no answer came from the store, so the outcome is
	// unknown. After a failed acquire, something may remain in the store for
	// one TTL at most; after a failed release, the key may stay taken until
	// the TTL has run out, and Release may be called again.
	ErrIndeterminate = driver.ErrIndeterminate
	// ErrClosed: the manager has been closed.
	ErrClosed = driver.ErrClosed
	// ErrNotApplied: the store certainly did not carry the request out.
	ErrNotApplied = driver.ErrNotApplied
	// ErrInvalid: an argument or an option is wrong; the message names it.
	// Nothing was sent to the store, or the store refused it unchanged.
	ErrInvalid = driver.ErrInvalid
)

// Types of package driver that users of dlm meet.
type (
	// LostError carries the reason of a loss.
	LostError = driver.LostError
	// LostReason says why a lock was lost.
	LostReason = driver.LostReason
	// LimitError says that a key is in use with another limit.
	LimitError = driver.LimitError
)

// The reasons for a loss, see [LostError].
const (
	ReasonExpired = driver.ReasonExpired
	ReasonGone    = driver.ReasonGone
	ReasonTaken   = driver.ReasonTaken
	ReasonSession = driver.ReasonSession
	ReasonMaxHold = driver.ReasonMaxHold
	ReasonClosed  = driver.ReasonClosed
)

// LockConflictError says who held the key when it was refused. It matches
// [ErrHeld].
type LockConflictError struct {
	Key string
	// Holder is the Value of one of the locks on the key, or empty if the key
	// was free but others were waiting.
	Holder string
	// Remaining is how long that lock runs unless it is renewed, at the time
	// of the answer; zero if not known.
	Remaining time.Duration
	// Position was the caller's place in the queue, 1 being the head; 0 if it
	// was not waiting.
	Position int
}

func (e *LockConflictError) Error() string {
	switch {
	case e.Holder == "" && e.Position == 0:
		return fmt.Sprintf("%v: others are waiting", ErrHeld)
	case e.Position == 0:
		return fmt.Sprintf("%v: %s", ErrHeld, e.Holder)
	case e.Holder == "":
		return fmt.Sprintf("%v: waiting at position %d", ErrHeld, e.Position)
	}
	return fmt.Sprintf("%v: %s, waiting at position %d", ErrHeld, e.Holder, e.Position)
}

// Unwrap returns [ErrHeld].
func (e *LockConflictError) Unwrap() error { return ErrHeld }

// UpgradeError says that an owner (see [WithOwner]) asked for a key exclusively
// that it holds shared: it would wait for itself. It must release the shared lock
// first, and take into account that others may come between. It matches
// [ErrInvalid].
type UpgradeError struct {
	Key string
	// Token is that of the shared lock.
	Token int64
}

func (e *UpgradeError) Error() string {
	return fmt.Sprintf("%v: the owner holds %q shared (token %d), and would wait for itself to have it exclusively",
		ErrInvalid, e.Key, e.Token)
}

// Unwrap returns [ErrInvalid].
func (e *UpgradeError) Unwrap() error { return ErrInvalid }

// Error is what the methods of [Manager] and [Lock] return: what was tried,
// on which key and backend, and why it failed.
type Error struct {
	// Op is "acquire", "try", "extend", "release", "get", "list", "force" or
	// "close" or
	// "check".
	Op string
	// Key is the key of the call, or empty.
	Key string
	// Backend is the name of the backend.
	Backend string
	// Err is the failure.
	Err error
}

func (e *Error) Error() string {
	if e.Key == "" {
		return fmt.Sprintf("%s on %s: %v", e.Op, e.Backend, e.Err)
	}
	return fmt.Sprintf("%s %q on %s: %v", e.Op, e.Key, e.Backend, e.Err)
}

// Unwrap returns the failure.
func (e *Error) Unwrap() error { return e.Err }

// invalidf says what is wrong with an argument.
func invalidf(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrInvalid}, args...)...)
}

// permanent says whether repeating a request cannot help.
func permanent(err error) bool {
	return refused(err) || errors.Is(err, ErrClosed)
}

// refused says whether the store turned a request down without any effect.
func refused(err error) bool {
	return errors.Is(err, ErrInvalid) || errors.Is(err, errors.ErrUnsupported)
}

// conflict turns a backend's refusal into the error that users see.
func conflict(key string, held *driver.HeldError) *LockConflictError {
	return &LockConflictError{Key: key, Holder: held.Holder, Remaining: max(held.Remaining, 0), Position: held.Position}
}

// unsupported says what a backend refuses on principle.
func unsupported(format string, args ...any) error {
	return fmt.Errorf("dlm: "+format+": %w", append(args, errors.ErrUnsupported)...)
}
