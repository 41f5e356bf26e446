//go:build unix && !linux

package supervise

import (
	"errors"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// selfExe is this program.
func selfExe() (string, error) { return os.Executable() }

// adoptOrphans does nothing: there are no subreapers.
func adoptOrphans() error { return nil }

func setName(string) {}

// dieWithParent does nothing: the kernel has no such service.
func dieWithParent(*syscall.SysProcAttr) {}

// parentOf is not known for other processes.
func parentOf(int) (int, error) { return 0, errors.ErrUnsupported }

// foreground returns the foreground process group of a terminal.
func foreground(fd int) (int, error) { return unix.IoctlGetInt(fd, unix.TIOCGPGRP) }

// tree signals the process group of a command, which stands for its
// descendants.
type tree struct{ group int }

// reaped takes note that the command is no more. Its group may still be there;
// nothing keeps the number from being given to another group once it is not.
func (t *tree) reaped(group int) { t.group = group }

func (t *tree) pgid(group int) int {
	if group > 0 {
		return group
	}
	return t.group
}

// end asks all processes of the group to end.
func (t *tree) end(group int) {
	if group = t.pgid(group); group > 0 {
		_ = unix.Kill(-group, unix.SIGTERM)
		_ = unix.Kill(-group, unix.SIGCONT)
	}
}

// kill kills all processes of the group.
func (t *tree) kill(group int) (stuck int, err error) {
	if group = t.pgid(group); group > 0 {
		if err = unix.Kill(-group, unix.SIGKILL); errors.Is(err, syscall.EPERM) {
			return group, err
		}
	}
	return 0, nil
}

// gone says whether no process of the group is left.
func (t *tree) gone(group int, _ bool) bool {
	group = t.pgid(group)
	return group == 0 || errors.Is(unix.Kill(-group, 0), syscall.ESRCH)
}

const waitFlags = 0

// quiet is false: the death of a grandchild is not reported.
const quiet = false
