package zklock

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/go-dlm/dlm/driver"
)

// session is one session at the ensemble with the client's connection that
// carries it. It never comes back once it has expired: the client would start
// another one by itself and send under it what was meant for the first, so it is
// closed, and the backend opens the next one.
//
// All fields but b, servers and quit are guarded by Backend.mu.
type session struct {
	b    *Backend
	conn *zk.Conn
	// events gets what handle gets too; it is closed at the very end.
	events <-chan zk.Event
	quit   chan struct{} // closed when the session is over

	id      int64
	timeout time.Duration
	up      bool
	changed chan struct{} // closed and replaced when up or fault change
	authed  bool
	fault   error // that calls need not wait for a connection
	over    bool
	lastErr error

	// The session was alive at the leader when it was made, or taken over by a
	// server, which was after this.
	base time.Time
	// proofs are when answered writes were sent, in order.
	proofs []time.Time

	watches map[string]*watch
	views   map[string]*view // of keys that have records
	epoch   int              // counts connections
	flights map[string]*flights

	wire     *wire // the newest connection
	dialing  hello // its first answer
	failures int   // failed attempts to connect in a row
}

// watch is a watch at the server. It is never taken back: it goes when the node
// does, and there is one for each path at most. One that is not armed only tells
// what we know by ourselves.
type watch struct {
	key, name string

	armed   bool
	czxid   int64
	own     *record              // whose node it is, if it is held
	waiters map[*record]struct{} // who waits for its end
}

// hello is what a server has answered to a connection's first request.
type hello struct {
	began   time.Time
	timeout time.Duration
	id      int64
}

// openSession starts a session. Backend.mu is held, so that no event is handled
// before the fields are set.
func (b *Backend) openSession() (*session, error) {
	s := &session{
		b: b, quit: make(chan struct{}), changed: make(chan struct{}), timeout: b.opts.SessionTimeout,
		watches: make(map[string]*watch), views: make(map[string]*view), flights: make(map[string]*flights),
		authed: b.opts.Auth == "",
	}
	conn, events, err := zk.Connect(b.servers, b.opts.SessionTimeout,
		zk.WithLogger(silence{}), zk.WithLogInfo(false), zk.WithEventCallback(s.handle),
		zk.WithHostProvider(&rotation{over: s.quit}), zk.WithDialer(s.dial))
	if err != nil {
		return nil, invalidf("%v", err)
	}
	s.conn, s.events = conn, events
	return s, nil
}

// silence swallows what the client would print.
type silence struct{}

func (silence) Printf(string, ...any) {}

// rotation goes round the servers. Their names are looked up at every attempt.
type rotation struct {
	over <-chan struct{}

	mu      sync.Mutex
	servers []string
	next    int
}

func (r *rotation) Init(servers []string) error {
	r.servers = servers
	return nil
}

func (r *rotation) Len() int { return len(r.servers) }

// Next implements [zk.HostProvider]. The client waits a whole second when it is
// told that the servers begin anew, which we do by ourselves, but only then it
// notices that it was closed.
func (r *rotation) Next() (server string, retryStart bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	server = r.servers[r.next%len(r.servers)]
	r.next++
	select {
	case <-r.over:
		return server, true
	default:
		return server, false
	}
}

func (r *rotation) Connected() {}

const (
	minPause = 20 * time.Millisecond
	maxPause = 500 * time.Millisecond
)

var errOver = errors.New("zklock: the session is over")

// dial connects to a server, after a pause if the last attempts have failed.
func (s *session) dial(network, addr string, timeout time.Duration) (net.Conn, error) {
	s.b.mu.Lock()
	failures := s.failures / len(s.b.servers)
	s.failures++ // until there is a session
	s.b.mu.Unlock()
	var pause <-chan time.Time
	if failures > 0 {
		timer := time.NewTimer(min(minPause<<min(failures, 10), maxPause))
		defer timer.Stop()
		pause = timer.C
	} else {
		now := make(chan time.Time, 1)
		now <- time.Time{}
		pause = now
	}
	select {
	case <-s.quit:
		return nil, errOver
	default:
	}
	select {
	case <-s.quit:
		return nil, errOver
	case <-pause:
	}
	began := time.Now()
	patience := s.b.patience()
	c, err := s.b.connect(network, addr, min(timeout, patience))
	if err != nil {
		s.b.mu.Lock()
		s.lastErr = fmt.Errorf("%s: %w", addr, err)
		s.b.mu.Unlock()
		return nil, err
	}
	w := &wire{Conn: c, s: s, began: began, patience: patience}
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	if s.over {
		_ = c.Close()
		return nil, errOver
	}
	s.wire = w
	return w, nil
}

func (b *Backend) connect(network, addr string, timeout time.Duration) (net.Conn, error) {
	opts := &b.opts
	c, err := opts.Dial(network, addr, timeout)
	if err != nil || opts.TLS == nil {
		return c, err
	}
	cfg := opts.TLS.Clone()
	if cfg.ServerName == "" {
		if host, _, err := net.SplitHostPort(addr); err == nil {
			cfg.ServerName = host
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	t := tls.Client(c, cfg)
	if err := t.HandshakeContext(ctx); err != nil {
		_ = c.Close()
		return nil, err
	}
	return t, nil
}

// patience bounds connecting to one server and its first answer, so that one
// that hangs leaves time within the session to find another.
func (b *Backend) patience() time.Duration {
	return min(max(b.opts.SessionTimeout/10, 250*time.Millisecond), 5*time.Second)
}

// wire is a connection that reads along until the session is told: the client
// keeps to itself what session time-out was granted. It also bounds the wait for
// that first answer, for which the client would wait longer than a session lasts.
type wire struct {
	net.Conn
	s        *session
	began    time.Time
	patience time.Duration

	head  []byte // the beginning of the first answer
	known bool   // all of it was read
}

// headLen is how long length, protocol version, time-out and session id are.
const headLen = 4 + 4 + 4 + 8

func (w *wire) Read(p []byte) (int, error) {
	n, err := w.Conn.Read(p)
	if !w.known {
		w.head = append(w.head, p[:min(n, headLen-len(w.head))]...)
		if len(w.head) >= 4 {
			// The client would allocate whatever size it is told.
			size := binary.BigEndian.Uint32(w.head)
			if size < headLen-4 || size > 1<<10 || len(w.head) >= 8 && binary.BigEndian.Uint32(w.head[4:]) != 0 {
				w.tell(&ServerError{Problem: ProblemNotZooKeeper, Detail: w.RemoteAddr().String()})
				return 0, errors.New("zklock: that is no ZooKeeper server")
			}
		}
		if len(w.head) == headLen {
			w.known = true
			w.s.b.mu.Lock()
			w.s.dialing = hello{
				began:   w.began,
				timeout: time.Duration(int32(binary.BigEndian.Uint32(w.head[8:]))) * time.Millisecond,
				id:      int64(binary.BigEndian.Uint64(w.head[12:])),
			}
			w.s.b.mu.Unlock()
		} else if err != nil {
			w.tell(fmt.Errorf("%s: %w", w.RemoteAddr(), err))
		}
	}
	return n, err
}

func (w *wire) tell(err error) {
	w.s.b.mu.Lock()
	defer w.s.b.mu.Unlock()
	w.s.lastErr = err
}

func (w *wire) SetReadDeadline(t time.Time) error {
	if !w.known {
		return w.Conn.SetReadDeadline(w.began.Add(2 * w.patience))
	}
	return w.Conn.SetReadDeadline(t)
}

// handle takes an event of the client, in order with its answers.
func (s *session) handle(e zk.Event) {
	b := s.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if s.over {
		return
	}
	switch {
	case e.Type == zk.EventSession && e.State == zk.StateHasSession:
		s.id, s.timeout, s.base = s.dialing.id, s.dialing.timeout, s.dialing.began
		s.failures, s.lastErr = 0, nil
		for _, w := range s.watches {
			w.armed = false // the client sets them again, but not before other requests
		}
		// What has gone meanwhile is not known, so no ticket rests on what was known
		// before: it is looked up.
		s.epoch++
		clear(s.views)
		if s.authed {
			s.rise()
		} else {
			b.wg.Go(s.authenticate)
		}
	case e.Type == zk.EventSession && e.State == zk.StateDisconnected:
		s.up = false
	case e.Type == zk.EventSession && e.State == zk.StateExpired:
		b.expired(s)
	case e.Type == zk.EventNodeDeleted:
		s.gone(e.Path)
	case e.Type == zk.EventNodeDataChanged:
		if w := s.watches[e.Path]; w != nil {
			w.armed = false // somebody has written into it, and the watch is used up
			b.wake(w)
		}
	}
}

// authenticate tells who we are.
func (s *session) authenticate() {
	err := s.conn.AddAuth("digest", []byte(s.b.opts.Auth))
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	switch {
	case err == nil:
		s.authed = true // the client repeats it by itself from here on
		s.rise()
	case errors.Is(err, zk.ErrAuthFailed):
		s.fault = classify(err, "")
		s.change()
	}
}

// rise lets calls begin. The mutex is held.
func (s *session) rise() {
	if s.over {
		return
	}
	s.up = true
	s.change()
	for _, l := range s.b.listeners {
		l.push(driver.Event{Kind: driver.EventUp})
	}
}

func (s *session) change() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// departed handles the end of a node that we have removed, or not found. The
// mutex is held.
func (s *session) departed(key, name string) {
	if v := s.views[key]; v != nil {
		v.drop(name)
	}
	if c, ok := parseName(name); ok {
		// In the same step, so that nobody begins to wait for a node whose end has
		// been told already.
		if r := s.b.ours(s, key, &c); r != nil && r.leaving {
			r.clear()
		}
	}
	s.gone(s.b.path(key, name))
}

// gone handles the end of a node that was watched. The mutex is held.
//
// It may have been released, have gone with its session, or been deleted by hand,
// and may have waited only: that does not matter, as nothing but its end is
// concluded from it. Names are not used twice, so late news is true as well.
func (s *session) gone(path string) {
	w := s.watches[path]
	if w == nil {
		return
	}
	delete(s.watches, path)
	if v := s.views[w.key]; v != nil {
		v.drop(w.name)
	}
	s.b.wake(w)
	r := w.own
	if r == nil || r.s != s || r.name != w.name || r.leaving {
		return
	}
	if r.held {
		s.b.lose(r, driver.ReasonGone)
	} else {
		s.b.push(r.manager, driver.Event{Kind: driver.EventWake, Lease: driver.Lease{Key: r.key, Owner: r.owner}})
		r.clear()
	}
	s.b.forget(r)
}

// expired ends a session with all that belongs to it, and begins the next one.
// The mutex is held.
func (b *Backend) expired(s *session) {
	b.end(s)
	for _, r := range b.records {
		if r.s != s {
			continue
		}
		if r.held {
			b.lose(r, driver.ReasonSession)
		} else {
			if r.name != "" {
				b.push(r.manager, driver.Event{Kind: driver.EventWake, Lease: driver.Lease{Key: r.key, Owner: r.owner}})
			}
			r.clear()
		}
		b.forget(r) // nobody comes for what is lost
	}
	if b.session == s && !b.ended {
		// It cannot fail, as the servers are the same.
		if next, err := b.openSession(); err == nil {
			b.session = next
		}
	}
	s.change()
}

// end closes a session. The mutex is held.
func (b *Backend) end(s *session) {
	if s.over {
		return
	}
	s.over, s.up = true, false
	close(s.quit)
	if s.wire != nil && s.id == 0 {
		_ = s.wire.Close() // nothing else ends the wait for a first answer
	}
	b.wg.Go(func() {
		s.conn.Close()
		b.mu.Lock()
		w := s.wire
		b.mu.Unlock()
		if w != nil {
			_ = w.Close()
		}
		for range s.events {
			// The channel is closed when the client's goroutine ends.
		}
	})
}

// ready waits for a session that is connected.
func (b *Backend) ready(ctx context.Context) (*session, error) {
	for {
		b.mu.Lock()
		if b.ended {
			b.mu.Unlock()
			return nil, driver.ErrClosed
		}
		s := b.session
		if s.up || s.fault != nil {
			defer b.mu.Unlock()
			return s, s.fault
		}
		changed := s.changed
		b.mu.Unlock()
		select {
		case <-changed:
		case <-b.closed:
		case <-ctx.Done():
			b.mu.Lock()
			defer b.mu.Unlock()
			if s.lastErr != nil {
				return nil, fmt.Errorf("%w: zklock: not connected: %w: %w", driver.ErrNotApplied, s.lastErr, ctx.Err())
			}
			return nil, fmt.Errorf("%w: zklock: not connected: %w", driver.ErrNotApplied, ctx.Err())
		}
	}
}

// proven notes that a write that was sent at this time has been answered: the
// leader and a majority then knew the session. A read says less, as a server that
// is cut off from the leader goes on answering for a while.
func (b *Backend) proven(s *session, sent time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mindingSince = time.Now() // a server that answers writes does not hang
	n := len(s.proofs)
	if n > 0 && !sent.After(s.proofs[n-1]) {
		return
	}
	// Those that are close together are of no use beside each other.
	if n > 1 && s.proofs[n-1].Sub(s.proofs[n-2]) < s.timeout/64 {
		s.proofs = s.proofs[:n-1]
	}
	s.proofs = append(s.proofs, sent)
	for len(s.proofs) > 1 && sent.Sub(s.proofs[0]) > s.timeout {
		s.proofs = s.proofs[1:]
	}
}

// left is for how long after a moment the session surely lasts. The mutex is
// held.
//
// The leader counts from when it last heard of the client. A server tells it once
// every half tick who has been heard, and a tick is at most half of a session's
// time-out. So when a write is answered, the leader knows of everything that we
// have sent a quarter of the time-out before: of an older write, or at least of one
// of the pings, which the client sends every third of the time-out.
func (s *session) left(from time.Time) time.Duration {
	alive := s.base
	if n := len(s.proofs); n > 0 {
		known := s.proofs[n-1].Add(-s.timeout / 4)
		if ping := known.Add(-s.timeout / 3); ping.After(alive) && ping.After(s.b.stalled) {
			alive = ping
		}
		for _, p := range s.proofs {
			if !p.After(known) && p.After(alive) {
				alive = p
			}
		}
	}
	return alive.Add(s.timeout).Sub(from)
}

// lease makes the lease of a grant whose call began at start. It lasts as long as
// its TTL or, if that is shorter, as the session surely does, which is said by
// Age. Package dlm takes off a hundredth of the TTL for clocks that differ; of
// that only the share of what is left is due. The mutex is held.
func (s *session) lease(key, owner string, mode driver.Mode, token int64, ttl time.Duration, start time.Time) driver.Lease {
	l := driver.Lease{Key: key, Owner: owner, Token: token, TTL: ttl, Mode: mode}
	if left := s.left(start); left < ttl {
		l.Age = (ttl - left) / 100 * 99
	}
	return l
}

// multi makes a transaction. Every answer to one is a proof.
func (s *session) multi(ops ...any) ([]zk.MultiResponse, error) {
	sent := time.Now()
	res, err := s.conn.Multi(ops...)
	if err == nil || refusal(err) {
		s.b.proven(s, sent)
	}
	return res, err
}

// beat makes sure that the session lives, and that this server has caught up
// with the leader: a transaction that changes nothing.
func (s *session) beat() error {
	if _, err := s.multi(&zk.CheckVersionRequest{Path: s.b.root, Version: -1}); err != nil && !errors.Is(err, zk.ErrNoNode) {
		return classify(err, s.b.root)
	}
	return nil
}

// sync makes this server catch up with the leader.
func (s *session) sync() error {
	_, err := s.conn.Sync(s.b.root)
	return classify(err, s.b.root)
}

// snapshot is what the nodes of a key were at one time. It is not changed.
type snapshot struct {
	list    []contender
	total   int    // foreign nodes included
	guard   string // one of them, or empty
	version int32  // of the parent's data, or noParent
	czxid   int64  // of the parent
	pzxid   int64  // of the last change to its children
}

const (
	noParent = -2
	// worthKeeping is from how many nodes on it is better to ask first whether they
	// have changed.
	worthKeeping = 16
)

// view is what we know of the nodes of a key: all that are there and were made up
// to a version of the parent's data, in order, and perhaps some that have gone.
//
// A node never gets a new one before it. So a node of ours that is in the list may
// be judged by it at any time: what is left out has gone, and if others have too,
// the node is the closer to the head for it. Nodes that were made since stand
// behind it. It is forgotten with the connection.
type view struct {
	list    []contender
	others  int   // foreign nodes
	version int32 // of the parent's data
	czxid   int64 // of the parent
	pzxid   int64 // of the last change to its children that we know the number of
	exact   bool  // there was none since then that we know of
}

func (v *view) drop(name string) {
	i := find(v.list, name)
	switch {
	case i < 0:
		return
	case i == 0:
		v.list = v.list[1:] // as almost always, and then the rest need not move
	default:
		v.list = slices.Delete(v.list, i, i+1)
	}
	v.exact = false
}

// created takes note of a new node of ours, and of what its transaction says of
// the parent: that and how many others there are. It says whether the view is
// exact then. The mutex is held.
func (s *session) created(key string, me contender, stat *zk.Stat, epoch int) bool {
	v := s.views[key]
	switch {
	case epoch != s.epoch || s.over:
		return false
	case stat.NumChildren == 0:
		s.views[key] = &view{
			list: []contender{me}, version: stat.Version, czxid: stat.Czxid, pzxid: stat.Mzxid, exact: true,
		}
		return true
	case v != nil && v.czxid == stat.Czxid && stat.Version == v.version+1 && int(stat.NumChildren) == len(v.list)+v.others:
		// Each creation raises the version by one: there was no other, and as many
		// are there as we know of.
		v.list, v.version, v.pzxid, v.exact = append(v.list, me), stat.Version, stat.Mzxid, true
		return true
	}
	return false
}

// keep makes a view of a list that was read, unless more is known by now. The
// mutex is held.
func (s *session) keep(key string, snap *snapshot, epoch int) {
	v := s.views[key]
	switch {
	case epoch != s.epoch || s.over || s.b.keys[key] == nil:
	case snap.version == noParent:
		delete(s.views, key)
	case v != nil && (v.czxid > snap.czxid || v.czxid == snap.czxid && (v.pzxid > snap.pzxid || v.pzxid == snap.pzxid && !v.exact)):
	default:
		s.views[key] = &view{
			list: slices.Clone(snap.list), others: snap.total - len(snap.list),
			version: snap.version, czxid: snap.czxid, pzxid: snap.pzxid, exact: true,
		}
	}
}

// look reads the nodes of a key. If there are many, it may ask first whether they
// have changed.
func (s *session) look(key string, ask bool) (*snapshot, error) {
	path := s.b.parent(key)
	s.b.mu.Lock()
	v, epoch := s.views[key], s.epoch
	ask = ask && v != nil && v.exact && len(v.list)+v.others >= worthKeeping
	s.b.mu.Unlock()
	if ask {
		stat, ok, err := s.stat(path)
		if err != nil {
			return nil, err
		}
		s.b.mu.Lock()
		v := s.views[key]
		if ok && epoch == s.epoch && v != nil && v.exact && stat.Czxid == v.czxid && stat.Pzxid == v.pzxid && len(v.list) > 0 {
			defer s.b.mu.Unlock()
			v.version = stat.Version
			return &snapshot{
				list: slices.Clone(v.list), total: len(v.list) + v.others, guard: v.list[len(v.list)-1].name,
				version: v.version, czxid: v.czxid, pzxid: v.pzxid,
			}, nil
		}
		s.b.mu.Unlock()
	}
	names, stat, err := s.conn.Children(path)
	snap := &snapshot{version: noParent}
	switch {
	case errors.Is(err, zk.ErrNoNode):
	case err != nil:
		return nil, classify(err, path)
	default:
		snap = &snapshot{
			list: parseNames(names), total: len(names), version: stat.Version, czxid: stat.Czxid, pzxid: stat.Pzxid,
		}
		if n := len(snap.list); n > 0 {
			snap.guard = snap.list[n-1].name
		} else if len(names) > 0 {
			snap.guard = names[0]
		}
	}
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	s.keep(key, snap, epoch)
	return snap, nil
}

// flight is a look at a key that several calls share.
type flight struct {
	done chan struct{}
	snap *snapshot
	err  error
}

// flights are the looks at one key: at most one is under way, and one waits for
// its end. They are guarded by Backend.mu.
type flights struct{ waiting *flight }

// lookNow reads the nodes of a key as the leader knows them after the start of
// the call. Calls that come while another one is under way go together.
func (s *session) lookNow(key string) (*snapshot, error) {
	b := s.b
	b.mu.Lock()
	all, others := s.flights[key]
	if !others {
		all = &flights{}
		s.flights[key] = all
	}
	if all.waiting == nil {
		all.waiting = &flight{done: make(chan struct{})}
	}
	mine := all.waiting
	b.mu.Unlock()
	if !others {
		s.fly(key, all, true)
	}
	<-mine.done
	return mine.snap, mine.err
}

// fly makes looks at a key, or one and leaves the rest to another goroutine.
func (s *session) fly(key string, all *flights, one bool) {
	b := s.b
	for {
		b.mu.Lock()
		f := all.waiting
		all.waiting = nil
		if f == nil {
			delete(s.flights, key)
		}
		b.mu.Unlock()
		if f == nil {
			return
		}
		if f.err = s.sync(); f.err == nil {
			f.snap, f.err = s.look(key, true)
		}
		close(f.done)
		if one {
			b.mu.Lock()
			idle := all.waiting == nil
			if idle {
				delete(s.flights, key)
			}
			b.mu.Unlock()
			if !idle {
				go s.fly(key, all, false)
			}
			return
		}
	}
}

// stat returns when and as what a node was created; false means that it is gone.
func (s *session) stat(path string) (*zk.Stat, bool, error) {
	ok, stat, err := s.conn.Exists(path)
	return stat, ok, classify(err, path)
}

// watchOf returns the watch of a node, which may not be armed. The mutex is held.
func (s *session) watchOf(key, name string) *watch {
	path := s.b.path(key, name)
	w := s.watches[path]
	if w == nil {
		w = &watch{key: key, name: name, waiters: make(map[*record]struct{})}
		s.watches[path] = w
	}
	return w
}

// watched says whether the end of a node of ours would be told. The mutex is held.
func (s *session) watched(r *record) bool {
	w := s.watches[s.b.path(r.key, r.name)]
	return r.watched && w != nil && w.armed
}

// add makes a record wait for the end of the node. The mutex is held.
func (w *watch) add(r *record) {
	w.waiters[r] = struct{}{}
	r.watching = append(r.watching, w)
}

// watchFor makes sure that somebody is told of the end of a node: its owner, or
// a waiter. It returns when the node was created, or 0 if it is gone.
func (s *session) watchFor(key, name string, own, waiter *record) (czxid int64, err error) {
	b := s.b
	path := b.path(key, name)
	b.mu.Lock()
	w := s.watchOf(key, name)
	if own != nil {
		w.own = own
	}
	if waiter != nil {
		w.add(waiter)
	}
	if w.armed {
		defer b.mu.Unlock()
		return w.czxid, nil
	}
	epoch := s.epoch
	b.mu.Unlock()
	// Other than a question whether the node exists, this leaves no watch if not.
	_, stat, _, err := s.conn.GetW(path)
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case errors.Is(err, zk.ErrNoNode):
		delete(w.waiters, waiter) // who need not be woken to hear it
		s.departed(key, name)
		return 0, nil
	case err != nil:
		return 0, classify(err, path)
	case s.watches[path] != w:
		return 0, nil // its end came with the answer
	}
	// Behind a new connection the client sets it again, but we do not know when.
	w.armed, w.czxid = epoch == s.epoch, stat.Czxid
	return w.czxid, nil
}
