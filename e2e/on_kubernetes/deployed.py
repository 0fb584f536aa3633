"""What the suite puts on a cluster: two nodes with GPUs that are only said to be there, the chart, the client's pod."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from e2e.cluster.providers import KEEP, Cluster, tool
from e2e.cluster.shell import CommandFailed, run
from e2e.on_kubernetes import client, lent

REPOSITORY: Final = Path(__file__).parents[2]
OPERATOR_NAMESPACE: Final = "forebay-system"
NAMESPACE: Final = "forebay-e2e"
_NAMESPACES: Final = (OPERATOR_NAMESPACE, NAMESPACE)
RELEASE: Final = "forebay"
GPUS: Final = 8
"""Of each node."""

POOL_LABEL: Final = "example.com/pool"
"""The example's; one node has `prefill`, the other `decode`."""

CLIENT: Final = "client"
_ENDED: Final = (
    "{range .items[*]}{.metadata.name}{': '}{.status.containerStatuses[*].lastState.terminated.message}{'\\n'}{end}"
)
"""The last words of containers that ended."""

_SOURCES: Final = {
    "e2e/traffic.py": REPOSITORY / "e2e" / "traffic.py",
    "e2e/on_kubernetes/client.py": REPOSITORY / "e2e" / "on_kubernetes" / "client.py",
    "support/client.py": REPOSITORY / "tests" / "support" / "client.py",
}


@dataclass
class Deployed:
    cluster: Cluster
    nodes: tuple[str, str] = ("", "")
    """Labelled for prefill, and for decode."""

    installed_seconds: float = 0.0
    _proxy: subprocess.Popen[bytes] | None = field(default=None)
    proxy_url: str = ""
    """The API server without its TLS and credentials, on loopback."""

    _begun: bool = False
    """Something may have been changed."""

    def kubectl(self, *words: object, seconds: float = 60.0, stdin: str | None = None, check: bool = True) -> str:
        """Its output. Raises CommandFailed."""
        command = (tool("kubectl"), f"--kubeconfig={self.cluster.kubeconfig}", *words)
        return run(*command, seconds=seconds, stdin=stdin, check=check).stdout

    def helm(self, *words: object, seconds: float = 180.0) -> str:
        return run(tool("helm"), f"--kubeconfig={self.cluster.kubeconfig}", *words, seconds=seconds).stdout

    def apply(self, *objects: Mapping[str, Any]) -> None:
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "-f", "-", stdin=json.dumps(listed))

    def client_url(self, path: str) -> str:
        return f"{self.proxy_url}/api/v1/namespaces/{NAMESPACE}/pods/{CLIENT}:{client.PORT}/proxy{path}"

    def start(self) -> None:
        """Raises CommandFailed, AssertionError, Occupied."""
        if self.cluster.lent:
            lent.check(self.kubectl, _NAMESPACES)
        self._begun = True
        self._prepare_nodes()
        if self.cluster.built_here or self.cluster.lent:
            # What an earlier run, perhaps killed, left on a kept cluster: models, and an operator scaled to nothing.
            self._clear()
        for name in _NAMESPACES:
            # The level that the docs promise to work under.
            labels = {"pod-security.kubernetes.io/enforce": "restricted", lent.MARK: "true"}
            self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
        self._start_client()
        started = time.monotonic()
        images = self.cluster.images
        repository, _, tag = images["forebay-operator"].rpartition(":")
        values = {
            "image.repository": repository,
            "image.tag": tag,
            "engineImage": images["forebay-engine-simulated"],
            "routerImage": images["forebay-router"],
            # Small nodes are shared with all of the suite.
            "resources.requests.cpu": "50m",
            # Nothing of it stays on somebody's cluster.
            "crds.keep": "false" if self.cluster.lent else "true",
        }
        self.helm(
            *("upgrade", "--install", RELEASE, REPOSITORY / "charts" / "forebay", "--namespace", OPERATOR_NAMESPACE),
            *(f"--set={key}={value}" for key, value in values.items()),
            *("--wait", "--timeout", "150s"),
        )
        self.installed_seconds = time.monotonic() - started
        self.kubectl("-n", NAMESPACE, "wait", f"pod/{CLIENT}", "--for=condition=Ready", "--timeout=60s", seconds=70)
        self._start_proxy()

    def stop(self) -> None:
        """Raises CommandFailed: a lent cluster could not be put back."""
        if self._proxy is not None:
            self._proxy.kill()
            self._proxy.wait()
        if self._begun and self.cluster.lent and not os.environ.get(KEEP):
            self._clear()
            lent.give_back(self.kubectl, POOL_LABEL, _NAMESPACES)

    def _clear(self) -> None:
        self.kubectl("-n", NAMESPACE, "delete", "dm", "--all", check=False, seconds=180)
        self.helm("uninstall", RELEASE, "--namespace", OPERATOR_NAMESPACE, "--ignore-not-found", "--wait")

    def _prepare_nodes(self) -> None:
        if self.cluster.built_here:
            self.kubectl("uncordon", "--selector=kubernetes.io/hostname")
        listed = json.loads(self.kubectl("get", "nodes", "-o", "json"))["items"]
        usable = lent.usable(listed)
        if not self.cluster.lent:
            usable = [node["metadata"]["name"] for node in listed if not lent.tainted(node)]
        assert len(usable) >= 2, (
            f"two schedulable nodes are needed (of a given cluster: that have no {lent.GPU}); there are {usable}"
        )
        self.nodes = (usable[0], usable[1])
        if self.cluster.lent:
            for node in listed:
                if node["metadata"]["name"] in self.nodes:
                    lent.take(self.kubectl, node, POOL_LABEL)
        for name, pool in zip(self.nodes, ("prefill", "decode"), strict=True):
            self.kubectl("label", "--overwrite", "node", name, f"{POOL_LABEL}={pool}")
            gpus = {"nvidia.com/gpu": str(GPUS)}
            patch = json.dumps({"status": {"capacity": gpus, "allocatable": gpus}})
            self.kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", patch)

    def _start_client(self) -> None:
        keys = {path: path.replace("/", "--") for path in _SOURCES}
        meta = {"name": CLIENT, "namespace": NAMESPACE}
        sources = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": meta,
            "data": {keys[path]: file.read_text() for path, file in _SOURCES.items()},
        }
        container = {
            "name": CLIENT,
            "image": self.cluster.images["forebay-router"],
            "command": ["python", "-m", "e2e.on_kubernetes.client"],
            "env": [{"name": "PYTHONPATH", "value": "/client"}],
            "ports": [{"containerPort": client.PORT}],
            "readinessProbe": {"tcpSocket": {"port": client.PORT}, "periodSeconds": 1},
            "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            },
            "volumeMounts": [{"name": "sources", "mountPath": "/client"}],
        }
        items = [{"key": key, "path": path} for path, key in keys.items()]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**meta, "labels": {"app": CLIENT}},
            "spec": {
                # Not on the node that a test drains.
                "nodeSelector": {"kubernetes.io/hostname": self.nodes[0]},
                "terminationGracePeriodSeconds": 1,
                "automountServiceAccountToken": False,
                "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
                "containers": [container],
                "volumes": [{"name": "sources", "configMap": {"name": CLIENT, "items": items}}],
            },
        }
        self.kubectl("-n", NAMESPACE, "delete", "pod", CLIENT, "--ignore-not-found", "--wait")
        self.apply(sources, pod)

    def _start_proxy(self) -> None:
        command = [tool("kubectl"), f"--kubeconfig={self.cluster.kubeconfig}", "proxy", "--port=0"]
        self._proxy = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._proxy.stdout is not None
        said = self._proxy.stdout.readline().decode().split()
        assert said, f"kubectl proxy ended without a word: run {' '.join(command)}"
        # "Starting to serve on 127.0.0.1:PORT"
        self.proxy_url = f"http://{said[-1]}"

    def logs(self) -> str:
        """Of everything that is not well, for a person who looks into a failure."""
        parts = []
        for namespace in (OPERATOR_NAMESPACE, NAMESPACE):
            for words in (
                ("get", "dm,deploy,pods", "-o", "wide"),
                ("get", "pods", "-o", f"jsonpath={_ENDED}"),
                ("get", "events", "--sort-by=.lastTimestamp"),
                ("logs", "--all-containers", "--tail=40", "--prefix", "--max-log-requests=40",
                 "-l", "app.kubernetes.io/name in (forebay-operator, forebay)"),
            ):  # fmt: skip
                try:
                    text = self.kubectl("-n", namespace, *words, check=False)[-6000:]
                except CommandFailed as error:
                    text = str(error)
                parts.append(f"--- {namespace}: {' '.join(words[:2])}\n{text}")
        return "\n".join(parts)
