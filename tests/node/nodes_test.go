package node

import (
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestTwoNodes takes two control plane nodes, whose etcds are one cluster, to rangecache and back, each apiserver through the one of
// its node. What is written at one apiserver is read at the other.
func TestTwoNodes(t *testing.T) {
	first := newNode(t)
	second := first.join(t)
	nodes := []*machine{first, second}
	crossed := []prober{{first.client, second.client}, {second.client, first.client}}
	unharmed := func(what string, probers []prober, act func()) {
		t.Helper()
		for _, result := range during(t, what, probers, act) {
			if len(result.failed) != 0 {
				t.Errorf("%s: %v", what, result)
			}
		}
	}
	// Both apiservers restart in turn when they are pointed elsewhere: the other one's clients must not see it.
	point := func(servers string) {
		t.Helper()
		for i, node := range nodes {
			other := nodes[1-i].client
			unharmed(node.name+"'s apiserver at "+servers, []prober{{other, other}}, func() { node.point(t, servers) })
		}
	}
	_, err := first.client.CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: seen}}, metav1.CreateOptions{})
	must(t, seen, err)

	unharmed("install", crossed, func() { first.helm(t, "install") })
	point(through)
	for _, node := range nodes {
		node.settled(t)
		node.passesThrough(t)
	}
	unharmed("another flag", crossed, func() { first.helm(t, "upgrade", "extraArgs={--probe-interval=2s}") })
	for _, node := range nodes {
		node.settled(t)
		node.restarts(t, 0)
		node.passesThrough(t)
	}
	unharmed("a crash of the other node's rangecache", []prober{{second.client, second.client}}, func() {
		first.run(t, "pkill", "-KILL", "-x", "rangecache")
		await(t, "restart", 2*time.Minute, func() error { return first.isReady("") })
	})

	// Without a majority nothing is answered; afterwards both serve again without help.
	during(t, "a crash of one member of etcd", crossed, func() {
		first.run(t, "pkill", "-KILL", "-x", "etcd")
		for _, node := range nodes {
			await(t, "everything after a crash of etcd", 3*time.Minute, func() error { return errors.Join(node.isReady(""), node.apiserver(through)) })
		}
	})
	unharmed("after the crash of etcd", crossed, func() {})

	point(direct)
	unharmed("removal", crossed, func() {
		first.helm(t, "upgrade", "staticPod.state=absent")
		first.run(t, "helm", "uninstall", "rangecache", "--namespace", namespace, "--wait")
	})
	for _, node := range nodes {
		if left := node.files(t); len(left) != 0 {
			t.Errorf("%s: the folder has %q", node.name, left)
		}
	}
}
