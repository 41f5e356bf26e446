// Command dlm takes distributed locks from the shell and from cron: it runs a
// command under a lock, shows who holds and who waits, and takes a lock away
// from a holder that is gone.
package main

import (
	"context"
	"os"

	"github.com/go-dlm/dlm/cmd/dlm/internal/supervise"
)

func main() {
	supervise.Init()
	os.Exit(NewMain().Run(context.Background(), os.Args[1:]))
}
