package redislock

import "strings"

// Every lock has up to three keys in Redis:
//
//	dlm:{key}     its record
//	dlm:{key}:q   its queue, while somebody waits
//	dlm:{key}:h   its holders, while they are not one that excludes all others
//
// What stands between the braces decides on the slot of a cluster, so the three
// always share one.

const (
	queueSuffix   = ":q"
	holdersSuffix = ":h"
)

var (
	keyEscaper   = strings.NewReplacer("%", "%25", "}", "%7D")
	keyUnescaper = strings.NewReplacer("%7D", "}", "%25", "%")
)

// escapeKey makes a lock's key fit to stand between braces. No two keys become
// the same.
func escapeKey(key string) string {
	if !strings.ContainsAny(key, "%}") {
		return key
	}
	return keyEscaper.Replace(key)
}

// recordKey names the record of a lock.
func recordKey(prefix, key string) string {
	return prefix + "{" + escapeKey(key) + "}"
}

// lockKey is the reverse of recordKey. It returns false for what is no record's
// name.
func lockKey(prefix, record string) (string, bool) {
	rest, ok := strings.CutPrefix(record, prefix+"{")
	if !ok {
		return "", false
	}
	rest, ok = strings.CutSuffix(rest, "}")
	if !ok || rest == "" || strings.Contains(rest, "}") {
		return "", false
	}
	key := keyUnescaper.Replace(rest)
	return key, escapeKey(key) == rest
}

// channel names the channel on which a manager is told of its grants.
func channel(prefix, manager string) string {
	if manager == "" {
		return ""
	}
	return prefix + "!" + manager
}

// globEscaper makes a text stand for itself in a pattern.
var globEscaper = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`, `^`, `\^`)

// recordPattern is the pattern of the records of all locks whose keys begin
// with a prefix.
func recordPattern(prefix, keyPrefix string) string {
	return globEscaper.Replace(prefix+"{"+escapeKey(keyPrefix)) + "*}"
}
