package dlm

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// LockManager is what patterns and wrappers build on. [*Manager] implements
// it, and so does every wrapper of one. Its locks are those of a [Manager].
type LockManager interface {
	// AcquireLock takes the key, waiting in its queue until the context ends.
	AcquireLock(ctx context.Context, key string, ttl time.Duration) (*Lock, error)
	// TryLock takes the key if that is possible now; otherwise the error
	// matches [ErrHeld].
	TryLock(ctx context.Context, key string, ttl time.Duration) (*Lock, error)
	// ReleaseLock gives a lock up, see [Lock.Release].
	ReleaseLock(ctx context.Context, lock *Lock) error
	// ExtendLock renews a lock, see [Lock.Extend].
	ExtendLock(ctx context.Context, lock *Lock, ttl time.Duration) error
}

// OptionsManager is a [LockManager] whose locks can be taken with options, which
// semaphores and read-write locks need. [*Manager] implements it, and so does a
// wrapper that is to carry these patterns.
type OptionsManager interface {
	LockManager
	// Acquire takes the key as the options say, see [Manager.Acquire].
	Acquire(ctx context.Context, key string, ttl time.Duration, opts *AcquireOptions) (*Lock, error)
	// GetLock tells who holds the key and who waits, see [Manager.GetLock].
	GetLock(ctx context.Context, key string) (*LockInfo, error)
	// Properties describes the store.
	Properties() driver.Properties
}

// Manager takes, renews and releases locks on one store. It is safe for
// concurrent use, and meant to be shared: one keeper goroutine renews all its
// locks, and one subscription wakes all its waiters. Close it when done.
//
// What a manager cannot promise: a process that is stopped for longer than a
// lock's TTL may wake up and act before it learns that the lock is gone. Let
// the protected resource check [Lock.Token].
type Manager struct {
	backend   driver.Backend
	notifier  driver.Notifier  // or nil
	inspector driver.Inspector // or nil
	forcer    driver.Forcer    // or nil
	checker   driver.Checker   // or nil
	props     driver.Properties
	cfg       LockConfig
	id        string // names the subscription
	clock     clock

	ctx    context.Context // ends when the manager closes
	cancel context.CancelCauseFunc

	mu      sync.Mutex
	closed  bool
	calls   sync.WaitGroup // calls and background goroutines
	keeper  keeper
	grants  map[string]*grant   // held ones by value
	waiters map[string]*waiter  // by value
	owned   map[ownedKey]*owned // for re-entry
	cleaner cleaner
	listen  listener
	events  eventQueue
}

var _ OptionsManager = (*Manager)(nil)

// ownedKey finds a lock for re-entry.
type ownedKey struct{ key, owner string }

// owned is a lock that its owner may enter again.
type owned struct {
	ready chan struct{} // closed when g is settled
	g     *grant        // nil if the acquisition failed
}

// NewManager returns a manager over a backend, which it owns from then on:
// Close closes it. A nil cfg means the defaults. If NewManager fails, it has
// closed the backend.
//
// Users call NewLockManager of a backend's package instead.
func NewManager(backend driver.Backend, cfg *LockConfig) (*Manager, error) {
	if backend == nil {
		return nil, invalidf("backend is nil")
	}
	conf, err := cfg.withDefaults()
	if err != nil {
		return nil, errors.Join(err, backend.Close())
	}
	m := &Manager{
		backend: backend,
		props:   backend.Properties(),
		cfg:     conf,
		clock:   newClock(),
		grants:  make(map[string]*grant),
		waiters: make(map[string]*waiter),
		owned:   make(map[ownedKey]*owned),
	}
	m.notifier, _ = driver.As[driver.Notifier](backend)
	m.inspector, _ = driver.As[driver.Inspector](backend)
	m.forcer, _ = driver.As[driver.Forcer](backend)
	m.checker, _ = driver.As[driver.Checker](backend)
	m.id = newValue(conf.Label)
	m.ctx, m.cancel = context.WithCancelCause(context.Background())
	m.keeper = newKeeper(m)
	m.calls.Go(func() {
		m.keeper.run(m.ctx)
	})
	return m, nil
}

// Properties describes the store.
func (m *Manager) Properties() driver.Properties { return m.props }

// AcquireLock takes the key for at least ttl, waiting in the key's queue if it
// is held. The context bounds the wait only: the lock outlives it. Unless
// LockConfig.AutoRenew is Off, the lock is renewed until it is released.
//
// If the context ends first, the error matches its error, and [ErrHeld] if the
// key was held. If the store could not be reached, the error is the store's.
// In either case nothing is left in the store; where that could not be
// confirmed, the error also matches [ErrIndeterminate], the manager goes on
// cleaning up in the background, and what is left ends with its TTL.
func (m *Manager) AcquireLock(ctx context.Context, key string, ttl time.Duration) (*Lock, error) {
	return m.Acquire(ctx, key, ttl, nil)
}

// TryLock is AcquireLock without the wait: if the key is held, or if others
// wait for it, the error matches [ErrHeld] and is a [*LockConflictError].
func (m *Manager) TryLock(ctx context.Context, key string, ttl time.Duration) (*Lock, error) {
	return m.Acquire(ctx, key, ttl, &AcquireOptions{NoWait: true})
}

// Acquire is AcquireLock with options: shared locks, locks with several
// holders, no waiting.
func (m *Manager) Acquire(ctx context.Context, key string, ttl time.Duration, opts *AcquireOptions) (*Lock, error) {
	op := "acquire"
	if opts != nil && opts.NoWait {
		op = "try"
	}
	l, err := m.acquire(ctx, key, ttl, opts)
	return l, m.wrap(op, key, err)
}

// ReleaseLock gives a lock of this manager up, see [Lock.Release].
func (m *Manager) ReleaseLock(ctx context.Context, lock *Lock) error {
	if err := m.checkOwn(lock); err != nil {
		return m.wrap("release", keyOf(lock), err)
	}
	return lock.Release(ctx)
}

// ExtendLock renews a lock of this manager, see [Lock.Extend].
func (m *Manager) ExtendLock(ctx context.Context, lock *Lock, ttl time.Duration) error {
	if err := m.checkOwn(lock); err != nil {
		return m.wrap("extend", keyOf(lock), err)
	}
	return lock.Extend(ctx, ttl)
}

func (m *Manager) checkOwn(l *Lock) error {
	switch {
	case l == nil:
		return invalidf("lock is nil")
	case l.g == nil:
		return invalidf("lock was not acquired")
	case l.g.m != m:
		return invalidf("lock belongs to another manager")
	}
	return nil
}

func keyOf(l *Lock) string {
	if l == nil {
		return ""
	}
	return l.Key
}

// Snapshots of the store's records.
type (
	// LockInfo is a snapshot of one key: who holds it and who waits.
	LockInfo = driver.KeyInfo
	// HolderInfo describes a lock; its Owner is the [Lock.Value].
	HolderInfo = driver.HolderInfo
	// WaiterInfo describes a waiter.
	WaiterInfo = driver.WaiterInfo
)

// GetLock tells who holds the key and who waits for it. A free key is no
// error: its LockInfo has no Holders. The answer may be old by the time it
// arrives; do not decide by it whether to act.
func (m *Manager) GetLock(ctx context.Context, key string) (*LockInfo, error) {
	if err := checkKey(key); err != nil {
		return nil, m.wrap("get", key, err)
	}
	var info LockInfo
	err := m.read(ctx, "get", key, func(ctx context.Context) (err error) {
		info, err = m.inspector.Inspect(ctx, key)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &info, nil
}

// ListLocks describes up to limit keys that begin with prefix and sort after
// the key given by after, in byte order, leaving out keys that nobody holds or
// waits for. A limit of zero or less means 1,000.
func (m *Manager) ListLocks(ctx context.Context, prefix, after string, limit int) ([]LockInfo, error) {
	var list []LockInfo
	err := m.read(ctx, "list", prefix, func(ctx context.Context) (err error) {
		list, err = m.inspector.List(ctx, prefix, after, limit)
		return err
	})
	return list, err
}

// read makes a call that changes nothing.
func (m *Manager) read(ctx context.Context, op, key string, call func(context.Context) error) error {
	err := m.enter(ctx)
	if err == nil {
		defer m.calls.Done()
		if m.inspector == nil {
			err = unsupported("%s cannot be read", m.props.Name)
		} else {
			err = m.callStore(ctx, op, key, call)
		}
	}
	return m.wrap(op, key, err)
}

// What a check of the store finds, see [Manager.Check].
type (
	// Finding is what was found out about one thing.
	Finding = driver.Finding
	// Severity says how much a Finding matters.
	Severity = driver.Severity
)

// The severities of a [Finding].
const (
	SeverityOK       = driver.SeverityOK
	SeverityUnknown  = driver.SeverityUnknown
	SeverityWarning  = driver.SeverityWarning
	SeverityCritical = driver.SeverityCritical
)

// Check looks at how the store is set up and says what is good or bad for
// locks. It changes nothing that lasts. A store that cannot be reached is a
// finding, not an error. Backends that have nothing to check return an error
// that matches [errors.ErrUnsupported].
func (m *Manager) Check(ctx context.Context) ([]Finding, error) {
	var findings []Finding
	err := m.enter(ctx)
	if err == nil {
		defer m.calls.Done()
		if m.checker == nil {
			err = unsupported("%s has nothing to check", m.props.Name)
		} else {
			err = guard(ctx, m.props.Name, func(ctx context.Context) (err error) {
				findings, err = m.checker.Check(ctx)
				return err
			})
		}
	}
	return findings, m.wrap("check", "", err)
}

// ForceRelease removes somebody's lock: the one with this token, or all locks
// of the key if the token is 0. It returns what it removed, which may be
// nothing. The holder learns of it at its next renewal at the latest, and works
// on until then, so this breaks the promise that nobody else holds the key.
// Use it when the holder is known to be gone. It is reported to the observer.
func (m *Manager) ForceRelease(ctx context.Context, key string, token int64) ([]HolderInfo, error) {
	removed, err := m.forceRelease(ctx, key, token)
	return removed, m.wrap("force", key, err)
}

func (m *Manager) forceRelease(ctx context.Context, key string, token int64) ([]HolderInfo, error) {
	if err := m.enter(ctx); err != nil {
		return nil, err
	}
	defer m.calls.Done()
	if err := checkKey(key); err != nil {
		return nil, err
	}
	if token < 0 {
		return nil, invalidf("token is %d, must not be negative", token)
	}
	if m.forcer == nil {
		return nil, unsupported("%s cannot release by force", m.props.Name)
	}
	var removed []HolderInfo
	err := m.callStore(ctx, "force", key, func(ctx context.Context) (err error) {
		removed, err = m.forcer.ForceRelease(ctx, key, token)
		return err
	})
	for _, h := range removed {
		m.observe(Event{Kind: EventForced, Key: key, Value: h.Owner, Token: h.Token, Mode: h.Mode})
	}
	return removed, err
}

// enter begins a call. Unless it fails, calls.Done must follow.
func (m *Manager) enter(ctx context.Context) error {
	if ctx == nil {
		return invalidf("context is nil")
	}
	// The context may be a lock's own, which takes the mutex.
	ended := ctxErr(ctx)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return ErrClosed
	}
	if ended != nil {
		return ended
	}
	m.calls.Add(1)
	return nil
}

// callStore makes one call to the store, bounded by CallTimeout and by the
// life of the manager, and reports its failure to the observer.
func (m *Manager) callStore(ctx context.Context, op, key string, call func(context.Context) error) error {
	callCtx, cancel := context.WithTimeout(ctx, m.cfg.CallTimeout)
	defer cancel()
	stop := context.AfterFunc(m.ctx, cancel)
	defer stop()
	err := guard(callCtx, m.props.Name, call)
	if err == nil || errors.Is(err, ErrHeld) || errors.Is(err, ErrLost) || refused(err) {
		return err
	}
	if m.ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", ErrClosed, err)
	}
	if ctx.Err() == nil {
		m.observe(Event{Kind: EventStoreError, Op: op, Key: key, Err: err})
	}
	return err
}

// guard turns a panic of the backend into an error.
func guard(ctx context.Context, backend string, call func(context.Context) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("dlm: backend %s panicked: %v", backend, p)
		}
	}()
	return call(ctx)
}

// wrap puts the operation around an error. Only exported methods call it.
func (m *Manager) wrap(op, key string, err error) error {
	if err == nil {
		return nil
	}
	return &Error{Op: op, Key: key, Backend: m.props.Name, Err: err}
}

// Close releases all locks that are held, ends every wait, and closes the
// backend. Held locks are lost with ReasonClosed before the store is asked.
// What could not be released is named in the error, and ends with its TTL, as do
// the ticks that a [Once] holds.
//
// Close returns when nothing of the manager runs any more, or when the context
// ends. Later calls of any method, Close included, return [ErrClosed]. If ctx
// ends with one of the manager's own locks, only its deadline counts, and 5s.
// Close must not be called by an [Observer].
func (m *Manager) Close(ctx context.Context) error {
	return m.wrap("close", "", m.close(ctx))
}

func (m *Manager) close(ctx context.Context) error {
	if ctx == nil {
		return invalidf("context is nil")
	}
	alive := ctx.Err() == nil
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return ErrClosed
	}
	m.closed = true
	held := slices.Collect(maps.Values(m.grants))
	var locks []*Lock
	for _, g := range held {
		locks = append(locks, g.locks...)
		m.keeper.lose(g, ReasonClosed, ErrClosed)
	}
	held = slices.DeleteFunc(held, func(g *grant) bool { return g.kept })
	m.mu.Unlock()
	if alive && slices.ContainsFunc(locks, func(l *Lock) bool { return l.ownContext(ctx) }) {
		var cancel context.CancelFunc
		ctx, cancel = detach(ctx)
		defer cancel()
	}
	m.cancel(ErrClosed)

	errs := m.releaseAll(ctx, held)
	// The calls under way withdraw what they have left in the store.
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		m.calls.Wait()
	}()
	select {
	case <-ended:
		errs = append(errs, m.cleaner.finish(ctx, m))
	case <-ctx.Done():
		errs = append(errs, fmt.Errorf("calls are still under way, and may leave something in the store: %w", ctx.Err()))
	}
	errs = append(errs, m.backend.Close(), m.events.drain(ctx))
	return errors.Join(errs...)
}

// maxReleases bounds the releases under way as a manager closes.
const maxReleases = 8

// releaseAll releases grants whose handles have ended, a few at a time.
func (m *Manager) releaseAll(ctx context.Context, grants []*grant) []error {
	var (
		mu   sync.Mutex
		errs []error
		wg   sync.WaitGroup
		next = make(chan *grant)
	)
	for range min(maxReleases, len(grants)) {
		wg.Go(func() {
			for g := range next {
				m.mu.Lock()
				err := m.keeper.join(ctx, g)
				lease, gone := g.lease, m.giveUp(g.deadline+driftMargin(g.lease.TTL))
				m.mu.Unlock()
				if m.clock.now() >= gone {
					continue // the store has dropped it by itself
				}
				if err == nil {
					err = m.freeOnce(ctx, lease)
				}
				if err != nil && lossOf(err, &lease) == nil {
					mu.Lock()
					errs = append(errs, fmt.Errorf("release %q: %w", g.key, err))
					mu.Unlock()
				}
			}
		})
	}
	for _, g := range grants {
		next <- g
	}
	close(next)
	wg.Wait()
	return errs
}

// freeOnce asks the store once to release a lease, whatever the state of the
// manager.
func (m *Manager) freeOnce(ctx context.Context, lease driver.Lease) error {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.CallTimeout)
	defer cancel()
	return guard(ctx, m.props.Name, func(ctx context.Context) error { return m.backend.Release(ctx, lease) })
}
