package servers_test

import (
	"slices"
	"strconv"
	"testing"

	"github.com/go-dlm/dlm/tests/servers"
)

func TestSentinelFailover(t *testing.T) {
	t.Parallel()
	s := servers.StartSentinel(t, nil)
	if len(s.Servers) != 2 || len(s.Sentinels) != 3 || len(s.Addrs()) != 3 || s.Addrs()[1] != s.Sentinels[1].Addr() {
		t.Fatalf("%d servers, sentinels %v", len(s.Servers), s.Addrs())
	}
	a, b := s.Servers[0], s.Servers[1]
	check := func(primary, replica *servers.Redis) {
		t.Helper()
		if got := s.Primary(); got != primary || primary.Role() != "master" || replica.Role() != "slave" {
			t.Fatalf("the primary is %s with role %s, the other one has %s", got.Addr(), primary.Role(), replica.Role())
		}
		if got := s.Replicas(); len(got) != 1 || got[0] != replica {
			t.Fatalf("replicas %v", got)
		}
		for _, r := range s.Sentinels {
			named, _ := r.MustDo("SENTINEL", "GET-MASTER-ADDR-BY-NAME", s.MasterName).([]any)
			if len(named) != 2 || named[1] != strconv.Itoa(primary.Port()) || r.Role() != "sentinel" {
				t.Fatalf("a %s names %v", r.Role(), named)
			}
		}
	}
	check(a, b)

	if got := s.Failover(); got != b {
		t.Fatalf("failover to %s", got.Addr())
	}
	s.WaitReady()
	check(b, a)

	b.MustDo("SET", "k", "v")
	eventually(t, "the key is replicated", func() bool { return a.MustDo("GET", "k") == "v" })
	b.Kill()
	if got := s.WaitPrimary(b); got != a || len(s.Replicas()) != 0 {
		t.Fatalf("after a kill: primary %s, replicas %v", got.Addr(), s.Replicas())
	}
	b.Restart()
	s.WaitReady()
	check(a, b)
	if got := b.MustDo("GET", "k"); got != "v" {
		t.Errorf("GET on the restarted server = %v", got)
	}

	// One sentinel is not needed. It finds its place again.
	s.Sentinels[0].Kill()
	a.Pause()
	if got := s.WaitPrimary(a); got != b {
		t.Fatalf("after a pause: primary %s", got.Addr())
	}
	a.Resume()
	s.Sentinels[0].Restart()
	s.WaitReady()
	check(b, a)
	// A server that was promoted stays so.
	b.Restart()
	s.WaitReady()
}

func TestSentinelConfig(t *testing.T) {
	t.Parallel()
	s := servers.StartSentinel(t, &servers.SentinelConfig{
		Replicas:      2,
		DefaultTimers: true,
		Args:          []string{"--requirepass", "secret", "--masterauth", "secret"},
	})
	replicas := s.Replicas()
	if len(replicas) != 2 || slices.Contains(replicas, s.Primary()) {
		t.Fatalf("replicas %v of %v", replicas, s.Primary())
	}
	s.Primary().MustDo("SET", "k", "v")
	for _, r := range replicas {
		eventually(t, "the key is replicated", func() bool { return r.MustDo("GET", "k") == "v" })
	}
	s.Failover()
}
