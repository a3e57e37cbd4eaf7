{{- /* Each job has checkpoints of its own. */}}
{{- define "checkpoints" }}
{{- .Values.checkpoints.claim | default (printf "%s-checkpoints" .Release.Name) }}
{{- end }}

{{- /* Without a tag it would be `latest`, and a pod that comes later might have another version. */}}
{{- define "image" }}
{{- .Values.image }}{{ if not (regexMatch "[:@][^/]+$" .Values.image) }}:{{ .Chart.AppVersion }}{{ end }}
{{- end }}
