// Package kubestorage runs Kubernetes' own tests of its storage with rangecache between their clients and etcd: those of
// the client of etcd, and those of the watch cache.
package kubestorage

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"rangecache.test/shared"
)

const (
	module = "k8s.io/apiserver@v0.37.1"
	server = "pkg/storage/etcd3/testserver"
	// What connects the suite's clients to etcd, and with what it is replaced.
	direct  = "Endpoints:   e.Server.Cluster().ClientURLs(),"
	through = "Endpoints:   throughRangecache(t, e.Server.Cluster().ClientURLs()),"
)

func TestStorage(t *testing.T) {
	root, err := filepath.Abs("../..")
	must(t, err)
	downloaded, err := exec.Command("go", "mod", "download", "-json", module).Output()
	must(t, err)
	var source struct{ Dir string }
	must(t, json.Unmarshal(downloaded, &source))
	// Files in the module cache cannot be changed.
	folder := filepath.Join(root, "target", "kubestorage-suite")
	must(t, os.RemoveAll(folder))
	must(t, os.CopyFS(folder, os.DirFS(source.Dir)))
	starting := filepath.Join(folder, server, "test_server.go")
	text, err := os.ReadFile(starting)
	must(t, err)
	if strings.Count(string(text), direct) != 1 {
		t.Fatalf("%s connects its clients in another way than this test knows", starting)
	}
	must(t, os.Remove(starting))
	must(t, os.WriteFile(starting, []byte(strings.Replace(string(text), direct, through, 1)), 0o644))
	ours, err := os.ReadFile("testdata/rangecache.go")
	must(t, err)
	must(t, os.WriteFile(filepath.Join(folder, server, "rangecache.go"), ours, 0o644))

	rangecache := os.Getenv("RANGECACHE")
	if rangecache == "" {
		rangecache = filepath.Join(root, "target/debug/rangecache")
	}
	command := exec.Command("go", "test", "-json", "-count=1", "-timeout=15m", "./pkg/storage/etcd3/", "./pkg/storage/cacher/")
	command.Dir, command.Env = folder, append(os.Environ(), "RANGECACHE="+rangecache)
	output, _ := command.Output()
	shared.JudgeSuite(t, output, nil, 1000)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
