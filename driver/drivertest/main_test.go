package drivertest

import "testing"

func TestMain(m *testing.M) { Main(m) }

func BenchmarkMemory(b *testing.B) {
	Bench(b, func(b *testing.B) *Harness { return overMemory(b, nil) })
}
