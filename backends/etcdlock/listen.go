package etcdlock

import (
	"context"
	"fmt"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/go-dlm/dlm/driver"
)

// Each Listen is one stream of watches. A waiter watches what it waits for:
//
//   - the ticket before its own, if it wants the lock for itself;
//   - the last ticket before its own that excludes it, if it shares the lock;
//   - all tickets of the lock, if it wants one of several permits.
//
// So the end of a lock wakes one waiter, or those who may enter together. Watches
// begin at the present, because one that begins in the past is served by a loop
// of the server that runs ten times a second. What happened between the answer
// that told the waiter whom to wait for and the beginning of the watch is made
// good by looking again; the revisions of both tell whether that is needed.
//
// The keys of the leases are watched too, and the keys of locks that have been
// held for some time, so that a loss is told at once. Locks that are held for a
// moment only do not pay for that.

const (
	// subscribePatience bounds how long a subscription may take to stand.
	subscribePatience = 5 * time.Second
	// quiet is after how long without news the stream is tried by another watch,
	// which must be confirmed within as long again.
	quiet = 3 * time.Second
	// settled is how long a lock has been held when its key is watched, and
	// maxHeld is how many are at the same time. Of more, a loss is told at the
	// next renewal.
	settled = 400 * time.Millisecond
	maxHeld = 1000
)

// listener is one Listen call under way. It is guarded by Backend.mu.
type listener struct {
	b       *Backend
	manager string

	events []driver.Event
	ready  chan struct{} // has room for one
	out    []*pb.WatchRequest
	send   chan struct{} // has room for one

	last    int64 // the last number given to a watch
	watches map[int64]*watch
	ranges  map[string]*watch // by range
	ping    *watch
	doubts  []*entry      // waiters whose place has to be looked at again
	doubt   chan struct{} // has room for one
	held    []heldSince   // locks whose keys are not watched yet, in order
	nHeld   int
	heard   time.Time
}

type heldSince struct {
	e    *entry
	rev  int64
	when time.Time
}

// watch is a range that the server watches for deletions.
type watch struct {
	l          *listener
	number     int64
	start, end string
	since      int64 // revision from which on it stands, 0 before that
	seen       int64 // revision of its last event
	// waiters are those to be woken, with the revision of their last look.
	waiters map[*entry]int64
	last    bool     // nobody but it stands in their way
	holder  *entry   // whose own key it is
	session *session // whose key it is
}

func (w *watch) place() string { return w.start + "\xff\xff" + w.end }

// tell queues an event. The mutex is held.
func (l *listener) tell(e driver.Event) {
	l.events = append(l.events, e)
	nudge(l.ready)
}

func nudge(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// open asks for a watch from a revision on, or from now on if it is 0. The mutex
// is held.
func (l *listener) open(w *watch, from int64) *watch {
	l.last++
	w.l, w.number = l, l.last
	l.watches[w.number] = w
	create := &pb.WatchCreateRequest{
		Key: []byte(w.start), WatchId: w.number, StartRevision: from,
		Filters: []pb.WatchCreateRequest_FilterType{pb.WatchCreateRequest_NOPUT},
	}
	if w.end != "" {
		create.RangeEnd = []byte(w.end)
	}
	l.post(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: create}})
	return w
}

func (l *listener) post(r *pb.WatchRequest) {
	l.out = append(l.out, r)
	nudge(l.send)
}

// shut ends a watch. The mutex is held.
func (l *listener) shut(w *watch) {
	if l.watches[w.number] != w {
		return
	}
	delete(l.watches, w.number)
	if l.ranges[w.place()] == w {
		delete(l.ranges, w.place())
	}
	l.post(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CancelRequest{
		CancelRequest: &pb.WatchCancelRequest{WatchId: w.number},
	}})
}

// await has a waiter woken when it is worth asking again. The list ends with its
// ticket, n of those before hold the lock, and rev is when that was so. The mutex
// is held.
func (b *Backend) await(e *entry, list []ticket, n int, rev int64) {
	l := b.listeners[e.manager]
	if l == nil || e.release {
		b.unwait(e)
		return
	}
	last := len(list) - 1
	w := &watch{start: list[last-1].name}
	e.next, e.ahead, e.need = last == 1, nil, 1
	switch {
	case e.limit > 1:
		w.start = limitBase(b.opts.Prefix, e.key, e.limit)
		w.end = after(w.start)
		e.next = false
		e.need = last - n + 1
		e.ahead = make(map[string]struct{}, last)
		for _, t := range list[:last] {
			e.ahead[t.name] = struct{}{}
		}
	case e.mode == driver.Shared:
		i := last - 1
		for i > 0 && list[i].mode == driver.Shared {
			i--
		}
		w.start = list[i].name
		e.next = i == 0
	}
	if have := l.ranges[w.place()]; have != nil {
		w = have
	}
	if e.watch != nil && e.watch != w {
		b.unwait(e)
	}
	if w.l == nil {
		w.waiters = make(map[*entry]int64)
		l.ranges[w.place()] = w
		l.open(w, 0)
	}
	e.watch = w
	w.waiters[e] = rev
	if w.since != 0 && rev < max(w.since, w.seen) {
		l.doubtful(e)
	}
}

// doubtful has a waiter's place looked at again. The mutex is held.
func (l *listener) doubtful(e *entry) {
	l.doubts = append(l.doubts, e)
	nudge(l.doubt)
}

// leave notes that a watch is no more. The mutex is held.
func (e *entry) leave(w *watch) {
	if e.watch == w {
		e.watch = nil
	}
}

// unwait ends what a waiter or holder watches. The mutex is held.
func (b *Backend) unwait(e *entry) {
	e.ahead = nil
	w := e.watch
	if w == nil {
		return
	}
	e.watch = nil
	delete(w.waiters, e)
	if w.holder == e {
		w.holder = nil
		w.l.nHeld--
	}
	if len(w.waiters) == 0 && w.holder == nil && w.session == nil {
		w.l.shut(w)
	}
}

// hold has the key of a grant watched when it has been held for some time. The
// mutex is held.
func (b *Backend) hold(e *entry) {
	l := b.listeners[e.manager]
	if l == nil || e.queued || e.watch != nil {
		return
	}
	e.queued = true
	l.held = append(l.held, heldSince{e: e, rev: e.rev, when: time.Now()})
}

// settle begins to watch the keys of locks that have been held for some time.
// The mutex is held.
func (l *listener) settle(now time.Time) {
	n := 0
	for ; n < len(l.held) && now.Sub(l.held[n].when) >= settled; n++ {
		e := l.held[n].e
		e.queued = false
		if e.rev != l.held[n].rev || !e.granted || e.watch != nil || e.release || l.nHeld >= maxHeld {
			continue
		}
		l.nHeld++
		e.watch = l.open(&watch{start: e.name, holder: e}, e.rev+1)
	}
	l.held = append(l.held[:0], l.held[n:]...)
}

func (l *listener) watchSession(s *session) {
	l.open(&watch{start: s.name, session: s}, 0)
}

func (l *listener) unwatchSession(s *session) {
	for _, w := range l.watches {
		if w.session == s {
			l.shut(w)
			return
		}
	}
}

// Listen implements [driver.Notifier].
func (b *Backend) Listen(ctx context.Context, manager string, handle func(driver.Event)) error {
	if err := b.enter(ctx); err != nil {
		return err
	}
	outer := ctx
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	stop := context.AfterFunc(b.ctx, cancel)
	defer stop()
	opening := time.AfterFunc(subscribePatience, cancel)
	stream, err := pb.NewWatchClient(b.client.ActiveConnection()).Watch(ctx)
	if !opening.Stop() && err == nil {
		err = context.DeadlineExceeded
	}
	if err == nil {
		err = b.listen(ctx, cancel, stream, manager, handle)
	}
	switch {
	case b.ctx.Err() != nil:
		return driver.ErrClosed
	case outer.Err() != nil:
		return outer.Err()
	}
	return classify(outer, err, b.opts.Prefix)
}

// listen reads a stream of watches until it breaks. cancel ends the stream.
func (b *Backend) listen(
	ctx context.Context, cancel context.CancelFunc, stream pb.Watch_WatchClient, manager string, handle func(driver.Event),
) error {
	l := &listener{
		b: b, manager: manager, ready: make(chan struct{}, 1), send: make(chan struct{}, 1), doubt: make(chan struct{}, 1),
		watches: make(map[int64]*watch), ranges: make(map[string]*watch), heard: time.Now(),
	}
	b.mu.Lock()
	b.listeners[manager] = l
	l.pingNow()
	for _, s := range b.byLease {
		l.watchSession(s)
	}
	for _, e := range b.entries {
		if e.manager == manager && e.granted && e.watch == nil {
			e.queued = false
			b.hold(e)
		}
	}
	b.mu.Unlock()

	errs := make(chan error, 2)
	go func() { errs <- l.sendAll(ctx, stream) }()
	go func() { errs <- l.receive(stream) }()
	running := 2
	end := func(err error) error {
		cancel()
		for ; running > 0; running-- {
			<-errs
		}
		return err
	}
	looked := make(chan struct{})
	go func() {
		defer close(looked)
		l.lookAll(ctx)
	}()
	defer func() {
		cancel()
		<-looked
		b.mu.Lock()
		if b.listeners[manager] == l {
			delete(b.listeners, manager)
		}
		for _, w := range l.watches {
			for e := range w.waiters {
				e.leave(w)
			}
			if w.holder != nil {
				w.holder.leave(w)
			}
		}
		for _, h := range l.held {
			h.e.queued = false
		}
		b.mu.Unlock()
	}()

	tick := time.NewTicker(settled / 2)
	defer tick.Stop()
	for {
		select {
		case err := <-errs:
			running--
			if err == nil {
				continue // sending has failed, and receiving will say why
			}
			return end(err)
		case now := <-tick.C:
			if !l.tick(now) {
				return end(fmt.Errorf("etcdlock: the watch has been silent for %v", 2*quiet))
			}
		case <-l.ready:
			b.mu.Lock()
			events := l.events
			l.events = nil
			b.mu.Unlock()
			for _, e := range events {
				handle(e)
			}
		}
	}
}

// pingNow asks for a watch that nothing happens to, only to have it confirmed.
// The mutex is held.
func (l *listener) pingNow() {
	if l.ping != nil {
		l.shut(l.ping)
	}
	l.ping = l.open(&watch{start: l.b.opts.Prefix + sessionSection}, 0)
}

// tick does what has to be done from time to time. It returns false if the
// stream does not answer.
func (l *listener) tick(now time.Time) bool {
	l.b.mu.Lock()
	defer l.b.mu.Unlock()
	l.settle(now)
	switch silent := now.Sub(l.heard); {
	case silent > 2*quiet:
		return false
	case silent > quiet && l.ping.since != 0:
		l.pingNow()
	}
	return true
}

// sendAll sends what is to be sent.
func (l *listener) sendAll(ctx context.Context, stream pb.Watch_WatchClient) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-l.send:
		}
		l.b.mu.Lock()
		out := l.out
		l.out = nil
		l.b.mu.Unlock()
		for _, r := range out {
			if err := stream.Send(r); err != nil {
				return nil // receive says why
			}
		}
	}
}

// receive takes what the server sends.
func (l *listener) receive(stream pb.Watch_WatchClient) error {
	for {
		r, err := stream.Recv()
		if err != nil {
			return err
		}
		l.b.mu.Lock()
		err = l.take(r)
		l.b.mu.Unlock()
		if err != nil {
			return err
		}
	}
}

// take takes one message. The mutex is held.
func (l *listener) take(r *pb.WatchResponse) error {
	l.heard = time.Now()
	w := l.watches[r.WatchId]
	switch {
	case r.Canceled:
		if w == nil {
			if r.WatchId == -1 {
				return fmt.Errorf("etcdlock: a watch was refused: %s", r.CancelReason)
			}
			return nil // we have asked for that
		}
		return l.canceled(w, r)
	case w == nil:
		return nil
	case r.Created:
		first := w == l.ping && w.number == 1
		w.since = max(r.Header.Revision, 1)
		for e, rev := range w.waiters {
			if rev < w.since {
				l.doubtful(e)
			}
		}
		if first {
			l.tell(driver.Event{Kind: driver.EventUp})
		}
	}
	for _, e := range r.Events {
		if e.Type == mvccpb.Event_DELETE {
			l.deleted(w, e.Kv)
		}
	}
	return nil
}

// canceled takes note that the server has ended a watch. The mutex is held.
func (l *listener) canceled(w *watch, r *pb.WatchResponse) error {
	if r.CompactRevision == 0 {
		return fmt.Errorf("etcdlock: a watch was ended: %s", r.CancelReason)
	}
	// What it was to begin with is in no history any more. Ask again, and watch
	// from now on.
	delete(l.watches, w.number)
	if l.ranges[w.place()] == w {
		delete(l.ranges, w.place())
	}
	for e := range w.waiters {
		e.leave(w)
		l.doubtful(e)
	}
	switch {
	case w.holder != nil:
		w.holder.watch = l.open(&watch{start: w.start, holder: w.holder}, 0)
	case w.session != nil:
		l.watchSession(w.session)
	}
	return nil
}

// deleted takes note that a key is gone. The mutex is held.
func (l *listener) deleted(w *watch, kv *mvccpb.KeyValue) {
	b := l.b
	w.seen = max(w.seen, kv.ModRevision)
	name := string(kv.Key)
	switch {
	case w.session != nil:
		b.end(w.session)
		return
	case w.holder != nil:
		if e := w.holder; !e.release {
			b.lose(e, driver.ReasonGone)
		}
		return
	}
	for e, rev := range w.waiters {
		if kv.ModRevision <= rev {
			continue // the waiter knows
		}
		if e.ahead != nil {
			if _, ok := e.ahead[name]; !ok {
				continue
			}
			delete(e.ahead, name)
		}
		if e.need--; e.need > 0 {
			continue
		}
		if e.next || w.last {
			l.grant(e)
		} else {
			b.unwait(e)
			l.doubtful(e)
		}
	}
}

// wake tells a waiter that it is worth asking again. The mutex is held.
func (l *listener) wake(e *entry) {
	l.tell(driver.Event{Kind: driver.EventWake, Lease: driver.Lease{Key: e.key, Owner: e.owner}})
}

// grant hands the lock to a waiter: nothing stands in its way any more, and its
// ticket is there. If the ticket belongs to a lease that is too short, or that may
// be about to end, the waiter has to ask, and gets another. The mutex is held.
func (l *listener) grant(e *entry) {
	b, s := l.b, e.session
	b.unwait(e)
	if e.release {
		return
	}
	e.granted = true
	if !good(s, e.ttl) {
		l.wake(e)
		return
	}
	b.hold(e)
	l.tell(driver.Event{Kind: driver.EventGrant, Ticket: e.rev, Lease: driver.Lease{
		Key: e.key, Owner: e.owner, Token: e.rev, TTL: s.ttl, Mode: e.mode, Age: s.age(e.asked),
	}})
}

// lookAll looks again at the places of waiters, of many with one question.
func (l *listener) lookAll(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.doubt:
		}
		for l.lookSome(ctx) {
		}
	}
}

// lookSome looks at some waiters' places. It says whether there are more.
func (l *listener) lookSome(ctx context.Context) bool {
	b := l.b
	b.mu.Lock()
	n := min(len(l.doubts), maxReads)
	some := l.doubts[:n]
	l.doubts = l.doubts[n:]
	more := len(l.doubts) > 0
	var entries []*entry
	var revs []int64
	var ops []clientv3.Op
	var watches []*watch
	for _, e := range some {
		if e.rev == 0 || e.granted || e.release || slices.Contains(entries, e) {
			continue
		}
		op, w := b.placeOp(e.key, e.limit, e.rev), e.watch
		if w != nil && w.end == "" {
			// Whom it waits for may be there as before, which is cheaper to find
			// out where the queue is long.
			op = clientv3.OpGet(w.start, clientv3.WithKeysOnly())
		} else {
			w = nil
		}
		entries, revs, ops, watches = append(entries, e), append(revs, e.rev), append(ops, op), append(watches, w)
	}
	b.mu.Unlock()
	if len(ops) == 0 {
		return more
	}
	resp, err := b.client.Txn(ctx).Then(ops...).Commit()
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, e := range entries {
		if e.rev != revs[i] || e.granted || e.release {
			continue
		}
		if err != nil {
			l.wake(e) // it finds out by itself
			continue
		}
		kvs, rev := resp.Responses[i].GetResponseRange().Kvs, resp.Header.Revision
		if w := watches[i]; w != nil {
			if e.watch != w {
				continue // it has been looked at meanwhile
			}
			if len(kvs) > 0 && kvs[0].CreateRevision < e.rev && rev >= w.since {
				w.waiters[e] = max(w.waiters[e], rev)
				continue
			}
			b.unwait(e)
			l.doubtful(e)
			more = true
			continue
		}
		list := ticketsAmong(b.opts.Prefix, kvs)
		switch last, n := len(list)-1, holders(list); {
		case last < 0 || list[last].name != e.name:
			l.wake(e) // its ticket is gone
		case n > last:
			l.grant(e)
		default:
			b.await(e, list, n, rev)
		}
	}
	return more
}

// placeOp lists the tickets of a lock up to one.
func (b *Backend) placeOp(key string, limit int, rev int64) clientv3.Op {
	base := limitBase(b.opts.Prefix, key, limit)
	return clientv3.OpGet(base, clientv3.WithRange(after(base)), clientv3.WithKeysOnly(), byCreation, clientv3.WithMaxCreateRev(rev))
}
