package fence_test

import (
	"os"
	"testing"

	"github.com/go-dlm/dlm/driver/drivertest"
)

func TestMain(m *testing.M) {
	if path := os.Getenv(writerEnv); path != "" {
		writeForever(path)
	}
	drivertest.Main(m)
}
