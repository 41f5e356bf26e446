package pglock

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/go-dlm/dlm/driver"
)

func newAdvisory(t *testing.T) *Advisory {
	t.Helper()
	// Nothing is there.
	pool, err := pgxpool.New(t.Context(), "postgres://postgres@127.0.0.1:1/x?sslmode=disable")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	a, err := NewAdvisory(pool, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	return a
}

func TestAdvisoryOptions(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		opts *AdvisoryOptions
		want string
	}{
		{"nil", nil, ""},
		{"zero", &AdvisoryOptions{}, ""},
		{"shortest", &AdvisoryOptions{SessionTimeout: 2 * time.Second}, ""},
		{"longest", &AdvisoryOptions{SessionTimeout: time.Hour}, ""},
		{"too short", &AdvisoryOptions{SessionTimeout: time.Second}, "AdvisoryOptions.SessionTimeout is 1s, must be between 2s and 1h0m0s"},
		{"negative", &AdvisoryOptions{SessionTimeout: -1}, "AdvisoryOptions.SessionTimeout"},
		{"too long", &AdvisoryOptions{SessionTimeout: time.Hour + 1}, "AdvisoryOptions.SessionTimeout"},
		{"schema", &AdvisoryOptions{Schema: strings.Repeat("x", 64)}, "Options.Schema has 64 bytes"},
		{"prefix", &AdvisoryOptions{Prefix: "\xff"}, "Options.Prefix"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			_, timeout, err := c.opts.withDefaults()
			switch {
			case c.want == "" && (err != nil || timeout < minSessionTimeout):
				t.Errorf("%v, %v", timeout, err)
			case c.want != "" && (!errors.Is(err, driver.ErrInvalid) || !strings.Contains(err.Error(), c.want)):
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
	if _, err := NewAdvisory(nil, nil); !errors.Is(err, driver.ErrInvalid) {
		t.Error(err)
	}
}

// Keys in different schemas have different locks.
func TestAdvisoryNumbers(t *testing.T) {
	t.Parallel()
	seen := make(map[int64]string)
	for _, o := range []Options{{Schema: "a"}, {Schema: "b"}, {Schema: "a", Prefix: "b"}, {Schema: "ab"}} {
		for _, key := range []string{"k", "K", "bk", "\x00k"} {
			name := o.Schema + "|" + o.Prefix + "|" + key
			n := o.number(key)
			if other, ok := seen[n]; ok {
				t.Errorf("%q and %q have the same number", name, other)
			}
			seen[n] = name
		}
	}
}

// Keys with the same number are not taken for each other.
func TestAdvisoryCollision(t *testing.T) {
	t.Parallel()
	a := newAdvisory(t)
	a.number = func(string) int64 { return 7 }
	k, err := a.turn(t.Context(), "x", false)
	if err != nil {
		t.Fatal(err)
	}
	_, err = a.turn(t.Context(), "y", false)
	if e, ok := errors.AsType[*CollisionError](err); !ok || e.Key != "y" || e.Other != "x" || !errors.Is(err, driver.ErrInvalid) {
		t.Errorf("%v", err)
	}
	a.pass(k)
	k, err = a.turn(t.Context(), "y", false)
	if err != nil {
		t.Fatalf("the other key is not in use any more: %v", err)
	}
	a.pass(k)
	if len(a.keys) != 0 {
		t.Errorf("%d keys are left", len(a.keys))
	}
}

// Turns on a key go in order, but for who gives something up; and who does not
// wait any more gets none.
func TestAdvisoryTurns(t *testing.T) {
	t.Parallel()
	a := newAdvisory(t)
	k, err := a.turn(t.Context(), "k", false)
	if err != nil {
		t.Fatal(err)
	}
	queued := func(n int) {
		t.Helper()
		for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
			a.mu.Lock()
			have := len(k.queue)
			a.mu.Unlock()
			if have == n {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("%d wait, want %d", have, n)
			}
		}
	}
	order := make(chan string, 10)
	var wg sync.WaitGroup
	wait := func(name string, first bool) {
		wg.Go(func() {
			if _, err := a.turn(context.Background(), "k", first); err != nil {
				t.Error(err)
				return
			}
			order <- name
			a.pass(k)
		})
	}
	wait("second", false)
	queued(1)
	ctx, cancel := context.WithCancel(t.Context())
	gone := make(chan error, 1)
	go func() {
		_, err := a.turn(ctx, "k", false)
		gone <- err
	}()
	queued(2)
	wait("third", false)
	queued(3)
	wait("giving up", true)
	queued(4)
	wait("giving up later", true)
	queued(5)
	cancel()
	if err := within(t, gone); !errors.Is(err, context.Canceled) || !errors.Is(err, driver.ErrNotApplied) {
		t.Error(err)
	}
	a.pass(k)
	wg.Wait()
	for _, want := range []string{"giving up", "giving up later", "second", "third"} {
		if got := within(t, order); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	if len(a.keys) != 0 {
		t.Errorf("%d keys are left", len(a.keys))
	}
}

// The backend asks for a lock only if none of its owners has it.
func TestAdvisoryWant(t *testing.T) {
	t.Parallel()
	grants := func(modes ...driver.Mode) *advKey {
		k := &advKey{grants: make(map[string]*advGrant)}
		for i, m := range modes {
			owner := string(rune('a' + i))
			k.grants[owner] = &advGrant{owner: owner, token: int64(9 - i), mode: m}
		}
		return k
	}
	for _, c := range []struct {
		name   string
		k      *advKey
		mode   driver.Mode
		want   int64
		holder string
	}{
		{"free", grants(), driver.Exclusive, 1, ""},
		{"free, to be shared", grants(), driver.Shared, 1, ""},
		{"held", grants(driver.Exclusive), driver.Exclusive, 0, "a"},
		{"held, to be shared", grants(driver.Exclusive), driver.Shared, 0, "a"},
		{"shared", grants(driver.Shared, driver.Shared), driver.Shared, 2, "b"},
		{"shared, wanted alone", grants(driver.Shared), driver.Exclusive, 0, "a"},
	} {
		if got := c.k.want(c.mode); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
		if got := c.k.held(); got.Holder != c.holder {
			t.Errorf("%s: held by %q, want %q", c.name, got.Holder, c.holder)
		}
	}
}

// Without a server every call ends with its context or says that nothing was done,
// and Close leaves nothing.
func TestAdvisoryUnreachable(t *testing.T) {
	t.Parallel()
	a := newAdvisory(t)
	req := driver.Request{Key: "k", Owner: "a", TTL: time.Minute, Limit: 1}
	if _, err := a.Acquire(t.Context(), req); !errors.Is(err, driver.ErrNotApplied) {
		t.Error(err)
	}
	if err := a.Release(t.Context(), driver.Lease{Key: "k", Owner: "a"}); err != nil {
		t.Errorf("withdrawing what cannot be there: %v", err)
	}
	lost, ok := errors.AsType[*driver.LostError](a.Release(t.Context(), driver.Lease{Key: "k", Owner: "a", Token: 5}))
	if !ok || lost.Token != 5 || lost.Reason != driver.ReasonSession {
		t.Errorf("%+v", lost)
	}
	req.Limit = 2
	if _, err := a.Acquire(t.Context(), req); !errors.Is(err, errors.ErrUnsupported) {
		t.Error(err)
	}
	if err := a.Listen(t.Context(), "m", func(driver.Event) {}); !errors.Is(err, driver.ErrNotApplied) {
		t.Error(err)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if _, err := a.Inspect(t.Context(), "k"); !errors.Is(err, driver.ErrClosed) {
		t.Error(err)
	}
}

// What the user's own functions do when a connection is made is an error of the
// call.
func TestAdvisoryConnectPanics(t *testing.T) {
	t.Parallel()
	a := newAdvisory(t)
	config := a.pool.Config()
	config.BeforeConnect = func(context.Context, *pgx.ConnConfig) error { panic("broken") }
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	a.pool = pool
	_, err = a.Acquire(t.Context(), driver.Request{Key: "k", Owner: "a", TTL: time.Minute, Limit: 1})
	if !errors.Is(err, driver.ErrNotApplied) || !strings.Contains(err.Error(), "broken") {
		t.Error(err)
	}
}
