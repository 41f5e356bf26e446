package redislock

import (
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/go-dlm/dlm/driver"
)

// Options configures a backend. Nil means the defaults, and so does the zero
// value of each field.
type Options struct {
	// Prefix begins all keys and channels, so that they meet nothing else in
	// the same database. All clients that are to exclude each other must use
	// the same. Up to 128 bytes of UTF-8 without braces. Defaults to "dlm:".
	Prefix string
	// LivenessWindow bounds how long a waiter that has died can hold up those
	// behind it. It must be between 100ms and 1h. Defaults to 20s.
	LivenessWindow time.Duration
	// KeepTokens is how long the last token of a key is remembered at least after its
	// last lock has ended, which takes about 150 bytes. After that the
	// server's clock alone makes tokens rise. It must be between 1m and
	// 366 days, and is to be longer than any step by which the clock may be
	// set back. Defaults to 24h.
	KeepTokens time.Duration
	// Replicas is how many replicas must have acknowledged a grant or a
	// renewal before it counts (WAIT). A grant that they have not acknowledged
	// is taken back and not handed out. It costs their round trip on every
	// acquisition, and while fewer are connected, no lock can be had. Up to 16.
	// Defaults to 0: no acknowledgement.
	Replicas int
	// ReplicaTimeout bounds the wait for acknowledgements. It must be between
	// 1ms and 1m. Defaults to 500ms.
	ReplicaTimeout time.Duration
}

const (
	defaultPrefix         = "dlm:"
	maxPrefixLen          = 128
	defaultLivenessWindow = 20 * time.Second
	defaultKeepTokens     = 24 * time.Hour
	defaultReplicaTimeout = 500 * time.Millisecond
	maxReplicas           = 16
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
	if err := checkPrefix("Options", opts.Prefix); err != nil {
		return opts, err
	}
	if opts.Replicas < 0 || opts.Replicas > maxReplicas {
		return opts, invalidf("Options.Replicas is %d, must be between 0 and %d", opts.Replicas, maxReplicas)
	}
	return opts, checkDurations("Options",
		durationField{"LivenessWindow", &opts.LivenessWindow, defaultLivenessWindow, 100 * time.Millisecond, time.Hour},
		durationField{"KeepTokens", &opts.KeepTokens, defaultKeepTokens, time.Minute, 366 * 24 * time.Hour},
		durationField{"ReplicaTimeout", &opts.ReplicaTimeout, defaultReplicaTimeout, time.Millisecond, time.Minute},
	)
}

// durationField is an option with its default and its bounds.
type durationField struct {
	name         string
	value        *time.Duration
	preset       time.Duration
	least, great time.Duration
}

// checkDurations fills in the defaults of options, and says which is out of its
// bounds.
func checkDurations(options string, fields ...durationField) error {
	for _, f := range fields {
		if *f.value == 0 {
			*f.value = f.preset
		}
		if *f.value < f.least || *f.value > f.great {
			return invalidf("%s.%s is %v, must be between %v and %v", options, f.name, *f.value, f.least, f.great)
		}
	}
	return nil
}

func checkPrefix(options, prefix string) error {
	switch {
	case len(prefix) > maxPrefixLen:
		return invalidf("%s.Prefix has %d bytes, must have at most %d", options, len(prefix), maxPrefixLen)
	case !utf8.ValidString(prefix) || strings.ContainsAny(prefix, "{}"):
		return invalidf("%s.Prefix is %q, must be UTF-8 without braces", options, prefix)
	}
	return nil
}

func invalidf(format string, args ...any) error {
	return fmt.Errorf("%w: redislock: "+format, append([]any{driver.ErrInvalid}, args...)...)
}
