{{- /*
Refuses values that contradict each other.  Otherwise one of them would have no effect, or daemons would be scraped twice.
*/ -}}
{{- define "pacecar.milliseconds" -}}
{{- if hasSuffix "ms" . }}{{ trimSuffix "ms" . | int64 }}
{{- else if hasSuffix "s" . }}{{ mul (trimSuffix "s" . | int64) 1000 }}
{{- else }}{{ mul (trimSuffix "m" . | int64) 60000 }}
{{- end }}
{{- end }}

{{- define "pacecar.checks" -}}
{{- $values := .Values }}
{{- $set := dict "host" "host" "port" "port" "socket" "" "sys_root" "" "recordings" "recordings.hostPath" "web_config_file" "web.secretName" }}
{{- if and $values.scrapeAnnotations (ne $values.monitor.kind "none") }}
  {{- fail (printf "scrapeAnnotations is true and monitor.kind is %s: each daemon would be scraped twice. Choose one of the two" $values.monitor.kind) }}
{{- end }}
{{- if hasKey $values.podAnnotations "prometheus.io/scrape" }}
  {{- fail "podAnnotations has prometheus.io/scrape: use the value scrapeAnnotations" }}
{{- end }}
{{- range $label, $value := fromYaml (include "pacecar.selector" .) }}
  {{- if hasKey $values.podLabels $label }}
    {{- fail (printf "podLabels has %s, which is the DaemonSet's selector" $label) }}
  {{- end }}
{{- end }}
{{- if gt (include "pacecar.milliseconds" $values.monitor.scrapeTimeout | int64) (include "pacecar.milliseconds" $values.monitor.interval | int64) }}
  {{- fail (printf "monitor.scrapeTimeout (%s) is longer than monitor.interval (%s), which Prometheus refuses" $values.monitor.scrapeTimeout $values.monitor.interval) }}
{{- end }}
{{- range $key, $value := $values.web.scrape }}
  {{- if and $value (not $values.web.secretName) }}
    {{- fail (printf "web.scrape.%s is set and web.secretName is not: the endpoint has neither TLS nor passwords" $key) }}
  {{- end }}
  {{- if and $value (not $values.web.tls) (ne $key "basicAuthSecret") }}
    {{- fail (printf "web.scrape.%s is for TLS, and web.tls is false" $key) }}
  {{- end }}
  {{- if and $value (eq $values.monitor.kind "none") }}
    {{- fail (printf "web.scrape.%s is set and monitor.kind is none: it has no effect" $key) }}
  {{- end }}
{{- end }}
{{- range $section := list "hook" "tune" }}
  {{- if regexMatch (printf "(?m)^\\s*\\[%s\\]" $section) $values.config }}
    {{- fail (printf "config has a section [%s], which the daemon does not read: configure it in the jobs" $section) }}
  {{- end }}
{{- end }}
{{- range $key, $instead := $set }}
  {{- if regexMatch (printf "(?m)^\\s*%s\\s*=" $key) $values.config }}
    {{- fail (printf "config sets %s, which the chart's environment variable overrides%s" $key (ternary (printf ": use the value %s" $instead) "" (ne $instead ""))) }}
  {{- end }}
{{- end }}
{{- range $variable := $values.extraEnv }}
  {{- $key := trimPrefix "PACECAR_DAEMON_" $variable.name | lower }}
  {{- if and (hasPrefix "PACECAR_DAEMON_" $variable.name) (hasKey $set $key) }}
    {{- $instead := get $set $key }}
    {{- fail (printf "extraEnv sets %s, which the chart sets itself%s" $variable.name (ternary (printf ": use the value %s" $instead) "" (ne $instead ""))) }}
  {{- end }}
  {{- if and (hasPrefix "PACECAR_DAEMON_" $variable.name) (regexMatch (printf "(?m)^\\s*%s\\s*=" $key) $values.config) }}
    {{- fail (printf "config sets %s and extraEnv sets %s, which wins: keep one of the two" $key $variable.name) }}
  {{- end }}
  {{- if eq $variable.name "PACECAR_CONFIG" }}
    {{- fail "extraEnv sets PACECAR_CONFIG: use the value config" }}
  {{- end }}
{{- end }}
{{- end }}
