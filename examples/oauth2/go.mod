module github.com/oncehttp/oncehttp/examples/oauth2

go 1.26.0

require (
	github.com/oncehttp/oncehttp v0.0.0
	golang.org/x/oauth2 v0.37.0
)

require (
	github.com/google/uuid v1.6.0 // indirect
	github.com/hashicorp/go-cleanhttp v0.5.2 // indirect
	github.com/hashicorp/go-retryablehttp v0.7.8 // indirect
	github.com/sony/gobreaker/v2 v2.4.0 // indirect
	go.etcd.io/bbolt v1.5.0 // indirect
	golang.org/x/sys v0.45.0 // indirect
	golang.org/x/time v0.16.0 // indirect
)

replace github.com/oncehttp/oncehttp => ../..
