package oncehttp

import (
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
)

// What the built-in providers' answers mean.

// decode reads a JSON answer; one of another shape says nothing.
func decode[T any](body []byte) (answer T) {
	_ = json.Unmarshal(body, &answer)
	return answer
}

func judgeStripe(resp *http.Response, body []byte) Verdict {
	if resp.StatusCode < 300 {
		return NoVerdict
	}
	if resp.StatusCode < 500 {
		answer := decode[struct {
			Error struct{ Type, Code string }
		}](body)
		switch {
		case answer.Error.Code == "idempotency_key_in_use":
			return InFlight
		case answer.Error.Code == "lock_timeout":
			return NotExecuted
		case answer.Error.Type == "idempotency_error":
			return OtherPayload
		}
	} else if replayed, _ := strconv.ParseBool(resp.Header.Get("Idempotent-Replayed")); replayed {
		return StoredFailure
	}
	switch resp.Header.Get("Stripe-Should-Retry") {
	case "true":
		return Retry
	case "false":
		return Stop
	}
	return NoVerdict
}

func judgeAdyen(resp *http.Response, body []byte) Verdict {
	if resp.StatusCode < 300 {
		return NoVerdict
	}
	if decode[struct{ ErrorCode string }](body).ErrorCode == "704" {
		return InFlight
	}
	switch strings.ToLower(resp.Header.Get("Transient-Error")) {
	case "true":
		return NotExecuted // it has no side effects
	case "false":
		return Stop
	}
	return NoVerdict
}

func judgePayPal(resp *http.Response, body []byte) Verdict {
	if resp.StatusCode < 300 {
		return NoVerdict
	}
	answer := decode[struct {
		Name    string
		Details []struct{ Issue string }
	}](body)
	issues := []string{answer.Name}
	for _, d := range answer.Details {
		issues = append(issues, d.Issue)
	}
	for _, issue := range issues {
		switch issue {
		case "PREVIOUS_REQUEST_IN_PROGRESS":
			return InFlight
		case "DUPLICATE_REQUEST_ID", "PAYPAL_REQUEST_ID_PREVIOUSLY_USED":
			return OtherPayload
		}
	}
	return NoVerdict
}

// judgeConflictInFlight is the verdict of providers whose every 409 is a request
// that still runs.
func judgeConflictInFlight(resp *http.Response, _ []byte) Verdict {
	if resp.StatusCode == http.StatusConflict {
		return InFlight
	}
	return NoVerdict
}

func judgeGoCardless(resp *http.Response, body []byte) Verdict {
	if resp.StatusCode != http.StatusConflict {
		return NoVerdict
	}
	answer := decode[struct {
		Error struct{ Errors []struct{ Reason string } }
	}](body)
	for _, e := range answer.Error.Errors {
		if e.Reason == "idempotent_creation_conflict" {
			return AlreadyCreated
		}
	}
	return NoVerdict
}

func judgeIncrease(resp *http.Response, body []byte) Verdict {
	if resp.StatusCode == http.StatusConflict && decode[struct{ Type string }](body).Type == "idempotency_key_already_used_error" {
		return OtherPayload
	}
	return NoVerdict
}

func judgeTrueLayer(resp *http.Response, body []byte) Verdict {
	if resp.StatusCode < 300 {
		return NoVerdict
	}
	_, problem, _ := strings.Cut(decode[struct{ Type string }](body).Type, "#")
	switch problem {
	case "idempotency-key-concurrency-conflict":
		return InFlight
	case "idempotency-key-reuse":
		return OtherPayload
	case "conflict", "concurrency-conflict":
		return Retry
	}
	return NoVerdict
}

func judgeMercadoPago(resp *http.Response, body []byte) Verdict {
	if resp.StatusCode < 300 {
		return NoVerdict
	}
	type fault struct{ Code json.RawMessage } // a string or a number
	answer := decode[struct{ Cause, Errors []fault }](body)
	for _, f := range append(answer.Cause, answer.Errors...) {
		switch strings.Trim(string(f.Code), `"`) {
		case "401001", "resource_locked":
			return InFlight
		case "idempotency_key_already_used":
			return OtherPayload
		}
	}
	return NoVerdict
}

func judgeSquare(resp *http.Response, body []byte) Verdict {
	if resp.StatusCode < 300 {
		return NoVerdict
	}
	for _, e := range decode[struct{ Errors []struct{ Code string } }](body).Errors {
		if e.Code == "IDEMPOTENCY_KEY_REUSED" {
			return OtherPayload
		}
	}
	return NoVerdict
}
