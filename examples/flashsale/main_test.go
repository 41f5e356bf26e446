package main

import (
	"encoding/json"
	"os"
	"runtime"
	"testing"

	"github.com/go-dlm/dlm/examples/internal/programtest"
)

func TestMain(m *testing.M) { programtest.Main(m) }

// sell runs a sale and reads its result.
func sell(t *testing.T, args ...string) (result, programtest.Result) {
	t.Helper()
	p := programtest.Run(t, append([]string{"-json"}, args...)...)
	var r result
	if err := json.Unmarshal([]byte(p.Stdout), &r); err != nil {
		t.Fatalf("%v: %+v", err, p)
	}
	return r, p
}

func TestSale(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		args []string
		want result
	}{
		{
			"sold out",
			[]string{"-processes", "4", "-stock", "20", "-buyers", "200"},
			result{Stock: 20, Buyers: 200, tally: tally{Tried: 220, Sold: 20, Refused: 200}},
		},
		{
			"enough for everybody",
			[]string{"-processes", "3", "-stock", "50", "-buyers", "30"},
			result{Stock: 50, Buyers: 30, tally: tally{Tried: 33, Sold: 30, Refused: 3}},
		},
		{
			"several items, of which one is not wanted by enough",
			[]string{"-processes", "3", "-items", "3", "-stock", "31", "-buyers", "30"},
			result{Stock: 31, Buyers: 30, tally: tally{Tried: 33, Sold: 30, Refused: 3}},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			got, p := sell(t, c.args...)
			got.Seconds = 0
			if got != c.want || p.Code != 0 || p.Stderr != "" {
				t.Errorf("%+v, want %+v: %+v", got, c.want, p)
			}
		})
	}
}

// How much is sold without a lock depends on luck. But the program says whether
// it was right.
func TestUnsafe(t *testing.T) {
	t.Parallel()
	r, p := sell(t, "-unsafe", "-processes", "4", "-stock", "20", "-buyers", "200")
	t.Logf("%d sold of %d", r.Sold, r.Stock)
	if right := r.Sold == r.Stock && r.Doubles == 0; right != (p.Code == 0) || right != (p.Stderr == "") {
		t.Errorf("%+v", p)
	}
}

// Ctrl-C ends all processes.
func TestInterrupted(t *testing.T) {
	t.Parallel()
	p := programtest.Start(t, "-stock", "1000000", "-buyers", "1000000")
	p.Await(t, "processes sell")
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
	p := programtest.Start(t, "-stock", "1000000", "-buyers", "1000000")
	p.Await(t, "processes sell")
	p.Signal(t, os.Kill)
}

func TestUsage(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"-processes", "0"}, {"-items", "0"}, {"-stock", "0"}, {"-buyers", "0"}, {"-nonsense"}, {"extra"}} {
		if r := programtest.Run(t, args...); r.Code == 0 || r.Stderr == "" || r.Stdout != "" {
			t.Errorf("%q: %+v", args, r)
		}
	}
}
