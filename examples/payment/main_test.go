package main

import (
	"testing"

	"github.com/go-dlm/dlm/examples/internal/programtest"
)

// What the program does with a database is tested in tests/examples.

func TestMain(m *testing.M) { programtest.Main(m) }

func TestUsage(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{}, {"-nonsense"}, {"-postgres", "postgres://127.0.0.1", "extra"}, {"-postgres", "nonsense://"},
	} {
		if r := programtest.Run(t, args...); r.Code == 0 || r.Stderr == "" || r.Stdout != "" {
			t.Errorf("%q: %+v", args, r)
		}
	}
}
