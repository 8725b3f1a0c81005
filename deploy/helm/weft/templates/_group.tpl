{{/* Leaders of all groups of a model, up to the most an autoscaler makes. Call with (list root model). */}}
{{- define "weft.leaders" -}}
{{- $root := index . 0 -}}{{- $model := index . 1 -}}
{{- $leaders := list -}}
{{- range $group := (include "weft.groups" $root | fromJson).groups -}}
{{- if eq .model $model -}}
{{- $name := printf "%s-%s" (include "weft.fullname" $root) .name -}}
{{- range $i := until (include "weft.maxReplicas" . | int) -}}
{{- $leaders = append $leaders (printf "%s-%d.%s.%s.svc.%s:50052" $name $i $name $root.Release.Namespace $root.Values.clusterDomain) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{ join "," $leaders }}
{{- end }}

{{/* The pod of a group, or of its share of a node. Call with (list root group). */}}
{{- define "weft.groupPod" -}}
{{- $root := index . 0 -}}{{- $group := index . 1 -}}
{{- $labels := dict "root" $root "component" "group" "model" $group.model "group" $group.name -}}
{{- $model := dict -}}
{{- range $root.Values.models }}{{ if eq .name $group.model }}{{ $model = . }}{{ end }}{{ end -}}
{{- $local := include "weft.localRanks" $group | int -}}
metadata:
  labels:
    {{- include "weft.labels" $labels | nindent 4 }}
    {{- with $group.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- with $group.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "weft.placement" (list $root $group (include "weft.selector" $labels)) | nindent 2 }}
  terminationGracePeriodSeconds: {{ include "weft.grace" $group }}
  securityContext: {{- include "weft.podSecurityContext" . | nindent 4 }}
  {{- with include "weft.fetch" (list $model "group") }}{{ nindent 2 . }}{{ end }}
  containers:
    {{- if eq (int $group.nodes) 1 }}
    {{- include "weft.supervisor" (list $root $group $model $local) | nindent 4 }}
    {{- else }}
    {{- range $i := until $local }}
    {{- include "weft.rank" (list $root $group $model $local $i) | nindent 4 }}
    {{- end }}
    {{- end }}
  volumes:
    {{- include "weft.modelVolume" $model | nindent 4 }}
    {{- with include "weft.secretVolume" (list "internal-tls" $root.Values.internalTls.secretName) }}{{ nindent 4 . }}{{ end }}
    {{- with include "weft.secretVolume" (list "join" (include "weft.joinSecret" (list $root $group))) }}{{ nindent 4 . }}{{ end }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $group.shmSize | default (printf "%dMi" (add 64 (mul 32 $local))) }}}
{{- end }}

{{/* All ranks of a group, as children of one process. Rank 0's probes speak for all of them. */}}
{{- define "weft.supervisor" -}}
{{- $root := index . 0 -}}{{- $group := index . 1 -}}{{- $local := index . 3 -}}
- name: worker
  command: [weft-worker]
  args:
    {{- include "weft.modelFlags" (index . 2) | nindent 4 }}
    - --listen=0.0.0.0:50052
    - --metrics-host=0.0.0.0
    - --metrics-port=9401
    {{- with include "weft.groupSecrets" (list $root $group) }}{{ nindent 4 . }}{{ end }}
    {{- with include "weft.groupFlags" (list $group $local) }}{{ nindent 4 . }}{{ end }}
  ports:
    - {name: grpc, containerPort: 50052, protocol: TCP}
    {{- range $i := until $local }}
    - {name: metrics-{{ $i }}, containerPort: {{ add 9401 $i }}, protocol: TCP}
    {{- end }}
  {{- include "weft.workerContainer" (list $root $group 0) | nindent 2 }}
{{- end }}

{{/* One rank of a group over several nodes: its number follows from the pod's. */}}
{{- define "weft.rank" -}}
{{- $root := index . 0 -}}{{- $group := index . 1 -}}{{- $local := index . 3 -}}{{- $i := index . 4 -}}
- name: rank-{{ $i }}
  command:
    - /bin/sh
    - -c
    - exec weft-worker --rank=$((LWS_WORKER_INDEX * {{ $local }} + {{ $i }})) "$@"
    - weft-worker
  args:
    {{- include "weft.modelFlags" (index . 2) | nindent 4 }}
    - --local-ranks={{ $local }}
    - --leader-address=$(LWS_LEADER_ADDRESS):50052
    - --listen=0.0.0.0:50052
    - --metrics-host=0.0.0.0
    - --metrics-port={{ add 9401 $i }}
    {{- with include "weft.groupSecrets" (list $root $group) }}{{ nindent 4 . }}{{ end }}
    {{- with include "weft.groupFlags" (list $group 1) }}{{ nindent 4 . }}{{ end }}
  ports:
    {{- if not $i }}
    - {name: grpc, containerPort: 50052, protocol: TCP}
    {{- end }}
    - {name: metrics-{{ $i }}, containerPort: {{ add 9401 $i }}, protocol: TCP}
  {{- include "weft.workerContainer" (list $root $group $i) | nindent 2 }}
{{- end }}

{{/* Ranks of one pod join through a socket that only they reach. */}}
{{- define "weft.joinSecret" -}}
{{- $root := index . 0 -}}{{- $group := index . 1 -}}
{{- if gt (int $group.nodes) 1 }}{{ $root.Values.joinSecret.secretName }}{{ end -}}
{{- end }}

{{- define "weft.groupSecrets" -}}
{{- $root := index . 0 -}}{{- $group := index . 1 -}}
{{- if $root.Values.internalTls.secretName }}
{{- include "weft.tlsFlags" (list "" "internal-tls" true) }}
{{- end }}
{{- if include "weft.joinSecret" . }}
- --join-secret-file=/etc/weft/join/{{ $root.Values.joinSecret.key }}
{{- end }}
{{- end }}

{{/* The options, and threads that fit the CPU limit of `ranks`: a rank sees the CPUs of the node, not the limit. */}}
{{- define "weft.groupFlags" -}}
{{- $group := index . 0 -}}{{- $ranks := index . 1 -}}
{{- $options := $group.options -}}
{{- $cpus := ($group.resources.limits | default dict).cpu -}}
{{- if and $cpus (not (hasKey $options "threads-per-rank")) -}}
{{- $threads := divf (include "weft.quantity" $cpus | float64) (float64 $ranks) | floor | int -}}
{{- $options = set (deepCopy $options) "threads-per-rank" (max 1 $threads) -}}
{{- end -}}
{{- with $group.role -}}
{{- $role := get (dict "prefill" "kv_producer" "decode" "kv_consumer" "both" "kv_both") . -}}
{{- $options = set (deepCopy $options) "kv-transfer-config" (dict "kv_role" $role | toJson) -}}
{{- end -}}
{{- include "weft.flags" $options -}}
{{- end }}

{{/* What the containers of both kinds share. */}}
{{- define "weft.workerContainer" -}}
{{- $root := index . 0 -}}{{- $group := index . 1 -}}{{- $i := index . 2 -}}
image: {{ include "weft.image" (list $root $group.image) }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
{{- with $group.env }}
env: {{- toYaml . | nindent 2 }}
{{- end }}
{{- /* Answered while the model loads. Not there for some seconds while a group starts again. */}}
livenessProbe:
  httpGet: {path: /healthz, port: metrics-{{ $i }}}
  periodSeconds: 10
  timeoutSeconds: 5
readinessProbe:
  httpGet: {path: /readyz, port: metrics-{{ $i }}}
  periodSeconds: 2
  timeoutSeconds: 5
{{- with include "weft.preStop" $group.preStopSeconds }}{{ nindent 0 . }}{{ end }}
resources: {{- toYaml $group.resources | nindent 2 }}
securityContext: {{- include "weft.securityContext" $group.capabilities | nindent 2 }}
volumeMounts:
  - {name: model, mountPath: /models/{{ $group.model }}, readOnly: true}
  - {name: shm, mountPath: /dev/shm}
  {{- with include "weft.secretMount" (list "internal-tls" $root.Values.internalTls.secretName) }}{{ nindent 2 . }}{{ end }}
  {{- with include "weft.secretMount" (list "join" (include "weft.joinSecret" (list $root $group))) }}{{ nindent 2 . }}{{ end }}
{{- end }}
