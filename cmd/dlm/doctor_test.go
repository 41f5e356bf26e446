package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/driver"
	"github.com/go-dlm/dlm/memlock"
)

// checkable is a store with findings.
type checkable struct {
	driver.Backend
	findings []driver.Finding
	err      error
}

func (c *checkable) Check(context.Context) ([]driver.Finding, error) { return c.findings, c.err }

func TestDoctor(t *testing.T) {
	t.Parallel()
	good := driver.Finding{Check: "version", Server: "host:1", Detail: "Store 1.0"}
	unknown := driver.Finding{Check: "memory", Severity: driver.SeverityUnknown, Detail: "hidden"}
	warning := driver.Finding{Check: "persistence", Severity: driver.SeverityWarning, Server: "host:1", Detail: "off", Fix: "turn it on"}
	critical := driver.Finding{Check: "role", Severity: driver.SeverityCritical, Detail: "a replica\x1b[2J", Fix: "ask the primary"}
	for _, c := range []struct {
		name           string
		findings       []driver.Finding
		err            error
		json, strict   bool
		code           int
		output, errors string
	}{
		{name: "nothing", output: ""},
		{name: "nothing in JSON", json: true, output: "[]\n"},
		{name: "good", findings: []driver.Finding{good, unknown}, output: "unknown  memory   -       hidden\nok       version  host:1  Store 1.0\n"},
		{name: "good, strict", strict: true, findings: []driver.Finding{good, unknown}, output: "unknown  memory   -       hidden\nok       version  host:1  Store 1.0\n"},
		{name: "warning", findings: []driver.Finding{warning}, output: "warning  persistence  host:1  off\n    fix: turn it on\n"},
		{
			name: "warning, strict", strict: true, findings: []driver.Finding{warning},
			output: "warning  persistence  host:1  off\n    fix: turn it on\n", code: 78, errors: "0 critical, 1 warnings",
		},
		{
			name: "the worst comes first", findings: []driver.Finding{good, warning, critical}, code: 78, errors: "1 critical, 1 warnings",
			output: "critical  role         -       a replica\ufffd[2J\n    fix: ask the primary\n" +
				"warning   persistence  host:1  off\n    fix: turn it on\n" +
				"ok        version      host:1  Store 1.0\n",
		},
		{
			name: "JSON", json: true, findings: []driver.Finding{good, critical}, code: 78, errors: "1 critical",
			output: `[{"severity":"critical","check":"role","detail":"a replica\u001b[2J","fix":"ask the primary"},` +
				`{"severity":"ok","check":"version","server":"host:1","detail":"Store 1.0"}]` + "\n",
		},
		{name: "failure", err: errors.New("broken"), code: 69, errors: "broken"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b, err := memlock.New(memlock.NewStore(), nil)
			if err != nil {
				t.Fatal(err)
			}
			m, err := dlm.NewManager(&checkable{b, c.findings, c.err}, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close(context.Background())
			var out, msg bytes.Buffer
			a := &app{Main: &Main{Out: &out, Err: &msg}}
			code := 0
			if err := classify(a.doctor(t.Context(), m, nil, c.json, c.strict)); err != nil {
				exit, _ := errors.AsType[*exitError](err)
				code = exit.code
				a.say("%v", exit)
			}
			if code != c.code || out.String() != c.output || !strings.Contains(msg.String(), c.errors) {
				t.Errorf("exit code %d, output %q, message %q; want %d, %q, %q", code, &out, &msg, c.code, c.output, c.errors)
			}
		})
	}
}

func TestDoctorOnStoreWithoutSettings(t *testing.T) {
	t.Parallel()
	env := map[string]string{"DLM_BACKEND": newStore(t)}
	code, out, msg := call(t.Context(), env, "doctor", "--strict")
	if code != 0 || out != "" || !isMessage(msg, "no settings to check") {
		t.Errorf("exit code %d: %s%s", code, out, msg)
	}
	code, out, _ = call(t.Context(), env, "doctor", "--json")
	var list []findingJSON
	if err := json.Unmarshal([]byte(out), &list); code != 0 || err != nil || list == nil || len(list) != 0 {
		t.Errorf("exit code %d, %v: %s", code, err, out)
	}
	if code, _, msg := call(t.Context(), map[string]string{"DLM_BACKEND": "sqlite://" + t.TempDir()}, "doctor"); code != 69 {
		t.Errorf("exit code %d: %s", code, msg)
	}
	if code, _, msg := call(t.Context(), env, "doctor", "x"); code != 64 {
		t.Errorf("exit code %d: %s", code, msg)
	}
}
