package clockskew

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-dlm/dlm"
)

// Options configures a [Checker]. Nil means the defaults.
type Options struct {
	// MaxOffset is how far the clock may be off, from 1ms to 24h. Between fine
	// and skewed lies twice the bound of a result, a few milliseconds in one
	// building, up to some hundred through the internet. Defaults to 500ms.
	MaxOffset time.Duration
	// Timeout is how long a server is waited for, the search for its address
	// included, from 1ms to 30s. Defaults to 5s.
	Timeout time.Duration
	// MinAnswers is how many valid answers a verdict other than [Unknown] needs,
	// at most as many as there are servers. With less than the default, the
	// bound of a result also rests on one of those who answered being right.
	// Defaults to more than half of the servers.
	MinAnswers int
	// Interval is the pause between two checks of [Checker.Run], give or take a
	// tenth at random, from 1s to 24h. After a check that could not tell, the
	// pause is an eighth of it, but at least 1s, and doubles from then on until
	// it has its full length again. Defaults to 5m.
	Interval time.Duration
	// OnChange is called when a check comes to another verdict than the one
	// before; before the first, that is [Unknown]. It is called by the goroutine
	// that checks, one call at a time, and holds it up; it must not call Check.
	OnChange func(before, now Result)
}

const (
	defaultMaxOffset = 500 * time.Millisecond
	defaultTimeout   = 5 * time.Second
	defaultInterval  = 5 * time.Minute

	maxMaxOffset = 24 * time.Hour
	maxTimeout   = 30 * time.Second
	minInterval  = time.Second
	maxInterval  = 24 * time.Hour

	maxServers = 32
	// maxQuiet is how long a server that does not want to be asked is left
	// alone, at most.
	maxQuiet = 24 * time.Hour
)

func (o *Options) withDefaults(servers int) (Options, error) {
	var opts Options
	if o != nil {
		opts = *o
	}
	for _, f := range []struct {
		name          string
		value         *time.Duration
		low, high, by time.Duration
	}{
		{"MaxOffset", &opts.MaxOffset, time.Millisecond, maxMaxOffset, defaultMaxOffset},
		{"Timeout", &opts.Timeout, time.Millisecond, maxTimeout, defaultTimeout},
		{"Interval", &opts.Interval, minInterval, maxInterval, defaultInterval},
	} {
		if *f.value == 0 {
			*f.value = f.by
		}
		if *f.value < f.low || *f.value > f.high {
			return opts, invalidf("Options.%s is %v, must be 0 or between %v and %v", f.name, *f.value, f.low, f.high)
		}
	}
	if opts.MinAnswers < 0 || opts.MinAnswers > servers {
		return opts, invalidf("Options.MinAnswers is %d, must be between 0 and the number of servers, %d", opts.MinAnswers, servers)
	}
	if opts.MinAnswers == 0 {
		opts.MinAnswers = servers/2 + 1
	}
	return opts, nil
}

// invalidf says what is wrong with an argument.
func invalidf(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{dlm.ErrInvalid}, args...)...)
}

// server is one of those that are asked.
type server struct {
	name, address string
	kisses        int       // answers in a row that asked to be left alone
	quiet         time.Time // not asked before that
}

// Checker asks NTP servers by how much this machine's clock is off. It is safe for
// concurrent use, owns no goroutine unless asked, and needs no closing.
type Checker struct {
	opts    Options
	query   func(ctx context.Context, address string) (answer, error)
	running atomic.Bool

	turn    chan struct{} // holds one element while a check is under way
	servers []server      // by whose turn it is

	mu    sync.Mutex
	state Snapshot
}

// New returns a checker that asks the given servers, each a host name or an
// address, with ":port" unless it is 123. There must be at least one, at most 32,
// none twice; no server is asked that is not named here. To outvote one that is
// wrong takes three, two take five; an even number is no better than one less. Names
// that lead to the same server are several votes for it, and are not noticed.
//
// New asks nobody. Its errors match [dlm.ErrInvalid] and name what is wrong.
func New(servers []string, opts *Options) (*Checker, error) {
	if len(servers) == 0 || len(servers) > maxServers {
		return nil, invalidf("servers has %d elements, must have between 1 and %d", len(servers), maxServers)
	}
	o, err := opts.withDefaults(len(servers))
	if err != nil {
		return nil, err
	}
	c := &Checker{opts: o, query: query, turn: make(chan struct{}, 1)}
	for i, name := range servers {
		address, err := addressOf(name)
		if err != nil {
			return nil, invalidf("servers[%d]: %w", i, err)
		}
		if slices.ContainsFunc(c.servers, func(s server) bool { return strings.EqualFold(s.address, address) }) {
			return nil, invalidf("servers[%d]: %q is there twice", i, name)
		}
		c.servers = append(c.servers, server{name: name, address: address})
	}
	return c, nil
}

// Check asks all servers and keeps the result. It takes as long as the slowest
// server, at most Options.Timeout; if another check is under way, it comes after
// that one. That servers do not answer is no error but part of the result. If ctx
// ends first, the error is that of ctx, and the check counts for nothing.
func (c *Checker) Check(ctx context.Context) (Result, error) {
	if ctx == nil {
		return Result{}, invalidf("context is nil")
	}
	if err := ctx.Err(); err != nil {
		return Result{}, err
	}
	select {
	case c.turn <- struct{}{}:
	case <-ctx.Done():
		return Result{}, ctx.Err()
	}
	defer func() { <-c.turn }()
	r, err := c.ask(ctx)
	if err != nil {
		return Result{}, err
	}
	before := c.keep(r)
	if before.Verdict != r.Verdict && c.opts.OnChange != nil {
		c.opts.OnChange(before, r.clone())
	}
	return r.clone(), nil
}

// ask puts the question to all servers.
func (c *Checker) ask(ctx context.Context) (Result, error) {
	r := Result{Time: time.Now()}
	answers, errs := make([]answer, len(c.servers)), make([]error, len(c.servers))
	var wg sync.WaitGroup
	for i, s := range c.servers {
		if wait := s.quiet.Sub(r.Time); wait > 0 {
			errs[i] = fmt.Errorf("asked to be left alone, for another %v", short(wait))
			continue
		}
		r.Asked++
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, c.opts.Timeout)
			defer cancel()
			answers[i], errs[i] = c.query(ctx, s.address)
		})
	}
	wg.Wait()
	if err := ctx.Err(); err != nil {
		return Result{}, err
	}
	var valid []answer
	for i := range c.servers {
		s := &c.servers[i]
		if errs[i] != nil {
			r.Errors = append(r.Errors, ServerError{s.name, errs[i]})
		} else {
			valid = append(valid, answers[i])
			s.kisses = 0
		}
		if kiss, ok := errors.AsType[*kissError](errs[i]); ok {
			s.kisses++
			s.quiet = time.Now().Add(c.quiet(kiss.code, s.kisses))
		}
	}
	r.judge(valid, len(c.servers), c.opts.MinAnswers, c.opts.MaxOffset)
	return r, nil
}

// quiet is how long to leave a server alone that has asked for it.
func (c *Checker) quiet(code string, times int) time.Duration {
	if code == "DENY" || code == "RSTR" {
		return maxQuiet
	}
	return doubled(c.opts.Interval, times, maxQuiet)
}

// doubled returns d doubled so many times, but at most limit.
func doubled(d time.Duration, times int, limit time.Duration) time.Duration {
	for ; times > 0 && d < limit; times-- {
		d *= 2
	}
	return min(d, limit)
}

// keep makes a result the last one, and returns the one before.
func (c *Checker) keep(r Result) Result {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.state.Last
	c.state.Last = r
	c.state.Checks++
	if r.Verdict == Unknown {
		c.state.Unknown++
	} else {
		c.state.Decided = r
	}
	return before
}

// Run checks at once and then again and again, see Options.Interval, until ctx
// ends; then it returns the context's error. If Run is already running, the error
// matches [dlm.ErrInvalid]. The pauses do not go on while the machine is suspended.
func (c *Checker) Run(ctx context.Context) error {
	if ctx == nil {
		return invalidf("context is nil")
	}
	if !c.running.CompareAndSwap(false, true) {
		return invalidf("the checker is running already")
	}
	defer c.running.Store(false)
	for failures := 0; ; {
		r, err := c.Check(ctx)
		if err != nil {
			return err
		}
		if r.Verdict == Unknown {
			failures++
		} else {
			failures = 0
		}
		pause := time.NewTimer(c.pause(failures))
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return ctx.Err()
		}
	}
}

// pause is the time to the next check after so many failures in a row.
func (c *Checker) pause(failures int) time.Duration {
	d := c.opts.Interval
	if failures > 0 {
		d = doubled(max(d/8, minInterval), failures-1, d)
	}
	return d - d/10 + rand.N(d/5)
}

// Snapshot is what a [Checker] has found so far.
type Snapshot struct {
	// Last is the last result; before the first check, the zero Result.
	Last Result
	// Decided is the last result that was [Fine] or [Skewed], or the zero Result.
	Decided Result
	// Checks counts the checks, Unknown those that could not tell.
	Checks, Unknown uint64
}

// Snapshot returns what was found so far. It asks nobody and never waits for a
// check, so it may be called for every reading of a gauge.
func (c *Checker) Snapshot() Snapshot {
	c.mu.Lock()
	s := c.state
	c.mu.Unlock()
	s.Last, s.Decided = s.Last.clone(), s.Decided.clone()
	return s
}

// clone copies what the receiver could change.
func (r Result) clone() Result {
	r.Errors = slices.Clone(r.Errors)
	return r
}

// decided returns the last result that was not Unknown.
func (c *Checker) decided() Result {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state.Decided
}
