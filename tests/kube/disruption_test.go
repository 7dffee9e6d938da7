package kube

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// restarts stops apiservers, etcd and the server in front of it in turn while clients are active: no acknowledged
// write is lost, no read is older than what was acknowledged before it, and watches deliver everything in the end.
func restarts(c *harness, etcd *etcdServer, front *front) {
	namespace := c.namespace("restarts")
	c.create(namespace, "bystander", 1000)
	clients := c.startActivity(namespace)
	clients.expectProgress("the start")
	for turn, server := range c.servers {
		server.restart(c.T, turn == 1)
		server.awaitReady(c.T)
		clients.expectProgress("a restart of " + server.name)
	}
	etcd.kill()
	etcd.start(c.T)
	clients.expectProgress("a restart of etcd")
	if front.process != nil {
		front.kill()
		front.start(c.T)
		clients.expectProgress("a kill of " + front.name)
		front.awaitWarm(c.T)
		front.stop()
		front.start(c.T)
		clients.expectProgress("a restart of " + front.name)
		front.awaitWarm(c.T)
		defer func() {
			c.Logf("rangecache, since its last start: %s", listed(reading{front: front.scrape(c.T)}.outcomes()))
		}()
	}
	clients.expectProgress("it all")
	clients.end()
	c.note("no lost write and no stale read")
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
		expired := c.refused(turn, namespace, "limit=20&continue="+first.Continue)
		c.note("an old list's next page: %s", refusalText(expired))
		current := c.list(namespace, turn, metav1.ListOptions{})
		c.note("%d objects are listed", len(current.Items))
		// The refusal has a token that continues after the same object, at the current revision.
		rest, options := []corev1.ConfigMap{}, metav1.ListOptions{Limit: 20, Continue: expired.Continue}
		for options.Continue != "" {
			page := c.list(namespace, turn+len(rest)/20, options)
			rest, options.Continue = append(rest, page.Items...), page.Continue
		}
		c.sameVersions("the rest of the list by the refusal's token", rest, current.Items[len(first.Items):])
	}
}
