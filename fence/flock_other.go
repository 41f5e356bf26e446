//go:build !darwin && !dragonfly && !freebsd && !linux && !netbsd && !openbsd

package fence

import (
	"errors"
	"os"
)

// flock is not to be had here.
func flock(*os.File) (bool, error) { return false, errors.ErrUnsupported }
