package redisfence_test

import (
	"context"
	"errors"
	"log"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/fence"
	"github.com/go-dlm/dlm/fence/redisfence"
	"github.com/go-dlm/dlm/memlock"
)

// This example needs a Redis, so it is compiled only.
//
//lint:ignore testableexamples it needs a Redis
func Example() {
	ctx := context.Background()
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379"})
	defer client.Close()
	guard, err := redisfence.New(client, nil)
	if err != nil {
		log.Fatal(err)
	}
	// The locks may be anywhere; here they are in memory, to be short.
	m, err := memlock.NewLockManager(memlock.NewStore(), nil, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close(ctx)

	withdraw, err := redisfence.NewScript(`
		if tonumber(redis.call('HGET', KEYS[1], 'balance') or 0) < tonumber(ARGV[1]) then
			return 0
		end
		redis.call('HINCRBY', KEYS[1], 'balance', -ARGV[1])
		return 1`)
	if err != nil {
		log.Fatal(err)
	}
	err = dlm.WithDistributedLock(ctx, m, "account:42", 30*time.Second, func(ctx context.Context) error {
		token := dlm.LockFromContext(ctx).Token
		return guard.Run(ctx, withdraw, []string{"account:42"}, []any{100}, "account:42", token).Err()
	})
	if errors.Is(err, fence.ErrStale) {
		log.Print("somebody else has the account by now")
	} else if err != nil {
		log.Print(err)
	}
}
