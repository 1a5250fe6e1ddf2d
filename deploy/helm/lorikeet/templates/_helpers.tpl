{{- define "lorikeet.name" -}}
{{- printf "%s" .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- define "lorikeet.selector" -}}
app.kubernetes.io/name: lorikeet
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
{{- define "lorikeet.labels" -}}
{{ include "lorikeet.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}
