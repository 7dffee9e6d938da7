package node

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// requestTimeout is the time after which a request to the apiserver counts as failed.
const requestTimeout = 5 * time.Second

// seen is an object that is read.
const seen = "seen"

// gap is what clients of the apiserver have seen while something happened.
type gap struct {
	requests int
	// failed has an error for each request that failed.
	failed []error
	// longest is the longest time without a request that succeeded.
	longest time.Duration
}

func (g gap) String() string {
	return fmt.Sprintf("%d requests, %d failed, at most %v without a response", g.requests, len(g.failed), g.longest.Round(time.Millisecond))
}

// prober has clients of the apiservers that it writes at and reads at.
type prober struct{ write, read kubernetes.Interface }

// during writes and reads at the node's apiserver, one request after another, while act runs and for some time afterwards.
func (m *machine) during(t *testing.T, what string, act func()) gap {
	t.Helper()
	return during(t, what, []prober{{m.client, m.client}}, act)[0]
}

// during runs the probers at once while act runs and for some time afterwards, because what a change sets off may come later, and
// returns what each has seen.
func during(t *testing.T, what string, probers []prober, act func()) []gap {
	t.Helper()
	const afterwards = 12 * time.Second
	stop := make(chan struct{})
	results := make([]gap, len(probers))
	var running sync.WaitGroup
	for i, prober := range probers {
		running.Go(func() { results[i] = prober.probe(stop) })
	}
	finish := sync.OnceFunc(func() {
		close(stop)
		running.Wait()
	})
	defer finish()
	act()
	time.Sleep(afterwards)
	finish()
	for _, result := range results {
		t.Logf("%s: %v", what, result)
		for i, err := range result.failed {
			if i == 5 {
				t.Logf("  and %d more", len(result.failed)-i)
				break
			}
			t.Logf("  %v", err)
		}
	}
	return results
}

// probe creates and reads objects until stop; each read is one at etcd, because it names no version, and must show what was
// created before it.
func (p prober) probe(stop <-chan struct{}) gap {
	var result gap
	started := time.Now()
	last := started
	written, read := p.write.CoreV1().ConfigMaps("default"), p.read.CoreV1().ConfigMaps("default")
	// The newest object that was created, and the version of that write.
	newest, version := seen, ""
	for number := 0; ; number++ {
		select {
		case <-stop:
			return result
		default:
		}
		requests := []func(context.Context) error{
			func(ctx context.Context) error {
				object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "probe-"}}
				created, err := written.Create(ctx, object, metav1.CreateOptions{})
				if err == nil {
					newest, version = created.Name, created.ResourceVersion
				}
				return err
			},
			func(ctx context.Context) error {
				_, err := read.Get(ctx, newest, metav1.GetOptions{})
				return err
			},
			func(ctx context.Context) error {
				list, err := read.List(ctx, metav1.ListOptions{Limit: 10})
				if err == nil && older(list.ResourceVersion, version) {
					return fmt.Errorf("a list of version %s after a write of %s", list.ResourceVersion, version)
				}
				return err
			},
		}
		for _, request := range requests {
			ctx, cancel := context.WithTimeout(context.Background(), requestTimeout)
			err := request(ctx)
			cancel()
			result.requests++
			now := time.Now()
			if err != nil {
				result.failed = append(result.failed, fmt.Errorf("after %v: %w", now.Sub(started).Round(time.Millisecond), err))
				// A refused connection takes no time.
				time.Sleep(100 * time.Millisecond)
				continue
			}
			result.longest = max(result.longest, now.Sub(last))
			last = now
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// older says whether a version is older than another, which is empty before the first write.
func older(version, than string) bool {
	return len(version) < len(than) || len(version) == len(than) && version < than
}
