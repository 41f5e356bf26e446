package drivertest

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

// leakPatience is how long goroutines may take to end after the last test.
var leakPatience = 5 * time.Second

// Main runs a package's tests and fails if they leave goroutines behind. Call
// it from TestMain, and nothing after it. With -bench nothing is checked: a
// benchmark that is cut short may leave something.
func Main(m *testing.M) {
	code := m.Run()
	if code == 0 && !benchmarking() {
		if left := leftGoroutines(leakPatience); len(left) > 0 {
			fmt.Fprintf(os.Stderr, "%d goroutines are left after the tests:\n\n%s\n", len(left), strings.Join(left, "\n\n"))
			code = 1
		}
	}
	os.Exit(code)
}

// CheckLeaks fails the test if it leaves goroutines behind that were not there
// when CheckLeaks was called. The check comes after all cleanups that were
// registered later. It must not be used in tests that run in parallel.
func CheckLeaks(t testing.TB) {
	t.Helper()
	before := goroutines()
	t.Cleanup(func() {
		for end := time.Now().Add(leakPatience); ; time.Sleep(5 * time.Millisecond) {
			left := without(goroutines(), before)
			if len(left) == 0 {
				return
			}
			if time.Now().After(end) {
				t.Errorf("%d goroutines are left after the test:\n\n%s", len(left), strings.Join(left, "\n\n"))
				return
			}
		}
	})
}

func benchmarking() bool {
	f := flag.Lookup("test.bench")
	return f != nil && f.Value.String() != ""
}

// leftGoroutines returns the stacks of goroutines that do not end in time.
func leftGoroutines(patience time.Duration) []string {
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		left := goroutines()
		if len(left) == 0 || time.Now().After(end) {
			return left
		}
	}
}

// goroutines returns the stacks of all goroutines but the caller's and those
// of the runtime and of package testing.
func goroutines() []string {
	buf := make([]byte, 1<<20)
	for {
		n := runtime.Stack(buf, true)
		if n < len(buf) {
			buf = buf[:n]
			break
		}
		buf = make([]byte, 2*len(buf))
	}
	var stacks []string
	for i, g := range strings.Split(string(buf), "\n\n") {
		_, stack, _ := strings.Cut(g, "\n")
		stack = strings.TrimSpace(stack)
		if i == 0 || stack == "" || harmless(stack) {
			continue
		}
		stacks = append(stacks, stack)
	}
	slices.Sort(stacks)
	return stacks
}

func harmless(stack string) bool {
	for _, mark := range []string{
		"created by testing.",
		"testing.(*M).",
		"testing.(*T).Run(",
		"testing.tRunner(",
		"testing.(*F).Fuzz(",
		"testing.runFuzz",
		"os/signal.signal_recv",
		"os/signal.loop",
		"created by runtime.",
		"runtime.ReadTrace",
		"runtime/pprof.",
		"internal/fuzz.",
	} {
		if strings.Contains(stack, mark) {
			return true
		}
	}
	return false
}

// without returns what is in list more often than in before.
func without(list, before []string) []string {
	rest := slices.Clone(before)
	var more []string
	for _, s := range list {
		if i := slices.Index(rest, s); i >= 0 {
			rest = slices.Delete(rest, i, i+1)
		} else {
			more = append(more, s)
		}
	}
	return more
}
