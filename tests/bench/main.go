// Command bench measures the lock backends of this project beside other Go
// libraries for the same store, and beside floors: bare calls that show what
// the store itself costs. It starts the servers on its own.
//
//	go run ./tests/bench -b redis -w 1,2 -json bench.json
//	go run ./tests/bench -b etcd -w 3 -only dlm-*,mutex
//
// Redis keeps everything in memory. The servers of etcd, PostgreSQL, ZooKeeper and
// Consul write to the folder for temporary files (TMPDIR) and wait for the disk, as they
// do by default, so their figures are those of the disk, too.
//
// There are five workloads:
//
//	W1  one goroutine, no contention: the time of acquire and release
//	W2  64 goroutines on 1000 keys, without waiting: pairs per second
//	W3  16 goroutines on one key, held for 1 ms: the gap between two holders
//	W4  1000 waiters on one key: the time until all have had it
//	W5  10,000 locks held and renewed: memory and traffic
//
// Each measurement runs in a process of its own, so that memory, goroutines
// and connections of one row do not reach the figures of another. In every
// round the rows take turns, and each round starts at another row. The tables
// show medians over the rounds, except for what must never happen, of which
// they show the worst round.
//
// Client and servers share the machine, so figures of two machines, or of two
// runs, are not to be compared: compare the ratios within one run. Where a
// round trip takes microseconds, most of the difference between two rounds is
// the kernel's choice of cores; the range over the rounds says how much. On one
// core there is no choice, which makes the ratios of W1 steadier:
//
//	taskset -c 0 go run ./tests/bench -b redis -w 1
//
// The command does not fail if a target is missed.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"path"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/go-dlm/dlm/tests/servers"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := Main(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// Main is the command without its process. It returns the exit code.
func Main(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	if len(args) > 0 && args[0] == childCommand {
		if err := child(ctx, args[1:], stdout); err != nil {
			fmt.Fprintln(stderr, "bench:", err)
			return 1
		}
		return 0
	}
	var tb processTB
	defer tb.end()
	tb.log = stderr
	err := tb.run(func() error { return parent(ctx, args, &tb, stdout, stderr) })
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case errors.Is(err, errUsage):
		return 2
	case err != nil:
		fmt.Fprintln(stderr, "bench:", err)
		return 1
	}
	return 0
}

// errUsage says that the command line is wrong; why has been printed.
var errUsage = errors.New("usage")

// settings are what the command line asks for.
type settings struct {
	store     *store
	workloads []workload
	rounds    map[workload]int
	scale     float64
	rows      []row
	json      string
	list      bool
}

func (set *settings) has(name string) bool {
	return slices.ContainsFunc(set.rows, func(r row) bool { return r.name == name })
}

// defaultRounds has many rounds where one is short and noisy.
const defaultRounds = "9,3,3,2,1"

func parse(args []string, stderr io.Writer) (*settings, error) {
	set := &settings{}
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(stderr)
	name := flags.String("b", "redis", "the store: "+strings.Join(slices.Sorted(maps.Keys(stores)), ", "))
	works := flags.String("w", "1,2,3,4,5", "the workloads")
	rounds := flags.String("rounds", defaultRounds, "rounds of every workload, or of W1 to W5 one by one")
	patterns := flags.String("only", "", "measure these rows only: names, or patterns such as dlm-*, with commas")
	flags.Float64Var(&set.scale, "scale", 1, "shorten the workloads by this factor, for a first look")
	flags.StringVar(&set.json, "json", "", "write everything that was measured to this `file`")
	flags.BoolVar(&set.list, "list", false, "list the rows and measure nothing")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil, err
		}
		return nil, errUsage
	}
	err := set.fill(*name, *works, *rounds, *patterns)
	if err == nil && flags.NArg() > 0 {
		err = fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if err != nil {
		fmt.Fprintln(stderr, "bench:", err)
		return nil, errUsage
	}
	return set, nil
}

// fill checks the flags that are more than a number.
func (set *settings) fill(name, works, rounds, patterns string) error {
	if set.store = stores[name]; set.store == nil {
		return fmt.Errorf("-b: there is no store %q", name)
	}
	if set.scale <= 0 || set.scale > 1 {
		return fmt.Errorf("-scale is %v, must be above 0 and at most 1", set.scale)
	}
	for text := range strings.SplitSeq(works, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || workload(n) < w1 || workload(n) > w5 {
			return fmt.Errorf("-w: there is no workload %q", text)
		}
		set.workloads = append(set.workloads, workload(n))
	}
	var err error
	if set.rounds, err = parseRounds(rounds); err != nil {
		return err
	}
	set.rows, err = match(set.store.rows, patterns)
	return err
}

func parseRounds(text string) (map[workload]int, error) {
	parts := strings.Split(text, ",")
	if len(parts) == 1 {
		parts = slices.Repeat(parts, int(w5))
	}
	if len(parts) != int(w5) {
		return nil, fmt.Errorf("-rounds: %q is neither one number nor five", text)
	}
	rounds := map[workload]int{}
	for i, part := range parts {
		n, err := strconv.Atoi(part)
		if err != nil || n < 0 {
			return nil, fmt.Errorf("-rounds: %q is no number of rounds", part)
		}
		rounds[w1+workload(i)] = n
	}
	return rounds, nil
}

// match returns the rows that one of the patterns names.
func match(rows []row, patterns string) ([]row, error) {
	if patterns == "" {
		return rows, nil
	}
	wanted := map[string]bool{}
	for pattern := range strings.SplitSeq(patterns, ",") {
		found := false
		for _, r := range rows {
			ok, err := path.Match(pattern, r.name)
			if err != nil {
				return nil, fmt.Errorf("-only: %q: %w", pattern, err)
			}
			if ok {
				found, wanted[r.name] = true, true
			}
		}
		if !found {
			return nil, fmt.Errorf("-only: there is no row %q", pattern)
		}
	}
	return slices.DeleteFunc(slices.Clone(rows), func(r row) bool { return !wanted[r.name] }), nil
}

func parent(ctx context.Context, args []string, tb servers.TB, stdout, stderr io.Writer) error {
	set, err := parse(args, stderr)
	if err != nil {
		return err
	}
	if set.list {
		for _, r := range set.rows {
			fmt.Fprintf(stdout, "%-18s %v\n%-18s %s\n", r.name, r.workloads, "", r.settings)
		}
		return nil
	}
	began := time.Now()
	d, err := newDriver(ctx, set, tb, stderr)
	if err != nil {
		return err
	}
	measured, err := d.measureAll(ctx)
	if len(measured) == 0 {
		return err
	}
	// What was measured before an interruption is worth having.
	measured.print(stdout, set.store)
	verdicts := make([]verdict, 0, len(set.store.targets))
	for _, t := range set.store.targets {
		if slices.Contains(set.workloads, t.workload) && set.has(t.row) {
			verdicts = append(verdicts, t.check(set.store, measured))
		}
	}
	if len(verdicts) > 0 {
		printTargets(stdout, verdicts, set.scale)
	}
	if set.json == "" {
		return err
	}
	r := newReport(set, d.version, began, measured, verdicts)
	return errors.Join(err, r.write(set.json))
}

// report is the file that -json asks for.
type report struct {
	Store        string            `json:"store"`
	Servers      string            `json:"servers"`
	Began        time.Time         `json:"began"`
	Seconds      float64           `json:"seconds"`
	Go           string            `json:"go"`
	Platform     string            `json:"platform"`
	Processors   int               `json:"processors"`
	Scale        float64           `json:"scale"`
	Modules      map[string]string `json:"modules"` // versions, by path
	Settings     map[string]string `json:"settings"`
	Summary      []summary         `json:"summary"`
	Targets      []verdict         `json:"targets"`
	Measurements outcomes          `json:"measurements"`
}

// summary is a figure over all rounds.
type summary struct {
	Workload workload `json:"workload"`
	Row      string   `json:"row"`
	Figure   string   `json:"figure"`
	Rounds   int      `json:"rounds"`
	Median   float64  `json:"median"`
	Min      float64  `json:"min"`
	Max      float64  `json:"max"`
}

func newReport(set *settings, version string, began time.Time, measured outcomes, verdicts []verdict) *report {
	r := &report{
		Store:        set.store.name,
		Servers:      version,
		Began:        began.UTC().Truncate(time.Second),
		Seconds:      time.Since(began).Round(time.Second).Seconds(),
		Go:           runtime.Version(),
		Platform:     runtime.GOOS + "/" + runtime.GOARCH,
		Processors:   runtime.GOMAXPROCS(0),
		Scale:        set.scale,
		Modules:      map[string]string{},
		Settings:     map[string]string{},
		Targets:      verdicts,
		Measurements: measured,
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range info.Deps {
			r.Modules[m.Path] = m.Version
		}
	}
	for _, row := range set.rows {
		r.Settings[row.name] = row.settings
		for _, w := range set.workloads {
			r.Summary = append(r.Summary, measured.summarize(w, row.name)...)
		}
	}
	return r
}

func (o outcomes) summarize(w workload, row string) []summary {
	keys := map[string]bool{}
	for _, m := range o {
		if m.Workload == w && m.Row == row {
			for key := range m.Figures {
				keys[key] = true
			}
		}
	}
	var list []summary
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		values := o.of(w, row, key)
		list = append(list, summary{w, row, key, len(values), median(values), slices.Min(values), slices.Max(values)})
	}
	return list
}

func (r *report) write(file string) error {
	text, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(text, '\n'), 0o644)
}
