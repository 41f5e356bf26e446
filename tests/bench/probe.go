package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// probe reads the counters of a measurement: what the servers have done, and the
// processor time of both sides.
type probe struct {
	row     *row
	servers []server
	count   counter
	sent    func(command string) bool // whether the client sends it
}

// reading is the state of all counters at one time.
type reading struct {
	at     time.Time
	sent   float64       // commands that the client has sent
	all    float64       // all that is counted
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
	p := &probe{row: r, servers: servers, count: count, sent: r.sent}
	if p.sent == nil {
		p.sent = s.sent
	}
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
		if p.sent == nil || p.sent(command) {
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

// processTime is the processor time that the living threads of a process and of
// its children have used, in nanoseconds, and what its dead children had used, in
// the hundredths of a second that /proc/pid/stat knows. It is zero where there
// are no such files.
func processTime(pid int) time.Duration {
	folders, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid)) // the pattern is right
	sum := deadChildrenTime(pid)
	for _, folder := range folders {
		// What cannot be read has ended.
		text, _ := os.ReadFile(filepath.Join(folder, "schedstat"))
		first, _, _ := strings.Cut(string(text), " ")
		n, _ := strconv.ParseInt(first, 10, 64)
		sum += time.Duration(n)
		children, _ := os.ReadFile(filepath.Join(folder, "children"))
		for field := range strings.FieldsSeq(string(children)) {
			if child, err := strconv.Atoi(field); err == nil {
				sum += processTime(child)
			}
		}
	}
	return sum
}

func deadChildrenTime(pid int) time.Duration {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	// The name of the program, in parentheses, may contain anything.
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	const user, system = 13, 14 // of children, counted from the state
	if len(fields) <= system {
		return 0
	}
	u, _ := strconv.ParseInt(fields[user], 10, 64)
	s, _ := strconv.ParseInt(fields[system], 10, 64)
	return time.Duration(u+s) * (time.Second / 100)
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
