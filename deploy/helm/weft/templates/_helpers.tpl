{{- define "weft.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride }}
{{- else if contains "weft" .Release.Name -}}
{{ .Release.Name }}
{{- else -}}
{{ .Release.Name }}-weft
{{- end -}}
{{- end }}

{{- define "weft.serviceAccountName" -}}
{{ .Values.serviceAccount.name | default (include "weft.fullname" .) }}
{{- end }}

{{/* Call with (list root image): image may be {} */}}
{{- define "weft.image" -}}
{{- $root := index . 0 -}}{{- $image := index . 1 -}}
{{ $image.repository | default $root.Values.image.repository }}:{{ $image.tag | default $root.Values.image.tag | default $root.Chart.AppVersion }}
{{- end }}

{{/* What selects pods; never changes. Call with (dict "root" $ "component" "router" "model" NAME "group" NAME) */}}
{{- define "weft.selector" -}}
app.kubernetes.io/name: weft
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .model }}
weft/model: {{ . }}
{{- end }}
{{- with .group }}
weft/group: {{ . }}
{{- end }}
{{- end }}

{{- define "weft.labels" -}}
{{ include "weft.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* groups, each with what it leaves to groupDefaults: {"groups": [...]} */}}
{{- define "weft.groups" -}}
{{- $groups := list -}}
{{- range .Values.groups -}}
{{- $groups = append $groups (mustMergeOverwrite (deepCopy $.Values.groupDefaults) .) -}}
{{- end -}}
{{ dict "groups" $groups | toJson }}
{{- end }}

{{/* A number of a values file is a float64, and 1e6 would become "1e+06". */}}
{{- define "weft.scalar" -}}
{{- if and (kindIs "float64" .) (eq (float64 (int64 .)) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end }}

{{/* Flags of a map of options, one a line, in order of their names. */}}
{{- define "weft.flags" -}}
{{- $flags := list -}}
{{- range $name, $value := . -}}
{{- if not (kindIs "invalid" $value) -}}
{{- $flags = append $flags (printf "- %q" (printf "--%s=%s" $name (include "weft.scalar" $value))) -}}
{{- end -}}
{{- end -}}
{{ join "\n" $flags }}
{{- end }}

{{/* "1m30s" to whole seconds, rounded up. */}}
{{- define "weft.seconds" -}}
{{- $sum := 0.0 -}}
{{- range regexFindAll "[0-9.]+(ns|us|ms|s|m|h)" . -1 -}}
{{- $unit := regexFind "[a-z]+" . -}}
{{- $factor := get (dict "ns" 0.000000001 "us" 0.000001 "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0) $unit -}}
{{- $sum = addf $sum (mulf (float64 (regexFind "[0-9.]+" .)) $factor) -}}
{{- end -}}
{{ ceil $sum | int }}
{{- end }}

{{/* A Kubernetes quantity, or bytes as flags take them (2GiB), as a number. */}}
{{- define "weft.quantity" -}}
{{- $text := include "weft.scalar" . -}}
{{- $unit := regexFind "[A-Za-z]*$" $text | lower | trimSuffix "b" -}}
{{- $number := float64 (regexFind "^[0-9.]+" $text) -}}
{{- if and (eq $unit "m") (hasSuffix "m" $text) -}}
{{ divf $number 1000.0 }}
{{- else -}}
{{- $factor := get (dict "" 1.0 "k" 1e3 "m" 1e6 "g" 1e9 "t" 1e12 "ki" 1024.0 "mi" 1048576.0 "gi" 1073741824.0 "ti" 1099511627776.0) $unit -}}
{{ mulf $number $factor | printf "%.3f" }}
{{- end -}}
{{- end }}

{{- define "weft.ranks" -}}
{{ index .options "tensor-parallel-size" | default 1 | int }}
{{- end }}

{{- define "weft.localRanks" -}}
{{ div (include "weft.ranks" . | int) (int .nodes) }}
{{- end }}

{{- define "weft.maxReplicas" -}}
{{ ternary .autoscaling.maxReplicas .replicas .autoscaling.enabled | int }}
{{- end }}

{{- define "weft.grace" -}}
{{- if kindIs "invalid" .terminationGracePeriodSeconds -}}
{{ add (int .preStopSeconds) (include "weft.seconds" (index .options "drain-timeout" | default "30s") | int) 10 }}
{{- else -}}
{{ int .terminationGracePeriodSeconds }}
{{- end -}}
{{- end }}

{{- define "weft.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Call with the list of capabilities to add. */}}
{{- define "weft.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- with . }}
  add: {{ toJson . }}
  {{- end }}
{{- end }}

{{- define "weft.preStop" -}}
{{- if . -}}
lifecycle:
  preStop: {exec: {command: [sleep, {{ . | int | quote }}]}}
{{- end -}}
{{- end }}

{{/* Where a model lies. Call with the model. */}}
{{- define "weft.modelDir" -}}
/models/{{ .name }}{{ with .path }}/{{ . }}{{ end }}
{{- end }}

{{- define "weft.modelFlags" -}}
- {{ printf "--model=%s" (include "weft.modelDir" .) | quote }}
- {{ printf "--served-model-name=%s" (.servedName | default .name) | quote }}
{{- end }}

{{/* Where Secrets are mounted: nothing of them is in an argument or the environment. */}}
{{- define "weft.secretVolume" -}}
{{- $name := index . 0 -}}{{- $secret := index . 1 -}}
{{- if $secret -}}
- name: {{ $name }}
  secret: {secretName: {{ $secret }}, defaultMode: 0440}
{{- end -}}
{{- end }}

{{- define "weft.secretMount" -}}
{{- $name := index . 0 -}}{{- $secret := index . 1 -}}
{{- if $secret -}}
- {name: {{ $name }}, mountPath: /etc/weft/{{ $name }}, readOnly: true}
{{- end -}}
{{- end }}

{{/* Flags of a Secret of type kubernetes.io/tls. Call with (list prefix name whether-peers-need-one). */}}
{{- define "weft.tlsFlags" -}}
{{- $prefix := index . 0 -}}{{- $dir := printf "/etc/weft/%s" (index . 1) -}}
- --{{ $prefix }}ssl-certfile={{ $dir }}/tls.crt
- --{{ $prefix }}ssl-keyfile={{ $dir }}/tls.key
{{- if index . 2 }}
- --{{ $prefix }}ssl-ca-certs={{ $dir }}/ca.crt
{{- end -}}
{{- end }}

{{- define "weft.modelVolume" -}}
- name: model
  {{- toYaml (.volume | default (dict "emptyDir" dict)) | nindent 2 }}
{{- end }}

{{/* Call with (list model component): routers need no weights. */}}
{{- define "weft.fetch" -}}
{{- $model := index . 0 -}}{{- $component := index . 1 -}}
{{- with $model.fetch -}}
initContainers:
  - name: fetch-model
    image: {{ .image }}
    {{- with .command }}
    command: {{ toJson . }}
    {{- end }}
    {{- with .args }}
    args: {{ toJson . }}
    {{- end }}
    env:
      - {name: WEFT_COMPONENT, value: {{ $component }}}
      {{- with .env }}{{ toYaml . | nindent 6 }}{{ end }}
    {{- with .envFrom }}
    envFrom: {{- toYaml . | nindent 6 }}
    {{- end }}
    workingDir: /models/{{ $model.name }}
    resources: {{- toYaml (.resources | default (dict "requests" (dict "cpu" "100m" "memory" "128Mi") "limits" (dict "memory" "1Gi"))) | nindent 6 }}
    securityContext: {{- include "weft.securityContext" (list) | nindent 6 }}
    volumeMounts:
      - {name: model, mountPath: /models/{{ $model.name }}}
{{- end -}}
{{- end }}

{{/* Where a pod may run. Call with (list root values selector). */}}
{{- define "weft.placement" -}}
{{- $root := index . 0 -}}{{- $values := index . 1 -}}{{- $selector := index . 2 -}}
serviceAccountName: {{ include "weft.serviceAccountName" $root }}
automountServiceAccountToken: false
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{- toYaml . | nindent 4 }}
    labelSelector:
      matchLabels: {{- $selector | nindent 8 }}
  {{- end }}
{{- end }}
{{- end }}
