package clockskew_test

import (
	"testing"

	"github.com/go-dlm/dlm/driver/drivertest"
)

func TestMain(m *testing.M) { drivertest.Main(m) }
