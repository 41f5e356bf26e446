package secure

// EventKind is the kind of an [Event].
type EventKind uint8

// What observers are told. For every EventAdmitted there is one EventGranted or one
// EventFailed after it; for every EventGranted, one EventEnded after it. So the
// number of acquisitions under way is EventAdmitted less EventGranted and
// EventFailed, and that of locks held EventGranted less EventEnded; both are exact
// when all is at rest, and [Manager.Stats] has them exactly at any time.
const (
	// EventDenied: a call was refused. Reason says why. With ReasonWait it comes
	// besides EventFailed.
	EventDenied EventKind = iota + 1
	// EventAdmitted: an acquisition goes on to the manager.
	EventAdmitted
	// EventGranted: it got the lock.
	EventGranted
	// EventFailed: it got none.
	EventFailed
	// EventEnded: a lock is no longer held, whatever the reason. It may be told
	// some time after it happened.
	EventEnded
)

// Event is what an [Observer] is told. Client and Key are what came from outside,
// cut as in [DeniedError]; do not make them labels of a metric.
type Event struct {
	Kind   EventKind
	Client string
	Key    string
	// Reason is set for EventDenied.
	Reason Reason
}

// Observer is told of what a [Manager] admits and refuses: for metrics and logs. What
// becomes of locks is told in more detail by the [dlm.Observer] of the manager
// behind it.
//
// Observe is called from many goroutines at once: EventEnded from one of its own,
// the others from the caller's, which it holds up if it blocks. A panic is
// swallowed. It may use the manager.
type Observer interface {
	Observe(Event)
}

// observe tells the observer, and shields the caller from it.
func (g *gate) observe(e Event) {
	if g.policy.Observer == nil {
		return
	}
	defer func() { _ = recover() }()
	g.policy.Observer.Observe(e)
}

// Stats is what is counted at one moment, for all clients together.
type Stats struct {
	// Held is the number of locks held, every handle of a nested lock counting.
	Held int
	// Waiting is the number of acquisitions under way.
	Waiting int
	// Clients is the number of clients remembered.
	Clients int
}
