"""Cluster DNS: CoreDNS as a Deployment."""

from __future__ import annotations

from typing import Any, Final

from e2e.cluster.state import DNS_ADDRESS

IMAGE: Final = "localhost/coredns:built"
NAMESPACE: Final = "kube-system"
NAME: Final = "coredns"

_COREFILE: Final = """\
cluster.local in-addr.arpa {
  errors
  health :8080 {
    lameduck 2s
  }
  ready :8181
  kubernetes cluster.local in-addr.arpa {
    ttl 5
  }
  cache 5
  reload
}
. {
  errors
  template ANY ANY {
    rcode NXDOMAIN
  }
}
"""
"""Two blocks: in one `template` would answer before `kubernetes`. No upstream: other names do not exist, at once."""


def objects() -> list[dict[str, Any]]:
    meta = {"name": NAME, "namespace": NAMESPACE}
    chosen = {"k8s-app": "kube-dns"}
    rbac = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRole",
            "metadata": {"name": "system:coredns"},
            "rules": [
                _reads("", "endpoints", "services", "pods", "namespaces"),
                _reads("discovery.k8s.io", "endpointslices"),
            ],
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "system:coredns"},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "system:coredns"},
            "subjects": [{"kind": "ServiceAccount", **meta}],
        },
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"Corefile": _COREFILE}},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "kube-dns", "namespace": NAMESPACE},
            "spec": {
                "clusterIP": DNS_ADDRESS,
                "selector": chosen,
                "ports": [
                    {"name": "dns", "port": 53, "protocol": "UDP"},
                    {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
                ],
            },
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": meta,
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": chosen},
                "template": {"metadata": {"labels": chosen}, "spec": _pod()},
            },
        },
    ]


def _reads(group: str, *resources: str) -> dict[str, Any]:
    return {"apiGroups": [group], "resources": list(resources), "verbs": ["list", "watch"]}


def _pod() -> dict[str, Any]:
    container = {
        "name": NAME,
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "args": ["-conf", "/etc/coredns/Corefile"],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1},
        "livenessProbe": {"httpGet": {"path": "/health", "port": 8080}, "initialDelaySeconds": 10},
        "resources": {"requests": {"cpu": "50m", "memory": "40Mi"}, "limits": {"memory": "170Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]},
        },
        "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns"}],
    }
    return {
        "serviceAccountName": NAME,
        "dnsPolicy": "Default",
        "priorityClassName": "system-cluster-critical",
        # Of node1: draining node2 is a test's business, and must not stop names from being known meanwhile.
        "nodeSelector": {"kubernetes.io/hostname": "node1"},
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": NAME}}],
    }
