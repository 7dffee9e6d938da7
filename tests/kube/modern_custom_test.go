package kube

import (
	"context"
	"fmt"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
)

const (
	customWrites = 20 // a second
	customGets   = 50
	customPages  = 2
)

// customResource measures a large custom resource of which the apiservers keep no watch cache; without rangecache, which
// then spares no memory, also with the watch cache. Memory includes the apiservers'.
func (m *modern) customResource(t *testing.T, d deployment) {
	files := newCertificates(t)
	etcd := startEtcd(t, files, "etcd-3.7")
	filler := startAPIServer(t, files, 1, etcd.url)
	filler.awaitReady(t)
	(&customObjects{count: m.objects, dataBytes: 1000}).fill(t, files, etcd, filler)
	filler.stop()

	run := d.start(t, files, etcd)
	uncached := fmt.Sprintf("custom resource of %d × 1 KB at `#0`; memory with the apiservers'", m.objects)
	instead := "the same, none with the watch cache"
	if d.fronts > 0 {
		m.serveCustom(t, run, []string{customUncached}, uncached, instead)
		return
	}
	m.serveCustom(t, run, []string{customUncached}, uncached)
	m.serveCustom(t, run, nil, instead)
}

// serveCustom measures apiservers with these flags, as rows of the parts.
func (m *modern) serveCustom(t *testing.T, run *deployed, flags []string, parts ...string) {
	t.Helper()
	run.startServers(t, flags...)
	defer run.stopServers()
	clients := map[*apiserver]dynamic.ResourceInterface{}
	for _, server := range run.servers {
		clients[server] = server.custom(t)
	}
	written := &acknowledged{latest: map[string]int64{}}
	spent, load := run.play(t, parts[0], m.short(), customNamespace,
		operation{modernWrites, customWrites, func(ctx context.Context, server *apiserver, _ string, turn int) error {
			object, err := patchCustom(ctx, clients[server], turn*131%m.objects, fmt.Sprint(turn))
			if err == nil {
				written.record(object.GetName(), object.GetResourceVersion())
			}
			return err
		}},
		operation{"GET", customGets, func(ctx context.Context, server *apiserver, _ string, turn int) error {
			name := customName(turn * 131 % m.objects)
			known := written.now(name)
			object, err := clients[server].Get(ctx, name, metav1.GetOptions{})
			if err == nil && revision(object.GetResourceVersion()) < known[name] {
				err = fmt.Errorf("wrong: %s is read at %s after it was written at %d", name, object.GetResourceVersion(), known[name])
			}
			return err
		}},
		operation{"page of 500", customPages, func(ctx context.Context, server *apiserver, _ string, _ int) error {
			page, err := clients[server].List(ctx, metav1.ListOptions{Limit: 500})
			if err == nil && len(page.Items) != min(500, m.objects) {
				err = fmt.Errorf("wrong: %d objects in a page of 500", len(page.Items))
			}
			return err
		}})
	spent.peak += run.residentMB(t)
	for _, part := range parts {
		m.table.addSpending(part, run.name, spent, "a second", spent.took.Seconds())
		m.table.addLatencies(part, run.name, load, modernWrites)
	}
}
