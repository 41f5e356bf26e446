//go:build linux || darwin

package sqlitelock

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// writable says why this process cannot read and write there, or nil.
func writable(path string) error {
	err := unix.Faccessat(unix.AT_FDCWD, path, unix.R_OK|unix.W_OK, unix.AT_EACCESS)
	if err != nil {
		return &os.PathError{Op: "write", Path: path, Err: err}
	}
	return nil
}

// links is how many names a file has.
func links(file os.FileInfo) uint64 {
	if st, ok := file.Sys().(*syscall.Stat_t); ok {
		return uint64(st.Nlink)
	}
	return 1
}
