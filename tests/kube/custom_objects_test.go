package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/dynamic"
)

// customObjects is a namespace full of custom resources: an apiserver writes the first one, the others are copies.
type customObjects struct{ count, dataBytes int }

const (
	customKind      = "Thing"
	customNamespace = "custom"
	// The apiserver keeps no watch cache of the kind: its reads and watches go to etcd.
	customUncached = "--watch-cache-sizes=things.monitoring.coreos.com#0"
)

var customResources = schema.GroupVersionResource{Group: "monitoring.coreos.com", Version: "v1", Resource: "things"}

func customName(number int) string { return fmt.Sprintf("thing-%06d", number) }

func customKey(number int) string {
	return "/registry/monitoring.coreos.com/things/" + customNamespace + "/" + customName(number)
}

// customObject returns one whose label divides the objects by three.
func customObject(number, dataBytes int) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "monitoring.coreos.com/v1", "kind": customKind,
		"metadata": map[string]any{"name": customName(number), "labels": map[string]any{"shard": fmt.Sprint(number % 3)}},
		"spec":     map[string]any{"state": "new", "filling": strings.Repeat("x", dataBytes)},
	}}
}

// custom returns the client for the objects of an apiserver, once that knows their kind.
func (a *apiserver) custom(t *testing.T) dynamic.ResourceInterface {
	t.Helper()
	client := newCluster(t, a).objects.Resource(customResources).Namespace(customNamespace)
	await(t, a.name+" knows the kind", func() error {
		_, err := client.List(t.Context(), metav1.ListOptions{Limit: 1})
		return err
	})
	return client
}

// fill defines the kind by an apiserver, and writes the objects into etcd itself.
func (s *customObjects) fill(t *testing.T, files *certificates, etcd *etcdServer, server *apiserver) {
	t.Helper()
	newCluster(t, server).define(t, customKind)
	_, err := server.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: customNamespace}}, metav1.CreateOptions{})
	must(t, customNamespace, err)
	_, err = server.custom(t).Create(t.Context(), customObject(0, s.dataBytes), metav1.CreateOptions{})
	must(t, customName(0), err)

	client := etcdClient(t, files, etcd.url)
	got, err := client.Get(t.Context(), customKey(0))
	must(t, customKey(0), err)
	if len(got.Kvs) != 1 {
		t.Fatalf("%d keys %s", len(got.Kvs), customKey(0))
	}
	putAll(t, client, 1, s.count, min(fillTxnOps, max(1, fillTxnBytes/len(got.Kvs[0].Value))), func(number int) clientv3.Op {
		var object map[string]any
		must(t, customKey(0), json.Unmarshal(got.Kvs[0].Value, &object))
		metadata := object["metadata"].(map[string]any)
		metadata["name"], metadata["uid"] = customName(number), string(uuid.NewUUID())
		metadata["labels"] = customObject(number, 0).Object["metadata"].(map[string]any)["labels"]
		text, err := json.Marshal(object)
		must(t, customName(number), err)
		return clientv3.OpPut(customKey(number), string(text)+"\n")
	})
}

// patchCustom changes the state of an object.
func patchCustom(ctx context.Context, client dynamic.ResourceInterface, number int, state string) (*unstructured.Unstructured, error) {
	return client.Patch(ctx, customName(number), "application/merge-patch+json", []byte(fmt.Sprintf(`{"spec":{"state":%q}}`, state)), metav1.PatchOptions{})
}

// customVersions lists name and resource version of objects.
func customVersions(items []unstructured.Unstructured) string {
	var text strings.Builder
	for i := range items {
		fmt.Fprintf(&text, "%s@%s\n", items[i].GetName(), items[i].GetResourceVersion())
	}
	return text.String()
}
