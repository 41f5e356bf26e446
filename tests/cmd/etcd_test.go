package cmd_test

import (
	"strings"
	"testing"

	"github.com/go-dlm/dlm/tests/servers"
)

// All commands work on etcd.
func TestEtcd(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		n    int
		cfg  servers.EtcdConfig
	}{
		{"single", 1, servers.EtcdConfig{}},
		{"old", 1, servers.EtcdConfig{Old: true}},
		{"three", 3, servers.EtcdConfig{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			members := servers.StartEtcdCluster(t, c.n, &c.cfg)
			testCommands(t, store{url: "etcd://" + strings.Join(servers.EtcdAddrs(members), ",") + "/locks"})
		})
	}
}
