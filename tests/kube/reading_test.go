package kube

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// readingWrites checks that what one apiserver has acknowledged is in the next read of the other: GET, LIST and a
// selection. Several run in parallel, so that feeds are always active.
func readingWrites(c *harness) {
	namespace := c.namespace("others")
	const writers, each = 8, 40
	together(writers, func(writer int) {
		for i := range each {
			if err := c.readAnothersWrite(namespace, fmt.Sprintf("fresh-%d-%03d", writer, i), i); err != nil {
				c.Error(err)
				return
			}
		}
	})
	if c.Failed() {
		c.FailNow()
	}
	c.note("%d objects", len(c.list(namespace, 1, metav1.ListOptions{}).Items))
}

// readAnothersWrite creates an object and changes it; each time the other apiserver must return it.
func (c *harness) readAnothersWrite(namespace, name string, turn int) error {
	mine, others := c.in(namespace, turn), c.in(namespace, turn+1)
	created, err := mine.Create(c.ctx, object(name), metav1.CreateOptions{})
	if err != nil {
		return err
	}
	read, err := others.Get(c.ctx, name, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("%s was created, and the other apiserver returns: %w", name, err)
	}
	list, err := others.List(c.ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	if position := slices.IndexFunc(list.Items, func(o corev1.ConfigMap) bool { return o.Name == name }); position < 0 {
		return fmt.Errorf("%s was created at %s, and the other apiserver lists %d objects of %s without it", name, created.ResourceVersion, len(list.Items), list.ResourceVersion)
	}
	read.Data["state"] = "changed"
	changed, err := others.Update(c.ctx, read, metav1.UpdateOptions{})
	if err != nil {
		return err
	}
	if read, err = mine.Get(c.ctx, name, metav1.GetOptions{}); err != nil || read.ResourceVersion != changed.ResourceVersion {
		return fmt.Errorf("%s is at %s, and the other apiserver reads %s: %v", name, changed.ResourceVersion, read.ResourceVersion, err)
	}
	if list, err = mine.List(c.ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + name}); err != nil || len(list.Items) != 1 || list.Items[0].ResourceVersion != changed.ResourceVersion {
		return fmt.Errorf("%s is at %s, and the other apiserver lists %v: %v", name, changed.ResourceVersion, versions(list.Items), err)
	}
	return nil
}

// pagingAcrossBoth checks that the pages of one list, read through both apiservers in turn while objects change,
// equal the list at the first page's revision.
func pagingAcrossBoth(c *harness) {
	namespace := c.namespace("pages")
	c.create(namespace, "page", 1000)
	for _, limit := range []int64{150, 1, 999, 1000} {
		before := c.list(namespace, 0, metav1.ListOptions{})
		options := metav1.ListOptions{Limit: limit}
		var items []corev1.ConfigMap
		pages, remaining := 0, []int64{}
		var revision string
		for {
			page := c.list(namespace, pages, options)
			if revision == "" {
				revision = page.ResourceVersion
			} else if page.ResourceVersion != revision {
				c.Errorf("page %d is of %s, the first of %s", pages, page.ResourceVersion, revision)
			}
			items = append(items, page.Items...)
			pages++
			if page.RemainingItemCount != nil {
				remaining = append(remaining, *page.RemainingItemCount)
			}
			options.Continue = page.Continue
			if page.Continue == "" || (limit == 1 && pages == 12) {
				break
			}
			// Changes during the list are not part of any page.
			name := fmt.Sprintf("page-%05d-between", (pages*77)%1000)
			_, err := c.in(namespace, pages).Create(c.ctx, object(name), metav1.CreateOptions{})
			c.must("creating", err)
			c.set(namespace, fmt.Sprintf("page-%05d", (pages*311)%1000), fmt.Sprint("during page ", pages), pages+1)
			c.must("deleting", c.in(namespace, pages).Delete(c.ctx, name, metav1.DeleteOptions{}))
		}
		c.sameVersions(fmt.Sprintf("pages of %d", limit), items, before.Items[:len(items)])
		c.note("pages of %d: %d pages, %d objects, remaining %v", limit, pages, len(items), remaining)
	}
}

// listingAtRevisions checks that a list at an exact revision is of that revision on both apiservers, and that one
// that may be newer is not older.
func listingAtRevisions(c *harness) {
	namespace := c.namespace("revisions")
	c.create(namespace, "then", 300)
	then := c.list(namespace, 0, metav1.ListOptions{})
	c.must("deleting", c.in(namespace, 0).Delete(c.ctx, "then-00007", metav1.DeleteOptions{}))
	changed := c.set(namespace, "then-00100", "later", 1)
	for turn := range c.servers {
		exact := c.list(namespace, turn, metav1.ListOptions{ResourceVersion: then.ResourceVersion, ResourceVersionMatch: metav1.ResourceVersionMatchExact})
		c.sameVersions("the exact list", exact.Items, then.Items)
		first := c.list(namespace, turn, metav1.ListOptions{ResourceVersion: then.ResourceVersion, ResourceVersionMatch: metav1.ResourceVersionMatchExact, Limit: 100})
		rest := c.list(namespace, turn+1, metav1.ListOptions{Continue: first.Continue})
		c.sameVersions("the exact list in pages", append(slices.Clone(first.Items), rest.Items...), then.Items)
		newer := c.list(namespace, turn, metav1.ListOptions{ResourceVersion: changed.ResourceVersion, ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan})
		position := slices.IndexFunc(newer.Items, func(o corev1.ConfigMap) bool { return o.Name == changed.Name })
		if position < 0 || newer.Items[position].ResourceVersion != changed.ResourceVersion {
			c.Errorf("a list with minimum revision %s is older", changed.ResourceVersion)
		}
		at, err := c.in(namespace, turn).Get(c.ctx, changed.Name, metav1.GetOptions{ResourceVersion: changed.ResourceVersion})
		c.must("a read not older than", err)
		c.note("exact %d of %d and %d, remaining %d; newer %d; state %s", len(exact.Items), len(first.Items), len(rest.Items),
			*first.RemainingItemCount, len(newer.Items), at.Data["state"])
		c.note("a future revision: %s", c.refusal(turn, namespace, "resourceVersion=1000000000&resourceVersionMatch=Exact"))
		c.note("an invalid continue token: %s", c.refusal(turn, namespace, "continue=nonsense"))
	}
	// The apiserver's cache may lag for this read, and catches up.
	await(c.T, "a list of any age", func() error {
		if items := c.list(namespace, 1, metav1.ListOptions{ResourceVersion: "0"}).Items; len(items) != 299 {
			return fmt.Errorf("%d objects", len(items))
		}
		return nil
	})
}

// selecting checks selections, whole and in pages, objects of many kinds, and counts that the apiserver requests.
func selecting(c *harness) {
	namespace := c.namespace("selections")
	c.create(namespace, "a", 100)
	c.create(namespace, "bb", 100)
	c.create(namespace, "ccc", 100)
	for turn, selector := range []string{"0", "1", "2", "none"} {
		whole := c.list(namespace, turn, metav1.ListOptions{LabelSelector: labelled("shard", selector)})
		options := metav1.ListOptions{LabelSelector: labelled("shard", selector), Limit: 7}
		var items []corev1.ConfigMap
		pages := 0
		for {
			page := c.list(namespace, turn+pages, options)
			items, options.Continue, pages = append(items, page.Items...), page.Continue, pages+1
			if page.Continue == "" {
				break
			}
		}
		c.sameVersions("a selection in pages", items, whole.Items)
		c.note("shard %s: %d objects in %d pages", selector, len(items), pages)
	}
	all := c.list(metav1.NamespaceAll, 0, metav1.ListOptions{LabelSelector: "shard"})
	c.note("objects of all namespaces: %d", len(all.Items))

	// Events have leases, and the apiserver does not cache them.
	for i := range 30 {
		_, err := c.servers[i%2].client.CoreV1().Events(namespace).Create(c.ctx, &corev1.Event{
			ObjectMeta:     metav1.ObjectMeta{Name: fmt.Sprintf("event-%02d", i)},
			InvolvedObject: corev1.ObjectReference{Namespace: namespace, Name: "a-00001", Kind: "ConfigMap"},
		}, metav1.CreateOptions{})
		c.must("an event", err)
	}
	events, err := c.servers[1].client.CoreV1().Events(namespace).List(c.ctx, metav1.ListOptions{Limit: 20})
	c.must("events", err)
	more, err := c.servers[0].client.CoreV1().Events(namespace).List(c.ctx, metav1.ListOptions{Continue: events.Continue})
	c.must("more events", err)
	c.note("events: %d and %d", len(events.Items), len(more.Items))
}
