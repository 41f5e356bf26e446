package gocronlock

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-co-op/gocron/v2"

	"github.com/go-dlm/dlm"
)

// Options configures a [Locker]. Nil means the defaults.
type Options struct {
	// Prefix begins the names of all jobs, so that they meet no other locks of
	// the store. All schedulers must use the same. Defaults to "gocron/".
	Prefix string
}

const defaultPrefix = "gocron/"

// Locker is a [gocron.Locker]. It is safe for concurrent use.
type Locker struct {
	m       dlm.LockManager
	minHold time.Duration
	prefix  string

	mu   sync.Mutex
	jobs map[string]*dlm.Once // by name
}

var (
	_ gocron.Locker  = (*Locker)(nil)
	_ gocron.Lock    = lock{}
	_ gocron.Elector = (*Elector)(nil)
)

// NewLocker returns a locker. A job that begins to run on one node is not begun
// on another for as long as it runs, nor within the minimum hold from its
// beginning. That must be longer than the schedulers are apart from each other,
// and shorter than the time from the beginning of a run to that of the next, or
// runs are left out; an interval less twice the skew is the upper end.
//
// All schedulers must give a job the same name, and its own: see
// [gocron.WithName].
func NewLocker(m dlm.LockManager, minHold time.Duration, opts *Options) (*Locker, error) {
	l := &Locker{m: m, minHold: minHold, prefix: defaultPrefix, jobs: make(map[string]*dlm.Once)}
	if opts != nil && opts.Prefix != "" {
		l.prefix = opts.Prefix
	}
	// A prefix is as good as a job for finding out what is wrong.
	if _, err := dlm.NewOnce(m, l.prefix, minHold); err != nil {
		return nil, err
	}
	return l, nil
}

// Lock implements [gocron.Locker]. If another node has begun the run, the error
// matches [dlm.ErrHeld]; gocron skips the run, whatever the error is.
func (l *Locker) Lock(ctx context.Context, job string) (gocron.Lock, error) {
	once, err := l.job(job)
	if err != nil {
		return nil, err
	}
	claim, err := once.Claim(ctx, "")
	if err != nil {
		return nil, err
	}
	return lock{claim}, nil
}

func (l *Locker) job(name string) (*dlm.Once, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if once := l.jobs[name]; once != nil {
		return once, nil
	}
	once, err := dlm.NewOnce(l.m, l.prefix+name, l.minHold)
	if err == nil {
		l.jobs[name] = once
	}
	return once, err
}

// Wait waits until no job runs and none is held any more, or until ctx ends,
// whose error it then returns. Shut the scheduler down first. It is needed
// before the process ends where a hold does not outlast it: see [dlm.Once].
func (l *Locker) Wait(ctx context.Context) error {
	l.mu.Lock()
	var jobs []*dlm.Once
	for _, once := range l.jobs {
		jobs = append(jobs, once)
	}
	l.mu.Unlock()
	for _, once := range jobs {
		if err := once.Wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// unlockTimeout bounds an Unlock whose context has ended already, as gocron's
// does when a scheduler is shut down.
const unlockTimeout = 5 * time.Second

// lock is a [gocron.Lock].
type lock struct{ claim *dlm.Claim }

// Unlock implements [gocron.Lock].
func (l lock) Unlock(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), unlockTimeout)
	defer cancel()
	return l.claim.End(ctx)
}

// ErrNotLeader is what an [Elector] answers on nodes that do not lead.
var ErrNotLeader = errors.New("gocronlock: another node leads")

// Elector is a [gocron.Elector]. It is safe for concurrent use.
type Elector struct{ election *dlm.LeaderElection }

// NewElector returns an elector whose scheduler runs jobs while its node leads.
// The election must be run by the caller (see [dlm.LeaderElection.Start]), and be
// stopped after the scheduler.
func NewElector(election *dlm.LeaderElection) (*Elector, error) {
	if election == nil {
		return nil, fmt.Errorf("%w: election is nil", dlm.ErrInvalid)
	}
	return &Elector{election}, nil
}

// IsLeader implements [gocron.Elector]. It asks no store.
func (e *Elector) IsLeader(context.Context) error {
	if !e.election.IsLeader() {
		return ErrNotLeader
	}
	return nil
}
