{{- /* Each job has checkpoints of its own. */}}
{{- define "checkpoints" }}
{{- .Values.checkpoints.claim | default (printf "%s-checkpoints" .Release.Name) }}
{{- end }}

{{- /* Without a tag it would be `latest`, and a pod that comes later might have another version. */}}
{{- define "image" }}
{{- .Values.image }}{{ if not (regexMatch "[:@][^/]+$" .Values.image) }}:{{ .Chart.AppVersion }}{{ end }}
{{- end }}

{{- /* How a container reaches etcd: its variables, and the files that they name. */}}
{{- define "etcd.env" }}
{{- $scheme := ternary "https://" "" .Values.tls.enabled }}
{{- $members := printf "%setcd-0.etcd:2379,%setcd-1.etcd:2379,%setcd-2.etcd:2379" $scheme $scheme $scheme }}
- {name: PET_ETCD, value: {{ .Values.etcd.endpoints | default $members | quote }}}
{{- with .Values.etcd.prefix }}
- {name: PET_PREFIX, value: {{ . | quote }}}
{{- end }}
{{- if .Values.tls.enabled }}
- {name: PET_CACERT, value: /etcd-client/ca.crt}
{{- end }}
{{- if .Values.etcd.user }}
- {name: PET_USER, value: {{ .Values.etcd.user | quote }}}
- {name: PET_PASSWORD_FILE, value: /etcd-user/password}
{{- else if .Values.tls.enabled }}
- {name: PET_CERT, value: /etcd-client/tls.crt}
- {name: PET_KEY, value: /etcd-client/tls.key}
{{- end }}
{{- end }}

{{- define "etcd.mounts" }}
{{- if .Values.tls.enabled }}
- {name: etcd-client, mountPath: /etcd-client, readOnly: true}
{{- end }}
{{- if .Values.etcd.user }}
- {name: etcd-user, mountPath: /etcd-user, readOnly: true}
{{- end }}
{{- end }}

{{- define "etcd.volumes" }}
{{- if .Values.tls.enabled }}
- name: etcd-client
  secret: {secretName: {{ .Values.tls.clientSecret }}, defaultMode: 0440}
{{- end }}
{{- if .Values.etcd.user }}
- name: etcd-user
  secret: {secretName: {{ .Values.etcd.passwordSecret }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{- define "container.securityContext" }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- /* The pod of an `elastic-etcd` command beside the jobs, but for its restartPolicy and its labels. */}}
{{- define "client.pod" }}
{{- $root := .root }}
{{- toYaml (pick $root.Values.pod "automountServiceAccountToken" "enableServiceLinks" "imagePullSecrets" "securityContext") }}
containers:
  - name: {{ .name }}
    image: {{ include "image" $root }}
    command: [elastic-etcd, {{ .name }}]
    args:
      {{- toYaml .args | nindent 6 }}
    env:
      {{- include "etcd.env" $root | trim | nindent 6 }}
    {{- with .more }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    resources:
      requests: {cpu: 50m, memory: 128Mi}
      limits: {memory: 512Mi}
    {{- include "container.securityContext" $root | trim | nindent 4 }}
    {{- with include "etcd.mounts" $root | trim }}
    volumeMounts:
      {{- . | nindent 6 }}
    {{- end }}
{{- with include "etcd.volumes" $root | trim }}
volumes:
  {{- . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "client.labels" }}
app.kubernetes.io/name: {{ printf "%s-%s" .root.Release.Name .name | quote }}
app.kubernetes.io/part-of: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: elastic-etcd-client
{{- end }}
