package promdlm_test

import (
	"context"
	"fmt"
	"log"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/go-dlm/dlm"
	"github.com/go-dlm/dlm/memlock"
	"github.com/go-dlm/dlm/observe/promdlm"
)

func Example() {
	ctx := context.Background()
	metrics, err := promdlm.New(&promdlm.Options{
		// "payment:42" counts as "payment".
		KeyClass: func(key string) string {
			class, _, _ := strings.Cut(key, ":")
			return class
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(metrics)

	m, err := memlock.NewLockManager(memlock.NewStore(), &dlm.LockConfig{Observer: metrics}, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close(ctx)
	if _, err := m.AcquireLock(ctx, "payment:42", 30*time.Second); err != nil {
		log.Fatal(err)
	}

	families, err := registry.Gather()
	if err != nil {
		log.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != "dlm_locks_held" {
			continue
		}
		for _, metric := range f.GetMetric() {
			fmt.Println(f.GetName(), "=", metric.GetGauge().GetValue())
			for _, label := range metric.GetLabel() {
				fmt.Println(" ", label.GetName(), label.GetValue())
			}
		}
	}
	// Output:
	// dlm_locks_held = 1
	//   backend memory
	//   class payment
	//   mode exclusive
}
