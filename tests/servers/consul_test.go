package servers_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/go-dlm/dlm/tests/servers"
)

func TestConsul(t *testing.T) {
	t.Parallel()
	c := servers.StartConsul(t, nil)
	c.Ask(http.MethodPut, "/v1/kv/k", "v")
	pid := c.Pid()
	c.Kill()
	c.Kill()
	if !gone(pid) {
		t.Error("it is alive after Kill")
	}
	c.Restart()
	if got := c.Ask(http.MethodGet, "/v1/kv/k?raw", ""); got != "v" || c.Pid() == pid {
		t.Errorf("after a restart the value is %q, the process %d", got, c.Pid())
	}
	c.Pause()
	c.Resume()
	c.WaitReady()
}

func TestConsulSecured(t *testing.T) {
	t.Parallel()
	c := servers.StartConsul(t, &servers.ConsulConfig{ACL: true, TLS: true})
	if c.Token() == "" || c.TLSConfig() == nil {
		t.Fatal("it has no token or no TLS")
	}
	c.Ask(http.MethodPut, "/v1/kv/k", "v")
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: c.TLSConfig(), DisableKeepAlives: true}}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, "https://"+c.Addr()+"/v1/kv/k", strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusForbidden {
		t.Errorf("without a token it says %s", resp.Status)
	}
}

func TestConsulCluster(t *testing.T) {
	t.Parallel()
	list := servers.StartConsulCluster(t, 3, nil)
	list[0].Ask(http.MethodPut, "/v1/kv/k", "v")
	for _, fault := range []func(*servers.Consul){(*servers.Consul).Kill, (*servers.Consul).Pause} {
		leader := servers.ConsulLeader(t, list)
		fault(leader)
		next := servers.ConsulLeader(t, list)
		if next == leader {
			t.Fatal("the leader goes on leading")
		}
		if got := next.Ask(http.MethodGet, "/v1/kv/k?raw&consistent", ""); got != "v" {
			t.Errorf("the new leader has the value %q", got)
		}
		leader.Resume()
		if leader.Pid() != 0 && gone(leader.Pid()) {
			leader.Restart()
		}
		leader.WaitReady()
	}
}
