package main

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
)

// column is a figure as it is shown. In its head, "commands" stands for the unit of
// the store; see [store.head].
type column struct {
	key, head string
	worst     combine // how rounds become one value if not by their median
	spread    bool    // show the range over the rounds, too
}

// combine makes one value out of those of several rounds.
type combine func([]float64) float64

// most is for what must never happen, not even in one round of many.
func most(values []float64) float64 { return slices.Max(values) }

// table is what is shown of a workload. The key is the figure by which the
// rows are compared with the floor.
type table struct {
	title, key string
	columns    []column
}

var tables = map[workload]table{
	w1: {"uncontended acquire and release, one goroutine (us)", "pairP50", []column{
		{key: "pairP50", head: "pair p50", spread: true},
		{key: "pairP95", head: "p95"},
		{key: "pairP99", head: "p99"},
		{key: "acquireP50", head: "acquire p50"},
		{key: "releaseP50", head: "release p50"},
		{key: "sameP50", head: "same key p50"},
		{key: "extendP50", head: "extend p50"},
		{key: "sent", head: "commands per pair"},
		{key: "failures", head: "errors", worst: most},
	}},
	w2: {"64 goroutines on 1000 keys, without waiting", "rate", []column{
		{key: "rate", head: "pairs/s", spread: true},
		{key: "conflicts", head: "conflicts/s"},
		{key: "failures", head: "errors", worst: most},
		{key: "violations", head: "violations", worst: most},
		{key: "pairP50", head: "pair p50 us"},
		{key: "pairP99", head: "p99 us"},
		{key: "client", head: "client CPU s/1000"},
		{key: "server", head: "server CPU s/1000"},
		{key: "sent", head: "commands per attempt"},
		{key: "all", head: "all counted"},
	}},
	w3: {"16 goroutines on one key, held for 1 ms", "gapP50", []column{
		{key: "rate", head: "acquisitions/s", spread: true},
		{key: "handOvers", head: "hand-overs to another/s"},
		{key: "gapP50", head: "gap p50 us", spread: true},
		{key: "gapP99", head: "gap p99 us"},
		{key: "otherP50", head: "other-holder gap p50 us"},
		{key: "otherP99", head: "p99 us"},
		{key: "self", head: "taken again by the same %"},
		{key: "jain", head: "Jain"},
		{key: "longest", head: "longest wait ms"},
		{key: "never", head: "never got it", worst: most},
		{key: "sent", head: "commands per acquisition"},
		{key: "all", head: "all counted"},
		{key: "client", head: "client CPU s/1000"},
		{key: "server", head: "server CPU s/1000"},
		{key: "violations", head: "violations", worst: most},
		{key: "failures", head: "errors", worst: most},
		{key: "stuck", head: "did not end", worst: most},
	}},
	w4: {"1000 waiters on one key, given up at once", "drain", []column{
		{key: "served", head: "served", worst: slices.Min[[]float64]},
		{key: "unserved", head: "not served", worst: most},
		{key: "drain", head: "drain ms", spread: true},
		{key: "sent", head: "commands in the drain"},
		{key: "all", head: "all counted"},
		{key: "idleSent", head: "commands/s while waiting"},
		{key: "idleClient", head: "client CPU s/s while waiting"},
		{key: "total", head: "commands in all"},
		{key: "client", head: "client CPU s in the drain"},
		{key: "server", head: "server CPU s in the drain"},
		{key: "goroutines", head: "goroutines"},
		{key: "inversions", head: "inversions"},
		{key: "inversionsApart", head: "inversions, 200 begun 1 ms apart", worst: most},
		{key: "early", head: "early", worst: most},
		{key: "violations", head: "violations", worst: most},
		{key: "failures", head: "errors", worst: most},
	}},
	w5: {"10,000 locks held for 30 s, renewed by the library", "rate", []column{
		{key: "held", head: "held", worst: slices.Min[[]float64]},
		{key: "seconds", head: "acquire all s"},
		{key: "acquireSent", head: "commands per acquisition"},
		{key: "goroutines", head: "goroutines"},
		{key: "resident", head: "RSS MiB"},
		{key: "grown", head: "RSS above idle MiB"},
		{key: "client", head: "client CPU s"},
		{key: "server", head: "server CPU s"},
		{key: "rate", head: "commands/s"},
		{key: "round", head: "commands per renewal round"},
		{key: "lost", head: "lost of 200", worst: most},
		{key: "failures", head: "errors", worst: most},
	}},
}

// head is the column's head for a store.
func (s *store) head(c column) string {
	if c.key == "all" {
		return s.extra
	}
	return strings.ReplaceAll(c.head, "commands", s.unit)
}

// columns are those that are shown for a store.
func (s *store) columns(w workload) []column {
	return slices.DeleteFunc(slices.Clone(tables[w].columns), func(c column) bool { return s.head(c) == "" })
}

// find returns the column of a figure.
func (t table) find(key string) column {
	i := slices.IndexFunc(t.columns, func(c column) bool { return c.key == key })
	if i < 0 {
		return column{key: key, head: key}
	}
	return t.columns[i]
}

// outcomes are all measurements of a run.
type outcomes []measurement

// of returns the values of a figure, one for each round that has it.
func (o outcomes) of(w workload, row, key string) []float64 {
	var values []float64
	for _, m := range o {
		if x, ok := m.Figures[key]; ok && m.Workload == w && m.Row == row {
			values = append(values, x)
		}
	}
	return values
}

// value is the figure over all rounds, NaN if it was not measured.
func (o outcomes) value(w workload, row, key string) float64 {
	values := o.of(w, row, key)
	if worst := tables[w].find(key).worst; worst != nil && len(values) > 0 {
		return worst(values)
	}
	return median(values)
}

// print writes a table for each workload that was measured, as Markdown.
func (o outcomes) print(to io.Writer, s *store) {
	for w := w1; w <= w5; w++ {
		var lines [][]string
		for _, r := range s.rows {
			if rounds := o.rounds(w, r.name); rounds > 0 {
				lines = append(lines, o.line(s, w, r.name, rounds))
			}
		}
		if len(lines) == 0 {
			continue
		}
		t := tables[w]
		heads := []string{"row", "rounds"}
		if floor := s.floors[w]; floor != "" {
			heads = append(heads, fmt.Sprintf("%s / %s", s.head(t.find(t.key)), floor))
		}
		for _, c := range s.columns(w) {
			if heads = append(heads, s.head(c)); c.spread {
				heads = append(heads, "of rounds")
			}
		}
		fmt.Fprintf(to, "\n### %v: %s\n\n", w, t.title)
		writeTable(to, heads, lines)
		o.printFailures(to, w)
	}
}

func (o outcomes) rounds(w workload, row string) (n int) {
	for _, m := range o {
		if m.Workload == w && m.Row == row {
			n++
		}
	}
	return n
}

func (o outcomes) line(s *store, w workload, row string, rounds int) []string {
	t := tables[w]
	cells := []string{row, fmt.Sprint(rounds)}
	if floor := s.floors[w]; floor != "" {
		cells = append(cells, show(per(o.value(w, row, t.key), o.value(w, floor, t.key))))
	}
	for _, c := range s.columns(w) {
		if cells = append(cells, show(o.value(w, row, c.key))); c.spread {
			cells = append(cells, showRange(o.of(w, row, c.key)))
		}
	}
	return cells
}

// printFailures lists what went wrong, all rounds together.
func (o outcomes) printFailures(to io.Writer, w workload) {
	type failure struct{ row, text string }
	count := map[failure]int{}
	for _, m := range o {
		if m.Workload != w {
			continue
		}
		for text, n := range m.Failures {
			count[failure{m.Row, text}] += n
		}
		if m.Error != "" {
			count[failure{m.Row, "no result: " + m.Error}]++
		}
	}
	var list []failure
	for f := range count {
		list = append(list, f)
	}
	slices.SortFunc(list, func(a, b failure) int {
		return cmp.Or(cmp.Compare(a.row, b.row), cmp.Compare(count[b], count[a]), cmp.Compare(a.text, b.text))
	})
	if len(list) > 0 {
		fmt.Fprintln(to)
	}
	const most = 20
	for i, f := range list {
		if i == most {
			fmt.Fprintf(to, "- and %d more kinds\n", len(list)-most)
			return
		}
		fmt.Fprintf(to, "- %s: %d x %s\n", f.row, count[f], f.text)
	}
}

func writeTable(to io.Writer, heads []string, lines [][]string) {
	fmt.Fprintf(to, "| %s |\n|%s\n", strings.Join(heads, " | "), strings.Repeat(" --- |", len(heads)))
	for _, cells := range lines {
		fmt.Fprintf(to, "| %s |\n", strings.Join(cells, " | "))
	}
}

// show writes a figure with about three significant digits.
func show(x float64) string {
	switch a := math.Abs(x); {
	case math.IsNaN(x):
		return "-"
	case a >= 100 || x == math.Trunc(x):
		return fmt.Sprintf("%.0f", x)
	case a >= 10:
		return fmt.Sprintf("%.1f", x)
	case a >= 0.1:
		return fmt.Sprintf("%.2f", x)
	}
	return fmt.Sprintf("%.3g", x)
}

func showRange(values []float64) string {
	if len(values) == 0 {
		return "-"
	}
	return show(slices.Min(values)) + ".." + show(slices.Max(values))
}
