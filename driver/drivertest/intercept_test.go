package drivertest

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/go-dlm/dlm/driver"
)

// marked is a backend with something of its own.
type marked struct{ driver.Backend }

func (m marked) Unwrap() driver.Backend { return m.Backend }
func (m marked) Mark() string           { return "mark" }

func TestInterceptKeepsOptionalInterfaces(t *testing.T) {
	for bits := range 8 {
		h := Hidden{Notifier: bits&1 != 0, Inspector: bits&2 != 0, Forcer: bits&4 != 0}
		t.Run(fmt.Sprintf("%+v", h), func(t *testing.T) {
			called := 0
			b := Intercept(marked{Hide(overMemory(t, nil).Open(t), h)}, Hooks{
				Listen: func(context.Context, string, func(driver.Event)) error {
					called++
					return nil
				},
				Inspect: func(context.Context, string) (driver.KeyInfo, error) {
					called++
					return driver.KeyInfo{}, nil
				},
				ForceRelease: func(context.Context, string, int64) ([]driver.HolderInfo, error) {
					called++
					return nil, nil
				},
			})
			b = Intercept(b, Hooks{}) // once more, with nothing to change
			ctx, want := t.Context(), 0
			n, ok := driver.As[driver.Notifier](b)
			if ok == h.Notifier {
				t.Errorf("has Notifier: %v", ok)
			}
			if ok {
				want++
				_ = n.Listen(ctx, "m", nil)
			}
			i, ok := driver.As[driver.Inspector](b)
			if ok == h.Inspector {
				t.Errorf("has Inspector: %v", ok)
			}
			if ok {
				want++
				_, _ = i.Inspect(ctx, "k")
				if _, err := i.List(ctx, "", "", 0); err != nil {
					t.Errorf("List, which has no hook: %v", err)
				}
			}
			f, ok := driver.As[driver.Forcer](b)
			if ok == h.Forcer {
				t.Errorf("has Forcer: %v", ok)
			}
			if ok {
				want++
				_, _ = f.ForceRelease(ctx, "k", 0)
			}
			if called != want {
				t.Errorf("%d hooks were called, want %d", called, want)
			}
			if m, ok := driver.As[interface{ Mark() string }](b); !ok || m.Mark() != "mark" {
				t.Error("what lies behind cannot be found")
			}
		})
	}
}

func TestInterceptReplacesMethods(t *testing.T) {
	boom := errors.New("boom")
	b := Intercept(overMemory(t, nil).Open(t), Hooks{
		Acquire: func(context.Context, driver.Request) (driver.Lease, error) { return driver.Lease{}, boom },
		Extend: func(_ context.Context, batch []driver.Renewal) {
			for i := range batch {
				batch[i].Err = boom
			}
		},
		Release:    func(context.Context, driver.Lease) error { return boom },
		Properties: func() driver.Properties { return driver.Properties{Name: "boom"} },
		Close:      func() error { return boom },
		List: func(context.Context, string, string, int) ([]driver.KeyInfo, error) {
			return nil, boom
		},
	})
	ctx := t.Context()
	batch := []driver.Renewal{{}}
	b.Extend(ctx, batch)
	i, _ := driver.As[driver.Inspector](b)
	for what, err := range map[string]error{
		"Acquire": second(b.Acquire(ctx, driver.Request{})),
		"Extend":  batch[0].Err,
		"Release": b.Release(ctx, driver.Lease{}),
		"Close":   b.Close(),
		"List":    second(i.List(ctx, "", "", 0)),
	} {
		if !errors.Is(err, boom) {
			t.Errorf("%s: %v, want the hook's answer", what, err)
		}
	}
	if name := b.Properties().Name; name != "boom" {
		t.Errorf("Properties names %q", name)
	}
}
