package ledger_test

import (
	"errors"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/go-dlm/dlm/examples/internal/ledger"
)

func open(t *testing.T, path string) *ledger.Ledger[string] {
	t.Helper()
	l, err := ledger.Open[string](path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

func values(t *testing.T, l *ledger.Ledger[string]) []string {
	t.Helper()
	entries, err := l.Read()
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for _, e := range entries {
		list = append(list, e.Value)
	}
	return list
}

// An entry of somebody who has lost the lock does not count, for anybody.
func TestStale(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "ledger")
	a, b := open(t, path), open(t, path)
	for _, step := range []struct {
		l     *ledger.Ledger[string]
		token int64
		value string
		want  error
	}{
		{a, 1, "a1", nil},
		{b, 2, "b2", nil},
		{a, 1, "a1 again", ledger.ErrStale},
		{b, 2, "b2 again", nil},
		{a, 3, "a3", nil},
		{b, 2, "b2 late", ledger.ErrStale},
	} {
		if err := step.l.Append(step.token, step.value); !errors.Is(err, step.want) {
			t.Errorf("%s: %v, want %v", step.value, err, step.want)
		}
	}
	want := []string{"a1", "b2", "b2 again", "a3"}
	for _, l := range []*ledger.Ledger[string]{a, b, open(t, path)} {
		if got := values(t, l); !slices.Equal(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// Entries that are written at the same time are all there, and whole.
func TestTogether(t *testing.T) {
	t.Parallel()
	const writers, each = 8, 100
	path := filepath.Join(t.TempDir(), "ledger")
	var wg sync.WaitGroup
	for range writers {
		l := open(t, path)
		wg.Go(func() {
			for range each {
				if err := l.Append(0, "x"); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if got := len(values(t, open(t, path))); got != writers*each {
		t.Errorf("%d entries, want %d", got, writers*each)
	}
}
