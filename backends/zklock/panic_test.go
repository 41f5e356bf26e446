package zklock

import (
	"strings"
	"testing"
)

// unreached returns a backend whose server there is not.
func unreached(t *testing.T) *Backend {
	t.Helper()
	b, err := New([]string{"127.0.0.1:1"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return b
}

// A panic in the client is an error of the call, as it is in another goroutine
// than the caller's.
func TestClientPanics(t *testing.T) {
	t.Parallel()
	b := unreached(t)
	_, err := detached(t.Context(), b, func() (int, error) { panic("broken dialer") })
	if err == nil || !strings.Contains(err.Error(), "panicked: broken dialer") {
		t.Error(err)
	}
}
