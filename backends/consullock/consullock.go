package consullock

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
)

// Backend keeps locks in Consul. It is safe for concurrent use.
type Backend struct {
	client *api.Client
	opts   Options
	free   func() // frees what Open has made

	ctx    context.Context // ends with the backend
	cancel context.CancelFunc
	tasks  sync.WaitGroup
	slots  chan struct{} // one for each request under way

	mu        sync.Mutex
	ended     bool
	looked    bool // the agent does for locks
	locks     map[string]*lock
	sessions  map[time.Duration]*session // the newest of each class
	byID      map[string]*session        // all that have not ended
	making    map[time.Duration]*making
	listeners map[string]*listener
	watching  int // how many locks are watched
	readings  map[string]*reading
}

var (
	_ driver.Backend   = (*Backend)(nil)
	_ driver.Notifier  = (*Backend)(nil)
	_ driver.Inspector = (*Backend)(nil)
	_ driver.Forcer    = (*Backend)(nil)
	_ driver.Checker   = (*Backend)(nil)
)

// entry is what this backend knows of a ticket that it has made, or tries to.
// It is guarded by Backend.mu, but for its first fields, which do not change.
type entry struct {
	key, owner string
	mode       driver.Mode
	limit      int

	manager string
	name    string    // of its key in Consul
	made    time.Time // when it was first asked for
	ttl     time.Duration
	asked   time.Time // when the last Acquire began
	create  uint64    // ticket and token; 0 if it is not known to exist
	mod     uint64    // index of the last change of its key
	granted bool
	first   bool // nothing stands in its way, but it has not been granted
	claimed bool // it has the key that is delayed
	release bool // it is being given up
	session *session
	// unsure are the sessions in whose name a request that was not answered may
	// still make the ticket.
	unsure map[*session]struct{}
	place  driver.HeldError // as last seen
}

const (
	// maxLooks is how often a call looks again because something has changed.
	maxLooks = 50
	// closePatience bounds the last calls of a backend.
	closePatience = time.Second
)

// New returns a backend over a client, which remains the caller's. It asks the
// server nothing yet.
func New(client *api.Client, opts *Options) (*Backend, error) {
	if client == nil {
		return nil, invalidf("client is nil")
	}
	o, err := opts.withDefaults()
	if err != nil {
		return nil, err
	}
	b := &Backend{
		client: client, opts: o, free: func() {},
		slots: make(chan struct{}, maxCalls),
		locks: make(map[string]*lock), sessions: make(map[time.Duration]*session), byID: make(map[string]*session),
		making: make(map[time.Duration]*making), listeners: make(map[string]*listener),
		readings: make(map[string]*reading),
	}
	b.ctx, b.cancel = context.WithCancel(context.Background())
	return b, nil
}

// NewLockManager returns a manager over a client, which remains the caller's. A
// nil cfg or nil opts mean the defaults.
func NewLockManager(client *api.Client, cfg *dlm.LockConfig, opts *Options) (*dlm.Manager, error) {
	b, err := New(client, opts)
	if err != nil {
		return nil, err
	}
	return dlm.NewManager(b, cfg)
}

// task runs something in the background, unless the backend is closed. The mutex
// is held.
func (b *Backend) task(f func()) {
	if !b.ended {
		b.tasks.Go(f)
	}
}

// Properties implements [driver.Backend].
func (b *Backend) Properties() driver.Properties {
	return driver.Properties{
		Name:          "consul",
		Tokens:        driver.TokensStrict,
		FairQueue:     true,
		SharedMode:    true,
		Permits:       true,
		SessionLeases: true,
	}
}

// enter begins a call.
func (b *Backend) enter(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%w: %w", driver.ErrNotApplied, err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ended {
		return driver.ErrClosed
	}
	return nil
}

// forget drops an entry. The mutex is held.
func (b *Backend) forget(e *entry) {
	b.attach(e, nil)
	if l := b.locks[e.key]; l != nil && l.entries[e.owner] == e {
		delete(l.entries, e.owner)
		b.settle(l)
	}
}

// entry returns what the owner has on the key, or nil. The mutex is held.
func (b *Backend) entry(key, owner string) *entry {
	if l := b.locks[key]; l != nil {
		return l.entries[owner]
	}
	return nil
}

// add makes an entry. The mutex is held.
func (b *Backend) add(e *entry) *entry {
	l := b.locks[e.key]
	if l == nil {
		l = &lock{key: e.key, base: lockBase(b.opts.Prefix, e.key), entries: make(map[string]*entry)}
		b.locks[e.key] = l
	}
	l.entries[e.owner] = e
	return e
}

// lose takes note that a ticket is gone without having been given up, and tells
// its manager. The mutex is held.
func (b *Backend) lose(e *entry, reason driver.LostReason) {
	create, granted := e.create, e.granted
	b.drop(e)
	if create == 0 {
		return
	}
	if l := b.listeners[e.manager]; l != nil {
		at := driver.Lease{Key: e.key, Owner: e.owner}
		if granted {
			l.tell(driver.Event{
				Kind: driver.EventLost, Lease: at,
				Err: &driver.LostError{Key: e.key, Token: int64(create), Reason: reason},
			})
		}
		l.tell(driver.Event{Kind: driver.EventWake, Lease: at})
	}
}

// drop forgets a ticket that is gone. The mutex is held.
func (b *Backend) drop(e *entry) {
	b.attach(e, nil)
	e.create, e.granted = 0, false
	if len(e.unsure) == 0 {
		b.forget(e)
		return
	}
	// Nobody else will withdraw what may still come.
	b.task(func() {
		ctx, cancel := context.WithTimeout(b.ctx, sessionPatience)
		defer cancel()
		_ = b.withdraw(ctx, driver.Lease{Key: e.key, Owner: e.owner})
	})
}

// Close implements [driver.Backend]. Sessions that hold no lock are ended; the
// others end with their TTL. A client that was passed in stays as it is.
func (b *Backend) Close() error {
	b.mu.Lock()
	if b.ended {
		b.mu.Unlock()
		return nil
	}
	b.ended = true
	var spare []string
	for _, s := range b.byID {
		if len(s.entries) == 0 {
			spare = append(spare, s.id)
		}
	}
	b.mu.Unlock()
	b.cancel()
	b.tasks.Wait()
	for _, id := range spare {
		b.tasks.Go(func() { b.destroy(id) })
	}
	b.tasks.Wait()
	b.free()
	return nil
}
