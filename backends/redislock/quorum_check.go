package redislock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-dlm/dlm/driver"
)

// checkQuorum is the check of what the nodes are together.
const checkQuorum = "quorum"

// Check implements [driver.Checker]. It looks at all nodes. What is critical for
// one node is a warning while a majority of others has no such fault.
func (q *Quorum) Check(ctx context.Context) ([]driver.Finding, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if q.ended.Load() {
		return nil, driver.ErrClosed
	}
	checks := make([]*check, len(q.nodes))
	marks := make([]nodeMark, len(q.nodes))
	var wg sync.WaitGroup
	for i, n := range q.nodes {
		c := newCheck(n.client, "", &Options{Prefix: q.opts.Prefix})
		c.quorum = true
		checks[i] = c
		wg.Go(func() {
			c.run(ctx)
			marks[i] = q.readMark(ctx, c)
		})
	}
	wg.Wait()
	// A deadline that has passed is a server that was too slow.
	if err := ctx.Err(); errors.Is(err, context.Canceled) {
		return nil, err
	}

	var findings []driver.Finding
	var clocks []clockReading
	ids := make(map[string][]string)
	bad := 0
	for i, c := range checks {
		clocks = append(clocks, c.clocks...)
		if id := c.info["run_id"]; id != "" {
			ids[id] = append(ids[id], c.server)
		}
		critical := slices.ContainsFunc(c.findings, func(f driver.Finding) bool { return f.Severity == driver.SeverityCritical })
		if critical || marks[i].silent > 0 {
			bad++
		}
	}
	for _, c := range checks {
		for _, f := range c.findings {
			if f.Severity == driver.SeverityCritical && len(q.nodes)-bad >= q.majority {
				f.Severity = driver.SeverityWarning
			}
			findings = append(findings, f)
		}
	}
	for _, twice := range ids {
		if len(twice) > 1 {
			findings = append(findings, driver.Finding{
				Check: checkQuorum, Severity: driver.SeverityCritical,
				Detail: fmt.Sprintf("%v are one server, which has only one vote", twice), Fix: "name each server once",
			})
		}
	}
	findings = append(findings, q.votes(checks, marks, bad)...)
	return append(findings, compareClocks("", clocks)...), nil
}

// nodeMark is whether a node votes.
type nodeMark struct {
	silent time.Duration // for how long it does not vote
}

// readMark finds out whether a node votes.
func (q *Quorum) readMark(ctx context.Context, c *check) nodeMark {
	value, err := c.ask(ctx, "get", q.markKey())
	text, _, _ := strings.Cut(fmt.Sprint(value), " ")
	f := fields{list: []any{text}}
	since := f.int()
	if err != nil || f.err != nil || since == 0 || len(c.clocks) == 0 {
		return nodeMark{}
	}
	now := time.Now().Add(c.clocks[0].offset).UnixMicro()
	return nodeMark{silent: max(0, time.Duration(q.quarantine()-(now-since))*time.Microsecond)}
}

// votes says whether the nodes can form a majority.
func (q *Quorum) votes(checks []*check, marks []nodeMark, bad int) []driver.Finding {
	var findings []driver.Finding
	for i, m := range marks {
		if m.silent > 0 {
			findings = append(findings, driver.Finding{
				Check: checkQuorum, Severity: driver.SeverityWarning, Server: checks[i].server,
				Detail: fmt.Sprintf("has come without its data, and does not vote for another %v", short(m.silent)),
				Fix:    "wait; a node with appendonly yes keeps its data over a restart",
			})
		}
	}
	good := len(q.nodes) - bad
	f := driver.Finding{
		Check:  checkQuorum,
		Detail: fmt.Sprintf("%d of %d nodes can vote, and it takes %d", good, len(q.nodes), q.majority),
	}
	switch {
	case good < q.majority:
		f.Severity, f.Fix = driver.SeverityCritical, "see the other findings"
	case bad > 0:
		f.Severity, f.Fix = driver.SeverityWarning, "see the other findings"
	}
	return append(findings, f)
}
