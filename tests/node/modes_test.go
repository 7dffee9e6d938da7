package node

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// etcdFiles is kubeadm's folder with the certificates of etcd.
const etcdFiles = "/etc/kubernetes/pki/etcd"

// TestOtherModes installs and updates the chart in its other modes.
func TestOtherModes(t *testing.T) {
	m := newNode(t)
	const restricted = "etcd-proxy"
	labels := map[string]string{"pod-security.kubernetes.io/enforce": "restricted"}
	_, err := m.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: restricted, Labels: labels}}, metav1.CreateOptions{})
	must(t, restricted, err)
	for name, of := range map[string]string{"client": "healthcheck-client", "server": "server"} {
		secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string][]byte{}}
		for key, file := range map[string]string{"ca.crt": "ca.crt", "tls.crt": of + ".crt", "tls.key": of + ".key"} {
			secret.Data[key] = []byte(m.run(t, "cat", filepath.Join(etcdFiles, file)))
		}
		_, err := m.client.CoreV1().Secrets(restricted).Create(t.Context(), secret, metav1.CreateOptions{})
		must(t, name, err)
	}
	m.installAndUpdate(t, restricted, "mode=deployment", "etcd.endpoints={https://"+m.address+":2379}", "etcd.tls.secretName=client", "listener.tls.secretName=server", "tolerations[0].operator=Exists")
	m.installAndUpdate(t, namespace, "mode=daemonset", "etcd.endpoints={https://127.0.0.1:2379}",
		"etcd.tls.hostPath="+etcdFiles+",etcd.tls.certFile=healthcheck-client.crt,etcd.tls.keyFile=healthcheck-client.key",
		"listener.tls.hostPath="+etcdFiles+",listener.tls.certFile=server.crt,listener.tls.keyFile=server.key", "security.runAsUser=0")
}

// installAndUpdate installs the chart, updates it, asks each of its pods, and uninstalls it.
func (m *machine) installAndUpdate(t *testing.T, in string, values ...string) {
	t.Helper()
	for _, step := range []struct{ action, level string }{{"install", "info"}, {"upgrade", "warn"}} {
		of := release(t, "other", in, append([]string{"log.level=" + step.level}, values...)...)
		m.run(t, append([]string{"helm", step.action, "--wait", "--timeout", "4m"}, of...)...)
		await(t, values[0]+", "+step.action, time.Minute, func() error {
			pods, err := m.client.CoreV1().Pods(in).List(t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/instance=other"})
			if err != nil {
				return err
			}
			asked := 0
			for _, pod := range pods.Items {
				if pod.DeletionTimestamp != nil {
					continue
				}
				address := pod.Status.PodIP
				if pod.Spec.HostNetwork {
					address = "127.0.0.1"
				}
				if _, err := m.get(address, "/readyz"); err != nil {
					return fmt.Errorf("%s: %w", pod.Name, err)
				}
				asked++
			}
			if asked == 0 {
				return fmt.Errorf("none of %d pods runs", len(pods.Items))
			}
			return nil
		})
		t.Logf("%s, %s: ready", values[0], step.action)
	}
	m.run(t, "helm", "uninstall", "other", "--namespace", in, "--wait")
}
