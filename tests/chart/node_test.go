package chart

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// node is a kubelet's folder, and what a kubelet does with it: it runs the container of the manifest in it.
type node struct {
	folder       string
	certificates *pki
	stop         chan struct{}
	stopped      chan struct{}
}

// newNode starts a kubelet in miniature, which looks at its folder again and again.
func newNode(t *testing.T, certificates *pki) *node {
	n := &node{folder: t.TempDir(), certificates: certificates, stop: make(chan struct{}), stopped: make(chan struct{})}
	t.Cleanup(func() {
		close(n.stop)
		<-n.stopped
	})
	go n.run()
	return n
}

func (n *node) run() {
	defer close(n.stopped)
	var running *exec.Cmd
	var text string
	end := func() {
		if running != nil {
			_ = running.Process.Kill()
			_ = running.Wait()
			running = nil
		}
	}
	defer end()
	for {
		files, _ := filepath.Glob(n.folder + "/[^.]*")
		found := ""
		for _, file := range files {
			content, _ := os.ReadFile(file)
			found = string(content)
		}
		if found != text {
			end()
			text = found
			running = n.start(text)
		}
		select {
		case <-n.stop:
			return
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// start starts the manifest's container on this machine; nothing if there is none, or if its image is missing.
func (n *node) start(manifest string) *exec.Cmd {
	pod := &corev1.Pod{}
	if manifest == "" || yaml.Unmarshal([]byte(manifest), pod) != nil || len(pod.Spec.Containers) != 1 || strings.HasSuffix(pod.Spec.Containers[0].Image, ":missing") {
		return nil
	}
	command := exec.Command(rangecacheBinary(), n.local(pod.Spec.Containers[0].Args, pod.Spec)...)
	command.Stderr = os.Stderr
	if command.Start() != nil {
		return nil
	}
	return command
}

// local returns the arguments with the files of this machine in the place of the container's. kubeadm's folder is that of the
// certificates.
func (n *node) local(args []string, spec corev1.PodSpec) []string {
	var local []string
	for _, arg := range args {
		for _, container := range append(spec.InitContainers, spec.Containers...) {
			for _, mount := range container.VolumeMounts {
				for _, volume := range spec.Volumes {
					if volume.Name != mount.Name || !strings.HasSuffix(arg, "="+mount.MountPath) {
						continue
					}
					file := filepath.Join(n.certificates.folder, filepath.Base(volume.HostPath.Path))
					if mount.MountPath == "/manifests" {
						file = n.folder
					}
					arg = strings.TrimSuffix(arg, mount.MountPath) + file
				}
			}
		}
		local = append(local, arg)
	}
	return local
}

// install runs the installer's init container for the values as a kubelet does.
func (n *node) install(t *testing.T, values []string, attempt string, more ...string) (string, error) {
	t.Helper()
	spec := render(t, values...).daemonSet.Spec.Template.Spec
	install := spec.InitContainers[0]
	command := exec.CommandContext(t.Context(), rangecacheBinary(), append(n.local(install.Args, spec), more...)...)
	manifest := strings.ReplaceAll(environment(install)["STATIC_POD_MANIFEST"], "$$(", "$(")
	command.Env = []string{"STATIC_POD_MANIFEST=" + manifest, "STATIC_POD_ATTEMPT=" + attempt}
	out, err := command.CombinedOutput()
	return string(out), err
}

// names returns the names in the folder.
func (n *node) names(t *testing.T) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(n.folder)
	must(t, n.folder, err)
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

func (n *node) manifest(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(n.folder + "/rc-rangecache.yaml")
	must(t, n.folder, err)
	return string(text)
}
