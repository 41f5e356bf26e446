package redislock

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm/driver"
)

// oldest is the oldest version of Redis that the scripts are made for.
const oldest = "6.2"

// setup is what a backend finds out about its server before the first call.
type setup struct {
	done atomic.Bool
	turn chan struct{} // has room for the one who looks
}

// ready looks at the server unless that was done. It fails if the server or
// the user's rights do not do for locks; the next call then looks again.
func (s *setup) ready(ctx context.Context, d *dispatcher, prefix string) error {
	if s.done.Load() {
		return nil
	}
	select {
	case s.turn <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("%w: redislock: looking at the server: %w", driver.ErrNotApplied, ctx.Err())
	}
	defer func() { <-s.turn }()
	if s.done.Load() {
		return nil
	}
	if err := s.look(ctx, d, prefix); err != nil {
		return err
	}
	s.done.Store(true)
	return nil
}

func (s *setup) look(ctx context.Context, d *dispatcher, prefix string) error {
	info, err := d.info(ctx)
	if err != nil {
		return err
	}
	if err := info.usable(); err != nil {
		return err
	}
	refused, err := probe(ctx, d, prefix, probeTag, false)
	if err != nil {
		return err
	}
	if len(refused) > 0 {
		return refusedError(refused)
	}
	return nil
}

// probeTag stands between the braces of the probe's keys. No lock has this
// record, as escaping changes a lone %. It is not empty, so that the keys share
// a slot.
const probeTag = "%"

// probe tries the commands of the scripts, and returns what the server refused.
func probe(ctx context.Context, d *dispatcher, prefix, tag string, quorum bool) ([]string, error) {
	record := prefix + "{" + tag + "}"
	keys := lockKeys(record)
	if quorum {
		keys = append(keys, record+":n")
	}
	reply, err := d.run(ctx, probeScript, keys, channel(prefix, "probe"))
	if err != nil {
		return nil, err
	}
	var refused []string
	for _, r := range asList(reply) {
		text := strings.Replace(fmt.Sprint(r), ": ERR ", ": ", 1)
		// Full memory and the like pass.
		no := strings.Contains(text, "NOPERM") || strings.Contains(text, "can't") || strings.Contains(text, "nknown")
		if no && !slices.Contains(refused, text) {
			refused = append(refused, text)
		}
	}
	return refused, nil
}

func refusedError(refused []string) error {
	return problem(ProblemPermission, nil, "%s", strings.Join(refused, "; "))
}

// serverInfo is what a server says about itself. A field that it may not say,
// because of the user's rights, is empty.
type serverInfo map[string]string

// info asks a server about itself.
func (d *dispatcher) info(ctx context.Context) (serverInfo, error) {
	cmd := newCommand(ctx, "info", "everything")
	if err := d.process(ctx, cmd); err != nil {
		err = classify(err)
		if is(err, ProblemPermission) {
			return serverInfo{}, nil
		}
		return nil, err
	}
	return parseInfo(cmd.Val()), nil
}

func parseInfo(reply any) serverInfo {
	text, ok := reply.(string)
	if !ok {
		text = fmt.Sprint(reply)
	}
	info := serverInfo{}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			info[name] = value
		}
	}
	return info
}

// usable says whether the server does for locks at all.
func (i serverInfo) usable() error {
	if v := i["redis_version"]; v != "" && older(v, oldest) {
		return problem(ProblemTooOld, nil, "Redis %s, must be %s or later", v, oldest)
	}
	if i["role"] == "slave" {
		return passing(ProblemReplica, nil, "a replica of %s:%s", i["master_host"], i["master_port"])
	}
	return nil
}

// older compares two versions, such as 6.2 and 7.0.15.
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

// process sends one command past the queue, and ends with its context.
func (d *dispatcher) process(ctx context.Context, cmd redis.Cmder) error {
	return await(ctx, func() error { return d.client.Process(ctx, cmd) })
}
