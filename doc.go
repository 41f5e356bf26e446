// Package dlm takes distributed locks: any number of processes on any number
// of machines take turns on a named thing, over a store that they share.
//
// What two holders can never do: while [Lock.Deadline] lies ahead, clocks run
// at about the same rate, and the store keeps what it acknowledged, nobody else
// holds the key. Tokens rise strictly from holder to holder, so a resource that
// refuses a lower [Lock.Token] than it has seen never accepts a stale holder.
// And the holder is told of a loss, through [Lock.Done], before anyone else can
// be granted the key.
//
// What can still happen: no lock service can stop a process that was paused
// from going on, for a moment, after its lease ran out. Where that would do
// harm, let the resource check the token. What each store promises is in
// docs/GUARANTEES.md.
//
// Every store has a package of its own, which makes a [Manager]:
//
//	m, err := sqlitelock.NewLockManager("/var/lib/app/locks.db", nil, nil)
//	if err != nil {
//		return err
//	}
//	defer m.Close(context.Background())
//
//	err = dlm.WithDistributedLock(ctx, m, "payment:42", 30*time.Second, func(ctx context.Context) error {
//		return charge(ctx) // ctx ends if the lock is lost
//	})
//
// Limits across machines are a [Semaphore], many readers or one writer a
// [ReadWriteLock], several keys at once a [MultiLock].
package dlm
