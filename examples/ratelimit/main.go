// Command ratelimit has several processes use a service that serves only so many
// calls at a time and refuses the rest, as a rented API does. A semaphore that all
// of them share keeps them from being refused: whoever has no permit waits in a
// queue instead. With -unsafe nobody waits, and calls are refused.
//
// A permit is a lock: if a process dies with some, they are free again after ttl.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/sqlitelock"
	"github.com/go-dlm/dlm/examples/internal/procs"
)

const (
	// name is what all processes call the semaphore.
	name = "api:calls"
	// ttl is how long the others wait for the permits of a process that died.
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
			fmt.Fprintln(os.Stderr, "ratelimit:", err)
		}
	}
	stop()
	os.Exit(code)
}

// settings are what all processes agree on.
type settings struct {
	dir     string
	url     string
	limit   int // calls at a time
	workers int // of each process
	calls   int // of each worker
	unsafe  bool
}

func run(ctx context.Context, args []string) error {
	isNode := len(args) > 0 && args[0] == node
	if isNode {
		args = args[1:]
	}
	var s settings
	flags := flag.NewFlagSet("ratelimit", flag.ExitOnError)
	processes := flags.Int("processes", 4, "how many `processes` there are")
	flags.IntVar(&s.workers, "workers", 5, "how many `workers` each of them has")
	flags.IntVar(&s.calls, "calls", 10, "how many `calls` each worker makes")
	flags.IntVar(&s.limit, "limit", 3, "how many `calls` the service serves at a time")
	flags.StringVar(&s.dir, "dir", "", "the `folder` for locks (default a temporary one)")
	flags.BoolVar(&s.unsafe, "unsafe", false, "do not wait for permits")
	if isNode {
		flags.StringVar(&s.url, "url", "", "the address of the service")
	}
	_ = flags.Parse(args) // it exits on errors
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if *processes < 1 || s.workers < 1 || s.calls < 1 || s.limit < 1 {
		return errors.New("-processes, -workers, -calls and -limit must be at least 1")
	}
	if isNode {
		return s.node(ctx)
	}
	if s.dir == "" {
		dir, err := os.MkdirTemp("", "dlm-ratelimit-")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		s.dir = dir
	}
	return s.start(ctx, *processes)
}

// start starts the service and the processes, waits for them, and says what the
// service has seen.
func (s *settings) start(ctx context.Context, processes int) (err error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	a := &api{limit: s.limit}
	server := &http.Server{Handler: a, ReadHeaderTimeout: patience}
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(listener) }) // until it is closed
	defer serving.Wait()
	defer server.Close()

	fmt.Printf("the service serves %d calls at a time; %d workers call it\n", s.limit, processes*s.workers)

	group, ctx := procs.NewGroup(ctx)
	defer group.Stop()
	for range processes {
		cmd, err := procs.Self(ctx, node,
			"-url", "http://"+listener.Addr().String(),
			"-workers", strconv.Itoa(s.workers),
			"-calls", strconv.Itoa(s.calls),
			"-limit", strconv.Itoa(s.limit),
			"-dir", s.dir,
			"-unsafe="+strconv.FormatBool(s.unsafe))
		if err != nil {
			return err
		}
		if err := group.Start(cmd); err != nil {
			return err
		}
	}
	if err := group.Wait(); err != nil {
		return err
	}
	fmt.Printf("%d calls were served, at most %d at a time, and %d refused\n", a.served.Load(), a.most.Load(), a.refused.Load())
	if n := a.refused.Load(); n > 0 {
		return fmt.Errorf("%d calls were refused", n)
	}
	return nil
}

// api is the service.
type api struct {
	limit                         int
	inside, most, served, refused atomic.Int64
}

// ServeHTTP implements [http.Handler].
func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	n := a.inside.Add(1)
	defer a.inside.Add(-1)
	if n > int64(a.limit) {
		a.refused.Add(1)
		http.Error(w, "too many calls", http.StatusTooManyRequests)
		return
	}
	for most := a.most.Load(); n > most && !a.most.CompareAndSwap(most, n); {
		most = a.most.Load()
	}
	_ = wait(r.Context(), 2*time.Millisecond) // the work
	a.served.Add(1)
}

// node is the life of one process.
func (s *settings) node(ctx context.Context) (err error) {
	locks, err := sqlitelock.NewLockManager(filepath.Join(s.dir, "locks.db"), nil, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, finish(ctx, locks.Close)) }()
	permits, err := dlm.NewDistributedSemaphore(locks, name, s.limit)
	if err != nil {
		return err
	}
	failed := make([]error, s.workers)
	var workers sync.WaitGroup
	for i := range s.workers {
		workers.Go(func() {
			for range s.calls {
				if failed[i] = s.call(ctx, permits); failed[i] != nil {
					return
				}
			}
		})
	}
	workers.Wait()
	return errors.Join(failed...)
}

// call makes one call of the service, with a permit.
func (s *settings) call(ctx context.Context, permits *dlm.Semaphore) (err error) {
	if s.unsafe {
		return get(ctx, s.url)
	}
	permit, err := permits.Acquire(ctx, ttl)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, finish(ctx, permit.Release)) }()
	// If the permit is lost, the call ends, as somebody else may make one.
	return get(permit.Context(ctx), s.url)
}

// get makes the call. That it is refused is no error here: the service counts it.
func get(ctx context.Context, url string) (err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, resp.Body.Close()) }()
	// To the end: the service is done with the call only then.
	_, err = io.Copy(io.Discard, resp.Body)
	return err
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
