package election_test

import (
	"os"
	"testing"

	"github.com/go-dlm/dlm/driver/drivertest"
)

func TestMain(m *testing.M) {
	if text := os.Getenv(nodeEnv); text != "" {
		os.Exit(runNode(text))
	}
	drivertest.Main(m)
}
