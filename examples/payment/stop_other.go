//go:build !unix

package main

import (
	"errors"
	"os"
)

// stop is not to be had here.
func stop(*os.Process) error { return errors.ErrUnsupported }

func resume(*os.Process) error { return errors.ErrUnsupported }
