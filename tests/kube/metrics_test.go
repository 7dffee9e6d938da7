package kube

import (
	"fmt"
	"maps"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// sample is one line of /metrics.
type sample struct {
	name   string
	labels map[string]string
	value  float64
}

type samples []sample

var (
	sampleLine = regexp.MustCompile(`(?m)^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? ([0-9eE.+-]+)(?: .*)?$`)
	labelPair  = regexp.MustCompile(`([a-zA-Z_]+)="((?:[^"\\]|\\.)*)"`)
)

func scrape(t *testing.T, client *http.Client, url string) samples {
	t.Helper()
	text, status, err := fetch(client, url)
	if err != nil || status != http.StatusOK {
		t.Fatalf("%s: %d, %v", url, status, err)
	}
	var all samples
	for _, match := range sampleLine.FindAllStringSubmatch(text, -1) {
		value, err := strconv.ParseFloat(match[3], 64)
		must(t, match[0], err)
		labels := map[string]string{}
		for _, pair := range labelPair.FindAllStringSubmatch(match[2], -1) {
			labels[pair[1]] = pair[2]
		}
		all = append(all, sample{match[1], labels, value})
	}
	return all
}

// by sums the samples of a name by the values of some labels, joined with a space.
func (s samples) by(name string, labels ...string) map[string]float64 {
	sums := map[string]float64{}
	for _, sample := range s {
		if sample.name == name {
			var values []string
			for _, label := range labels {
				values = append(values, sample.labels[label])
			}
			sums[strings.Join(values, " ")] += sample.value
		}
	}
	return sums
}

// sum adds the samples of a name that have the labels, given as name, value, name, value and so on.
func (s samples) sum(name string, labels ...string) float64 {
	var sum float64
next:
	for _, sample := range s {
		if sample.name != name {
			continue
		}
		for i := 0; i < len(labels); i += 2 {
			if sample.labels[labels[i]] != labels[i+1] {
				continue next
			}
		}
		sum += sample.value
	}
	return sum
}

// grown returns by how much each sum has grown; those that have not are left out.
func grown(before, after map[string]float64) map[string]float64 {
	difference := map[string]float64{}
	for key, value := range after {
		if value != before[key] {
			difference[key] = value - before[key]
		}
	}
	return difference
}

// listed formats a map in the order of its keys.
func listed(sums map[string]float64) string {
	var parts []string
	for _, key := range slices.Sorted(maps.Keys(sums)) {
		parts = append(parts, fmt.Sprintf("%s %.0f", key, sums[key]))
	}
	return strings.Join(parts, ", ")
}

// cpuTime returns the process's CPU time so far, in steps of 10 ms.
func (p *process) cpuTime(t *testing.T) time.Duration {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.pid()))
	must(t, p.name, err)
	// The name in parentheses may contain spaces; user and system time are the 12th and 13th fields after it.
	_, rest, _ := strings.Cut(string(stat), ") ")
	fields := strings.Fields(rest)
	user, err := strconv.Atoi(fields[11])
	must(t, "user time", err)
	system, err := strconv.Atoi(fields[12])
	must(t, "system time", err)
	return time.Duration(user+system) * 10 * time.Millisecond
}

// residentBytes returns the process's resident memory.
func (p *process) residentBytes(t *testing.T) int {
	t.Helper()
	statm, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", p.pid()))
	must(t, p.name, err)
	pages, err := strconv.Atoi(strings.Fields(string(statm))[1])
	must(t, "resident pages", err)
	return pages * os.Getpagesize()
}
