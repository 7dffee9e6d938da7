package shared

import (
	"bytes"
	"encoding/json"
	"path"
	"strings"
	"testing"
)

// event is a line of `go test -json`.
type event struct{ Action, Package, Test, Output string }

// JudgeSuite reads the output of `go test -json` of another project's tests. A test that fails is an error, unless expected
// has its name, behind the last part of its package's, and it said these words; so are fewer tests that pass than least.
func JudgeSuite(t *testing.T, output []byte, expected map[string]string, least int) {
	t.Helper()
	said := map[string]*strings.Builder{}
	passed := 0
	for line := range bytes.Lines(output) {
		var e event
		if json.Unmarshal(line, &e) != nil || e.Test == "" {
			continue
		}
		name := path.Base(e.Package) + "/" + e.Test
		if said[name] == nil {
			said[name] = &strings.Builder{}
		}
		switch e.Action {
		case "output":
			if !strings.Contains(e.Output, "logger.go:") {
				said[name].WriteString(e.Output)
			}
		case "pass":
			passed++
		case "fail":
			words, known := expected[name]
			if text := said[name].String(); !known || !strings.Contains(text, words) {
				t.Errorf("%s fails through rangecache:\n%s", name, text)
			}
		}
	}
	t.Logf("%d tests passed through rangecache", passed)
	if passed < least {
		t.Errorf("only %d tests passed:\n%s", passed, output[max(0, len(output)-4000):])
	}
}
