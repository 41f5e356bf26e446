package pglock

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/go-dlm/dlm/driver"
)

const (
	// connectPatience bounds how long a session may take to begin.
	connectPatience = 10 * time.Second
	// maxBackoff bounds the pause before the next attempt to begin one.
	maxBackoff = time.Second
	// pinRounds is how often a pooler is tried out.
	pinRounds = 5
	// pinPatience bounds how long one attempt may take.
	pinPatience = 2 * time.Second
	// sweepPause is how often what dead sessions have left is looked for.
	sweepPause = 10 * time.Minute
)

var (
	errSilent = errors.New("pglock: the server does not answer")
	errLeft   = errors.New("pglock: the backend was closed")
)

// stateClaim is the SQLSTATE of our own functions for a session that is not ours.
const stateClaim = "DL002"

// advSession is a session at the server, with the connection that carries it. All
// grants and tickets of a backend belong to one, and end with it. It never comes
// back; the next one has another number.
type advSession struct {
	a      *Advisory
	w      *wire
	number int64
	over   bool // guarded by Advisory.mu
}

// dialing is an attempt to begin a session.
type dialing struct {
	done chan struct{} // closed when err is set
	err  error
}

// ready waits for a session. If there is none, it begins one.
func (a *Advisory) ready(ctx context.Context) (*advSession, error) {
	for {
		a.mu.Lock()
		if a.ended {
			a.mu.Unlock()
			return nil, driver.ErrClosed
		}
		if s := a.session; s != nil {
			a.mu.Unlock()
			return s, nil
		}
		d := a.dialing
		if d == nil {
			d = &dialing{done: make(chan struct{})}
			a.dialing = d
			a.wg.Go(func() { a.begin(d) })
		}
		a.mu.Unlock()
		select {
		case <-d.done:
			if d.err != nil {
				return nil, d.err
			}
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: pglock: not connected: %w", driver.ErrNotApplied, ctx.Err())
		}
	}
}

// begin begins a session, after a pause if it did not succeed the last time.
func (a *Advisory) begin(d *dialing) {
	a.mu.Lock()
	retry := a.retry
	a.mu.Unlock()
	if wait := time.Until(retry); wait > 0 {
		timer := time.NewTimer(wait)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-a.ctx.Done():
		}
	}
	s, err := a.connect()
	a.mu.Lock()
	defer a.mu.Unlock()
	defer close(d.done)
	a.dialing = nil
	switch {
	case a.ended:
		d.err = driver.ErrClosed
		if s != nil {
			a.wg.Go(func() { s.w.leave(errLeft) })
		}
		return
	case err == nil && s.over:
		err = fmt.Errorf("%w: %w", driver.ErrNotApplied, errCut)
	}
	if err != nil {
		a.failures = min(a.failures+1, 10)
		a.retry = time.Now().Add(min(maxBackoff, 25*time.Millisecond<<a.failures))
		d.err = err
		return
	}
	a.failures, a.retry = 0, time.Time{}
	a.session, a.former = s, 0
	a.wg.Go(s.watch)
	for _, l := range a.listeners {
		l.push(driver.Event{Kind: driver.EventUp})
	}
}

// connect begins a session. Nothing is done for a call yet, so no failure is of
// unknown outcome.
func (a *Advisory) connect() (s *advSession, err error) {
	defer func() {
		if p := recover(); p != nil {
			s, err = nil, fmt.Errorf("%w: pglock: making a connection panicked: %v", driver.ErrNotApplied, p)
		}
	}()
	ctx, cancel := context.WithTimeout(a.ctx, connectPatience)
	defer cancel()
	conn, err := dialAs(ctx, a.pool)
	if err == nil {
		if s, err = a.enlist(ctx, conn); err == nil {
			return s, nil
		}
		hangUp(conn)
	}
	err = a.opts.classify(err)
	if errors.Is(err, driver.ErrInvalid) || errors.Is(err, driver.ErrNotApplied) {
		return nil, err
	}
	return nil, fmt.Errorf("%w: %w", driver.ErrNotApplied, err)
}

// asks makes statements on a connection that nothing else uses.
func asks(conn *pgx.Conn) asker {
	return func(ctx context.Context, text string) ([]row, error) {
		results, err := conn.PgConn().Exec(ctx, text).ReadAll()
		if err != nil {
			return nil, err
		}
		if len(results) == 0 {
			return nil, errStrange
		}
		return rows(results[len(results)-1]), nil
	}
}

// enlist makes a session of a connection.
func (a *Advisory) enlist(ctx context.Context, conn *pgx.Conn) (*advSession, error) {
	ask := asks(conn)
	cells, err := ask(ctx, lookSQL)
	if err != nil {
		return nil, err
	}
	if len(cells) != 1 || len(cells[0]) != 5 {
		return nil, errStrange
	}
	f := &scanner{row: cells[0]}
	if v := f.int(); v < oldest {
		return nil, problem(ProblemTooOld, nil, "PostgreSQL %d.%d, must be %d or later", v/10000, v/100%100, oldest/10000)
	}
	f.text() // the isolation level is set below
	pid := f.int()
	if f.text() == "true" || f.text() == "on" {
		return nil, passing(ProblemReadOnly, nil, "the server is a standby, or default_transaction_read_only is on")
	}
	if err := a.opts.version(ctx, ask); err != nil {
		return nil, err
	}
	if err := a.opts.rights(ctx, ask, neededForAdvisory); err != nil {
		return nil, err
	}
	if pid != int64(conn.PgConn().PID()) {
		// Another one has answered than let us in: a pooler.
		if err := a.pinned(ctx, conn, pid); err != nil {
			return nil, err
		}
	}
	s := &advSession{a: a}
	for s.number == 0 {
		var b [8]byte
		_, _ = rand.Read(b[:]) // it never fails
		s.number = int64(binary.BigEndian.Uint64(b[:]) >> 1)
	}
	sent := time.Now()
	if err := a.claim(ctx, ask, s.number); err != nil {
		return nil, err
	}
	for _, st := range a.st.all() {
		if _, err := conn.PgConn().Prepare(ctx, st.name, st.sql, nil); err != nil {
			return nil, err
		}
	}
	if err := conn.PgConn().SyncConn(ctx); err != nil {
		return nil, err
	}
	hc, err := conn.PgConn().Hijack()
	if err != nil {
		return nil, err
	}
	keepAlive(hc.Conn, a.timeout)
	s.w = newWire(hc, sent, s.notified, s.ended)
	return s, nil
}

// sessionSettings are the settings of the session, as far as the server knows
// them. They are those that could end it, or hold it up, or change what a
// statement sees.
func (a *Advisory) sessionSettings() string {
	seconds := func(d time.Duration) int64 { return max(1, int64((d+time.Second-1)/time.Second)) }
	var values []string
	for _, v := range []struct {
		name  string
		value any
	}{
		{"default_transaction_isolation", "read committed"},
		{"default_transaction_read_only", "off"},
		{"statement_timeout", 0},
		{"idle_in_transaction_session_timeout", 0},
		{"idle_session_timeout", 0},
		{"transaction_timeout", 0},
		// Whatever blocks a call holds up all behind it.
		{"lock_timeout", "1s"},
		// The tables are small, and looked into through their indexes.
		{"enable_seqscan", "off"},
		{"enable_bitmapscan", "off"},
		{"jit", "off"},
		// How long the server keeps the session of a client that has vanished: never
		// shorter than the backend counts on, see left. What it has sent may be under
		// way for as long as the backend has patience.
		{"tcp_keepalives_idle", seconds(a.timeout / 2)},
		{"tcp_keepalives_interval", seconds(a.timeout / 8)},
		{"tcp_keepalives_count", 4},
		{"tcp_user_timeout", (a.timeout + a.timeout/4*3).Milliseconds()},
	} {
		values = append(values, fmt.Sprintf("('%s', '%v')", v.name, v.value))
	}
	return `SELECT count(set_config(s.name, v.value, false)) FROM pg_settings s
		JOIN (VALUES ` + strings.Join(values, ", ") + `) AS v(name, value) ON v.name = s.name`
}

// claim makes the session ours, which succeeds once in the life of a session:
// then no two backends can have the same one, whatever stands in between. Advisory
// locks can be taken twice in one session.
func (a *Advisory) claim(ctx context.Context, ask asker, number int64) error {
	own := strconv.FormatInt(number, 10)
	cells, err := ask(ctx, `SELECT set_config('dlm_adv.session',
		coalesce(nullif(current_setting('dlm_adv.session', true), ''), '`+own+`'), false)`)
	if err != nil {
		return err
	}
	if len(cells) != 1 || string(cells[0][0]) != own {
		return errShared("another backend has used the same session")
	}
	// Tokens must not fall after a crash: the sequence is written ahead, seldom.
	if _, err := ask(ctx, a.sessionSettings()+`;
		SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off';
		SELECT pg_advisory_lock(`+own+`); LISTEN dlm_s`+own); err != nil && !errors.Is(err, errStrange) {
		return err
	}
	a.mu.Lock()
	former := a.former
	a.mu.Unlock()
	if former != 0 {
		// The server may not know yet that the session before this one is at its end,
		// and would keep its locks for a while. Nobody here has them any more.
		if _, err := ask(ctx, fmt.Sprintf(`SELECT pg_terminate_backend(l.pid) FROM pg_locks l
			WHERE l.locktype = 'advisory' AND l.granted AND l.mode = 'ExclusiveLock' AND l.objsubid = 1
			AND l.classid = %d AND l.objid = %d AND l.pid <> pg_backend_pid()
			AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())`,
			uint32(former>>32), uint32(former))); err != nil && state(err) == "" {
			return err // a refusal costs time, and nothing else
		}
	}
	_, err = ask(ctx, "SELECT "+a.opts.name("adv_sweep_v1")+"("+own+")")
	return err
}

func errShared(detail string) error {
	return problem(ProblemPooling, nil, "%s: a pooler in transaction mode stands before the server, behind which advisory locks "+
		"are everybody's; connect to the server itself, or to a pool in session mode", detail)
}

// pinned looks whether a pooler gives us a session of our own. In transaction mode
// it takes the session away after each transaction and gives it to others. So
// somebody else begins a transaction: then either he has got our session, or we
// are given another one, unless there are many more that both could get, which is
// why it is tried several times. What is not found out here, every call finds out
// for itself (adv_claim_v1).
func (a *Advisory) pinned(ctx context.Context, conn *pgx.Conn, pid int64) error {
	// A pool in session mode may have no session left for him.
	brief, cancel := context.WithTimeout(ctx, pinPatience)
	defer cancel()
	other, err := dialAs(brief, a.pool)
	if err != nil {
		return ctx.Err()
	}
	defer hangUp(other)
	number := func(ctx context.Context, conn *pgx.Conn, text string) (int64, error) {
		cells, err := asks(conn)(ctx, text)
		if err != nil {
			return 0, err
		}
		if len(cells) != 1 {
			return 0, errStrange
		}
		f := &scanner{row: cells[0]}
		return f.int(), f.err
	}
	for range pinRounds {
		theirs, err := number(brief, other, "BEGIN; SELECT pg_backend_pid()")
		if err != nil {
			return ctx.Err()
		}
		if theirs == pid {
			return errShared("somebody else was given the same session")
		}
		ours, err := number(ctx, conn, "SELECT pg_backend_pid()")
		if err != nil {
			return err
		}
		if ours != pid {
			return errShared(fmt.Sprintf("the session was %d and is %d", pid, ours))
		}
		if _, err := asks(other)(brief, "COMMIT"); err != nil {
			return ctx.Err()
		}
	}
	return nil
}

// keepAlive has a connection notice that the other side has vanished, before the
// other side gives us up.
func keepAlive(conn net.Conn, timeout time.Duration) {
	if t, ok := conn.(*tls.Conn); ok {
		conn = t.NetConn()
	}
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return // a connection within the machine, or one of the user's making
	}
	// Where it is not to be had, the backend's own watch does it.
	_ = tcp.SetKeepAliveConfig(net.KeepAliveConfig{
		Enable: true, Idle: max(time.Second, timeout/4), Interval: max(time.Second, timeout/16), Count: 4,
	})
	setUserTimeout(tcp, timeout/2)
}

// dialAs makes a connection as a pool does.
func dialAs(ctx context.Context, pool *pgxpool.Pool) (*pgx.Conn, error) {
	config := pool.Config()
	config.ConnConfig.OnNotification = nil
	if config.BeforeConnect != nil {
		if err := config.BeforeConnect(ctx, config.ConnConfig); err != nil {
			return nil, err
		}
	}
	conn, err := pgx.ConnectConfig(ctx, config.ConnConfig)
	if err != nil {
		return nil, err
	}
	if config.AfterConnect != nil {
		if err := config.AfterConnect(ctx, conn); err != nil {
			hangUp(conn)
			return nil, err
		}
	}
	return conn, nil
}

// ask makes a call. It does not end before the answer, or the session.
func (s *advSession) ask(st *statement, args ...any) ([]row, error) {
	return s.check(s.w.ask(st.name, append([]any{s.number}, args...)...))
}

// askWithin makes a call that changes nothing, and may be left alone.
func (s *advSession) askWithin(ctx context.Context, st *statement, args ...any) ([]row, error) {
	r := s.w.start(st.name, append([]any{s.number}, args...)...)
	select {
	case <-r.done:
		return s.check(r.rows, r.err)
	case <-ctx.Done():
		return nil, fmt.Errorf("pglock: %w: %w", errNoReply, ctx.Err())
	}
}

// check looks at an answer.
func (s *advSession) check(list []row, err error) ([]row, error) {
	if state(err) == stateClaim {
		err = errShared("the session has changed")
		s.w.fail(err)
	}
	return list, s.a.opts.classify(err)
}

// beat makes sure that the session lives, and is ours.
func (s *advSession) beat(ctx context.Context) error {
	list, err := s.askWithin(ctx, s.a.st.beat)
	if err != nil {
		return err
	}
	return s.ours(list)
}

func (s *advSession) ours(list []row) error {
	if len(list) == 1 && string(list[0][0]) == "true" {
		return nil
	}
	err := errShared("the session has changed")
	s.w.fail(err)
	return err
}

// left is for how long after a moment the session surely lasts.
//
// The server keeps it for at least the time-out after it has last heard of us
// (tcp_keepalives_idle and the like), which was not before the last call was sent
// that it has answered. It may also give us up since something that it has sent is
// not acknowledged (tcp_user_timeout). What came with that answer or before it was
// not sent more than three quarters of the time-out earlier than the call, as watch
// does not wait for an answer so long.
func (s *advSession) left(from time.Time) time.Duration {
	return s.w.proven().Add(s.a.timeout).Sub(from)
}

// lease makes the lease of a grant whose call began at start. It lasts as long as
// its TTL or, if that is shorter, as the session surely does, which is said by
// Age. Package dlm takes off a hundredth of the TTL for clocks that differ; of
// that only the share of what is left is due.
func (s *advSession) lease(key, owner string, mode driver.Mode, token int64, ttl time.Duration, start time.Time) driver.Lease {
	l := driver.Lease{Key: key, Owner: owner, Token: token, TTL: ttl, Mode: mode}
	if left := s.left(start); left < ttl {
		l.Age = (ttl - left) / 100 * 99
	}
	return l
}

// watch has the session tried when it is quiet, and ends it if the server does not
// answer for half of the time-out. Time in which this process did not run counts as
// one tick, since the answer may have come meanwhile.
func (s *advSession) watch() {
	a := s.a
	pause := min(a.timeout/32, time.Second)
	tick := time.NewTicker(pause)
	defer tick.Stop()
	var waiting, beat *reply
	var ticks int
	swept := time.Now()
	for {
		select {
		case <-s.w.quit:
			return
		case <-tick.C:
		}
		if beat != nil {
			select {
			case <-beat.done:
				if beat.err == nil {
					_ = s.ours(beat.rows) // which ends the session otherwise
				}
				beat = nil
			default:
			}
		}
		oldest := s.w.head()
		switch {
		case oldest == nil || oldest != waiting:
			waiting, ticks = oldest, 0
		case time.Duration(ticks)*pause >= a.timeout/2:
			s.w.fail(errSilent)
			return
		default:
			ticks++
		}
		if beat == nil && oldest == nil && time.Since(s.w.quietSince()) >= min(quiet, a.timeout/8) {
			beat = s.w.start(a.st.beat.name, s.number)
		}
		if time.Since(swept) >= sweepPause {
			swept = time.Now()
			s.w.start(a.st.sweep.name, s.number) // what fails is done the next time, or by others
		}
	}
}

// ended takes everything away that belonged to the session.
func (s *advSession) ended(err error) {
	a := s.a
	a.mu.Lock()
	defer a.mu.Unlock()
	s.over = true
	if a.session != s {
		return
	}
	a.session, a.former = nil, s.number
	for _, k := range a.keys {
		for _, g := range k.grants {
			a.push(g.manager, driver.Event{
				Kind: driver.EventLost, Lease: driver.Lease{Key: k.key, Owner: g.owner},
				Err: &driver.LostError{Key: k.key, Token: g.token, Reason: driver.ReasonSession, Cause: err},
			})
			a.drop(k, g)
		}
		for _, t := range k.tickets {
			a.push(t.manager, driver.Event{Kind: driver.EventWake, Lease: driver.Lease{Key: k.key, Owner: t.owner}})
			a.forgetTicket(k, t)
		}
		a.tidy(k)
	}
}

// notified takes a message of adv_wake_v1 or adv_force_v1.
func (s *advSession) notified(payload string) {
	what, text, _ := strings.Cut(payload, " ")
	number, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return
	}
	a := s.a
	a.mu.Lock()
	defer a.mu.Unlock()
	if s.over {
		return
	}
	switch what {
	case "w":
		if t := a.tickets[number]; t != nil {
			a.push(t.manager, driver.Event{Kind: driver.EventWake, Lease: driver.Lease{Key: t.k.key, Owner: t.owner}})
		}
	case "f":
		if g := a.grants[number]; g != nil && !a.ended {
			a.wg.Go(func() { a.giveWay(s, g) })
		}
	}
}
