// Package clients runs real clients of etcd, each with the etcd library that it ships with.
//
// Each client's program prints what it sees. It runs on a fresh etcd, and on rangecache in front of another fresh etcd:
// the lines must be equal, and reads must have been answered from memory. `make test-clients` builds and runs them.
package clients

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"rangecache.test/shared"
)

const (
	tools = "../../target/tools"
	// timeout bounds every wait for a condition; no test asserts how long one takes.
	timeout = 2 * time.Minute
)

// programs are the clients: a program that takes a client URL as its last argument.
var programs = map[string][]string{
	"coredns": {tools + "/client-coredns", "-endpoint"},
	"cilium":  {tools + "/client-cilium", "-endpoint"},
	// By the JSON gateway.
	"patroni": {tools + "/client-patroni/bin/python", "../tools/client-patroni/main.py", "-endpoint"},
}

var fromMemory = regexp.MustCompile(`(?m)^rangecache_range_total\{outcome="(?:hit|waited)",[^}]*\} (\d+)$`)

func TestClients(t *testing.T) {
	for name, program := range programs {
		t.Run(name, func(t *testing.T) {
			direct := run(t, append(program, startEtcd(t)))
			url, metrics := startRangecache(t, startEtcd(t))
			through := run(t, append(program, url))
			if difference := firstDifference(direct, through); difference != "" {
				t.Errorf("the client sees another etcd through rangecache:\n%s", difference)
			}
			text, err := get(metrics + "/metrics")
			must(t, err)
			reads := 0
			for _, match := range fromMemory.FindAllStringSubmatch(text, -1) {
				count, err := strconv.Atoi(match[1])
				must(t, err)
				reads += count
			}
			if reads == 0 {
				t.Error("memory has answered no read")
			}
			t.Logf("%d equal lines, %d reads answered from memory", strings.Count(direct, "\n"), reads)
		})
	}
}

func TestDifferenceIsFound(t *testing.T) {
	if difference := firstDifference("a\nb\nc\n", "a\nx\nc\n"); !strings.Contains(difference, "line 2") {
		t.Errorf("%q", difference)
	}
	if difference := firstDifference("a\nb\n", "a\n"); !strings.Contains(difference, "line 2") {
		t.Errorf("%q", difference)
	}
	if difference := firstDifference("a\nb\n", "a\nb\n"); difference != "" {
		t.Errorf("%q", difference)
	}
}

// firstDifference returns "" if both are equal.
func firstDifference(direct, through string) string {
	if direct == through {
		return ""
	}
	a, b := strings.Split(direct, "\n"), strings.Split(through, "\n")
	line := 0
	for line < min(len(a), len(b)) && a[line] == b[line] {
		line++
	}
	at := func(lines []string) string {
		return strings.Join(lines[min(line, len(lines)):min(line+3, len(lines))], "\n")
	}
	return fmt.Sprintf("line %d\ndirectly:\n%s\nthrough rangecache:\n%s", line+1, at(a), at(b))
}

// startEtcd returns the client URL of a fresh etcd.
func startEtcd(t *testing.T) string {
	t.Helper()
	url, peer := freeURL(t), freeURL(t)
	start(t, tools+"/etcd-3.7", "--data-dir", t.TempDir(), "--log-level", "error",
		"--listen-client-urls", url, "--advertise-client-urls", url,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "default="+peer)
	await(t, url+"/health")
	return url
}

// startRangecache returns the client URL and the URL of the metrics of a rangecache that serves from memory.
func startRangecache(t *testing.T, etcd string) (string, string) {
	t.Helper()
	program := os.Getenv("RANGECACHE")
	if program == "" {
		program = "../../target/debug/rangecache"
	}
	url, metrics := freeURL(t), freeURL(t)
	start(t, program, "--endpoints", etcd, "--listen-client-urls", url, "--listen-metrics-urls", metrics)
	await(t, metrics+"/readyz")
	return url, metrics
}

// start runs a server until the test ends; its output is printed if the test fails.
func start(t *testing.T, program string, args ...string) {
	t.Helper()
	output, err := os.Create(filepath.Join(t.TempDir(), "log"))
	must(t, err)
	command := exec.Command(program, args...)
	command.Stdout, command.Stderr = output, output
	must(t, command.Start())
	t.Cleanup(func() {
		_ = command.Process.Signal(syscall.SIGTERM)
		_ = command.Wait()
		if t.Failed() {
			text, _ := os.ReadFile(output.Name())
			t.Logf("%s:\n%s", program, text[max(0, len(text)-4_000):])
		}
	})
}

func run(t *testing.T, words []string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	var stdout, stderr bytes.Buffer
	command := exec.CommandContext(ctx, words[0], words[1:]...)
	command.Stdout, command.Stderr = &stdout, &stderr
	if err := command.Run(); err != nil {
		t.Fatalf("%q: %v\n%s", words, err, stderr.String())
	}
	if stdout.Len() == 0 {
		t.Fatalf("%q printed nothing", words)
	}
	return stdout.String()
}

// await waits until the URL answers 200.
func await(t *testing.T, url string) {
	t.Helper()
	for end := time.Now().Add(timeout); ; time.Sleep(20 * time.Millisecond) {
		_, err := get(url)
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

func get(url string) (string, error) {
	client := http.Client{Timeout: 5 * time.Second}
	response, err := client.Get(url)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", url, response.Status)
	}
	return string(body), err
}

func freeURL(t *testing.T) string {
	t.Helper()
	return fmt.Sprintf("http://127.0.0.1:%d", shared.FreePort(t))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
