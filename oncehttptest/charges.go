package oncehttptest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
)

// Charges is a handler to wrap: a payment API as small as it can be. A POST,
// JSON or form-encoded, with a field order (or order_id, or metadata[order_id]
// in a form) creates a charge and answers 200 with
//
//	{"id":"ch_1","object":"charge","order":"A-1","status":"succeeded"}
//
// A GET of any path lists the charges, those of ?order=… only if given:
//
//	{"object":"list","data":[…]}
//
// Anything else gets 400. Each Charges counts its own.
func Charges() http.Handler { return &charges{} }

type charge struct {
	ID     string `json:"id"`
	Object string `json:"object"`
	Order  string `json:"order"`
	Status string `json:"status"`
}

type charges struct {
	mu   sync.Mutex // guards made
	made []charge
}

func (c *charges) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	var answer any
	switch r.Method {
	case http.MethodPost:
		order := orderOf(body)
		if order == "" {
			refuse(w, "Missing required param: order.")
			return
		}
		answer = c.charge(order)
	case http.MethodGet, http.MethodHead:
		answer = struct {
			Object string   `json:"object"`
			Data   []charge `json:"data"`
		}{"list", c.list(r.URL.Query().Get("order"))}
	default:
		refuse(w, "Unrecognized request method.")
		return
	}
	w.Header().Set("Content-Type", "application/json")
	b, err := json.Marshal(answer)
	if err != nil {
		panic(fmt.Sprintf("oncehttptest: %v", err)) // strings only
	}
	w.Write(b)
}

func (c *charges) charge(order string) charge {
	c.mu.Lock()
	defer c.mu.Unlock()
	made := charge{fmt.Sprintf("ch_%d", len(c.made)+1), "charge", order, "succeeded"}
	c.made = append(c.made, made)
	return made
}

func (c *charges) list(order string) []charge {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := []charge{}
	for _, made := range c.made {
		if order == "" || made.Order == order {
			out = append(out, made)
		}
	}
	return out
}

func orderOf(body []byte) string {
	if strings.HasPrefix(strings.TrimSpace(string(body)), "{") {
		var fields map[string]any
		dec := json.NewDecoder(bytes.NewReader(body))
		dec.UseNumber()
		dec.Decode(&fields) // what cannot be read has no order
		for _, name := range []string{"order", "order_id"} {
			if v, ok := fields[name]; ok && v != nil {
				return fmt.Sprint(v)
			}
		}
		return ""
	}
	form, _ := url.ParseQuery(string(body))
	for _, name := range []string{"order", "order_id", "metadata[order_id]"} {
		if form.Has(name) {
			return form.Get(name)
		}
	}
	return ""
}

func refuse(w http.ResponseWriter, message string) {
	a := errorAnswer(http.StatusBadRequest, "invalid_request_error", "", message)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(a.code)
	w.Write(a.body)
}
