package oncehttp_test

import (
	"cmp"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/oncehttp/oncehttp"
)

var updateFlag = flag.Bool("update", false, "write the generated part of docs/providers.md")

// builtin are the built-in providers by the names of their variables.
var builtin = map[string]oncehttp.Provider{
	"Stripe": oncehttp.Stripe, "StripeV2": oncehttp.StripeV2, "Adyen": oncehttp.Adyen, "PayPal": oncehttp.PayPal,
	"Checkout": oncehttp.Checkout, "CheckoutTransfers": oncehttp.CheckoutTransfers, "GoCardless": oncehttp.GoCardless,
	"Increase": oncehttp.Increase, "TrueLayer": oncehttp.TrueLayer, "MercadoPago": oncehttp.MercadoPago,
	"RazorpayPayouts": oncehttp.RazorpayPayouts, "Chargebee": oncehttp.Chargebee, "Qonto": oncehttp.Qonto,
	"Dwolla": oncehttp.Dwolla, "Worldpay": oncehttp.Worldpay, "Square": oncehttp.Square, "Plaid": oncehttp.Plaid,
	"Twilio": oncehttp.Twilio,
}

// TestProvidersAreDocumented: docs/providers.md has what the variables and their
// comments say. With -update, it is written.
func TestProvidersAreDocumented(t *testing.T) {
	const file, begin, end = "docs/providers.md", "<!-- generated from providers.go by go test -run TestProvidersAreDocumented -update -->\n", "<!-- end -->\n"
	page := readPage(t, file)
	before, rest, ok1 := strings.Cut(page, begin)
	_, after, ok2 := strings.Cut(rest, end)
	if !ok1 || !ok2 {
		t.Fatalf("%s has no generated part", file)
	}
	want := before + begin + "\n" + providerTables(t) + "\n" + end + after
	if *updateFlag {
		if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if page != want {
		t.Errorf("%s is not what providers.go says; write it with -update", file)
	}
}

func providerTables(t *testing.T) string {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), "providers.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	var table, sections strings.Builder
	table.WriteString("| variable | host | key in | longest | window | methods | confirmed |\n|---|---|---|---|---|---|---|\n")
	label := regexp.MustCompile(`(?m)^- (\w+):`)
	found := 0
	for _, d := range parsed.Decls {
		decl, ok := d.(*ast.GenDecl)
		if !ok || decl.Tok != token.VAR || !decl.Specs[0].(*ast.ValueSpec).Names[0].IsExported() {
			continue
		}
		name := decl.Specs[0].(*ast.ValueSpec).Names[0].Name
		p, ok := builtin[name]
		if !ok {
			t.Errorf("%s is not in the test", name)
			continue
		}
		found++
		text := strings.ReplaceAll(decl.Doc.Text(), "\n  ", "\n")
		for _, item := range []string{"Stored", "Conflicts", "Sources"} {
			if !strings.Contains(text, "\n- "+item+":") {
				t.Errorf("the comment of %s says nothing of: %s", name, item)
			}
		}
		confirmed := "yes"
		if strings.Contains(text, "\n- Unconfirmed: ") {
			confirmed = "in part"
		}
		hosts := "`" + strings.Join(p.Hosts, "`, `") + "`"
		if p.PathPrefix != "" {
			hosts += ": `" + p.PathPrefix + "`"
		}
		row := []string{"`" + name + "`", hosts, cmp.Or(p.Header, "Idempotency-Key"), fmt.Sprint(cmp.Or(p.MaxKey, 255)), oncehttp.InWords(p.Window), "POST, PATCH", confirmed}
		switch {
		case p.NoKeys:
			row[2], row[3], row[4], row[5] = "none", "", "", ""
		case p.BodyField != "":
			row[2], row[5] = "body: "+p.BodyField, "with the field"
		case p.Methods != nil:
			row[5] = strings.Join(p.Methods, ", ")
		}
		fmt.Fprintf(&table, "| %s |\n", strings.Join(row, " | "))
		fmt.Fprintf(&sections, "\n### %s\n\n%s", p.Name, label.ReplaceAllString(text, "- **$1:**"))
	}
	if found != len(builtin) {
		t.Errorf("%d of %d variables found", found, len(builtin))
	}
	return table.String() + sections.String()
}
