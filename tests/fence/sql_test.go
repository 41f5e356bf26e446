// Package fence_test runs the guards of package fence on real stores.
package fence_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	_ "github.com/jackc/pgx/v5/stdlib"
	"modernc.org/sqlite"

	"github.com/go-dlm/dlm/fence"
	"github.com/go-dlm/dlm/tests/servers"
)

// database is a database that the suite runs on.
type database struct {
	dialect fence.Dialect
	db      *sql.DB
	levels  []sql.IsolationLevel
	// serial is the type of a column that counts rows.
	serial string
	// waiting counts the transactions that wait for another one; nil where only
	// one transaction can write.
	waiting string
	// again says whether an error asks for the transaction to be repeated.
	again func(error) bool
}

// tables numbers tables, as databases share servers.
var tables atomic.Int64

func newTable(prefix string) string { return fmt.Sprint(prefix, tables.Add(1)) }

func openDB(t *testing.T, driver, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	db.SetMaxOpenConns(16)
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return db
}

func postgres(t *testing.T) (*database, *servers.Postgres) {
	t.Helper()
	s := servers.StartPostgres(t, nil)
	return &database{
		dialect: fence.PostgreSQL,
		db:      openDB(t, "pgx", s.URL("postgres")),
		levels:  []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable},
		serial:  "bigserial",
		waiting: "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'",
		again: func(err error) bool {
			var e *pgconn.PgError
			return errors.As(err, &e) && (e.Code == "40001" || e.Code == "40P01")
		},
	}, s
}

func sqliteFile(t *testing.T) *database {
	t.Helper()
	return &database{
		dialect: fence.SQLite,
		db: openDB(t, "sqlite", "file:"+filepath.Join(t.TempDir(), "data.db")+
			"?_pragma=busy_timeout(20000)&_pragma=journal_mode(wal)&_pragma=synchronous(off)"),
		levels: []sql.IsolationLevel{sql.LevelDefault},
		serial: "integer",
		again: func(err error) bool {
			var e *sqlite.Error
			return errors.As(err, &e) && e.Code()&0xff == 5 // SQLITE_BUSY
		},
	}
}

func mariaDB(t *testing.T, s *servers.MariaDB, params ...string) *database {
	t.Helper()
	return &database{
		dialect: fence.MySQL,
		db:      openDB(t, "mysql", s.DSN("test", params...)),
		levels: []sql.IsolationLevel{
			sql.LevelReadUncommitted, sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable,
		},
		serial:  "serial",
		waiting: "SELECT variable_value FROM information_schema.global_status WHERE variable_name = 'INNODB_ROW_LOCK_CURRENT_WAITS'",
		again: func(err error) bool {
			var e *mysql.MySQLError
			return errors.As(err, &e) && (e.Number == 1213 || e.Number == 1020) // deadlock; changed since it was read
		},
	}
}

func TestPostgreSQL(t *testing.T) {
	t.Parallel()
	d, s := postgres(t)
	d.suite(t)
	t.Run("pgx", func(t *testing.T) { pgxStatement(t, d, s) })
}

func TestSQLite(t *testing.T) {
	t.Parallel()
	sqliteFile(t).suite(t)
}

// The guard does not depend on how the client counts rows.
func TestMariaDB(t *testing.T) {
	t.Parallel()
	s := servers.StartMariaDB(t)
	t.Run("changed rows", func(t *testing.T) { mariaDB(t, s).suite(t) })
	t.Run("found rows", func(t *testing.T) {
		d := mariaDB(t, s, "clientFoundRows=true")
		d.suite(t)
		d.column(t, "UPDATE item SET stock = ?, fence = ? WHERE id = ? AND fence <= ?", true)
	})
}

func (d *database) suite(t *testing.T) {
	for _, c := range []struct {
		name string
		run  func(*testing.T, *database)
	}{
		{"Sequences", sequences},
		{"Names", names},
		{"Rollback", rollback},
		{"Order", order},
		{"OldSnapshot", oldSnapshot},
		{"Concurrent", concurrent},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(t, d) })
	}
	switch d.dialect {
	case fence.PostgreSQL:
		d.column(t, "UPDATE item SET stock = $1, fence = $2 WHERE id = $3 AND fence <= $2", false)
	case fence.SQLite:
		d.column(t, "UPDATE item SET stock = ?1, fence = ?2 WHERE id = ?3 AND fence <= ?2", false)
	}
}

// guard makes a guard with a table of its own.
func (d *database) guard(t *testing.T) *fence.SQL {
	t.Helper()
	g, err := fence.NewSQL(d.dialect, &fence.SQLOptions{Table: newTable("fence_")})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // it does no harm to do it twice
		d.exec(t, g.Schema())
	}
	return g
}

func (d *database) exec(t *testing.T, query string, args ...any) {
	t.Helper()
	if _, err := d.db.ExecContext(t.Context(), query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// write checks a token in a transaction, which is committed if all is well, and
// calls then in it.
func (d *database) write(
	ctx context.Context, g *fence.SQL, level sql.IsolationLevel, resource string, token int64, then func(*sql.Tx) error,
) error {
	tx, err := d.db.BeginTx(ctx, &sql.TxOptions{Isolation: level})
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := g.Check(ctx, tx, resource, token); err != nil {
		return err
	}
	if then != nil {
		if err := then(tx); err != nil {
			return err
		}
	}
	return tx.Commit()
}

func isStale(t *testing.T, err error, want fence.StaleError) {
	t.Helper()
	var stale *fence.StaleError
	if !errors.As(err, &stale) || *stale != want {
		t.Errorf("%v, want %v", err, &want)
	}
}

// runs are tokens in the order in which they come, and which of them are refused.
var runs = []struct {
	name    string
	tokens  []int64
	refused []bool
}{
	{"rising", []int64{1, 2, 7}, []bool{false, false, false}},
	{"the same holder writes often", []int64{5, 5, 5}, []bool{false, false, false}},
	{"a lower one is refused", []int64{5, 4, 1}, []bool{false, true, true}},
	{"the same as before a higher one is refused", []int64{5, 6, 5}, []bool{false, false, true}},
	{"a refusal changes nothing", []int64{5, 4, 5, 6}, []bool{false, true, false, false}},
	{"the highest there is", []int64{fence.MaxToken - 1, fence.MaxToken, fence.MaxToken, fence.MaxToken - 1}, []bool{false, false, false, true}},
}

func sequences(t *testing.T, d *database) {
	g := d.guard(t)
	for _, level := range d.levels {
		for _, c := range runs {
			resource := fmt.Sprint(level, c.name)
			var highest int64
			for i, token := range c.tokens {
				err := d.write(t.Context(), g, level, resource, token, nil)
				if c.refused[i] {
					isStale(t, err, fence.StaleError{Resource: resource, Token: token, Highest: highest})
				} else if err != nil {
					t.Errorf("%s, %v: token %d: %v", c.name, level, token, err)
				}
				highest = max(highest, token)
			}
		}
	}
}

// No two names meet.
func names(t *testing.T, d *database) {
	g := d.guard(t)
	list := []string{
		"a", "A", "a ", " a", "ä", "a\u0308", "ß", "ss", "a\x00", "a\x00b", "a'b", `a"b`, `a\b`, "%", "_",
		strings.Repeat("x", 511), strings.Repeat("x", 512), strings.Repeat("世", 170), "1", "01",
	}
	for i, resource := range list {
		if err := d.write(t.Context(), g, 0, resource, int64(100-i), nil); err != nil {
			t.Errorf("%q: %v", resource, err)
		}
	}
	for i, resource := range list {
		err := d.write(t.Context(), g, 0, resource, int64(99-i), nil)
		isStale(t, err, fence.StaleError{Resource: resource, Token: int64(99 - i), Highest: int64(100 - i)})
	}
}

// A token whose transaction was rolled back was never seen.
func rollback(t *testing.T, d *database) {
	g := d.guard(t)
	changed := errors.New("changed my mind")
	for _, before := range []bool{false, true} {
		resource := fmt.Sprint("r", before)
		if before {
			if err := d.write(t.Context(), g, 0, resource, 3, nil); err != nil {
				t.Fatal(err)
			}
		}
		err := d.write(t.Context(), g, 0, resource, 9, func(*sql.Tx) error { return changed })
		if !errors.Is(err, changed) {
			t.Fatal(err)
		}
		if err := d.write(t.Context(), g, 0, resource, 4, nil); err != nil {
			t.Errorf("before: %v: %v", before, err)
		}
	}
}

// Whoever comes while an accepted transaction is open waits for its end, also if
// the row is new, or its token does not change.
func order(t *testing.T, d *database) {
	if d.waiting == "" {
		t.Skip("only one transaction can write at all")
	}
	g := d.guard(t)
	for i, c := range []struct {
		name                 string
		before, first, later int64
		commit               bool
		want                 error
	}{
		{"a higher one, new row", 0, 5, 6, true, nil},
		{"a higher one, row with a lower token", 4, 5, 6, true, nil},
		{"a higher one, row with the same token", 5, 5, 6, true, nil},
		{"a lower one, new row", 0, 5, 4, true, fence.ErrStale},
		{"a lower one, row with a lower token", 4, 5, 4, true, fence.ErrStale},
		{"a lower one, new row is rolled back", 0, 5, 4, false, nil},
		{"a lower one, row is rolled back", 4, 5, 4, false, nil},
		{"the same one", 4, 5, 5, true, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			resource := fmt.Sprint("r", i)
			if c.before > 0 {
				if err := d.write(t.Context(), g, 0, resource, c.before, nil); err != nil {
					t.Fatal(err)
				}
			}
			tx, err := d.db.BeginTx(t.Context(), &sql.TxOptions{Isolation: sql.LevelReadCommitted})
			if err != nil {
				t.Fatal(err)
			}
			defer tx.Rollback()
			if err := g.Check(t.Context(), tx, resource, c.first); err != nil {
				t.Fatal(err)
			}
			done := make(chan error, 1)
			go func() { done <- d.write(t.Context(), g, sql.LevelReadCommitted, resource, c.later, nil) }()
			servers.Until(t, "the other transaction waits", func() bool {
				select {
				case err := <-done:
					t.Fatalf("it did not wait: %v", err)
				default:
				}
				var n int
				if err := d.db.QueryRowContext(t.Context(), d.waiting).Scan(&n); err != nil {
					t.Fatal(err)
				}
				return n == 1
			})
			end := tx.Rollback
			if c.commit {
				end = tx.Commit
			}
			if err := end(); err != nil {
				t.Fatal(err)
			}
			if err := <-done; !errors.Is(err, c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
		})
	}
}

// A transaction that looks at an old state of the database is not accepted with a
// token that has become stale since: it is told so, or to repeat itself.
func oldSnapshot(t *testing.T, d *database) {
	g := d.guard(t)
	other := newTable("other_")
	d.exec(t, "CREATE TABLE "+other+" (id bigint PRIMARY KEY)")
	for _, level := range d.levels {
		for _, before := range []int64{0, 4} {
			resource := fmt.Sprint(level, before)
			if before > 0 {
				if err := d.write(t.Context(), g, level, resource, before, nil); err != nil {
					t.Fatal(err)
				}
			}
			tx, err := d.db.BeginTx(t.Context(), &sql.TxOptions{Isolation: level})
			if err != nil {
				t.Fatal(err)
			}
			var n int
			if err := tx.QueryRowContext(t.Context(), "SELECT count(*) FROM "+other).Scan(&n); err != nil {
				t.Fatal(err)
			}
			if err := d.write(t.Context(), g, level, resource, 6, nil); err != nil {
				t.Fatal(err)
			}
			err = g.Check(t.Context(), tx, resource, 5)
			if !errors.Is(err, fence.ErrStale) && !d.again(err) {
				t.Errorf("%v, token before: %d: %v", level, before, err)
			}
			t.Logf("%v, token before: %d: %v", level, before, err)
			if err := tx.Rollback(); err != nil {
				t.Fatal(err)
			}
			isStale(t, d.write(t.Context(), g, level, resource, 5, nil), fence.StaleError{Resource: resource, Token: 5, Highest: 6})
		}
	}
}

// Many transactions with random tokens, some of which are rolled back: in the order
// in which they wrote, tokens never fall.
func concurrent(t *testing.T, d *database) {
	g := d.guard(t)
	for _, level := range d.levels {
		table := newTable("journal_")
		d.exec(t, "CREATE TABLE "+table+" (id "+d.serial+" PRIMARY KEY, resource text, token bigint)")
		insert := "INSERT INTO " + table + " (resource, token) VALUES (?, ?)"
		if d.dialect == fence.PostgreSQL {
			insert = "INSERT INTO " + table + " (resource, token) VALUES ($1, $2)"
		}
		changed := errors.New("changed my mind")
		var wg sync.WaitGroup
		var next, accepted, refused, repeated atomic.Int64
		for range 12 {
			wg.Go(func() {
				for range 25 {
					resource := fmt.Sprint(level, rand.N(2))
					token := next.Add(1) + rand.Int64N(20)
					for {
						err := d.write(t.Context(), g, level, resource, token, func(tx *sql.Tx) error {
							if _, err := tx.ExecContext(t.Context(), insert, resource, token); err != nil {
								return err
							}
							if rand.N(4) == 0 {
								return changed
							}
							return nil
						})
						switch {
						case err == nil:
							accepted.Add(1)
						case errors.Is(err, fence.ErrStale):
							refused.Add(1)
						case errors.Is(err, changed):
						case d.again(err):
							repeated.Add(1)
							continue
						default:
							t.Error(err)
						}
						break
					}
				}
			})
		}
		wg.Wait()
		t.Logf("%v: %d accepted, %d refused, %d repeated", level, accepted.Load(), refused.Load(), repeated.Load())
		rows, err := d.db.QueryContext(t.Context(), "SELECT resource, token FROM "+table+" ORDER BY id")
		if err != nil {
			t.Fatal(err)
		}
		last, n := make(map[string]int64), int64(0)
		for rows.Next() {
			var resource string
			var token int64
			if err := rows.Scan(&resource, &token); err != nil {
				t.Fatal(err)
			}
			if token < last[resource] {
				t.Errorf("%v: %d after %d", level, token, last[resource])
			}
			last[resource] = token
			n++
		}
		if err := errors.Join(rows.Err(), rows.Close()); err != nil {
			t.Fatal(err)
		}
		if n != accepted.Load() || n == 0 || refused.Load() == 0 {
			t.Errorf("%v: %d rows, %d accepted, %d refused", level, n, accepted.Load(), refused.Load())
		}
	}
}

// A row with a fence column of its own. The values are in the order of the
// statement's parameters, the token twice if they have no numbers.
func (d *database) column(t *testing.T, update string, twice bool) {
	t.Run("Column", func(t *testing.T) {
		d.exec(t, "CREATE TABLE item (id bigint PRIMARY KEY, stock bigint NOT NULL, fence bigint NOT NULL DEFAULT 0)")
		d.exec(t, "INSERT INTO item (id, stock) VALUES (1, 100)")
		for _, c := range []struct {
			stock, id, token int64
			want             error
		}{
			{99, 1, 5, nil},
			{98, 1, 5, nil},
			{98, 1, 5, nil}, // a repetition, which changes nothing
			{50, 1, 4, fence.ErrStale},
			{97, 1, 6, nil},
			{50, 1, 5, fence.ErrStale},
			{50, 2, 9, fence.ErrStale}, // there is no such row
		} {
			args := []any{c.stock, c.token, c.id}
			if twice {
				args = append(args, c.token)
			}
			result, err := d.db.ExecContext(t.Context(), update, args...)
			if err != nil {
				t.Fatal(err)
			}
			n, err := result.RowsAffected()
			if err != nil {
				t.Fatal(err)
			}
			if err := fence.Affected("item", c.token, n); !errors.Is(err, c.want) {
				t.Errorf("token %d: %v, want %v", c.token, err, c.want)
			}
		}
		var stock int64
		if err := d.db.QueryRowContext(t.Context(), "SELECT stock FROM item WHERE id = 1").Scan(&stock); err != nil || stock != 97 {
			t.Errorf("stock is %d, %v", stock, err)
		}
	})
}

// pgxStatement checks tokens in transactions of pgx.
func pgxStatement(t *testing.T, d *database, s *servers.Postgres) {
	g := d.guard(t)
	conn, err := pgx.Connect(t.Context(), s.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		for _, c := range runs {
			resource := fmt.Sprint(mode, c.name)
			for i, token := range c.tokens {
				err := pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
					query, args, err := g.Statement(resource, token)
					if err != nil {
						return err
					}
					tag, err := tx.Exec(t.Context(), query, append([]any{mode}, args...)...)
					if err != nil {
						return err
					}
					return fence.Affected(resource, token, tag.RowsAffected())
				})
				if c.refused[i] {
					isStale(t, err, fence.StaleError{Resource: resource, Token: token})
				} else if err != nil {
					t.Errorf("%v, %s: token %d: %v", mode, c.name, token, err)
				}
			}
		}
	}
}
