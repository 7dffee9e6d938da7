package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"sigs.k8s.io/yaml"
)

const chartDir = root + "/charts/rangecache"

// TestChart applies every mode of the chart to a real apiserver with strict validation: there must be no warning, in
// a namespace that enforces the restricted pod security standard if the mode supports it. The apiserver reads through
// rangecache.
func TestChart(t *testing.T) {
	files := newCertificates(t)
	etcd := startEtcd(t, files, "etcd-3.7")
	front := startFront(t, files, rangecache, etcd)
	server := startAPIServer(t, files, 1, front.url)
	server.awaitReady(t)
	cluster := newCluster(t, server)
	for _, kind := range []string{"ServiceMonitor", "PodMonitor", "PrometheusRule"} {
		cluster.define(t, kind)
	}
	modes, err := filepath.Glob(chartDir + "/ci/*-values.yaml")
	if err != nil || len(modes) < 6 {
		t.Fatalf("values of the modes: %v, %v", modes, err)
	}
	kubeconfig := writeKubeconfig(t, files, server)
	for _, values := range modes {
		name := strings.TrimSuffix(filepath.Base(values), "-values.yaml")
		t.Run(name, func(t *testing.T) {
			level := "privileged"
			if strings.HasPrefix(name, "deployment") {
				level = "restricted"
			}
			cluster.namespace(t, name, level)
			rendered := run(t, tools+"/helm-4", "template", "rc", chartDir, "--namespace", name, "--values", values)
			if count := cluster.dryRun(t, name, rendered); count == 0 {
				t.Error("the chart rendered no object")
			}
			if name == "static-pod-manifest" {
				return // what is put onto nodes is not installed
			}
			// A real installation by Helm, and an upgrade, which would show changes of immutable fields.
			helm := []string{"rc", chartDir, "--kubeconfig", kubeconfig, "--namespace", name, "--values", values}
			run(t, tools+"/helm-4", append([]string{"install"}, helm...)...)
			run(t, tools+"/helm-4", append([]string{"upgrade", "--set", "image.tag=another,cache.maxBytes=3Gi"}, helm...)...)
			run(t, tools+"/helm-4", "uninstall", "rc", "--kubeconfig", kubeconfig, "--namespace", name)
		})
	}
	t.Run("sidecar", func(t *testing.T) {
		cluster.namespace(t, "sidecar", "restricted")
		cluster.dryRun(t, "sidecar", sidecarPod(t))
	})
	t.Run("invalid objects are refused", func(t *testing.T) {
		cluster.namespace(t, "strict", "restricted")
		daemonset := run(t, tools+"/helm-4", "template", "rc", chartDir, "--namespace", "strict", "--values", chartDir+"/ci/daemonset-values.yaml")
		if problems := cluster.problems(t, "strict", daemonset); !slices.ContainsFunc(problems, func(p string) bool { return strings.Contains(p, "hostNetwork") }) {
			t.Errorf("the host's network in a restricted namespace: %q", problems)
		}
		misspelt := strings.Replace(daemonset, "hostNetwork:", "hostNetwrok:", 1)
		if problems := cluster.problems(t, "strict", misspelt); !slices.ContainsFunc(problems, func(p string) bool { return strings.Contains(p, "hostNetwrok") }) {
			t.Errorf("a misspelt field: %q", problems)
		}
	})
}

// cluster applies objects of any kind.
type cluster struct {
	server   *apiserver
	objects  *dynamic.DynamicClient
	warnings *warnings
}

// warnings collects the warnings in the apiserver's responses.
type warnings struct {
	mutex sync.Mutex
	texts []string
}

func (w *warnings) HandleWarningHeader(_ int, _ string, text string) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	w.texts = append(w.texts, text)
}

// take returns the warnings since the last call.
func (w *warnings) take() []string {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	texts := w.texts
	w.texts = nil
	return texts
}

func newCluster(t *testing.T, server *apiserver) *cluster {
	t.Helper()
	c := &cluster{server: server, warnings: &warnings{}}
	config := rest.CopyConfig(server.config)
	config.ContentConfig = rest.ContentConfig{}
	config.WarningHandler = c.warnings
	var err error
	c.objects, err = dynamic.NewForConfig(config)
	must(t, "a client", err)
	return c
}

// resource returns the client for a kind, by the apiserver's current discovery.
func (c *cluster) resource(object *unstructured.Unstructured, namespace string) (dynamic.ResourceInterface, error) {
	groups, err := restmapper.GetAPIGroupResources(c.server.client.Discovery())
	if err != nil {
		return nil, err
	}
	kind := object.GroupVersionKind()
	mapping, err := restmapper.NewDiscoveryRESTMapper(groups).RESTMapping(kind.GroupKind(), kind.Version)
	if err != nil {
		return nil, err
	}
	if mapping.Scope.Name() == meta.RESTScopeNameRoot {
		return c.objects.Resource(mapping.Resource), nil
	}
	return c.objects.Resource(mapping.Resource).Namespace(namespace), nil
}

// define registers a kind of the Prometheus operator. Its fields are checked by the chart's own tests.
func (c *cluster) define(t *testing.T, kind string) {
	t.Helper()
	plural := strings.ToLower(kind) + "s"
	definition := fmt.Sprintf(`{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"%[1]s.monitoring.coreos.com",
		"annotations":{"api-approved.kubernetes.io":"unapproved, for a test"}},
		"spec":{"group":"monitoring.coreos.com","scope":"Namespaced","names":{"kind":"%[2]s","plural":"%[1]s","singular":"%[3]s","listKind":"%[2]sList"},
		"versions":[{"name":"v1","served":true,"storage":true,"schema":{"openAPIV3Schema":{"type":"object","properties":{
		"spec":{"type":"object","x-kubernetes-preserve-unknown-fields":true}}}}}]}}`, plural, kind, strings.ToLower(kind))
	object := &unstructured.Unstructured{}
	must(t, kind, json.Unmarshal([]byte(definition), &object.Object))
	resource, err := c.resource(object, "")
	must(t, kind, err)
	_, err = resource.Create(t.Context(), object, metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict})
	must(t, kind, err)
	await(t, kind+" is known", func() error {
		probe := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "monitoring.coreos.com/v1", "kind": kind}}
		resource, err := c.resource(probe, "default")
		if err != nil {
			return err
		}
		_, err = resource.List(t.Context(), metav1.ListOptions{})
		return err
	})
}

// namespace creates one that enforces a pod security level and warns by it, with the objects that controllers would
// add.
func (c *cluster) namespace(t *testing.T, name, level string) {
	t.Helper()
	core := c.server.client.CoreV1()
	_, err := core.Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
		"pod-security.kubernetes.io/enforce": level, "pod-security.kubernetes.io/warn": level,
	}}}, metav1.CreateOptions{})
	must(t, name, err)
	// Pods name their mode's service account, which a dry run does not create.
	for _, account := range []string{"default", "rc-rangecache-dry"} {
		_, err = core.ServiceAccounts(name).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: account}}, metav1.CreateOptions{})
		must(t, account, err)
	}
}

// dryRun sends an object to the apiserver without storing it, and fails the test on a refusal or a warning.
func (c *cluster) dryRun(t *testing.T, namespace, manifests string) int {
	t.Helper()
	for _, problem := range c.problems(t, namespace, manifests) {
		t.Error(problem)
	}
	return len(documents(t, manifests))
}

var separator = regexp.MustCompile(`(?m)^---\s*$`)

func documents(t *testing.T, manifests string) (objects []*unstructured.Unstructured) {
	t.Helper()
	for _, text := range separator.Split(manifests, -1) {
		object := &unstructured.Unstructured{}
		must(t, text, yaml.Unmarshal([]byte(text), &object.Object))
		if object.GetKind() != "" {
			objects = append(objects, object)
		}
	}
	return objects
}

// problems returns refusals and warnings.
func (c *cluster) problems(t *testing.T, namespace, manifests string) (problems []string) {
	t.Helper()
	objects := documents(t, manifests)
	for _, object := range slices.Clone(objects) {
		// The pod of `helm test`.
		if _, found, _ := unstructured.NestedString(object.Object, "spec", "serviceAccountName"); found && object.GetKind() == "Pod" {
			must(t, object.GetName(), unstructured.SetNestedField(object.Object, "rc-rangecache-dry", "spec", "serviceAccountName"))
		}
		objects = append(objects, podsOf(t, object)...)
	}
	for _, object := range objects {
		what := object.GetKind() + " " + object.GetName()
		resource, err := c.resource(object, namespace)
		must(t, what, err)
		c.warnings.take()
		_, err = resource.Create(context.Background(), object, metav1.CreateOptions{
			DryRun: []string{metav1.DryRunAll}, FieldValidation: metav1.FieldValidationStrict, FieldManager: "test",
		})
		if err != nil {
			problems = append(problems, fmt.Sprintf("%s: %v", what, err))
		}
		for _, warning := range c.warnings.take() {
			problems = append(problems, what+" warns: "+warning)
		}
	}
	return problems
}

// podsOf returns the pods that a controller would create for an object, and the static pod of the installer: the pod
// security standard is enforced on pods only.
func podsOf(t *testing.T, object *unstructured.Unstructured) (pods []*unstructured.Unstructured) {
	t.Helper()
	spec, found, err := unstructured.NestedMap(object.Object, "spec", "template")
	must(t, object.GetKind(), err)
	if !found {
		return nil
	}
	pod := &corev1.Pod{}
	must(t, object.GetKind(), runtime.DefaultUnstructuredConverter.FromUnstructured(spec, pod))
	pod.Name = object.GetName() + "-pod"
	if pod.Spec.ServiceAccountName != "" {
		pod.Spec.ServiceAccountName = "rc-rangecache-dry"
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(pod)
	must(t, pod.Name, err)
	delete(content, "status")
	made := &unstructured.Unstructured{Object: content}
	made.SetAPIVersion("v1")
	made.SetKind("Pod")
	pods = append(pods, made)
	for _, container := range pod.Spec.InitContainers {
		for _, variable := range container.Env {
			if variable.Name == "STATIC_POD_MANIFEST" {
				pods = append(pods, documents(t, strings.ReplaceAll(variable.Value, "$$(", "$("))...)
			}
		}
	}
	return pods
}

// sidecarPod returns the pod of a hosted apiserver with the sidecar from the chart's README.
func sidecarPod(t *testing.T) string {
	t.Helper()
	readme, err := os.ReadFile(chartDir + "/README.md")
	must(t, "the chart's README", err)
	match := regexp.MustCompile("(?s)```yaml\n(initContainers:.*?)```").FindSubmatch(readme)
	if match == nil {
		t.Fatal("the chart's README has no example of a sidecar")
	}
	return `apiVersion: v1
kind: Pod
metadata:
  name: kube-apiserver
spec:
  securityContext: {runAsNonRoot: true, runAsUser: 65532, seccompProfile: {type: RuntimeDefault}}
  containers:
    - name: kube-apiserver
      image: registry.k8s.io/kube-apiserver:v1.37.2
      securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
` + regexp.MustCompile(`(?m)^`).ReplaceAllString(string(match[1]), "  ")
}

func writeKubeconfig(t *testing.T, files *certificates, server *apiserver) string {
	t.Helper()
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
current-context: test
contexts: [{name: test, context: {cluster: test, user: test}}]
clusters: [{name: test, cluster: {server: %q, certificate-authority: %q}}]
users: [{name: test, user: {token: %q}}]
`, server.url, files.ca, token)
	path := filepath.Join(t.TempDir(), "kubeconfig")
	must(t, path, os.WriteFile(path, []byte(text), 0o600))
	return path
}
