package dlm

import (
	"context"
	"crypto/rand"
	"strings"
)

type ownerKey struct{}

// WithOwner returns a context that carries an owner for re-entry: an
// acquisition of a key that the same manager already holds for the same owner
// succeeds at once, with the same Value and Token and a handle of its own; the
// key is freed when the last handle is released. An owner that holds a key
// exclusively and asks for it shared gets a further handle of its exclusive
// lock; the other way round it gets an [*UpgradeError] at once.
//
// The id is compared within one manager only. It proves nothing to the store,
// where every acquisition has a unique value: two managers with the same
// owner id exclude each other like any others. An empty id means no owner,
// which is the default: then every acquisition stands for itself, and a
// goroutine that locks the same key twice waits for itself until its context
// ends.
func WithOwner(ctx context.Context, id string) context.Context {
	return context.WithValue(ctx, ownerKey{}, id)
}

// OwnerFromContext returns the owner that [WithOwner] put into the context, or "".
// A wrapper that several parties share needs it to keep their owners apart.
func OwnerFromContext(ctx context.Context) string {
	id, _ := ctx.Value(ownerKey{}).(string)
	return id
}

// newValue returns a value that no other acquisition has: the label for
// people, and at least 128 random bits.
func newValue(label string) string {
	return label + "/" + rand.Text()
}

// labelOf returns the label within a value.
func labelOf(value string) string {
	// The random part has no slash, but a label may have some.
	if i := strings.LastIndexByte(value, '/'); i >= 0 {
		return value[:i]
	}
	return value
}
