package servers_test

import (
	"database/sql"
	"testing"

	"github.com/go-dlm/dlm/tests/servers"
)

// What a server has acknowledged is there after it was killed, and a paused one
// answers when it goes on.
func TestMariaDB(t *testing.T) {
	t.Parallel()
	s := servers.StartMariaDB(t, "--max-connections=20")
	db, err := sql.Open("mysql", s.DSN("test", "timeout=1s", "readTimeout=60s"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	exec := func(query string) {
		t.Helper()
		if _, err := db.ExecContext(t.Context(), query); err != nil {
			t.Fatalf("%s: %v", query, err)
		}
	}
	read := func(query string) (n int) {
		t.Helper()
		if err := db.QueryRowContext(t.Context(), query).Scan(&n); err != nil {
			t.Fatalf("%s: %v", query, err)
		}
		return n
	}
	if n := read("SELECT @@max_connections"); n != 20 {
		t.Errorf("max_connections is %d, want 20", n)
	}
	exec("CREATE TABLE t (n int PRIMARY KEY)")
	exec("INSERT INTO t VALUES (7)")

	pid := s.Pid()
	s.Kill()
	if !gone(pid) {
		t.Error("the process is there after Kill")
	}
	s.Restart()
	if n := read("SELECT n FROM t"); n != 7 {
		t.Errorf("%d after a restart, want 7", n)
	}

	s.Pause()
	done := make(chan error, 1)
	go func() {
		var n int
		done <- db.QueryRowContext(t.Context(), "SELECT n FROM t").Scan(&n)
	}()
	s.Resume()
	if err := <-done; err != nil {
		t.Errorf("after a pause: %v", err)
	}
}
