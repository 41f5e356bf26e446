package sqlitelock_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-dlm/dlm/backends/sqlitelock"
	"github.com/go-dlm/dlm/driver"
)

// everyCall runs each of the backend's calls.
func everyCall(ctx context.Context, b *sqlitelock.Backend, lease driver.Lease, each func(name string, err error)) {
	_, err := b.Acquire(ctx, ask(lease.Key, "other"))
	each("Acquire", err)
	each("Extend", extend(ctx, b, lease))
	each("Release", b.Release(ctx, lease))
	_, err = b.ForceRelease(ctx, lease.Key, 0)
	each("ForceRelease", err)
}

func TestContextDone(t *testing.T) {
	t.Parallel()
	b := open(t, file(t), nil)
	lease := acquire(t, b, ask("k", "o"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	check := func(name string, err error) {
		if !errors.Is(err, context.Canceled) || !errors.Is(err, driver.ErrNotApplied) {
			t.Errorf("%s: %v", name, err)
		}
	}
	everyCall(ctx, b, lease, check)
	_, err := b.Inspect(ctx, "k")
	check("Inspect", err)
	_, err = b.List(ctx, "", "", 0)
	check("List", err)
	check("Listen", b.Listen(ctx, "m", func(driver.Event) { t.Error("an event") }))
	if got := owners(inspect(t, b, "k")); got != "o /" {
		t.Fatal(got)
	}
}

// While somebody keeps the file locked, calls wait for as long as their
// context lasts, and reading goes on.
func TestFileLockedByOthers(t *testing.T) {
	t.Parallel()
	path := file(t)
	b := open(t, path, nil)
	lease := acquire(t, b, ask("k", "o"))
	db := raw(t, path)
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.ExecContext(t.Context(), "BEGIN IMMEDIATE"); err != nil {
		t.Fatal(err)
	}
	everyCall(timeout(t, 50*time.Millisecond), b, lease, func(name string, err error) {
		if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, driver.ErrNotApplied) || errors.Is(err, driver.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	})
	if got := owners(inspect(t, b, "k")); got != "o /" {
		t.Fatal(got)
	}
	open(t, path, nil) // need not write

	// Whoever waits gets on once the lock has gone.
	done := make(chan error)
	go func() { done <- b.Release(t.Context(), lease) }()
	if _, err := conn.ExecContext(t.Context(), "ROLLBACK"); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestCloseWhileLockedByOthers(t *testing.T) {
	t.Parallel()
	path := file(t)
	b := open(t, path, nil)
	conn, err := raw(t, path).Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.ExecContext(t.Context(), "BEGIN IMMEDIATE"); err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	for range 3 {
		go func() {
			_, err := b.Acquire(t.Context(), ask("k", "o"))
			done <- err
		}()
	}
	closeBackend(t, b)
	for range 3 {
		if err := <-done; !errors.Is(err, driver.ErrClosed) {
			t.Fatal(err)
		}
	}
}

func timeout(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// A call returns soon after its context ends even if the disk hangs in the
// middle of its transaction. Its outcome is then unknown, and withdrawing it
// is what settles it.
func TestDiskHangs(t *testing.T) {
	t.Parallel()
	var hang atomic.Pointer[chan struct{}]
	clock := sqlitelock.NewClock("boot", func() (int64, error) {
		if c := hang.Load(); c != nil {
			<-*c
		}
		return int64(time.Hour), nil
	})
	b, err := sqlitelock.Open(file(t), nil, clock)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeBackend(t, b) })
	lease := acquire(t, b, ask("held", "o"))

	stuck := make(chan struct{})
	hang.Store(&stuck)
	started := time.Now()
	_, err = b.Acquire(timeout(t, 20*time.Millisecond), ask("k", "a"))
	if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, driver.ErrNotApplied) {
		t.Fatalf("in the middle of the transaction: %v", err)
	}
	// Those behind it never began.
	everyCall(timeout(t, 20*time.Millisecond), b, lease, func(name string, err error) {
		if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, driver.ErrNotApplied) {
			t.Errorf("%s: %v", name, err)
		}
	})
	if took := time.Since(started); took > 5*time.Second {
		t.Errorf("the calls took %v", took)
	}
	hang.Store(nil)
	close(stuck)
	release(t, b, driver.Lease{Key: "k", Owner: "a"})
	if got := owners(inspect(t, b, "k")); got != "/" {
		t.Fatal(got)
	}
	release(t, b, lease)
}

// A clock that cannot be read ends the call; it never counts as the time zero.
func TestClockFails(t *testing.T) {
	t.Parallel()
	var broken atomic.Bool
	b, err := sqlitelock.Open(file(t), nil, sqlitelock.NewClock("boot", func() (int64, error) {
		if broken.Load() {
			return 0, errors.New("no clock")
		}
		return int64(time.Hour), nil
	}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeBackend(t, b) })
	lease := acquire(t, b, ask("k", "o"))
	broken.Store(true)
	everyCall(t.Context(), b, lease, func(name string, err error) {
		if !errors.Is(err, driver.ErrNotApplied) || !contains(err, "no clock") {
			t.Errorf("%s: %v", name, err)
		}
	})
	broken.Store(false)
	release(t, b, lease)
}

// A request that is cancelled at any moment either holds the lock and says so,
// or leaves nothing that is not withdrawn.
func TestCancelledAtAnyMoment(t *testing.T) {
	t.Parallel()
	path := file(t)
	a, b := open(t, path, nil), open(t, path, nil)
	for i := range 300 {
		owner := fmt.Sprint("o", i)
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i%60)*10*time.Microsecond)
		lease, err := a.Acquire(ctx, ask("k", owner))
		cancel()
		info := inspect(t, b, "k")
		switch {
		case err == nil && owners(info) != owner+" /":
			t.Fatalf("granted %+v, but in the file is %+v", lease, info)
		case errors.Is(err, driver.ErrNotApplied) && owners(info) != "/":
			t.Fatalf("not applied (%v), but in the file is %+v", err, info)
		case err != nil && !errors.Is(err, context.DeadlineExceeded):
			t.Fatal(err)
		}
		release(t, b, driver.Lease{Key: "k", Owner: owner})
		if info := inspect(t, b, "k"); owners(info) != "/" {
			t.Fatalf("left behind: %+v", info)
		}
	}
}

// A full file refuses what is new, certainly without effect, and is well again
// once there is room.
func TestFull(t *testing.T) {
	t.Parallel()
	b := open(t, file(t), nil)
	pages, err := b.Number(t.Context(), "PRAGMA page_count")
	if err != nil {
		t.Fatal(err)
	}
	fill(t, b, func() error { return b.Exec(t.Context(), fmt.Sprint("PRAGMA max_page_count = ", pages)) })
	// The connection that failed has been replaced, and with it the limit.
	for i := range 100 {
		acquire(t, b, ask(fmt.Sprintf("%0500d", 1_000_000+i), "owner"))
	}
}

// fill takes locks until there is no more room.
func fill(t *testing.T, b *sqlitelock.Backend, limit func() error) {
	t.Helper()
	var leases []driver.Lease
	for i := 0; ; i++ {
		// A failure may replace the connection, and with it the limit.
		if err := limit(); err != nil {
			t.Fatal(err)
		}
		req := ask(fmt.Sprintf("%0500d", i), "owner")
		lease, err := b.Acquire(t.Context(), req)
		if err == nil {
			leases = append(leases, lease)
			continue
		}
		if !errors.Is(err, driver.ErrNotApplied) || errors.Is(err, driver.ErrInvalid) || !contains(err, "full") {
			t.Fatalf("after %d locks: %v", i, err)
		}
		if info := inspect(t, b, req.Key); owners(info) != "/" {
			t.Fatalf("not applied, but in the file is %+v", info)
		}
		break
	}
	if len(leases) == 0 {
		t.Fatal("full from the start")
	}
	list, err := b.List(t.Context(), "", "", len(leases)+1)
	if err != nil || len(list) != len(leases) {
		t.Fatalf("%d locks are in the file, want %d (%v)", len(list), len(leases), err)
	}
}

// Many goroutines, several backends, one key: no two hold it at once, and
// tokens rise in the order of the grants.
func TestExclusion(t *testing.T) {
	t.Parallel()
	path := file(t)
	var (
		wg     sync.WaitGroup
		inside atomic.Int32
		last   atomic.Int64
	)
	for i := range 4 {
		b := open(t, path, nil)
		w := newWaiter(t.Context(), b, fmt.Sprint("m", i))
		t.Cleanup(func() {
			if err := w.close(); err != nil {
				t.Error(err)
			}
		})
		for j := range 4 {
			wg.Go(func() {
				for n := range 10 {
					lease, err := w.lock(t.Context(), ask("k", fmt.Sprintf("%d-%d-%d", i, j, n)), nil)
					if err != nil {
						t.Error(err)
						return
					}
					if inside.Add(1) != 1 {
						t.Error("two are inside")
					}
					if prev := last.Swap(lease.Token); prev >= lease.Token {
						t.Errorf("token %d follows %d", lease.Token, prev)
					}
					inside.Add(-1)
					if err := b.Release(t.Context(), lease); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
	}
	wg.Wait()
	b := open(t, path, nil)
	if list, err := b.List(t.Context(), "", "", 0); err != nil || len(list) != 0 {
		t.Fatalf("left behind: %+v (%v)", list, err)
	}
}
