package chart

import (
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

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
		{"--set", "image.digest=" + digest, "--set", "security.runAsUser=65532", "--set", "extraEnv[0].name=RANGECACHE_TRACE_SAMPLE", "--set-string", "extraEnv[0].value=0.5"},
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
