{{/* What a schema cannot say. Each message tells what was seen and what is allowed. */}}
{{- define "weft.checks" -}}
{{- $models := list -}}
{{- range .Values.models -}}
{{- if has .name $models }}{{ fail (printf "models: the name %s is there twice" .name) }}{{ end -}}
{{- $models = append $models .name -}}
{{- end -}}
{{- $used := list -}}
{{- $names := list -}}
{{- range (include "weft.groups" . | fromJson).groups -}}
{{- if has .name $names }}{{ fail (printf "groups: the name %s is there twice" .name) }}{{ end -}}
{{- $names = append $names .name -}}
{{- if not (has .model $models) }}{{ fail (printf "group %s: model is %q; models has %s" .name .model (join ", " $models)) }}{{ end -}}
{{- $used = append $used .model -}}
{{- if has .name $models }}{{ fail (printf "group %s has the name of a model: its Service would be the routers'" .name) }}{{ end -}}
{{- include "weft.checkName" (printf "%s-%s" (include "weft.fullname" $) .name) -}}
{{- include "weft.checkLayout" . -}}
{{- include "weft.checkResources" . -}}
{{- include "weft.checkReplicas" (list (printf "group %s" .name) .) -}}
{{- include "weft.checkGrace" (list (printf "group %s" .name) . 5) -}}
{{- end -}}
{{- include "weft.checkRoles" . -}}
{{- range $models -}}
{{- if not (has . $used) }}{{ fail (printf "model %s has no group" .) }}{{ end -}}
{{- include "weft.checkName" (printf "%s-%s-headless" (include "weft.fullname" $) .) -}}
{{- end -}}
{{- include "weft.checkReplicas" (list "router" .Values.router) -}}
{{- if and .Values.router.tls.verifyClients (not .Values.router.tls.secretName) }}{{ fail "router.tls: verifyClients is true and secretName empty; the CA is in that Secret" }}{{ end -}}
{{- include "weft.checkGrace" (list "router" .Values.router 0) -}}
{{- end }}

{{- define "weft.checkRoles" -}}
{{- $prefill := list -}}
{{- $decode := list -}}
{{- range (include "weft.groups" . | fromJson).groups -}}
{{- if and .role (index .options "kv-transfer-config") }}{{ fail (printf "group %s: role sets kv-transfer-config; give one of them" .name) }}{{ end -}}
{{- if has .role (list "prefill" "both") }}{{ $prefill = append $prefill .model }}{{ end -}}
{{- if has .role (list "decode" "both") }}{{ $decode = append $decode .model }}{{ end -}}
{{- end -}}
{{- range $prefill -}}
{{- if not (has . $decode) }}{{ fail (printf "model %s has a group with role prefill, and none with decode or both that goes on with its prompts" .) }}{{ end -}}
{{- end -}}
{{- end }}

{{- define "weft.checkName" -}}
{{- if gt (len .) 52 }}{{ fail (printf "%s has %d characters; 52 are allowed: Kubernetes adds more. fullnameOverride shortens it" . (len .)) }}{{ end -}}
{{- end }}

{{- define "weft.checkLayout" -}}
{{- $t := include "weft.ranks" . | int -}}
{{- $n := index .options "decode-context-parallel-size" | default 1 | int -}}
{{- $v := index .options "block-size" | default 0 | int -}}
{{- $i := index .options "cp-kv-cache-interleave-size" | default 0 | int -}}
{{- if mod $t $n }}{{ fail (printf "group %s: decode-context-parallel-size is %d; it has to divide tensor-parallel-size, which is %d" .name $n $t) }}{{ end -}}
{{- if mod $t (int .nodes) }}{{ fail (printf "group %s: nodes is %d; it has to divide tensor-parallel-size, which is %d" .name (int .nodes) $t) }}{{ end -}}
{{- if and $v (gt $n 1) -}}
{{- $unit := mul $n ($i | default 1) | int -}}
{{- if mod $v $unit -}}
{{- fail (printf "group %s: block-size is %d; with decode-context-parallel-size %d and cp-kv-cache-interleave-size %d it has to be a multiple of %d: %d, for instance" .name $v $n ($i | default 1) $unit (mul $unit (add1 (div $v $unit)))) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "weft.checkResources" -}}
{{- $local := include "weft.localRanks" . | int -}}
{{- $ranks := ternary $local 1 (eq (int .nodes) 1) -}}
{{- $limits := .resources.limits | default dict -}}
{{- $kv := index .options "kv-cache-memory-bytes" -}}
{{- if and $kv $limits.memory -}}
{{- $bytes := mulf (include "weft.quantity" $kv | float64) (float64 $ranks) -}}
{{- if ge $bytes (include "weft.quantity" $limits.memory | float64) -}}
{{- fail (printf "group %s: resources.limits.memory is %v; kv-cache-memory-bytes %v of %d ranks alone is %.1f GiB" .name $limits.memory (include "weft.scalar" $kv) $ranks (divf $bytes 1073741824.0)) -}}
{{- end -}}
{{- end -}}
{{- $gpus := index $limits "nvidia.com/gpu" -}}
{{- if and $gpus (ne (int $gpus) $ranks) -}}
{{- fail (printf "group %s: nvidia.com/gpu is %d; a container has %d ranks, and each takes one" .name (int $gpus) $ranks) -}}
{{- end -}}
{{- end }}

{{- define "weft.checkReplicas" -}}
{{- $what := index . 0 -}}{{- $values := index . 1 -}}
{{- if $values.autoscaling.enabled -}}
{{- if not (int $values.replicas) }}{{ fail (printf "%s: replicas is 0 and autoscaling enabled; an autoscaler does not start from 0. Disable one" $what) }}{{ end -}}
{{- if gt (int $values.autoscaling.minReplicas) (int $values.autoscaling.maxReplicas) -}}
{{- fail (printf "%s: autoscaling.minReplicas is %d; at most maxReplicas, which is %d, is allowed" $what (int $values.autoscaling.minReplicas) (int $values.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The supervisor of a group waits 5 s longer for its ranks. */}}
{{- define "weft.checkGrace" -}}
{{- $what := index . 0 -}}{{- $values := index . 1 -}}
{{- $drain := index $values.options "drain-timeout" | default "30s" -}}
{{- $least := add (int $values.preStopSeconds) (include "weft.seconds" $drain | int) (index . 2) | int -}}
{{- $grace := include "weft.grace" $values | int -}}
{{- if le $grace $least -}}
{{- fail (printf "%s: terminationGracePeriodSeconds is %d; preStopSeconds %d and drain-timeout %s need more than %d" $what $grace (int $values.preStopSeconds) $drain $least) -}}
{{- end -}}
{{- end }}
