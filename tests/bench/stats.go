package main

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// percentile returns the smallest duration that at least the share q of all
// are not above, in microseconds. Without durations it is NaN, which is shown
// and recorded as "not measured".
func percentile(durations []time.Duration, q float64) float64 {
	if len(durations) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(durations))
	i := int(math.Ceil(q*float64(len(sorted)))) - 1
	return micros(sorted[min(max(i, 0), len(sorted)-1)])
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// median returns the middle of the values, or the mean of the two in the
// middle. It is NaN without values.
func median(values []float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(values))
	half := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[half]
	}
	return (sorted[half-1] + sorted[half]) / 2
}

// jain is Jain's index of fairness: 1 if all have the same share, 1/n if one
// of n has everything. It is NaN if nobody has anything.
func jain(shares []int) float64 {
	var sum, squares float64
	for _, s := range shares {
		sum += float64(s)
		squares += float64(s) * float64(s)
	}
	return sum * sum / (float64(len(shares)) * squares)
}

// inversions counts the pairs that stand the wrong way round: none in a sorted
// list, n*(n-1)/2 in one that is reversed, about half of that in a shuffled one.
func inversions[T cmp.Ordered](list []T) int {
	n, _ := mergeCount(slices.Clone(list))
	return n
}

func mergeCount[T cmp.Ordered](list []T) (int, []T) {
	if len(list) < 2 {
		return 0, list
	}
	n, left := mergeCount(list[:len(list)/2])
	m, right := mergeCount(list[len(list)/2:])
	n += m
	merged := make([]T, 0, len(list))
	for len(left) > 0 && len(right) > 0 {
		if right[0] < left[0] {
			n += len(left)
			merged, right = append(merged, right[0]), right[1:]
		} else {
			merged, left = append(merged, left[0]), left[1:]
		}
	}
	return n, slices.Concat(merged, left, right)
}

// per divides, and returns NaN rather than an infinity if there is nothing to
// divide by.
func per(x, by float64) float64 {
	if by == 0 {
		return math.NaN()
	}
	return x / by
}
