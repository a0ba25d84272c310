{{- define "cornplug.labels" -}}
app.kubernetes.io/name: {{ .part }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/part-of: cornplug
{{- end }}

{{- define "cornplug.image" -}}
{{- with .root.Values.image.registry }}{{ . }}/{{ end }}cornplug-{{ .image }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* Fields of every pod. Service links are variables: that of a Service "cornplug-encoder" is CORNPLUG_ENCODER_PORT,
which is a setting. */}}
{{- define "cornplug.pod" -}}
enableServiceLinks: false
automountServiceAccountToken: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
nodeSelector: {{ toYaml .root.Values.gpu.nodeSelector | nindent 2 }}
tolerations: {{ toYaml .root.Values.gpu.tolerations | nindent 2 }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ int .root.Values.user }}
  runAsGroup: {{ int .root.Values.user }}
  fsGroup: {{ int .root.Values.user }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "cornplug.confined" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end }}

{{/* Variables of every container of cornplug's. */}}
{{- define "cornplug.env" -}}
- {name: CORNPLUG_STORE_SOCKET, value: /run/cornplug/store.sock}
- {name: CORNPLUG_STORE_SECRET_FILE, value: /etc/cornplug/secret/secret}
{{- if .Values.config }}
- {name: CORNPLUG_CONFIG, value: /etc/cornplug/config/cornplug.toml}
{{- end }}
{{- end }}

{{- define "cornplug.mounts" -}}
- {name: run, mountPath: /run/cornplug}
- {name: secret, mountPath: /etc/cornplug/secret, readOnly: true}
{{- if .Values.config }}
- {name: config, mountPath: /etc/cornplug/config, readOnly: true}
{{- end }}
- {name: shm, mountPath: /dev/shm}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{/* Root's, and readable by the group of the processes: what read_secret allows. Only the secret's own bytes are
files; the administrator's key is a variable of the encoder. */}}
{{- define "cornplug.volumes" -}}
- name: secret
  secret:
    secretName: {{ .root.Values.secret.name }}
    defaultMode: 0440
    items: [{key: secret, path: secret}]
{{- if .root.Values.config }}
- {name: config, configMap: {name: {{ .root.Release.Name }}-config}}
{{- end }}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .shm }}}}
- {name: tmp, emptyDir: {}}
{{- end }}

{{- define "cornplug.storeMemory" -}}
{{ add (int .Values.store.sizeGiB) (div (add (int .Values.store.sizeGiB) 14) 15) 1 }}Gi
{{- end }}

{{- define "cornplug.autoscaler" -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ .root.Release.Name }}-{{ .part }}
  labels: {{ include "cornplug.labels" . | nindent 4 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ .root.Release.Name }}-{{ .part }}}
  minReplicas: {{ .workload.replicas }}
  maxReplicas: {{ .workload.autoscaling.maxReplicas }}
  metrics:
    - type: Pods
      pods:
        metric: {name: {{ .metric }}}
        target: {type: AverageValue, averageValue: {{ .target | toString | quote }}}
  behavior:
    # A new pod loads weights for minutes, and one that ends takes its caches along.
    scaleDown: {stabilizationWindowSeconds: 600, policies: [{type: Pods, value: 1, periodSeconds: 300}]}
{{- end }}

{{/* A changed configuration starts the pods again: they read it once. */}}
{{- define "cornplug.annotations" -}}
{{- with .Values.config -}}
annotations: {cornplug/config: {{ sha256sum . | quote }}}
{{- end }}
{{- end }}
