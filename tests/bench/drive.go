package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-dlm/dlm/tests/servers"
)

// childCommand is the first argument of a process that makes one measurement.
const childCommand = "run"

// patience is how long one measurement may take. The longest, W4 of a row that
// does not drain, takes two minutes.
const patience = 4 * time.Minute

// driver has the measurements made, one after the other.
type driver struct {
	set     *settings
	servers map[string][]server
	version string
	log     io.Writer
}

// newDriver starts the servers, which live until the end of tb.
func newDriver(ctx context.Context, set *settings, tb servers.TB, log io.Writer) (*driver, error) {
	d := &driver{set: set, servers: set.store.start(tb), log: log}
	for _, list := range d.servers {
		var err error
		if d.version, err = set.store.version(ctx, list); err != nil {
			return nil, fmt.Errorf("asking for the servers' version: %w", err)
		}
	}
	return d, nil
}

// measureAll goes through all workloads, rounds and rows. It returns what it
// has when the context ends.
func (d *driver) measureAll(ctx context.Context) (outcomes, error) {
	var all outcomes
	for _, w := range d.set.workloads {
		var rows []row
		for _, r := range d.set.rows {
			if r.in(w) {
				rows = append(rows, r)
			}
		}
		rounds := d.set.rounds[w]
		for round := range rounds {
			for i := range rows {
				r := &rows[turnOf(i, round, rounds, len(rows))]
				m := d.measure(ctx, r, w)
				if ctx.Err() != nil {
					return all, ctx.Err()
				}
				m.Round = round + 1
				all = append(all, m)
				fmt.Fprintf(d.log, "%s %v round %d of %d: %-17s %s\n",
					time.Now().Format(time.TimeOnly), w, m.Round, rounds, r.name, glance(d.set.store, &m))
			}
		}
	}
	return all, nil
}

// turnOf is the place in the list of the row that is the i-th in a round. The
// rounds start at places spread over the list.
func turnOf(i, round, rounds, rows int) int { return (i + round*max(1, rows/rounds)) % rows }

// glance is what is worth a look while the others run.
func glance(s *store, m *measurement) string {
	if m.Error != "" {
		return "no result: " + m.Error
	}
	t := tables[m.Workload]
	parts := []string{s.head(t.find(t.key)) + " " + show(m.Figures[t.key])}
	for _, key := range []string{"failures", "violations", "unserved", "lost"} {
		if n := m.Figures[key]; n != 0 {
			parts = append(parts, s.head(t.find(key))+" "+show(n))
		}
	}
	return strings.Join(parts, ", ")
}

// measure makes one measurement in a process of its own.
func (d *driver) measure(ctx context.Context, r *row, w workload) measurement {
	m, err := d.spawn(ctx, r, w)
	if err != nil {
		m = measurement{Row: r.name, Workload: w, At: time.Now().UTC().Truncate(time.Second), Error: err.Error()}
	}
	return m
}

func (d *driver) spawn(ctx context.Context, r *row, w workload) (m measurement, err error) {
	list := d.servers[r.servers]
	if err := d.set.store.flush(ctx, list); err != nil {
		return m, fmt.Errorf("emptying the servers: %w", err)
	}
	self, err := os.Executable()
	if err != nil {
		return m, err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, self, childCommand,
		"-b", d.set.store.name,
		"-row", r.name,
		"-w", strconv.Itoa(int(w)),
		"-scale", fmt.Sprint(d.set.scale),
		"-servers", formatServers(list))
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err = cmd.Run()
	if err == nil {
		err = json.Unmarshal(stdout.Bytes(), &m)
	}
	if err != nil {
		err = fmt.Errorf("%w: %.500s", err, stderr.String())
	}
	return m, err
}

// child is the process that makes one measurement.
func child(ctx context.Context, args []string, stdout io.Writer) error {
	flags := flag.NewFlagSet(childCommand, flag.ContinueOnError)
	name := flags.String("b", "", "store")
	rowName := flags.String("row", "", "row")
	work := flags.Int("w", 0, "workload")
	scale := flags.Float64("scale", 1, "scale")
	list := flags.String("servers", "", "address/pid of each server, with commas")
	if err := flags.Parse(args); err != nil {
		return err
	}
	s := stores[*name]
	if s == nil {
		return fmt.Errorf("there is no store %q, only %v", *name, slices.Sorted(maps.Keys(stores)))
	}
	i := slices.IndexFunc(s.rows, func(r row) bool { return r.name == *rowName })
	if i < 0 {
		return fmt.Errorf("there is no row %q", *rowName)
	}
	servers, err := parseServers(*list)
	if err != nil {
		return err
	}
	m := measure(ctx, s, &s.rows[i], workload(*work), servers, *scale)
	return json.NewEncoder(stdout).Encode(m)
}

func formatServers(list []server) string {
	var parts []string
	for _, s := range list {
		parts = append(parts, fmt.Sprintf("%s/%d", s.addr, s.pid))
	}
	return strings.Join(parts, ",")
}

func parseServers(text string) ([]server, error) {
	var list []server
	for part := range strings.SplitSeq(text, ",") {
		addr, pid, ok := strings.Cut(part, "/")
		n, err := strconv.Atoi(pid)
		if !ok || err != nil {
			return nil, errors.New("not the address and process of a server: " + part)
		}
		list = append(list, server{addr, n})
	}
	return list, nil
}
