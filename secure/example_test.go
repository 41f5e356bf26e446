package secure_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/memlock"
	"github.com/go-dlm/dlm/secure"
)

func ExampleNew() {
	m, err := memlock.NewLockManager(memlock.NewStore(), nil, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close(context.Background())

	s, err := secure.New(m, &secure.Policy{
		Prefix:    secure.OwnPrefix(":"), // "billing" may use "billing:..."
		MaxTTL:    time.Minute,
		MaxHold:   time.Hour,
		PerClient: secure.Limits{Rate: 50, Held: 1},
	})
	if err != nil {
		log.Fatal(err)
	}

	// The server's code does this when it knows who calls.
	ctx := secure.WithClient(context.Background(), "billing")

	lock, err := s.AcquireLock(ctx, "billing:42", 30*time.Second)
	if err != nil {
		log.Fatal(err)
	}
	_, err = s.AcquireLock(ctx, "billing:43", 30*time.Second)
	if denied, ok := errors.AsType[*secure.DeniedError](err); ok {
		fmt.Println(denied.Reason, denied.RetryAfter, errors.Is(err, secure.ErrQuota))
	}
	_, err = s.AcquireLock(ctx, "shipping:1", 30*time.Second)
	fmt.Println(err)
	_, err = s.AcquireLock(ctx, "billing:43", time.Hour)
	fmt.Println(errors.Is(err, dlm.ErrInvalid))

	if err := s.ReleaseLock(ctx, lock); err != nil {
		log.Fatal(err)
	}
	fmt.Println(s.Stats().Held)
	// Output:
	// held 1s true
	// secure: denied: acquire "shipping:1" for client "billing": the key must begin with "billing:" (Policy.Prefix)
	// true
	// 0
}
