{{- /* Each job has checkpoints of its own. */}}
{{- define "checkpoints" }}
{{- .Values.checkpoints.claim | default (printf "%s-checkpoints" .Release.Name) }}
{{- end }}
