package pglock

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/go-dlm/dlm/driver"
)

// Options configures a backend. Nil means the defaults, and so does the zero
// value of each field.
type Options struct {
	// Schema is the schema of the tables and functions. All clients that are to
	// exclude each other must use the same. Up to 63 bytes of UTF-8. Defaults to
	// "dlm".
	Schema string
	// Prefix begins the names of all tables, indexes and functions, for a schema
	// that is shared with others. Up to 32 bytes of UTF-8. Defaults to none.
	Prefix string
	// LivenessWindow bounds how long a waiter that has died can hold up those
	// behind it. It must be between 100ms and 1h. Defaults to 20s.
	LivenessWindow time.Duration
	// KeepTokens is how long the row of a key is kept at least after its last
	// lock has ended. After that the last token of all such keys together is
	// remembered, and tokens go on rising from there. It must be between 1m and
	// 366 days. Defaults to 24h.
	KeepTokens time.Duration
	// PollInterval is how often a waiter looks again while there are no
	// notifications: behind a pooler in transaction mode, over database/sql, or
	// while the listening connection is down. It must be between 10ms and 1m.
	// Defaults to 500ms.
	PollInterval time.Duration
}

const (
	defaultSchema         = "dlm"
	maxNameLen            = 63
	maxPrefixLen          = 32
	defaultLivenessWindow = 20 * time.Second
	defaultKeepTokens     = 24 * time.Hour
	defaultPollInterval   = 500 * time.Millisecond
)

// withDefaults checks the options and fills in the defaults.
func (o *Options) withDefaults() (Options, error) {
	var opts Options
	if o != nil {
		opts = *o
	}
	if opts.Schema == "" {
		opts.Schema = defaultSchema
	}
	for _, f := range []struct {
		name, value string
		most        int
	}{
		{"Schema", opts.Schema, maxNameLen},
		{"Prefix", opts.Prefix, maxPrefixLen},
	} {
		switch {
		case len(f.value) > f.most:
			return opts, invalidf("Options.%s has %d bytes, must have at most %d", f.name, len(f.value), f.most)
		case !utf8.ValidString(f.value) || strings.ContainsRune(f.value, 0):
			return opts, invalidf("Options.%s is %q, must be UTF-8 without zero bytes", f.name, f.value)
		}
	}
	for _, f := range []struct {
		name                string
		value               *time.Duration
		preset, least, most time.Duration
	}{
		{"LivenessWindow", &opts.LivenessWindow, defaultLivenessWindow, 100 * time.Millisecond, time.Hour},
		{"KeepTokens", &opts.KeepTokens, defaultKeepTokens, time.Minute, 366 * 24 * time.Hour},
		{"PollInterval", &opts.PollInterval, defaultPollInterval, 10 * time.Millisecond, time.Minute},
	} {
		if *f.value == 0 {
			*f.value = f.preset
		}
		if *f.value < f.least || *f.value > f.most {
			return opts, invalidf("Options.%s is %v, must be between %v and %v", f.name, *f.value, f.least, f.most)
		}
	}
	return opts, nil
}

func invalidf(format string, args ...any) error {
	return fmt.Errorf("%w: pglock: "+format, append([]any{driver.ErrInvalid}, args...)...)
}

// quote makes a name an identifier of SQL.
func quote(name string) string { return `"` + strings.ReplaceAll(name, `"`, `""`) + `"` }

// name is the full name of a table or function.
func (o *Options) name(of string) string { return quote(o.Schema) + "." + quote(o.Prefix+of) }

// ticketLife is how long a ticket, or a grant that was handed over, lasts
// unless its waiter is heard of again.
func (o *Options) ticketLife() time.Duration { return o.LivenessWindow / 4 * 3 }

// kept is for how long the row of a key is kept: tickets must not outlive it.
func (o *Options) kept() int64 { return micros(max(o.KeepTokens, 2*o.LivenessWindow)) }

// channel is the name on which a manager listens: an identifier of fixed length,
// as those of PostgreSQL are cut at 63 bytes.
func (o *Options) channel(manager string) string {
	if manager == "" {
		return ""
	}
	sum := sha256.Sum256([]byte(o.Schema + "\x00" + o.Prefix + "\x00" + manager))
	return "dlm_" + hex.EncodeToString(sum[:20])
}

// micros rounds up, so that nothing lasts shorter than it was promised to.
func micros(d time.Duration) int64 { return int64((d + time.Microsecond - 1) / time.Microsecond) }
