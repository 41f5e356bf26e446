package redislock

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-dlm/dlm/driver"
)

const (
	// subscribePatience bounds how long a subscription may take to stand.
	subscribePatience = 5 * time.Second
	// quiet is after how long without news the subscription is tried by a
	// ping, which must be answered within as long again.
	quiet = 3 * time.Second
)

// Listen implements [driver.Notifier].
func (b *Backend) Listen(ctx context.Context, manager string, handle func(driver.Event)) error {
	if b.ended.Load() {
		return driver.ErrClosed
	}
	err := listen(ctx, b.closed, b.client, b.opts.Prefix, manager, handle)
	if b.ended.Load() {
		return driver.ErrClosed
	}
	// The node may be dead, and a subscription goes to the node that the
	// client takes for the right one.
	b.calls.reload()
	return err
}

// listen subscribes to the channel of a manager until the context ends, closed
// is closed, or the subscription breaks.
func listen(
	ctx context.Context, closed <-chan struct{}, client redis.UniversalClient, prefix, manager string, handle func(driver.Event),
) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	sub := client.Subscribe(ctx)
	// To close it is what ends a Receive under way, whatever the client does
	// with contexts.
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		select {
		case <-ctx.Done():
		case <-closed:
		}
		_ = sub.Close()
	}()
	defer func() { <-stopped }()
	defer cancel()

	errs := make(chan error, 1)
	go func() { errs <- receive(ctx, sub, prefix, channel(prefix, manager), handle) }()
	select {
	case err := <-errs:
		return err
	case <-ctx.Done():
	case <-closed:
	}
	// The client may still be connecting, which nothing ends but its own
	// time-out. What it finds then is closed.
	select {
	case <-errs:
	case <-time.After(closePatience):
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return driver.ErrClosed
}

// closePatience is how long a subscription may take to end.
const closePatience = 100 * time.Millisecond

// receive passes on what arrives.
func receive(ctx context.Context, sub *redis.PubSub, prefix, name string, handle func(driver.Event)) error {
	if err := sub.Subscribe(ctx, name); err != nil {
		return classify(err)
	}
	asked := false
	for wait := subscribePatience; ; {
		msg, err := sub.ReceiveTimeout(ctx, wait)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			timeout, ok := errors.AsType[net.Error](err)
			if !ok || !timeout.Timeout() || asked || wait == subscribePatience {
				return classify(err)
			}
			if err := sub.Ping(ctx); err != nil {
				return classify(err)
			}
			asked = true
			continue
		}
		asked = false
		switch m := msg.(type) {
		case *redis.Subscription:
			if m.Kind == "subscribe" {
				wait = quiet
				handle(driver.Event{Kind: driver.EventUp})
			}
		case *redis.Message:
			if e, err := parseEvent(prefix, m.Payload); err == nil {
				handle(e)
			}
		}
	}
}

// parseEvent reads a message of the scripts:
//
//	what ticket token ttl kind len(owner) owner record
func parseEvent(prefix, text string) (driver.Event, error) {
	f := strings.SplitN(text, " ", 7)
	if len(f) != 7 {
		return driver.Event{}, fmt.Errorf("redislock: strange message %q", text)
	}
	ticket, err1 := strconv.ParseInt(f[1], 10, 64)
	token, err2 := strconv.ParseInt(f[2], 10, 64)
	ttl, err3 := strconv.ParseInt(f[3], 10, 64)
	mode, _, err4 := parseKind(f[4])
	n, err5 := strconv.Atoi(f[5])
	if err := errors.Join(err1, err2, err3, err4, err5); err != nil {
		return driver.Event{}, fmt.Errorf("redislock: strange message %q: %w", text, err)
	}
	if n < 0 || n > len(f[6]) {
		return driver.Event{}, fmt.Errorf("redislock: strange message %q", text)
	}
	key, ok := lockKey(prefix, f[6][n:])
	if !ok {
		return driver.Event{}, fmt.Errorf("redislock: strange message %q", text)
	}
	lease := driver.Lease{Key: key, Owner: f[6][:n], Token: token, TTL: time.Duration(ttl) * time.Microsecond, Mode: mode}
	switch f[0] {
	case "g":
		return driver.Event{Kind: driver.EventGrant, Ticket: ticket, Lease: lease}, nil
	case "w":
		return driver.Event{Kind: driver.EventWake, Lease: driver.Lease{Key: key, Owner: lease.Owner}}, nil
	case "l":
		lost := &driver.LostError{Key: key, Token: token, Reason: driver.ReasonGone}
		return driver.Event{Kind: driver.EventLost, Lease: driver.Lease{Key: key, Owner: lease.Owner}, Err: lost}, nil
	}
	return driver.Event{}, fmt.Errorf("redislock: strange message %q", text)
}
