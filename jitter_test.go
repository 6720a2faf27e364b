package oncehttp

import (
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
	"time"
)

func seeded(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 0)) }

// Sources of the ends of the range.
func least(int64) int64  { return 0 }
func most(n int64) int64 { return n - 1 }

func TestJitterReachesBothEndsOfItsRange(t *testing.T) {
	const base, ceiling = 500 * time.Millisecond, 30 * time.Second
	for n, want := range []time.Duration{
		base, 1 * time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second, 16 * time.Second, ceiling, ceiling,
	} {
		if got := fullJitter(n, base, ceiling, most); got != want {
			t.Errorf("retry %d: at most %v, want %v", n, got, want)
		}
		if got := fullJitter(n, base, ceiling, least); got != 0 {
			t.Errorf("retry %d: at least %v, want 0", n, got)
		}
	}
}

func TestJitterOfNothingIsNothing(t *testing.T) {
	never := func(int64) int64 { t.Error("rnd called"); return 0 }
	for _, c := range [][2]time.Duration{{0, time.Second}, {-1, time.Second}, {time.Second, 0}, {time.Second, -1}, {0, 0}} {
		if got := fullJitter(3, c[0], c[1], never); got != 0 {
			t.Errorf("base %v, ceiling %v: %v, want 0", c[0], c[1], got)
		}
	}
}

func TestJitterCeilingIsExactForAnyInput(t *testing.T) {
	r := seeded(1)
	for range 20_000 {
		n := r.IntN(140) - 5
		base := time.Duration(r.Int64() >> r.IntN(63))
		ceiling := time.Duration(r.Int64() >> r.IntN(63))
		checkJitter(t, n, base, ceiling, most)
		checkJitter(t, n, base, ceiling, r.Int64N)
	}
	for _, n := range []int{math.MinInt, -1, 0, 1, 62, 63, 64, math.MaxInt} {
		checkJitter(t, n, 1, math.MaxInt64, most)
		checkJitter(t, n, math.MaxInt64, math.MaxInt64, r.Int64N)
	}
}

func FuzzJitter(f *testing.F) {
	f.Add(0, int64(500*time.Millisecond), int64(30*time.Second), uint64(1))
	f.Add(math.MaxInt, int64(1), int64(math.MaxInt64), uint64(2))
	f.Add(-1, int64(-1), int64(0), uint64(3))
	f.Fuzz(func(t *testing.T, n int, base, ceiling int64, seed uint64) {
		checkJitter(t, n, time.Duration(base), time.Duration(ceiling), seeded(seed).Int64N)
	})
}

// checkJitter compares with the formula in numbers of any size.
func checkJitter(t *testing.T, n int, base, ceiling time.Duration, rnd func(int64) int64) {
	t.Helper()
	want := new(big.Int)
	if base > 0 && ceiling > 0 {
		want.Lsh(big.NewInt(int64(base)), uint(min(max(n, 0), 200)))
		if c := big.NewInt(int64(ceiling)); want.Cmp(c) > 0 {
			want = c
		}
	}
	if got := backoffCeiling(n, base, ceiling); int64(got) != want.Int64() {
		t.Fatalf("ceiling of n=%d base=%d ceiling=%d is %d, want %v", n, base, ceiling, got, want)
	}
	if got := fullJitter(n, base, ceiling, rnd); got < 0 || int64(got) > want.Int64() {
		t.Fatalf("n=%d base=%d ceiling=%d: %d is not in [0, %v]", n, base, ceiling, got, want)
	}
}

func TestJitterIsUniform(t *testing.T) {
	const samples, bins, ceiling = 100_000, 20, 4 * time.Second
	r := seeded(2)
	var count [bins]int
	for range samples {
		d := fullJitter(3, 500*time.Millisecond, 30*time.Second, r.Int64N)
		count[min(int64(d)*bins/int64(ceiling), bins-1)]++
	}
	// Of a binomial distribution, five standard deviations.
	expected := float64(samples) / bins
	within := 5 * math.Sqrt(expected*(1-1.0/bins))
	for i, n := range count {
		if math.Abs(float64(n)-expected) > within {
			t.Errorf("bin %d has %d samples, want %.0f ± %.0f", i, n, expected, within)
		}
	}
}
