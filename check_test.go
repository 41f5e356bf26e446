package dlm_test

import (
	"context"
	"errors"
	"testing"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/memlock"
)

// checked is a backend that can be checked.
type checked struct {
	driver.Backend
	check func(context.Context) ([]driver.Finding, error)
}

func (c checked) Check(ctx context.Context) ([]driver.Finding, error) { return c.check(ctx) }

// wrapped is a backend within another.
type wrapped struct{ driver.Backend }

func (w wrapped) Unwrap() driver.Backend { return w.Backend }

func TestCheck(t *testing.T) {
	t.Parallel()
	found := dlm.Finding{Check: "eviction", Severity: dlm.SeverityCritical, Server: "s", Detail: "d", Fix: "f"}
	failure := errors.New("no")
	for _, c := range []struct {
		name  string
		check func(context.Context) ([]driver.Finding, error)
		want  error
	}{
		{"findings", func(context.Context) ([]driver.Finding, error) { return []driver.Finding{found}, nil }, nil},
		{"failure", func(context.Context) ([]driver.Finding, error) { return nil, failure }, failure},
		{"panic", func(context.Context) ([]driver.Finding, error) { panic("no") }, nil},
		{"nothing to check", nil, errors.ErrUnsupported},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b, err := memlock.New(memlock.NewStore(), nil)
			if err != nil {
				t.Fatal(err)
			}
			var backend driver.Backend = b
			if c.check != nil {
				backend = wrapped{checked{b, c.check}}
			}
			m, err := dlm.NewManager(backend, nil)
			if err != nil {
				t.Fatal(err)
			}
			list, err := m.Check(t.Context())
			switch {
			case c.name == "panic":
				if err == nil {
					t.Error("a panic is no failure")
				}
			case !errors.Is(err, c.want):
				t.Errorf("%v, want %v", err, c.want)
			case err == nil && (len(list) != 1 || list[0] != found):
				t.Errorf("%+v", list)
			}
			ended, cancel := context.WithCancel(t.Context())
			cancel()
			if _, err := m.Check(ended); !errors.Is(err, context.Canceled) {
				t.Errorf("with an ended context: %v", err)
			}
			if err := m.Close(t.Context()); err != nil {
				t.Error(err)
			}
			if _, err := m.Check(t.Context()); !errors.Is(err, dlm.ErrClosed) {
				t.Errorf("after Close: %v", err)
			}
		})
	}
}

func TestSeverities(t *testing.T) {
	t.Parallel()
	for s, want := range map[dlm.Severity]string{
		dlm.SeverityOK: "ok", dlm.SeverityUnknown: "unknown", dlm.SeverityWarning: "warning", dlm.SeverityCritical: "critical",
	} {
		if s.String() != want {
			t.Errorf("%d is %q, want %q", s, s, want)
		}
	}
}
