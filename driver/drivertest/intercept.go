package drivertest

import (
	"context"

	"github.com/go-dlm/dlm/driver"
)

// Hooks replaces methods of a backend. A nil field passes the call on.
type Hooks struct {
	Acquire      func(ctx context.Context, req driver.Request) (driver.Lease, error)
	Extend       func(ctx context.Context, batch []driver.Renewal)
	Release      func(ctx context.Context, lease driver.Lease) error
	Properties   func() driver.Properties
	Close        func() error
	Listen       func(ctx context.Context, manager string, handle func(driver.Event)) error
	Inspect      func(ctx context.Context, key string) (driver.KeyInfo, error)
	List         func(ctx context.Context, prefix, after string, limit int) ([]driver.KeyInfo, error)
	ForceRelease func(ctx context.Context, key string, token int64) ([]driver.HolderInfo, error)
}

// Intercept returns a backend that calls the hooks in the place of b's own
// methods. It has the optional interfaces that b has, as [driver.As] finds
// them: hooks for an interface that b does not have are never called.
func Intercept(b driver.Backend, h Hooks) driver.Backend {
	var out driver.Backend = &intercepted{Backend: b, hooks: h}
	if n, ok := driver.As[driver.Notifier](b); ok {
		out = &withNotifier{Backend: out, Notifier: n, listen: h.Listen}
	}
	if i, ok := driver.As[driver.Inspector](b); ok {
		out = &withInspector{Backend: out, Inspector: i, inspect: h.Inspect, list: h.List}
	}
	if f, ok := driver.As[driver.Forcer](b); ok {
		out = &withForcer{Backend: out, Forcer: f, force: h.ForceRelease}
	}
	return out
}

// Hidden lists the optional interfaces that [Hide] takes away.
type Hidden struct {
	Notifier, Inspector, Forcer bool
}

// Hide returns b without some of its optional interfaces.
func Hide(b driver.Backend, hidden Hidden) driver.Backend {
	var out driver.Backend = opaque{b}
	if n, ok := driver.As[driver.Notifier](b); ok && !hidden.Notifier {
		out = &withNotifier{Backend: out, Notifier: n}
	}
	if i, ok := driver.As[driver.Inspector](b); ok && !hidden.Inspector {
		out = &withInspector{Backend: out, Inspector: i}
	}
	if f, ok := driver.As[driver.Forcer](b); ok && !hidden.Forcer {
		out = &withForcer{Backend: out, Forcer: f}
	}
	return out
}

// opaque has no Unwrap method, so that nothing but the contract shows through.
type opaque struct{ driver.Backend }

type intercepted struct {
	driver.Backend
	hooks Hooks
}

func (i *intercepted) Unwrap() driver.Backend { return i.Backend }

func (i *intercepted) Acquire(ctx context.Context, req driver.Request) (driver.Lease, error) {
	if i.hooks.Acquire != nil {
		return i.hooks.Acquire(ctx, req)
	}
	return i.Backend.Acquire(ctx, req)
}

func (i *intercepted) Extend(ctx context.Context, batch []driver.Renewal) {
	if i.hooks.Extend != nil {
		i.hooks.Extend(ctx, batch)
		return
	}
	i.Backend.Extend(ctx, batch)
}

func (i *intercepted) Release(ctx context.Context, lease driver.Lease) error {
	if i.hooks.Release != nil {
		return i.hooks.Release(ctx, lease)
	}
	return i.Backend.Release(ctx, lease)
}

func (i *intercepted) Properties() driver.Properties {
	if i.hooks.Properties != nil {
		return i.hooks.Properties()
	}
	return i.Backend.Properties()
}

func (i *intercepted) Close() error {
	if i.hooks.Close != nil {
		return i.hooks.Close()
	}
	return i.Backend.Close()
}

// The optional interfaces are layers of their own, one upon the other, so that
// each is there only if it shall be.

type withNotifier struct {
	driver.Backend
	driver.Notifier
	listen func(context.Context, string, func(driver.Event)) error
}

func (w *withNotifier) Unwrap() driver.Backend { return w.Backend }

func (w *withNotifier) Listen(ctx context.Context, manager string, handle func(driver.Event)) error {
	if w.listen != nil {
		return w.listen(ctx, manager, handle)
	}
	return w.Notifier.Listen(ctx, manager, handle)
}

type withInspector struct {
	driver.Backend
	driver.Inspector
	inspect func(context.Context, string) (driver.KeyInfo, error)
	list    func(context.Context, string, string, int) ([]driver.KeyInfo, error)
}

func (w *withInspector) Unwrap() driver.Backend { return w.Backend }

func (w *withInspector) Inspect(ctx context.Context, key string) (driver.KeyInfo, error) {
	if w.inspect != nil {
		return w.inspect(ctx, key)
	}
	return w.Inspector.Inspect(ctx, key)
}

func (w *withInspector) List(ctx context.Context, prefix, after string, limit int) ([]driver.KeyInfo, error) {
	if w.list != nil {
		return w.list(ctx, prefix, after, limit)
	}
	return w.Inspector.List(ctx, prefix, after, limit)
}

type withForcer struct {
	driver.Backend
	driver.Forcer
	force func(context.Context, string, int64) ([]driver.HolderInfo, error)
}

func (w *withForcer) Unwrap() driver.Backend { return w.Backend }

func (w *withForcer) ForceRelease(ctx context.Context, key string, token int64) ([]driver.HolderInfo, error) {
	if w.force != nil {
		return w.force(ctx, key, token)
	}
	return w.Forcer.ForceRelease(ctx, key, token)
}
