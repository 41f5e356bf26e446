package semaphore_test

import (
	"os"
	"testing"

	"github.com/go-dlm/dlm/driver/drivertest"
)

func TestMain(m *testing.M) {
	if text := os.Getenv(workerEnv); text != "" {
		os.Exit(work(text))
	}
	drivertest.Main(m)
}
