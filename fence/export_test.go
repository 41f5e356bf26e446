package fence

import (
	"context"
	"io/fs"
)

// WriteFileUntil is WriteFile that stops where at returns an error, as it would if
// the process died there.
func WriteFileUntil(
	ctx context.Context, path string, data []byte, perm fs.FileMode, token int64, at func(point string) error,
) error {
	w := fileWriter{path: path, perm: perm, at: at}
	return w.write(ctx, data, token)
}
