package servers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

// account is a user of the system.
type account struct{ uid, gid int }

// unprivileged is a user for servers that refuse to be run by root: nil if we are
// not root.
func unprivileged() (*account, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err1 := strconv.Atoi(u.Uid)
		gid, err2 := strconv.Atoi(u.Gid)
		return &account{uid, gid}, errors.Join(err1, err2)
	}
	return nil, errors.New("there is neither a user postgres nor nobody")
}

// daemon is a server with processes of its own, on a port and in a folder that
// stay the same. Its methods are safe for concurrent use.
type daemon struct {
	tb   TB
	what string // for messages
	bin  string
	who  *account
	dir  string
	port int
	// argv returns the arguments, and ready what it takes to be ready.
	argv  func() []string
	ready func(context.Context) error

	mu     sync.Mutex // guards what follows; held while a process is started or killed
	proc   *process
	closed bool
}

// begin starts the server for the first time, in a new folder, and registers its
// end. prepare fills the folder.
func (d *daemon) begin(prepare func() error) {
	d.tb.Helper()
	root, err := os.MkdirTemp("", "dlm-servers-")
	if err != nil {
		d.tb.Fatalf("servers: %v", err)
	}
	d.tb.Cleanup(func() {
		d.close()
		if err := os.RemoveAll(root); err != nil {
			d.tb.Logf("servers: %v", err)
		}
	})
	err = func() error {
		// Other users must get through to their own folder.
		if err := os.Chmod(root, 0o755); err != nil {
			return err
		}
		d.dir = filepath.Join(root, "0")
		if err := os.Mkdir(d.dir, 0o700); err != nil {
			return err
		}
		if d.who != nil {
			if err := os.Chown(d.dir, d.who.uid, d.who.gid); err != nil {
				return err
			}
		}
		for attempt := 1; ; attempt++ {
			givePort(d.port)
			port, err := takePort()
			if err != nil {
				return err
			}
			d.port = port
			if attempt == 1 {
				if err := prepare(); err != nil {
					return err
				}
			}
			if err = d.launch(); !errors.Is(err, errPortInUse) || attempt == 10 {
				return err
			}
		}
	}()
	if err != nil {
		d.tb.Fatalf("servers: starting %s: %v", d.what, err)
	}
}

// launch starts a process and waits until it is ready; if it fails, the process
// is dead.
func (d *daemon) launch() error {
	p, err := d.spawn()
	if err != nil {
		return err
	}
	err = poll(startPatience, func(ctx context.Context) error {
		if p.exited() {
			return fmt.Errorf("%w: %s", errHopeless, p.death())
		}
		ctx, cancel := context.WithTimeout(ctx, askPatience)
		defer cancel()
		return d.ready(ctx)
	})
	if err == nil {
		return nil
	}
	d.Kill()
	p.noted.Store(true)
	out := p.output()
	if strings.Contains(out, "Address already in use") {
		return fmt.Errorf("%w: %s:\n%s", errPortInUse, d.Addr(), out)
	}
	return fmt.Errorf("%s on %s: %w; its last output:\n%s", d.what, d.Addr(), err, out)
}

func (d *daemon) spawn() (*process, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, errors.New("the test is over")
	}
	if d.proc != nil && !d.proc.exited() {
		return nil, errors.New("it was started at the same time by somebody else")
	}
	p, err := startProcessAs(d.who, d.dir, d.bin, d.argv())
	if err == nil {
		d.proc = p
	}
	return p, err
}

// close ends the server for good.
func (d *daemon) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	if p := d.proc; p != nil {
		killTree(p)
		if !p.noted.Load() {
			d.tb.Logf("servers: %s on %s: %s; its last output:\n%s", d.what, d.Addr(), p.death(), p.output())
		}
	}
	givePort(d.port)
}

// killTree kills a process with all its descendants, paused or not, and waits
// until they are gone.
func killTree(p *process) {
	if p.exited() {
		return
	}
	children := descendants(p.pid())
	p.kill()
	for _, pid := range children {
		_ = sendSignal(pid, syscall.SIGKILL) // it may have ended with its parent
	}
	_ = poll(startPatience, func(context.Context) error {
		for _, pid := range children {
			if s := state(pid); s != 'X' && s != 'Z' {
				return fmt.Errorf("process %d is alive", pid)
			}
		}
		return nil
	})
}

// Addr returns the server's address, host and port.
func (d *daemon) Addr() string { return address(d.port) }

// Port returns the port that the server listens on.
func (d *daemon) Port() int { return d.port }

// Dir returns the server's folder, which is removed at the end of the test.
func (d *daemon) Dir() string { return d.dir }

// Pid returns the number of the process; each start has another one.
func (d *daemon) Pid() int { return d.current().pid() }

func (d *daemon) current() *process {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.proc
}

// Kill ends the server with SIGKILL and waits until all its processes are gone.
// It has no effect on a dead one.
func (d *daemon) Kill() {
	d.mu.Lock()
	defer d.mu.Unlock()
	killTree(d.proc)
}

// Restart starts the server again, with the same data and on the same port, and
// waits until it is ready. One that is alive is killed first.
func (d *daemon) Restart() {
	d.tb.Helper()
	d.Kill()
	// Somebody looking for a free port may have ours for a moment.
	err := poll(startPatience, func(context.Context) error {
		err := d.launch()
		if err != nil && !errors.Is(err, errPortInUse) {
			err = fmt.Errorf("%w: %w", errHopeless, err)
		}
		return err
	})
	if err != nil {
		d.tb.Fatalf("servers: restarting %s on %s: %v", d.what, d.Addr(), err)
	}
}

// Pause stops the server with all its processes: the kernel goes on accepting
// connections for it, and what is sent is answered after Resume. It fails the
// test if the server is dead.
func (d *daemon) Pause() {
	d.tb.Helper()
	p := d.current()
	// The parent first, so that no further child comes.
	if err := p.pause(); err != nil {
		d.tb.Fatalf("servers: pausing %s on %s: %v", d.what, d.Addr(), err)
	}
	for _, pid := range descendants(p.pid()) {
		if err := sendSignal(pid, syscall.SIGSTOP); err != nil && !errors.Is(err, syscall.ESRCH) {
			d.tb.Fatalf("servers: pausing process %d of %s on %s: %v", pid, d.what, d.Addr(), err)
		}
	}
}

// Resume lets the server go on after Pause. It has no effect on one that runs or
// is dead.
func (d *daemon) Resume() {
	d.tb.Helper()
	p := d.current()
	for _, pid := range descendants(p.pid()) {
		_ = sendSignal(pid, syscall.SIGCONT) // it may be dead
	}
	if err := p.resume(); err != nil && !errors.Is(err, errHopeless) {
		d.tb.Fatalf("servers: resuming %s on %s: %v", d.what, d.Addr(), err)
	}
}
