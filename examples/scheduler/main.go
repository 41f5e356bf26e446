// Command scheduler runs a job once per tick of a clock, though several
// processes would run it, each by a clock of its own.
//
// A lock alone is not enough for that: it keeps runs from overlapping, but where
// clocks differ, a fast process may be done, and its lock free again, before a
// slow one comes to the same tick. So there is a record of the last tick that
// was run. It is read and written under the lock, and a writer that has lost
// its lock without noticing is refused by its fencing token.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/sqlitelock"
	"github.com/go-dlm/dlm/examples/internal/ledger"
	"github.com/go-dlm/dlm/examples/internal/procs"
)

const (
	key = "job:report"
	// ttl is how long the others wait if the process that runs the job dies.
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
			fmt.Fprintln(os.Stderr, "scheduler:", err)
		}
	}
	stop()
	os.Exit(code)
}

// scheduler is what all processes agree on. A tick is a number: the time since
// 1970 in intervals.
type scheduler struct {
	dir      string
	interval time.Duration
	first    int64 // tick
	ticks    int64
}

// job is the record of a tick that was run.
type job struct {
	Tick    int64 `json:"tick"`
	Process int   `json:"process"`
}

func run(ctx context.Context, args []string) error {
	isNode := len(args) > 0 && args[0] == node
	if isNode {
		args = args[1:]
	}
	var s scheduler
	var number int
	flags := flag.NewFlagSet("scheduler", flag.ExitOnError)
	processes := flags.Int("processes", 5, "how many `processes` there are")
	flags.Int64Var(&s.ticks, "ticks", 10, "for how many `ticks` to run")
	flags.DurationVar(&s.interval, "interval", 250*time.Millisecond, "the `time` from tick to tick")
	flags.StringVar(&s.dir, "dir", "", "the `folder` for locks and records (default a temporary one)")
	if isNode {
		flags.IntVar(&number, "number", 0, "which process this is")
		flags.Int64Var(&s.first, "first", 0, "the first tick")
	}
	_ = flags.Parse(args) // it exits on errors
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if *processes < 1 || s.ticks < 1 || s.interval < time.Millisecond {
		return errors.New("-processes and -ticks must be at least 1, and -interval at least 1ms")
	}
	if isNode {
		return s.node(ctx, number)
	}
	if s.dir == "" {
		dir, err := os.MkdirTemp("", "dlm-scheduler-")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		s.dir = dir
	}
	s.first = time.Now().UnixNano()/int64(s.interval) + 1
	if err := s.start(ctx, *processes); err != nil {
		return err
	}
	return s.check()
}

// start starts the processes and waits for them.
func (s *scheduler) start(ctx context.Context, processes int) error {
	group, ctx := procs.NewGroup(ctx)
	defer group.Stop()
	for i := range processes {
		cmd, err := procs.Self(ctx, node,
			"-number", strconv.Itoa(i+1),
			"-first", strconv.FormatInt(s.first, 10),
			"-ticks", strconv.FormatInt(s.ticks, 10),
			"-interval", s.interval.String(),
			"-dir", s.dir)
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
func (s *scheduler) node(ctx context.Context, number int) (err error) {
	// The label is what `dlm get job:report` shows.
	cfg := &dlm.LockConfig{Label: fmt.Sprint("scheduler-", number)}
	locks, err := sqlitelock.NewLockManager(filepath.Join(s.dir, "locks.db"), cfg, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, finish(ctx, locks.Close)) }()
	records, err := s.records()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, records.Close()) }()

	for tick := s.first; tick < s.first+s.ticks; tick++ {
		if err := s.await(ctx, tick); err != nil {
			return err
		}
		token, err := once(ctx, locks, records, job{tick, number})
		if err != nil {
			return err
		}
		if token != 0 {
			fmt.Printf("tick %d: run by process %d with token %d\n", tick-s.first+1, number, token)
		}
	}
	return nil
}

// await waits for a tick by the process's own clock, which is behind by
// something else each time.
func (s *scheduler) await(ctx context.Context, tick int64) error {
	behind := 10*time.Millisecond + rand.N(40*time.Millisecond)
	return wait(ctx, time.Until(time.Unix(0, tick*int64(s.interval)))+behind)
}

// once runs the job for a tick, unless that has been done. It returns the
// fencing token if it ran the job, or 0.
//
// It waits for the lock instead of trying it: if the process that runs the job
// dies, another one finds no record and runs it.
func once(ctx context.Context, locks dlm.LockManager, records *ledger.Ledger[job], j job) (token int64, err error) {
	err = dlm.WithDistributedLock(ctx, locks, key, ttl, func(ctx context.Context) error {
		list, err := records.Read()
		if err != nil {
			return err
		}
		if n := len(list); n > 0 && list[n-1].Value.Tick >= j.Tick {
			return nil
		}
		if err := work(ctx); err != nil {
			return err
		}
		// The record is what the job achieves here. If a job achieves
		// something elsewhere, and the process dies before the record is
		// written, then another process runs it again.
		token = dlm.LockFromContext(ctx).Token
		return records.Append(token, j)
	})
	return token, err
}

// work is the job. It takes less time than the clocks are apart. It stops when
// the context ends, which it does if the lock is lost.
func work(ctx context.Context) error { return wait(ctx, 5*time.Millisecond) }

// check fails if a tick was not run, or was run twice.
func (s *scheduler) check() (err error) {
	records, err := s.records()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, records.Close()) }()
	list, err := records.Read()
	if err != nil {
		return err
	}
	runs := make(map[int64]int)
	for _, r := range list {
		runs[r.Value.Tick]++
	}
	var faults []error
	for i := range s.ticks {
		if n := runs[s.first+i]; n != 1 {
			faults = append(faults, fmt.Errorf("tick %d was run %d times", i+1, n))
		}
	}
	if len(faults) > 0 {
		return errors.Join(faults...)
	}
	fmt.Printf("each of %d ticks was run once\n", s.ticks)
	return nil
}

func (s *scheduler) records() (*ledger.Ledger[job], error) {
	return ledger.Open[job](filepath.Join(s.dir, "records"))
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
