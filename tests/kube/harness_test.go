package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	typed "k8s.io/client-go/kubernetes/typed/core/v1"
)

// harness runs scenarios with two apiservers on one etcd, or on one rangecache. The notes of a scenario must be the
// same with every server between the apiservers and etcd.
type harness struct {
	*testing.T
	ctx     context.Context
	servers [2]*apiserver
	prefix  string // prefix of its namespaces
	notes   []string
}

// in returns a namespace's objects through one of the apiservers, alternating by turn.
func (c *harness) in(namespace string, turn int) typed.ConfigMapInterface {
	return c.servers[turn%2].client.CoreV1().ConfigMaps(namespace)
}

func (c *harness) note(format string, args ...any) {
	c.notes = append(c.notes, fmt.Sprintf(format, args...))
}

// number matches text that differs between runs: numbers, and ids of objects.
var number = regexp.MustCompile(`[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d+`)

// noteError notes an error without the text that differs between runs.
func (c *harness) noteError(what string, err error) {
	if err == nil {
		c.note("%s: no error", what)
		return
	}
	c.note("%s: %s", what, number.ReplaceAllString(err.Error(), "N"))
}

func (c *harness) must(what string, err error) {
	c.Helper()
	must(c.T, what, err)
}

// namespace creates a namespace for a scenario.
func (c *harness) namespace(name string) string {
	c.Helper()
	name = c.prefix + "-" + name
	_, err := c.servers[0].client.CoreV1().Namespaces().Create(c.ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	c.must(name, err)
	return name
}

// object returns a ConfigMap of about a kilobyte.
func object(name string) *corev1.ConfigMap {
	return &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"shard": fmt.Sprint(len(name) % 3)}},
		Data:       map[string]string{"state": "new", "filling": strings.Repeat("x", 700)},
	}
}

// create creates objects, many in parallel, through both apiservers.
func (c *harness) create(namespace, prefix string, count int) {
	c.Helper()
	must(c.T, "creating", fill(c.ctx, c.servers[:], namespace, prefix, count))
}

func fill(ctx context.Context, servers []*apiserver, namespace, prefix string, count int) error {
	const workers = 16
	errs := make(chan error, workers)
	for worker := range workers {
		go func() {
			for i := worker; i < count; i += workers {
				_, err := servers[i%len(servers)].client.CoreV1().ConfigMaps(namespace).
					Create(ctx, object(fmt.Sprintf("%s-%05d", prefix, i)), metav1.CreateOptions{})
				if err != nil {
					errs <- err
					return
				}
			}
			errs <- nil
		}()
	}
	var first error
	for range workers {
		if err := <-errs; err != nil && first == nil {
			first = err
		}
	}
	return first
}

// set changes an object's state, retrying on conflicts.
func (c *harness) set(namespace, name, state string, turn int) *corev1.ConfigMap {
	c.Helper()
	for {
		object, err := c.in(namespace, turn).Get(c.ctx, name, metav1.GetOptions{})
		c.must(name, err)
		object.Data["state"] = state
		if object, err = c.in(namespace, turn).Update(c.ctx, object, metav1.UpdateOptions{}); err == nil {
			return object
		}
		c.must(name, err)
	}
}

func (c *harness) list(namespace string, turn int, options metav1.ListOptions) *corev1.ConfigMapList {
	c.Helper()
	list, err := c.in(namespace, turn).List(c.ctx, options)
	c.must("listing "+namespace, err)
	return list
}

// versions lists name and resource version of objects; equal texts mean equal objects.
func versions(items []corev1.ConfigMap) string {
	var text strings.Builder
	for i := range items {
		fmt.Fprintf(&text, "%s/%s@%s\n", items[i].Namespace, items[i].Name, items[i].ResourceVersion)
	}
	return text.String()
}

// sameVersions compares the versions of two lists.
func (c *harness) sameVersions(what string, got, expected []corev1.ConfigMap) {
	c.Helper()
	if versions(got) != versions(expected) {
		c.Errorf("%s: %d objects differ from the %d expected", what, len(got), len(expected))
	}
}

func labelled(key, value string) string { return labels.Set{key: value}.String() }

// together runs the functions in parallel and waits for all.
func together(count int, do func(int)) {
	var all sync.WaitGroup
	for i := range count {
		all.Go(func() { do(i) })
	}
	all.Wait()
}

// refused returns the apiserver's refusal of a list. It does not use the client library, which would retry.
func (c *harness) refused(turn int, namespace, query string) metav1.Status {
	c.Helper()
	server := c.servers[turn%2]
	body, code, err := fetch(server.http, server.url+"/api/v1/namespaces/"+namespace+"/configmaps?"+query)
	c.must("asking "+server.name, err)
	var status metav1.Status
	c.must(body, json.Unmarshal([]byte(body), &status))
	status.Code = int32(code)
	return status
}

// refusal returns the text of a refusal, without what differs between runs.
func (c *harness) refusal(turn int, namespace, query string) string {
	c.Helper()
	return refusalText(c.refused(turn, namespace, query))
}

func refusalText(status metav1.Status) string {
	return fmt.Sprintf("%d %s: %s", status.Code, status.Reason, number.ReplaceAllString(status.Message, "N"))
}
