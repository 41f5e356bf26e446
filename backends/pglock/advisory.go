package pglock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
)

// AdvisoryOptions configures a backend with advisory locks. Nil means the
// defaults, and so does the zero value of each field.
type AdvisoryOptions struct {
	// Schema and Prefix are as in [Options].
	Schema, Prefix string
	// SessionTimeout is how long the server keeps at least, and up to twice as long,
	// the session of a client that has vanished without a word, as when its machine
	// lost power, with all locks that belong to it; a process that dies is noticed at
	// once. No lock has a deadline further away than that. A server that is silent for
	// half of it counts as lost. It must be between 2s and 1h. Defaults to 30s.
	SessionTimeout time.Duration
}

const (
	defaultSessionTimeout = 30 * time.Second
	minSessionTimeout     = 2 * time.Second
	maxSessionTimeout     = time.Hour
)

// withDefaults checks the options and fills in the defaults.
func (o *AdvisoryOptions) withDefaults() (Options, time.Duration, error) {
	var opts AdvisoryOptions
	if o != nil {
		opts = *o
	}
	names, err := (&Options{Schema: opts.Schema, Prefix: opts.Prefix}).withDefaults()
	if err != nil {
		return names, 0, err
	}
	if opts.SessionTimeout == 0 {
		opts.SessionTimeout = defaultSessionTimeout
	}
	if d := opts.SessionTimeout; d < minSessionTimeout || d > maxSessionTimeout {
		return names, 0, invalidf("AdvisoryOptions.SessionTimeout is %v, must be between %v and %v", d, minSessionTimeout, maxSessionTimeout)
	}
	return names, opts.SessionTimeout, nil
}

// CollisionError says that two keys, of which one is in use, have the same number
// (64 bits of a hash) and so the same advisory lock. It matches
// [driver.ErrInvalid]: the one can be locked when the other is free.
type CollisionError struct{ Key, Other string }

func (e *CollisionError) Error() string {
	return fmt.Sprintf("pglock: key %q has the same advisory lock as key %q, which is in use", e.Key, e.Other)
}

// Unwrap returns [driver.ErrInvalid].
func (e *CollisionError) Unwrap() error { return driver.ErrInvalid }

// Advisory keeps locks as advisory locks of one session at the server, on a
// connection of its own, and takes up another one when that is lost. It is safe for
// concurrent use.
type Advisory struct {
	pool    *pgxpool.Pool
	opts    Options
	timeout time.Duration
	st      advStatements
	number  func(key string) int64
	ctx     context.Context // ends with the backend
	cancel  context.CancelFunc
	wg      sync.WaitGroup

	mu      sync.Mutex
	ended   bool
	session *advSession // nil while there is none
	dialing *dialing    // an attempt to get one
	// former is the number of the session that was lost, until there is another.
	former    int64
	failures  int
	retry     time.Time // when the next attempt is due
	keys      map[int64]*advKey
	grants    map[int64]*advGrant  // by token
	tickets   map[int64]*advTicket // by number
	listeners map[string]*mailbox
}

var (
	_ driver.Backend   = (*Advisory)(nil)
	_ driver.Notifier  = (*Advisory)(nil)
	_ driver.Inspector = (*Advisory)(nil)
	_ driver.Forcer    = (*Advisory)(nil)
	_ driver.Checker   = (*Advisory)(nil)
)

// advKey is what the owners of this backend have on a key. It is kept by number,
// since that is what the server locks. All fields are guarded by Advisory.mu; what
// the server has for it is changed only by whoever has the turn: the session is one
// for all owners, and the server would grant it the same lock again.
type advKey struct {
	number  int64
	key     string
	busy    bool            // somebody has the turn
	queue   []chan struct{} // who waits for it, in order
	first   int             // so many of them, at its head, give something up
	grants  map[string]*advGrant
	tickets map[string]*advTicket
}

// advGrant is a grant to an owner of this backend.
type advGrant struct {
	k       *advKey
	owner   string
	token   int64
	mode    driver.Mode
	manager string
	orphan  *time.Timer // ends it, as its caller had gone when it came
}

// advTicket is the place of an owner of this backend in a queue.
type advTicket struct {
	k       *advKey
	owner   string
	ticket  int64
	mode    driver.Mode
	manager string
}

// NewAdvisory returns a backend with a session of its own, on a connection that it
// makes as the pool makes its own; it does not take one of the pool's, which may
// be closed. It asks the server nothing yet: what does not do for locks is an error
// of the first call.
func NewAdvisory(pool *pgxpool.Pool, opts *AdvisoryOptions) (*Advisory, error) {
	if pool == nil {
		return nil, invalidf("pool is nil")
	}
	names, timeout, err := opts.withDefaults()
	if err != nil {
		return nil, err
	}
	a := &Advisory{
		pool: pool, opts: names, timeout: timeout, st: names.advStatements(),
		keys: make(map[int64]*advKey), grants: make(map[int64]*advGrant), tickets: make(map[int64]*advTicket),
		listeners: make(map[string]*mailbox),
	}
	a.number = names.number
	a.ctx, a.cancel = context.WithCancel(context.Background())
	return a, nil
}

// NewAdvisoryLockManager returns a manager over a new backend. A nil cfg or nil
// opts mean the defaults.
func NewAdvisoryLockManager(pool *pgxpool.Pool, cfg *dlm.LockConfig, opts *AdvisoryOptions) (*dlm.Manager, error) {
	a, err := NewAdvisory(pool, opts)
	if err != nil {
		return nil, err
	}
	m, err := dlm.NewManager(a, cfg)
	if err != nil {
		return nil, errors.Join(err, a.Close())
	}
	return m, nil
}

// number is the number of a key's lock.
func (o *Options) number(key string) int64 {
	n := lockNumber("dlm advisory " + o.Schema + "\x00" + o.Prefix + "\x00" + key)
	if n == 0 {
		n = 1 // 0 stands for all keys
	}
	return n
}

// advStatements are what the backend asks the server. The first parameter of each
// is the number of the session.
type advStatements struct{ acquire, release, withdraw, wake, undo, held, force, list, beat, sweep *statement }

func (s *advStatements) all() []*statement {
	return []*statement{s.acquire, s.release, s.withdraw, s.wake, s.undo, s.held, s.force, s.list, s.beat, s.sweep}
}

func (o *Options) advStatements() advStatements {
	st := func(name, text string) *statement {
		return &statement{"dlm_adv_" + name, strings.ReplaceAll(text, "FUNCTION", o.name("adv_"+name+"_v1"))}
	}
	return advStatements{
		acquire: st("acquire", `SELECT a.status, a.number, encode(a.holder, 'hex'), a.place, a.ticket, a.swept
			FROM FUNCTION($1::bigint, $2::bigint, $3::bytea, $4::bytea, $5::bigint::int, $6::bigint::int, $7::bigint, $8::bigint::int) a`),
		release:  st("release", `SELECT FUNCTION($1::bigint, $2::bigint, $3::bigint, $4::bigint::int)`),
		withdraw: st("withdraw", `SELECT FUNCTION($1::bigint, $2::bigint, $3::bigint, $4::bytea, $5::bytea)`),
		wake:     st("wake", `SELECT FUNCTION($1::bigint, $2::bigint)`),
		undo:     st("undo", `SELECT FUNCTION($1::bigint, $2::bigint, $3::bigint::int)`),
		held:     st("held", `SELECT array_to_string(FUNCTION($1::bigint, string_to_array($2::text, ',')), ',')`),
		force: st("force", `SELECT encode(a.owner, 'hex'), a.token, a.mode, a.held, a.pid
			FROM FUNCTION($1::bigint, $2::bigint, $3::bytea, $4::bigint) a`),
		list: st("list", `SELECT encode(a.key, 'hex'), a.what, encode(a.owner, 'hex'), a.number, a.mode, a.age
			FROM FUNCTION($1::bigint, $2::bigint, $3::bytea, CASE WHEN $4::bytea = '' THEN NULL ELSE $4::bytea END, $5::bytea, $6::bigint) a`),
		beat:  st("beat", `SELECT (current_setting('dlm_adv.session', true) = $1::bigint::text)::text`),
		sweep: st("sweep", `SELECT FUNCTION($1::bigint)`),
	}
}

// neededForAdvisory are the rights that advisory locks need.
var neededForAdvisory = []need{
	{"meta", "SELECT"},
	{"adv_holds", "SELECT INSERT UPDATE DELETE"},
	{"adv_tickets", "SELECT INSERT UPDATE DELETE"},
	{"adv_numbers", "USAGE"},
}

// Properties implements [driver.Backend].
func (a *Advisory) Properties() driver.Properties {
	return driver.Properties{
		Name:          "postgres-advisory",
		Tokens:        driver.TokensStrict,
		FairQueue:     true,
		SharedMode:    true,
		SessionLeases: true,
	}
}

// Close implements [driver.Backend]. It ends the session, and with it all grants
// and tickets. The pool stays open.
func (a *Advisory) Close() error {
	a.mu.Lock()
	s := a.session
	if !a.ended {
		a.ended = true
		a.cancel()
		for _, g := range a.grants {
			g.claim()
		}
	}
	a.mu.Unlock()
	if s != nil {
		s.w.leave(errLeft)
	}
	a.wg.Wait()
	return nil
}

// enter begins a call.
func (a *Advisory) enter(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%w: %w", driver.ErrNotApplied, err)
	}
	if a.ctx.Err() != nil {
		return driver.ErrClosed
	}
	return nil
}

// use returns what is known of a key. The mutex is held.
func (a *Advisory) use(key string) (*advKey, error) {
	number := a.number(key)
	k := a.keys[number]
	if k == nil {
		k = &advKey{number: number, key: key, grants: make(map[string]*advGrant), tickets: make(map[string]*advTicket)}
		a.keys[number] = k
	}
	if k.key != key {
		return nil, &CollisionError{Key: key, Other: k.key}
	}
	return k, nil
}

// tidy forgets a key of which nothing is known. The mutex is held.
func (a *Advisory) tidy(k *advKey) {
	if !k.busy && len(k.grants) == 0 && len(k.tickets) == 0 && a.keys[k.number] == k {
		delete(a.keys, k.number)
	}
}

// turn waits for the turn on a key. Who gives something up comes first: all
// others wait for that.
func (a *Advisory) turn(ctx context.Context, key string, first bool) (*advKey, error) {
	a.mu.Lock()
	k, err := a.use(key)
	if err != nil {
		a.mu.Unlock()
		return nil, err
	}
	if !k.busy {
		k.busy = true
		a.mu.Unlock()
		return k, nil
	}
	mine := make(chan struct{})
	if first {
		k.queue = slices.Insert(k.queue, k.first, mine)
		k.first++
	} else {
		k.queue = append(k.queue, mine)
	}
	a.mu.Unlock()
	select {
	case <-mine:
		return k, nil
	case <-ctx.Done():
	case <-a.ctx.Done():
	}
	a.mu.Lock()
	if i := slices.Index(k.queue, mine); i >= 0 {
		k.queue = slices.Delete(k.queue, i, i+1)
		if i < k.first {
			k.first--
		}
		a.mu.Unlock()
	} else { // it came all the same
		a.mu.Unlock()
		a.pass(k)
	}
	if a.ctx.Err() != nil {
		return nil, driver.ErrClosed
	}
	return nil, fmt.Errorf("%w: pglock: an earlier request for the key is not answered: %w", driver.ErrNotApplied, ctx.Err())
}

// pass gives the turn to the next one.
func (a *Advisory) pass(k *advKey) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(k.queue) > 0 {
		close(k.queue[0])
		k.queue = k.queue[1:]
		k.first = max(0, k.first-1)
		return
	}
	k.busy = false
	a.tidy(k)
}

// inTurn runs f when it is the key's turn. If the context ends meanwhile it comes
// back, and f goes on; late then gets what f has returned.
func inTurn[T any](ctx context.Context, a *Advisory, key string, first bool, f func(k *advKey) (T, error), late func(T)) (T, error) {
	var none T
	k, err := a.turn(ctx, key, first)
	if err != nil {
		return none, err
	}
	type answer struct {
		value T
		err   error
	}
	var (
		done = make(chan struct{})
		got  answer
		gone bool // nobody waits any more; guarded by Advisory.mu
		over bool
	)
	run := func() {
		defer close(done)
		defer a.pass(k)
		defer func() {
			if p := recover(); p != nil {
				got.err = fmt.Errorf("pglock: panic: %v", p)
			}
			a.mu.Lock()
			defer a.mu.Unlock()
			over = true
			if gone && got.err == nil && late != nil {
				late(got.value)
			}
		}()
		got.value, got.err = f(k)
	}
	a.mu.Lock()
	if a.ended {
		a.mu.Unlock()
		a.pass(k)
		return none, driver.ErrClosed
	}
	a.wg.Go(run)
	a.mu.Unlock()
	select {
	case <-done:
	case <-ctx.Done():
		a.mu.Lock()
		gone = !over
		a.mu.Unlock()
		if gone {
			return none, fmt.Errorf("pglock: %w: %w", errNoReply, ctx.Err())
		}
	}
	if got.err != nil {
		return none, a.left(got.err)
	}
	return got.value, nil
}

// left says of a failure that comes of Close that it does. The server may have ended
// the connection before this side did.
func (a *Advisory) left(err error) error {
	if errors.Is(err, errLeft) || a.ctx.Err() != nil && errors.Is(err, errCut) {
		return fmt.Errorf("%w: %w", driver.ErrClosed, err)
	}
	return err
}

// Acquire implements [driver.Backend].
func (a *Advisory) Acquire(ctx context.Context, req driver.Request) (driver.Lease, error) {
	start := time.Now()
	if err := a.enter(ctx); err != nil {
		return driver.Lease{}, err
	}
	if req.Limit > 1 {
		return driver.Lease{}, fmt.Errorf("%w: %w: pglock: several permits as advisory locks", driver.ErrInvalid, errors.ErrUnsupported)
	}
	if _, err := a.ready(ctx); err != nil {
		return driver.Lease{}, err
	}
	return inTurn(ctx, a, req.Key, false,
		func(k *advKey) (driver.Lease, error) { return a.acquire(ctx, k, req, start) },
		func(l driver.Lease) { a.orphaned(l) })
}

// want is whether the server is to be asked for the lock: 0 if it is another
// owner's of this backend, 2 if it is shared with one, and else 1.
func (k *advKey) want(mode driver.Mode) int64 {
	for _, g := range k.grants {
		if mode == driver.Shared && g.mode == driver.Shared {
			return 2
		}
		return 0
	}
	return 1
}

// acquire is the part of Acquire that its caller may not live to see.
func (a *Advisory) acquire(ctx context.Context, k *advKey, req driver.Request, start time.Time) (driver.Lease, error) {
	if err := ctx.Err(); err != nil {
		return driver.Lease{}, fmt.Errorf("%w: %w", driver.ErrNotApplied, err)
	}
	a.mu.Lock()
	s := a.session
	if s == nil {
		a.mu.Unlock()
		return driver.Lease{}, fmt.Errorf("%w: %w", driver.ErrNotApplied, errCut)
	}
	g, t := k.grants[req.Owner], k.tickets[req.Owner]
	if g != nil && g.mode != req.Mode || t != nil && t.mode != req.Mode {
		a.mu.Unlock()
		return driver.Lease{}, invalidf("the owner is on key %q in another mode", req.Key)
	}
	if g != nil {
		g.claim()
		g.manager = req.Manager
		a.mu.Unlock()
		return a.again(s, g, req, start)
	}
	want, ticket := k.want(req.Mode), int64(0)
	if t != nil {
		t.manager = req.Manager
		ticket = t.ticket
	}
	if want == 0 && !req.Enqueue && t == nil {
		defer a.mu.Unlock()
		return driver.Lease{}, k.held()
	}
	a.mu.Unlock()
	made := false
	for {
		var enqueue int64
		if req.Enqueue {
			enqueue = 1
		}
		rows, err := s.ask(a.st.acquire, k.number, bytea(req.Key), bytea(req.Owner), int64(req.Mode), want, ticket, enqueue)
		if err != nil {
			if want == 1 {
				s.undo(k, req.Mode)
			}
			return driver.Lease{}, unconfirmed(made, err)
		}
		if len(rows) != 1 || len(rows[0]) != 6 {
			s.w.fail(errStrange)
			return driver.Lease{}, errStrange
		}
		f := &scanner{row: rows[0]}
		status, number, holder, place, queued, swept := f.int(), f.int(), f.hex(), f.int(), f.int(), f.text()
		if f.err != nil || status != 1 && status != 2 && status != 5 {
			s.w.fail(errStrange)
			return driver.Lease{}, errStrange
		}
		if swept == "t" || swept == "true" {
			s.w.start(a.st.wake.name, s.number, k.number) // else they look for themselves, somewhat later
		}
		a.mu.Lock()
		if s.over {
			a.mu.Unlock()
			return driver.Lease{}, errCut
		}
		switch {
		case status == 1:
			defer a.mu.Unlock()
			if t := k.tickets[req.Owner]; t != nil {
				a.forgetTicket(k, t)
			}
			g := &advGrant{k: k, owner: req.Owner, token: number, mode: req.Mode, manager: req.Manager}
			k.grants[g.owner], a.grants[g.token] = g, g
			return s.lease(req.Key, req.Owner, req.Mode, number, req.TTL, start), nil
		case status == 5:
			a.mu.Unlock()
			return driver.Lease{}, unconfirmed(made, &CollisionError{Key: req.Key, Other: holder})
		}
		fresh := queued != ticket
		if fresh {
			made = true
			if t := k.tickets[req.Owner]; t != nil {
				a.forgetTicket(k, t)
			}
			t := &advTicket{k: k, owner: req.Owner, ticket: queued, mode: req.Mode, manager: req.Manager}
			k.tickets[t.owner], a.tickets[t.ticket] = t, t
			ticket = queued
		}
		a.mu.Unlock()
		// Whoever released the key before the ticket was committed has not seen it,
		// and wakes nobody: so it is tried again.
		if !fresh {
			return driver.Lease{}, &driver.HeldError{Holder: holder, Token: number, Position: int(place)}
		}
	}
}

// unconfirmed makes an error that says "had no effect" one that does not, if the
// call has made a ticket before it failed: nobody would withdraw it otherwise.
func unconfirmed(made bool, err error) error {
	if !made || !errors.Is(err, driver.ErrNotApplied) && !errors.Is(err, driver.ErrInvalid) {
		return err
	}
	return fmt.Errorf("pglock: %w about the ticket that was made: %v", errNoReply, err)
}

// held is the refusal for an owner of this backend by another one. The mutex is
// held.
func (k *advKey) held() *driver.HeldError {
	e := &driver.HeldError{}
	for _, g := range k.grants {
		if e.Token == 0 || g.token < e.Token {
			e.Holder, e.Token = g.owner, g.token
		}
	}
	return e
}

// again answers an owner who has the key.
func (a *Advisory) again(s *advSession, g *advGrant, req driver.Request, start time.Time) (driver.Lease, error) {
	if err := s.beat(a.ctx); err != nil {
		return driver.Lease{}, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.grants[g.token] != g {
		return driver.Lease{}, errCut
	}
	return s.lease(req.Key, req.Owner, g.mode, g.token, req.TTL, start), nil
}

// undo takes back what a failed call may have locked: a lock is not rolled back
// with its transaction. If that fails, too, the session is ended.
func (s *advSession) undo(k *advKey, mode driver.Mode) {
	if _, err := s.ask(s.a.st.undo, k.number, int64(mode)); err != nil {
		s.w.fail(err)
	}
}

// orphaned gives up a grant whose caller had gone when it came, unless the caller
// asks for it again, or withdraws, within its TTL. The mutex is held.
func (a *Advisory) orphaned(l driver.Lease) {
	g := a.grants[l.Token]
	if g == nil || a.ended {
		return
	}
	g.orphan = time.AfterFunc(l.TTL, func() {
		a.mu.Lock()
		if g.orphan != nil && a.grants[g.token] == g && !a.ended {
			a.wg.Go(func() {
				// It fails if the session does, with which the grant ends.
				_, _ = inTurnRelease(a.ctx, a, driver.Lease{Key: l.Key, Owner: l.Owner, Token: l.Token})
			})
		}
		a.mu.Unlock()
	})
}

// claim says that somebody knows of a grant. The mutex is held.
func (g *advGrant) claim() {
	if g.orphan != nil {
		g.orphan.Stop()
		g.orphan = nil
	}
}

// drop forgets a grant. The mutex is held.
func (a *Advisory) drop(k *advKey, g *advGrant) {
	g.claim()
	delete(a.grants, g.token)
	if k.grants[g.owner] == g {
		delete(k.grants, g.owner)
	}
}

// forgetTicket forgets a ticket. The mutex is held.
func (a *Advisory) forgetTicket(k *advKey, t *advTicket) {
	delete(a.tickets, t.ticket)
	if k.tickets[t.owner] == t {
		delete(k.tickets, t.owner)
	}
}

// Release implements [driver.Backend].
func (a *Advisory) Release(ctx context.Context, lease driver.Lease) error {
	if err := a.enter(ctx); err != nil {
		return err
	}
	a.mu.Lock()
	nothing := a.session == nil && (lease.Token != 0 || a.former == 0)
	a.mu.Unlock()
	switch {
	case !nothing:
		// What was lost with a session is withdrawn when the next one begins, as that
		// ends the former at the server.
		if _, err := a.ready(ctx); err != nil {
			return err
		}
	case lease.Token != 0:
		return &driver.LostError{Key: lease.Key, Token: lease.Token, Reason: driver.ReasonSession}
	default:
		return nil
	}
	_, err := inTurnRelease(ctx, a, lease)
	return err
}

func inTurnRelease(ctx context.Context, a *Advisory, lease driver.Lease) (struct{}, error) {
	return inTurn(ctx, a, lease.Key, true, func(k *advKey) (struct{}, error) { return struct{}{}, a.release(ctx, k, lease) }, nil)
}

// release is the part of Release that its caller may not live to see.
func (a *Advisory) release(ctx context.Context, k *advKey, lease driver.Lease) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%w: %w", driver.ErrNotApplied, err)
	}
	a.mu.Lock()
	s, g, t := a.session, k.grants[lease.Owner], k.tickets[lease.Owner]
	a.mu.Unlock()
	switch {
	case s == nil:
		return fmt.Errorf("%w: %w", driver.ErrNotApplied, errCut)
	case lease.Token != 0 && (g == nil || g.token != lease.Token):
		reasons, err := a.reasons(ctx, s, []int64{k.number})
		if err != nil {
			return err
		}
		return &driver.LostError{Key: lease.Key, Token: lease.Token, Reason: reasons[0]}
	case lease.Token == 0 && (t != nil || g == nil):
		if err := a.withdraw(s, k, t, lease.Owner); err != nil {
			return err
		}
	}
	if g == nil {
		return nil
	}
	if err := a.unlock(s, k, g); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.drop(k, g)
	return nil
}

// withdraw gives up a ticket. A nil one may belong to another session of the same
// owner.
func (a *Advisory) withdraw(s *advSession, k *advKey, t *advTicket, owner string) error {
	var ticket int64
	if t != nil {
		ticket = t.ticket
	}
	// The second call is another transaction, see adv_withdraw_v1.
	first := s.w.start(a.st.withdraw.name, s.number, k.number, ticket, bytea(k.key), bytea(owner))
	second := s.w.start(a.st.wake.name, s.number, k.number)
	<-first.done
	<-second.done
	if _, err := s.check(first.rows, first.err); err != nil {
		return err
	}
	if t != nil {
		a.mu.Lock()
		a.forgetTicket(k, t)
		a.mu.Unlock()
	}
	if _, err := s.check(second.rows, second.err); err != nil && state(err) == "" {
		return err
	}
	return nil // who was not woken looks for himself
}

// unlockTries is how often the server may refuse to unlock.
const unlockTries = 3

// unlock gives a grant's lock back at the server, unless other owners share it. If
// the server refuses to, the session is ended: a lock must not stay behind.
func (a *Advisory) unlock(s *advSession, k *advKey, g *advGrant) error {
	a.mu.Lock()
	var how int64
	if others := len(k.grants); others == 0 || others == 1 && k.grants[g.owner] == g {
		how = int64(g.mode) + 1
	}
	a.mu.Unlock()
	for try := 1; ; try++ {
		// It may be repeated: what is unlocked already makes no difference.
		_, err := s.ask(a.st.release, k.number, g.token, how)
		if err == nil {
			return nil
		}
		if try == unlockTries || state(err) == "" {
			s.w.fail(err)
			return fmt.Errorf("pglock: the session was ended with all its locks, as one could not be released: %w", err)
		}
	}
}

// giveWay gives up a grant because somebody wants it by force.
func (a *Advisory) giveWay(s *advSession, g *advGrant) {
	k, err := a.turn(a.ctx, g.k.key, true)
	if err != nil {
		return
	}
	defer a.pass(k)
	a.mu.Lock()
	if a.grants[g.token] != g || s.over {
		a.mu.Unlock()
		return
	}
	// Its owner is told before the server.
	a.drop(k, g)
	a.push(g.manager, driver.Event{
		Kind: driver.EventLost, Lease: driver.Lease{Key: k.key, Owner: g.owner},
		Err: &driver.LostError{Key: k.key, Token: g.token, Reason: driver.ReasonGone},
	})
	a.mu.Unlock()
	_ = a.unlock(s, k, g) // if it fails, the session has ended
}

// reasons says why grants of keys are not there.
func (a *Advisory) reasons(ctx context.Context, s *advSession, numbers []int64) ([]driver.LostReason, error) {
	texts := make([]string, len(numbers))
	for i, n := range numbers {
		texts[i] = strconv.FormatInt(n, 10)
	}
	rows, err := s.askWithin(ctx, a.st.held, strings.Join(texts, ","))
	if err != nil {
		return nil, err
	}
	if len(rows) != 1 || len(rows[0]) != 1 {
		return nil, errStrange
	}
	answers := strings.Split(string(rows[0][0]), ",")
	if len(answers) != len(numbers) {
		return nil, errStrange
	}
	reasons := make([]driver.LostReason, len(numbers))
	for i, answer := range answers {
		reasons[i] = driver.ReasonGone
		if answer == "1" {
			reasons[i] = driver.ReasonTaken
		}
	}
	return reasons, nil
}

// Extend implements [driver.Backend]. One call for the batch shows that the
// session lives.
func (a *Advisory) Extend(ctx context.Context, batch []driver.Renewal) {
	if len(batch) == 0 {
		return
	}
	if err := a.extend(ctx, batch, time.Now()); err != nil {
		for i := range batch {
			batch[i].Err = err
		}
	}
}

func (a *Advisory) extend(ctx context.Context, batch []driver.Renewal, start time.Time) error {
	if err := a.enter(ctx); err != nil {
		return err
	}
	a.mu.Lock()
	s := a.session
	a.mu.Unlock()
	if s == nil {
		for i := range batch {
			l := &batch[i].Lease
			batch[i].Err = &driver.LostError{Key: l.Key, Token: l.Token, Reason: driver.ReasonSession}
		}
		return nil
	}
	if err := s.beat(ctx); err != nil {
		return a.left(err)
	}
	var lost []int
	var numbers []int64
	a.mu.Lock()
	for i := range batch {
		l := &batch[i].Lease
		if g := a.grants[l.Token]; g != nil && !s.over && g.owner == l.Owner && g.k.key == l.Key {
			g.claim()
			*l = s.lease(l.Key, l.Owner, g.mode, l.Token, l.TTL, start)
			batch[i].Err = nil
			continue
		}
		lost, numbers = append(lost, i), append(numbers, a.number(l.Key))
	}
	a.mu.Unlock()
	if len(lost) == 0 {
		return nil
	}
	reasons, err := a.reasons(ctx, s, numbers)
	for i, n := range lost {
		if batch[n].Err = err; err == nil {
			l := &batch[n].Lease
			batch[n].Err = &driver.LostError{Key: l.Key, Token: l.Token, Reason: reasons[i]}
		}
	}
	return nil
}
