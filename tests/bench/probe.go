package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// probe reads the counters of a measurement: the servers' commands, and the
// processor time of both sides.
type probe struct {
	row     *row
	servers []server
	count   counter
}

// reading is the state of all counters at one time.
type reading struct {
	at     time.Time
	sent   float64       // commands that the client has sent
	all    float64       // those that ran within scripts, too
	client time.Duration // processor time of this process
	server time.Duration // and of the servers
}

// newProbe connects to the servers. Its first reading is thrown away, so that
// the connection itself is not counted.
func newProbe(ctx context.Context, s *store, r *row, servers []server) (*probe, error) {
	count, err := s.count(ctx, servers)
	if err != nil {
		return nil, fmt.Errorf("counting commands: %w", err)
	}
	p := &probe{row: r, servers: servers, count: count}
	_, err = p.read(ctx)
	return p, err
}

func (p *probe) read(ctx context.Context) (reading, error) {
	calls, err := p.count(ctx)
	if err != nil {
		return reading{}, fmt.Errorf("counting commands: %w", err)
	}
	var n reading
	for command, c := range calls {
		n.all += float64(c)
		if p.row.sent == nil || p.row.sent(command) {
			n.sent += float64(c)
		}
	}
	for _, s := range p.servers {
		n.server += processTime(s.pid)
	}
	n.client, n.at = ownTime(), time.Now()
	return n, nil
}

// since is what has happened between two readings.
func (n reading) since(before reading) spent {
	return spent{
		seconds: n.at.Sub(before.at).Seconds(),
		sent:    n.sent - before.sent,
		all:     n.all - before.all,
		client:  (n.client - before.client).Seconds(),
		server:  (n.server - before.server).Seconds(),
	}
}

// spent is the difference of two readings; times are in seconds.
type spent struct {
	seconds, sent, all, client, server float64
}

// ownTime is the processor time that this process has used.
func ownTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// processTime is the processor time that the living threads of a process have
// used, in nanoseconds where /proc/pid/stat knows hundredths of a second. It
// is zero where there is no such file.
func processTime(pid int) time.Duration {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	var sum int64
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			continue // the thread has ended
		}
		first, _, _ := strings.Cut(string(text), " ")
		n, _ := strconv.ParseInt(first, 10, 64)
		sum += n
	}
	return time.Duration(sum)
}

// residentMB is the memory of this process that is in RAM, in MiB.
func residentMB() float64 {
	text, _ := os.ReadFile("/proc/self/status")
	for line := range strings.Lines(string(text)) {
		var kb float64
		if n, _ := fmt.Sscanf(line, "VmRSS: %f kB", &kb); n == 1 {
			return kb / 1024
		}
	}
	return 0
}

// load is the machine's load average over the last minute.
func load() float64 {
	text, _ := os.ReadFile("/proc/loadavg")
	first, _, _ := strings.Cut(string(text), " ")
	n, _ := strconv.ParseFloat(first, 64)
	return n
}
