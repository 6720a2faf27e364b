package oncehttptest

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
)

// schedule decides which fault an attempt meets. All of it is guarded by
// Server.mu; functions of the user are called without it.
type schedule struct {
	script []Fault
	rules  []*rule
	choose func(Attempt) Fault
	random func(Attempt) Fault
}

type rule struct {
	match  func(Attempt) bool
	faults []Fault
}

// Script appends faults, consumed one by each attempt as it comes, whatever it
// is; a zero Fault lets one pass. Attempts that find the script at its end go
// on to [Server.FaultFunc], then to [Server.Random].
func (s *Server) Script(faults ...Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.schedule.script = append(s.schedule.script, faults...)
}

// ScriptFor is a script for the attempts that match, which takes precedence
// over [Server.Script]. Of several scripts that match and are not at their
// end, the first one added is used. match is called concurrently and must not
// modify the attempt; see [ByKey] and [ByBody].
func (s *Server) ScriptFor(match func(Attempt) bool, faults ...Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.schedule.rules = append(s.schedule.rules, &rule{match, slices.Clone(faults)})
}

// FaultFunc sets what chooses the fault of an attempt that no script concerns.
// A function of Attempt.Body and Attempt.N only gives each operation the same
// faults in every run, however the operations interleave. f is called
// concurrently; nil removes it.
func (s *Server) FaultFunc(f func(Attempt) Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.schedule.choose = f
}

// Random gives every attempt that nothing else concerns a fault drawn by the
// given rates, each between 0 and 1; what their sum leaves free is no fault.
// The draw depends on the seed, on the attempt's account, method, path and
// body, and on its N: a run can be repeated, however its operations
// interleave. An empty map ends it.
func (s *Server) Random(seed uint64, rates map[Fault]float64) {
	var random func(Attempt) Fault
	if len(rates) > 0 {
		rates = maps.Clone(rates)
		faults := slices.SortedFunc(maps.Keys(rates), func(a, b Fault) int {
			return strings.Compare(a.String(), b.String())
		})
		random = func(a Attempt) Fault {
			sum := identity(a.Account, a.Method, a.Path, a.Body)
			rng := rand.New(rand.NewPCG(seed^binary.LittleEndian.Uint64(sum[:]), uint64(a.N)))
			x := rng.Float64()
			for _, f := range faults {
				if x -= rates[f]; x < 0 {
					return f
				}
			}
			return Fault{}
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.schedule.random = random
}

// ByKey matches the attempts with this idempotency key.
func ByKey(key string) func(Attempt) bool {
	return func(a Attempt) bool { return a.Key == key }
}

// ByBody matches the attempts whose body contains part.
func ByBody(part string) func(Attempt) bool {
	return func(a Attempt) bool { return bytes.Contains(a.Body, []byte(part)) }
}

// needsBody tells whether a fault can only be chosen when the body is known.
func (s *Server) needsBody() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := &s.schedule
	return c.choose != nil || c.random != nil || slices.ContainsFunc(c.rules, func(r *rule) bool { return len(r.faults) > 0 })
}

// fault chooses the fault of an attempt and consumes it where it is scripted.
func (s *Server) fault(a Attempt) Fault {
	s.mu.Lock()
	rules := slices.Clone(s.schedule.rules)
	s.mu.Unlock()
	for _, r := range rules {
		if r.match(a) {
			if f, ok := s.take(&r.faults); ok {
				return f
			}
		}
	}
	if f, ok := s.take(&s.schedule.script); ok {
		return f
	}
	s.mu.Lock()
	choose, random := s.schedule.choose, s.schedule.random
	s.mu.Unlock()
	if choose != nil {
		if f := choose(a); f != (Fault{}) {
			return f
		}
	}
	if random != nil {
		return random(a)
	}
	return Fault{}
}

func (s *Server) take(faults *[]Fault) (f Fault, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(*faults) == 0 {
		return Fault{}, false
	}
	f, *faults = (*faults)[0], (*faults)[1:]
	return f, true
}

// identity is a digest of what makes two attempts the same for Attempt.N.
func identity(account, method, path string, body []byte) [sha256.Size]byte {
	h := sha256.New()
	for _, part := range []string{account, method, path} {
		h.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(part))))
		h.Write([]byte(part))
	}
	h.Write(body)
	return [sha256.Size]byte(h.Sum(nil))
}
