package main

import (
	"fmt"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/go-dlm/dlm"
)

// runOptions are the options of `dlm run`, from flags and environment.
type runOptions struct {
	ttl   time.Duration
	wait  time.Duration // 0: without bound
	grace time.Duration // 0: the default
	now   bool          // do not wait
	acq   dlm.AcquireOptions
	quiet bool
}

func (a *app) runCommand() *cobra.Command {
	var opts runOptions
	var slots int
	cmd := &cobra.Command{
		Use:   "run [flags] KEY -- COMMAND [ARGS...]",
		Short: "Run a command under a lock",
		Long: `Wait for the lock on KEY, run COMMAND, and release the lock when COMMAND and all
that it has started have ended. The lock is renewed in the background. Without
--wait or --no-wait, the wait has no bound.

The exit code is that of COMMAND, or 128+n if signal n killed it. Standard input
and outputs are COMMAND's own; messages of dlm go to standard error.

COMMAND finds in its environment
  DLM_KEY       the key
  DLM_TOKEN     the fencing token: larger than that of every holder before
  DLM_DEADLINE  until when the lock was sure to be held when COMMAND started, as
                in 2006-01-02T15:04:05.999999999Z; it moves on with every renewal

Signals are passed on to COMMAND's process group: INT, TERM, HUP, QUIT, USR1,
USR2, WINCH, TSTP, CONT. At a terminal, that group is in the foreground, and if
it is suspended, so is dlm; then nobody renews the lock, and COMMAND is killed
unless it is resumed before the deadline. While dlm waits for the lock, INT,
TERM, HUP and QUIT end it, and COMMAND is never started.

If the lock cannot be renewed, COMMAND is stopped before anybody else can get
it: SIGTERM comes --grace before the lock's deadline, SIGKILL a twelfth of the
TTL, at most 2s, before it. If somebody has taken the lock away by force, SIGTERM
comes as soon as that is noticed, and SIGKILL 250ms later. On Linux this reaches
all descendants, also those in sessions of their own, and it holds when dlm is
stopped or killed.

What COMMAND has left running when it ends is stopped before the lock is
released: it may end by itself within a second, then it gets SIGTERM, and SIGKILL
when the time between the two signals above has passed. Start services through
the service manager, not through the command.

` + exitHelp + `
COMMAND may use the same codes; the line tells them apart.

Environment: DLM_BACKEND, DLM_TTL, DLM_WAIT and DLM_GRACE stand for the flags of
these names where a flag is not given.`,
		Example: `  dlm run nightly-report -- ./report.sh
  dlm run --wait 10m deploy:web -- make deploy
  dlm run --no-wait --quiet backup -- restic backup /srv || [ $? -eq 75 ]`,
		DisableFlagsInUseLine: true,
		Args: func(cmd *cobra.Command, args []string) error {
			switch dash := cmd.ArgsLenAtDash(); {
			case dash < 0:
				return usageError("put -- between KEY and COMMAND, as in: dlm run KEY -- COMMAND")
			case dash != 1:
				return usageError("there must be one KEY before --, not %d", dash)
			case len(args) < 2:
				return usageError("no COMMAND after --")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := opts.resolve(cmd, a, slots); err != nil {
				return err
			}
			if err := checkKey(args[0]); err != nil {
				return err
			}
			open, err := a.store()
			if err != nil {
				return err
			}
			return newJob(a, opts, args[0], args[1:]).run(cmd.Context(), open)
		},
	}
	f := cmd.Flags()
	f.DurationVar(&opts.ttl, "ttl", 30*time.Second, "how long the lock lasts if dlm dies; it is renewed every third of that")
	f.DurationVar(&opts.wait, "wait", 0, "give up after this time")
	f.BoolVar(&opts.now, "no-wait", false, "give up at once if the lock is held")
	f.DurationVar(&opts.grace, "grace", 0, "how long before the deadline to stop COMMAND (default a third of the TTL, at most 10s)")
	f.IntVar(&slots, "slots", 1, "how many may hold the lock together; all must ask for the same number")
	f.BoolVar(&opts.acq.Shared, "shared", false, "share the lock with others that use --shared")
	f.BoolVarP(&opts.quiet, "quiet", "q", false, "print errors only")
	return cmd
}

// resolve fills in what the environment says and checks everything.
func (o *runOptions) resolve(cmd *cobra.Command, a *app, slots int) error {
	given := map[string]bool{}
	for _, v := range []struct {
		flag, env string
		value     *time.Duration
	}{
		{"ttl", "DLM_TTL", &o.ttl},
		{"wait", "DLM_WAIT", &o.wait},
		{"grace", "DLM_GRACE", &o.grace},
	} {
		source := "--" + v.flag
		given[v.flag] = cmd.Flags().Changed(v.flag)
		text, _ := a.LookupEnv(v.env)
		// Asking not to wait overrides how long to wait, if that comes from
		// the environment.
		if !given[v.flag] && text != "" && !(v.flag == "wait" && o.now) {
			d, err := time.ParseDuration(text)
			if err != nil {
				return usageError("%s is %q, must be a duration such as 30s", v.env, text)
			}
			*v.value, source, given[v.flag] = d, v.env, true
		}
		if given[v.flag] && *v.value <= 0 {
			hint := ""
			if v.flag == "wait" {
				hint = "; use --no-wait to not wait at all"
			}
			return usageError("%s is %v, must be above 0%s", source, *v.value, hint)
		}
	}
	switch {
	case o.ttl < dlm.MinTTL || o.ttl > dlm.MaxTTL:
		return usageError("the ttl is %v, must be between %v and %v", o.ttl, dlm.MinTTL, dlm.MaxTTL)
	case given["wait"] && o.now:
		return usageError("--wait and --no-wait exclude each other")
	case slots < 1 || slots > 1<<30:
		return usageError("--slots is %d, must be between 1 and %d", slots, 1<<30)
	case slots > 1 && o.acq.Shared:
		return usageError("--slots and --shared exclude each other")
	}
	if o.grace > 0 {
		if l := newLimits(o.ttl, o.grace); o.grace <= l.lead || o.grace > o.ttl/2 {
			return usageError("the grace is %v, must be above %v, when the command is killed, and at most %v, half the ttl",
				o.grace, l.lead, o.ttl/2)
		}
	}
	o.acq.NoWait, o.acq.Limit = o.now, slots
	if o.acq.Shared {
		o.acq.Limit = 0
	}
	return nil
}

// checkKey refuses what cannot be a key, before anything is opened.
func checkKey(key string) error {
	switch {
	case key == "":
		return usageError("KEY is empty")
	case len(key) > dlm.MaxKeyLen:
		return usageError("KEY has %d bytes, must have at most %d", len(key), dlm.MaxKeyLen)
	case !utf8.ValidString(key):
		return usageError("KEY %q is not valid UTF-8", key)
	}
	return nil
}

// describe names what is asked for in messages.
func (o *runOptions) describe(key string) string {
	switch {
	case o.acq.Shared:
		return fmt.Sprintf("the shared lock on %s", quote(key))
	case o.acq.Limit > 1:
		return fmt.Sprintf("one of %d slots of %s", o.acq.Limit, quote(key))
	}
	return fmt.Sprintf("the lock on %s", quote(key))
}
