package consullock_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/consullock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/tests/servers"
)

// rig is what is needed to look at servers past the backend.
type rig struct {
	*testing.T
	list   []*servers.Consul
	prefix string
}

func newRig(t *testing.T, list []*servers.Consul) *rig {
	return &rig{T: t, list: list, prefix: newPrefix()}
}

// patience is for waits that only a fault makes long.
const patience = time.Minute

func (r *rig) within() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	r.Cleanup(cancel)
	return ctx
}

func (r *rig) until(what string, cond func() bool) {
	r.Helper()
	servers.Until(r, what, cond)
}

// open opens a backend of its own, with short sessions.
func (r *rig) open(cut *cuts, change ...func(*consullock.Config, *consullock.Options)) *consullock.Backend {
	r.Helper()
	cfg := config(r.list, cut)
	opts := &consullock.Options{Prefix: r.prefix, MinSessionTTL: unit, WaiterTTL: 3 * unit}
	for _, c := range change {
		c(cfg, opts)
	}
	b, err := consullock.Open(cfg, opts)
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() { b.Close() })
	return b
}

// manager opens a manager over a backend of its own.
func (r *rig) manager(cut *cuts, change ...func(*consullock.Config, *consullock.Options)) *dlm.Manager {
	r.Helper()
	return r.manage(r.open(cut, change...), nil)
}

func (r *rig) manage(b *consullock.Backend, cfg *dlm.LockConfig) *dlm.Manager {
	r.Helper()
	m, err := dlm.NewManager(b, cfg)
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
	before := len(r.tickets(key))
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
	r.until("a waiter is in the queue", func() bool { return len(r.tickets(key)) > before })
	return got
}

// ticket is what a key in Consul tells.
type ticket struct {
	Key, Session string
	CreateIndex  int64
}

// any returns a server that runs.
func (r *rig) any() *servers.Consul { return servers.ConsulLeader(r, r.list) }

// keys are all keys that begin with a name.
func (r *rig) keys(name string) []ticket {
	r.Helper()
	// The list is in vain unless something is there: the server says 404 then.
	var list []ticket
	txn := fmt.Sprintf(`[{"KV":{"Verb":"get-tree","Key":%q}}]`, r.prefix+name)
	var out struct{ Results []struct{ KV ticket } }
	if err := json.Unmarshal([]byte(r.any().Ask(http.MethodPut, "/v1/txn", txn)), &out); err != nil {
		r.Fatal(err)
	}
	for _, result := range out.Results {
		list = append(list, result.KV)
	}
	slices.SortFunc(list, func(a, b ticket) int { return int(a.CreateIndex - b.CreateIndex) })
	return list
}

// tickets are those of a lock, in the order of their creation.
func (r *rig) tickets(key string) []ticket {
	r.Helper()
	return slices.DeleteFunc(r.keys(key+"/"), func(t ticket) bool { return t.Session == "" || strings.HasSuffix(t.Key, "/delay") })
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
	if !slices.Contains(reasons, lost.Reason) {
		r.Errorf("the lock on %q was lost for the reason %q, want %q", l.Key, lost.Reason, reasons)
	}
}

func (r *rig) destroy(session string) {
	r.Helper()
	r.any().Ask(http.MethodPut, "/v1/session/destroy/"+session, "")
}

// The leader goes while locks are held and waited for: nobody loses anything
// (CON3). One that is stopped comes back as a follower.
func TestLeaderGoes(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]func(*servers.Consul){"killed": (*servers.Consul).Kill, "stopped": (*servers.Consul).Pause} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, servers.StartConsulCluster(t, 3, nil))
			a, b, c := r.manager(nil), r.manager(nil), r.manager(nil)
			const ttl = 20 * time.Second
			l := r.lock(a, "k", ttl)
			second := r.queue(b, "k", ttl)
			third := r.queue(c, "k", ttl)
			leader := servers.ConsulLeader(t, r.list)
			fault(leader)
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
			leader.Resume()
			r.release(next)
			last := r.get(third, "the second waiter after a new leader")
			if last.Token <= next.Token {
				t.Errorf("token %d after %d", last.Token, next.Token)
			}
			r.release(last)
		})
	}
}

// A server that is killed and comes back with its data has all locks.
func TestRestart(t *testing.T) {
	t.Parallel()
	r := newRig(t, servers.StartConsulCluster(t, 1, nil))
	a, b := r.manager(nil), r.manager(nil)
	const ttl = 12 * time.Second
	l := r.lock(a, "k", ttl)
	next := r.queue(b, "k", ttl)
	r.list[0].Restart()
	r.stayHeld(r.manager(nil), 2*time.Second, l)
	r.release(l)
	second := r.get(next, "the waiter after a restart")
	if second.Token <= l.Token {
		t.Errorf("token %d after %d", second.Token, l.Token)
	}
	r.release(second)
}

// A client that reaches one server of three, or none.
func TestCutOff(t *testing.T) {
	t.Parallel()
	list := servers.StartConsulCluster(t, 3, nil)
	for n := 1; n <= 3; n++ {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, list)
			cut := newCuts(t)
			a, b := r.manager(cut), r.manager(nil)
			const ttl = 6 * time.Second
			l := r.lock(a, "k", ttl)
			r.release(r.lock(a, "warm", ttl))
			for _, s := range list[:n] {
				p, err := cut.to(s.Addr())
				if err != nil {
					t.Fatal(err)
				}
				p.Blackhole()
			}
			if n < 3 {
				r.stayHeld(b, 2*ttl, l)
				r.release(l)
				r.release(r.lock(a, "k2", ttl))
				return
			}
			next := r.queue(b, "k", ttl)
			deadline := l.Deadline()
			r.lostWithin(l, 2*ttl, dlm.ReasonExpired)
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

// A session that is ended by hand takes its own locks along at once, and no
// others (LOST2). Its waiters are not granted anything, and get new tickets.
func TestSessionIsDestroyed(t *testing.T) {
	t.Parallel()
	r := newRig(t, servers.StartConsulCluster(t, 1, nil))
	// It does not renew, as a renewal may find a key gone before the session is known
	// to be.
	a, b := r.manage(r.open(nil), &dlm.LockConfig{AutoRenew: dlm.Off}), r.manager(nil)
	const short, long = 3 * unit, 30 * time.Second
	var locks, others []*dlm.Lock
	for i := range 50 {
		locks = append(locks, r.lock(a, fmt.Sprint("short", i), short))
		others = append(others, r.lock(a, fmt.Sprint("long", i), long))
	}
	if n := len(r.keys("=s/")); n != 2 {
		t.Errorf("100 locks of two TTLs have %d sessions", n)
	}
	r.lock(b, "k", long)
	waiter := r.queue(a, "k", short)
	session := r.tickets("short0")[0].Session
	tickets := r.tickets("k")
	if len(tickets) != 2 || tickets[1].Session != session {
		t.Fatalf("the waiter's ticket is not on the same session as locks of this TTL: %+v", tickets)
	}
	r.destroy(session)
	for _, l := range locks {
		r.lostWithin(l, time.Second, dlm.ReasonSession)
	}
	r.until("the waiter has a new ticket", func() bool {
		now := r.tickets("k")
		return len(now) == 2 && now[1].CreateIndex > tickets[1].CreateIndex
	})
	select {
	case <-waiter:
		t.Fatal("a waiter was granted a lock that another holds")
	default:
	}
	r.held(others...)
	r.release(r.lock(a, "short0", short))
	if err := b.Close(r.within()); err != nil {
		t.Fatal(err)
	}
	r.release(r.get(waiter, "the waiter whose session had ended"))
}

// A key that is deleted by hand is a loss within one TTL, and the next is let in.
func TestKeyIsDeleted(t *testing.T) {
	t.Parallel()
	r := newRig(t, servers.StartConsulCluster(t, 1, nil))
	a, b := r.manager(nil), r.manager(nil)
	const ttl = 4 * time.Second
	l, other := r.lock(a, "k", ttl), r.lock(a, "other", ttl)
	next := r.queue(b, "k", ttl)
	r.list[0].Ask(http.MethodDelete, "/v1/kv/"+r.tickets("k")[0].Key, "")
	r.lostWithin(l, ttl, dlm.ReasonGone, dlm.ReasonTaken)
	second := r.get(next, "the waiter behind a lock whose key was deleted")
	if second.Token <= l.Token {
		t.Errorf("token %d after %d", second.Token, l.Token)
	}
	r.release(second)
	r.held(other)
	r.release(other)
	// Tokens go on after all of it is gone.
	r.list[0].Ask(http.MethodDelete, "/v1/kv/"+r.prefix+"k/?recurse", "")
	third := r.lock(b, "k", ttl)
	if third.Token <= second.Token {
		t.Errorf("token %d after %d", third.Token, second.Token)
	}
	r.release(third)
}

// Without the key that tells of a queue, the lock is not taken for free.
func TestQueueIsDeleted(t *testing.T) {
	t.Parallel()
	r := newRig(t, servers.StartConsulCluster(t, 1, nil))
	a, b, c := r.manager(nil), r.manager(nil), r.manager(nil)
	const ttl = 20 * time.Second
	first := r.lock(a, "k", ttl)
	queued := r.queue(b, "k", ttl)
	r.release(first)
	l := r.get(queued, "the waiter, whose ticket is in the queue")
	r.list[0].Ask(http.MethodDelete, "/v1/kv/"+r.prefix+"k/queue", "")
	if other, err := c.TryLock(r.within(), "k", ttl); !errors.Is(err, dlm.ErrHeld) {
		t.Fatalf("%v, %v, want ErrHeld: the lock is held", other, err)
	}
	next := r.queue(c, "k", ttl)
	r.held(l)
	r.release(l)
	r.release(r.get(next, "who came after the key of the queue was deleted"))
}

// What a process held that died ends between once and twice the TTL of its
// session, and nothing but the key of the queue is left.
func TestProcessDies(t *testing.T) {
	t.Parallel()
	r := newRig(t, servers.StartConsulCluster(t, 1, nil))
	cut := newCuts(t)
	b := r.manager(nil)
	dead := r.open(cut)
	const ttl = 3 * time.Second
	lease, err := dead.Acquire(r.within(), driver.Request{Key: "k", Owner: "o", TTL: ttl, Limit: 1})
	if err != nil {
		t.Fatal(err)
	}
	// A waiter that dies with it does not cost anything further.
	if _, err := dead.Acquire(r.within(), driver.Request{Key: "k", Owner: "w", TTL: ttl, Limit: 1, Enqueue: true}); !errors.Is(err, driver.ErrHeld) {
		t.Fatal(err)
	}
	next := r.queue(b, "k", ttl)
	cut.each((*servers.Proxy).Refuse)
	died := time.Now()
	l := r.get(next, "the waiter behind a process that died")
	if took := time.Since(died); took < ttl/2 || took > 2*ttl+2*time.Second {
		t.Errorf("the lock was free %v after its holder had died", took)
	}
	if l.Token <= lease.Token {
		t.Errorf("token %d after %d", l.Token, lease.Token)
	}
	r.release(l)
	r.until("all keys of the lock are gone", func() bool { return len(r.keys("k/")) == 0 })
}

// Nothing is left of those who came and went while a lock was held.
func TestNothingIsLeft(t *testing.T) {
	t.Parallel()
	r := newRig(t, servers.StartConsulCluster(t, 1, nil))
	a, b := r.manager(nil), r.manager(nil)
	const ttl = 10 * time.Second
	for i, shared := range []bool{false, true} {
		key := fmt.Sprint("k", i)
		l, err := a.Acquire(r.within(), key, ttl, &dlm.AcquireOptions{Shared: shared})
		if err != nil {
			t.Fatal(err)
		}
		if shared {
			other, err := b.Acquire(r.within(), key, ttl, &dlm.AcquireOptions{Shared: true})
			if err != nil {
				t.Fatal(err)
			}
			r.release(other)
		} else {
			ctx, cancel := context.WithCancel(r.within())
			gone := make(chan error, 1)
			go func() {
				_, err := b.Acquire(ctx, key, ttl, nil)
				gone <- err
			}()
			r.until("the other waits", func() bool { return len(r.tickets(key)) == 2 })
			cancel()
			if err := <-gone; !errors.Is(err, dlm.ErrHeld) || !errors.Is(err, context.Canceled) {
				t.Fatalf("the other waited for %q: %v", key, err)
			}
		}
		r.until("the other has left", func() bool { return len(r.tickets(key)) == 1 })
		r.release(l)
		r.until("all keys of the lock are gone", func() bool { return len(r.keys(key+"/")) == 0 })
	}
}

// Consul keeps a lock free for some time after its holder died if that is asked
// for, and not otherwise (CON2).
func TestLockDelay(t *testing.T) {
	t.Parallel()
	list := servers.StartConsulCluster(t, 1, nil)
	for _, delay := range []time.Duration{0, 3 * time.Second} {
		for _, waited := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v/%t", delay, waited), func(t *testing.T) {
				t.Parallel()
				r := newRig(t, list)
				with := func(_ *consullock.Config, o *consullock.Options) { o.LockDelay = delay }
				a, b, c := r.manager(nil, with), r.manager(nil, with), r.manager(nil, with)
				const ttl = 20 * time.Second
				l := r.lock(a, "k", ttl)
				if waited {
					// A holder that waited has another kind of ticket.
					next := r.queue(b, "k", ttl)
					r.release(l)
					l = r.get(next, "the waiter")
				}
				next := r.queue(c, "k", ttl)
				ended := time.Now()
				r.destroy(r.tickets("k")[0].Session)
				r.lostWithin(l, time.Second, dlm.ReasonSession)
				if _, err := a.TryLock(r.within(), "k", ttl); !errors.Is(err, dlm.ErrHeld) {
					t.Errorf("a try passes a waiter: %v", err)
				}
				second := r.get(next, "the waiter behind a session that was ended")
				switch took := time.Since(ended); {
				case took < delay:
					t.Errorf("after %v, want not before %v", took, delay)
				case took > delay+3*time.Second:
					t.Errorf("after %v, want soon after %v", took, delay)
				}
				if second.Token <= l.Token {
					t.Errorf("token %d after %d", second.Token, l.Token)
				}
				// A lock that is given back is free at once.
				r.release(second)
				last := r.lock(a, "k", ttl)
				r.destroy(r.tickets("k")[0].Session)
				r.lostWithin(last, time.Second, dlm.ReasonSession)
				if _, err := b.TryLock(r.within(), "k", ttl); errors.Is(err, dlm.ErrHeld) != (delay > 0) {
					t.Errorf("a try after the end of a session: %v", err)
				}
			})
		}
	}
}

// counter counts requests.
type counter struct{ n atomic.Int64 }

func (c *counter) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, network, addr)
	return &counted{conn, c}, err
}

type counted struct {
	net.Conn
	counter *counter
}

func (c *counted) Write(p []byte) (int, error) {
	if bytes.HasPrefix(p, []byte("PUT /")) || bytes.HasPrefix(p, []byte("GET /")) {
		c.counter.n.Add(1)
	}
	return c.Conn.Write(p)
}

func TestManyWaiters(t *testing.T) {
	r := newRig(t, servers.StartConsulCluster(t, 1, nil))
	const waiters, ttl = 300, 15 * time.Second
	var requests counter
	var managers []*dlm.Manager
	for range 4 {
		managers = append(managers, r.manager(nil, func(c *consullock.Config, o *consullock.Options) {
			o.WaiterTTL, c.Dial = ttl, requests.dial
		}))
	}
	first := r.lock(managers[0], "k", ttl)
	var mu sync.Mutex
	var tokens []int64
	var wg sync.WaitGroup
	begin := time.Now()
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
	r.until("all are in the queue", func() bool { return len(r.tickets("k")) == waiters+1 })
	queued := time.Now()
	t.Logf("they queued up within %v", queued.Sub(begin))
	r.release(first)
	wg.Wait()
	each := float64(requests.n.Load()) / waiters
	t.Logf("%d waiters took %v, %.1f requests each", waiters, time.Since(queued), each)
	if each > 9 {
		t.Errorf("there were %.1f requests for each waiter", each)
	}
	if len(tokens) != waiters {
		t.Fatalf("%d of %d waiters were served", len(tokens), waiters)
	}
	if !slices.IsSorted(tokens) {
		t.Error("they were not served in the order of their tickets")
	}
}

// A request that was given up and withdrawn does not come into effect, wherever
// it was held up.
func TestLateRequest(t *testing.T) {
	t.Parallel()
	r := newRig(t, servers.StartConsulCluster(t, 1, nil))
	cut := newCuts(t)
	b := r.open(cut)
	const ttl = 20 * time.Second
	if _, err := b.Acquire(r.within(), driver.Request{Key: "warm", Owner: "o", TTL: ttl, Limit: 1}); err != nil {
		t.Fatal(err)
	}
	p, err := cut.to(r.list[0].Addr())
	if err != nil {
		t.Fatal(err)
	}
	other := r.manager(nil)
	for i := range 12 {
		key := fmt.Sprint("k", i)
		want := 0
		if i%2 == 1 {
			// It would have had to wait.
			r.lock(other, key, ttl)
			want = 1
		}
		p.Hold(servers.Up)
		req := driver.Request{Key: key, Owner: fmt.Sprint("o", i), TTL: ttl, Limit: 1, Enqueue: true}
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		if _, err := b.Acquire(ctx, req); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("a request that is held up: %v", err)
		}
		cancel()
		// The withdrawal takes another way, and is there before.
		p.Resume()
		if err := b.Release(r.within(), driver.Lease{Key: key, Owner: req.Owner}); err != nil {
			t.Fatal(err)
		}
		if got := r.tickets(key); len(got) != want {
			t.Fatalf("left behind: %+v", got)
		}
	}
	for end := time.Now().Add(500 * time.Millisecond); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		for i := range 12 {
			if left := r.tickets(fmt.Sprint("k", i)); len(left) != i%2 {
				t.Fatalf("came late: %+v", left)
			}
		}
	}
}

// An answer that is lost is found again by the owner, with the same token.
func TestAnswerIsLost(t *testing.T) {
	t.Parallel()
	r := newRig(t, servers.StartConsulCluster(t, 1, nil))
	cut := newCuts(t)
	b := r.open(cut)
	const ttl = 20 * time.Second
	if _, err := b.Acquire(r.within(), driver.Request{Key: "warm", Owner: "o", TTL: ttl, Limit: 1}); err != nil {
		t.Fatal(err)
	}
	p, err := cut.to(r.list[0].Addr())
	if err != nil {
		t.Fatal(err)
	}
	for i := range 4 {
		key := fmt.Sprint("k", i)
		req := driver.Request{Key: key, Owner: "o", TTL: ttl, Limit: 1, Enqueue: i%2 == 1}
		p.Hold(servers.Down)
		ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
		_, err := b.Acquire(ctx, req)
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, driver.ErrNotApplied) {
			t.Fatalf("without an answer: %v", err)
		}
		have := r.tickets(key)
		if len(have) != 1 {
			t.Fatalf("the request did not get there: %+v", have)
		}
		p.Reset()
		p.Resume()
		lease, err := b.Acquire(r.within(), req)
		if err != nil || lease.Token != have[0].CreateIndex {
			t.Fatalf("asked again: %+v, %v; want token %d", lease, err, have[0].CreateIndex)
		}
		if err := b.Release(r.within(), lease); err != nil {
			t.Fatal(err)
		}
	}
}

// More locks are waited for than are watched.
func TestManyLocksAreWaitedFor(t *testing.T) {
	t.Parallel()
	r := newRig(t, servers.StartConsulCluster(t, 1, nil))
	a, b := r.manager(nil), r.manager(nil)
	const n, ttl = 40, 10 * time.Second
	var locks []*dlm.Lock
	var got []<-chan *dlm.Lock
	for i := range n {
		key := fmt.Sprint("k", i)
		locks = append(locks, r.lock(a, key, ttl))
		got = append(got, r.queue(b, key, ttl))
	}
	begin := time.Now()
	for _, l := range locks {
		r.release(l)
	}
	for i, next := range got {
		l := r.get(next, fmt.Sprintf("the waiter of lock %d", i))
		if l.Token <= locks[i].Token {
			t.Errorf("token %d after %d", l.Token, locks[i].Token)
		}
		r.release(l)
	}
	t.Logf("all were handed over within %v", time.Since(begin))
}

// Close leaves no connection of a client of its own.
func TestClose(t *testing.T) {
	t.Parallel()
	r := newRig(t, servers.StartConsulCluster(t, 1, nil))
	cut := newCuts(t)
	m := r.manager(cut)
	l := r.lock(m, "k", 10*time.Second)
	p, err := cut.to(r.list[0].Addr())
	if err != nil {
		t.Fatal(err)
	}
	if p.Conns() == 0 {
		t.Error("there is no connection")
	}
	if err := m.Close(r.within()); err != nil {
		t.Fatal(err)
	}
	r.lostWithin(l, time.Second, dlm.ReasonClosed)
	r.until("all connections are closed", func() bool { return p.Conns() == 0 })
	if left := r.keys(""); len(left) > 0 {
		t.Errorf("left behind: %+v", left)
	}
}

// A server that hangs: Done closes at the deadline, and calls end with their
// contexts.
func TestServerHangs(t *testing.T) {
	t.Parallel()
	r := newRig(t, servers.StartConsulCluster(t, 1, nil))
	m := r.manager(nil)
	const ttl = 3 * time.Second
	l := r.lock(m, "k", ttl)
	r.list[0].Pause()
	defer r.list[0].Resume()
	r.lostWithin(l, ttl+time.Second, dlm.ReasonExpired)
	if late := time.Since(l.Deadline()); late > time.Second {
		t.Errorf("the loss was told %v after the deadline", late)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	begin := time.Now()
	if _, err := m.TryLock(ctx, "k2", ttl); err == nil || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a server that hangs answers %v", err)
	}
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("the call took %v", took)
	}
}
