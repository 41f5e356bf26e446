package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/go-dlm/dlm"
)

func (a *app) getCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "get KEY",
		Short: "Show who holds a key and who waits for it",
		Long: `Show who holds KEY, with a line for each holder, and who waits for it, first come
first. A key that nobody holds is no error.

The answer may be old by the time it is read. To do something only if the key is
free, use: dlm run --no-wait KEY -- COMMAND`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkKey(args[0]); err != nil {
				return err
			}
			return a.withManager(cmd.Context(), func(ctx context.Context, m *dlm.Manager) error {
				info, err := m.GetLock(ctx, args[0])
				if err != nil {
					return err
				}
				if asJSON {
					return output(writeJSON(a.Out, lockToJSON(info)))
				}
				return output(a.show(info))
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print an object")
	return cmd
}

// show writes a key for people to read.
func (a *app) show(info *dlm.LockInfo) error {
	t := newTable(a.Out, lockColumns...)
	t.lock(info)
	if err := t.flush(); err != nil || len(info.Waiters) == 0 {
		return err
	}
	fmt.Fprintln(a.Out)
	t = newTable(a.Out, "WAITER", "MODE", "WAITING")
	for _, w := range info.Waiters {
		t.row(quote(w.Owner), w.Mode.String(), round(w.Waiting).String())
	}
	return t.flush()
}
