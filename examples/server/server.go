package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"time"

	bolt "go.etcd.io/bbolt"
)

const (
	maxKey  = 255
	maxBody = 64 << 10
)

// A server charges orders. All that it must not forget is in db; that a request
// is being executed, it may: with the process, the transaction has ended, too.
type server struct {
	db       *bolt.DB
	accounts map[string]string // by token
	window   time.Duration     // for which a key is remembered, from its first receipt

	mu      sync.Mutex      // guards the following
	claimed map[string]bool // keys that are being executed, with their accounts
}

var (
	keysBucket    = []byte("keys")    // account, NUL, key: stored
	chargesBucket = []byte("charges") // id: charge
)

// stored is what is remembered of a key.
type stored struct {
	First  time.Time
	Print  [sha256.Size]byte // of the request
	Answer answer
}

// An answer is all that a client gets to see of a request, byte for byte.
type answer struct {
	Status int
	Header http.Header
	Body   []byte
}

type charge struct {
	ID      string `json:"id"`
	Account string `json:"-"`
	Order   string `json:"order"`
	Amount  int    `json:"amount"`
}

func openServer(path string) (*server, error) {
	db, err := bolt.Open(path, 0o600, &bolt.Options{Timeout: 5 * time.Second})
	if err != nil {
		return nil, err
	}
	s := &server{db, map[string]string{"shop-token": "shop", "other-token": "other"}, 24 * time.Hour, sync.Mutex{}, make(map[string]bool)}
	err = db.Update(func(tx *bolt.Tx) error {
		_, err := tx.CreateBucketIfNotExists(keysBucket)
		_, err2 := tx.CreateBucketIfNotExists(chargesBucket)
		return errors.Join(err, err2)
	})
	return s, err
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	// At the door: nothing has been executed, so nothing is stored, and the
	// same key may come again with what was missing.
	token, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	account, ok := s.accounts[token]
	if !ok {
		refuse(w, http.StatusUnauthorized, "unknown token")
		return
	}
	if r.Method != http.MethodPost || r.URL.Path != "/charges" {
		refuse(w, http.StatusNotFound, "only POST /charges")
		return
	}
	key, err := keyOf(r.Header)
	if err != nil {
		refuse(w, http.StatusBadRequest, err.Error())
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		refuse(w, http.StatusRequestEntityTooLarge, err.Error())
		return
	}
	c := charge{Account: account}
	if err := json.Unmarshal(body, &c); err != nil || c.Order == "" || c.Amount <= 0 {
		refuse(w, http.StatusBadRequest, "want an order and an amount")
		return
	}

	// From here on, once. Not by r.Context(): the effect does not depend on
	// whether the client is still there.
	id := account + "\x00" + key
	if !s.claim(id) {
		w.Header().Set("Retry-After", "1")
		refuse(w, http.StatusConflict, "a request with this key is being executed")
		return
	}
	defer s.release(id)
	print := sha256.Sum256(fmt.Appendf(nil, "%s %s\n%s", r.Method, r.URL, body))
	a, replayed, err := s.once(id, print, c.create)
	switch {
	case errors.Is(err, errOtherRequest):
		refuse(w, http.StatusUnprocessableEntity, err.Error())
		return
	case err != nil: // rolled back: not executed, not stored
		log.Print(err)
		refuse(w, http.StatusInternalServerError, "try again with the same key")
		return
	}
	maps.Copy(w.Header(), a.Header)
	if replayed {
		w.Header().Set("Idempotent-Replayed", "true")
	}
	w.WriteHeader(a.Status)
	w.Write(a.Body)
}

// keyOf returns a request's key, bare or as a string in quotes, as the IETF draft
// has it.
func keyOf(h http.Header) (string, error) {
	values := h.Values("Idempotency-Key")
	if len(values) != 1 {
		return "", errors.New("want one Idempotency-Key")
	}
	key := values[0]
	if len(key) >= 2 && key[0] == '"' && key[len(key)-1] == '"' {
		key = strings.NewReplacer(`\"`, `"`, `\\`, `\`).Replace(key[1 : len(key)-1])
	}
	if key == "" || len(key) > maxKey {
		return "", fmt.Errorf("want an Idempotency-Key of 1 to %d bytes", maxKey)
	}
	return key, nil
}

// claim takes a key for a request, unless another one has it.
func (s *server) claim(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.claimed[id] {
		return false
	}
	s.claimed[id] = true
	return true
}

func (s *server) release(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.claimed, id)
}

var errOtherRequest = errors.New("the key was used with another request")

// once returns the stored answer of a key that is claimed. If there is none, it
// executes the effect and stores its answer in the same transaction: whenever the
// process dies, both are there, or neither.
func (s *server) once(id string, print [sha256.Size]byte, effect func(*bolt.Tx) (answer, error)) (a answer, replayed bool, err error) {
	first := time.Now()
	var known *stored
	err = s.db.View(func(tx *bolt.Tx) error {
		if text := tx.Bucket(keysBucket).Get([]byte(id)); text != nil {
			return json.Unmarshal(text, &known)
		}
		return nil
	})
	switch {
	case err != nil:
		return answer{}, false, err
	case known == nil || first.Sub(known.First) >= s.window:
	case known.Print != print:
		return answer{}, false, errOtherRequest
	default:
		return known.Answer, true, nil
	}
	err = s.db.Update(func(tx *bolt.Tx) error {
		if a, err = effect(tx); err != nil {
			return err
		}
		text, err := json.Marshal(stored{first, print, a})
		if err != nil {
			return err
		}
		return tx.Bucket(keysBucket).Put([]byte(id), text)
	})
	return a, false, err // only now may the client hear of it
}

// create is the effect. That an order is refused is an answer as well, and stored.
func (c charge) create(tx *bolt.Tx) (answer, error) {
	header := http.Header{"Content-Type": {"application/json"}}
	if c.Amount > 1_000_000 {
		return answer{http.StatusPaymentRequired, header, []byte(`{"error":"declined"}`)}, nil
	}
	charges := tx.Bucket(chargesBucket)
	n, err := charges.NextSequence()
	if err != nil {
		return answer{}, err
	}
	c.ID = fmt.Sprintf("ch_%d", n)
	text, err := json.Marshal(c)
	if err != nil {
		return answer{}, err
	}
	header.Set("Location", "/charges/"+c.ID)
	return answer{http.StatusCreated, header, text}, charges.Put([]byte(c.ID), text)
}

// forget removes the keys whose window has passed.
func (s *server) forget() error {
	return s.db.Update(func(tx *bolt.Tx) error {
		var old [][]byte
		keys := tx.Bucket(keysBucket)
		err := keys.ForEach(func(id, text []byte) error {
			var known stored
			if err := json.Unmarshal(text, &known); err != nil {
				return err
			}
			if time.Since(known.First) >= s.window {
				old = append(old, bytes.Clone(id))
			}
			return nil
		})
		for _, id := range old {
			err = errors.Join(err, keys.Delete(id))
		}
		return err
	})
}

func refuse(w http.ResponseWriter, status int, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(map[string]string{"error": message})
}

// serve serves until ctx ends.
func serve(ctx context.Context, l net.Listener, dir string) error {
	s, err := openServer(filepath.Join(dir, "server.db"))
	if err != nil {
		return err
	}
	defer s.db.Close()
	srv := &http.Server{Handler: s, ReadHeaderTimeout: 10 * time.Second}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	for {
		if err := s.forget(); err != nil {
			log.Print(err)
		}
		select {
		case err := <-served:
			return err
		case <-ctx.Done():
			return srv.Shutdown(context.Background())
		case <-time.After(time.Hour):
		}
	}
}
