package kube

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// operation is one of the calls that clients make on a schedule.
type operation struct {
	name      string
	perSecond float64
	call      func(ctx context.Context, server *apiserver, namespace string, turn int) error
}

func nameOf(turn int) string { return fmt.Sprintf("object-%05d", turn*131%objectsPerNamespace) }

var operations = []operation{
	{"GET", 200, func(ctx context.Context, server *apiserver, namespace string, turn int) error {
		_, err := server.client.CoreV1().ConfigMaps(namespace).Get(ctx, nameOf(turn), metav1.GetOptions{})
		return err
	}},
	{fmt.Sprintf("consistent LIST of %d", objectsPerNamespace), 10, func(ctx context.Context, server *apiserver, namespace string, turn int) error {
		list, err := server.client.CoreV1().ConfigMaps(namespace).List(ctx, metav1.ListOptions{})
		if err == nil && len(list.Items) != objectsPerNamespace {
			err = fmt.Errorf("%d objects", len(list.Items))
		}
		return err
	}},
	{"page of 100 of all objects, and the next page", 5, func(ctx context.Context, server *apiserver, namespace string, turn int) error {
		maps := server.client.CoreV1().ConfigMaps(metav1.NamespaceAll)
		page, err := maps.List(ctx, metav1.ListOptions{Limit: 100})
		if err == nil {
			_, err = maps.List(ctx, metav1.ListOptions{Limit: 100, Continue: page.Continue})
		}
		return err
	}},
	{"PATCH", 20, func(ctx context.Context, server *apiserver, namespace string, turn int) error {
		_, err := server.client.CoreV1().ConfigMaps(namespace).Patch(ctx, nameOf(turn), "application/merge-patch+json",
			[]byte(fmt.Sprintf(`{"data":{"state":"%d"}}`, time.Now().UnixNano())), metav1.PatchOptions{})
		return err
	}},
}

// load makes calls on a fixed schedule; a call's latency counts from the time when it was due.
type load struct {
	servers    []*apiserver
	namespaces []string
	operations []operation
	mutex      sync.Mutex
	timeout    time.Duration
	latencies  map[string][]time.Duration
	failed     int
	first      error
}

func newLoad(servers []*apiserver, namespaces []string, operations []operation) *load {
	return &load{servers: servers, namespaces: namespaces, operations: operations, timeout: waitTimeout, latencies: map[string][]time.Duration{}}
}

func (l *load) run(t *testing.T, length time.Duration) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), length+waitTimeout)
	defer cancel()
	var calls sync.WaitGroup
	for _, operation := range l.operations {
		calls.Go(func() {
			interval := time.Duration(float64(time.Second) / operation.perSecond)
			begin := time.Now()
			for turn := 0; time.Duration(turn)*interval < length; turn++ {
				due := begin.Add(time.Duration(turn) * interval)
				time.Sleep(time.Until(due))
				calls.Go(func() {
					ctx, cancel := context.WithTimeout(ctx, l.timeout)
					defer cancel()
					err := operation.call(ctx, l.servers[turn%len(l.servers)], l.namespaces[turn*7%len(l.namespaces)], turn)
					l.took(operation.name, time.Since(due), err)
				})
			}
		})
	}
	calls.Wait()
}

func (l *load) took(name string, latency time.Duration, err error) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.latencies[name] = append(l.latencies[name], latency)
	if err != nil {
		if l.failed++; l.first == nil {
			l.first = fmt.Errorf("%s: %w", name, err)
		}
	}
}

func (l *load) count() (count int) {
	for _, latencies := range l.latencies {
		count += len(latencies)
	}
	return count
}

func (l *load) latency(name string) string {
	return fmt.Sprintf("%.1f / %.1f ms", l.quantile(name, 0.5), l.quantile(name, 0.99))
}

// quantile returns the latency, in milliseconds, that this share of the calls did not exceed.
func (l *load) quantile(name string, share float64) float64 {
	sorted := slices.Sorted(slices.Values(l.latencies[name]))
	return sorted[int(share*float64(len(sorted)-1))].Seconds() * 1000
}
