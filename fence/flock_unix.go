//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package fence

import (
	"errors"
	"os"
	"syscall"
)

// flock locks a file, or says that somebody else has. The lock belongs to this
// opening of the file, so it keeps out other goroutines as it does processes.
func flock(f *os.File) (bool, error) {
	conn, err := f.SyscallConn()
	if err != nil {
		return false, err
	}
	var failure error
	err = conn.Control(func(fd uintptr) {
		for {
			failure = syscall.Flock(int(fd), syscall.LOCK_EX|syscall.LOCK_NB)
			if !errors.Is(failure, syscall.EINTR) {
				return
			}
		}
	})
	if errors.Is(failure, syscall.EWOULDBLOCK) {
		return false, err
	}
	return failure == nil, errors.Join(err, failure)
}
