package fence_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/fence"
	"github.com/go-dlm/dlm/memlock"
)

func ExampleMemory() {
	ctx := context.Background()
	guard, err := fence.NewMemory(nil)
	if err != nil {
		log.Fatal(err)
	}
	write := func(token int64, text string) {
		err := guard.Do(ctx, "payment:42", token, func(context.Context) error {
			fmt.Println("written:", text)
			return nil
		})
		var stale *fence.StaleError
		if errors.As(err, &stale) {
			fmt.Printf("%d is refused, as %d was here\n", stale.Token, stale.Highest)
		}
	}
	write(7, "by the first holder")
	write(7, "by the first holder, again")
	write(8, "by the second holder")
	write(7, "by the first holder, late")
	// Output:
	// written: by the first holder
	// written: by the first holder, again
	// written: by the second holder
	// 7 is refused, as 8 was here
}

// The check is the first statement of the transaction that writes. (It needs a
// database, so it is compiled only; examples/payment is a whole program.)
//
//lint:ignore testableexamples it needs a database
func ExampleSQL_Check() {
	guard, err := fence.NewSQL(fence.PostgreSQL, nil)
	if err != nil {
		log.Fatal(err)
	}
	charge := func(ctx context.Context, db *sql.DB, payment string) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		lock := dlm.LockFromContext(ctx)
		if err := guard.Check(ctx, tx, lock.Key, lock.Token); err != nil {
			return err // matches fence.ErrStale if the lock is somebody else's by now
		}
		if _, err := tx.ExecContext(ctx, "UPDATE payment SET state = 'charged' WHERE id = $1", payment); err != nil {
			return err
		}
		return tx.Commit()
	}
	_ = charge // it is called within dlm.WithDistributedLock
}

// A row with a fence column of its own needs neither guard nor table. (It needs a
// database, so it is compiled only.)
//
//lint:ignore testableexamples it needs a database
func ExampleAffected() {
	write := func(ctx context.Context, db *sql.DB, stock int, item string, lock *dlm.Lock) error {
		result, err := db.ExecContext(ctx,
			"UPDATE item SET stock = $1, fence = $2 WHERE id = $3 AND fence <= $2", stock, lock.Token, item)
		if err != nil {
			return err
		}
		n, err := result.RowsAffected()
		if err != nil {
			return err
		}
		return fence.Affected(item, lock.Token, n)
	}
	_ = write
}

func ExampleHandler() {
	ctx := context.Background()
	guard, err := fence.NewMemory(nil)
	if err != nil {
		log.Fatal(err)
	}
	save := http.HandlerFunc(func(http.ResponseWriter, *http.Request) { fmt.Println("saved") })
	server := httptest.NewServer(fence.Handler(guard, save, &fence.HandlerOptions{
		// The resource is what the path says, whatever the client says.
		Resource: func(r *http.Request) string { return r.URL.Path[1:] },
	}))
	defer server.Close()

	m, err := memlock.NewLockManager(memlock.NewStore(), nil, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close(ctx)
	client := &http.Client{Transport: &fence.Transport{}}
	defer client.CloseIdleConnections()
	err = dlm.WithDistributedLock(ctx, m, "account:42", 30*time.Second, func(ctx context.Context) error {
		r, err := http.NewRequestWithContext(ctx, http.MethodPut, server.URL+"/account:42", http.NoBody)
		if err != nil {
			return err
		}
		resp, err := client.Do(r)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if err := fence.ResponseError(resp); err != nil {
			return err
		}
		fmt.Println(resp.Status)
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output:
	// saved
	// 200 OK
}

func ExampleWriteFile() {
	dir, err := os.MkdirTemp("", "dlm-example-")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "state")
	for _, w := range []struct {
		token int64
		text  string
	}{{7, "first"}, {8, "second"}, {7, "first, late"}} {
		err := fence.WriteFile(context.Background(), path, []byte(w.text), 0o600, w.token)
		if errors.Is(err, errors.ErrUnsupported) {
			return // no file locks on this system
		}
		fmt.Printf("%s: stale: %v\n", w.text, errors.Is(err, fence.ErrStale))
	}
	data, err := os.ReadFile(path)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("the file has:", string(data))
	// Output:
	// first: stale: false
	// second: stale: false
	// first, late: stale: true
	// the file has: second
}
