// Command leader runs several processes of which one at a time works: the
// leader. It works for a while and hands over to the next, which goes on at
// once; a leader that ends does the same. If it is killed instead, the others
// wait for its lease to run out.
//
// The work is done while a context lasts that ends with the leadership. What it
// writes carries the term of the leader, a fencing token: a leader that was
// paused, and has lost the leadership without noticing, is refused.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/sqlitelock"
	"github.com/go-dlm/dlm/examples/internal/ledger"
	"github.com/go-dlm/dlm/examples/internal/procs"
)

const (
	key = "leader"
	// ttl is how long the others wait if the leader dies.
	ttl = 10 * time.Second
	// patience bounds what is left to do when the context has ended.
	patience = 5 * time.Second
	// node is the argument that makes the program one of its processes.
	node = "node"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := 0
	if err := run(ctx, os.Args[1:]); err != nil {
		code = 1
		if ctx.Err() == nil { // after a signal there is nothing to say
			fmt.Fprintln(os.Stderr, "leader:", err)
		}
	}
	stop()
	os.Exit(code)
}

// cluster is what all processes agree on.
type cluster struct {
	dir      string
	rounds   int // terms of each process
	steps    int // pieces of work in a term
	interval time.Duration
}

// work is the record of a piece of work.
type work struct {
	Process int       `json:"process"`
	Step    int       `json:"step"`
	At      time.Time `json:"at"`
}

func run(ctx context.Context, args []string) error {
	isNode := len(args) > 0 && args[0] == node
	if isNode {
		args = args[1:]
	}
	var c cluster
	var number int
	flags := flag.NewFlagSet("leader", flag.ExitOnError)
	processes := flags.Int("processes", 3, "how many `processes` there are")
	flags.IntVar(&c.rounds, "rounds", 4, "how many `terms` each process leads before it ends")
	flags.IntVar(&c.steps, "steps", 5, "how many `pieces` of work a leader does before it hands over")
	flags.DurationVar(&c.interval, "interval", 50*time.Millisecond, "the `time` from one piece of work to the next")
	flags.StringVar(&c.dir, "dir", "", "the `folder` for locks and records (default a temporary one)")
	if isNode {
		flags.IntVar(&number, "number", 0, "which process this is")
	}
	_ = flags.Parse(args) // it exits on errors
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if *processes < 1 || c.rounds < 1 || c.steps < 1 || c.interval < 0 {
		return errors.New("-processes, -rounds and -steps must be at least 1, and -interval must not be negative")
	}
	if isNode {
		return c.node(ctx, number)
	}
	if c.dir == "" {
		dir, err := os.MkdirTemp("", "dlm-leader-")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		c.dir = dir
	}
	if err := c.start(ctx, *processes); err != nil {
		return err
	}
	return c.check(*processes * c.rounds)
}

// start starts the processes and waits for them.
func (c *cluster) start(ctx context.Context, processes int) error {
	group, ctx := procs.NewGroup(ctx)
	defer group.Stop()
	for i := range processes {
		cmd, err := procs.Self(ctx, node,
			"-number", strconv.Itoa(i+1),
			"-rounds", strconv.Itoa(c.rounds),
			"-steps", strconv.Itoa(c.steps),
			"-interval", c.interval.String(),
			"-dir", c.dir)
		if err != nil {
			return err
		}
		cmd.Stdout = os.Stdout
		if err := group.Start(cmd); err != nil {
			return err
		}
	}
	return group.Wait()
}

// node is the life of one process.
func (c *cluster) node(ctx context.Context, number int) (err error) {
	locks, err := sqlitelock.NewLockManager(filepath.Join(c.dir, "locks.db"), nil, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, finish(ctx, locks.Close)) }()
	records, err := c.records()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, records.Close()) }()

	// The name is what `dlm get leader` and the other processes see.
	name := fmt.Sprint("process-", number)
	election, err := dlm.NewLeaderElection(locks, key, name, &dlm.ElectionConfig{TTL: ttl})
	if err != nil {
		return err
	}
	rounds := 0
	var failure error
	err = election.Run(ctx, &dlm.ElectionCallbacks{
		OnElected: func(ctx context.Context, term int64) {
			rounds++
			fmt.Printf("term %d: %s leads\n", term, name)
			err := c.work(ctx, records, number, term)
			if ctx.Err() != nil {
				return // the leadership is over; Run campaigns again, unless it is to end
			}
			// This ends the term, and after the last the election: both hand
			// over to the next in the queue. They do not wait here, since they
			// are called by the work that they would wait for.
			leave := election.StepDown
			if err != nil || rounds == c.rounds {
				leave = election.Stop
			}
			failure = errors.Join(err, leave(ctx))
		},
	})
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return errors.Join(failure, err)
}

// work is what a leader does. It stops when the context ends, which it does if
// the leadership is lost.
func (c *cluster) work(ctx context.Context, records *ledger.Ledger[work], number int, term int64) error {
	for step := range c.steps {
		if step > 0 {
			if err := wait(ctx, c.interval); err != nil {
				return err
			}
		}
		if err := records.Append(term, work{number, step, time.Now()}); err != nil {
			return err
		}
	}
	return nil
}

// check fails if two have worked at the same time, or if work was left out. It
// says how long nobody worked between two leaders.
func (c *cluster) check(terms int) (err error) {
	records, err := c.records()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, records.Close()) }()
	list, err := records.Read()
	if err != nil {
		return err
	}
	if len(list) != terms*c.steps {
		return fmt.Errorf("%d pieces of work were done, want %d", len(list), terms*c.steps)
	}
	var gaps []time.Duration
	for i, r := range list {
		switch {
		case r.Value.Step != i%c.steps:
			return fmt.Errorf("term %d: step %d comes at the place of step %d", r.Token, r.Value.Step, i%c.steps)
		case r.Value.Step > 0 && r.Token != list[i-1].Token:
			return fmt.Errorf("terms %d and %d mix", list[i-1].Token, r.Token)
		case r.Value.Step == 0 && i > 0:
			if r.Token <= list[i-1].Token {
				return fmt.Errorf("term %d comes after term %d", r.Token, list[i-1].Token)
			}
			gaps = append(gaps, r.Value.At.Sub(list[i-1].Value.At))
		}
	}
	fmt.Printf("one leader at a time in %d terms", terms)
	if len(gaps) > 0 {
		slices.Sort(gaps)
		fmt.Printf("; half of the %d hand-overs took up to %v", len(gaps), gaps[len(gaps)/2].Round(10*time.Microsecond))
	}
	fmt.Println()
	return nil
}

func (c *cluster) records() (*ledger.Ledger[work], error) {
	return ledger.Open[work](filepath.Join(c.dir, "records"))
}

// finish makes a call that must be made though the context may have ended.
func finish(ctx context.Context, call func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	return call(ctx)
}

// wait waits for some time, or until the context ends.
func wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
