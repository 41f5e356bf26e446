package servers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// PostgresConfig says what kind of server to start. The zero value is a primary
// whose data survive Kill and Restart, though not the death of the machine.
type PostgresConfig struct {
	// Settings are further settings of the server, such as
	// "synchronous_commit=off". They win over those of the package.
	Settings []string
	// ReplicaOf is the primary that the server follows, nil for none.
	ReplicaOf *Postgres
	// TLS has the server offer TLS, and URLs ask for it.
	TLS bool
	// HBA are lines that take the place of those that let everybody in from this
	// machine (pg_hba.conf), but for the user postgres.
	HBA []string
}

// Postgres is one PostgreSQL server, whose user postgres needs no password. Its
// methods are safe for concurrent use, but those that fail the test are for the
// test's goroutine.
type Postgres struct {
	daemon
	home string // of the server's programs
	tls  bool
}

// StartPostgres starts one server. It returns when the server answers and, for a
// replica, when it follows its primary. A nil cfg is the zero value. As root, the
// server is run by the user postgres or nobody.
func StartPostgres(tb TB, cfg *PostgresConfig) *Postgres {
	tb.Helper()
	if cfg == nil {
		cfg = &PostgresConfig{}
	}
	settings := slices.Clone(cfg.Settings)
	bin := postgresProgram(tb)
	who, err := unprivileged()
	if err != nil {
		Missing(tb, err.Error())
	}
	p := &Postgres{daemon: daemon{tb: tb, what: "postgres", bin: bin, who: who}, home: filepath.Dir(bin), tls: cfg.TLS}
	if cfg.TLS {
		settings = append([]string{"ssl=on", "ssl_cert_file=" + certFile, "ssl_key_file=" + keyFile}, settings...)
	}
	p.argv = func() []string {
		args := []string{"-D", p.data(), "-p", strconv.Itoa(p.port)}
		for _, s := range append([]string{
			"listen_addresses=127.0.0.1", "unix_socket_directories=", "shared_buffers=16MB", "max_connections=200",
			"fsync=off", "full_page_writes=off", "autovacuum=off", "jit=off", "wal_level=replica", "max_wal_senders=4",
			"log_min_messages=warning",
		}, settings...) {
			args = append(args, "-c", s)
		}
		return args
	}
	primary := cfg.ReplicaOf
	p.ready = func(ctx context.Context) error {
		if err := p.answers(ctx); err != nil {
			return err
		}
		if primary == nil || primary.current().exited() || primary.current().paused.Load() {
			return nil
		}
		return primary.followed(ctx, p.port)
	}
	p.begin(func() error {
		if primary != nil {
			return p.run(filepath.Join(p.home, "pg_basebackup"), "-D", p.data(), "-R", "-X", "stream", "-c", "fast", "--no-sync",
				"-d", fmt.Sprintf("host=127.0.0.1 port=%d user=postgres application_name=r%d", primary.port, p.port))
		}
		from, err := p.template()
		if err != nil {
			return err
		}
		if err := p.run("/bin/cp", "-a", from, p.data()); err != nil {
			return err
		}
		if cfg.TLS {
			if err := p.identify(); err != nil {
				return err
			}
		}
		if cfg.HBA == nil {
			return nil
		}
		lines := append([]string{"host all postgres 127.0.0.1/32 trust", "host replication postgres 127.0.0.1/32 trust"}, cfg.HBA...)
		return os.WriteFile(filepath.Join(p.data(), "pg_hba.conf"), []byte(strings.Join(lines, "\n")+"\n"), 0o600)
	})
	return p
}

// postgresProgram finds the server, which Debian does not put where programs are
// looked for.
func postgresProgram(tb TB) string {
	tb.Helper()
	if path, err := exec.LookPath("postgres"); err == nil {
		// The other programs are beside it, and not beside a link to it.
		if real, err := filepath.EvalSymlinks(path); err == nil {
			return real
		}
	}
	number := regexp.MustCompile(`\d+`)
	version := func(path string) int {
		n, _ := strconv.Atoi(number.FindString(path)) // digits
		return n
	}
	var found []string
	for _, pattern := range []string{"/usr/lib/postgresql/*/bin/postgres", "/usr/pgsql-*/bin/postgres"} {
		list, _ := filepath.Glob(pattern) // the pattern is right
		found = append(found, list...)
	}
	if len(found) == 0 {
		return command(tb, "postgres")
	}
	return slices.MaxFunc(found, func(a, b string) int { return version(a) - version(b) })
}

// identify gives the server its certificate, in files that must be its own.
func (p *Postgres) identify() error {
	id, err := theIdentity()
	if err != nil {
		return err
	}
	if err := id.write(p.data()); err != nil || p.who == nil {
		return err
	}
	return errors.Join(os.Chown(filepath.Join(p.data(), certFile), p.who.uid, p.who.gid),
		os.Chown(filepath.Join(p.data(), keyFile), p.who.uid, p.who.gid))
}

func (p *Postgres) data() string { return filepath.Join(p.dir, "data") }

// run runs a program as the server's user, to its end.
func (p *Postgres) run(bin string, args ...string) error {
	return runAs(p.who, p.dir, bin, args...)
}

func runAs(who *account, dir, bin string, args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), startPatience)
	defer cancel()
	cmd := exec.CommandContext(ctx, bin, args...)
	cmd.Dir = dir
	cmd.SysProcAttr = childAttributes(who)
	cmd.SysProcAttr.Pdeathsig = 0 // the thread may end before it
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w:\n%s", filepath.Base(bin), err, out)
	}
	return nil
}

var templates sync.Mutex

// template is a folder with data of a new server, which is kept for later runs: to
// make it takes a second, to copy it a tenth of that.
func (p *Postgres) template() (string, error) {
	templates.Lock()
	defer templates.Unlock()
	out, err := exec.Command(p.bin, "--version").Output()
	if err != nil {
		return "", fmt.Errorf("%s --version: %w", p.bin, err)
	}
	uid := os.Geteuid()
	if p.who != nil {
		uid = p.who.uid
	}
	version := regexp.MustCompile(`[^0-9.]+`).ReplaceAllString(string(out), "-")
	dir := filepath.Join(os.TempDir(), fmt.Sprintf("dlm-postgres%s%d", version, uid))
	if f, err := os.Lstat(dir); err == nil {
		if !f.IsDir() || ownerOf(f) != uid {
			return "", fmt.Errorf("%s belongs to somebody else", dir)
		}
		return dir, nil
	}
	fresh := filepath.Join(p.dir, "template")
	err = p.run(filepath.Join(p.home, "initdb"), "-D", fresh, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C",
		"--no-sync", "--no-instructions", "--wal-segsize=1")
	if err != nil {
		return "", err
	}
	// Another process may be faster, and a rename may not be possible.
	if os.Rename(fresh, dir) == nil {
		return dir, nil
	}
	if _, err := os.Lstat(dir); err == nil {
		return dir, nil
	}
	return fresh, nil
}

// URL returns the URL of a database for the user postgres.
func (p *Postgres) URL(database string) string { return p.URLFor("postgres", "", database) }

// URLFor returns the URL of a database for any user.
func (p *Postgres) URLFor(user, password, database string) string {
	if password != "" {
		user += ":" + password
	}
	mode := "disable"
	if p.tls {
		mode = "verify-full&sslrootcert=" + filepath.Join(p.data(), caFile)
	}
	return fmt.Sprintf("postgres://%s@%s/%s?sslmode=%s", user, p.Addr(), database, mode)
}

// Stop ends the server in order: SIGINT, which ends sessions (a fast shutdown), or
// SIGQUIT, which ends them at once and leaves the data to be repaired. It has no
// effect on a dead one.
func (p *Postgres) Stop(s syscall.Signal) {
	p.tb.Helper()
	proc := p.current()
	proc.noted.Store(true)
	if err := proc.signal(s); err != nil && !errors.Is(err, errHopeless) {
		p.tb.Fatalf("servers: stopping postgres on %s: %v", p.Addr(), err)
	}
	select {
	case <-proc.done:
	case <-time.After(startPatience):
		p.tb.Fatalf("servers: postgres on %s does not stop", p.Addr())
	}
}

// PauseSession stops the server's process with this number (pg_backend_pid), and
// returns what lets it go on.
func (p *Postgres) PauseSession(pid int) (resume func()) {
	p.tb.Helper()
	if err := sendSignal(pid, syscall.SIGSTOP); err != nil {
		p.tb.Fatalf("servers: pausing session %d: %v", pid, err)
	}
	return func() { _ = sendSignal(pid, syscall.SIGCONT) } // it may be dead
}

// Promote makes a primary of a replica.
func (p *Postgres) Promote() {
	p.tb.Helper()
	p.MustDo("postgres", "select pg_promote(true, 60)")
	err := poll(changePatience, func(ctx context.Context) error {
		rows, err := p.Do(ctx, "postgres", "select pg_is_in_recovery()::text")
		if err == nil && rows[0][0] != "false" {
			err = errors.New("it is in recovery")
		}
		return err
	})
	if err != nil {
		p.tb.Fatalf("servers: promoting postgres on %s: %v", p.Addr(), err)
	}
}

// Do makes one or several statements in a database, on a connection of its own, as
// the user postgres, and returns the rows of the last one, as text; NULL is "".
func (p *Postgres) Do(ctx context.Context, database, text string) ([][]string, error) {
	config, err := pgx.ParseConfig(p.URL(database))
	if err != nil {
		return nil, err
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	defer conn.Close(context.Background())
	results, err := conn.PgConn().Exec(ctx, text).ReadAll()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", text, err)
	}
	var rows [][]string
	for _, r := range results[len(results)-1].Rows {
		var cells []string
		for _, cell := range r {
			cells = append(cells, string(cell))
		}
		rows = append(rows, cells)
	}
	return rows, nil
}

// MustDo is [Postgres.Do] for statements that cannot fail: if one does, or is not
// answered in some seconds, the test fails.
func (p *Postgres) MustDo(database, text string) [][]string {
	p.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), changePatience)
	defer cancel()
	rows, err := p.Do(ctx, database, text)
	if err != nil {
		p.tb.Fatalf("servers: postgres on %s: %v", p.Addr(), err)
	}
	return rows
}

// answers checks that the server serves statements, and that it is our process.
func (p *Postgres) answers(ctx context.Context) error {
	if _, err := p.Do(ctx, "postgres", "select 1"); err != nil {
		return err
	}
	text, err := os.ReadFile(filepath.Join(p.data(), "postmaster.pid"))
	if err != nil {
		return err
	}
	if pid, _, _ := strings.Cut(string(text), "\n"); pid != strconv.Itoa(p.Pid()) {
		return fmt.Errorf("process %s has the data and not %d", pid, p.Pid())
	}
	return nil
}

// followed checks that a replica is in step.
func (p *Postgres) followed(ctx context.Context, port int) error {
	rows, err := p.Do(ctx, "postgres", fmt.Sprintf(
		"select count(*) from pg_stat_replication where state = 'streaming' and application_name = 'r%d'", port))
	if err == nil && rows[0][0] != "1" {
		err = errors.New("the replica has no link to its primary")
	}
	return err
}

// PgBouncer is a pooler between clients and a server.
type PgBouncer struct{ daemon }

// StartPgBouncer starts a pooler with few connections to a server, in a mode such
// as "transaction" or "session". Users need no password.
func StartPgBouncer(tb TB, target *Postgres, mode string, connections int) *PgBouncer {
	tb.Helper()
	bin := "/usr/sbin/pgbouncer" // not where everybody looks for programs
	if _, err := os.Stat(bin); err != nil {
		bin = command(tb, "pgbouncer")
	}
	who, err := unprivileged()
	if err != nil {
		Missing(tb, err.Error())
	}
	b := &PgBouncer{daemon{tb: tb, what: "pgbouncer", bin: bin, who: who}}
	b.argv = func() []string {
		file := filepath.Join(b.dir, "pgbouncer.ini")
		text := fmt.Sprintf("[databases]\n* = host=127.0.0.1 port=%d user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\n"+
			"listen_port = %d\nunix_socket_dir =\nauth_type = any\npool_mode = %s\nmax_client_conn = 1000\ndefault_pool_size = %d\n"+
			"ignore_startup_parameters = extra_float_digits\nadmin_users = postgres\n", target.port, b.port, mode, connections)
		_ = os.WriteFile(file, []byte(text), 0o644) // the start fails without it
		return []string{file}
	}
	b.ready = func(ctx context.Context) error {
		conn, err := pgx.Connect(ctx, b.URL("postgres")+"&default_query_exec_mode=exec")
		if err != nil {
			return err
		}
		return conn.Close(ctx)
	}
	b.begin(func() error { return nil })
	return b
}

// URL returns the URL of a database for the user postgres.
func (b *PgBouncer) URL(database string) string {
	return fmt.Sprintf("postgres://postgres@%s/%s?sslmode=disable", b.Addr(), database)
}
