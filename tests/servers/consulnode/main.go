// Command consulnode is Consul's own agent for tests, without Consul's other
// commands: it takes the arguments of "consul agent". The version is the newest
// one whose licence is the MPL and that can be had as a Go module.
package main

import (
	"io"
	"log"
	"os"

	"github.com/hashicorp/consul/command/agent"
	"github.com/hashicorp/consul/command/cli"
	mcli "github.com/mitchellh/cli"
)

func main() {
	log.SetOutput(io.Discard)
	ui := &cli.BasicUI{BasicUi: mcli.BasicUi{Writer: os.Stdout, ErrorWriter: os.Stderr}}
	os.Exit(agent.New(ui).Run(os.Args[1:]))
}
