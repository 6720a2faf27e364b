package oncehttp

import (
	"math"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestRetryAfterForms(t *testing.T) {
	const none = -1
	now := time.Date(2026, time.November, 6, 8, 49, 37, 400_000_000, time.UTC)
	tests := []struct {
		name  string
		after string
		ms    string
		date  string
		want  time.Duration
	}{
		{name: "absent", want: none},
		{name: "seconds", after: "120", want: 120 * time.Second},
		{name: "zero", after: "0", want: 0},
		{name: "trimmed", after: " \t7 ", want: 7 * time.Second},
		{name: "leading zeros", after: "0000000000000000000000000000000003", want: 3 * time.Second},
		{name: "fraction is rounded up", after: "1.001", want: 2 * time.Second},
		{name: "empty fraction of zeros", after: "2.000", want: 2 * time.Second},

		{name: "empty", after: " ", want: none},
		{name: "negative", after: "-1", want: none},
		{name: "plus", after: "+1", want: none},
		{name: "exponent", after: "1e3", want: none},
		{name: "hexadecimal", after: "0x10", want: none},
		{name: "underscore", after: "1_000", want: none},
		{name: "unit", after: "5s", want: none},
		{name: "two points", after: "1.2.3", want: none},
		{name: "only a point", after: ".", want: none},
		{name: "no digits before", after: ".5", want: none},
		{name: "no digits after", after: "5.", want: none},
		{name: "digits of another script", after: "٣", want: none},
		{name: "infinity", after: "Inf", want: none},
		{name: "text", after: "soon", want: none},

		// time.Duration(9223372037) * time.Second is negative.
		{name: "first that overflows", after: "9223372037", want: math.MaxInt64},
		{name: "last that does not", after: "9223372036", want: 9223372036 * time.Second},
		{name: "beyond int64", after: "9223372036854775808", want: math.MaxInt64},
		{name: "beyond everything", after: strings.Repeat("9", 1000), want: math.MaxInt64},
		{name: "fraction at the end of the range", after: "9223372036.1", want: math.MaxInt64},

		{name: "IMF-fixdate", after: "Fri, 06 Nov 2026 08:50:37 GMT", date: "Fri, 06 Nov 2026 08:49:37 GMT", want: time.Minute},
		{name: "RFC 850", after: "Friday, 06-Nov-26 08:50:37 GMT", date: "Fri, 06 Nov 2026 08:49:37 GMT", want: time.Minute},
		{name: "asctime", after: "Fri Nov  6 08:50:37 2026", date: "Fri, 06 Nov 2026 08:49:37 GMT", want: time.Minute},
		{name: "the server's clock is years behind", after: "Thu, 01 Jan 1970 00:00:09 GMT", date: "Thu, 01 Jan 1970 00:00:04 GMT", want: 5 * time.Second},
		{name: "the server's clock is years ahead", after: "Fri, 06 Nov 2099 08:50:37 GMT", date: "Fri, 06 Nov 2099 08:50:07 GMT", want: 30 * time.Second},
		{name: "Date is trimmed, in another form", after: "Fri, 06 Nov 2026 08:50:37 GMT", date: " Friday, 06-Nov-26 08:50:36 GMT\t", want: time.Second},
		{name: "no Date: since now, rounded up", after: "Fri, 06 Nov 2026 08:49:39 GMT", want: 2 * time.Second},
		{name: "unreadable Date: since now, rounded up", after: "Fri, 06 Nov 2026 08:49:39 GMT", date: "today", want: 2 * time.Second},
		{name: "date is that of the response", after: "Fri, 06 Nov 2026 08:49:37 GMT", date: "Fri, 06 Nov 2026 08:49:37 GMT", want: 0},
		{name: "date has passed", after: "Fri, 06 Nov 2026 08:49:36 GMT", date: "Fri, 06 Nov 2026 08:49:37 GMT", want: none},
		{name: "date has passed just now", after: "Fri, 06 Nov 2026 08:49:37 GMT", want: none},
		{name: "date beyond the range", after: "Fri, 31 Dec 9999 23:59:59 GMT", date: "Fri, 06 Nov 2026 08:49:37 GMT", want: math.MaxInt64},
		{name: "no date", after: "Fri, 99 Nov 2026 08:49:37 GMT", want: none},

		{name: "milliseconds", ms: "1500", want: 1500 * time.Millisecond},
		{name: "milliseconds are trimmed", ms: " 20 ", want: 20 * time.Millisecond},
		{name: "fraction of a millisecond is rounded up", ms: "20.5", want: 21 * time.Millisecond},
		{name: "milliseconds beyond the range", ms: "9223372036855", want: math.MaxInt64},
		{name: "milliseconds win", ms: "1500", after: "2", want: 1500 * time.Millisecond},
		{name: "milliseconds win although shorter", ms: "0", after: "60", want: 0},
		{name: "unreadable milliseconds do not win", ms: "-5", after: "2", want: 2 * time.Second},
		{name: "milliseconds are no date", ms: "Fri, 06 Nov 2026 08:50:37 GMT", want: none},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := http.Header{}
			for name, value := range map[string]string{"Retry-After": tt.after, "Retry-After-Ms": tt.ms, "Date": tt.date} {
				if value != "" {
					h.Set(name, value)
				}
			}
			got, ok := retryAfter(h, now)
			if !ok {
				got = none
			}
			if got != tt.want {
				t.Errorf("%v, %v; want %v", got, ok, tt.want)
			}
		})
	}
}

func TestRetryAfterTakesTheLongestOfSeveral(t *testing.T) {
	h := http.Header{"Retry-After": {"3", "-9", "120", "later", "7"}}
	if got, ok := retryAfter(h, time.Time{}); !ok || got != 2*time.Minute {
		t.Errorf("%v, %v; want 2m0s", got, ok)
	}
	if got, ok := retryAfter(nil, time.Time{}); ok {
		t.Errorf("no header: %v", got)
	}
}

func FuzzRetryAfter(f *testing.F) {
	f.Add("120", "", "", int64(0))
	f.Add("9223372037", "1500", "", int64(1))
	f.Add("Fri, 06 Nov 2026 08:50:37 GMT", "", "Fri, 06 Nov 2026 08:49:37 GMT", int64(1794000000))
	f.Add("Friday, 06-Nov-26 08:50:37 GMT", "-1", "Fri Nov  6 08:49:37 2026", int64(-1<<62))
	f.Add("-0", "0.00000000000000000001", "9", int64(1<<62))
	f.Fuzz(func(t *testing.T, after, ms, date string, now int64) {
		h := http.Header{"Retry-After": {after}, "Retry-After-Ms": {ms}, "Date": {date}}
		d, ok := retryAfter(h, time.Unix(now, 999_999_999))
		if d < 0 || !ok && d != 0 {
			t.Fatalf("%d, %v", d, ok)
		}
		if _, readable := parseDecimal(strings.TrimSpace(ms), time.Millisecond); readable {
			return
		}
		if n, err := strconv.ParseUint(strings.TrimSpace(after), 10, 64); err == nil {
			want := time.Duration(math.MaxInt64)
			if n <= math.MaxInt64/uint64(time.Second) {
				want = time.Duration(n) * time.Second
			}
			if !ok || d != want {
				t.Fatalf("%d, %v; want %d", d, ok, want)
			}
		}
	})
}
