// Command buildservers builds the servers for tests that are no packages of the
// system, unless that was done. Consul takes minutes, which is too long to be done
// within a test that has a time-out.
package main

import (
	"fmt"
	"os"

	"github.com/go-dlm/dlm/tests/servers"
)

func main() {
	if err := servers.Build(os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "buildservers:", err)
		os.Exit(1)
	}
}
