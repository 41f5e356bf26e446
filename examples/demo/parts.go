package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"github.com/go-dlm/dlm/backends/sqlitelock"
	"github.com/go-dlm/dlm/examples/internal/ledger"
)

// step is what the processes that write the report leave in the ledger.
type step struct {
	Worker int  `json:"worker"`
	Begin  bool `json:"begin"` // or end
}

// report is run by `dlm run`, which tells it the fencing token. It writes the
// report, that is, it notes when it begins and when it ends.
func report(ctx context.Context, args []string) (err error) {
	path := args[0]
	worker, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	token, err := strconv.ParseInt(os.Getenv("DLM_TOKEN"), 10, 64)
	if err != nil {
		return fmt.Errorf("DLM_TOKEN: %w", err)
	}
	steps, err := ledger.Open[step](path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, steps.Close()) }()

	if err := steps.Append(token, step{Worker: worker, Begin: true}); err != nil {
		return err
	}
	fmt.Printf("  worker %d has the lock, with token %d\n", worker, token)
	writing := time.NewTimer(100 * time.Millisecond)
	defer writing.Stop()
	select {
	case <-writing.C:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return steps.Append(token, step{Worker: worker})
}

// hold takes a lock, prints its token, and holds the lock until its standard
// input ends.
func hold(ctx context.Context, args []string) (err error) {
	path, key := args[0], args[1]
	ttl, err := time.ParseDuration(args[2])
	if err != nil {
		return err
	}
	locks, err := sqlitelock.NewLockManager(path, nil, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, finish(ctx, locks.Close)) }()
	lock, err := locks.AcquireLock(ctx, key, ttl)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, finish(ctx, lock.Release)) }()

	fmt.Println(lock.Token)
	done := make(chan error, 1)
	go func() {
		_, err := io.Copy(io.Discard, os.Stdin)
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-lock.Done():
		return lock.Err()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// idle says that it is there, and does nothing until it is ended.
func idle(ctx context.Context, _ []string) error {
	fmt.Println(os.Getpid())
	<-ctx.Done()
	return context.Cause(ctx)
}
