package drivertest

import (
	"context"
	"errors"

	"github.com/go-dlm/dlm/driver"
)

var checkCases = []Case{{
	Name: "Backend/CheckTellsWhatToChange", Guarantee: "contract of Checker",
	Why: "a check that is silent, or that takes locks away, is worse than none",
	run: checkTellsWhatToChange,
}}

func checkTellsWhatToChange(e *env) {
	cl := e.open()
	checker, ok := driver.As[driver.Checker](cl.backend)
	if !ok {
		return // package dlm says that there is nothing to check
	}
	held := cl.grant(driver.Request{Key: "k", Owner: "a", TTL: e.long})
	for range 2 {
		findings, err := checker.Check(e.within(e.patience))
		if err != nil {
			e.fatalf("Check: %w", err)
		}
		if len(findings) == 0 {
			e.fatalf("Check found nothing, not even what is as it should be")
		}
		for _, f := range findings {
			if f.Check == "" || f.Detail == "" || f.Severity > driver.SeverityCritical {
				e.fatalf("a finding says too little: %+v", f)
			}
			if f.Severity >= driver.SeverityWarning && f.Fix == "" {
				e.fatalf("a finding does not say what to change: %+v", f)
			}
		}
	}
	cl.mustRelease(held)
	if in, ok := driver.As[driver.Inspector](cl.backend); ok {
		keys, err := in.List(e.within(e.patience), "", "", 0)
		if err != nil {
			e.fatalf("List: %w", err)
		}
		for _, info := range keys {
			e.fatalf("Check left %+v", info)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := checker.Check(ctx); !errors.Is(err, context.Canceled) {
		e.fatalf("Check with a context that has ended: %v, want context.Canceled to match", err)
	}
}
