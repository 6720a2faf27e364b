package oncehttp

import "time"

// What tests outside of the package may set.

// WithClock returns options whose client reads the wall clock by now.
func (o Options) WithClock(now func() time.Time) *Options { o.now = now; return &o }

// WithRand returns options whose client draws by rnd, uniform in [0, n).
func (o Options) WithRand(rnd func(n int64) int64) *Options { o.rnd = rnd; return &o }
