package main

import (
	"os"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"github.com/go-dlm/dlm/examples/internal/programtest"
)

func TestMain(m *testing.M) { programtest.Main(m) }

var summary = regexp.MustCompile(`(?m)^(\d+) calls were served, at most (\d+) at a time, and (\d+) refused$`)

// Nobody is refused, and all that may be inside are.
func TestNoneRefused(t *testing.T) {
	t.Parallel()
	r := programtest.Run(t, "-processes", "3", "-workers", "4", "-calls", "10", "-limit", "2")
	found := summary.FindStringSubmatch(r.Stdout)
	if r.Code != 0 || found == nil || found[1] != "120" || found[2] != "2" || found[3] != "0" {
		t.Errorf("%+v", r)
	}
}

func TestUnsafe(t *testing.T) {
	t.Parallel()
	r := programtest.Run(t, "-unsafe", "-calls", "50")
	found := summary.FindStringSubmatch(r.Stdout)
	if r.Code == 0 || found == nil || found[3] == "0" || !strings.Contains(r.Stderr, "calls were refused") {
		t.Errorf("%+v", r)
	}
}

// Ctrl-C ends all processes.
func TestInterrupted(t *testing.T) {
	t.Parallel()
	p := programtest.Start(t, "-calls", "1000000")
	p.Await(t, "workers call it")
	if code := p.Signal(t, os.Interrupt); code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
}

// So does the death of the program.
func TestKilled(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("only Linux kills the children of a process that was killed")
	}
	p := programtest.Start(t, "-calls", "1000000")
	p.Await(t, "workers call it")
	p.Signal(t, os.Kill)
}

func TestUsage(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"-processes", "0"}, {"-workers", "0"}, {"-calls", "0"}, {"-limit", "0"}, {"-nonsense"}, {"extra"},
	} {
		if r := programtest.Run(t, args...); r.Code == 0 || r.Stderr == "" || r.Stdout != "" {
			t.Errorf("%q: %+v", args, r)
		}
	}
}
