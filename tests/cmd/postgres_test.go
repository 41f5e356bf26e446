package cmd_test

import (
	"syscall"
	"testing"
	"time"

	"github.com/go-dlm/dlm/tests/servers"
)

// All commands work on PostgreSQL, with locks in tables and with advisory locks.
func TestPostgres(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, query string }{
		{"tables", "&create_schema=true"},
		{"advisory", "&create_schema=true&mode=advisory"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			testCommands(t, store{url: servers.StartPostgres(t, nil).URL("postgres") + c.query})
		})
	}
}

// The advisory lock of a holder that was killed is free at once, whatever its TTL.
func TestPostgresHolderKilled(t *testing.T) {
	t.Parallel()
	s := store{url: servers.StartPostgres(t, nil).URL("postgres") + "&create_schema=true&mode=advisory"}
	p := s.start(t, "run", "--ttl", "1h", "k", "--", "sh", "-c", "echo $$; exec sleep 1000")
	pid := int(number(t, p.line()))
	waiter := s.queue(t, "k")
	p.signal(syscall.SIGKILL)
	killed := time.Now()
	p.expect(-int(syscall.SIGKILL))
	eventually(t, "the command is killed", func() bool { return !alive(pid) })
	waiter.line()
	if took := time.Since(killed); took > 10*time.Second {
		t.Errorf("the lock went over after %v", took)
	}
	waiter.let()
}
