package oncehttp

import (
	"math"
	"time"
)

// fullJitter returns how long to wait before retry n, counted from 0: uniformly
// at random in [0, min(ceiling, base·2ⁿ)], both ends included. The ceiling is
// applied before the jitter, so that late retries spread over the whole range
// instead of crowding at its end.
//
// rnd(n) is uniform in [0, n), as rand.Int64N of math/rand/v2 is; it is called
// once, or not at all if the range is empty. A negative n counts as 0, and a
// base or ceiling that is not positive means no wait.
//
// This is "Full Jitter" of the AWS Architecture Blog, "Exponential Backoff And
// Jitter" (2015), where it needed the fewest calls of the variants compared.
func fullJitter(n int, base, ceiling time.Duration, rnd func(n int64) int64) time.Duration {
	return uniform(backoffCeiling(n, base, ceiling), rnd)
}

// backoffCeiling returns min(ceiling, base·2ⁿ), without overflow for any n.
func backoffCeiling(n int, base, ceiling time.Duration) time.Duration {
	if base <= 0 || ceiling <= 0 {
		return 0
	}
	n = max(n, 0)
	// base·2ⁿ > ceiling exactly when base > ⌊ceiling/2ⁿ⌋, which is 0 for large n.
	if base > ceiling>>n {
		return ceiling
	}
	return base << n
}

// uniform returns a duration uniformly at random in [0, most], 0 if most is not
// positive.
func uniform(most time.Duration, rnd func(n int64) int64) time.Duration {
	if most <= 0 {
		return 0
	}
	if most == math.MaxInt64 { // most+1 would overflow
		return time.Duration(rnd(math.MaxInt64))
	}
	return time.Duration(rnd(int64(most) + 1))
}
