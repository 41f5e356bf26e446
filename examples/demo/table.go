package main

import (
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
)

// table is what the demo comes to.
type table struct{ rows []row }

// row compares what was measured with what was expected.
type row struct {
	shown, expected, measured string
	ok                        bool
}

func (t *table) add(r row) { t.rows = append(t.rows, r) }

func (t *table) print(w io.Writer) error {
	tw := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprintln(tw, "WHAT WAS SHOWN\tEXPECTED\tMEASURED\tOK")
	for _, r := range t.rows {
		ok := "yes"
		if !r.ok {
			ok = "NO"
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\n", r.shown, r.expected, r.measured, ok)
	}
	return tw.Flush()
}

// failed says whether anything was not as expected.
func (t *table) failed() error {
	var faults []error
	for _, r := range t.rows {
		if !r.ok {
			faults = append(faults, fmt.Errorf("%s: %s, expected %s", r.shown, r.measured, r.expected))
		}
	}
	return errors.Join(faults...)
}
