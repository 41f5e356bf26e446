package servers_test

import (
	"fmt"
	"testing"

	"github.com/go-dlm/dlm/tests/servers"
)

func TestCluster(t *testing.T) {
	t.Parallel()
	c := servers.StartCluster(t, 3, 3)
	if len(c.Nodes) != 6 || len(c.Addrs()) != 6 {
		t.Fatalf("nodes %v", c.Addrs())
	}
	for i := range 3 {
		if got := c.ReplicaOf(c.Nodes[i]); got != c.Nodes[3+i] {
			t.Errorf("the replica of node %d is %v", i, got)
		}
	}
	for slot, want := range map[int]int{0: 0, 5460: 0, 5461: 1, 10921: 1, 10922: 2, 16383: 2} {
		if got := c.PrimaryOf(slot); got != c.Nodes[want] {
			t.Errorf("slot %d is on %s and not on node %d", slot, got.Addr(), want)
		}
	}
	t.Run("slots", func(t *testing.T) { testSlots(t, c) })
	t.Run("migration", func(t *testing.T) { testMigration(t, c) })
	t.Run("failover", func(t *testing.T) { testClusterFailover(t, c) })
}

func testSlots(t *testing.T, c *servers.Cluster) {
	for _, key := range []string{
		"", "a", "123456789", "lock:orders", "{user1000}.following", "foo{}{bar}", "foo{{bar}}zap", "foo{bar}{zap}", "}x{y", "{x", "é\x00",
	} {
		if got, want := c.Slot(key), c.Nodes[0].MustDo("CLUSTER", "KEYSLOT", key); int64(got) != want {
			t.Errorf("Slot(%q) = %d, the server says %v", key, got, want)
		}
	}
}

func testMigration(t *testing.T, c *servers.Cluster) {
	slot := c.Slot("{tag}")
	from := c.PrimaryOf(slot)
	to := c.Nodes[0]
	if from == to {
		to = c.Nodes[1]
	}
	const keys = 250
	for i := range keys {
		from.MustDo("SET", fmt.Sprintf("{tag}%d", i), "v")
	}
	finish := c.BeginMigration(slot, to)
	if _, err := from.Do(t.Context(), "GET", "{tag}0"); code(err) != "ASK" {
		t.Errorf("the old owner answers %v", err)
	}
	if _, err := to.Do(t.Context(), "GET", "{tag}0"); code(err) != "MOVED" {
		t.Errorf("the new owner answers %v", err)
	}
	if got := c.PrimaryOf(slot); got != from {
		t.Errorf("the owner is already %s", got.Addr())
	}
	finish()
	finish()
	if _, err := from.Do(t.Context(), "GET", "{tag}0"); code(err) != "MOVED" {
		t.Errorf("the old owner answers %v", err)
	}
	if got := to.MustDo("CLUSTER", "COUNTKEYSINSLOT", fmt.Sprint(slot)); got != int64(keys) {
		t.Errorf("the new owner has %v keys", got)
	}
	if got := c.PrimaryOf(slot); got != to {
		t.Errorf("the owner is %s", got.Addr())
	}
	c.WaitReady()
	c.MigrateSlot(slot, from)
	c.MigrateSlot(slot, from)
	if got := from.MustDo("GET", "{tag}249"); got != "v" {
		t.Errorf("back at the old owner: %v", got)
	}
	c.WaitReady()
}

func testClusterFailover(t *testing.T, c *servers.Cluster) {
	a, b := c.Nodes[0], c.Nodes[3]
	slot := c.Slot("{tag}")
	c.MigrateSlot(slot, a)
	a.MustDo("SET", "{tag}", "v")

	c.Failover(b)
	if c.PrimaryOf(slot) != b || c.WaitPrimary(slot, a) != b || c.WaitPrimary(slot, nil) != b {
		t.Fatalf("the primary is %s", c.PrimaryOf(slot).Addr())
	}
	c.WaitReady()
	if c.ReplicaOf(b) != a || c.ReplicaOf(a) != nil {
		t.Fatalf("the replica is %v", c.ReplicaOf(b))
	}
	if got := b.MustDo("GET", "{tag}"); got != "v" {
		t.Errorf("after the failover: %v", got)
	}

	b.Kill()
	if got := c.WaitPrimary(slot, b); got != a {
		t.Fatalf("after a kill the primary is %s", got.Addr())
	}
	if got := a.MustDo("GET", "{tag}"); got != "v" {
		t.Errorf("after the kill: %v", got)
	}
	b.Restart()
	c.WaitReady()
	if c.ReplicaOf(a) != b {
		t.Fatal("the restarted node is no replica")
	}
	a.Pause()
	if got := c.WaitPrimary(slot, a); got != b {
		t.Fatalf("after a pause the primary is %s", got.Addr())
	}
	a.Resume()
	c.WaitReady()
}
