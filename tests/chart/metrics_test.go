package chart

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"rangecache.test/shared"
	"sigs.k8s.io/yaml"
)

const (
	alertsFile    = chart + "/files/alerts.yaml"
	dashboardFile = chart + "/files/dashboard.json"
)

// rangecacheBinary is the program whose metrics and flags the chart names.
func rangecacheBinary() string {
	if path := os.Getenv("RANGECACHE"); path != "" {
		return path
	}
	return root + "/target/debug/rangecache"
}

// start runs a program until the test ends.
func start(t *testing.T, program string, args ...string) {
	t.Helper()
	command := exec.Command(program, args...)
	must(t, program, command.Start())
	t.Cleanup(func() {
		_ = command.Process.Kill()
		_ = command.Wait()
	})
}

func get(url string) (string, int, error) {
	client := http.Client{Timeout: 5 * time.Second}
	response, err := client.Get(url)
	if err != nil {
		return "", 0, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	return string(body), response.StatusCode, err
}

// awaitReady waits until every mirror is warm.
func awaitReady(t *testing.T, metrics string) {
	t.Helper()
	for deadline := time.Now().Add(60 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if _, status, err := get(metrics + "/readyz"); err == nil && status == http.StatusOK {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("rangecache does not get ready")
		}
	}
}

// startPair starts a rangecache on a real etcd and returns its URLs for clients and for metrics.
func startPair(t *testing.T) (clientURL, metricsURL string) {
	t.Helper()
	etcd, peer, clients, metrics := shared.FreePort(t), shared.FreePort(t), shared.FreePort(t), shared.FreePort(t)
	url := func(port int) string { return fmt.Sprintf("http://127.0.0.1:%d", port) }
	start(t, tools+"/etcd-3.7", "--data-dir", t.TempDir(), "--log-level", "error",
		"--listen-client-urls", url(etcd), "--advertise-client-urls", url(etcd),
		"--listen-peer-urls", url(peer), "--initial-advertise-peer-urls", url(peer), "--initial-cluster", "default="+url(peer))
	start(t, rangecacheBinary(), "--endpoints", url(etcd), "--listen-client-urls", url(clients), "--listen-metrics-urls", url(metrics))
	awaitReady(t, url(metrics))
	return url(clients), url(metrics)
}

// scrape returns /metrics of a rangecache on a real etcd, after a read.
func scrape(t *testing.T) string {
	t.Helper()
	clients, metrics := startPair(t)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for _, words := range [][]string{{"put", "a", "b"}, {"get", "a"}} {
		out, err := exec.CommandContext(ctx, tools+"/etcdctl", append([]string{"--endpoints", clients}, words...)...).CombinedOutput()
		must(t, string(out), err)
	}
	text, _, err := get(metrics + "/metrics")
	must(t, "metrics", err)
	return text
}

type rule struct {
	Alert       string            `json:"alert"`
	Expr        string            `json:"expr"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
}

func alerts(t *testing.T) []rule {
	t.Helper()
	var file struct {
		Groups []struct {
			Rules []rule `json:"rules"`
		} `json:"groups"`
	}
	must(t, alertsFile, yaml.Unmarshal([]byte(read(t, alertsFile)), &file))
	if len(file.Groups) != 1 || len(file.Groups[0].Rules) < 10 {
		t.Fatalf("%d groups of alerts", len(file.Groups))
	}
	return file.Groups[0].Rules
}

// panel is a panel of the dashboard, or a row, which holds its panels while it is collapsed.
type panel struct {
	ID          int    `json:"id"`
	Type        string `json:"type"`
	Title       string `json:"title"`
	Description string `json:"description"`
	Collapsed   bool   `json:"collapsed"`
	GridPos     struct{ X, Y, W, H int }
	Targets     []struct {
		Expr string `json:"expr"`
	} `json:"targets"`
	Panels []panel `json:"panels"`
}

// dashboardExprs returns the queries of all panels, and of the annotations behind them, with Grafana's variables replaced.
func dashboardExprs(t *testing.T) []string {
	t.Helper()
	var dashboard struct {
		Panels      []panel `json:"panels"`
		Annotations struct {
			List []struct {
				Expr string `json:"expr"`
			} `json:"list"`
		} `json:"annotations"`
	}
	must(t, dashboardFile, json.Unmarshal([]byte(read(t, dashboardFile)), &dashboard))
	replacer := strings.NewReplacer("$__rate_interval", "5m", "$cluster", ".*", "$namespace", ".*", "$job", ".*", "$instance", ".*")
	var exprs []string
	for _, outer := range dashboard.Panels {
		for _, panel := range append([]panel{outer}, outer.Panels...) {
			for _, target := range panel.Targets {
				exprs = append(exprs, replacer.Replace(target.Expr))
			}
		}
	}
	if len(dashboard.Annotations.List) == 0 {
		t.Fatal("no annotations")
	}
	for _, annotation := range dashboard.Annotations.List {
		exprs = append(exprs, replacer.Replace(annotation.Expr))
	}
	if len(exprs) < 30 {
		t.Fatalf("%d queries", len(exprs))
	}
	return exprs
}

var (
	series = regexp.MustCompile(`(?m)^([a-z][a-z_]+)[ {]`)
	// Every metric of the chart has labels to select by, save rangecache's own in comparisons.
	metric    = regexp.MustCompile(`rangecache_[a-z_]+|[a-z][a-z_]*_[a-z_]+\{`)
	limit     = regexp.MustCompile(`limit="([a-z_]+)"`)
	labelWord = regexp.MustCompile(`(?:outcome|reason|result)[!=~]+"([a-z_|]+)"`)
)

// TestMetricsExist checks that dashboard and alerts name only metrics that rangecache exports.
func TestMetricsExist(t *testing.T) {
	text := scrape(t)
	exported := map[string]bool{}
	for _, match := range series.FindAllStringSubmatch(text, -1) {
		exported[match[1]] = true
	}
	if len(exported) < 20 {
		t.Fatalf("rangecache exports %v", keysOf(exported))
	}
	declared := readMetrics(t, root+"/src") + readMetrics(t, root+"/crates")
	words := declared + read(t, root+"/crates/base/src/telemetry/outcome.rs") + readFolder(t, root+"/crates/mirror/src") +
		readFolder(t, root+"/crates/edge/src/server")
	exprs := dashboardExprs(t)
	for _, rule := range alerts(t) {
		exprs = append(exprs, rule.Expr)
	}
	for _, expr := range exprs {
		for _, name := range metric.FindAllString(expr, -1) {
			name = strings.TrimSuffix(name, "{")
			// Some labelled metrics are exported only after their first event; these names are searched in the source.
			isOurs := strings.HasPrefix(name, "rangecache_")
			family := strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(name, "_bucket"), "_count"), "_sum")
			if !exported[name] && !(isOurs && strings.Contains(declared, fmt.Sprintf("%q", family))) {
				t.Errorf("%s is not exported; it is in %s", name, expr)
			}
		}
		for _, match := range limit.FindAllStringSubmatch(expr, -1) {
			if !strings.Contains(text, fmt.Sprintf("rangecache_limit{limit=%q}", match[1])) {
				t.Errorf("there is no limit %s", match[1])
			}
		}
		for _, match := range labelWord.FindAllStringSubmatch(expr, -1) {
			for _, word := range strings.Split(match[1], "|") {
				if !strings.Contains(words, fmt.Sprintf("%q", word)) {
					t.Errorf("no source has the label value %q of %s", word, expr)
				}
			}
		}
	}
}

// readMetrics returns the texts of the files below a folder in which rooms declare their metrics.
func readMetrics(t *testing.T, folder string) string {
	t.Helper()
	text := ""
	must(t, folder, filepath.WalkDir(folder, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".rs") {
			if source := read(t, path); strings.Contains(source, "metric_group!") {
				text += source
			}
		}
		return err
	}))
	return text
}

// readFolder returns the texts of all Rust files in a folder.
func readFolder(t *testing.T, folder string) string {
	t.Helper()
	paths, err := filepath.Glob(folder + "/*.rs")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no sources in %s: %v", folder, err)
	}
	text := ""
	for _, path := range paths {
		text += read(t, path)
	}
	return text
}

func promtool(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command(tools+"/promtool", args...).CombinedOutput(); err != nil {
		t.Errorf("promtool %v: %v\n%s", args, err, out)
	}
}

// TestAlerts checks the alerts with promtool, those of the chart's object too: each fires exactly in the described
// conditions.
func TestAlerts(t *testing.T) {
	promtool(t, "check", "rules", "--lint=all", "--lint-fatal", alertsFile)
	promtool(t, "test", "rules", "alerts.test.yaml", "failures.test.yaml")
	tests := read(t, "alerts.test.yaml")
	for _, rule := range alerts(t) {
		if !strings.Contains(tests, "alertname: "+rule.Alert+"\n") {
			t.Errorf("%s has no test", rule.Alert)
		}
		if rule.Labels["severity"] == "" || rule.Annotations["summary"] == "" || rule.Annotations["description"] == "" {
			t.Errorf("%s has too little text", rule.Alert)
		}
	}
	spec, err := yaml.Marshal(renderMode(t, "deployment").rule.Spec)
	must(t, "the object's rules", err)
	file := filepath.Join(t.TempDir(), "rules.yaml")
	must(t, file, os.WriteFile(file, spec, 0o600))
	promtool(t, "check", "rules", "--lint=all", "--lint-fatal", file)
}

// TestAlertsCanBeLeftOut checks that only the named alerts are missing, and that the others are those of the file.
func TestAlertsCanBeLeftOut(t *testing.T) {
	all := renderMode(t, "deployment").rule.Spec.Groups[0].Rules
	some := renderMode(t, "deployment", "--set", "prometheusRule.disabledAlerts={RangecacheDown,RangecachePanics}").rule.Spec.Groups[0].Rules
	left := slices.DeleteFunc(slices.Clone(all), func(rule monitoringv1.Rule) bool {
		return rule.Alert == "RangecacheDown" || rule.Alert == "RangecachePanics"
	})
	if len(all) != len(alerts(t)) || len(left) != len(all)-2 || !reflect.DeepEqual(some, left) {
		t.Errorf("%d of %d alerts: %v", len(some), len(all), some)
	}
	for i, rule := range alerts(t) {
		if all[i].Alert != rule.Alert || all[i].Expr.String() != rule.Expr || all[i].Annotations["summary"] != rule.Annotations["summary"] {
			t.Errorf("%v is not %v", all[i], rule)
		}
	}
}

// TestMonitors checks that both kinds of monitors find the metrics in every mode, and have the operator's settings.
func TestMonitors(t *testing.T) {
	settings := func(kind string) []string {
		other := map[string]string{"serviceMonitor": "podMonitor", "podMonitor": "serviceMonitor"}[kind]
		set := strings.NewReplacer("X", kind, "Y", other).Replace("metrics.host=0.0.0.0,Y.enabled=false,X.enabled=true,X.labels.release=prometheus," +
			"X.interval=15s,X.scrapeTimeout=5s,X.relabelings[0].targetLabel=rack,X.metricRelabelings[0].action=drop")
		return []string{"--set", set}
	}
	for _, mode := range []string{"deployment", "daemonset", "static-pod"} {
		o := renderMode(t, mode, settings("serviceMonitor")...)
		endpoint := o.monitor.Spec.Endpoints[0]
		if endpoint.Port != "metrics" || endpoint.Interval != "15s" || endpoint.ScrapeTimeout != "5s" || o.podMonitor != nil ||
			len(endpoint.RelabelConfigs) != 1 || endpoint.RelabelConfigs[0].TargetLabel != "rack" || endpoint.MetricRelabelConfigs[0].Action != "drop" {
			t.Errorf("%s: %v", mode, endpoint)
		}
		o = renderMode(t, mode, settings("podMonitor")...)
		if o.monitor != nil || mode != "deployment" && o.services["rc-rangecache-metrics"] != nil || o.podMonitor.Labels["release"] != "prometheus" {
			t.Errorf("%s: %q, %v", mode, keysOf(o.all), o.podMonitor)
		}
		for key, value := range o.podMonitor.Spec.Selector.MatchLabels {
			if o.proxy.Labels[key] != value {
				t.Errorf("%s: the monitor wants %s=%s", mode, key, value)
			}
		}
		pod := o.podMonitor.Spec.PodMetricsEndpoints[0]
		if pod.Interval != "15s" || pod.ScrapeTimeout != "5s" || pod.RelabelConfigs[len(pod.RelabelConfigs)-1].TargetLabel != "rack" || pod.MetricRelabelConfigs[0].Action != "drop" {
			t.Errorf("%s: %v", mode, pod)
		}
		if mode != "static-pod" {
			ports := o.proxy.Spec.Containers[0].Ports
			if last := ports[len(ports)-1]; *pod.Port != last.Name || last.ContainerPort != 23791 || len(pod.RelabelConfigs) != 1 {
				t.Errorf("%s: %v", mode, pod)
			}
			continue
		}
		if len(pod.RelabelConfigs) != 3 {
			t.Fatalf("%v", pod.RelabelConfigs)
		}
		// As Prometheus applies them: a rule's expression matches the whole of its source.
		for ip, want := range map[string]string{"10.0.0.1": "10.0.0.1:23791", "fd00::1": "[fd00::1]:23791"} {
			address := ip
			for _, rule := range pod.RelabelConfigs[:2] {
				whole := regexp.MustCompile("^(?:" + rule.Regex + ")$")
				if rule.SourceLabels[0] == "__meta_kubernetes_pod_ip" && rule.TargetLabel == "__address__" && whole.MatchString(ip) {
					address = whole.ReplaceAllString(ip, strings.ReplaceAll(*rule.Replacement, "$1", "${1}"))
				}
			}
			if address != want || pod.Port != nil {
				t.Errorf("%s is scraped at %s", ip, address)
			}
		}
	}
}

// TestMetricsWithTLS checks that monitors scrape the port with TLS, that probes and the test of the chart ask in plaintext, which in the
// host's network is on loopback, and that the network policy opens to others the port with TLS alone.
func TestMetricsWithTLS(t *testing.T) {
	tls := "metrics.tlsPort=23793,X.enabled=true,X.tlsConfig.serverName=rangecache"
	for mode, urls := range map[string]string{
		"deployment": "http://0.0.0.0:23791,https://0.0.0.0:23793",
		"daemonset":  "http://127.0.0.1:23791,https://0.0.0.0:23793",
		"static-pod": "http://127.0.0.1:23791,https://0.0.0.0:23793",
	} {
		host := map[bool]string{true: "", false: ",metrics.host=0.0.0.0"}[mode == "deployment"]
		o := renderMode(t, mode, "--set", strings.ReplaceAll(tls, "X", "serviceMonitor")+host)
		container := o.proxy.Spec.Containers[0]
		if !slices.Contains(container.Args, "--listen-metrics-urls="+urls) || container.ReadinessProbe.HTTPGet.Port.IntValue() != 23791 {
			t.Errorf("%s: %q", mode, container.Args)
		}
		endpoint := o.monitor.Spec.Endpoints[0]
		if endpoint.Port != "metrics-tls" || *endpoint.Scheme != "https" || *endpoint.TLSConfig.ServerName != "rangecache" {
			t.Errorf("%s: %v", mode, endpoint)
		}
		ports := o.services["rc-rangecache-metrics"].Spec.Ports
		if len(ports) != 2 || ports[1].Name != endpoint.Port || ports[1].Port != 23793 {
			t.Errorf("%s: %v", mode, ports)
		}
		pod := renderMode(t, mode, "--set", "serviceMonitor.enabled=false", "--set", strings.ReplaceAll(tls, "X", "podMonitor")+host).podMonitor.Spec.PodMetricsEndpoints[0]
		if *pod.Scheme != "https" || *pod.TLSConfig.ServerName != "rangecache" {
			t.Errorf("%s: %v", mode, pod)
		}
		if mode == "static-pod" {
			if replacement := *pod.RelabelConfigs[0].Replacement; replacement != "$1:23793" {
				t.Errorf("%s: %s", mode, replacement)
			}
		} else if *pod.Port != "metrics-tls" || container.Ports[len(container.Ports)-1].Name != "metrics-tls" {
			t.Errorf("%s: %v, %v", mode, pod, container.Ports)
		}
		if args := o.test.Spec.Containers[0].Args; !strings.HasSuffix(args[len(args)-1], ":23791") {
			t.Errorf("%s: the test asks %q", mode, args)
		}
	}
	for _, peers := range []string{"", ",networkPolicy.metrics[0].podSelector.matchLabels.app=prometheus"} {
		ingress := renderMode(t, "deployment", "--set", "metrics.tlsPort=23793"+peers).policy.Spec.Ingress
		scraped, tested := ingress[len(ingress)-2], ingress[len(ingress)-1]
		if scraped.Ports[0].Port.String() != "metrics-tls" || (len(scraped.From) == 0) != (peers == "") {
			t.Errorf("%v", scraped)
		}
		if tested.Ports[0].Port.String() != "metrics" || len(tested.From) != 1 || tested.From[0].PodSelector.MatchLabels["app.kubernetes.io/component"] != "test" {
			t.Errorf("%v", tested)
		}
	}
	if plain := renderMode(t, "deployment").monitor.Spec.Endpoints[0]; plain.Scheme != nil || plain.TLSConfig != nil {
		t.Errorf("%v", plain)
	}
	if meshed := renderMode(t, "deployment", "--set", "serviceMonitor.scheme=https").monitor.Spec.Endpoints[0]; meshed.Port != "metrics" || *meshed.Scheme != "https" {
		t.Errorf("%v", meshed)
	}
}

// TestHelmTestAsksWhetherMemoryAnswers runs the test's program with its arguments on a rangecache, and where none is, and checks that
// its pod reaches the metrics.
func TestHelmTestAsksWhetherMemoryAnswers(t *testing.T) {
	_, metrics := startPair(t)
	_, port, _ := strings.Cut(strings.TrimPrefix(metrics, "http://"), ":")
	for _, mode := range []string{"daemonset", "static-pod"} {
		for wanted, port := range map[int]string{0: port, 2: fmt.Sprint(shared.FreePort(t))} {
			pod := renderMode(t, mode, "--set", "metrics.port="+port).test
			command := exec.Command(rangecacheBinary(), pod.Spec.Containers[0].Args...)
			out, _ := command.CombinedOutput()
			if code := command.ProcessState.ExitCode(); code != wanted || !pod.Spec.HostNetwork {
				t.Errorf("%s: exit code %d, not %d: %s", mode, code, wanted, out)
			}
			placed := renderMode(t, mode).daemonSet.Spec.Template.Spec
			if !reflect.DeepEqual(pod.Spec.Tolerations, placed.Tolerations) || !reflect.DeepEqual(pod.Spec.Affinity, placed.Affinity) {
				t.Errorf("%s: the test runs on other nodes: %v, %v", mode, pod.Spec.Tolerations, pod.Spec.Affinity)
			}
		}
	}
	o := renderMode(t, "deployment-plain", "--set", "networkPolicy.metrics[0].podSelector.matchLabels.app=prometheus")
	const url = "http://rc-rangecache-metrics.some-namespace.svc:23791"
	if args := o.test.Spec.Containers[0].Args; !slices.Equal(args, []string{"health", "--ready", "--metrics-url=" + url}) {
		t.Errorf("%q", args)
	}
	args := o.proxy.Spec.Containers[0].Args
	if !slices.ContainsFunc(args, func(arg string) bool {
		return strings.HasPrefix(arg, "--host-whitelist=") && strings.Contains(arg, ",rc-rangecache-metrics.some-namespace.svc")
	}) {
		t.Errorf("rangecache refuses the name: %q", args)
	}
	from := o.policy.Spec.Ingress[len(o.policy.Spec.Ingress)-1].From
	if len(from) != 1 || from[0].PodSelector.MatchLabels["app.kubernetes.io/component"] != o.test.Labels["app.kubernetes.io/component"] {
		t.Errorf("the policy refuses the test: %v", from)
	}
}

// TestFailuresHaveAlerts checks that each alert fires for one of several rangecaches that has its failure, and that
// docs/operations.md names alerts only.
func TestFailuresHaveAlerts(t *testing.T) {
	_, table, _ := strings.Cut(read(t, root+"/docs/operations.md"), "## Faults and their symptoms")
	table, _, _ = strings.Cut(table, "\n### ")
	cases := read(t, "failures.test.yaml")
	known := map[string]bool{}
	for _, rule := range alerts(t) {
		known[rule.Alert] = true
		// With one of several gone, RangecacheAbsent must not fire.
		if rule.Alert != "RangecacheAbsent" && !strings.Contains(cases, fmt.Sprintf("alertname=%q, alertstate", rule.Alert)) {
			t.Errorf("failures.test.yaml has no case of %s", rule.Alert)
		}
	}
	for _, name := range regexp.MustCompile(`\bRangecache[A-Z][A-Za-z]+`).FindAllString(table, -1) {
		if !known[name] {
			t.Errorf("docs/operations.md names %s, which is no alert", name)
		}
	}
}

// TestHeadlinesCountBothKindsOfReads checks that figures of all reads contain those of RangeStream, by which newer
// kube-apiservers list.
func TestHeadlinesCountBothKindsOfReads(t *testing.T) {
	var exprs []string
	for _, rule := range alerts(t) {
		exprs = append(exprs, rule.Expr)
	}
	// The first row; the panels below show Range and RangeStream next to each other.
	headlines := 0
	for _, expr := range dashboardExprs(t)[:4] {
		if strings.Contains(expr, "rangecache_range_total") {
			headlines++
		}
		exprs = append(exprs, expr)
	}
	for _, expr := range exprs {
		if strings.Contains(expr, "rangecache_range_total") != strings.Contains(expr, "rangecache_range_stream_total") {
			t.Errorf("one kind of reads alone: %s", expr)
		}
	}
	if headlines != 3 {
		t.Errorf("%d headlines about reads", headlines)
	}
}

// TestRunbooks checks that each alert links to its heading, in the installed version or under the operator's base URL.
func TestRunbooks(t *testing.T) {
	page := read(t, root+"/docs/runbooks.md")
	rules := renderMode(t, "deployment").rule.Spec.Groups[0].Rules
	installed := renderMode(t, "static-pod").rule.Spec.Groups[0].Rules
	blob := "https://github.com/rangecache/rangecache/blob/v" + cargoVersion(t) + "/"
	for i, rule := range alerts(t) {
		anchor := "#" + strings.ToLower(rule.Alert)
		if url := rule.Annotations["runbook_url"]; url != "https://github.com/rangecache/rangecache/blob/main/docs/runbooks.md"+anchor {
			t.Errorf("%s links to %s", rule.Alert, url)
		}
		if url := rules[i].Annotations["runbook_url"]; url != "https://runbooks.example/rangecache"+anchor {
			t.Errorf("%s links to %s", rule.Alert, url)
		}
		if url := installed[i].Annotations["runbook_url"]; url != blob+"docs/runbooks.md"+anchor {
			t.Errorf("%s links to %s, which is not of the installed version", rule.Alert, url)
		}
		if !regexp.MustCompile(`(?m)^#+ ` + rule.Alert + `$`).MatchString(page) {
			t.Errorf("docs/runbooks.md has no heading %s", rule.Alert)
		}
	}
}

// TestDashboard checks that Prometheus parses every query of the dashboard, and that the ConfigMap holds the same
// file.
func TestDashboard(t *testing.T) {
	var rules strings.Builder
	rules.WriteString("groups:\n- name: dashboard\n  rules:\n")
	for i, expr := range dashboardExprs(t) {
		fmt.Fprintf(&rules, "  - record: query:%d\n    expr: %q\n", i, expr)
	}
	file := filepath.Join(t.TempDir(), "dashboard.yaml")
	must(t, file, os.WriteFile(file, []byte(rules.String()), 0o600))
	promtool(t, "check", "rules", "--lint=none", file)
	installed := strings.ReplaceAll(read(t, dashboardFile), "/blob/main/", "/blob/v"+cargoVersion(t)+"/")
	if data := renderMode(t, "deployment").configMap.Data["rangecache.json"]; strings.TrimSpace(data) != strings.TrimSpace(installed) {
		t.Error("the ConfigMap's dashboard is not the file's, with links to the installed version")
	}
	var dashboard struct {
		Panels []panel `json:"panels"`
		Links  []struct {
			URL string `json:"url"`
		} `json:"links"`
	}
	must(t, dashboardFile, json.Unmarshal([]byte(read(t, dashboardFile)), &dashboard))
	ids := map[int]bool{}
	// What is laid out on one canvas: the rows with the open panels, and the panels of each collapsed row.
	canvases := [][]panel{dashboard.Panels}
	open := 0
	for _, panel := range dashboard.Panels {
		if panel.Type != "row" {
			open++
		} else if panel.Collapsed {
			canvases = append(canvases, panel.Panels)
		}
	}
	if open != 8 {
		t.Errorf("%d panels are open, which is more or less than a screen", open)
	}
	for _, canvas := range canvases {
		for i, panel := range canvas {
			if ids[panel.ID] || panel.Title == "" || (panel.Type != "row" && panel.Description == "") {
				t.Errorf("panel %d %q: its id is not unique, or it has no description", panel.ID, panel.Title)
			}
			ids[panel.ID] = true
			for _, other := range canvas[:i] {
				a, b := panel.GridPos, other.GridPos
				if a.X < b.X+b.W && b.X < a.X+a.W && a.Y < b.Y+b.H && b.Y < a.Y+a.H {
					t.Errorf("%q overlaps %q", panel.Title, other.Title)
				}
			}
		}
	}
	for _, link := range dashboard.Links {
		if _, page, found := strings.Cut(link.URL, "/blob/main/"); !found || read(t, root+"/"+page) == "" {
			t.Errorf("%s is no page", link.URL)
		}
	}
	if len(dashboard.Links) == 0 {
		t.Error("the dashboard links to no runbooks")
	}
}
