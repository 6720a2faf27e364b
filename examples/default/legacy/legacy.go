// Package legacy is a program as there are many: it sends through net/http's
// default client, and knows nothing of oncehttp.
package legacy

import (
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
)

// Poll asks whether the shop is open.
func Poll(shop string) (string, error) {
	resp, err := http.Get(shop + "/status")
	return answer(resp, err)
}

// Charge charges an order.
func Charge(payments, token, order string) (string, error) {
	form := strings.NewReader(url.Values{"order": {order}}.Encode())
	req, err := http.NewRequest(http.MethodPost, payments+"/v1/charges", form)
	if err != nil {
		return "", err
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	req.Header.Set("Authorization", "Bearer "+token)
	resp, err := http.DefaultClient.Do(req)
	return answer(resp, err)
}

// Notify sends events to a webhook, as they come.
func Notify(hook, user, password string, events io.Reader) (string, error) {
	req, err := http.NewRequest(http.MethodPost, hook+"/events", events)
	if err != nil {
		return "", err
	}
	req.SetBasicAuth(user, password)
	resp, err := http.DefaultClient.Do(req)
	return answer(resp, err)
}

// Upload sends a file, however long it is.
func Upload(files string, file io.Reader) (string, error) {
	resp, err := http.Post(files+"/report", "text/csv", file)
	return answer(resp, err)
}

func answer(resp *http.Response, err error) (string, error) {
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode/100 != 2 {
		err = fmt.Errorf("the server answered %s", resp.Status)
	}
	return strings.TrimSpace(string(body)), err
}
