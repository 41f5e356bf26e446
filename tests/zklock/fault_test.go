package zklock_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/zklock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/tests/servers"
)

// patience is for waits that only a fault makes long.
const patience = 40 * time.Second

// rig is a root of one test on an ensemble.
type rig struct {
	*testing.T
	nodes []*servers.ZooKeeper
	root  string
	conn  *zk.Conn // beside the product
}

func newRig(t *testing.T, nodes []*servers.ZooKeeper) *rig {
	return &rig{T: t, nodes: nodes, root: newRoot(), conn: plain(t, nodes)}
}

// open returns a backend, and what cuts it off or tells of its session.
func (r *rig) open(timeout time.Duration) (*zklock.Backend, *tap) {
	r.Helper()
	tap := &tap{cuts: newCuts(r)}
	b, err := zklock.New(addrs(r.nodes), &zklock.Options{Root: r.root, SessionTimeout: timeout, Dial: tap.dial})
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() { b.Close() })
	return b, tap
}

func (r *rig) manage(timeout time.Duration, cfg *dlm.LockConfig) (*dlm.Manager, *tap) {
	r.Helper()
	b, tap := r.open(timeout)
	m, err := dlm.NewManager(b, cfg)
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() { m.Close(context.Background()) })
	return m, tap
}

func (r *rig) within(d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	r.Cleanup(cancel)
	return ctx
}

func request(key, owner string) driver.Request {
	return driver.Request{Key: key, Owner: owner, TTL: time.Minute, Limit: 1, Enqueue: true}
}

func (r *rig) grant(b driver.Backend, req driver.Request) driver.Lease {
	r.Helper()
	lease, err := b.Acquire(r.within(patience), req)
	if err != nil {
		r.Fatal(err)
	}
	return lease
}

func (r *rig) queue(b driver.Backend, req driver.Request) *driver.HeldError {
	r.Helper()
	_, err := b.Acquire(r.within(patience), req)
	held, ok := errors.AsType[*driver.HeldError](err)
	if !ok {
		r.Fatalf("%v, want a refusal", err)
	}
	return held
}

// until waits for a condition.
func (r *rig) until(what string, cond func() bool) {
	r.Helper()
	servers.Until(r, what, cond)
}

// children are the nodes of a key.
func (r *rig) children(key string) []string {
	r.Helper()
	for {
		list, _, err := r.conn.Children(r.root + "/" + key)
		switch {
		case errors.Is(err, zk.ErrConnectionClosed):
			continue
		case err != nil && !errors.Is(err, zk.ErrNoNode):
			r.Fatal(err)
		}
		return list
	}
}

// tap reads along who the session is.
type tap struct {
	*cuts

	mu     sync.Mutex
	dials  int
	id     int64
	passwd []byte
}

func (c *tap) dial(network, addr string, timeout time.Duration) (net.Conn, error) {
	c.mu.Lock()
	c.dials++
	c.mu.Unlock()
	conn, err := c.cuts.dial(network, addr, timeout)
	if err != nil {
		return nil, err
	}
	return &tapped{Conn: conn, tap: c}, nil
}

type tapped struct {
	net.Conn
	tap  *tap
	head []byte
}

func (c *tapped) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	const whole = 4 + 4 + 4 + 8 + 4 + 16
	if len(c.head) < whole {
		c.head = append(c.head, p[:n]...)
		if len(c.head) >= whole {
			c.tap.mu.Lock()
			defer c.tap.mu.Unlock()
			c.tap.id = int64(binary.BigEndian.Uint64(c.head[12:]))
			c.tap.passwd = c.head[24:whole]
		}
	}
	return n, err
}

func (c *tap) session() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.id
}

// expire ends a session as nobody but its owner can: by another connection that
// takes it over and closes it.
func (r *rig) expire(c *tap) {
	r.Helper()
	c.mu.Lock()
	id, passwd := c.id, c.passwd
	c.mu.Unlock()
	c.all((*servers.Proxy).Refuse) // it would take the session back
	r.until("the session is taken over and closed", func() bool { return r.end(id, passwd) == nil })
	c.all((*servers.Proxy).Resume)
}

func (r *rig) end(id int64, passwd []byte) error {
	var d net.Dialer
	conn, err := d.DialContext(context.Background(), "tcp", r.nodes[0].Addr())
	if err != nil {
		return err
	}
	defer conn.Close()
	msg := binary.BigEndian.AppendUint32(nil, 0) // protocol version
	msg = binary.BigEndian.AppendUint64(msg, 0)  // last transaction seen
	msg = binary.BigEndian.AppendUint32(msg, 10_000)
	msg = binary.BigEndian.AppendUint64(msg, uint64(id))
	msg = binary.BigEndian.AppendUint32(msg, uint32(len(passwd)))
	msg = append(msg, passwd...)
	send := func(msg []byte) error {
		if _, err := conn.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(msg))), msg...)); err != nil {
			return err
		}
		head := make([]byte, 4)
		if _, err := io.ReadFull(conn, head); err != nil {
			return err
		}
		_, err := io.CopyN(io.Discard, conn, int64(binary.BigEndian.Uint32(head)))
		return err
	}
	if err := send(msg); err != nil {
		return err
	}
	return send(binary.BigEndian.AppendUint64(nil, 2<<32-11))
}

func TestOneServer(t *testing.T) {
	t.Parallel()
	nodes := servers.StartZooKeeper(t, nil)
	for name, f := range map[string]func(*rig){
		"SessionExpiredFromOutside": sessionExpiredFromOutside,
		"WaiterOfAnExpiredSession":  waiterOfAnExpiredSession,
		"StoppedPastItsSession":     stoppedPastItsSession,
		"AnswerToACreateIsCutOff":   answerToACreateIsCutOff,
		"ParentDeleted":             parentDeleted,
		"OldSessionsNodeIsNotOurs":  oldSessionsNodeIsNotOurs,
		"ForeignNodes":              foreignNodes,
		"DeletedByHand":             deletedByHand,
		"DeadlineLiesWithinSession": deadlineLiesWithinSession,
		"NothingIsLeft":             nothingIsLeft,
		"LostConnection":            lostConnection,
		"RightsAndUsers":            rightsAndUsers,
		"Chroot":                    chroot,
		"ShortTTLInALongSession":    shortTTLInALongSession,
		"LeftoverParentIsUsedAgain": leftoverParentIsUsedAgain,
		"PermitsAreHandedOnAtOnce":  permitsAreHandedOnAtOnce,
		"ManyBackendsOnOneKey":      manyBackendsOnOneKey,
		"ReadersAndWriterByWatches": readersAndWriterByWatches,
		"CheckOfASingleServer":      checkOfASingleServer,
		"WaiterInTheMiddleGoes":     waiterInTheMiddleGoes,
		"GoneTicketIsNotGranted":    goneTicketIsNotGranted,
		"LostLockIsForgotten":       lostLockIsForgotten,
		"SlowServerIsKept":          slowServerIsKept,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f(newRig(t, nodes))
		})
	}
}

func sessionExpiredFromOutside(r *rig) {
	m, tap := r.manage(10*time.Second, nil)
	l, err := m.Acquire(r.within(patience), "k", time.Minute, nil)
	if err != nil {
		r.Fatal(err)
	}
	r.expire(tap)
	ended := time.Now()
	select {
	case <-l.Done():
	case <-time.After(patience):
		r.Fatal("the holder is not told that its session is over")
	}
	if took := time.Since(ended); took > 3*time.Second {
		r.Errorf("it took %v to be told", took)
	}
	lost, ok := errors.AsType[*dlm.LostError](l.Err())
	if !ok || lost.Reason != dlm.ReasonSession {
		r.Errorf("%v, want a loss with its session", l.Err())
	}
	// A new session serves the next lock.
	again, err := m.Acquire(r.within(patience), "k", time.Minute, nil)
	if err != nil {
		r.Fatal(err)
	}
	if again.Token <= l.Token {
		r.Errorf("token %d follows %d", again.Token, l.Token)
	}
	if err := l.Release(r.within(patience)); !errors.Is(err, dlm.ErrLost) {
		r.Errorf("release of the lost lock: %v", err)
	}
	if n := len(r.children("k")); n != 1 {
		r.Errorf("%d nodes, want 1", n)
	}
	if err := again.Release(r.within(patience)); err != nil {
		r.Error(err)
	}
}

func waiterOfAnExpiredSession(r *rig) {
	a, _ := r.open(10 * time.Second)
	m, tap := r.manage(10*time.Second, nil)
	lease := r.grant(a, request("k", "a"))
	got := make(chan *dlm.Lock, 1)
	go func() {
		l, err := m.Acquire(context.Background(), "k", time.Minute, nil)
		if err != nil {
			r.Error(err)
		}
		got <- l
	}()
	r.until("the waiter waits", func() bool { return len(r.children("k")) == 2 })
	old := tap.session()
	r.expire(tap)
	r.until("the waiter waits again", func() bool { return tap.session() != old && len(r.children("k")) == 2 })
	select {
	case <-got:
		r.Fatal("the waiter was granted a key that is held")
	default:
	}
	if err := a.Release(r.within(patience), lease); err != nil {
		r.Fatal(err)
	}
	if l := <-got; l != nil && l.Token <= lease.Token {
		r.Errorf("token %d follows %d", l.Token, lease.Token)
	}
}

func stoppedPastItsSession(r *rig) {
	m, tap := r.manage(2*time.Second, nil)
	other, _ := r.manage(2*time.Second, nil)
	l, err := m.Acquire(r.within(patience), "k", time.Minute, nil)
	if err != nil {
		r.Fatal(err)
	}
	thaw := tap.freeze()
	stopped := time.Now()
	next, err := other.Acquire(r.within(patience), "k", time.Minute, nil)
	if err != nil {
		r.Fatal(err)
	}
	select {
	case <-l.Done():
	default:
		r.Error("another has the key, and its former holder was not told")
	}
	if took := time.Since(stopped); took > patience/2 {
		r.Errorf("it took %v to replace a dead holder with a session of 2s", took)
	}
	if next.Token <= l.Token {
		r.Errorf("token %d follows %d", next.Token, l.Token)
	}
	thaw()
	// The stopped one does no harm, and works again.
	if err := l.Release(r.within(patience)); !errors.Is(err, dlm.ErrLost) {
		r.Errorf("release of the lost lock: %v", err)
	}
	l, err = m.Acquire(r.within(patience), "other", time.Minute, nil)
	if err != nil {
		r.Fatal(err)
	}
	if err := errors.Join(l.Release(r.within(patience)), next.Release(r.within(patience))); err != nil {
		r.Error(err)
	}
}

func answerToACreateIsCutOff(r *rig) {
	b, tap := r.open(10 * time.Second)
	r.grant(b, request("warm", "a")) // the session stands
	for i, enqueue := range []bool{true, false} {
		for _, withdraw := range []bool{false, true} {
			key := fmt.Sprintf("k%d%v", i, withdraw)
			req := request(key, "owner")
			req.Enqueue = enqueue
			tap.all(func(p *servers.Proxy) { p.Hold(servers.Down) })
			ctx, cancel := context.WithCancel(context.Background())
			done := make(chan error, 1)
			go func() { _, err := b.Acquire(ctx, req); done <- err }()
			r.until("the node is there", func() bool { return len(r.children(key)) == 1 })
			tap.all((*servers.Proxy).Reset)
			tap.all((*servers.Proxy).Resume)
			err := <-done
			cancel()
			if err == nil || errors.Is(err, driver.ErrNotApplied) || errors.Is(err, driver.ErrInvalid) {
				r.Errorf("%v, want an unknown outcome", err)
			}
			if !withdraw {
				lease := r.grant(b, req)
				if n := len(r.children(key)); n != 1 {
					r.Errorf("%d nodes after a repetition, want 1", n)
				}
				if err := b.Release(r.within(patience), lease); err != nil {
					r.Error(err)
				}
			} else if err := b.Release(r.within(patience), driver.Lease{Key: key, Owner: "owner"}); err != nil {
				r.Error(err)
			}
			if n := len(r.children(key)); n != 0 {
				r.Errorf("%d nodes are left", n)
			}
		}
	}
}

func parentDeleted(r *rig) {
	b, _ := r.open(10 * time.Second)
	var last int64
	for i := range 10 {
		lease := r.grant(b, request("k", fmt.Sprint("o", i)))
		if lease.Token <= last {
			r.Fatalf("token %d follows %d", lease.Token, last)
		}
		last = lease.Token
		if err := b.Release(r.within(patience), lease); err != nil {
			r.Fatal(err)
		}
		if err := r.conn.Delete(r.root+"/k", -1); err != nil && !errors.Is(err, zk.ErrNoNode) {
			r.Fatal(err)
		}
	}
	// Parent and node go while the lock is held, and somebody else comes.
	lease := r.grant(b, request("k", "a"))
	path := r.root + "/k/" + r.children("k")[0]
	if err := r.conn.Delete(path, -1); err != nil {
		r.Fatal(err)
	}
	if err := r.conn.Delete(r.root+"/k", -1); err != nil {
		r.Fatal(err)
	}
	other, _ := r.open(10 * time.Second)
	next := r.grant(other, request("k", "b"))
	if next.Token <= lease.Token {
		r.Errorf("token %d follows %d", next.Token, lease.Token)
	}
	if err := b.Release(r.within(patience), lease); !errors.Is(err, driver.ErrLost) {
		r.Errorf("release of a lock that was deleted: %v", err)
	}
	if len(r.children("k")) != 1 {
		r.Error("the release of a lost lock has freed another's")
	}
}

func oldSessionsNodeIsNotOurs(r *rig) {
	b, tap := r.open(10 * time.Second)
	first := r.grant(b, request("k", "owner"))
	name := r.children("k")[0]
	r.expire(tap)
	r.until("its node is gone", func() bool { return len(r.children("k")) == 0 })
	// A node with this very owner, of a session that is not ours: once with the
	// number of the old session, once with that of the new one.
	b2, tap2 := r.open(10 * time.Second)
	r.grant(b2, request("other", "x"))
	mine := fmt.Sprintf("x1-%016x-owner-", uint64(tap2.session()))
	for _, prefix := range []string{name[:len(name)-10], mine} {
		parent := r.root + "/k"
		if _, err := r.conn.Create(parent, nil, 0, zk.WorldACL(zk.PermAll)); err != nil && !errors.Is(err, zk.ErrNodeExists) {
			r.Fatal(err)
		}
		path, err := r.conn.Create(parent+"/"+prefix, nil, zk.FlagEphemeralSequential, zk.WorldACL(zk.PermAll))
		if err != nil {
			r.Fatal(err)
		}
		held := r.queue(b2, request("k", "owner"))
		if held.Position != 1 || held.Token <= first.Token {
			r.Errorf("%+v, want the first place behind the node of another session", held)
		}
		if err := r.conn.Delete(path, -1); err != nil {
			r.Fatal(err)
		}
		lease := r.grant(b2, request("k", "owner"))
		if err := b2.Release(r.within(patience), lease); err != nil {
			r.Fatal(err)
		}
	}
}

func foreignNodes(r *rig) {
	b, _ := r.open(10 * time.Second)
	acl := zk.WorldACL(zk.PermAll)
	r.grant(b, request("warm", "a"))
	for _, path := range []string{"/k", "/k/lock-0000000001", "/k/x1-nonsense-0000000002", "/k/sub", "/loose%zz", "/!note"} {
		if _, err := r.conn.Create(r.root+path, []byte("foreign"), 0, acl); err != nil {
			r.Fatal(err)
		}
	}
	lease := r.grant(b, request("k", "a"))
	held := r.queue(b, request("k", "b"))
	if held.Holder != "a" || held.Position != 1 {
		r.Errorf("%+v, want place 1 behind a", held)
	}
	if err := b.Release(r.within(patience), lease); err != nil {
		r.Fatal(err)
	}
	lease = r.grant(b, request("k", "b"))
	if err := b.Release(r.within(patience), lease); err != nil {
		r.Fatal(err)
	}
	if n := len(r.children("k")); n != 3 {
		r.Errorf("%d foreign nodes are left of 3", n)
	}
	list, err := b.List(r.within(patience), "", "", 0)
	if err != nil || len(list) != 1 || list[0].Key != "warm" {
		r.Errorf("List: %+v, %v; want warm only", list, err)
	}
}

func deletedByHand(r *rig) {
	m, _ := r.manage(10*time.Second, nil)
	l, err := m.Acquire(r.within(patience), "k", time.Minute, nil)
	if err != nil {
		r.Fatal(err)
	}
	if err := r.conn.Delete(r.root+"/k/"+r.children("k")[0], -1); err != nil {
		r.Fatal(err)
	}
	began := time.Now()
	select {
	case <-l.Done():
	case <-time.After(patience):
		r.Fatal("the holder is not told")
	}
	if took := time.Since(began); took > 3*time.Second {
		r.Errorf("it took %v to be told", took)
	}
	if !errors.Is(l.Err(), dlm.ErrLost) {
		r.Error(l.Err())
	}
}

func deadlineLiesWithinSession(r *rig) {
	const timeout = 10 * time.Second
	m, _ := r.manage(timeout, nil)
	for i, ttl := range []time.Duration{time.Second, 9 * time.Second, time.Minute, time.Hour, 24 * time.Hour} {
		l, err := m.Acquire(r.within(patience), fmt.Sprint("k", i), ttl, nil)
		if err != nil {
			r.Fatal(err)
		}
		left := time.Until(l.Deadline())
		if left > min(ttl, timeout) || left < min(ttl, timeout/3)-500*time.Millisecond {
			r.Errorf("a lock with TTL %v has %v left in a session of %v", ttl, left, timeout)
		}
		if err := l.Release(r.within(patience)); err != nil {
			r.Error(err)
		}
	}
}

func nothingIsLeft(r *rig) {
	b, _ := r.open(10 * time.Second)
	for i := range 50 {
		key := fmt.Sprint("k", i)
		lease := r.grant(b, request(key, "a"))
		if i%2 == 0 {
			r.queue(b, request(key, "b"))
			if err := b.Release(r.within(patience), driver.Lease{Key: key, Owner: "b"}); err != nil {
				r.Fatal(err)
			}
		}
		if err := b.Release(r.within(patience), lease); err != nil {
			r.Fatal(err)
		}
	}
	r.until("no parent is left", func() bool {
		list, _, err := r.conn.Children(r.root)
		return err == nil && len(list) == 0
	})
}

func lostConnection(r *rig) {
	m, tap := r.manage(10*time.Second, nil)
	other, _ := r.open(10 * time.Second)
	l, err := m.Acquire(r.within(patience), "k", time.Minute, nil)
	if err != nil {
		r.Fatal(err)
	}
	lease := r.grant(other, request("waited", "o"))
	got := make(chan error, 1)
	go func() {
		w, err := m.Acquire(context.Background(), "waited", time.Minute, nil)
		if err == nil {
			err = w.Release(context.Background())
		}
		got <- err
	}()
	r.until("the waiter waits", func() bool { return len(r.children("waited")) == 2 })
	id := tap.session()
	// What the waiter waits for comes while it is cut off.
	tap.all((*servers.Proxy).Refuse)
	if err := other.Release(r.within(patience), lease); err != nil {
		r.Fatal(err)
	}
	tap.all((*servers.Proxy).Resume)
	if err := <-got; err != nil {
		r.Error(err)
	}
	if l.Err() != nil || tap.session() != id {
		r.Errorf("a short loss of the connection cost the lock: %v", l.Err())
	}
	if err := l.Release(r.within(patience)); err != nil {
		r.Error(err)
	}
}

func rightsAndUsers(r *rig) {
	open := func(opts zklock.Options) *zklock.Backend {
		opts.Root, opts.SessionTimeout = r.root, 10*time.Second
		b, err := zklock.New(addrs(r.nodes), &opts)
		if err != nil {
			r.Fatal(err)
		}
		r.Cleanup(func() { b.Close() })
		return b
	}
	alice, bob := open(zklock.Options{Auth: "alice:secret"}), open(zklock.Options{Auth: "bob:secret"})
	lease := r.grant(alice, request("k", "a"))
	_, err := bob.Acquire(r.within(patience), request("k", "b"))
	e, ok := errors.AsType[*zklock.ServerError](err)
	if !ok || e.Problem != zklock.ProblemPermission || !strings.Contains(e.Error(), r.root) || !errors.Is(err, driver.ErrInvalid) {
		r.Errorf("%v, want a ServerError about rights that names the path", err)
	}
	findings, err := bob.Check(r.within(patience))
	if err != nil {
		r.Fatal(err)
	}
	if f := finding(findings, "rights"); f.Severity != driver.SeverityCritical || !strings.Contains(f.Fix, r.root) {
		r.Errorf("%+v, want a critical finding about rights", f)
	}
	findings, err = alice.Check(r.within(patience))
	if err != nil {
		r.Fatal(err)
	}
	for _, name := range []string{"rights", "acl", "session", "connection"} {
		if f := finding(findings, name); f.Severity != driver.SeverityOK {
			r.Errorf("%+v, want it to be right", f)
		}
	}
	// The user is told again after a loss of the connection.
	if err := alice.Release(r.within(patience), lease); err != nil {
		r.Error(err)
	}
}

func finding(list []driver.Finding, check string) driver.Finding {
	for _, f := range list {
		if f.Check == check {
			return f
		}
	}
	return driver.Finding{Check: "none"}
}

func chroot(r *rig) {
	b, err := zklock.New(addrs(r.nodes), &zklock.Options{Chroot: r.root + "/app/one", Root: "/locks", SessionTimeout: 10 * time.Second})
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() { b.Close() })
	lease := r.grant(b, request("k", "a"))
	list, _, err := r.conn.Children(r.root + "/app/one/locks/k")
	if err != nil || len(list) != 1 {
		r.Errorf("%q, %v; want one node", list, err)
	}
	if err := b.Release(r.within(patience), lease); err != nil {
		r.Error(err)
	}
}

func shortTTLInALongSession(r *rig) {
	m, _ := r.manage(30*time.Second, &dlm.LockConfig{AutoRenew: dlm.Off})
	other, _ := r.manage(30*time.Second, nil)
	l, err := m.Acquire(r.within(patience), "k", time.Second, nil)
	if err != nil {
		r.Fatal(err)
	}
	began := time.Now()
	next, err := other.Acquire(r.within(patience), "k", time.Minute, nil)
	if err != nil {
		r.Fatal(err)
	}
	if took := time.Since(began); took > 15*time.Second {
		r.Errorf("a lock with a TTL of 1s of a living process was taken over after %v", took)
	}
	if l.Err() == nil {
		r.Error("the former holder was not told")
	}
	if err := next.Release(r.within(patience)); err != nil {
		r.Error(err)
	}
}

func leftoverParentIsUsedAgain(r *rig) {
	b, _ := r.open(10 * time.Second)
	r.grant(b, request("warm", "a"))
	acl := zk.WorldACL(zk.PermAll)
	if _, err := r.conn.Create(r.root+"/k", []byte("old"), 0, acl); err != nil {
		r.Fatal(err)
	}
	req := request("k", "a")
	req.Enqueue = false
	lease := r.grant(b, req)
	if err := b.Release(r.within(patience), lease); err != nil {
		r.Error(err)
	}
	if ok, _, err := r.conn.Exists(r.root + "/k"); ok || err != nil {
		r.Errorf("the parent is left behind (%v)", err)
	}
}

func permitsAreHandedOnAtOnce(r *rig) {
	const limit, waiters = 3, 12
	managers := make([]*dlm.Manager, 3)
	for i := range managers {
		managers[i], _ = r.manage(10*time.Second, nil)
	}
	opts := &dlm.AcquireOptions{Limit: limit}
	var wg sync.WaitGroup
	began := time.Now()
	for i := range waiters {
		wg.Go(func() {
			l, err := managers[i%3].Acquire(context.Background(), "k", time.Minute, opts)
			if err != nil {
				r.Error(err)
				return
			}
			if err := l.Release(context.Background()); err != nil {
				r.Error(err)
			}
		})
	}
	wg.Wait()
	r.Logf("%d waiters for %d permits: %v", waiters, limit, time.Since(began))
	if n := len(r.children("k")); n != 0 {
		r.Errorf("%d nodes are left", n)
	}
}

func manyBackendsOnOneKey(r *rig) {
	var wg sync.WaitGroup
	var mu sync.Mutex
	inside, last := 0, int64(0)
	for range 8 {
		m, _ := r.manage(10*time.Second, nil)
		wg.Go(func() {
			for range 10 {
				l, err := m.Acquire(context.Background(), "k", time.Minute, nil)
				if err != nil {
					r.Error(err)
					return
				}
				mu.Lock()
				if inside++; inside != 1 || l.Token <= last {
					r.Errorf("%d are inside; token %d follows %d", inside, l.Token, last)
				}
				last = l.Token
				inside--
				mu.Unlock()
				if err := l.Release(context.Background()); err != nil {
					r.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

func readersAndWriterByWatches(r *rig) {
	m, _ := r.manage(10*time.Second, nil)
	b, _ := r.open(10 * time.Second)
	lease := r.grant(b, request("k", "w"))
	var wg sync.WaitGroup
	for range 5 {
		wg.Go(func() {
			l, err := m.Acquire(context.Background(), "k", time.Minute, &dlm.AcquireOptions{Shared: true})
			if err != nil {
				r.Error(err)
				return
			}
			if err := l.Release(context.Background()); err != nil {
				r.Error(err)
			}
		})
	}
	r.until("the readers wait", func() bool { return len(r.children("k")) == 6 })
	if err := b.Release(r.within(patience), lease); err != nil {
		r.Error(err)
	}
	wg.Wait()
}

// waiterInTheMiddleGoes lets the one before a waiter go, in all ways, while the key
// is held: the end of whom one waits for is not always a release.
func waiterInTheMiddleGoes(r *rig) {
	for _, own := range []bool{true, false} { // the three share a backend, or none do
		for _, way := range []string{"leaves", "is deleted by hand", "expires"} {
			if own && way == "expires" {
				continue
			}
			key := strings.ReplaceAll(fmt.Sprint(way, own), " ", "_")
			a, _ := r.open(10 * time.Second)
			b, tap := a, (*tap)(nil)
			c := a
			if !own {
				b, tap = r.open(10 * time.Second)
				c, _ = r.open(10 * time.Second)
			}
			lease := r.grant(a, request(key, "a"))
			r.queue(b, request(key, "b"))
			woken := make(chan struct{}, 100)
			req := request(key, "c")
			req.Manager = "c"
			ctx, cancel := context.WithCancel(context.Background())
			listening := make(chan error, 1)
			go func() {
				listening <- c.Listen(ctx, "c", func(e driver.Event) {
					if e.Kind == driver.EventWake {
						woken <- struct{}{}
					}
				})
			}()
			if held := r.queue(c, req); held.Position != 2 {
				r.Errorf("%s: place %d, want 2", key, held.Position)
			}
			var middle string
			for _, name := range r.children(key) {
				if strings.Contains(name, "-b-") {
					middle = name
				}
			}
			switch way {
			case "leaves":
				if err := b.Release(r.within(patience), driver.Lease{Key: key, Owner: "b"}); err != nil {
					r.Fatal(err)
				}
			case "is deleted by hand":
				if err := r.conn.Delete(r.root+"/"+key+"/"+middle, -1); err != nil {
					r.Fatal(err)
				}
			case "expires":
				r.expire(tap)
			}
			select {
			case <-woken:
			case <-time.After(patience):
				r.Fatalf("%s: the waiter behind is not told", key)
			}
			if held := r.queue(c, req); held.Position != 1 || held.Holder != "a" || held.Token != lease.Token {
				r.Errorf("%s: %+v, want place 1 behind the holder", key, held)
			}
			if err := a.Release(r.within(patience), lease); err != nil {
				r.Fatal(err)
			}
			select {
			case <-woken:
			case <-time.After(patience):
				r.Fatalf("%s: the waiter is not told of the release", key)
			}
			next := r.grant(c, req)
			if next.Token <= lease.Token {
				r.Errorf("%s: token %d follows %d", key, next.Token, lease.Token)
			}
			if err := c.Release(r.within(patience), next); err != nil {
				r.Error(err)
			}
			cancel()
			<-listening
		}
	}
}

// goneTicketIsNotGranted deletes a ticket by hand while another one waits behind
// it. What stood before both goes, and all of that is known, but the ticket is not
// there.
func goneTicketIsNotGranted(r *rig) {
	ours, _ := r.open(10 * time.Second)
	holding, _ := r.open(10 * time.Second)
	behind, _ := r.open(10 * time.Second)
	for i, holder := range []*zklock.Backend{ours, holding} {
		key := fmt.Sprint("k", i)
		lease := r.grant(holder, request(key, "a"))
		r.queue(ours, request(key, "b"))
		r.queue(behind, request(key, "c"))
		for _, name := range r.children(key) {
			if strings.Contains(name, "-b-") {
				if err := r.conn.Delete(r.root+"/"+key+"/"+name, -1); err != nil {
					r.Fatal(err)
				}
			}
		}
		if err := holder.Release(r.within(patience), lease); err != nil {
			r.Fatal(err)
		}
		next := r.grant(behind, request(key, "c"))
		if held := r.queue(ours, request(key, "b")); held.Holder != "c" || held.Position != 1 {
			r.Errorf("%s: %+v, want place 1 behind c", key, held)
		}
		if err := behind.Release(r.within(patience), next); err != nil {
			r.Error(err)
		}
		r.until("b has it", func() bool {
			_, err := ours.Acquire(r.within(patience), request(key, "b"))
			return err == nil
		})
	}
}

// lostLockIsForgotten loses a lock with its session. Nobody comes for it, and the
// key is tidied all the same.
func lostLockIsForgotten(r *rig) {
	b, tap := r.open(10 * time.Second)
	r.grant(b, request("k", "lost"))
	r.expire(tap)
	r.until("its node is gone", func() bool { return len(r.children("k")) == 0 })
	lease := r.grant(b, request("k", "a"))
	r.queue(b, request("k", "b"))
	if err := b.Release(r.within(patience), lease); err != nil {
		r.Fatal(err)
	}
	if err := b.Release(r.within(patience), r.grant(b, request("k", "b"))); err != nil {
		r.Fatal(err)
	}
	r.until("the key's node is gone", func() bool {
		ok, _, err := r.conn.Exists(r.root + "/k")
		return err == nil && !ok
	})
}

// slowServerIsKept has so many nodes to watch, at a server that takes its time, that
// this takes longer than a server may hang.
func slowServerIsKept(r *rig) {
	b, tap := r.open(10 * time.Second)
	r.grant(b, request("warm", "a"))
	tap.all(func(p *servers.Proxy) { p.Delay(servers.Down, 100*time.Millisecond) })
	tap.mu.Lock()
	before := tap.dials
	tap.mu.Unlock()
	const locks = 1500 // at most 64 requests are under way
	var wg sync.WaitGroup
	for i := range locks {
		wg.Go(func() {
			if _, err := b.Acquire(r.within(patience), request(fmt.Sprint("k", i), "a")); err != nil {
				r.Error(err)
			}
		})
	}
	wg.Wait()
	dials := func() int {
		tap.mu.Lock()
		defer tap.mu.Unlock()
		return tap.dials - before
	}
	r.until("all are watched", func() bool {
		out, err := r.nodes[0].Ask(context.Background(), "wchp")
		if err != nil {
			r.Fatal(err)
		}
		return strings.Count(out, r.root+"/k") == locks || dials() > 0
	})
	if n := dials(); n > 0 {
		r.Errorf("the connection was given up %d times", n)
	}
}

func checkOfASingleServer(r *rig) {
	b, _ := r.open(90 * time.Second) // more than the server grants
	findings, err := b.Check(r.within(patience))
	if err != nil {
		r.Fatal(err)
	}
	for name, want := range map[string]driver.Severity{
		"connection": driver.SeverityOK, "session": driver.SeverityWarning, "server": driver.SeverityOK,
		"version": driver.SeverityOK, "ensemble": driver.SeverityWarning, "rights": driver.SeverityOK, "acl": driver.SeverityWarning,
	} {
		if f := finding(findings, name); f.Severity != want || want >= driver.SeverityWarning && f.Fix == "" {
			r.Errorf("%s: %+v, want %v", name, f, want)
		}
	}
	if list, _, err := r.conn.Children(r.root); err != nil || len(list) != 0 {
		r.Errorf("the check left %q, %v", list, err)
	}
}

// TestLeaderKilled kills the leader while locks are held and waited for.
func TestLeaderKilled(t *testing.T) {
	r := newRig(t, servers.StartZooKeeper(t, &servers.ZooKeeperConfig{Nodes: 3}))
	const timeout = 20 * time.Second
	m, _ := r.manage(timeout, nil)
	other, _ := r.manage(timeout, nil)
	for _, fault := range []struct {
		name       string
		stop, heal func(*servers.ZooKeeper)
	}{
		{"killed", (*servers.ZooKeeper).Kill, (*servers.ZooKeeper).Restart},
		{"stopped", (*servers.ZooKeeper).Pause, (*servers.ZooKeeper).Resume},
	} {
		l, err := m.Acquire(r.within(patience), "k", time.Minute, nil)
		if err != nil {
			t.Fatal(fault.name, err)
		}
		got := make(chan *dlm.Lock, 1)
		go func() {
			next, err := other.Acquire(context.Background(), "k", time.Minute, nil)
			if err != nil {
				t.Error(fault.name, err)
			}
			got <- next
		}()
		r.until("the waiter waits", func() bool { return len(r.children("k")) == 2 })
		var leader *servers.ZooKeeper
		r.until("there is a leader", func() bool {
			for _, z := range r.nodes {
				if z.Leads() {
					leader = z
				}
			}
			return leader != nil
		})
		fault.stop(leader)
		// A lock that is new can be had again, the held one is kept.
		fresh, err := other.Acquire(r.within(patience), "fresh", time.Minute, nil)
		if err != nil {
			t.Fatal(fault.name, err)
		}
		if err := fresh.Release(r.within(patience)); err != nil {
			t.Error(fault.name, err)
		}
		if l.Err() != nil {
			t.Errorf("%s: the lock is lost: %v", fault.name, l.Err())
		}
		select {
		case <-got:
			t.Errorf("%s: the waiter was granted a key that is held", fault.name)
		default:
		}
		if err := l.Release(r.within(patience)); err != nil {
			t.Error(fault.name, err)
		}
		next := <-got
		if next == nil {
			t.FailNow()
		}
		if next.Token <= l.Token {
			t.Errorf("%s: token %d follows %d", fault.name, next.Token, l.Token)
		}
		if err := next.Release(r.within(patience)); err != nil {
			t.Error(fault.name, err)
		}
		fault.heal(leader)
		r.until("all serve again", func() bool {
			for _, z := range r.nodes {
				out, err := z.Ask(context.Background(), "srvr")
				if err != nil || !strings.Contains(out, "Mode: ") {
					return false
				}
			}
			return true
		})
	}
}

// received is how many packets the first server has received.
func (r *rig) received() int {
	r.Helper()
	out, err := r.nodes[0].Ask(context.Background(), "srvr")
	if err != nil {
		r.Fatal(err)
	}
	for line := range strings.SplitSeq(out, "\n") {
		if n, ok := strings.CutPrefix(line, "Received: "); ok {
			count, err := strconv.Atoi(strings.TrimSpace(n))
			if err != nil {
				r.Fatal(err)
			}
			return count
		}
	}
	r.Fatalf("srvr says %q", out)
	return 0
}

// TestPacketsPerHandOver counts what it costs the server that a lock goes round. On
// a busy machine waits are long, and a ticket that stays gets a watch of its own.
func TestPacketsPerHandOver(t *testing.T) {
	r := newRig(t, servers.StartZooKeeper(t, nil))
	const workers, rounds = 8, 40
	for _, c := range []struct {
		managers, most int
	}{{1, 4}, {workers, 12}} {
		managers := make([]*dlm.Manager, c.managers)
		for i := range managers {
			managers[i], _ = r.manage(30*time.Second, nil)
		}
		key := fmt.Sprint("k", c.managers)
		before := r.received()
		var wg sync.WaitGroup
		for i := range workers {
			wg.Go(func() {
				for range rounds {
					l, err := managers[i%len(managers)].Acquire(context.Background(), key, time.Minute, nil)
					if err != nil {
						t.Error(err)
						return
					}
					if err := l.Release(context.Background()); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		n := r.received() - before
		t.Logf("%d managers: %.2f packets for each hand-over", c.managers, float64(n)/(workers*rounds))
		if n > c.most*workers*rounds {
			t.Errorf("%d managers: %d packets for %d hand-overs", c.managers, n, workers*rounds)
		}
	}
}

// TestThousandWaiters lets a thousand wait on one key, and counts what that costs
// the server.
func TestThousandWaiters(t *testing.T) {
	r := newRig(t, servers.StartZooKeeper(t, nil))
	received := r.received
	const waiters = 1000
	managers := make([]*dlm.Manager, 4)
	for i := range managers {
		managers[i], _ = r.manage(30*time.Second, nil)
	}
	b, _ := r.open(30 * time.Second)
	lease := r.grant(b, request("k", "first"))
	before := received()
	began := time.Now()
	var wg sync.WaitGroup
	for i := range waiters {
		wg.Go(func() {
			l, err := managers[i%len(managers)].Acquire(context.Background(), "k", time.Minute, nil)
			if err != nil {
				t.Error(err)
				return
			}
			if err := l.Release(context.Background()); err != nil {
				t.Error(err)
			}
		})
	}
	r.until("all wait", func() bool { return len(r.children("k")) == waiters+1 })
	waiting, queued := received(), time.Since(began)
	began = time.Now()
	if err := b.Release(r.within(patience), lease); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	t.Logf("%d waiters: %d packets to queue in %v, %d to be served in %v",
		waiters, waiting-before, queued, received()-waiting, time.Since(began))
	if n := received() - before; n > 60*waiters {
		t.Errorf("%d waiters cost the server %d packets", waiters, n)
	}
}
