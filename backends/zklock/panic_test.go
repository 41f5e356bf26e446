package zklock

import (
	"strings"
	"testing"
)

// A panic in the client is an error of the call, as it is in another goroutine
// than the caller's.
func TestClientPanics(t *testing.T) {
	t.Parallel()
	b, err := New([]string{"127.0.0.1:1"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	_, err = detached(t.Context(), b, func() (int, error) { panic("broken dialer") })
	if err == nil || !strings.Contains(err.Error(), "panicked: broken dialer") {
		t.Error(err)
	}
}
