package sqlitelock_test

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(childRole); role != "" {
		os.Exit(runChild(role))
	}
	code := m.Run()
	if code == 0 {
		if stacks := leaked(); stacks != "" {
			fmt.Fprintf(os.Stderr, "goroutines left behind:\n%s\n", stacks)
			code = 1
		}
	}
	os.Exit(code)
}

// leaked returns the stacks of goroutines that outlive the tests. Some take a
// moment to end, so it looks more than once.
func leaked() string {
	var left []string
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		buf := make([]byte, 1<<20)
		buf = buf[:runtime.Stack(buf, true)]
		left = left[:0]
		// The first goroutine is this one.
		for _, stack := range strings.Split(string(buf), "\n\n")[1:] {
			if strings.Contains(stack, "sqlitelock") || strings.Contains(stack, "database/sql") {
				left = append(left, stack)
			}
		}
		if len(left) == 0 {
			return ""
		}
	}
	return strings.Join(left, "\n\n")
}
