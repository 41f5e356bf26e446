package dlm

import (
	"os"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/go-dlm/dlm/driver"
)

// Bounds on arguments.
const (
	// MaxKeyLen is the greatest length of a key in bytes.
	MaxKeyLen = 512
	// MinTTL is the shortest time to live. Backends may raise it further.
	MinTTL = time.Millisecond
	// MaxTTL is the longest time to live.
	MaxTTL = 366 * 24 * time.Hour
	// maxLimit bounds the permits of a key.
	maxLimit = 1 << 30
	// maxLabelLen bounds the label within an owner value.
	maxLabelLen = 128
)

// Toggle is a switch whose zero value means the default of its field.
type Toggle int8

// The states of a [Toggle].
const (
	Default Toggle = iota
	On
	Off
)

// LockConfig configures a [Manager]. A nil *LockConfig means the defaults, and
// so does the zero value of each field. It is copied when the manager is made.
type LockConfig struct {
	// AutoRenew says whether locks are renewed in the background until they
	// are released. Defaults to On.
	AutoRenew Toggle
	// RenewInterval is the time from one successful renewal of a lock to the
	// next. It must be below the lock's TTL less the drift margin (see
	// [Lock.Deadline]), which is checked when the lock is asked for. Defaults
	// to a third of each lock's TTL.
	RenewInterval time.Duration
	// RetryInterval is the pause after the first failed call to the store; it
	// doubles with every further failure up to 2s (or up to RetryInterval if
	// that is longer), and each pause is cut at random by up to a half. It
	// says nothing about waiting for a held key, which is woken by the store.
	// Defaults to 50ms.
	RetryInterval time.Duration
	// MaxRetries is how many failed store calls in a row an acquisition
	// repeats before it gives up. Negative means no bound but the context.
	// Defaults to 10, which is about 8s with the default RetryInterval.
	MaxRetries int
	// CallTimeout bounds one call to the store. Defaults to 5s.
	CallTimeout time.Duration
	// MaxHold bounds how long a lock may be held in all, renewals included:
	// then it is lost with ReasonMaxHold, and released. Defaults to no bound.
	MaxHold time.Duration
	// Label tells people who holds a lock: it is the first part of every
	// [Lock.Value]. It proves nothing. Up to 128 bytes of printable UTF-8
	// without spaces. Defaults to host name, colon, process id.
	Label string
	// Observer is told of everything that happens. Defaults to nobody.
	Observer Observer
}

const (
	defaultRetryInterval = 50 * time.Millisecond
	maxRetryInterval     = 2 * time.Second
	defaultMaxRetries    = 10
	defaultCallTimeout   = 5 * time.Second
)

// withDefaults checks the configuration and fills in the defaults.
func (c *LockConfig) withDefaults() (LockConfig, error) {
	var cfg LockConfig
	if c != nil {
		cfg = *c
	}
	for _, f := range []struct {
		name  string
		value time.Duration
	}{
		{"RenewInterval", cfg.RenewInterval},
		{"RetryInterval", cfg.RetryInterval},
		{"CallTimeout", cfg.CallTimeout},
		{"MaxHold", cfg.MaxHold},
	} {
		if f.value < 0 || f.value > MaxTTL {
			return cfg, invalidf("LockConfig.%s is %v, must be between 0 and %v", f.name, f.value, MaxTTL)
		}
		if f.value > 0 && f.value < time.Millisecond {
			return cfg, invalidf("LockConfig.%s is %v, must be 0 or at least 1ms", f.name, f.value)
		}
	}
	if cfg.AutoRenew < Default || cfg.AutoRenew > Off {
		return cfg, invalidf("LockConfig.AutoRenew is %d, must be Default, On or Off", cfg.AutoRenew)
	}
	if cfg.AutoRenew == Off && cfg.RenewInterval != 0 {
		return cfg, invalidf("LockConfig.RenewInterval is %v, but AutoRenew is Off", cfg.RenewInterval)
	}
	if err := checkLabel("LockConfig.Label", cfg.Label); err != nil {
		return cfg, err
	}
	if cfg.RetryInterval == 0 {
		cfg.RetryInterval = defaultRetryInterval
	}
	if cfg.MaxRetries == 0 {
		cfg.MaxRetries = defaultMaxRetries
	}
	if cfg.CallTimeout == 0 {
		cfg.CallTimeout = defaultCallTimeout
	}
	if cfg.Label == "" {
		cfg.Label = defaultLabel()
	}
	return cfg, nil
}

// checkLabel reports what is wrong with a label; name says whose it is.
func checkLabel(name, label string) error {
	if len(label) > maxLabelLen {
		return invalidf("%s has %d bytes, must have at most %d", name, len(label), maxLabelLen)
	}
	if !utf8.ValidString(label) || strings.ContainsFunc(label, func(r rune) bool { return r <= ' ' || r == 0x7f }) {
		return invalidf("%s %q must be printable UTF-8 without spaces", name, label)
	}
	return nil
}

func defaultLabel() string {
	pid := strconv.Itoa(os.Getpid())
	host, err := os.Hostname()
	label := host + ":" + pid
	if err != nil || checkLabel("", label) != nil {
		return "pid:" + pid
	}
	return label
}

// AcquireOptions changes one acquisition. Nil means a plain exclusive lock
// that waits.
type AcquireOptions struct {
	// NoWait refuses at once, with an error matching [ErrHeld], if the key
	// cannot be granted now.
	NoWait bool
	// Shared asks for a shared lock: any number of shared locks of a key may
	// be held together, but none beside an exclusive one. Backends that
	// cannot do it return an error matching [errors.ErrUnsupported].
	Shared bool
	// Limit is how many exclusive locks of the key may be held at once.
	// Whoever uses the key at the same time must ask for the same limit, or
	// gets a [*LimitError]. Zero means 1. It cannot be combined with Shared.
	Limit int
	// MaxHold replaces LockConfig.MaxHold for this lock if it is not zero. On
	// re-entry, the nearest end counts for all nested locks.
	MaxHold time.Duration
	// Label replaces LockConfig.Label for this lock if it is not empty. On
	// re-entry it is ignored: the lock keeps its value.
	Label string
}

// checkKey reports what is wrong with a key.
func checkKey(key string) error { return checkKeyAs("key", key) }

// checkKeyAs reports what is wrong with a key that goes by this name.
func checkKeyAs(name, key string) error {
	switch {
	case key == "":
		return invalidf("%s is empty", name)
	case len(key) > MaxKeyLen:
		return invalidf("%s has %d bytes, must have at most %d", name, len(key), MaxKeyLen)
	case !utf8.ValidString(key):
		return invalidf("%s %q is not valid UTF-8", name, key)
	}
	return nil
}

func checkTTL(ttl time.Duration) error {
	if ttl < MinTTL || ttl > MaxTTL {
		return invalidf("ttl is %v, must be between %v and %v", ttl, MinTTL, MaxTTL)
	}
	return nil
}

// checkRenewInterval refuses a renewal interval that a TTL does not outlast.
func (c *LockConfig) checkRenewInterval(ttl time.Duration) error {
	if c.AutoRenew == Off || c.RenewInterval == 0 {
		return nil
	}
	if limit := ttl - driftMargin(ttl); c.RenewInterval >= limit {
		return invalidf("LockConfig.RenewInterval is %v, must be below %v for a ttl of %v", c.RenewInterval, limit, ttl)
	}
	return nil
}

// checkAutoRenew refuses a manager that does not renew its locks.
func (c *LockConfig) checkAutoRenew(what string) error {
	if c.AutoRenew == Off {
		return invalidf("LockConfig.AutoRenew is Off, must be On for %s", what)
	}
	return nil
}

// checkTerm refuses what a leader cannot lead with, for a grace.
func (c *LockConfig) checkTerm(grace time.Duration) error {
	if c.MaxHold > 0 && c.MaxHold <= grace {
		return invalidf("LockConfig.MaxHold is %v, must exceed ElectionConfig.Grace, %v", c.MaxHold, grace)
	}
	return c.checkAutoRenew("an election")
}

// driftMargin is how much earlier than the store a lock's deadline falls: one
// percent for clocks that run at different rates, and a millisecond for the
// resolution of timers, as in Redis's description of Redlock.
func driftMargin(ttl time.Duration) time.Duration {
	return min(ttl/100+time.Millisecond, ttl/2)
}

// request builds the backend's request and refuses what the backend cannot do.
func (o *AcquireOptions) request(key string, ttl time.Duration, p *driver.Properties) (driver.Request, error) {
	var opts AcquireOptions
	if o != nil {
		opts = *o
	}
	req := driver.Request{Key: key, TTL: max(ttl, p.MinTTL), Limit: 1, Enqueue: !opts.NoWait}
	if opts.Limit < 0 || opts.Limit > maxLimit {
		return req, invalidf("AcquireOptions.Limit is %d, must be between 0 and %d", opts.Limit, maxLimit)
	}
	if opts.MaxHold < 0 || opts.MaxHold > MaxTTL {
		return req, invalidf("AcquireOptions.MaxHold is %v, must be between 0 and %v", opts.MaxHold, MaxTTL)
	}
	if err := checkLabel("AcquireOptions.Label", opts.Label); err != nil {
		return req, err
	}
	if opts.Limit > 1 {
		if opts.Shared {
			return req, invalidf("AcquireOptions.Limit is %d, must be 0 or 1 for a shared lock", opts.Limit)
		}
		if !p.Permits {
			return req, unsupported("%s has no locks with a limit above 1", p.Name)
		}
		req.Limit = opts.Limit
	}
	if opts.Shared {
		if !p.SharedMode {
			return req, unsupported("%s has no shared locks", p.Name)
		}
		req.Mode = driver.Shared
	}
	return req, nil
}
