package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/pglock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/tests/servers"
)

// A lock survives the death of the server in whatever way, and so does the place
// of whoever waits for it. Tokens go on rising.
func TestServerRestarts(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*servers.Postgres){
		"killed":    func(s *servers.Postgres) { s.Kill() },
		"fast":      func(s *servers.Postgres) { s.Stop(syscall.SIGINT) },
		"immediate": func(s *servers.Postgres) { s.Stop(syscall.SIGQUIT) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, nil)
			a, b := r.plain(), r.plain()
			held := r.take(a, "k", time.Minute)
			waiter := r.later(b, "k", time.Minute)
			r.queued(r.backend(), "k", 1)
			end(r.s)
			r.s.Restart()
			if err := held.Err(); err != nil {
				t.Fatal(err)
			}
			r.survived(held)
			r.release(held)
			next := r.got(waiter)
			if next.Token <= held.Token {
				t.Errorf("token %d follows %d", next.Token, held.Token)
			}
			r.release(next)
			r.clean()
		})
	}
}

// While the server is gone a lock is lost at its deadline, not later, and nobody
// gets it before.
func TestServerGoneForLonger(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	m := r.plain()
	held := r.take(m, "k", 2*time.Second)
	r.s.Kill()
	select {
	case <-held.Done():
	case <-time.After(rigPatience):
		t.Fatal("the loss was never told")
	}
	if late := time.Since(held.Deadline()); late > 2*time.Second {
		t.Errorf("the loss was told %v after the deadline", late)
	}
	r.s.Restart()
	next := r.take(r.plain(), "k", time.Minute)
	if next.Token <= held.Token {
		t.Errorf("token %d follows %d", next.Token, held.Token)
	}
	r.release(next)
}

// Sessions that are ended from outside cost nobody a lock, a place or a wake-up.
func TestSessionsTerminated(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	j := &journal{}
	m := r.manager(r.pool("&application_name=target"), &dlm.LockConfig{Observer: j}, nil)
	other := r.plain()
	held := r.take(other, "k", time.Minute)
	waiter := r.later(m, "k", time.Minute)
	r.queued(r.backend(), "k", 1)
	l := r.load(4, m)
	for range 5 {
		l.goesOn(3)
		r.s.MustDo("postgres", "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'target'")
	}
	l.goesOn(3)
	l.stop()
	if j.count(dlm.EventStoreError, "listen") == 0 {
		t.Error("the listener was never ended")
	}
	r.release(held)
	r.release(r.got(waiter))
	r.clean()
}

// The wake-up of a waiter comes through a subscription that was renewed.
func TestListenerComesBack(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	b, a := r.backend(), r.backend()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	events := make(chan driver.Event, 100)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() {
		for ctx.Err() == nil {
			_ = b.Listen(ctx, "m", func(e driver.Event) { events <- e })
		}
	})
	next := func(want driver.EventKind) driver.Event {
		t.Helper()
		select {
		case e := <-events:
			if e.Kind != want {
				t.Fatalf("%+v, want kind %v", e, want)
			}
			return e
		case <-time.After(rigPatience):
			t.Fatalf("no event of kind %v", want)
			return driver.Event{}
		}
	}
	next(driver.EventUp)
	r.s.MustDo("postgres", "select pg_terminate_backend(pid) from pg_stat_activity where query ilike 'listen%'")
	next(driver.EventUp)
	lease, err := a.Acquire(t.Context(), driver.Request{Key: "k", Owner: "a", TTL: time.Minute, Limit: 1})
	if err != nil {
		t.Fatal(err)
	}
	_, err = b.Acquire(t.Context(), driver.Request{Key: "k", Owner: "b", TTL: time.Minute, Limit: 1, Enqueue: true, Manager: "m"})
	held, ok := errors.AsType[*driver.HeldError](err)
	if !ok {
		t.Fatal(err)
	}
	if err := a.Release(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	e := next(driver.EventGrant)
	if e.Lease.Key != "k" || e.Lease.Owner != "b" || e.Ticket != held.Ticket || e.Lease.TTL != time.Minute {
		t.Errorf("%+v", e)
	}
	if removed, err := a.ForceRelease(t.Context(), "k", e.Lease.Token); err != nil || len(removed) != 1 {
		t.Errorf("%+v, %v", removed, err)
	}
	lost := next(driver.EventLost)
	if want, ok := errors.AsType[*driver.LostError](lost.Err); !ok || want.Token != e.Lease.Token {
		t.Errorf("%+v", lost)
	}
}

// After a failover to a replica that was in step nothing is lost; the pool finds
// the new primary by itself.
func TestFailover(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	replica := servers.StartPostgres(t, &servers.PostgresConfig{ReplicaOf: r.s})
	url := fmt.Sprintf("postgres://postgres@%s,%s/postgres?sslmode=disable&target_session_attrs=read-write", r.s.Addr(), replica.Addr())
	a, b := r.manager(newPool(t, url, nil), nil, nil), r.manager(newPool(t, url, nil), nil, nil)
	held := r.take(a, "k", time.Minute)
	waiter := r.later(b, "k", time.Minute)
	r.queued(r.backend(), "k", 1)
	end := r.s.MustDo("postgres", "select pg_current_wal_lsn()")[0][0]
	r.until("the replica has it all", func() bool {
		return replica.MustDo("postgres", "select (pg_last_wal_replay_lsn() >= '"+end+"')::text")[0][0] == "true"
	})
	r.s.Kill()
	replica.Promote()
	r.survived(held)
	r.release(held)
	next := r.got(waiter)
	if next.Token <= held.Token {
		t.Errorf("token %d follows %d", next.Token, held.Token)
	}
	r.release(next)
}

// A standby grants nothing, and says why.
func TestStandby(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	replica := servers.StartPostgres(t, &servers.PostgresConfig{ReplicaOf: r.s})
	r.until("the replica has the tables", func() bool {
		return replica.MustDo("postgres", "select coalesce(to_regprocedure('dlm.release_v1(bytea,bytea,bigint,bigint)')::text, '')")[0][0] != ""
	})
	b, err := pglock.New(newPool(t, replica.URL("postgres"), nil), nil)
	if err != nil {
		t.Fatal(err)
	}
	wantReadOnly(t, b)
	if _, err := b.List(t.Context(), "", "", 0); err != nil {
		t.Errorf("a standby can be read: %v", err)
	}
	expectFinding(t, findings(t, b), "role", driver.SeverityCritical, "standby")
}

func wantReadOnly(t *testing.T, b driver.Backend) {
	t.Helper()
	_, err := b.Acquire(t.Context(), driver.Request{Key: "k", Owner: "a", TTL: time.Second, Limit: 1})
	batch := []driver.Renewal{{Lease: driver.Lease{Key: "k", Owner: "a", Token: 1, TTL: time.Second}}}
	b.Extend(t.Context(), batch)
	for what, err := range map[string]error{
		"Acquire": err, "Extend": batch[0].Err, "Release": b.Release(t.Context(), driver.Lease{Key: "k", Owner: "a", Token: 1}),
	} {
		e, ok := errors.AsType[*pglock.ServerError](err)
		if !ok || e.Problem != pglock.ProblemReadOnly || !errors.Is(err, driver.ErrNotApplied) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// A server that becomes read-only refuses releases; when it is writable again they
// are made good.
func TestReadOnlyForAWhile(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	b := r.backend()
	lease, err := b.Acquire(t.Context(), driver.Request{Key: "k", Owner: "a", TTL: time.Minute, Limit: 1})
	if err != nil {
		t.Fatal(err)
	}
	// A session learns of a setting when it is idle.
	set := func(to string, refused bool) {
		r.s.MustDo("postgres", "alter system set default_transaction_read_only = "+to)
		r.s.MustDo("postgres", "select pg_reload_conf()")
		r.until("the backend's session knows", func() bool {
			err := b.Release(t.Context(), driver.Lease{Key: "k", Owner: "nobody"})
			return (err != nil) == refused
		})
	}
	set("on", true)
	wantReadOnly(t, b)
	if err := b.Release(t.Context(), lease); !errors.Is(err, driver.ErrNotApplied) {
		t.Error(err)
	}
	expectFinding(t, findings(t, b), "role", driver.SeverityCritical, "default_transaction_read_only")
	set("off", false)
	if err := b.Release(t.Context(), lease); err != nil {
		t.Error(err)
	}
	r.clean()
}

// Waiters hold no connection: a pool of one serves a holder and many waiters, and
// while others use the whole pool, calls end with their contexts.
func TestPoolExhausted(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	pool := r.pool("&pool_max_conns=1")
	m := r.manager(pool, nil, nil)
	held := r.take(m, "k", time.Minute)
	var waiters []<-chan *dlm.Lock
	for i := range 20 {
		waiters = append(waiters, r.later(m, "k", time.Minute))
		r.queued(r.backend(), "k", i+1)
	}
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	b, err := pglock.New(pool, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = b.Acquire(ctx, driver.Request{Key: "other", Owner: "a", TTL: time.Second, Limit: 1})
	if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, driver.ErrNotApplied) {
		t.Errorf("without a connection: %v", err)
	}
	conn.Release()
	r.release(held)
	for _, w := range waiters {
		r.release(r.got(w))
	}
	r.clean()
}

// Whatever isolation level the users of the server have as their default, locks
// work, and no serialization failure is seen.
func TestIsolationDefaults(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"serializable", "repeatable read", "read uncommitted"} {
		for _, kind := range []string{"pgx", "sql"} {
			t.Run(level+"/"+kind, func(t *testing.T) {
				t.Parallel()
				r := newRig(t, &servers.PostgresConfig{Settings: []string{"default_transaction_isolation=" + level}})
				j := &journal{}
				var m *dlm.Manager
				if kind == "pgx" {
					m = r.manager(r.pool(""), &dlm.LockConfig{Observer: j}, nil)
				} else {
					m = r.overDB(&dlm.LockConfig{Observer: j})
				}
				l := r.load(16, m)
				l.goesOn(10)
				l.stop()
				for _, op := range []string{"acquire", "release", "extend"} {
					if n := j.count(dlm.EventStoreError, op); n > 0 {
						t.Errorf("%d errors of %s", n, op)
					}
				}
				r.clean()
			})
		}
	}
}

// A default that is changed while a backend is in use is noticed.
func TestIsolationChanges(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	l := r.load(4, r.plain())
	l.goesOn(3)
	r.s.MustDo("postgres", "alter system set default_transaction_isolation = 'serializable'; ")
	r.s.MustDo("postgres", "select pg_reload_conf()")
	l.goesOn(20)
	l.stop()
	r.clean()
}

// Time-outs of the server are failures of which it is known that they had no
// effect, and idle sessions that are ended cost nothing.
func TestServerTimeouts(t *testing.T) {
	t.Parallel()
	r := newRig(t, &servers.PostgresConfig{Settings: []string{
		"statement_timeout=2s", "lock_timeout=1s", "idle_in_transaction_session_timeout=200ms",
	}})
	b := r.backend()
	lease, err := b.Acquire(t.Context(), driver.Request{Key: "k", Owner: "a", TTL: time.Minute, Limit: 1})
	if err != nil {
		t.Fatal(err)
	}
	pool := r.pool("&lock_timeout=0&statement_timeout=0&idle_in_transaction_session_timeout=0")
	for name, timeout := range map[string]string{"lock": "&lock_timeout=100", "statement": "&statement_timeout=100&lock_timeout=0"} {
		tx, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tx.Exec(t.Context(), "select from dlm.keys for update"); err != nil {
			t.Fatal(err)
		}
		blocked, err := pglock.New(r.pool(timeout), nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := blocked.Release(t.Context(), lease); !errors.Is(err, driver.ErrNotApplied) {
			t.Errorf("%s: %v", name, err)
		}
		if err := tx.Rollback(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if err := b.Release(t.Context(), lease); err != nil {
		t.Error(err)
	}
	// A lock with renewals outlives sessions that are ended for being idle.
	m := r.manager(r.pool("&idle_session_timeout=300"), nil, nil)
	held := r.take(m, "idle", 6*time.Second)
	waiter := r.later(m, "idle", time.Minute)
	began := time.Now()
	r.until("it was renewed for a while", func() bool { return held.Deadline().Sub(began) > 10*time.Second || held.Err() != nil })
	if err := held.Err(); err != nil {
		t.Fatal(err)
	}
	r.release(held)
	r.release(r.got(waiter))
	r.clean()
}

// A statement that goes on after its caller has gone does not come behind the
// withdrawal.
func TestWithdrawalWaits(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	b := r.backend()
	req := driver.Request{Key: "k", Owner: "first", TTL: time.Minute, Limit: 1, Enqueue: true}
	if _, err := b.Acquire(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	if err := b.Release(t.Context(), driver.Lease{Key: "k", Owner: "first"}); err != nil {
		t.Fatal(err)
	}
	tx, err := r.pool("").Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if _, err := tx.Exec(t.Context(), "select from dlm.keys for update"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	req.Owner = "late"
	if _, err := b.Acquire(ctx, req); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, driver.ErrNotApplied) {
		t.Fatal(err)
	}
	short, cancel2 := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel2()
	if err := b.Release(short, driver.Lease{Key: "k", Owner: "late"}); !errors.Is(err, driver.ErrNotApplied) {
		t.Errorf("the withdrawal did not wait: %v", err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := b.Release(t.Context(), driver.Lease{Key: "k", Owner: "late"}); err != nil {
		t.Fatal(err)
	}
	info, err := b.Inspect(t.Context(), "k")
	if err != nil || len(info.Holders)+len(info.Waiters) != 0 {
		t.Errorf("%+v, %v", info, err)
	}
}

// A server that stands still and one session that does end calls with their
// contexts, and afterwards all goes on.
func TestServerPaused(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	m := r.plain()
	l := r.load(4, m)
	l.goesOn(2)
	r.s.Pause()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	began := time.Now()
	if _, err := r.plain().TryLock(ctx, "k", time.Second); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("it took %v", took)
	}
	r.s.Resume()
	l.goesOn(2)
	l.stop()
	r.clean()
}

// A thousand waiters are served in the order in which they came.
func TestThousandWaiters(t *testing.T) {
	t.Parallel()
	const count = 1000
	r := newRig(t, nil)
	queue := &counter{}
	m := r.manager(r.pool("&pool_max_conns=4"), &dlm.LockConfig{Observer: queue}, nil)
	held := r.take(m, "k", time.Minute)
	var mu sync.Mutex
	var order []int
	var wg sync.WaitGroup
	ctx, cancel := context.WithTimeout(t.Context(), 4*rigPatience)
	defer cancel()
	for i := range count {
		wg.Go(func() {
			l, err := m.AcquireLock(ctx, "k", time.Minute)
			if err != nil {
				t.Errorf("waiter %d: %v", i, err)
				return
			}
			mu.Lock()
			order = append(order, i)
			mu.Unlock()
			r.release(l)
		})
		// So that the order is known.
		r.until("he is in the queue", func() bool { return queue.waiting.Load() == int64(i+1) })
	}
	began := time.Now()
	r.release(held)
	wg.Wait()
	t.Logf("%d waiters were served in %v", count, time.Since(began))
	if !slices.IsSorted(order) || len(order) != count {
		t.Errorf("%d waiters were served, in the order %v", len(order), order)
	}
	r.clean()
}

// What dead processes leave is deleted by calls on other keys, and tokens rise all
// the same.
func TestSweep(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	opts := &pglock.Options{LivenessWindow: 100 * time.Millisecond, KeepTokens: time.Minute}
	b, err := pglock.New(r.pool(""), opts)
	if err != nil {
		t.Fatal(err)
	}
	tokens := map[string]int64{}
	for i := range 30 {
		key := fmt.Sprint("dead", i)
		req := driver.Request{Key: key, Owner: "a", TTL: 50 * time.Millisecond, Limit: 1 + i%2, Enqueue: true}
		lease, err := b.Acquire(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		tokens[key] = lease.Token
		for range 2 {
			req.Owner += "x"
			_, _ = b.Acquire(t.Context(), req)
		}
	}
	// As if a minute had passed, and as if the clock had been far ahead.
	n := 0
	r.until("nothing of them is left", func() bool {
		r.s.MustDo("postgres", "update dlm.keys set stays = 0, last = last + 1000000000000 where key like 'dead%'::bytea and stays <> 0")
		n++
		lease, err := b.Acquire(t.Context(), driver.Request{Key: fmt.Sprint("live", n), Owner: "a", TTL: time.Second, Limit: 1})
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Release(t.Context(), lease); err != nil {
			t.Fatal(err)
		}
		rows := r.s.MustDo("postgres", "select (select count(*) from dlm.keys where key like 'dead%'::bytea) + (select count(*) from dlm.tickets) + (select count(*) from dlm.holds)")
		return rows[0][0] == "0"
	})
	for key, last := range tokens {
		lease, err := b.Acquire(t.Context(), driver.Request{Key: key, Owner: "b", TTL: time.Second, Limit: 1})
		if err != nil {
			t.Fatal(err)
		}
		if lease.Token <= last+1000000000000 {
			t.Errorf("%s: token %d follows %d, which was swept", key, lease.Token, last+1000000000000)
		}
	}
}

// A clock that is set back does not make a lock last for longer than its TTL: here
// the row is made to look as if it had been.
func TestClockSetBack(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	b := r.backend()
	if _, err := b.Acquire(t.Context(), driver.Request{Key: "k", Owner: "a", TTL: time.Second, Limit: 1}); err != nil {
		t.Fatal(err)
	}
	r.s.MustDo("postgres", "update dlm.keys set expires = expires + 3600000000, since = since + 3600000000, last = last + 3600000000, token = token + 3600000000")
	var token int64
	r.until("the key is free", func() bool {
		lease, err := b.Acquire(t.Context(), driver.Request{Key: "k", Owner: "b", TTL: time.Second, Limit: 1})
		if held, ok := errors.AsType[*driver.HeldError](err); ok {
			if held.Remaining > time.Second {
				t.Fatalf("%v remain of a second", held.Remaining)
			}
			token = held.Token
			return false
		}
		if err != nil {
			t.Fatal(err)
		}
		if lease.Token <= token {
			t.Errorf("token %d follows %d", lease.Token, token)
		}
		return true
	})
}

// Through a pooler in transaction mode no notification arrives, which is found
// out; waiters are served all the same. In session mode they do.
func TestListenBehindPgBouncer(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	for _, mode := range []string{"transaction", "session"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			p := servers.StartPgBouncer(t, r.s, mode, 6)
			pool := newPool(t, p.URL("postgres"), nil)
			b, err := pglock.New(pool, nil)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), rigPatience)
			defer cancel()
			up := false
			err = b.Listen(ctx, "m", func(driver.Event) {
				up = true
				cancel()
			})
			if up != (mode == "session") || up != errors.Is(err, context.Canceled) || err == nil {
				t.Errorf("up: %v, %v", up, err)
			}
			r2 := &rig{T: t, s: r.s}
			m := r2.manager(pool, nil, &pglock.Options{PollInterval: 20 * time.Millisecond})
			held := r2.take(m, mode, time.Minute)
			waiter := r2.later(m, mode, time.Minute)
			r2.queued(b, mode, 1)
			r2.release(held)
			r2.release(r2.got(waiter))
		})
	}
}

// Both modes over TLS: locks are handed on, notifications arrive, the death of the
// server is noticed, and nothing goes over a connection without TLS.
func TestOverTLS(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		open func(*rig) *dlm.Manager
	}{
		{"tables", (*rig).plain},
		{"advisory", func(r *rig) *dlm.Manager { return r.advise(r.pool(""), nil, nil) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, &servers.PostgresConfig{TLS: true})
			a, b := c.open(r), c.open(r)
			const ttl = 5 * time.Second
			first := r.take(a, "k", ttl)
			later := r.later(b, "k", ttl)
			r.until("a waiter is in the queue", func() bool {
				info, err := a.GetLock(t.Context(), "k")
				return err == nil && len(info.Waiters) == 1
			})
			rows := r.s.MustDo("postgres", "select ssl::text, count(*) from pg_stat_ssl join pg_stat_activity using (pid) "+
				"where backend_type = 'client backend' group by 1")
			if len(rows) != 1 || rows[0][0] != "true" {
				t.Errorf("sessions over TLS or not: %v", rows)
			}
			r.release(first)
			second := r.got(later)
			if second.Token <= first.Token {
				t.Errorf("token %d after %d", second.Token, first.Token)
			}
			deadline := second.Deadline()
			r.s.Kill()
			select {
			case <-second.Done():
			case <-time.After(time.Until(deadline) + time.Second):
				t.Error("the loss was not told")
			}
		})
	}
}
