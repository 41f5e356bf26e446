package pglock_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/pglock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/tests/servers"
)

// advisory returns a backend, which the test need not close.
func (r *rig) advisory(pool *pgxpool.Pool, opts *pglock.AdvisoryOptions) *pglock.Advisory {
	r.Helper()
	a, err := pglock.NewAdvisory(pool, opts)
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() { a.Close() })
	return a
}

// advise returns a manager with advisory locks, which the test need not close.
func (r *rig) advise(pool *pgxpool.Pool, cfg *dlm.LockConfig, opts *pglock.AdvisoryOptions) *dlm.Manager {
	r.Helper()
	m, err := pglock.NewAdvisoryLockManager(pool, cfg, opts)
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		_ = m.Close(ctx) // the server may be gone
	})
	return m
}

// unlocked waits until no advisory lock is left but those of the sessions
// themselves, and nothing is in the tables.
func (r *rig) unlocked(sessions int) {
	r.Helper()
	r.until("nothing is left", func() bool {
		rows := r.s.MustDo("postgres", `select (select count(*) from dlm.adv_tickets) + (select count(*) from dlm.adv_holds),
			(select count(*) from pg_locks where locktype = 'advisory')`)
		return rows[0][0] == "0" && rows[0][1] == strconv.Itoa(sessions)
	})
}

// lostWithin waits for the loss of a lock and checks its reason.
func (r *rig) lostWithin(l *dlm.Lock, most time.Duration, reason driver.LostReason) {
	r.Helper()
	began := time.Now()
	select {
	case <-l.Done():
	case <-time.After(rigPatience):
		r.Fatal("the loss was never told")
	}
	lost, ok := errors.AsType[*driver.LostError](l.Err())
	if !ok || reason != "" && lost.Reason != reason {
		r.Errorf("lost: %v, want reason %q", l.Err(), reason)
	}
	if took := time.Since(began); took > most {
		r.Errorf("the loss was told after %v, want at most %v", took, most)
	}
}

// holderEnv has the URL of a server in the environment of a process that takes
// locks and keeps them.
const holderEnv = "DLM_TEST_ADVISORY_HOLDER"

// hold takes "a", and waits for "b" which another process has, until it is killed.
func hold(url string) {
	fail := func(err error) {
		fmt.Println("error:", err)
		os.Exit(1)
	}
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		fail(err)
	}
	m, err := pglock.NewAdvisoryLockManager(pool, nil, nil)
	if err != nil {
		fail(err)
	}
	if _, err := m.AcquireLock(ctx, "a", time.Hour); err != nil {
		fail(err)
	}
	fmt.Println("holding")
	if _, err := m.AcquireLock(ctx, "b", time.Hour); err != nil {
		fail(err)
	}
	fmt.Println("done")
	select {}
}

// A process that is killed loses its locks and its places at once, though they were
// asked for an hour.
func TestAdvisoryProcessKilled(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	a := r.advisory(r.pool(""), nil)
	m := r.advise(r.pool(""), nil, nil)
	held := r.take(m, "b", time.Minute)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), holderEnv+"="+r.s.URL("postgres"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "holding\n" {
		t.Fatalf("the process says %q, %v", line, err)
	}
	r.queued(a, "b", 1)
	waiter := r.later(m, "a", time.Minute)
	r.queued(a, "a", 1)
	began := time.Now()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	next := r.got(waiter)
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("the lock of a dead process was free after %v", took)
	}
	behind := r.later(m, "b", time.Minute)
	r.queued(a, "b", 1)
	r.release(held)
	r.release(r.got(behind))
	r.release(next)
	r.unlocked(2)
}

// When the connection is lost, all locks on it are, at once; waiters come again, and
// new locks have larger tokens.
func TestAdvisorySessionEnds(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*rig, *cut){
		"cut":        func(_ *rig, c *cut) { c.proxy.Reset() },
		"terminated": func(r *rig, _ *cut) { r.terminate() },
		"killed":     func(r *rig, _ *cut) { r.s.Kill(); r.s.Restart() },
		"fast":       func(r *rig, _ *cut) { r.s.Stop(syscall.SIGINT); r.s.Restart() },
		"immediate":  func(r *rig, _ *cut) { r.s.Stop(syscall.SIGQUIT); r.s.Restart() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, nil)
			c := newCut(t, r.s.Addr())
			m := r.advise(newPool(t, r.s.URL("postgres")+"&application_name=target", c.dial), nil, nil)
			other := r.advise(r.pool(""), nil, nil)
			j := r.advisory(r.pool(""), nil)
			var locks []*dlm.Lock
			for i := range 20 {
				locks = append(locks, r.take(m, fmt.Sprint("k", i), time.Hour))
			}
			theirs := r.take(other, "other", time.Hour)
			waiter := r.later(m, "other", time.Minute)
			r.queued(j, "other", 1)
			end(r, c)
			for _, l := range locks {
				r.lostWithin(l, 2*time.Second, driver.ReasonSession)
				if err := l.Release(t.Context()); !errors.Is(err, dlm.ErrLost) {
					t.Errorf("release of a lost lock: %v", err)
				}
			}
			next := r.take(other, "k0", time.Minute)
			if next.Token <= locks[0].Token {
				t.Errorf("token %d follows %d", next.Token, locks[0].Token)
			}
			r.release(next)
			if theirs.Err() == nil {
				r.release(theirs)
			}
			r.release(r.got(waiter))
			again := r.take(m, "k1", time.Minute)
			r.release(again)
			r.until("nothing is left", func() bool {
				return r.s.MustDo("postgres", "select count(*) from dlm.adv_tickets")[0][0] == "0"
			})
		})
	}
}

func (r *rig) terminate() {
	r.s.MustDo("postgres", "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'target'")
}

// A server that has become silent is noticed, within half of the session time-out;
// the session that it still has is ended when there is a connection again.
func TestAdvisoryBlackhole(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	c := newCut(t, r.s.Addr())
	opts := &pglock.AdvisoryOptions{SessionTimeout: 4 * time.Second}
	m := r.advise(newPool(t, r.s.URL("postgres"), c.dial), nil, opts)
	other := r.advise(r.pool(""), nil, nil)
	held := r.take(m, "k", time.Hour)
	if left := time.Until(held.Deadline()); left > opts.SessionTimeout {
		t.Errorf("the deadline is %v away, with a session time-out of %v", left, opts.SessionTimeout)
	}
	waiter := r.later(other, "k", time.Minute)
	r.queued(r.advisory(r.pool(""), nil), "k", 1)
	c.proxy.Blackhole()
	r.lostWithin(held, opts.SessionTimeout, "")
	// The server does not know yet, so nobody has the key.
	select {
	case <-waiter:
		t.Error("the server freed the key of a session that it had")
	default:
	}
	proxy := servers.StartProxy(withoutCleanup{t}, r.s.Addr())
	t.Cleanup(proxy.Close)
	old := c.proxy
	c.proxy = proxy
	t.Cleanup(old.Close)
	r.until("there is a session again", func() bool {
		l, err := m.TryLock(t.Context(), "another", time.Minute)
		if err != nil {
			return false
		}
		r.release(l)
		return true
	})
	next := r.got(waiter)
	if next.Token <= held.Token {
		t.Errorf("token %d follows %d", next.Token, held.Token)
	}
	r.release(next)
	r.unlocked(3)
}

// A failover forgets all locks. Whoever is told of it in time loses them before the
// new primary knows anybody, and tokens go on rising if it had them all.
func TestAdvisoryFailover(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	replica := servers.StartPostgres(t, &servers.PostgresConfig{ReplicaOf: r.s})
	url := fmt.Sprintf("postgres://postgres@%s,%s/postgres?sslmode=disable&target_session_attrs=read-write", r.s.Addr(), replica.Addr())
	a, b := r.advise(newPool(t, url, nil), nil, nil), r.advise(newPool(t, url, nil), nil, nil)
	held := r.take(a, "k", time.Minute)
	waiter := r.later(b, "k", time.Minute)
	r.queued(r.advisory(r.pool(""), nil), "k", 1)
	end := r.s.MustDo("postgres", "select pg_current_wal_lsn()")[0][0]
	r.until("the replica has it all", func() bool {
		return replica.MustDo("postgres", "select (pg_last_wal_replay_lsn() >= '"+end+"')::text")[0][0] == "true"
	})
	r.s.Kill()
	r.lostWithin(held, 2*time.Second, driver.ReasonSession)
	replica.Promote()
	next := r.got(waiter)
	if next.Token <= held.Token {
		t.Errorf("token %d follows %d", next.Token, held.Token)
	}
	r.release(next)
}

// Through a pooler that takes sessions away it is refused, also if there is only
// one to be had; through one that leaves them alone it works.
func TestAdvisoryBehindPgBouncer(t *testing.T) {
	t.Parallel()
	for _, connections := range []int{1, 4} {
		t.Run(fmt.Sprint("transaction/", connections), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, nil)
			p := servers.StartPgBouncer(t, r.s, "transaction", connections)
			for range 3 {
				a := r.advisory(newPool(t, p.URL("postgres")+"&default_query_exec_mode=exec", nil), nil)
				_, err := a.Acquire(t.Context(), driver.Request{Key: "k", Owner: "a", TTL: time.Minute, Limit: 1})
				e, ok := errors.AsType[*pglock.ServerError](err)
				if !ok || e.Problem != pglock.ProblemPooling || !errors.Is(err, driver.ErrInvalid) {
					t.Errorf("%v, want %s", err, pglock.ProblemPooling)
				}
				expectFinding(t, findings(t, a), "pooling", driver.SeverityCritical, "pooler")
			}
			if n := r.s.MustDo("postgres", "select count(*) from pg_locks where locktype = 'advisory'")[0][0]; n != "0" {
				t.Errorf("%s advisory locks are left", n)
			}
		})
	}
	t.Run("session", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, nil)
		p := servers.StartPgBouncer(t, r.s, "session", 8)
		m := r.advise(newPool(t, p.URL("postgres"), nil), nil, nil)
		other := r.advise(r.pool(""), nil, nil)
		held := r.take(m, "k", time.Minute)
		waiter := r.later(other, "k", time.Minute)
		r.queued(r.advisory(r.pool(""), nil), "k", 1)
		r.release(held)
		r.release(r.got(waiter))
		if err := m.Close(t.Context()); err != nil {
			t.Error(err)
		}
		// The pooler gives the session to the next one as new.
		again := r.advise(newPool(t, p.URL("postgres"), nil), nil, nil)
		r.release(r.take(again, "k", time.Minute))
		r.unlocked(3)
	})
}

// A session that somebody takes away in the middle is found out by the next call,
// before it does anything.
func TestAdvisorySessionIsSwapped(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	s := r.s
	for _, text := range []string{
		"select dlm.adv_acquire_v1(1, 2, 'k', 'o', 0, 1, 0, 1)", "select dlm.adv_release_v1(1, 2, 3, 1)", "select dlm.adv_undo_v1(1, 2, 0)",
		"select dlm.adv_withdraw_v1(1, 2, 3, 'k', 'o')",
	} {
		_, err := s.Do(t.Context(), "postgres", text)
		if err == nil || !strings.Contains(err.Error(), "DL002") {
			t.Errorf("%s: %v, want DL002", text, err)
		}
	}
}

// A thousand waiters are served in the order in which they came, and nobody stalls
// the server.
func TestAdvisoryThousandWaiters(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	const count, managers = 1000, 8
	c := &counter{}
	var all []*dlm.Manager
	for range managers {
		all = append(all, r.advise(r.pool(""), &dlm.LockConfig{Observer: c}, nil))
	}
	held := r.take(all[0], "k", time.Minute)
	ctx, cancel := context.WithTimeout(t.Context(), 4*rigPatience)
	defer cancel()
	var wg sync.WaitGroup
	defer wg.Wait()
	var mu sync.Mutex
	var order []int
	for i := range count {
		wg.Go(func() {
			l, err := all[i%managers].AcquireLock(ctx, "k", 10*time.Minute)
			if err != nil {
				t.Errorf("waiter %d: %v", i, err)
				return
			}
			mu.Lock()
			order = append(order, i)
			mu.Unlock()
			r.release(l)
		})
		r.until("it is in the queue", func() bool { return c.waiting.Load() == int64(i+1) })
	}
	began := time.Now()
	r.release(held)
	wg.Wait()
	t.Logf("%d waiters in %v", count, time.Since(began))
	for i, n := range order {
		if i != n {
			t.Fatalf("waiter %d was served as number %d", n, i)
		}
	}
	r.unlocked(managers)
}

// Many callers share one connection, on few keys and on many, alone and shared, and
// nobody has what he must not.
func TestAdvisoryCrowd(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	j := &journal{}
	cfg := &dlm.LockConfig{Observer: j}
	a, b := r.advise(r.pool(""), cfg, nil), r.advise(r.pool(""), cfg, nil)
	l := r.load(50, a, b)
	l.goesOn(3)
	l.stop()

	ctx, cancel := context.WithCancel(t.Context())
	var readers, writers, rounds atomic.Int64
	var wg sync.WaitGroup
	for i := range 40 {
		m := a
		if i%2 == 0 {
			m = b
		}
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				shared := (n+i)%3 > 0
				lock, err := m.Acquire(ctx, "mixed", time.Minute, &dlm.AcquireOptions{Shared: shared})
				if err != nil {
					if ctx.Err() == nil {
						t.Error(err)
					}
					return
				}
				mine, others := &writers, &readers
				if shared {
					mine, others = others, mine
				}
				if k, m := mine.Add(1), others.Load(); m != 0 || !shared && k != 1 {
					t.Errorf("%d of one kind beside %d of the other (shared: %v)", k, m, shared)
				}
				mine.Add(-1)
				if err := lock.Release(context.Background()); err != nil {
					t.Error(err)
				}
				rounds.Add(1)
			}
		})
	}
	began := time.Now()
	r.until("they have had some hundred turns", func() bool { return rounds.Load() > 300 })
	t.Logf("%d turns in %v", rounds.Load(), time.Since(began))
	cancel()
	wg.Wait()
	r.unlocked(2)
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, e := range j.events {
		if e.Kind == dlm.EventStoreError && !errors.Is(e.Err, context.Canceled) {
			t.Errorf("%s: %v after %v", e.Op, e.Err, e.Duration)
		}
	}
}

// request asks for the key "k".
func request(owner string, mode driver.Mode) driver.Request {
	return driver.Request{Key: "k", Owner: owner, TTL: time.Minute, Limit: 1, Mode: mode, Enqueue: true, Manager: "m"}
}

// hears returns the owners whom a backend wakes.
func (r *rig) hears(a *pglock.Advisory) <-chan driver.Event {
	events := make(chan driver.Event, 10000)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	r.Cleanup(wg.Wait)
	r.Cleanup(cancel)
	wg.Go(func() {
		_ = a.Listen(ctx, "m", func(e driver.Event) { events <- e })
	})
	select {
	case <-events:
	case <-time.After(rigPatience):
		r.Fatal("the subscription never stood")
	}
	return events
}

// claims repeats a request that was refused, once it is woken, and only then. It
// fails if nobody wakes it.
func (r *rig) claims(a *pglock.Advisory, events <-chan driver.Event, req driver.Request) driver.Lease {
	r.Helper()
	for {
		lease, err := a.Acquire(r.Context(), req)
		if err == nil {
			return lease
		}
		if !errors.Is(err, driver.ErrHeld) {
			r.Fatal(err)
		}
		for woken := false; !woken; {
			select {
			case e := <-events:
				woken = e.Kind == driver.EventWake && e.Lease.Owner == req.Owner
			case <-time.After(rigPatience):
				r.Fatalf("nobody woke %q, for whom the key is free", req.Owner)
			}
		}
	}
}

// A release, or a withdrawal, that meets a request on its way never leaves it
// asleep: no waiter here looks by itself.
func TestAdvisoryWakeUpIsNotLost(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	a, b := r.advisory(r.pool(""), nil), r.advisory(r.pool(""), nil)
	woken := r.hears(b)
	const rounds = 1500
	release := func(lease driver.Lease) {
		if err := a.Release(context.Background(), lease); err != nil {
			t.Error(err)
		}
	}
	for i := range rounds {
		lease, err := a.Acquire(t.Context(), request(fmt.Sprint("a", i), driver.Exclusive))
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		wg.Go(func() { release(lease) })
		got := r.claims(b, woken, request(fmt.Sprint("b", i), driver.Exclusive))
		wg.Wait()
		if err := b.Release(t.Context(), got); err != nil {
			t.Fatal(err)
		}
	}
	// A reader comes up behind a writer who gives up, while others read.
	held, err := a.Acquire(t.Context(), request("reader", driver.Shared))
	if err != nil {
		t.Fatal(err)
	}
	for i := range rounds {
		writer := fmt.Sprint("w", i)
		if _, err := a.Acquire(t.Context(), request(writer, driver.Exclusive)); !errors.Is(err, driver.ErrHeld) {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		wg.Go(func() { release(driver.Lease{Key: "k", Owner: writer}) })
		got := r.claims(b, woken, request(fmt.Sprint("r", i), driver.Shared))
		wg.Wait()
		if err := b.Release(t.Context(), got); err != nil {
			t.Fatal(err)
		}
	}
	release(held)
	r.unlocked(2)
}

// The head of the queue dies while the key is free: the next one gets it when it
// looks.
func TestAdvisoryHeadDies(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	a := r.advisory(r.pool(""), nil)
	dead := r.advisory(r.pool("&application_name=target"), nil)
	m := r.advise(r.pool(""), nil, nil)
	lease, err := a.Acquire(t.Context(), request("a", driver.Exclusive))
	if err != nil {
		t.Fatal(err)
	}
	for i := range 5 { // nobody listens to their wake-ups
		if _, err := dead.Acquire(t.Context(), request(fmt.Sprint("dead", i), driver.Exclusive)); !errors.Is(err, driver.ErrHeld) {
			t.Fatal(err)
		}
	}
	waiter := r.later(m, "k", time.Minute)
	r.queued(a, "k", 6)
	if err := a.Release(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Acquire(t.Context(), driver.Request{Key: "k", Owner: "c", TTL: time.Minute, Limit: 1}); !errors.Is(err, driver.ErrHeld) {
		t.Errorf("a request without a ticket passed the queue: %v", err)
	}
	began := time.Now()
	r.terminate()
	r.release(r.got(waiter))
	t.Logf("served %v after the death of the head", time.Since(began))
	if err := dead.Close(); err != nil {
		t.Error(err)
	}
	r.unlocked(2)
}

// Two keys with the same number are told apart.
func TestAdvisoryCollision(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	a := r.advisory(r.pool(""), nil)
	if _, err := a.Acquire(t.Context(), request("a", driver.Exclusive)); err != nil {
		t.Fatal(err)
	}
	number := r.s.MustDo("postgres", "select number from dlm.adv_holds")[0][0]
	rows := r.s.MustDo("postgres", `select set_config('dlm_adv.session', '5', false); select pg_advisory_lock(5);
		select a.status, convert_from(a.holder, 'UTF8') from dlm.adv_acquire_v1(5, `+number+`, 'other', 'o', 0, 1, 0, 1) a`)
	if rows[0][0] != "5" || rows[0][1] != "k" {
		t.Errorf("%v, want status 5 and the other key", rows)
	}
	if err := a.Release(t.Context(), driver.Lease{Key: "k", Owner: "a"}); err != nil {
		t.Error(err)
	}
	r.unlocked(1)
}

// What a server may have set against idle sessions, slow statements and dirty reads
// does not touch the session.
func TestAdvisoryServerSettings(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	for _, setting := range []string{
		"idle_session_timeout = '1s'", "idle_in_transaction_session_timeout = '500ms'",
		"default_transaction_isolation = 'serializable'", "synchronous_commit = off",
	} {
		r.s.MustDo("postgres", "alter system set "+setting)
	}
	r.s.MustDo("postgres", "select pg_reload_conf()")
	r.until("the settings are in force", func() bool { return r.s.MustDo("postgres", "show synchronous_commit")[0][0] == "off" })
	r.s.MustDo("postgres", "create role brief login superuser; alter role brief set statement_timeout = '500ms'; alter role brief set lock_timeout = '1ms'")
	m := r.advise(newPool(t, r.s.URLFor("brief", "", "postgres"), nil), nil, &pglock.AdvisoryOptions{SessionTimeout: time.Minute})
	held := r.take(m, "k", time.Hour)
	l := r.load(8, m)
	l.goesOn(10)
	l.stop()
	r.s.MustDo("postgres", "alter system set default_transaction_read_only = on")
	r.s.MustDo("postgres", "select pg_reload_conf()")
	idle := time.NewTimer(3 * time.Second)
	defer idle.Stop()
	select {
	case <-held.Done():
		t.Errorf("lost: %v", held.Err())
	case <-idle.C:
	}
	r.release(held)
}

// A statement that the server breaks off leaves no lock behind.
func TestAdvisoryStatementsFail(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	a, b := r.advisory(r.pool("&application_name=target"), nil), r.advisory(r.pool(""), nil)
	warmUp(t, a)
	warmUp(t, b)
	blocked := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(blocked)
		// Longer than the session waits for a lock of the tables.
		r.s.MustDo("postgres", "begin; lock table dlm.adv_holds in access exclusive mode; select pg_sleep(2.5); commit")
	})
	r.until("the table is locked", func() bool {
		return r.s.MustDo("postgres", "select count(*) from pg_locks where mode = 'AccessExclusiveLock' and relation = 'dlm.adv_holds'::regclass and granted")[0][0] == "1"
	})
	_, err := a.Acquire(t.Context(), request("a", driver.Exclusive))
	if !errors.Is(err, driver.ErrNotApplied) {
		t.Errorf("%v, want ErrNotApplied", err)
	}
	<-blocked
	wg.Wait()
	r.unlocked(2)
	lease, err := b.Acquire(t.Context(), request("b", driver.Exclusive))
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Release(t.Context(), lease); err != nil {
		t.Error(err)
	}
}

// A ticket that was made by a call which then failed does not stay behind.
func TestAdvisoryTicketIsWithdrawn(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	// From here on whoever asks again with a ticket is refused.
	r.s.MustDo("postgres", `create sequence refusals;
		alter function dlm.adv_acquire_v1 rename to adv_acquire_really;
		create function dlm.adv_acquire_v1(
			p_session bigint, p_number bigint, p_key bytea, p_owner bytea, p_mode int, p_want int, p_ticket bigint, p_enqueue int,
			out status int, out number bigint, out holder bytea, out place bigint, out ticket bigint, out swept boolean
		) language plpgsql as $$
		begin
			if p_ticket <> 0 then
				perform nextval('refusals'); -- remains
				raise exception 'no memory left' using errcode = '53200';
			end if;
			select x.status, x.number, x.holder, x.place, x.ticket, x.swept into status, number, holder, place, ticket, swept
			from dlm.adv_acquire_really(p_session, p_number, p_key, p_owner, p_mode, p_want, p_ticket, p_enqueue) x;
		end $$`)
	a, b := r.advise(r.pool(""), nil, nil), r.advise(r.pool(""), nil, nil)
	held := r.take(a, "k", time.Minute)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	failed := make(chan error, 1)
	go func() {
		_, err := b.AcquireLock(ctx, "k", time.Minute)
		failed <- err
	}()
	r.until("the caller was refused and asked again", func() bool {
		n, _ := strconv.Atoi(r.s.MustDo("postgres", "select last_value from refusals")[0][0]) // digits
		return n > 1
	})
	cancel()
	if err := <-failed; err == nil {
		t.Error("the lock was granted though another manager has it")
	}
	r.until("the ticket is withdrawn", func() bool {
		return r.s.MustDo("postgres", "select count(*) from dlm.adv_tickets")[0][0] == "0"
	})
	r.release(held)
}

// A grant whose caller has gone is given up when its TTL is over, unless it is
// asked for again.
func TestAdvisoryOrphan(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	c := newCut(t, r.s.Addr())
	a := r.advisory(newPool(t, r.s.URL("postgres"), c.dial), nil)
	b := r.advisory(r.pool(""), nil)
	warmUp(t, a)
	leave := func(owner string) {
		t.Helper()
		c.proxy.Hold(servers.Down)
		defer c.proxy.Resume()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		req := request(owner, driver.Exclusive)
		req.TTL = 2 * time.Second
		failed := make(chan error, 1)
		go func() {
			_, err := a.Acquire(ctx, req)
			failed <- err
		}()
		r.until("it is held", func() bool {
			info, err := b.Inspect(t.Context(), "k")
			return err == nil && len(info.Holders) == 1 && info.Holders[0].Owner == owner
		})
		cancel()
		if err := <-failed; !errors.Is(err, context.Canceled) || errors.Is(err, driver.ErrNotApplied) {
			t.Fatalf("%v", err)
		}
	}
	leave("a")
	r.unlocked(2)
	leave("b")
	lease, err := a.Acquire(t.Context(), request("b", driver.Exclusive))
	if err != nil {
		t.Fatal(err)
	}
	idle := time.NewTimer(2500 * time.Millisecond)
	defer idle.Stop()
	<-idle.C
	if err := a.Release(t.Context(), lease); err != nil {
		t.Errorf("a grant that was claimed: %v", err)
	}
	leave("c")
	if err := a.Release(t.Context(), driver.Lease{Key: "k", Owner: "c"}); err != nil {
		t.Error(err)
	}
	r.unlocked(2)
}

// Tables of earlier versions are brought up to date, with the locks in them.
func TestSchemaUpgrade(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	const (
		version2 = "drop function dlm.acquire_many_v1, dlm.release_many_v1; update dlm.meta set version = 2;"
		version1 = version2 + "drop table dlm.adv_holds, dlm.adv_tickets cascade; drop sequence dlm.adv_numbers; update dlm.meta set version = 1"
	)
	for _, older := range []string{version1, version2} {
		lease, err := r.backend().Acquire(t.Context(), alone("k", "a"))
		if err != nil {
			t.Fatal(err)
		}
		r.s.MustDo("postgres", older)
		a, b := r.advisory(r.pool(""), nil), r.backend()
		_, errAdvisory := a.Acquire(t.Context(), request("a", driver.Exclusive))
		for _, err := range []error{errAdvisory, b.Release(t.Context(), lease)} {
			if e, ok := errors.AsType[*pglock.ServerError](err); !ok || e.Problem != pglock.ProblemSchemaVersion {
				t.Errorf("%v, want %s", err, pglock.ProblemSchemaVersion)
			}
		}
		if err := pglock.CreateSchema(t.Context(), r.pool(""), nil); err != nil {
			t.Fatal(err)
		}
		warmUp(t, a)
		if err := b.Release(t.Context(), lease); err != nil {
			t.Errorf("a lock in the older tables: %v", err)
		}
	}
}

// What is wrong is said by the first call and by a check.
func TestAdvisoryWrongSetup(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	r.s.MustDo("postgres", "create database empty")
	r.s.MustDo("postgres", `create role limited login; grant usage on schema dlm to limited;
		grant select, insert, update, delete on all tables in schema dlm to limited`)
	replica := servers.StartPostgres(t, &servers.PostgresConfig{ReplicaOf: r.s})
	r.until("the replica has the tables", func() bool {
		return replica.MustDo("postgres", "select coalesce(to_regclass('dlm.adv_tickets')::text, '')")[0][0] != ""
	})
	for _, c := range []struct {
		name, url string
		problem   pglock.Problem
		want      error
		check     string
	}{
		{"missing right", r.s.URLFor("limited", "", "postgres"), pglock.ProblemPermission, driver.ErrInvalid, "rights"},
		{"missing schema", r.s.URL("empty"), pglock.ProblemNoSchema, driver.ErrInvalid, "schema"},
		{"standby", replica.URL("postgres"), pglock.ProblemReadOnly, driver.ErrNotApplied, "role"},
		{"nothing", "postgres://postgres@127.0.0.1:1/x?sslmode=disable", "", driver.ErrNotApplied, "connection"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := (&rig{T: t, s: r.s}).advisory(newPool(t, c.url, nil), nil)
			_, err := a.Acquire(t.Context(), request("a", driver.Exclusive))
			e, _ := errors.AsType[*pglock.ServerError](err)
			if !errors.Is(err, c.want) || c.problem != "" && (e == nil || e.Problem != c.problem) {
				t.Errorf("%v, want %s", err, c.problem)
			}
			expectFinding(t, findings(t, a), c.check, driver.SeverityCritical, "")
		})
	}
	expectFinding(t, findings(t, r.advisory(r.pool(""), nil)), "replicas", driver.SeverityWarning, "advisory")
	expectFinding(t, findings(t, r.advisory(r.pool(""), nil)), "pooling", driver.SeverityOK, "own")
}

// A server that has no room for more locks says so, and keeps those that it has.
func TestAdvisoryServerFull(t *testing.T) {
	t.Parallel()
	r := newRig(t, &servers.PostgresConfig{Settings: []string{"max_locks_per_transaction=10", "max_connections=20"}})
	a := r.advisory(r.pool("&pool_max_conns=1"), nil)
	var held []driver.Lease
	for {
		lease, err := a.Acquire(t.Context(), driver.Request{Key: fmt.Sprint("k", len(held)), Owner: "a", TTL: time.Hour, Limit: 1})
		if err != nil {
			if !errors.Is(err, driver.ErrNotApplied) {
				t.Error(err)
			}
			t.Logf("full with %d locks: %v", len(held), err)
			break
		}
		if held = append(held, lease); len(held) == 50000 {
			t.Fatal("the server is never full")
		}
	}
	for _, lease := range held {
		if err := a.Release(t.Context(), lease); err != nil {
			t.Fatal(err)
		}
	}
	warmUp(t, a)
	r.unlocked(1)
}

// A call that is under way says that the backend was closed, also if the connection
// breaks before this side has ended it.
func TestAdvisoryCloseCut(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	c := newCut(t, r.s.Addr())
	a, b := r.advisory(newPool(t, r.s.URL("postgres"), c.dial), nil), r.advisory(r.pool(""), nil)
	warmUp(t, a)
	c.proxy.Hold(servers.Down)
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := a.Acquire(t.Context(), request("a", driver.Exclusive)); !errors.Is(err, driver.ErrClosed) || errors.Is(err, driver.ErrNotApplied) {
			t.Errorf("%v, want an unknown outcome of a closed backend", err)
		}
	})
	r.until("the server has the call", func() bool {
		info, err := b.Inspect(t.Context(), "k")
		return err == nil && len(info.Holders) == 1
	})
	wg.Go(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	r.until("it is being closed", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond) // nobody answers
		defer cancel()
		_, err := a.Acquire(ctx, alone("other", "a"))
		return errors.Is(err, driver.ErrClosed)
	})
	c.proxy.Reset()
	wg.Wait()
}

// The locks of a session that has been closed are free, and what waits goes on.
func TestAdvisoryClose(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	a, b := r.advisory(r.pool(""), nil), r.advisory(r.pool(""), nil)
	for i := range 10 {
		if _, err := a.Acquire(t.Context(), driver.Request{Key: fmt.Sprint(i), Owner: "a", TTL: time.Hour, Limit: 1}); err != nil {
			t.Fatal(err)
		}
	}
	lease, err := b.Acquire(t.Context(), request("b", driver.Shared))
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 50 { // calls that meet the end
		wg.Go(func() {
			_, err := a.Acquire(t.Context(), request(fmt.Sprint("w", i), driver.Exclusive))
			if err == nil || !errors.Is(err, driver.ErrHeld) && !errors.Is(err, driver.ErrClosed) {
				t.Error(err)
			}
		})
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	wg.Wait()
	if err := b.Release(t.Context(), lease); err != nil {
		t.Error(err)
	}
	r.until("the session has ended", func() bool {
		return r.s.MustDo("postgres", "select count(*) from pg_locks where locktype = 'advisory'")[0][0] == "1"
	})
	r.release(r.take(r.advise(r.pool(""), nil, nil), "k", time.Minute))
}
