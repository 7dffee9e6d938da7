package kube

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/uuid"
)

// packedKind is a kind of object with a mirror of its own, and what one write of it is.
type packedKind struct {
	name, prefix string
	// Share of the number of objects, as one of this many.
	share int
	write func(ctx context.Context, server *apiserver, number int) error
}

const packedNamespace = "packed"

var packedKinds = []packedKind{
	{"pods", "/registry/pods/", 1, writePod},
	{"configmaps", "/registry/configmaps/" + packedNamespace + "/", 1, writeConfigMap},
	{"secrets", "/registry/secrets/", 1, writeSecret},
	{"leases", "/registry/leases/" + packedNamespace + "/", 1, writeLease},
	{"events", "/registry/events/", 1, writeEvent},
	{"custom resource definitions", "/registry/apiextensions.k8s.io/customresourcedefinitions/", 20, writeDefinition},
}

// TestPacking measures how much memory objects take that a kube-apiserver has written, in rangecaches that pack and that do
// not. It runs only if KUBE_PACKING is set, and prints a table.
func TestPacking(t *testing.T) {
	if setting(t, "KUBE_PACKING", 0) == 0 {
		t.Skip("a measurement: make bench-packing")
	}
	files, objects := newCertificates(t), setting(t, "KUBE_OBJECTS", 2000)
	etcd := startEtcd(t, files, "etcd-3.7")
	// There is no controller that makes service accounts for the pods.
	server := startAPIServer(t, files, 1, etcd.url, "--disable-admission-plugins", "ServiceAccount")
	server.awaitReady(t)
	_, err := server.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: packedNamespace}}, metav1.CreateOptions{})
	must(t, packedNamespace, err)
	for _, kind := range packedKinds {
		const workers = 16
		var all sync.WaitGroup
		for worker := range workers {
			all.Go(func() {
				for number := worker; number < objects/kind.share; number += workers {
					if err := kind.write(t.Context(), server, number); err != nil {
						t.Errorf("%s: %v", kind.name, err)
						return
					}
				}
			})
		}
		all.Wait()
	}
	server.stop()

	var prefixes []string
	for _, kind := range packedKinds {
		prefixes = append(prefixes, "--cache-prefix", kind.prefix)
	}
	memory := map[string]map[string]float64{}
	var encoded, keys map[string]float64
	for _, pack := range []string{"never", "always"} {
		front := startFront(t, files, rangecache, etcd, append([]string{"--cache-pack", pack}, prefixes...)...)
		metrics := front.scrape(t)
		memory[pack] = metrics.by("rangecache_mirror_memory_bytes", "mirror")
		encoded = metrics.by("rangecache_mirror_load_bytes", "mirror")
		keys = metrics.by("rangecache_mirror_keys", "mirror")
		front.stop()
	}
	table := "memory for each byte of an object as etcd sends it\n| kind | objects | bytes of one | plain | packed |\n|---|---|---|---|---|\n"
	for _, kind := range packedKinds {
		bytes := encoded[kind.prefix]
		if bytes == 0 {
			t.Fatalf("no mirror of %s: %v", kind.prefix, encoded)
		}
		table += fmt.Sprintf("| %s | %.0f | %.0f | %.2f | %.2f |\n", kind.name, keys[kind.prefix], bytes/keys[kind.prefix],
			memory["never"][kind.prefix]/bytes, memory["always"][kind.prefix]/bytes)
	}
	t.Log(table)
}

// A pod of a deployment as it is once it runs: two containers with environments, probes and volumes, and a status.
func writePod(ctx context.Context, server *apiserver, number int) error {
	app := fmt.Sprintf("app-%03d", number/10)
	labels := map[string]string{"app.kubernetes.io/name": app, "app.kubernetes.io/managed-by": "Helm", "pod-template-hash": "7c9d8b6f5d"}
	container := func(name, image string, port int32) corev1.Container {
		return corev1.Container{
			Name: name, Image: image, Args: []string{"--config=/etc/" + app + "/config.yaml", "--log-level=info"},
			Env: []corev1.EnvVar{
				{Name: "POD_NAME", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}},
				{Name: "POD_NAMESPACE", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.namespace"}}},
				{Name: "DATABASE_URL", Value: "postgres://" + app + "@database." + packedNamespace + ".svc:5432/" + app},
			},
			Ports: []corev1.ContainerPort{{Name: name, ContainerPort: port}},
			Resources: corev1.ResourceRequirements{
				Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m"), corev1.ResourceMemory: resource.MustParse("128Mi")},
				Limits:   corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("256Mi")},
			},
			ReadinessProbe: &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/ready", Port: intstr.FromString(name)}}},
			VolumeMounts:   []corev1.VolumeMount{{Name: "config", MountPath: "/etc/" + app}, {Name: "data", MountPath: "/data"}},
		}
	}
	controller := true
	pods := server.client.CoreV1().Pods(packedNamespace)
	pod, err := pods.Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: fmt.Sprintf("%s-7c9d8b6f5d-%05d", app, number), Labels: labels,
			Annotations:     map[string]string{"prometheus.io/scrape": "true", "checksum/config": fmt.Sprintf("%064x", number)},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: app + "-7c9d8b6f5d", UID: uuid.NewUUID(), Controller: &controller}},
		},
		Spec: corev1.PodSpec{
			NodeName:   fmt.Sprintf("node-%03d", number%100),
			Containers: []corev1.Container{container("app", "registry.example.com/team/"+app+":v1.2.3", 8080), container("proxy", "registry.example.com/mesh/proxy:v3.4.5", 9090)},
			Volumes: []corev1.Volume{
				{Name: "config", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: app}}}},
				{Name: "data", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
			},
		},
	}, metav1.CreateOptions{FieldManager: "kube-controller-manager"})
	if err != nil {
		return err
	}
	now := metav1.Now()
	status := &pod.Status
	status.Phase, status.StartTime = corev1.PodRunning, &now
	status.HostIP, status.PodIP = fmt.Sprintf("10.0.%d.%d", number/250%250, number%250), fmt.Sprintf("10.1.%d.%d", number/250%250, number%250)
	for _, condition := range []corev1.PodConditionType{corev1.PodInitialized, corev1.PodReady, corev1.ContainersReady, corev1.PodScheduled} {
		status.Conditions = append(status.Conditions, corev1.PodCondition{Type: condition, Status: corev1.ConditionTrue, LastTransitionTime: now})
	}
	for _, container := range pod.Spec.Containers {
		status.ContainerStatuses = append(status.ContainerStatuses, corev1.ContainerStatus{
			Name: container.Name, Image: container.Image, Ready: true, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: now}},
			ImageID: "registry.example.com/team@sha256:" + fmt.Sprintf("%064x", number/10), ContainerID: "containerd://" + hexadecimal(32),
		})
	}
	_, err = pods.UpdateStatus(ctx, pod, metav1.UpdateOptions{FieldManager: "kubelet"})
	return err
}

func writeConfigMap(ctx context.Context, server *apiserver, number int) error {
	config := ""
	for line := range 20 {
		config += fmt.Sprintf("server.%d:\n  address: 10.2.%d.%d:8080\n  timeout: %ds\n  retries: %d\n", line, number%250, line, 5+line, number%7)
	}
	_, err := server.client.CoreV1().ConfigMaps(packedNamespace).Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("app-%05d", number), Labels: map[string]string{"app.kubernetes.io/managed-by": "Helm"}},
		Data:       map[string]string{"config.yaml": config},
	}, metav1.CreateOptions{FieldManager: "helm"})
	return err
}

// A secret is random: what does not shrink.
func writeSecret(ctx context.Context, server *apiserver, number int) error {
	data := make([]byte, 1000)
	_, _ = rand.Read(data)
	_, err := server.client.CoreV1().Secrets(packedNamespace).Create(ctx, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("token-%05d", number)},
		Data:       map[string][]byte{"token": []byte(base64.StdEncoding.EncodeToString(data))},
	}, metav1.CreateOptions{})
	return err
}

func writeLease(ctx context.Context, server *apiserver, number int) error {
	name, seconds, now := fmt.Sprintf("node-%05d", number), int32(40), metav1.NowMicro()
	_, err := server.client.CoordinationV1().Leases(packedNamespace).Create(ctx, &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: name, OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: name, UID: uuid.NewUUID()}}},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &name, LeaseDurationSeconds: &seconds, RenewTime: &now},
	}, metav1.CreateOptions{FieldManager: "kubelet"})
	return err
}

func writeEvent(ctx context.Context, server *apiserver, number int) error {
	pod, now := fmt.Sprintf("app-%03d-7c9d8b6f5d-%05d", number/10, number), metav1.NewTime(time.Now())
	_, err := server.client.CoreV1().Events(packedNamespace).Create(ctx, &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Name: fmt.Sprintf("%s.%016x", pod, number*7919)},
		InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: packedNamespace, Name: pod, UID: uuid.NewUUID(), APIVersion: "v1", ResourceVersion: fmt.Sprint(1000 + number)},
		Reason:         "Scheduled", Message: fmt.Sprintf("Successfully assigned %s/%s to node-%03d", packedNamespace, pod, number%100),
		Source: corev1.EventSource{Component: "default-scheduler"}, FirstTimestamp: now, LastTimestamp: now, Count: 1, Type: corev1.EventTypeNormal,
	}, metav1.CreateOptions{FieldManager: "kube-scheduler"})
	return err
}

// A definition with a schema of forty documented fields.
func writeDefinition(ctx context.Context, server *apiserver, number int) error {
	kind, fields := fmt.Sprintf("Thing%03d", number), ""
	for field := range 40 {
		if field > 0 {
			fields += ","
		}
		fields += fmt.Sprintf(`"field%02d":{"type":"string","maxLength":%d,"description":"Field number %d of what is wanted of the thing: its meaning depends on the ones before, and it may be left out."}`, field, 64+field, field)
	}
	plural := fmt.Sprintf("thing%03ds", number)
	body := fmt.Sprintf(`{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"%s.example.com"},
		"spec":{"group":"example.com","names":{"plural":"%s","singular":"thing%03d","kind":"%s","listKind":"%sList"},"scope":"Namespaced",
		"versions":[{"name":"v1","served":true,"storage":true,"schema":{"openAPIV3Schema":{"type":"object","properties":{"spec":{"type":"object","properties":{%s}}}}}}]}}`,
		plural, plural, number, kind, kind, fields)
	return server.client.CoreV1().RESTClient().Post().AbsPath("/apis/apiextensions.k8s.io/v1/customresourcedefinitions").
		SetHeader("Content-Type", "application/json").Body([]byte(body)).Do(ctx).Error()
}

func hexadecimal(bytes int) string {
	data := make([]byte, bytes)
	_, _ = rand.Read(data)
	return fmt.Sprintf("%x", data)
}
