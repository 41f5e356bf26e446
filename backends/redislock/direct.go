package redislock

import (
	"context"
	"runtime"
	"sync"
	"time"
	"weak"

	"github.com/redis/go-redis/v9"
)

// A client of go-redis has one time-out for all its commands. A copy with a
// shorter one ([redis.Client.WithTimeout]) shares its connections, but not the
// hooks that the user has added, which are to see every command. So a command
// that is meant for the copy goes through the client, and a hook of ours, behind
// those of the user's, passes it to the copy.

// directCommand is a command for a copy of the client.
type directCommand struct {
	command
	via *redis.Client
}

// redirect is the hook that passes such commands on.
type redirect struct{}

func (redirect) DialHook(next redis.DialHook) redis.DialHook { return next }

func (redirect) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if c, ok := cmd.(directCommand); ok {
			return c.via.Process(ctx, c.command)
		}
		return next(ctx, cmd)
	}
}

func (redirect) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// redirected are the clients that have the hook already.
var redirected sync.Map // of weak.Pointer[redis.Client]

// withTimeout returns a copy of the client with a short time-out, for
// directCommands.
func withTimeout(c *redis.Client, timeout time.Duration) *redis.Client {
	id := weak.Make(c)
	if _, known := redirected.LoadOrStore(id, struct{}{}); !known {
		c.AddHook(redirect{})
		runtime.AddCleanup(c, func(id weak.Pointer[redis.Client]) { redirected.Delete(id) }, id)
	}
	return c.WithTimeout(timeout)
}
