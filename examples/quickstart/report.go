package main

import (
	"errors"
	"fmt"
	"io"
	"net/http"
)

// A result is what became of a scenario for one contender, counted by order at
// the server.
type result struct {
	twice    int // orders that were charged more than once
	never    int // orders that were not charged
	missing  int // orders that were charged and are not in the ledger
	reported int // orders that were reported as unknown
	wire     int // requests that reached the server
	inOutage int // those of them that met the outage
	late     int // charges sent after the first kill
	kills    int // children killed
	hit      int // kills that hit a request on the wire
}

func count(srv *server, j job, kills []*strike) (result, error) {
	book, err := openLedger(j.file("ledger"))
	if err != nil {
		return result{}, err
	}
	defer book.Close()
	reported, err := openLedger(j.file("reported"))
	if err != nil {
		return result{}, err
	}
	defer reported.Close()

	charges := make(map[string]int)
	for _, effect := range srv.api.Effects() {
		charges[orderOf(effect.Body)]++
	}
	r := result{kills: len(kills)}
	for n := 1; n <= j.Orders; n++ {
		order := j.order(n)
		switch charged := charges[order]; {
		case charged == 0:
			r.never++
		case charged > 1:
			r.twice++
		}
		if charges[order] > 0 && !book.has(order) {
			r.missing++
		}
		if reported.has(order) {
			r.reported++
		}
	}
	for _, k := range kills {
		if k.hit > 0 {
			r.hit++
		}
	}
	for _, a := range srv.api.Attempts() {
		r.wire++
		if a.Fault == outageFault {
			r.inOutage++
		}
		if a.Method == http.MethodPost && len(kills) > 0 && a.Time.After(kills[0].at) {
			r.late++
		}
	}
	return r, nil
}

// results are the results by scenario and contender.
type results map[string]map[string]result

// print prints the table, and what it does not say.
func (t results) print(out io.Writer, scenarios []scenario) {
	fmt.Fprintf(out, "\n%-39s", "")
	for _, c := range contenders {
		fmt.Fprintf(out, "%16s", c.name)
	}
	fmt.Fprintln(out)
	for _, s := range scenarios {
		row := func(label string, of func(result) int) {
			fmt.Fprintf(out, "  %-37s", label)
			for _, c := range contenders {
				fmt.Fprintf(out, "%16d", of(t[s.name][c.name]))
			}
			fmt.Fprintln(out)
		}
		fmt.Fprintf(out, "%s, %d orders\n", s.name, s.orders)
		row("charged twice", func(r result) int { return r.twice })
		row("never charged", func(r result) int { return r.never })
		row("charged, but not in the ledger", func(r result) int { return r.missing })
		switch {
		case s.rest > 0:
			row("charges sent again after the window", func(r result) int { return r.late })
			row("reported: window closed, looked up", func(r result) int { return r.reported })
		case s.down > 0:
			row("requests during the outage", func(r result) int { return r.inOutage })
			row("requests in all", func(r result) int { return r.wire })
		default:
			row("requests on the wire", func(r result) int { return r.wire })
			row("kills that hit a request on the wire", func(r result) int { return r.hit })
		}
	}
	fmt.Fprint(out, notes)
}

const notes = `
"key = order id" charges nobody twice in the storm: a key that names the order is
all that takes, and oncehttp gets the same. But whoever does it by hand still has to
  - keep a list of the orders, and send all that are not in the ledger again after
    a restart: begun, charged but not recorded, never begun, it cannot tell.
    oncehttp knows what it began: it sends that, and nothing else again
  - know when the server forgets the key. The late restart charges twice, where
    oncehttp sends nothing, says so (window closed), and has the charge looked up
  - bound the retries, and leave a dead server alone, as the outage shows
  - set the key, also where an SDK makes the request
`

// verdict is an error if oncehttp was not perfect.
func (t results) verdict(scenarios []scenario) error {
	var errs []error
	for _, s := range scenarios {
		r, byHand := t[s.name][oursName], t[s.name]["key = order id"]
		expect := func(what string, ok bool) {
			if !ok {
				errs = append(errs, fmt.Errorf("oncehttp, %s: %s: %+v", s.name, what, r))
			}
		}
		expect("an order was charged twice", r.twice == 0)
		expect("an order was never charged", r.never == 0)
		expect("a charge is missing from the ledger", r.missing == 0)
		if s.rest > 0 {
			expect("a charge was sent after the window", r.late == 0)
			expect("not every order was reported", r.reported == s.orders)
		} else {
			expect("an order was reported as unknown", r.reported == 0)
		}
		if s.down > 0 {
			expect("the outage met half as many requests as by hand, or more", 2*r.inOutage < byHand.inOutage)
		}
		expect("not every kill took place", r.kills == len(s.kills))
		expect("no kill hit a request on the wire", r.hit > 0 || len(s.kills) == 0)
	}
	return errors.Join(errs...)
}
