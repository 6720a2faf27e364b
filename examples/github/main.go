// Github is an ordinary consumer of an API that knows no idempotency keys: reads
// are retried, pauses that the server asks for are kept, and what creates something
// is sent once, as by http.Client.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"

	"github.com/google/go-github/v88/github"
	"github.com/oncehttp/oncehttp"
)

func main() {
	if len(os.Args) != 3 {
		log.Fatal("usage: github OWNER REPO")
	}
	api, done, err := connect(nil)
	if err != nil {
		log.Fatal(err)
	}
	defer done()
	if err := report(context.Background(), os.Stdout, api, os.Args[1], os.Args[2]); err != nil {
		log.Fatal(err)
	}
}

// connect returns go-github on a client of ours. The transport is for tests; nil
// means the network.
func connect(transport http.RoundTripper) (api *github.Client, done func() error, err error) {
	client, err := oncehttp.New(oncehttp.NewMemoryStore(), &oncehttp.Options{
		HTTPClient: &http.Client{Transport: transport},
		Unlisted:   oncehttp.OnlyGivenKeys, // GitHub does not deduplicate: no POST gets a key
	})
	if err != nil {
		return nil, nil, err
	}
	api, err = github.NewClient(github.WithHTTPClient(client.StandardClient()))
	return api, client.Close, err
}

// report lists the open issues of a repository.
func report(ctx context.Context, out io.Writer, api *github.Client, owner, repo string) error {
	issues, _, err := api.Issues.ListByRepo(ctx, owner, repo, nil)
	for _, issue := range issues {
		fmt.Fprintf(out, "#%d %s\n", issue.GetNumber(), issue.GetTitle())
	}
	return err
}
