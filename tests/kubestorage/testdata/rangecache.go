// Package testserver: the clients of Kubernetes' storage tests, each behind a rangecache of its own. TestStorage adds this
// file to the package that starts their etcd.
package testserver

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// throughRangecache returns the URL of a rangecache before these endpoints, which serves from memory and ends with the test.
func throughRangecache(t testing.TB, endpoints []string) []string {
	t.Helper()
	log, err := os.Create(filepath.Join(t.TempDir(), "rangecache.log"))
	if err != nil {
		t.Fatal(err)
	}
	command := exec.Command(os.Getenv("RANGECACHE"), "--endpoints", strings.Join(endpoints, ","), "--log-format", "json",
		"--listen-client-urls", "http://127.0.0.1:0", "--listen-metrics-urls", "http://127.0.0.1:0")
	command.Stdout, command.Stderr = log, log
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = command.Process.Kill()
		_ = command.Wait()
		_ = log.Close()
	})
	serving := map[string]string{}
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		text, err := os.ReadFile(log.Name())
		if err != nil {
			t.Fatal(err)
		}
		for line := range bytes.Lines(text) {
			var logged struct{ Message, URL string }
			if json.Unmarshal(line, &logged) == nil && strings.HasPrefix(logged.Message, "serving ") {
				serving[logged.Message] = logged.URL
			}
		}
		if url := serving["serving metrics"]; url != "" {
			if response, err := http.Get(url + "/readyz"); err == nil {
				_ = response.Body.Close()
				if response.StatusCode == http.StatusOK {
					return []string{serving["serving clients"]}
				}
			}
		}
	}
	text, _ := os.ReadFile(log.Name())
	t.Fatalf("rangecache does not become ready:\n%s", text)
	return nil
}
