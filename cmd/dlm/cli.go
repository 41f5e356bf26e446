package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/go-dlm/dlm"
)

// Main is the command. Its fields are what it uses of its surroundings, except
// for `dlm run`, which gives the process's own standard input and outputs to
// the command that it runs.
type Main struct {
	Out, Err  io.Writer
	LookupEnv func(name string) (string, bool)
}

// NewMain returns the command as the shell sees it.
func NewMain() *Main {
	return &Main{Out: os.Stdout, Err: os.Stderr, LookupEnv: os.LookupEnv}
}

// Run carries out one command line and returns the exit code.
func (m *Main) Run(ctx context.Context, args []string) int {
	a := &app{Main: m}
	root := a.root()
	root.SetArgs(append([]string{}, args...)) // nil would mean os.Args
	root.SetOut(m.Out)
	root.SetErr(m.Err)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	var exit *exitError
	if !errors.As(err, &exit) {
		// Whatever is not ours is cobra's, about the command line.
		exit = usageError("%w; see dlm --help", err)
	}
	if exit.err != nil {
		a.say("%v", exit.err)
	}
	return exit.code
}

// app is one run of [Main].
type app struct {
	*Main
	backend string // the flag
	mu      sync.Mutex
}

// root is the whole command line.
func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "dlm",
		Short: "Take turns on a named thing, across processes and machines",
		Long: `dlm runs commands under distributed locks, and shows who holds and who waits.

` + backendHelp() + `

` + exitHelp,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return usageError("say what to do; see dlm --help")
		},
	}
	root.PersistentFlags().StringVar(&a.backend, "backend", "", "URL of the store (default $DLM_BACKEND, or "+defaultBackend+")")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usageError("%w; see %s --help", err, cmd.CommandPath())
	})
	root.AddCommand(
		a.runCommand(), a.lsCommand(), a.getCommand(), a.releaseCommand(), a.watchCommand(), a.doctorCommand(), a.versionCommand(),
	)
	return root
}

// say writes a line of our own. It never mixes with what commands print on
// their standard output.
func (a *app) say(format string, args ...any) {
	line := strings.ReplaceAll(fmt.Sprintf(format, args...), "\n", "; ")
	a.mu.Lock()
	defer a.mu.Unlock()
	fmt.Fprintf(a.Err, "dlm: %s\n", line)
}

// closePatience is how long a manager may take to leave the store in order.
const closePatience = time.Second

// closeManager closes a manager, releasing what it holds. It returns in time
// even if the store hangs: then it is the end of the process that closes.
func closeManager(m *dlm.Manager, patience time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		_ = m.Close(ctx)
	}()
	defer cancel()
	select {
	case <-closed:
	case <-ctx.Done():
	}
}

// withManager calls fn with a manager on the store that the user has named, and
// a context that ends with a signal.
func (a *app) withManager(ctx context.Context, fn func(context.Context, *dlm.Manager) error) error {
	open, err := a.store()
	if err != nil {
		return err
	}
	ctx, stop := signalContext(ctx)
	defer stop()
	m, err := open(nil)
	if err != nil {
		return err
	}
	defer closeManager(m, closePatience)
	err = fn(ctx, m)
	if cause := context.Cause(ctx); ctx.Err() != nil && errors.As(cause, new(signalError)) {
		return &exitError{code: codeOf(cause)}
	}
	return classify(err)
}

// endings are the signals that end a command.
var endings = []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT}

// signalError says that a signal has ended a command.
type signalError struct{ sig syscall.Signal }

func (e signalError) Error() string { return e.sig.String() }

// heeded leaves out the signals that were ignored when the process was started,
// as by nohup, and so are to stay ignored.
func heeded(signals ...os.Signal) []os.Signal {
	var list []os.Signal
	for _, sig := range signals {
		if !signal.Ignored(sig) {
			list = append(list, sig)
		}
	}
	return list
}

// signalContext returns a context that ends with a signal, which is its cause.
func signalContext(parent context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(parent)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, heeded(endings...)...)
	go func() {
		select {
		case sig := <-signals:
			cancel(signalError{sig.(syscall.Signal)})
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		cancel(nil)
	}
}
