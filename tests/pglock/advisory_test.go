package pglock_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/go-dlm/dlm/backends/pglock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/tests/servers"
)

// process is the network of one client. When that has vanished, the server learns
// of it later, as it would of a machine that has lost power.
type process struct {
	to   pgconnDial
	mu   sync.Mutex
	dead bool
	all  []net.Conn
}

// vanishing is how long the server does not know.
const vanishing = 3 * time.Second

func (p *process) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := p.to(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dead {
		conn.Close()
		return nil, errors.New("the process is dead")
	}
	p.all = append(p.all, conn)
	return &line{conn, p}, nil
}

func (p *process) gone() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.dead
}

func (p *process) vanish(tb testing.TB) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dead = true
	end := func() {
		for _, conn := range p.all {
			conn.Close()
		}
	}
	timer := time.AfterFunc(vanishing, end)
	tb.Cleanup(func() {
		timer.Stop()
		end()
	})
}

// line is a connection of a process.
type line struct {
	net.Conn
	p *process
}

func (l *line) Write(b []byte) (int, error) {
	if l.p.gone() {
		return len(b), nil
	}
	return l.Conn.Write(b)
}

func (l *line) Close() error {
	if l.p.gone() {
		return l.SetReadDeadline(time.Now())
	}
	return l.Conn.Close()
}

// overAdvisory opens backends with advisory locks, each of which is a process.
func overAdvisory(url string) opener {
	return func(_ testing.TB, dial pgconnDial, name string) backends {
		var mu sync.Mutex
		processes := make(map[driver.Backend]*process)
		open := func(tb testing.TB, opts *pglock.Options) (driver.Backend, error) {
			p := &process{to: dial}
			a, err := pglock.NewAdvisory(newPool(tb, named(url, name), p.dial), &pglock.AdvisoryOptions{Schema: opts.Schema})
			if err != nil {
				return nil, err
			}
			warmUp(tb, a)
			mu.Lock()
			defer mu.Unlock()
			processes[a] = p
			return a, nil
		}
		kill := func(tb testing.TB, b driver.Backend) {
			a, _ := driver.As[*pglock.Advisory](b)
			mu.Lock()
			p := processes[a]
			mu.Unlock()
			p.vanish(tb)
			_ = b.Close()
		}
		return backends{open: open, kill: kill, resting: func() int { return 0 }, close: func() {}}
	}
}

// warmUp begins the session and has the server's functions compiled, which on a busy
// machine takes a good part of a short TTL.
func warmUp(tb testing.TB, a *pglock.Advisory) {
	tb.Helper()
	lease, err := a.Acquire(tb.Context(), driver.Request{Key: "warm " + rand.Text(), Owner: "a", TTL: time.Minute, Limit: 1})
	if err == nil {
		batch := []driver.Renewal{{Lease: lease}}
		a.Extend(tb.Context(), batch)
		err = errors.Join(batch[0].Err, a.Release(tb.Context(), lease), a.Release(tb.Context(), driver.Lease{Key: lease.Key, Owner: "b"}))
	}
	if err != nil {
		tb.Fatal(err)
	}
}

func advisoryShelf(t testing.TB, s *servers.Postgres) *shelf {
	return newShelf(t, s, s.Addr(), 2*unit, overAdvisory(s.URL("postgres")))
}

func TestConformancePgAdvisory(t *testing.T) {
	t.Parallel()
	drivertest.Run(t, advisoryShelf(t, servers.StartPostgres(t, nil)).harness)
}

// The model hands a key over when it is released, so that readers who enter
// together have their tokens in the order of the queue. Here they have them as they
// come: so there are none.
func TestOperationsPgAdvisory(t *testing.T) {
	t.Parallel()
	sh := advisoryShelf(t, servers.StartPostgres(t, nil))
	for seed := range uint64(10) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			drivertest.Operations(t, seed, func(t *testing.T) *drivertest.Harness {
				h := sh.harness(t)
				open := h.Open
				h.Open = func(t testing.TB) driver.Backend {
					b := open(t)
					p := b.Properties()
					p.SharedMode = false
					return drivertest.Intercept(b, drivertest.Hooks{Properties: func() driver.Properties { return p }})
				}
				return h
			})
		})
	}
}
