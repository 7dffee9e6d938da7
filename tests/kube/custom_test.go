package kube

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
)

const customCount = 900

// TestCustomResourceWithoutWatchCache has two apiservers serve a custom resource of which they keep no watch cache, directly
// and through rangecache: lists, pages, watches and deletions give the same, and rangecache forwards no read.
func TestCustomResourceWithoutWatchCache(t *testing.T) {
	notes := map[string][]string{}
	for _, kind := range []string{direct, rangecache} {
		t.Run(strings.ReplaceAll(kind, " ", "-"), func(t *testing.T) {
			c, files, etcd, front := newHarness(t, kind, "etcd-3.7", customUncached)
			(&customObjects{count: customCount, dataBytes: 1000}).fill(t, files, etcd, c.servers[0])
			c.prefix = "custom"
			things := &customScenario{harness: c, clients: [2]dynamic.ResourceInterface{c.servers[0].custom(t), c.servers[1].custom(t)}}
			c.runAll(etcd, front, []scenario{
				{"not cached", func(*harness) { things.notCached() }},
				{"listing", func(*harness) { things.listing() }},
				{"paging", func(*harness) { things.paging() }},
				{"watching", func(*harness) { things.watching() }},
				{"deleting", func(*harness) { things.deleting() }},
			})
			notes[kind] = c.notes
		})
	}
	compare(t, notes[rangecache], notes[direct])
}

// customScenario is what scenarios do with the objects, through both apiservers.
type customScenario struct {
	*harness
	clients [2]dynamic.ResourceInterface
}

func (s *customScenario) list(turn int, options metav1.ListOptions) *unstructured.UnstructuredList {
	s.Helper()
	list, err := s.clients[turn%2].List(s.ctx, options)
	s.must("listing", err)
	return list
}

func (s *customScenario) patch(turn, number int, state string) *unstructured.Unstructured {
	s.Helper()
	changed, err := patchCustom(s.ctx, s.clients[turn%2], number, state)
	s.must(customName(number), err)
	return changed
}

// notCached checks that an apiserver asks etcd even for a list of any age, which a watch cache would answer.
func (s *customScenario) notCached() {
	for turn, server := range s.servers {
		asked := func() (count float64) {
			for operation, sum := range server.scrape(s.T).by("etcd_requests_total", "resource", "operation") {
				if strings.HasPrefix(operation, "things list") {
					count += sum
				}
			}
			return count
		}
		before := asked()
		s.list(turn, metav1.ListOptions{ResourceVersion: "0"})
		if asked() == before {
			s.Errorf("%s has a watch cache of the kind", server.name)
		}
	}
}

// listing checks that a list has what either apiserver has written before, whole and selected.
func (s *customScenario) listing() {
	for turn := range 6 {
		number := turn * 131
		changed := s.patch(turn, number, fmt.Sprint("listed ", turn))
		whole := s.list(turn+1, metav1.ListOptions{})
		if len(whole.Items) != customCount || whole.Items[number].GetResourceVersion() != changed.GetResourceVersion() {
			s.Errorf("%d objects, and %s at %s, not %s", len(whole.Items), customName(number), whole.Items[number].GetResourceVersion(), changed.GetResourceVersion())
		}
		got, err := s.clients[(turn+1)%2].Get(s.ctx, customName(number), metav1.GetOptions{})
		s.must(customName(number), err)
		selected := s.list(turn, metav1.ListOptions{LabelSelector: labelled("shard", "1")})
		s.note("%d of %d objects are selected, %v", len(selected.Items), len(whole.Items), got.Object["spec"].(map[string]any)["state"])
	}
}

// paging checks that pages through both apiservers are of the first one's revision, whatever changes meanwhile.
func (s *customScenario) paging() {
	var items []unstructured.Unstructured
	options, pages, first := metav1.ListOptions{Limit: 70}, 0, ""
	for {
		page := s.list(pages, options)
		if first == "" {
			first = page.GetResourceVersion()
		} else if page.GetResourceVersion() != first {
			s.Errorf("page %d is of %s, the first of %s", pages, page.GetResourceVersion(), first)
		}
		items, pages = append(items, page.Items...), pages+1
		if options.Continue = page.GetContinue(); options.Continue == "" {
			break
		}
		s.patch(pages, pages*311%customCount, fmt.Sprint("during page ", pages))
	}
	exact := s.list(1, metav1.ListOptions{ResourceVersion: first, ResourceVersionMatch: metav1.ResourceVersionMatchExact})
	if len(exact.Items) != customCount || customVersions(items) != customVersions(exact.Items) {
		s.Errorf("%d objects of pages differ from the %d at their revision", len(items), len(exact.Items))
	}
	s.note("%d pages", pages)
}

// watching checks that watches of either apiserver, from a list on and with the list in them, see each change in order.
func (s *customScenario) watching() {
	start := s.list(0, metav1.ListOptions{})
	yes := true
	var watchers []watch.Interface
	for turn, client := range s.clients {
		for _, options := range []metav1.ListOptions{{ResourceVersion: start.GetResourceVersion()},
			{SendInitialEvents: &yes, AllowWatchBookmarks: true, ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan}} {
			watcher, err := client.Watch(s.ctx, options)
			s.must(fmt.Sprint("a watch at ", turn), err)
			s.Cleanup(watcher.Stop)
			watchers = append(watchers, watcher)
		}
	}
	initial := []int{0, customCount, 0, customCount}
	for number, watcher := range watchers {
		events := &watching{s.harness, watcher.ResultChan(), "things"}
		for range initial[number] {
			if event := events.next(); event.Type != watch.Added {
				s.Fatalf("watcher %d: %s in the list", number, event.Type)
			}
		}
	}
	var expected []string
	for turn := range 20 {
		expected = append(expected, "MODIFIED "+s.patch(turn, turn*37, fmt.Sprint("watched ", turn)).GetResourceVersion())
	}
	for number, watcher := range watchers {
		events := &watching{s.harness, watcher.ResultChan(), "things"}
		for _, wanted := range expected {
			event := events.next()
			if got := fmt.Sprint(event.Type, " ", event.Object.(*unstructured.Unstructured).GetResourceVersion()); got != wanted {
				s.Fatalf("watcher %d: %s instead of %s", number, got, wanted)
			}
		}
	}
	s.note("%d watchers saw %d changes", len(watchers), len(expected))
}

// deleting checks that deleted objects are gone at both apiservers: one, those of a selection, and with the definition all.
func (s *customScenario) deleting() {
	s.must("deleting", s.clients[0].Delete(s.ctx, customName(3), metav1.DeleteOptions{}))
	_, err := s.clients[1].Get(s.ctx, customName(3), metav1.GetOptions{})
	s.noteError("a deleted object", err)
	s.must("deleting a selection", s.clients[1].DeleteCollection(s.ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: labelled("shard", "1")}))
	s.note("%d objects remain", len(s.list(0, metav1.ListOptions{}).Items))
	definitions := newCluster(s.T, s.servers[0]).objects.Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"})
	s.must("deleting the kind", definitions.Delete(s.ctx, customResources.GroupResource().String(), metav1.DeleteOptions{}))
	for turn := range s.servers {
		await(s.T, "the kind is gone", func() error {
			if _, err := s.clients[turn].List(s.ctx, metav1.ListOptions{}); !apierrors.IsNotFound(err) {
				return errors.New("it is still served")
			}
			return nil
		})
	}
}
