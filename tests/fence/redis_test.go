package fence_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm/fence"
	"github.com/go-dlm/dlm/fence/redisfence"
	"github.com/go-dlm/dlm/tests/servers"
)

func readFile(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// newClient returns a client of a server, or of a cluster if there are several.
func newClient(t *testing.T, addrs ...string) redis.UniversalClient {
	t.Helper()
	client := redis.NewUniversalClient(&redis.UniversalOptions{Addrs: addrs})
	t.Cleanup(func() {
		if err := client.Close(); err != nil {
			t.Error(err)
		}
	})
	return client
}

func newGuard(t *testing.T, client redis.UniversalClient) *redisfence.Guard {
	t.Helper()
	g, err := redisfence.New(client, nil)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func newScript(t *testing.T, source string) *redisfence.Script {
	t.Helper()
	s, err := redisfence.NewScript(source)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestRedis(t *testing.T) {
	t.Parallel()
	redisSuite(t, newClient(t, servers.StartRedis(t, nil).Addr()))
}

func TestRedisCluster(t *testing.T) {
	t.Parallel()
	redisSuite(t, newClient(t, servers.StartCluster(t, 3, 0).Addrs()...))
}

func redisSuite(t *testing.T, client redis.UniversalClient) {
	t.Run("Sequences", func(t *testing.T) { redisSequences(t, client) })
	t.Run("Names", func(t *testing.T) { redisNames(t, client) })
	t.Run("Expiry", func(t *testing.T) { redisExpiry(t, client) })
	t.Run("Damaged", func(t *testing.T) { redisDamaged(t, client) })
	t.Run("Scripts", func(t *testing.T) { redisScripts(t, client) })
	t.Run("Concurrent", func(t *testing.T) { redisConcurrent(t, client) })
}

func redisSequences(t *testing.T, client redis.UniversalClient) {
	g := newGuard(t, client)
	for _, c := range runs {
		key := "sequence " + c.name
		var highest int64
		value := ""
		for i, token := range c.tokens {
			next := fmt.Sprint("write ", i)
			err := g.Set(t.Context(), key, next, token, 0)
			if c.refused[i] {
				isStale(t, err, fence.StaleError{Resource: key, Token: token, Highest: highest})
			} else if err != nil {
				t.Errorf("%s: token %d: %v", c.name, token, err)
			} else {
				value = next
			}
			highest = max(highest, token)
			if got := get(t, client, key); got != value {
				t.Errorf("%s: the value is %q, want %q", c.name, got, value)
			}
			if got := get(t, client, "dlm:fence:{"+key+"}"); got != fmt.Sprint(highest) {
				t.Errorf("%s: the record is %q, want %d", c.name, got, highest)
			}
		}
	}
}

// No two names meet, and the record is in the slot of its key.
func redisNames(t *testing.T, client redis.UniversalClient) {
	g := newGuard(t, client)
	list := []string{
		"a", "A", "a ", "a\x00", "{a}", "{a}b", "b{a}", "{a}{b}", "x{a", "{", "{a}:{a}", "世界", "{世}界", "a\nb",
		strings.Repeat("x", 512), "{" + strings.Repeat("x", 510) + "}",
	}
	for i, key := range list {
		if err := g.Set(t.Context(), key, key, int64(100-i), 0); err != nil {
			t.Errorf("%q: %v", key, err)
		}
	}
	for i, key := range list {
		err := g.Set(t.Context(), key, "x", int64(99-i), 0)
		isStale(t, err, fence.StaleError{Resource: key, Token: int64(99 - i), Highest: int64(100 - i)})
		if got := get(t, client, key); got != key {
			t.Errorf("%q has %q", key, got)
		}
	}
}

// A key may expire; the record of its token does not.
func redisExpiry(t *testing.T, client redis.UniversalClient) {
	g := newGuard(t, client)
	for _, c := range []struct {
		ttl  time.Duration
		keep bool
	}{{0, true}, {time.Hour, false}} {
		if err := g.Set(t.Context(), "expiry", "x", 5, c.ttl); err != nil {
			t.Fatal(err)
		}
		ttl, err := client.PTTL(t.Context(), "expiry").Result()
		if err != nil || c.keep != (ttl < 0) || ttl > c.ttl {
			t.Errorf("the key has a time to live of %v, %v, want %v", ttl, err, c.ttl)
		}
	}
	if err := client.PExpire(t.Context(), "dlm:fence:{expiry}", time.Hour).Err(); err != nil {
		t.Fatal(err)
	}
	if err := g.Set(t.Context(), "expiry", "x", 6, time.Millisecond); err != nil {
		t.Fatal(err)
	}
	servers.Until(t, "the key expires", func() bool { return errors.Is(client.Get(t.Context(), "expiry").Err(), redis.Nil) })
	if ttl, err := client.PTTL(t.Context(), "dlm:fence:{expiry}").Result(); err != nil || ttl >= 0 {
		t.Errorf("the record has a time to live of %v, %v", ttl, err)
	}
	isStale(t, g.Set(t.Context(), "expiry", "late", 5, 0), fence.StaleError{Resource: "expiry", Token: 5, Highest: 6})
}

// A record that was not written by a guard is not taken for none.
func redisDamaged(t *testing.T, client redis.UniversalClient) {
	g := newGuard(t, client)
	for i, record := range []string{"", "x", "-1", "0", "1e3", "0x10", " 7", "7.5", "9007199254740992", "inf", "nan"} {
		key := fmt.Sprint("damaged", i)
		if err := client.Set(t.Context(), "dlm:fence:{"+key+"}", record, 0).Err(); err != nil {
			t.Fatal(err)
		}
		err := g.Set(t.Context(), key, "x", 5, 0)
		if err == nil || errors.Is(err, fence.ErrStale) || !strings.Contains(err.Error(), "damaged") {
			t.Errorf("%q: %v", record, err)
		}
		if n, err := client.Exists(t.Context(), key).Result(); err != nil || n != 0 {
			t.Errorf("%q: the key was written: %d, %v", record, n, err)
		}
	}
	if err := client.RPush(t.Context(), "dlm:fence:{list}", "x").Err(); err != nil {
		t.Fatal(err)
	}
	if err := g.Set(t.Context(), "list", "x", 5, 0); !redis.HasErrorPrefix(err, "WRONGTYPE") {
		t.Errorf("%v, want WRONGTYPE", err)
	}
}

func redisScripts(t *testing.T, client redis.UniversalClient) {
	g := newGuard(t, client)
	echo := newScript(t, `local all = {#KEYS, #ARGV}
		for _, k in ipairs(KEYS) do all[#all + 1] = k end
		for _, a in ipairs(ARGV) do all[#all + 1] = a end
		return all -- a comment at the end`)
	for _, c := range []struct {
		keys []string
		args []any
		want string
	}{
		{nil, nil, "[0 0]"},
		{[]string{"{s}a"}, nil, "[1 0 {s}a]"},
		{nil, []any{1, "x"}, "[0 2 1 x]"},
		{[]string{"{s}a", "{s}b"}, []any{"x", 2, []byte("y")}, "[2 3 {s}a {s}b x 2 y]"},
	} {
		// The arrays behind the slices belong to the caller.
		keys, args := append(slices.Clone(c.keys), "mine"), append(slices.Clone(c.args), "mine")
		keys, args = keys[:len(c.keys)], args[:len(c.args)]
		got, err := g.Run(t.Context(), echo, keys, args, "{s}", 5).Result()
		if err != nil || fmt.Sprint(got) != c.want {
			t.Errorf("%v, %v, want %s", got, err, c.want)
		}
		if keys[:len(keys)+1][len(keys)] != "mine" || args[:len(args)+1][len(args)] != "mine" {
			t.Error("the caller's array was written to")
		}
	}

	count := newScript(t, `return redis.call('INCRBY', KEYS[1], ARGV[1])`)
	for _, c := range []struct {
		token, want int64
	}{{5, 10}, {4, -1}, {5, 20}, {6, 30}, {5, -1}} {
		n, err := g.Run(t.Context(), count, []string{"{c}n"}, []any{10}, "{c}", c.token).Int64()
		if stale := errors.Is(err, fence.ErrStale); stale != (c.want < 0) || !stale && (err != nil || n != c.want) {
			t.Errorf("token %d: %d, %v, want %d", c.token, n, err, c.want)
		}
	}
	if got := get(t, client, "{c}n"); got != "30" {
		t.Errorf("the count is %s", got)
	}

	// Scripts come back after Redis has forgotten them; a failure is that of Redis.
	err := client.ScriptFlush(t.Context()).Err()
	if cluster, ok := client.(*redis.ClusterClient); ok {
		err = cluster.ForEachMaster(t.Context(), func(ctx context.Context, c *redis.Client) error {
			return c.ScriptFlush(ctx).Err()
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	if n, err := g.Run(t.Context(), count, []string{"{c}n"}, []any{1}, "{c}", 6).Int64(); err != nil || n != 31 {
		t.Errorf("%d, %v, want 31", n, err)
	}
	if err := g.Run(t.Context(), newScript(t, "return redis.call('GET', 'none')"), nil, nil, "none", 1).Err(); !errors.Is(err, redis.Nil) {
		t.Errorf("%v, want %v", err, redis.Nil)
	}
	if err := g.Run(t.Context(), newScript(t, "return redis.error_reply('ODD day')"), nil, nil, "odd", 7).Err(); !redis.HasErrorPrefix(err, "ODD") {
		t.Errorf("%v, want ODD", err)
	}
	err = g.Run(t.Context(), count, []string{"odd"}, []any{1}, "odd", 6).Err()
	isStale(t, err, fence.StaleError{Resource: "odd", Token: 6, Highest: 7})
}

// Many writers with random tokens: as the resource sees it, tokens never fall.
func redisConcurrent(t *testing.T, client redis.UniversalClient) {
	g := newGuard(t, client)
	push := newScript(t, `redis.call('RPUSH', KEYS[1], ARGV[1])`)
	keys := []string{"list a", "list b", "list c"}
	var next, accepted, refused atomic.Int64
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range 100 {
				key := keys[rand.N(len(keys))]
				token := next.Add(1) + rand.Int64N(50)
				err := g.Run(t.Context(), push, []string{key}, []any{token}, key, token).Err()
				switch {
				case err == nil || errors.Is(err, redis.Nil):
					accepted.Add(1)
				case errors.Is(err, fence.ErrStale):
					refused.Add(1)
				default:
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	n := 0
	for _, key := range keys {
		var tokens []int64
		if err := client.LRange(t.Context(), key, 0, -1).ScanSlice(&tokens); err != nil {
			t.Fatal(err)
		}
		if !slices.IsSorted(tokens) {
			t.Errorf("%s: tokens fall: %v", key, tokens)
		}
		n += len(tokens)
	}
	if int64(n) != accepted.Load() || n == 0 || refused.Load() == 0 {
		t.Errorf("%d writes, %d accepted, %d refused", n, accepted.Load(), refused.Load())
	}
}
