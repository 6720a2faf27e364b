package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"time"

	"github.com/failsafe-go/failsafe-go/circuitbreaker"
	"github.com/failsafe-go/failsafe-go/failsafehttp"
	"github.com/hashicorp/go-retryablehttp"
	"github.com/sony/gobreaker/v2"
	"go.etcd.io/bbolt"

	"github.com/oncehttp/oncehttp"
)

// What is sent, by everybody.
var (
	payload  = bytes.Repeat([]byte("x"), 500)
	response = append(append([]byte(`{"id":"`), bytes.Repeat([]byte("c"), 391)...), '"', '}')
)

// A network is what a contender sends through: a new transport, for so many
// callers.
type network struct {
	url       string
	transport func(callers int) http.RoundTripper
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// instant answers at once, without a network.
var instant = network{"https://api.example.com/v1/charges", func(int) http.RoundTripper { return roundTripper(answerAtOnce) }}

func answerAtOnce(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		io.Copy(io.Discard, r.Body)
		r.Body.Close()
	}
	return &http.Response{
		Status: "200 OK", StatusCode: 200, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{"Content-Type": {"application/json"}}, ContentLength: int64(len(response)), Request: r,
		Body: io.NopCloser(bytes.NewReader(response)),
	}, nil
}

// serve starts a server on the loopback interface, for as long as the process
// lives, that takes a time for each request. Every caller has a connection.
func serve(takes time.Duration) (network, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return network{}, err
	}
	go http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		if takes > 0 {
			time.Sleep(takes)
		}
		w.Header().Set("Content-Type", "application/json")
		w.Write(response)
	}))
	return network{"http://" + l.Addr().String() + "/v1/charges", func(callers int) http.RoundTripper {
		return &http.Transport{MaxIdleConnsPerHost: callers + 8}
	}}, nil
}

// A sender is a client, or what is like one.
type sender func(*http.Request) (*http.Response, error)

// get is an unkeyed GET, of one caller: the request is used again.
func (n network) get(send sender) (func() error, error) {
	req, err := http.NewRequest("GET", n.url, nil)
	if err != nil {
		return nil, err
	}
	return func() error {
		_, err := exchange(send, req, false)
		return err
	}, nil
}

// post is a POST of 500 B; with a key, unless the sender gives it one.
func (n network) post(send sender, withKey bool) func() error {
	return func() error {
		key := ""
		if withKey {
			key = oncehttp.NewKey()
		}
		_, err := n.postWith(send, key, false)
		return err
	}
}

func (n network) postWith(send sender, key string, want bool) (body []byte, err error) {
	req, err := http.NewRequest("POST", n.url, bytes.NewReader(payload))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	if key != "" {
		req.Header.Set("Idempotency-Key", key)
	}
	return exchange(send, req, want)
}

// exchange reads the answer to its end, and returns it if it is wanted.
func exchange(send sender, req *http.Request, want bool) (body []byte, err error) {
	resp, err := send(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if want {
		body, err = io.ReadAll(resp.Body)
	} else {
		_, err = io.Copy(io.Discard, resp.Body)
	}
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, errors.New(resp.Status)
	}
	return body, nil
}

// A made sender, and what ends it.
type made struct {
	send  sender
	keyed bool         // it makes keys itself
	close func() error // may be nil
	file  string       // see opened
}

// A maker makes a sender that sends through a transport.
type maker func(setting, http.RoundTripper) (*made, error)

func bareClient(_ setting, t http.RoundTripper) (*made, error) {
	return &made{send: (&http.Client{Transport: t}).Do}, nil
}

func retryable(_ setting, t http.RoundTripper) (*made, error) {
	return &made{send: retryableClient(t).Do}, nil
}

func retryableClient(t http.RoundTripper) *http.Client {
	c := retryablehttp.NewClient()
	c.HTTPClient.Transport = t
	c.Logger = nil
	return c.StandardClient()
}

func failsafe(_ setting, t http.RoundTripper) (*made, error) {
	breaker := circuitbreaker.NewBuilder[*http.Response]().
		HandleIf(func(r *http.Response, err error) bool { return err != nil || r != nil && r.StatusCode >= 500 }).
		WithFailureThresholdRatio(20, 40).
		Build()
	return &made{send: (&http.Client{Transport: failsafehttp.NewRoundTripper(t, failsafehttp.NewRetryPolicyBuilder().Build(), breaker)}).Do}, nil
}

// ours is a client of this package with all defaults.
func ours(store oncehttp.KeyStore, t http.RoundTripper) (*made, error) {
	c, err := oncehttp.New(store, &oncehttp.Options{HTTPClient: &http.Client{Transport: t}})
	if err != nil {
		return nil, err
	}
	return &made{send: c.Do, keyed: true, close: func() error { return errors.Join(c.Close(), store.Close()) }}, nil
}

func inMemory(_ setting, t http.RoundTripper) (*made, error) {
	return ours(oncehttp.NewMemoryStore(), t)
}

func durable(s setting, t http.RoundTripper) (*made, error) {
	file := filepath.Join(s.dir, "operations.db")
	store, err := oncehttp.OpenBolt(file)
	if err != nil {
		return nil, err
	}
	m, err := ours(store, t)
	if err != nil {
		return nil, errors.Join(err, store.Close())
	}
	m.file = file
	return m, nil
}

// getting and posting are contenders that send through n.
func getting(name string, n network, by maker) contender {
	return contender{name, func(s setting) (*opened, error) {
		t := n.transport(s.callers)
		m, err := by(s, t)
		if err != nil {
			return nil, err
		}
		do, err := n.get(m.send)
		return &opened{do: do, close: closing(t, m.close)}, err
	}}
}

func posting(name string, n network, by maker) contender {
	return contender{name, func(s setting) (*opened, error) {
		t := n.transport(s.callers)
		m, err := by(s, t)
		if err != nil {
			return nil, err
		}
		return &opened{do: n.post(m.send, !m.keyed), close: closing(t, m.close), file: m.file}, nil
	}}
}

// closing closes what a contender has, and its connections.
func closing(t http.RoundTripper, then func() error) func() error {
	return func() error {
		var err error
		if then != nil {
			err = then()
		}
		if t, ok := t.(*http.Transport); ok {
			t.CloseIdleConnections()
		}
		return err
	}
}

// stored is what the compositions store.
type stored struct {
	Key, Method, URL string
	Body             []byte
	Status           int    `json:",omitempty"`
	Answer           []byte `json:",omitempty"`
}

// composed is what a user would make without us: go-retryablehttp in a
// gobreaker, a key, and a record before and after, each in a commit.
func composed(name string, n network, write func(*bbolt.DB, func(*bbolt.Tx) error) error) contender {
	return contender{name, func(s setting) (*opened, error) {
		db, err := openDatabase(s, write)
		if err != nil {
			return nil, err
		}
		t := n.transport(s.callers)
		client := retryableClient(t)
		breaker := gobreaker.NewCircuitBreaker[*http.Response](gobreaker.Settings{})
		send := func(r *http.Request) (*http.Response, error) {
			return breaker.Execute(func() (*http.Response, error) { return client.Do(r) })
		}
		put := func(r *stored) error {
			b, err := json.Marshal(r)
			if err != nil {
				return err
			}
			return db.put(r.Key, b)
		}
		return &opened{
			do: func() error {
				r := &stored{Key: oncehttp.NewKey(), Method: "POST", URL: n.url, Body: payload}
				if err := put(r); err != nil {
					return err
				}
				answer, err := n.postWith(send, r.Key, true)
				if err != nil {
					return err
				}
				return put(&stored{Key: r.Key, Status: 200, Answer: answer})
			},
			close: closing(t, db.Close),
			file:  db.file,
		}, nil
	}}
}

// limit is the least that a durable POST costs here: a bare client, and the raw
// file.
func limit(name string, n network) contender {
	return contender{name, func(s setting) (*opened, error) {
		l, err := openLog(filepath.Join(s.dir, "log"))
		if err != nil {
			return nil, err
		}
		t := n.transport(s.callers)
		client := &http.Client{Transport: t}
		return &opened{
			do: func() error {
				key := oncehttp.NewKey()
				if err := l.append(key, begun, true); err != nil {
					return err
				}
				answer, err := n.postWith(client.Do, key, true)
				if err != nil {
					return err
				}
				return l.append(key, answer, false)
			},
			finish: l.flush,
			close:  closing(t, l.Close),
		}, nil
	}}
}

// beside is one caller's unkeyed GETs on a client that has POSTs of 256 others
// under way.
func beside(name string, n network, by maker) contender {
	return contender{name, func(s setting) (*opened, error) {
		const others = 256
		t := n.transport(others + 1)
		m, err := by(s, t)
		if err != nil {
			return nil, err
		}
		do, err := n.get(m.send)
		if err != nil {
			return nil, err
		}
		post := n.post(m.send, !m.keyed)
		stop, stopped := make(chan struct{}), make(chan error, others)
		for range others {
			go func() {
				for {
					select {
					case <-stop:
						stopped <- nil
						return
					default:
						if err := post(); err != nil {
							stopped <- fmt.Errorf("beside: %w", err)
							return
						}
					}
				}
			}()
		}
		return &opened{do: do, close: closing(t, func() (err error) {
			close(stop)
			for range others {
				err = errors.Join(err, <-stopped)
			}
			if m.close != nil {
				err = errors.Join(err, m.close())
			}
			return err
		})}, nil
	}}
}
