package dlm_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/memlock"
)

func TestMain(m *testing.M) { drivertest.Main(m) }

// client is a manager whose way to its store can be disturbed.
type client struct {
	*dlm.Manager
	*drivertest.Faults
	events *recorder
}

// open returns a client of the store. It is closed at the end of the test, and
// must by then have nothing left.
func open(t *testing.T, store *memlock.Store, cfg *dlm.LockConfig) *client {
	t.Helper()
	b, err := memlock.New(store, nil)
	if err != nil {
		t.Fatal(err)
	}
	c := &client{Faults: drivertest.NewFaults(b), events: &recorder{}}
	var conf dlm.LockConfig
	if cfg != nil {
		conf = *cfg
	}
	conf.Observer = dlm.Observers(conf.Observer, c.events)
	c.Manager, err = dlm.NewManager(c.Backend(), &conf)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(context.Background()); err != nil && !errors.Is(err, dlm.ErrClosed) {
			t.Errorf("Close: %v", err)
		}
		if !dlm.Idle(c.Manager) {
			t.Error("the closed manager still keeps something")
		}
		c.events.check(t)
	})
	return c
}

// lock takes a key and fails the test if that is not possible at once.
func (c *client) lock(t *testing.T, key string, ttl time.Duration) *dlm.Lock {
	t.Helper()
	l, err := c.TryLock(t.Context(), key, ttl)
	if err != nil {
		t.Fatalf("TryLock: %v", err)
	}
	return l
}

// holders lists the tokens of the key's holders as the store sees them.
func (c *client) holders(t *testing.T, key string) (tokens []int64) {
	t.Helper()
	info, err := c.GetLock(t.Context(), key)
	if err != nil {
		t.Fatalf("GetLock: %v", err)
	}
	for _, h := range info.Holders {
		tokens = append(tokens, h.Token)
	}
	return tokens
}

// recorder keeps all events, and checks that they pair up.
type recorder struct {
	mu     sync.Mutex
	events []dlm.Event
}

func (r *recorder) Observe(e dlm.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
}

func (r *recorder) of(kind dlm.EventKind) []dlm.Event {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(r.events), func(e dlm.Event) bool { return e.Kind != kind })
}

func (r *recorder) check(t *testing.T) {
	t.Helper()
	ended := len(r.of(dlm.EventReleased)) + len(r.of(dlm.EventLost))
	if got := len(r.of(dlm.EventAcquired)); got != ended {
		t.Errorf("%d locks were acquired, but %d released or lost", got, ended)
	}
	if began, ended := len(r.of(dlm.EventWaiting)), len(r.of(dlm.EventWaitEnded)); began != ended {
		t.Errorf("%d waits began, but %d ended", began, ended)
	}
	for _, e := range r.events {
		if e.Duration < 0 || e.Backend == "" {
			t.Errorf("bad event: %+v", e)
		}
	}
}

// bubble runs a test in fake time.
func bubble(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, test)
}

// wantLoss checks that an error is a loss for this reason.
func wantLoss(t *testing.T, err error, reason dlm.LostReason) {
	t.Helper()
	lost, ok := errors.AsType[*dlm.LostError](err)
	if !ok || !errors.Is(err, dlm.ErrLost) || lost.Reason != reason {
		t.Errorf("error is %v, want a loss with reason %q", err, reason)
	}
}

// isDone says whether a channel is closed.
func isDone(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
