//go:build linux

package main

import (
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"github.com/go-dlm/dlm/cmd/dlm/internal/proctest"
)

// terminal is a terminal with a process that leads its session.
type terminal struct {
	t    testing.TB
	cmd  *exec.Cmd
	file *os.File

	mu     sync.Mutex
	screen strings.Builder
	seen   int           // how much of it was awaited
	more   chan struct{} // has room for one
}

// onTerminal starts a command on a terminal of its own.
func onTerminal(t testing.TB, store, name string, args ...string) *terminal {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Env = environ("DLM_BACKEND="+store, "DLM="+binary, "PS1=$ ", "TERM=dumb", "HISTFILE=")
	file, err := pty.Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	term := &terminal{t: t, cmd: cmd, file: file, more: make(chan struct{}, 1)}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		buf := make([]byte, 4096)
		for {
			n, err := file.Read(buf)
			term.mu.Lock()
			term.screen.Write(buf[:n])
			term.mu.Unlock()
			select {
			case term.more <- struct{}{}:
			default:
			}
			if err != nil {
				close(term.more)
				return
			}
		}
	}()
	t.Cleanup(func() {
		cmd.Process.Kill()
		if cmd.ProcessState == nil {
			cmd.Wait()
		}
		file.Close()
		<-ended
	})
	return term
}

func (term *terminal) text() string {
	term.mu.Lock()
	defer term.mu.Unlock()
	return term.screen.String()
}

// await waits until a text is written after what was awaited before.
func (term *terminal) await(text string) {
	term.t.Helper()
	for open := true; ; _, open = <-term.more {
		screen := term.text()
		if i := strings.Index(screen[term.seen:], text); i >= 0 {
			term.seen += i + len(text)
			return
		}
		if !open {
			term.t.Fatalf("the terminal was closed without %q:\n%s", text, screen)
		}
	}
}

func (term *terminal) write(text string) {
	term.t.Helper()
	if _, err := io.WriteString(term.file, text); err != nil {
		term.t.Fatal(err)
	}
}

// expect waits for the exit code, or -n for a death by signal n.
func (term *terminal) expect(want int) {
	term.t.Helper()
	_ = term.cmd.Wait()
	code := term.cmd.ProcessState.ExitCode()
	if status := term.cmd.ProcessState.Sys().(syscall.WaitStatus); status.Signaled() {
		code = -int(status.Signal())
	}
	if code != want {
		term.t.Errorf("exit code %d, want %d:\n%s", code, want, term.text())
	}
}

// awaitForeground waits until a process group is in the foreground: the
// terminal's signals go elsewhere before.
func (term *terminal) awaitForeground(group int) {
	term.t.Helper()
	eventually(term.t, func() bool {
		front, err := unix.IoctlGetInt(int(term.file.Fd()), unix.TIOCGPGRP)
		if err != nil {
			term.t.Fatal(err)
		}
		return front == group
	})
}

const (
	ctrlC = "\x03"
	ctrlZ = "\x1a"
)

func TestTerminalInput(t *testing.T) {
	t.Parallel()
	term := onTerminal(t, newStore(t), binary, "run", "k", "--", "sh", "-c", `echo re''ady; read x; echo "got $x"; exit 5`)
	term.await("ready")
	term.write("hello\n")
	term.await("got hello")
	term.expect(5)
}

func TestTerminalInterruptIsTheCommands(t *testing.T) {
	t.Parallel()
	term := onTerminal(t, newStore(t), binary, "run", "k", "--", "sh", "-c",
		`trap 'echo caught; exit 7' INT; echo ready; read x; read x`)
	term.await("ready")
	term.write(ctrlC)
	term.await("caught")
	term.expect(7)
}

// A command that dies of Ctrl-C takes the script with it that it is part of, as
// it would without dlm.
func TestTerminalInterruptEndsScript(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	tree := proctest.New(t)
	script := append([]string{"-c", `$DLM run k -- "$@"; echo "went on"`, "sh"}, tree.Args("ready", "stay")...)
	term := onTerminal(t, store, "sh", script...)
	tree.Await("command")
	term.write(ctrlC)
	term.expect(-int(syscall.SIGINT))
	tree.Gone()
	if strings.Contains(term.text(), "went on") {
		t.Errorf("the script went on:\n%s", term.text())
	}
	if info := get(t, store, "k"); len(info.Holders) > 0 {
		t.Errorf("still held: %+v", info)
	}
}

func TestTerminalIsGivenBack(t *testing.T) {
	t.Parallel()
	term := onTerminal(t, newStore(t), "sh", "-c", `$DLM run k -- true; echo ready; read x; echo "got $x"`)
	term.await("ready")
	term.write("hello\n")
	term.await("got hello")
	term.expect(0)
}

// Standard input is no terminal, but the command asks at the terminal.
func TestTerminalOnDemand(t *testing.T) {
	t.Parallel()
	term := onTerminal(t, newStore(t), "sh", "-c",
		`echo data | $DLM run k -- sh -c 'echo ready; read x </dev/tty; read y; echo "got $x $y"'; echo "code $?"`)
	term.await("ready")
	term.write("hello\n")
	term.await("got hello data")
	term.await("code 0")
	term.expect(0)
}

func TestTerminalWhileWaiting(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	h := hold(t, store, "k")
	term := onTerminal(t, store, binary, "run", "k", "--", "true")
	term.await("waiting for")
	began := time.Now()
	term.write(ctrlC)
	term.expect(130)
	within(t, began, time.Second)
	h.let()
}

// Job control works as for any other command.
func TestTerminalSuspend(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	term := onTerminal(t, store, "bash", "--norc", "--noprofile", "-i")
	term.await("$ ")
	term.write(`$DLM run k -- sh -c 'echo "pid=$$;"; read x; echo "got $x"; exit 5'` + "\n")
	term.await("\npid=")
	term.await(";")
	screen := term.text()[:term.seen-1]
	pid, err := strconv.Atoi(screen[strings.LastIndexByte(screen, '=')+1:])
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		// Resumed and in the foreground: a Ctrl-Z before that is lost.
		term.awaitForeground(pid)
		awaitState(t, pid, 'S')
		term.write(ctrlZ)
		term.await("Stopped")
		term.await("$ ")
		if info := get(t, store, "k"); len(info.Holders) != 1 {
			t.Errorf("got %+v, want the holder", info)
		}
		term.write("fg\n")
		term.await("$DLM run")
	}
	term.write("hello\n")
	term.await("got hello")
	term.write("echo code $?\n")
	term.await("code 5")
	term.write("exit\n")
	term.expect(0)
}

// A command that stays suspended loses its lock, and is killed before.
func TestTerminalSuspendForTooLong(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	term := onTerminal(t, store, "bash", "--norc", "--noprofile", "-i")
	term.await("$ ")
	term.write(`$DLM run --ttl 3s k -- sh -c 'echo re""ady; sleep 1000'` + "\n")
	term.await("ready")
	next := queue(t, store, "k")
	term.write(ctrlZ)
	term.await("Stopped")
	next.tree.Await("command")
	term.write("fg\n")
	term.await("stopping the command")
	term.write("echo code $?\n")
	term.await("code 79")
	next.let()
	term.write("exit\n")
	term.expect(0)
}

// In the background, a command that wants the terminal is stopped as usual.
func TestTerminalBackground(t *testing.T) {
	t.Parallel()
	term := onTerminal(t, newStore(t), "bash", "--norc", "--noprofile", "-i")
	term.await("$ ")
	term.write(`$DLM run k -- sh -c 'read x; echo "got $x"' &` + "\n")
	term.await("$ ")
	term.write("wait; jobs\n")
	term.await("Stopped")
	term.write("fg\n")
	term.await("$DLM run")
	term.write("hello\n")
	term.await("got hello")
	term.write("exit\n")
	term.expect(0)
}
