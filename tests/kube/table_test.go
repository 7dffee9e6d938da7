package kube

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// setting returns a number from the environment: `make bench-kube` uses larger ones than `make test-kube`.
func setting(t *testing.T, name string, otherwise int) int {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	number, err := strconv.Atoi(text)
	must(t, name, err)
	return number
}

const objectsPerNamespace = 500

// TestTable measures the cost of two apiservers to etcd, at their start and while serving, with etcd itself, its
// grpc-proxy and rangecache. It prints a table; it fails only on errors, or if rangecache forwards reads that it has
// in memory.
func TestTable(t *testing.T) {
	objects, seconds := setting(t, "KUBE_OBJECTS", 3000), setting(t, "KUBE_SECONDS", 4)
	files := newCertificates(t)
	etcd := startEtcd(t, files, "etcd-3.7")
	namespaces := fillCluster(t, files, etcd, objects)
	kinds := []string{direct, rangecache}
	if setting(t, "KUBE_GRPC_PROXY", 0) > 0 { // through it consistent lists take seconds
		kinds = []string{direct, grpcProxy, rangecache}
	}
	columns := map[string]*column{}
	for _, flags := range [][]string{nil, {"--watch-cache=false"}} {
		for _, kind := range kinds {
			name := kind + strings.Join(flags, "")
			// A test of its own, so that its servers stop with it.
			t.Run(name, func(t *testing.T) { columns[name] = measure(t, files, etcd, kind, namespaces, seconds, flags) })
		}
	}
	if t.Failed() {
		return
	}
	var table strings.Builder
	fmt.Fprintf(&table, "| | | %s |\n|---|---|%s\n", strings.Join(kinds, " | "), strings.Repeat("---|", len(kinds)))
	for _, flags := range []string{"", "--watch-cache=false"} {
		last := ""
		for row := range columns[direct].rows {
			first := columns[direct+flags].rows[row]
			cells := []string{"", first.what}
			if first.when != last {
				cells[0], last = first.when, first.when
			}
			for _, kind := range kinds {
				cells = append(cells, columns[kind+flags].rows[row].figure)
			}
			fmt.Fprintf(&table, "| %s |\n", strings.Join(cells, " | "))
		}
	}
	fmt.Printf("\n%d objects\n\n%s\n", objects, table.String())
}

// fillCluster creates the objects through an apiserver that is stopped afterwards.
func fillCluster(t *testing.T, files *certificates, etcd *etcdServer, objects int) []string {
	t.Helper()
	server := startAPIServer(t, files, 1, etcd.url)
	server.awaitReady(t)
	var namespaces []string
	for i := range max(1, objects/objectsPerNamespace) {
		name := fmt.Sprintf("filled-%02d", i)
		_, err := server.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		must(t, name, err)
		must(t, name, fill(t.Context(), []*apiserver{server}, name, "object", objectsPerNamespace))
		namespaces = append(namespaces, name)
	}
	server.stop()
	return namespaces
}

// column is the measurements with one server in front of etcd.
type column struct{ rows []row }

type row struct{ when, what, figure string }

func (c *column) add(when, what, format string, args ...any) {
	c.rows = append(c.rows, row{when, what, fmt.Sprintf(format, args...)})
}

func measure(t *testing.T, files *certificates, etcd *etcdServer, kind string, namespaces []string, seconds int, flags []string) *column {
	t.Helper()
	c := &column{}
	suffix := ""
	if len(flags) > 0 {
		suffix = ", `" + flags[0] + "`"
	}
	front := startFront(t, files, kind, etcd)
	var servers []*apiserver
	phase := func(when string, ranges float64, do func()) {
		t.Helper()
		costReport := openCostReport(t, etcd, front, servers)
		do()
		costReport.servers = servers
		took := time.Since(costReport.before.at).Seconds()
		costReport.close(t, when+suffix)
		c.add(when+suffix, "time", "%.1f s", took)
		c.cost(when+suffix, costReport)
		if kind == rangecache {
			costReport.nothingForwarded(t, ranges)
		}
	}
	phase("two apiservers start", 200, func() {
		for i := range 2 {
			servers = append(servers, startAPIServer(t, files, i+1, front.url, flags...))
		}
		for _, server := range servers {
			server.awaitReady(t)
		}
	})

	const clients = 10
	phase(fmt.Sprintf("%d clients list all objects at once", clients), 2, func() {
		together(clients, func(turn int) {
			list, err := servers[turn%2].client.CoreV1().ConfigMaps(metav1.NamespaceAll).List(t.Context(), metav1.ListOptions{LabelSelector: "shard"})
			if err != nil || len(list.Items) < len(namespaces)*objectsPerNamespace {
				t.Errorf("%d objects are listed: %v", len(list.Items), err)
			}
		})
	})

	load := newLoad(servers, namespaces, operations)
	if kind == grpcProxy {
		load.timeout = 10 * time.Second // its failures are shown, not waited for
	}
	steady := fmt.Sprintf("serving for %d s", seconds)
	phase(steady, 200, func() { load.run(t, time.Duration(seconds)*time.Second) })
	for _, operation := range operations {
		c.add(steady+suffix, operation.name+", p50 / p99", "%s", load.latency(operation.name))
	}
	c.add(steady+suffix, "failed calls", "%d of %d", load.failed, load.count())
	if kind == grpcProxy {
		return c
	}
	if load.failed > 0 {
		t.Errorf("%d calls failed, the first: %v", load.failed, load.first)
	}
	for _, server := range servers {
		if server.gaveUpStreams() {
			t.Errorf("%s has switched RangeStream off", server.name)
		}
	}
	return c
}

// cost adds the cost of a period to etcd and to the server in front of it.
func (c *column) cost(when string, l *costReport) {
	c.add(when, "etcd's CPU", "%.0f ms", l.spent.etcdCPU.Seconds()*1000)
	c.add(when, "calls of etcd: Range, RangeStream, Txn", "%.0f, %.0f, %.0f", l.calls["Range"], l.calls["RangeStream"], l.calls["Txn"])
	c.add(when, "sent by etcd", "%.1f MB", l.spent.sentBytes/1e6)
	front, memory := "–", "–"
	if l.front.process != nil {
		front = fmt.Sprintf("%.0f ms", l.spent.frontCPU.Seconds()*1000)
	}
	if l.front.kind == rangecache {
		share, all := l.fromMemory()
		memory = fmt.Sprintf("%.1f %% of %.0f", share*100, all)
	}
	c.add(when, "CPU of the proxy", "%s", front)
	c.add(when, "reads answered from memory", "%s", memory)
}
