package pglock_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/go-dlm/dlm/backends/pglock"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/tests/servers"
)

// BenchmarkPair takes and gives up a lock that nobody else wants: in tables, as an
// advisory lock, and with nothing but the server's own functions on one connection.
func BenchmarkPair(b *testing.B) {
	s := servers.StartPostgres(b, nil)
	pool := newPool(b, s.URL("postgres"), nil)
	if err := pglock.CreateSchema(b.Context(), pool, nil); err != nil {
		b.Fatal(err)
	}
	table, err := pglock.New(pool, nil)
	if err != nil {
		b.Fatal(err)
	}
	advisory, err := pglock.NewAdvisory(pool, nil)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { advisory.Close() })
	pair := func(d driver.Backend) func(*testing.B) {
		return func(b *testing.B) {
			for b.Loop() {
				lease, err := d.Acquire(b.Context(), driver.Request{Key: "k", Owner: "a", TTL: time.Minute, Limit: 1})
				if err == nil {
					err = d.Release(b.Context(), lease)
				}
				if err != nil {
					b.Fatal(err)
				}
			}
		}
	}
	b.Run("tables", pair(table))
	b.Run("advisory", pair(advisory))
	b.Run("bare", func(b *testing.B) {
		conn, err := pgx.Connect(b.Context(), s.URL("postgres"))
		if err != nil {
			b.Fatal(err)
		}
		defer conn.Close(b.Context())
		for b.Loop() {
			var got, back bool
			if err := conn.QueryRow(b.Context(), "select pg_try_advisory_lock($1)", int64(7)).Scan(&got); err != nil {
				b.Fatal(err)
			}
			if err := conn.QueryRow(b.Context(), "select pg_advisory_unlock($1)", int64(7)).Scan(&back); err != nil || !got || !back {
				b.Fatal(got, back, err)
			}
		}
	})
}
