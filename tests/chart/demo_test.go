package chart

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
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
	for _, name := range []string{"etcd", "reads", "watches", "writes"} {
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
	if image := c.Services["rangecache"].Image; image != "ghcr.io/rangecache/rangecache:"+cargoVersion(t) {
		t.Error(image)
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
	clients, metrics := startPair(t)
	local := func(service string) []string {
		var args []string
		for _, arg := range c.Services[service].Command {
			arg = strings.ReplaceAll(arg, "http://rangecache:23790", clients)
			args = append(args, strings.ReplaceAll(arg, "/usr/local/bin/etcdctl", tools+"/etcdctl"))
		}
		return args
	}
	lines := func(service string) *bufio.Reader {
		watch := exec.Command(tools+"/etcdctl", local(service)...)
		out, err := watch.StdoutPipe()
		must(t, service, err)
		must(t, service, watch.Start())
		t.Cleanup(func() {
			_ = watch.Process.Kill()
			_ = watch.Wait()
		})
		return bufio.NewReader(out)
	}
	events, reads := lines("watches"), lines("reads")
	start(t, tools+"/etcdctl", local("writes")...)
	line, err := events.ReadString('\n')
	if must(t, "an event", err); line != "PUT\n" {
		t.Errorf("the watch got %q", line)
	}
	// The second event is printed once the read after the first one has ended.
	for events := 0; events < 2; {
		line, err := reads.ReadString('\n')
		must(t, "an event of the reads", err)
		if line == "PUT\n" {
			events++
		}
	}
	text, _, err := get(metrics + "/metrics")
	must(t, "metrics", err)
	if !regexp.MustCompile(`(?m)^rangecache_range_total\{.*outcome="(hit|waited)".*\} [1-9]`).MatchString(text) {
		t.Errorf("memory answers no read:\n%s", text)
	}
}
