package oncehttp

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
)

// An exchange is what one attempt came to.
type exchange struct {
	resp    *http.Response // nil with an error; a keyed one's body is in body, unless it streams
	body    []byte
	streams bool // too long, or an event stream: body is not buffered
	err     error
	refused bool     // refused by us: never handed to the transport
	notSent bool     // provably no byte was written
	url     *url.URL // of the response: the target of the last redirect that was followed
	resent  bool     // net/http has sent it more than once by itself
	final   bool     // unkeyed: cannot be sent again
	left    bool     // unkeyed: failed because its caller has cancelled it
}

func (x *exchange) status() int {
	if x.resp == nil {
		return 0
	}
	return x.resp.StatusCode
}

// A judgement says what an exchange means for the operation.
type judgement struct {
	next      next
	outcome   Outcome       // with settle and stop
	reason    Reason        // with stop and Unknown
	uncertain bool          // the attempt may have had its effect
	wait      time.Duration // with again: what the provider asks for
}

type next uint8

const (
	settle next = iota // the answer settles the operation
	again              // retry, if the limits allow
	stop               // no retry, and no answer
)

// atTheDoor are the statuses that refuse a request before it is looked at, and
// so say nothing about an earlier attempt.
var atTheDoor = []int{
	http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound, http.StatusMethodNotAllowed,
	http.StatusProxyAuthRequired, http.StatusMisdirectedRequest, http.StatusUpgradeRequired,
	http.StatusRequestHeaderFieldsTooLarge, http.StatusUnavailableForLegalReasons,
}

// judge classifies the outcome of a keyed attempt. earlier says that an earlier
// attempt, of this run or another, may have had its effect.
func judge(p *Provider, x exchange, earlier bool) judgement {
	if x.err != nil {
		j := judgement{next: again, outcome: Unknown, reason: ReasonGaveUp, uncertain: !x.refused && !x.notSent}
		if x.refused || !retryable(x.err) {
			j.next = stop
		}
		return j
	}
	unknown := func(r Reason) judgement { return judgement{next: stop, outcome: Unknown, reason: r, uncertain: true} }
	retry := judgement{next: again, outcome: Unknown, reason: ReasonGaveUp, uncertain: true}
	succeeded := judgement{next: settle, outcome: Succeeded, uncertain: true}
	rejected := judgement{next: settle, outcome: Rejected}
	status := x.resp.StatusCode

	verdict := NoVerdict
	if p.Judge != nil && !x.streams {
		verdict = p.Judge(x.resp, x.body)
	}
	switch verdict {
	case InFlight:
		retry.wait = p.InFlightWait
		return retry
	case NotExecuted:
		retry.uncertain = false
		return retry
	case AlreadyCreated:
		return succeeded
	case OtherPayload:
		return unknown(ReasonConflict)
	case StoredFailure:
		return unknown(ReasonStored)
	case Retry:
		if status/100 != 2 {
			retry.uncertain = status != http.StatusTooManyRequests
			return retry
		}
	case Stop:
		if status == http.StatusTooManyRequests {
			return judgement{next: stop, outcome: Unknown, reason: ReasonGaveUp}
		}
		if retriedStatus(status) || status == http.StatusConflict && earlier {
			return unknown(ReasonGaveUp)
		}
	}

	switch {
	case status/100 == 2, status == http.StatusSeeOther:
		return succeeded
	case status >= 500 && p.replayed(x.resp.Header):
		return unknown(ReasonStored)
	case status == http.StatusTooManyRequests:
		retry.uncertain = false
		return retry
	case retriedStatus(status):
		return retry
	case status/100 == 4 && p.replayed(x.resp.Header):
		return rejected // the stored answer of this very key
	case status == http.StatusConflict && earlier:
		retry.wait = p.InFlightWait
		return retry // our own earlier attempt may still run there
	case status/100 == 4 && !earlier:
		return rejected
	case slices.Contains(atTheDoor, status):
		return unknown(ReasonRefused)
	case slices.Contains(p.StoredRefusals, status):
		return rejected
	case (status == http.StatusTemporaryRedirect || status == http.StatusPermanentRedirect) && !earlier:
		return rejected
	}
	return unknown(ReasonAmbiguous)
}

// judgePlain classifies the outcome of an attempt without a key.
func judgePlain(x exchange) judgement {
	if !x.final && (x.err == nil && retriedStatus(x.resp.StatusCode) || x.err != nil && retryable(x.err)) {
		return judgement{next: again}
	}
	return judgement{next: settle}
}

func retriedStatus(status int) bool {
	return status == http.StatusRequestTimeout || status == http.StatusTooManyRequests || status >= 500
}

// retryable reports whether a transport error may go away by itself. Errors are
// told apart by type, never by text.
func retryable(err error) bool {
	if dns, ok := errors.AsType[*net.DNSError](err); ok && dns.IsNotFound {
		return false
	}
	_, broken := errors.AsType[contractError](err)
	return !broken && !isCertificateError(err) && !errors.Is(err, http.ErrSchemeMismatch)
}

func isCertificateError(err error) bool {
	_, verification := errors.AsType[*tls.CertificateVerificationError](err)
	_, authority := errors.AsType[x509.UnknownAuthorityError](err)
	_, hostname := errors.AsType[x509.HostnameError](err)
	_, invalid := errors.AsType[x509.CertificateInvalidError](err)
	return verification || authority || hostname || invalid
}

// connectError reports whether an error is one of dialling: DNS, connect, or
// TLS handshake.
func connectError(err error) bool {
	if op, ok := errors.AsType[*net.OpError](err); ok && (op.Op == "dial" || op.Op == "proxyconnect" || op.Op == "socks connect") {
		return true
	}
	_, dns := errors.AsType[*net.DNSError](err)
	_, record := errors.AsType[tls.RecordHeaderError](err)
	_, alert := errors.AsType[tls.AlertError](err)
	return dns || record || alert || isCertificateError(err) || errors.Is(err, http.ErrSchemeMismatch)
}

// detail returns the text of an error for logs and records: without the URL
// that a *url.Error carries, whose query may be secret.
func detail(err error) string {
	if err == nil {
		return ""
	}
	if u, ok := errors.AsType[*url.Error](err); ok {
		return detail(u.Err)
	}
	return strings.TrimPrefix(err.Error(), "oncehttp: ")
}
