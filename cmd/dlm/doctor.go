package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/clockskew"
)

// findingJSON is a finding for programs.
type findingJSON struct {
	Severity string `json:"severity"`
	Check    string `json:"check"`
	Server   string `json:"server,omitempty"`
	Detail   string `json:"detail"`
	Fix      string `json:"fix,omitempty"`
}

func (a *app) doctorCommand() *cobra.Command {
	var asJSON, strict bool
	var servers []string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check whether the store is set up well for locks",
		Long: `Look at how the store is set up, and print a line for each finding, the worst
first: how much it matters, what was looked at, on which server, and what was
found. Below it stands what to change.

  critical  locks do not work, or can be lost in ordinary operation
  warning   locks work, but less is promised than could be
  unknown   it could not be found out, often for lack of a right
  ok        it is as it should be

Nothing is changed in the store. The exit code is 78 if a finding is critical,
with --strict also if one is a warning. That the store cannot be reached is a
critical finding.

With --ntp, this machine's clock is compared with that of NTP servers, of which
three or more are best; without it none is asked. Locks depend on it only if
Redis or PostgreSQL runs on this machine.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var clock *clockskew.Checker
			if cmd.Flags().Changed("ntp") {
				var err error
				if clock, err = clockskew.New(servers, nil); err != nil {
					return usageError("--ntp: %w", err)
				}
			}
			return a.withManager(cmd.Context(), func(ctx context.Context, m *dlm.Manager) error {
				return a.doctor(ctx, m, clock, asJSON, strict)
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print an array of objects")
	cmd.Flags().BoolVar(&strict, "strict", false, "a warning makes the exit code 78, too")
	cmd.Flags().StringSliceVar(&servers, "ntp", nil, "compare the clock with that of these NTP servers, host or host:port")
	return cmd
}

// doctor looks at the store, and at the clock unless that is nil.
func (a *app) doctor(ctx context.Context, m *dlm.Manager, clock *clockskew.Checker, asJSON, strict bool) error {
	findings, err := m.Check(ctx)
	if errors.Is(err, errors.ErrUnsupported) {
		a.say("this store can be used, and has no settings to check")
		err = nil
	}
	if err != nil {
		return err
	}
	if clock != nil {
		r, err := clock.Check(ctx)
		if err != nil {
			return err
		}
		findings = append(findings, clockFindings(r)...)
	}
	slices.SortStableFunc(findings, func(x, y dlm.Finding) int { return int(y.Severity) - int(x.Severity) })
	if asJSON {
		list := []findingJSON{}
		for _, f := range findings {
			list = append(list, findingJSON{f.Severity.String(), f.Check, f.Server, f.Detail, f.Fix})
		}
		err = writeJSON(a.Out, list)
	} else {
		err = a.printFindings(findings)
	}
	if err != nil {
		return output(err)
	}
	count := map[dlm.Severity]int{}
	for _, f := range findings {
		count[f.Severity]++
	}
	bad := count[dlm.SeverityCritical]
	if strict {
		bad += count[dlm.SeverityWarning]
	}
	if bad > 0 {
		return exitWith(exitUnfit, "the store is not set up well for locks: %d critical, %d warnings",
			count[dlm.SeverityCritical], count[dlm.SeverityWarning])
	}
	return nil
}

// clockFindings is what a check of this machine's clock has found.
func clockFindings(r clockskew.Result) []dlm.Finding {
	f := dlm.Finding{
		Check:    "local clock",
		Severity: dlm.SeverityUnknown,
		Detail:   fmt.Sprintf("%v: %v", r.Verdict, r),
	}
	switch r.Verdict {
	case clockskew.Fine:
		f.Severity = dlm.SeverityOK
	case clockskew.Skewed:
		f.Severity = dlm.SeverityWarning
		f.Detail += "; locks depend on it only if Redis or PostgreSQL runs here"
		f.Fix = "let a time service such as chrony keep the clock of this machine"
	}
	list := []dlm.Finding{f}
	for _, e := range r.Errors {
		list = append(list, dlm.Finding{
			Check: "ntp", Severity: dlm.SeverityUnknown, Server: e.Server,
			Detail: fmt.Sprintf("no valid answer: %v", e.Err),
		})
	}
	return list
}

// printFindings writes findings for people to read.
func (a *app) printFindings(findings []dlm.Finding) error {
	rows := make([][3]string, len(findings))
	var width [3]int
	for i, f := range findings {
		rows[i] = [3]string{f.Severity.String(), f.Check, f.Server}
		if f.Server == "" {
			rows[i][2] = "-"
		}
		for j, cell := range rows[i] {
			width[j] = max(width[j], len(cell))
		}
	}
	var b strings.Builder
	for i, f := range findings {
		for j, cell := range rows[i] {
			fmt.Fprintf(&b, "%-*s  ", width[j], printable(cell))
		}
		b.WriteString(printable(f.Detail) + "\n")
		if f.Fix != "" {
			b.WriteString("    fix: " + printable(f.Fix) + "\n")
		}
	}
	_, err := a.Out.Write([]byte(b.String()))
	return err
}
