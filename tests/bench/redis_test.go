package main

import (
	"bufio"
	"context"
	"fmt"
	"maps"
	"net"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/redis/go-redis/v9"
)

func TestAddCommandStats(t *testing.T) {
	t.Parallel()
	calls := map[string]int64{"get": 1}
	text := "# Commandstats\r\n" +
		"cmdstat_get:calls=2,usec=5,usec_per_call=2.50,rejected_calls=0,failed_calls=0\r\n" +
		"cmdstat_client|setinfo:calls=30,usec=1,usec_per_call=0.03,rejected_calls=0,failed_calls=0\r\n"
	if err := addCommandStats(calls, text); err != nil {
		t.Fatal(err)
	}
	if want := map[string]int64{"get": 3, "client|setinfo": 30}; !maps.Equal(calls, want) {
		t.Errorf("got %v, want %v", calls, want)
	}
	for _, text := range []string{"cmdstat_get:none", "cmdstat_get:calls=x,usec=1"} {
		if err := addCommandStats(calls, text); err == nil {
			t.Errorf("%q: no error", text)
		}
	}
}

// TestRedisSent compares what each row says of its commands, whether they are
// sent by the client or called by its scripts, with what MONITOR says.
func TestRedisSent(t *testing.T) {
	t.Parallel()
	s := stores["redis"]
	d, err := newDriver(t.Context(), &settings{store: s, scale: 0.01}, t, logWriter{t})
	if err != nil {
		t.Fatal(err)
	}
	monitor := startMonitor(t, d.servers)
	for _, r := range s.rows {
		for _, w := range []workload{w1, w3} {
			if !r.in(w) {
				continue
			}
			if m := d.measure(t.Context(), &r, w); m.Error != "" {
				t.Errorf("%v of %s: %s", w, r.name, m.Error)
			}
			total, wrong := 0, map[redisCommand]int{}
			for c, n := range monitor.take(t) {
				total += n
				// A few of those with which a client begins are sent and
				// called in scripts as well.
				const few = 2
				if sent := r.sent == nil || r.sent(c.name); sent == c.inScript && n > few*len(d.servers[r.servers]) {
					wrong[c] = n
				}
			}
			if len(wrong) > 0 {
				t.Errorf("%v of %s: of %d commands, these count wrongly: %+v", w, r.name, total, wrong)
			}
		}
	}
}

// redisCommand is a kind of command that a server has executed.
type redisCommand struct {
	name     string // as in INFO commandstats
	inScript bool
}

// redisMonitor listens to what servers execute.
type redisMonitor struct {
	clients []*redis.Client
	wg      sync.WaitGroup

	mu      sync.Mutex
	seen    map[redisCommand]int
	markers map[string]chan struct{}
}

var monitorLine = regexp.MustCompile(`^\+[0-9.]+ \[\d+ (\S+)\] "([^"]*)"(?: "([^"]*)")?`)

func startMonitor(t *testing.T, groups map[string][]server) *redisMonitor {
	m := &redisMonitor{seen: map[redisCommand]int{}, markers: map[string]chan struct{}{}}
	t.Cleanup(m.wg.Wait)
	for _, list := range groups {
		for _, s := range list {
			conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", s.addr)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = conn.Close() }) // nothing is lost
			if _, err := fmt.Fprint(conn, "MONITOR\r\n"); err != nil {
				t.Fatal(err)
			}
			lines := bufio.NewScanner(conn)
			if !lines.Scan() || lines.Text() != "+OK" {
				t.Fatalf("MONITOR is answered by %q: %v", lines.Text(), lines.Err())
			}
			m.wg.Go(func() {
				for lines.Scan() {
					m.hear(lines.Text())
				}
			})
			c := newRedisClient(s.addr, 1)
			t.Cleanup(func() { _ = c.Close() })
			m.clients = append(m.clients, c)
		}
	}
	return m
}

func (m *redisMonitor) hear(line string) {
	parts := monitorLine.FindStringSubmatch(line)
	if parts == nil {
		return
	}
	from, name, arg := parts[1], strings.ToLower(parts[2]), parts[3]
	switch name {
	case "client", "config", "function", "script":
		name += "|" + strings.ToLower(arg)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if done := m.markers[arg]; name == "echo" && done != nil {
		close(done)
		return
	}
	m.seen[redisCommand{name, from == "lua"}]++
}

// take returns how often the servers have executed each command since the last
// call.
func (m *redisMonitor) take(t *testing.T) map[redisCommand]int {
	t.Helper()
	for i, c := range m.clients {
		// What has been sent before the marker has been heard when it is.
		marker, done := fmt.Sprintf("%s-%d", prefix(w1), i), make(chan struct{})
		m.mu.Lock()
		m.markers[marker] = done
		m.mu.Unlock()
		if err := c.Echo(context.WithoutCancel(t.Context()), marker).Err(); err != nil {
			t.Fatal(err)
		}
		<-done
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	seen := m.seen
	m.seen = map[redisCommand]int{}
	for _, own := range []string{"flushall", "info", "client|setinfo", "hello"} {
		delete(seen, redisCommand{own, false}) // of the command itself, too
	}
	return seen
}
