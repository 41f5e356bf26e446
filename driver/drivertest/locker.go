package drivertest

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
)

// manager is what the suite uses of a [dlm.Manager].
type manager interface {
	dlm.LockManager
	Acquire(ctx context.Context, key string, ttl time.Duration, opts *dlm.AcquireOptions) (*dlm.Lock, error)
	GetLock(ctx context.Context, key string) (*dlm.LockInfo, error)
	ListLocks(ctx context.Context, prefix, after string, limit int) ([]dlm.LockInfo, error)
	ForceRelease(ctx context.Context, key string, token int64) ([]dlm.HolderInfo, error)
	Properties() driver.Properties
	Close(ctx context.Context) error
}

// managed is one manager of a case.
type managed struct {
	manager
	env    *env
	client *client
	faults *Faults
	once   sync.Once
}

// shut closes the manager, unless the case has done so.
func (m *managed) shut() {
	m.once.Do(func() {
		err := m.Close(m.env.within(m.env.patience))
		if err != nil && !errors.Is(err, dlm.ErrClosed) {
			m.env.fatalf("Manager.Close: %w", err)
		}
	})
}

// lock takes a key, waiting for it.
func (m *managed) lock(key string, ttl time.Duration) *dlm.Lock {
	l, err := m.AcquireLock(m.env.within(m.env.patience), key, ttl)
	if err != nil {
		m.env.fatalf("AcquireLock of %q: %w", key, err)
	}
	return l
}

// unlock releases a lock.
func (m *managed) unlock(l *dlm.Lock) {
	if err := m.ReleaseLock(m.env.within(m.env.patience), l); err != nil {
		m.env.fatalf("ReleaseLock of %q: %w", l.Key, err)
	}
}

// locker takes locks on a backend, or through a manager: for the cases that
// run on both.
type locker interface {
	// try takes the key or is refused.
	try(key string, want want) (*grip, error)
	// wait takes the key, and waits for it until the context ends.
	wait(ctx context.Context, key string, want want) (*grip, error)
	// die ends the process that the locker stands for.
	die()
}

// want is how a key is wanted.
type want struct {
	ttl    time.Duration // zero means long
	shared bool
	limit  int // zero means 1
}

// grip is a lock that a locker took.
type grip struct {
	owner   string
	token   int64
	ttl     time.Duration
	release func() error
	extend  func(ttl time.Duration) error
	lock    *dlm.Lock // if a manager took it
}

// both makes two cases of one: on the backend, and through a manager that does not
// renew, and so is dead as far as its locks are concerned.
func both(name, guarantee, why string, run func(e *env, open func() locker)) []Case {
	return bothOver(name, guarantee, why, quick, run)
}

// bothOver is both with managers of some configuration. If they renew, nobody can die.
func bothOver(name, guarantee, why string, cfg func() *dlm.LockConfig, run func(e *env, open func() locker)) []Case {
	return []Case{
		{
			Name: "Backend/" + name, Guarantee: guarantee, Why: why,
			run: func(e *env) { run(e, func() locker { return &rawLocker{e.open()} }) },
		},
		{
			Name: "Manager/" + name, Guarantee: guarantee, Why: why,
			run: func(e *env) { run(e, func() locker { return &managedLocker{e.manage(cfg())} }) },
		},
	}
}

// quick is the configuration of managers that do not renew.
func quick() *dlm.LockConfig {
	return &dlm.LockConfig{AutoRenew: dlm.Off, RetryInterval: 5 * time.Millisecond, Label: "conformance"}
}

func (e *env) openManaged() locker { return &managedLocker{e.manage(quick())} }

// rawLocker does on a backend what a manager would, in the simplest way.
type rawLocker struct{ *client }

func (r *rawLocker) request(key string, w want) driver.Request {
	req := driver.Request{Key: key, Owner: r.env.name("owner"), TTL: w.ttl, Limit: w.limit}
	if w.shared {
		req.Mode = driver.Shared
	}
	return req
}

func (r *rawLocker) try(key string, w want) (*grip, error) {
	lease, err := r.acquire(r.request(key, w))
	if err != nil {
		return nil, err
	}
	return r.grip(lease), nil
}

func (r *rawLocker) wait(ctx context.Context, key string, w want) (*grip, error) {
	req := r.request(key, w)
	req.Enqueue = true
	for pause := time.Millisecond; ; pause = r.nextPause(pause) {
		lease, err := r.acquire(req)
		if err == nil {
			return r.grip(lease), nil
		}
		if !errors.Is(err, driver.ErrHeld) {
			return nil, err
		}
		if _, ended := awaitFor(ctx.Done(), pause); ended {
			return nil, errors.Join(ctx.Err(), r.release(driver.Lease{Key: req.Key, Owner: req.Owner}))
		}
	}
}

func (r *rawLocker) grip(lease driver.Lease) *grip {
	return &grip{
		owner: lease.Owner, token: lease.Token, ttl: lease.TTL,
		release: func() error { return r.release(lease) },
		extend: func(ttl time.Duration) error {
			_, err := r.extend(lease, ttl)
			return err
		},
	}
}

// managedLocker is a manager.
type managedLocker struct{ *managed }

func (m *managedLocker) acquire(ctx context.Context, key string, w want, noWait bool) (*grip, error) {
	if w.ttl == 0 {
		w.ttl = m.env.long
	}
	l, err := m.Acquire(ctx, key, w.ttl, &dlm.AcquireOptions{NoWait: noWait, Shared: w.shared, Limit: w.limit})
	if err != nil {
		return nil, err
	}
	return &grip{
		owner: l.Value, token: l.Token, ttl: l.TTL, lock: l,
		release: func() error { return m.ReleaseLock(m.env.within(m.env.patience), l) },
		extend:  func(ttl time.Duration) error { return m.ExtendLock(m.env.within(m.env.patience), l, ttl) },
	}, nil
}

func (m *managedLocker) try(key string, w want) (*grip, error) {
	return m.acquire(m.env.within(m.env.patience), key, w, true)
}

func (m *managedLocker) wait(ctx context.Context, key string, w want) (*grip, error) {
	return m.acquire(ctx, key, w, false)
}

// die does nothing: see both.
func (m *managedLocker) die() {}

// take is try that must succeed.
func (e *env) take(l locker, key string, w want) *grip {
	g, err := l.try(key, w)
	if err != nil {
		e.fatalf("%q was not granted: %w", key, err)
	}
	return g
}

// denied checks that a try is refused.
func (e *env) denied(l locker, key string, w want) {
	g, err := l.try(key, w)
	switch {
	case err == nil:
		e.fatalf("%q was granted with token %d, but should have been refused", key, g.token)
	case !errors.Is(err, driver.ErrHeld):
		e.fatalf("the refusal of %q does not match ErrHeld: %w", key, err)
	}
}

// obtain is wait that must succeed.
func (e *env) obtain(l locker, key string, w want) *grip {
	g, err := l.wait(e.within(e.patience), key, w)
	if err != nil {
		e.fatalf("%q was not granted to a waiter: %w", key, err)
	}
	return g
}

// drop releases what must be held.
func (e *env) drop(g *grip) {
	if err := g.release(); err != nil {
		e.fatalf("release by %q: %w", g.owner, err)
	}
}

// queue starts a waiter, and returns when it is in the queue.
func (e *env) queue(g *group, l locker, key string, w want) <-chan *grip {
	before := e.history.waiting(key)
	got := make(chan *grip, 1)
	g.start(func() { got <- e.obtain(l, key, w) })
	e.eventually("a waiter is in the queue", func() bool { return e.history.waiting(key) > before })
	return got
}
