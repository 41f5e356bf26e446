package servers_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-dlm/dlm/driver/drivertest"
	"github.com/go-dlm/dlm/tests/servers"
)

func TestMain(m *testing.M) { drivertest.Main(m) }

// patience is for waits that only a fault makes long.
const patience = 20 * time.Second

// eventually waits until a condition holds.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	servers.Until(t, what, cond)
}

// brief is a context for a question that stays without answer.
func brief(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}

// code returns the first word of an error reply.
func code(err error) string {
	e, _ := errors.AsType[servers.ReplyError](err)
	return e.Code()
}

// gone says whether there is no process with that number, not even a dead one
// that nobody waited for.
func gone(pid int) bool {
	_, err := os.Stat(fmt.Sprintf("/proc/%d", pid))
	return errors.Is(err, os.ErrNotExist)
}

// fakeTB notes how a test would end.
type fakeTB struct {
	mu       sync.Mutex
	fatal    string
	skipped  string
	logged   string
	cleanups []func()
}

func (f *fakeTB) Helper()          {}
func (f *fakeTB) Cleanup(c func()) { f.cleanups = append(f.cleanups, c) }

func (f *fakeTB) Logf(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.logged += fmt.Sprintf(format, args...) + "\n"
}

func (f *fakeTB) Fatalf(format string, args ...any) {
	f.fatal = fmt.Sprintf(format, args...)
	runtime.Goexit()
}

func (f *fakeTB) Skipf(format string, args ...any) {
	f.skipped = fmt.Sprintf(format, args...)
	runtime.Goexit()
}

// run runs a test to its end and its cleanups.
func (f *fakeTB) run(test func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			for len(f.cleanups) > 0 {
				last := len(f.cleanups) - 1
				c := f.cleanups[last]
				f.cleanups = f.cleanups[:last]
				c()
			}
		}()
		test()
	}()
	<-done
}

func contains(t *testing.T, got string, want ...string) {
	t.Helper()
	for _, w := range want {
		if !strings.Contains(got, w) {
			t.Errorf("%q does not contain %q", got, w)
		}
	}
}
