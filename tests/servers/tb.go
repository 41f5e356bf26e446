package servers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"time"
)

// TB is the part of testing.TB that the package needs, for commands that bring
// their own. Fatalf and Skipf must not return.
type TB interface {
	Helper()
	// Cleanup registers a function to be called at the end, the last one first.
	Cleanup(func())
	Fatalf(format string, args ...any)
	Logf(format string, args ...any)
	Skipf(format string, args ...any)
}

// installHint says how to get servers that are missing.
const installHint = "install it with scripts/install-servers.sh"

// command returns the path of a server's program. Without it the test is skipped.
func command(tb TB, name string) string {
	tb.Helper()
	if runtime.GOOS != "linux" {
		Missing(tb, "servers are started on Linux only")
	}
	path, err := exec.LookPath(name)
	if err != nil {
		Missing(tb, fmt.Sprintf("%s is not installed; %s", name, installHint))
	}
	return path
}

// Missing skips the test for want of a program, or fails it where nothing may be skipped silently.
func Missing(tb TB, reason string) {
	tb.Helper()
	for _, name := range []string{"CI", "DLM_TEST_REQUIRE"} {
		if os.Getenv(name) != "" {
			tb.Fatalf("servers: %s (%s is set, therefore this is not skipped)", reason, name)
		}
	}
	tb.Skipf("servers: %s", reason)
}

const (
	// startPatience is how long one server may take to start on a busy machine.
	startPatience = 30 * time.Second
	// changePatience is how long several servers may take to agree.
	changePatience = 60 * time.Second
	// askPatience is how long a server may take to answer one of our questions
	// before it counts as silent.
	askPatience = 2 * time.Second
	// pollPause is the pause between two looks at a condition.
	pollPause = 5 * time.Millisecond
)

// errHopeless marks what no further waiting can mend.
var errHopeless = errors.New("servers: hopeless")

// poll calls cond until it returns nil, or an error that matches errHopeless, or
// patience is at an end; it returns the last error. The context that cond gets
// ends with the patience.
func poll(patience time.Duration, cond func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	tick := time.NewTicker(pollPause)
	defer tick.Stop()
	for {
		err := cond(ctx)
		if err == nil || errors.Is(err, errHopeless) {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("after %v: %w", patience, err)
		}
	}
}

// untilPatience is for waits that only a fault makes long, or a busy machine.
const untilPatience = time.Minute

// Until waits until a condition holds, looking less and less often, as to look may
// cost the server more than what it does meanwhile. If it never does, the test
// fails.
func Until(tb TB, what string, cond func() bool) {
	tb.Helper()
	end := time.Now().Add(untilPatience)
	for pause := time.Millisecond; !cond(); pause = min(pause+pause/2, 50*time.Millisecond) {
		if time.Now().After(end) {
			tb.Fatalf("never happened: %s", what)
		}
		time.Sleep(pause)
	}
}
