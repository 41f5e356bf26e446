package main

import (
	"fmt"
	"io"
	"math"
)

// target is a figure that the project has set itself: of one row alone, or
// divided by that of another row.
type target struct {
	workload workload
	row      string
	figure   string
	against  string // another row, or nothing
	want     bound
}

// bound is what a figure is to be. The zero value wants nothing: the figure is
// only reported.
type bound struct {
	sign  string
	value float64
}

func atMost(x float64) bound  { return bound{"<=", x} }
func atLeast(x float64) bound { return bound{">=", x} }

func (b bound) String() string {
	if b.sign == "" {
		return "-"
	}
	return b.sign + " " + show(b.value)
}

// judge says whether a figure is as wanted.
func (b bound) judge(x float64) string {
	switch {
	case math.IsNaN(x):
		return "not measured"
	case b.sign == "":
		return "-"
	case b.sign == "<=" && x <= b.value, b.sign == ">=" && x >= b.value:
		return "yes"
	}
	return "no"
}

// verdict is a target beside what was measured.
type verdict struct {
	Figure   string `json:"figure"`
	Wanted   string `json:"wanted"`
	Measured string `json:"measured"`
	OK       string `json:"ok"` // yes, no, "not measured", or - if nothing was wanted
}

func (t target) check(s *store, o outcomes) verdict {
	column := tables[t.workload].find(t.figure)
	x := o.value(t.workload, t.row, t.figure)
	v := verdict{
		Figure:   fmt.Sprintf("%v %s, %s", t.workload, s.head(column), t.row),
		Wanted:   t.want.String(),
		Measured: show(x),
	}
	if t.against != "" {
		by := o.value(t.workload, t.against, t.figure)
		v.Figure += " / " + t.against
		v.Measured = fmt.Sprintf("%s (%s / %s)", show(per(x, by)), show(x), show(by))
		x = per(x, by)
	}
	v.OK = t.want.judge(x)
	return v
}

// printTargets writes the figures that the project has set itself.
func printTargets(to io.Writer, list []verdict, scale float64) {
	fmt.Fprint(to, "\n### Targets\n\n")
	if scale != 1 {
		fmt.Fprintf(to, "They are meant for -scale 1, and this is %v.\n\n", scale)
	}
	var lines [][]string
	for _, v := range list {
		lines = append(lines, []string{v.Figure, v.Wanted, v.Measured, v.OK})
	}
	writeTable(to, []string{"figure", "wanted", "measured", "ok?"}, lines)
}
