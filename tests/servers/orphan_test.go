package servers_test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-dlm/dlm/tests/servers"
)

// orphanEnv makes TestOrphanParent start a server and wait for its death.
const orphanEnv = "SERVERS_ORPHAN"

func TestOrphanParent(t *testing.T) {
	if os.Getenv(orphanEnv) == "" {
		return // it is part of TestOrphan
	}
	r := servers.StartRedis(t, nil)
	fmt.Printf("\norphan %d %s\n", r.Pid(), filepath.Dir(r.Dir()))
	select {}
}

// A server does not outlive a test that is killed.
func TestOrphan(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestOrphanParent$")
	cmd.Env = append(os.Environ(), orphanEnv+"=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var pid int
	var dir string
	for lines := bufio.NewScanner(out); pid == 0 && lines.Scan(); {
		_, _ = fmt.Sscanf(lines.Text(), "orphan %d %s", &pid, &dir) // most lines are others
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = cmd.Wait() // killed
	if pid == 0 {
		t.Fatal("no server was started")
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	eventually(t, "the server dies with the test", func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		return err != nil || strings.Contains(string(stat), ") Z ") // its new parent may be slow to wait for it
	})
}
