package redislock

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
)

// QuorumOptions configures a quorum. Nil means the defaults, and so does the
// zero value of each field.
type QuorumOptions struct {
	// Prefix begins all keys and channels. Locks of a quorum and locks of a
	// single Redis do not exclude each other, and must not share a prefix. Up to
	// 128 bytes of UTF-8 without braces. Defaults to "dlmq:".
	Prefix string
	// LivenessWindow bounds how long a waiter that has died can hold up those
	// behind it. It must be between 100ms and 1h. Defaults to 20s.
	LivenessWindow time.Duration
	// KeepTokens is how long the last token of a key is remembered after its
	// last lock has ended, see [Options.KeepTokens]. Defaults to 24h.
	KeepTokens time.Duration
	// NodeTimeout bounds the wait for one node in one step of a call. A node
	// that is slower does not count in that step; a majority of faster ones is
	// never kept waiting for it. Who does not wait for a lock, and is refused though
	// nobody has a majority, asks again for as long. It must be between 1ms and 1m. Defaults to
	// 250ms; half the TTL if that is less.
	NodeTimeout time.Duration
	// MaxTTL bounds the TTL of all locks. A node that comes back without its
	// data does not vote for this long, so that nothing which it had granted
	// is granted again. All clients must use the same. It must be between 1s
	// and 366 days. Defaults to 1m.
	MaxTTL time.Duration
}

const (
	defaultQuorumPrefix = "dlmq:"
	defaultNodeTimeout  = 250 * time.Millisecond
	defaultMaxTTL       = time.Minute
	// minQuorumTTL leaves the nodes some time to answer.
	minQuorumTTL = 100 * time.Millisecond
)

func (o *QuorumOptions) withDefaults() (QuorumOptions, error) {
	var opts QuorumOptions
	if o != nil {
		opts = *o
	}
	if opts.Prefix == "" {
		opts.Prefix = defaultQuorumPrefix
	}
	if err := checkPrefix("QuorumOptions", opts.Prefix); err != nil {
		return opts, err
	}
	return opts, checkDurations("QuorumOptions",
		durationField{"LivenessWindow", &opts.LivenessWindow, defaultLivenessWindow, 100 * time.Millisecond, time.Hour},
		durationField{"KeepTokens", &opts.KeepTokens, defaultKeepTokens, time.Minute, 366 * 24 * time.Hour},
		durationField{"NodeTimeout", &opts.NodeTimeout, defaultNodeTimeout, time.Millisecond, time.Minute},
		durationField{"MaxTTL", &opts.MaxTTL, defaultMaxTTL, time.Second, dlm.MaxTTL},
	)
}

// Quorum keeps locks in an odd number of Redis primaries that know nothing of
// each other, as the algorithm Redlock does: a lock is held by whoever holds it
// on a majority of them. It goes on while a minority is down, slow or cut off.
// It is safe for concurrent use.
type Quorum struct {
	nodes    []*node
	majority int
	opts     QuorumOptions
	clock    nodeClock

	setupMu sync.Mutex
	ids     map[string]int // run ids of the nodes, to tell a server given twice
	twice   error          // one was
	settled atomic.Bool    // all nodes have been looked at
	opened  atomic.Bool    // the first look at the nodes is over
	opening chan struct{}  // has room for the one who has the first look

	mu   sync.Mutex
	late map[string]*straggle // by owner
	// won are the tokens that were handed out, by owner, so that an owner who
	// asks again is told the same one whatever nodes have learned since.
	won      map[string]wonToken
	wonSweep int // at which size to forget those whose time is over

	attempts atomic.Int64 // numbers the votes
	voting   throttle

	ended  atomic.Bool
	closed chan struct{}
	rounds tasks // goroutines that ask a node
}

var (
	_ driver.Backend   = (*Quorum)(nil)
	_ driver.Notifier  = (*Quorum)(nil)
	_ driver.Inspector = (*Quorum)(nil)
	_ driver.Forcer    = (*Quorum)(nil)
	_ driver.Checker   = (*Quorum)(nil)
)

// node is one of the servers.
type node struct {
	index  int
	client redis.UniversalClient
	calls  *dispatcher
	setup  nodeSetup
}

// straggle watches over a lock about which nodes may still learn something.
type straggle struct {
	tasks    int            // under way
	released bool           // it was given up meanwhile
	undone   map[*node]bool // nodes on which it is being undone past the release
}

// wonToken is the token of a lock that was handed out.
type wonToken struct {
	key   string
	token int64
	until time.Time
}

// handedOut notes the token of a lock.
func (q *Quorum) handedOut(l *driver.Lease) {
	now := time.Now()
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.won) >= q.wonSweep {
		maps.DeleteFunc(q.won, func(_ string, w wonToken) bool { return w.until.Before(now) })
		q.wonSweep = 2*len(q.won) + 1000
	}
	q.won[l.Owner] = wonToken{l.Key, l.Token, now.Add(l.TTL)}
}

// tokenOf returns the token of a lock that was handed out, or 0.
func (q *Quorum) tokenOf(owner, key string) int64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	if w := q.won[owner]; w.key == key && time.Now().Before(w.until) {
		return w.token
	}
	return 0
}

// watch begins a task that tells nodes of a lock.
func (q *Quorum) watch(owner string) *straggle { return q.watchAll(owner, 1) }

// watchAll begins several such tasks.
func (q *Quorum) watchAll(owner string, tasks int) *straggle {
	q.mu.Lock()
	defer q.mu.Unlock()
	s := q.late[owner]
	if s == nil {
		s = &straggle{}
		q.late[owner] = s
	}
	s.tasks += tasks
	return s
}

// unwatch ends such a task.
func (q *Quorum) unwatch(owner string, s *straggle) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if s.tasks--; s.tasks == 0 && q.late[owner] == s {
		delete(q.late, owner)
	}
}

// leave marks a lock as given up. It returns nil if no task is under way.
func (q *Quorum) leave(owner string) *straggle {
	q.mu.Lock()
	defer q.mu.Unlock()
	s := q.late[owner]
	if s != nil {
		s.released = true
		// The owner may take another lock.
		delete(q.late, owner)
	}
	delete(q.won, owner)
	return s
}

// undo notes that what a node has of a lock that was given up is removed past the
// release, which then cannot tell whether it was there.
func (q *Quorum) undo(s *straggle, n *node) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if s.undone == nil {
		s.undone = make(map[*node]bool)
	}
	s.undone[n] = true
}

// wasUndone says whether undo was called.
func (q *Quorum) wasUndone(s *straggle, n *node) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return s != nil && s.undone[n]
}

// left says that the lock was given up.
func (q *Quorum) left(s *straggle) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return s.released
}

// tidy releases a lease on a node that has learned of it after it may have been
// told to release it.
func (q *Quorum) tidy(s *straggle, n *node, lease driver.Lease) {
	if q.left(s) {
		q.undo(s, n)
		ctx, cancel := context.WithTimeout(context.Background(), q.opts.NodeTimeout)
		defer cancel()
		_, _ = q.releaseOn(ctx, n, lease)
	}
}

// minNodes is the smallest number of nodes of which one may fail.
const minNodes = 3

// NewQuorum returns a backend over clients, each of which leads to another
// primary. The clients remain the caller's to close. Their number must be odd,
// and three at least: with an even number, the last one makes the quorum less
// available and no safer. Nothing is asked yet; that two clients lead to the
// same server is found out by the first calls, which then fail with
// [ProblemSameServer].
//
// A cluster, a Ring and clients of Sentinel are no nodes of a quorum: only the
// first kind is told apart and refused.
func NewQuorum(clients []redis.UniversalClient, opts *QuorumOptions) (*Quorum, error) {
	o, err := opts.withDefaults()
	if err != nil {
		return nil, err
	}
	if n := len(clients); n < minNodes || n%2 == 0 {
		return nil, invalidf("a quorum of %d clients, must be an odd number and at least %d", n, minNodes)
	}
	q := &Quorum{
		majority: len(clients)/2 + 1, opts: o, opening: make(chan struct{}, 1),
		ids: make(map[string]int), late: make(map[string]*straggle), won: make(map[string]wonToken), closed: make(chan struct{}),
	}
	for i, client := range clients {
		if err := checkClient(client); err != nil {
			return nil, fmt.Errorf("client %d: %w", i, err)
		}
		if _, ok := client.(*redis.ClusterClient); ok {
			return nil, fmt.Errorf("redislock: client %d is a cluster, must be one primary: %w", i, errors.ErrUnsupported)
		}
		for j, other := range clients[:i] {
			if other == client {
				return nil, invalidf("clients %d and %d are the same", j, i)
			}
		}
		q.nodes = append(q.nodes, &node{index: i, client: client, calls: newDispatcher(client, 0, 0)})
	}
	return q, nil
}

// NewQuorumLockManager returns a manager over a new quorum of clients, which
// remain the caller's to close. A nil cfg or nil opts mean the defaults.
func NewQuorumLockManager(clients []redis.UniversalClient, cfg *dlm.LockConfig, opts *QuorumOptions) (*dlm.Manager, error) {
	q, err := NewQuorum(clients, opts)
	if err != nil {
		return nil, err
	}
	return dlm.NewManager(q, cfg)
}

// Properties implements [driver.Backend].
func (q *Quorum) Properties() driver.Properties {
	return driver.Properties{
		Name:           "redis-quorum",
		Tokens:         driver.TokensClock,
		MinTTL:         minQuorumTTL,
		LivenessWindow: q.opts.LivenessWindow,
	}
}

// Close implements [driver.Backend]. The clients stay open.
func (q *Quorum) Close() error {
	if !q.ended.Swap(true) {
		close(q.closed)
	}
	q.rounds.wait()
	return nil
}

// enter begins a call.
func (q *Quorum) enter(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%w: %w", driver.ErrNotApplied, err)
	}
	if q.ended.Load() {
		return driver.ErrClosed
	}
	return q.ready(ctx)
}

// nodeTimeout bounds one step of a call about a lock with this TTL.
func (q *Quorum) nodeTimeout(ttl time.Duration) time.Duration {
	return max(min(q.opts.NodeTimeout, ttl/2), time.Millisecond)
}

func (q *Quorum) kept(ttl time.Duration) int64 { return q.opts.KeepTokens.Milliseconds() + millis(ttl) }

// keys are the keys of a lock on a node.
func (q *Quorum) keys(key string) []string {
	record := recordKey(q.opts.Prefix, key)
	return []string{record, record + queueSuffix}
}

// markKey names the key that says since when a node has its data.
func (q *Quorum) markKey() string { return q.opts.Prefix + "!node" }

// quarantine is for how long a node without data does not vote: as long as any
// grant can last that it has forgotten, by clocks that differ in their rate.
func (q *Quorum) quarantine() int64 { return micros(q.opts.MaxTTL + q.opts.MaxTTL/50) }

// nodeClock guesses what the nodes' clocks show. It serves to propose numbers
// that all nodes can accept, so that they agree without a second round; nothing
// but that rests on it.
type nodeClock struct {
	mu     sync.Mutex
	micros int64
	at     time.Time
}

// heard notes what a node's clock showed a moment ago.
func (c *nodeClock) heard(us int64) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.micros == 0 || us > c.micros+now.Sub(c.at).Microseconds() {
		c.micros, c.at = us, now
	}
}

// guess returns what the fastest clock shows about now, or 0.
func (c *nodeClock) guess() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.micros == 0 {
		return 0
	}
	return c.micros + time.Since(c.at).Microseconds()
}
