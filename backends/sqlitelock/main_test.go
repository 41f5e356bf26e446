package sqlitelock_test

import (
	"os"
	"testing"

	"github.com/go-dlm/dlm/driver/drivertest"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(childRole); role != "" {
		os.Exit(runChild(role))
	}
	drivertest.Main(m)
}
