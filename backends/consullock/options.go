package consullock

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/go-dlm/dlm/driver"
)

// Options configures a backend. Nil means the defaults, and so does the zero
// value of each field.
type Options struct {
	// Prefix begins all keys, so that they meet nothing else in the same
	// datacenter. All clients that are to exclude each other must use the same, and
	// no two prefixes may be the beginning of one another. Up to 128 letters, digits
	// and characters of "-_.:/", without a slash at the beginning, an empty part or
	// one that is . or .. between slashes. It should end with a slash. Defaults to
	// "dlm/".
	Prefix string
	// MinSessionTTL is the shortest TTL of a session, and so how soon the locks of
	// a process that died end in the store at the earliest; Consul takes up to twice
	// as long. Servers refuse less than their session_ttl_min, which is 10s by
	// default. It must be between 1s and 1h. Defaults to 10s.
	MinSessionTTL time.Duration
	// WaiterTTL is the TTL of the session that a waiter's ticket belongs to, if
	// its lock has a longer one: a waiter that has died holds up those behind it
	// for up to twice as long. It must be between 1s and 1h and is raised to
	// MinSessionTTL. Defaults to 30s, so that locks with TTLs up to that never move to
	// another session when they are granted.
	WaiterTTL time.Duration
	// LockDelay is how long a lock stays free after the session of its holder has
	// ended, by its TTL or by hand, for writes of that holder that come late. All
	// clients that are to exclude each other should use the same. It holds for locks
	// that one holds for himself, not for shared ones and permits, and costs a
	// waiter that gets the lock one more request. It must be at most 60s.
	//
	// Defaults to 0: no delay. Consul waits for a whole TTL after a holder's own
	// deadline anyway, unless somebody ends the session by hand, and resources that
	// check tokens need none.
	LockDelay time.Duration
}

const (
	defaultPrefix    = "dlm/"
	maxPrefixLen     = 128
	defaultMinTTL    = 10 * time.Second
	defaultWaiterTTL = 30 * time.Second
	maxLockDelay     = time.Minute
)

// withDefaults checks the options and fills in the defaults.
func (o *Options) withDefaults() (Options, error) {
	var opts Options
	if o != nil {
		opts = *o
	}
	if opts.Prefix == "" {
		opts.Prefix = defaultPrefix
	}
	if err := checkPrefix(opts.Prefix); err != nil {
		return opts, err
	}
	if opts.MinSessionTTL == 0 {
		opts.MinSessionTTL = defaultMinTTL
	}
	if opts.WaiterTTL == 0 {
		opts.WaiterTTL = defaultWaiterTTL
	}
	for _, d := range []struct {
		name        string
		value       time.Duration
		least, most time.Duration
	}{
		{"MinSessionTTL", opts.MinSessionTTL, time.Second, time.Hour},
		{"WaiterTTL", opts.WaiterTTL, time.Second, time.Hour},
		{"LockDelay", opts.LockDelay, 0, maxLockDelay},
	} {
		if d.value < d.least || d.value > d.most {
			return opts, invalidf("Options.%s is %v, must be between %v and %v", d.name, d.value, d.least, d.most)
		}
	}
	opts.WaiterTTL = max(opts.WaiterTTL, opts.MinSessionTTL)
	return opts, nil
}

func checkPrefix(prefix string) error {
	if len(prefix) > maxPrefixLen {
		return invalidf("Options.Prefix has %d bytes, must have at most %d", len(prefix), maxPrefixLen)
	}
	for _, c := range prefix {
		if c == utf8.RuneError || !strings.ContainsRune("-_.:/", c) && (c < '0' || c > 'z' || c > '9' && c < 'A' || c > 'Z' && c < 'a') {
			return invalidf("Options.Prefix is %q, must have only letters, digits and characters of -_.:/", prefix)
		}
	}
	parts := strings.SplitSeq(strings.TrimSuffix(prefix, "/"), "/")
	for part := range parts {
		if part == "" || part == "." || part == ".." {
			return invalidf("Options.Prefix is %q, must not begin with a slash, nor have a part that is empty, . or ..", prefix)
		}
	}
	return nil
}

// Config says how to reach Consul, for [Open]. Whoever has an api.Client already
// uses [New].
type Config struct {
	// Addresses are those of agents or servers, host:port. If one cannot be
	// reached, or fails, the next request goes to the next. Required.
	Addresses []string
	// Token is the ACL token. Defaults to the agent's own.
	Token string
	// Datacenter is asked for locks. All clients that are to exclude each other
	// must use the same. Defaults to the agent's own.
	Datacenter string
	// TLS speaks https. A ServerName that is empty is that of the address. Defaults
	// to nil: http.
	TLS *tls.Config
	// Dial connects to a server. Defaults to that of a [net.Dialer].
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
}

const maxAddresses = 64

// Validate checks a configuration and options as [Open] does, and opens nothing.
func (c *Config) Validate(opts *Options) error {
	if len(c.Addresses) == 0 || len(c.Addresses) > maxAddresses {
		return invalidf("Config.Addresses has %d addresses, must have between 1 and %d", len(c.Addresses), maxAddresses)
	}
	for i, a := range c.Addresses {
		host, port, err := net.SplitHostPort(a)
		if err != nil || host == "" || port == "" || strings.ContainsAny(a, "/, @") {
			return invalidf("Config.Addresses[%d] is %q, must be host:port", i, a)
		}
	}
	for _, f := range []struct{ name, text string }{{"Token", c.Token}, {"Datacenter", c.Datacenter}} {
		for _, r := range f.text {
			if r <= ' ' || r >= 0x7f {
				return invalidf("Config.%s must have only printable ASCII characters and no spaces", f.name)
			}
		}
	}
	_, err := opts.withDefaults()
	return err
}

func invalidf(format string, args ...any) error {
	return fmt.Errorf("%w: consullock: "+format, append([]any{driver.ErrInvalid}, args...)...)
}
