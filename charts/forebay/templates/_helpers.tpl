{{/* Name of all objects of a release. */}}
{{- define "forebay.fullname" -}}
{{- if contains "forebay" .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-forebay" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Immutable: a Deployment's selector can't be changed. The name is what models' NetworkPolicies let in. */}}
{{- define "forebay.selectorLabels" -}}
app.kubernetes.io/name: forebay-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "forebay.labels" -}}
{{ include "forebay.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: forebay
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "forebay.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "forebay.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is needed when serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "forebay.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* What the operator does in the namespaces of models: these verbs and no others (tests compare them with its code). */}}
{{- define "forebay.rules" -}}
- apiGroups: [serving.forebay.dev]
  resources: [disaggregatedmodels]
  verbs: [get, list, watch]
- apiGroups: [serving.forebay.dev]
  resources: [disaggregatedmodels/status]
  verbs: [patch]
# Asked for where OwnerReferencesPermissionEnforcement is on: children name their model with blockOwnerDeletion.
- apiGroups: [serving.forebay.dev]
  resources: [disaggregatedmodels/finalizers]
  verbs: [update]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [replicasets]
  verbs: [list]
# Routers get the first two of them (each model's Role): nobody may give away a right that they don't have.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch]
- apiGroups: [""]
  resources: [services, serviceaccounts]
  verbs: [get, list, watch, create, patch]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
# No list: the operator reads only Secrets by name, its own token Secrets and those that a model names.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, patch]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end -}}
