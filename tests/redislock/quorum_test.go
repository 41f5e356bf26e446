package redislock_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/redislock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/tests/servers"
)

// quorumHarness is the harness of a quorum of servers.
func quorumHarness(tb testing.TB, nodes []*servers.Redis) *drivertest.Harness {
	cut := newCuts(tb)
	opts := redislock.QuorumOptions{Prefix: newPrefix(), LivenessWindow: 3 * window, NodeTimeout: 2 * time.Second, MaxTTL: dlm.MaxTTL}
	return &drivertest.Harness{
		Unit: 4 * unit, // half of it is for a node to answer
		Open: func(t testing.TB) driver.Backend {
			var clients []redis.UniversalClient
			for _, n := range nodes {
				client := redis.NewClient(&redis.Options{Addr: n.Addr(), Dialer: cut.dial})
				tb.Cleanup(func() { client.Close() })
				clients = append(clients, client)
			}
			b, err := redislock.NewQuorum(clients, &opts)
			if err != nil {
				t.Fatal(err)
			}
			return b
		},
		Freeze: cut.freeze,
		Forget: func(t testing.TB, key string) {
			escaped := strings.NewReplacer("%", "%25", "}", "%7D").Replace(key)
			for _, n := range nodes {
				if _, err := n.Do(context.Background(), "DEL", record(opts.Prefix, escaped)); err != nil {
					t.Fatal(err)
				}
			}
		},
	}
}

func TestConformanceQuorum(t *testing.T) {
	t.Parallel()
	nodes := servers.StartMasters(t, 3, nil)
	drivertest.Run(t, func(t *testing.T) *drivertest.Harness { return quorumHarness(t, nodes) })
}

func TestOperationsQuorum(t *testing.T) {
	t.Parallel()
	nodes := servers.StartMasters(t, 3, nil)
	for seed := range uint64(10) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			drivertest.Operations(t, seed, func(t *testing.T) *drivertest.Harness { return quorumHarness(t, nodes) })
		})
	}
}
