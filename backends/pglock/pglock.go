package pglock

import (
	"context"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/driver/flow"
)

// backend is what all backends of the package share.
type backend struct {
	opts  Options
	calls *calls
	setup setup
	// turns lets the acquisitions of the backend ask for a key one after another. All
	// of them would lock the key's row, and the server would have the holder's release
	// wait among them: each that waits there for a second has the server look for
	// deadlocks, which takes the longer the more there are. Releases and renewals do
	// not wait for a turn.
	turns  *flow.Turns
	st     statements
	closed chan struct{}
	ended  atomic.Bool
	// acquiring and releasing are of what is simply granted and given up.
	acquiring, releasing sharer
}

// Backend keeps locks in a database that it reaches through a pool of pgx. It is
// safe for concurrent use.
type Backend struct {
	backend
	pool   *pgxpool.Pool
	pooled pooled
}

// DB keeps locks in a database that it reaches through any driver for
// database/sql. Waiters look again every [Options.PollInterval], as database/sql
// knows no notifications. It is safe for concurrent use.
type DB struct {
	backend
}

var (
	_ driver.Backend   = (*Backend)(nil)
	_ driver.Notifier  = (*Backend)(nil)
	_ driver.Inspector = (*Backend)(nil)
	_ driver.Forcer    = (*Backend)(nil)
	_ driver.Checker   = (*Backend)(nil)
	_ driver.Backend   = (*DB)(nil)
	_ driver.Inspector = (*DB)(nil)
	_ driver.Forcer    = (*DB)(nil)
	_ driver.Checker   = (*DB)(nil)
)

// New returns a backend over a pool, which remains the caller's to close. It asks
// the server nothing yet: what does not do for locks is an error of the first
// call.
func New(pool *pgxpool.Pool, opts *Options) (*Backend, error) {
	if pool == nil {
		return nil, invalidf("pool is nil")
	}
	o, err := opts.withDefaults()
	if err != nil {
		return nil, err
	}
	b := &Backend{pool: pool}
	b.init(o, newPgxDatabase(pool))
	return b, nil
}

// NewDB is [New] for database/sql, with any driver that has parameters of the form
// $1 and errors with a method SQLState, such as pgx/stdlib and lib/pq.
func NewDB(db *sql.DB, opts *Options) (*DB, error) {
	if db == nil {
		return nil, invalidf("db is nil")
	}
	o, err := opts.withDefaults()
	if err != nil {
		return nil, err
	}
	b := &DB{}
	b.init(o, &sqlDatabase{db: db})
	return b, nil
}

// NewLockManager returns a manager over a pool, which remains the caller's to
// close. A nil cfg or nil opts mean the defaults.
func NewLockManager(pool *pgxpool.Pool, cfg *dlm.LockConfig, opts *Options) (*dlm.Manager, error) {
	b, err := New(pool, opts)
	if err != nil {
		return nil, err
	}
	return dlm.NewManager(b, cfg)
}

func (b *backend) init(o Options, db database) {
	b.opts = o
	b.calls = newCalls(db, &b.opts)
	b.setup = setup{turn: make(chan struct{}, 1)}
	b.st = b.opts.statements()
	b.turns = flow.NewTurns(1)
	b.closed = make(chan struct{})
	b.acquiring.init(b.calls, b.st.acquireMany, b.opts.kept())
	b.releasing.init(b.calls, b.st.releaseMany, b.opts.kept())
}

// statements are what the backend asks the server.
type statements struct{ acquire, acquireMany, release, releaseMany, extend, force, list *statement }

func (o *Options) statements() statements {
	st := func(name, text string) *statement {
		return &statement{"dlm_" + name + "_" + o.tag(), strings.ReplaceAll(text, "FUNCTION", o.name(name+"_v1"))}
	}
	return statements{
		acquire: st("acquire", `SELECT a.status, a.number, encode(a.holder, 'hex'), a.remaining, a.place, a.ticket
			FROM FUNCTION($1::bytea, $2::bytea, $3::bigint, $4::text, $5::bigint::int, $6::bigint::int, $7::bigint, $8::bigint) a`),
		acquireMany: st("acquire_many", `SELECT a.place, a.token FROM FUNCTION($1::text, $2::text, $3::text, $4::text, $5::bigint) a`),
		release:     st("release", `SELECT FUNCTION($1::bytea, $2::bytea, $3::bigint, $4::bigint)`),
		releaseMany: st("release_many", `SELECT a FROM FUNCTION($1::text, $2::text, $3::text, $4::bigint) a`),
		extend: st("extend", `SELECT array_to_string(FUNCTION(string_to_array($1::text, ','), string_to_array($2::text, ','),
			string_to_array($3::text, ','), string_to_array($4::text, ','), $5::bigint), ',')`),
		force: st("force", `SELECT encode(a.owner, 'hex'), a.token, a.mode, a.ttl, a.held, a.remaining
			FROM FUNCTION($1::bytea, $2::bigint, $3::bigint) a`),
		list: st("list", `SELECT encode(a.key, 'hex'), a.what, encode(a.owner, 'hex'), a.number, a.mode, a.permits, a.ttl, a.age, a.remaining
			FROM FUNCTION($1::bytea, CASE WHEN $2::bytea = '' THEN NULL ELSE $2::bytea END, $3::bytea, $4::bigint) a`),
	}
}

// Properties implements [driver.Backend].
func (b *backend) Properties() driver.Properties {
	return driver.Properties{
		Name:           "postgres",
		Tokens:         driver.TokensStrict,
		LivenessWindow: b.opts.LivenessWindow,
		FairQueue:      true,
		SharedMode:     true,
		Permits:        true,
		PollInterval:   b.opts.PollInterval,
	}
}

// enter begins a call.
func (b *backend) enter(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%w: %w", driver.ErrNotApplied, err)
	}
	if b.ended.Load() {
		return driver.ErrClosed
	}
	return b.ready(ctx)
}

// Acquire implements [driver.Backend].
func (b *backend) Acquire(ctx context.Context, req driver.Request) (driver.Lease, error) {
	if err := b.enter(ctx); err != nil {
		return driver.Lease{}, err
	}
	var life time.Duration
	if req.Enqueue {
		life = b.opts.ticketLife()
	}
	leave, err := b.turns.Take(ctx, req.Key)
	if err != nil {
		return driver.Lease{}, err
	}
	defer leave()
	if req.Mode == driver.Exclusive && req.Limit == 1 {
		r, end, err := b.acquiring.do(ctx, req.Key, req.Owner,
			hexed(req.Key), hexed(req.Owner), decimal(micros(req.TTL)), b.opts.channel(req.Manager))
		if end == nil {
			if err != nil {
				return driver.Lease{}, err
			}
			f := &scanner{row: r}
			return driver.Lease{Key: req.Key, Owner: req.Owner, Token: f.int(), TTL: req.TTL}, f.err
		}
		defer end()
	}
	rows, err := b.calls.do(ctx, req.Owner, b.st.acquire,
		bytea(req.Key), bytea(req.Owner), micros(req.TTL), b.opts.channel(req.Manager),
		int64(req.Mode), int64(req.Limit), micros(life), b.opts.kept())
	if err != nil {
		return driver.Lease{}, err
	}
	if len(rows) != 1 || len(rows[0]) != 6 {
		return driver.Lease{}, errStrange
	}
	f := &scanner{row: rows[0]}
	status, number := f.int(), f.int()
	held := &driver.HeldError{Holder: f.hex(), Token: number, Remaining: f.micros(), Position: int(f.int()), Ticket: f.int()}
	switch {
	case f.err != nil:
		return driver.Lease{}, f.err
	case status == 1:
		return driver.Lease{Key: req.Key, Owner: req.Owner, Token: number, TTL: req.TTL, Mode: req.Mode}, nil
	case status == 2:
		return driver.Lease{}, held
	case status == 3:
		return driver.Lease{}, &driver.LimitError{Key: req.Key, Want: req.Limit, Have: int(number)}
	case status == 4:
		return driver.Lease{}, invalidf("the owner holds key %q in another mode or with another limit", req.Key)
	}
	return driver.Lease{}, errStrange
}

var errStrange = errors.New("pglock: strange answer")

// bytea is a parameter. Keys and owners are bytes for the server, so that its
// encoding and its collation do not matter, and that they sort as they should.
func bytea(s string) []byte { return append([]byte{}, s...) }

// hexed and decimal make items of lists.
func hexed(s string) string { return hex.EncodeToString([]byte(s)) }

func decimal(n int64) string { return strconv.FormatInt(n, 10) }

// Extend implements [driver.Backend].
func (b *backend) Extend(ctx context.Context, batch []driver.Renewal) {
	if len(batch) == 0 {
		return
	}
	if err := b.extend(ctx, batch); err != nil {
		for i := range batch {
			batch[i].Err = err
		}
	}
}

func (b *backend) extend(ctx context.Context, batch []driver.Renewal) error {
	if err := b.enter(ctx); err != nil {
		return err
	}
	var lists [4]strings.Builder
	for i := range batch {
		l := &batch[i].Lease
		for j, text := range [4]string{
			hexed(l.Key), hexed(l.Owner), decimal(l.Token), decimal(micros(l.TTL)),
		} {
			if i > 0 {
				lists[j].WriteByte(',')
			}
			lists[j].WriteString(text)
		}
	}
	rows, err := b.calls.do(ctx, "", b.st.extend,
		lists[0].String(), lists[1].String(), lists[2].String(), lists[3].String(), b.opts.kept())
	if err != nil {
		return err
	}
	if len(rows) != 1 || len(rows[0]) != 1 {
		return errStrange
	}
	answers := strings.Split(string(rows[0][0]), ",")
	if len(answers) != len(batch) {
		return errStrange
	}
	for i, answer := range answers {
		r := &batch[i]
		r.Lease.Age = 0
		r.Err = gone(&r.Lease, answer)
	}
	return nil
}

// gone turns the answer for one grant into an error.
func gone(l *driver.Lease, answer string) error {
	switch answer {
	case "1":
		return nil
	case "0":
		return &driver.LostError{Key: l.Key, Token: l.Token, Reason: driver.ReasonGone}
	case "2":
		return &driver.LostError{Key: l.Key, Token: l.Token, Reason: driver.ReasonTaken}
	}
	return errStrange
}

// Release implements [driver.Backend].
func (b *backend) Release(ctx context.Context, lease driver.Lease) error {
	if err := b.enter(ctx); err != nil {
		return err
	}
	if err := b.calls.await(ctx, lease.Owner); err != nil {
		return err
	}
	if lease.Token != 0 {
		_, end, err := b.releasing.do(ctx, lease.Key, "", hexed(lease.Key), hexed(lease.Owner), decimal(lease.Token))
		if end == nil {
			return err
		}
		defer end()
	}
	rows, err := b.calls.do(ctx, "", b.st.release, bytea(lease.Key), bytea(lease.Owner), lease.Token, b.opts.kept())
	if err != nil {
		return err
	}
	if len(rows) != 1 || len(rows[0]) != 1 {
		return errStrange
	}
	return gone(&lease, string(rows[0][0]))
}

// Close implements [driver.Backend]. Pool and DB stay open.
func (b *backend) Close() error {
	if !b.ended.Swap(true) {
		close(b.closed)
		b.calls.close()
		b.acquiring.close()
		b.releasing.close()
	}
	return nil
}

// scanner reads the cells of a row.
type scanner struct {
	row row
	err error
}

func (s *scanner) next() []byte {
	if len(s.row) == 0 {
		if s.err == nil {
			s.err = errStrange
		}
		return nil
	}
	cell := s.row[0]
	s.row = s.row[1:]
	return cell
}

func (s *scanner) text() string { return string(s.next()) }

// int reads a number; NULL is 0.
func (s *scanner) int() int64 {
	cell := s.next()
	if cell == nil {
		return 0
	}
	n, err := strconv.ParseInt(string(cell), 10, 64)
	if err != nil && s.err == nil {
		s.err = errStrange
	}
	return n
}

func (s *scanner) micros() time.Duration { return time.Duration(s.int()) * time.Microsecond }

func (s *scanner) hex() string {
	text, err := hex.DecodeString(s.text())
	if err != nil && s.err == nil {
		s.err = errStrange
	}
	return string(text)
}
