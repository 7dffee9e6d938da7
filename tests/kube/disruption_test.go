package kube

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"
)

// counter is an object that one writer increments and one reader reads, each through a different apiserver.
type counter struct {
	name         string
	turn         int
	acknowledged atomic.Int64 // the highest count that an apiserver has said is written
	attempted    atomic.Int64 // the highest that may be written
	reads        atomic.Int64
}

// restarts stops apiservers, etcd and the server in front of it in turn while clients are active: no acknowledged
// write is lost, no read is older than what was acknowledged before it, and watches deliver everything in the end.
func restarts(c *harness, etcd *etcdServer, front *front) {
	namespace := c.namespace("restarts")
	c.create(namespace, "bystander", 1000)
	ctx, cancel := context.WithCancel(c.ctx)
	var clients sync.WaitGroup
	defer clients.Wait()
	defer cancel()
	watching, noMore := context.WithCancel(c.ctx)

	var informed []cache.SharedIndexInformer
	for _, server := range c.servers {
		factory := informers.NewSharedInformerFactoryWithOptions(server.client, 0, informers.WithNamespace(namespace))
		informed = append(informed, factory.Core().V1().ConfigMaps().Informer())
		factory.Start(watching.Done())
		defer factory.Shutdown()
	}
	defer noMore()
	counters := make([]*counter, 6)
	for i := range counters {
		one := &counter{name: fmt.Sprintf("counter-%d", i), turn: i}
		counters[i] = one
		c.create(namespace, one.name, 1)
		one.name += "-00000"
		clients.Go(func() { one.write(ctx, c, namespace) })
		clients.Go(func() { one.read(ctx, c, namespace) })
	}
	expectProgress := func(after string) {
		c.Helper()
		for _, one := range counters {
			written, read := one.acknowledged.Load(), one.reads.Load()
			await(c.T, one.name+" continues after "+after, func() error {
				if one.acknowledged.Load() < written+3 || one.reads.Load() < read+3 {
					return fmt.Errorf("%d writes and %d reads since", one.acknowledged.Load()-written, one.reads.Load()-read)
				}
				return nil
			})
		}
	}
	expectProgress("the start")
	for turn, server := range c.servers {
		server.restart(c.T, turn == 1)
		server.awaitReady(c.T)
		expectProgress("a restart of " + server.name)
	}
	etcd.kill()
	etcd.start(c.T)
	expectProgress("a restart of etcd")
	if front.process != nil {
		front.kill()
		front.start(c.T)
		expectProgress("a kill of " + front.name)
		front.awaitWarm(c.T)
		front.stop()
		front.start(c.T)
		expectProgress("a restart of " + front.name)
		front.awaitWarm(c.T)
		defer func() {
			c.Logf("rangecache, since its last start: %s", listed(reading{front: front.scrape(c.T)}.outcomes()))
		}()
	}
	expectProgress("it all")
	cancel()
	clients.Wait()

	for _, one := range counters {
		object, err := c.in(namespace, one.turn).Get(c.ctx, one.name, metav1.GetOptions{})
		c.must("reading", err)
		if count := countOf(object); count < one.acknowledged.Load() || count > one.attempted.Load() {
			c.Errorf("%s is at %d, though %d was acknowledged and %d was attempted last", one.name, count, one.acknowledged.Load(), one.attempted.Load())
		}
	}
	c.note("no lost write and no stale read")
	for _, informer := range informed {
		c.holds(namespace, informer)
	}
}

// holds waits until an informer has the same objects as a consistent list.
func (c *harness) holds(namespace string, informer cache.SharedIndexInformer) {
	c.Helper()
	expected := versions(c.list(namespace, 0, metav1.ListOptions{}).Items)
	await(c.T, "an informer", func() error {
		if got := sortedVersions(informer); got != expected {
			return fmt.Errorf("the informer has %d objects of %d, or in another state", strings.Count(got, "\n"), strings.Count(expected, "\n"))
		}
		return nil
	})
}

func countOf(object *corev1.ConfigMap) int64 {
	count, _ := strconv.ParseInt(object.Data["state"], 10, 64)
	return count
}

// pause waits for a moment, so that a client does not retry in a tight loop.
func pause(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(20 * time.Millisecond):
	}
}

// write increments the counter until it is stopped. While servers fail the outcome of an update may be unknown; then
// it reads the counter again.
func (one *counter) write(ctx context.Context, c *harness, namespace string) {
	for turn := one.turn; ctx.Err() == nil; turn++ {
		object, err := c.in(namespace, turn).Get(ctx, one.name, metav1.GetOptions{})
		if err != nil {
			pause(ctx)
			continue
		}
		if count := countOf(object); count < one.acknowledged.Load() || count > one.attempted.Load() {
			c.Errorf("the writer of %s reads %d between %d and %d", one.name, count, one.acknowledged.Load(), one.attempted.Load())
		}
		next := countOf(object) + 1
		one.attempted.Store(next)
		object.Data["state"] = strconv.FormatInt(next, 10)
		if _, err := c.in(namespace, turn).Update(ctx, object, metav1.UpdateOptions{}); err == nil {
			one.acknowledged.Store(next)
		}
	}
}

// read checks that a consistent read through either apiserver is not older than what was acknowledged before.
func (one *counter) read(ctx context.Context, c *harness, namespace string) {
	for turn := one.turn + 1; ctx.Err() == nil; turn++ {
		before := one.acknowledged.Load()
		var count int64
		if turn%4 < 2 {
			object, err := c.in(namespace, turn).Get(ctx, one.name, metav1.GetOptions{})
			if err != nil {
				pause(ctx)
				continue
			}
			count = countOf(object)
		} else {
			list, err := c.in(namespace, turn).List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + one.name})
			if err != nil {
				pause(ctx)
				continue
			}
			if len(list.Items) != 1 {
				c.Errorf("%s lists %d objects named %s", c.servers[turn%2].name, len(list.Items), one.name)
				return
			}
			count = countOf(&list.Items[0])
		}
		if count < before {
			c.Errorf("%s was acknowledged at %d, and %s reads %d", one.name, before, c.servers[turn%2].name, count)
		}
		one.reads.Add(1)
	}
}

// compaction checks that after a compaction by the apiservers old lists are refused with the same message, and
// current ones succeed.
func compaction(c *harness) {
	c.restartBoth("--etcd-compaction-interval=1s")
	namespace := c.namespace("compacted")
	c.create(namespace, "a", 50)
	first := c.list(namespace, 0, metav1.ListOptions{Limit: 20})
	c.set(namespace, "a-00042", "later", 1)
	for turn := range c.servers {
		refused := ""
		await(c.T, "a compaction", func() error {
			refused = c.refusal(turn, namespace, "resourceVersionMatch=Exact&resourceVersion="+first.ResourceVersion)
			if !strings.HasPrefix(refused, "410 ") {
				return fmt.Errorf("%s", refused)
			}
			return nil
		})
		c.note("an old list: %s", refused)
		c.note("an old list's next page: %s", c.refusal(turn, namespace, "limit=20&continue="+first.Continue))
		c.note("%d objects are listed", len(c.list(namespace, turn, metav1.ListOptions{}).Items))
	}
}

// sortedVersions returns the objects of an informer, in the order of a list.
func sortedVersions(informer cache.SharedIndexInformer) string {
	var items []corev1.ConfigMap
	for _, object := range informer.GetStore().List() {
		items = append(items, *object.(*corev1.ConfigMap))
	}
	slices.SortFunc(items, func(a, b corev1.ConfigMap) int { return strings.Compare(a.Name, b.Name) })
	return versions(items)
}
