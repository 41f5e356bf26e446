package etcdlock

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/driver/flow"
)

// Backend keeps locks in an etcd cluster. It is safe for concurrent use.
type Backend struct {
	client *clientv3.Client
	opts   Options

	ctx    context.Context // ends with the backend
	cancel context.CancelFunc
	tasks  sync.WaitGroup
	wake   chan struct{} // of the goroutine that renews leases; has room for one

	// Acquisitions and releases do not share requests: a full database refuses
	// the ones and takes the others.
	acquiring, releasing sharer

	trying  *flow.Turns // for a lock's permits, without waiting
	looking *flow.Turns // at a lock

	mu        sync.Mutex
	ended     bool
	looked    bool // the server does for locks
	renewing  bool // the goroutine that renews leases runs
	entries   map[id]*entry
	sessions  map[int64]*session // the newest of each class
	retired   map[*session]struct{}
	byLease   map[clientv3.LeaseID]*session // all that have not ended
	making    map[int64]*making
	listeners map[string]*listener
}

var (
	_ driver.Backend   = (*Backend)(nil)
	_ driver.Notifier  = (*Backend)(nil)
	_ driver.Inspector = (*Backend)(nil)
	_ driver.Forcer    = (*Backend)(nil)
	_ driver.Checker   = (*Backend)(nil)
)

// id tells what one owner has on one key.
type id struct{ key, owner string }

// entry is what this backend knows of a ticket that it has made, or tries to.
// It is guarded by Backend.mu, but for its first fields, which do not change.
type entry struct {
	id
	manager string
	name    string // of its key in etcd
	mode    driver.Mode
	limit   int

	made    time.Time // when it was first asked for
	ttl     time.Duration
	asked   time.Time // when the last Acquire began
	rev     int64     // create revision: ticket and token; 0 if it is not known to exist
	granted bool
	next    bool // it holds the lock as soon as what it waits for is gone
	session *session
	// unsure are the leases in whose name a request that was not answered may
	// still make the ticket.
	unsure map[*session]struct{}

	// What follows belongs to the listener.

	watch   *watch           // what it waits for, or its own key
	place   driver.HeldError // as last seen
	looked  time.Time        // when that was
	ahead   map[string]struct{}
	need    int  // how many of those ahead have to leave
	queued  bool // it is in a listener's list of what is to be watched
	release bool // it is being given up
}

const (
	// maxLooks is how often a call looks again because something has changed.
	maxLooks = 50
	// maxLooking is how many calls about one lock ask the store at the same time.
	// Each may have to list all who wait for the lock. If a thousand ask at once,
	// the last answer comes when its caller has given up and asks again, and the
	// renewals of leases are as late. A call that has not been sent costs nothing.
	maxLooking = 16
	// front is how near to the head a waiter always asks the store; those behind
	// are told again what they were told before, for up to trust, as long as the
	// watch stands that tells when they move up.
	front = 3
	trust = 30 * time.Second
	// closePatience bounds the last calls of a backend.
	closePatience = time.Second
)

// New returns a backend over a client, which remains the caller's to close. It
// asks the server nothing yet.
func New(client *clientv3.Client, opts *Options) (*Backend, error) {
	if client == nil || client.ActiveConnection() == nil {
		return nil, invalidf("client is nil")
	}
	o, err := opts.withDefaults()
	if err != nil {
		return nil, err
	}
	b := &Backend{
		client: client, opts: o,
		wake:    make(chan struct{}, 1),
		entries: make(map[id]*entry), sessions: make(map[int64]*session), retired: make(map[*session]struct{}),
		byLease: make(map[clientv3.LeaseID]*session), making: make(map[int64]*making), listeners: make(map[string]*listener),
		trying: flow.NewTurns(1), looking: flow.NewTurns(maxLooking),
	}
	b.ctx, b.cancel = context.WithCancel(context.Background())
	b.acquiring.init(b.ctx, b.commit)
	b.releasing.init(b.ctx, b.commit)
	return b, nil
}

// NewLockManager returns a manager over a client, which remains the caller's to
// close. A nil cfg or nil opts mean the defaults.
func NewLockManager(client *clientv3.Client, cfg *dlm.LockConfig, opts *Options) (*dlm.Manager, error) {
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
		Name:          "etcd",
		Tokens:        driver.TokensStrict,
		MinTTL:        time.Second,
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
	if !b.renewing {
		b.renewing = true
		b.tasks.Go(b.keepAlive)
	}
	return nil
}

// Acquire implements [driver.Backend].
func (b *Backend) Acquire(ctx context.Context, req driver.Request) (driver.Lease, error) {
	if err := b.enter(ctx); err != nil {
		return driver.Lease{}, err
	}
	a := acquisition{b: b, ctx: ctx, req: &req, start: time.Now()}
	if !req.Enqueue && req.Limit > 1 {
		// Whether there is a permit to be had can only be seen, and the attempt
		// fails if somebody else makes one at the same time: not we ourselves.
		leave, err := b.trying.Take(ctx, req.Key)
		if err != nil {
			return driver.Lease{}, err
		}
		defer leave()
	}
	for n := range maxLooks {
		if n > 5 {
			pause(ctx, rand.N(time.Duration(min(n, 20))*time.Millisecond))
		}
		lease, again, err := a.look()
		if !again {
			a.leave(err)
			return lease, err
		}
	}
	err := fmt.Errorf("%w: etcdlock: key %q did not hold still", driver.ErrNotApplied, req.Key)
	a.leave(err)
	return driver.Lease{}, err
}

// pause waits for a time or the end of the context.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// acquisition is one call of Acquire.
type acquisition struct {
	b     *Backend
	ctx   context.Context
	req   *driver.Request
	start time.Time
	e     *entry
	// seen is the revision at which a key with permits was last seen to have one
	// to give.
	seen int64
}

// leave forgets the entry if nothing is left of it.
func (a *acquisition) leave(err error) {
	if err == nil || a.e == nil {
		return
	}
	a.b.mu.Lock()
	defer a.b.mu.Unlock()
	if a.e.rev == 0 && len(a.e.unsure) == 0 {
		a.b.forget(a.e)
	}
}

// forget drops an entry. The mutex is held.
func (b *Backend) forget(e *entry) {
	b.attach(e, nil)
	b.unwait(e)
	if b.entries[e.id] == e {
		delete(b.entries, e.id)
	}
}

// enter finds the owner's entry, or makes it. It fails if the owner uses the key
// in another way.
func (a *acquisition) enter() (rev int64, err error) {
	b, req := a.b, a.req
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.entries[id{req.Key, req.Owner}]
	if e != nil && (e.mode != req.Mode || e.limit != req.Limit) {
		if e.rev != 0 || len(e.unsure) > 0 {
			return 0, b.otherKind(req)
		}
		b.forget(e)
		e = nil
	}
	if e == nil {
		e = &entry{
			id: id{req.Key, req.Owner}, manager: req.Manager, mode: req.Mode, limit: req.Limit,
			name: ticketName(b.opts.Prefix, req.Key, req.Limit, req.Mode, req.Owner), made: a.start,
		}
		b.entries[e.id] = e
	}
	e.ttl, e.asked, e.manager, e.release = req.TTL, a.start, req.Manager, false
	a.e = e
	return e.rev, nil
}

func (b *Backend) otherKind(req *driver.Request) error {
	return invalidf("owner holds or awaits key %q in another mode or with another limit", req.Key)
}

// look asks the store once. It says whether to look again.
func (a *acquisition) look() (driver.Lease, bool, error) {
	rev, err := a.enter()
	if err != nil {
		return driver.Lease{}, false, err
	}
	if rev != 0 {
		return a.lookAgain(rev)
	}
	return a.create()
}

// lookAgain looks at the ticket that the owner has, which needs no write.
func (a *acquisition) lookAgain(rev int64) (driver.Lease, bool, error) {
	b, req := a.b, a.req
	b.mu.Lock()
	place, known := b.placeOf(a.e)
	holds := a.e.granted && a.e.rev == rev && !good(a.e.session, req.TTL)
	b.mu.Unlock()
	if holds {
		// It has been told so, and is to have another lease.
		return a.confirm(rev)
	}
	if known && req.Enqueue {
		return driver.Lease{}, false, &place
	}
	leave, err := b.looking.Take(a.ctx, req.Key)
	if err != nil {
		return driver.Lease{}, false, a.readFailed(a.ctx.Err())
	}
	answer, err := b.client.Do(a.ctx, b.placeOp(req.Key, req.Limit, rev))
	leave()
	if err != nil {
		return driver.Lease{}, false, a.readFailed(err)
	}
	resp := answer.Get()
	list := ticketsAmong(b.opts.Prefix, resp.Kvs)
	if n := len(list); n > 0 && list[n-1].name == a.e.name && list[n-1].rev == rev {
		return a.decide(list, resp.Header.Revision)
	}
	// It was deleted, or its lease has ended.
	b.mu.Lock()
	defer b.mu.Unlock()
	if a.e.rev == rev {
		b.attach(a.e, nil)
		b.unwait(a.e)
		a.e.rev, a.e.granted = 0, false
	}
	return driver.Lease{}, true, nil
}

// placeOf returns a waiter's place if it cannot have become the holder since it
// was last seen. The mutex is held.
func (b *Backend) placeOf(e *entry) (driver.HeldError, bool) {
	w, now := e.watch, time.Now()
	if w == nil || w.since == 0 || w.waiters[e] < max(w.since, w.seen) || now.Sub(w.l.heard) > 2*quiet ||
		e.place.Position <= front || now.Sub(e.looked) > trust || e.session == nil || !e.session.usable(now) {
		return driver.HeldError{}, false
	}
	return e.place, true
}

// readFailed is the error for a question that had no effect, but on a ticket
// that exists.
func (a *acquisition) readFailed(err error) error {
	return classify(a.ctx, err, lockBase(a.b.opts.Prefix, a.req.Key))
}

// create makes the ticket unless there is one, and sees who is before it, in one
// transaction.
func (a *acquisition) create() (driver.Lease, bool, error) {
	b, req, e := a.b, a.req, a.e
	prefix := b.opts.Prefix
	long, err := b.session(a.ctx, class(req.TTL))
	if err != nil {
		return driver.Lease{}, false, err
	}
	short := long
	if wait := min(req.TTL, b.opts.WaiterTTL); req.Enqueue && class(wait) < long.class {
		if short, err = b.session(a.ctx, class(wait)); err != nil {
			return driver.Lease{}, false, err
		}
	}

	base, end := lockBase(prefix, req.Key), lockEnd(prefix, req.Key)
	mine := limitBase(prefix, req.Key, req.Limit)
	leave, err := b.looking.Take(a.ctx, req.Key)
	if err != nil {
		return driver.Lease{}, false, err
	}
	// Without waiting, a lock of one's own is to be had only if there is no ticket
	// at all, which is one comparison.
	only := !req.Enqueue && req.Limit == 1 && req.Mode == driver.Exclusive
	var conds []clientv3.Cmp
	if only {
		conds = append(conds, empty(base, end))
	} else {
		conds = append(conds, clientv3.Compare(clientv3.CreateRevision(e.name), "=", 0), empty(base, mine), empty(after(mine), end))
	}
	b.mu.Lock()
	conds = append(conds, clientv3.Compare(clientv3.ModRevision(long.name), "=", long.fence))
	if short != long {
		conds = append(conds, clientv3.Compare(clientv3.ModRevision(short.name), "=", short.fence))
	}
	b.mu.Unlock()
	if req.Limit == 1 && !only {
		other := ticketName(prefix, req.Key, 1, driver.Shared-req.Mode, req.Owner)
		conds = append(conds, clientv3.Compare(clientv3.CreateRevision(other), "=", 0))
	}
	// Nothing of this range may be there for the lock to be had at once.
	blocker := mine
	if req.Mode == driver.Shared {
		blocker = modeBase(prefix, req.Key, 1, driver.Exclusive)
	}
	data := value{ttl: req.TTL, made: e.made, manager: req.Manager}.String()
	put := clientv3.OpPut(e.name, data, clientv3.WithLease(long.id))
	list := clientv3.OpGet(mine, clientv3.WithRange(after(mine)), clientv3.WithKeysOnly(), byCreation)
	var then []clientv3.Op
	switch {
	case only:
		then = []clientv3.Op{put}
	case !req.Enqueue && a.seen > 0:
		conds = append(conds, clientv3.Compare(clientv3.CreateRevision(mine).WithRange(after(mine)), "<", a.seen+1))
		then = []clientv3.Op{list, put}
	case !req.Enqueue:
		conds = append(conds, empty(blocker, after(blocker)))
		then = []clientv3.Op{list, put}
	case short == long:
		then = []clientv3.Op{list, put}
	default:
		// Those who have to wait get the lease that does not hold up others for
		// long when they die.
		wait := clientv3.OpPut(e.name, data, clientv3.WithLease(short.id))
		then = []clientv3.Op{list, clientv3.OpTxn(
			[]clientv3.Cmp{empty(blocker, after(blocker))}, []clientv3.Op{put}, []clientv3.Op{wait})}
	}
	otherwise := []clientv3.Op{
		clientv3.OpGet(base, clientv3.WithRange(end), clientv3.WithKeysOnly(), byCreation),
		clientv3.OpGet(e.name), // with its lease, which etcd 3.7 leaves out of lists without values
		clientv3.OpGet(long.name, clientv3.WithKeysOnly()),
	}
	if short != long {
		otherwise = append(otherwise, clientv3.OpGet(short.name, clientv3.WithKeysOnly()))
	}
	resp, rev, err := b.acquiring.do(a.ctx, req.Key, false, condition{
		conds: conds, then: then, otherwise: otherwise,
		rights: []clientv3.Op{clientv3.OpGet(base, clientv3.WithRange(end)), clientv3.OpPut(e.name, "")},
	})
	leave()
	if err != nil {
		return a.createFailed(err, long, short)
	}
	if !resp.Succeeded {
		return a.notCreated(resp, rev, long, short)
	}
	var tickets []ticket
	s := long
	if !only {
		tickets = ticketsAmong(prefix, resp.Responses[0].GetResponseRange().Kvs)
		if nested := resp.Responses[1].GetResponseTxn(); nested != nil && !nested.Succeeded {
			s = short
		}
	}
	own := ticket{name: e.name, key: req.Key, owner: req.Owner, mode: req.Mode, limit: req.Limit, rev: rev}
	b.mu.Lock()
	e.rev = rev
	b.attach(e, s)
	if s.ended {
		// It came to its end meanwhile, with all that belongs to it.
		b.attach(e, nil)
		e.rev = 0
		b.mu.Unlock()
		return driver.Lease{}, true, nil
	}
	b.mu.Unlock()
	return a.decide(append(tickets, own), rev)
}

var byCreation = clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortAscend)

// empty is true if a range is.
func empty(from, to string) clientv3.Cmp {
	return clientv3.Compare(clientv3.CreateRevision(from).WithRange(to), "=", 0)
}

// createFailed notes what may have been left.
func (a *acquisition) createFailed(err error, sessions ...*session) (driver.Lease, bool, error) {
	b := a.b
	if gone(err) {
		b.endDead(a.ctx, sessions...)
		return driver.Lease{}, true, nil
	}
	err = classify(a.ctx, err, lockBase(b.opts.Prefix, a.req.Key))
	if is(err, ProblemNoSpace) {
		// The server also says so of the very request with which the space ran out,
		// after it was carried out. As it is over, it takes no fence to undo it, and
		// to delete takes no space.
		if _, undone := b.client.Delete(a.ctx, a.e.name); undone != nil {
			err = fmt.Errorf("etcdlock: the ticket may be there all the same: %v", err)
		}
	}
	if !certain(err) {
		b.mu.Lock()
		defer b.mu.Unlock()
		if a.e.unsure == nil {
			a.e.unsure = make(map[*session]struct{})
		}
		for _, s := range sessions {
			a.e.unsure[s] = struct{}{}
		}
	}
	return driver.Lease{}, false, err
}

// notCreated finds out what stood in the way.
func (a *acquisition) notCreated(resp *pb.TxnResponse, rev int64, long, short *session) (driver.Lease, bool, error) {
	b, req, e := a.b, a.req, a.e
	fenced := false
	sessions := []*session{long}
	if short != long {
		sessions = append(sessions, short)
	}
	for i, s := range sessions {
		kvs := resp.Responses[2+i].GetResponseRange().Kvs
		b.mu.Lock()
		switch {
		case len(kvs) == 0:
			b.end(s)
			fenced = true
		case kvs[0].ModRevision > s.fence:
			s.fence = kvs[0].ModRevision
			fenced = true
		}
		b.mu.Unlock()
	}
	list, err := parseTickets(b.opts.Prefix, resp.Responses[0].GetResponseRange().Kvs)
	if err != nil {
		return driver.Lease{}, false, err
	}
	for i, t := range list {
		switch {
		case t.owner != req.Owner:
		case t.mode != req.Mode || t.limit != req.Limit:
			return driver.Lease{}, false, b.otherKind(req)
		default:
			// It is there since a call that was not answered, or made by another
			// client.
			b.mu.Lock()
			e.rev = t.rev
			if kvs := resp.Responses[1].GetResponseRange().Kvs; len(kvs) > 0 {
				b.attach(e, b.byLease[clientv3.LeaseID(kvs[0].Lease)])
			}
			b.mu.Unlock()
			return a.decide(list[:i+1], rev)
		}
	}
	if len(list) > 0 && list[0].limit != req.Limit {
		return driver.Lease{}, false, &driver.LimitError{Key: req.Key, Want: req.Limit, Have: list[0].limit}
	}
	switch {
	case fenced || req.Enqueue:
		return driver.Lease{}, true, nil
	case len(list) < req.Limit && req.Limit > 1:
		a.seen = rev
		return driver.Lease{}, true, nil
	}
	probe := ticket{owner: req.Owner, mode: req.Mode, limit: req.Limit}
	list = append(list, probe)
	if i := len(list) - 1; holders(list) <= i {
		return driver.Lease{}, false, &driver.HeldError{Holder: list[0].owner, Token: list[0].rev}
	}
	return driver.Lease{}, true, nil
}

// decide says whether the last ticket of a list, which is the owner's, holds the
// lock. The list is what there was at a revision.
func (a *acquisition) decide(list []ticket, rev int64) (driver.Lease, bool, error) {
	b, e := a.b, a.e
	last := len(list) - 1
	own := list[last]
	if n := holders(list); n <= last {
		b.mu.Lock()
		defer b.mu.Unlock()
		held := driver.HeldError{Holder: list[0].owner, Token: list[0].rev, Position: last - n + 1, Ticket: own.rev}
		e.place, e.looked = held, time.Now()
		b.await(e, list, n, rev)
		if e.session == nil || !e.session.usable(time.Now()) {
			// Its lease will end, and it must not lose its place.
			b.task(func() { b.rescue(e, own) })
		}
		return driver.Lease{}, false, &held
	}
	return a.confirm(own.rev)
}

// good says whether a lease does for a lock with this TTL.
func good(s *session, ttl time.Duration) bool {
	return s != nil && s.ttl >= ttl && s.usable(time.Now())
}

// confirm puts a ticket that holds the lock on a lease that is long enough.
func (a *acquisition) confirm(rev int64) (driver.Lease, bool, error) {
	b, req, e := a.b, a.req, a.e
	b.mu.Lock()
	s := e.session
	fits := good(s, req.TTL)
	b.mu.Unlock()
	if !fits {
		var err error
		if s, err = b.session(a.ctx, max(class(req.TTL), b.classOf(s))); err != nil {
			return driver.Lease{}, false, unconfirmed(a.ctx, err)
		}
		moved, err := b.move(a.ctx, e, rev, s)
		if err != nil {
			return driver.Lease{}, false, unconfirmed(a.ctx, err)
		}
		if !moved {
			return driver.Lease{}, true, nil
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if e.rev != rev || s.ended {
		return driver.Lease{}, true, nil
	}
	e.granted = true
	b.unwait(e)
	b.hold(e)
	return driver.Lease{
		Key: req.Key, Owner: req.Owner, Token: rev, TTL: s.ttl, Mode: req.Mode, Age: s.age(a.start),
	}, false, nil
}

// unconfirmed makes an error that says "had no effect" one that does not: the
// ticket is there.
func unconfirmed(ctx context.Context, err error) error {
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("etcdlock: no reply yet: %w", ctx.Err())
	case certain(err):
		return fmt.Errorf("etcdlock: the ticket is there, but not confirmed: %v", err)
	}
	return err
}

func (b *Backend) classOf(s *session) int64 {
	if s == nil {
		return 0
	}
	return s.class
}

// rescue puts a waiter's ticket on another lease.
func (b *Backend) rescue(e *entry, own ticket) {
	ctx, cancel := context.WithTimeout(b.ctx, sessionPatience)
	defer cancel()
	b.mu.Lock()
	wait := class(min(e.ttl, b.opts.WaiterTTL))
	b.mu.Unlock()
	if s, err := b.session(ctx, wait); err == nil {
		_, _ = b.move(ctx, e, own.rev, s) // or it is tried again with the next question
	}
}

// move puts a ticket on another lease; it keeps its create revision. It returns
// false if the ticket is gone.
func (b *Backend) move(ctx context.Context, e *entry, rev int64, s *session) (bool, error) {
	b.mu.Lock()
	op := b.moveOp(e, rev, s)
	b.mu.Unlock()
	resp, _, err := b.txn(ctx, op.conds, op.then, op.otherwise)
	if err != nil {
		if gone(err) {
			b.mu.Lock()
			b.end(s)
			b.mu.Unlock()
		}
		return false, classify(ctx, err, lockBase(b.opts.Prefix, e.key))
	}
	return b.moved(e, rev, s, resp), nil
}

// condition is a transaction.
type condition struct {
	conds           []clientv3.Cmp
	then, otherwise []clientv3.Op
	// rights are operations that need the same rights, and as much space. They
	// are never carried out.
	rights []clientv3.Op
}

func (b *Backend) moveOp(e *entry, rev int64, s *session) condition {
	data := value{ttl: e.ttl, made: e.made, manager: e.manager}.String()
	return condition{
		conds:     []clientv3.Cmp{clientv3.Compare(clientv3.CreateRevision(e.name), "=", rev)},
		then:      []clientv3.Op{clientv3.OpPut(e.name, data, clientv3.WithLease(s.id))},
		otherwise: []clientv3.Op{clientv3.OpGet(e.name, clientv3.WithKeysOnly())},
	}
}

// moved takes the answer to a move.
func (b *Backend) moved(e *entry, rev int64, s *session, resp *pb.TxnResponse) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	known := b.entries[e.id] == e && e.rev == rev
	if !resp.Succeeded {
		if known {
			b.attach(e, nil)
			e.rev, e.granted = 0, false
		}
		return false
	}
	if !known || s.ended {
		// It was given up as lost meanwhile, so nobody would ever release it.
		b.task(func() { b.remove(e.name, rev) })
		return false
	}
	b.attach(e, s)
	return true
}

// remove deletes what nobody knows of any more.
func (b *Backend) remove(name string, rev int64) {
	for pause := 50 * time.Millisecond; b.ctx.Err() == nil; pause = min(2*pause, time.Second) {
		ctx, cancel := context.WithTimeout(b.ctx, sessionPatience)
		_, _, err := b.txn(ctx, []clientv3.Cmp{clientv3.Compare(clientv3.CreateRevision(name), "=", rev)},
			[]clientv3.Op{clientv3.OpDelete(name)}, nil)
		cancel()
		if err == nil {
			return
		}
		select {
		case <-time.After(pause):
		case <-b.ctx.Done():
		}
	}
}

// lose takes note that a ticket is gone without having been given up, and tells
// its manager. The mutex is held.
func (b *Backend) lose(e *entry, reason driver.LostReason) {
	rev := e.rev
	b.drop(e)
	if l := b.listeners[e.manager]; l != nil && rev != 0 {
		// Whether it was granted is not always known: a waiter can be told by
		// what it sees.
		at := driver.Lease{Key: e.key, Owner: e.owner}
		l.tell(driver.Event{
			Kind: driver.EventLost, Lease: at,
			Err: &driver.LostError{Key: e.key, Token: rev, Reason: reason},
		})
		l.tell(driver.Event{Kind: driver.EventWake, Lease: at})
	}
}

// drop forgets a ticket that is gone. The mutex is held.
func (b *Backend) drop(e *entry) {
	b.attach(e, nil)
	b.unwait(e)
	e.rev, e.granted = 0, false
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

// txn runs a transaction, and returns the answer with the revision at which it
// was given.
func (b *Backend) txn(ctx context.Context, conds []clientv3.Cmp, then, otherwise []clientv3.Op) (*pb.TxnResponse, int64, error) {
	return b.commit(ctx, condition{conds: conds, then: then, otherwise: otherwise})
}

func (b *Backend) commit(ctx context.Context, t condition) (*pb.TxnResponse, int64, error) {
	var resp *clientv3.TxnResponse
	err := guarded(func() (err error) {
		resp, err = b.client.Txn(ctx).If(t.conds...).Then(t.then...).Else(t.otherwise...).Commit()
		return err
	})
	if err != nil {
		return nil, 0, err
	}
	return (*pb.TxnResponse)(resp), resp.Header.Revision, nil
}

// Release implements [driver.Backend].
func (b *Backend) Release(ctx context.Context, lease driver.Lease) error {
	if err := b.enter(ctx); err != nil {
		return err
	}
	if lease.Token == 0 {
		return b.withdraw(ctx, lease)
	}
	b.mu.Lock()
	e := b.entries[id{lease.Key, lease.Owner}]
	name, awaited := "", false
	if e != nil && e.rev == lease.Token {
		name = e.name
		e.release = true
		b.unwait(e)
		awaited = b.leaving(e)
		if len(e.unsure) > 0 {
			b.mu.Unlock()
			return b.releaseFenced(ctx, e, lease)
		}
	}
	b.mu.Unlock()
	if name == "" {
		list, err := b.read(ctx, lease.Key)
		if err != nil {
			return err
		}
		i := slices.IndexFunc(list, func(t ticket) bool { return t.owner == lease.Owner && t.rev == lease.Token })
		if i < 0 {
			return lostError(&lease, len(list) > 0)
		}
		name = list[i].name
	}
	resp, _, err := b.releasing.do(ctx, lease.Key, awaited, condition{
		conds: []clientv3.Cmp{clientv3.Compare(clientv3.CreateRevision(name), "=", lease.Token)},
		then:  []clientv3.Op{clientv3.OpDelete(name)}, otherwise: []clientv3.Op{b.anybody(lease.Key)},
		rights: []clientv3.Op{clientv3.OpDelete(name), b.anybody(lease.Key)},
	})
	if err != nil {
		return classify(ctx, err, lockBase(b.opts.Prefix, lease.Key))
	}
	b.mu.Lock()
	if e != nil && e.rev == lease.Token {
		b.forget(e)
	}
	b.mu.Unlock()
	if !resp.Succeeded {
		return lostError(&lease, len(resp.Responses[0].GetResponseRange().Kvs) > 0)
	}
	return nil
}

// leaving notes that a lock is being released. It says whether somebody here
// waits for that. One who waits for a lock of its own is the next, and need not
// look when it is gone. The mutex is held.
func (b *Backend) leaving(e *entry) (awaited bool) {
	if !e.granted {
		return false
	}
	what := watch{start: e.name}
	if e.limit > 1 {
		what.start = limitBase(b.opts.Prefix, e.key, e.limit)
		what.end = after(what.start)
	}
	place := what.place()
	for _, l := range b.listeners {
		if w := l.ranges[place]; w != nil {
			awaited = true
			w.last = w.last || e.limit == 1 && e.mode == driver.Exclusive
		}
	}
	return awaited
}

// releaseFenced is Release for a ticket that a request on its way may make
// again.
func (b *Backend) releaseFenced(ctx context.Context, e *entry, lease driver.Lease) error {
	resp, err := b.fenced(ctx, e,
		[]clientv3.Cmp{clientv3.Compare(clientv3.CreateRevision(e.name), "=", lease.Token)},
		clientv3.OpDelete(e.name), b.anybody(lease.Key))
	if err != nil {
		return err
	}
	if !resp.Succeeded {
		return lostError(&lease, len(resp.Responses[0].GetResponseRange().Kvs) > 0)
	}
	return nil
}

// anybody asks whether a lock has any ticket.
func (b *Backend) anybody(key string) clientv3.Op {
	return clientv3.OpGet(lockBase(b.opts.Prefix, key), clientv3.WithRange(lockEnd(b.opts.Prefix, key)),
		clientv3.WithKeysOnly(), clientv3.WithLimit(1))
}

func lostError(l *driver.Lease, taken bool) error {
	reason := driver.ReasonGone
	if taken {
		reason = driver.ReasonTaken
	}
	return &driver.LostError{Key: l.Key, Token: l.Token, Reason: reason}
}

// read lists the tickets of a lock in the order of their creation.
func (b *Backend) read(ctx context.Context, key string) ([]ticket, error) {
	base := lockBase(b.opts.Prefix, key)
	resp, err := b.client.Get(ctx, base, clientv3.WithRange(lockEnd(b.opts.Prefix, key)), clientv3.WithKeysOnly(), byCreation)
	if err != nil {
		return nil, classify(ctx, err, base)
	}
	return parseTickets(b.opts.Prefix, resp.Kvs)
}

// withdraw removes whatever the owner has on the key. A request of his that was
// not answered may still be on its way, in a broken connection or in a member's
// queue. So the same transaction moves the fence that this request compares.
func (b *Backend) withdraw(ctx context.Context, lease driver.Lease) error {
	b.mu.Lock()
	e := b.entries[id{lease.Key, lease.Owner}]
	if e != nil {
		e.release = true
		b.unwait(e)
	}
	b.mu.Unlock()
	if e == nil {
		return b.withdrawUnknown(ctx, lease)
	}
	_, err := b.fenced(ctx, e, nil, clientv3.OpDelete(e.name), clientv3.Op{})
	return err
}

// fenced runs a transaction that ends a ticket, and makes sure that no request
// from before makes it again. Then the entry is forgotten.
func (b *Backend) fenced(ctx context.Context, e *entry, conds []clientv3.Cmp, then, otherwise clientv3.Op) (*pb.TxnResponse, error) {
	for range maxLooks {
		thenOps, otherwiseOps := []clientv3.Op{then}, []clientv3.Op{otherwise}
		b.mu.Lock()
		var fences []*session
		for s := range e.unsure {
			if s.ended {
				delete(e.unsure, s)
				continue
			}
			fences = append(fences, s)
			put := clientv3.OpPut(s.name, formatVersion, clientv3.WithLease(s.id))
			thenOps, otherwiseOps = append(thenOps, put), append(otherwiseOps, put)
		}
		b.mu.Unlock()
		if len(conds) == 0 {
			otherwiseOps = nil
		}
		resp, rev, err := b.txn(ctx, conds, thenOps, otherwiseOps)
		if err != nil && gone(err) {
			b.endDead(ctx, fences...)
			continue
		}
		if err != nil {
			return nil, classify(ctx, err, lockBase(b.opts.Prefix, e.key))
		}
		b.mu.Lock()
		for _, s := range fences {
			s.fence = max(s.fence, rev)
		}
		e.unsure, e.rev = nil, 0
		b.forget(e)
		b.mu.Unlock()
		return resp, nil
	}
	return nil, fmt.Errorf("%w: etcdlock: leases end all the time", driver.ErrNotApplied)
}

// endDead finds out which of some leases has ended, after the server has said
// that one has.
func (b *Backend) endDead(ctx context.Context, sessions ...*session) {
	for _, s := range sessions {
		resp, err := b.client.Get(ctx, s.name, clientv3.WithKeysOnly())
		if err == nil && len(resp.Kvs) == 0 {
			b.mu.Lock()
			b.end(s)
			b.mu.Unlock()
		}
	}
}

// withdrawUnknown removes what an owner has that this backend has not heard of.
func (b *Backend) withdrawUnknown(ctx context.Context, lease driver.Lease) error {
	list, err := b.read(ctx, lease.Key)
	if err != nil {
		return err
	}
	for _, t := range list {
		if t.owner != lease.Owner {
			continue
		}
		if _, _, err := b.txn(ctx, nil, []clientv3.Op{clientv3.OpDelete(t.name)}, nil); err != nil {
			return classify(ctx, err, lockBase(b.opts.Prefix, lease.Key))
		}
	}
	return nil
}

// Close implements [driver.Backend]. Leases that hold no lock are revoked; the
// others end with their locks. The client stays open.
func (b *Backend) Close() error {
	b.mu.Lock()
	if b.ended {
		b.mu.Unlock()
		return nil
	}
	b.ended = true
	var spare []clientv3.LeaseID
	for _, s := range b.byLease {
		if len(s.entries) == 0 {
			spare = append(spare, s.id)
		}
	}
	b.mu.Unlock()
	b.cancel()
	b.acquiring.close()
	b.releasing.close()
	b.tasks.Wait()
	for _, id := range spare {
		b.tasks.Go(func() { b.revoke(id) })
	}
	b.tasks.Wait()
	return nil
}
