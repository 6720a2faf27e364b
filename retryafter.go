package oncehttp

import (
	"math"
	"net/http"
	"strings"
	"time"
)

// maxDuration is what a wait beyond the range of a Duration is cut to: 292 years.
const maxDuration = time.Duration(math.MaxInt64)

// retryAfter returns how long the server asked to wait, counted from the
// arrival of a response with the header h at the time now. It reports false if
// the server did not ask, or not in a way that can be read.
//
// The result is a minimum: it is never earlier than what was said, rounded up
// to the unit of its form, and never negative. Callers add jitter on top.
//
//   - Retry-After-Ms, in milliseconds, wins where both are readable: it is the
//     more precise form of the same statement. (Not standardized; some API
//     gateways and SDKs use it.)
//   - Retry-After (RFC 9110, 10.2.3) in seconds, or as one of the three forms
//     of an HTTP date. A date is measured against the response's own Date, so
//     that the difference of the two clocks does not matter; against now if
//     there is no readable Date.
//
// Numbers may have a fraction, which the RFC does not allow but servers send.
// Numbers and dates beyond the range of a Duration become its largest value.
// Negative numbers, dates that have passed and anything else are ignored. Of
// several fields of one name, the longest wait counts.
func retryAfter(h http.Header, now time.Time) (time.Duration, bool) {
	if d, ok := longestOf(h.Values("Retry-After-Ms"), parseMilliseconds); ok {
		return d, true
	}
	return longestOf(h.Values("Retry-After"), func(v string) (time.Duration, bool) {
		if d, ok := parseDecimal(v, time.Second); ok {
			return d, true
		}
		return untilDate(v, h, now)
	})
}

func parseMilliseconds(v string) (time.Duration, bool) { return parseDecimal(v, time.Millisecond) }

// longestOf returns the longest duration that parse can read from the trimmed
// values.
func longestOf(values []string, parse func(string) (time.Duration, bool)) (d time.Duration, ok bool) {
	for _, v := range values {
		if one, readable := parse(strings.TrimSpace(v)); readable {
			d, ok = max(d, one), true
		}
	}
	return d, ok
}

// untilDate returns the time from the response's Date, or from now, to the HTTP
// date v. HTTP dates are cut to the second, and so Date is never later than the
// moment it describes; measured from now, the wait is rounded up.
func untilDate(v string, h http.Header, now time.Time) (time.Duration, bool) {
	at, err := http.ParseTime(v)
	if err != nil {
		return 0, false
	}
	from, err := http.ParseTime(strings.TrimSpace(h.Get("Date")))
	if err != nil {
		from = now
	}
	d := at.Sub(from) // saturates
	if d < 0 {
		return 0, false
	}
	if rest := d % time.Second; rest > 0 {
		if d > maxDuration-time.Second {
			return maxDuration, true
		}
		d += time.Second - rest
	}
	return d, true
}

// parseDecimal reads digits with an optional fraction as a number of units,
// rounded up to whole units and cut to the range of a Duration. There is no
// sign and no exponent.
func parseDecimal(v string, unit time.Duration) (time.Duration, bool) {
	whole, fraction, dotted := strings.Cut(v, ".")
	if !isDigits(whole) || dotted && !isDigits(fraction) {
		return 0, false
	}
	most := int64(maxDuration / unit)
	var n int64
	for _, c := range []byte(whole) {
		if digit := int64(c - '0'); n > (most-digit)/10 {
			return maxDuration, true
		} else {
			n = n*10 + digit
		}
	}
	if strings.Trim(fraction, "0") != "" {
		if n == most {
			return maxDuration, true
		}
		n++
	}
	return time.Duration(n) * unit, true
}

// isDigits reports whether s is one or more ASCII digits.
func isDigits(s string) bool {
	for _, c := range []byte(s) {
		if c < '0' || c > '9' {
			return false
		}
	}
	return s != ""
}
