package servers

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/go-sql-driver/mysql"
)

// MariaDB is one MariaDB server, whose user root needs no password. Its data
// survive Kill and Restart, though not the death of the machine. Its methods are
// safe for concurrent use, but those that fail the test are for the test's
// goroutine.
type MariaDB struct{ daemon }

// StartMariaDB starts one server, with an empty database named test. Settings
// are further arguments of it, such as "--innodb-lock-wait-timeout=5", which win
// over those of the package. It returns when the server answers. As root, the
// server is run by the user postgres or nobody.
func StartMariaDB(tb TB, settings ...string) *MariaDB {
	tb.Helper()
	bin := "/usr/sbin/mariadbd" // not where everybody looks for programs
	if _, err := os.Stat(bin); err != nil {
		bin = command(tb, "mariadbd")
	}
	who, err := unprivileged()
	if err != nil {
		Missing(tb, err.Error())
	}
	install := command(tb, "mariadb-install-db")
	m := &MariaDB{daemon{tb: tb, what: "mariadbd", bin: bin, who: who}}
	data := func() string { return filepath.Join(m.dir, "data") }
	// A server removes temporary tables of others that it finds when it starts.
	common := func() []string {
		return []string{"--no-defaults", "--datadir=" + data(), "--tmpdir=" + m.dir, "--skip-name-resolve", "--innodb-log-file-size=8M"}
	}
	m.argv = func() []string {
		return slices.Concat(common(), []string{
			"--port=" + strconv.Itoa(m.port), "--bind-address=127.0.0.1", "--socket=" + filepath.Join(m.dir, "socket"),
			"--innodb-buffer-pool-size=16M", "--innodb-flush-log-at-trx-commit=2", "--skip-log-bin", "--max-connections=200",
		}, settings)
	}
	m.ready = func(ctx context.Context) error {
		db, err := m.open("")
		if err != nil {
			return err
		}
		defer db.Close()
		var got string
		if err := db.QueryRowContext(ctx, "SELECT @@datadir").Scan(&got); err != nil {
			return err
		}
		if filepath.Clean(got) != data() {
			return fmt.Errorf("another server has the port, with data in %s", got)
		}
		_, err = db.ExecContext(ctx, "CREATE DATABASE IF NOT EXISTS test")
		return err
	}
	m.begin(func() error {
		return m.run(install, append(common(), "--auth-root-authentication-method=normal", "--skip-test-db")...)
	})
	return m
}

func (m *MariaDB) run(bin string, args ...string) error { return runAs(m.who, m.dir, bin, args...) }

// DSN returns the name of a database for the driver of go-sql-driver, with
// further parameters.
func (m *MariaDB) DSN(database string, params ...string) string {
	return fmt.Sprintf("root@tcp(%s)/%s?%s", m.Addr(), database, strings.Join(params, "&"))
}

// open returns connections that do not report failures, which are many while the
// server starts.
func (m *MariaDB) open(database string) (*sql.DB, error) {
	config, err := mysql.ParseDSN(m.DSN(database))
	if err != nil {
		return nil, err
	}
	config.Logger = &mysql.NopLogger{}
	connector, err := mysql.NewConnector(config)
	if err != nil {
		return nil, err
	}
	return sql.OpenDB(connector), nil
}
