package chart

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
)

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
		if slow := renderMode(t, mode, "--set", "minReadySeconds=30").daemonSet.Spec; plain.MinReadySeconds != 0 || slow.MinReadySeconds != 30 {
			t.Errorf("%s: %d, %d", mode, plain.MinReadySeconds, slow.MinReadySeconds)
		}
	}
	if slow := renderMode(t, "deployment", "--set", "minReadySeconds=30").deployment.Spec; plain.MinReadySeconds != 0 || slow.MinReadySeconds != 30 {
		t.Errorf("%d, %d", plain.MinReadySeconds, slow.MinReadySeconds)
	}
}

// TestDisruptionBudget checks that a number of pods that must stay takes the place of the number that may be missing.
func TestDisruptionBudget(t *testing.T) {
	plain := renderMode(t, "deployment").budget.Spec
	own := renderMode(t, "deployment", "--set", "podDisruptionBudget.minAvailable=1").budget.Spec
	if plain.MaxUnavailable.IntValue() != 1 || plain.MinAvailable != nil || own.MaxUnavailable != nil || own.MinAvailable.IntValue() != 1 {
		t.Errorf("%v, %v", plain, own)
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
	o := renderMode(t, "deployment", "--set", "service.type=LoadBalancer,service.loadBalancerClass=inner,service.loadBalancerSourceRanges={10.0.0.0/8,fd00::/8}",
		"--set", "service.externalTrafficPolicy=Local,service.internalTrafficPolicy=Cluster",
		"--set", "service.ipFamilyPolicy=RequireDualStack,service.ipFamilies={IPv6,IPv4},listener.host=::,metrics.host=::")
	spec := o.services["rc-rangecache"].Spec
	if *spec.LoadBalancerClass != "inner" || len(spec.LoadBalancerSourceRanges) != 2 || spec.ExternalTrafficPolicy != "Local" || *spec.InternalTrafficPolicy != "Cluster" {
		t.Errorf("%v", spec)
	}
	for name, service := range o.services {
		if families := service.Spec.IPFamilies; *service.Spec.IPFamilyPolicy != "RequireDualStack" || len(families) != 2 || families[0] != corev1.IPv6Protocol {
			t.Errorf("%s: %v", name, service.Spec)
		}
	}
	if args := o.proxy.Spec.Containers[0].Args; !slices.Contains(args, "--listen-client-urls=https://[::]:23790") || !slices.Contains(args, "--listen-metrics-urls=http://[::]:23791") {
		t.Errorf("%q", args)
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

// TestAnnotations checks that every object has the common annotations, beside those of its own, and that pods have theirs alone.
func TestAnnotations(t *testing.T) {
	for mode := range modes(t) {
		plain := renderMode(t, mode)
		o := renderMode(t, mode, "--set-string", "commonAnnotations.team=storage,serviceAccount.annotations.role=cache,podAnnotations.tier=cache")
		for name, of := range o.annotations {
			// A static pod's manifest is a pod, and an object of extraObjects has what it is given.
			if isPod := mode == "static-pod-manifest"; name != "ConfigMap rc-clients" && (of["team"] == "storage") == isPod {
				t.Errorf("%s: %s has %v", mode, name, of)
			}
			if isAccount := strings.HasPrefix(name, "ServiceAccount "); (of["role"] == "cache") != isAccount {
				t.Errorf("%s: %s has %v", mode, name, of)
			}
		}
		for name, of := range plain.annotations {
			if len(of) != 0 && mode != "deployment-settings" && name != "Pod rc-rangecache-test" && name != "Service rc-rangecache" && name != "ConfigMap rc-rangecache-dashboard" {
				t.Errorf("%s: %s has %v without a value", mode, name, of)
			}
		}
		if o.test != nil && o.test.Annotations["helm.sh/hook"] != "test" {
			t.Errorf("%s: the test is no hook: %v", mode, o.test.Annotations)
		}
		if o.proxy != nil && (o.proxy.Annotations["tier"] != "cache" || o.proxy.Annotations["team"] != "") {
			t.Errorf("%s: the pod has %v", mode, o.proxy.Annotations)
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
	hub := renderMode(t, "deployment", "--set", "etcd.endpoints={http://hub:23790},etcd.fallbackEndpoints={https://a:2379,https://b:2379}")
	if ports := hub.policy.Spec.Egress[0].Ports; len(ports) != 2 {
		t.Errorf("ports of hub and etcd: %v", ports)
	}
	if args := hub.proxy.Spec.Containers[0].Args; !slices.Contains(args, "--fallback-endpoints=https://a:2379,https://b:2379") {
		t.Errorf("%q", args)
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
