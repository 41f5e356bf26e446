package drivertest

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// leakEnv makes TestLeakChild leave a goroutine behind.
const leakEnv = "DRIVERTEST_LEAK"

func TestLeakChild(t *testing.T) {
	if os.Getenv(leakEnv) == "" {
		return // it is part of TestMainFailsOnLeaks
	}
	leakPatience = 100 * time.Millisecond
	go leave(make(chan struct{}))
}

func leave(never chan struct{}) { <-never }

func TestMainFailsOnLeaks(t *testing.T) {
	cmd := exec.Command(os.Args[0], "-test.run=^TestLeakChild$")
	cmd.Env = append(os.Environ(), leakEnv+"=1")
	out, err := cmd.CombinedOutput()
	exit, ok := errors.AsType[*exec.ExitError](err)
	if !ok || exit.ExitCode() != 1 || !strings.Contains(string(out), "1 goroutines are left") || !strings.Contains(string(out), "drivertest.leave") {
		t.Errorf("tests that leave a goroutine: %v\n%s", err, out)
	}
}

// failing notes whether a test failed.
type failing struct {
	testing.TB
	failed   bool
	cleanups []func()
}

func (f *failing) Helper()               {}
func (f *failing) Errorf(string, ...any) { f.failed = true }
func (f *failing) Cleanup(c func())      { f.cleanups = append(f.cleanups, c) }

func TestCheckLeaks(t *testing.T) {
	stop := make(chan struct{})
	f := &failing{TB: t}
	CheckLeaks(f)
	time.AfterFunc(50*time.Millisecond, func() { close(stop) })
	go leave(stop) // it takes a while, but it ends
	f.cleanups[0]()
	if f.failed {
		t.Error("a goroutine that ended was taken for a leak")
	}
	if got := without([]string{"a", "b", "b"}, []string{"b", "c"}); len(got) != 2 || got[0] != "a" || got[1] != "b" {
		t.Errorf("without = %q", got)
	}
}
