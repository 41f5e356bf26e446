package zklock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/go-dlm/dlm/driver"
)

// The names of what Check looks at.
const (
	checkConnection = "connection"
	checkSession    = "session"
	checkServer     = "server"
	checkVersion    = "version"
	checkEnsemble   = "ensemble"
	checkRights     = "rights"
	checkACL        = "acl"
)

const (
	// askPatience bounds a question to one server.
	askPatience = 2 * time.Second
	// connectPatience bounds the wait for a session.
	connectPatience = 5 * time.Second
	// maxAnswer bounds an answer to a four-letter word.
	maxAnswer = 1 << 16
)

// Check implements [driver.Checker]. It asks every server by srvr, which is on the
// white list of four-letter words by default, and tries what a lock does on a node
// below the root that goes with it.
func (b *Backend) Check(ctx context.Context) ([]driver.Finding, error) {
	if err := b.enter(ctx); err != nil {
		return nil, err
	}
	c := &check{b: b}
	c.connected(ctx)
	c.ensemble(ctx)
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("zklock: %w", err)
	}
	return c.findings, nil
}

type check struct {
	b        *Backend
	findings []driver.Finding
}

func (c *check) add(name string, severity driver.Severity, server, detail, fix string) {
	c.findings = append(c.findings, driver.Finding{Check: name, Severity: severity, Server: server, Detail: detail, Fix: fix})
}

// connected looks at what needs a session.
func (c *check) connected(ctx context.Context) {
	b := c.b
	within, cancel := context.WithTimeout(ctx, connectPatience)
	defer cancel()
	s, err := b.ready(within)
	if err != nil {
		fix := "see that one of " + strings.Join(b.servers, ", ") + " can be reached from here and that a majority of the ensemble runs"
		if e, ok := errors.AsType[*ServerError](err); ok && e.Problem == ProblemAuth {
			fix = "set Options.Auth (in a URL, user and password) to a user that the servers know"
		}
		c.add(checkConnection, driver.SeverityCritical, "", err.Error(), fix)
		return
	}
	c.add(checkConnection, driver.SeverityOK, s.conn.Server(), "there is a session", "")
	b.mu.Lock()
	granted := s.timeout
	b.mu.Unlock()
	switch wanted := b.opts.SessionTimeout; {
	case granted > wanted:
		c.add(checkSession, driver.SeverityWarning, "", fmt.Sprintf(
			"a session of %v was asked for and one of %v granted: a process that dies holds its locks that long", wanted, granted),
			fmt.Sprintf("set minSessionTimeout=%d in zoo.cfg of all servers, or Options.SessionTimeout (session_timeout in a URL) to %v",
				wanted.Milliseconds(), granted))
	case granted < wanted:
		c.add(checkSession, driver.SeverityWarning, "", fmt.Sprintf(
			"a session of %v was asked for and one of %v granted: locks are lost when a loss of the connection lasts about half of that",
			wanted, granted),
			fmt.Sprintf("set maxSessionTimeout=%d in zoo.cfg of all servers, or Options.SessionTimeout (session_timeout in a URL) to %v",
				wanted.Milliseconds(), granted))
	default:
		c.add(checkSession, driver.SeverityOK, "", fmt.Sprintf("the session time-out is %v, as asked for: "+
			"a process that dies holds its locks that long, and a loss of the connection is survived for about half of it", granted), "")
	}
	_, err = detached(within, b, func() (struct{}, error) { return struct{}{}, c.rights(within, s) })
	if err != nil {
		path := b.root
		c.add(checkRights, driver.SeverityCritical, "", "a lock's nodes cannot be made and removed: "+err.Error(),
			"give the user the rights to read, write, create and delete at and below "+path+", such as setAcl "+path+" auth::cdrwa")
		return
	}
	c.add(checkRights, driver.SeverityOK, "", "nodes can be made, written, read and removed below "+b.root, "")
	c.acl(within, s)
}

// rights makes and removes a node as those of locks, which is none of theirs.
func (c *check) rights(ctx context.Context, s *session) error {
	b := c.b
	if err := b.makeRoot(ctx, s); err != nil {
		return err
	}
	path := fmt.Sprintf("%s/!check-%016x", b.root, uint64(s.id))
	_, err := s.multi(
		&zk.CreateRequest{Path: path, Acl: b.opts.ACL},
		&zk.SetDataRequest{Path: path, Version: 0},
		&zk.CreateRequest{Path: path + "/x", Acl: b.opts.ACL, Flags: zk.FlagEphemeralSequential},
		&zk.CheckVersionRequest{Path: path, Version: 1},
		&zk.CheckVersionRequest{Path: b.root, Version: -1})
	if err != nil && !errors.Is(err, zk.ErrNodeExists) {
		return classify(err, path)
	}
	names, _, err := s.conn.Children(path)
	if err != nil {
		return classify(err, path)
	}
	for _, name := range names {
		if err := s.conn.Delete(path+"/"+name, -1); err != nil && !errors.Is(err, zk.ErrNoNode) {
			return classify(err, path)
		}
	}
	if err := s.conn.Delete(path, -1); err != nil && !errors.Is(err, zk.ErrNoNode) {
		return classify(err, path)
	}
	return nil
}

// acl looks at who may touch the locks.
func (c *check) acl(ctx context.Context, s *session) {
	b := c.b
	acl, err := detached(ctx, b, func() ([]zk.ACL, error) {
		acl, _, err := s.conn.GetACL(b.root)
		return acl, err
	})
	if err != nil {
		c.add(checkACL, driver.SeverityUnknown, "", "the ACL of "+b.root+" cannot be read: "+err.Error(), "")
		return
	}
	for _, a := range acl {
		if a.Scheme == "world" && a.Perms&(zk.PermWrite|zk.PermCreate|zk.PermDelete|zk.PermAdmin) != 0 {
			c.add(checkACL, driver.SeverityWarning, "", "everybody who reaches the servers may remove locks at "+b.root,
				"set Options.Auth (in a URL, user and password) for all clients, and setAcl -R "+b.root+" auth::cdrwa as that user")
			return
		}
	}
	c.add(checkACL, driver.SeverityOK, "", "not everybody may write at "+b.root, "")
}

// ensemble asks the servers themselves.
func (c *check) ensemble(ctx context.Context) {
	answers, errs := make([]string, len(c.b.servers)), make([]error, len(c.b.servers))
	var wg sync.WaitGroup
	for i, server := range c.b.servers {
		wg.Go(func() {
			within, cancel := context.WithTimeout(ctx, askPatience)
			defer cancel()
			answers[i], errs[i] = detached(within, c.b, func() (string, error) { return c.ask(server, "srvr") })
		})
	}
	wg.Wait()
	modes := make(map[string]int)
	for i, server := range c.b.servers {
		mode, version := field(answers[i], "Mode: "), field(answers[i], "Zookeeper version: ")
		switch {
		case errs[i] != nil:
			c.add(checkServer, driver.SeverityWarning, server, "it does not answer: "+errs[i].Error(), "start it, or take it out of the list of servers")
			continue
		case strings.Contains(answers[i], "not in the whitelist"):
			c.add(checkServer, driver.SeverityUnknown, server,
				"its version and its part in the ensemble cannot be found out: srvr is not allowed (4lw.commands.whitelist)", "")
			continue
		case strings.Contains(answers[i], "not currently serving"):
			c.add(checkServer, driver.SeverityWarning, server, "it serves no requests, most likely for want of a majority", "start the other servers of its ensemble")
			continue
		case mode == "":
			c.add(checkServer, driver.SeverityUnknown, server, "its answer to srvr does not say which part it has in the ensemble", "")
			continue
		}
		modes[mode]++
		c.add(checkServer, driver.SeverityOK, server, "it serves as "+mode, "")
		switch major, minor, ok := release(version); {
		case !ok:
			c.add(checkVersion, driver.SeverityUnknown, server, fmt.Sprintf("it gives its version as %q", version), "")
		case major < 3 || major == 3 && minor < 5:
			c.add(checkVersion, driver.SeverityWarning, server, fmt.Sprintf("it is version %d.%d; locks are tried with 3.5 and later", major, minor),
				"install ZooKeeper 3.5 or later")
		default:
			c.add(checkVersion, driver.SeverityOK, server, fmt.Sprintf("it is version %d.%d", major, minor), "")
		}
	}
	switch members := modes["leader"] + modes["follower"]; {
	case modes["standalone"] > 1:
		c.add(checkEnsemble, driver.SeverityCritical, "", fmt.Sprintf(
			"%d of the servers stand alone: they know nothing of each other, and each grants the same locks", modes["standalone"]),
			"name the servers of one ensemble only")
	case modes["leader"] > 1:
		c.add(checkEnsemble, driver.SeverityCritical, "", "several of the servers lead: they belong to different ensembles", "name the servers of one ensemble only")
	case modes["standalone"] == 1 && members > 0:
		c.add(checkEnsemble, driver.SeverityCritical, "", "one of the servers stands alone, and others form an ensemble", "name the servers of one ensemble only")
	case modes["standalone"] == 1:
		c.add(checkEnsemble, driver.SeverityWarning, "", "the server stands alone: no locks while it is down",
			"run an ensemble of three servers, and name them all")
	case members == 0:
		c.add(checkEnsemble, driver.SeverityUnknown, "", "whether the servers form one ensemble cannot be found out", "")
	case members < 3:
		c.add(checkEnsemble, driver.SeverityWarning, "", fmt.Sprintf("%d servers that vote were found; the client knows no others to turn to", members),
			"name all servers of the ensemble, three at least")
	default:
		c.add(checkEnsemble, driver.SeverityOK, "", fmt.Sprintf("%d servers that vote were found", members), "")
	}
}

// ask sends a four-letter word to a server.
func (c *check) ask(server, word string) (string, error) {
	conn, err := c.b.connect("tcp", server, askPatience)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(askPatience)); err != nil {
		return "", err
	}
	if _, err := io.WriteString(conn, word); err != nil {
		return "", err
	}
	answer, err := io.ReadAll(io.LimitReader(conn, maxAnswer))
	if len(answer) > 0 && !errors.Is(err, net.ErrClosed) {
		err = nil // some servers reset the connection behind it
	}
	return string(answer), err
}

// field returns the rest of a line that begins so.
func field(text, begins string) string {
	for line := range strings.SplitSeq(text, "\n") {
		if rest, ok := strings.CutPrefix(line, begins); ok {
			return strings.TrimSpace(rest)
		}
	}
	return ""
}

// release reads the first two numbers of a version.
func release(version string) (major, minor int, ok bool) {
	parts := strings.SplitN(version, ".", 3)
	if len(parts) < 3 {
		return 0, 0, false
	}
	major, err1 := strconv.Atoi(parts[0])
	minor, err2 := strconv.Atoi(parts[1])
	return major, minor, err1 == nil && err2 == nil
}
