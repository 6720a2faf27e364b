package main

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
)

// benchmarks are figures by name, without "Benchmark", and unit.
type benchmarks map[string]map[string]float64

var processors = regexp.MustCompile(`-\d+$`)

// ownBenchmarks runs the library's own benchmarks of scale once.
func ownBenchmarks(records int) (benchmarks, error) {
	cmd := exec.Command("go", "test", "-run", "^$", "-bench", "^Benchmark(BeginIn|FindPending|OpenLarge)$", "-timeout", "2h", ".")
	cmd.Dir = ".."
	cmd.Env = append(os.Environ(), "ONCEHTTP_SCALE="+strconv.Itoa(records))
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("the library's own benchmarks: %w\n%s", err, out)
	}
	return parseBenchmarks(string(out)), nil
}

func parseBenchmarks(out string) benchmarks {
	all := make(benchmarks)
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if len(f) < 4 || !strings.HasPrefix(f[0], "Benchmark") {
			continue
		}
		figures := make(map[string]float64)
		for i := 2; i+1 < len(f); i += 2 {
			if v, err := strconv.ParseFloat(f[i], 64); err == nil {
				figures[f[i+1]] = v
			}
		}
		all[processors.ReplaceAllString(strings.TrimPrefix(f[0], "Benchmark"), "")] = figures
	}
	return all
}
