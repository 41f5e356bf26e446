package fence_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/fence"
)

// invalids are pairs that no guard takes.
var invalids = []struct {
	name     string
	resource string
	token    int64
}{
	{"no resource", "", 1},
	{"a resource that is too long", strings.Repeat("x", fence.MaxResourceLen+1), 1},
	{"a resource that is not UTF-8", "a\xffb", 1},
	{"token 0", "r", 0},
	{"a negative token", "r", -1},
	{"a token that is too high", "r", fence.MaxToken + 1},
}

func TestValidate(t *testing.T) {
	t.Parallel()
	for _, c := range invalids {
		if err := fence.Validate(c.resource, c.token); !errors.Is(err, dlm.ErrInvalid) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	for _, resource := range []string{"r", strings.Repeat("x", fence.MaxResourceLen), "a\x00\n世"} {
		for _, token := range []int64{1, fence.MaxToken} {
			if err := fence.Validate(resource, token); err != nil {
				t.Errorf("%q, %d: %v", resource, token, err)
			}
		}
	}
}

func TestStaleError(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err  *fence.StaleError
		want string
	}{
		{&fence.StaleError{Resource: "r", Token: 3, Highest: 5}, `dlm: stale fencing token: "r" has seen 5, which is higher than 3`},
		{&fence.StaleError{Resource: "r", Token: 3}, `dlm: stale fencing token: "r" has seen a higher one than 3`},
	} {
		if c.err.Error() != c.want || !errors.Is(c.err, fence.ErrStale) {
			t.Errorf("%v, want %s", c.err, c.want)
		}
	}
}

// isStale fails the test unless err is this refusal.
func isStale(t *testing.T, err error, want fence.StaleError) {
	t.Helper()
	var stale *fence.StaleError
	if !errors.As(err, &stale) || *stale != want || !errors.Is(err, fence.ErrStale) {
		t.Errorf("%v, want %v", err, &want)
	}
}
