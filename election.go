package dlm

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"
)

// ElectionConfig configures a [LeaderElection]. A nil *ElectionConfig means the
// defaults, and so does the zero value of each field. It is copied.
type ElectionConfig struct {
	// TTL is how long the others wait for a leader that died or was cut off. It
	// must be between [MinTTL] and [MaxTTL], and longer than the manager's
	// renewal interval. The store may raise it to its floor. Defaults to 15s.
	TTL time.Duration
	// Grace is how long before the end of the lease the context of OnElected
	// ends if the lease cannot be renewed, so that the work can stop before
	// anyone else may lead. It must be below the TTL less the drift margin (see
	// [Lock.Deadline]) and one and a half renewal intervals. Leases that are
	// shorter than the TTL have a shorter one, half of what their renewal
	// leaves: after a hand-over until the first renewal, and on stores whose
	// sessions are shorter. Negative means none: the context then ends with
	// the lease. Defaults to a fifth of the TTL, or less if the renewal
	// interval leaves less.
	Grace time.Duration
	// RetryInterval is the pause after a failed campaign, which is one that the
	// manager's own retries (see [LockConfig]) did not save. It doubles with
	// every further failure up to MaxRetryInterval, and each pause is cut at
	// random by up to a half. Defaults to 100ms, or to MaxRetryInterval if that
	// is shorter.
	RetryInterval time.Duration
	// MaxRetryInterval must not be below RetryInterval. Defaults to 5s, or to
	// RetryInterval if that is longer.
	MaxRetryInterval time.Duration
	// PollInterval is how often Watch asks the store. Defaults to 1s.
	PollInterval time.Duration
}

const (
	defaultElectionTTL      = 15 * time.Second
	defaultElectionRetry    = 100 * time.Millisecond
	defaultElectionMaxRetry = 5 * time.Second
	defaultElectionPoll     = time.Second
	// overrunPatience is how long work may take to return after a sudden loss
	// before it is said to go on.
	overrunPatience = 100 * time.Millisecond
)

// withDefaults checks the configuration and fills in the defaults. It also returns
// by how much a renewal may be late.
func (c *ElectionConfig) withDefaults(m OptionsManager) (cfg ElectionConfig, late time.Duration, err error) {
	if c != nil {
		cfg = *c
	}
	for _, f := range []struct {
		name  string
		value time.Duration
	}{
		{"TTL", cfg.TTL},
		{"RetryInterval", cfg.RetryInterval},
		{"MaxRetryInterval", cfg.MaxRetryInterval},
		{"PollInterval", cfg.PollInterval},
	} {
		if f.value != 0 && (f.value < MinTTL || f.value > MaxTTL) {
			return cfg, 0, invalidf("ElectionConfig.%s is %v, must be 0 or between %v and %v", f.name, f.value, MinTTL, MaxTTL)
		}
	}
	if cfg.TTL == 0 {
		cfg.TTL = defaultElectionTTL
	}
	ttl := max(cfg.TTL, m.Properties().MinTTL)
	interval := ttl / 3
	if mgr, ok := m.(*Manager); ok {
		interval = mgr.interval(ttl)
	}
	lasts := ttl - driftMargin(ttl)
	if interval >= lasts {
		return cfg, 0, invalidf("ElectionConfig.TTL is %v, which must exceed LockConfig.RenewInterval, %v, and the drift margin, %v",
			ttl, interval, driftMargin(ttl))
	}
	late = interval / 2
	limit := lasts - interval - late
	switch {
	case cfg.Grace < 0:
		cfg.Grace = 0
	case cfg.Grace == 0:
		cfg.Grace = max(min(ttl/5, limit/2), 0)
	case cfg.Grace >= limit:
		return cfg, 0, invalidf("ElectionConfig.Grace is %v, must be below %v for a TTL of %v that is renewed every %v",
			cfg.Grace, max(limit, 0), ttl, interval)
	}
	switch {
	case cfg.RetryInterval == 0 && cfg.MaxRetryInterval == 0:
		cfg.RetryInterval, cfg.MaxRetryInterval = defaultElectionRetry, defaultElectionMaxRetry
	case cfg.RetryInterval == 0:
		cfg.RetryInterval = min(defaultElectionRetry, cfg.MaxRetryInterval)
	case cfg.MaxRetryInterval == 0:
		cfg.MaxRetryInterval = max(defaultElectionMaxRetry, cfg.RetryInterval)
	case cfg.MaxRetryInterval < cfg.RetryInterval:
		return cfg, 0, invalidf("ElectionConfig.MaxRetryInterval is %v, must be at least RetryInterval, %v",
			cfg.MaxRetryInterval, cfg.RetryInterval)
	}
	if mgr, ok := m.(*Manager); ok {
		if err := mgr.cfg.checkTerm(cfg.Grace); err != nil {
			return cfg, 0, err
		}
	}
	if cfg.PollInterval == 0 {
		cfg.PollInterval = defaultElectionPoll
	}
	return cfg, late, nil
}

// backoff is the pause after a number of failed campaigns in a row.
func (c *ElectionConfig) backoff(failures int) time.Duration {
	pause := c.RetryInterval
	for ; failures > 1 && pause < c.MaxRetryInterval; failures-- {
		pause = min(2*pause, c.MaxRetryInterval)
	}
	return jitter(pause)
}

// ElectionCallbacks are told of the terms of a node. Each may be nil. For every
// call of OnElected there is one of OnLost, and no term begins before the
// callbacks of the one before have returned.
//
// A panic in a callback ends the term: its context ends, the leadership is
// given up, and then the panic goes on in the caller of Run, or in a goroutine
// of its own after Start, where it ends the process.
//
// OnLost and OnOverrun must not call Stop or StepDown, which would wait for them.
type ElectionCallbacks struct {
	// OnElected is the work of a leader. Its context ends with the leadership,
	// before anyone else can lead: when the lease is lost or cannot be renewed
	// (see ElectionConfig.Grace), on StepDown, on Stop, and with the context of
	// Run. [context.Cause] is the loss, if it was one, and
	// [LockFromContext] gets the lock. OnElected then has to return: the
	// leadership is given up only when it has, and renewed until then. However
	// long it takes, it holds up no renewal.
	//
	// The term is a fencing token: larger than that of every leader before. Pass
	// it on to what the work changes.
	//
	// The node goes on leading if OnElected returns early. Call StepDown if
	// the work has failed, and another node is to try.
	OnElected func(ctx context.Context, term int64)
	// OnLost is called once for each call of OnElected, when its context has
	// ended and OnElected has returned. If the lease was lost meanwhile, it waits
	// for OnElected no longer than 100ms. IsLeader says no by then. Unless the
	// lease was lost, the leadership is given up when OnLost has returned, or
	// one TTL later, so that what was started in OnElected can be stopped here.
	// (A term that is lost in the very moment in which it begins, in a process
	// that stands still just then, can have OnLost begin before OnElected.)
	OnLost func(term int64)
	// OnOverrun is called before OnLost if the lease was lost, and another node
	// may lead, while OnElected still has not returned 100ms later. A program that
	// must not have two leaders at work ends itself here.
	OnOverrun func(term int64)
}

// LeaderElection makes one of the nodes that campaign for a key the leader, and
// another one when it steps down, stops or dies. The election is a lock on that
// key, its queue are the nodes that stand by, and a term is the lock's fencing
// token.
//
// What is not guaranteed: a leader that was paused past the end of its lease
// can act for a moment before it notices, and work that does not heed its
// context goes on. Only a resource that checks the term is safe from that.
// While the store cannot be reached, nobody leads for longer than a TTL.
//
// It is safe for concurrent use. Stop it before the manager is closed: Close
// does not wait for the work.
type LeaderElection struct {
	m      OptionsManager
	key    string
	nodeID string
	cfg    ElectionConfig
	late   time.Duration // by how much a renewal may be late, if the lease is long enough
	unfair bool          // whoever releases the lock may get it again before those who wait

	mu   sync.Mutex
	run  *electionRun // the last one, or nil
	term *term        // the present one, or nil
}

// electionRun is one call of Run or Start.
type electionRun struct {
	cancel context.CancelFunc
	done   chan struct{} // closed when nothing of it runs any more
	err    error         // set before done is closed
}

// term is the time for which a node leads.
type term struct {
	run    *electionRun
	lock   *Lock
	ctx    context.Context
	cancel context.CancelCauseFunc
	over   chan struct{} // closed when the leadership has been given up, or lost
	err    error         // of the release; set before over is closed
}

// termKey finds the term of an election that a context belongs to.
type termKey struct{ e *LeaderElection }

// errLeaseEnds is why a term ends before its lease.
var errLeaseEnds = fmt.Errorf("%w: the lease of the leader was not renewed in time, or may not be renewed any longer", ErrLost)

// NewLeaderElection returns a node of the election on the key. It does nothing
// yet: call Run or Start, or, for a mere observer, Leader or Watch. All nodes
// must use the same key, which nothing else may lock.
//
// The node id is what observers learn of the leader: up to 128 bytes of
// printable UTF-8 without spaces. Two nodes with the same id are two nodes all
// the same. A nil cfg means the defaults.
//
// The manager must renew its locks; its LockConfig.MaxHold bounds a term, less the
// grace, and must be longer than that. Whatever is wrong with an argument, the error
// matches [ErrInvalid], and names the field and its bound.
func NewLeaderElection(m OptionsManager, key, nodeID string, cfg *ElectionConfig) (*LeaderElection, error) {
	if m == nil {
		return nil, invalidf("manager is nil")
	}
	if err := checkKey(key); err != nil {
		return nil, err
	}
	if nodeID == "" {
		return nil, invalidf("node id is empty")
	}
	if err := checkLabel("node id", nodeID); err != nil {
		return nil, err
	}
	conf, late, err := cfg.withDefaults(m)
	if err != nil {
		return nil, err
	}
	return &LeaderElection{m: m, key: key, nodeID: nodeID, cfg: conf, late: late, unfair: !m.Properties().FairQueue}, nil
}

// Run campaigns, leads, and campaigns again, until ctx ends or Stop is called.
// It then gives the leadership up, after the work has stopped, and returns when
// nothing of the election runs any more. The context of OnElected is derived
// from ctx. The callbacks are not changed by Run; nil means none.
//
// Run returns nil if it was asked to end, or the error of the last release or
// withdrawal, such as one matching [ErrIndeterminate]: another node may then have
// to wait for the TTL. It ends by itself, with the error, if going on is pointless: the
// manager was closed ([ErrClosed]), or the key is in use for something else
// ([ErrInvalid]). Failures of the store are repeated for as long as it takes;
// the manager's [Observer] is told of them.
//
// If the election runs already, the error matches [ErrInvalid]. It may be run
// again once it has ended.
func (e *LeaderElection) Run(ctx context.Context, callbacks *ElectionCallbacks) error {
	r, ctx, err := e.begin(ctx)
	if err != nil {
		return err
	}
	return e.serve(ctx, r, callbacks)
}

// Start is Run in the background: it returns at once, and Stop ends it and
// returns its error.
func (e *LeaderElection) Start(ctx context.Context, callbacks *ElectionCallbacks) error {
	r, ctx, err := e.begin(ctx)
	if err != nil {
		return err
	}
	go func() { _ = e.serve(ctx, r, callbacks) }() // Stop returns the error
	return nil
}

// begin makes sure that there is one run at a time.
func (e *LeaderElection) begin(ctx context.Context) (*electionRun, context.Context, error) {
	if ctx == nil {
		return nil, nil, invalidf("context is nil")
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.run != nil {
		select {
		case <-e.run.done:
		default:
			return nil, nil, invalidf("the election runs already")
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	e.run = &electionRun{cancel: cancel, done: make(chan struct{})}
	return e.run, ctx, nil
}

// serve is the life of a run.
func (e *LeaderElection) serve(ctx context.Context, r *electionRun, callbacks *ElectionCallbacks) error {
	defer close(r.done)
	defer r.cancel()
	var cb ElectionCallbacks
	if callbacks != nil {
		cb = *callbacks
	}
	r.err = e.campaign(ctx, &cb)
	return r.err
}

// campaign leads whenever it is the node's turn.
func (e *LeaderElection) campaign(ctx context.Context, cb *ElectionCallbacks) error {
	failures := 0
	for {
		began := time.Now()
		// An owner for re-entry would let two nodes of a process lead at once.
		lock, err := e.m.Acquire(WithOwner(ctx, ""), e.key, e.cfg.TTL, &AcquireOptions{Label: e.nodeID})
		switch {
		case err == nil:
			asked := false // the term ended as somebody wanted it
			asked, err = e.lead(ctx, lock, cb)
			if ctx.Err() != nil || permanent(err) {
				return err
			}
			switch {
			case !asked && time.Since(began) < e.cfg.MaxRetryInterval: // terms that do not last are failures
				if failures++; failures > 1 {
					sleep(ctx, ctx, e.cfg.backoff(failures-1))
				}
			case e.unfair:
				failures = 0
				sleep(ctx, ctx, e.cfg.backoff(1))
			default:
				failures = 0
			}
		case ctx.Err() != nil && errors.Is(err, ErrIndeterminate):
			return err
		case ctx.Err() != nil:
			return nil
		case permanent(err):
			return err
		default:
			failures++
			sleep(ctx, ctx, e.cfg.backoff(failures))
		}
		if ctx.Err() != nil {
			return nil
		}
	}
}

// lead is one term. It returns when nothing of it runs any more, with the error
// of the release, and says whether the term has ended because that was asked for.
func (e *LeaderElection) lead(ctx context.Context, lock *Lock, cb *ElectionCallbacks) (asked bool, err error) {
	if lock.g != nil { // of another manager than the one that was checked
		if err := lock.g.m.cfg.checkTerm(e.cfg.Grace); err != nil {
			return false, errors.Join(err, e.giveUp(lock))
		}
	}
	t := &term{lock: lock, over: make(chan struct{})}
	ctx, t.cancel = context.WithCancelCause(ctx)
	defer t.cancel(nil)
	t.ctx = lock.Context(context.WithValue(ctx, termKey{e}, t))
	if t.ctx.Err() != nil {
		return false, e.giveUp(lock) // it was over before it began
	}
	e.setTerm(t)
	defer e.setTerm(nil)

	worked, concluded := make(chan struct{}), make(chan struct{})
	var panicked any
	go func() {
		defer close(concluded)
		panicked = e.conclude(t, cb, worked)
	}()
	defer func() {
		<-concluded
		if panicked != nil {
			panic(panicked)
		}
		asked, err = !errors.Is(context.Cause(t.ctx), ErrLost), t.err
	}()
	func() {
		defer close(worked)
		if cb.OnElected == nil {
			return
		}
		panics := true
		defer func() {
			if panics {
				t.cancel(nil)
			}
		}()
		cb.OnElected(t.ctx, lock.Token)
		panics = false
	}()
	<-t.ctx.Done()
	return false, nil // for what it is see above
}

// conclude ends a term: it waits for the end of its context, and of the work,
// calls OnLost and gives the leadership up. It returns what a callback panicked
// with.
func (e *LeaderElection) conclude(t *term, cb *ElectionCallbacks, worked <-chan struct{}) (panicked any) {
	e.watchLease(t)
	overrun := false
	select {
	case <-worked:
	case <-t.lock.Done():
		patience := time.NewTimer(overrunPatience)
		select {
		case <-worked:
		case <-patience.C:
			overrun = true
		}
		patience.Stop()
	}
	told := make(chan struct{})
	go func() {
		defer close(told)
		defer func() { panicked = recover() }()
		if overrun && cb.OnOverrun != nil {
			cb.OnOverrun(t.lock.Token)
		}
		if cb.OnLost != nil {
			cb.OnLost(t.lock.Token)
		}
	}()
	timer := time.NewTimer(t.lock.TTL)
	defer timer.Stop()
	select {
	case <-told:
	case <-timer.C: // a callback that hangs must not hold up the others
	case <-t.lock.Done():
	}
	t.err = e.giveUp(t.lock)
	close(t.over)
	<-told
	return panicked
}

// watchLease waits for the end of the term's context, which it ends if the lease
// was not renewed in time.
func (e *LeaderElection) watchLease(t *term) {
	if e.cfg.Grace == 0 {
		<-t.ctx.Done()
		return
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	// A renewal that has succeeded plans the next, also where the deadline is that
	// of a session which was kept alive before.
	known, plan := instant(-1), instant(-1)
	for {
		select {
		case <-t.ctx.Done():
			return
		case <-timer.C:
		}
		deadline, slack, now := t.lock.lease()
		if deadline == known && slack == plan {
			t.cancel(errLeaseEnds)
			return
		}
		known, plan = deadline, slack
		timer.Reset(deadline - min(e.cfg.Grace, max(slack-e.late, slack/2)) - now)
	}
}

// giveUp releases the lock of a leader. That it was lost is no error here: the
// context of the term says so.
func (e *LeaderElection) giveUp(lock *Lock) error {
	ctx, cancel := context.WithTimeout(context.Background(), releaseTimeout)
	defer cancel()
	err := e.m.ReleaseLock(ctx, lock)
	if errors.Is(err, ErrLost) {
		return nil
	}
	return err
}

func (e *LeaderElection) setTerm(t *term) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if t != nil {
		t.run = e.run
	}
	e.term = t
}

// leading returns the present term, or nil if the node does not lead.
func (e *LeaderElection) leading() *term {
	e.mu.Lock()
	t := e.term
	e.mu.Unlock()
	if t == nil || t.ctx.Err() != nil {
		return nil
	}
	return t
}

// Stop ends Run or Start, and waits until nothing of it runs any more, or until
// ctx ends; Stop may then be called again. It returns the error of the run (see
// Run) or of the context. Called with the context that OnElected was given, it
// does not wait, and ends the run of that term only. If nothing was started, it
// does nothing.
func (e *LeaderElection) Stop(ctx context.Context) error {
	if ctx == nil {
		return invalidf("context is nil")
	}
	if within, ok := ctx.Value(termKey{e}).(*term); ok {
		within.run.cancel()
		return nil
	}
	e.mu.Lock()
	r := e.run
	e.mu.Unlock()
	if r == nil {
		return nil
	}
	r.cancel()
	select {
	case <-r.done:
		return r.err
	default:
	}
	select {
	case <-r.done:
		return r.err
	case <-ctx.Done():
		return fmt.Errorf("dlm: the election is still ending: %w", ctxErr(ctx))
	}
}

// StepDown gives the leadership up: the context of OnElected ends, and as soon
// as it and OnLost have returned, the next node in the queue leads. This node
// queues up again, behind the others; if there are none, it leads again at once.
//
// StepDown waits until the leadership has been given up, or until ctx ends, but
// what it began goes on all the same. Called with the context that OnElected was
// given, it does not wait, and ends that term only. It returns the error of the release: if it matches
// [ErrIndeterminate], the others may have to wait for the TTL. If the node does
// not lead, it does nothing.
func (e *LeaderElection) StepDown(ctx context.Context) error {
	if ctx == nil {
		return invalidf("context is nil")
	}
	if within, ok := ctx.Value(termKey{e}).(*term); ok {
		within.cancel(nil)
		return nil
	}
	e.mu.Lock()
	t := e.term
	e.mu.Unlock()
	if t == nil {
		return nil
	}
	t.cancel(nil)
	select {
	case <-t.over:
		return t.err
	default:
	}
	select {
	case <-t.over:
		return t.err
	case <-ctx.Done():
		return fmt.Errorf("dlm: the leader is still stepping down: %w", ctxErr(ctx))
	}
}

// IsLeader says whether this node leads. The answer may be old as soon as it is
// given: work that must not outlive the leadership belongs under the context of
// OnElected, and what it changes should check the term.
func (e *LeaderElection) IsLeader() bool { return e.leading() != nil }

// Term returns the term that this node leads, or 0 if it does not lead. Terms
// rise strictly from leader to leader.
func (e *LeaderElection) Term() int64 {
	if t := e.leading(); t != nil {
		return t.lock.Token
	}
	return 0
}

// NodeID returns the id of this node.
func (e *LeaderElection) NodeID() string { return e.nodeID }

// LeaderInfo says who leads. It is zero if nobody does.
type LeaderInfo struct {
	NodeID string
	Term   int64
}

// Leader asks the store who leads. The zero LeaderInfo says that nobody does.
// The answer may be old by the time it arrives, and a leader that died is seen
// until its lease has run out. On a store that cannot be read, the error matches
// [errors.ErrUnsupported].
func (e *LeaderElection) Leader(ctx context.Context) (LeaderInfo, error) {
	info, err := e.m.GetLock(ctx, e.key)
	if err != nil || len(info.Holders) == 0 {
		return LeaderInfo{}, err
	}
	h := info.Holders[len(info.Holders)-1]
	return LeaderInfo{NodeID: labelOf(h.Owner), Term: h.Token}, nil
}

// Watch calls changed with the leader, and again whenever that has changed: for
// a new leader, a new term of the same one, and for none. It asks the store every
// ElectionConfig.PollInterval, so it may miss what lasts less, but not the last
// change. It calls changed from its own goroutine, and holds up nobody else
// while changed runs.
//
// Watch goes on until ctx ends, and returns the context's error. While the
// store cannot be read it calls nothing and goes on trying. It ends by itself
// with an error that matches [ErrClosed] or [errors.ErrUnsupported].
func (e *LeaderElection) Watch(ctx context.Context, changed func(LeaderInfo)) error {
	switch {
	case ctx == nil:
		return invalidf("context is nil")
	case changed == nil:
		return invalidf("function is nil")
	}
	known, failures := false, 0
	var last LeaderInfo
	for {
		info, err := e.Leader(ctx)
		pause := e.cfg.PollInterval - rand.N(e.cfg.PollInterval/8+1)
		switch {
		case ctx.Err() != nil:
			return ctxErr(ctx)
		case err == nil:
			failures = 0
			if !known || info != last {
				known, last = true, info
				changed(info)
			}
		case permanent(err):
			return err
		default:
			failures++
			pause = max(pause, e.cfg.backoff(failures))
		}
		sleep(ctx, ctx, pause)
	}
}
