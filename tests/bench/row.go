package main

import (
	"context"
	"crypto/rand"
	"errors"
	"slices"
	"time"

	"github.com/go-dlm/dlm/tests/servers"
)

// store is a lock store and the rows that are measured on it. A store is a
// file of its own that adds itself to [stores].
type store struct {
	name string
	rows []row
	// floors names, for each workload, the row that the others are compared
	// with.
	floors map[workload]string
	// targets are the figures that the project has set itself.
	targets []target
	// start starts the servers, by the name that rows ask for in row.servers.
	start func(tb servers.TB) map[string][]server
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
	servers   string // which of the store's servers
	settings  string // for people
	// sent tells the commands that the client sends from those that only run
	// within its scripts. Nil means that all are sent.
	sent func(command string) bool
	// holdByTry makes W5 take its locks with TryLock rather than Lock.
	holdByTry bool
	open      func(ctx context.Context, cfg openConfig) (locker, error)
}

func (r *row) in(w workload) bool { return slices.Contains(r.workloads, w) }

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

// extender is a held lock whose lease can be prolonged by hand.
type extender interface {
	Extend(ctx context.Context, ttl time.Duration) error
}

var (
	errConflict = errors.New("held by another owner")
	errNotHeld  = errors.New("no longer held")
	errUnfit    = errors.New("the row is not made for this workload")
)

// only accepts commands of the names given, and allBut all others.
func only(names ...string) func(string) bool {
	return func(command string) bool { return slices.Contains(names, command) }
}

func allBut(names ...string) func(string) bool {
	return func(command string) bool { return !slices.Contains(names, command) }
}

// prefix returns a beginning for keys that nobody else uses.
func prefix(w workload) string { return w.String() + "-" + rand.Text()[:8] + "-" }

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
