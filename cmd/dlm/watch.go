package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/go-dlm/dlm"
)

func (a *app) watchCommand() *cobra.Command {
	var asJSON bool
	var interval time.Duration
	cmd := &cobra.Command{
		Use:   "watch KEY",
		Short: "Print a line whenever the holders or waiters of a key change",
		Long: `Print who holds KEY and how many wait for it, now and whenever that changes,
until a signal comes. Renewals are no change.

The store is looked at once every --interval: what begins and ends in between is
not seen.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if interval < 10*time.Millisecond {
				return usageError("--interval is %v, must be at least 10ms", interval)
			}
			if err := checkKey(args[0]); err != nil {
				return err
			}
			return a.withManager(cmd.Context(), func(ctx context.Context, m *dlm.Manager) error {
				return a.watch(ctx, m, args[0], interval, asJSON)
			})
		},
	}
	cmd.Flags().DurationVar(&interval, "interval", 500*time.Millisecond, "how often to look")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print objects")
	return cmd
}

// watch prints changes until the context ends. A store that has answered once
// may fail for a while.
func (a *app) watch(ctx context.Context, m *dlm.Manager, key string, interval time.Duration, asJSON bool) error {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	last, failing := "", false
	for {
		info, err := m.GetLock(ctx, key)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && last == "":
			return err
		case err != nil && !failing:
			a.say("%v; trying again", err)
		case err == nil && failing:
			a.say("the store answers again")
		}
		failing = err != nil
		if err == nil {
			if now := fingerprint(info); now != last {
				last = now
				if err := a.printChange(info, asJSON); err != nil {
					return output(err)
				}
			}
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// fingerprint changes when holders or waiters do.
func fingerprint(info *dlm.LockInfo) string {
	var b strings.Builder
	fmt.Fprintln(&b, info.Limit)
	for _, h := range info.Holders {
		fmt.Fprintf(&b, "%q %d %v\n", h.Owner, h.Token, h.Mode)
	}
	for _, w := range info.Waiters {
		fmt.Fprintf(&b, "%q %v\n", w.Owner, w.Mode)
	}
	return b.String()
}

func (a *app) printChange(info *dlm.LockInfo, asJSON bool) error {
	now := time.Now().UTC().Format("2006-01-02T15:04:05.000Z")
	if asJSON {
		out := lockToJSON(info)
		out.Time = now
		return writeJSON(a.Out, out)
	}
	holders := make([]string, 0, len(info.Holders))
	for _, h := range info.Holders {
		holders = append(holders, fmt.Sprintf("%s (token %d, %v)", quote(h.Owner), h.Token, h.Mode))
	}
	state := "free"
	if len(holders) > 0 {
		state = "held by " + strings.Join(holders, ", ")
	}
	_, err := fmt.Fprintf(a.Out, "%s %s %s; %d waiting\n", now, quote(info.Key), state, len(info.Waiters))
	return err
}
