package node

import (
	"context"
	"fmt"
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

// during writes and reads at the apiserver, one request after another, while act runs and for some time afterwards: what a change
// sets off may come later.
func (m *machine) during(t *testing.T, what string, act func()) gap {
	t.Helper()
	const afterwards = 12 * time.Second
	stop := make(chan struct{})
	results := make(chan gap, 1)
	go func() { results <- probe(m.client, stop) }()
	defer func() {
		select {
		case <-stop:
		default:
			close(stop)
			<-results
		}
	}()
	act()
	time.Sleep(afterwards)
	close(stop)
	result := <-results
	t.Logf("%s: %v", what, result)
	for i, err := range result.failed {
		if i == 5 {
			t.Logf("  and %d more", len(result.failed)-i)
			break
		}
		t.Logf("  %v", err)
	}
	return result
}

// probe creates and reads objects until stop; each read is one at etcd, because it names no version.
func probe(client kubernetes.Interface, stop <-chan struct{}) gap {
	var result gap
	started := time.Now()
	last := started
	maps := client.CoreV1().ConfigMaps("default")
	for number := 0; ; number++ {
		select {
		case <-stop:
			return result
		default:
		}
		name := fmt.Sprintf("probe-%d-%d", started.UnixNano(), number)
		requests := []func(context.Context) error{
			func(ctx context.Context) error {
				object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}
				_, err := maps.Create(ctx, object, metav1.CreateOptions{})
				return err
			},
			func(ctx context.Context) error {
				_, err := maps.Get(ctx, seen, metav1.GetOptions{})
				return err
			},
			func(ctx context.Context) error {
				_, err := maps.List(ctx, metav1.ListOptions{Limit: 10})
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
