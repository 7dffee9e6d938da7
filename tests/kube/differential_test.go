// Package kube runs real kube-apiservers before etcd itself and before rangecache, and compares what their clients see.
//
// `make test-kube` builds what it needs and runs it.
package kube

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

type chapter struct {
	name string
	play func(*cast)
}

var chapters = []chapter{
	{"reading others' writes", readingOthersWrites},
	{"paging across both", pagingAcrossBoth},
	{"listing at revisions", listingAtRevisions},
	{"selecting", selecting},
	{"updating with conflicts", updatingWithConflicts},
	{"applying", applying},
	{"deleting", deleting},
	{"watching changes", watchingChanges},
	{"bookmarks", bookmarks},
	{"watch lists", watchLists},
}

// Everything that clients of two apiservers do ends alike, whether those read etcd itself or through rangecache: with
// the apiservers' own caches, without them, and while servers fail.
func TestResponsesEqual(t *testing.T) {
	expected := play(t, direct, "etcd-3.7")
	if t.Failed() {
		return
	}
	got := play(t, rangecache, "etcd-3.7")
	if len(expected) < 60 {
		t.Errorf("only %d notes", len(expected))
	}
	compare(t, got, expected)
}

// play runs all chapters and gives their notes.
func play(t *testing.T, kind, version string) (notes []string) {
	t.Run(strings.ReplaceAll(kind, " ", "-"), func(t *testing.T) {
		c, files, etcd, front := newCast(t, kind, version)
		c.act = "cached"
		c.playAll(etcd, front, chapters)
		c.act = "troubled"
		c.playOne(chapter{"restarts", func(c *cast) { restarts(c, etcd, front) }})
		c.playOne(chapter{"compaction", compaction})

		c.restartBoth("--watch-cache=false", "--etcd-compaction-interval=5m")
		c.act = "uncached"
		// Without its cache an apiserver passes on etcd's own progress alone, which comes every ten minutes.
		c.playAll(etcd, front, slices.DeleteFunc(slices.Clone(chapters), func(ch chapter) bool { return ch.name == "bookmarks" }))
		c.playOne(chapter{"compaction", compaction})
		c.playOne(chapter{"the end", func(c *cast) { asEtcdHasIt(c, files, etcd) }})
		streamsToTheEnd(t, etcd, c.servers[:])
		notes = c.notes
	})
	return notes
}

// Before an etcd without RangeStream, which rangecache has all the same.
func TestOldEtcdStreamsThroughRangecache(t *testing.T) {
	notes := map[string][]string{}
	for _, kind := range []string{direct, rangecache} {
		t.Run(strings.ReplaceAll(kind, " ", "-"), func(t *testing.T) {
			c, _, etcd, front := newCast(t, kind, "etcd-3.6", "--watch-cache=false")
			c.act = "old"
			c.playAll(etcd, front, []chapter{{"paging across both", pagingAcrossBoth}, {"listing at revisions", listingAtRevisions},
				{"selecting", selecting}, {"watch lists", watchLists}})
			if kind == rangecache {
				streamsToTheEnd(t, etcd, c.servers[:])
			} else if !c.servers[0].gaveUpStreams() {
				t.Error("an apiserver before etcd 3.6 has not switched RangeStream off, or no longer says so: the other tests would not see it")
			}
			notes[kind] = c.notes
		})
	}
	compare(t, notes[rangecache], notes[direct])
}

// newCast starts etcd, what is before it, and two apiservers.
func newCast(t *testing.T, kind, version string, flags ...string) (*cast, *certificates, *etcdServer, *front) {
	t.Helper()
	files := newCertificates(t)
	etcd := startEtcd(t, files, version)
	front := startFront(t, files, kind, etcd)
	c := &cast{T: t, ctx: t.Context()}
	for i := range c.servers {
		c.servers[i] = startAPIServer(t, files, i+1, front.url, flags...)
	}
	for _, server := range c.servers {
		server.awaitReady(t)
	}
	return c, files, etcd, front
}

// compare shows the notes that only one of the two has.
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

func (c *cast) restartBoth(flags ...string) {
	c.Helper()
	together(len(c.servers), func(turn int) { c.servers[turn].stop() })
	for _, server := range c.servers {
		server.restart(c.T, false, flags...)
	}
	for _, server := range c.servers {
		server.awaitReady(c.T)
	}
}

// playAll plays chapters during which nothing fails, so that a warm rangecache answers every Range itself.
func (c *cast) playAll(etcd *etcdServer, front *front, chapters []chapter) {
	c.Helper()
	ledger := openLedger(c.T, etcd, front, c.servers[:])
	for _, chapter := range chapters {
		c.playOne(chapter)
	}
	ledger.close(c.T, c.act)
	if front.kind == rangecache {
		ledger.nothingForwarded(c.T, 200)
	}
}

func (c *cast) playOne(chapter chapter) {
	whole, notes := c.T, c.notes
	defer func() { c.T = whole }()
	c.notes = nil
	began := time.Now()
	ok := whole.Run(c.act+"/"+strings.ReplaceAll(chapter.name, " ", "-"), func(t *testing.T) {
		c.T = t
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		c.ctx = ctx
		chapter.play(c)
	})
	if !ok {
		whole.FailNow()
	}
	whole.Logf("%s, %s: %.1f s", c.act, chapter.name, time.Since(began).Seconds())
	for _, note := range c.notes {
		notes = append(notes, c.act+", "+chapter.name+": "+note)
	}
	c.notes = notes
}

// Both apiservers list everything as a third one does that reads etcd itself.
func asEtcdHasIt(c *cast, files *certificates, etcd *etcdServer) {
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

// streamsToTheEnd checks that no apiserver has switched RangeStream off, which it does for ten minutes on any
// Unimplemented, and that they did list by it.
func streamsToTheEnd(t *testing.T, etcd *etcdServer, servers []*apiserver) {
	t.Helper()
	for _, server := range servers {
		if server.gaveUpStreams() {
			t.Errorf("%s has switched RangeStream off", server.name)
		}
		if server.scrape(t).sum("apiserver_storage_list_duration_seconds_count", "streamed", "true") == 0 {
			t.Errorf("%s has listed nothing by RangeStream", server.name)
		}
	}
	if count := etcd.scrape(t).sum("grpc_server_handled_total", "grpc_code", "Unimplemented"); count != 0 {
		t.Errorf("etcd has answered Unimplemented %v times", count)
	}
}
