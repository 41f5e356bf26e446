package main

import (
	"bytes"
	"context"
	"encoding/json"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/go-dlm/dlm/driver/drivertest"
)

// TestMain lets the test binary stand in for the command, which runs itself
// for each measurement.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == childCommand {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
		defer stop()
		os.Exit(Main(ctx, os.Args[1:], os.Stdout, os.Stderr))
	}
	// Processes with the race detector would take a second to end.
	if err := os.Setenv("GORACE", "atexit_sleep_ms=0 "+os.Getenv("GORACE")); err != nil {
		panic(err)
	}
	drivertest.Main(m)
}

// logWriter writes to the test's log.
type logWriter struct{ t *testing.T }

func (w logWriter) Write(text []byte) (int, error) {
	w.t.Log(strings.TrimSuffix(string(text), "\n"))
	return len(text), nil
}

// TestSmoke goes the way of the command for each store, all workloads in small. W2
// knows nothing of the store that W1 does not, but wants 64 connections of some.
func TestSmoke(t *testing.T) {
	t.Parallel()
	// Some peers have leases of a second here, which they lose if they are starved.
	slots := make(chan struct{}, 2)
	for _, tt := range []struct {
		store, workloads, only, ours, floor string
		target                              string // a line of the output
	}{
		{"redis", "1,2,3,4,5", "setnx-floor,blpop-floor,dlm-redis,dlm-quorum", "dlm-redis", "setnx-floor", "| W3 Jain, dlm-redis | >= 0.99 | "},
		{"etcd", "1,3,4,5", "put,txn-floor,mutex*,dlm-etcd", "dlm-etcd", "txn-floor", "| W3 messages per acquisition, dlm-etcd | <= 5 | "},
		{"consul", "1,3,4,5", "leader,kv-floor,api-lock-session,dlm-consul", "dlm-consul", "kv-floor", "| W3 hand-overs to another/s, dlm-consul / api-lock | >= 5 | "},
		{"postgres", "1,3,4,5", "select1,*-floor,*-pglock,dlm-postgres,dlm-advisory", "dlm-postgres", "row-floor", "| W5 statements per renewal round, dlm-postgres | <= 200 | "},
		{"zookeeper", "1,3,4,5", "exists,create-floor,zk-lock,dlm-zookeeper", "dlm-zookeeper", "create-floor", "| W3 packets per acquisition, dlm-zookeeper | <= 4 | "},
	} {
		t.Run(tt.store, func(t *testing.T) {
			t.Parallel()
			slots <- struct{}{}
			defer func() { <-slots }()
			smoke(t, stores[tt.store], tt.workloads, tt.only, tt.ours, tt.floor, tt.target)
		})
	}
}

func smoke(t *testing.T, s *store, workloads, only, ours, floor, target string) {
	file := filepath.Join(t.TempDir(), "bench.json")
	args := []string{"-b", s.name, "-w", workloads, "-scale", "0.02", "-rounds", "1", "-only", only, "-json", file}
	var stdout bytes.Buffer
	if err := parent(t.Context(), args, t, &stdout, logWriter{t}); err != nil {
		t.Fatal(err)
	}

	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var r report
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}
	rows, err := match(s.rows, only)
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range rows {
		for _, w := range row.workloads {
			if strings.Contains(workloads, w.String()[1:]) {
				checkMeasurement(t, r.Measurements, w, row.name)
			}
		}
	}
	for w, table := range tables {
		if w == w2 || w == w3 {
			continue // they last a moment, in which a busy machine does nothing
		}
		for _, c := range table.columns {
			if math.IsNaN(r.Measurements.value(w, ours, c.key)) {
				t.Errorf("%v of %s has no figure for the column %s", w, ours, c.head)
			}
		}
	}
	// One to take, one to release; a ping or a keep-alive may come in between.
	if sent := r.Measurements.value(w1, floor, "sent"); sent < 2 || sent > 2.1 {
		t.Errorf("W1 of %s takes %v %s per pair, want 2", floor, sent, s.unit)
	}
	if len(r.Targets) == 0 || len(r.Summary) == 0 || r.Servers == "" {
		t.Errorf("the report is not complete: %s", text)
	}
	for _, want := range []string{"### W1: ", "### W5: ", "### Targets", target, s.unit + " per pair"} {
		if !strings.Contains(stdout.String(), want) {
			t.Errorf("%q is not in the output:\n%s", want, stdout.String())
		}
	}
}

// checkMeasurement checks that a row was measured, and that it is a lock.
func checkMeasurement(t *testing.T, o outcomes, w workload, row string) {
	t.Helper()
	i := slices.IndexFunc(o, func(m measurement) bool { return m.Workload == w && m.Row == row })
	if i < 0 {
		t.Errorf("%v of %s was not measured", w, row)
		return
	}
	m := o[i]
	if m.Error != "" || len(m.Failures) > 0 {
		t.Errorf("%v of %s failed: %s %v", w, row, m.Error, m.Failures)
	}
	// Locks of W5, which have a lease of a second here, may be lost on a busy machine.
	for _, key := range []string{"violations", "unserved", "early", "stuck"} {
		if m.Figures[key] != 0 {
			t.Errorf("%v of %s: %s is %v, want 0", w, row, key, m.Figures[key])
		}
	}
}

func TestParse(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		args []string
		want string // part of the error, empty for none
	}{
		{"defaults", nil, ""},
		{"all flags", strings.Fields("-b redis -w 3,4 -rounds 2 -scale 0.5 -only ping,dlm-* -json x"), ""},
		{"rounds one by one", strings.Fields("-rounds 3,3,3,2,0"), ""},
		{"unknown store", strings.Fields("-b nothing"), `no store "nothing"`},
		{"unknown workload", strings.Fields("-w 6"), `no workload "6"`},
		{"two rounds", strings.Fields("-rounds 1,2"), "neither one number nor five"},
		{"bad round", strings.Fields("-rounds 1,2,3,4,x"), `"x" is no number`},
		{"bad scale", strings.Fields("-scale 2"), "at most 1"},
		{"unknown row", strings.Fields("-only ping,pong"), `no row "pong"`},
		{"bad pattern", strings.Fields("-only ["), "syntax error"},
		{"unknown flag", strings.Fields("-x"), "not defined"},
		{"argument", strings.Fields("redis"), `unexpected argument "redis"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			var stderr bytes.Buffer
			_, err := parse(tt.args, &stderr)
			switch {
			case tt.want == "" && err != nil:
				t.Errorf("got %v: %s", err, &stderr)
			case tt.want != "" && (err == nil || !strings.Contains(stderr.String(), tt.want)):
				t.Errorf("got %v: %s, want %q", err, &stderr, tt.want)
			}
		})
	}
}

func TestMatch(t *testing.T) {
	t.Parallel()
	rows := []row{{name: "a"}, {name: "b"}, {name: "b-x16"}}
	for _, tt := range []struct {
		patterns string
		want     []string
	}{
		{"", []string{"a", "b", "b-x16"}},
		{"b", []string{"b"}},
		{"b*,a", []string{"a", "b", "b-x16"}},
	} {
		got, err := match(rows, tt.patterns)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, r := range got {
			names = append(names, r.name)
		}
		if !slices.Equal(names, tt.want) {
			t.Errorf("%q: got %v, want %v", tt.patterns, names, tt.want)
		}
	}
}

func TestMainExitCodes(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		args string
		want int
	}{
		{"-list", 0},
		{"-h", 0},
		{"-w 0", 2},
		{childCommand + " -row nothing", 1},
	} {
		var out bytes.Buffer
		if got := Main(t.Context(), strings.Fields(tt.args), &out, &out); got != tt.want {
			t.Errorf("%s: exit code %d, want %d:\n%s", tt.args, got, tt.want, &out)
		}
	}
}
