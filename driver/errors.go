package driver

import (
	"errors"
	"fmt"
	"time"
)

// The sentinels of dlm. Package dlm re-exports them, so that one value is
// matched everywhere with [errors.Is]. What a backend refuses on principle
// matches [errors.ErrUnsupported] instead.
var (
	// ErrHeld says that the key is taken, or that others wait for it.
	// Acquire returns it inside a [*HeldError].
	ErrHeld = errors.New("dlm: held by another owner")

	// ErrLost says that a grant is no longer the caller's, though the caller
	// did not give it up: it expired, was taken, was removed, or its session
	// ended. Extend and Release return it inside a [*LostError].
	ErrLost = errors.New("dlm: lock lost")

	// ErrReleased says that the caller itself has released this lock.
	// Only package dlm returns it.
	ErrReleased = errors.New("dlm: lock released")

	// ErrIndeterminate says that no answer came and that the outcome is
	// unknown: the request may or may not have taken effect. Only package dlm
	// returns it; a backend returns the plain failure.
	ErrIndeterminate = errors.New("dlm: outcome unknown")

	// ErrClosed says that the manager or the backend has been closed.
	ErrClosed = errors.New("dlm: closed")

	// ErrNotApplied says that a request failed and certainly had no effect on
	// the store. A backend that is not certain must not return it.
	ErrNotApplied = errors.New("dlm: request not applied")

	// ErrInvalid says that an argument or an option is wrong, or that callers
	// disagree on how a key is used. Repeating the call will not help, and the
	// request had no effect.
	ErrInvalid = errors.New("dlm: invalid argument")
)

// HeldError is the answer of Acquire when the key could not be granted. It
// matches [ErrHeld]. A refusal with Request.Enqueue set means that the ticket
// is in the queue; without it, that nothing was left in the store.
type HeldError struct {
	// Holder is the owner of one of the present grants, or empty when the key
	// is free and only others wait for it.
	Holder string
	// Token is that grant's token, or 0.
	Token int64
	// Remaining is how long from now the first of the present grants runs
	// unless it is renewed. Zero or less means not known.
	Remaining time.Duration
	// Position is the caller's place in the queue, 1 being the head, or 0 if
	// the caller is not in it or the backend has no queue. Where
	// [Properties.FairQueue] is false it is a guess.
	Position int
	// Ticket tells the caller's ticket from any other that the same owner had
	// before or gets later, for backends that send EventGrant; otherwise 0.
	Ticket int64
}

func (e *HeldError) Error() string {
	if e.Holder == "" {
		return ErrHeld.Error()
	}
	return fmt.Sprintf("%v: %s (token %d)", ErrHeld, e.Holder, e.Token)
}

// Unwrap returns [ErrHeld].
func (e *HeldError) Unwrap() error { return ErrHeld }

// LostReason says why a grant was lost.
type LostReason string

// The reasons for a loss. A backend returns ReasonGone, ReasonTaken or
// ReasonSession; the others are found by package dlm.
const (
	// ReasonExpired: the deadline passed without a successful renewal.
	ReasonExpired LostReason = "expired"
	// ReasonGone: the store has no such grant any more, and nobody else holds
	// the key. It expired there, or somebody removed it.
	ReasonGone LostReason = "gone"
	// ReasonTaken: somebody else holds the key.
	ReasonTaken LostReason = "taken"
	// ReasonSession: the store ended the session that the grant belonged to.
	ReasonSession LostReason = "session"
	// ReasonMaxHold: the longest hold that the caller allowed is over.
	ReasonMaxHold LostReason = "max-hold"
	// ReasonClosed: the manager was closed while the lock was held.
	ReasonClosed LostReason = "closed"
)

// LostError carries the reason of a loss. It matches [ErrLost] and whatever
// its cause matches.
type LostError struct {
	Key    string
	Token  int64
	Reason LostReason
	// Cause is what lay behind the loss, such as the last failed renewal, or
	// nil.
	Cause error
}

func (e *LostError) Error() string {
	s := fmt.Sprintf("%v: %q (token %d): %s", ErrLost, e.Key, e.Token, e.Reason)
	if e.Cause != nil {
		s += ": " + e.Cause.Error()
	}
	return s
}

// Unwrap returns [ErrLost] and the cause.
func (e *LostError) Unwrap() []error {
	if e.Cause == nil {
		return []error{ErrLost}
	}
	return []error{ErrLost, e.Cause}
}

// LimitError says that a key is in use with another limit than the one asked
// for. It matches [ErrInvalid]; the request had no effect.
type LimitError struct {
	Key string
	// Want is the limit that the caller asked for, Have the one in force.
	Want, Have int
}

func (e *LimitError) Error() string {
	return fmt.Sprintf("%v: limit %d for key %q, which is in use with limit %d", ErrInvalid, e.Want, e.Key, e.Have)
}

// Unwrap returns [ErrInvalid].
func (e *LimitError) Unwrap() error { return ErrInvalid }
