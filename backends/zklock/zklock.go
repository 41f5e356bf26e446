package zklock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
)

// Backend keeps locks in ZooKeeper. It has a session of its own there, and opens
// another one when that has expired. It is safe for concurrent use.
type Backend struct {
	servers []string
	opts    Options
	root    string // with the chroot
	closed  chan struct{}
	wg      sync.WaitGroup

	mu        sync.Mutex
	ended     bool
	session   *session
	records   map[recordID]*record
	keys      map[string]*keyState
	listeners map[string]*listener
	tidy      map[string]struct{} // keys whose parent may be left without children
	// minded is when the minder last looked; stalled when it last came late, and
	// the process may have been stopped.
	minded, stalled time.Time
	minding         bool // it has made requests
	// mindingSince is when it began to, or when a write was answered since.
	mindingSince time.Time
	// The server's clock showed serverTime at the time serverSeen.
	serverTime, serverSeen time.Time
}

var (
	_ driver.Backend   = (*Backend)(nil)
	_ driver.Notifier  = (*Backend)(nil)
	_ driver.Inspector = (*Backend)(nil)
	_ driver.Forcer    = (*Backend)(nil)
	_ driver.Checker   = (*Backend)(nil)
)

type recordID struct{ key, owner string }

// record is what is known of one owner on one key. Calls for it take turns, also
// those that were given up: so none of them arrives behind a withdrawal.
type record struct {
	recordID
	turn  chan struct{} // filled by whoever has the turn
	users int

	// What follows is guarded by Backend.mu, and changed by who has the turn, or
	// when the node is gone.

	s     *session // whose the node is
	name  string   // of the node, or empty
	mode  driver.Mode
	limit int
	token int64
	held  bool // we know that it holds the key
	since time.Time
	// proven says that the node was there when what stood before it had gone.
	proven bool
	// leaving says that the node is being removed.
	leaving bool
	// unsure says that there may be a node: a request was not answered.
	unsure bool
	// alone says that there was no other node when we last looked.
	alone bool
	// woken says that a node was seen to go that this one waited for.
	woken    bool
	manager  string
	watching []*watch
	watched  bool // we are told when the node goes
}

// keyState is what the records of one key share.
type keyState struct {
	records int
	// gate is filled by whoever makes a node, so that those who would only get in
	// each other's way do it in turn.
	gate chan struct{}
}

// clear forgets the node. The mutex is held.
func (r *record) clear() {
	r.unwatch()
	r.s, r.name, r.token, r.held, r.unsure, r.alone, r.woken, r.watched = nil, "", 0, false, false, false, false, false
	r.proven, r.leaving = false, false
}

// unwatch forgets whom the record waits for. The mutex is held.
func (r *record) unwatch() {
	for _, w := range r.watching {
		delete(w.waiters, r)
	}
	r.watching = r.watching[:0]
}

// New returns a backend with a session of its own at the ensemble of these
// servers, each host:port, or host for port 2181. It connects in the background,
// so that servers which cannot be reached are an error of the calls.
func New(servers []string, opts *Options) (*Backend, error) {
	list, err := checkServers(servers)
	if err != nil {
		return nil, err
	}
	o, err := opts.withDefaults()
	if err != nil {
		return nil, err
	}
	now := time.Now()
	b := &Backend{
		servers: list, opts: o, root: o.Chroot + o.Root, closed: make(chan struct{}),
		records: make(map[recordID]*record), keys: make(map[string]*keyState), listeners: make(map[string]*listener),
		tidy: make(map[string]struct{}), minded: now, stalled: now,
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.session, err = b.openSession(); err != nil {
		return nil, err
	}
	b.wg.Go(b.mind)
	return b, nil
}

// NewLockManager returns a manager over a new backend. A nil cfg or nil opts mean
// the defaults.
func NewLockManager(servers []string, cfg *dlm.LockConfig, opts *Options) (*dlm.Manager, error) {
	b, err := New(servers, opts)
	if err != nil {
		return nil, err
	}
	m, err := dlm.NewManager(b, cfg)
	if err != nil {
		return nil, errors.Join(err, b.Close())
	}
	return m, nil
}

// Properties implements [driver.Backend].
func (b *Backend) Properties() driver.Properties {
	return driver.Properties{
		Name:          "zookeeper",
		Tokens:        driver.TokensStrict,
		FairQueue:     true,
		SharedMode:    true,
		Permits:       true,
		SessionLeases: true,
	}
}

// Close implements [driver.Backend]. It ends the session, and with it all grants
// and tickets.
func (b *Backend) Close() error {
	b.mu.Lock()
	if !b.ended {
		b.ended = true
		close(b.closed)
		b.end(b.session)
	}
	b.mu.Unlock()
	b.wg.Wait()
	return nil
}

func (b *Backend) parent(key string) string     { return b.root + "/" + escape(key, true) }
func (b *Backend) path(key, name string) string { return b.parent(key) + "/" + name }

// enter begins a call.
func (b *Backend) enter(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%w: %w", driver.ErrNotApplied, err)
	}
	select {
	case <-b.closed:
		return driver.ErrClosed
	default:
		return nil
	}
}

// detached runs f, which uses the client and may wait longer than the context
// allows: then f goes on, and is to stop before its next request.
func detached[T any](ctx context.Context, b *Backend, f func() (T, error)) (T, error) {
	type answer struct {
		value T
		err   error
	}
	done := make(chan answer, 1)
	go func() {
		var a answer
		defer func() {
			if p := recover(); p != nil {
				a.err = fmt.Errorf("zklock: the client panicked: %v", p)
			}
			done <- a
		}()
		a.value, a.err = f()
	}()
	var none T
	select {
	case a := <-done:
		if a.err != nil {
			if b.enter(context.Background()) != nil {
				return none, fmt.Errorf("%w: %w", driver.ErrClosed, a.err)
			}
		}
		return a.value, a.err
	case <-ctx.Done():
		return none, fmt.Errorf("zklock: %w: %w", errNoReply, ctx.Err())
	case <-b.closed:
		return none, driver.ErrClosed
	}
}

// alive says whether a call may make its next request.
func alive(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("zklock: given up: %w", err)
	}
	return nil
}

// withRecord runs f when it is the owner's turn.
func withRecord[T any](ctx context.Context, b *Backend, key, owner string, f func(s *session, r *record) (T, error)) (T, error) {
	var none T
	if err := b.enter(ctx); err != nil {
		return none, err
	}
	r := b.use(recordID{key, owner})
	select {
	case r.turn <- struct{}{}:
	default:
		select {
		case r.turn <- struct{}{}:
		case <-ctx.Done():
			b.leave(r)
			return none, fmt.Errorf("%w: zklock: an earlier request is not answered: %w", driver.ErrNotApplied, ctx.Err())
		case <-b.closed:
			b.leave(r)
			return none, driver.ErrClosed
		}
	}
	s, err := b.ready(ctx)
	if err != nil {
		<-r.turn
		b.leave(r)
		return none, err
	}
	return detached(ctx, b, func() (T, error) {
		defer b.leave(r)
		defer func() { <-r.turn }()
		b.mu.Lock()
		if r.s != nil && r.s != s {
			r.clear()
		}
		b.mu.Unlock()
		return f(s, r)
	})
}

// use returns an owner's record, which stays until leave.
func (b *Backend) use(id recordID) *record {
	b.mu.Lock()
	defer b.mu.Unlock()
	r := b.records[id]
	if r == nil {
		r = &record{recordID: id, turn: make(chan struct{}, 1)}
		b.records[id] = r
		k := b.keys[id.key]
		if k == nil {
			k = &keyState{gate: make(chan struct{}, 1)}
			b.keys[id.key] = k
		}
		k.records++
	}
	r.users++
	return r
}

func (b *Backend) leave(r *record) {
	b.mu.Lock()
	defer b.mu.Unlock()
	r.users--
	b.forget(r)
}

// forget drops a record that nothing is known of. The mutex is held.
func (b *Backend) forget(r *record) {
	if r.users > 0 || r.name != "" || r.unsure || b.records[r.recordID] != r {
		return
	}
	delete(b.records, r.recordID)
	k := b.keys[r.key]
	if k.records--; k.records == 0 {
		delete(b.keys, r.key)
		delete(b.session.views, r.key)
	}
}

// Acquire implements [driver.Backend].
func (b *Backend) Acquire(ctx context.Context, req driver.Request) (driver.Lease, error) {
	a := acquisition{ctx: ctx, b: b, req: req, start: time.Now()}
	return withRecord(ctx, b, req.Key, req.Owner, func(s *session, r *record) (driver.Lease, error) {
		a.s, a.r = s, r
		lease, err := a.run()
		return lease, a.outcome(err)
	})
}

// Extend implements [driver.Backend].
func (b *Backend) Extend(ctx context.Context, batch []driver.Renewal) {
	if len(batch) == 0 {
		return
	}
	start := time.Now()
	answers, err := func() ([]driver.Renewal, error) {
		if err := b.enter(ctx); err != nil {
			return nil, err
		}
		s, err := b.ready(ctx)
		if err != nil {
			return nil, err
		}
		sent := append([]driver.Renewal(nil), batch...)
		return detached(ctx, b, func() ([]driver.Renewal, error) { return sent, b.extend(ctx, s, sent, start) })
	}()
	if err != nil {
		for i := range batch {
			batch[i].Err = err
		}
		return
	}
	copy(batch, answers)
}

// maxFlight bounds the requests of one call that are on their way together.
const maxFlight = 64

// extend renews grants: one transaction proves that the session lives and brings
// this server up to date, news of nodes that have gone included, which it sends
// before its answer. Only nodes that are not watched yet have to be asked for.
func (b *Backend) extend(ctx context.Context, s *session, batch []driver.Renewal, start time.Time) error {
	if err := s.beat(); err != nil {
		return err
	}
	records := make([]*record, len(batch))
	var ask []int
	b.mu.Lock()
	for i := range batch {
		l := &batch[i].Lease
		r := b.records[recordID{l.Key, l.Owner}]
		if r == nil || r.s != s || !r.held || r.token != l.Token {
			continue
		}
		records[i] = r
		if !s.watched(r) {
			ask = append(ask, i)
		}
	}
	b.mu.Unlock()
	err := inFlight(len(ask), func(n int) error {
		if err := alive(ctx); err != nil {
			return err
		}
		return b.watchOwn(s, records[ask[n]], batch[ask[n]].Lease.Token)
	})
	if err != nil {
		return err
	}
	for i := range batch {
		l := &batch[i].Lease
		b.mu.Lock()
		r := records[i]
		there := r != nil && r.s == s && r.held && r.token == l.Token
		if there {
			*l = s.lease(l.Key, l.Owner, r.mode, l.Token, l.TTL, start)
		}
		b.mu.Unlock()
		batch[i].Err = nil
		if !there {
			if err := alive(ctx); err != nil {
				return err
			}
			batch[i].Err = b.lost(s, l)
		}
	}
	return nil
}

// watchOwn makes sure that we are told when a node of ours goes, be it a grant or
// a ticket.
func (b *Backend) watchOwn(s *session, r *record, token int64) error {
	b.mu.Lock()
	if r.s != s || r.name == "" || r.leaving || r.token != token {
		b.mu.Unlock()
		return nil
	}
	name := r.name
	b.mu.Unlock()
	czxid, err := s.watchFor(r.key, name, r, nil)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if r.s == s && r.name == name && !r.leaving && czxid == token {
		r.watched = true
	}
	return nil
}

// inFlight calls f for 0 to n-1, several at a time, and returns the first error.
func inFlight(n int, f func(i int) error) error {
	if n == 1 {
		return f(0)
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var first error
	next := 0
	for range min(n, maxFlight) {
		wg.Go(func() {
			for {
				mu.Lock()
				i := next
				next++
				stop := first != nil || i >= n
				mu.Unlock()
				if stop {
					return
				}
				if err := f(i); err != nil {
					mu.Lock()
					if first == nil {
						first = err
					}
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	return first
}

// lost says why a grant is not there.
func (b *Backend) lost(s *session, l *driver.Lease) error {
	snap, err := s.look(l.Key, false)
	if err != nil {
		return err
	}
	reason := driver.ReasonGone
	if len(snap.list) > 0 {
		reason = driver.ReasonTaken
	}
	return &driver.LostError{Key: l.Key, Token: l.Token, Reason: reason}
}

// Release implements [driver.Backend].
func (b *Backend) Release(ctx context.Context, lease driver.Lease) error {
	_, err := withRecord(ctx, b, lease.Key, lease.Owner, func(s *session, r *record) (struct{}, error) {
		return struct{}{}, b.release(ctx, s, r, &lease)
	})
	return err
}

func (b *Backend) release(ctx context.Context, s *session, r *record, l *driver.Lease) error {
	if err := b.settle(ctx, s, r); err != nil {
		return err
	}
	b.mu.Lock()
	there := r.name != "" && (l.Token == 0 || r.held && r.token == l.Token)
	path, alone := b.path(r.key, r.name), r.alone && b.keys[r.key].records == 1
	var heirs []contender
	if there {
		r.held, r.watched, r.leaving = false, false, true // that it goes is no news from here on
		heirs = b.heirs(s, r)
	}
	b.mu.Unlock()
	if !there {
		if err := s.sync(); err != nil {
			return err
		}
		if l.Token == 0 {
			return b.withdraw(ctx, s, l)
		}
		return b.lost(s, l)
	}
	err := b.remove(s, l.Key, path, alone, heirs...)
	if err != nil && !errors.Is(err, zk.ErrNoNode) {
		b.mu.Lock()
		r.held, r.leaving = r.name != "" && l.Token != 0, false // so that it can be tried again
		b.mu.Unlock()
		return classify(err, path)
	}
	b.mu.Lock()
	r.clear()
	b.mu.Unlock()
	if err != nil && l.Token != 0 {
		return b.lost(s, l)
	}
	return nil
}

// withdraw removes what an owner has that is not known here: nothing, or what it
// got through another backend.
func (b *Backend) withdraw(ctx context.Context, s *session, l *driver.Lease) error {
	snap, err := s.look(l.Key, false)
	if err != nil {
		return err
	}
	for _, c := range snap.list {
		if c.owner != l.Owner {
			continue
		}
		if err := alive(ctx); err != nil {
			return err
		}
		path := b.path(l.Key, c.name)
		if err := b.remove(s, l.Key, path, snap.total == 1); err != nil && !errors.Is(err, zk.ErrNoNode) {
			return classify(err, path)
		}
	}
	return nil
}

// maxHeirs bounds how many tickets one release proves.
const maxHeirs = 32

// heirs are the tickets of ours that hold the key once a node has gone, as far as
// is known. The mutex is held.
func (b *Backend) heirs(s *session, r *record) []contender {
	v := s.views[r.key]
	if v == nil {
		return nil
	}
	i := find(v.list, r.name)
	if i < 0 {
		return nil
	}
	rest := v.list[i+1:]
	if i > 0 {
		rest = slices.Concat(v.list[:i], rest)
	}
	var heirs []contender
	for _, c := range rest[:holders(rest)] {
		if o := b.ours(s, r.key, &c); o != nil && !o.held && !o.leaving && !o.proven && len(heirs) < maxHeirs {
			heirs = append(heirs, c)
		}
	}
	return heirs
}

// remove deletes a node, and its parent with it if it has no other child. Our own
// waiters hear of it here, and not only when the server tells us. The same request
// proves that those are there that hold the key then.
func (b *Backend) remove(s *session, key, path string, alone bool, heirs ...contender) (err error) {
	defer func() {
		if err == nil || errors.Is(err, zk.ErrNoNode) {
			b.mu.Lock()
			defer b.mu.Unlock()
			s.departed(key, path[strings.LastIndexByte(path, '/')+1:])
		}
	}()
	if alone {
		res, err := s.multi(
			&zk.DeleteRequest{Path: path, Version: -1}, &zk.DeleteRequest{Path: b.parent(key), Version: -1})
		if err == nil || len(res) == 0 || res[0].Error != nil || !refusal(err) {
			return err
		}
		// Others have come, or the parent may not be deleted.
	}
	if len(heirs) > 0 {
		ops := []any{&zk.DeleteRequest{Path: path, Version: -1}}
		for _, c := range heirs {
			ops = append(ops, &zk.CheckVersionRequest{Path: b.path(key, c.name), Version: -1})
		}
		res, err := s.multi(ops...)
		if err == nil {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.tidy[key] = struct{}{}
			for _, c := range heirs {
				if o := b.ours(s, key, &c); o != nil {
					o.proven = true
				}
			}
			return nil
		}
		if len(res) == 0 || res[0].Error != nil || !refusal(err) {
			return err
		}
		// One of them has gone.
	}
	sent := time.Now()
	err = s.conn.Delete(path, -1)
	if err == nil {
		b.proven(s, sent)
		b.mu.Lock()
		b.tidy[key] = struct{}{}
		b.mu.Unlock()
	}
	return err
}

// settle finds out what became of a request that was not answered.
func (b *Backend) settle(ctx context.Context, s *session, r *record) error {
	b.mu.Lock()
	unsure := r.unsure
	b.mu.Unlock()
	if !unsure {
		return nil
	}
	if err := s.beat(); err != nil {
		return err
	}
	if err := alive(ctx); err != nil {
		return err
	}
	snap, err := s.look(r.key, false)
	if err != nil {
		return err
	}
	var found contender
	for _, c := range snap.list {
		if c.owner == r.owner && c.session == s.id {
			found = c
			break
		}
	}
	if found.name == "" {
		b.mu.Lock()
		defer b.mu.Unlock()
		r.clear()
		return nil
	}
	stat, ok, err := s.stat(b.path(r.key, found.name))
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if !ok || stat.EphemeralOwner != s.id {
		r.clear()
		return nil
	}
	r.s, r.name, r.mode, r.limit, r.token, r.unsure = s, found.name, found.mode, found.limit, stat.Czxid, false
	r.alone = snap.total == 1
	return nil
}
