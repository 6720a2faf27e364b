// Default puts a client under a program that knows nothing of it: package legacy
// sends through http.Get, http.Post and http.DefaultClient, as it always did. The
// payment API is declared, so charges get keys, are stored and retried. Requests
// to all other hosts go out as they are; those that may be repeated are retried.
//
//	go run ./examples/default
//
// What can go wrong when http.DefaultClient is replaced:
//
//   - It is a variable like any other. Replace it first thing in main: before that,
//     requests of init functions have gone out, and later it is a data race.
//   - It does not reach who has copied it before (var client = http.DefaultClient),
//     who makes an http.Client of their own, or who uses http.DefaultTransport.
//   - Timeout, Jar and CheckRedirect belong into Options.HTTPClient. In the
//     replacement, they would come on top of the client and not under it.
//   - There is no recursion: without Options.HTTPClient, a client sends through what
//     is http.DefaultTransport when it is made, never through http.DefaultClient.
//   - What is retried takes longer until it fails. Who cannot wait needs a context
//     with a deadline, as ever.
//   - After Shutdown, the replacement refuses everything: put the old one back first.
package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"time"

	"github.com/oncehttp/oncehttp"
)

func main() {
	if err := demo(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "default:", err)
		os.Exit(1)
	}
}

// install replaces http.DefaultClient, until uninstall is called. What a crash
// leaves unfinished is found in the file: examples/resume shows how to go on.
func install(file string) (uninstall func(context.Context) error, err error) {
	old := http.DefaultClient
	client, err := oncehttp.Open(file, &oncehttp.Options{
		HTTPClient: old, // whatever was configured stays in use
		Unlisted:   oncehttp.OnlyGivenKeys,
		Providers: []oncehttp.Provider{{
			Name:   "payments",
			Hosts:  []string{"pay.example"},
			Window: 24 * time.Hour, // for how long it remembers a key, as it says itself
		}},
	})
	if err != nil {
		return nil, err
	}
	http.DefaultClient = client.StandardClient()
	return func(ctx context.Context) error {
		http.DefaultClient = old
		return client.Shutdown(ctx)
	}, nil
}
