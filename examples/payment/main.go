// Command payment charges a payment once, though the process that is about to do it
// is stopped in the middle, for longer than its lock lasts.
//
// The first process takes the payment's lock, finds that the payment is open, and
// asks the bank. Then it is stopped (SIGSTOP), as by a suspended machine. Its
// lock runs out, a second process takes it, and charges the payment. Then
// the first one goes on: it does not know yet that it was stopped, and charges
// the payment, too. But each transaction shows the lock's fencing token to the
// database, which refuses that one. With -unsafe nobody checks tokens, and the
// payment is charged twice.
//
//	payment -postgres postgres://postgres@127.0.0.1:5432/app
//
// Locks, fence and payments are in the same PostgreSQL; only fence and payments must
// be. The program makes the tables that it needs and leaves them there.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/pglock"
	"github.com/go-dlm/dlm/examples/internal/procs"
	"github.com/go-dlm/dlm/fence"
)

const (
	// ttl is how long the second process waits for a first one that has stopped.
	ttl = 3 * time.Second
	// patience bounds what is left to do when the context has ended.
	patience = 5 * time.Second
	// worker is the argument that makes the program one of its processes.
	worker = "worker"
	// asks ends the line after which a process is stopped.
	asks = "asks the bank"
)

const tables = `
CREATE TABLE IF NOT EXISTS example_payment (id bigserial PRIMARY KEY, state text NOT NULL DEFAULT 'open');
CREATE TABLE IF NOT EXISTS example_charge (payment bigint NOT NULL, process text NOT NULL)`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := 0
	if err := run(ctx, os.Args[1:]); err != nil {
		code = 1
		if ctx.Err() == nil { // after a signal there is nothing to say
			fmt.Fprintln(os.Stderr, "payment:", err)
		}
	}
	stop()
	os.Exit(code)
}

// options are the command line.
type options struct {
	postgres string
	unsafe   bool
	// of a worker
	name  string
	id    int64
	pause bool
}

func run(ctx context.Context, args []string) error {
	isWorker := len(args) > 0 && args[0] == worker
	if isWorker {
		args = args[1:]
	}
	var o options
	flags := flag.NewFlagSet("payment", flag.ExitOnError)
	flags.StringVar(&o.postgres, "postgres", "", "the `URL` of a PostgreSQL")
	flags.BoolVar(&o.unsafe, "unsafe", false, "do not check tokens")
	if isWorker {
		flags.StringVar(&o.name, "name", "", "what the process is called")
		flags.Int64Var(&o.id, "payment", 0, "the payment")
		flags.BoolVar(&o.pause, "pause", false, "wait for a line on standard input while the bank is asked")
	}
	_ = flags.Parse(args) // it exits on errors
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if o.postgres == "" {
		return errors.New("-postgres must name a database")
	}
	pool, err := pgxpool.New(ctx, o.postgres)
	if err != nil {
		return err
	}
	defer pool.Close()
	guard, err := fence.NewSQL(fence.PostgreSQL, &fence.SQLOptions{Table: "example_fence"})
	if err != nil {
		return err
	}
	if isWorker {
		w := process{options: o, pool: pool, guard: guard}
		return w.work(ctx)
	}
	if err := pglock.CreateSchema(ctx, pool, nil); err != nil {
		return err
	}
	if _, err := pool.Exec(ctx, tables+";"+guard.Schema()); err != nil {
		return err
	}
	return o.show(ctx, pool)
}

// show has a new payment charged by two processes, of which the first is stopped in
// between.
func (o *options) show(ctx context.Context, pool *pgxpool.Pool) error {
	err := pool.QueryRow(ctx, "INSERT INTO example_payment DEFAULT VALUES RETURNING id").Scan(&o.id)
	if err != nil {
		return err
	}
	group, ctx := procs.NewGroup(ctx)
	defer group.Stop()

	first, err := o.start(ctx, "first", "-pause")
	if err != nil {
		return err
	}
	input, err := first.StdinPipe()
	if err != nil {
		return err
	}
	output, lines, err := os.Pipe()
	if err != nil {
		return err
	}
	defer output.Close()
	first.Stdout = lines
	err = errors.Join(group.Start(first), lines.Close())
	if err != nil {
		return err
	}
	defer resume(first.Process) // stopped, it would not end

	said := bufio.NewScanner(output)
	for said.Scan() {
		fmt.Println(said.Text())
		if strings.HasSuffix(said.Text(), asks) {
			break
		}
	}
	if err := stop(first.Process); err != nil {
		return errors.Join(err, said.Err())
	}
	fmt.Println("the first process is stopped")

	second, err := o.start(ctx, "second")
	if err != nil {
		return err
	}
	second.Stdout = os.Stdout
	if err := second.Run(); err != nil {
		return err
	}

	fmt.Println("the first process goes on")
	if _, err := io.WriteString(input, "\n"); err != nil {
		return err
	}
	if err := resume(first.Process); err != nil {
		return err
	}
	for said.Scan() {
		fmt.Println(said.Text())
	}
	if err := errors.Join(said.Err(), group.Wait()); err != nil {
		return err
	}
	return check(context.WithoutCancel(ctx), pool, o.id)
}

// start prepares a process that charges the payment.
func (o *options) start(ctx context.Context, name string, more ...string) (*exec.Cmd, error) {
	return procs.Self(ctx, append([]string{
		worker, "-postgres", o.postgres, "-unsafe=" + strconv.FormatBool(o.unsafe),
		"-payment", strconv.FormatInt(o.id, 10), "-name", name,
	}, more...)...)
}

// check fails if the payment was not charged once.
func check(ctx context.Context, pool *pgxpool.Pool, id int64) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var n int
	if err := pool.QueryRow(ctx, "SELECT count(*) FROM example_charge WHERE payment = $1", id).Scan(&n); err != nil {
		return err
	}
	if n != 1 {
		return fmt.Errorf("the payment was charged %d times", n)
	}
	fmt.Println("the payment was charged once")
	return nil
}

// process is one that charges a payment.
type process struct {
	options
	pool  *pgxpool.Pool
	guard *fence.SQL
}

// work is the life of one process.
func (p *process) work(ctx context.Context) (err error) {
	locks, err := pglock.NewLockManager(p.pool, &dlm.LockConfig{Label: p.name}, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, finish(ctx, locks.Close)) }()
	err = dlm.WithDistributedLock(ctx, locks, fmt.Sprint("payment:", p.id), ttl, p.charge)
	switch {
	case errors.Is(err, fence.ErrStale):
		p.say("is refused: somebody else has the payment by now")
		return nil
	case errors.Is(err, dlm.ErrLost):
		p.say("learns that it has lost its lock")
		return nil
	}
	return err
}

// charge charges the payment unless it is charged. Its context ends if the lock is
// lost.
func (p *process) charge(ctx context.Context) error {
	lock := dlm.LockFromContext(ctx)
	var state string
	err := p.write(ctx, lock, func(tx pgx.Tx) error {
		// From here on, no earlier holder can change what is read.
		return tx.QueryRow(ctx, "SELECT state FROM example_payment WHERE id = $1", p.id).Scan(&state)
	})
	if err != nil {
		return err
	}
	if state != "open" {
		p.say("finds that the payment is " + state)
		return nil
	}
	p.say(asks)
	// The bank is not asked within a transaction, which would keep the others
	// waiting for as long as this process is stopped. A bank that knows of
	// tokens would get this one.
	if p.pause {
		if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil {
			return err
		}
	}
	// A look at the context would help now. But the process could as well have
	// been stopped right after it; so this one does not look.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	err = p.write(ctx, lock, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "INSERT INTO example_charge VALUES ($1, $2)", p.id, p.name)
		if err == nil {
			_, err = tx.Exec(ctx, "UPDATE example_payment SET state = 'charged' WHERE id = $1", p.id)
		}
		return err
	})
	if err == nil {
		p.say("has charged the payment")
	}
	return err
}

// write does something in a transaction that begins with the check of the token.
func (p *process) write(ctx context.Context, lock *dlm.Lock, do func(pgx.Tx) error) error {
	return pgx.BeginFunc(ctx, p.pool, func(tx pgx.Tx) error {
		if p.unsafe {
			return do(tx)
		}
		query, args, err := p.guard.Statement(lock.Key, lock.Token)
		if err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, query, args...)
		if err != nil {
			return err
		}
		if err := fence.Affected(lock.Key, lock.Token, tag.RowsAffected()); err != nil {
			return err
		}
		return do(tx)
	})
}

func (p *process) say(what string) { fmt.Printf("the %s process %s\n", p.name, what) }

// finish makes a call that must be made though the context may have ended.
func finish(ctx context.Context, call func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	return call(ctx)
}
