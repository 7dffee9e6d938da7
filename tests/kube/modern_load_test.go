package kube

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	modernWrites   = "write"
	steadyWrites   = 300 // a second
	mixCalls       = 200 // a second: 10,000 of a cluster of 25,000 nodes, at 1:50
	mixWriteShare  = 0.961
	mixGetShare    = 0.037
	mixListShare   = 0.002
	modernListSize = 500
)

// acknowledged is the latest revision at which a write of each object was acknowledged. No later answer may be older.
type acknowledged struct {
	mutex  sync.Mutex
	latest map[string]int64
}

func (a *acknowledged) record(name, resourceVersion string) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.latest[name] = max(a.latest[name], revision(resourceVersion))
}

// now returns the revisions of one object or, without a name, of all.
func (a *acknowledged) now(name string) map[string]int64 {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	copied := map[string]int64{}
	for object, revision := range a.latest {
		if name == "" || name == object {
			copied[object] = revision
		}
	}
	return copied
}

// write replaces an object of a kilobyte, whatever it is.
func (a *acknowledged) write(perSecond float64) operation {
	return operation{modernWrites, perSecond, func(ctx context.Context, server *apiserver, namespace string, turn int) error {
		wanted := object(nameOf(turn))
		wanted.Data["state"] = strconv.Itoa(turn)
		written, err := server.client.CoreV1().ConfigMaps(namespace).Update(ctx, wanted, metav1.UpdateOptions{})
		if err == nil {
			a.record(written.Name, written.ResourceVersion)
		}
		return err
	}}
}

func (a *acknowledged) get(perSecond float64) operation {
	return operation{"GET", perSecond, func(ctx context.Context, server *apiserver, namespace string, turn int) error {
		name := nameOf(turn)
		known := a.now(name)
		object, err := server.client.CoreV1().ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
		if err == nil && revision(object.ResourceVersion) < known[name] {
			err = fmt.Errorf("wrong: %s is read at %s after it was written at %d", name, object.ResourceVersion, known[name])
		}
		return err
	}}
}

func (a *acknowledged) list(perSecond float64) operation {
	return operation{"LIST", perSecond, func(ctx context.Context, server *apiserver, namespace string, turn int) error {
		known := a.now("")
		list, err := server.client.CoreV1().ConfigMaps(namespace).List(ctx, metav1.ListOptions{Limit: modernListSize})
		if err != nil {
			return err
		}
		if len(list.Items) != modernListSize {
			return fmt.Errorf("wrong: %d of %d objects are listed", len(list.Items), modernListSize)
		}
		for i := range list.Items {
			if item := &list.Items[i]; revision(item.ResourceVersion) < known[item.Name] {
				return fmt.Errorf("wrong: %s is listed at %s after it was written at %d", item.Name, item.ResourceVersion, known[item.Name])
			}
		}
		return nil
	}}
}

// steady measures writes alone, whose events go to the watches of all apiservers: of each resource one, with previous values.
func (m *modern) steady(t *testing.T, run *deployed, namespace string) {
	part := fmt.Sprintf("steady state: %d writes/s of 1 KB", steadyWrites)
	spent, load := run.play(t, part, m.short(), namespace, (&acknowledged{latest: map[string]int64{}}).write(steadyWrites))
	m.table.addSpending(part, run.name, spent, "a second", spent.took.Seconds())
	m.table.addLatencies(part, run.name, load, modernWrites)
	m.table.add(part, "watches that etcd serves", run.name, run.etcd.scrape(t).sum("etcd_debugging_mvcc_watcher_total"))
	for _, front := range run.fronts {
		if front.process != nil {
			metrics := front.scrape(t)
			t.Logf("%s: streams of watches: %s; handed over: %s", run.name, listed(metrics.by("rangecache_watch_streams", "source", "reason")),
				listed(metrics.by("rangecache_watch_handovers_total", "to", "reason")))
		}
	}
}

// mix measures the calls of a large cluster: nearly all are writes.
func (m *modern) mix(t *testing.T, run *deployed, namespace string) {
	part := fmt.Sprintf("%.0f %% writes, %.1f %% GETs, %.1f %% LISTs of %d, %d calls/s", mixWriteShare*100, mixGetShare*100, mixListShare*100, modernListSize, mixCalls)
	written := &acknowledged{latest: map[string]int64{}}
	spent, load := run.play(t, part, m.short(), namespace, written.write(mixCalls*mixWriteShare), written.get(mixCalls*mixGetShare), written.list(mixCalls*mixListShare))
	m.table.addSpending(part, run.name, spent, "for 1,000 calls", float64(load.count())/1000)
	m.table.addLatencies(part, run.name, load, modernWrites)
}

// play makes calls on a schedule, at all apiservers in turn.
func (d *deployed) play(t *testing.T, part string, length time.Duration, namespace string, operations ...operation) (spending, *load) {
	t.Helper()
	load := newLoad(d.servers, []string{namespace}, operations)
	spent := d.spend(t, part, func() { load.run(t, length) })
	for _, operation := range operations {
		t.Logf("%s, %s: %s: %s", d.name, part, operation.name, load.latency(operation.name))
	}
	return spent, load
}
