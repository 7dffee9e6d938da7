package kube

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"
	"rangecache.test/shared"
)

// TestUnixSocket has an apiserver call rangecache by a unix socket, without TLS.
func TestUnixSocket(t *testing.T) {
	files := newCertificates(t)
	etcd := startEtcd(t, files, "etcd-3.7")
	socket := "unix://" + filepath.Join(t.TempDir(), "etcd.sock")
	metrics := fmt.Sprintf("http://127.0.0.1:%d", shared.FreePort(t))
	front := &front{kind: rangecache, url: socket, metrics: metrics}
	front.process = newProcess(t, rangecache, rangecacheBinary(), "--listen-client-urls", socket, "--listen-metrics-urls", metrics,
		"--log-format", "text", "--endpoints", etcd.url, "--cacert", files.ca, "--cert", files.clientCert, "--key", files.clientKey)
	front.awaitWarm(t)
	// With a certificate for etcd it would use TLS on the socket, too.
	server := startAPIServer(t, files, 1, front.url, "--etcd-cafile=", "--etcd-certfile=", "--etcd-keyfile=")
	server.awaitReady(t)
	costReport := openCostReport(t, etcd, front, []*apiserver{server})
	useSomeObjects(t, server)
	costReport.close(t, "some objects")
	costReport.nothingForwarded(t, 40)
}

// TestOverrides has an apiserver read one resource through rangecache, which mirrors nothing else, and the others from
// etcd itself.
func TestOverrides(t *testing.T) {
	files := newCertificates(t)
	etcd := startEtcd(t, files, "etcd-3.7")
	log := filepath.Join(t.TempDir(), "access.jsonl")
	// Without a slash at its end: the apiserver reads that key to get the current revision.
	front := startFront(t, files, rangecache, etcd, "--cache-prefix", "/registry/configmaps", "--access-log", log,
		"--access-log-keys", "--access-log-sample", "1")
	server := startAPIServer(t, files, 1, etcd.url, "--etcd-servers-overrides", "/configmaps#"+front.url)
	server.awaitReady(t)
	useSomeObjects(t, server)
	front.stop()
	text, err := os.ReadFile(log)
	must(t, log, err)
	fromMemory := 0
	for line := range strings.Lines(string(text)) {
		var call struct{ Method, Key, Outcome string }
		must(t, line, json.Unmarshal([]byte(line), &call))
		isHealthCheck := call.Key == "/registry/health" || call.Key == "compact_rev_key"
		switch {
		case call.Method == "etcdserverpb.Watch/Watch" && call.Outcome == "memory":
		case call.Outcome == "hit" || call.Outcome == "waited":
			fromMemory++
		case call.Outcome != "" && !isHealthCheck:
			t.Errorf("not from memory: %s", line)
		}
	}
	if fromMemory < 40 {
		t.Errorf("%d reads from memory:\n%s", fromMemory, tail(string(text), 10))
	}
}

// useSomeObjects writes, gets and lists the objects of a namespace.
func useSomeObjects(t *testing.T, server *apiserver) {
	t.Helper()
	c := &harness{T: t, ctx: t.Context(), prefix: "settings", servers: [2]*apiserver{server, server}}
	namespace := c.namespace("some")
	c.create(namespace, "object", 100)
	for n := range 20 {
		c.set(namespace, "object-00007", strconv.Itoa(n), 0)
		object, err := c.in(namespace, 0).Get(c.ctx, "object-00007", metav1.GetOptions{})
		c.must("reading", err)
		if object.Data["state"] != strconv.Itoa(n) {
			t.Fatalf("read %q after writing %d", object.Data["state"], n)
		}
		if objects := c.list(namespace, 0, metav1.ListOptions{}); len(objects.Items) != 100 {
			t.Fatalf("listed %d objects", len(objects.Items))
		}
	}
}

// TestApiserverStartsBeforeRangecache restarts an apiserver while rangecache is down: it serves once rangecache is back,
// and again after another restart; nothing is lost.
func TestApiserverStartsBeforeRangecache(t *testing.T) {
	files := newCertificates(t)
	etcd := startEtcd(t, files, "etcd-3.7")
	front := startFront(t, files, rangecache, etcd)
	server := startAPIServer(t, files, 1, front.url)
	server.awaitReady(t)
	c := &harness{T: t, ctx: t.Context(), prefix: "restarted", servers: [2]*apiserver{server, server}}
	namespace := c.namespace("restarted")
	c.create(namespace, "object", 50)
	factory := informers.NewSharedInformerFactoryWithOptions(server.client, 0, informers.WithNamespace(namespace))
	informer := factory.Core().V1().ConfigMaps().Informer()
	factory.Start(c.ctx.Done())
	cache.WaitForCacheSync(c.ctx.Done(), informer.HasSynced)

	front.kill()
	server.kill()
	known := len(server.log())
	server.start(t)
	await(t, "the apiserver calls its etcd", func() error {
		if log := server.log()[known:]; !strings.Contains(log, "connection refused") {
			return errors.New("its log names no failed connection: " + tail(log, 3))
		}
		return nil
	})
	front.start(t)
	awaitServing(t, server)
	c.set(namespace, "object-00003", "written after rangecache was back", 0)
	server.restart(t, false)
	awaitServing(t, server)
	c.set(namespace, "object-00004", "written after another restart", 0)

	objects := c.list(namespace, 0, metav1.ListOptions{})
	states := []string{}
	for _, object := range objects.Items {
		states = append(states, object.Data["state"])
	}
	for _, expected := range []string{"written after rangecache was back", "written after another restart"} {
		if !slices.Contains(states, expected) {
			t.Errorf("%q is lost", expected)
		}
	}
	if len(objects.Items) != 50 {
		t.Errorf("%d of 50 objects", len(objects.Items))
	}
	c.holds(namespace, informer)
}

// awaitServing waits until an apiserver is ready, and starts it again when it has given up, as a supervisor does.
func awaitServing(t *testing.T, server *apiserver) {
	t.Helper()
	await(t, server.name+" serves", func() error {
		if !server.running() {
			server.start(t)
			return errors.New("it has ended")
		}
		body, status, err := fetch(server.http, server.url+"/readyz")
		if err == nil && status != http.StatusOK {
			err = fmt.Errorf("%d: %s", status, body)
		}
		return err
	})
}
