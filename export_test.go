package oncehttp

import (
	"fmt"
	"net/http"
	"runtime/debug"
	"slices"
	"strings"
	"time"
)

// What tests outside of the package may set.

// WithClock returns options whose client reads the wall clock by now.
func (o Options) WithClock(now func() time.Time) *Options { o.now = now; return &o }

// WithRand returns options whose client draws by rnd, uniform in [0, n).
func (o Options) WithRand(rnd func(n int64) int64) *Options { o.rnd = rnd; return &o }

// LeastWait is the shortest wait before a retry.
const LeastWait = leastWait

// Defaults are the defaults in force, in the words of docs/defaults.md.
func Defaults() map[string]string {
	o, err := (*Options)(nil).withDefaults()
	if err != nil {
		panic(err)
	}
	budget, breaker, p := o.Budget.withDefaults(), o.Breaker.withDefaults(), &Provider{}
	bytes := func(n int64) string { return fmt.Sprint(n>>20, " MiB") }
	lastAttempt := func(p *Provider) string { return inWords(p.resendFor(o.attemptTimeout(p))) }
	none := func(f float64) string {
		if f == 0 {
			return "none"
		}
		return fmt.Sprint(f)
	}
	var methods []string
	for _, m := range []string{"GET", "POST", "PUT", "PATCH", "DELETE"} {
		if p.keys(m) {
			methods = append(methods, m)
		}
	}
	var replayed strings.Builder
	for _, name := range []string{"Idempotent-Replayed", "Idempotency-Replayed"} {
		if p.replayed(http.Header{name: {"true"}}) {
			replayed.WriteString(name)
		}
	}
	burst := newLimits(nil).newHost("", hostConfig{Rate: 7}).gate.rate.Burst()
	return map[string]string{
		"MaxAttempts":             fmt.Sprint(o.MaxAttempts),
		"AttemptTimeout":          inWords(o.attemptTimeout(p)),
		"Stripe.AttemptTimeout":   inWords(o.attemptTimeout(&Stripe)),
		"StripeV2.AttemptTimeout": inWords(o.attemptTimeout(&StripeV2)),
		"Provider.AttemptTimeout": inWords(o.attemptTimeout(p)),
		"BackoffBase":             inWords(o.BackoffBase),
		"BackoffCap":              inWords(o.BackoffCap),
		"MaxRetryAfter":           inWords(o.MaxRetryAfter),
		"Unlisted":                map[Unlisted]string{KeyUnlisted: "KeyUnlisted", OnlyGivenKeys: "OnlyGivenKeys"}[o.Unlisted],

		"Provider.Window":             inWords(p.window()),
		"Stripe.Window":               inWords(Stripe.window()),
		"StripeV2.Window":             inWords(StripeV2.window()),
		"last attempt, Stripe":        lastAttempt(&Stripe),
		"last attempt, 24 h and 30 s": lastAttempt(p),

		"Budget.Ratio":         fmt.Sprint(budget.Ratio),
		"Budget.Window":        inWords(budget.Window),
		"Budget.MinPerSecond":  fmt.Sprint(budget.MinPerSecond),
		"Budget.Burst":         fmt.Sprint(budget.Burst),
		"Breaker.Window":       inWords(breaker.Window),
		"Breaker.MinRequests":  fmt.Sprint(breaker.MinRequests),
		"Breaker.FailureRatio": fmt.Sprint(breaker.FailureRatio),
		"Breaker.Consecutive":  fmt.Sprint(breaker.Consecutive),
		"Breaker.OpenFor":      inWords(breaker.OpenFor),
		"RateLimit":            none(o.RateLimit),
		"Burst":                fmt.Sprint(burst/7, " s worth"),

		"MaxBodyBytes":             bytes(o.MaxBodyBytes),
		"MaxResponseBytes":         bytes(o.MaxResponseBytes),
		"answer kept after Ack":    inWords(keepAnswer),
		"outcome kept, chosen key": inWords(keepGivenKey),
		"outcome kept, fresh key":  fmt.Sprint(keepFreshKeys, " windows"),
		"wait for the file's lock": inWords(lockWait),

		"operations at once, per origin":      fmt.Sprint(resumeWorkers),
		"rest between passes of Run":          inWords(runEvery),
		"rest of an operation without answer": inWords(postponeBase) + " to " + inWords(postponeCap),
		"poison":                              fmt.Sprint(poisonLimit, " deaths"),
		"clock behind":                        inWords(clockBehind),

		"Provider.Header":         p.header(),
		"Provider.Methods":        strings.Join(methods, ", "),
		"Provider.MaxKey":         fmt.Sprint(p.maxKey()),
		"Provider.ReplayedHeader": replayed.String(),
	}
}

// inWords writes a duration as the documents do.
func inWords(d time.Duration) string {
	var words []string
	for _, u := range []struct {
		of   time.Duration
		name string
	}{{24 * time.Hour, "d"}, {time.Hour, "h"}, {time.Minute, "min"}, {time.Second, "s"}, {time.Millisecond, "ms"}} {
		if u.name == "d" && d < 48*time.Hour || u.name == "min" && d%time.Minute != 0 && d < 2*time.Minute {
			continue
		}
		if n := d / u.of; n > 0 {
			words = append(words, fmt.Sprint(int64(n), " ", u.name))
			d %= u.of
		}
	}
	return strings.Join(words, " ")
}

// InWords writes a duration as the documents do.
var InWords = inWords

// FullJitter is the backoff.
var FullJitter = fullJitter

// RaceEnabled reports whether the test runs under the race detector, which makes
// it 10 times as long.
func RaceEnabled() bool {
	info, _ := debug.ReadBuildInfo()
	return info != nil && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}
