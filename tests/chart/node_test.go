package chart

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
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
	// running is the number of containers that run.
	running atomic.Int32
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
	// The process of each manifest; nil if it could not be started.
	running := map[string]*exec.Cmd{}
	texts := map[string]string{}
	end := func(file string) {
		if process := running[file]; process != nil {
			_ = process.Process.Kill()
			_ = process.Wait()
			n.running.Add(-1)
		}
		delete(running, file)
		delete(texts, file)
	}
	defer func() {
		for file := range running {
			end(file)
		}
	}()
	for {
		files, _ := filepath.Glob(n.folder + "/[^.]*")
		for file := range texts {
			if !slices.Contains(files, file) {
				end(file)
			}
		}
		for _, file := range files {
			content, _ := os.ReadFile(file)
			if text := string(content); text != texts[file] {
				end(file)
				texts[file], running[file] = text, n.start(text)
				if running[file] != nil {
					n.running.Add(1)
				}
			}
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
	command.Env = append(os.Environ(), "K8S_POD_NAME="+pod.Name+"-node1")
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

// install runs the installer's init container for the values as a kubelet does; to remove, too.
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

// awaitAlone waits until the pod before has ended, which shares the ports until then.
func (n *node) awaitAlone(t *testing.T) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); n.running.Load() != 1; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d containers run", n.running.Load())
		}
	}
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

// manifest returns the text of rangecache's manifest, which must be the only one.
func (n *node) manifest(t *testing.T) string {
	t.Helper()
	files, err := filepath.Glob(n.folder + "/rc-rangecache*.yaml")
	must(t, n.folder, err)
	if len(files) != 1 || digits.FindString(files[0]) == "" {
		t.Fatalf("the manifests are %q", files)
	}
	text, err := os.ReadFile(files[0])
	must(t, n.folder, err)
	return string(text)
}
