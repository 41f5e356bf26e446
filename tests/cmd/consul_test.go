package cmd_test

import (
	"strings"
	"testing"

	"github.com/go-dlm/dlm/tests/servers"
)

// All commands work on Consul.
func TestConsul(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		n    int
		cfg  servers.ConsulConfig
	}{
		{"single", 1, servers.ConsulConfig{}},
		{"acl", 1, servers.ConsulConfig{ACL: true}},
		{"three", 3, servers.ConsulConfig{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			list := servers.StartConsulCluster(t, c.n, &c.cfg)
			user := ""
			if token := list[0].Token(); token != "" {
				user = ":" + token + "@"
			}
			testCommands(t, store{url: "consul://" + user + strings.Join(servers.ConsulAddrs(list), ",") + "/locks?min_session=1s"})
		})
	}
}
