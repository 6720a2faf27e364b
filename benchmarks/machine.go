package main

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
)

// machine describes what was measured on.
func machine(dir string) ([]string, error) {
	sync, err := syncTime(dir)
	if err != nil {
		return nil, err
	}
	kernel, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	return []string{
		fmt.Sprintf("%s, %d cores", processor(), runtime.NumCPU()),
		strings.TrimSpace(runtime.GOOS + " " + string(kernel)),
		runtime.Version() + " " + runtime.GOARCH,
		"files on " + fileSystem(dir),
		fmt.Sprintf("fdatasync of 1 KiB: p50 %d µs", sync.Microseconds()),
	}, nil
}

func processor() string {
	info, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(info)) {
		if name, value, _ := strings.Cut(line, ":"); strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return runtime.GOARCH
}

// fileSystem returns the type of the file system that a directory is on.
func fileSystem(dir string) string {
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return "unknown"
	}
	mounts, _ := os.ReadFile("/proc/mounts")
	kind, longest := "unknown", -1
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		if len(f) < 3 {
			continue
		}
		if in := f[1] == "/" || dir == f[1] || strings.HasPrefix(dir, f[1]+"/"); in && len(f[1]) > longest {
			kind, longest = f[2], len(f[1])
		}
	}
	return kind
}

// syncTime returns the median of a write of 1 KiB and its sync.
func syncTime(dir string) (time.Duration, error) {
	path := filepath.Join(dir, "oncehttp-sync")
	l, err := openLog(path)
	if err != nil {
		return 0, err
	}
	defer os.Remove(path)
	defer l.Close()
	var all []time.Duration
	for range 300 {
		start := time.Now()
		if err := l.append("", begun, true); err != nil {
			return 0, err
		}
		all = append(all, time.Since(start))
	}
	slices.Sort(all)
	return all[len(all)/2], nil
}
