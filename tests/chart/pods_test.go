package chart

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
)

func keysOf[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for key := range m {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}

// violations returns violations of the restricted pod security standard, by the apiserver's own admission code.
func violations(t *testing.T, pod *corev1.PodTemplateSpec) []string {
	t.Helper()
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	level := api.LevelVersion{Level: api.LevelRestricted, Version: api.LatestVersion()}
	for _, result := range evaluator.EvaluatePod(level, &pod.ObjectMeta, &pod.Spec) {
		if !result.Allowed {
			found = append(found, result.ForbiddenReason)
		}
	}
	slices.Sort(found)
	return found
}

// TestPodSecurity checks that a Deployment is restricted, and that host modes violate only the rules for access to
// the host.
func TestPodSecurity(t *testing.T) {
	for mode, expected := range map[string][]string{
		"deployment":          nil,
		"deployment-plain":    nil,
		"daemonset":           {"host namespaces", "probe or lifecycle host"},
		"static-pod-manifest": {"host namespaces", "probe or lifecycle host", "restricted volume types"},
		"static-pod":          {"host namespaces", "probe or lifecycle host", "restricted volume types", "runAsNonRoot != true", "runAsUser=0"},
	} {
		slices.Sort(expected)
		if got := violations(t, renderMode(t, mode).proxy); !slices.Equal(got, expected) {
			t.Errorf("%s violates %q, not %q", mode, got, expected)
		}
	}
	for mode, expected := range map[string][]string{"deployment": nil, "daemonset": {"host namespaces"}, "static-pod": {"host namespaces"}} {
		test := renderMode(t, mode).test
		if got := violations(t, &corev1.PodTemplateSpec{ObjectMeta: test.ObjectMeta, Spec: test.Spec}); !slices.Equal(got, expected) {
			t.Errorf("%s: the test violates %q, not %q", mode, got, expected)
		}
	}
	installer := renderMode(t, "static-pod").daemonSet.Spec.Template
	expected := []string{"host namespaces", "probe or lifecycle host", "restricted volume types", "runAsNonRoot != true", "runAsUser=0"}
	if got := violations(t, &installer); !slices.Equal(got, expected) {
		t.Errorf("the installer violates %q, not %q", got, expected)
	}
}

// TestIdsCanBeLeftOut checks that a cluster can assign user, group and the volumes' group, and that the pod is restricted as
// before.
func TestIdsCanBeLeftOut(t *testing.T) {
	for _, mode := range []string{"deployment", "daemonset"} {
		given := renderMode(t, mode).proxy
		if security := given.Spec.SecurityContext; *security.RunAsUser != 65532 || *security.RunAsGroup != 65532 || *security.FSGroup != 65532 {
			t.Errorf("%s: %v", mode, security)
		}
		pod := renderMode(t, mode, "--set", "security.setIds=false").proxy
		security := pod.Spec.SecurityContext
		if security.RunAsUser != nil || security.RunAsGroup != nil || security.FSGroup != nil || pod.Spec.Containers[0].SecurityContext.RunAsUser != nil {
			t.Errorf("%s: %v", mode, security)
		}
		if got, expected := violations(t, pod), violations(t, given); !*security.RunAsNonRoot || !slices.Equal(got, expected) {
			t.Errorf("%s violates %q, not %q", mode, got, expected)
		}
	}
}

// TestSecurityContexts checks that each field of an operator replaces the chart's, and that the other fields stay.
func TestSecurityContexts(t *testing.T) {
	for _, mode := range []string{"deployment", "daemonset", "static-pod", "static-pod-manifest"} {
		spec := renderMode(t, mode, "--set", "podSecurityContext.supplementalGroups={7},podSecurityContext.seccompProfile.type=Unconfined",
			"--set", "securityContext.readOnlyRootFilesystem=false,securityContext.appArmorProfile.type=RuntimeDefault").proxy.Spec
		pod, container := spec.SecurityContext, spec.Containers[0].SecurityContext
		if !slices.Equal(pod.SupplementalGroups, []int64{7}) || pod.SeccompProfile.Type != corev1.SeccompProfileTypeUnconfined || pod.RunAsUser == nil {
			t.Errorf("%s: %v", mode, pod)
		}
		if *container.ReadOnlyRootFilesystem || container.AppArmorProfile == nil || *container.AllowPrivilegeEscalation || container.Capabilities.Drop[0] != "ALL" {
			t.Errorf("%s: %v", mode, container)
		}
	}
}

func TestContainersAreReadOnlyAndWithoutToken(t *testing.T) {
	for mode := range modes(t) {
		o := renderMode(t, mode)
		pods := slices.Clone(o.pods)
		if o.proxy != nil {
			pods = append(pods, *o.proxy)
		}
		if o.test != nil {
			pods = append(pods, corev1.PodTemplateSpec{Spec: o.test.Spec})
		}
		for _, pod := range pods {
			if pod.Spec.AutomountServiceAccountToken == nil || *pod.Spec.AutomountServiceAccountToken {
				t.Errorf("%s mounts a token", mode)
			}
			for _, container := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
				security := container.SecurityContext
				if !*security.ReadOnlyRootFilesystem || *security.AllowPrivilegeEscalation || security.Capabilities.Drop[0] != "ALL" {
					t.Errorf("%s: %v", mode, security)
				}
				if container.Resources.Limits.Memory().IsZero() || container.Resources.Requests.Memory().IsZero() {
					t.Errorf("%s: %s has no bound on memory", mode, container.Name)
				}
			}
		}
	}
}

// TestPullSecretsAreNamesOrObjects: values of other charts are objects.
func TestPullSecretsAreNamesOrObjects(t *testing.T) {
	for _, flag := range []string{"imagePullSecrets={a}", "imagePullSecrets[0].name=a"} {
		deployment, installer := renderMode(t, "deployment", "--set", flag), renderMode(t, "static-pod", "--set", flag)
		for _, spec := range []corev1.PodSpec{deployment.proxy.Spec, deployment.test.Spec, installer.daemonSet.Spec.Template.Spec} {
			if secrets := spec.ImagePullSecrets; len(secrets) != 1 || secrets[0].Name != "a" {
				t.Errorf("%s: %v", flag, secrets)
			}
		}
	}
}

// TestFilesOfFlagsAreMounted checks that each file named by a flag is below a mount of one of the pod's volumes.
func TestFilesOfFlagsAreMounted(t *testing.T) {
	for mode := range modes(t) {
		pod := renderMode(t, mode).proxy
		if pod == nil {
			continue
		}
		for _, volume := range pod.Spec.Volumes {
			if volume.Secret != nil && *volume.Secret.DefaultMode != 0o440 {
				t.Errorf("%s: the files of %s have mode %o", mode, volume.Name, *volume.Secret.DefaultMode)
			}
		}
		var mounted []string
		for _, mount := range pod.Spec.Containers[0].VolumeMounts {
			if !mount.ReadOnly || !slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == mount.Name }) {
				t.Errorf("%s: mount %s is writable or of no volume", mode, mount.Name)
			}
			mounted = append(mounted, mount.MountPath)
		}
		for _, arg := range pod.Spec.Containers[0].Args {
			_, value, _ := strings.Cut(arg, "=")
			// Key prefixes look like file names.
			if strings.HasPrefix(value, "/etc/") && !slices.ContainsFunc(mounted, func(m string) bool { return value == m || strings.HasPrefix(value, m+"/") }) {
				t.Errorf("%s: %s is not mounted", mode, arg)
			}
		}
	}
}

var kubeadm = []string{
	"--endpoints=https://127.0.0.1:2379",
	"--cacert=/etc/rangecache/etcd/ca.crt",
	"--cert=/etc/rangecache/etcd/healthcheck-client.crt",
	"--key=/etc/rangecache/etcd/healthcheck-client.key",
	"--listen-client-urls=https://127.0.0.1:23790",
	"--cert-file=/etc/rangecache/listener/server.crt",
	"--key-file=/etc/rangecache/listener/server.key",
	"--trusted-ca-file=/etc/rangecache/listener/ca.crt",
	"--client-cert-auth",
	"--listen-metrics-urls=http://127.0.0.1:23791",
}

// TestPlaintextNeedsAFlag checks that an address without TLS is always accompanied by the flag that allows it.
func TestPlaintextNeedsAFlag(t *testing.T) {
	open := renderMode(t, "deployment-plain").proxy.Spec.Containers[0].Args
	if !slices.Contains(open, "--listen-client-urls=http://0.0.0.0:23790") || !slices.Contains(open, plaintextFlag) {
		t.Errorf("%q", open)
	}
	for _, args := range [][]string{
		renderMode(t, "deployment").proxy.Spec.Containers[0].Args,
		renderMode(t, "deployment-plain", "--set", "mode=daemonset").proxy.Spec.Containers[0].Args,
	} {
		if slices.Contains(args, plaintextFlag) {
			t.Errorf("%q", args)
		}
	}
}

const plaintextFlag = "--allow-plaintext-listener"

func TestMemoryFollowsTheCache(t *testing.T) {
	for _, c := range []struct{ cache, buffers, flag, request, limit string }{
		{"1Gi", "768Mi", "1073741824", "1Gi", "2341Mi"},           // the rest decides
		{"6Gi", "768Mi", "6442450944", "6Gi", "8Gi"},              // four thirds decide
		{"1500000000", "128Mi", "1500000000", "1431Mi", "2074Mi"}, // rounded up
		{"2Ti", "1536Mi", "2199023255552", "2Ti", "2796203Mi"},
	} {
		container := renderMode(t, "deployment-plain", "--set", "cache.maxBytes="+c.cache, "--set", "buffers.maxBytes="+c.buffers).proxy.Spec.Containers[0]
		if !slices.Contains(container.Args, "--cache-max-bytes="+c.flag) {
			t.Errorf("%s: %q", c.cache, container.Args)
		}
		if request, limit := container.Resources.Requests.Memory().String(), container.Resources.Limits.Memory().String(); request != c.request || limit != c.limit {
			t.Errorf("%s: request %s, limit %s", c.cache, request, limit)
		}
	}
	watches := renderMode(t, "deployment-plain", "--set", "cache.maxBytes=1Gi", "--set", "buffers.maxBytes=768Mi", "--set", "watches.maxBytes=128Mi").proxy.Spec.Containers[0].Resources
	if limit := watches.Limits.Memory().String(); limit != "2405Mi" {
		t.Errorf("watches beyond 64Mi: limit %s", limit)
	}
	own := renderMode(t, "deployment", "--set", "resources.limits.memory=9Gi").proxy.Spec.Containers[0].Resources
	if own.Limits.Memory().String() != "9Gi" || own.Requests.Memory().String() != "4Gi" || own.Requests.Cpu().String() != "1" {
		t.Errorf("resources given are laid over those derived: %v", own)
	}
}

// TestLimitsAndNames checks the flags of the bounds on clients, and that HTTP/1 clients may use the Services' names.
func TestLimitsAndNames(t *testing.T) {
	given := renderMode(t, "deployment").proxy.Spec.Containers[0].Args
	services := "rc-rangecache,rc-rangecache.some-namespace,rc-rangecache.some-namespace.svc," +
		"rc-rangecache-metrics,rc-rangecache-metrics.some-namespace,rc-rangecache-metrics.some-namespace.svc"
	for _, want := range []string{
		"--host-whitelist=" + services + ",etcd.example",
		"--cors=https://console.example",
		"--advertise-client-urls=https://etcd.example:23790,https://10.0.0.9:23790",
		"--max-connections=2000",
		"--max-connections-per-address=500",
		"--max-concurrent-streams=2000",
		"--max-calls=100000",
		"--request-timeout=1m",
	} {
		if !slices.Contains(given, want) {
			t.Errorf("%s is not in %q", want, given)
		}
	}
	// Nothing is set that the operator has not set.
	for _, arg := range renderMode(t, "static-pod").proxy.Spec.Containers[0].Args {
		for _, prefix := range []string{"--max-", "--request-timeout", "--cors", "--advertise"} {
			if strings.HasPrefix(arg, prefix) {
				t.Errorf("%s in a static pod", arg)
			}
		}
	}
	for _, arg := range renderMode(t, "static-pod", "--set", "serviceMonitor.enabled=false").proxy.Spec.Containers[0].Args {
		if strings.HasPrefix(arg, "--host-whitelist") {
			t.Errorf("%s without a Service", arg)
		}
	}
}

// TestValuesBecomeFlags checks the flags of values that have no default in the chart, and that no other mode has them.
func TestValuesBecomeFlags(t *testing.T) {
	flags := map[string]string{
		"listener.readOnlyPort=23792":            "--read-only-listen-client-urls=https://0.0.0.0:23792",
		"metrics.clientsTop=0":                   "--client-metrics-top=0",
		"metrics.prefixesTop=50":                 "--prefix-metrics-top=50",
		"cache.whenBehind=fail":                  "--when-behind=fail",
		"cache.serveStale=5m":                    "--serve-stale=5m",
		"cache.warmFrom={http://a:1,http://b:1}": "--warm-from=http://a:1,http://b:1",
		"cache.image.hostPath=/var/lib/images":   "--image-dir=/var/lib/rangecache",
		"watches.cache=off":                      "--watch-cache=off",
		"watches.maxBytes=128Mi":                 "--watch-max-bytes=134217728",
		"watches.progressNotifyInterval=1m":      "--watch-progress-notify-interval=1m",
	}
	known := knownFlags(t)
	without := renderMode(t, "deployment").proxy.Spec.Containers[0].Args
	for value, want := range flags {
		option := "--set"
		if strings.Contains(value, "0.") {
			option = "--set-json" // --set makes a string of it
		}
		args := renderMode(t, "deployment", option, value).proxy.Spec.Containers[0].Args
		name, _, _ := strings.Cut(want, "=")
		if !slices.Contains(args, want) || !slices.Contains(known, name) {
			t.Errorf("%s: %s is not in %q, or rangecache does not have it", value, want, args)
		}
		if slices.ContainsFunc(without, func(arg string) bool { return strings.HasPrefix(arg, name+"=") }) {
			t.Errorf("%s is given without %s", name, value)
		}
	}
	byName := renderMode(t, "daemonset", "--set", "etcd.callerIs=certificate").proxy.Spec.Containers[0].Args
	if !slices.Contains(byName, "--caller-is=certificate") {
		t.Errorf("%q", byName)
	}
}

// TestReadOnlyPort checks that the Service and the network policy lead to the port on which clients only read.
func TestReadOnlyPort(t *testing.T) {
	o := renderMode(t, "deployment", "--set", "listener.readOnlyPort=23792",
		"--set", "networkPolicy.readOnlyClients[0].podSelector.matchLabels.app=reader")
	ports := o.services["rc-rangecache"].Spec.Ports
	if len(ports) != 2 || ports[1].Port != 23792 || ports[1].TargetPort.String() != "client-read" {
		t.Errorf("%v", ports)
	}
	if ports := o.proxy.Spec.Containers[0].Ports; len(ports) != 3 || ports[1].Name != "client-read" || ports[1].ContainerPort != 23792 {
		t.Errorf("%v", ports)
	}
	readers := o.policy.Spec.Ingress[1]
	if len(readers.Ports) != 1 || readers.Ports[0].Port.String() != "client-read" || readers.From[0].PodSelector.MatchLabels["app"] != "reader" {
		t.Errorf("%v", readers)
	}
	if ingress := renderMode(t, "deployment").policy.Spec.Ingress; len(ingress) != 2 {
		t.Errorf("without the port: %v", ingress)
	}
}

// TestProbesAndStops checks that a pod leaves the Service before it stops and has time to complete its calls, and
// that a cold pod is not restarted.
func TestProbesAndStops(t *testing.T) {
	container := renderMode(t, "deployment").proxy.Spec.Containers[0]
	if p := container.StartupProbe.HTTPGet; p.Path != "/readyz" || p.Host != "" || p.Port.IntValue() != 23791 {
		t.Errorf("start: %v", p)
	}
	if container.ReadinessProbe.HTTPGet.Path != "/servez" || container.LivenessProbe.HTTPGet.Path != "/livez" {
		t.Error("a Deployment's pod that is cold for a while must stay in the Service")
	}
	if grace := *renderMode(t, "deployment").proxy.Spec.TerminationGracePeriodSeconds; grace != 10+5+5 || container.Lifecycle.PreStop.Sleep.Seconds != 5 {
		t.Errorf("grace %d", grace)
	}
	if cold := renderMode(t, "deployment-plain").proxy.Spec.Containers[0].StartupProbe.HTTPGet.Path; cold != "/livez" {
		t.Errorf("waitForWarmth=false starts by %s", cold)
	}
	for _, mode := range []string{"static-pod", "static-pod-manifest", "daemonset"} {
		container := renderMode(t, mode).proxy.Spec.Containers[0]
		for _, probe := range []*corev1.Probe{container.StartupProbe, container.ReadinessProbe, container.LivenessProbe} {
			if probe.HTTPGet.Host != "127.0.0.1" {
				t.Errorf("%s probes %q", mode, probe.HTTPGet.Host)
			}
		}
		if container.ReadinessProbe.HTTPGet.Path != "/readyz" || container.StartupProbe.HTTPGet.Path != "/livez" {
			t.Errorf("%s: %v", mode, container.ReadinessProbe)
		}
	}
	if renderMode(t, "daemonset").proxy.Spec.Containers[0].Lifecycle != nil {
		t.Error("the pod of a DaemonSet must end at once: the next one waits for it")
	}
	// The installer's readiness is that of its node's rangecache, so that a rollout waits for it.
	installer := renderMode(t, "static-pod").daemonSet
	probe := installer.Spec.Template.Spec.Containers[0].ReadinessProbe.HTTPGet
	if probe.Path != "/readyz" || probe.Host != "127.0.0.1" || installer.Spec.UpdateStrategy.RollingUpdate.MaxUnavailable.IntValue() != 1 {
		t.Errorf("%v", installer.Spec)
	}
}

// TestProbeSettings checks that an operator's numbers replace the chart's, and that what the probes ask stays.
func TestProbeSettings(t *testing.T) {
	for _, mode := range []string{"deployment", "daemonset", "static-pod", "static-pod-manifest"} {
		plain := renderMode(t, mode).proxy.Spec.Containers[0]
		container := renderMode(t, mode, "--set", "startupProbe.failureThreshold=900,readinessProbe.timeoutSeconds=9,livenessProbe.initialDelaySeconds=7").proxy.Spec.Containers[0]
		start, ready, live := container.StartupProbe, container.ReadinessProbe, container.LivenessProbe
		if start.FailureThreshold != 900 || start.PeriodSeconds != 2 || ready.TimeoutSeconds != 9 || ready.PeriodSeconds != 5 || live.InitialDelaySeconds != 7 || live.FailureThreshold != 6 {
			t.Errorf("%s: %v, %v, %v", mode, start, ready, live)
		}
		if !reflect.DeepEqual(start.HTTPGet, plain.StartupProbe.HTTPGet) || !reflect.DeepEqual(ready.HTTPGet, plain.ReadinessProbe.HTTPGet) || plain.StartupProbe.FailureThreshold != 300 {
			t.Errorf("%s: %v, %v", mode, start, ready)
		}
	}
}

// TestSpread checks that constraints count the Deployment's pods, and that the operator's replace the chart's.
func TestSpread(t *testing.T) {
	zone := "topologySpreadConstraints[0].maxSkew=1,topologySpreadConstraints[0].whenUnsatisfiable=DoNotSchedule,topologySpreadConstraints[0].topologyKey="
	for _, c := range []struct {
		args []string
		keys []string
	}{
		{nil, []string{"topology.kubernetes.io/zone", "kubernetes.io/hostname"}},
		{[]string{"--set", zone + "example.com/rack"}, []string{"example.com/rack"}},
	} {
		o := renderMode(t, "deployment", c.args...)
		var keys []string
		for _, spread := range o.proxy.Spec.TopologySpreadConstraints {
			keys = append(keys, spread.TopologyKey)
			if !reflect.DeepEqual(spread.LabelSelector, o.deployment.Spec.Selector) {
				t.Errorf("%v", spread)
			}
		}
		if !slices.Equal(keys, c.keys) {
			t.Errorf("%q: %q", c.args, keys)
		}
	}
	own := renderMode(t, "deployment", "--set", zone+"x,topologySpreadConstraints[0].labelSelector.matchLabels.a=b").proxy.Spec.TopologySpreadConstraints
	if selector := own[0].LabelSelector.MatchLabels; len(selector) != 1 || selector["a"] != "b" {
		t.Errorf("%v", own)
	}
	if none := renderMode(t, "deployment", "--set-json", "topologySpreadConstraints=[]").proxy.Spec.TopologySpreadConstraints; len(none) != 0 {
		t.Errorf("%v", none)
	}
}

// TestTracing checks that tracing.* become OpenTelemetry's variables in every mode, next to those of extraEnv.
func TestTracing(t *testing.T) {
	for _, mode := range []string{"deployment", "daemonset", "static-pod", "static-pod-manifest"} {
		spec := renderMode(t, mode, "--set", "tracing.endpoint=http://collector:4317", "--set", "tracing.protocol=grpc", "--set-json", "tracing.sampleRatio=0.5").proxy.Spec
		for name, value := range map[string]string{
			"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317",
			"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
			"OTEL_TRACES_SAMPLER":         "parentbased_traceidratio",
			"OTEL_TRACES_SAMPLER_ARG":     "0.5",
		} {
			if got := environment(spec.Containers[0])[name]; got != value {
				t.Errorf("%s: %s=%q", mode, name, got)
			}
		}
		fields := map[string]string{}
		for _, variable := range spec.Containers[0].Env {
			if variable.ValueFrom != nil && variable.ValueFrom.FieldRef != nil {
				fields[variable.Name] = variable.ValueFrom.FieldRef.FieldPath
			}
		}
		for name, path := range map[string]string{
			"K8S_POD_NAME":       "metadata.name",
			"K8S_NAMESPACE_NAME": "metadata.namespace",
			"K8S_NODE_NAME":      "spec.nodeName",
		} {
			if fields[name] != path {
				t.Errorf("%s: %s is %q", mode, name, fields[name])
			}
		}
	}
	for _, variable := range renderMode(t, "deployment").proxy.Spec.Containers[0].Env {
		if variable.Name == "OTEL_EXPORTER_OTLP_HEADERS" && variable.ValueFrom.SecretKeyRef.Name == "collector" {
			return
		}
	}
	t.Error("extraEnv does not refer to a Secret")
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func must(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(fmt.Errorf("%s: %w", what, err))
	}
}

var (
	fenced = regexp.MustCompile("(?s)```yaml\n(.*?)```")
	// In help, at the beginning of its entry.
	flag = regexp.MustCompile(`(?m)^ {1,8}(?:-[a-zA-Z], )?(--[a-z][a-z0-9-]+)|\[alias: (--[a-z0-9-]+)\]`)
)

const flagsFile = chart + "/files/flags.txt"

// knownFlags returns the flags of the chart's rangecache.
func knownFlags(t *testing.T) []string {
	t.Helper()
	return strings.Fields(read(t, flagsFile))
}

// TestFlagsAreThoseOfTheProgram checks the list by which extraArgs are judged. With UPDATE_REFERENCE=1 it writes the list.
func TestFlagsAreThoseOfTheProgram(t *testing.T) {
	help, err := exec.Command(rangecacheBinary(), "--help").Output()
	must(t, rangecacheBinary(), err)
	var found []string
	for _, match := range flag.FindAllStringSubmatch(string(help), -1) {
		// These two end the program.
		if name := match[1] + match[2]; name != "--help" && name != "--version" {
			found = append(found, name)
		}
	}
	slices.Sort(found)
	found = slices.Compact(found)
	if os.Getenv("UPDATE_REFERENCE") != "" {
		must(t, flagsFile, os.WriteFile(flagsFile, []byte(strings.Join(found, "\n")+"\n"), 0o644))
	} else if len(found) < 50 || !slices.Equal(found, knownFlags(t)) {
		t.Errorf("%s is not what rangecache has: `make chart-reference` writes it again", flagsFile)
	}
}

// TestExtraArgs checks that each flag of the program passes, that one is not taken for another, and that those of another version
// are not judged.
func TestExtraArgs(t *testing.T) {
	for _, args := range []string{"extraArgs={--probe-interval=2s,--reuse-port}", "image.tag=2.0.0,extraArgs={--of-another-version=x}"} {
		renderMode(t, "deployment", "--set", args)
	}
	if _, err := template(helms[0], "--values", modes(t)["deployment"], "--set", "image.tag="+cargoVersion(t)+",extraArgs={--probe}"); err == nil {
		t.Error("a part of a flag is taken for it")
	}
}

// TestExtraContainers checks that further containers run in the pod, behind rangecache, and names in it are resolved as the operator says.
func TestExtraContainers(t *testing.T) {
	settings := "dnsConfig.nameservers={10.0.0.10},hostAliases[0].ip=10.0.0.1,hostAliases[0].hostnames={etcd.example}"
	for _, mode := range []string{"deployment", "daemonset"} {
		spec := renderMode(t, mode, "--set", settings+",extraContainers[0].name=logs,extraContainers[0].image=logs:1").proxy.Spec
		if containers := spec.Containers; len(containers) != 2 || containers[0].Name != "rangecache" || containers[1].Image != "logs:1" {
			t.Errorf("%s: %v", mode, containers)
		}
	}
	// The installer's check connects to etcd as the static pod does.
	o := renderMode(t, "static-pod", "--set", settings)
	for _, spec := range []corev1.PodSpec{o.proxy.Spec, o.daemonSet.Spec.Template.Spec, renderMode(t, "deployment", "--set", settings).proxy.Spec} {
		if spec.DNSConfig == nil || spec.DNSConfig.Nameservers[0] != "10.0.0.10" || len(spec.HostAliases) != 1 || spec.HostAliases[0].Hostnames[0] != "etcd.example" {
			t.Errorf("%v, %v", spec.DNSConfig, spec.HostAliases)
		}
	}
}

// sidecar returns the container in the chart's README, with its volumes.
func sidecar(t *testing.T) *corev1.PodSpec {
	t.Helper()
	_, section, found := strings.Cut(read(t, chart+"/README.md"), "## Sidecar ")
	section, _, _ = strings.Cut(section, "\n## ")
	blocks := fenced.FindAllStringSubmatch(section, -1)
	if !found || len(blocks) != 1 {
		t.Fatalf("%d blocks of YAML in the README's section on the sidecar", len(blocks))
	}
	return strictly[corev1.PodSpec](t, blocks[0][1])
}

// TestSidecar checks that the sidecar is a native one, restricted, and of the size that the chart would set.
func TestSidecar(t *testing.T) {
	spec := sidecar(t)
	container := spec.InitContainers[0]
	if *container.RestartPolicy != corev1.ContainerRestartPolicyAlways {
		t.Error("not a native sidecar")
	}
	template := corev1.PodTemplateSpec{Spec: *spec}
	if got := violations(t, &template); len(got) != 0 {
		t.Errorf("violates %q", got)
	}
	if spec.Volumes[0].Name != container.VolumeMounts[0].Name {
		t.Error("the mount is of no volume")
	}
	derived := renderMode(t, "deployment-plain", "--set", "cache.maxBytes=1Gi").proxy.Spec.Containers[0]
	if derived.Image != container.Image || derived.Resources.Limits.Memory().Cmp(*container.Resources.Limits.Memory()) != 0 {
		t.Errorf("%s, %v", container.Image, container.Resources)
	}
}

// TestFlagsFile checks that rangecache takes its settings from the ConfigMap, and that a change of the file restarts no pod.
func TestFlagsFile(t *testing.T) {
	settings := func(calls int) string {
		file := filepath.Join(t.TempDir(), "flags.env")
		must(t, file, os.WriteFile(file, fmt.Appendf(nil, "  # Of this cluster\nRANGECACHE_MAX_CALLS=%d\nRANGECACHE_CACHE_PREFIX=/a/,/b/\nRANGECACHE_LOG_LEVEL=debug\n", calls), 0o600))
		return "flagsFile=" + file
	}
	for _, mode := range []string{"deployment-plain", "daemonset"} {
		o := renderMode(t, mode, "--set-file", settings(1000), "--set", "log.level=")
		again := renderMode(t, mode, "--set-file", settings(2000), "--set", "log.level=")
		if !reflect.DeepEqual(o.proxy, again.proxy) {
			t.Errorf("%s: another file is another pod", mode)
		}
		spec := o.proxy.Spec
		volume := spec.Volumes[len(spec.Volumes)-1]
		object, found := o.all["ConfigMap "+volume.ConfigMap.Name].(*corev1.ConfigMap)
		mount := spec.Containers[0].VolumeMounts[len(spec.Containers[0].VolumeMounts)-1]
		if !found || mount.Name != volume.Name || mount.SubPath != "" {
			t.Fatalf("%s: %v, %v", mode, volume, mount)
		}
		folder := t.TempDir()
		for name, text := range object.Data {
			must(t, name, os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600))
		}
		var args []string
		for _, arg := range spec.Containers[0].Args {
			// Files of certificates are not looked at where there are none.
			args = append(args, strings.Replace(arg, mount.MountPath, folder, 1))
		}
		out, err := exec.Command(rangecacheBinary(), append([]string{"config"}, args...)...).CombinedOutput()
		must(t, string(out), err)
		_, fromFile, _ := strings.Cut(string(out), "# From the flags file\n")
		fromFile, _, _ = strings.Cut(fromFile, "\n#")
		if lines := strings.Split(fromFile, "\n"); !slices.Contains(lines, "RANGECACHE_MAX_CALLS=1000") || !slices.Contains(lines, "RANGECACHE_CACHE_PREFIX=/a/,/b/") || !slices.Contains(lines, "RANGECACHE_LOG_LEVEL=debug") {
			t.Errorf("%s: from the file come %q", mode, lines)
		}
	}
	if o := renderMode(t, "deployment-plain"); slices.ContainsFunc(o.proxy.Spec.Containers[0].Args, func(arg string) bool { return strings.HasPrefix(arg, "--flags-file") }) {
		t.Errorf("a file without flagsFile: %v", o.proxy.Spec)
	}
}

// TestFlagsExist checks that rangecache has every flag that the chart uses.
func TestFlagsExist(t *testing.T) {
	known := knownFlags(t)
	specs := map[string]corev1.Container{"the sidecar": sidecar(t).InitContainers[0]}
	for mode := range modes(t) {
		if pod := renderMode(t, mode).proxy; pod != nil {
			specs[mode] = pod.Spec.Containers[0]
		}
	}
	for where, container := range specs {
		for _, arg := range container.Args {
			if name, _, _ := strings.Cut(arg, "="); !slices.Contains(known, name) {
				t.Errorf("%s: rangecache has no %s", where, name)
			}
		}
	}
}
