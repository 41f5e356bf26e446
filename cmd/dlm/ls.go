package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/go-dlm/dlm"
)

// pageSize is how many keys are read in one call.
const pageSize = 200

func (a *app) lsCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "ls [PREFIX]",
		Short: "List the keys that somebody holds or waits for",
		Long: `List the keys that begin with PREFIX and that somebody holds or waits for, in
byte order. There is a line for each holder; WAITING counts those who wait for
the key. Characters that are not printable are shown as in Go, within quotes.`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			prefix := ""
			if len(args) > 0 {
				prefix = args[0]
			}
			return a.withManager(cmd.Context(), func(ctx context.Context, m *dlm.Manager) error {
				return a.list(ctx, m, prefix, asJSON)
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print an array of objects")
	return cmd
}

func (a *app) list(ctx context.Context, m *dlm.Manager, prefix string, asJSON bool) error {
	all := []lockJSON{}
	t := newTable(a.Out, lockColumns...)
	for after := ""; ; {
		page, err := m.ListLocks(ctx, prefix, after, pageSize)
		if err != nil {
			return err
		}
		for i := range page {
			after = page[i].Key
			if asJSON {
				all = append(all, lockToJSON(&page[i]))
			} else {
				t.lock(&page[i])
			}
		}
		if len(page) < pageSize {
			break
		}
	}
	if asJSON {
		return output(writeJSON(a.Out, all))
	}
	return output(t.flush())
}

// output is the error of writing what was asked for.
func output(err error) error {
	if err == nil {
		return nil
	}
	return exitWith(exitInternal, "cannot write the output: %w", err)
}
