package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/go-dlm/dlm/examples/internal/ledger"
	"github.com/go-dlm/dlm/examples/internal/programtest"
)

func TestMain(m *testing.M) { programtest.Main(m) }

var ran = regexp.MustCompile(`(?m)^tick (\d+): run by process ([1-4]) with token (\d+)$`)

// Every tick is run by one process, with tokens that rise, also when the folder
// was used before.
func TestEveryTickOnce(t *testing.T) {
	t.Parallel()
	const ticks = 6
	dir := t.TempDir()
	last := int64(0)
	for range 2 {
		r := programtest.Run(t, "-processes", "4", "-ticks", strconv.Itoa(ticks), "-interval", "120ms", "-dir", dir)
		lines := ran.FindAllStringSubmatch(r.Stdout, -1)
		if r.Code != 0 || len(lines) != ticks || !strings.HasSuffix(r.Stdout, "each of 6 ticks was run once\n") {
			t.Fatalf("%+v", r)
		}
		for i, line := range lines {
			token, err := strconv.ParseInt(line[3], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			if line[1] != strconv.Itoa(i+1) || token <= last {
				t.Errorf("%s comes after token %d", line[0], last)
			}
			last = token
		}
	}
}

// A record from the future keeps all from running the job, and the program says
// so.
func TestNeverRun(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	records, err := ledger.Open[job](filepath.Join(dir, "records"))
	if err != nil {
		t.Fatal(err)
	}
	defer records.Close()
	if err := records.Append(1, job{Tick: 1 << 60}); err != nil {
		t.Fatal(err)
	}
	r := programtest.Run(t, "-processes", "2", "-ticks", "2", "-interval", "50ms", "-dir", dir)
	if r.Code != 1 || r.Stderr != "scheduler: tick 1 was run 0 times\ntick 2 was run 0 times\n" {
		t.Errorf("%+v", r)
	}
}

func TestCheck(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		runs []int64
		want string
	}{
		{"once", []int64{10, 11, 12}, "<nil>"},
		{"others do not matter", []int64{9, 9, 10, 11, 12, 13, 13}, "<nil>"},
		{"twice", []int64{10, 11, 11, 12}, "tick 2 was run 2 times"},
		{"never", []int64{10, 11}, "tick 3 was run 0 times"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := scheduler{dir: t.TempDir(), first: 10, ticks: 3}
			records, err := s.records()
			if err != nil {
				t.Fatal(err)
			}
			defer records.Close()
			for i, tick := range c.runs {
				if err := records.Append(int64(i), job{Tick: tick}); err != nil {
					t.Fatal(err)
				}
			}
			if got := fmt.Sprint(s.check()); got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
}

// Ctrl-C ends all processes.
func TestInterrupted(t *testing.T) {
	t.Parallel()
	p := programtest.Start(t, "-ticks", "1000000", "-interval", "100ms")
	p.Await(t, "tick 1:")
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
	p := programtest.Start(t, "-ticks", "1000000", "-interval", "100ms")
	p.Await(t, "tick 1:")
	p.Signal(t, os.Kill)
}

func TestUsage(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"-processes", "0"}, {"-ticks", "0"}, {"-interval", "0"}, {"-nonsense"}, {"extra"}} {
		if r := programtest.Run(t, args...); r.Code == 0 || r.Stderr == "" || r.Stdout != "" {
			t.Errorf("%q: %+v", args, r)
		}
	}
}
