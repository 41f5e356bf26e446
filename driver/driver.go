// Package driver defines what a store must do to serve locks. Users of dlm
// never call it; they call package dlm, which does all waiting, retrying,
// renewing, timing and reporting. A backend does one atomic step per call.
//
// # What to implement
//
// Implement [Backend]. If the store can tell of changes, implement [Notifier].
// If its records can be read, implement [Inspector]; if an operator may remove
// a grant that is not his, [Forcer]. Package dlm finds the optional interfaces
// through [As], so a wrapper that has an Unwrap method keeps them.
//
// Then run the conformance suite, package driver/drivertest. It is the
// checklist that counts.
//
// # The rules that no backend may break
//
//   - A key has at most Limit unexpired exclusive grants (1 for a lock), or any
//     number of shared ones, never both kinds.
//   - Tokens of one key rise strictly from grant to grant, are at least 1 and
//     below 2^53, and never repeat: not after an expiry, not after the key's
//     record has gone. Renewal and repetition keep the token.
//   - Release and Extend act on a grant only if owner and token are its own.
//     No call re-creates a grant that has gone.
//   - Waiters are granted in the order in which the store saw their tickets,
//     and a request without a ticket does not pass a live ticket.
//   - An expiry is judged by the store's own clock, never by comparing clocks
//     of two machines. Only durations cross this interface.
//   - Every method obeys its context: it returns soon after the context ends,
//     whatever the store does.
//   - All methods may be called concurrently.
//
// # Unknown outcomes
//
// An error that matches [ErrNotApplied] or [ErrInvalid] says that the request
// certainly had no effect. Any other failure is taken as unknown: package dlm
// repeats the request with the same owner, or withdraws it.
package driver

import (
	"context"
	"time"
)

// Mode is how a key is taken.
type Mode uint8

const (
	// Exclusive grants exclude all others, up to the limit of the key.
	Exclusive Mode = iota
	// Shared grants exclude exclusive ones only.
	Shared
)

func (m Mode) String() string {
	if m == Shared {
		return "shared"
	}
	return "exclusive"
}

// Request asks for a grant. Package dlm has checked it: the key is non-empty
// UTF-8 of at most 512 bytes, the TTL lies within the backend's [Properties],
// the limit is at least 1, and 1 for shared requests.
type Request struct {
	Key string
	// Owner is the unique value of this acquisition. It is opaque.
	Owner string
	// TTL is how long the grant lasts unless it is renewed.
	TTL time.Duration
	// Mode is Exclusive or Shared.
	Mode Mode
	// Limit is how many exclusive grants the key may have at once: 1 for a
	// lock, n for a semaphore of n permits. Callers that use a key at the same
	// time with different limits get a [*LimitError].
	Limit int
	// Enqueue asks for a ticket if the key cannot be granted now. Without it
	// a refused request leaves nothing behind.
	Enqueue bool
	// Manager names the caller's subscription: wake-ups for this request go
	// to the [Notifier.Listen] call with the same name. It may be empty.
	Manager string
}

// Lease is a grant.
type Lease struct {
	Key   string
	Owner string
	// Token is the fencing token.
	Token int64
	// TTL is the granted time to live: at least the requested one, more where
	// the store has a floor or a step. In a call to Extend it is the wanted
	// one.
	TTL  time.Duration
	Mode Mode
	// Age is how long before the start of the call that returned it the lease
	// began to run. It is zero wherever the call itself started or restarted
	// the lease; stores whose leases ride on a shared session set it.
	Age time.Duration
}

// Renewal is one entry of a batch for [Backend.Extend]: Lease goes in, and
// Lease.TTL, Lease.Age and Err come out.
type Renewal struct {
	Lease Lease
	Err   error
}

// TokenStrength says what the tokens of a store rest on.
type TokenStrength uint8

const (
	// TokensStrict rise for as long as the store keeps acknowledged writes.
	TokensStrict TokenStrength = iota
	// TokensClock may fall behind when the store loses writes and its wall
	// clock is set back at the same time.
	TokensClock
)

// Properties describes a backend. They are constant for its life.
type Properties struct {
	// Name is the backend's name in errors and metrics, such as "redis".
	Name string
	// Tokens says what the fencing tokens rest on.
	Tokens TokenStrength
	// MinTTL is the shortest TTL that is granted: a shorter request is raised
	// to it. Zero means no floor beyond that of package dlm.
	MinTTL time.Duration
	// LivenessWindow bounds how long a waiter that has died can hold up those
	// behind it. A ticket, and a grant that was handed over and not yet
	// confirmed, lapses three quarters of the window after the waiter's last
	// Acquire; package dlm repeats Acquire four times in a window. A ticket
	// that has lapsed is passed over, but keeps its place for as long again, in
	// case its waiter was only slow. Zero means that tickets belong to a
	// session which the backend keeps alive itself.
	LivenessWindow time.Duration
	// FairQueue says that waiters are served in order of arrival.
	FairQueue bool
	// SharedMode and Permits say which requests beyond a plain exclusive
	// lock are served: Mode Shared, and a Limit above 1.
	SharedMode, Permits bool
	// SessionLeases says that grants last as long as a session of this
	// backend, whatever their TTL: package dlm then releases a grant whose
	// TTL has run out.
	SessionLeases bool
	// PollInterval is how often a waiter looks again when there is no
	// Notifier, or none at the moment. Zero means one second.
	PollInterval time.Duration
}

// Backend is a store's driver.
type Backend interface {
	// Acquire grants the key, or refuses with a [*HeldError]; with
	// Request.Enqueue the owner then has a ticket.
	//
	// It is idempotent by owner. An owner that holds the key gets its grant
	// again, same token, running for at least its TTL from now: the call counts
	// as a renewal, and confirms a grant that was handed over. An owner that
	// has a ticket keeps its place, and the ticket is refreshed.
	//
	// Any Acquire that is not refused as invalid drops what has expired on the
	// key and serves its queue, so that waiters move on even when nobody
	// releases.
	Acquire(ctx context.Context, req Request) (Lease, error)

	// Extend renews a batch of grants and answers in place, one by one. A
	// grant then runs for at least the given TTL from now; it is never
	// shortened, so that a request which arrives late does no harm. Entries
	// that are not held by that owner with that token get a [*LostError] with
	// the key and token of the entry. A failure of the whole call is written
	// into every entry.
	Extend(ctx context.Context, batch []Renewal)

	// Release gives up the owner's grant of the lease's key and hands the key
	// to the head of the queue in the same step. If the grant is not there,
	// it returns a [*LostError] with the lease's key and token.
	//
	// A zero token withdraws whatever the owner has on the key, grant or
	// ticket; nothing being there is then no error.
	Release(ctx context.Context, lease Lease) error

	// Properties describes the backend.
	Properties() Properties

	// Close frees what the backend itself opened. It does not release grants,
	// and does not close a client that the user passed in. Calls after Close
	// return [ErrClosed]. A second Close does nothing.
	Close() error
}

// EventKind is the kind of an [Event].
type EventKind uint8

const (
	// EventUp says that the subscription stands from here on. Events before
	// it may have been missed, so package dlm looks again for every waiter.
	EventUp EventKind = iota + 1
	// EventGrant says that the release of another has handed the key to a
	// waiter, and carries the grant. The grant runs for the shorter of its TTL
	// and three quarters of the liveness window, counted from a moment not
	// before the waiter's last Acquire, until Acquire or Extend confirms it.
	EventGrant
	// EventWake says that a waiter should call Acquire again now. It may be
	// repeated.
	EventWake
	// EventLost says that a grant is gone; Err is the [*LostError] with its key
	// and token.
	EventLost
)

// Event is news from the store for one owner.
type Event struct {
	Kind EventKind
	// Ticket is set for EventGrant: the [HeldError.Ticket] that was granted.
	// Package dlm takes the grant only if that is the ticket it knows of. It
	// thereby tells a grant from one that came late, lapsed, and was followed
	// by a new ticket of the same owner.
	Ticket int64
	// Lease holds the grant for EventGrant; for EventWake and EventLost only
	// Key and Owner are set.
	Lease Lease
	// Err is set for EventLost.
	Err error
}

// Notifier is implemented by backends that can tell of changes.
type Notifier interface {
	// Listen delivers the events of all requests that name this manager, by
	// calling handle in order and never concurrently. handle does not block.
	// Listen calls it with EventUp once the subscription stands, and returns
	// when the context ends or the subscription breaks; package dlm then calls
	// it again after a pause. There is at most one Listen call per manager.
	//
	// Delivery is not guaranteed, and an event may overtake the answer of a
	// call that is under way. Package dlm goes on looking for itself, at a
	// slower pace.
	Listen(ctx context.Context, manager string, handle func(Event)) error
}

// KeyInfo is a snapshot of one key.
type KeyInfo struct {
	Key string
	// Limit is the limit in force, 0 if nobody holds or waits.
	Limit int
	// Holders are the unexpired grants, by rising token.
	Holders []HolderInfo
	// Waiters are the live tickets, head first.
	Waiters []WaiterInfo
}

// HolderInfo describes a grant.
type HolderInfo struct {
	Owner string
	Token int64
	Mode  Mode
	TTL   time.Duration
	// Held is how long ago the grant was made, by the store's clock.
	Held time.Duration
	// Remaining is how long the grant runs unless it is renewed.
	Remaining time.Duration
}

// WaiterInfo describes a ticket.
type WaiterInfo struct {
	Owner string
	Mode  Mode
	// Waiting is how long ago the ticket was taken, by the store's clock.
	Waiting time.Duration
}

// Inspector is implemented by backends whose records can be read.
type Inspector interface {
	// Inspect describes one key. A key that nobody holds or waits for is no
	// error: its KeyInfo has no holders and no waiters.
	Inspect(ctx context.Context, key string) (KeyInfo, error)

	// List describes up to limit keys that begin with prefix and sort after
	// the key given by after, in byte order, leaving out keys that nobody
	// holds or waits for. A limit of zero or less means 1,000. Fewer keys
	// than the limit mean that there are no more.
	List(ctx context.Context, prefix, after string, limit int) ([]KeyInfo, error)
}

// Forcer is implemented by backends that can remove somebody else's grant.
type Forcer interface {
	// ForceRelease removes the grant with this token from the key, or all its
	// grants if the token is 0, hands the key on, and returns what it
	// removed. Nothing to remove is no error.
	ForceRelease(ctx context.Context, key string, token int64) ([]HolderInfo, error)
}

// Severity says how much a [Finding] matters.
type Severity uint8

const (
	// SeverityOK says that it is as it should be.
	SeverityOK Severity = iota
	// SeverityUnknown says that it could not be found out.
	SeverityUnknown
	// SeverityWarning says that locks work, but that less is promised than could
	// be.
	SeverityWarning
	// SeverityCritical says that locks do not work, or can be lost in ordinary
	// operation.
	SeverityCritical
)

func (s Severity) String() string {
	switch s {
	case SeverityOK:
		return "ok"
	case SeverityUnknown:
		return "unknown"
	case SeverityWarning:
		return "warning"
	}
	return "critical"
}

// Finding is what a check of a store has found out about one thing.
type Finding struct {
	// Check names what was looked at, in one or two words that stay the same.
	Check    string
	Severity Severity
	// Server names the server that it is about, or is empty.
	Server string
	// Detail says what was found, in one sentence.
	Detail string
	// Fix says what to change, or is empty.
	Fix string
}

// Checker is implemented by backends that can tell whether their store is set
// up well for locks.
type Checker interface {
	// Check looks at the store and changes nothing that lasts. A store that
	// cannot be reached is a finding, not an error; the error is for calls that
	// could not be made, such as when the context has ended.
	Check(ctx context.Context) ([]Finding, error)
}

// As finds the first backend in b's chain of Unwrap methods that is a T.
func As[T any](b Backend) (T, bool) {
	for b != nil {
		if t, ok := b.(T); ok {
			return t, true
		}
		u, ok := b.(interface{ Unwrap() Backend })
		if !ok {
			break
		}
		b = u.Unwrap()
	}
	var zero T
	return zero, false
}
