// Package semaphore tests semaphores with many processes.
package semaphore_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/tests/servers"
)

const (
	workers   = 200
	processes = 12
	// patience is for waits that only a fault makes long.
	patience = 30 * time.Second
	// grace is what a busy machine gets.
	grace = 2 * time.Second
)

// runTime is for how long workers are killed.
func runTime(t *testing.T) time.Duration {
	text := os.Getenv("DLM_TEST_CHAOS")
	if text == "" {
		return 5 * time.Second
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatalf("DLM_TEST_CHAOS: %v", err)
	}
	return d
}

func TestKilledWorkersRedis(t *testing.T) {
	s := servers.StartRedis(t, nil)
	killWorkers(t, job{Store: "redis", Addr: s.Addr(), TTL: redisTTL}, redisTTL+redisWindow)
}

func TestKilledWorkersEtcd(t *testing.T) {
	const lazy = time.Second // etcd ends leases up to so much later
	s := servers.StartEtcd(t, nil)
	killWorkers(t, job{Store: "etcd", Addr: s.Addr(), TTL: etcdTTL}, etcdTTL+etcdWaiter+lazy)
}

// process is one of the processes that work, in one of its lives.
type process struct {
	account
	name  string
	cmd   *exec.Cmd
	stdin io.Closer
	ended chan struct{} // closed when it is dead and all that it has reported is read
	err   error         // how it ended
}

// crew are the processes that work, the dead included.
type crew struct {
	t       *testing.T
	job     job
	now     []*process // by number
	all     []*process
	killed  int
	granted atomic.Int64
}

// start starts the process with a number, again if it has been there before.
func (c *crew) start(i int) {
	c.t.Helper()
	j := c.job
	j.Workers = workers*(i+1)/processes - workers*i/processes
	text, err := json.Marshal(j)
	if err != nil {
		c.t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		c.t.Fatal(err)
	}
	p := &process{
		account: account{granted: &c.granted},
		name:    fmt.Sprintf("process %d, life %d", i, len(c.all)),
		cmd:     exec.Command(self), ended: make(chan struct{}),
	}
	p.cmd.Env = append(os.Environ(), workerEnv+"="+string(text))
	p.cmd.Stderr = os.Stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		c.t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		c.t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	go func() {
		defer close(p.ended)
		p.read(p.name, out)
		p.err = p.cmd.Wait()
	}()
	c.now[i] = p
	c.all = append(c.all, p)
}

// kill kills a process and waits for its death.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // fails only if it is dead
	<-p.ended
}

// third returns the numbers of a third of the processes, chosen by chance.
func third() []int { return rand.Perm(processes)[:processes/3] }

// kill kills a process that works.
func (c *crew) kill(i int) {
	c.t.Helper()
	p := c.now[i]
	p.kill()
	status, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	if !ok || status.Signal() != syscall.SIGKILL {
		c.t.Fatalf("%s ended before it was killed: %v, %q", p.name, p.err, p.faults)
	}
	c.now[i] = nil
	c.killed++
}

// goesOn waits until permits have been granted again.
func (c *crew) goesOn() {
	c.t.Helper()
	before := c.granted.Load()
	servers.Until(c.t, "permits are granted", func() bool { return c.granted.Load() >= before+5*permits })
}

// killWorkers has 200 workers in 12 processes use a semaphore of 10, while a third
// of the processes is killed and started again, then another third, and so on.
// Never more than 10 are inside, and in the end all permits come back, no later
// than is promised.
func killWorkers(t *testing.T, j job, promised time.Duration) {
	d := runTime(t)
	c := &crew{t: t, job: j, now: make([]*process, processes)}
	defer c.end()
	for i := range processes {
		c.start(i)
	}
	c.goesOn()
	for end := time.Now().Add(d); time.Now().Before(end); c.goesOn() {
		for _, i := range third() {
			<-time.After(rand.N(400 * time.Millisecond)) // at a moment that nobody can know
			c.kill(i)
			c.start(i)
		}
	}
	// These are not started again, and nobody has stopped using the semaphore yet.
	for _, i := range third() {
		c.kill(i)
	}
	died := time.Now()
	for _, p := range c.now {
		if p != nil {
			p.stdin.Close()
		}
	}
	for _, p := range c.now {
		if p == nil {
			continue
		}
		select {
		case <-p.ended:
		case <-time.After(patience):
			t.Fatalf("%s does not end", p.name)
		}
		if p.err != nil {
			t.Errorf("%s: %v", p.name, p.err)
		}
	}
	allBack(t, j, died, promised)
}

// end kills whoever is left, and has all that was reported judged.
func (c *crew) end() {
	for _, p := range c.all {
		p.kill()
	}
	var tenures []tenure
	var faults []string
	lost, left := 0, 0
	for _, p := range c.all {
		tenures, faults, lost = append(tenures, p.tenures...), append(faults, p.faults...), lost+p.lost
		for _, t := range p.tenures {
			if t.end == abandoned {
				left++
			}
		}
	}
	most, more := judge(tenures, permits)
	faults = append(faults, more...)
	c.t.Logf("%d permits granted, %d processes killed and %d permits with them, %d lost; at most %d inside",
		len(tenures), c.killed, left, lost, most)
	const enough = 20
	for _, f := range faults[:min(len(faults), enough)] {
		c.t.Error(f)
	}
	if n := len(faults) - enough; n > 0 {
		c.t.Errorf("and %d more", n)
	}
	if !c.t.Failed() && (most < permits || left == 0) {
		c.t.Errorf("the run shows nothing: at most %d were inside, and %d were killed there", most, left)
	}
}

// allBack takes all permits, and gives them back.
func allBack(t *testing.T, j job, since time.Time, promised time.Duration) {
	t.Helper()
	m, closeAll, err := open(j.Store, j.Addr, soon)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := closeAll(); err != nil {
			t.Error(err)
		}
	}()
	sem, err := dlm.NewDistributedSemaphore(m, name, permits)
	if err != nil {
		t.Fatal(err)
	}
	var held []*dlm.Lock
	servers.Until(t, "all permits are back", func() bool {
		for len(held) < permits {
			l, err := sem.TryAcquire(t.Context(), patience)
			if errors.Is(err, dlm.ErrHeld) {
				return false
			}
			if err != nil {
				t.Fatal(err)
			}
			held = append(held, l)
		}
		return true
	})
	took := time.Since(since)
	t.Logf("all permits are back after %v, promised are %v", took.Round(time.Millisecond), promised)
	if took > promised+grace {
		t.Errorf("the permits of the dead came back after %v, promised are %v", took, promised)
	}
	if l, err := sem.TryAcquire(t.Context(), patience); !errors.Is(err, dlm.ErrHeld) {
		t.Errorf("one permit too many: %v, %v", l, err)
	}
	usage(t, sem, dlm.SemaphoreUsage{Capacity: permits, Held: permits})
	for _, l := range held {
		if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	usage(t, sem, dlm.SemaphoreUsage{Capacity: permits})
}

func usage(t *testing.T, sem *dlm.Semaphore, want dlm.SemaphoreUsage) {
	t.Helper()
	if got, err := sem.Usage(t.Context()); err != nil || got != want {
		t.Errorf("usage is %+v, %v; want %+v", got, err, want)
	}
}
