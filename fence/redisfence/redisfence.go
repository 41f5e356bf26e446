// Package redisfence guards keys of a Redis with fencing tokens: one script
// checks the token and does the write. Package fence says what a guard promises
// and what it cannot do.
//
//	guard, err := redisfence.New(client, nil)
//	if err != nil {
//		return err
//	}
//	err = dlm.WithDistributedLock(ctx, m, "account:42", 30*time.Second, func(ctx context.Context) error {
//		token := dlm.LockFromContext(ctx).Token
//		return guard.Set(ctx, "account:42", state, token, 0) // matches fence.ErrStale if it came too late
//	})
//
// # What is kept
//
// For each resource one string with the highest token that was accepted, under
// the prefix and the resource's name: "dlm:fence:{account:42}". It is in the
// same slot of a cluster as the resource's key.
//
// It has no expiry, on purpose. A stale holder is one that was away for longer
// than anybody thought possible; as soon as the record is gone, what it writes is
// accepted. The cost is one small key for each resource that was ever written.
// Remove it together with a resource that will never be written again.
//
// # What is not guaranteed
//
// A Redis that evicts keys (any maxmemory-policy that begins with allkeys) drops
// records, too. A failover to a replica that lags behind, or a restart without
// persistence, takes the record back together with the data: a stale holder whose
// refusal was forgotten that way may write again, until the next holder writes. A
// record that was removed by hand, by FLUSHDB for instance, accepts anything. Clients
// that write to the key in other ways are not held back.
//
// go-redis repeats a command whose answer did not come (MaxRetries, 3 times by
// default). A repeated [Guard.Set] is harmless as long as the holder writes one
// value after another, and waits for each answer; a script that adds something is
// not: set MaxRetries to -1, or make it safe to repeat.
//
// The redis.UniversalClient must not be a Ring with several shards, nor send
// scripts to replicas.
package redisfence

import (
	"context"
	"crypto/sha1"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/fence"
)

//go:embed check.lua
var checkLua string

// setScript writes one key.
var setScript = mustScript(`
if ARGV[2] == '0' then
	return redis.call('SET', KEYS[1], ARGV[1])
end
return redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])`)

// staleMark begins the answer to a stale token.
const staleMark = "DLMSTALE "

// Options are options of [New].
type Options struct {
	// Prefix begins the names of records. All who write to a resource must use
	// the same. It has no braces, is UTF-8, and has at most 128 bytes. Defaults to
	// "dlm:fence:".
	Prefix string
}

// Guard is a guard for keys of one Redis server or cluster. It is safe for
// concurrent use, keeps no state of its own, and need not be closed.
type Guard struct {
	client redis.Scripter
	prefix string
}

// New returns a guard over a client, which stays the caller's. Nil options mean
// the defaults. Nothing is sent. The error matches [dlm.ErrInvalid] if an argument
// is wrong.
func New(client redis.UniversalClient, opts *Options) (*Guard, error) {
	if client == nil {
		return nil, invalidf("client is nil")
	}
	g := &Guard{client: client, prefix: "dlm:fence:"}
	if opts != nil && opts.Prefix != "" {
		g.prefix = opts.Prefix
	}
	switch {
	case len(g.prefix) > 128:
		return nil, invalidf("Prefix has %d bytes, must have at most 128", len(g.prefix))
	case !utf8.ValidString(g.prefix) || strings.ContainsAny(g.prefix, "{}"):
		return nil, invalidf("Prefix is %q, must be UTF-8 without braces", g.prefix)
	}
	return g, nil
}

// Set sets a key to a value if the token is at least as high as all that were
// accepted for the key before. The value is anything that go-redis takes. A ttl
// of 0 means that the key has no expiry; else it is at least 1ms, and whole
// milliseconds count. The expiry is that of the key only; that of the record of
// its token is never.
//
// The error matches [fence.ErrStale] if the token is too low, and is then a
// [*fence.StaleError]; [dlm.ErrInvalid] if an argument is wrong; otherwise it is
// go-redis's, and unless Redis has said no, the key may have been set.
func (g *Guard) Set(ctx context.Context, key string, value any, token int64, ttl time.Duration) error {
	if ttl < 0 || ttl > 0 && ttl < time.Millisecond {
		return invalidf("ttl is %v, must be 0 or at least 1ms", ttl)
	}
	return g.Run(ctx, setScript, []string{key}, []any{value, ttl.Milliseconds()}, key, token).Err()
}

// Script is a Lua script with a check before it. It is made by [NewScript], and
// safe for concurrent use.
type Script struct{ source, sha string }

// NewScript returns a script for [Guard.Run]. In it, KEYS and ARGV are what Run
// was given. Redis keeps every script that differs, so make it once and give it
// what changes as arguments. The error matches [dlm.ErrInvalid] if the source is
// empty, or begins with a shebang line (#!lua), which would have to come before
// the check.
func NewScript(source string) (*Script, error) {
	switch {
	case strings.TrimSpace(source) == "":
		return nil, invalidf("script is empty")
	case strings.HasPrefix(source, "#!"):
		return nil, invalidf("script begins with #!, which is not supported")
	}
	source = checkLua + source
	sum := sha1.Sum([]byte(source))
	return &Script{source: source, sha: hex.EncodeToString(sum[:])}, nil
}

func mustScript(source string) *Script {
	s, err := NewScript(source)
	if err != nil {
		panic(err)
	}
	return s
}

// Run checks the token and runs a script as one step. If the token is lower than
// one that was accepted for the resource before, then the script does not run,
// and the error of the command is a [*fence.StaleError]. The token counts as seen
// also if the script fails.
//
// The resource need not be one of the keys. In a cluster all keys, and the
// resource's name, must be in one slot: give them the same part in braces. A
// resource with braces that are no such part, such as "a}b" or "{}", is refused.
//
// Otherwise the error matches [dlm.ErrInvalid] if an argument is wrong, or is
// go-redis's, [redis.Nil] included; unless Redis has said no, the script may have
// run.
func (g *Guard) Run(
	ctx context.Context, script *Script, keys []string, args []any, resource string, token int64,
) *redis.Cmd {
	fail := func(err error) *redis.Cmd {
		cmd := redis.NewCmd(ctx)
		cmd.SetErr(err)
		return cmd
	}
	if ctx == nil {
		ctx = context.Background() // of a command that is not sent
		return fail(invalidf("context is nil"))
	}
	if script == nil || script.source == "" {
		return fail(invalidf("script was not made by NewScript"))
	}
	record, err := g.record(resource, token)
	if err != nil {
		return fail(err)
	}
	// Not appended in place, where the caller's arrays would be written to.
	keys = append(keys[:len(keys):len(keys)], record)
	args = append(args[:len(args):len(args)], strconv.FormatInt(token, 10))
	cmd := g.client.EvalSha(ctx, script.sha, keys, args...)
	if redis.HasErrorPrefix(cmd.Err(), "NOSCRIPT") {
		cmd = g.client.Eval(ctx, script.source, keys, args...)
	}
	if text, ok := staleText(cmd.Err()); ok {
		highest, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			highest = 0 // not known
		}
		cmd.SetErr(&fence.StaleError{Resource: resource, Token: token, Highest: highest})
	}
	return cmd
}

// staleText returns what follows the mark in the answer to a stale token.
func staleText(err error) (string, bool) {
	var answer redis.Error
	if !errors.As(err, &answer) {
		return "", false
	}
	return strings.CutPrefix(answer.Error(), staleMark)
}

// record returns the name of the record of a resource.
func (g *Guard) record(resource string, token int64) (string, error) {
	if err := fence.Validate(resource, token); err != nil {
		return "", err
	}
	if tag, ok := hashTag(resource); ok {
		return g.prefix + "{" + tag + "}:" + resource, nil
	}
	if strings.Contains(resource, "}") {
		return "", invalidf("resource %q has a brace but no hash tag, so that nothing can be kept in its slot", resource)
	}
	return g.prefix + "{" + resource + "}", nil
}

// hashTag returns the part of a key that decides on its slot if it is not all
// of it.
func hashTag(key string) (string, bool) {
	if _, rest, ok := strings.Cut(key, "{"); ok {
		if tag, _, ok := strings.Cut(rest, "}"); ok && tag != "" {
			return tag, true
		}
	}
	return "", false
}

func invalidf(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{dlm.ErrInvalid}, args...)...)
}
