package secure

import (
	"container/list"
	"context"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/time/rate"
)

type clientKey struct{}

// WithClient returns a context that names the client for whom calls are made. The
// code that authenticates clients calls it; whatever it says is believed.
func WithClient(ctx context.Context, id string) context.Context {
	return context.WithValue(ctx, clientKey{}, id)
}

// ClientFromContext returns the client that [WithClient] put into the context, or "".
func ClientFromContext(ctx context.Context) string {
	id, _ := ctx.Value(clientKey{}).(string)
	return id
}

// clientFault says what is wrong with the id of a client, or returns "".
func clientFault(id string) string {
	switch {
	case len(id) > MaxClientLen:
		return "is longer than 256 bytes"
	case !utf8.ValidString(id) || strings.ContainsFunc(id, unicode.IsControl):
		return "must be UTF-8 without control characters"
	}
	return ""
}

// client is what is known of one client. It is guarded by gate.mu.
type client struct {
	id      string
	bucket  *rate.Limiter // nil if its rate is unlimited
	held    int           // locks
	waiting int           // acquisitions under way
	idle    *list.Element // its place among those that have neither, or nil
}

// table is the clients that are remembered. It is guarded by gate.mu.
type table struct {
	max     int
	limits  Limits
	clients map[string]*client
	idle    list.List // of *client; who was away for longest comes first
}

// enter returns the client, which is remembered from then on, or nil if there is no
// room. Clients that have no more reason to be remembered make room.
func (t *table) enter(id string, now time.Time) *client {
	// Two for each that may come, so that the past wears off.
	for range 2 {
		if c := t.first(); c == nil || c.id == id || !full(c.bucket, now) {
			break
		}
		t.forget()
	}
	if c := t.clients[id]; c != nil {
		return c
	}
	if len(t.clients) >= t.max {
		if t.first() == nil {
			return nil
		}
		t.forget()
	}
	c := &client{id: id, bucket: newBucket(t.limits)}
	t.clients[id] = c
	t.settle(c)
	return c
}

// settle puts a client, whose numbers have changed or who has come by, where it
// belongs.
func (t *table) settle(c *client) {
	busy := c.held+c.waiting > 0
	switch {
	case busy && c.idle != nil:
		t.idle.Remove(c.idle)
		c.idle = nil
	case !busy && c.idle != nil:
		t.idle.MoveToBack(c.idle)
	case !busy:
		c.idle = t.idle.PushBack(c)
	}
}

// first is the idle client that was away for longest, or nil.
func (t *table) first() *client {
	if e := t.idle.Front(); e != nil {
		return e.Value.(*client)
	}
	return nil
}

// forget forgets the first idle client.
func (t *table) forget() {
	c := t.first()
	t.idle.Remove(c.idle)
	delete(t.clients, c.id)
}

// newBucket returns a full bucket, or nil if the rate is unlimited.
func newBucket(l Limits) *rate.Limiter {
	if l.Rate == Unlimited {
		return nil
	}
	return rate.NewLimiter(rate.Limit(l.Rate), l.Burst)
}

// full says whether a bucket is like a new one.
func full(b *rate.Limiter, now time.Time) bool {
	return b == nil || b.TokensAt(now) >= float64(b.Burst())
}

// lack is how long it takes until there is a token, zero if there is one. As in
// package rate, less than a nanosecond is nothing.
func lack(b *rate.Limiter, now time.Time) time.Duration {
	if b == nil {
		return 0
	}
	seconds := max(1-b.TokensAt(now), 0) / float64(b.Limit())
	return time.Duration(min(seconds*float64(time.Second), float64(longestLack)))
}

// longestLack keeps very low rates within a Duration.
const longestLack = 1000 * 24 * time.Hour

// take takes the token that is there.
func take(b *rate.Limiter, now time.Time) {
	if b != nil {
		b.AllowN(now, 1)
	}
}
