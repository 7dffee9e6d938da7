package kube

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// modern is a run of the benchmark: its sizes, and what it has found.
type modern struct {
	objects int
	seconds int // of the longest part
	table   *comparison
}

// modernPart is measured with servers of its own in each deployment.
type modernPart struct {
	name        string
	deployments []deployment
	measure     func(m *modern, t *testing.T, d deployment)
}

var modernParts = []modernPart{
	{"apiservers", allDeployments, (*modern).apiservers},
	{"watches", []deployment{noRangecache, oneShared}, (*modern).watches},
	{"custom resource", allDeployments, (*modern).customResource},
}

// Objects of the filled cluster have so many bytes, as pods have today.
const modernObjectBytes = 5000

// TestModern measures what rangecaches cost and spare three kube-apiservers with their defaults, in each deployment. It
// runs only if KUBE_MODERN is set, and prints a table. It asserts nothing: failed calls and wrong answers are in the table.
func TestModern(t *testing.T) {
	if setting(t, "KUBE_MODERN", 0) == 0 {
		t.Skip("a measurement: make bench-modern")
	}
	m := &modern{objects: setting(t, "KUBE_OBJECTS", 2000), seconds: setting(t, "KUBE_SECONDS", 5), table: newComparison(allDeployments)}
	for _, part := range modernParts {
		t.Run(part.name, func(t *testing.T) {
			for _, d := range part.deployments {
				t.Run(d.name, func(t *testing.T) { part.measure(m, t, d) })
			}
		})
	}
	fmt.Printf("\n%d objects, %d s; CPU and memory are sums of etcd and all rangecaches\n\n%s\n", m.objects, m.seconds, m.table.markdown())
}

// short is the length of the parts whose figures need less time than that of the idle apiservers.
func (m *modern) short() time.Duration {
	return time.Duration(max(min(5, m.seconds), m.seconds/5)) * time.Second
}

// apiservers measures three apiservers in front of a filled etcd: their start, their idle time, and two loads.
func (m *modern) apiservers(t *testing.T, d deployment) {
	files := newCertificates(t)
	etcd := startEtcd(t, files, "etcd-3.7")
	objects := storedObjects{count: m.objects, dataBytes: modernObjectBytes}
	objects.fill(t, files, etcd)
	run := d.start(t, files, etcd)
	m.startOfServers(t, run, &objects)
	m.idle(t, run)

	const written = "written"
	client := run.servers[0].client
	_, err := client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: written}}, metav1.CreateOptions{})
	must(t, written, err)
	must(t, written, fill(t.Context(), run.servers, written, "object", objectsPerNamespace))
	m.steady(t, run, written)
	m.mix(t, run, written)
}

// startOfServers measures the start of all apiservers at once. The rangecaches run already.
func (m *modern) startOfServers(t *testing.T, run *deployed, objects *storedObjects) {
	const part = "three apiservers start"
	spent := run.spend(t, part, func() { run.startServers(t) })
	m.table.addSpending(part, run.name, spent, "in all", 1)
	m.table.add(part, "time until all serve, s", run.name, spent.took.Seconds())
	for _, server := range run.servers {
		if err := objects.check(t.Context(), server); err != nil {
			m.table.fault(part, run.name, "%s: %v", server.name, err)
		}
	}
}

// idle measures apiservers without clients, each of which compares each resource with its etcd every five minutes or
// somewhat more.
func (m *modern) idle(t *testing.T, run *deployed) {
	part := fmt.Sprintf("idle for %d s, with consistency checks", m.seconds)
	before := run.consistencyChecks(t)
	spent := run.spend(t, part, func() { time.Sleep(time.Duration(m.seconds) * time.Second) })
	checks := grown(before, run.consistencyChecks(t))
	t.Logf("%s: consistency checks: %s", run.name, listed(checks))
	m.table.addSpending(part, run.name, spent, "a minute", spent.took.Minutes())
	if wrong := checks["failure"] + checks["error"]; wrong > 0 {
		m.table.fault(part, run.name, "%.0f consistency checks differ, %.0f failed", checks["failure"], checks["error"])
	}
}

// consistencyChecks returns how many comparisons all apiservers have made, by result.
func (d *deployed) consistencyChecks(t *testing.T) map[string]float64 {
	t.Helper()
	var all samples
	for _, server := range d.servers {
		all = append(all, server.scrape(t)...)
	}
	return all.by("apiserver_storage_consistency_checks_total", "status")
}
