package main

import (
	"maps"
	"testing"
)

func TestZooKeeperPackets(t *testing.T) {
	t.Parallel()
	got, err := zooKeeperPackets("zk_version\t3.8.0\nzk_packets_received\t12\nzk_packets_sent\t34\nzk_avg_latency\t0.5\n")
	if want := map[string]int64{zooKeeperReceived: 12, zooKeeperSent: 34}; err != nil || !maps.Equal(got, want) {
		t.Errorf("got %v and %v, want %v", got, err, want)
	}
	for _, text := range []string{
		"", "zk_packets_received\t12\n", "zk_packets_received\tmany\nzk_packets_sent\t34\n", "mntr is not executed because it is not in the whitelist.",
	} {
		if got, err := zooKeeperPackets(text); err == nil {
			t.Errorf("%q: got %v and no error", text, got)
		}
	}
}
