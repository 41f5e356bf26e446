package etcdlock_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/etcdlock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/tests/servers"
)

// rig is what is needed to look at a cluster past the backend.
type rig struct {
	*testing.T
	members []*servers.Etcd
	prefix  string
	admin   *clientv3.Client
}

func newRig(t *testing.T, members []*servers.Etcd) *rig {
	t.Helper()
	return &rig{T: t, members: members, prefix: newPrefix(), admin: connect(t, members, nil)}
}

// patience is for waits that only a fault makes long.
const patience = 40 * time.Second

func (r *rig) within() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	r.Cleanup(cancel)
	return ctx
}

func (r *rig) until(what string, cond func() bool) {
	r.Helper()
	servers.Until(r, what, cond)
}

// manager opens a manager over a client of its own.
func (r *rig) manager(cut *cuts, cfg *dlm.LockConfig, change ...func(*clientv3.Config)) *dlm.Manager {
	r.Helper()
	m, err := etcdlock.NewLockManager(connect(r, r.members, cut, change...), cfg, &etcdlock.Options{Prefix: r.prefix})
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = m.Close(ctx) // the fault may have left something
	})
	return m
}

func (r *rig) lock(m *dlm.Manager, key string, ttl time.Duration) *dlm.Lock {
	r.Helper()
	l, err := m.AcquireLock(r.within(), key, ttl)
	if err != nil {
		r.Fatalf("acquiring %q: %v", key, err)
	}
	return l
}

// queue has a manager wait for a key, and returns when its ticket is there.
func (r *rig) queue(m *dlm.Manager, key string, ttl time.Duration) <-chan *dlm.Lock {
	r.Helper()
	before := len(r.keys(key))
	got := make(chan *dlm.Lock, 1)
	go func() {
		defer close(got)
		l, err := m.AcquireLock(r.within(), key, ttl)
		if err != nil {
			r.Errorf("waiting for %q: %v", key, err)
			return
		}
		got <- l
	}()
	r.until("a waiter is in the queue", func() bool { return len(r.keys(key)) > before })
	return got
}

// keys are the tickets of a key.
func (r *rig) keys(key string) []string {
	r.Helper()
	resp, err := r.admin.Get(r.within(), r.prefix+key+"\x00", clientv3.WithPrefix(), clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortAscend))
	if err != nil {
		r.Fatal(err)
	}
	var names []string
	for _, kv := range resp.Kvs {
		names = append(names, string(kv.Key))
	}
	return names
}

func (r *rig) lease(name string) clientv3.LeaseID {
	r.Helper()
	resp, err := r.admin.Get(r.within(), name)
	if err != nil || len(resp.Kvs) != 1 {
		r.Fatalf("reading %q: %v, %v", name, resp, err)
	}
	return clientv3.LeaseID(resp.Kvs[0].Lease)
}

func (r *rig) held(locks ...*dlm.Lock) {
	r.Helper()
	for _, l := range locks {
		if err := l.Err(); err != nil {
			r.Fatalf("the lock on %q is not held any more: %v", l.Key, err)
		}
	}
}

// stayHeld checks that a lock is held for some time, and by nobody else.
func (r *rig) stayHeld(other *dlm.Manager, d time.Duration, l *dlm.Lock) {
	r.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		r.held(l)
		if _, err := other.TryLock(r.within(), l.Key, l.TTL); !errors.Is(err, dlm.ErrHeld) {
			r.Fatalf("another asks for %q, which is held: %v", l.Key, err)
		}
	}
}

func (r *rig) get(got <-chan *dlm.Lock, what string) *dlm.Lock {
	r.Helper()
	select {
	case l := <-got:
		if l == nil {
			r.Fatalf("not granted: %s", what)
		}
		return l
	case <-time.After(patience):
		r.Fatalf("never granted: %s", what)
		panic("not reached")
	}
}

func (r *rig) release(l *dlm.Lock) {
	r.Helper()
	if err := l.Release(r.within()); err != nil {
		r.Fatalf("releasing %q: %v", l.Key, err)
	}
}

func (r *rig) lostWithin(l *dlm.Lock, d time.Duration, reasons ...dlm.LostReason) {
	r.Helper()
	select {
	case <-l.Done():
	case <-time.After(d):
		r.Fatalf("the lock on %q was not lost within %v", l.Key, d)
	}
	lost, ok := errors.AsType[*dlm.LostError](l.Err())
	if !ok {
		r.Fatalf("the lock on %q ended with %v", l.Key, l.Err())
	}
	if slices.Contains(reasons, lost.Reason) {
		return
	}
	r.Errorf("the lock on %q was lost for the reason %q, want %q", l.Key, lost.Reason, reasons)
}

func TestLeaderIsKilled(t *testing.T) {
	t.Parallel()
	r := newRig(t, three(t))
	a, b, c := r.manager(nil, nil), r.manager(nil, nil), r.manager(nil, nil)
	const ttl = 8 * time.Second
	l := r.lock(a, "k", ttl)
	second := r.queue(b, "k", ttl)
	third := r.queue(c, "k", ttl)
	servers.EtcdLeader(t, r.members).Kill()
	// The locks of nobody are lost, and those who wait go on waiting.
	for end := time.Now().Add(ttl + 2*time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		r.held(l)
		select {
		case <-second:
			t.Fatal("a waiter was let in beside the holder")
		default:
		}
	}
	r.release(l)
	next := r.get(second, "the first waiter after a new leader")
	if next.Token <= l.Token {
		t.Errorf("token %d after %d", next.Token, l.Token)
	}
	r.release(next)
	r.release(r.get(third, "the second waiter after a new leader"))
}

func TestCutOff(t *testing.T) {
	t.Parallel()
	members := three(t)
	for n := 1; n <= 3; n++ {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, members)
			cut := newCuts(t)
			// As the package's documentation wants it.
			a, b := r.manager(cut, nil, func(cfg *clientv3.Config) {
				cfg.DialKeepAliveTime, cfg.DialKeepAliveTimeout = 10*time.Second, 2*time.Second
			}), r.manager(nil, nil)
			// The client does not notice within this time that members are silent.
			const ttl = 3 * time.Second
			l := r.lock(a, "k", ttl)
			r.release(r.lock(a, "warm", ttl))
			for _, e := range members[:n] {
				p, err := cut.to(e.Addr())
				if err != nil {
					t.Fatal(err)
				}
				p.Blackhole()
			}
			if n < 3 {
				r.stayHeld(b, 6*ttl, l)
				r.release(l)
				r.release(r.lock(a, "k2", ttl))
				return
			}
			deadline := l.Deadline()
			next := r.queue(b, "k", ttl)
			r.lostWithin(l, ttl+time.Second, dlm.ReasonExpired)
			if late := time.Since(deadline); late > time.Second {
				t.Errorf("the loss was told %v after the deadline", late)
			}
			second := r.get(next, "the waiter behind a holder that is cut off")
			if second.Token <= l.Token {
				t.Errorf("token %d after %d", second.Token, l.Token)
			}
			cut.each((*servers.Proxy).Resume)
			r.release(second)
			r.release(r.lock(a, "k", ttl))
		})
	}
}

// One lease that ends takes its own locks along, and no others (ETC2, ETC5).
func TestLeaseIsRevoked(t *testing.T) {
	t.Parallel()
	r := newRig(t, single(t))
	a, b := r.manager(nil, nil), r.manager(nil, nil)
	const short, long = 3 * time.Second, 6 * time.Second
	var locks, others []*dlm.Lock
	for i := range 50 {
		locks = append(locks, r.lock(a, fmt.Sprint("short", i), short))
		others = append(others, r.lock(a, fmt.Sprint("long", i), long))
	}
	r.lock(b, "k", long)
	waiter := r.queue(a, "k", short)
	tickets := r.keys("k")
	lease := r.lease(r.keys("short0")[0])
	if r.lease(tickets[1]) != lease {
		t.Errorf("the waiter's ticket is not on the same lease as locks of this TTL")
	}
	if _, err := r.admin.Revoke(r.within(), lease); err != nil {
		t.Fatal(err)
	}
	for _, l := range locks {
		r.lostWithin(l, time.Second, dlm.ReasonSession, dlm.ReasonGone)
	}
	for end := time.Now().Add(3 * short); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		r.held(others...)
	}
	select {
	case <-waiter:
		t.Fatal("a waiter was granted a lock that another holds")
	default:
	}
	if now := r.keys("k"); len(now) != 2 {
		t.Errorf("after the end of its lease the waiter has no new ticket: %q", now)
	}
	r.release(r.lock(a, "short0", short))
	if err := b.Close(r.within()); err != nil {
		t.Fatal(err)
	}
	r.release(r.get(waiter, "the waiter whose lease had ended"))
}

func TestKeyIsDeleted(t *testing.T) {
	t.Parallel()
	r := newRig(t, single(t))
	a, b := r.manager(nil, nil), r.manager(nil, nil)
	const ttl = 30 * time.Second
	l, other := r.lock(a, "k", ttl), r.lock(a, "other", ttl)
	r.stayHeld(b, time.Second, l) // its key is watched by now
	next := r.queue(b, "k", ttl)
	if _, err := r.admin.Delete(r.within(), r.keys("k")[0]); err != nil {
		t.Fatal(err)
	}
	r.lostWithin(l, time.Second, dlm.ReasonGone)
	r.release(r.get(next, "the waiter behind a lock whose key was deleted"))
	r.held(other)
	r.release(other)
}

func TestKeepAliveIsBlocked(t *testing.T) {
	t.Parallel()
	r := newRig(t, single(t))
	a := r.manager(nil, nil, func(cfg *clientv3.Config) {
		cfg.DialOptions = append(cfg.DialOptions, grpc.WithChainStreamInterceptor(func(
			ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption,
		) (grpc.ClientStream, error) {
			if strings.HasSuffix(method, "/LeaseKeepAlive") {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return streamer(ctx, desc, cc, method, opts...)
		}))
	})
	b := r.manager(nil, nil)
	const ttl = 4 * time.Second
	l := r.lock(a, "k", ttl)
	// The lock goes from lease to lease as long as these can be had.
	r.stayHeld(b, 6*ttl, l)
	next := r.queue(b, "k", ttl)
	r.release(l)
	r.release(r.get(next, "the waiter behind a holder without keep-alive"))
}

// mutedStream is a stream by which nothing arrives any more, though it stands.
type mutedStream struct {
	grpc.ClientStream
	muted <-chan struct{}
}

func (s mutedStream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	select {
	case <-s.muted:
		<-s.Context().Done()
		return s.Context().Err()
	default:
		return err
	}
}

// A watch that is silent is given up, and another one begun.
func TestWatchIsSilent(t *testing.T) {
	t.Parallel()
	r := newRig(t, single(t))
	opened, muted := make(chan struct{}, 100), make(chan struct{})
	a := r.manager(nil, nil, func(cfg *clientv3.Config) {
		cfg.DialOptions = append(cfg.DialOptions, grpc.WithChainStreamInterceptor(func(
			ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption,
		) (grpc.ClientStream, error) {
			s, err := streamer(ctx, desc, cc, method, opts...)
			if err != nil || !strings.HasSuffix(method, "/Watch") {
				return s, err
			}
			opened <- struct{}{}
			if len(opened) == 1 {
				s = mutedStream{s, muted}
			}
			return s, nil
		}))
	})
	b := r.manager(nil, nil)
	l := r.lock(b, "k", time.Minute)
	next := r.queue(a, "k", time.Minute)
	close(muted)
	r.until("another watch", func() bool { return len(opened) > 1 })
	r.release(l)
	r.release(r.get(next, "the waiter whose watch was silent"))
}

// The waiter's watch breaks, and what happened before it comes back is in no
// history any more (ETC4).
func TestCompactionWhileWaiting(t *testing.T) {
	t.Parallel()
	r := newRig(t, single(t))
	cut := newCuts(t)
	a, b, c := r.manager(nil, nil), r.manager(cut, nil), r.manager(nil, nil)
	const ttl = 20 * time.Second
	l := r.lock(a, "k", ttl)
	second := r.queue(b, "k", ttl)
	third := r.queue(c, "k", ttl)
	compact := func() {
		var rev int64
		for range 100 {
			resp, err := r.admin.Put(r.within(), r.prefix+"noise", "x")
			if err != nil {
				t.Fatal(err)
			}
			rev = resp.Header.Revision
		}
		if _, err := r.admin.Compact(r.within(), rev, clientv3.WithCompactPhysical()); err != nil {
			t.Fatal(err)
		}
	}
	compact()
	cut.each((*servers.Proxy).Refuse)
	compact()
	cut.each((*servers.Proxy).Resume)
	compact()
	r.release(l)
	r.release(r.get(second, "the waiter whose watch was broken"))
	r.release(r.get(third, "the waiter behind it"))
	if left := r.keys("k"); len(left) != 0 {
		t.Errorf("left behind: %q", left)
	}
}

func TestThousandWaiters(t *testing.T) {
	r := newRig(t, single(t))
	const waiters, ttl = 1000, 15 * time.Second
	var managers []*dlm.Manager
	for range 4 {
		managers = append(managers, r.manager(nil, nil))
	}
	first := r.lock(managers[0], "k", ttl)
	var mu sync.Mutex
	var tokens []int64
	var wg sync.WaitGroup
	messages := func() float64 { return r.members[0].Metric("grpc_server_msg_received_total{") }
	before := messages()
	for i := range waiters {
		wg.Go(func() {
			l, err := managers[i%len(managers)].AcquireLock(t.Context(), "k", ttl)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			tokens = append(tokens, l.Token)
			mu.Unlock()
			if err := l.Release(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	queued := time.Now()
	r.until("all are in the queue", func() bool { return len(r.keys("k")) == waiters+1 })
	t.Logf("they queued up within %v, with %.1f messages each", time.Since(queued), (messages()-before)/waiters)
	begin := time.Now()
	r.release(first)
	wg.Wait()
	took, sent := time.Since(begin), messages()-before
	t.Logf("%d waiters took %v, %.1f messages to the server each", waiters, took, sent/waiters)
	if len(tokens) != waiters {
		t.Fatalf("%d of %d waiters were served", len(tokens), waiters)
	}
	for i := 1; i < len(tokens); i++ {
		if tokens[i] <= tokens[i-1] {
			t.Fatalf("token %d after %d", tokens[i], tokens[i-1])
		}
	}
	if sent > 12*waiters {
		t.Errorf("%.0f messages for %d waiters", sent, waiters)
	}
}

// A request that was given up and withdrawn does not come into effect, wherever
// it was held up.
func TestLateRequest(t *testing.T) {
	t.Parallel()
	r := newRig(t, three(t))
	cut := newCuts(t)
	b, err := etcdlock.New(connect(t, r.members, cut), &etcdlock.Options{Prefix: r.prefix})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	warm := driver.Request{Key: "warm", Owner: "o", TTL: 20 * time.Second, Limit: 1}
	if _, err := b.Acquire(r.within(), warm); err != nil {
		t.Fatal(err)
	}
	held := 0
	for i := range 12 {
		p, err := cut.to(r.members[i%3].Addr())
		if err != nil {
			t.Fatal(err)
		}
		p.Hold(servers.Up)
		req := driver.Request{Key: "k", Owner: fmt.Sprint("o", i), TTL: 20 * time.Second, Limit: 1, Enqueue: true}
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		if _, err := b.Acquire(ctx, req); err != nil {
			held++
		}
		cancel()
		r.until("it is withdrawn", func() bool {
			ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
			defer cancel()
			return b.Release(ctx, driver.Lease{Key: req.Key, Owner: req.Owner}) == nil
		})
		p.Resume()
	}
	t.Logf("%d of 12 requests were held up", held)
	for end := time.Now().Add(500 * time.Millisecond); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if left := r.keys("k"); len(left) != 0 {
			t.Fatalf("came late: %q", left)
		}
	}
	if err := b.Release(r.within(), driver.Lease{Key: "warm", Owner: "o"}); err != nil {
		t.Fatal(err)
	}
}
