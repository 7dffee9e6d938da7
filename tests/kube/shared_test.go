package kube

import (
	"fmt"
	"testing"
)

// TestShared has two apiservers share a rangecache of two replicas, which both name in `--etcd-servers`. Each replica is
// killed in turn. An apiserver's client of etcd repeats reads by itself: none fails. It repeats no write that etcd may have
// seen: each writer may lose the one that was in flight.
func TestShared(t *testing.T) {
	files := newCertificates(t)
	etcd := startEtcd(t, files, "etcd-3.7")
	replicas := []*front{startFront(t, files, rangecache, etcd), startFront(t, files, rangecache, etcd)}
	c := &harness{T: t, ctx: t.Context(), prefix: "shared"}
	for i := range c.servers {
		c.servers[i] = startAPIServer(t, files, i+1, replicas[0].url+","+replicas[1].url)
	}
	for _, server := range c.servers {
		server.awaitReady(t)
	}
	namespace := c.namespace("shared")
	c.create(namespace, "bystander", 200)
	clients := c.startActivity(namespace)
	clients.expectProgress("the start")
	for number, replica := range replicas {
		awaitReads(t, replica)
		replica.kill()
		clients.expectProgress(fmt.Sprintf("a kill of replica %d", number))
		replica.start(t)
		replica.awaitWarm(t)
		awaitReads(t, replica)
	}
	clients.expectProgress("it all")
	clients.end()
	for _, one := range clients.counters {
		reads, writes := one.failedReads.Load(), one.failedWrites.Load()
		if reads > 0 || writes > int64(len(replicas)) {
			t.Errorf("%s: %d reads and %d writes failed, the last: %v", one.name, reads, writes, one.lastError.Load())
		}
		t.Logf("%s: %d writes, %d of them failed, and %d reads", one.name, one.attempted.Load(), writes, one.reads.Load())
	}
}

// awaitReads waits until the apiservers read from a replica.
func awaitReads(t *testing.T, replica *front) {
	t.Helper()
	await(t, "reads at "+replica.url, func() error {
		if count := replica.scrape(t).sum("rangecache_range_total"); count < 10 {
			return fmt.Errorf("%v reads", count)
		}
		return nil
	})
}
