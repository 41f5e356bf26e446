package pglock

import (
	"context"

	"github.com/go-dlm/dlm/driver"
)

// Check implements [driver.Checker].
func (b *backend) Check(ctx context.Context) ([]driver.Finding, error) {
	return nil, ctx.Err()
}
