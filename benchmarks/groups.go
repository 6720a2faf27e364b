package main

import "go.etcd.io/bbolt"

// A group is work that several contenders do, one after the other in every round.
type group struct {
	name       string
	callers    []int
	timed      bool // operation by operation
	contenders []contender
}

var everyLoad = []int{1, 8, 64, 256}

// Names of groups and contenders, as the page has them.
const (
	storeWork, slowPost, instantPost = "store", "POST, 20 ms", "POST"
	plainGet, memoryPost, besideGet  = "GET, in memory", "POST, in memory", "GET beside"

	oursName, memoryName, bareName, limitName = "oncehttp", "oncehttp, memory store", "http.Client", "raw file"
	updateName, batchName                     = "db.Update", "db.Batch"
	byUpdateName, byBatchName                 = "composition, db.Update", "composition, db.Batch"
	retryableName, failsafeName               = "go-retryablehttp", "failsafehttp"
	aloneName, besideBareName, besideOursName = "alone", "beside 256 of http.Client", "beside 256 of oncehttp"
)

func groups() ([]group, error) {
	slow, err := serve(20_000_000)
	if err != nil {
		return nil, err
	}
	fast, err := serve(0)
	if err != nil {
		return nil, err
	}
	return []group{
		{storeWork, everyLoad, true, []contender{
			{oursName, ourStore},
			{updateName, bboltStore((*bbolt.DB).Update)},
			{batchName, bboltStore((*bbolt.DB).Batch)},
			{limitName, rawStore},
		}},
		{slowPost, everyLoad, true, []contender{
			posting(oursName, slow, durable),
			posting(memoryName, slow, inMemory),
		}},
		{instantPost, everyLoad, true, []contender{
			posting(oursName, fast, durable),
			posting(bareName, fast, bareClient),
			limit(limitName, fast),
			composed(byUpdateName, fast, (*bbolt.DB).Update),
			composed(byBatchName, fast, (*bbolt.DB).Batch),
		}},
		{plainGet, []int{1}, false, []contender{
			getting(oursName, instant, inMemory),
			getting(bareName, instant, bareClient),
			getting(retryableName, instant, retryable),
			getting(failsafeName, instant, failsafe),
		}},
		{memoryPost, []int{1}, false, []contender{
			posting(oursName, instant, inMemory),
			posting(bareName, instant, bareClient),
			posting(retryableName, instant, retryable),
			posting(failsafeName, instant, failsafe),
		}},
		{besideGet, []int{1}, true, []contender{
			getting(aloneName, fast, durable),
			beside(besideBareName, fast, bareClient),
			beside(besideOursName, fast, durable),
		}},
	}, nil
}
