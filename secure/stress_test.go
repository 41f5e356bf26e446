package secure_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/memlock"
	"github.com/go-dlm/dlm/secure"
)

// Clients do whatever they can at once, the store fails now and then, and locks
// are taken by force. No limit is passed meanwhile, and nothing is left in the end.
func TestStress(t *testing.T) {
	t.Parallel()
	const (
		clients   = 12
		workers   = 3 // of each client
		rounds    = 150
		perClient = 4
		total     = 30
	)
	s := open(t, memlock.NewStore(), &secure.Policy{
		MinTTL:     20 * time.Millisecond,
		MaxClients: clients,
		PerClient:  secure.Limits{Rate: secure.Unlimited, Held: perClient, Waiting: 2},
		Total:      secure.Limits{Rate: secure.Unlimited, Held: total, Waiting: 20},
	}, &dlm.LockConfig{MaxRetries: 1, RetryInterval: time.Millisecond, CallTimeout: 50 * time.Millisecond})
	for _, kind := range []drivertest.FaultKind{drivertest.Refuse, drivertest.Swallow, drivertest.HangAfter} {
		for _, op := range []drivertest.Op{drivertest.OpAcquire, drivertest.OpRelease, drivertest.OpExtend} {
			s.faults.Inject(drivertest.Fault{Kind: kind, Op: op, Times: 10})
		}
	}
	var granted, refused atomic.Int64
	held := make([]atomic.Int64, clients) // by what clients see, never more than there are
	var wg sync.WaitGroup
	for i := range clients * workers {
		wg.Go(func() {
			client := i / workers
			name := fmt.Sprint("client", client)
			ctx := dlm.WithOwner(as(t, name), fmt.Sprint(i))
			for range rounds {
				key := fmt.Sprint("key", rand.N(10))
				waitCtx, cancel := context.WithTimeout(ctx, time.Duration(rand.N(5_000_000)))
				l, err := s.AcquireLock(waitCtx, key, 20*time.Millisecond+time.Duration(rand.N(int64(time.Second))))
				cancel()
				if err != nil {
					if errors.Is(err, secure.ErrQuota) {
						refused.Add(1)
					}
					continue
				}
				granted.Add(1)
				if n := held[client].Add(1); n > perClient {
					t.Errorf("%s has %d locks, may have %d", name, n, perClient)
				}
				if st := s.Stats(); st.Held+st.Waiting > total {
					t.Errorf("counted: %+v, may be %d", st, total)
				}
				inner := l
				if rand.N(4) == 0 {
					if inner, err = s.TryLock(ctx, key, 30*time.Millisecond); err != nil {
						inner = l
					}
				}
				held[client].Add(-1)
				switch rand.N(6) {
				case 0:
					_, _ = s.inner.ForceRelease(ctx, key, l.Token)
					_ = s.ExtendLock(ctx, l, 50*time.Millisecond)
				case 1:
					_ = l.Release(ctx)
				case 2:
					ended, cancel := context.WithCancel(ctx)
					cancel()
					_ = s.ReleaseLock(ended, l)
				case 3:
					if err := s.ReleaseLock(as(t, "another"), l); !errors.Is(err, secure.ErrForbidden) {
						t.Errorf("another client's release: %v", err)
					}
				}
				var both sync.WaitGroup
				for _, l := range []*dlm.Lock{l, inner, l} {
					both.Go(func() { _ = s.ReleaseLock(ctx, l) })
				}
				both.Wait()
				if l.Err() == nil || inner.Err() == nil {
					t.Errorf("still held after its release: %v, %v", l.Err(), inner.Err())
				}
			}
		})
	}
	wg.Wait()
	s.want(t, 0, 0)
	t.Logf("%d acquisitions granted, %d refused for a quota", granted.Load(), refused.Load())
	if granted.Load() == 0 || refused.Load() == 0 {
		t.Error("the test did not test anything")
	}
}

// A flood of made-up clients and keys, with a client behind it that must not
// notice more than that the rate of all is used up.
func TestFlood(t *testing.T) {
	t.Parallel()
	s := open(t, memlock.NewStore(), &secure.Policy{
		MaxClients: 100,
		Total:      secure.Limits{Rate: 1000},
	}, nil)
	l := s.lock(t, "a", "key")
	before := s.faults.Calls(drivertest.OpAcquire)
	began := time.Now()
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range 5_000 {
				if l, err := s.TryLock(as(t, fmt.Sprint(w, "/", i)), "key", ttl); err == nil {
					t.Errorf("the key was held, and granted: %v", l)
				}
			}
		})
	}
	wg.Wait()
	// No more calls reached the store than the rate allows.
	most := 1000 + int(time.Since(began).Seconds()*1000) + 1
	if n := s.faults.Calls(drivertest.OpAcquire) - before; n > most {
		t.Errorf("%d calls reached the store, may be %d", n, most)
	}
	if n := s.Stats().Clients; n > 100 {
		t.Errorf("%d clients are remembered, may be 100", n)
	}
	if err := s.ExtendLock(as(t, "a"), l, time.Minute); err != nil {
		t.Errorf("ExtendLock: %v", err)
	}
	if err := s.ReleaseLock(as(t, "a"), l); err != nil {
		t.Errorf("ReleaseLock: %v", err)
	}
}
