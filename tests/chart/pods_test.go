package chart

import (
	"encoding/base64"
	"encoding/xml"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
	"sigs.k8s.io/yaml"
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

// TestStaticPodsReferToNoObjects: the kubelet refuses static pods that refer to objects of the API.
func TestStaticPodsReferToNoObjects(t *testing.T) {
	for _, mode := range []string{"static-pod", "static-pod-manifest"} {
		spec := renderMode(t, mode, "--set", "imagePullSecrets={a}").proxy.Spec
		if spec.ServiceAccountName != "" || len(spec.ImagePullSecrets) != 0 || len(spec.ResourceClaims) != 0 {
			t.Errorf("%s refers to objects", mode)
		}
		for _, volume := range spec.Volumes {
			if volume.HostPath == nil {
				t.Errorf("%s: volume %s is not of the host", mode, volume.Name)
			}
		}
		for _, variable := range spec.Containers[0].Env {
			// The kubelet knows the pod's own fields.
			if variable.ValueFrom != nil && variable.ValueFrom.FieldRef == nil {
				t.Errorf("%s: variable %s is not plain", mode, variable.Name)
			}
		}
		if !spec.HostNetwork || spec.DNSPolicy != corev1.DNSDefault || spec.PriorityClassName != "system-node-critical" {
			t.Errorf("%s: %v %v %v", mode, spec.HostNetwork, spec.DNSPolicy, spec.PriorityClassName)
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

// TestStaticPodFitsKubeadm checks that next to a kubeadm apiserver only the mode has to be set.
func TestStaticPodFitsKubeadm(t *testing.T) {
	pod := render(t, "--set", "mode=static-pod").proxy
	if args := pod.Spec.Containers[0].Args; !slices.Equal(args[:len(kubeadm)], kubeadm) {
		t.Errorf("%q", args)
	}
	for _, volume := range pod.Spec.Volumes {
		if folder, file := filepath.Split(volume.HostPath.Path); folder != "/etc/kubernetes/pki/etcd/" || *volume.HostPath.Type != corev1.HostPathFile || file == "ca.key" {
			t.Errorf("%s is %s", volume.Name, volume.HostPath.Path)
		}
	}
	if user := *pod.Spec.SecurityContext.RunAsUser; user != 0 {
		t.Errorf("user %d cannot read kubeadm's keys", user)
	}
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
		"listener.readOnlyPort=23792":         "--read-only-listen-client-urls=https://0.0.0.0:23792",
		"metrics.clientsTop=0":                "--client-metrics-top=0",
		"metrics.prefixesTop=50":              "--prefix-metrics-top=50",
		"cache.whenBehind=fail":               "--when-behind=fail",
		"cache.shadow=0.01":                   "--shadow=0.01",
		"cache.serveStale=5m":                 "--serve-stale=5m",
		"watches.cache=off":                   "--watch-cache=off",
		"watches.maxBytes=128Mi":              "--watch-max-bytes=134217728",
		"watches.progressNotifyInterval=1m":   "--watch-progress-notify-interval=1m",
		"limits.clientMaxCalls=100":           "--client-max-calls=100",
		"limits.clientMaxBytesPerSecond=50Mi": "--client-max-bytes-per-second=52428800",
		"limits.clientMaxForwardedLists=2":    "--client-max-forwarded-lists=2",
		"limits.clientMaxWatches=1000":        "--client-max-watches=1000",
	}
	help, err := exec.Command(rangecacheBinary(), "--help").Output()
	must(t, rangecacheBinary(), err)
	known := flag.FindAllString(string(help), -1)
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

// TestUpdates checks the strategies and the revisions that are kept, by default and as the operator sets them.
func TestUpdates(t *testing.T) {
	plain := renderMode(t, "deployment").deployment.Spec
	if rolling := plain.Strategy.RollingUpdate; rolling.MaxUnavailable.IntValue() != 0 || rolling.MaxSurge.IntValue() != 1 || plain.RevisionHistoryLimit != nil {
		t.Errorf("%v", plain.Strategy)
	}
	own := renderMode(t, "deployment", "--set", "deployment.strategy.type=Recreate,revisionHistoryLimit=0").deployment.Spec
	if own.Strategy.Type != appsv1.RecreateDeploymentStrategyType || own.Strategy.RollingUpdate != nil || *own.RevisionHistoryLimit != 0 {
		t.Errorf("%v", own.Strategy)
	}
	for _, mode := range []string{"daemonset", "static-pod", "static-pod-absent"} {
		plain := renderMode(t, mode).daemonSet.Spec
		if rolling := plain.UpdateStrategy.RollingUpdate; rolling.MaxUnavailable.IntValue() != 1 || plain.RevisionHistoryLimit != nil {
			t.Errorf("%s: %v", mode, plain.UpdateStrategy)
		}
		own := renderMode(t, mode, "--set", "daemonSet.updateStrategy.type=OnDelete,revisionHistoryLimit=3").daemonSet.Spec
		if own.UpdateStrategy.Type != appsv1.OnDeleteDaemonSetStrategyType || own.UpdateStrategy.RollingUpdate != nil || *own.RevisionHistoryLimit != 3 {
			t.Errorf("%s: %v", mode, own.UpdateStrategy)
		}
	}
}

// TestSpread checks that constraints count the Deployment's pods, and that the operator's replace the chart's.
func TestSpread(t *testing.T) {
	zone := "topologySpreadConstraints[0].maxSkew=1,topologySpreadConstraints[0].whenUnsatisfiable=DoNotSchedule,topologySpreadConstraints[0].topologyKey="
	for want, args := range map[string][]string{
		"kubernetes.io/hostname":      nil,
		"topology.kubernetes.io/zone": {"--set", zone + "topology.kubernetes.io/zone"},
	} {
		o := renderMode(t, "deployment", args...)
		spread := o.proxy.Spec.TopologySpreadConstraints
		if len(spread) != 1 || spread[0].TopologyKey != want || !reflect.DeepEqual(spread[0].LabelSelector, o.deployment.Spec.Selector) {
			t.Errorf("%q: %v", want, spread)
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

// TestService checks what meshes and load balancers read of the clients' Service: the protocol behind each port, above all.
func TestService(t *testing.T) {
	for protocol, args := range map[string][]string{
		"https":             {"deployment", "--set", "listener.readOnlyPort=23792"},
		"kubernetes.io/h2c": {"deployment-plain", "--set", "listener.readOnlyPort=23792"},
		"grpc":              {"deployment", "--set", "listener.readOnlyPort=23792", "--set", "service.appProtocol=grpc"},
	} {
		service := renderMode(t, args[0], args[1:]...).services["rc-rangecache"].Spec
		for _, port := range service.Ports {
			if port.AppProtocol == nil || *port.AppProtocol != protocol {
				t.Errorf("%q: port %s is not of %s", args, port.Name, protocol)
			}
		}
		if len(service.Ports) != 2 || service.Type != corev1.ServiceTypeClusterIP || service.TrafficDistribution != nil {
			t.Errorf("%q: %v", args, service)
		}
	}
	service := renderMode(t, "deployment", "--set", "service.type=LoadBalancer,service.trafficDistribution=PreferSameZone", "--set-string", "service.annotations.internal=true").services["rc-rangecache"]
	if service.Spec.Type != corev1.ServiceTypeLoadBalancer || *service.Spec.TrafficDistribution != "PreferSameZone" || service.Annotations["internal"] != "true" {
		t.Errorf("%v", service)
	}
}

func TestSelectorsFindTheirPods(t *testing.T) {
	for _, mode := range []string{"deployment", "static-pod"} {
		o := renderMode(t, mode)
		selectors := map[string]map[string]string{}
		for name, service := range o.services {
			selectors[name] = service.Spec.Selector
		}
		if mode == "deployment" {
			selectors["budget"] = o.budget.Spec.Selector.MatchLabels
			selectors["policy"] = o.policy.Spec.PodSelector.MatchLabels
			selectors["deployment"] = o.deployment.Spec.Selector.MatchLabels
		}
		for name, selector := range selectors {
			for key, value := range selector {
				if o.proxy.Labels[key] != value {
					t.Errorf("%s: %s wants %s=%s", mode, name, key, value)
				}
			}
		}
		for key, value := range o.monitor.Spec.Selector.MatchLabels {
			if o.services["rc-rangecache-metrics"].Labels[key] != value {
				t.Errorf("%s: the monitor wants %s=%s", mode, key, value)
			}
			if client := o.services["rc-rangecache"]; client != nil && key == "app.kubernetes.io/component" && client.Labels[key] == value {
				t.Errorf("%s: the monitor finds the clients' Service, too", mode)
			}
		}
		if o.daemonSet != nil {
			for _, service := range o.services {
				if service.Spec.Selector["app.kubernetes.io/component"] == o.daemonSet.Spec.Template.Labels["app.kubernetes.io/component"] {
					t.Error("the installer is taken for rangecache")
				}
			}
		}
	}
}

// TestLabels checks that every object and pod has the common labels, that an operator's labels win over the chart's, and that
// selectors are the same with and without them.
func TestLabels(t *testing.T) {
	selectors := func(o *objects) string {
		text := ""
		if o.deployment != nil {
			text += fmt.Sprint(o.deployment.Spec.Selector, o.budget.Spec.Selector, o.policy.Spec.PodSelector)
		}
		if o.daemonSet != nil {
			text += fmt.Sprint(o.daemonSet.Spec.Selector)
		}
		if o.monitor != nil {
			text += fmt.Sprint(o.monitor.Spec.Selector)
		}
		for _, name := range keysOf(o.services) {
			text += fmt.Sprint(o.services[name].Spec.Selector)
		}
		return text
	}
	for mode := range modes(t) {
		plain := renderMode(t, mode)
		o := renderMode(t, mode, "--set", `commonLabels.team=storage,commonLabels.app\.kubernetes\.io/part-of=plane,podLabels.tier=cache`)
		labels := map[string]map[string]string{}
		for name, of := range o.labels {
			// An object of extraObjects has the labels that it is given.
			if name != "ConfigMap rc-clients" {
				labels[name] = of
			}
		}
		for i, pod := range o.pods {
			labels[fmt.Sprint("pod ", i)] = pod.Labels
		}
		if o.proxy != nil {
			labels["the proxy's pod"] = o.proxy.Labels
			if o.proxy.Labels["tier"] != "cache" || plain.proxy.Labels["app.kubernetes.io/part-of"] != "rangecache" {
				t.Errorf("%s: the pod has %v", mode, o.proxy.Labels)
			}
			// An upgrade of the chart alone replaces no pod.
			if o.proxy.Labels["helm.sh/chart"] != "" || o.proxy.Labels["app.kubernetes.io/version"] != "" {
				t.Errorf("%s: the pod has versions: %v", mode, o.proxy.Labels)
			}
		}
		for name, of := range labels {
			if of["team"] != "storage" || of["app.kubernetes.io/part-of"] != "plane" || of["app.kubernetes.io/component"] == "" || of["app.kubernetes.io/instance"] != release {
				t.Errorf("%s: %s has %v", mode, name, of)
			}
		}
		if with, without := selectors(o), selectors(plain); with != without {
			t.Errorf("%s: labels changed the selectors from %s to %s", mode, without, with)
		}
	}
}

// TestExtraObjects checks that further objects are rendered as templates, whether they are manifests or texts of them.
func TestExtraObjects(t *testing.T) {
	values := filepath.Join(t.TempDir(), "values.yaml")
	must(t, values, os.WriteFile(values, []byte(`extraObjects:
  - apiVersion: v1
    kind: ServiceAccount
    metadata: {name: "{{ .Release.Name }}-map", namespace: "{{ .Release.Namespace }}"}
  - |
    apiVersion: v1
    kind: ServiceAccount
    metadata:
      name: {{ include "rangecache.fullname" . }}-text
      namespace: {{ .Release.Namespace }}
`), 0o600))
	o := renderMode(t, "daemonset", "--values", values)
	if o.all["ServiceAccount rc-map"] == nil || o.all["ServiceAccount rc-rangecache-text"] == nil {
		t.Errorf("%q", keysOf(o.all))
	}
}

func TestNetworkPolicy(t *testing.T) {
	policy := renderMode(t, "deployment", "--set", "etcd.endpoints={https://a:2379,https://b:12379}").policy.Spec
	var ports []string
	for _, port := range policy.Egress[0].Ports {
		ports = append(ports, port.Port.String())
	}
	slices.Sort(ports)
	if !slices.Equal(ports, []string{"12379", "2379"}) {
		t.Errorf("etcd's ports: %q", ports)
	}
	if from := policy.Ingress[0].From; len(from) != 1 || from[0].PodSelector.MatchLabels["app"] != "kube-apiserver" {
		t.Errorf("clients: %v", from)
	}
	// Without a list of clients, access is limited to pods of the namespace.
	if from := renderMode(t, "deployment-plain").policy.Spec.Ingress[0].From; len(from) != 1 || from[0].PodSelector == nil || from[0].NamespaceSelector != nil {
		t.Errorf("clients: %v", from)
	}
}

// TestNetworkPolicyOpensTheCollectorsPort checks that traces and the operator's own rules pass the policy.
func TestNetworkPolicyOpensTheCollectorsPort(t *testing.T) {
	egress := renderMode(t, "deployment", "--set", "tracing.endpoint=https://collector.observability:4318/otlp",
		"--set", "networkPolicy.collector[0].namespaceSelector.matchLabels.name=observability",
		"--set", "networkPolicy.extraEgress[0].ports[0].port=8200").policy.Spec.Egress
	ports := map[string]networkingv1.NetworkPolicyEgressRule{}
	for _, rule := range egress {
		for _, port := range rule.Ports {
			ports[port.Port.String()] = rule
		}
	}
	if to := ports["4318"].To; len(to) != 1 || to[0].NamespaceSelector.MatchLabels["name"] != "observability" {
		t.Errorf("the collector: %v", egress)
	}
	if _, found := ports["8200"]; !found {
		t.Errorf("further rules: %v", egress)
	}
	if rules := renderMode(t, "deployment-plain").policy.Spec.Egress; len(rules) != 2 {
		t.Errorf("without traces: %v", rules)
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

// TestStaticPodRefusesReferences checks that values that a kubelet would refuse are refused before.
func TestStaticPodRefusesReferences(t *testing.T) {
	for _, set := range []string{
		"extraEnv[0].name=X,extraEnv[0].valueFrom.secretKeyRef.name=y,extraEnv[0].valueFrom.secretKeyRef.key=z",
		"extraVolumes[0].name=x,extraVolumes[0].secret.secretName=y",
	} {
		if _, err := template(helms[0], "--values", modes(t)["static-pod"], "--set", set); err == nil || !strings.Contains(err.Error(), "static pod") {
			t.Errorf("%s: %v", set, err)
		}
	}
	volumes := renderMode(t, "static-pod", "--set", "extraVolumes[0].name=x,extraVolumes[0].hostPath.path=/x,extraVolumeMounts[0].name=x,extraVolumeMounts[0].mountPath=/x").proxy.Spec
	if !slices.ContainsFunc(volumes.Containers[0].VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == "/x" }) {
		t.Errorf("volumes: %v", volumes.Volumes)
	}
}

// TestControlPlaneIsFoundByItsLabel checks that the host modes find control plane nodes of kubeadm, whose label has no value, and
// of k3s and RKE2, whose label is "true", and that static pods tolerate every taint.
func TestControlPlaneIsFoundByItsLabel(t *testing.T) {
	for _, values := range [][]string{{"static-pod"}, {"daemonset", "--set", "nodeSelector=null", "--set", "tolerations=null"}} {
		spec := renderMode(t, values[0], values[1:]...).daemonSet.Spec.Template.Spec
		if len(spec.NodeSelector) != 0 {
			t.Errorf("%s: %v", values[0], spec.NodeSelector)
		}
		terms := spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
		if len(terms) != 1 || len(terms[0].MatchExpressions) != 1 || terms[0].MatchExpressions[0].Key != "node-role.kubernetes.io/control-plane" ||
			terms[0].MatchExpressions[0].Operator != corev1.NodeSelectorOpExists {
			t.Errorf("%s: %v", values[0], terms)
		}
		for _, key := range []string{"node-role.kubernetes.io/control-plane", "CriticalAddonsOnly"} {
			taint := corev1.Taint{Key: key, Effect: corev1.TaintEffectNoSchedule}
			tolerated := slices.ContainsFunc(spec.Tolerations, func(toleration corev1.Toleration) bool {
				return (toleration.Key == "" || toleration.Key == taint.Key) && toleration.Operator == corev1.TolerationOpExists &&
					(toleration.Effect == "" || toleration.Effect == taint.Effect)
			})
			if tolerated != (values[0] == "static-pod" || key == "node-role.kubernetes.io/control-plane") {
				t.Errorf("%s: taint %s: %v", values[0], key, spec.Tolerations)
			}
		}
	}
	own := renderMode(t, "static-pod", "--set", "nodeSelector.role=etcd").daemonSet.Spec.Template.Spec
	if own.Affinity != nil || own.NodeSelector["role"] != "etcd" {
		t.Errorf("the operator's labels: %v, %v", own.NodeSelector, own.Affinity)
	}
}

// TestStaticPodsOverlap checks what two static pods need to run side by side, so that the apiserver is never without its etcd
// while one replaces the other, and what the kubelet needs to rank them.
func TestStaticPodsOverlap(t *testing.T) {
	name := func(pod *corev1.PodTemplateSpec) string {
		return strings.TrimSuffix(pod.Name, digits.FindString(pod.Name))
	}
	for _, mode := range []string{"static-pod", "static-pod-manifest"} {
		pod, again, changed := renderMode(t, mode).proxy, renderMode(t, mode).proxy, renderMode(t, mode, "--set", "log.level=warn").proxy
		if name(pod) != "rc-rangecache" || pod.Name != again.Name || pod.Name == changed.Name || name(changed) != name(pod) {
			t.Errorf("%s: names %s, %s and %s", mode, pod.Name, again.Name, changed.Name)
		}
		container := pod.Spec.Containers[0]
		if !slices.Contains(container.Args, "--socket-reuse-port") || len(container.Ports) != 0 {
			t.Errorf("%s cannot listen beside the pod before it: %q, %v", mode, container.Args, container.Ports)
		}
		if container.Lifecycle.PreStop.Sleep.Seconds != 5 || *pod.Spec.TerminationGracePeriodSeconds != 10+5+5 {
			t.Errorf("%s: the pod before it ends at once: %v", mode, container.Lifecycle)
		}
		if names := container.Env[0]; names.Name != "K8S_POD_NAME" || names.ValueFrom.FieldRef.FieldPath != "metadata.name" {
			t.Errorf("%s: the installer could not tell the pods apart: %v", mode, names)
		}
		if priority := pod.Spec.Priority; priority == nil || *priority != 2000001000 || pod.Spec.PriorityClassName != "system-node-critical" {
			t.Errorf("%s: priority %v", mode, priority)
		}
	}
	if pod := renderMode(t, "daemonset").proxy.Spec; pod.Priority != nil || slices.Contains(pod.Containers[0].Args, "--socket-reuse-port") {
		t.Errorf("a pod that the apiserver admits has its priority from its class: %v", pod)
	}
	// A Service finds the metrics although the pod names no port.
	if port := renderMode(t, "static-pod").services["rc-rangecache-metrics"].Spec.Ports[0].TargetPort; port.IntValue() != 23791 {
		t.Errorf("metrics at %v", port)
	}
}

// TestInstallerRunsTheImageAlone checks that the installer runs the static pod's image with the static pod's flags, environment and
// files, that nothing but its init container may write to the kubelet's folder, and that no container sees a CA's key.
func TestInstallerRunsTheImageAlone(t *testing.T) {
	digest := "sha256:" + strings.Repeat("a", 64)
	for others, args := range [][]string{
		{"--set", "image.digest=" + digest},
		{"--set", "image.digest=" + digest, "--set", "security.runAsUser=65532", "--set", "extraEnv[0].name=RANGECACHE_SHADOW", "--set-string", "extraEnv[0].value=0.5"},
	} {
		o := renderMode(t, "static-pod", append(args, "--set", "staticPod.force=true,staticPod.readyTimeout=3m")...)
		pod, static := o.daemonSet.Spec.Template.Spec, o.proxy.Spec.Containers[0]
		install, hold := pod.InitContainers[0], pod.Containers[0]
		if len(pod.InitContainers) != 1 || len(pod.Containers) != 1 {
			t.Fatalf("%d and %d containers", len(pod.InitContainers), len(pod.Containers))
		}
		for _, container := range []corev1.Container{install, hold} {
			if container.Image != static.Image || !strings.HasSuffix(container.Image, "@"+digest) || len(container.Command) != 0 {
				t.Errorf("%s runs %s %q", container.Name, container.Image, container.Command)
			}
		}
		if own := []string{"static-pod", "install", "--manifests-dir=/manifests", "--manifest-name=rc-rangecache.yaml", "--force", "--ready-timeout=3m"}; !slices.Equal(install.Args, append(own, static.Args...)) {
			t.Errorf("%q", install.Args)
		}
		for name, value := range environment(static) {
			if strings.HasPrefix(name, "RANGECACHE_") && environment(install)[name] != value {
				t.Errorf("%s=%s is missing", name, value)
			}
		}
		if folder := install.VolumeMounts[0]; folder.MountPath != "/manifests" || folder.ReadOnly {
			t.Errorf("%v", folder)
		}
		if !reflect.DeepEqual(install.VolumeMounts[1:], static.VolumeMounts) || len(hold.VolumeMounts) != 0 {
			t.Errorf("%v and %v", install.VolumeMounts, hold.VolumeMounts)
		}
		for _, volume := range pod.Volumes[1:] {
			if *volume.HostPath.Type != corev1.HostPathFile || strings.HasSuffix(volume.HostPath.Path, "ca.key") {
				t.Errorf("%s is %s", volume.Name, volume.HostPath.Path)
			}
		}
		if *hold.SecurityContext.RunAsUser == 0 || install.Resources.Limits.Memory().Cmp(*static.Resources.Limits.Memory()) != 0 {
			t.Errorf("user %d, memory %v", *hold.SecurityContext.RunAsUser, install.Resources.Limits.Memory())
		}
		// The check reads the files of another user if the static pod is not root's.
		if added := install.SecurityContext.Capabilities.Add; len(added) != others {
			t.Errorf("%v: capabilities %q", args, added)
		}
	}
	absent := renderMode(t, "static-pod-absent").daemonSet.Spec.Template.Spec
	if install := absent.InitContainers[0]; !slices.Equal(install.Args, []string{"static-pod", "remove", "--manifests-dir=/manifests", "--manifest-name=rc-rangecache.yaml"}) || len(install.Env) != 0 {
		t.Errorf("%q", install.Args)
	}
}

var version = regexp.MustCompile(`(?m)^version = "(.*)"`)

func cargoVersion(t *testing.T) string {
	t.Helper()
	return version.FindStringSubmatch(read(t, root+"/Cargo.toml"))[1]
}

// TestVersions checks that chart, image and program have the same version.
func TestVersions(t *testing.T) {
	cargo := cargoVersion(t)
	for _, line := range []string{"version: ", "appVersion: "} {
		if !strings.Contains(read(t, chart+"/Chart.yaml"), "\n"+line+cargo+"\n") {
			t.Errorf("Chart.yaml has no %s%s", line, cargo)
		}
	}
	if !strings.Contains(read(t, root+"/Dockerfile"), "\nARG VERSION="+cargo+"\n") {
		t.Errorf("the Dockerfile's VERSION is not %s", cargo)
	}
	image := renderMode(t, "daemonset").proxy.Spec.Containers[0].Image
	if image != "ghcr.io/rangecache/rangecache:"+cargo {
		t.Error(image)
	}
	digest := "sha256:" + strings.Repeat("a", 64)
	if image := renderMode(t, "daemonset", "--set", "image.digest="+digest).proxy.Spec.Containers[0].Image; image != "ghcr.io/rangecache/rangecache@"+digest {
		t.Error(image)
	}
}

var (
	pageLink   = regexp.MustCompile(`\]\(([^)]+)\)`)
	metaLink   = regexp.MustCompile(`https://github\.com/rangecache/rangecache/[^\s)]+`)
	anchorDrop = regexp.MustCompile(`[^a-z0-9 _-]`)
)

// resolveLink checks that a link leads to a file of the repository in the chart's version, and to a heading of it.
func resolveLink(t *testing.T, where, link string) {
	t.Helper()
	file, found := strings.CutPrefix(link, "https://github.com/rangecache/rangecache/blob/v"+cargoVersion(t)+"/")
	if !found {
		t.Errorf("%s: %s does not lead to this version", where, link)
		return
	}
	file, fragment, hasFragment := strings.Cut(file, "#")
	text, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		t.Errorf("%s: %s leads nowhere: %v", where, link, err)
		return
	}
	if hasFragment && !slices.ContainsFunc(strings.Split(string(text), "\n"), func(line string) bool {
		heading := strings.ToLower(strings.TrimSpace(strings.TrimLeft(line, "#")))
		return strings.HasPrefix(line, "#") && strings.ReplaceAll(anchorDrop.ReplaceAllString(heading, ""), " ", "-") == fragment
	}) {
		t.Errorf("%s: %s leads to no heading", where, link)
	}
}

// TestPackageIsReadableAlone checks what is shown of a package without the repository: its README has no relative links, links lead
// to the documents of its version, and the index has an icon, the maintainers, changes and the image.
func TestPackageIsReadableAlone(t *testing.T) {
	links := 0
	for _, match := range pageLink.FindAllStringSubmatch(read(t, chart+"/README.md"), -1) {
		if link := match[1]; !strings.HasPrefix(link, "#") {
			resolveLink(t, "README.md", link)
			links++
		}
	}
	if links < 8 {
		t.Errorf("%d links in README.md", links)
	}
	var meta struct {
		Icon        string                       `json:"icon"`
		Maintainers []struct{ Name, URL string } `json:"maintainers"`
		Annotations map[string]string            `json:"annotations"`
	}
	must(t, "Chart.yaml", yaml.Unmarshal([]byte(read(t, chart+"/Chart.yaml")), &meta))
	encoded, isSvg := strings.CutPrefix(meta.Icon, "data:image/svg+xml;base64,")
	if icon, err := base64.StdEncoding.DecodeString(encoded); err != nil || !isSvg || xml.Unmarshal(icon, new(struct{ XMLName xml.Name })) != nil {
		t.Errorf("the icon is no drawing: %v", err)
	}
	if len(meta.Maintainers) == 0 || meta.Maintainers[0].Name == "" {
		t.Error("no maintainers")
	}
	var changes, images, others []struct{ Kind, Description, Name, Image, URL string }
	for name, into := range map[string]any{"changes": &changes, "images": &images, "links": &others} {
		text := meta.Annotations["artifacthub.io/"+name]
		must(t, name, yaml.Unmarshal([]byte(text), into))
		for _, link := range metaLink.FindAllString(text, -1) {
			if !strings.HasSuffix(link, "/issues") {
				resolveLink(t, name, link)
			}
		}
	}
	if len(changes) == 0 || changes[0].Kind == "" || changes[0].Description == "" || len(others) == 0 {
		t.Errorf("changes %v, links %v", changes, others)
	}
	if image := renderMode(t, "daemonset").proxy.Spec.Containers[0].Image; len(images) != 1 || images[0].Image != image {
		t.Errorf("images %v, not %s", images, image)
	}
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
	flag   = regexp.MustCompile(`--[a-z][a-z-]+`)
)

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
	help, err := exec.Command(rangecacheBinary(), "--help").Output()
	must(t, rangecacheBinary(), err)
	known := flag.FindAllString(string(help), -1)
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
