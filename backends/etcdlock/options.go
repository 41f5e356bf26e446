package etcdlock

import (
	"fmt"
	"time"
	"unicode/utf8"

	"github.com/go-dlm/dlm/driver"
)

// Options configures a backend. Nil means the defaults, and so does the zero
// value of each field.
type Options struct {
	// Prefix begins all keys, so that they meet nothing else in the same
	// cluster. All clients that are to exclude each other must use the same, and
	// no two prefixes may be the beginning of one another. Up to 128 bytes of
	// UTF-8 without NUL. Defaults to "dlm/".
	Prefix string
	// WaiterTTL is the TTL of the lease that a waiter's ticket belongs to, if
	// its lock has a longer one: how long a waiter that has died holds up those
	// behind it. It must be between 1s and 1h and is rounded up to full seconds.
	// Defaults to 20s.
	WaiterTTL time.Duration
}

const (
	defaultPrefix    = "dlm/"
	maxPrefixLen     = 128
	defaultWaiterTTL = 20 * time.Second
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
	if len(opts.Prefix) > maxPrefixLen {
		return opts, invalidf("Options.Prefix has %d bytes, must have at most %d", len(opts.Prefix), maxPrefixLen)
	}
	if !utf8.ValidString(opts.Prefix) {
		return opts, invalidf("Options.Prefix is %q, must be UTF-8", opts.Prefix)
	}
	for i := range len(opts.Prefix) {
		if opts.Prefix[i] == 0 {
			return opts, invalidf("Options.Prefix is %q, must not contain NUL", opts.Prefix)
		}
	}
	if opts.WaiterTTL == 0 {
		opts.WaiterTTL = defaultWaiterTTL
	}
	if opts.WaiterTTL < time.Second || opts.WaiterTTL > time.Hour {
		return opts, invalidf("Options.WaiterTTL is %v, must be between 1s and 1h", opts.WaiterTTL)
	}
	return opts, nil
}

func invalidf(format string, args ...any) error {
	return fmt.Errorf("%w: etcdlock: "+format, append([]any{driver.ErrInvalid}, args...)...)
}
