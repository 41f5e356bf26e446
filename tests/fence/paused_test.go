package fence_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/backends/pglock"
	"github.com/go-dlm/dlm/backends/redislock"
	"github.com/go-dlm/dlm/backends/sqlitelock"
	"github.com/go-dlm/dlm/fence"
	"github.com/go-dlm/dlm/fence/redisfence"
	"github.com/go-dlm/dlm/memlock"
	"github.com/go-dlm/dlm/tests/servers"
)

// resource is what holders write to.
type resource struct {
	// newManager makes a manager, as each process has one.
	newManager func(cfg *dlm.LockConfig) (*dlm.Manager, error)
	// write writes a value with a token, whatever has become of the lock.
	write func(key, value string, token int64) error
	// read reads the value.
	read func(key string) string
}

// paused lets a holder lose its lock and write after the next one has.
func (r resource) paused(t *testing.T) {
	t.Helper()
	open := func(cfg *dlm.LockConfig) *dlm.Manager {
		m, err := r.newManager(cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := m.Close(context.Background()); err != nil {
				t.Error(err)
			}
		})
		return m
	}
	take := func(m *dlm.Manager, key string, ttl time.Duration) *dlm.Lock {
		l, err := m.AcquireLock(t.Context(), key, ttl)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	for _, c := range []struct {
		name string
		ttl  time.Duration
		lose func(m *dlm.Manager, l *dlm.Lock) error
	}{
		{"its lease runs out", 200 * time.Millisecond, nil},
		{"it is removed by force", time.Minute, func(m *dlm.Manager, l *dlm.Lock) error {
			_, err := m.ForceRelease(t.Context(), l.Key, l.Token)
			return err
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			key := "payment:{42} " + c.name
			// Without renewal a process is, to the store, one that has stopped.
			first := take(open(&dlm.LockConfig{AutoRenew: dlm.Off}), key, c.ttl)
			if err := r.write(key, "first", first.Token); err != nil {
				t.Fatal(err)
			}
			m := open(nil)
			if c.lose != nil {
				if err := c.lose(m, first); err != nil {
					t.Fatal(err)
				}
			}
			second := take(m, key, time.Minute)
			if second.Token <= first.Token {
				t.Fatalf("token %d after %d", second.Token, first.Token)
			}
			if err := r.write(key, "second", second.Token); err != nil {
				t.Fatal(err)
			}
			err := r.write(key, "late", first.Token)
			var stale *fence.StaleError
			if !errors.As(err, &stale) || stale.Token != first.Token || stale.Highest != second.Token {
				t.Errorf("the late write: %v, want a refusal by %d", err, second.Token)
			}
			if got := r.read(key); got != "second" {
				t.Errorf("the resource has %q", got)
			}
			if err := r.write(key, "more", second.Token); err != nil {
				t.Error(err)
			}
			if got := r.read(key); got != "more" {
				t.Errorf("the resource has %q", got)
			}
			if err := second.Release(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// rows makes a resource of a table, guarded in each transaction that writes to it.
func (d *database) rows(t *testing.T, newManager func(*dlm.LockConfig) (*dlm.Manager, error)) resource {
	t.Helper()
	g := d.guard(t)
	table := newTable("payment_")
	d.exec(t, "CREATE TABLE "+table+" (id varchar(100) PRIMARY KEY, state varchar(100))")
	arg := func(n int) string {
		if d.dialect == fence.PostgreSQL {
			return fmt.Sprint("$", n)
		}
		return "?"
	}
	return resource{
		newManager: newManager,
		write: func(key, value string, token int64) error {
			return d.write(t.Context(), g, sql.LevelDefault, key, token, func(tx *sql.Tx) error {
				if _, err := tx.ExecContext(t.Context(), "DELETE FROM "+table+" WHERE id = "+arg(1), key); err != nil {
					return err
				}
				_, err := tx.ExecContext(t.Context(), "INSERT INTO "+table+" VALUES ("+arg(1)+", "+arg(2)+")", key, value)
				return err
			})
		},
		read: func(key string) (value string) {
			err := d.db.QueryRowContext(t.Context(), "SELECT state FROM "+table+" WHERE id = "+arg(1), key).Scan(&value)
			if err != nil {
				t.Fatal(err)
			}
			return value
		},
	}
}

func inMemory(*testing.T) func(*dlm.LockConfig) (*dlm.Manager, error) {
	store := memlock.NewStore()
	return func(cfg *dlm.LockConfig) (*dlm.Manager, error) { return memlock.NewLockManager(store, cfg, nil) }
}

func TestPausedHolderPostgreSQL(t *testing.T) {
	t.Parallel()
	d, s := postgres(t)
	pool, err := pgxpool.New(t.Context(), s.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if err := pglock.CreateSchema(t.Context(), pool, nil); err != nil {
		t.Fatal(err)
	}
	managers := func(cfg *dlm.LockConfig) (*dlm.Manager, error) { return pglock.NewLockManager(pool, cfg, nil) }
	r := d.rows(t, managers)
	r.paused(t)

	// The same with a column of the row, over pgx, which does not say why a token is
	// refused.
	d.exec(t, "CREATE TABLE item (id text PRIMARY KEY, state text, fence bigint NOT NULL)")
	column := resource{
		newManager: managers,
		write: func(key, value string, token int64) error {
			_, err := pool.Exec(t.Context(), "INSERT INTO item VALUES ($1, '', 0) ON CONFLICT DO NOTHING", key)
			if err != nil {
				return err
			}
			tag, err := pool.Exec(t.Context(), "UPDATE item SET state = $1, fence = $2 WHERE id = $3 AND fence <= $2", value, token, key)
			if err != nil {
				return err
			}
			err = fence.Affected(key, token, tag.RowsAffected())
			var stale *fence.StaleError
			if errors.As(err, &stale) && stale.Highest == 0 {
				err = errors.Join(pool.QueryRow(t.Context(), "SELECT fence FROM item WHERE id = $1", key).Scan(&stale.Highest), err)
			}
			return err
		},
		read: func(key string) (value string) {
			if err := pool.QueryRow(t.Context(), "SELECT state FROM item WHERE id = $1", key).Scan(&value); err != nil {
				t.Fatal(err)
			}
			return value
		},
	}
	t.Run("Column", column.paused)
}

func TestPausedHolderSQLite(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "locks.db")
	sqliteFile(t).rows(t, func(cfg *dlm.LockConfig) (*dlm.Manager, error) {
		return sqlitelock.NewLockManager(path, cfg, nil)
	}).paused(t)
}

func TestPausedHolderMariaDB(t *testing.T) {
	t.Parallel()
	mariaDB(t, servers.StartMariaDB(t)).rows(t, inMemory(t)).paused(t)
}

func TestPausedHolderRedis(t *testing.T) {
	t.Parallel()
	client := newClient(t, servers.StartRedis(t, nil).Addr())
	g, err := redisfence.New(client, nil)
	if err != nil {
		t.Fatal(err)
	}
	managers := func(cfg *dlm.LockConfig) (*dlm.Manager, error) { return redislock.NewLockManager(client, cfg, nil) }
	resource{
		newManager: managers,
		write:      func(key, value string, token int64) error { return g.Set(t.Context(), key, value, token, 0) },
		read:       func(key string) string { return get(t, client, key) },
	}.paused(t)
}

// The locks are in Redis, the data in a file.
func TestPausedHolderFile(t *testing.T) {
	t.Parallel()
	client := newClient(t, servers.StartRedis(t, nil).Addr())
	dir := t.TempDir()
	resource{
		newManager: func(cfg *dlm.LockConfig) (*dlm.Manager, error) { return redislock.NewLockManager(client, cfg, nil) },
		write: func(key, value string, token int64) error {
			return fence.WriteFile(t.Context(), filepath.Join(dir, key), []byte(value), 0o600, token)
		},
		read: func(key string) string { return readFile(t, filepath.Join(dir, key)) },
	}.paused(t)
}

// The locks are in Redis, the data behind an HTTP server.
func TestPausedHolderHTTP(t *testing.T) {
	t.Parallel()
	client := newClient(t, servers.StartRedis(t, nil).Addr())
	guard, err := fence.NewMemory(nil)
	if err != nil {
		t.Fatal(err)
	}
	data := make(map[string]string) // the guard lets in one at a time for each key, and the test is one
	server := httptest.NewServer(fence.Handler(guard, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		data[r.FormValue("key")] = r.FormValue("value")
	}), &fence.HandlerOptions{Resource: func(r *http.Request) string { return r.FormValue("key") }}))
	t.Cleanup(server.Close)
	resource{
		newManager: func(cfg *dlm.LockConfig) (*dlm.Manager, error) { return redislock.NewLockManager(client, cfg, nil) },
		write: func(key, value string, token int64) error {
			r, err := http.NewRequestWithContext(t.Context(), http.MethodPut, server.URL, nil)
			if err != nil {
				return err
			}
			query := r.URL.Query()
			query.Set("key", key)
			query.Set("value", value)
			r.URL.RawQuery = query.Encode()
			if err := fence.SetHeader(r.Header, key, token); err != nil {
				return err
			}
			resp, err := server.Client().Do(r)
			if err != nil {
				return err
			}
			defer resp.Body.Close()
			if err := fence.ResponseError(resp); err != nil {
				return err
			}
			if resp.StatusCode != http.StatusOK {
				return errors.New(resp.Status)
			}
			return nil
		},
		read: func(key string) string { return data[key] },
	}.paused(t)
}

func get(t *testing.T, client redis.UniversalClient, key string) string {
	t.Helper()
	value, err := client.Get(t.Context(), key).Result()
	if err != nil {
		t.Fatal(err)
	}
	return value
}
