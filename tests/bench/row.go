package main

import (
	"context"
	"crypto/rand"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-dlm/dlm/tests/servers"
)

// store is a lock store and the rows that are measured on it. A store is a
// file of its own that adds itself to [stores].
type store struct {
	name string
	rows []row
	// unit is what the servers count: commands, messages, statements.
	unit string
	// extra says what is counted beside what clients send, for the heading of a
	// column; without it there is nothing else.
	extra string
	// floors names, for each workload, the row that the others are compared
	// with.
	floors map[workload]string
	// targets are the figures that the project has set itself.
	targets []target
	// start starts the servers, by the name that rows ask for in row.servers.
	start func(tb servers.TB) map[string][]server
	// sent tells what clients send from what else is counted, for rows that do
	// not say so themselves. Nil means that clients send it all.
	sent func(command string) bool
	// flush empties the servers between two measurements.
	flush func(ctx context.Context, list []server) error
	// version says what the servers are.
	version func(ctx context.Context, list []server) (string, error)
	// count opens a connection of its own to count what the servers have done.
	count func(ctx context.Context, list []server) (counter, error)
}

// stores are the stores that can be measured, by name.
var stores = map[string]*store{}

// server is a running server: an address to connect to, and a process.
type server struct {
	addr string
	pid  int
}

// counter returns how often the servers have executed each of their commands
// so far. Its own calls are left out.
type counter func(ctx context.Context) (map[string]int64, error)

// row is one thing to measure: a backend of this project, a library of others,
// or a floor, which is a bare call without which no lock can do.
type row struct {
	name      string
	workloads []workload
	servers   string // which of the store's servers, empty if it has one group only
	settings  string // for people
	// sent tells the commands that the client sends from what else is counted.
	// Nil means that it is as the store says.
	sent func(command string) bool
	// holdByTry makes W5 take its locks with TryLock rather than Lock.
	holdByTry bool
	open      opener
}

func (r *row) in(w workload) bool { return slices.Contains(r.workloads, w) }

// opener opens a row.
type opener func(ctx context.Context, cfg openConfig) (locker, error)

// openConfig says what a row is opened for.
type openConfig struct {
	addrs   []string
	workers int           // goroutines that will use it at the same time
	ttl     time.Duration // of every lock
}

// locker is a lock library as the workloads see it. The worker tells which
// goroutine asks, so that an adapter can give each a client of its own. A row
// implements what its workloads need, and returns [errUnfit] for the rest.
type locker interface {
	// TryLock returns errConflict if another owner holds the key.
	TryLock(ctx context.Context, worker int, key string, ttl time.Duration) (held, error)
	// Lock waits until it has the key.
	Lock(ctx context.Context, worker int, key string, ttl time.Duration) (held, error)
}

// held is an acquired lock.
type held interface {
	Unlock(ctx context.Context) error
}

// looker is a locker that cannot try to take a lock, but tells whether somebody
// holds it.
type looker interface {
	Held(ctx context.Context, key string) (bool, error)
}

// extender is a held lock whose lease can be prolonged by hand.
type extender interface {
	Extend(ctx context.Context, ttl time.Duration) error
}

var (
	errConflict = errors.New("held by another owner")
	errNotHeld  = errors.New("no longer held")
	errUnfit    = errors.New("the row is not made for this workload")
)

// wantHeld makes an error of an answer that says that there was no lock.
func wantHeld(ok bool, err error) error {
	if err == nil && !ok {
		err = errNotHeld
	}
	return err
}

// prefix returns a beginning for keys that nobody else uses.
func prefix(w workload) string { return w.String() + "-" + rand.Text()[:8] + "-" }

// pingFloor is one round trip, in the guise of a lock that is always free.
type pingFloor func(ctx context.Context, worker int) error

type noLock struct{}

func (ping pingFloor) TryLock(ctx context.Context, worker int, _ string, _ time.Duration) (held, error) {
	if err := ping(ctx, worker); err != nil {
		return nil, err
	}
	return noLock{}, nil
}

func (pingFloor) Lock(context.Context, int, string, time.Duration) (held, error) {
	return nil, errUnfit
}

func (noLock) Unlock(context.Context) error { return nil }

// each calls f for 0 to n-1, for some of them at a time, and returns the first
// error.
func each(n, together int, f func(i int) error) error {
	var (
		next  atomic.Int64
		wg    sync.WaitGroup
		once  sync.Once
		first error
	)
	for range min(n, together) {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				if err := f(i); err != nil {
					once.Do(func() { first = err })
					next.Store(int64(n)) // there is no use in the others
				}
			}
		})
	}
	wg.Wait()
	return first
}

// poll is the plain way to wait on a store without a queue.
func poll(ctx context.Context, every time.Duration, try func() (held, error)) (held, error) {
	for {
		h, err := try()
		if !errors.Is(err, errConflict) {
			return h, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(every):
		}
	}
}
