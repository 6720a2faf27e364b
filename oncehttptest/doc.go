// Package oncehttptest tests programs that talk to an idempotent API: it has
// a server that behaves as Stripe's does, with faults on demand, and what is
// needed to test a store of oncehttp.
//
// [New] wraps a handler, the effect, into a [Server] that runs it once for
// each account and idempotency key and replays the stored answer afterwards.
// [Server.Transport] reaches it without sockets and works inside a
// testing/synctest bubble; [Start] serves it on a real loopback socket.
// [Server.Script] and its relatives break attempts on the way: refused,
// reset, cut short, silent, delayed until after the client has given up.
// [Server.Effects] then tells what ran, and [Server.Attempts] what was on the
// wire.
//
//	s := oncehttptest.New(oncehttptest.Charges())
//	s.Script(oncehttptest.DropResponse(), oncehttptest.Status(503))
//	client := &http.Client{Transport: s.Transport()}
//
// [CheckServer] asks a real server whether it deduplicates.
//
// The package is for tests: it keeps everything it has seen in memory until
// [Server.Reset].
package oncehttptest
