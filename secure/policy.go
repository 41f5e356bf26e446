package secure

import (
	"context"
	"fmt"
	"math"
	"regexp"
	"strings"
	"time"

	"github.com/go-dlm/dlm"
)

// Unlimited switches a bound off, in those fields of [Policy] and [Limits] that
// say so.
const Unlimited = -1

// MaxClientLen is the greatest length of a client's id in bytes.
const MaxClientLen = 256

// maxCount bounds what is counted, and the burst of a rate.
const maxCount = 1 << 30

// Policy says what clients may do. A nil *Policy means the defaults, and so does
// the zero value of each field. It is copied when the wrapper is made. Its
// functions must be safe for concurrent use.
type Policy struct {
	// Client finds out for whom a call is made. It gets the context of the call;
	// for ReleaseLock one that does not end, because a lock is to be released
	// after its client has gone. A client without an id, "", has the id
	// Anonymous. An error refuses the call. Defaults to [ClientFromContext].
	Client func(ctx context.Context) (string, error)
	// Anonymous is the id of clients without one, who share its limits and may
	// release each other's locks; no client that is known should have the same.
	// Defaults to refusing them.
	Anonymous string
	// MaxClients is how many clients are remembered, at less than a kilobyte
	// each. As others come, those without locks and waiting calls are forgotten
	// when that makes no difference to their rate; and, if there are too many, the
	// one that was away for longest, who may then make a burst of calls again. If
	// all of them have locks or wait, a further one is refused. From 1 to 2^30.
	// Defaults to 10,000.
	MaxClients int

	// KeyPattern is a regular expression (see [regexp/syntax]) that keys match
	// as a whole. Defaults to printable characters without spaces,
	// `[\pL\pM\pN\pP\pS]+`.
	KeyPattern string
	// MaxKeyLen is the greatest length of a key in bytes, from 1 to
	// [dlm.MaxKeyLen], which is the default.
	MaxKeyLen int
	// Prefix is what the client's keys must begin with; if it is false, the client
	// has no keys at all. End it in a separator: "a" is also a prefix of what
	// belongs to "ab". See [OwnPrefix]. The prefix is required, not added: keys
	// are the same here, in [dlm.Lock], in errors, and in the store. Defaults to
	// all keys for all clients.
	Prefix func(client string) (prefix string, ok bool)

	// MinTTL and MaxTTL bound the time to live that may be asked for, by
	// ExtendLock, too. From 1ms to [dlm.MaxTTL]. The store may grant more where
	// it has a floor. Default to 1s and 5m.
	MinTTL, MaxTTL time.Duration
	// MaxWait bounds how long an acquisition may take, waiting in the queue
	// included. From 1ms to [dlm.MaxTTL], or Unlimited. Defaults to 1m.
	MaxWait time.Duration
	// MaxHold bounds how long a lock may be held in all, renewals included: then
	// it is lost with ReasonMaxHold. It replaces LockConfig.MaxHold of the
	// manager; a caller may ask for less, but not for more. From 1ms to
	// [dlm.MaxTTL]. Defaults to what LockConfig and the caller say.
	MaxHold time.Duration
	// MaxPermits bounds AcquireOptions.Limit, the capacity of semaphores. From
	// 1 to 2^30. Defaults to 1,000.
	MaxPermits int

	// PerClient limits each client by itself. Defaults to 100 calls a second,
	// 1,000 locks held and 100 acquisitions under way.
	PerClient Limits
	// Total limits all clients together. Defaults to 10,000 calls a second,
	// 100,000 locks held and 10,000 acquisitions under way.
	Total Limits

	// Observer is told of what is admitted and refused. Defaults to nobody.
	Observer Observer
}

// Limits bounds what one client does, or all of them. A zero field means the
// default, Unlimited no bound.
type Limits struct {
	// Rate is how many calls a second are admitted in the long run. Acquisitions
	// and GetLock count, whatever becomes of them. ExtendLock counts for the client
	// only and not in all, so that no client can make another lose its locks.
	// ReleaseLock does not count and is never refused for a limit.
	Rate float64
	// Burst is how many calls are admitted at once after a pause, from 1 to 2^30.
	// Defaults to the calls of one second, at least 1. It must be zero if Rate is
	// Unlimited.
	Burst int
	// Held is how many locks may be held at once, up to 2^30. An acquisition
	// under way counts, since it may become a lock at any time.
	Held int
	// Waiting is how many acquisitions may be under way at once, in a queue or on
	// their way to the store and back, up to 2^30.
	Waiting int
}

var (
	defaultPerClient = Limits{Rate: 100, Held: 1_000, Waiting: 100}
	defaultTotal     = Limits{Rate: 10_000, Held: 100_000, Waiting: 10_000}
)

const (
	defaultKeyPattern = `[\pL\pM\pN\pP\pS]+`
	defaultMaxClients = 10_000
	defaultMinTTL     = time.Second
	defaultMaxTTL     = 5 * time.Minute
	defaultMaxWait    = time.Minute
	defaultMaxPermits = 1_000
)

// OwnPrefix is a Policy.Prefix that gives every client the keys that begin with
// its id and the separator, such as "billing:". Clients with the separator in their
// id have no keys: "a:b:" lies within "a:". An empty separator gives nobody keys.
func OwnPrefix(separator string) func(client string) (string, bool) {
	return func(client string) (string, bool) {
		return client + separator, separator != "" && !strings.Contains(client, separator)
	}
}

// withDefaults checks the policy and fills in the defaults.
func (p *Policy) withDefaults() (Policy, *regexp.Regexp, error) {
	var out Policy
	if p != nil {
		out = *p
	}
	if out.Client == nil {
		out.Client = func(ctx context.Context) (string, error) { return ClientFromContext(ctx), nil }
	}
	if out.Anonymous != "" {
		if fault := clientFault(out.Anonymous); fault != "" {
			return out, nil, invalidf("Policy.Anonymous %q %s", clip(out.Anonymous, MaxClientLen), fault)
		}
	}
	if out.KeyPattern == "" {
		out.KeyPattern = defaultKeyPattern
	}
	// By itself first: "a)|(b" would be well-formed within the brackets.
	if _, err := regexp.Compile(out.KeyPattern); err != nil {
		return out, nil, invalidf("Policy.KeyPattern is no regular expression: %w", err)
	}
	pattern, err := regexp.Compile(`\A(?:` + out.KeyPattern + `)\z`)
	if err != nil {
		return out, nil, invalidf("Policy.KeyPattern is no regular expression: %w", err)
	}
	for _, f := range []struct {
		name     string
		value    *int
		def, max int
	}{
		{"MaxClients", &out.MaxClients, defaultMaxClients, maxCount},
		{"MaxKeyLen", &out.MaxKeyLen, dlm.MaxKeyLen, dlm.MaxKeyLen},
		{"MaxPermits", &out.MaxPermits, defaultMaxPermits, maxCount},
	} {
		if *f.value == 0 {
			*f.value = f.def
		}
		if *f.value < 1 || *f.value > f.max {
			return out, nil, invalidf("Policy.%s is %d, must be between 1 and %d", f.name, *f.value, f.max)
		}
	}
	for _, f := range []struct {
		name  string
		value *time.Duration
		def   time.Duration
		off   bool // may be Unlimited
	}{
		{"MinTTL", &out.MinTTL, defaultMinTTL, false},
		{"MaxTTL", &out.MaxTTL, defaultMaxTTL, false},
		{"MaxWait", &out.MaxWait, defaultMaxWait, true},
		{"MaxHold", &out.MaxHold, 0, false},
	} {
		if *f.value == 0 {
			*f.value = f.def
		}
		if v := *f.value; v != f.def && (v < time.Millisecond || v > dlm.MaxTTL) && !(f.off && v == Unlimited) {
			or := ""
			if f.off {
				or = ", or Unlimited"
			}
			return out, nil, invalidf("Policy.%s is %v, must be between 1ms and %v%s", f.name, v, dlm.MaxTTL, or)
		}
	}
	if out.MinTTL > out.MaxTTL {
		return out, nil, invalidf("Policy.MinTTL is %v, must be at most Policy.MaxTTL, which is %v", out.MinTTL, out.MaxTTL)
	}
	if out.PerClient, err = out.PerClient.withDefaults("Policy.PerClient", defaultPerClient); err != nil {
		return out, nil, err
	}
	if out.Total, err = out.Total.withDefaults("Policy.Total", defaultTotal); err != nil {
		return out, nil, err
	}
	return out, pattern, nil
}

func (l Limits) withDefaults(name string, def Limits) (Limits, error) {
	if l.Rate == 0 {
		l.Rate = def.Rate
	}
	if l.Rate != Unlimited && !(l.Rate > 0 && l.Rate <= maxCount) {
		return l, invalidf("%s.Rate is %v, must be above 0 and at most %d, or Unlimited", name, l.Rate, maxCount)
	}
	switch {
	case l.Rate == Unlimited && l.Burst != 0:
		return l, invalidf("%s.Burst is %d, but Rate is Unlimited", name, l.Burst)
	case l.Rate != Unlimited && l.Burst == 0:
		l.Burst = int(math.Ceil(l.Rate))
	}
	if l.Burst < 0 || l.Burst > maxCount {
		return l, invalidf("%s.Burst is %d, must be between 0 and %d", name, l.Burst, maxCount)
	}
	for _, f := range []struct {
		name  string
		value *int
		def   int
	}{
		{"Held", &l.Held, def.Held},
		{"Waiting", &l.Waiting, def.Waiting},
	} {
		if *f.value == 0 {
			*f.value = f.def
		}
		if *f.value != Unlimited && (*f.value < 1 || *f.value > maxCount) {
			return l, invalidf("%s.%s is %d, must be between 1 and %d, or Unlimited", name, f.name, *f.value, maxCount)
		}
	}
	return l, nil
}

// invalidf says what is wrong with an argument.
func invalidf(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{dlm.ErrInvalid}, args...)...)
}
