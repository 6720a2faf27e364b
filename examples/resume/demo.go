package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/signal"
	"syscall"

	"github.com/oncehttp/oncehttp"
	"github.com/oncehttp/oncehttp/oncehttptest"
)

func main() {
	url := flag.String("url", "", "where charges are posted to; empty means a demonstration")
	dir := flag.String("dir", ".", "directory for the ledger and the operations, with -url")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	var err error
	if *url == "" {
		err = demo(ctx, os.Stdout)
	} else {
		err = run(ctx, os.Stdout, *dir, *url, flag.Args())
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "resume:", err)
		os.Exit(1)
	}
}

// authorize adds the credentials, which are never stored, to each attempt.
func authorize(_ context.Context, _ oncehttp.Info, req *http.Request) error {
	req.Header.Set("Authorization", "Bearer "+os.Getenv("API_KEY"))
	return nil
}

// demo runs the program twice. The first run is stopped, as by a SIGTERM, in the
// middle of A-2: it is charged, the answer was lost, and the API is busy now. The
// second run is given A-3 alone.
func demo(ctx context.Context, out io.Writer) error {
	dir, err := os.MkdirTemp("", "oncehttp-resume-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	first, sigterm := context.WithCancel(ctx)
	defer sigterm()
	api := oncehttptest.New(oncehttptest.Charges())
	api.ScriptFor(oncehttptest.ByBody("A-2"), oncehttptest.DropResponse(), oncehttptest.Status(503))
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if len(api.Attempts()) == 2 { // whose answer was lost
			sigterm()
		}
		api.ServeHTTP(w, r)
	}))
	defer srv.Close()

	fmt.Fprintln(out, "first run, until SIGTERM")
	err = run(first, out, dir, srv.URL, []string{"A-1", "A-2", "A-3"})
	fmt.Fprintln(out, "second run")
	err = errors.Join(err, run(ctx, out, dir, srv.URL, []string{"A-3"}))
	fmt.Fprintf(out, "%d charges for %d requests\n", len(api.Effects()), len(api.Attempts()))
	return err
}
