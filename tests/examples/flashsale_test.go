// Package examples runs the examples against real servers.
package examples

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/go-dlm/dlm/tests/servers"
)

// A flash sale over Redis sells every unit once. With DLM_TEST_BUYERS=100000 it
// is the whole sale; by default fewer come.
func TestFlashSaleRedis(t *testing.T) {
	t.Parallel()
	program := filepath.Join(t.TempDir(), "flashsale")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, "github.com/go-dlm/dlm/examples/flashsale")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	buyers := os.Getenv("DLM_TEST_BUYERS")
	if buyers == "" {
		buyers = "2000"
	}
	s := servers.StartRedis(t, nil)
	cmd := exec.CommandContext(t.Context(), program, "-json", "-redis", "redis://"+s.Addr(), "-dir", t.TempDir(),
		"-processes", "8", "-items", "10", "-stock", "100", "-buyers", buyers)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var r struct {
		Sold, Doubles, Tried int
		Seconds              float64
	}
	if err := json.Unmarshal(out, &r); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Logf("%d purchases tried in %.1fs: %.0f a second", r.Tried, r.Seconds, float64(r.Tried)/r.Seconds)
	if r.Sold != 100 || r.Doubles != 0 {
		t.Errorf("%s", out)
	}
}
