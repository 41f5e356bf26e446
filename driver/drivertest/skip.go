package drivertest

import (
	"fmt"
	"os"
	"testing"
)

// Skip skips a test for want of something that the machine lacks. Where nothing
// may be skipped silently, because CI or DLM_TEST_REQUIRE is set, the test fails.
func Skip(tb testing.TB, format string, args ...any) {
	tb.Helper()
	reason := fmt.Sprintf(format, args...)
	for _, name := range []string{"CI", "DLM_TEST_REQUIRE"} {
		if os.Getenv(name) != "" {
			tb.Fatalf("%s (%s is set, therefore this is not skipped)", reason, name)
		}
	}
	tb.Skip(reason)
}
