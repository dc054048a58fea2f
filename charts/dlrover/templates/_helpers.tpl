{{- define "dlrover.name" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride }}
{{- else if contains .Chart.Name .Release.Name }}
{{- printf "%s-operator" (.Release.Name | trunc 44 | trimSuffix "-") }}
{{- else }}
{{- printf "%s-dlrover-operator" (.Release.Name | trunc 36 | trimSuffix "-") }}
{{- end }}
{{- end }}

{{- define "dlrover.account" -}}
{{- .Values.serviceAccount.name | default (include "dlrover.name" .) }}
{{- end }}

{{- define "dlrover.selector" -}}
app.kubernetes.io/name: dlrover-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "dlrover.labels" -}}
{{ include "dlrover.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Returns the name of an image; `of` is `image` or `master.image` of the values. */ -}}
{{- define "dlrover.image" -}}
{{- with .root.Values.image.registry }}{{ trimSuffix "/" . }}/{{ end }}
{{- .of.repository }}
{{- if .of.digest }}@{{ .of.digest }}{{ else }}:{{ .of.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end }}

{{- /* Pod Security level `restricted`. The image sets the user (65532), and a cluster may change it. */ -}}
{{- define "dlrover.podSecurity" -}}
runAsNonRoot: true
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "dlrover.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
