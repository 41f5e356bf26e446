package supervise

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// selfExe is this program, also after its file was replaced or removed.
func selfExe() (string, error) { return "/proc/self/exe", nil }

// adoptOrphans makes this process the parent of all descendants whose parent
// dies.
func adoptOrphans() error {
	if _, err := parentOf(os.Getpid()); err != nil {
		return fmt.Errorf("/proc must be mounted: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("PR_SET_CHILD_SUBREAPER: %w", err)
	}
	return nil
}

// setName is what ps and killall show. It is not the name of the caller, so
// that killall -9 of the one does not hit both.
func setName(name string) {
	b := append([]byte(name), 0)
	_ = unix.Prctl(unix.PR_SET_NAME, uintptr(unsafe.Pointer(&b[0])), 0, 0, 0)
}

// dieWithParent has the kernel kill the process when the thread that starts it
// ends.
func dieWithParent(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL }

// foreground returns the foreground process group of a terminal.
func foreground(fd int) (int, error) {
	group, err := unix.IoctlGetUint32(fd, unix.TIOCGPGRP)
	return int(group), err
}

// errNoProcess says that no such process was found.
var errNoProcess = errors.New("no such process")

// parentOf returns the parent of a process.
func parentOf(pid int) (int, error) {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, err
	}
	// pid (name) state parent ...: the name may hold anything.
	i := bytes.LastIndexByte(stat, ')')
	if i < 0 {
		return 0, errNoProcess
	}
	fields := bytes.Fields(stat[i+1:])
	if len(fields) < 2 {
		return 0, errNoProcess
	}
	return strconv.Atoi(string(fields[1]))
}

// member is a process of the tree.
type member struct{ pid, parent int }

// descendants lists all descendants of this process, parents first. Processes
// that come and go meanwhile may be missing.
func descendants() []member {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	children := make(map[int][]int)
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if parent, err := parentOf(pid); err == nil {
			children[parent] = append(children[parent], pid)
		}
	}
	var all []member
	for parents := []int{os.Getpid()}; len(parents) > 0; parents = parents[1:] {
		for _, pid := range children[parents[0]] {
			all = append(all, member{pid, parents[0]})
			parents = append(parents, pid)
		}
	}
	return all
}

// signalMember signals a process, but never a stranger that has got its number
// meanwhile: a child of ours keeps its number until we reap it, and for the
// others there are process descriptors.
func signalMember(m member, sig syscall.Signal) error {
	self := os.Getpid()
	if m.parent == self {
		return unix.Kill(m.pid, sig)
	}
	fd, err := unix.PidfdOpen(m.pid, 0)
	if err != nil {
		// Gone, or a kernel before 5.3: it becomes our child when those above
		// it are gone.
		return syscall.ESRCH
	}
	defer unix.Close(fd)
	if parent, err := parentOf(m.pid); err != nil || parent != m.parent && parent != self {
		return syscall.ESRCH
	}
	return unix.PidfdSendSignal(fd, unix.Signal(sig), nil, 0)
}

// tree signals all descendants of this process.
type tree struct{}

// end asks all descendants to end. group is the command's process group, or 0
// once the command has been reaped, since the number may then mean others.
func (tree) end(group int) {
	if group > 0 {
		_ = unix.Kill(-group, unix.SIGTERM)
		_ = unix.Kill(-group, unix.SIGCONT)
	}
	for _, m := range descendants() {
		if pgid, err := unix.Getpgid(m.pid); group > 0 && err == nil && pgid == group {
			continue
		}
		if signalMember(m, syscall.SIGTERM) == nil {
			// A stopped process does not see its SIGTERM.
			_ = signalMember(m, syscall.SIGCONT)
		}
	}
}

// kill kills all descendants it can see. It has to be repeated until none is
// left. It returns a process that it may not kill, if there is one.
func (tree) kill(group int) (stuck int, err error) {
	if group > 0 {
		// At once, and safe from processes that fork meanwhile.
		_ = unix.Kill(-group, unix.SIGKILL)
	}
	for _, m := range descendants() {
		if e := signalMember(m, syscall.SIGKILL); errors.Is(e, syscall.EPERM) {
			stuck, err = m.pid, e
		}
	}
	return stuck, err
}

// reaped takes note that the command is no more.
func (tree) reaped(int) {}

// gone says whether no process is left. noChildren says that the system has
// just denied that this process has children. As orphans are adopted, it then
// has no descendants either.
func (tree) gone(_ int, noChildren bool) bool { return noChildren }

// waitFlags makes wait4 also return children that were made without SIGCHLD.
const waitFlags = unix.WALL

// quiet says that the death of any descendant is followed by a SIGCHLD.
const quiet = true
