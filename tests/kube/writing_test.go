package kube

import (
	"fmt"
	"strconv"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	applycore "k8s.io/client-go/applyconfigurations/core/v1"
)

// updatingWithConflicts checks that updates of a changed object are refused, and that counting with retries through
// both apiservers loses no increment.
func updatingWithConflicts(c *harness) {
	namespace := c.namespace("conflicts")
	old, err := c.in(namespace, 0).Create(c.ctx, object("contended"), metav1.CreateOptions{})
	c.must("creating", err)
	c.set(namespace, "contended", "none yet", 1)
	_, err = c.in(namespace, 0).Update(c.ctx, old, metav1.UpdateOptions{})
	c.noteError("a stale update", err)
	if !apierrors.IsConflict(err) {
		c.Errorf("a stale update: %v", err)
	}
	_, err = c.in(namespace, 1).Create(c.ctx, object("contended"), metav1.CreateOptions{})
	c.noteError("a second creation", err)

	const workers, each = 8, 15
	together(workers, func(worker int) {
		for done := 0; done < each; {
			object, err := c.in(namespace, worker).Get(c.ctx, "contended", metav1.GetOptions{})
			if err != nil {
				c.Errorf("reading: %v", err)
				return
			}
			count, _ := strconv.Atoi(object.Data["state"])
			object.Data["state"] = strconv.Itoa(count + 1)
			if _, err = c.in(namespace, worker+1).Update(c.ctx, object, metav1.UpdateOptions{}); err == nil {
				done++
			} else if !apierrors.IsConflict(err) {
				c.Errorf("counting: %v", err)
				return
			}
		}
	})
	final, err := c.in(namespace, 0).Get(c.ctx, "contended", metav1.GetOptions{})
	c.must("reading", err)
	if final.Data["state"] != strconv.Itoa(workers*each) {
		c.Errorf("the counter is at %s of %d", final.Data["state"], workers*each)
	}
	c.note("counted to %s", final.Data["state"])
}

// applying checks server-side apply by two managers.
func applying(c *harness) {
	namespace := c.namespace("applied")
	apply := func(manager, value string, turn int, force bool) error {
		wish := applycore.ConfigMap("shared", namespace).WithData(map[string]string{"common": value, manager: value})
		_, err := c.in(namespace, turn).Apply(c.ctx, wish, metav1.ApplyOptions{FieldManager: manager, Force: force})
		return err
	}
	c.noteError("first", apply("one", "1", 0, false))
	c.noteError("again", apply("one", "1", 1, false))
	c.noteError("another's field", apply("two", "2", 1, false))
	c.noteError("taking over a field by force", apply("two", "2", 1, true))
	c.noteError("applying a lost field", apply("one", "1", 0, false))
	object, err := c.in(namespace, 0).Get(c.ctx, "shared", metav1.GetOptions{})
	c.must("reading", err)
	c.note("%v, managed by %d", object.Data, len(object.ManagedFields))
	patched, err := c.in(namespace, 1).Patch(c.ctx, "shared", types.JSONPatchType,
		[]byte(`[{"op":"test","path":"/data/common","value":"2"},{"op":"replace","path":"/data/common","value":"3"}]`), metav1.PatchOptions{})
	c.must("a patch", err)
	_, err = c.in(namespace, 0).Patch(c.ctx, "shared", types.JSONPatchType, []byte(`[{"op":"test","path":"/data/common","value":"2"}]`), metav1.PatchOptions{})
	c.noteError("patched to "+patched.Data["common"], err)
}

// deleting checks deletes with preconditions, by name and by selection; deleted objects are gone on both apiservers.
func deleting(c *harness) {
	namespace := c.namespace("deleted")
	c.create(namespace, "a", 60)
	c.create(namespace, "bb", 60)
	wrong := types.UID("another-object")
	c.noteError("another's", c.in(namespace, 0).Delete(c.ctx, "a-00000", metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &wrong}}))
	old := c.set(namespace, "a-00001", "1", 0).ResourceVersion
	c.set(namespace, "a-00001", "2", 1)
	c.noteError("a delete with an old version", c.in(namespace, 0).Delete(c.ctx, "a-00001", metav1.DeleteOptions{Preconditions: &metav1.Preconditions{ResourceVersion: &old}}))
	for i := range 20 {
		name := fmt.Sprintf("a-%05d", i)
		c.must(name, c.in(namespace, i).Delete(c.ctx, name, metav1.DeleteOptions{}))
		if _, err := c.in(namespace, i+1).Get(c.ctx, name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			c.Errorf("%s was deleted, and the other apiserver says: %v", name, err)
		}
	}
	c.noteError("twice", c.in(namespace, 1).Delete(c.ctx, "a-00000", metav1.DeleteOptions{}))
	shard := object("bb-00000").Labels["shard"]
	c.must("deleting a selection", c.in(namespace, 1).DeleteCollection(c.ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: labelled("shard", shard)}))
	left := c.list(namespace, 0, metav1.ListOptions{})
	c.note("%d objects remain", len(left.Items))
	for _, object := range left.Items {
		if object.Labels["shard"] == shard {
			c.Errorf("%s is still there", object.Name)
		}
	}
}
