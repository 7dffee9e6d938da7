{{- define "rangecache.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "rangecache.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else if contains (include "rangecache.name" .) .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "rangecache.name" .) | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "rangecache.selectorLabels" -}}
app.kubernetes.io/name: {{ include "rangecache.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* The component distinguishes rangecache's pods from the installer's. */ -}}
{{- define "rangecache.podSelectorLabels" -}}
{{ include "rangecache.selectorLabels" . }}
app.kubernetes.io/component: proxy
{{- end -}}

{{- /*
Labels of an object. Takes a dict of root, component, and labels, which the operator gives to this object alone. Labels that select
cannot be replaced.
*/ -}}
{{- define "rangecache.labels" -}}
{{- $labels := dict
  "app.kubernetes.io/part-of" "rangecache"
  "app.kubernetes.io/version" .root.Chart.AppVersion
  "app.kubernetes.io/managed-by" .root.Release.Service
  "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") -}}
{{- $selecting := include "rangecache.selectorLabels" .root | fromYaml -}}
{{- $_ := set $selecting "app.kubernetes.io/component" .component -}}
{{- mergeOverwrite $labels .root.Values.commonLabels (default dict .labels) $selecting | toYaml -}}
{{- end -}}

{{- /*
Name, namespace, labels and annotations of an object. Takes the dict of labels with suffix, which follows the release's name, or name
instead of both, and annotations, which the operator gives to this object alone.
*/ -}}
{{- define "rangecache.metadata" -}}
name: {{ default (printf "%s%s" (include "rangecache.fullname" .root) (default "" .suffix)) .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "rangecache.labels" . | nindent 2 }}
{{- with mergeOverwrite (dict) .root.Values.commonAnnotations (default dict .annotations) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Labels of a pod, without versions, which would replace pods that are equal otherwise. Takes the same dict. */ -}}
{{- define "rangecache.podLabels" -}}
{{- omit (include "rangecache.labels" . | fromYaml) "app.kubernetes.io/version" "app.kubernetes.io/managed-by" "helm.sh/chart" | toYaml -}}
{{- end -}}

{{- define "rangecache.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "rangecache.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "rangecache.imagePullSecrets" -}}
{{- with .Values.imagePullSecrets -}}
imagePullSecrets:
  {{- range . }}
  - name: {{ kindIs "string" . | ternary . (get (kindIs "string" . | ternary dict .) "name") }}
  {{- end }}
{{- end -}}
{{- end -}}

{{- define "rangecache.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ default $.Chart.AppVersion .tag }}{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Gives values of an older chart (`--reuse-values`) the defaults of the keys that they lack. files/values.yaml is values.yaml. */ -}}
{{- define "rangecache.fillValues" -}}
{{- include "rangecache.fill" (list .Values (.Files.Get "files/values.yaml" | fromYaml)) -}}
{{- end -}}

{{- define "rangecache.fill" -}}
{{- $values := index . 0 -}}
{{- range $key, $default := index . 1 -}}
{{- if not (hasKey $values $key) -}}
{{- $_ := set $values $key $default -}}
{{- else if and (kindIs "map" $default) (kindIs "map" (get $values $key)) -}}
{{- include "rangecache.fill" (list (get $values $key) $default) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* A size such as 1Gi in bytes; 0 if it has another form, which the schema refuses where it matters. */ -}}
{{- define "rangecache.bytes" -}}
{{- $text := kindIs "string" . | ternary . (. | int64 | toString) -}}
{{- $unit := regexFind "[A-Za-z]+$" $text -}}
{{- $factors := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000
  "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mulf (trimSuffix $unit $text) (default 0 (get $factors $unit)) | int64 -}}
{{- end -}}

{{- /* Bytes as the next whole number of Mi. */ -}}
{{- define "rangecache.mebibytes" -}}
{{ div (add (int64 .) 1048575) 1048576 }}Mi
{{- end -}}

{{- /*
The memory request is what the mirrors may take. The limit leaves room for what else takes memory: a third of that, but at
least the buffers, 256Mi for the program and watches (64Mi), and an eighth of the limit for connections.
*/ -}}
{{- define "rangecache.resources" -}}
{{- $cache := include "rangecache.bytes" .Values.cache.maxBytes | int64 -}}
{{- $rest := add (include "rangecache.bytes" .Values.buffers.maxBytes | int64) 268435456 -}}
{{- $watches := max 0 (sub (include "rangecache.bytes" (default "64Mi" .Values.watches.maxBytes) | int64) 67108864) -}}
{{- $limit := add (max (div (mul $cache 4) 3) (div (mul (add $cache $rest) 8) 7)) $watches -}}
{{- $derived := dict
  "requests" (dict "cpu" "100m" "memory" (include "rangecache.mebibytes" $cache))
  "limits" (dict "memory" (include "rangecache.mebibytes" $limit)) -}}
{{- $resources := mergeOverwrite $derived (deepCopy .Values.resources) -}}
{{- $memory := get (get $resources "limits" | default dict) "memory" -}}
{{- $given := include "rangecache.bytes" $memory | int64 -}}
{{- if and $given (lt $given $cache) -}}
{{- fail (printf "resources.limits.memory is %s, below cache.maxBytes (%s): the kernel would end the pod before its mirrors reach their bound; raise the limit, or lower cache.maxBytes" (toString $memory) (toString .Values.cache.maxBytes)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- /* Numbers of a Deployment or DaemonSet that are not Kubernetes' defaults. */ -}}
{{- define "rangecache.rollout" -}}
{{- range $field := list "minReadySeconds" "revisionHistoryLimit" }}
{{- $value := get $.Values $field }}
{{- if not (kindIs "invalid" $value) }}
{{ $field }}: {{ int64 $value }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* One node after another, each warm before the next: a cold cache reads everything from etcd once. */ -}}
{{- define "rangecache.updateStrategy" -}}
{{- default (dict "type" "RollingUpdate" "rollingUpdate" (dict "maxUnavailable" 1)) .Values.daemonSet.updateStrategy | toYaml -}}
{{- end -}}

{{- define "rangecache.hostNetwork" -}}
{{- if ne .Values.mode "deployment" -}}true{{- end -}}
{{- end -}}

{{- /* Where Prometheus finds the metrics. */ -}}
{{- define "rangecache.scrapedHost" -}}
{{- default (ternary "0.0.0.0" "127.0.0.1" (eq .Values.mode "deployment")) .Values.metrics.host -}}
{{- end -}}

{{- define "rangecache.scrapedPort" -}}
{{- ternary "metrics-tls" "metrics" (not (not .Values.metrics.tlsPort)) -}}
{{- end -}}

{{- /* Where the metrics are served in plaintext: beside TLS for the kubelet alone, which asks the pod's address or the host's loopback. */ -}}
{{- define "rangecache.metricsHost" -}}
{{- if and .Values.metrics.tlsPort (include "rangecache.hostNetwork" .) -}}
127.0.0.1
{{- else -}}
{{- include "rangecache.scrapedHost" . -}}
{{- end -}}
{{- end -}}

{{- define "rangecache.listenerHost" -}}
{{- default (ternary "0.0.0.0" "127.0.0.1" (eq .Values.mode "deployment")) .Values.listener.host -}}
{{- end -}}

{{- /* Address in URL notation: IPv6 in brackets. */ -}}
{{- define "rangecache.urlHost" -}}
{{- if contains ":" . -}}[{{ . }}]{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{- define "rangecache.isLoopback" -}}
{{- if or (hasPrefix "127." .) (eq "::1" .) (eq "localhost" .) -}}true{{- end -}}
{{- end -}}

{{- define "rangecache.endpoints" -}}
{{- if .Values.etcd.endpoints -}}
{{- join "," .Values.etcd.endpoints -}}
{{- else if eq .Values.mode "static-pod" -}}
https://127.0.0.1:2379
{{- else -}}
{{- fail "etcd.endpoints is needed: etcd's client URLs, for example --set 'etcd.endpoints={https://etcd.example:2379}'" -}}
{{- end -}}
{{- end -}}

{{- /*
Where the TLS files of one side come from, as JSON: kind (none, secret or hostPath), name (of the Secret, or the folder),
and the files. Takes a dict of root, side (etcd or listener), and kubeadm's names for the files of that side.
*/ -}}
{{- define "rangecache.tls" -}}
{{- $tls := (get .root.Values .side).tls -}}
{{- $files := dict "ca" "ca.crt" "cert" "tls.crt" "key" "tls.key" -}}
{{- $kind := "none" -}}{{- $name := "" -}}
{{- if and $tls.secretName $tls.hostPath -}}
{{- fail (printf "%s.tls.secretName and %s.tls.hostPath are both set: choose one" .side .side) -}}
{{- else if $tls.secretName -}}
{{- if eq .root.Values.mode "static-pod" -}}
{{- fail (printf "%s.tls.secretName cannot be used in mode static-pod: the kubelet reads no Secrets; put the files on the hosts and set %s.tls.hostPath" .side .side) -}}
{{- end -}}
{{- $kind = "secret" -}}{{- $name = $tls.secretName -}}
{{- else if $tls.hostPath -}}
{{- $kind = "hostPath" -}}{{- $name = $tls.hostPath -}}
{{- else if and (eq .root.Values.mode "static-pod") (.useKubeadm) -}}
{{- $kind = "hostPath" -}}{{- $name = "/etc/kubernetes/pki/etcd" -}}
{{- $files = dict "ca" "ca.crt" "cert" (printf "%s.crt" .kubeadm) "key" (printf "%s.key" .kubeadm) -}}
{{- end -}}
{{- dict "kind" $kind "name" $name
  "ca" (default $files.ca $tls.caFile) "cert" (default $files.cert $tls.certFile) "key" (default $files.key $tls.keyFile)
  | toJson -}}
{{- end -}}

{{- /* The endpoints with those of the fallback. */ -}}
{{- define "rangecache.allEndpoints" -}}
{{- join "," (concat (list (include "rangecache.endpoints" .)) .Values.etcd.fallbackEndpoints) -}}
{{- end -}}

{{- define "rangecache.etcdTls" -}}
{{- $https := contains "https://" (include "rangecache.allEndpoints" .) -}}
{{- $tls := include "rangecache.tls" (dict "root" . "side" "etcd" "kubeadm" "healthcheck-client" "useKubeadm" $https) -}}
{{- if and $https (eq (fromJson $tls).kind "none") -}}
{{- fail "etcd.endpoints or etcd.fallbackEndpoints has https:// URLs: set etcd.tls.secretName (keys ca.crt, tls.crt, tls.key) or etcd.tls.hostPath" -}}
{{- end -}}
{{- $tls -}}
{{- end -}}

{{- /* Clients of an open listener act with rangecache's own certificate, so it must be requested explicitly. */ -}}
{{- define "rangecache.listenerTls" -}}
{{- $open := .Values.listener.allowUnauthenticated -}}
{{- $tls := include "rangecache.tls" (dict "root" . "side" "listener" "kubeadm" "server" "useKubeadm" (not $open)) -}}
{{- if and (not $open) (or (eq (fromJson $tls).kind "none") (not .Values.listener.clientCertAuth)) -}}
{{- fail "every client that reaches the listener reads and writes etcd with rangecache's own certificate: set listener.tls.secretName or listener.tls.hostPath and keep listener.clientCertAuth, or set listener.allowUnauthenticated=true" -}}
{{- end -}}
{{- $tls -}}
{{- end -}}

{{- define "rangecache.listenerUrl" -}}
{{- $tls := include "rangecache.listenerTls" .root | fromJson -}}
{{ ternary "http" "https" (eq $tls.kind "none") }}://{{ include "rangecache.urlHost" (include "rangecache.listenerHost" .root) }}:{{ .port }}
{{- end -}}

{{- define "rangecache.clientUrl" -}}
{{- include "rangecache.listenerUrl" (dict "root" . "port" .Values.listener.port) -}}
{{- end -}}

{{- /* The repository's files of the installed version. */ -}}
{{- define "rangecache.blob" -}}
https://github.com/rangecache/rangecache/blob/v{{ .Chart.AppVersion }}
{{- end -}}

{{- /* How a monitor scrapes an endpoint. Takes a dict of root, monitor, its values, and relabelings, those before the operator's. */ -}}
{{- define "rangecache.scrape" -}}
interval: {{ .monitor.interval }}
{{- with default (ternary "https" "" (not (not .root.Values.metrics.tlsPort))) .monitor.scheme }}
scheme: {{ . }}
{{- end }}
{{- with .monitor.tlsConfig }}
tlsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .monitor.scrapeTimeout }}
scrapeTimeout: {{ . }}
{{- end }}
{{- with concat .relabelings .monitor.relabelings }}
relabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .monitor.metricRelabelings }}
metricRelabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Whether there is a Service for metrics: ServiceMonitors and the test of mode deployment need it. */ -}}
{{- define "rangecache.metricsService" -}}
{{- if or .Values.serviceMonitor.enabled (eq .Values.mode "deployment") -}}true{{- end -}}
{{- end -}}

{{- /* Names under which HTTP/1 requests without TLS are answered: those of the Services, and the operator's. */ -}}
{{- define "rangecache.hosts" -}}
{{- $hosts := list -}}
{{- $services := list -}}
{{- if eq .Values.mode "deployment" -}}
{{- $services = append $services (include "rangecache.fullname" .) -}}
{{- end -}}
{{- if include "rangecache.metricsService" . -}}
{{- $services = append $services (printf "%s-metrics" (include "rangecache.fullname" .)) -}}
{{- end -}}
{{- range $services -}}
{{- $inNamespace := printf "%s.%s" . $.Release.Namespace -}}
{{- $hosts = concat $hosts (list . $inNamespace (printf "%s.svc" $inNamespace)) -}}
{{- end -}}
{{- join "," (concat $hosts .Values.listener.hostWhitelist) -}}
{{- end -}}
