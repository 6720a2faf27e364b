// Package oncehttp is an HTTP client for APIs that take idempotency keys, such
// as Stripe's. It makes one logical operation have one effect: through retries,
// crashes and restarts.
//
// # The promise
//
// One logical operation, one key, one effect.
//
//   - Nothing of an operation leaves the process before its record is durable.
//   - Every attempt, by whatever process, has the same key, method, URL and body.
//   - An operation without answer is found after a restart; one whose answer the
//     caller has not acknowledged is handed over again, without network.
//   - No attempt starts that could reach the server after it may have forgotten
//     the key.
//   - Under an outage, retries are at most a tenth of first attempts, plus a small
//     floor.
//   - The caller can always tell whether an operation succeeded, was rejected, was
//     not sent, or is unknown; and nothing is sent later that a caller was told
//     had failed, unless somebody asks for it.
//
// What it cannot promise is exactly-once delivery: it is at-least-once delivery
// plus the server's deduplication. A server that ignores the key is not
// protected, nor is a first attempt that the network delays beyond the server's
// window. After the loss of the disk, a key that names the business intent
// ([KeyFor]) still protects, within the window.
//
// # Three ways in
//
// To send requests as with [net/http.Client], use [Open] and [Client.Do]:
//
//	client, err := oncehttp.Open("operations.db", nil)
//	…
//	defer client.Close()
//	resp, err := client.PostForm("https://api.stripe.com/v1/charges", form)
//
// To know the outcome, and to be handed the answer again after a crash, begin the
// operation with [Start] and acknowledge it with [Operation.Ack]:
//
//	ctx, op := oncehttp.Start(ctx, oncehttp.Op{Key: oncehttp.KeyFor("order", id), Metadata: …})
//	resp, err := client.Do(req.WithContext(ctx)) // or any SDK on client.StandardClient()
//	…                                            // record the answer
//	err = op.Ack(ctx)
//
// To finish after a restart what was begun before, call [Client.Run] or
// [Client.Resume] with a [Handler]:
//
//	go client.Run(ctx, oncehttp.Handler{Settled: record})
//
// # Errors
//
// What a [Client] returns is a [*net/url.Error], as with net/http. Inside it, an
// operation's is an [*OperationError], which says what is known of the outcome,
// around one of the errors of this package or of the transport. If there is a
// response, the caller gets it with a nil error, also when the attempts were used
// up; [OperationFrom] and [Operation.Info] tell the outcome.
package oncehttp
