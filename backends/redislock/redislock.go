package redislock

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
)

// Backend keeps locks in one Redis: a server, a primary found through
// Sentinel, or a cluster. It is safe for concurrent use.
type Backend struct {
	client redis.UniversalClient
	opts   Options
	calls  *dispatcher
	setup  setup
	// spread says that one script call may not touch several locks, as their
	// records lie in different slots.
	spread atomic.Bool
	closed chan struct{}
	ended  atomic.Bool
}

var (
	_ driver.Backend   = (*Backend)(nil)
	_ driver.Notifier  = (*Backend)(nil)
	_ driver.Inspector = (*Backend)(nil)
	_ driver.Forcer    = (*Backend)(nil)
	_ driver.Checker   = (*Backend)(nil)
)

// New returns a backend over a client, which remains the caller's to close. It
// asks the server nothing yet. A *redis.Ring is refused with an error that
// matches [errors.ErrUnsupported]: it moves a key to another server when its
// own does not answer, and the lock would be granted again there.
//
// A *redis.Client gets a hook, by which calls with a shorter time-out than the
// client's pass those hooks that it has already. Add yours before.
func New(client redis.UniversalClient, opts *Options) (*Backend, error) {
	if err := checkClient(client); err != nil {
		return nil, err
	}
	o, err := opts.withDefaults()
	if err != nil {
		return nil, err
	}
	b := &Backend{
		client: client,
		opts:   o,
		calls:  newDispatcher(client, o.Replicas, o.ReplicaTimeout),
		setup:  setup{turn: make(chan struct{}, 1)},
		closed: make(chan struct{}),
	}
	_, cluster := client.(*redis.ClusterClient)
	b.spread.Store(cluster)
	return b, nil
}

func checkClient(client redis.UniversalClient) error {
	if client == nil || reflect.ValueOf(client).Kind() == reflect.Pointer && reflect.ValueOf(client).IsNil() {
		return invalidf("client is nil")
	}
	if _, ok := client.(*redis.Ring); ok {
		return fmt.Errorf("redislock: locks over a *redis.Ring: %w", errors.ErrUnsupported)
	}
	return nil
}

// NewLockManager returns a manager over a client, which remains the caller's to
// close. A nil cfg or nil opts mean the defaults.
func NewLockManager(client redis.UniversalClient, cfg *dlm.LockConfig, opts *Options) (*dlm.Manager, error) {
	b, err := New(client, opts)
	if err != nil {
		return nil, err
	}
	return dlm.NewManager(b, cfg)
}

// Properties implements [driver.Backend].
func (b *Backend) Properties() driver.Properties {
	return driver.Properties{
		Name:           "redis",
		Tokens:         driver.TokensClock,
		LivenessWindow: b.opts.LivenessWindow,
		FairQueue:      true,
		SharedMode:     true,
		Permits:        true,
	}
}

// enter begins a call.
func (b *Backend) enter(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%w: %w", driver.ErrNotApplied, err)
	}
	if b.ended.Load() {
		return driver.ErrClosed
	}
	return b.setup.ready(ctx, b.calls, b.opts.Prefix)
}

// Acquire implements [driver.Backend].
func (b *Backend) Acquire(ctx context.Context, req driver.Request) (driver.Lease, error) {
	if err := b.enter(ctx); err != nil {
		return driver.Lease{}, err
	}
	var life time.Duration
	if req.Enqueue {
		life = b.ticketLife()
	}
	record := recordKey(b.opts.Prefix, req.Key)
	args := []any{
		req.Owner, micros(req.TTL), channel(b.opts.Prefix, req.Manager), b.kept(req.TTL), kind(req.Mode, req.Limit), micros(life),
	}
	if b.opts.Replicas > 0 {
		// A grant has to be acknowledged, so it is not handed over in the news.
		args = append(args, "wake")
	}
	reply, acked, err := b.calls.do(&call{
		ctx: ctx, script: acquireScript, keys: lockKeys(record), args: args, ack: true, owner: req.Owner,
	})
	if is(err, ProblemForeign) {
		return driver.Lease{}, b.undo(ctx, &req, err)
	}
	if err != nil {
		return driver.Lease{}, err
	}
	lease, err := acquired(&req, reply)
	if err == nil && acked < b.opts.Replicas {
		return driver.Lease{}, b.takeBack(ctx, lease, acked)
	}
	return lease, err
}

// takeBack removes a grant that too few replicas have acknowledged.
func (b *Backend) takeBack(ctx context.Context, lease driver.Lease, acked int) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), takeBackPatience)
	defer cancel()
	lost := &ServerError{
		Problem: ProblemAcknowledgement,
		Detail:  fmt.Sprintf("%d of %d replicas within %v", acked, b.opts.Replicas, b.opts.ReplicaTimeout),
	}
	if err := b.release(ctx, lease); err != nil && !errors.Is(err, driver.ErrLost) {
		// That the removal had no effect must not be taken for that of the request.
		lost.Err = fmt.Errorf("it may be there all the same: %v", err)
		return lost
	}
	return fmt.Errorf("%w: %w", driver.ErrNotApplied, lost)
}

// undo removes what a script has written before it came upon something that is not
// ours: the server keeps it.
func (b *Backend) undo(ctx context.Context, req *driver.Request, foreign error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), takeBackPatience)
	defer cancel()
	if err := b.release(ctx, driver.Lease{Key: req.Key, Owner: req.Owner}); err != nil && !is(err, ProblemForeign) {
		// Neither error is wrapped: that either call had no effect is not known of both.
		return fmt.Errorf("redislock: something may be left of the request (%v): %v", err, foreign)
	}
	return foreign
}

// takeBackPatience bounds the removal of a grant that does not count.
const takeBackPatience = time.Second

// lockKeys are the keys of a lock.
func lockKeys(record string) []string {
	return []string{record, record + queueSuffix, record + holdersSuffix}
}

// ticketLife is how long a ticket, or a grant that was handed over, lasts
// unless its waiter is heard of again.
func (b *Backend) ticketLife() time.Duration { return b.opts.LivenessWindow / 4 * 3 }

// kept is for how many milliseconds the record of a grant is kept: a ticket must
// not go with it before it has lapsed for good.
func (b *Backend) kept(ttl time.Duration) int64 {
	return max(b.opts.KeepTokens, 2*b.opts.LivenessWindow).Milliseconds() + millis(ttl)
}

// micros and millis round up, so that nothing lasts shorter than it was
// promised to.
func micros(d time.Duration) int64 { return int64((d + time.Microsecond - 1) / time.Microsecond) }
func millis(d time.Duration) int64 { return int64((d + time.Millisecond - 1) / time.Millisecond) }

// kind is how the scripts write mode and limit.
func kind(mode driver.Mode, limit int) string {
	switch {
	case mode == driver.Shared:
		return "s1"
	case limit == 1:
		return "x1"
	}
	return "x" + strconv.Itoa(limit)
}

// parseKind is the reverse of kind.
func parseKind(s string) (driver.Mode, int, error) {
	if s == "s1" {
		return driver.Shared, 1, nil
	}
	if len(s) > 1 && s[0] == 'x' {
		if limit, err := strconv.Atoi(s[1:]); err == nil {
			return driver.Exclusive, limit, nil
		}
	}
	return 0, 0, fmt.Errorf("redislock: %q is no kind of lock", s)
}

// acquired reads the reply of the script acquire.
func acquired(req *driver.Request, reply any) (driver.Lease, error) {
	switch r := reply.(type) {
	case int64:
		return driver.Lease{Key: req.Key, Owner: req.Owner, Token: r, TTL: req.TTL, Mode: req.Mode}, nil
	case []any:
		f := fields{list: r}
		switch f.int() {
		case 0:
			held := &driver.HeldError{
				Holder: f.string(), Token: f.int(), Remaining: f.micros(), Position: int(f.int()), Ticket: f.int(),
			}
			if f.err == nil {
				return driver.Lease{}, held
			}
		case 1:
			return driver.Lease{}, &driver.LimitError{Key: req.Key, Want: req.Limit, Have: int(f.int())}
		case 2:
			return driver.Lease{}, invalidf("owner holds key %q in another mode or with another limit", req.Key)
		}
	}
	return driver.Lease{}, fmt.Errorf("redislock: strange reply: %v", reply)
}

// Extend implements [driver.Backend].
func (b *Backend) Extend(ctx context.Context, batch []driver.Renewal) {
	if err := b.enter(ctx); err != nil {
		fail(batch, err)
		return
	}
	if b.spread.Load() {
		b.extendSpread(ctx, batch)
		return
	}
	err := b.extend(ctx, batch)
	if says, ok := serverSays(err); ok && len(batch) > 1 && strings.HasPrefix(says, "CROSSSLOT") {
		// It is a cluster, though the client does not know.
		b.spread.Store(true)
		b.extendSpread(ctx, batch)
		return
	}
	if err != nil {
		fail(batch, err)
	}
}

func fail(batch []driver.Renewal, err error) {
	for i := range batch {
		batch[i].Err = err
	}
}

// extend renews grants of one slot.
func (b *Backend) extend(ctx context.Context, batch []driver.Renewal) error {
	err := b.extendAll(ctx, batch, true)
	if says, ok := serverSays(err); !ok || !strings.HasPrefix(says, "TRYAGAIN") {
		return err
	}
	// The slot is on its way to another node. Until it is there, which can take
	// longer than a lock lasts, only calls with a single key are served.
	var wg sync.WaitGroup
	for i := range batch {
		wg.Go(func() {
			if err := b.extendAll(ctx, batch[i:i+1], false); err != nil {
				batch[i].Err = err
			}
		})
	}
	wg.Wait()
	return nil
}

// extendAll renews grants in one call. It names the keys of their holders only
// if holders is set: a lock without limit or mode has none.
func (b *Backend) extendAll(ctx context.Context, batch []driver.Renewal, holders bool) error {
	keys := make([]string, 0, 2*len(batch))
	args := make([]any, 0, 1+4*len(batch))
	args = append(args, b.kept(0))
	for i := range batch {
		l := &batch[i].Lease
		record := recordKey(b.opts.Prefix, l.Key)
		keys = append(keys, record)
		if holders {
			keys = append(keys, record+holdersSuffix)
		}
		args = append(args, l.Owner, l.Token, micros(l.TTL), b.kept(l.TTL))
	}
	reply, acked, err := b.calls.do(&call{ctx: ctx, script: extendScript, keys: keys, args: args, ack: true})
	if err != nil {
		return err
	}
	answers, _ := reply.([]any)
	if len(answers) != len(batch) {
		return fmt.Errorf("redislock: strange reply: %v", reply)
	}
	for i := range batch {
		batch[i].Err = renewed(&batch[i].Lease, answers[i])
		batch[i].Lease.Age = 0
		if batch[i].Err == nil && acked < b.opts.Replicas {
			batch[i].Err = &ServerError{
				Problem: ProblemAcknowledgement,
				Detail:  fmt.Sprintf("%d of %d replicas within %v", acked, b.opts.Replicas, b.opts.ReplicaTimeout),
			}
		}
	}
	return nil
}

// extendSpread renews grants in one call for each slot.
func (b *Backend) extendSpread(ctx context.Context, batch []driver.Renewal) {
	slots := make(map[int][]int)
	for i := range batch {
		s := slot(escapeKey(batch[i].Lease.Key))
		slots[s] = append(slots[s], i)
	}
	ended := make(chan struct{}, len(slots))
	for _, places := range slots {
		go func() {
			defer func() { ended <- struct{}{} }()
			part := make([]driver.Renewal, len(places))
			for i, place := range places {
				part[i] = batch[place]
			}
			if err := b.extend(ctx, part); err != nil {
				fail(part, err)
			}
			for i, place := range places {
				batch[place] = part[i]
			}
		}()
	}
	for range slots {
		<-ended
	}
}

// nestedError is what the server refused, within a reply.
type nestedError string

func (e nestedError) Error() string { return string(e) }

// RedisError makes it a [redis.Error].
func (nestedError) RedisError() {}

// renewed turns the answer for one renewal into an error.
func renewed(l *driver.Lease, answer any) error {
	switch a := answer.(type) {
	case int64:
		return gone(l, a)
	case string:
		return classify(nestedError(a))
	}
	return fmt.Errorf("redislock: strange reply: %v", answer)
}

// gone turns the answer for one grant into an error.
func gone(l *driver.Lease, answer int64) error {
	switch answer {
	case 1:
		return nil
	case 2:
		return &driver.LostError{Key: l.Key, Token: l.Token, Reason: driver.ReasonTaken}
	}
	return &driver.LostError{Key: l.Key, Token: l.Token, Reason: driver.ReasonGone}
}

// Release implements [driver.Backend].
func (b *Backend) Release(ctx context.Context, lease driver.Lease) error {
	if err := b.enter(ctx); err != nil {
		return err
	}
	return b.release(ctx, lease)
}

func (b *Backend) release(ctx context.Context, lease driver.Lease) error {
	if err := b.calls.await(ctx, lease.Owner); err != nil {
		return err
	}
	record := recordKey(b.opts.Prefix, lease.Key)
	c := &call{
		ctx: ctx, script: releaseScript, keys: lockKeys(record), args: []any{lease.Owner, lease.Token, b.kept(0)},
	}
	reply, _, err := b.calls.do(c)
	if err != nil {
		return err
	}
	answer, ok := reply.(int64)
	if !ok {
		return fmt.Errorf("redislock: strange reply: %v", reply)
	}
	return released(c, &lease, answer)
}

// released turns the answer to a release into an error.
func released(c *call, l *driver.Lease, answer int64) error {
	if answer != 1 && c.repeated {
		// It may have been there the first time.
		return fmt.Errorf("redislock: %w to a release, and then the grant was not there", errNoReply)
	}
	return gone(l, answer)
}

// Close implements [driver.Backend]. The client stays open.
func (b *Backend) Close() error {
	if !b.ended.Swap(true) {
		close(b.closed)
	}
	return nil
}
