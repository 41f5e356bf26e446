package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/go-dlm/dlm"
)

func (a *app) releaseCommand() *cobra.Command {
	var asJSON, force bool
	var token int64
	cmd := &cobra.Command{
		Use:   "release --force KEY [--token N]",
		Short: "Take a lock away from its holder",
		Long: `Remove all locks on KEY, or the one with the token that --token gives, whoever
holds them. What was removed is written to standard error; keep that line, it is
the only record.

The holder is not asked. It learns of the loss at its next renewal, and works on
until then, while somebody else can hold the key already: so release a lock only
if its holder is known to be gone. With --token, a lock that has changed hands
meanwhile is left alone.

The exit code is 1 if there was nothing to remove.`,
		DisableFlagsInUseLine: true,
		Args:                  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			key := args[0]
			switch {
			case !force:
				return usageError("this takes the lock away from its holder, which may be at work; if that is meant, add --force")
			case cmd.Flags().Changed("token") && token < 1:
				return usageError("--token is %d, must be at least 1", token)
			}
			if err := checkKey(key); err != nil {
				return err
			}
			return a.withManager(cmd.Context(), func(ctx context.Context, m *dlm.Manager) error {
				removed, err := m.ForceRelease(ctx, key, token)
				if err != nil {
					return err
				}
				for _, h := range removed {
					a.say("removed the lock on %s by force: token %d, owner %s, %s, held for %v, %v remaining",
						quote(key), h.Token, quote(h.Owner), h.Mode, round(h.Held), round(h.Remaining))
				}
				if asJSON {
					if err := writeJSON(a.Out, removedJSON{key, holdersToJSON(removed)}); err != nil {
						return output(err)
					}
				}
				switch {
				case len(removed) > 0:
					return nil
				case token != 0:
					return exitWith(exitNothing, "no lock on %s has the token %d", quote(key), token)
				}
				return exitWith(exitNothing, "nobody holds %s", quote(key))
			})
		},
	}
	f := cmd.Flags()
	f.BoolVar(&force, "force", false, "needed, since the holder may be at work")
	f.Int64Var(&token, "token", 0, "remove only the lock with this token (default: all locks on the key)")
	f.BoolVar(&asJSON, "json", false, "also print an object with what was removed")
	return cmd
}
