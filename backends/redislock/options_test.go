package redislock_test

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm/backends/redislock"
	"github.com/go-dlm/dlm/driver"
)

func TestDefaults(t *testing.T) {
	t.Parallel()
	want := redislock.Options{
		Prefix: "dlm:", LivenessWindow: 20 * time.Second, KeepTokens: 24 * time.Hour, ReplicaTimeout: 500 * time.Millisecond,
	}
	for name, opts := range map[string]*redislock.Options{"nil": nil, "zero": {}, "the defaults": &want} {
		if got, err := opts.Defaults(); err != nil || got != want {
			t.Errorf("%s: %+v, %v; want %+v", name, got, err, want)
		}
	}
}

func TestOptionsWithinBounds(t *testing.T) {
	t.Parallel()
	for _, opts := range []redislock.Options{
		{Prefix: strings.Repeat("p", 128), LivenessWindow: 100 * time.Millisecond, KeepTokens: time.Minute},
		{Prefix: "app/lock*[1]\x00", LivenessWindow: time.Hour, KeepTokens: 366 * 24 * time.Hour},
		{Prefix: "замок:", Replicas: 16, ReplicaTimeout: time.Minute},
		{Prefix: "dlm:", Replicas: 1, ReplicaTimeout: time.Millisecond},
	} {
		if _, err := opts.Defaults(); err != nil {
			t.Errorf("%+v: %v", opts, err)
		}
	}
}

func TestOptionsOutOfBounds(t *testing.T) {
	t.Parallel()
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer client.Close()
	for _, tt := range []struct {
		name  string
		opts  redislock.Options
		field string
	}{
		{"long prefix", redislock.Options{Prefix: strings.Repeat("p", 129)}, "Options.Prefix"},
		{"prefix with a brace", redislock.Options{Prefix: "a{"}, "Options.Prefix"},
		{"prefix with a closing brace", redislock.Options{Prefix: "}:"}, "Options.Prefix"},
		{"prefix that is no UTF-8", redislock.Options{Prefix: "\xff"}, "Options.Prefix"},
		{"short window", redislock.Options{LivenessWindow: 99 * time.Millisecond}, "Options.LivenessWindow"},
		{"long window", redislock.Options{LivenessWindow: time.Hour + 1}, "Options.LivenessWindow"},
		{"negative window", redislock.Options{LivenessWindow: -1}, "Options.LivenessWindow"},
		{"tokens kept for too short", redislock.Options{KeepTokens: time.Minute - 1}, "Options.KeepTokens"},
		{"tokens kept for too long", redislock.Options{KeepTokens: math.MaxInt64}, "Options.KeepTokens"},
		{"tokens kept for a negative time", redislock.Options{KeepTokens: math.MinInt64}, "Options.KeepTokens"},
		{"negative replicas", redislock.Options{Replicas: -1}, "Options.Replicas"},
		{"many replicas", redislock.Options{Replicas: 17}, "Options.Replicas"},
		{"short acknowledgement", redislock.Options{ReplicaTimeout: 1}, "Options.ReplicaTimeout"},
		{"long acknowledgement", redislock.Options{ReplicaTimeout: time.Hour}, "Options.ReplicaTimeout"},
	} {
		_, err := redislock.New(client, &tt.opts)
		if !errors.Is(err, driver.ErrInvalid) || !strings.Contains(err.Error(), tt.field+" ") {
			t.Errorf("%s: %v, want an error that names %s", tt.name, err, tt.field)
		}
		if m, err := redislock.NewLockManager(client, nil, &tt.opts); m != nil || !errors.Is(err, driver.ErrInvalid) {
			t.Errorf("%s: NewLockManager returns %v, %v", tt.name, m, err)
		}
	}
}

func TestClientsThatDoNotDo(t *testing.T) {
	t.Parallel()
	for name, client := range map[string]redis.UniversalClient{
		"nil": nil, "nil client": (*redis.Client)(nil), "nil cluster": (*redis.ClusterClient)(nil),
	} {
		if _, err := redislock.New(client, nil); !errors.Is(err, driver.ErrInvalid) || !strings.Contains(err.Error(), "client is nil") {
			t.Errorf("%s: %v", name, err)
		}
	}
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}})
	defer ring.Close()
	if _, err := redislock.New(ring, nil); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("ring: %v", err)
	}
}
