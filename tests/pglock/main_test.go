package pglock_test

import (
	"os"
	"testing"

	"github.com/go-dlm/dlm/driver/drivertest"
)

func TestMain(m *testing.M) {
	if url := os.Getenv(holderEnv); url != "" {
		hold(url)
	}
	drivertest.Main(m)
}
