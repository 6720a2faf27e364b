package main

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncehttp/oncehttp/examples/default/legacy"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

func TestDemo(t *testing.T) {
	var out strings.Builder
	if err := demo(&out); err != nil {
		t.Fatal(err)
	}
	want := `charge: {"id":"ch_1","object":"charge","order":"A-1","status":"succeeded"}; requests 2, keys 1
poll: open; requests 2, keys 0
notify: the server answered 503 Service Unavailable; requests 1, keys 0
upload: got 4 bytes; requests 1, keys 0
1 charge
`
	if out.String() != want {
		t.Errorf("printed\n%s\nwant\n%s", out.String(), want)
	}
}

// withDefault replaces http.DefaultClient by an installed client for as long as f
// runs, and returns the bytes of its file.
func withDefault(t *testing.T, below *http.Client, f func()) (file []byte) {
	t.Helper()
	old := http.DefaultClient
	defer func() { http.DefaultClient = old }()
	http.DefaultClient = below
	path := filepath.Join(t.TempDir(), "operations.db")
	uninstall, err := install(path)
	if err != nil {
		t.Fatal(err)
	}
	if http.DefaultClient == below {
		t.Error("http.DefaultClient was not replaced")
	}
	f()
	if err := uninstall(context.Background()); err != nil {
		t.Error(err)
	}
	if http.DefaultClient != below {
		t.Error("http.DefaultClient was not put back")
	}
	file, err = os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return file
}

// A leaked goroutine fails the bubble.
func TestTheDeclaredHostIsKeyedAndRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := oncehttptest.New(oncehttptest.Charges())
		api.Script(oncehttptest.DropResponse(), oncehttptest.Status(503))
		file := withDefault(t, &http.Client{Transport: api.Transport()}, func() {
			if answer, err := legacy.Charge("http://pay.example", "a-secret", "A-1"); err != nil || !strings.Contains(answer, "ch_1") {
				t.Errorf("answered %q, %v", answer, err)
			}
		})
		api.Wait()
		sent := api.Attempts()
		for _, a := range sent {
			if a.Key == "" || a.Key != sent[0].Key || a.Header.Get("Authorization") != "Bearer a-secret" || string(a.Body) != "order=A-1" {
				t.Errorf("sent %+v", a)
			}
		}
		if len(sent) != 3 || len(api.Effects()) != 1 {
			t.Errorf("%d requests, %d charges; want 3 and 1", len(sent), len(api.Effects()))
		}
		if !bytes.Contains(file, []byte("pay.example")) || bytes.Contains(file, []byte("a-secret")) {
			t.Error("the file lacks the operation, or has its credentials")
		}
	})
}

func TestOtherHostsGetTheBytesTheyAlwaysGot(t *testing.T) {
	without := record(t, sendOther)
	var with []string
	file := withDefault(t, http.DefaultClient, func() { with = record(t, sendOther) })
	if len(without) != 2 || len(with) != 2 || with[0] != without[0] || with[1] != without[1] {
		t.Errorf("sent\n%q\nwithout us\n%q", with, without)
	}
	for _, part := range []string{"127.0.0.1", "event", "password"} {
		if bytes.Contains(file, []byte(part)) {
			t.Errorf("%q is in the file", part)
		}
	}
}

// sendOther makes the POSTs. The second event is there only when the first has
// arrived.
func sendOther(t *testing.T, url string, arrived <-chan struct{}) {
	events, w := io.Pipe()
	go func() {
		io.WriteString(w, "event 1\n")
		select {
		case <-arrived:
		case <-time.After(10 * time.Second):
			t.Error("the body did not stream")
		}
		io.WriteString(w, "event 2\n")
		w.Close()
	}()
	if _, err := legacy.Notify(url, "user", "password", events); err == nil {
		t.Error("no error from a busy server")
	}
	if _, err := legacy.Upload(url, io.MultiReader(strings.NewReader("a,b\n"), strings.NewReader("1,2\n"))); err == nil {
		t.Error("no error from a busy server")
	}
}

// record returns the bytes of each request that send makes, to a server that is
// always busy. It tells when the first event has arrived.
func record(t *testing.T, send func(t *testing.T, url string, arrived <-chan struct{})) (requests []string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	arrived, done := make(chan struct{}), make(chan struct{})
	tell := sync.OnceFunc(func() { close(arrived) })
	go func() {
		defer close(done)
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			conn.SetDeadline(time.Now().Add(15 * time.Second))
			var got []byte
			buf := make([]byte, 4096)
			for end := []byte("\r\n0\r\n\r\n"); !bytes.HasSuffix(got, end); {
				n, err := conn.Read(buf)
				if err != nil {
					break
				}
				got = append(got, buf[:n]...)
				if bytes.Contains(got, []byte("event 1")) {
					tell()
				}
			}
			requests = append(requests, string(got))
			io.WriteString(conn, "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
			conn.Close()
		}
	}()
	send(t, "http://"+ln.Addr().String(), arrived)
	ln.Close()
	<-done
	for i := range requests { // the port is another each time
		requests[i] = strings.ReplaceAll(requests[i], ln.Addr().String(), "127.0.0.1")
	}
	return requests
}
