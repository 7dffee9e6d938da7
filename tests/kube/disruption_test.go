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

// counter is an object that one writer counts up and one reader reads, each by another apiserver.
type counter struct {
	name         string
	turn         int
	acknowledged atomic.Int64 // the highest count that an apiserver has said is written
	attempted    atomic.Int64 // the highest that may be written
	reads        atomic.Int64
}

// restarts ends apiservers, etcd and what is before it, in turn and while clients are at work: no acknowledged write is
// lost, no read is older than what was acknowledged before it, and whoever watches ends up with everything.
func restarts(c *cast, etcd *etcdServer, front *front) {
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
	goOn := func(after string) {
		c.Helper()
		for _, one := range counters {
			written, read := one.acknowledged.Load(), one.reads.Load()
			await(c.T, one.name+" goes on after "+after, func() error {
				if one.acknowledged.Load() < written+3 || one.reads.Load() < read+3 {
					return fmt.Errorf("%d writes and %d reads since", one.acknowledged.Load()-written, one.reads.Load()-read)
				}
				return nil
			})
		}
	}
	goOn("the start")
	for turn, server := range c.servers {
		server.restart(c.T, turn == 1)
		server.awaitReady(c.T)
		goOn("a restart of " + server.name)
	}
	etcd.kill()
	etcd.start(c.T)
	goOn("a restart of etcd")
	if front.process != nil {
		front.kill()
		front.start(c.T)
		goOn("the death of " + front.name)
		front.awaitWarm(c.T)
		front.stop()
		front.start(c.T)
		goOn("a restart of " + front.name)
		front.awaitWarm(c.T)
		defer func() {
			c.Logf("rangecache, since its last start: %s", listed(reading{front: front.scrape(c.T)}.outcomes()))
		}()
	}
	goOn("it all")
	cancel()
	clients.Wait()

	for _, one := range counters {
		object, err := c.in(namespace, one.turn).Get(c.ctx, one.name, metav1.GetOptions{})
		c.must("reading", err)
		if count := countOf(object); count < one.acknowledged.Load() || count > one.attempted.Load() {
			c.Errorf("%s is at %d, though %d was acknowledged and %d was attempted last", one.name, count, one.acknowledged.Load(), one.attempted.Load())
		}
	}
	c.note("nothing was lost, nothing was stale")
	for _, informer := range informed {
		c.holds(namespace, informer)
	}
}

// holds waits until an informer has what a consistent list has.
func (c *cast) holds(namespace string, informer cache.SharedIndexInformer) {
	c.Helper()
	expected := versions(c.list(namespace, 0, metav1.ListOptions{}).Items)
	await(c.T, "an informer", func() error {
		if got := sortedVersions(informer); got != expected {
			return fmt.Errorf("it has %d objects of %d, or not in the same state", strings.Count(got, "\n"), strings.Count(expected, "\n"))
		}
		return nil
	})
}

func countOf(object *corev1.ConfigMap) int64 {
	count, _ := strconv.ParseInt(object.Data["state"], 10, 64)
	return count
}

// breathe keeps a client from asking a server that is gone as fast as it can.
func breathe(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(20 * time.Millisecond):
	}
}

// write counts up until it is told to stop. While servers fail an update's outcome may be unknown; it is read again then.
func (one *counter) write(ctx context.Context, c *cast, namespace string) {
	for turn := one.turn; ctx.Err() == nil; turn++ {
		object, err := c.in(namespace, turn).Get(ctx, one.name, metav1.GetOptions{})
		if err != nil {
			breathe(ctx)
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

// read checks that a consistent read of either apiserver is not older than what was acknowledged before.
func (one *counter) read(ctx context.Context, c *cast, namespace string) {
	for turn := one.turn + 1; ctx.Err() == nil; turn++ {
		before := one.acknowledged.Load()
		var count int64
		if turn%4 < 2 {
			object, err := c.in(namespace, turn).Get(ctx, one.name, metav1.GetOptions{})
			if err != nil {
				breathe(ctx)
				continue
			}
			count = countOf(object)
		} else {
			list, err := c.in(namespace, turn).List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + one.name})
			if err != nil {
				breathe(ctx)
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

// The apiservers compact: what was listed before is gone, in the same words, and what is there is listed.
func compaction(c *cast) {
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
		c.note("%d are there", len(c.list(namespace, turn, metav1.ListOptions{}).Items))
	}
}

// sortedVersions is what an informer holds, in the order of a list.
func sortedVersions(informer cache.SharedIndexInformer) string {
	var items []corev1.ConfigMap
	for _, object := range informer.GetStore().List() {
		items = append(items, *object.(*corev1.ConfigMap))
	}
	slices.SortFunc(items, func(a, b corev1.ConfigMap) int { return strings.Compare(a.Name, b.Name) })
	return versions(items)
}
