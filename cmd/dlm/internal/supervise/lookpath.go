//go:build unix

package supervise

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// LookPath finds the file of a command as execvp(3) and shells do: a name with
// a slash is a path, any other is looked for in the directories of PATH, an
// empty one meaning the working directory. The error matches [fs.ErrNotExist],
// or [fs.ErrPermission] if there is only a file that cannot be executed.
func LookPath(name string) (string, error) {
	if strings.Contains(name, "/") {
		return name, executable(name)
	}
	if name == "" {
		return "", syscall.ENOENT
	}
	var found error = syscall.ENOENT
	for _, dir := range filepath.SplitList(os.Getenv("PATH")) {
		path := filepath.Join(dir, name)
		if !strings.Contains(path, "/") {
			path = "./" + path
		}
		err := executable(path)
		if err == nil {
			return path, nil
		}
		if errors.Is(err, fs.ErrPermission) {
			found = err
		}
	}
	return "", found
}

// executable returns nil if the file can be executed.
func executable(path string) error {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, syscall.ENOTDIR):
		return syscall.ENOENT
	case err != nil:
		return err
	case info.IsDir():
		return syscall.EACCES
	}
	err = unix.Faccessat(unix.AT_FDCWD, path, unix.X_OK, unix.AT_EACCESS)
	if errors.Is(err, syscall.ENOSYS) || errors.Is(err, syscall.EPERM) {
		// An old kernel, or a container that forbids the call: the start
		// itself will tell.
		return nil
	}
	return err
}
