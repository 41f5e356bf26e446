//go:build unix

// Package proctest makes commands for tests: processes that start others,
// ignore signals, and tell a test when they are ready and when all are gone.
// The test binary itself plays them.
package proctest

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// marker is the first argument of a test binary that plays a command.
const marker = "proctest"

// Init must be the first thing that TestMain does. It returns, unless this
// process plays a command.
func Init() {
	if len(os.Args) > 2 && os.Args[1] == marker {
		play(os.Args[2], os.Args[3:])
		os.Exit(0)
	}
}

// Tree is a command and the processes that it starts, seen from the test. All
// of them hold a named pipe open, so that the test sees the end of the last.
type Tree struct {
	// Pids are the process numbers by name: "command" is the first process,
	// the others are named after the behaviour that started them.
	Pids map[string]int
	// Parent is the command's parent.
	Parent int

	t     testing.TB
	path  string
	lines *bufio.Scanner
	open  *os.File // the test's own end for writing, so that there is one before the command starts
	once  sync.Once
}

// New prepares a command.
func New(t testing.TB) *Tree {
	t.Helper()
	path := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	open, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	pipe, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pipe.Close() })
	tr := &Tree{t: t, path: path, Pids: map[string]int{}, lines: bufio.NewScanner(pipe), open: open}
	t.Cleanup(tr.NoMore)
	return tr
}

// NoMore says that the command has ended or will never start, so that nobody
// waits for it in vain. It may be called more than once.
func (tr *Tree) NoMore() { tr.once.Do(func() { tr.open.Close() }) }

// Args is the command line for these behaviours, which are done in order:
//
//	ignore   ignore SIGTERM, as do all that are started later
//	child    start a child that lives on
//	daemon   start a process that has a session of its own and no parent
//	orphan   start a process in the same group that has no parent
//	ready    report to the test
//	usr1     wait for SIGUSR1
//	signal   wait for a signal, and end with 100 and its number
//	exit N   end with an exit code
//	root     become another user, if the file has the set-user-ID bit
//	stay     live on
func (tr *Tree) Args(behaviours ...string) []string {
	return append([]string{os.Args[0], marker, tr.path}, behaviours...)
}

// Await waits until the processes with these names are ready.
func (tr *Tree) Await(names ...string) {
	tr.t.Helper()
	left := slices.Clone(names)
	for len(left) > 0 {
		if !tr.lines.Scan() {
			tr.t.Fatalf("all processes are gone before %v were ready", left)
		}
		var name string
		var pid, parent int
		_, err := fmt.Sscan(tr.lines.Text(), &name, &pid, &parent)
		i := slices.Index(left, name)
		if err != nil || i < 0 {
			tr.t.Fatalf("unexpected report %q", tr.lines.Text())
		}
		left = slices.Delete(left, i, i+1)
		tr.NoMore() // the command holds the pipe open
		tr.Pids[name] = pid
		if name == "command" {
			tr.Parent = parent
		}
	}
}

// Gone waits until no process is left.
func (tr *Tree) Gone() {
	tr.t.Helper()
	for tr.lines.Scan() {
		tr.t.Errorf("unexpected report %q", tr.lines.Text())
	}
}

// Living returns the names of the processes that are there at this moment.
func (tr *Tree) Living() []string {
	var names []string
	for name, pid := range tr.Pids {
		if syscall.Kill(pid, 0) == nil {
			names = append(names, name)
		}
	}
	return names
}

// held is the pipe of a process that plays. It is to be open for as long as the
// process lives, also when nothing uses it any more.
var held *os.File

// play does what a process of the tree is told. pipe is a path, or the number
// of an inherited descriptor.
func play(pipe string, behaviours []string) {
	var err error
	if fd, e := strconv.Atoi(pipe); e == nil {
		held = os.NewFile(uintptr(fd), "pipe")
	} else if held, err = os.OpenFile(pipe, os.O_WRONLY, 0); err != nil {
		panic(err)
	}
	w := held
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGUSR1)
	name := "command"
	start := func(attr *syscall.SysProcAttr, args ...string) *exec.Cmd {
		cmd := exec.Command(os.Args[0], append([]string{marker, "3"}, args...)...)
		cmd.ExtraFiles = []*os.File{w}
		cmd.SysProcAttr = attr
		if err := cmd.Start(); err != nil {
			panic(err)
		}
		return cmd
	}
	for _, b := range behaviours {
		switch word, arg, _ := strings.Cut(b, " "); word {
		case "ignore":
			signal.Ignore(syscall.SIGTERM)
		case "root":
			if err := syscall.Setuid(os.Geteuid()); err != nil {
				panic(err)
			}
		case "name":
			name = arg
		case "child":
			start(nil, "name child", "ready", "stay")
		case "daemon":
			_ = start(&syscall.SysProcAttr{Setsid: true}, "fork daemon").Wait()
		case "orphan":
			_ = start(nil, "fork orphan").Wait()
		case "fork":
			start(nil, "name "+arg, "ready", "stay")
			return
		case "ready":
			fmt.Fprintln(w, name, os.Getpid(), os.Getppid())
		case "usr1":
			<-signals
		case "signal":
			signal.Notify(signals, syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM,
				syscall.SIGUSR2, syscall.SIGWINCH)
			fmt.Fprintln(w, name, os.Getpid(), os.Getppid())
			os.Exit(100 + int((<-signals).(syscall.Signal)))
		case "exit":
			code, err := strconv.Atoi(arg)
			if err != nil {
				panic(err)
			}
			os.Exit(code)
		case "stay":
			for {
				time.Sleep(time.Hour)
			}
		default:
			panic("unknown behaviour " + b)
		}
	}
}
