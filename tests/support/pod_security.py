"""Kubernetes' restricted pod security standard, as a list of what it refuses in a pod spec."""

from __future__ import annotations

from typing import Any

RESTRICTED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def violations(pod: dict[str, Any]) -> set[str]:
    found = set()
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(key):
            found.add(key)
    for volume in pod.get("volumes", ()):
        found |= {f"volume {kind}" for kind in set(volume) - {"name"} - RESTRICTED_VOLUMES}
    whole = pod.get("securityContext", {})
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        own = container.get("securityContext", {})
        if own.get("privileged"):
            found.add("privileged")
        if own.get("allowPrivilegeEscalation") is not False:
            found.add("allowPrivilegeEscalation")
        if not own.get("runAsNonRoot", whole.get("runAsNonRoot")):
            found.add("runAsNonRoot")
        seccomp = own.get("seccompProfile", whole.get("seccompProfile", {})).get("type")
        if seccomp not in ("RuntimeDefault", "Localhost"):
            found.add("seccompProfile")
        capabilities = own.get("capabilities", {})
        if "ALL" not in capabilities.get("drop", ()):
            found.add("capabilities not dropped")
        found |= {f"capability {name}" for name in set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}}
        if any("hostPort" in port for port in container.get("ports", ())):
            found.add("hostPort")
    return found
