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

// activity is clients of both apiservers that write, read and watch objects of a namespace while servers fail.
type activity struct {
	*harness
	namespace string
	counters  []*counter
	informed  []cache.SharedIndexInformer
	clients   sync.WaitGroup
	stop      context.CancelFunc
}

// startActivity starts clients that end with the test at the latest.
func (c *harness) startActivity(namespace string) *activity {
	c.Helper()
	ctx, stop := context.WithCancel(c.ctx)
	watching, noMore := context.WithCancel(c.ctx)
	a := &activity{harness: c, namespace: namespace, counters: make([]*counter, 6), stop: stop}
	for _, server := range c.servers {
		factory := informers.NewSharedInformerFactoryWithOptions(server.client, 0, informers.WithNamespace(namespace))
		a.informed = append(a.informed, factory.Core().V1().ConfigMaps().Informer())
		factory.Start(watching.Done())
		c.Cleanup(factory.Shutdown)
	}
	c.Cleanup(func() {
		stop()
		noMore()
		a.clients.Wait()
	})
	for i := range a.counters {
		one := &counter{name: fmt.Sprintf("counter-%d", i), turn: i}
		a.counters[i] = one
		c.create(namespace, one.name, 1)
		one.name += "-00000"
		a.clients.Go(func() { one.write(ctx, c, namespace) })
		a.clients.Go(func() { one.read(ctx, c, namespace) })
	}
	return a
}

// expectProgress waits until every counter was written and read several times.
func (a *activity) expectProgress(after string) {
	a.Helper()
	for _, one := range a.counters {
		written, read := one.acknowledged.Load(), one.reads.Load()
		await(a.T, one.name+" continues after "+after, func() error {
			if one.acknowledged.Load() < written+3 || one.reads.Load() < read+3 {
				return fmt.Errorf("%d writes and %d reads since, the last error: %v", one.acknowledged.Load()-written, one.reads.Load()-read, one.lastError.Load())
			}
			return nil
		})
	}
}

// end stops the clients. No write that was acknowledged may be lost, and watches must deliver everything in the end.
func (a *activity) end() {
	a.Helper()
	a.stop()
	a.clients.Wait()
	for _, one := range a.counters {
		object, err := a.in(a.namespace, one.turn).Get(a.ctx, one.name, metav1.GetOptions{})
		a.must("reading", err)
		if count := countOf(object); count < one.acknowledged.Load() || count > one.attempted.Load() {
			a.Errorf("%s is at %d, though %d was acknowledged and %d was attempted last", one.name, count, one.acknowledged.Load(), one.attempted.Load())
		}
	}
	for _, informer := range a.informed {
		a.holds(a.namespace, informer)
	}
}

// counter is an object that one writer increments and one reader reads, each through a different apiserver.
type counter struct {
	name         string
	turn         int
	acknowledged atomic.Int64 // the highest count that an apiserver has said is written
	attempted    atomic.Int64 // the highest that may be written
	reads        atomic.Int64
	failedReads  atomic.Int64
	failedWrites atomic.Int64
	lastError    atomic.Value // its text
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

// failed counts a call that was answered by an error.
func (one *counter) failed(ctx context.Context, count *atomic.Int64, err error) {
	if ctx.Err() == nil {
		count.Add(1)
		one.lastError.Store(err.Error())
	}
}

// write increments the counter until it is stopped. While servers fail the outcome of an update may be unknown; then
// it reads the counter again.
func (one *counter) write(ctx context.Context, c *harness, namespace string) {
	for turn := one.turn; ctx.Err() == nil; turn++ {
		object, err := c.in(namespace, turn).Get(ctx, one.name, metav1.GetOptions{})
		if err != nil {
			one.failed(ctx, &one.failedReads, err)
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
		} else {
			one.failed(ctx, &one.failedWrites, err)
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
				one.failed(ctx, &one.failedReads, err)
				pause(ctx)
				continue
			}
			count = countOf(object)
		} else {
			list, err := c.in(namespace, turn).List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + one.name})
			if err != nil {
				one.failed(ctx, &one.failedReads, err)
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

// sortedVersions returns the objects of an informer, in the order of a list.
func sortedVersions(informer cache.SharedIndexInformer) string {
	var items []corev1.ConfigMap
	for _, object := range informer.GetStore().List() {
		items = append(items, *object.(*corev1.ConfigMap))
	}
	slices.SortFunc(items, func(a, b corev1.ConfigMap) int { return strings.Compare(a.Name, b.Name) })
	return versions(items)
}
