package consullock

import (
	"context"
	"errors"
	"fmt"

	"github.com/hashicorp/consul/api"

	"github.com/go-dlm/dlm/driver"
)

// Release implements [driver.Backend].
func (b *Backend) Release(ctx context.Context, lease driver.Lease) error {
	if err := b.enter(ctx); err != nil {
		return err
	}
	if lease.Token == 0 {
		return b.withdraw(ctx, lease)
	}
	return b.delete(ctx, &lease)
}

// delete gives up a grant or ticket by its token.
func (b *Backend) delete(ctx context.Context, lease *driver.Lease) error {
	b.mu.Lock()
	e := b.entry(lease.Key, lease.Owner)
	var own ticket
	claimed, unsure, base := false, false, lockBase(b.opts.Prefix, lease.Key)
	if e != nil && int64(e.create) == lease.Token {
		own = ticket{name: e.name, mod: e.mod}
		e.release = true
		claimed, unsure = e.claimed, len(e.unsure) > 0
	}
	b.mu.Unlock()
	if unsure {
		if _, err := b.refence(ctx, e); err != nil {
			return err
		}
	}
	for range maxLooks {
		if own.name == "" {
			st, err := b.read(ctx, lease.Key)
			if err != nil {
				return err
			}
			i := find(st.list, lease.Owner)
			if i < 0 || int64(st.list[i].create) != lease.Token {
				b.gone(lease, false)
				return lostError(lease, len(st.list) > 0)
			}
			own = st.list[i]
			claimed = b.opts.LockDelay > 0 && i == 0 && own.limit == 1 && own.mode == driver.Exclusive
		}
		ops := []*api.KVTxnOp{
			{Verb: api.KVCheckIndex, Key: own.name, Index: own.mod},
			{Verb: api.KVDelete, Key: own.name},
		}
		if claimed {
			ops = append(ops, &api.KVTxnOp{Verb: api.KVDelete, Key: base + delayName})
		}
		fast := own.name == base+lockName
		if fast {
			// Others may have come and gone.
			ops = append(ops, &api.KVTxnOp{Verb: api.KVGetTree, Key: base + queueName})
		}
		results, no, err := b.txn(ctx, ops)
		if err != nil {
			return err
		}
		if no == nil {
			b.gone(lease, !fast || len(pairs(results, base+queueName)) > 0)
			return nil
		}
		// It is on another session, or gone.
		own = ticket{}
	}
	return fmt.Errorf("%w: consullock: key %q did not hold still", driver.ErrNotApplied, lease.Key)
}

// gone takes note that a ticket has been deleted, and that the next may hold the
// lock therefore. There may be a queue to be tidied up.
func (b *Backend) gone(lease *driver.Lease, queue bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if l := b.locks[lease.Key]; l != nil {
		if e := l.entries[lease.Owner]; e != nil && int64(e.create) == lease.Token {
			e.create, e.granted = 0, false
			b.forget(e)
		}
		b.left(l, uint64(lease.Token))
	}
	if queue && b.alone(lease.Key) {
		b.task(func() { b.tidy(lease.Key) })
	}
}

// alone says whether this backend has no ticket of a lock. The mutex is held.
func (b *Backend) alone(key string) bool {
	l := b.locks[key]
	if l == nil {
		return true
	}
	for _, e := range l.entries {
		if e.create != 0 {
			return false
		}
	}
	return true
}

// tidy removes what is there for the sake of a queue, if nobody is in it.
func (b *Backend) tidy(key string) {
	ctx, cancel := context.WithTimeout(b.ctx, sessionPatience)
	defer cancel()
	st, err := b.read(ctx, key)
	if err != nil || st.queue == 0 || len(st.list) > 0 {
		return
	}
	// It fails if somebody has come.
	_, _, _ = b.txn(ctx, []*api.KVTxnOp{{Verb: api.KVDeleteCAS, Key: lockBase(b.opts.Prefix, key) + queueName, Index: st.queue}})
}

func lostError(l *driver.Lease, taken bool) error {
	reason := driver.ReasonGone
	if taken {
		reason = driver.ReasonTaken
	}
	return &driver.LostError{Key: l.Key, Token: l.Token, Reason: reason}
}

// withdraw removes whatever the owner has on the key. A request of his that was
// not answered may still be on its way, in a broken connection or in a server's
// queue. So the fence that it names is moved first.
func (b *Backend) withdraw(ctx context.Context, lease driver.Lease) error {
	b.mu.Lock()
	e := b.entry(lease.Key, lease.Owner)
	if e == nil {
		e = &entry{key: lease.Key, owner: lease.Owner}
	} else {
		e.release = true
	}
	create, sure := e.create, len(e.unsure) == 0
	b.mu.Unlock()
	if create != 0 && sure {
		lease.Token = int64(create)
		if err := b.delete(ctx, &lease); !errors.Is(err, driver.ErrLost) {
			return err
		}
		lease.Token = 0
	}
	for range maxLooks {
		st, err := b.refence(ctx, e)
		if err != nil {
			return err
		}
		i := find(st.list, lease.Owner)
		if i < 0 {
			b.mu.Lock()
			defer b.mu.Unlock()
			e.create, e.granted = 0, false
			b.forget(e)
			return nil
		}
		lease.Token = int64(st.list[i].create)
		if err := b.delete(ctx, &lease); err != nil && !errors.Is(err, driver.ErrLost) {
			return err
		}
	}
	return fmt.Errorf("consullock: key %q did not hold still", lease.Key)
}
