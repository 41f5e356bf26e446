package secure

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
	"weak"

	"golang.org/x/time/rate"

	"github.com/go-dlm/dlm"
)

// gate is what all wrappers have in common: the policy, and what is counted.
type gate struct {
	policy  Policy
	pattern *regexp.Regexp
	m       dlm.LockManager
	late    string // Detail of ReasonWait

	// mu guards the rest. It is taken under the mutex of the manager when a lock
	// ends, so nothing of a lock, nor a context, may be used while it is held.
	mu      sync.Mutex
	table   table
	bucket  *rate.Limiter // of all clients, or nil
	held    int           // of all clients
	waiting int
	// holds has the locks that were granted, also after they have ended, as long
	// as somebody has them, who might release them. It does not keep them.
	holds map[weak.Pointer[dlm.Lock]]*hold
}

func newGate(m dlm.LockManager, p *Policy) (*gate, error) {
	policy, pattern, err := p.withDefaults()
	if err != nil {
		return nil, err
	}
	return &gate{
		policy: policy, pattern: pattern, m: m,
		late:   fmt.Sprintf("not acquired within %v (Policy.MaxWait)", policy.MaxWait),
		table:  table{max: policy.MaxClients, limits: policy.PerClient, clients: make(map[string]*client)},
		bucket: newBucket(policy.Total),
		holds:  make(map[weak.Pointer[dlm.Lock]]*hold),
	}, nil
}

// call is one call of a client.
type call struct {
	g      *gate
	op     string
	client string
	key    string
}

// deny refuses the call.
func (c *call) deny(reason Reason, retry time.Duration, format string, args ...any) *DeniedError {
	err := c.denied(reason, retry, fmt.Sprintf(format, args...))
	c.g.observe(Event{Kind: EventDenied, Client: err.Client, Key: err.Key, Reason: reason})
	return err
}

// denied makes the error for a refusal.
func (c *call) denied(reason Reason, retry time.Duration, detail string) *DeniedError {
	return &DeniedError{
		Op: c.op, Client: clip(c.client, MaxClientLen), Key: clip(c.key, dlm.MaxKeyLen),
		Reason: reason, Detail: detail, RetryAfter: retry,
	}
}

// begin finds out whose call it is.
func (g *gate) begin(ctx context.Context, op, key string) (*call, error) {
	if ctx == nil {
		return nil, invalidf("context is nil")
	}
	c := &call{g: g, op: op, key: key}
	id, err := g.policy.Client(ctx)
	if err != nil {
		denied := c.denied(ReasonClient, 0, "the client is not accepted")
		denied.Err = err
		g.observe(Event{Kind: EventDenied, Key: denied.Key, Reason: ReasonClient})
		return nil, denied
	}
	if c.client = id; id == "" {
		c.client = g.policy.Anonymous
	}
	if c.client == "" {
		return nil, c.deny(ReasonClient, 0, "the context names no client")
	}
	if fault := clientFault(c.client); fault != "" {
		return nil, c.deny(ReasonClient, 0, "the client's id %s", fault)
	}
	return c, nil
}

// allow takes a token of the client's for this call, and one of all clients' if
// that is wanted.
func (c *call) allow(total bool) error {
	reason, retry := c.takeTokens(total)
	switch reason {
	case "":
		return nil
	case ReasonClients:
		return c.deny(reason, retry, "all of the %d clients that can be remembered have locks or wait (Policy.MaxClients)",
			c.g.policy.MaxClients)
	case ReasonRate:
		l := c.g.policy.PerClient
		return c.deny(reason, retry, "more than %v calls a second after a burst of %d (Policy.PerClient.Rate, Burst)",
			l.Rate, l.Burst)
	default:
		l := c.g.policy.Total
		return c.deny(reason, retry, "more than %v calls a second after a burst of %d of all clients (Policy.Total.Rate, Burst)",
			l.Rate, l.Burst)
	}
}

func (c *call) takeTokens(total bool) (Reason, time.Duration) {
	g := c.g
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	// The bucket of a client that is not remembered is full.
	if known := g.table.clients[c.client]; known != nil {
		if wait := lack(known.bucket, now); wait > 0 {
			return ReasonRate, wait
		}
	}
	if total {
		if wait := lack(g.bucket, now); wait > 0 {
			return ReasonTotalRate, wait
		}
	}
	// A flood of new clients comes this far at the rate of all clients only.
	cl := g.table.enter(c.client, now)
	if cl == nil {
		return ReasonClients, quotaPause
	}
	take(cl.bucket, now)
	if total {
		take(g.bucket, now)
	}
	g.table.settle(cl)
	return "", 0
}

// checkKey checks the key against the grammar and the client's prefix.
func (c *call) checkKey() error {
	p := &c.g.policy
	if c.key == "" {
		return c.deny(ReasonKey, 0, "the key is empty")
	}
	if len(c.key) > p.MaxKeyLen {
		return c.deny(ReasonKey, 0, "the key has %d bytes, must have at most %d (Policy.MaxKeyLen)", len(c.key), p.MaxKeyLen)
	}
	if !utf8.ValidString(c.key) {
		return c.deny(ReasonKey, 0, "the key is not valid UTF-8")
	}
	if !c.g.pattern.MatchString(c.key) {
		return c.deny(ReasonKey, 0, "the key must match %s (Policy.KeyPattern)", p.KeyPattern)
	}
	if p.Prefix == nil {
		return nil
	}
	prefix, ok := p.Prefix(c.client)
	if !ok {
		return c.deny(ReasonPrefix, 0, "the client may use no keys (Policy.Prefix)")
	}
	if !strings.HasPrefix(c.key, prefix) {
		return c.deny(ReasonPrefix, 0, "the key must begin with %q (Policy.Prefix)", prefix)
	}
	return nil
}

func (c *call) checkTTL(ttl time.Duration) error {
	p := &c.g.policy
	if ttl < p.MinTTL || ttl > p.MaxTTL {
		return c.deny(ReasonTTL, 0, "ttl is %v, must be between %v and %v (Policy.MinTTL, MaxTTL)", ttl, p.MinTTL, p.MaxTTL)
	}
	return nil
}

// admit makes all checks of a call that does something with a key.
func (g *gate) admit(ctx context.Context, op, key string) (*call, error) {
	c, err := g.begin(ctx, op, key)
	if err != nil {
		return nil, err
	}
	if err := c.allow(true); err != nil {
		return nil, err
	}
	if err := c.checkKey(); err != nil {
		return nil, err
	}
	return c, nil
}

// reserve counts an acquisition, and the lock that it may become.
func (c *call) reserve() (*client, error) {
	cl, reason := c.reserveOne()
	p := &c.g.policy
	switch reason {
	case "":
		return cl, nil
	case ReasonClients:
		return nil, c.deny(reason, quotaPause, "all of the %d clients that can be remembered have locks or wait (Policy.MaxClients)",
			p.MaxClients)
	case ReasonHeld:
		return nil, c.deny(reason, quotaPause, "it has %d locks or asks for them (Policy.PerClient.Held)", p.PerClient.Held)
	case ReasonWaiting:
		return nil, c.deny(reason, quotaPause, "it has %d acquisitions under way (Policy.PerClient.Waiting)", p.PerClient.Waiting)
	case ReasonTotalHeld:
		return nil, c.deny(reason, quotaPause, "all clients have %d locks or ask for them (Policy.Total.Held)", p.Total.Held)
	default:
		return nil, c.deny(reason, quotaPause, "all clients have %d acquisitions under way (Policy.Total.Waiting)", p.Total.Waiting)
	}
}

func (c *call) reserveOne() (*client, Reason) {
	g := c.g
	g.mu.Lock()
	defer g.mu.Unlock()
	// It may have been forgotten since it took its token.
	cl := g.table.enter(c.client, time.Now())
	switch per, total := &g.policy.PerClient, &g.policy.Total; {
	case cl == nil:
		return nil, ReasonClients
	case over(per.Held, cl.held+cl.waiting):
		return nil, ReasonHeld
	case over(per.Waiting, cl.waiting):
		return nil, ReasonWaiting
	case over(total.Held, g.held+g.waiting):
		return nil, ReasonTotalHeld
	case over(total.Waiting, g.waiting):
		return nil, ReasonTotalWaiting
	}
	cl.waiting++
	g.waiting++
	g.table.settle(cl)
	return cl, ""
}

// over says whether one more is too many.
func over(limit, have int) bool { return limit != Unlimited && have >= limit }

// giveBack undoes reserve.
func (g *gate) giveBack(cl *client) {
	g.mu.Lock()
	defer g.mu.Unlock()
	cl.waiting--
	g.waiting--
	g.table.settle(cl)
}

// acquire makes an acquisition that has passed all checks but the quotas.
func (c *call) acquire(ctx context.Context, ask func(context.Context) (*dlm.Lock, error)) (lock *dlm.Lock, err error) {
	g := c.g
	cl, err := c.reserve()
	if err != nil {
		return nil, err
	}
	var granted bool
	defer func() {
		if !granted { // ask may have panicked
			g.giveBack(cl)
			g.observe(c.event(EventFailed))
		}
	}()
	g.observe(c.event(EventAdmitted))
	if owner := dlm.OwnerFromContext(ctx); owner != "" {
		// No client enters a lock of another by calling itself the same. No
		// client's id has control characters.
		ctx = dlm.WithOwner(ctx, c.client+"\x00"+owner)
	}
	var late *DeniedError
	if wait := g.policy.MaxWait; wait != Unlimited {
		late = c.denied(ReasonWait, 0, g.late)
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, wait, late)
		defer cancel()
	}
	lock, err = ask(ctx)
	switch {
	case err != nil:
		if late != nil && errors.Is(err, context.DeadlineExceeded) && errors.Is(context.Cause(ctx), late) {
			g.observe(Event{Kind: EventDenied, Client: late.Client, Key: late.Key, Reason: late.Reason})
			if !errors.Is(err, late) {
				err = fmt.Errorf("%w: %w", late, err)
			}
		}
		return nil, err
	case lock == nil:
		return nil, errors.New("secure: the manager returned neither a lock nor an error")
	}
	granted = true
	g.observe(c.event(EventGranted))
	g.hold(cl, c, lock)
	return lock, nil
}

func (c *call) event(kind EventKind) Event {
	return Event{Kind: kind, Client: c.client, Key: clip(c.key, dlm.MaxKeyLen)}
}

// hold turns the reservation into a lock, which counts until it ends.
func (g *gate) hold(cl *client, c *call, lock *dlm.Lock) {
	h := &hold{g: g, client: cl, id: cl.id}
	place := weak.Make(lock)
	ended := c.event(EventEnded)
	g.mu.Lock()
	cl.waiting--
	g.waiting--
	cl.held++
	g.held++
	g.holds[place] = h
	g.mu.Unlock()
	runtime.AddCleanup(lock, g.drop, place)
	context.AfterFunc(lock.Context(h), func() {
		h.end()
		g.observe(ended)
	})
}

// drop forgets a lock that nobody has any more.
func (g *gate) drop(place weak.Pointer[dlm.Lock]) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.holds, place)
}

// own checks that the lock is one of the client's.
func (c *call) own(lock *dlm.Lock) error {
	c.g.mu.Lock()
	h := c.g.holds[weak.Make(lock)]
	c.g.mu.Unlock()
	switch {
	case h == nil:
		return c.deny(ReasonNotHolder, 0, "the lock was not acquired here")
	case h.id != c.client:
		return c.deny(ReasonNotHolder, 0, "the lock is another client's")
	}
	return nil
}

// hold is a lock that was granted to a client. It is the parent of the context that
// ends with the lock, so that the lock counts no longer in the very moment when it
// ends: package context calls the function that AfterFunc returns when the child
// needs the parent no more. Were that to change, the lock would still be counted
// right, a moment later, by the function that hangs on the context itself.
type hold struct {
	g      *gate
	client *client
	id     string
	over   bool // guarded by gate.mu
}

var _ context.Context = (*hold)(nil)

// never is the Done channel of contexts that do not end by themselves.
var never = make(chan struct{})

func (*hold) Deadline() (time.Time, bool) { return time.Time{}, false }
func (*hold) Done() <-chan struct{}       { return never }
func (*hold) Err() error                  { return nil }
func (*hold) Value(any) any               { return nil }

// AfterFunc is never to call its argument, since a hold does not end by itself.
func (h *hold) AfterFunc(func()) (stop func() bool) {
	return func() bool {
		h.end()
		return true
	}
}

// end says that the lock has ended. Only the first call counts. The mutex of the
// manager may be held.
func (h *hold) end() {
	g := h.g
	g.mu.Lock()
	defer g.mu.Unlock()
	if h.over {
		return
	}
	h.over = true
	h.client.held--
	g.held--
	g.table.settle(h.client)
}
