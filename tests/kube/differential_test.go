// Package kube runs real kube-apiservers on etcd itself and on rangecache, and compares what their clients see.
//
// `make test-kube` builds the tools and runs it.
package kube

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

type scenario struct {
	name string
	play func(*harness)
}

var scenarios = []scenario{
	{"reading others' writes", readingWrites},
	{"paging across both", pagingAcrossBoth},
	{"listing at revisions", listingAtRevisions},
	{"selecting", selecting},
	{"updating with conflicts", updatingWithConflicts},
	{"applying", applying},
	{"deleting", deleting},
	{"watching changes", watchersSeeEveryChange},
	{"bookmarks", bookmarks},
	{"watch lists", watchLists},
}

// TestResponsesEqual checks that clients of two apiservers get the same results whether the apiservers use etcd
// itself or rangecache: with the apiservers' own caches, without them, and while servers fail.
func TestResponsesEqual(t *testing.T) {
	expected := runScenarios(t, direct, "etcd-3.7")
	if t.Failed() {
		return
	}
	got := runScenarios(t, rangecache, "etcd-3.7")
	if len(expected) < 60 {
		t.Errorf("only %d notes", len(expected))
	}
	compare(t, got, expected)
}

// runScenarios runs all scenarios and returns their notes.
func runScenarios(t *testing.T, kind, version string) (notes []string) {
	t.Run(strings.ReplaceAll(kind, " ", "-"), func(t *testing.T) {
		c, files, etcd, front := newHarness(t, kind, version)
		c.prefix = "cached"
		c.runAll(etcd, front, scenarios)
		onlyFeedsWatch(t, etcd, front)
		c.prefix = "troubled"
		c.runOne(scenario{"restarts", func(c *harness) { restarts(c, etcd, front) }})
		c.runOne(scenario{"compaction", compaction})

		c.restartBoth("--watch-cache=false", "--etcd-compaction-interval=5m")
		c.prefix = "uncached"
		// Without its cache an apiserver forwards only etcd's own progress notifications, which come every ten minutes.
		c.runAll(etcd, front, slices.DeleteFunc(slices.Clone(scenarios), func(ch scenario) bool { return ch.name == "bookmarks" }))
		c.runOne(scenario{"compaction", compaction})
		c.runOne(scenario{"the end", func(c *harness) { sameAsEtcd(c, files, etcd) }})
		streamsToTheEnd(t, etcd, c.servers[:])
		notes = c.notes
	})
	return notes
}

// TestOldEtcdStreamsThroughRangecache runs on an etcd without RangeStream, which rangecache adds.
func TestOldEtcdStreamsThroughRangecache(t *testing.T) {
	notes := map[string][]string{}
	for _, kind := range []string{direct, rangecache} {
		t.Run(strings.ReplaceAll(kind, " ", "-"), func(t *testing.T) {
			c, _, etcd, front := newHarness(t, kind, "etcd-3.6", "--watch-cache=false")
			c.prefix = "old"
			c.runAll(etcd, front, []scenario{{"paging across both", pagingAcrossBoth}, {"listing at revisions", listingAtRevisions},
				{"selecting", selecting}, {"watch lists", watchLists}})
			if kind == rangecache {
				streamsToTheEnd(t, etcd, c.servers[:])
			} else if !c.servers[0].gaveUpStreams() {
				t.Error("an apiserver before etcd 3.6 did not switch RangeStream off, or no longer logs it: then the other tests would not notice it")
			}
			notes[kind] = c.notes
		})
	}
	compare(t, notes[rangecache], notes[direct])
}

// newHarness starts etcd, the server in front of it, and two apiservers.
func newHarness(t *testing.T, kind, version string, flags ...string) (*harness, *certificates, *etcdServer, *front) {
	t.Helper()
	files := newCertificates(t)
	etcd := startEtcd(t, files, version)
	front := startFront(t, files, kind, etcd)
	c := &harness{T: t, ctx: t.Context()}
	for i := range c.servers {
		c.servers[i] = startAPIServer(t, files, i+1, front.url, flags...)
	}
	for _, server := range c.servers {
		server.awaitReady(t)
	}
	return c, files, etcd, front
}

// compare reports the notes that only one of the two runs has.
func compare(t *testing.T, got, expected []string) {
	t.Helper()
	if slices.Equal(got, expected) {
		return
	}
	only := func(some, others []string) string {
		return strings.Join(slices.DeleteFunc(slices.Clone(some), func(note string) bool { return slices.Contains(others, note) }), "\n")
	}
	t.Errorf("only through rangecache:\n%s\nonly direct:\n%s", only(got, expected), only(expected, got))
}

func (c *harness) restartBoth(flags ...string) {
	c.Helper()
	together(len(c.servers), func(turn int) { c.servers[turn].stop() })
	for _, server := range c.servers {
		server.restart(c.T, false, flags...)
	}
	for _, server := range c.servers {
		server.awaitReady(c.T)
	}
}

// runAll runs scenarios without faults, during which a warm rangecache must answer every Range from memory.
func (c *harness) runAll(etcd *etcdServer, front *front, scenarios []scenario) {
	c.Helper()
	costReport := openCostReport(c.T, etcd, front, c.servers[:])
	for _, scenario := range scenarios {
		c.runOne(scenario)
	}
	costReport.close(c.T, c.prefix)
	if front.kind == rangecache {
		costReport.nothingForwarded(c.T, 200)
	}
}

func (c *harness) runOne(scenario scenario) {
	whole, notes := c.T, c.notes
	defer func() { c.T = whole }()
	c.notes = nil
	began := time.Now()
	ok := whole.Run(c.prefix+"/"+strings.ReplaceAll(scenario.name, " ", "-"), func(t *testing.T) {
		c.T = t
		ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
		defer cancel()
		c.ctx = ctx
		scenario.play(c)
	})
	if !ok {
		whole.FailNow()
	}
	whole.Logf("%s, %s: %.1f s", c.prefix, scenario.name, time.Since(began).Seconds())
	for _, note := range c.notes {
		notes = append(notes, c.prefix+", "+scenario.name+": "+note)
	}
	c.notes = notes
}

// sameAsEtcd checks that both apiservers list the same objects as a third one that uses etcd itself.
func sameAsEtcd(c *harness, files *certificates, etcd *etcdServer) {
	witness := startAPIServer(c.T, files, 3, etcd.url, "--watch-cache=false")
	witness.awaitReady(c.T)
	truth, err := witness.client.CoreV1().ConfigMaps(metav1.NamespaceAll).List(c.ctx, metav1.ListOptions{})
	c.must("the witness", err)
	if len(truth.Items) < 2000 {
		c.Errorf("%d objects in all", len(truth.Items))
	}
	for turn := range c.servers {
		c.sameVersions("everything", c.list(metav1.NamespaceAll, turn, metav1.ListOptions{}).Items, truth.Items)
	}
}

// streamsToTheEnd checks that apiservers listed by RangeStream, and that none has switched it off, which an apiserver
// does for ten minutes after any Unimplemented.
func streamsToTheEnd(t *testing.T, etcd *etcdServer, servers []*apiserver) {
	t.Helper()
	for _, server := range servers {
		if server.gaveUpStreams() {
			t.Errorf("%s has switched RangeStream off", server.name)
		}
		if server.scrape(t).sum("apiserver_storage_list_duration_seconds_count", "streamed", "true") == 0 {
			t.Errorf("%s made no list by RangeStream", server.name)
		}
	}
	if count := etcd.scrape(t).sum("grpc_server_handled_total", "grpc_code", "Unimplemented"); count != 0 {
		t.Errorf("etcd returned Unimplemented %v times", count)
	}
}
