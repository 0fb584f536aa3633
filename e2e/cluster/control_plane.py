"""A real API server without any node: etcd, kube-apiserver and kube-controller-manager as processes on loopback.

Needs no root and no containers; up in about 5 s. What a kubelet would do, `Kubelets` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from e2e.cluster.binaries import CONTROL_PLANE, bin_dir, missing

START_SECONDS: Final = 60.0
CONTROLLERS: Final = (
    "deployment-controller,replicaset-controller,garbage-collector-controller,namespace-controller,"
    "disruption-controller,serviceaccount-controller"
)


class NotBuilt(Exception):
    """The programs are not there; the text says how to get them."""


@dataclass
class ControlPlane:
    folder: Path
    url: str = ""
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    controllers: bool = True
    manifests: Sequence[dict[str, Any]] = ()
    """CustomResourceDefinitions to make before the controllers start: the garbage collector looks for new kinds only
    every 30 s."""

    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        """Returns when the API server is ready. Raises NotBuilt, TimeoutError."""
        absent = missing(*(name for name in CONTROL_PLANE if self.controllers or name != "kube-controller-manager"))
        if absent:
            raise NotBuilt(f"{', '.join(absent)} not built; `make kube-binaries` builds them (5 minutes, once)")
        etcd, peer, port = _free_ports(3)
        (self.folder / "tokens.csv").write_text(f'{self.token},admin,admin,"system:masters"\n')
        for command in (["genrsa", "-out", "sa.key", "2048"], ["rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub"]):
            subprocess.run(["openssl", *command], cwd=self.folder, check=True, capture_output=True, timeout=30)
        self._run(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            "--unsafe-no-fsync",
            "--log-level=error",
            f"--listen-client-urls=http://127.0.0.1:{etcd}",
            f"--advertise-client-urls=http://127.0.0.1:{etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
        )
        self.url = f"https://127.0.0.1:{port}"
        self._run(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{etcd}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            f"--cert-dir={self.folder}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self.folder / 'sa.pub'}",
            f"--service-account-signing-key-file={self.folder / 'sa.key'}",
            "--service-cluster-ip-range=10.96.0.0/16",
            # No node will ever ask for a pod's token.
            "--disable-admission-plugins=ServiceAccount",
        )
        self._wait()
        for manifest in self.manifests:
            self._create_crd(manifest)
        if self.controllers:
            kubeconfig = self.kubeconfig()
            self._run(
                "kube-controller-manager",
                f"--kubeconfig={kubeconfig}",
                "--leader-elect=false",
                "--secure-port=0",
                f"--controllers={CONTROLLERS}",
                "--kube-api-qps=200",
                "--kube-api-burst=400",
            )

    def kubeconfig(self) -> Path:
        path = self.folder / "kubeconfig"
        cluster = {"server": self.url, "insecure-skip-tls-verify": True}
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "c",
                    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                    "clusters": [{"name": "c", "cluster": cluster}],
                    "users": [{"name": "u", "user": {"token": self.token}}],
                }
            )
        )
        return path

    def credentials(self) -> Path:
        """A folder with `token` and `ca.crt`, as a pod's service account has it."""
        folder = self.folder / "account"
        folder.mkdir(exist_ok=True)
        (folder / "token").write_text(self.token)
        shutil.copy(self.folder / "apiserver.crt", folder / "ca.crt")
        return folder

    def client(self, **options: Any) -> Any:
        """The operator's own client, as an administrator."""
        from kubernetes.aio import client

        from forebay_operator.kube import KubeClient

        configuration = client.Configuration(host=self.url)
        configuration.verify_ssl = False
        configuration.api_key = {"BearerToken": f"Bearer {self.token}"}
        configuration.client_session_kwargs = {"trust_env": False}
        return KubeClient(client.ApiClient(configuration), **options)

    def pid(self, name: str) -> int:
        return next(p.pid for p in self._processes if str(p.args[0]).endswith(f"/{name}"))  # type: ignore[index]

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.pid(name), number)

    def stop(self) -> None:
        """Nothing here is worth an orderly end."""
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        self._processes.clear()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _run(self, name: str, *arguments: str) -> None:
        out: IO[bytes]
        with (self.folder / f"{name}.log").open("ab") as out:
            self._processes.append(
                subprocess.Popen([str(bin_dir() / name), *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            )

    def _opener(self) -> urllib.request.OpenerDirector:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )

    def _create_crd(self, manifest: dict[str, Any]) -> None:
        """Raises HTTPError with the server's reason."""
        request = urllib.request.Request(
            f"{self.url}/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
            data=json.dumps(manifest).encode(),
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"},
        )
        with self._opener().open(request, timeout=30):
            pass

    def _wait(self) -> None:
        opener = self._opener()
        request = urllib.request.Request(f"{self.url}/readyz", headers={"Authorization": f"Bearer {self.token}"})
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError), opener.open(request, timeout=5) as answer:
                if answer.status == 200:
                    return
            for process in self._processes:
                if process.poll() is not None:
                    raise TimeoutError(f"{process.args} ended with {process.returncode}: see its log in {self.folder}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no API server after {START_SECONDS:.0f} s: see the logs in {self.folder}")
            time.sleep(0.1)


@contextlib.contextmanager
def control_plane(*, controllers: bool = True, manifests: Sequence[dict[str, Any]] = ()) -> Iterator[ControlPlane]:
    """Up while the block runs; its folder is removed after."""
    folder = Path(tempfile.mkdtemp(prefix="forebay-kube-"))
    plane = ControlPlane(folder, controllers=controllers, manifests=manifests)
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


class Kubelets:
    """Makes pods run: each gets an address and becomes ready, unless told otherwise. Pods stay unscheduled, so that the
    API server deletes them at once."""

    def __init__(self, kube: Any, selector: str, poll: float = 0.1, network: str = "10.88") -> None:
        """`network`: first two bytes of the pods' addresses; in 127.0.0.0/8 they refuse connections at once."""
        self._kube = kube
        self._selector = selector
        self._poll = poll
        self._network = network
        self._count = 0
        self.unready: set[str] = set()
        """Pods, by name, that are kept NotReady."""

        self.seen: dict[str, dict[str, Any]] = {}
        """Pods there are now."""

    async def run(self) -> None:
        from forebay_operator.kube import PODS, ApiError

        while True:
            with contextlib.suppress(ApiError):
                pods = await self._kube.list(PODS, None, selector=self._selector)
                self.seen = {pod["metadata"]["name"]: pod for pod in pods}
                for pod in pods:
                    await self._touch(pod)
            await asyncio.sleep(self._poll)

    async def _touch(self, pod: dict[str, Any]) -> None:
        from forebay_operator.kube import PODS, NotFound

        meta, status = pod["metadata"], pod.get("status") or {}
        ready = meta["name"] not in self.unready
        held = next((c["status"] == "True" for c in status.get("conditions") or [] if c["type"] == "Ready"), None)
        if held == ready and status.get("podIP"):
            return
        self._count += 1
        address = status.get("podIP") or f"{self._network}.{self._count // 250 % 250}.{self._count % 250 + 1}"
        patch = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [{"type": "Ready", "status": "True" if ready else "False", "lastProbeTime": None}],
        }
        with contextlib.suppress(NotFound):
            await self._kube.merge(PODS, meta["namespace"], meta["name"], {"status": patch}, subresource="status")
