package consullock

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/go-dlm/dlm/driver"
)

// oldest is the oldest version of Consul that will do.
const oldest = "1.10"

// The names of what Check looks at.
const (
	checkAgent     = "agent"
	checkVersion   = "version"
	checkLeader    = "leader"
	checkServers   = "servers"
	checkAutopilot = "autopilot"
	checkRights    = "rights"
	checkSession   = "session"
	checkDelay     = "lock-delay"
)

// older compares two versions, such as 1.9 and 1.14.11.
func older(a, b string) bool {
	a, _, _ = strings.Cut(a, "-")
	x, y := strings.Split(a, "."), strings.Split(b, ".")
	for i := range y {
		if i >= len(x) {
			return true
		}
		m, _ := strconv.Atoi(x[i])
		n, _ := strconv.Atoi(y[i])
		if m != n {
			return m < n
		}
	}
	return false
}

// checkPatience bounds each question.
const checkPatience = 5 * time.Second

// Check implements [driver.Checker]. It makes a session and a key that goes with
// it, and ends it.
func (b *Backend) Check(ctx context.Context) ([]driver.Finding, error) {
	if err := b.enter(ctx); err != nil {
		return nil, err
	}
	c := &checkup{b: b, ctx: ctx}
	if c.agent() {
		c.leader()
		c.rights()
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("consullock: %w", err)
	}
	return c.found, nil
}

type checkup struct {
	b     *Backend
	ctx   context.Context
	found []driver.Finding
	// server says that the agent is a server, so that sessions belong to it.
	server bool
}

func (c *checkup) add(check string, s driver.Severity, detail, fix string) {
	c.found = append(c.found, driver.Finding{Check: check, Severity: s, Detail: detail, Fix: fix})
}

func (c *checkup) brief() (context.Context, context.CancelFunc) {
	return context.WithTimeout(c.ctx, checkPatience)
}

// agent looks at who answers, and says whether it is worth asking more.
func (c *checkup) agent() bool {
	ctx, cancel := c.brief()
	defer cancel()
	info, err := c.b.self(ctx)
	switch {
	case is(err, ProblemPermission):
		c.add(checkAgent, driver.SeverityOK, "the agent answers", "")
		c.add(checkVersion, driver.SeverityUnknown, "the token may not ask the agent for its version",
			`give the token agent_prefix "" { policy = "read" } to have it checked`)
		return true
	case err != nil:
		c.add(checkAgent, driver.SeverityCritical, err.Error(), fixOf(err))
		return false
	}
	c.server = info.server
	role := "a client agent"
	if info.server {
		role = "a server"
	}
	c.add(checkAgent, driver.SeverityOK, fmt.Sprintf("%s of datacenter %s, %s, answers", role, info.datacenter, info.node), "")
	if older(info.version, oldest) {
		c.add(checkVersion, driver.SeverityCritical, "runs Consul "+info.version, "upgrade to "+oldest+" or later")
		return false
	}
	c.add(checkVersion, driver.SeverityOK, "runs Consul "+info.version, "")
	return true
}

// fixOf says what may be done about an error.
func fixOf(err error) string {
	switch {
	case is(err, ProblemToken):
		return "use a token that the datacenter knows"
	case is(err, ProblemTLS):
		return "use https where the agent speaks TLS and http where it does not, and trust the authority of its certificate"
	case is(err, ProblemNotConsul):
		return "name the address of the agent's HTTP or HTTPS port, 8500 or 8501 by default"
	case is(err, ProblemDatacenter):
		return "name a datacenter that the agent's knows, or none"
	}
	return "see that the agent runs and can be reached from here"
}

// leader looks at the servers.
func (c *checkup) leader() {
	ctx, cancel := c.brief()
	defer cancel()
	var leader string
	var peers []string
	err := c.b.call(ctx, func(ctx context.Context) (err error) {
		if leader, err = c.b.client.Status().LeaderWithQueryOptions((&api.QueryOptions{}).WithContext(ctx)); err == nil {
			peers, err = c.b.client.Status().PeersWithQueryOptions((&api.QueryOptions{}).WithContext(ctx))
		}
		return err
	})
	switch {
	case err != nil:
		c.add(checkLeader, driver.SeverityCritical, err.Error(), fixOf(err))
		return
	case leader == "":
		c.add(checkLeader, driver.SeverityCritical, "the servers have no leader", "start a majority of the servers")
		return
	}
	c.add(checkLeader, driver.SeverityOK, leader+" leads", "")
	switch n := len(peers); {
	case n == 1:
		c.add(checkServers, driver.SeverityWarning, "there is one server; while it is down there are no locks",
			"run three servers or five")
	case n%2 == 0:
		c.add(checkServers, driver.SeverityWarning, fmt.Sprintf("there are %d servers, which survive no more failures than %d", n, n-1),
			"run an odd number of servers")
	default:
		c.add(checkServers, driver.SeverityOK, fmt.Sprintf("there are %d servers", n), "")
	}
	if c.server && len(peers) > 1 {
		c.autopilot()
	}
}

// autopilot asks whether the sessions that are made through a server end with it.
func (c *checkup) autopilot() {
	const fix = "let clients use the agent of their own machine, or run: consul operator autopilot set-config -cleanup-dead-servers=false"
	ctx, cancel := c.brief()
	defer cancel()
	var conf *api.AutopilotConfiguration
	err := c.b.call(ctx, func(ctx context.Context) (err error) {
		conf, err = c.b.client.Operator().AutopilotGetConfiguration((&api.QueryOptions{}).WithContext(ctx))
		return err
	})
	switch {
	case err != nil:
		c.add(checkAutopilot, driver.SeverityUnknown, fmt.Sprintf("whether the death of this server ends its clients' locks: %v", err),
			`give the token operator = "read" to have it checked; `+fix)
	case conf.CleanupDeadServers:
		c.add(checkAutopilot, driver.SeverityWarning,
			"this agent is a server, and autopilot removes servers that have died: all locks that were taken through it are lost then", fix)
	default:
		c.add(checkAutopilot, driver.SeverityOK, "servers that have died keep their sessions", "")
	}
}

// rights tries what locks need, without leaving anything.
func (c *checkup) rights() {
	ctx, cancel := c.brief()
	defer cancel()
	b := c.b
	s, err := b.newSession(ctx, b.opts.MinSessionTTL)
	if err != nil {
		check, fix := checkRights, fixOf(err)
		switch {
		case is(err, ProblemPermission):
			fix = "give the token a policy with " + rules(b.opts.Prefix)
		case is(err, ProblemSession):
			check = checkSession
			fix = fmt.Sprintf("set session_ttl_min of the servers to %v or less, or MinSessionTTL (min_session in a URL) to what they allow",
				b.opts.MinSessionTTL)
		}
		c.add(check, driver.SeverityCritical, err.Error(), fix)
		return
	}
	s.cancel()
	defer b.destroy(s.id)
	var list api.KVPairs
	err = b.call(ctx, func(ctx context.Context) (err error) {
		list, _, err = b.client.KV().List(s.name, consistent(ctx))
		return err
	})
	switch {
	case err == nil && len(list) == 0:
		err = problem(ProblemPermission, nil, "the token may not list what it writes; it needs %s", rules(b.opts.Prefix))
		fallthrough
	case err != nil:
		c.add(checkRights, driver.SeverityCritical, err.Error(), "give the token a policy with "+rules(b.opts.Prefix))
		return
	}
	c.add(checkRights, driver.SeverityOK, "the token may do what locks need", "")
	c.add(checkSession, driver.SeverityOK, fmt.Sprintf(
		"sessions have at least %v: Consul ends the locks of a process that died up to twice as long after it was last heard of",
		b.opts.MinSessionTTL), "")
	c.delay()
}

func (c *checkup) delay() {
	switch d := c.b.opts.LockDelay; {
	case d == 0:
		c.add(checkDelay, driver.SeverityOK, "a lock whose session was ended can be taken at once; let resources check tokens", "")
	default:
		c.add(checkDelay, driver.SeverityOK, fmt.Sprintf("a lock whose session was ended stays free for %v", d), "")
	}
}
