package sqlitelock_test

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"
)

func TestFair(t *testing.T) {
	path := file(t)
	var wg sync.WaitGroup
	end := time.Now().Add(5 * time.Second)
	var mu sync.Mutex
	for i := range 4 {
		b := open(t, path, nil)
		n := 16
		if i == 3 { n = 1 }
		var all []time.Duration
		var bw sync.WaitGroup
		for j := range n {
			bw.Go(func() {
				for time.Now().Before(end) {
					t0 := time.Now()
					l := acquire(t, b, ask(fmt.Sprint(i, j), "o"))
					release(t, b, l)
					mu.Lock()
					all = append(all, time.Since(t0))
					mu.Unlock()
				}
			})
		}
		wg.Go(func() {
			bw.Wait()
			slices.Sort(all)
			t.Logf("backend %d (%d callers): %d pairs, p50 %v p99 %v max %v", i, n, len(all), all[len(all)/2], all[len(all)*99/100], all[len(all)-1])
		})
	}
	wg.Wait()
}
