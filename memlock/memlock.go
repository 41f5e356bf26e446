// Package memlock keeps locks in this process's memory. It serves tests, and
// it is the reference model of the backend contract: where a document is
// silent, what memlock does is right.
//
// # Guarantees
//
// Locks exclude each other among the managers that share a [Store], and no
// further: another process has another store. Nothing survives the process.
//
// # Fencing token
//
// One counter for the whole store, beginning at 1.
//
// # Errors
//
// Every failed request certainly had no effect and matches
// [driver.ErrNotApplied], [driver.ErrInvalid] or [driver.ErrClosed].
package memlock

import (
	"context"
	"fmt"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
)

// Options configures a backend. Nil means the defaults.
type Options struct {
	// LivenessWindow bounds how long a waiter that has died can hold up those
	// behind it. It must be between 1ms and 1h. Defaults to 10s.
	LivenessWindow time.Duration
}

const defaultLivenessWindow = 10 * time.Second

// Backend is one client of a [Store]. It is safe for concurrent use.
type Backend struct {
	store  *Store
	window time.Duration
	closed chan struct{} // closed under store.mu
}

var (
	_ driver.Backend   = (*Backend)(nil)
	_ driver.Notifier  = (*Backend)(nil)
	_ driver.Inspector = (*Backend)(nil)
	_ driver.Forcer    = (*Backend)(nil)
)

// New returns a backend on the store.
func New(store *Store, opts *Options) (*Backend, error) {
	if store == nil {
		return nil, fmt.Errorf("%w: store is nil", driver.ErrInvalid)
	}
	window := defaultLivenessWindow
	if opts != nil && opts.LivenessWindow != 0 {
		window = opts.LivenessWindow
	}
	if window < time.Millisecond || window > time.Hour {
		return nil, fmt.Errorf("%w: Options.LivenessWindow is %v, must be between 1ms and 1h", driver.ErrInvalid, window)
	}
	return &Backend{store: store, window: window, closed: make(chan struct{})}, nil
}

// NewLockManager returns a manager over a new backend on the store.
func NewLockManager(store *Store, cfg *dlm.LockConfig, opts *Options) (*dlm.Manager, error) {
	b, err := New(store, opts)
	if err != nil {
		return nil, err
	}
	return dlm.NewManager(b, cfg)
}

// Properties implements [driver.Backend].
func (b *Backend) Properties() driver.Properties {
	return driver.Properties{
		Name:           "memory",
		Tokens:         driver.TokensStrict,
		LivenessWindow: b.window,
		FairQueue:      true,
		SharedMode:     true,
		Permits:        true,
	}
}

// enter begins a call: unless it returns an error, the store is locked.
func (b *Backend) enter(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%w: %w", driver.ErrNotApplied, err)
	}
	b.store.mu.Lock()
	select {
	case <-b.closed:
		b.store.mu.Unlock()
		return driver.ErrClosed
	default:
		return nil
	}
}

// Acquire implements [driver.Backend].
func (b *Backend) Acquire(ctx context.Context, req driver.Request) (driver.Lease, error) {
	if err := b.enter(ctx); err != nil {
		return driver.Lease{}, err
	}
	defer b.store.mu.Unlock()
	return b.store.acquire(req, b.ticketLife())
}

// ticketLife is how long a ticket, or a grant that was handed over, lasts
// unless its waiter is heard of again.
func (b *Backend) ticketLife() time.Duration { return b.window / 4 * 3 }

// Extend implements [driver.Backend].
func (b *Backend) Extend(ctx context.Context, batch []driver.Renewal) {
	if err := b.enter(ctx); err != nil {
		for i := range batch {
			batch[i].Err = err
		}
		return
	}
	defer b.store.mu.Unlock()
	for i := range batch {
		batch[i].Err = b.store.extend(&batch[i].Lease)
	}
}

// Release implements [driver.Backend].
func (b *Backend) Release(ctx context.Context, lease driver.Lease) error {
	if err := b.enter(ctx); err != nil {
		return err
	}
	defer b.store.mu.Unlock()
	return b.store.release(lease)
}

// Listen implements [driver.Notifier].
func (b *Backend) Listen(ctx context.Context, manager string, handle func(driver.Event)) error {
	if err := b.enter(ctx); err != nil {
		return err
	}
	sub := &subscription{ready: make(chan struct{}, 1)}
	b.store.subs[manager] = sub
	b.store.mu.Unlock()
	defer func() {
		b.store.mu.Lock()
		defer b.store.mu.Unlock()
		if b.store.subs[manager] == sub {
			delete(b.store.subs, manager)
		}
	}()

	handle(driver.Event{Kind: driver.EventUp})
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-b.closed:
			return driver.ErrClosed
		case <-sub.ready:
		}
		b.store.mu.Lock()
		events := sub.events
		sub.events = nil
		b.store.mu.Unlock()
		for _, e := range events {
			handle(e)
		}
	}
}

// Inspect implements [driver.Inspector].
func (b *Backend) Inspect(ctx context.Context, key string) (driver.KeyInfo, error) {
	if err := b.enter(ctx); err != nil {
		return driver.KeyInfo{}, err
	}
	defer b.store.mu.Unlock()
	return b.store.inspect(key), nil
}

// List implements [driver.Inspector].
func (b *Backend) List(ctx context.Context, prefix, after string, limit int) ([]driver.KeyInfo, error) {
	if err := b.enter(ctx); err != nil {
		return nil, err
	}
	defer b.store.mu.Unlock()
	return b.store.list(prefix, after, limit), nil
}

// ForceRelease implements [driver.Forcer].
func (b *Backend) ForceRelease(ctx context.Context, key string, token int64) ([]driver.HolderInfo, error) {
	if err := b.enter(ctx); err != nil {
		return nil, err
	}
	defer b.store.mu.Unlock()
	return b.store.force(key, token), nil
}

// Close implements [driver.Backend].
func (b *Backend) Close() error {
	b.store.mu.Lock()
	defer b.store.mu.Unlock()
	select {
	case <-b.closed:
	default:
		close(b.closed)
	}
	return nil
}
