package main

import (
	"os"
	"regexp"
	"runtime"
	"testing"

	"github.com/go-dlm/dlm/examples/internal/programtest"
)

func TestMain(m *testing.M) { programtest.Main(m) }

// line is a line of the table.
var line = regexp.MustCompile(`(?m)^\S.* {3,}\S.* {3,}\S.* {3,}(yes|NO)$`)

// The others wait for this test, which builds the programs that they use.
func TestDemo(t *testing.T) {
	r := programtest.Run(t, "-programs", programtest.Folder())
	lines := line.FindAllStringSubmatch(r.Stdout, -1)
	if r.Code != 0 || len(lines) != 8 {
		t.Fatalf("%d lines in the table: %+v", len(lines), r)
	}
	for _, l := range lines {
		if l[1] != "yes" {
			t.Error(l[0])
		}
	}
}

// What is not as expected is said, and is an error.
func TestTable(t *testing.T) {
	t.Parallel()
	var d demo
	d.table.add(row{"a", "1", "1", true})
	if err := d.table.failed(); err != nil {
		t.Error(err)
	}
	d.table.add(row{"b", "1", "2", false})
	if err := d.table.failed(); err == nil || err.Error() != "b: 2, expected 1" {
		t.Error(err)
	}
}

// Ctrl-C ends all processes.
func TestInterrupted(t *testing.T) {
	t.Parallel()
	p := programtest.Start(t, "-programs", programtest.Folder())
	p.Await(t, "worker 1 has the lock")
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
	p := programtest.Start(t, "-programs", programtest.Folder())
	p.Await(t, "worker 1 has the lock")
	p.Signal(t, os.Kill)
}

func TestUsage(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"extra"}, {"hold"}, {"-nonsense"}} {
		if r := programtest.Run(t, args...); r.Code == 0 || r.Stderr == "" || r.Stdout != "" {
			t.Errorf("%q: %+v", args, r)
		}
	}
}
