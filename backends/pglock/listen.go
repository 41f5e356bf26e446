package pglock

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/go-dlm/dlm/driver"
)

const (
	// subscribePatience bounds how long a subscription may take to stand.
	subscribePatience = 5 * time.Second
	// probePatience bounds how long a notification may take that shows whether
	// any arrive.
	probePatience = 2 * time.Second
	// quiet is after how long without news the connection is tried, which must
	// answer within as long again.
	quiet = 3 * time.Second
	// lookAgain is after how long it is tried again whether notifications arrive
	// through a pooler.
	lookAgain = 10 * time.Minute
	// closePatience bounds how long the end of a connection is waited for.
	closePatience = 100 * time.Millisecond
)

// errPooled says that no notifications can be had.
var errPooled = errors.New("pglock: notifications do not arrive, as a pooler in transaction mode stands before the server; " +
	"waiters look for themselves every Options.PollInterval")

// pooled remembers that no notifications arrive.
type pooled struct {
	mu    sync.Mutex
	since time.Time
}

// Listen implements [driver.Notifier]. It uses a connection of its own, which it
// makes as the pool makes its own, and does not take one of the pool's.
func (b *Backend) Listen(ctx context.Context, manager string, handle func(driver.Event)) error {
	if b.ended.Load() {
		return driver.ErrClosed
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		select {
		case <-b.closed:
			cancel()
		case <-stop:
		}
	})
	err := b.listen(ctx, b.opts.channel(manager), handle)
	close(stop)
	wg.Wait()
	if b.ended.Load() {
		return driver.ErrClosed
	}
	return err
}

func (b *Backend) listen(ctx context.Context, channel string, handle func(driver.Event)) error {
	b.pooled.mu.Lock()
	since := b.pooled.since
	b.pooled.mu.Unlock()
	if !since.IsZero() {
		// It was tried a short time ago, and each failure is reported.
		timer := time.NewTimer(time.Until(since.Add(lookAgain)))
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	conn, err := b.subscribe(ctx, channel, handle)
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		b.pooled.mu.Lock()
		defer b.pooled.mu.Unlock()
		b.pooled.since = time.Time{}
		if errors.Is(err, errPooled) {
			b.pooled.since = time.Now()
		}
		return b.opts.classify(err)
	}
	defer hangUp(conn)
	for {
		n, err := notification(ctx, conn, quiet)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil && !conn.IsClosed() && errors.Is(err, context.DeadlineExceeded):
			err = func() error {
				ctx, cancel := context.WithTimeout(ctx, quiet)
				defer cancel()
				return conn.Ping(ctx)
			}()
			if err != nil {
				return fmt.Errorf("pglock: the listening connection does not answer: %w", err)
			}
		case err != nil:
			return b.opts.classify(err)
		default:
			if e, err := parseEvent(n); err == nil {
				handle(e)
			}
		}
	}
}

// notification waits for the next one.
func notification(ctx context.Context, conn *pgx.Conn, patience time.Duration) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	n, err := conn.WaitForNotification(ctx)
	if err != nil {
		return "", err
	}
	return n.Payload, nil
}

// hangUp closes a connection, whatever the other side does.
func hangUp(conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), closePatience)
	defer cancel()
	_ = conn.Close(ctx) // it is not needed any more
}

// subscribe makes a connection that listens, and says so.
func (b *Backend) subscribe(ctx context.Context, channel string, handle func(driver.Event)) (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, subscribePatience)
	defer cancel()
	conn, err := dialAs(ctx, b.pool)
	if err != nil {
		return nil, err
	}
	up := false
	defer func() {
		if !up {
			hangUp(conn)
		}
	}()
	results, err := conn.PgConn().Exec(ctx, "select pg_backend_pid()").ReadAll()
	if err != nil {
		return nil, err
	}
	if len(results) != 1 || len(results[0].Rows) != 1 {
		return nil, errStrange
	}
	if string(results[0].Rows[0][0]) != strconv.FormatUint(uint64(conn.PgConn().PID()), 10) {
		// Another one has answered than let us in: a pooler.
		if err := b.probe(ctx, conn); err != nil {
			return nil, err
		}
	}
	if _, err := conn.PgConn().Exec(ctx, "listen "+quote(channel)).ReadAll(); err != nil {
		return nil, err
	}
	up = true
	handle(driver.Event{Kind: driver.EventUp})
	return conn, nil
}

// probe looks whether notifications arrive through a pooler. In session mode they
// do; in transaction mode they go to whoever uses the server's connection at the
// moment. One that this very connection sent would arrive in either case, so it is
// sent through another one. The channel is one that is used once: the server's
// connection may go on listening to it, for the benefit of nobody.
func (b *Backend) probe(ctx context.Context, conn *pgx.Conn) error {
	const text = "probe"
	channel := "dlm_" + rand.Text()
	if _, err := conn.PgConn().Exec(ctx, "listen "+quote(channel)).ReadAll(); err != nil {
		return err
	}
	defer func() {
		_, _ = conn.PgConn().Exec(ctx, "unlisten "+quote(channel)).ReadAll() // it may reach another
	}()
	_, err := b.calls.do(ctx, "", &statement{"", "SELECT pg_notify($1::text, $2::text)"}, channel, text)
	if err != nil {
		return err
	}
	end := time.Now().Add(probePatience)
	for {
		got, err := notification(ctx, conn, time.Until(end))
		switch {
		case err == nil && got == text:
			return nil
		case err != nil && time.Now().After(end):
			return errPooled
		case err != nil:
			return err
		}
	}
}

// parseEvent reads a message of tell_v1:
//
//	what ticket token ttl mode hex(owner) hex(key)
func parseEvent(text string) (driver.Event, error) {
	strange := fmt.Errorf("pglock: strange message %q", text)
	f := strings.Split(text, " ")
	if len(f) != 7 {
		return driver.Event{}, strange
	}
	ticket, err1 := strconv.ParseInt(f[1], 10, 64)
	token, err2 := strconv.ParseInt(f[2], 10, 64)
	ttl, err3 := strconv.ParseInt(f[3], 10, 64)
	mode, err4 := strconv.ParseUint(f[4], 10, 1)
	owner, err5 := hex.DecodeString(f[5])
	key, err6 := hex.DecodeString(f[6])
	if errors.Join(err1, err2, err3, err4, err5, err6) != nil {
		return driver.Event{}, strange
	}
	lease := driver.Lease{Key: string(key), Owner: string(owner)}
	switch f[0] {
	case "g":
		lease.Token, lease.TTL, lease.Mode = token, time.Duration(ttl)*time.Microsecond, driver.Mode(mode)
		return driver.Event{Kind: driver.EventGrant, Ticket: ticket, Lease: lease}, nil
	case "l":
		lost := &driver.LostError{Key: lease.Key, Token: token, Reason: driver.ReasonGone}
		return driver.Event{Kind: driver.EventLost, Lease: lease, Err: lost}, nil
	}
	return driver.Event{}, strange
}
