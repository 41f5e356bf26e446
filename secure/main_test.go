package secure_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/memlock"
	"github.com/go-dlm/dlm/secure"
)

func TestMain(m *testing.M) { drivertest.Main(m) }

// server is a wrapper over a manager whose way to its store can be disturbed.
type server struct {
	*secure.Manager
	inner  *dlm.Manager
	faults *drivertest.Faults
	events *recorder
}

// open returns a server. When the test is over, nothing may be counted any more,
// and the events must have paired up.
func open(t testing.TB, store *memlock.Store, policy *secure.Policy, cfg *dlm.LockConfig) *server {
	t.Helper()
	b, err := memlock.New(store, nil)
	if err != nil {
		t.Fatal(err)
	}
	s := &server{faults: drivertest.NewFaults(b), events: &recorder{}}
	if s.inner, err = dlm.NewManager(s.faults.Backend(), cfg); err != nil {
		t.Fatal(err)
	}
	var p secure.Policy
	if policy != nil {
		p = *policy
	}
	if p.Observer == nil {
		p.Observer = s.events
	}
	if s.Manager, err = secure.New(s.inner, &p); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.inner.Close(context.Background()); err != nil && !errors.Is(err, dlm.ErrClosed) {
			t.Errorf("Close: %v", err)
		}
		s.want(t, 0, 0)
		s.events.check(t)
	})
	return s
}

// want checks what is counted at this moment.
func (s *server) want(t testing.TB, held, waiting int) {
	t.Helper()
	if got := s.Stats(); got.Held != held || got.Waiting != waiting {
		t.Errorf("%d locks are counted and %d acquisitions under way, want %d and %d", got.Held, got.Waiting, held, waiting)
	}
}

// lock takes a key for a client, and fails the test if that is not possible at once.
func (s *server) lock(t testing.TB, client, key string) *dlm.Lock {
	t.Helper()
	l, err := s.TryLock(as(t, client), key, ttl)
	if err != nil {
		t.Fatalf("TryLock: %v", err)
	}
	return l
}

// ttl is the time to live in tests that do not care.
const ttl = 10 * time.Second

// as returns a context of the client.
func as(t testing.TB, client string) context.Context {
	return secure.WithClient(t.Context(), client)
}

// wantDenied checks that an error is a refusal for this reason, and its words.
func wantDenied(t testing.TB, err error, reason secure.Reason, words ...string) *secure.DeniedError {
	t.Helper()
	denied, ok := errors.AsType[*secure.DeniedError](err)
	if !ok || !errors.Is(err, secure.ErrDenied) || denied.Reason != reason {
		t.Fatalf("error is %v, want a refusal with reason %q", err, reason)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not say %q", err, w)
		}
	}
	return denied
}

// bubble runs a test in fake time.
func bubble(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, test)
}

// recorder counts events.
type recorder struct {
	mu      sync.Mutex
	kinds   [secure.EventEnded + 1]int
	reasons map[secure.Reason]int
	bad     []secure.Event
}

func (r *recorder) Observe(e secure.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.kinds[e.Kind]++
	if e.Kind == secure.EventDenied {
		if r.reasons == nil {
			r.reasons = make(map[secure.Reason]int)
		}
		r.reasons[e.Reason]++
	}
	if (e.Kind == secure.EventDenied) != (e.Reason != "") || e.Client == "" && e.Reason != secure.ReasonClient {
		r.bad = append(r.bad, e)
	}
}

func (r *recorder) denied(reason secure.Reason) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.reasons[reason]
}

// fault says what does not pair up, or returns "".
func (r *recorder) fault() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	admitted, granted := r.kinds[secure.EventAdmitted], r.kinds[secure.EventGranted]
	failed, ended := r.kinds[secure.EventFailed], r.kinds[secure.EventEnded]
	if admitted != granted+failed || granted != ended || len(r.bad) > 0 {
		return fmt.Sprintf("%d admitted, %d granted, %d failed, %d ended, bad ones: %v", admitted, granted, failed, ended, r.bad)
	}
	return ""
}

// check waits until the last events have come in.
func (r *recorder) check(t testing.TB) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); r.fault() != ""; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Errorf("events do not pair up: %s", r.fault())
			return
		}
	}
}
