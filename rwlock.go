package dlm

import (
	"context"
	"time"
)

// ReadWriteLock is a key that many readers hold together, or one writer alone. A
// hold is a [Lock] with everything that belongs to it: readers have a time to
// live each, are renewed one by one, and die one by one. The tokens of readers
// and writers are one sequence: who was granted the key later has the larger
// token. A ReadWriteLock keeps no state of its own, needs no closing, and is safe
// for concurrent use.
//
// Readers and writers stand in one queue, in the order in which the store saw
// them, where its Properties say FairQueue. So a writer waits for those who came
// before it and no others; readers behind a waiting writer wait although the key
// is read; and readers that stand behind each other enter together. The price is
// that one reader that stays for long, with a writer behind it, holds up all.
//
// With a [WithOwner] context, an owner that reads may read again at once, whoever
// waits. An owner that reads and asks to write gets an [*UpgradeError] at once: it
// would wait for itself, and two of them for each other. An owner that writes and
// asks to read gets a further handle of its write lock (same token, Mode
// Exclusive), and the key is exclusively its own until the last of its handles is
// released.
//
// What it does not do: there is no downgrade. A store has no step that turns a
// write lock into a read lock, and between the release of the one and the grant of
// the other a writer could come. Without an owner, a caller that holds the key in
// any mode and asks for it in a conflicting one waits for itself until its context
// ends.
type ReadWriteLock struct {
	m   OptionsManager
	key string
}

// NewReadWriteLock returns the read-write lock of a key. It asks nothing of the
// store. A store without shared locks is refused with an error that matches
// [errors.ErrUnsupported]; a wrong argument with one that matches [ErrInvalid].
func NewReadWriteLock(m OptionsManager, key string) (*ReadWriteLock, error) {
	if m == nil {
		return nil, invalidf("manager is nil")
	}
	if err := checkKey(key); err != nil {
		return nil, err
	}
	if p := m.Properties(); !p.SharedMode {
		return nil, unsupported("%s has no read-write locks", p.Name)
	}
	return &ReadWriteLock{m: m, key: key}, nil
}

// Key is the key.
func (rw *ReadWriteLock) Key() string { return rw.key }

// AcquireRead takes the key for reading for at least ttl, waiting in the queue
// until the context ends. It is [Manager.AcquireLock] for readers, with the same
// errors.
func (rw *ReadWriteLock) AcquireRead(ctx context.Context, ttl time.Duration) (*Lock, error) {
	return rw.m.Acquire(ctx, rw.key, ttl, &AcquireOptions{Shared: true})
}

// TryRead is AcquireRead without the wait: if somebody writes, or waits, the error
// matches [ErrHeld].
func (rw *ReadWriteLock) TryRead(ctx context.Context, ttl time.Duration) (*Lock, error) {
	return rw.m.Acquire(ctx, rw.key, ttl, &AcquireOptions{Shared: true, NoWait: true})
}

// AcquireWrite takes the key for writing for at least ttl, waiting in the queue
// until the context ends. It is [Manager.AcquireLock] for writers, with the same
// errors; an owner that holds the key for reading gets an [*UpgradeError].
func (rw *ReadWriteLock) AcquireWrite(ctx context.Context, ttl time.Duration) (*Lock, error) {
	return rw.m.Acquire(ctx, rw.key, ttl, nil)
}

// TryWrite is AcquireWrite without the wait: if somebody reads, writes or waits,
// the error matches [ErrHeld].
func (rw *ReadWriteLock) TryWrite(ctx context.Context, ttl time.Duration) (*Lock, error) {
	return rw.m.Acquire(ctx, rw.key, ttl, &AcquireOptions{NoWait: true})
}
