// Package fence is the resource's side of fencing tokens.
//
// A process can be stopped for longer than its lock lasts, and go on without
// knowing that somebody else holds the lock by now. What it writes then can be
// refused by the resource only: every lock has a [dlm.Lock.Token] that is larger
// than those of all earlier locks of its key, the holder sends it along with
// each write, and the resource keeps the highest token that it has seen and
// refuses lower ones. A token is worth what the resource checks, and no more.
//
// There is one guard for each kind of resource:
//
//   - [SQL]: one statement inside the transaction that writes;
//   - [Memory]: state of this process, and, with [Handler], what stands behind an
//     HTTP server of one process;
//   - [ReadHeader], [Handler], [Transport]: how the token gets from a client to a
//     server by HTTP;
//   - [WriteFile]: a file;
//   - package redisfence, a module of its own: keys in Redis.
//
// # What is accepted
//
// A token that is at least as high as the highest one that was accepted for the
// resource before. So a holder may write as often as it likes, and is refused
// for good as soon as a later holder has been accepted once. That a later
// holder exists is not known to the resource before its first write; until
// then the earlier one is accepted, which does no harm, as the later one then
// finds what was written, if it reads after its own token was accepted.
//
// A token counts as seen once it was accepted, whatever becomes of the write,
// except where check and write are one transaction that is rolled back.
//
// # What a guard cannot do
//
//   - If check and write are not one atomic step, the check is worth nothing: the
//     process can be stopped between them. No function here answers yes or no and
//     leaves the write to the caller, but for those whose transaction holds both.
//   - Two writes with the same token are not ordered. A holder that writes from
//     several goroutines, or repeats a write whose answer got lost, must order
//     them itself.
//   - A write that goes around the guard is not seen.
//   - What a holder has read before its token was accepted can be out of date when it
//     writes: an earlier holder may have written in between. Read, and decide,
//     after the token was accepted, in the same step or before another one.
//   - A guard believes tokens. One that was made up, say 2^53-1, shuts out everybody
//     else for good, so let only those send tokens who may write anyway.
//   - A guard that has forgotten a resource accepts any token again. Never let its
//     records expire, and do not restore them from a backup without the data.
//   - Tokens of two stores of locks, or of two keys, cannot be compared. The same
//     resource must always be guarded by the same key of the same store. When the
//     locks move to another store, whose tokens may be lower, remove the records
//     while nobody holds a lock.
//   - Several readers (shared locks) and n permits of a semaphore are held at the same
//     time with different tokens, so a guard would refuse all but the last one.
//     Only exclusive locks order writers.
//   - 0 is no token: it is refused as invalid.
//
// What tokens rest on in each store is in docs/GUARANTEES.md: on some of them a
// failover can take the counter back.
package fence

import (
	"context"
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/go-dlm/dlm"
)

// Bounds on arguments.
const (
	// MaxResourceLen is the greatest length of a resource's name in bytes, the
	// same as that of a lock's key.
	MaxResourceLen = dlm.MaxKeyLen
	// MaxToken is the highest token: what a floating-point number holds exactly.
	MaxToken int64 = 1<<53 - 1
)

// ErrStale says that a token was refused since a higher one has been accepted
// before: the caller has lost its lock. Nothing was written, and to repeat the
// call is of no use. The details are in a [*StaleError].
var ErrStale = errors.New("dlm: stale fencing token")

// StaleError says which token was refused. It matches [ErrStale].
type StaleError struct {
	// Resource is what was to be written.
	Resource string
	// Token is the one that was refused.
	Token int64
	// Highest is the one that was accepted before, or 0 if it is not known.
	Highest int64
}

func (e *StaleError) Error() string {
	if e.Highest == 0 {
		return fmt.Sprintf("%v: %q has seen a higher one than %d", ErrStale, e.Resource, e.Token)
	}
	return fmt.Sprintf("%v: %q has seen %d, which is higher than %d", ErrStale, e.Resource, e.Highest, e.Token)
}

// Unwrap returns [ErrStale].
func (e *StaleError) Unwrap() error { return ErrStale }

// Guard checks a token and does the write as one step. [*Memory] is one.
type Guard interface {
	// Do calls fn if the token is at least as high as all that were accepted for
	// the resource before, and returns what fn returns. Until fn has returned, no
	// other call for the same resource is accepted. Else it returns an error that
	// matches [ErrStale], or [dlm.ErrInvalid] if an argument is wrong, or the
	// cause of the context's end if that came first, and has not called fn.
	//
	// If fn was called, and an error is not its own, then nobody knows whether
	// its effects last.
	Do(ctx context.Context, resource string, token int64, fn func(ctx context.Context) error) error
}

// Validate returns an error that matches [dlm.ErrInvalid] unless the resource is
// a non-empty UTF-8 string of at most [MaxResourceLen] bytes, and the token lies
// between 1 and [MaxToken]. All guards call it.
func Validate(resource string, token int64) error {
	switch {
	case resource == "":
		return invalidf("resource is empty")
	case len(resource) > MaxResourceLen:
		return invalidf("resource has %d bytes, must have at most %d", len(resource), MaxResourceLen)
	case !utf8.ValidString(resource):
		return invalidf("resource is not UTF-8")
	}
	return validToken(token)
}

func validToken(token int64) error {
	switch {
	case token == 0:
		return invalidf("token is 0, which means that there is none")
	case token < 0 || token > MaxToken:
		return invalidf("token is %d, must be from 1 to %d", token, MaxToken)
	}
	return nil
}

func invalidf(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{dlm.ErrInvalid}, args...)...)
}
