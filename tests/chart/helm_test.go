// Package chart tests charts/rangecache: every mode is rendered by Helm 3 and 4 and checked by Kubernetes' own rules.
//
// `make chart-test` builds the tools and runs it. tests/kube applies the manifests to a real kube-apiserver.
package chart

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	"sigs.k8s.io/yaml"
)

const (
	root        = "../.."
	chart       = root + "/charts/rangecache"
	tools       = root + "/target/tools"
	kubeVersion = "1.37.0"
	release     = "rc"
	namespace   = "some-namespace"
)

// helms are the versions of Helm that must agree, by the variable HELMS.
var helms = func() []string {
	names := os.Getenv("HELMS")
	if names == "" {
		names = "helm-4 helm-3"
	}
	paths := strings.Fields(names)
	for i, name := range paths {
		paths[i] = tools + "/" + name
	}
	return paths
}()

func helm(binary string, args ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	command := exec.Command(binary, args...)
	command.Stdout, command.Stderr = &stdout, &stderr
	if err := command.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%w: %s", err, stderr.String())
	}
	return stdout.String(), nil
}

func template(binary string, args ...string) (string, error) {
	return helm(binary, append([]string{"template", release, chart, "--namespace", namespace, "--kube-version", kubeVersion}, args...)...)
}

// modes returns the values files of all modes, by name.
func modes(t *testing.T) map[string]string {
	files, err := filepath.Glob(chart + "/ci/*-values.yaml")
	if err != nil || len(files) < 6 {
		t.Fatalf("values of the modes: %v, %v", files, err)
	}
	byName := map[string]string{}
	for _, file := range files {
		byName[strings.TrimSuffix(filepath.Base(file), "-values.yaml")] = file
	}
	return byName
}

// objects are the objects of a rendered mode, by type.
type objects struct {
	all             map[string]any               // by "Kind name"
	labels          map[string]map[string]string // by "Kind name"
	annotations     map[string]map[string]string // by "Kind name"
	pods            []corev1.PodTemplateSpec
	proxy           *corev1.PodTemplateSpec // rangecache's own, also out of the installer's hands
	test            *corev1.Pod             // of `helm test`
	staticManifest  string
	deployment      *appsv1.Deployment
	daemonSet       *appsv1.DaemonSet
	services        map[string]*corev1.Service
	budget          *policyv1.PodDisruptionBudget
	policy          *networkingv1.NetworkPolicy
	monitor         *monitoringv1.ServiceMonitor
	podMonitor      *monitoringv1.PodMonitor
	rule            *monitoringv1.PrometheusRule
	configMap       *corev1.ConfigMap
	serviceAccounts int
}

var separator = regexp.MustCompile(`(?m)^---\s*$`)

// strictly decodes one document; unknown and repeated fields are errors.
func strictly[T any](t *testing.T, document string) *T {
	t.Helper()
	into := new(T)
	if err := yaml.UnmarshalStrict([]byte(document), into, yaml.DisallowUnknownFields); err != nil {
		t.Fatalf("%v in\n%s", err, document)
	}
	return into
}

func parse(t *testing.T, manifests string) *objects {
	t.Helper()
	o := &objects{all: map[string]any{}, labels: map[string]map[string]string{}, annotations: map[string]map[string]string{}, services: map[string]*corev1.Service{}}
	for _, document := range separator.Split(manifests, -1) {
		var head struct {
			APIVersion string `json:"apiVersion"`
			Kind       string `json:"kind"`
			Metadata   struct {
				Name        string            `json:"name"`
				Namespace   string            `json:"namespace"`
				Labels      map[string]string `json:"labels"`
				Annotations map[string]string `json:"annotations"`
			} `json:"metadata"`
		}
		if err := yaml.Unmarshal([]byte(document), &head); err != nil {
			t.Fatalf("%v in\n%s", err, document)
		}
		if head.Kind == "" {
			continue
		}
		var object any
		switch head.APIVersion + " " + head.Kind {
		case "v1 Pod":
			pod := strictly[corev1.Pod](t, document)
			object = pod
			if pod.Annotations["helm.sh/hook"] == "test" {
				o.test = pod
				break
			}
			o.proxy = &corev1.PodTemplateSpec{ObjectMeta: pod.ObjectMeta, Spec: pod.Spec}
			o.staticManifest = document
		case "apps/v1 DaemonSet":
			o.daemonSet = strictly[appsv1.DaemonSet](t, document)
			o.pods = append(o.pods, o.daemonSet.Spec.Template)
			object = o.daemonSet
		case "apps/v1 Deployment":
			o.deployment = strictly[appsv1.Deployment](t, document)
			o.pods = append(o.pods, o.deployment.Spec.Template)
			object = o.deployment
		case "v1 Service":
			service := strictly[corev1.Service](t, document)
			o.services[service.Name] = service
			object = service
		case "v1 ServiceAccount":
			o.serviceAccounts++
			object = strictly[corev1.ServiceAccount](t, document)
		case "v1 ConfigMap":
			o.configMap = strictly[corev1.ConfigMap](t, document)
			object = o.configMap
		case "policy/v1 PodDisruptionBudget":
			o.budget = strictly[policyv1.PodDisruptionBudget](t, document)
			object = o.budget
		case "networking.k8s.io/v1 NetworkPolicy":
			o.policy = strictly[networkingv1.NetworkPolicy](t, document)
			object = o.policy
		case "monitoring.coreos.com/v1 ServiceMonitor":
			o.monitor = strictly[monitoringv1.ServiceMonitor](t, document)
			object = o.monitor
		case "monitoring.coreos.com/v1 PodMonitor":
			o.podMonitor = strictly[monitoringv1.PodMonitor](t, document)
			object = o.podMonitor
		case "monitoring.coreos.com/v1 PrometheusRule":
			o.rule = strictly[monitoringv1.PrometheusRule](t, document)
			object = o.rule
		default:
			t.Fatalf("unexpected object %s %s", head.APIVersion, head.Kind)
		}
		if head.Metadata.Namespace != namespace {
			t.Errorf("%s %s is in namespace %q", head.Kind, head.Metadata.Name, head.Metadata.Namespace)
		}
		key := head.Kind + " " + head.Metadata.Name
		if o.all[key] != nil {
			t.Errorf("%s is rendered twice", key)
		}
		o.all[key], o.labels[key], o.annotations[key] = object, head.Metadata.Labels, head.Metadata.Annotations
	}
	for i := range o.pods {
		pod := &o.pods[i]
		if pod.Labels["app.kubernetes.io/component"] != "installer" {
			o.proxy = pod
			continue
		}
		if manifest := environment(pod.Spec.InitContainers[0])["STATIC_POD_MANIFEST"]; manifest != "" {
			o.staticManifest = strings.ReplaceAll(manifest, "$$(", "$(")
			static := strictly[corev1.Pod](t, o.staticManifest)
			o.proxy = &corev1.PodTemplateSpec{ObjectMeta: static.ObjectMeta, Spec: static.Spec}
		}
	}
	return o
}

func environment(container corev1.Container) map[string]string {
	values := map[string]string{}
	for _, variable := range container.Env {
		values[variable.Name] = variable.Value
	}
	return values
}

// render returns the output of Helm 4 for the arguments.
func render(t *testing.T, args ...string) *objects {
	t.Helper()
	out, err := template(helms[0], args...)
	if err != nil {
		t.Fatal(err)
	}
	return parse(t, out)
}

func renderMode(t *testing.T, mode string, args ...string) *objects {
	t.Helper()
	return render(t, append([]string{"--values", modes(t)[mode]}, args...)...)
}

func TestLint(t *testing.T) {
	for _, binary := range helms {
		for name, file := range modes(t) {
			out, err := helm(binary, "lint", "--strict", "--kube-version", kubeVersion, chart, "--values", file)
			if err != nil || !strings.Contains(out, "0 chart(s) failed") {
				t.Errorf("%s, %s: %v\n%s", binary, name, err, out)
			}
		}
	}
}

// TestModesRender checks that every mode renders to known kinds without unknown fields, equally under both versions
// of Helm.
func TestModesRender(t *testing.T) {
	for name, file := range modes(t) {
		var first string
		for _, binary := range helms {
			out, err := template(binary, "--values", file)
			if err != nil {
				t.Fatalf("%s, %s: %v", binary, name, err)
			}
			parse(t, out)
			// The versions separate documents by different numbers of empty lines, and may order them differently.
			if keys := fmt.Sprint(keysOf(parse(t, out).all)); first == "" {
				first = keys
			} else if keys != first {
				t.Errorf("%s: one Helm gives %s, the other %s", name, first, keys)
			}
		}
	}
}

// digits are the end of a static pod's name.
var digits = regexp.MustCompile(`-[0-9a-f]{8}\b`)

// TestModesConsistOfTheirObjects checks the objects of each mode, with no others.
func TestModesConsistOfTheirObjects(t *testing.T) {
	for mode, expected := range map[string]string{
		"static-pod":          "[ConfigMap rc-rangecache-dashboard DaemonSet rc-rangecache-installer Pod rc-rangecache-test PrometheusRule rc-rangecache Service rc-rangecache-metrics ServiceAccount rc-rangecache ServiceMonitor rc-rangecache]",
		"static-pod-absent":   "[DaemonSet rc-rangecache-installer ServiceAccount rc-rangecache]",
		"static-pod-manifest": "[Pod rc-rangecache-00000000]",
		"daemonset":           "[DaemonSet rc-rangecache Pod rc-rangecache-test ServiceAccount rc-rangecache]",
		"deployment":          "[ConfigMap rc-rangecache-dashboard Deployment rc-rangecache NetworkPolicy rc-rangecache Pod rc-rangecache-test PodDisruptionBudget rc-rangecache PrometheusRule rc-rangecache Service rc-rangecache Service rc-rangecache-metrics ServiceAccount rc-rangecache ServiceMonitor rc-rangecache]",
		"deployment-settings": "[ConfigMap rc-clients ConfigMap rc-rangecache-flags Deployment rc-rangecache NetworkPolicy rc-rangecache Pod rc-rangecache-test PodDisruptionBudget rc-rangecache PodMonitor rc-rangecache PrometheusRule rc-rangecache Service rc-rangecache Service rc-rangecache-metrics ServiceAccount rc-rangecache]",
		"deployment-plain":    "[Deployment rc-rangecache NetworkPolicy rc-rangecache Pod rc-rangecache-test PodDisruptionBudget rc-rangecache Service rc-rangecache Service rc-rangecache-metrics ServiceAccount rc-rangecache]",
	} {
		// The digits are those of the manifest's text.
		if got := digits.ReplaceAllString(fmt.Sprint(keysOf(renderMode(t, mode).all)), "-00000000"); got != expected {
			t.Errorf("%s is\n%s, not\n%s", mode, got, expected)
		}
	}
}

// TestInvalidValuesAreRefused checks that invalid values are refused with a helpful message.
func TestInvalidValuesAreRefused(t *testing.T) {
	good := []string{"--set", "etcd.endpoints={https://a:2379}", "--set", "etcd.tls.secretName=e", "--set", "listener.tls.secretName=l"}
	for _, binary := range helms {
		if _, err := template(binary, good...); err != nil {
			t.Fatalf("the valid values: %v", err)
		}
		for _, mistake := range []struct{ set, says string }{
			{"cahce.maxBytes=1Gi", "additional properties 'cahce' not allowed"},
			{"cache.maxByte=1Gi", "additional properties 'maxByte' not allowed"},
			{"cache.maxBytes=1GB", "does not match pattern"},
			{"cache.maxBytes=1Gi,resources.limits.memory=256Mi", "resources.limits.memory is 256Mi, below cache.maxBytes (1Gi)"},
			{"cache.maxBytes=1Gi,resources.limits.memory=1G", "resources.limits.memory is 1G, below cache.maxBytes (1Gi)"},
			{"cache.maxBytes=1Gi,resources.limits.memory=1000000000", "below cache.maxBytes (1Gi)"},
			{"mode=static_pod", "value must be one of 'static-pod', 'daemonset', 'deployment'"},
			{"listener.port=0", "at '/listener/port'"},
			{"listener.hostWhitelist={https://a}", "at '/listener/hostWhitelist/0'"},
			{"listener.cors={console.example}", "at '/listener/cors/0'"},
			{"limits.maxConnectionsPerAddress=0", "at '/limits/maxConnectionsPerAddress'"},
			{"listener.readOnlyPort=23790", "listener.port and listener.readOnlyPort are both 23790"},
			{"metrics.port=23790", "listener.port and metrics.port are both 23790"},
			{"metrics.tlsPort=23791", "metrics.port and metrics.tlsPort are both 23791"},
			{"listener.readOnlyPort=23791", "listener.readOnlyPort and metrics.port are both 23791"},
			{"metrics.tlsPort=23793,listener.tls.secretName=,listener.allowUnauthenticated=true", "metrics.tlsPort has the listener's certificate"},
			{"log.level=bogus", "at '/log/level'"},
			{"log.level=h2=loud", "at '/log/level'"},
			{"metrics.clientsTop=-1", "at '/metrics/clientsTop'"},
			{"cache.whenBehind=wait", "at '/cache/whenBehind'"},
			{"cache.warmFrom={rangecache:23790}", "at '/cache/warmFrom/0'"},
			{"cache.image.hostPath=images", "at '/cache/image/hostPath'"},
			{"watches.cache=on", "at '/watches/cache'"},
			{"etcd.callerIs=certificate,etcd.user=a,etcd.passwordFile=b", "it excludes etcd.user"},
			{"limits.requestTimeout=30", "at '/limits/requestTimeout'"},
			{"etcd.endpoints={a:2379}", "at '/etcd/endpoints/0'"},
			{"etcd.endpoints=null", "etcd.endpoints is needed"},
			{"etcd.tls.secretName=", "set etcd.tls.secretName"},
			{"etcd.tls.hostPath=/x", "both set"},
			{"listener.tls.secretName=", "listener.allowUnauthenticated=true"},
			{"etcd.user=rangecache", "etcd.user and etcd.passwordFile must be set together"},
			{"listener.allowUnauthenticated=true,listener.clientCertAuth=false,listener.crlFile=x", "listener.crlFile revokes"},
			{"listener.clientCertAuth=false", "listener.allowUnauthenticated=true"},
			{"mode=static-pod", "the kubelet reads no Secrets"},
			{"mode=static-pod,etcd.tls.secretName=,listener.tls.secretName=,extraArgs={--ready-timeout=30s}", "--ready-timeout=30s is given by the chart"},
			{"mode=static-pod,etcd.tls.secretName=,listener.tls.secretName=,priorityClassName=important", "because the kubelet knows no other; not important"},
			{"staticPod.readyTimeout=30", "at '/staticPod/readyTimeout'"},
			{"extraArgs={-x}", "at '/extraArgs/0'"},
			{"extraArgs={--bogus}", "has no flag --bogus"},
			{"extraArgs={--probe-interval=2s,--probe-intervall=2s}", "has no flag --probe-intervall"},
			{"mode=static-pod,etcd.tls.secretName=,listener.tls.secretName=,extraContainers[0].name=a,extraContainers[0].image=b", "extraContainers: a static pod is rangecache alone"},
			{"extraContainers[0].name=a", "at '/extraContainers/0'"},
			{"dnsConfig.ndots=2", "additional properties 'ndots' not allowed"},
			{"hostAliases[0].ip=10.0.0.1", "at '/hostAliases/0'"},
			{"minReadySeconds=-1", "at '/minReadySeconds'"},
			{"deployment.replicas=0", "at '/deployment/replicas'"},
			{"podDisruptionBudget.minAvailable=2", "podDisruptionBudget.minAvailable is 2 of deployment.replicas=2"},
			{"podDisruptionBudget.minAvailable=100%", "podDisruptionBudget.minAvailable is 100%"},
			{"podDisruptionBudget.minAvailable=most", "at '/podDisruptionBudget/minAvailable'"},
			{"service.ipFamilyPolicy=Dual", "at '/service/ipFamilyPolicy'"},
			{"service.ipFamilies={IPv5}", "at '/service/ipFamilies/0'"},
			{"service.ipFamilies={IPv6}", "set listener.host and metrics.host to `::`"},
			{"service.ipFamilies={IPv6},listener.host=::", "set listener.host and metrics.host to `::`"},
			{"service.externalTrafficPolicy=Local", "service.type is ClusterIP"},
			{"service.type=NodePort,service.loadBalancerClass=x", "service.loadBalancerClass is of a Service of type LoadBalancer"},
			{"service.loadBalancerSourceRanges={10.0.0.1}", "at '/service/loadBalancerSourceRanges/0'"},
			{"serviceMonitor.scheme=tls", "at '/serviceMonitor/scheme'"},
			{"commonAnnotations.a=1", "at '/commonAnnotations/a'"},
			{"serviceAccount.annotations.a=1", "at '/serviceAccount/annotations/a'"},
			{"extraEnv[0].name=X", "at '/extraEnv/0'"},
			{"extraEnv[0].name=X,extraEnv[0].value=x,extraEnv[0].valueFrom.fieldRef.fieldPath=y", "at '/extraEnv/0'"},
			{"listener.advertiseUrls={rangecache}", "at '/listener/advertiseUrls/0'"},
			{"tracing.endpoint=collector:4317", "at '/tracing/endpoint'"},
			{"tracing.sampleRatio=2", "at '/tracing/sampleRatio'"},
			{"security.setIds=false,security.runAsUser=1000", "it excludes security.runAsUser"},
			{"mode=static-pod,etcd.tls.secretName=,listener.tls.secretName=,security.setIds=false", "nothing assigns a user to a static pod"},
			{"podSecurityContext.runAsUser=1000", "given by security.runAsUser"},
			{"startupProbe.httpGet.path=/", "additional properties 'httpGet' not allowed"},
			{"startupProbe.periodSeconds=0", "at '/startupProbe/periodSeconds'"},
			{"deployment.strategy.type=OnDelete", "at '/deployment/strategy/type'"},
			{"daemonSet.updateStrategy.type=Recreate", "at '/daemonSet/updateStrategy/type'"},
			{"topologySpreadConstraints[0].topologyKey=x", "missing properties 'maxSkew', 'whenUnsatisfiable'"},
			{"service.trafficDistribution=Near", "at '/service/trafficDistribution'"},
			{"service.type=ExternalName", "at '/service/type'"},
			{"serviceMonitor.enabled=true,podMonitor.enabled=true", "choose one"},
			{"podMonitor.scrapeTimeout=5", "at '/podMonitor/scrapeTimeout'"},
			{"prometheusRule.enabled=true,prometheusRule.disabledAlerts={RangecacheDwon}", "there is no alert RangecacheDwon"},
			{"mode=static-pod,etcd.tls.secretName=,listener.tls.secretName=,flagsFile=RANGECACHE_MAX_CALLS=1", "a static pod cannot use a ConfigMap"},
			{`commonLabels.app\.kubernetes\.io/name=x`, "value must be 'given by the chart'"},
			{`podLabels.app\.kubernetes\.io/component=x`, "value must be 'given by the chart'"},
		} {
			_, err := template(binary, append(good[:len(good):len(good)], "--set", mistake.set)...)
			if err == nil || !strings.Contains(err.Error(), mistake.says) {
				t.Errorf("%s, %s: %v does not say %q", binary, mistake.set, err, mistake.says)
			}
		}
		for _, monitor := range []string{"serviceMonitor", "podMonitor"} {
			_, err := template(binary, append(good[:len(good):len(good)], "--set", "mode=daemonset", "--set", monitor+".enabled=true")...)
			if err == nil || !strings.Contains(err.Error(), "metrics.host") {
				t.Errorf("metrics on loopback cannot be scraped: %v", err)
			}
		}
	}
}

// TestValuesOfAnOlderChartRender checks that keys which the values lack have their defaults: `helm upgrade --reuse-values`
// renders with the values of the chart before.
func TestValuesOfAnOlderChartRender(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "rangecache")
	must(t, "a copy", exec.Command("cp", "-RL", chart, folder).Run())
	must(t, "values.yaml", os.WriteFile(folder+"/values.yaml", []byte("{}\n"), 0o644))
	for mode, values := range modes(t) {
		for _, binary := range helms {
			expected, err := template(binary, "--values", values)
			must(t, mode, err)
			got, err := helm(binary, "template", release, folder, "--namespace", namespace, "--kube-version", kubeVersion, "--values", values)
			must(t, mode, err)
			if got != expected {
				t.Errorf("%s, %s: without its defaults the chart renders\n%s", binary, mode, got)
			}
		}
	}
}

// TestNotes checks that the notes explain how to verify and how to roll back in every mode, with the right addresses.
func TestNotes(t *testing.T) {
	for mode, says := range map[string][]string{
		"static-pod":          {"/readyz", "--etcd-servers=https://127.0.0.1:23790", "Roll back", "--etcd-servers=https://127.0.0.1:2379", "staticPod.state=absent"},
		"static-pod-absent":   {"helm uninstall"},
		"static-pod-manifest": {"/etc/kubernetes/manifests"},
		"daemonset":           {"DO NOT", "https://127.0.0.1:23790", "Roll back", "https://etcd.example:2379"},
		"deployment":          {"https://rc-rangecache.some-namespace.svc:23790", "Roll back"},
		"deployment-plain":    {"http://rc-rangecache.some-namespace.svc:23790", "Roll back", "WARNING", "networkPolicy.clients"},
	} {
		if tests := mode != "static-pod-absent" && mode != "static-pod-manifest"; tests {
			says = append(says, "helm test rc --namespace some-namespace")
		}
		// Helm 3 needs a cluster for this; its lint has rendered the notes, too.
		out, err := helm(helms[0], "install", release, chart, "--dry-run=client", "--namespace", namespace, "--values", modes(t)[mode])
		must(t, mode, err)
		_, notes, _ := strings.Cut(out, "NOTES:")
		for _, words := range says {
			if !strings.Contains(notes, words) {
				t.Errorf("%s: %q is missing in the notes:\n%s", mode, words, notes)
			}
		}
	}
}
