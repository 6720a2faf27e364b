package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"

	"github.com/oncehttp/oncehttp/examples/default/legacy"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

// demo runs the program against a payment API that loses its first answer, and
// against another host that is busy.
func demo(out io.Writer) (err error) {
	dir, err := os.MkdirTemp("", "oncehttp-default-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	payments := oncehttptest.New(oncehttptest.Charges())
	payments.Script(oncehttptest.DropResponse())
	others := oncehttptest.New(http.HandlerFunc(other))
	others.ScriptFor(at("/status"), oncehttptest.Status(503))
	others.ScriptFor(at("/events"), oncehttptest.Status(503))
	below, stop := network(map[string]http.Handler{"pay.example": payments, "other.example": others})
	defer stop()
	defer func(old *http.Client) { http.DefaultClient = old }(http.DefaultClient)
	http.DefaultClient = below

	uninstall, err := install(filepath.Join(dir, "operations.db"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, uninstall(context.Background())) }()
	tell := func(what string, server *oncehttptest.Server, f func() (string, error)) {
		before := len(server.Attempts())
		text, err := f()
		if err != nil {
			text = err.Error()
		}
		sent, keys := server.Attempts()[before:], make(map[string]bool)
		for _, a := range sent {
			if a.Key != "" {
				keys[a.Key] = true
			}
		}
		fmt.Fprintf(out, "%s: %s; requests %d, keys %d\n", what, text, len(sent), len(keys))
	}
	tell("charge", payments, func() (string, error) { return legacy.Charge("http://pay.example", "token", "A-1") })
	tell("poll", others, func() (string, error) { return legacy.Poll("http://other.example") })
	tell("notify", others, func() (string, error) {
		return legacy.Notify("http://other.example", "user", "password", io.MultiReader(strings.NewReader("event\n")))
	})
	tell("upload", others, func() (string, error) {
		return legacy.Upload("http://other.example", io.MultiReader(strings.NewReader("a,b\n")))
	})
	fmt.Fprintf(out, "%d charge\n", len(payments.Effects()))
	return nil
}

func at(path string) func(oncehttptest.Attempt) bool {
	return func(a oncehttptest.Attempt) bool { return a.Path == path }
}

// other is the rest of the world.
func other(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/status":
		io.WriteString(w, "open")
	default:
		n, _ := io.Copy(io.Discard, r.Body)
		fmt.Fprintf(w, "got %d bytes", n)
	}
}

// network serves hosts on loopback sockets. The client that it returns finds them
// by their names.
func network(hosts map[string]http.Handler) (client *http.Client, stop func()) {
	var servers []*httptest.Server
	addrs := make(map[string]string)
	for host, handler := range hosts {
		server := httptest.NewServer(handler)
		servers = append(servers, server)
		addrs[host+":80"] = server.Listener.Addr().String()
	}
	dial := func(ctx context.Context, network, addr string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, addrs[addr])
	}
	client = &http.Client{Transport: &http.Transport{DialContext: dial}}
	return client, func() {
		client.CloseIdleConnections()
		for _, server := range servers {
			server.Close()
		}
	}
}
