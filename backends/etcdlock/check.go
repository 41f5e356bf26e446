package etcdlock

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/go-dlm/dlm/driver"
)

// oldest is the oldest version of etcd that will do.
const oldest = "3.4"

// setup looks at the server unless that was done. If the server does not do for
// locks, it fails, and the next call looks again.
func (b *Backend) setup(ctx context.Context) error {
	b.mu.Lock()
	looked := b.looked
	b.mu.Unlock()
	if looked {
		return nil
	}
	status, err := pb.NewMaintenanceClient(b.client.ActiveConnection()).Status(ctx, &pb.StatusRequest{})
	if err != nil {
		err = classifyFirst(ctx, err, b.opts.Prefix)
		if is(err, ProblemPermission) {
			return nil // it may not be asked; then less is found out
		}
		return err
	}
	if older(status.Version, oldest) {
		return problem(ProblemTooOld, nil, "etcd %s, must be %s or later", status.Version, oldest)
	}
	b.mu.Lock()
	b.looked = true
	b.mu.Unlock()
	return nil
}

// older compares two versions, such as 3.4 and 3.10.1.
func older(a, b string) bool {
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

// checkPatience bounds the question to one member.
const checkPatience = 3 * time.Second

// Check implements [driver.Checker].
func (b *Backend) Check(ctx context.Context) ([]driver.Finding, error) {
	if err := b.enter(ctx); err != nil {
		return nil, err
	}
	c := &checkup{b: b, ctx: ctx}
	c.members()
	c.alarms()
	c.rights()
	c.lease()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return c.found, nil
}

type checkup struct {
	b     *Backend
	ctx   context.Context
	found []driver.Finding
}

func (c *checkup) add(check string, s driver.Severity, server, detail, fix string) {
	c.found = append(c.found, driver.Finding{Check: check, Severity: s, Server: server, Detail: detail, Fix: fix})
}

func (c *checkup) brief() (context.Context, context.CancelFunc) {
	return context.WithTimeout(c.ctx, checkPatience)
}

// members looks at each member that the client knows.
func (c *checkup) members() {
	answered := 0
	endpoints := c.b.client.Endpoints()
	for _, endpoint := range endpoints {
		ctx, cancel := c.brief()
		status, err := c.b.client.Status(ctx, endpoint)
		cancel()
		if err != nil {
			c.add("member", driver.SeverityWarning, endpoint, "does not answer: "+classifyFirst(c.ctx, err, c.b.opts.Prefix).Error(),
				"start it, or leave it out")
			continue
		}
		answered++
		c.version(endpoint, status.Version)
		if status.Leader == 0 {
			c.add("leader", driver.SeverityCritical, endpoint, "has no leader", "start a majority of the members")
		}
		if status.IsLearner {
			c.add("member", driver.SeverityWarning, endpoint, "is a learner, which answers no requests for locks", "leave it out")
		}
		c.space(endpoint, status)
	}
	if answered == 0 {
		c.add("member", driver.SeverityCritical, "", "no member answers", "")
		return
	}
	ctx, cancel := c.brief()
	defer cancel()
	list, err := c.b.client.MemberList(ctx)
	switch {
	case err != nil:
		c.add("members", driver.SeverityUnknown, "", "the list of members cannot be had: "+err.Error(), "")
	case len(list.Members) == 1:
		c.add("members", driver.SeverityWarning, "", "there is one member; while it is down there are no locks",
			"run three members or five")
	case len(list.Members)%2 == 0:
		c.add("members", driver.SeverityWarning, "", fmt.Sprintf("there are %d members, which survive no more failures than %d",
			len(list.Members), len(list.Members)-1), "run an odd number of members")
	default:
		c.add("members", driver.SeverityOK, "", fmt.Sprintf("there are %d members", len(list.Members)), "")
	}
	if err == nil && len(list.Members) > 1 && len(endpoints) == 1 {
		c.add("endpoints", driver.SeverityWarning, "", "the client knows one of several members, and fails with it",
			"name all members")
	}
}

// version judges a member's version.
func (c *checkup) version(endpoint, version string) {
	switch {
	case older(version, oldest):
		c.add("version", driver.SeverityCritical, endpoint, "runs etcd "+version, "upgrade to "+oldest+" or later")
	case older(version, "3.4.26"), !older(version, "3.5") && older(version, "3.5.9"):
		// etcd-io/etcd #15247: a leader that has been replaced and does not know
		// goes on confirming and revoking leases.
		c.add("version", driver.SeverityWarning, endpoint,
			"runs etcd "+version+", whose former leader can still renew or revoke leases for an election timeout",
			"upgrade to 3.4.26, 3.5.9 or later")
	default:
		c.add("version", driver.SeverityOK, endpoint, "runs etcd "+version, "")
	}
}

// space judges how full the database is.
func (c *checkup) space(endpoint string, s *clientv3.StatusResponse) {
	quota, assumed := s.DbSizeQuota, ""
	if quota == 0 {
		quota, assumed = 2<<30, " (if the quota is the default)" // older servers do not say
	}
	percent := 100 * s.DbSize / quota
	detail := fmt.Sprintf("the database takes %d%% of its quota%s", percent, assumed)
	if percent >= 80 {
		c.add("space", driver.SeverityWarning, endpoint, detail,
			"have the history compacted (--auto-compaction-retention) and defragment; at 100% there are no locks")
		return
	}
	c.add("space", driver.SeverityOK, endpoint, detail, "")
}

func (c *checkup) alarms() {
	ctx, cancel := c.brief()
	defer cancel()
	list, err := c.b.client.AlarmList(ctx)
	if err != nil {
		c.add("alarms", driver.SeverityUnknown, "", "the alarms cannot be read: "+err.Error(), "")
		return
	}
	for _, a := range list.Alarms {
		switch a.Alarm {
		case pb.AlarmType_NOSPACE:
			c.add("alarms", driver.SeverityCritical, "", fmt.Sprintf("member %x has raised NOSPACE: no locks can be had", a.MemberID),
				"compact, defragment, and disarm the alarm")
		case pb.AlarmType_CORRUPT:
			c.add("alarms", driver.SeverityCritical, "", fmt.Sprintf("member %x has raised CORRUPT: the members' data differ", a.MemberID),
				"replace the member by a new one")
		default:
		}
	}
	if len(list.Alarms) == 0 {
		c.add("alarms", driver.SeverityOK, "", "no alarm is raised", "")
	}
}

// rights tries what locks need, without leaving anything.
func (c *checkup) rights() {
	ctx, cancel := c.brief()
	defer cancel()
	name := c.b.opts.Prefix + sessionSection + "check"
	_, err := c.b.client.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(name), "=", -1)).
		Then(clientv3.OpPut(name, "")).
		Else(clientv3.OpGet(c.b.opts.Prefix, clientv3.WithRange(after(c.b.opts.Prefix)), clientv3.WithLimit(1))).Commit()
	switch err = classify(c.ctx, err, c.b.opts.Prefix); {
	case err == nil:
		c.add("rights", driver.SeverityOK, "", "the user may read and write what locks need", "")
	case is(err, ProblemPermission):
		c.add("rights", driver.SeverityCritical, "", err.Error(),
			fmt.Sprintf("etcdctl role grant-permission ROLE --prefix=true readwrite %q", c.b.opts.Prefix))
	default:
		c.add("rights", driver.SeverityCritical, "", err.Error(), "")
	}
}

// lease finds out the shortest TTL.
func (c *checkup) lease() {
	ctx, cancel := c.brief()
	defer cancel()
	granted, err := c.b.client.Grant(ctx, 1)
	if err != nil {
		c.add("lease", driver.SeverityCritical, "", "no lease can be had: "+err.Error(), "")
		return
	}
	c.b.revoke(granted.ID)
	c.add("lease", driver.SeverityOK, "", fmt.Sprintf("the shortest TTL is %ds", granted.TTL), "")
}
