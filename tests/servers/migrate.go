package servers

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
)

// MigrateSlot moves a slot with its keys to another primary, as resharding tools
// do. It returns when all nodes that run know the new owner.
func (c *Cluster) MigrateSlot(slot int, to *Redis) {
	c.tb.Helper()
	c.BeginMigration(slot, to)()
}

// BeginMigration moves the keys of a slot to another primary, but leaves the slot
// to its owner: that one replies ASK for keys which it does not have, and the
// other takes commands for the slot only after ASKING. finish assigns the slot to
// its new owner, as in [Cluster.MigrateSlot]; further calls of it have no effect.
func (c *Cluster) BeginMigration(slot int, to *Redis) (finish func()) {
	c.tb.Helper()
	from := c.PrimaryOf(slot)
	if from == to {
		return func() {}
	}
	ctx, cancel := context.WithTimeout(context.Background(), changePatience)
	defer cancel()
	_, err := to.ask(ctx, "CLUSTER", "SETSLOT", strconv.Itoa(slot), "IMPORTING", from.id)
	if err == nil {
		_, err = from.ask(ctx, "CLUSTER", "SETSLOT", strconv.Itoa(slot), "MIGRATING", to.id)
	}
	if err == nil {
		err = moveKeys(ctx, slot, from, to)
	}
	if err != nil {
		c.tb.Fatalf("servers: migrating slot %d from %s to %s: %v", slot, from.Addr(), to.Addr(), err)
	}
	var once sync.Once
	return func() {
		c.tb.Helper()
		once.Do(func() {
			c.tb.Helper()
			if err := c.assign(slot, from, to); err != nil {
				c.tb.Fatalf("servers: assigning slot %d to %s: %v", slot, to.Addr(), err)
			}
		})
	}
}

// moveKeys moves all keys of a slot.
func moveKeys(ctx context.Context, slot int, from, to *Redis) error {
	for {
		v, err := from.ask(ctx, "CLUSTER", "GETKEYSINSLOT", strconv.Itoa(slot), "100")
		if err != nil {
			return err
		}
		keys, _ := v.([]any)
		if len(keys) == 0 {
			return nil
		}
		args := []string{"MIGRATE", "127.0.0.1", strconv.Itoa(to.port), "", "0", "5000", "KEYS"}
		for _, k := range keys {
			args = append(args, fmt.Sprint(k))
		}
		if _, err := from.Do(ctx, args...); err != nil {
			return err
		}
	}
}

// assign ends a migration.
func (c *Cluster) assign(slot int, from, to *Redis) error {
	return poll(changePatience, func(ctx context.Context) error {
		// The new owner first, then the old one: whatever a client asks between
		// the two, it is not sent round in circles.
		nodes := []*Redis{to, from}
		for _, r := range c.Nodes {
			if r != to && r != from {
				nodes = append(nodes, r)
			}
		}
		for _, r := range nodes {
			if !r.running() {
				continue
			}
			role, err := r.role(ctx)
			if err != nil {
				return err
			}
			if role != "master" {
				continue // it learns it from its primary
			}
			if _, err := r.ask(ctx, "CLUSTER", "SETSLOT", strconv.Itoa(slot), "NODE", to.id); err != nil {
				return err
			}
		}
		views, errs := c.views(ctx)
		for r, v := range views {
			if c.owner(map[*Redis]clusterView{r: v}, slot) != to {
				errs = append(errs, fmt.Errorf("%s does not know the new owner", r.Addr()))
			}
		}
		return errors.Join(errs...)
	})
}
