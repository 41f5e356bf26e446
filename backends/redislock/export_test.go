package redislock

import (
	"time"

	"github.com/go-dlm/dlm/driver"
)

// Internals under test.
var (
	EscapeKey     = escapeKey
	RecordKey     = recordKey
	LockKey       = lockKey
	RecordPattern = recordPattern
	Slot          = slot
	ParseEvent    = parseEvent
	Classify      = classify
	Kind          = kind
	ParseKind     = parseKind
	Older         = older
	ParseInfo     = parseInfo
)

// Defaults returns the options with their defaults.
func (o *Options) Defaults() (Options, error) { return o.withDefaults() }

// Acquired reads the reply of the script acquire.
func Acquired(req *driver.Request, reply any) (driver.Lease, error) { return acquired(req, reply) }

// ParseInspection reads the reply of the script inspect.
func ParseInspection(key string, reply any) (driver.KeyInfo, error) {
	return parseInspection(key, reply)
}

// ParsedInt reads one number of a reply.
func ParsedInt(v any) (int64, error) {
	f := fields{list: []any{v}}
	return f.int(), f.err
}

// Rounded returns a duration as the scripts get it.
func Rounded(d time.Duration) (us, ms int64) { return micros(d), millis(d) }
