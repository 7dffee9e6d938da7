package kube

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
)

// watching follows one watch.
type watching struct {
	*harness
	events <-chan watch.Event
	what   string
}

// watch starts a watch that ends with the scenario.
func (c *harness) watch(namespace string, turn int, options metav1.ListOptions) *watching {
	c.Helper()
	ctx, cancel := context.WithCancel(c.ctx)
	c.Cleanup(cancel)
	watcher, err := c.in(namespace, turn).Watch(ctx, options)
	c.must("a watch of "+namespace, err)
	c.Cleanup(watcher.Stop)
	return &watching{c, watcher.ResultChan(), namespace}
}

// next waits for an event other than a bookmark.
func (w *watching) next() watch.Event {
	w.Helper()
	for {
		if event := w.any(); event.Type != watch.Bookmark {
			return event
		}
	}
}

func (w *watching) any() watch.Event {
	w.Helper()
	select {
	case event, more := <-w.events:
		if !more {
			w.Fatalf("the watch of %s has ended", w.what)
		}
		if event.Type == watch.Error {
			w.Fatalf("the watch of %s: %v", w.what, event.Object)
		}
		return event
	case <-time.After(waitTimeout):
		w.Fatalf("no further event on the watch of %s", w.what)
		return watch.Event{}
	}
}

// bookmark waits for a bookmark at a revision or later, or for the end of the watch.
func (w *watching) bookmark(atLeast string) metav1.Object {
	w.Helper()
	for event := range w.events {
		if event.Type != watch.Bookmark {
			w.Fatalf("%s of %v instead of a bookmark", event.Type, event.Object)
		}
		object, err := meta.Accessor(event.Object)
		w.must("a bookmark", err)
		if revision(object.GetResourceVersion()) >= revision(atLeast) {
			return object
		}
	}
	return nil
}

func revision(text string) int64 {
	number, _ := strconv.ParseInt(text, 10, 64)
	return number
}

// watchersSeeEveryChange checks that each watcher, of either apiserver, receives every change once and in order.
func watchersSeeEveryChange(c *harness) {
	namespace := c.namespace("watched")
	c.create(namespace, "old", 50)
	start := c.list(namespace, 0, metav1.ListOptions{})
	watchers := []*watching{
		c.watch(namespace, 0, metav1.ListOptions{ResourceVersion: start.ResourceVersion, AllowWatchBookmarks: true}),
		c.watch(namespace, 1, metav1.ListOptions{ResourceVersion: start.ResourceVersion}),
	}
	var expected []string
	for i := range 30 {
		name := fmt.Sprintf("new-%02d", i)
		created, err := c.in(namespace, i).Create(c.ctx, object(name), metav1.CreateOptions{})
		c.must(name, err)
		changed := c.set(namespace, name, fmt.Sprint(i), i+1)
		expected = append(expected, "ADDED "+created.ResourceVersion, "MODIFIED "+changed.ResourceVersion)
		if i%3 == 0 {
			c.must(name, c.in(namespace, i).Delete(c.ctx, name, metav1.DeleteOptions{}))
			expected = append(expected, "DELETED")
		}
	}
	// A watcher that starts late starts in the past.
	watchers = append(watchers, c.watch(namespace, 1, metav1.ListOptions{ResourceVersion: start.ResourceVersion}))
	for number, watcher := range watchers {
		last := int64(0)
		for i, wanted := range expected {
			event := watcher.next()
			object := event.Object.(*corev1.ConfigMap)
			got := string(event.Type)
			if event.Type != watch.Deleted {
				got += " " + object.ResourceVersion
			}
			if got != wanted {
				c.Fatalf("watcher %d: event %d is %s of %s, not %s", number, i, got, object.Name, wanted)
			}
			if now := revision(object.ResourceVersion); now <= last {
				c.Errorf("watcher %d: revision %d comes after %d", number, now, last)
			} else {
				last = now
			}
		}
	}
	c.note("%d watchers saw %d changes", len(watchers), len(expected))
}

// bookmarks checks that a watch sends a bookmark before its end, and that the next watch continues there.
func bookmarks(c *harness) {
	namespace := c.namespace("bookmarks")
	c.create(namespace, "a", 10)
	start := c.list(namespace, 1, metav1.ListOptions{})
	elsewhere := c.namespace("elsewhere")
	// The apiserver sends one two seconds before the end, which a machine that stalls may miss.
	var mark metav1.Object
	attempt := 0
	await(c.T, "a bookmark", func() error {
		seconds := int64(4)
		watcher := c.watch(namespace, 0, metav1.ListOptions{ResourceVersion: start.ResourceVersion, AllowWatchBookmarks: true, TimeoutSeconds: &seconds})
		// A change in another namespace advances the revision, but is no event of this watch.
		attempt++
		_, err := c.in(elsewhere, 1).Create(c.ctx, object(fmt.Sprint("x-", attempt)), metav1.CreateOptions{})
		c.must("creating", err)
		if mark = watcher.bookmark(start.ResourceVersion); mark == nil {
			return fmt.Errorf("the watch ended without a bookmark")
		}
		return nil
	})
	next := c.watch(namespace, 1, metav1.ListOptions{ResourceVersion: mark.GetResourceVersion()})
	changed := c.set(namespace, "a-00003", "after", 0)
	if event := next.next(); event.Object.(*corev1.ConfigMap).ResourceVersion != changed.ResourceVersion {
		c.Errorf("after the bookmark comes %v", event)
	}
	c.note("a bookmark, and the events after it")
}

// watchLists checks watches that start with the whole list (WatchList): each object once, a bookmark at the end of
// the list, then changes.
func watchLists(c *harness) {
	namespace := c.namespace("watchlists")
	c.create(namespace, "w", 200)
	yes := true
	for turn := range 4 {
		fresh := c.set(namespace, "w-00042", fmt.Sprint("before ", turn), turn+1)
		watcher := c.watch(namespace, turn, metav1.ListOptions{SendInitialEvents: &yes, AllowWatchBookmarks: true, ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan})
		seen := map[string]string{}
		for {
			event := watcher.any()
			object := event.Object.(*corev1.ConfigMap)
			if event.Type == watch.Bookmark {
				if object.Annotations[metav1.InitialEventsAnnotationKey] != "true" {
					continue
				}
				if revision(object.ResourceVersion) < revision(fresh.ResourceVersion) {
					c.Errorf("the initial list ends at %s, before %s", object.ResourceVersion, fresh.ResourceVersion)
				}
				break
			}
			if event.Type != watch.Added || seen[object.Name] != "" {
				c.Errorf("%s of %s in the initial list, seen before: %q", event.Type, object.Name, seen[object.Name])
			}
			seen[object.Name] = object.ResourceVersion
		}
		if seen[fresh.Name] != fresh.ResourceVersion {
			c.Errorf("the initial list has %s at %s, although it was written at %s", fresh.Name, seen[fresh.Name], fresh.ResourceVersion)
		}
		c.note("%d in the initial list", len(seen))
		changed := c.set(namespace, "w-00100", fmt.Sprint("after ", turn), turn)
		if event := watcher.next(); event.Object.(*corev1.ConfigMap).ResourceVersion != changed.ResourceVersion {
			c.Errorf("after the initial list comes %v", event)
		}
	}
}

// onlyFeedsWatch checks that the apiservers' watches cost etcd the one of rangecache's feed, if RANGECACHE_WATCH_CACHE,
// which rangecache reads, asks for watches from memory. Those that began at etcd return to memory.
func onlyFeedsWatch(t *testing.T, etcd *etcdServer, front *front) {
	t.Helper()
	if front.kind != rangecache || os.Getenv("RANGECACHE_WATCH_CACHE") != "auto" {
		return
	}
	await(t, "the feed is etcd's only watch", func() error {
		watchers := etcd.scrape(t).by("etcd_debugging_mvcc_watcher_total")[""]
		served := scrape(t, http.DefaultClient, front.metrics+"/metrics").by("rangecache_watch_watchers")[""]
		if watchers != 1 || served < 50 {
			return fmt.Errorf("memory serves %v watches of the apiservers, etcd %v", served, watchers)
		}
		return nil
	})
}
