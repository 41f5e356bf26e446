package examples

import (
	"bytes"
	"errors"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/go-dlm/dlm/tests/servers"
)

// A payment is charged once though the process that does it was stopped for longer
// than its lock lasts; without the fence it is charged twice.
func TestPayment(t *testing.T) {
	t.Parallel()
	program := filepath.Join(t.TempDir(), "payment")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, "github.com/go-dlm/dlm/examples/payment")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	s := servers.StartPostgres(t, nil)
	for _, c := range []struct {
		name           string
		args           []string
		stdout, stderr string
	}{
		{
			name: "fenced",
			stdout: "the first process asks the bank\nthe first process is stopped\n" +
				"the second process asks the bank\nthe second process has charged the payment\n" +
				"the first process goes on\nthe first process is refused: somebody else has the payment by now\n" +
				"the payment was charged once\n",
		},
		{
			name: "unsafe",
			args: []string{"-unsafe"},
			stdout: "the first process asks the bank\nthe first process is stopped\n" +
				"the second process asks the bank\nthe second process has charged the payment\n" +
				"the first process goes on\nthe first process has charged the payment\n" +
				"the first process learns that it has lost its lock\n",
			stderr: "payment: the payment was charged 2 times\n",
		},
	} {
		// One after the other, as both create the same tables.
		t.Run(c.name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), program, append([]string{"-postgres", s.URL("postgres")}, c.args...)...)
			var stdout, stderr bytes.Buffer
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			err := cmd.Run()
			if exit := new(exec.ExitError); err != nil && !errors.As(err, &exit) {
				t.Fatal(err)
			}
			if stdout.String() != c.stdout || stderr.String() != c.stderr || (err == nil) != (c.stderr == "") {
				t.Errorf("%v\n%s%s", err, &stdout, &stderr)
			}
		})
	}
}
