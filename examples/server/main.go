// Server is the other half of the contract: a service that charges orders, once
// for each account and idempotency key, and a program that pays with it through
// oncehttp. Either may be killed at any moment.
//
//	go run . -serve localhost:8080 -dir bank
//	printf 'A-1\nA-2\n' | go run . -pay http://localhost:8080/charges -dir shop
//
// server.go is what to read first.
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	addr := flag.String("serve", "", "address to serve at")
	url := flag.String("pay", "", "URL to pay the orders at that come in, a line each")
	dir := flag.String("dir", ".", "directory of the database, or of the ledger and the operations")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	var err error
	switch {
	case *addr != "":
		var l net.Listener
		if l, err = net.Listen("tcp", *addr); err == nil {
			err = serve(ctx, l, *dir)
		}
	case *url != "":
		err = pay(ctx, os.Stdin, os.Stdout, *dir, *url)
	default:
		flag.Usage()
		os.Exit(2)
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "server:", err)
		os.Exit(1)
	}
}
