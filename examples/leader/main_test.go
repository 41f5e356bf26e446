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

var leads = regexp.MustCompile(`(?m)^term (\d+): process-([123]) leads$`)

// Terms rise, and every process has its share.
func TestHandOver(t *testing.T) {
	t.Parallel()
	r := programtest.Run(t, "-processes", "3", "-rounds", "2", "-steps", "3", "-interval", "5ms")
	lines := leads.FindAllStringSubmatch(r.Stdout, -1)
	if r.Code != 0 || len(lines) != 6 || !strings.Contains(r.Stdout, "one leader at a time in 6 terms; half of the 5 hand-overs took up to ") {
		t.Fatalf("%+v", r)
	}
	last, terms := 0, make(map[string]int)
	for _, line := range lines {
		term, err := strconv.Atoi(line[1])
		if err != nil || term <= last {
			t.Errorf("%s comes after term %d: %v", line[0], last, err)
		}
		last = term
		terms[line[2]]++
	}
	if len(terms) != 3 {
		t.Errorf("terms by process: %v", terms)
	}
}

// What is wrong with the records is found.
func TestCheck(t *testing.T) {
	t.Parallel()
	type record struct {
		term int64
		step int
	}
	for _, c := range []struct {
		name    string
		records []record
		want    string
	}{
		{"good", []record{{1, 0}, {1, 1}, {3, 0}, {3, 1}}, "<nil>"},
		{"left out", []record{{1, 0}, {1, 1}, {3, 0}}, "3 pieces of work were done, want 4"},
		{"twice", []record{{1, 0}, {1, 0}, {3, 0}, {3, 1}}, "term 1: step 0 comes at the place of step 1"},
		{"mixed", []record{{1, 0}, {3, 1}, {3, 0}, {3, 1}}, "terms 1 and 3 mix"},
		{"no new term", []record{{1, 0}, {1, 1}, {1, 0}, {1, 1}}, "term 1 comes after term 1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			cl := cluster{dir: t.TempDir(), steps: 2}
			records, err := ledger.Open[work](filepath.Join(cl.dir, "records"))
			if err != nil {
				t.Fatal(err)
			}
			defer records.Close()
			for _, r := range c.records {
				if err := records.Append(r.term, work{Step: r.step}); err != nil {
					t.Fatal(err)
				}
			}
			if got := fmt.Sprint(cl.check(2)); got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
}

// Ctrl-C ends all processes.
func TestInterrupted(t *testing.T) {
	t.Parallel()
	p := programtest.Start(t, "-rounds", "1000000")
	p.Await(t, " leads")
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
	p := programtest.Start(t, "-rounds", "1000000")
	p.Await(t, " leads")
	p.Signal(t, os.Kill)
}

func TestUsage(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"-processes", "0"}, {"-rounds", "0"}, {"-steps", "0"}, {"-interval", "-1s"}, {"-nonsense"}, {"extra"},
	} {
		if r := programtest.Run(t, args...); r.Code == 0 || r.Stderr == "" || r.Stdout != "" {
			t.Errorf("%q: %+v", args, r)
		}
	}
}
