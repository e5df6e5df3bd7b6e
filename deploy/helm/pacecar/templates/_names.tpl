{{- define "pacecar.name" -}}
{{ .Values.fullnameOverride | default "pacecar" }}
{{- end }}

{{- /* The labels that rules, monitors and the documentation's commands select by. */ -}}
{{- define "pacecar.selector" -}}
app.kubernetes.io/name: pacecar
app.kubernetes.io/component: node
{{- end }}

{{- define "pacecar.labels" -}}
app.kubernetes.io/name: pacecar
app.kubernetes.io/part-of: pacecar
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "pacecar.image" -}}
{{ .Values.image.repository }}
{{- if .Values.image.digest -}} @{{ .Values.image.digest }}
{{- else -}} :{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
{{- end }}

{{- /* An endpoint of a PodMonitor or ServiceMonitor, without its relabelings. */ -}}
{{- define "pacecar.endpoint" -}}
port: metrics
interval: {{ .Values.monitor.interval }}
scrapeTimeout: {{ .Values.monitor.scrapeTimeout }}
{{- if and .Values.web.secretName .Values.web.tls }}
scheme: https
tlsConfig:
  {{- with .Values.web.scrape.caSecret }}
  ca:
    secret:
      name: {{ . }}
      key: ca.crt
  {{- end }}
  {{- with .Values.web.scrape.serverName }}
  serverName: {{ . | quote }}
  {{- end }}
  insecureSkipVerify: false
{{- end }}
{{- with .Values.web.scrape.basicAuthSecret }}
basicAuth:
  username:
    name: {{ . }}
    key: username
  password:
    name: {{ . }}
    key: password
{{- end }}
{{- end }}
