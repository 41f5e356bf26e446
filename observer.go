package dlm

import (
	"time"

	"github.com/go-dlm/dlm/driver"
)

// EventKind is the kind of an [Event].
type EventKind uint8

// What observers are told. For every lock there is one EventAcquired, and then
// one EventReleased or one EventLost; for every EventWaiting, one
// EventWaitEnded.
const (
	// EventAcquired: a lock was granted. Duration is the time since the call
	// began; Waited says whether it had to queue.
	EventAcquired EventKind = iota + 1
	// EventAcquireFailed: an acquisition ended without a lock. Err says why
	// (see [ErrHeld], [context.Canceled] and the others); Duration is the time
	// since the call began.
	EventAcquireFailed
	// EventWaiting: a caller began to wait in a queue.
	EventWaiting
	// EventWaitEnded: a caller's wait ended, with or without a lock. Duration
	// is how long it waited.
	EventWaitEnded
	// EventReleased: a held lock was released. Duration is how long it was
	// held; Err is what Release returned.
	EventReleased
	// EventExtended: a held lock was renewed, by the keeper or by Extend.
	// Margin is how far its old deadline still was.
	EventExtended
	// EventExtendFailed: a renewal failed, but the lock is still held. Margin
	// is how far its deadline is.
	EventExtendFailed
	// EventLost: a held lock was lost. Reason says why; Duration is how long
	// it was held.
	EventLost
	// EventStoreError: a call to the store failed, and may be repeated. Op
	// says which call.
	EventStoreError
	// EventForced: somebody's lock was removed by ForceRelease. Token is the
	// removed one's token, Value its value.
	EventForced
)

// Event is what an [Observer] is told. Fields that a kind does not use are
// zero.
type Event struct {
	Kind    EventKind
	Backend string
	// Op is the operation that failed, for EventStoreError: "acquire",
	// "extend", "release", "withdraw", "listen", "get", "list" or "force".
	Op    string
	Key   string
	Value string
	Token int64
	Mode  driver.Mode
	// Waited is set for EventAcquired if the call had to queue.
	Waited   bool
	Duration time.Duration
	Margin   time.Duration
	Reason   LostReason
	Err      error
}

// Observer is told of everything that a [Manager] does: for metrics, traces
// and logs.
//
// Observe is called from many goroutines at once. Events of calls (acquire,
// release, force) come from the goroutine of the caller; renewals and losses
// come one after another from a goroutine of their own, which may report an
// event some time after it happened. An Observe that
// blocks holds up that caller or the later background events, which pile up in
// memory, but no renewal and no loss signal. A panic in Observe is swallowed.
// Observe may use the manager and its locks, but must not close it.
type Observer interface {
	Observe(Event)
}

// Observers joins several observers into one. Nil ones are left out.
func Observers(list ...Observer) Observer {
	var all observers
	for _, o := range list {
		if o != nil {
			all = append(all, o)
		}
	}
	return all
}

type observers []Observer

func (all observers) Observe(e Event) {
	for _, o := range all {
		observe(o, e)
	}
}

// observe shields the manager, and the other observers, from a panic.
func observe(o Observer, e Event) {
	defer func() { _ = recover() }()
	o.Observe(e)
}
