package fence_test

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"testing"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/fence"
)

// What the statements do is tested on real databases, in tests/fence. Here it is
// about what needs none.

func TestNewSQL(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		dialect fence.Dialect
		table   string
		want    string // part of the schema, or "" if it is refused
	}{
		{"default", fence.PostgreSQL, "", `"dlm_fence" (`},
		{"a reserved word", fence.SQLite, "order", `"order" (`},
		{"with a schema", fence.PostgreSQL, "app.fence_2", `"app"."fence_2" (`},
		{"the longest name", fence.PostgreSQL, strings.Repeat("x", 63), strings.Repeat("x", 63)},
		{"no dialect", 0, "", ""},
		{"unknown dialect", 99, "", ""},
		{"too long", fence.PostgreSQL, strings.Repeat("x", 64), ""},
		{"capital letters", fence.PostgreSQL, "Fence", ""},
		{"a quote", fence.PostgreSQL, `f"`, ""},
		{"a space", fence.SQLite, "f x", ""},
		{"a digit first", fence.SQLite, "1f", ""},
		{"two dots", fence.SQLite, "a.b.c", ""},
		{"a dot at the end", fence.SQLite, "a.", ""},
		{"a newline at the end", fence.SQLite, "a\n", ""},
	} {
		g, err := fence.NewSQL(c.dialect, &fence.SQLOptions{Table: c.table})
		if c.want == "" {
			if !errors.Is(err, dlm.ErrInvalid) {
				t.Errorf("%s: %v", c.name, err)
			}
		} else if err != nil || !strings.Contains(g.Schema(), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestDialectString(t *testing.T) {
	t.Parallel()
	for dialect, want := range map[fence.Dialect]string{
		fence.PostgreSQL: "PostgreSQL", fence.SQLite: "SQLite", fence.MySQL: "MySQL", 0: "Dialect(0)",
	} {
		if got := dialect.String(); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

// noTx fails the test if it is used.
type noTx struct {
	fence.Tx
	t *testing.T
}

func (n noTx) ExecContext(context.Context, string, ...any) (sql.Result, error) {
	n.t.Error("the database was asked")
	return nil, errors.ErrUnsupported
}

func TestSQLInvalid(t *testing.T) {
	t.Parallel()
	g, err := fence.NewSQL(fence.PostgreSQL, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range invalids {
		if err := g.Check(t.Context(), noTx{t: t}, c.resource, c.token); !errors.Is(err, dlm.ErrInvalid) {
			t.Errorf("%s: %v", c.name, err)
		}
		if _, _, err := g.Statement(c.resource, c.token); !errors.Is(err, dlm.ErrInvalid) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	//lint:ignore SA1012 nil is what is tested
	if err := g.Check(nil, noTx{t: t}, "r", 1); !errors.Is(err, dlm.ErrInvalid) {
		t.Errorf("no context: %v", err)
	}
	if err := g.Check(t.Context(), nil, "r", 1); !errors.Is(err, dlm.ErrInvalid) {
		t.Errorf("no transaction: %v", err)
	}
}

func TestStatementMySQL(t *testing.T) {
	t.Parallel()
	g, err := fence.NewSQL(fence.MySQL, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := g.Statement("r", 1); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("%v, want %v", err, errors.ErrUnsupported)
	}
}

func TestAffected(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		rows int64
		want error
	}{
		{1, nil},
		{2, nil},
		{0, fence.ErrStale},
		{-1, errors.ErrUnsupported},
	} {
		if err := fence.Affected("r", 5, c.rows); !errors.Is(err, c.want) {
			t.Errorf("%d rows: %v, want %v", c.rows, err, c.want)
		}
	}
	isStale(t, fence.Affected("r", 5, 0), fence.StaleError{Resource: "r", Token: 5})
}
