// Package etcd runs etcd's own tests with rangecache between their clients and etcd: its integration tests of watches and of
// reads and writes, and its robustness traffic with its validation.
package etcd

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"rangecache.test/shared"
)

const (
	suite   = "go.etcd.io/etcd/tests/v3"
	watches = suite + "/integration/clientv3/watch"
	calls   = suite + "/integration/clientv3"
	// What connects the suite's clients to etcd.
	clients = "framework/integration/cluster_direct.go"
)

// expected are the tests that see differences, and what they say. Some count watches at etcd: rangecache has one of its own
// there, and the clients' watches only until its mirror is loaded. The others see what responses from memory hold
// (docs/consistency.md, "Watches").
var expected = map[string]string{
	"watch/TestV3WatchCloseCancelRace":            "expected 0 watch, got 1",
	"watch/TestV3WatchCancellation":               "expected 1 watch, got 2",
	"watch/TestWatchCancelOnServer":               "expected 10 canceled watchers, got ",
	"watch/TestV3WatchProgressWaitsForSync":       "Incomplete watch response!",
	"watch/TestWatchFragmentDisable":              "expected 10 events with watch fragmentation",
	"watch/TestWatchFragmentDisableWithGRPCLimit": "expected 0 events with watch fragmentation",
	"watch/TestWatchFragmentEnable":               "expected 10 events with watch fragmentation",
	"watch/TestWatchFragmentEnableWithGRPCLimit":  "expected 10 events with watch fragmentation",
}

// The tests that set etcd's interval of progress notifications: rangecache has an interval of its own. Some wait for one
// for 4 s and then for none for 1 s, another one waits for one for 1 s.
const (
	seldom = "TestWatchWithProgressNotify.*"
	often  = "TestConfigurableWatchProgressNotifyInterval"
)

// The tests of reads and writes in which every client, with a rangecache of its own, stays connected.
const readsAndWrites = "TestKV(Range|DeleteRange|Compact|CompactError|GetStreamCompactedError|GetKeysOnlyWithCountOnly|" +
	"PutWith.*|PutAtMostOnce|GetRetry|PutFailGetRetry|GetCancel)"

func TestSuite(t *testing.T) {
	root, err := filepath.Abs("../..")
	must(t, err)
	// Files in the module cache cannot be overlaid.
	folder := filepath.Join(root, "target", "etcd-suite")
	must(t, os.RemoveAll(folder))
	source, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", suite).Output()
	must(t, err)
	must(t, os.MkdirAll(folder, 0o755))
	must(t, copyTree(strings.TrimSpace(string(source)), filepath.Join(folder, "suite")))
	ours, err := os.ReadFile("testdata/clients.go")
	must(t, err)
	must(t, os.WriteFile(filepath.Join(folder, "suite", clients), ours, 0o644))
	for _, name := range []string{"go.mod", "go.sum"} {
		content, err := os.ReadFile(name)
		must(t, err)
		must(t, os.WriteFile(filepath.Join(folder, name), content, 0o644))
	}
	ourModule := "rangecache.test/shared"
	run(t, folder, "go", "mod", "edit", "-replace", suite+"=./suite", "-droprequire", ourModule, "-dropreplace", ourModule)

	report := filepath.Join(folder, "created.txt")
	rangecache := os.Getenv("RANGECACHE")
	if rangecache == "" {
		rangecache = filepath.Join(root, "target/debug/rangecache")
	}
	environment := append(os.Environ(), "RANGECACHE="+rangecache, "UNDER_TEST_REPORT="+report)
	output := []byte{}
	for _, part := range []struct{ chosen, of, flags string }{
		{"-skip=^(" + seldom + "|" + often + ")$", watches, ""},
		{"-run=^" + seldom + "$", watches, " --watch-progress-notify-interval 1500ms"},
		{"-run=^" + often + "$", watches, " --watch-progress-notify-interval 500ms"},
		{"-run=^" + readsAndWrites + "$", calls, ""},
	} {
		command := exec.Command("go", "test", "-json", "-count=1", "-timeout=5m", part.chosen, part.of)
		command.Dir, command.Env = folder, append(environment, "UNDER_TEST_FLAGS=--watch-cache auto"+part.flags)
		// Some tests leave their client, and so its rangecache, open.
		command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		printed, err := command.Output()
		if len(printed) == 0 {
			t.Fatal(err)
		}
		syscall.Kill(-command.Process.Pid, syscall.SIGKILL)
		output = append(output, printed...)
	}
	shared.JudgeSuite(t, output, expected, 50)
	fromMemory(t, report)
}

// fromMemory checks that memory served most watches.
func fromMemory(t *testing.T, report string) {
	file, err := os.Open(report)
	must(t, err)
	defer file.Close()
	memory, all := 0, 0
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		sample, number, _ := strings.Cut(lines.Text(), "} ")
		count, err := strconv.Atoi(number)
		must(t, err)
		all += count
		if strings.Contains(sample, `outcome="memory"`) {
			memory += count
		}
	}
	t.Logf("memory served %d of %d watches", memory, all)
	if memory*10 < all*9 {
		t.Errorf("memory served only %d of %d watches", memory, all)
	}
}

// copyTree copies a folder of the module cache, whose files are read-only.
func copyTree(from, to string) error {
	return os.CopyFS(to, os.DirFS(from))
}

func run(t *testing.T, folder string, name string, arguments ...string) {
	t.Helper()
	command := exec.Command(name, arguments...)
	command.Dir = folder
	if output, err := command.CombinedOutput(); err != nil {
		t.Fatalf("%s %s: %v\n%s", name, arguments, err, output)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
