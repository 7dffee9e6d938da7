{{- /* rangecache's pod, the same in every mode. Takes the root; gives the spec. */ -}}
{{- define "rangecache.podSpec" -}}
{{- $host := include "rangecache.hostNetwork" . -}}
{{- include "rangecache.refuse" . -}}
{{- $static := eq .Values.mode "static-pod" -}}
{{- $deployment := eq .Values.mode "deployment" -}}
{{- $etcd := include "rangecache.etcdTls" . | fromJson -}}
{{- $listener := include "rangecache.listenerTls" . | fromJson -}}
{{- /* Static pods may not refer to objects of the API. */ -}}
{{- if not $static }}
serviceAccountName: {{ include "rangecache.serviceAccountName" . }}
{{- with include "rangecache.imagePullSecrets" . }}
{{- . | nindent 0 }}
{{- end }}
{{- end }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- if $host }}
hostNetwork: true
# etcd's names are resolved like the node's, without the cluster's DNS, which needs the apiserver.
dnsPolicy: Default
{{- end }}
{{- with include "rangecache.nameResolution" . }}
{{- . | trim | nindent 0 }}
{{- end }}
{{- with default (ternary "" "system-node-critical" $deployment) .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- if $static }}
# The kubelet reads no classes.
priority: {{ get (dict "system-node-critical" 2000001000 "system-cluster-critical" 2000000000) . | required (printf "priorityClassName: a static pod's is system-node-critical or system-cluster-critical, because the kubelet knows no other; not %s" .) | int64 }}
{{- end }}
{{- end }}
{{- /* A pod of a DaemonSet is replaced only when it has ended. */ -}}
{{- $preStop := ternary 0 .Values.shutdown.preStopSeconds (eq .Values.mode "daemonset") }}
terminationGracePeriodSeconds: {{ add .Values.shutdown.timeoutSeconds $preStop 5 }}
securityContext:
  {{- include "rangecache.podSecurityContext" . | nindent 2 }}
containers:
  - name: rangecache
    image: {{ include "rangecache.image" . | quote }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    args:
      {{- include "rangecache.args" . | trim | nindent 6 }}
    {{- with concat (include "rangecache.env" . | fromYamlArray) .Values.extraEnv }}
    env:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- /* In the host's network they would be ports of the host, which the kubelet gives to one pod only: two run side by side while one replaces the other. */ -}}
    {{- if not $static }}
    ports:
      - name: client
        containerPort: {{ .Values.listener.port }}
      {{- with .Values.listener.readOnlyPort }}
      - name: client-read
        containerPort: {{ . }}
      {{- end }}
      - name: metrics
        containerPort: {{ .Values.metrics.port }}
      {{- with .Values.metrics.tlsPort }}
      - name: metrics-tls
        containerPort: {{ . }}
      {{- end }}
    {{- end }}
    {{- with $preStop }}
    lifecycle:
      preStop:
        sleep:
          seconds: {{ . }}
    {{- end }}
    # Loading a large keyspace may take long: ten minutes, unless startupProbe says otherwise.
    startupProbe:
      {{- include "rangecache.probe" (dict "root" . "path" (ternary "/readyz" "/livez" (and $deployment .Values.deployment.waitForWarmth))) | nindent 6 }}
      {{- include "rangecache.withOverrides" (dict "fields" (dict "periodSeconds" 2 "failureThreshold" 300) "overrides" .Values.startupProbe) | nindent 6 }}
    # A cold rangecache still forwards, so a cold pod must stay in its Service; one that no member of etcd answers must not. The
    # readiness of pods in the host's network routes no traffic and therefore shows whether the mirrors are warm.
    readinessProbe:
      {{- include "rangecache.probe" (dict "root" . "path" (ternary "/servez" "/readyz" $deployment)) | nindent 6 }}
      {{- include "rangecache.withOverrides" (dict "fields" (dict "periodSeconds" 5 "timeoutSeconds" 3) "overrides" .Values.readinessProbe) | nindent 6 }}
    livenessProbe:
      {{- include "rangecache.probe" (dict "root" . "path" "/livez") | nindent 6 }}
      {{- include "rangecache.withOverrides" (dict "fields" (dict "periodSeconds" 10 "timeoutSeconds" 5 "failureThreshold" 6) "overrides" .Values.livenessProbe) | nindent 6 }}
    resources:
      {{- include "rangecache.resources" . | nindent 6 }}
    securityContext:
      {{- include "rangecache.securityContext" . | nindent 6 }}
    {{- with include "rangecache.volumeMounts" . | fromYamlArray }}
    volumeMounts:
      {{- toYaml . | nindent 6 }}
    {{- end }}
  {{- with .Values.extraContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with include "rangecache.volumes" . | fromYamlArray }}
volumes:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* User, group and volumes' group of the pod, unless the cluster assigns them. */ -}}
{{- define "rangecache.podSecurityContext" -}}
{{- $static := eq .Values.mode "static-pod" -}}
{{- $own := .Values.security -}}
{{- $user := kindIs "invalid" $own.runAsUser | ternary (ternary 0 65532 $static) $own.runAsUser | int64 -}}
{{- $group := kindIs "invalid" $own.runAsGroup | ternary $user $own.runAsGroup | int64 -}}
{{- $context := dict "runAsNonRoot" (ne $user 0) "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- if $own.setIds -}}
{{- $_ := set $context "runAsUser" $user -}}
{{- $_ := set $context "runAsGroup" $group -}}
{{- /* Makes the Secrets' files readable. */ -}}
{{- if not $static -}}{{- $_ := set $context "fsGroup" $group -}}{{- end -}}
{{- else if $static -}}
{{- fail "security.setIds=false: nothing assigns a user to a static pod" -}}
{{- else if not (and (kindIs "invalid" $own.runAsUser) (kindIs "invalid" $own.runAsGroup)) -}}
{{- fail "security.setIds=false leaves user and group to the cluster: it excludes security.runAsUser and security.runAsGroup" -}}
{{- end -}}
{{- include "rangecache.withOverrides" (dict "fields" $context "overrides" .Values.podSecurityContext) -}}
{{- end -}}

{{- define "rangecache.securityContext" -}}
{{- $context := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "capabilities" (dict "drop" (list "ALL")) -}}
{{- include "rangecache.withOverrides" (dict "fields" $context "overrides" .Values.securityContext) -}}
{{- end -}}

{{- /* Fields as YAML, those of the overrides instead of those before. */ -}}
{{- define "rangecache.withOverrides" -}}
{{- $fields := .fields -}}
{{- range $name, $value := .overrides -}}{{- $_ := set $fields $name $value -}}{{- end -}}
{{- toYaml $fields -}}
{{- end -}}

{{- /*
Files of the host that the flags name, as JSON, by volume. Each is a volume of its own: the folder may contain a CA's key.
*/ -}}
{{- define "rangecache.hostFiles" -}}
{{- $etcd := include "rangecache.etcdTls" . | fromJson -}}
{{- $listener := include "rangecache.listenerTls" . | fromJson -}}
{{- $files := dict -}}
{{- if eq $etcd.kind "hostPath" -}}
{{- $files = dict "etcd-ca" $etcd.ca "etcd-cert" $etcd.cert "etcd-key" $etcd.key -}}
{{- with .Values.etcd.passwordFile -}}{{- $_ := set $files "etcd-password" . -}}{{- end -}}
{{- end -}}
{{- if eq $listener.kind "hostPath" -}}
{{- $_ := set $files "listener-cert" $listener.cert -}}
{{- $_ := set $files "listener-key" $listener.key -}}
{{- if .Values.listener.clientCertAuth -}}
{{- $_ := set $files "listener-ca" $listener.ca -}}
{{- with .Values.listener.crlFile -}}{{- $_ := set $files "listener-crl" . -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- $found := dict -}}
{{- range $volume, $file := $files -}}
{{- $side := regexFind "^[a-z]+" $volume -}}
{{- $folder := ternary $etcd.name $listener.name (eq $side "etcd") -}}
{{- $_ := set $found $volume (dict "path" (printf "%s/%s" $folder $file) "mount" (printf "/etc/rangecache/%s/%s" $side $file)) -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{- /* Where the container finds the files that its flags name, as a list. */ -}}
{{- define "rangecache.volumeMounts" -}}
{{- $mounts := list -}}
{{- range $side := list "etcd" "listener" -}}
{{- if eq (include (printf "rangecache.%sTls" $side) $ | fromJson).kind "secret" -}}
{{- $mounts = append $mounts (dict "name" (printf "%s-tls" $side) "mountPath" (printf "/etc/rangecache/%s" $side) "readOnly" true) -}}
{{- end -}}
{{- end -}}
{{- range $volume, $file := include "rangecache.hostFiles" . | fromJson -}}
{{- $mounts = append $mounts (dict "name" $volume "mountPath" $file.mount "readOnly" true) -}}
{{- end -}}
{{- if .Values.cache.image.hostPath -}}
{{- $mounts = append $mounts (dict "name" "images" "mountPath" "/var/lib/rangecache") -}}
{{- end -}}
{{- /* A folder, so that the kubelet updates the file. */ -}}
{{- if .Values.flagsFile -}}
{{- $mounts = append $mounts (dict "name" "flags" "mountPath" "/etc/rangecache/flags" "readOnly" true) -}}
{{- end -}}
{{- concat $mounts .Values.extraVolumeMounts | toYaml -}}
{{- end -}}

{{- /* The volumes of these mounts, as a list. */ -}}
{{- define "rangecache.volumes" -}}
{{- $volumes := list -}}
{{- range $side := list "etcd" "listener" -}}
{{- $tls := include (printf "rangecache.%sTls" $side) $ | fromJson -}}
{{- if eq $tls.kind "secret" -}}
{{- /* 0440 */ -}}
{{- $secret := dict "secretName" $tls.name "defaultMode" 288 -}}
{{- $volumes = append $volumes (dict "name" (printf "%s-tls" $side) "secret" $secret) -}}
{{- end -}}
{{- end -}}
{{- range $volume, $file := include "rangecache.hostFiles" . | fromJson -}}
{{- $volumes = append $volumes (dict "name" $volume "hostPath" (dict "path" $file.path "type" "File")) -}}
{{- end -}}
{{- with .Values.cache.image.hostPath -}}
{{- $volumes = append $volumes (dict "name" "images" "hostPath" (dict "path" . "type" "DirectoryOrCreate")) -}}
{{- end -}}
{{- if .Values.flagsFile -}}
{{- $volumes = append $volumes (dict "name" "flags" "configMap" (dict "name" (printf "%s-flags" (include "rangecache.fullname" .)))) -}}
{{- end -}}
{{- concat $volumes .Values.extraVolumes | toYaml -}}
{{- end -}}

{{- /* The pod's name, which its status tells, and OpenTelemetry's variables for tracing.*, as a list. */ -}}
{{- define "rangecache.env" -}}
- name: K8S_POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- with .Values.tracing }}
{{- if .endpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ .endpoint | quote }}
- name: OTEL_EXPORTER_OTLP_PROTOCOL
  value: {{ .protocol | quote }}
- name: OTEL_TRACES_SAMPLER
  value: parentbased_traceidratio
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ .sampleRatio | quote }}
- name: K8S_NAMESPACE_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: K8S_NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
{{- end }}
{{- end }}
{{- end -}}

{{- /* Hosts' names, and DNS, as the operator sets them. */ -}}
{{- define "rangecache.nameResolution" -}}
{{- range $field := list "dnsConfig" "hostAliases" }}
{{- with get $.Values $field }}
{{ $field }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* Values that are valid alone, and that a kubelet, the apiserver or rangecache would refuse together. */ -}}
{{- define "rangecache.refuse" -}}
{{- $ports := dict -}}
{{- range $name, $port := dict "listener.port" .Values.listener.port "listener.readOnlyPort" .Values.listener.readOnlyPort "metrics.port" .Values.metrics.port "metrics.tlsPort" .Values.metrics.tlsPort -}}
{{- with $port -}}
{{- $key := int64 . | toString -}}
{{- with get $ports $key -}}
{{- fail (printf "%s and %s are both %s: they must differ" . $name $key) -}}
{{- end -}}
{{- $_ := set $ports $key $name -}}
{{- end -}}
{{- end -}}
{{- if and .Values.metrics.tlsPort (eq (include "rangecache.listenerTls" . | fromJson).kind "none") -}}
{{- fail "metrics.tlsPort has the listener's certificate: set listener.tls.secretName or listener.tls.hostPath" -}}
{{- end -}}
{{- /* The flags of another version are not known here. */ -}}
{{- if has .Values.image.tag (list "" .Chart.AppVersion) -}}
{{- $flags := .Files.Get "files/flags.txt" | splitList "\n" -}}
{{- range .Values.extraArgs -}}
{{- if not (has (splitList "=" . | first) $flags) -}}
{{- fail (printf "extraArgs: rangecache %s has no flag %s" $.Chart.AppVersion (splitList "=" . | first)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.mode "deployment" -}}
{{- $service := .Values.service -}}
{{- if and (has "IPv6" $service.ipFamilies) (not (and (contains ":" (include "rangecache.listenerHost" .)) (contains ":" (include "rangecache.scrapedHost" .)))) -}}
{{- fail "service.ipFamilies has IPv6: set listener.host and metrics.host to `::`, because rangecache listens on IPv4 alone by default" -}}
{{- end -}}
{{- range $field, $types := dict "externalTrafficPolicy" (list "NodePort" "LoadBalancer") "loadBalancerClass" (list "LoadBalancer") "loadBalancerSourceRanges" (list "LoadBalancer") -}}
{{- if and (get $service $field) (not (has $service.type $types)) -}}
{{- fail (printf "service.%s is of a Service of type %s: service.type is %s" $field (join " or " $types) $service.type) -}}
{{- end -}}
{{- end -}}
{{- $least := .Values.podDisruptionBudget.minAvailable -}}
{{- if and (not (kindIs "invalid" $least)) (or (eq (toString $least) "100%") (and (not (kindIs "string" $least)) (ge (int64 $least) (int64 .Values.deployment.replicas)))) -}}
{{- fail (printf "podDisruptionBudget.minAvailable is %v of deployment.replicas=%v: no node could be drained" $least .Values.deployment.replicas) -}}
{{- end -}}
{{- end -}}
{{- /* The kubelet runs a static pod without the apiserver, so that it refuses references to objects. */ -}}
{{- if eq .Values.mode "static-pod" -}}
{{- if .Values.extraContainers -}}
{{- fail "extraContainers: a static pod is rangecache alone, which an apiserver waits for; run them in a pod of their own" -}}
{{- end -}}
{{- range .Values.extraEnv -}}
{{- if hasKey . "valueFrom" -}}
{{- if or (hasKey .valueFrom "secretKeyRef") (hasKey .valueFrom "configMapKeyRef") -}}
{{- fail (printf "extraEnv: %s refers to an object, which a static pod cannot do; write its value" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range .Values.extraVolumes -}}
{{- if not (or (hasKey . "hostPath") (hasKey . "emptyDir")) -}}
{{- fail (printf "extraVolumes: a static pod cannot use the volume %s; use a hostPath or an emptyDir" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "rangecache.args" -}}
{{- $etcd := include "rangecache.etcdTls" . | fromJson -}}
{{- $listener := include "rangecache.listenerTls" . | fromJson -}}
{{- if and .Values.listener.crlFile (or (eq $listener.kind "none") (not .Values.listener.clientCertAuth)) }}
{{- fail "listener.crlFile revokes clients' certificates: it needs listener.tls and listener.clientCertAuth" }}
{{- end }}
- --endpoints={{ include "rangecache.endpoints" . }}
{{- with .Values.etcd.fallbackEndpoints }}
- --fallback-endpoints={{ join "," . }}
{{- end }}
{{- if ne $etcd.kind "none" }}
- --cacert=/etc/rangecache/etcd/{{ $etcd.ca }}
- --cert=/etc/rangecache/etcd/{{ $etcd.cert }}
- --key=/etc/rangecache/etcd/{{ $etcd.key }}
{{- end }}
{{- with .Values.etcd.user }}
- {{ printf "--user=%s" . | quote }}
{{- end }}
{{- if ne (not .Values.etcd.user) (not .Values.etcd.passwordFile) }}
{{- fail "etcd.user and etcd.passwordFile must be set together" }}
{{- end }}
{{- with .Values.etcd.passwordFile }}
{{- if eq $etcd.kind "none" }}
{{- fail "etcd.passwordFile is in the same place as the certificate: set etcd.tls.secretName or etcd.tls.hostPath" }}
{{- end }}
- --password-file=/etc/rangecache/etcd/{{ . }}
{{- end }}
{{- if eq .Values.etcd.callerIs "certificate" }}
{{- if or (eq $etcd.kind "none") (eq $listener.kind "none") (not .Values.listener.clientCertAuth) .Values.etcd.user }}
{{- fail "etcd.callerIs=certificate needs etcd.tls, and listener.tls with listener.clientCertAuth; and it excludes etcd.user" }}
{{- end }}
{{- end }}
{{- with .Values.etcd.callerIs }}
- --caller-is={{ . }}
{{- end }}
- --listen-client-urls={{ include "rangecache.clientUrl" . }}
{{- with .Values.listener.readOnlyPort }}
- --read-only-listen-client-urls={{ include "rangecache.listenerUrl" (dict "root" $ "port" .) }}
{{- end }}
{{- if ne $listener.kind "none" }}
- --cert-file=/etc/rangecache/listener/{{ $listener.cert }}
- --key-file=/etc/rangecache/listener/{{ $listener.key }}
{{- if .Values.listener.clientCertAuth }}
- --trusted-ca-file=/etc/rangecache/listener/{{ $listener.ca }}
- --client-cert-auth
{{- with .Values.listener.crlFile }}
- --client-crl-file=/etc/rangecache/listener/{{ . }}
{{- end }}
{{- end }}
{{- else if not (include "rangecache.isLoopback" (include "rangecache.listenerHost" .)) }}
- --allow-plaintext-listener
{{- end }}
{{- /* The installer asks the first one. */}}
{{- $metrics := list (printf "http://%s:%v" (include "rangecache.urlHost" (include "rangecache.metricsHost" .)) .Values.metrics.port) }}
{{- with .Values.metrics.tlsPort }}
{{- $metrics = append $metrics (printf "https://%s:%v" (include "rangecache.urlHost" (include "rangecache.scrapedHost" $)) .) }}
{{- end }}
- --listen-metrics-urls={{ join "," $metrics }}
{{- with include "rangecache.hosts" . }}
- {{ printf "--host-whitelist=%s" . | quote }}
{{- end }}
{{- with .Values.listener.advertiseUrls }}
- {{ printf "--advertise-client-urls=%s" (join "," .) | quote }}
{{- end }}
{{- with .Values.listener.cors }}
- {{ printf "--cors=%s" (join "," .) | quote }}
{{- end }}
{{- range .Values.cache.prefixes }}
- {{ printf "--cache-prefix=%s" . | quote }}
{{- end }}
{{- range .Values.cache.excludePrefixes }}
- {{ printf "--no-cache-prefix=%s" . | quote }}
{{- end }}
- --cache-max-bytes={{ include "rangecache.bytes" .Values.cache.maxBytes }}
{{- with .Values.cache.warmFrom }}
- {{ printf "--warm-from=%s" (join "," .) | quote }}
{{- end }}
{{- with .Values.cache.image }}
{{- if .hostPath }}
- --image-dir=/var/lib/rangecache
{{- with .maxBytes }}
- --image-max-bytes={{ include "rangecache.bytes" . }}
{{- end }}
{{- with .maxBytesPerSecond }}
- --image-max-bytes-per-second={{ include "rangecache.bytes" . }}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.cache.historyMaxAge }}
- --history-max-age={{ . }}
{{- end }}
{{- with .Values.cache.historyMaxBytes }}
- --history-max-bytes={{ include "rangecache.bytes" . }}
{{- end }}
{{- with .Values.cache.serveStale }}
- --serve-stale={{ . }}
{{- end }}
{{- with .Values.cache.whenBehind }}
- --when-behind={{ . }}
{{- end }}
{{- if not (kindIs "invalid" .Values.metrics.clientsTop) }}
- --client-metrics-top={{ int64 .Values.metrics.clientsTop }}
{{- end }}
{{- if not (kindIs "invalid" .Values.metrics.prefixesTop) }}
- --prefix-metrics-top={{ int64 .Values.metrics.prefixesTop }}
{{- end }}
{{- with .Values.watches.cache }}
- --watch-cache={{ . }}
{{- end }}
{{- with .Values.watches.maxBytes }}
- --watch-max-bytes={{ include "rangecache.bytes" . }}
{{- end }}
{{- with .Values.watches.progressNotifyInterval }}
- --watch-progress-notify-interval={{ . }}
{{- end }}
- --buffer-max-bytes={{ include "rangecache.bytes" .Values.buffers.maxBytes }}
{{- with .Values.limits.maxConnections }}
- --max-connections={{ int64 . }}
{{- end }}
{{- with .Values.limits.maxConnectionsPerAddress }}
- --max-connections-per-address={{ int64 . }}
{{- end }}
{{- with .Values.limits.maxConcurrentStreams }}
- --max-concurrent-streams={{ int64 . }}
{{- end }}
{{- with .Values.limits.maxCalls }}
- --max-calls={{ int64 . }}
{{- end }}
{{- with .Values.limits.requestTimeout }}
- --request-timeout={{ . }}
{{- end }}
- --shutdown-timeout={{ .Values.shutdown.timeoutSeconds }}s
- --log-format={{ .Values.log.format }}
{{- with .Values.log.level }}
- {{ printf "--log-level=%s" . | quote }}
{{- end }}
{{- with .Values.log.access }}
{{- if .enabled }}
- --access-log=-
- --access-log-sample={{ .sample }}
- --access-log-keys={{ .keys }}
{{- end }}
{{- end }}
{{- if eq .Values.mode "static-pod" }}
# The next pod listens before this one ends.
- --socket-reuse-port
{{- end }}
{{- if .Values.flagsFile }}
- --flags-file=/etc/rangecache/flags/flags.env
{{- end }}
{{- range .Values.extraArgs }}
{{- if and (eq $.Values.mode "static-pod") (regexMatch "^--(socket-reuse-port|reuse-port|manifests-dir|manifest-name|manifest|ready-timeout|attempt|force)(=|$)" .) }}
{{- fail (printf "extraArgs: %s is given by the chart in mode static-pod, or is no flag of a server; see staticPod" .) }}
{{- end }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{- /* In the host's network the kubelet must ask where the metrics are served; elsewhere it asks the pod's address. */ -}}
{{- define "rangecache.probe" -}}
httpGet:
  path: {{ .path }}
  port: {{ .root.Values.metrics.port }}
  {{- if include "rangecache.hostNetwork" .root }}
  host: {{ include "rangecache.metricsHost" .root | replace "0.0.0.0" "127.0.0.1" | quote }}
  {{- end }}
{{- end -}}

{{- /* Where pods go in the host modes: null means the control plane. */ -}}
{{- define "rangecache.placement" -}}
{{- $host := include "rangecache.hostNetwork" . -}}
{{- $selector := .Values.nodeSelector -}}
{{- $tolerations := .Values.tolerations -}}
{{- $affinity := .Values.affinity -}}
{{- /* The label's value is empty with kubeadm, and "true" with k3s and RKE2. */ -}}
{{- if and $host (kindIs "invalid" $selector) -}}
{{- $exists := dict "key" "node-role.kubernetes.io/control-plane" "operator" "Exists" -}}
{{- $terms := list (dict "matchExpressions" (list $exists)) -}}
{{- $required := dict "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms) -}}
{{- $affinity = mergeOverwrite (dict "nodeAffinity" $required) (deepCopy $affinity) -}}
{{- end -}}
{{- /* RKE2 taints with CriticalAddonsOnly and node-role.kubernetes.io/etcd, others with keys of their own. */ -}}
{{- if and (eq .Values.mode "static-pod") (kindIs "invalid" $tolerations) -}}
{{- $tolerations = list (dict "operator" "Exists") -}}
{{- else if and $host (kindIs "invalid" $tolerations) -}}
{{- $tolerations = list (dict "key" "node-role.kubernetes.io/control-plane" "operator" "Exists" "effect" "NoSchedule") -}}
{{- end -}}
{{- with $selector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
