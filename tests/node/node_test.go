// Package node tests the chart on a true Kubernetes node: kubeadm, kubelet, containerd, and etcd, kube-apiserver and the others as
// static pods, in namespaces that end with the test. It needs root, and takes some minutes.
package node

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	namespace = "kube-system"
	direct    = "https://127.0.0.1:2379"
	through   = "https://127.0.0.1:23790"
)

// TestNode takes one node through everything that an operator does with the static pod. Between the steps the apiserver reads and
// writes through rangecache, and clients of the apiserver are watched at each.
func TestNode(t *testing.T) {
	m := newNode(t)
	unharmed := func(what string, act func()) {
		t.Helper()
		if seen := m.during(t, what, act); len(seen.failed) != 0 {
			t.Errorf("%s: %v", what, seen)
		}
	}

	_, err := m.client.CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: seen}}, metav1.CreateOptions{})
	must(t, seen, err)

	m.write(t, manifests+"/rangecache.yaml", alone(m.template(t)))
	await(t, "a pod of an earlier version", 2*time.Minute, func() error { return m.isReady("") })
	m.point(t, through)

	// Its ports are not shared, so that the new pod waits until it has ended.
	m.during(t, "from a pod that shares no ports", func() { m.helm(t, "install") })
	m.settled(t)
	m.restarts(t, 0)
	m.passesThrough(t)

	unharmed("another log level", func() { m.helm(t, "upgrade", "log.level=warn") })
	unharmed("another flag and another size", func() {
		m.helm(t, "upgrade", "log.level=warn", "cache.maxBytes=512Mi", "extraArgs={--probe-interval=2s}")
	})
	m.settled(t)
	before := m.files(t)

	// The check does not know what else runs on the node.
	unharmed("a pod that the kubelet does not admit", func() {
		m.upgradeThatFails(t, "the new pod did not become ready", "resources.requests.cpu=1000", "staticPod.readyTimeout=20s")
	})
	unharmed("flags that the check refuses", func() {
		m.upgradeThatFails(t, "the check of the flags failed", "etcd.endpoints={https://127.0.0.1:2999}")
	})
	unharmed("removal under the apiserver", func() {
		m.upgradeThatFails(t, "would lose its etcd", "staticPod.state=absent")
	})
	unharmed("another port under the apiserver", func() {
		m.upgradeThatFails(t, "would lose its etcd", "listener.port=23700")
	})
	unharmed("the values before", func() {
		m.helm(t, "upgrade", "log.level=warn", "cache.maxBytes=512Mi", "extraArgs={--probe-interval=2s}")
	})
	if after := m.files(t); !slices.Equal(after, before) {
		t.Errorf("the folder has %q, and had %q", after, before)
	}

	m.during(t, "a crash of rangecache", func() {
		m.run(t, "pkill", "-KILL", "-x", "rangecache")
		await(t, "restart", 2*time.Minute, func() error { return m.isReady("") })
	})
	serial := func() string {
		return m.run(t, "bash", "-c", "openssl s_client -connect 127.0.0.1:23790 </dev/null 2>/dev/null | openssl x509 -noout -serial")
	}
	served := serial()
	unharmed("renewed certificates", func() {
		m.run(t, "kubeadm", "certs", "renew", "etcd-server")
		m.run(t, "kubeadm", "certs", "renew", "etcd-healthcheck-client")
		await(t, "the renewed certificate", 2*time.Minute, func() error {
			if serial() == served {
				return errors.New("the old one is served")
			}
			return nil
		})
	})

	m.upgradeKubernetes(t)

	m.powerCut(t)
	await(t, "everything after a power cut", 5*time.Minute, func() error { return errors.Join(m.isReady(""), m.apiserver(through)) })

	m.point(t, direct)
	unharmed("removal", func() {
		m.helm(t, "upgrade", "staticPod.state=absent")
		m.run(t, "helm", "uninstall", "rangecache", "--namespace", namespace, "--wait")
	})
	if left := m.files(t); len(left) != 0 {
		t.Errorf("the folder has %q", left)
	}
}

// chart returns the arguments of helm for these values.
func (m *machine) chart(t *testing.T, values ...string) []string {
	t.Helper()
	return release(t, "rangecache", namespace, append([]string{"mode=static-pod", "image.digest=" + m.digest}, values...)...)
}

// release returns the arguments of helm for a release of the chart with these values.
func release(t *testing.T, name, in string, values ...string) []string {
	t.Helper()
	chart, err := filepath.Abs(root + "/charts/rangecache")
	must(t, "chart", err)
	args := []string{name, chart, "--namespace", in}
	for _, value := range values {
		args = append(args, "--set", value)
	}
	return args
}

// template returns the manifest of a static pod.
func (m *machine) template(t *testing.T) string {
	t.Helper()
	return m.run(t, append([]string{"helm", "template"}, append(m.chart(t, "staticPod.delivery=manifest"), "--show-only", "templates/static-pod.yaml")...)...)
}

// alone returns the manifest as it was before static pods ran side by side: with a fixed name, ports of the host, and listeners of
// its own.
func alone(manifest string) string {
	var lines []string
	for line := range strings.Lines(manifest) {
		switch {
		case strings.HasPrefix(line, "  name: rangecache-"):
			line = "  name: rangecache\n"
		case strings.Contains(line, "--socket-reuse-port"), strings.Contains(line, "priority: "):
			continue
		case strings.HasPrefix(line, "      resources:"):
			line = "      ports:\n        - containerPort: 23790\n        - containerPort: 23791\n" + line
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "")
}

// helm installs or upgrades the chart, and waits until the installer has done its work.
func (m *machine) helm(t *testing.T, action string, values ...string) {
	t.Helper()
	m.run(t, append([]string{"helm", action}, m.chart(t, values...)...)...)
	await(t, "helm "+action, 4*time.Minute, func() error {
		set, err := m.client.AppsV1().DaemonSets(namespace).Get(t.Context(), "rangecache-installer", metav1.GetOptions{})
		if err != nil {
			return err
		}
		status := set.Status
		nodes := status.DesiredNumberScheduled
		if status.ObservedGeneration < set.Generation || nodes == 0 || status.UpdatedNumberScheduled < nodes || status.NumberReady < nodes {
			return fmt.Errorf("the installer is not ready: %+v: %s", status, m.installerSays())
		}
		return nil
	})
}

// upgradeThatFails upgrades the chart and waits until the installer says why it fails.
func (m *machine) upgradeThatFails(t *testing.T, says string, values ...string) {
	t.Helper()
	m.run(t, append([]string{"helm", "upgrade"}, m.chart(t, append([]string{"log.level=warn"}, values...)...)...)...)
	await(t, "an upgrade that fails", 4*time.Minute, func() error {
		if text := m.installerSays(); !strings.Contains(text, says) {
			return fmt.Errorf("the installer says %s", text)
		}
		return nil
	})
}

// installerSays returns the last words of the newest installer.
func (m *machine) installerSays() string {
	pods, err := m.client.CoreV1().Pods(namespace).List(context.Background(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=installer"})
	if err != nil {
		return err.Error()
	}
	var text strings.Builder
	for _, pod := range pods.Items {
		for _, status := range pod.Status.InitContainerStatuses {
			log, err := m.client.CoreV1().Pods(namespace).GetLogs(pod.Name, &corev1.PodLogOptions{Container: "install"}).Do(context.Background()).Raw()
			fmt.Fprintf(&text, "%s %+v: %s%v\n", pod.Name, status.State, log, err)
		}
	}
	return text.String()
}

// point points the apiserver at another etcd, and waits until it reads there.
func (m *machine) point(t *testing.T, servers string) {
	t.Helper()
	file := manifests + "/kube-apiserver.yaml"
	text := m.run(t, "cat", file)
	var lines []string
	for line := range strings.Lines(text) {
		if before, _, found := strings.Cut(line, "--etcd-servers="); found {
			line = before + "--etcd-servers=" + servers + "\n"
		}
		lines = append(lines, line)
	}
	m.write(t, file, strings.Join(lines, ""))
	await(t, "the apiserver at "+servers, 4*time.Minute, func() error { return m.apiserver(servers) })
}

// apiserver returns why the apiserver that reads from servers is not ready.
func (m *machine) apiserver(servers string) error {
	if _, err := m.try("pgrep", "-f", "^kube-apiserver .*--etcd-servers="+servers+"( |$)"); err != nil {
		return err
	}
	_, err := m.client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(context.Background()).Raw()
	return err
}

// isReady returns why rangecache is not ready, or not the pod of this name.
func (m *machine) isReady(pod string) error {
	status, err := m.get("127.0.0.1", "/status")
	if err != nil {
		return err
	}
	if !strings.Contains(status, `"ready":true`) || !strings.Contains(status, `"pod":"`+pod) && pod != "" {
		return fmt.Errorf("rangecache is not ready: %.300s", status)
	}
	return nil
}

// passesThrough checks that reads of the apiserver come from rangecache's memory.
func (m *machine) passesThrough(t *testing.T) {
	t.Helper()
	hits := func() (sum float64) {
		text, err := m.get("127.0.0.1", "/metrics")
		must(t, "metrics", err)
		for line := range strings.Lines(text) {
			if strings.HasPrefix(line, "rangecache_range_total{outcome=\"hit\"") {
				var count float64
				_, err := fmt.Sscan(line[strings.LastIndex(line, " ")+1:], &count)
				must(t, line, err)
				sum += count
			}
		}
		return sum
	}
	before := hits()
	for range 10 {
		_, err := m.client.CoreV1().ConfigMaps("default").Get(t.Context(), seen, metav1.GetOptions{})
		must(t, "get", err)
	}
	if after := hits(); after < before+10 {
		t.Errorf("%v hits before ten reads of the apiserver, and %v afterwards", before, after)
	}
}

// settled waits until the pod of the only manifest is the only one that runs.
func (m *machine) settled(t *testing.T) {
	t.Helper()
	await(t, "one pod", 2*time.Minute, func() error {
		files := m.files(t)
		if len(files) != 1 {
			return fmt.Errorf("the manifests are %q", files)
		}
		// A pause process, and those of the installer, have other names or arguments.
		processes, err := m.try("pgrep", "-c", "-f", "^/rangecache --endpoints")
		if err != nil || strings.TrimSpace(processes) != "1" {
			return fmt.Errorf("%s processes: %w", processes, err)
		}
		return m.isReady(strings.TrimSuffix(files[0], ".yaml"))
	})
}

// restarts checks how often the container of the node's rangecache was started again.
func (m *machine) restarts(t *testing.T, expected int32) {
	t.Helper()
	await(t, "restarts", time.Minute, func() error {
		pods, err := m.client.CoreV1().Pods(namespace).List(t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=proxy", FieldSelector: "spec.nodeName=" + m.name})
		if err != nil {
			return err
		}
		if len(pods.Items) != 1 || len(pods.Items[0].Status.ContainerStatuses) != 1 {
			return fmt.Errorf("%d pods", len(pods.Items))
		}
		if count := pods.Items[0].Status.ContainerStatuses[0].RestartCount; count != expected {
			return fmt.Errorf("%s was restarted %d times", pods.Items[0].Name, count)
		}
		return nil
	})
}

// upgradeKubernetes lets kubeadm replace etcd, the apiserver and the others, by the same version, and checks that the apiserver
// keeps the flag that stands in the ClusterConfiguration. Requests fail while etcd and the only apiserver are replaced.
func (m *machine) upgradeKubernetes(t *testing.T) {
	t.Helper()
	maps := m.client.CoreV1().ConfigMaps(namespace)
	config, err := maps.Get(t.Context(), "kubeadm-config", metav1.GetOptions{})
	must(t, "kubeadm-config", err)
	const key = "ClusterConfiguration"
	flag := "apiServer:\n  extraArgs:\n  - name: etcd-servers\n    value: " + through + "\n"
	config.Data[key] = strings.Replace(config.Data[key], "apiServer: {}\n", flag, 1)
	if !strings.Contains(config.Data[key], flag) {
		t.Fatalf("the ClusterConfiguration has flags of its own:\n%s", config.Data[key])
	}
	_, err = maps.Update(t.Context(), config, metav1.UpdateOptions{})
	must(t, "kubeadm-config", err)
	m.during(t, "kubeadm upgrade", func() {
		m.run(t, "kubeadm", "upgrade", "apply", version, "--force", "--yes", "--ignore-preflight-errors=all")
		await(t, "the apiserver after the upgrade", 4*time.Minute, func() error { return errors.Join(m.isReady(""), m.apiserver(through)) })
	})
}

// powerCut kills everything, takes what is not on the disk, and starts the machine's services again.
func (m *machine) powerCut(t *testing.T) {
	t.Helper()
	m.run(t, "bash", "-c", `for process in /proc/[0-9]*; do
  number=${process#/proc/}
  [ "$number" = 1 ] || [ "$number" = $$ ] || kill -KILL "$number" 2>/dev/null || true
done
sleep 1
awk '$2 ~ "^/run/containerd|^/var/lib/kubelet/pods|^/run/netns" { print $2 }' /proc/mounts | sort -r | xargs -r -n1 umount -l
rm -rf /run/containerd /run/netns`)
	m.background(t, "containerd", "containerd")
	m.startKubelet(t)
}
