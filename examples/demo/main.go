// Command demo shows what dlm does, with processes that race for locks and are
// killed. It needs no server: the locks are in a file, as they are by default.
//
// It is run from within the source tree, since it builds the programs that it
// shows:
//
//	go run ./examples/demo
//
// Everything in its table was measured. It fails if anything is not as expected.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/sqlitelock"
	"github.com/go-dlm/dlm/examples/internal/procs"
)

const (
	// timeout ends a demo that hangs.
	timeout = 3 * time.Minute
	// patience bounds what is left to do when the context has ended.
	patience = 5 * time.Second
)

// parts are the parts that this program plays in its processes. The first
// argument says which, and so many follow.
var parts = map[string]struct {
	args int
	play func(ctx context.Context, args []string) error
}{
	"report": {2, report},
	"hold":   {3, hold},
	"idle":   {0, idle},
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := 0
	if err := run(ctx, os.Args[1:]); err != nil {
		code = 1
		if ctx.Err() == nil { // after a signal there is nothing to say
			fmt.Fprintln(os.Stderr, "demo:", err)
		}
	}
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string) error {
	if len(args) > 0 {
		if part, ok := parts[args[0]]; ok && len(args) == 1+part.args {
			return part.play(ctx, args[1:])
		}
	}
	d := &demo{}
	flags := flag.NewFlagSet("demo", flag.ExitOnError)
	flags.StringVar(&d.programs, "programs", "", "the `folder` to build the programs in (default a temporary one)")
	_ = flags.Parse(args) // it exits on errors
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("not done after %v", timeout))
	defer cancel()
	err := d.show(ctx)
	if err != nil && ctx.Err() != nil {
		// Whatever failed, failed because of that.
		return context.Cause(ctx)
	}
	return err
}

// demo is the scene of all acts.
type demo struct {
	self     string       // this program
	programs string       // where the others are
	dir      string       // for the locks, and for what they protect
	locks    *dlm.Manager // on the same file as all processes
	table    table
}

// show plays all acts and prints the table.
func (d *demo) show(ctx context.Context) (err error) {
	began := time.Now()
	if d.self, err = os.Executable(); err != nil {
		return err
	}
	if d.dir, err = os.MkdirTemp("", "dlm-demo-"); err != nil {
		return err
	}
	defer os.RemoveAll(d.dir)
	if d.programs == "" {
		d.programs = d.dir
	}
	if d.programs, err = filepath.Abs(d.programs); err != nil {
		return err
	}

	fmt.Println("Building dlm and the flash sale ...")
	if err := d.build(ctx); err != nil {
		return err
	}
	if d.locks, err = sqlitelock.NewLockManager(d.file(), nil, nil); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, finish(ctx, d.locks.Close)) }()

	for i, act := range []func(context.Context) error{d.turns, d.deaths, d.flashSale} {
		fmt.Printf("\nAct %d: ", i+1)
		if err := act(ctx); err != nil {
			return err
		}
	}
	fmt.Println()
	if err := d.table.print(os.Stdout); err != nil {
		return err
	}
	fmt.Printf("\n%.0f seconds in all. No server was needed: the locks were in one file.\n", time.Since(began).Seconds())
	return d.table.failed()
}

// build builds the dlm command and the flash sale.
func (d *demo) build(ctx context.Context) error {
	var out bytes.Buffer
	cmd := procs.Command(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "github.com/go-dlm/dlm/examples")
	cmd.Stdout = &out
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("go list: %w; run the demo from within the source tree", err)
	}
	examples := strings.TrimSpace(out.String())
	for _, dir := range []string{
		filepath.Join(examples, "..", "cmd", "dlm"),
		filepath.Join(examples, "flashsale"),
	} {
		// The version that is stamped into a program is of no use here.
		cmd := procs.Command(ctx, "go", "build", "-C", dir, "-buildvcs=false", "-o", d.programs+string(filepath.Separator), ".")
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("go build in %s: %w", dir, err)
		}
	}
	return nil
}

// file is the file with the locks.
func (d *demo) file() string { return filepath.Join(d.dir, "locks.db") }

// url names the file to the dlm command.
func (d *demo) url() string { return (&url.URL{Scheme: "sqlite", Path: d.file()}).String() }

// queued waits until as many wait for a key.
func (d *demo) queued(ctx context.Context, key string, waiters int) error {
	look := time.NewTicker(10 * time.Millisecond)
	defer look.Stop()
	for {
		info, err := d.locks.GetLock(ctx, key)
		if err != nil {
			return err
		}
		if len(info.Waiters) >= waiters {
			return nil
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// finish makes a call that must be made though the context may have ended.
func finish(ctx context.Context, call func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	return call(ctx)
}
