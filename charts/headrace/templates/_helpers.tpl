{{- define "headrace.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "headrace.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "headrace.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "headrace.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Name of a component's objects. Takes (list $ "gateway"). */}}
{{- define "headrace.componentName" -}}
{{- printf "%s-%s" (include "headrace.fullname" (index . 0)) (index . 1) }}
{{- end }}

{{/* Never changed and never versioned: a Deployment's selector is immutable. Takes (list $ "gateway"). */}}
{{- define "headrace.selectorLabels" -}}
app.kubernetes.io/name: {{ include "headrace.name" (index . 0) }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Labels of pods: nothing versioned, so that an upgrade restarts only what it changes. Takes (list $ "gateway"). */}}
{{- define "headrace.podLabels" -}}
{{- $own := include "headrace.selectorLabels" . | fromYaml -}}
{{- merge $own (dict "app.kubernetes.io/part-of" "headrace") (index . 0).Values.commonLabels | toYaml }}
{{- end }}

{{/* Labels of objects. Takes (list $ "gateway"). */}}
{{- define "headrace.labels" -}}
{{- $root := index . 0 -}}
{{- $release := dict
      "app.kubernetes.io/managed-by" $root.Release.Service
      "app.kubernetes.io/version" $root.Chart.AppVersion
      "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_") -}}
{{- merge $release (include "headrace.podLabels" . | fromYaml) | toYaml }}
{{- end }}

{{/* Image of one of the three targets of the Dockerfile. Takes (list $ "gateway"). */}}
{{- define "headrace.image" -}}
{{- $root := index . 0 -}}
{{- printf "%s-%s:%s" $root.Values.image.repository (index . 1) (default $root.Chart.AppVersion $root.Values.image.tag) }}
{{- end }}

{{- define "headrace.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Restricted Pod Security for a pod; the user exists in the images. */}}
{{- define "headrace.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "headrace.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Where pods may run. Takes a component's values. */}}
{{- define "headrace.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/* Settings as environment variables; what is null or empty is left out. Takes (dict "prefix" "HEADRACE_GATEWAY_" "settings" {...}). */}}
{{- define "headrace.settingsEnv" -}}
{{- $prefix := .prefix -}}
{{- range $name, $value := .settings }}
{{- if not (or (kindIs "invalid" $value) (and (kindIs "map" $value) (not $value)) (eq (toString $value) "")) }}
- name: {{ printf "%s%s" $prefix (upper $name) }}
  value: {{ include "headrace.settingText" $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* A size as a number of bytes: (dict "text" 64MiB), as settings of processes are read; with "redis" true as Redis reads it. */}}
{{- define "headrace.bytes" -}}
{{- $text := include "headrace.settingText" .text | lower | nospace -}}
{{- $number := regexFind "^[0-9.]+" $text -}}
{{- $thousand := ternary 1024.0 1000.0 (default false .redis) -}}
{{- $powers := dict "k" 1 "m" 2 "g" 3 "t" 4 -}}
{{- $unit := trimPrefix $number $text -}}
{{- if hasSuffix "ib" $unit }}{{ $thousand = 1024.0 }}{{ end -}}
{{- $bytes := float64 $number -}}
{{- range until (int (get $powers (trunc 1 $unit) | default 0)) }}{{ $bytes = mulf $bytes $thousand }}{{ end -}}
{{- int64 (floor $bytes) -}}
{{- end }}

{{/* What one tenant may leave in the bundled Redis: a sixth of it. Empty: the gateway's own default. */}}
{{- define "headrace.tenantStoreBytes" -}}
{{- if eq .Values.redis.mode "bundled" -}}
{{- div (include "headrace.bytes" (dict "text" .Values.redis.bundled.maxMemory "redis" true) | int64) 6 -}}
{{- end -}}
{{- end }}

{{/* One value as a setting's text: maps and lists as JSON, whole numbers without an exponent. */}}
{{- define "headrace.settingText" -}}
{{- if or (kindIs "map" .) (kindIs "slice" .) -}}
{{ toJson . }}
{{- else if and (kindIs "float64" .) (eq (floor .) .) -}}
{{ int64 . }}
{{- else -}}
{{ . }}
{{- end -}}
{{- end }}

{{- define "headrace.redis.secretName" -}}
{{- if eq .Values.redis.mode "external" }}
{{- default (include "headrace.componentName" (list . "redis")) .Values.redis.external.existingSecret }}
{{- else }}
{{- default (include "headrace.componentName" (list . "redis")) .Values.redis.bundled.existingSecret }}
{{- end }}
{{- end }}

{{/* Of a role that may have a Redis user of its own: list of the context and "", "engine" or "operator". */}}
{{- define "headrace.redis.secretKey" -}}
{{- $redis := (index . 0).Values.redis }}
{{- if and (eq $redis.mode "external") $redis.external.existingSecret }}
{{- $own := index . 1 }}
{{- $key := "" }}
{{- if eq $own "engine" }}{{ $key = $redis.external.engineSecretKey }}{{ end }}
{{- if eq $own "operator" }}{{ $key = $redis.external.operatorSecretKey }}{{ end }}
{{- default $redis.external.existingSecretKey $key }}
{{- else if and (include "headrace.redis.users" (index . 0)) (ne (index . 1) "engine") }}
{{- printf "%s-url" (default "gateway" (index . 1)) }}
{{- else }}
{{- "url" }}
{{- end }}
{{- end }}

{{/* Not empty where the bundled server has a user for each role and model. */}}
{{- define "headrace.redis.users" -}}
{{- if and (eq .Values.redis.mode "bundled") .Values.redis.bundled.usersByModel .Values.operator.enabled (not .Values.redis.bundled.existingSecret) }}true{{ end }}
{{- end }}

{{/* Not empty where the bundled Redis is three servers with Sentinels. */}}
{{- define "headrace.redis.sentinel" -}}
{{- if and (eq .Values.redis.mode "bundled") .Values.redis.bundled.sentinel.enabled }}true{{ end -}}
{{- end }}

{{/* Names of the pods of the bundled Redis. */}}
{{- define "headrace.redis.pods" -}}
{{- $name := include "headrace.componentName" (list . "redis") -}}
{{- range until (ternary 3 1 (eq (include "headrace.redis.sentinel" .) "true")) }}
- {{ printf "%s-%d" $name . }}
{{- end }}
{{- end }}

{{/* URL of the bundled Redis. Takes (list $ "user:password@"). */}}
{{- define "headrace.redis.bundledUrl" -}}
{{- $root := index . 0 -}}
{{- if include "headrace.redis.sentinel" $root -}}
{{- $hosts := list -}}
{{- range include "headrace.redis.pods" $root | fromYamlArray -}}
{{- $hosts = append $hosts (printf "%s.%s.svc:26379" . $root.Release.Namespace) -}}
{{- end -}}
{{- printf "redis+sentinel://%s%s/headrace/0" (index . 1) (join "," $hosts) -}}
{{- else -}}
{{- printf "redis://%s%s.%s.svc:6379/0" (index . 1) (include "headrace.componentName" (list $root "redis")) $root.Release.Namespace -}}
{{- end -}}
{{- end }}

{{/* Ports of the bundled Redis. */}}
{{- define "headrace.redis.bundledPorts" -}}
- {port: 6379, protocol: TCP}
{{- if include "headrace.redis.sentinel" . }}
- {port: 26379, protocol: TCP}
{{- end }}
{{- end }}

{{/* Its roles' users without their passwords, as files. */}}
{{- define "headrace.redis.acl" -}}
{{- if include "headrace.redis.users" . }}
{{- range list "gateway" "operator" }}
{{ . }}.acl: |
  {{- $.Files.Get (printf "files/acl/%s.acl" .) | trim | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{/* What the bundled server's container does before it starts it: its place among others, the users that the chart knows, and those that the operator has made. */}}
{{- define "headrace.redis.prepare" -}}
umask 077
{{- if include "headrace.redis.sentinel" . }}
sh /etc/redis/sentinel.sh place
{{- end }}
{{- if include "headrace.redis.users" . }}
{
  printf 'user default on ~* &* +@all >%s\n' "$REDIS_PASSWORD"
  printf '%s >%s\n' "$(cat /etc/redis/gateway.acl)" "$GATEWAY_PASSWORD"
  printf '%s >%s\n' "$(cat /etc/redis/operator.acl)" "$OPERATOR_PASSWORD"
  if test -f /data/users.acl; then grep '^user headrace-engine\.' /data/users.acl || true; fi
} > /data/users.acl.new
mv /data/users.acl.new /data/users.acl
unset REDIS_PASSWORD REDISCLI_AUTH GATEWAY_PASSWORD OPERATOR_PASSWORD
{{- else }}
printf 'requirepass "%s"\n' "$(printf %s "$REDIS_PASSWORD" | sed 's/[\\"]/\\&/g')" > /run/redis/auth.conf
unset REDIS_PASSWORD REDISCLI_AUTH
{{- end }}
{{- end }}

{{/* The URL without a password of an external server, with its CA where there is one. */}}
{{- define "headrace.redis.externalUrl" -}}
{{- $external := .Values.redis.external -}}
{{- $external.url -}}
{{- if $external.caSecret -}}
{{- ternary "&" "?" (contains "?" $external.url) -}}ssl_ca_certs=/etc/headrace/redis-ca/ca.crt
{{- end -}}
{{- end }}

{{/* Rolls pods when the values point them to another Redis. */}}
{{- define "headrace.redis.checksum" -}}
{{- $redis := .Values.redis -}}
{{- $used := ternary (toJson $redis.external) $redis.bundled.existingSecret (eq $redis.mode "external") -}}
{{- printf "%s %s%s%s" $redis.mode $used (include "headrace.redis.users" .) (include "headrace.redis.sentinel" . | replace "true" "sentinel") | sha256sum | trunc 16 }}
{{- end }}

{{- define "headrace.otlpEndpoint" -}}
{{- if .Values.telemetry.otlpEndpoint }}
{{- .Values.telemetry.otlpEndpoint }}
{{- else if .Values.otelCollector.enabled }}
{{- printf "http://%s.%s.svc:4318" (include "headrace.componentName" (list . "otel-collector")) .Release.Namespace }}
{{- end }}
{{- end }}

{{/* OTEL_* of a process, as environment variables. */}}
{{- define "headrace.otelEnv" -}}
{{- $endpoint := include "headrace.otlpEndpoint" . -}}
{{- if $endpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ $endpoint | quote }}
- name: OTEL_METRICS_EXPORTER
  value: {{ ternary "otlp" "none" .Values.telemetry.otlpMetrics }}
- name: OTEL_TRACES_SAMPLER
  value: parentbased_traceidratio
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ .Values.telemetry.traceRatio | quote }}
{{- end }}
{{- end }}

{{/* "true" where objects of the Prometheus operator are wanted. */}}
{{- define "headrace.prometheusOperator" -}}
{{- $wanted := .Values.monitoring.prometheusOperator -}}
{{- if or (eq (toString $wanted) "true") (and (eq (toString $wanted) "auto") (.Capabilities.APIVersions.Has "monitoring.coreos.com/v1")) -}}
true
{{- end -}}
{{- end }}

{{/* Peers that may scrape metrics: the release's namespace and the named ones. */}}
{{- define "headrace.metricsFrom" -}}
- podSelector: {}
{{- range .Values.networkPolicy.metricsNamespaces }}
- namespaceSelector:
    matchLabels: {kubernetes.io/metadata.name: {{ . }}}
{{- end }}
{{- end }}

{{/* Egress that every component needs: names, Redis, traces. */}}
{{- define "headrace.egress.dns" -}}
- to:
    - namespaceSelector: {}
    - ipBlock: {cidr: 169.254.20.10/32}
  ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end }}

{{- define "headrace.egress.redis" -}}
{{- if eq .Values.redis.mode "bundled" -}}
- to:
    - podSelector:
        matchLabels:
          {{- include "headrace.selectorLabels" (list . "redis") | nindent 10 }}
  ports:
    {{- include "headrace.redis.bundledPorts" . | nindent 4 }}
{{- else -}}
- ports:
    {{- range prepend .Values.redis.external.morePorts .Values.redis.external.port }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
  to:
    {{- range .Values.redis.external.cidrs }}
    - ipBlock: {cidr: {{ . | quote }}}
    {{- else }}
    {{- include "headrace.anywhere" . | nindent 4 }}
    {{- end }}
{{- end }}
{{- end }}

{{/* The port of a URL, given or by its scheme. */}}
{{- define "headrace.urlPort" -}}
{{- $default := ternary "443" "80" (hasPrefix "https:" .) -}}
{{- regexFind ":[0-9]+$" (urlParse .).host | trimPrefix ":" | default $default }}
{{- end }}

{{- define "headrace.egress.otlp" -}}
{{- if .Values.telemetry.otlpEndpoint -}}
{{ include "headrace.egress.port" (include "headrace.urlPort" .Values.telemetry.otlpEndpoint) }}
{{- else if .Values.otelCollector.enabled -}}
- to:
    - podSelector:
        matchLabels:
          {{- include "headrace.selectorLabels" (list . "otel-collector") | nindent 10 }}
  ports:
    - {port: 4318, protocol: TCP}
{{- end }}
{{- end }}

{{/* Anywhere but link-local addresses, where clouds keep credentials. */}}
{{- define "headrace.anywhere" -}}
- ipBlock: {cidr: 0.0.0.0/0, except: [169.254.0.0/16]}
- ipBlock: {cidr: "::/0", except: ["fe80::/10", "fd00:ec2::254/128"]}
{{- end }}

{{/* "true" where a model of the gateways' settings is fetched from a hub. */}}
{{- define "headrace.gateway.fetches" -}}
{{- $settings := .Values.gateway.settings -}}
{{- range concat (list $settings.model) (values $settings.extra_models) -}}
{{- if not (or (empty .) (hasPrefix "/" .) (has . (list "headrace-demo" "headrace-demo-embeddings" "headrace-demo-vision"))) -}}true{{- end -}}
{{- end -}}
{{- end }}

{{/* A hub outside the cluster. */}}
{{- define "headrace.egress.https" -}}
- to:
    {{- include "headrace.anywhere" . | nindent 4 }}
  ports:
    - {port: 443, protocol: TCP}
{{- end }}

{{/* A server that only a name or URL tells, in the cluster or outside. Takes its port. */}}
{{- define "headrace.egress.port" -}}
- to:
    - namespaceSelector: {}
    {{- include "headrace.anywhere" . | nindent 4 }}
  ports:
    - {port: {{ . }}, protocol: TCP}
{{- end }}

{{/* All that is wrong with the values at once, each with what would mend it. */}}
{{- define "headrace.validate" -}}
{{- $problems := list -}}
{{- if not .Values.image.repository -}}
{{- $problems = append $problems "image.repository is empty, and nobody publishes these images: build them with make images IMAGE_LOAD=\"kind load docker-image\" (or what gives images to your nodes) and set image.repository=headrace, or push them with make push REGISTRY=registry.example.com/team and set image.repository=registry.example.com/team/headrace" -}}
{{- end -}}
{{- $external := .Values.redis.external -}}
{{- if eq .Values.redis.mode "external" -}}
{{- if not (or $external.url $external.existingSecret) -}}
{{- $problems = append $problems "redis.external has neither url nor existingSecret: set redis.external.existingSecret to a Secret that holds the URL" -}}
{{- end -}}
{{- if and $external.url $external.existingSecret -}}
{{- $problems = append $problems "redis.external has both url and existingSecret: leave one empty" -}}
{{- end -}}
{{- if regexMatch "://[^/]*@|[?&][a-z_]*password=" $external.url -}}
{{- $problems = append $problems "redis.external.url holds a password, which would be readable in the release: put the URL into a Secret and set redis.external.existingSecret" -}}
{{- end -}}
{{- if and $external.caSecret $external.url (not (hasPrefix "rediss" $external.url)) -}}
{{- $problems = append $problems "redis.external.caSecret is for TLS: begin redis.external.url with rediss" -}}
{{- end -}}
{{- end -}}
{{- if .Values.redis.bundled.sentinel.enabled -}}
{{- if eq .Values.redis.mode "external" -}}
{{- $problems = append $problems "redis.bundled.sentinel.enabled is for the bundled Redis, and redis.mode is external: leave redis.bundled.sentinel.enabled=false (a URL like redis+sentinel://HOST1,HOST2/MASTER/0 leads to Sentinels of your own)" -}}
{{- end -}}
{{- $name := include "headrace.componentName" (list . "redis") -}}
{{- $policy := dig "spec" "podManagementPolicy" "Parallel" (lookup "apps/v1" "StatefulSet" .Release.Namespace $name | default dict) -}}
{{- if ne $policy "Parallel" -}}
{{- $problems = append $problems (printf "redis.bundled.sentinel.enabled needs a StatefulSet that starts its pods at once, and %s is %s, which cannot be changed: kubectl -n %s delete statefulset %s --cascade=orphan, which leaves its pod running, and upgrade again" $name $policy .Release.Namespace $name) -}}
{{- end -}}
{{- with .Values.redis.bundled.existingSecret -}}
{{- $url := dig "data" "url" "" (lookup "v1" "Secret" $.Release.Namespace . | default dict) | b64dec -}}
{{- if and $url (not (hasPrefix "redis+sentinel://" $url)) -}}
{{- $problems = append $problems (printf "redis.bundled.sentinel.enabled needs the URL of the Sentinels in redis.bundled.existingSecret: set its key url to %s" (include "headrace.redis.bundledUrl" (list $ ":PASSWORD@"))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $scaling := .Values.gateway.autoscaling -}}
{{- if $scaling.enabled -}}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) -}}
{{- $problems = append $problems "gateway.autoscaling.minReplicas is above maxReplicas: lower the one or raise the other" -}}
{{- end -}}
{{- if not (or $scaling.targetCPUUtilizationPercentage $scaling.targetRequestsInFlight) -}}
{{- $problems = append $problems "gateway.autoscaling has no target: set gateway.autoscaling.targetCPUUtilizationPercentage" -}}
{{- end -}}
{{- if and $scaling.targetCPUUtilizationPercentage (not (dig "requests" "cpu" "" .Values.gateway.resources)) -}}
{{- $problems = append $problems "gateway.autoscaling aims at CPU and the pods request none: set gateway.resources.requests.cpu" -}}
{{- end -}}
{{- end -}}
{{- $settings := .Values.gateway.settings -}}
{{- range list "served_model_name" "revision" "chat_template" -}}
{{- if and (get $settings .) (not $settings.model) -}}
{{- $problems = append $problems (printf "gateway.settings.%s is of a model that the settings name and they name none: set gateway.settings.model, or the ModelService's own fields instead" .) -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.redis.mode "bundled" -}}
{{- $most := div (include "headrace.bytes" (dict "text" .Values.redis.bundled.maxMemory "redis" true) | int64) 4 -}}
{{- range list "max_tenant_store_bytes" "max_file_bytes" "max_stored_bytes" "max_kept_embedding_bytes" "max_batch_output_bytes" "max_tenant_image_bytes" -}}
{{- $asked := get $settings . -}}
{{- if and $asked (gt (include "headrace.bytes" (dict "text" $asked) | int64) $most) -}}
{{- $problems = append $problems (printf "gateway.settings.%s is over a quarter of redis.bundled.maxMemory, so that few tenants could fill Redis: lower it to at most %d bytes, or raise redis.bundled.maxMemory with the pod's memory" . $most) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $keys := .Values.gateway.apiKeys -}}
{{- if and $keys.enabled (not $keys.existingSecret) -}}
{{- $problems = append $problems "gateway.apiKeys is enabled and no keys are given: make a Secret with headrace keys create ID --secret NAME and name it in gateway.apiKeys.existingSecret" -}}
{{- end -}}
{{- if and $keys.existingSecret (not $keys.enabled) -}}
{{- $problems = append $problems "gateway.apiKeys.existingSecret is given, but everybody may ask: set gateway.apiKeys.enabled=true" -}}
{{- end -}}
{{- if and .Values.usageExport.enabled (not .Values.usageExport.url) -}}
{{- $problems = append $problems "usageExport has no server to send to: set usageExport.url" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- $problems = append $problems "httpRoute has no gateway to attach to: set httpRoute.parentRefs" -}}
{{- end -}}
{{- if and .Values.ingress.tlsSecret (not .Values.ingress.hosts) -}}
{{- $problems = append $problems "ingress.tlsSecret needs host names: set ingress.hosts" -}}
{{- end -}}
{{- if $problems -}}
{{- fail (printf "\n- %s" (join "\n- " $problems)) -}}
{{- end -}}
{{- end }}

{{/* Labels that the operator gives every engine pod. */}}
{{- define "headrace.engineLabels" -}}
app.kubernetes.io/name: headrace-engine
app.kubernetes.io/managed-by: headrace-operator
{{- end }}

{{- define "headrace.redis.config" -}}
bind * -::*
port 6379
dir /data
# Every write is in the file within a second; no snapshots beside it.
appendonly {{ ternary "yes" "no" .Values.redis.bundled.persistence.enabled }}
appendfsync everysec
save ""
# A full server refuses requests. It must never drop one that was accepted.
maxmemory {{ .Values.redis.bundled.maxMemory }}
maxmemory-policy noeviction
tcp-keepalive 60
{{- if include "headrace.redis.sentinel" . }}
# A master that no replica follows takes no writes: they would be lost after a failover.
min-replicas-to-write 1
min-replicas-max-lag 3
repl-diskless-sync-delay 0
# Written by the container before the start.
include /run/redis/place.conf
{{- end }}
# Written by the container before the start, from the Secret.
{{- if include "headrace.redis.users" . }}
# The operator adds a user for each ModelService.
aclfile /data/users.acl
{{- else }}
include /run/redis/auth.conf
{{- end }}
{{- end }}

{{/* Everything that the bundled servers read, as text. */}}
{{- define "headrace.redis.files" -}}
{{- include "headrace.redis.config" . }}{{ include "headrace.redis.acl" . -}}
{{- if include "headrace.redis.sentinel" . -}}
{{- include "headrace.redis.sentinelConfig" . }}{{ .Files.Get "files/redis/sentinel.sh" -}}
{{- end -}}
{{- end }}

{{/* Environment variables of files/redis/sentinel.sh. */}}
{{- define "headrace.redis.place" -}}
{{- $servers := list -}}
{{- range include "headrace.redis.pods" . | fromYamlArray -}}
{{- $servers = append $servers (printf "%s.%s.svc" . $.Release.Namespace) -}}
{{- end -}}
- name: POD_NAME
  valueFrom:
    fieldRef: {fieldPath: metadata.name}
- name: SELF
  value: $(POD_NAME).{{ .Release.Namespace }}.svc
- name: SERVERS
  value: {{ join " " $servers }}
{{- end }}

{{- define "headrace.redis.sentinelConfig" -}}
bind * -::*
port 26379
protected-mode no
dir /tmp
# Without a password a client may ask for the master, and nothing else.
user default on nopass -@all +ping +sentinel|get-master-addr-by-name
sentinel resolve-hostnames yes
sentinel announce-hostnames yes
sentinel down-after-milliseconds headrace {{ .Values.redis.bundled.sentinel.downAfterMilliseconds }}
# A replica that follows no master is put right after this time.
sentinel failover-timeout headrace 10000
sentinel parallel-syncs headrace 1
{{- end }}

{{- define "headrace.otel.config" -}}
{{- $exporter := ternary "otlphttp" "debug" (ne .Values.otelCollector.exportEndpoint "") -}}
receivers:
  otlp:
    protocols:
      http: {endpoint: "0.0.0.0:4318"}
processors:
  memory_limiter: {check_interval: 1s, limit_percentage: 80, spike_limit_percentage: 20}
  batch: {}
exporters:
  {{- if .Values.otelCollector.exportEndpoint }}
  otlphttp: {endpoint: {{ .Values.otelCollector.exportEndpoint | quote }}}
  {{- else }}
  debug: {verbosity: basic}
  {{- end }}
extensions:
  health_check: {endpoint: "0.0.0.0:13133"}
service:
  extensions: [health_check]
  pipelines:
    {{- range list "traces" "metrics" }}
    {{ . }}: {receivers: [otlp], processors: [memory_limiter, batch], exporters: [{{ $exporter }}]}
    {{- end }}
{{- end }}

{{/* A ClusterRole's name is shared by all namespaces. */}}
{{- define "headrace.operator.roleName" -}}
{{- $name := include "headrace.componentName" (list . "operator") -}}
{{- ternary (printf "%s-%s" .Release.Namespace $name) $name .Values.operator.watchAllNamespaces }}
{{- end }}

{{/* A ClusterRole in each release that watches nodes. */}}
{{- define "headrace.operator.nodesRoleName" -}}
{{- printf "%s-%s-nodes" .Release.Namespace (include "headrace.componentName" (list . "operator")) }}
{{- end }}

{{/* Its objects belong to no namespace, so their name has the release's in it. */}}
{{- define "headrace.modelServicePolicy.name" -}}
{{- list .Release.Namespace (include "headrace.componentName" (list . "model-services")) | compact | join "-" }}
{{- end }}

{{/* CEL: is the value of a variable in a list, whose entries may end in *? Takes (list "variable" entries). */}}
{{- define "headrace.celAllowed" -}}
{{- $clauses := list -}}
{{- $variable := index . 0 -}}
{{- range index . 1 -}}
{{- if hasSuffix "*" . -}}
{{- $clauses = append $clauses (printf "%s.startsWith(%s)" $variable (trimSuffix "*" . | toJson)) -}}
{{- else -}}
{{- $clauses = append $clauses (printf "%s == %s" $variable (toJson .)) -}}
{{- end -}}
{{- end -}}
{{- join " || " $clauses | default "false" -}}
{{- end }}

{{/* Secrets of the release that lead to its Redis, its keys or its values: ModelServices may not name them. */}}
{{- define "headrace.reservedSecrets" -}}
{{- $keys := .Values.gateway.apiKeys -}}
{{- list (include "headrace.redis.secretName" .) $keys.existingSecret $keys.testKeySecret .Values.gateway.hfTokenSecret .Values.redis.sealing.existingSecret "sh.helm.release.v1.*" | compact | uniq | toYaml -}}
{{- end }}

{{/* Why a definition that is there cannot be this release's, and what to do; nothing where it can. Takes (list $ definition). */}}
{{- define "headrace.crdProblem" -}}
{{- $release := (index . 0).Release -}}
{{- with index . 1 -}}
{{- $annotations := .metadata.annotations | default dict -}}
{{- $owner := dig "meta.helm.sh/release-name" "" $annotations -}}
{{- $place := dig "meta.helm.sh/release-namespace" "" $annotations -}}
{{- if and $owner (or (ne $owner $release.Name) (ne $place $release.Namespace)) -}}
the definition {{ .metadata.name }} belongs to the release {{ $owner }} in namespace {{ $place }}, and one definition serves the whole cluster: set crds.enabled=false for this release
{{- else if not $owner -}}
the definition {{ .metadata.name }} is there and no release's: set crds.enabled=false, or give it to this one with kubectl label crd {{ .metadata.name }} app.kubernetes.io/managed-by=Helm and kubectl annotate crd {{ .metadata.name }} meta.helm.sh/release-name={{ $release.Name }} meta.helm.sh/release-namespace={{ $release.Namespace }}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Settings of the operator: the chart's own, the user's, and defaults that the user may replace. */}}
{{- define "headrace.operator.settings" -}}
{{- $selector := list -}}
{{- range $key, $value := include "headrace.selectorLabels" (list . "gateway") | fromYaml -}}
{{- $selector = append $selector (printf "%s=%s" $key $value) -}}
{{- end -}}
{{- $own := dict
      "namespace" .Release.Namespace
      "watch_all_namespaces" .Values.operator.watchAllNamespaces
      "watch_nodes" .Values.operator.watchNodes
      "lease_name" (include "headrace.componentName" (list . "operator"))
      "engine_redis_secret" (include "headrace.redis.secretName" .)
      "engine_redis_secret_key" (include "headrace.redis.secretKey" (list . "engine"))
      "engine_image_pull_policy" .Values.image.pullPolicy
      "reserved_secrets" (include "headrace.reservedSecrets" . | fromYamlArray)
      "gateway_selector" (join "," $selector)
      "metrics_namespaces" .Values.networkPolicy.metricsNamespaces
      "metrics_port" 9400 -}}
{{- if include "headrace.redis.users" . -}}
{{- $_ := set $own "engine_redis_url" (include "headrace.redis.bundledUrl" (list . "")) -}}
{{- end -}}
{{- if include "headrace.redis.sentinel" . -}}
{{- $_ := set $own "engine_redis_ports" (list 6379) -}}
{{- end -}}
{{- if .Values.image.pullSecrets -}}
{{- $_ := set $own "engine_image_pull_secrets" .Values.image.pullSecrets -}}
{{- end -}}
{{- if eq .Values.redis.mode "bundled" -}}
{{- $_ := set $own "reserved_claims" (list (printf "data-%s-*" (include "headrace.componentName" (list . "redis")))) -}}
{{- end -}}
{{- if and (eq .Values.redis.mode "external") .Values.redis.external.caSecret -}}
{{- $_ := set $own "engine_redis_ca_secret" .Values.redis.external.caSecret -}}
{{- end -}}
{{- with .Values.redis.sealing -}}
{{- if .existingSecret -}}
{{- $_ := set $own "engine_sealing_secret" .existingSecret -}}
{{- $_ := set $own "engine_sealing_mode" .mode -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.redis.mode "external" -}}
{{- with .Values.redis.external -}}
{{- $_ := set $own "engine_redis_ports" (uniq (prepend .morePorts .port)) -}}
{{- end -}}
{{- end -}}
{{- with include "headrace.otlpEndpoint" . -}}
{{- $_ := set $own "engine_otlp_endpoint" . -}}
{{- end -}}
{{- $defaults := dict "engine_image" (include "headrace.image" (list . "engine")) "metrics_host" "0.0.0.0" -}}
{{- merge $own .Values.operator.settings $defaults | toYaml }}
{{- end }}
