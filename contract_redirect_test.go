package oncehttp_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"slices"
	"strings"
	"testing"
)

// redirecting makes a handler that redirects the first request, with a body, and
// answers the others.
func redirecting(status int, location string) func(*trial, int, http.ResponseWriter, *http.Request) {
	return func(_ *trial, n int, w http.ResponseWriter, r *http.Request) {
		if n > 1 {
			io.WriteString(w, "arrived")
			return
		}
		if location != "" {
			w.Header().Set("Location", location)
		}
		w.WriteHeader(status)
		io.WriteString(w, "moved")
	}
}

func TestRedirectsAreThoseOfNetHTTP(t *testing.T) {
	noBody := edited(post, func(r *http.Request) { r.Body, r.GetBody, r.ContentLength = nil, nil, 0 })
	broken := edited(post, func(r *http.Request) { r.GetBody = func() (io.ReadCloser, error) { return nil, errBroken } })
	kinds := map[string]func(*trial) *http.Request{
		"GET": get, "HEAD": edited(get, func(r *http.Request) { r.Method = "HEAD" }), "DELETE": edited(get, func(r *http.Request) { r.Method = "DELETE" }),
		"POST": post, "PUT": put, "streaming": streaming, "no body": noBody, "broken GetBody": broken,
		"with headers": edited(post, func(r *http.Request) {
			r.Header = http.Header{
				"Authorization": {"Bearer x"}, "Www-Authenticate": {"x"}, "Cookie": {"a=1"}, "X-Own": {"1", "2"},
				"Content-Type": {"text/plain"}, "Content-Language": {"de"}, "Referer": {"http://first.example.com"},
			}
		}),
		"with userinfo": edited(get, func(r *http.Request) { r.URL.User = url.UserPassword("me", "secret") }),
		"with Host":     edited(get, func(r *http.Request) { r.Host = "virtual.example.com" }),
	}
	var clauses []clause
	for kind, newRequest := range kinds {
		for _, status := range []int{300, 301, 302, 303, 304, 305, 307, 308} {
			for place, location := range map[string]string{
				"relative": "next?x=1", "absolute": "http://a.example.com:80/next", "another host": "http://b.example.org/next",
				"a subdomain": "http://sub.a.example.com/", "https": "https://a.example.com/next", "missing": "", "invalid": "http://%zz/",
				"scheme": "ftp://a.example.com/", "with a fragment": "/next#frag", "with userinfo": "http://you:pw@a.example.com/",
			} {
				clauses = append(clauses, clause{
					name:  fmt.Sprintf("%d to %s, %s", status, place, kind),
					serve: redirecting(status, location), run: sends(newRequest),
				})
			}
		}
	}
	slices.SortFunc(clauses, func(a, b clause) int { return strings.Compare(a.name, b.name) })
	if testing.Short() { // one in 7, which is not a multiple of the kinds or the statuses
		kept := clauses[:0]
		for i := 0; i < len(clauses); i += 7 {
			kept = append(kept, clauses[i])
		}
		clauses = kept
	}
	fulfil(t, clauses)
}

func TestChainsOfRedirectsAreThoseOfNetHTTP(t *testing.T) {
	endless := func(_ *trial, n int, w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, fmt.Sprint("/", n), http.StatusTemporaryRedirect)
	}
	steps := func(steps ...string) func(*trial, int, http.ResponseWriter, *http.Request) {
		return func(_ *trial, n int, w http.ResponseWriter, r *http.Request) {
			if n > len(steps) {
				io.WriteString(w, "arrived")
				return
			}
			status, location, _ := strings.Cut(steps[n-1], " ")
			code := 0
			fmt.Sscan(status, &code)
			http.Redirect(w, r, location, code)
		}
	}
	checking := func(check func(x *trial, req *http.Request, via []*http.Request) error) func(*trial) {
		return func(x *trial) {
			x.hc.CheckRedirect = func(req *http.Request, via []*http.Request) error {
				var text []string
				for _, v := range via {
					text = append(text, fmt.Sprint(v.Method, " ", v.URL))
				}
				x.note("CheckRedirect", "%s, response %d %s, via %q", madeText(req), req.Response.StatusCode, chainText(req.Response, nil), text)
				return check(x, req, via)
			}
		}
	}
	follow := checking(func(*trial, *http.Request, []*http.Request) error { return nil })
	authorized := edited(post, func(r *http.Request) {
		r.Header.Set("Authorization", "Bearer x")
		r.Header.Set("Cookie", "a=1")
		r.Header.Set("Content-Type", "text/plain")
	})
	fulfil(t, []clause{
		{name: "endless, GET", serve: endless, run: sends(get)},
		{name: "endless, POST", serve: endless, run: sends(post)},
		{name: "there and back again", serve: steps("307 http://b.example.org/", "307 http://a.example.com/back"), config: follow, run: sends(authorized)},
		{name: "https and back", serve: steps("301 https://a.example.com/s", "301 http://a.example.com/back", "302 /last"), config: follow, run: sends(get)},
		{name: "307, then 303, then 307", serve: steps("307 /1", "303 /2", "307 /3"), config: follow, run: sends(authorized)},
		{name: "CheckRedirect that refuses", serve: steps("302 /1"), config: checking(func(*trial, *http.Request, []*http.Request) error { return errBroken }), run: sends(post)},
		{name: "CheckRedirect that refuses the second", serve: steps("302 /1", "302 /2"), config: checking(func(_ *trial, _ *http.Request, via []*http.Request) error {
			if len(via) > 1 {
				return errBroken
			}
			return nil
		}), run: sends(get)},
		{name: "ErrUseLastResponse", serve: steps("302 /1"), config: checking(func(*trial, *http.Request, []*http.Request) error { return http.ErrUseLastResponse }), run: sends(post)},
		{name: "ErrUseLastResponse at the second", serve: steps("307 /1", "307 /2"), config: checking(func(_ *trial, _ *http.Request, via []*http.Request) error {
			if len(via) > 1 {
				return http.ErrUseLastResponse
			}
			return nil
		}), run: sends(post)},
		{name: "wrapped ErrUseLastResponse is an error", serve: steps("302 /1"), config: checking(func(*trial, *http.Request, []*http.Request) error {
			return errors.Join(http.ErrUseLastResponse)
		}), run: sends(get)},
		{name: "CheckRedirect that edits", serve: steps("302 /1", "302 /2"), config: checking(func(_ *trial, req *http.Request, via []*http.Request) error {
			req.Header.Set("X-Hop", fmt.Sprint(len(via)))
			return nil
		}), run: sends(post)},
		{name: "the answer breaks", serve: func(_ *trial, n int, w http.ResponseWriter, r *http.Request) {
			if n > 1 {
				hangUp()
			}
			http.Redirect(w, r, "/1", http.StatusFound)
		}, run: sends(post), differs: map[string]string{"elapsed": "2s", "request 4": "= request 2", "request 5": "= request 2"}}, // 3 is net/http's own, on a connection that it takes for dead
		{name: "a redirect after a failure", serve: func(_ *trial, n int, w http.ResponseWriter, r *http.Request) {
			if n == 1 {
				http.Redirect(w, r, "/1", http.StatusTemporaryRedirect)
			}
		}, run: sends(put)},
		{name: "a long answer", serve: func(_ *trial, n int, w http.ResponseWriter, r *http.Request) {
			if n == 1 {
				http.Redirect(w, r, "/1", http.StatusTemporaryRedirect)
				io.WriteString(w, strings.Repeat("x", 100_000))
			}
		}, run: func(x *trial) { x.do(get(x).WithContext(x.reused(x.ctx))) }},
		{name: "Host, relative and not", serve: steps("307 /1", "307 http://a.example.com/2", "307 /3"), config: follow, run: sends(edited(get, func(r *http.Request) { r.Host = "virtual.example.com" }))},
		{name: "the referer", serve: steps("302 /1?q=secret#frag", "302 /2"), config: follow, run: sends(edited(get, func(r *http.Request) { r.URL.User = url.UserPassword("me", "secret") }))},
		{name: "a policy of the standard client", serve: steps("302 /1"), run: func(x *trial) {
			never := func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
			if hc, ok := x.client.(*http.Client); ok {
				hc.CheckRedirect = never
			} else {
				hc := x.once.StandardClient()
				hc.CheckRedirect = never
				x.client = hc
			}
			x.do(get(x))
		}},
	})
}

// madeText tells of a request that a client has made.
func madeText(r *http.Request) string {
	return fmt.Sprintf("%s %v for %q, %s, length %d, body %v, GetBody %v, close %v", r.Method, r.URL, r.Host, headerText(r.Header), r.ContentLength, r.Body != nil, r.GetBody != nil, r.Close)
}

func TestCookiesAreThoseOfNetHTTP(t *testing.T) {
	jar := func(x *trial) {
		j, err := cookiejar.New(nil)
		if err != nil {
			x.t.Fatal(err)
		}
		x.hc.Jar = j
	}
	cookies := func(_ *trial, n int, w http.ResponseWriter, r *http.Request) {
		http.SetCookie(w, &http.Cookie{Name: "n", Value: fmt.Sprint(n)})
		http.SetCookie(w, &http.Cookie{Name: fmt.Sprint("own", n), Value: "1", Path: "/x"})
	}
	redirects := func(status int, to string) func(*trial, int, http.ResponseWriter, *http.Request) {
		return func(x *trial, n int, w http.ResponseWriter, r *http.Request) {
			cookies(x, n, w, r)
			if n == 1 {
				http.Redirect(w, r, to, status)
			}
		}
	}
	byHand := edited(post, func(r *http.Request) { r.Header.Set("Cookie", "n=0; hand=1") })
	fulfil(t, []clause{
		{name: "without a jar", serve: cookies, run: func(x *trial) { x.do(get(x)); x.do(post(x)) }},
		{name: "with a jar", config: jar, serve: cookies, run: func(x *trial) { x.do(get(x)); x.do(post(x)); x.do(put(x)); x.do(byHand(x)) }},
		{name: "one request twice", config: jar, serve: cookies, run: func(x *trial) {
			req := get(x)
			x.do(req)
			x.do(req)
		}},
		{name: "redirect", config: jar, serve: redirects(302, "/x"), run: sends(post)},
		{name: "redirect, by hand", config: jar, serve: redirects(307, "/x"), run: sends(byHand)},
		{name: "redirect to another host", config: jar, serve: redirects(307, "http://b.example.org/x"), run: sends(byHand)},
		{name: "by Host", config: jar, serve: cookies, run: func(x *trial) {
			virtual := edited(get, func(r *http.Request) { r.Host = "virtual.example.com" })
			x.do(virtual(x))
			x.do(virtual(x))
			x.do(get(x))
		}},
		{name: "of a failed attempt are not kept, as its answer is not told", config: jar, serve: func(x *trial, n int, w http.ResponseWriter, r *http.Request) {
			if n == 1 && x.who != bare {
				http.SetCookie(w, &http.Cookie{Name: "failed", Value: "1"})
				w.WriteHeader(503)
				return
			}
			http.SetCookie(w, &http.Cookie{Name: "done", Value: "1"})
		}, run: func(x *trial) {
			x.do(get(x))
			x.note("jar", "%v", x.hc.Jar.Cookies(&url.URL{Scheme: "http", Host: "a.example.com", Path: "/"}))
		}, differs: map[string]string{"elapsed": "1s", "request 2": "= request 1"}},
	})
}
