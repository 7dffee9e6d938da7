package chart

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// compose is the part of demo/compose.yaml that can be checked without a container engine.
type compose struct {
	Services map[string]struct {
		Image   string   `json:"image"`
		Command []string `json:"command"`
		Volumes []string `json:"volumes"`
		Ports   []string `json:"ports"`
	} `json:"services"`
}

const demo = root + "/demo"

// mounts returns the files of this machine by their paths in a service's container.
func (c *compose) mounts(t *testing.T, service string) map[string]string {
	t.Helper()
	byTarget := map[string]string{}
	for _, volume := range c.Services[service].Volumes {
		parts := strings.Split(volume, ":")
		if len(parts) != 3 || parts[2] != "ro" {
			t.Errorf("%s: %s is not a read-only mount", service, volume)
			continue
		}
		byTarget[parts[1]] = filepath.Join(demo, parts[0])
	}
	return byTarget
}

// TestDemoIsComplete checks that demo/compose.yaml mounts files that exist, among them the chart's own dashboard and alerts, that
// Prometheus and rangecache accept their settings, and that no port is open to other machines.
func TestDemoIsComplete(t *testing.T) {
	c := &compose{}
	must(t, "compose.yaml", yaml.Unmarshal([]byte(read(t, demo+"/compose.yaml")), c))
	if names := keysOf(c.Services); !slices.Equal(names, []string{"etcd", "grafana", "prometheus", "rangecache", "reads", "watches", "writes"}) {
		t.Fatalf("%q", names)
	}
	tools := read(t, root+"/tests/tools/etcdctl/go.mod")
	for _, name := range []string{"etcd", "watches", "writes"} {
		_, version, _ := strings.Cut(c.Services[name].Image, ":")
		if !strings.Contains(tools, "etcdctl/v3 "+version+"\n") {
			t.Errorf("%s: etcd %s is not one that is tested", name, version)
		}
	}
	var sources []string
	for name, service := range c.Services {
		for _, source := range c.mounts(t, name) {
			if info, err := os.Stat(source); err != nil || !info.Mode().IsRegular() {
				t.Errorf("%s mounts %s: %v", name, source, err)
			}
			sources = append(sources, filepath.Clean(source))
		}
		for _, port := range service.Ports {
			if !strings.HasPrefix(port, "127.0.0.1:") {
				t.Errorf("%s opens %s", name, port)
			}
		}
	}
	for _, file := range []string{"dashboard.json", "alerts.yaml"} {
		if !slices.Contains(sources, filepath.Clean(chart+"/files/"+file)) {
			t.Errorf("the chart's %s is not mounted: %q", file, sources)
		}
	}

	settings := read(t, demo+"/prometheus.yaml")
	for target, source := range c.mounts(t, "prometheus") {
		local, err := filepath.Abs(source)
		must(t, source, err)
		settings = strings.ReplaceAll(settings, target, local)
	}
	file := filepath.Join(t.TempDir(), "prometheus.yaml")
	must(t, file, os.WriteFile(file, []byte(settings), 0o600))
	promtool(t, "check", "config", file)

	out, err := exec.Command(rangecacheBinary(), append([]string{"config"}, c.Services["rangecache"].Command...)...).CombinedOutput()
	must(t, string(out), err)
	for _, name := range []string{"rangecache", "reads"} {
		if c.Services[name].Image != "ghcr.io/rangecache/rangecache:"+cargoVersion(t) {
			t.Error(c.Services[name].Image)
		}
	}
	// The dashboards are provisioned from the folder into which the dashboard is mounted.
	provider := struct {
		Providers []struct {
			Options struct {
				Path string `json:"path"`
			} `json:"options"`
		} `json:"providers"`
	}{}
	must(t, "dashboards.yaml", yaml.Unmarshal([]byte(read(t, demo+"/grafana/dashboards.yaml")), &provider))
	if c.mounts(t, "grafana")[provider.Providers[0].Options.Path+"/rangecache.json"] == "" {
		t.Errorf("%v", provider)
	}
}

// TestDemoHasLoad checks that the clients of demo/compose.yaml write, watch and read: the dashboard would open empty without them.
func TestDemoHasLoad(t *testing.T) {
	c := &compose{}
	must(t, "compose.yaml", yaml.Unmarshal([]byte(read(t, demo+"/compose.yaml")), c))
	clients, _ := startPair(t)
	local := func(service string) []string {
		var args []string
		for _, arg := range c.Services[service].Command {
			arg = strings.ReplaceAll(arg, "http://rangecache:23790", clients)
			for target, source := range c.mounts(t, service) {
				arg = strings.ReplaceAll(arg, target, source)
			}
			args = append(args, arg)
		}
		return args
	}
	watch := exec.Command(tools+"/etcdctl", local("watches")...)
	events, err := watch.StdoutPipe()
	must(t, "watches", err)
	must(t, "watches", watch.Start())
	t.Cleanup(func() {
		_ = watch.Process.Kill()
		_ = watch.Wait()
	})
	start(t, tools+"/etcdctl", local("writes")...)
	line, err := bufio.NewReader(events).ReadString('\n')
	if must(t, "an event", err); line != "PUT\n" {
		t.Errorf("the watch got %q", line)
	}

	// At once, not in the 15 seconds that the demo takes for them.
	args := append(local("reads"), "--speed=10000")
	args = slices.DeleteFunc(args, func(arg string) bool { return arg == "--speed=20" })
	out, err := exec.Command(rangecacheBinary(), args...).CombinedOutput()
	must(t, string(out), err)
	if !strings.Contains(string(out), "300 calls in") {
		t.Errorf("not every line is a read:\n%s", out)
	}
}
