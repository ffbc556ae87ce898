{{- define "sm70.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "sm70.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "sm70.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "sm70.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "sm70.selector" -}}
app.kubernetes.io/name: {{ include "sm70.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "sm70.labels" -}}
{{ include "sm70.selector" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: sm70
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") }}
{{- end -}}

{{- define "sm70.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "sm70.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name must be set when serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* What the operator does in the namespaces that it serves. It reads no Secret, runs no command in a pod, reads no log. */}}
{{- define "sm70.rules" -}}
- apiGroups: [inference.sm70.io]
  resources: [sm70inferenceservices]
  verbs: [get, list, watch]
- apiGroups: [inference.sm70.io]
  resources: [sm70inferenceservices/status]
  verbs: [patch]
# Only so that owner references may block the owner's deletion where the cluster guards that; no finalizer is ever set.
- apiGroups: [inference.sm70.io]
  resources: [sm70inferenceservices/finalizers]
  verbs: [update]
- apiGroups: [inference.sm70.io]
  resources: [sm70qualifications]
  verbs: [get, list, watch, create, patch]
- apiGroups: [inference.sm70.io]
  resources: [sm70qualifications/status]
  verbs: [patch]
- apiGroups: [apps]
  resources: [deployments, controllerrevisions]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, create, patch]
# GPUs by claims (`gpus.allocation: DRA`).
- apiGroups: [resource.k8s.io]
  resources: [resourceclaimtemplates]
  verbs: [get, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
# The documents that `profileRef` and `qualification.suiteRef` name.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get]
# Why a node cannot prepare a pod stands nowhere else.
- apiGroups: [""]
  resources: [events]
  verbs: [list]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end -}}
