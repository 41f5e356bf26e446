package sqlitelock

import "github.com/go-dlm/dlm"

// NewLockManager returns a manager over a file. It opens the file as [New]
// does; Close of the manager closes it. A nil cfg or nil opts mean the
// defaults.
func NewLockManager(path string, cfg *dlm.LockConfig, opts *Options) (*dlm.Manager, error) {
	b, err := New(path, opts)
	if err != nil {
		return nil, err
	}
	return dlm.NewManager(b, cfg)
}
