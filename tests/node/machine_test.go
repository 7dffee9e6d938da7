package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	root    = "../.."
	tools   = root + "/target/tools"
	version = "v1.37.2"
	// rangecacheImage is the image of the chart's defaults, by its tag.
	rangecacheImage = "ghcr.io/rangecache/rangecache"
	// manifests is the kubelet's folder.
	manifests = "/etc/kubernetes/manifests"
)

// machine is a Linux machine in namespaces of its own, on which kubeadm has made a control plane node.
type machine struct {
	folder string
	// name and address are those of its node.
	name, address string
	// digest is that of rangecache's image.
	digest string
	client kubernetes.Interface
	// network is open on the machine's network namespace.
	network *os.File
}

func must(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// await calls until is done, and fails if that takes more than a limit that a loaded machine keeps.
func await(t *testing.T, what string, limit time.Duration, done func() error) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for {
		err := done()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v", what, err)
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// newMachine starts a machine with containerd and the images of a node. The number, from 1 on, is the last part of its address.
func newMachine(t *testing.T, number int) *machine {
	t.Helper()
	folder, err := os.MkdirTemp("", "rangecache-node-")
	must(t, "folder", err)
	m := &machine{folder: folder, name: fmt.Sprintf("node%d", number), address: fmt.Sprintf("10.99.0.%d", number)}
	t.Cleanup(func() {
		if out, err := m.host("machine/stop").CombinedOutput(); err != nil {
			t.Errorf("the machine cannot be stopped: %v: %s", err, out)
		}
		if t.Failed() {
			t.Logf("logs of the node are in %s", folder)
			return
		}
		must(t, folder, os.RemoveAll(folder))
	})
	for _, name := range []string{"bin", "state", "over", "log"} {
		must(t, name, os.Mkdir(filepath.Join(folder, name), 0o755))
	}
	absolute := func(name string) string {
		found, err := filepath.Abs(name)
		must(t, name, err)
		return found
	}
	must(t, "packages", os.Symlink(absolute(tools+"/node-packages"), folder+"/packages"))
	for _, name := range []string{"kubelet", "kubeadm"} {
		must(t, name, os.Symlink(absolute(tools+"/kube-node"), folder+"/bin/"+name))
	}
	must(t, "helm", os.Symlink(absolute(tools+"/helm-4"), folder+"/bin/helm"))
	for _, name := range []string{"containerd.toml", "network.conflist"} {
		content, err := os.ReadFile("machine/" + name)
		must(t, name, err)
		text := strings.ReplaceAll(string(content), "MACHINE_NUMBER", fmt.Sprint(number))
		must(t, name, os.WriteFile(filepath.Join(folder, name), []byte(text), 0o644))
	}

	start := m.host("machine/start")
	start.Env = append(start.Env, fmt.Sprintf("MACHINE_NUMBER=%d", number))
	log, err := os.Create(folder + "/log/machine")
	must(t, "log", err)
	defer log.Close()
	start.Stdout, start.Stderr = log, log
	must(t, "start", start.Start())
	go func() { _ = start.Wait() }()
	await(t, "the machine's first process", time.Minute, func() error {
		// `start` becomes unshare, whose child is the first process.
		children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", start.Process.Pid, start.Process.Pid))
		first := strings.TrimSpace(string(children))
		if err != nil || first == "" {
			return errors.Join(err, errors.New("none"))
		}
		if err := os.WriteFile(folder+"/first.pid", []byte(first), 0o644); err != nil {
			return err
		}
		_, err = m.try("test", "-f", "/run/machine.ready")
		return err
	})
	first, err := os.ReadFile(folder + "/first.pid")
	must(t, "first.pid", err)
	m.network, err = os.Open(fmt.Sprintf("/proc/%s/ns/net", first))
	must(t, "network", err)
	t.Cleanup(func() { _ = m.network.Close() })

	m.background(t, "containerd", "containerd")
	await(t, "containerd", time.Minute, func() error {
		_, err := m.try("ctr", "version")
		return err
	})
	m.importImages(t)
	return m
}

// host returns a command of this test's folder with the machine in its environment.
func (m *machine) host(name string, args ...string) *exec.Cmd {
	command := exec.Command(name, args...)
	command.Env = append(os.Environ(), "MACHINE="+m.folder)
	return command
}

// try runs a program in the machine.
func (m *machine) try(args ...string) (string, error) {
	out, err := m.host("machine/in", args...).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, out)
	}
	return string(out), err
}

func (m *machine) run(t *testing.T, args ...string) string {
	t.Helper()
	out, err := m.try(args...)
	must(t, "in the machine", err)
	return out
}

// background starts a program that runs until the machine ends.
func (m *machine) background(t *testing.T, name string, args ...string) {
	t.Helper()
	log, err := os.OpenFile(filepath.Join(m.folder, "log", name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	must(t, name, err)
	defer log.Close()
	command := m.host("machine/in", args...)
	command.Stdout, command.Stderr = log, log
	must(t, name, command.Start())
	go func() { _ = command.Wait() }()
}

// dial connects to an address in the machine's network: a socket stays in the network in which its thread created it.
func (m *machine) dial(ctx context.Context, network, address string) (net.Conn, error) {
	type dialed struct {
		conn net.Conn
		err  error
	}
	done := make(chan dialed, 1)
	go func() {
		// The thread ends with this goroutine, which never unlocks it.
		runtime.LockOSThread()
		if err := unix.Setns(int(m.network.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- dialed{nil, err}
			return
		}
		conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
		done <- dialed{conn, err}
	}()
	result := <-done
	return result.conn, result.err
}

// importImages gives containerd what the node's pods run.
func (m *machine) importImages(t *testing.T) {
	t.Helper()
	kube := map[string]string{}
	names := map[string]string{}
	for line := range strings.Lines(m.run(t, "kubeadm", "config", "images", "list", "--kubernetes-version", version)) {
		name := strings.TrimSpace(line)
		repository, _, _ := strings.Cut(name[strings.LastIndex(name, "/")+1:], ":")
		names[repository] = name
	}
	for _, name := range []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler"} {
		kube["/usr/local/bin/"+name] = "kube-node"
	}
	binary := os.Getenv("RANGECACHE")
	if binary == "" {
		binary = root + "/target/debug/rangecache"
	}
	images := []image{
		{name: "registry.k8s.io/pause:test", entrypoint: []string{"/pause"}, files: map[string]string{"/pause": tools + "/pause"}},
		{name: names["etcd"], files: map[string]string{"/usr/local/bin/etcd": tools + "/etcd-3.7"}},
		{name: names["kube-apiserver"], files: map[string]string{"/usr/local/bin/kube-node": tools + "/kube-node"}, links: kube},
		{name: rangecacheImage + ":0.1.0", entrypoint: []string{"/rangecache"}, files: withLibraries(t, binary)},
	}
	for _, image := range images {
		file := filepath.Join(m.folder, "image.tar")
		digest := image.write(t, file)
		m.run(t, "ctr", "images", "import", file)
		must(t, file, os.Remove(file))
		m.digest = digest
	}
	for _, name := range []string{"kube-controller-manager", "kube-scheduler"} {
		m.run(t, "ctr", "images", "tag", names["kube-apiserver"], names[name])
	}
	m.run(t, "ctr", "images", "tag", rangecacheImage+":0.1.0", rangecacheImage+"@"+m.digest)
}

// withLibraries returns the files of an image for a binary that is linked dynamically.
func withLibraries(t *testing.T, binary string) map[string]string {
	t.Helper()
	files := map[string]string{"/rangecache": binary}
	out, err := exec.Command("ldd", binary).Output()
	if err != nil {
		return files
	}
	for _, word := range strings.Fields(string(out)) {
		if strings.HasPrefix(word, "/") {
			files[word] = word
		}
	}
	return files
}

// write writes a file in the machine, as an operator's editor does: in place.
func (m *machine) write(t *testing.T, file, text string) {
	t.Helper()
	command := m.host("machine/in", "tee", file)
	command.Stdin = strings.NewReader(text)
	out, err := command.CombinedOutput()
	must(t, string(out), err)
}

// startKubelet starts the kubelet with the flags that kubeadm has written, and again when it ends, as a service manager does.
func (m *machine) startKubelet(t *testing.T) {
	t.Helper()
	m.background(t, "kubelet", "bash", "-c", `until [ -f /var/lib/kubelet/config.yaml ]; do sleep 0.2; done
. /var/lib/kubelet/kubeadm-flags.env
while :; do
  kubelet --bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf --kubeconfig=/etc/kubernetes/kubelet.conf --config=/var/lib/kubelet/config.yaml $KUBELET_KUBEADM_ARGS || true
  sleep 1
done`)
}

// newNode starts a machine that kubeadm makes the first control plane node of a cluster.
func newNode(t *testing.T) *machine {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("namespaces, mounts and control groups of a machine need root")
	}
	m := newMachine(t, 1)
	m.configure(t, "init")
	m.run(t, "kubeadm", "init", "--config", "/run/kubeadm.yaml", "--ignore-preflight-errors=all")
	m.connect(t)
	return m
}

// join starts a second machine, which becomes another control plane node of this one's cluster, and a member of its etcd.
func (m *machine) join(t *testing.T) *machine {
	t.Helper()
	other := newMachine(t, 2)
	// A cable between the bridges of both machines, laid by the host, which sees both.
	pids := []string{}
	for _, machine := range []*machine{m, other} {
		first, err := os.ReadFile(machine.folder + "/first.pid")
		must(t, "first.pid", err)
		pids = append(pids, string(first))
	}
	cable := exec.Command("nsenter", "--target", pids[0], "--net", "ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", pids[1])
	out, err := cable.CombinedOutput()
	must(t, string(out), err)
	for _, machine := range []*machine{m, other} {
		machine.run(t, "ip", "link", "set", "cable", "master", "node0", "up")
	}

	words := strings.Fields(m.run(t, "kubeadm", "init", "phase", "upload-certs", "--upload-certs"))
	other.configure(t, "join",
		"CERTIFICATE_KEY", words[len(words)-1],
		"TOKEN", strings.TrimSpace(m.run(t, "kubeadm", "token", "create")))
	other.run(t, "kubeadm", "join", "--config", "/run/kubeadm.yaml", "--ignore-preflight-errors=all")
	other.connect(t)
	return other
}

// connect makes the client of the node's apiserver, and waits until the node is ready.
func (m *machine) connect(t *testing.T) {
	t.Helper()
	access, err := clientcmd.RESTConfigFromKubeConfig([]byte(m.run(t, "cat", "/etc/kubernetes/admin.conf")))
	must(t, "admin.conf", err)
	access.Host = "https://" + m.address + ":6443"
	access.Dial = m.dial
	access.QPS = -1
	access.Timeout = requestTimeout
	m.client, err = kubernetes.NewForConfig(rest.AddUserAgent(access, "node-test"))
	must(t, "client", err)
	await(t, "the node", 3*time.Minute, func() error {
		node, err := m.client.CoreV1().Nodes().Get(t.Context(), m.name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, condition := range node.Status.Conditions {
			if condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue {
				return nil
			}
		}
		return fmt.Errorf("not ready: %v", node.Status.Conditions)
	})
}

// configure starts the kubelet, and writes kubeadm's configuration for an action, with words that are replaced.
func (m *machine) configure(t *testing.T, action string, words ...string) {
	t.Helper()
	config, err := os.ReadFile("machine/" + action + ".yaml")
	must(t, action, err)
	words = append(words, "KUBERNETES_VERSION", version, "NODE_NAME", m.name, "NODE_ADDRESS", m.address)
	m.write(t, "/run/kubeadm.yaml", strings.NewReplacer(words...).Replace(string(config)))
	m.startKubelet(t)
}

// get returns the response of rangecache's port for operators at an address of the machine's networks.
func (m *machine) get(address, path string) (string, error) {
	client := &http.Client{Transport: &http.Transport{DialContext: m.dial, DisableKeepAlives: true}, Timeout: 5 * time.Second}
	response, err := client.Get("http://" + address + ":23791" + path)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return "", err
	}
	if response.StatusCode != http.StatusOK {
		return "", fmt.Errorf("%s: %s", response.Status, text)
	}
	return string(text), nil
}

// files returns the names in the kubelet's folder, but for kubeadm's.
func (m *machine) files(t *testing.T) []string {
	t.Helper()
	var files []string
	for _, name := range strings.Fields(m.run(t, "ls", "-A", manifests)) {
		kubeadms := []string{"etcd.yaml", "kube-apiserver.yaml", "kube-controller-manager.yaml", "kube-scheduler.yaml"}
		if !slices.Contains(kubeadms, name) {
			files = append(files, name)
		}
	}
	return files
}
