"""A kubelet without containers: each pod's command runs as a process of this machine, at an address of its own.

Pods get addresses of 127.0.0.0/8, which Linux takes all of, so that each can listen on the port that its spec says.
Probes, the preStop sleep, SIGTERM and the grace period are as a kubelet's; limits, volumes but the token's, and users
are not. It is for pods of Forebay with simulated workers.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from forebay_operator.build.expand import expand
from forebay_operator.kube import PODS, SECRETS, ApiError, Conflict, Kube, NotFound

PERIOD_SECONDS = 0.1
PROBE_SECONDS = 2.0
FAILURES = 3
"""Failed probes in a row that make a pod NotReady, as the pods' own probes say."""

EVERYWHERE = "0.0.0.0"


@dataclass
class _Pod:
    name: str
    namespace: str
    uid: str
    address: str
    port: int
    process: subprocess.Popen[bytes]
    grace: float
    pre_stop: float
    failures: int = FAILURES
    reported: bool | None = None
    leaving: asyncio.Task[None] | None = field(default=None)


class ProcessKubelet:
    def __init__(
        self,
        kube: Kube,
        folder: Path,
        selector: str,
        *,
        api: str,
        credentials: Path,
        network: str = "127.77",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`api` and `credentials` are what routers get in the place of a cluster's own."""
        self._kube = kube
        self._folder = folder
        self._selector = selector
        self._api = api
        self._credentials = credentials
        self._network = network
        self._environment = dict(environment or {})
        self._pods: dict[str, _Pod] = {}
        self._count = 0

    async def run(self) -> None:
        """Until cancelled; then every process is killed."""
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PROBE_SECONDS)) as session:
                while True:
                    with contextlib.suppress(ApiError):
                        await self._turn(session)
                    await asyncio.sleep(PERIOD_SECONDS)
        finally:
            for pod in self._pods.values():
                if pod.leaving is not None:
                    pod.leaving.cancel()
                pod.process.kill()
                pod.process.wait()

    def address(self, name: str) -> str:
        return self._pods[name].address

    def kill(self, name: str) -> None:
        self._pods[name].process.kill()

    async def _turn(self, session: aiohttp.ClientSession) -> None:
        listed = {pod["metadata"]["uid"]: pod for pod in await self._kube.list(PODS, None, selector=self._selector)}
        for uid, obj in listed.items():
            if obj["metadata"].get("deletionTimestamp") is None and uid not in self._pods:
                self._pods[uid] = await self._start(obj)
        for uid, pod in list(self._pods.items()):
            asked_to_go = uid not in listed or listed[uid]["metadata"].get("deletionTimestamp") is not None
            if asked_to_go and pod.leaving is None:
                pod.leaving = asyncio.create_task(self._end(pod))
        await asyncio.gather(*(self._probe(session, pod) for pod in list(self._pods.values())))

    async def _start(self, obj: dict[str, Any]) -> _Pod:
        meta, spec = obj["metadata"], obj["spec"]
        self._count += 1
        address = f"{self._network}.{self._count // 250 + 1}.{self._count % 250 + 1}"
        container = spec["containers"][0]
        port = next(int(p["containerPort"]) for p in container["ports"] if p["name"] == "http")
        fields = {"metadata.name": meta["name"], "metadata.namespace": meta["namespace"], "status.podIP": address}
        env: dict[str, str] = {}
        for entry in container.get("env", []):
            if "valueFrom" in entry:
                env[entry["name"]] = fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            else:
                # The API server leaves an empty value out.
                env[entry["name"]] = expand(entry.get("value", ""), env)
        if env.get("BIND_ADDRESS") == EVERYWHERE:
            env["BIND_ADDRESS"] = address
        env["TOKEN_FILE"] = str(await self._token(meta["namespace"], spec))
        env |= self._environment
        words = [expand(word, env) for word in (*container["command"], *container.get("args", []))]
        if container["name"] == "router":
            words += [f"--kubernetes-api={self._api}", f"--kubernetes-credentials={self._credentials}"]
        words[0] = str(Path(sys.executable).parent / words[0])
        with (self._folder / f"{meta['name']}.log").open("ab") as log:
            process = subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        hook = ((container.get("lifecycle") or {}).get("preStop") or {}).get("sleep") or {}
        grace = float(spec.get("terminationGracePeriodSeconds", 30))
        pre_stop = float(hook.get("seconds", 0))
        return _Pod(meta["name"], meta["namespace"], meta["uid"], address, port, process, grace, pre_stop)

    async def _token(self, namespace: str, spec: Mapping[str, Any]) -> Path:
        name = next(v["secret"]["secretName"] for v in spec["volumes"] if v["name"] == "token")
        file = self._folder / f"{namespace}-{name}"
        if not file.exists():
            secret = await self._kube.get(SECRETS, namespace, name)
            file.write_bytes(base64.b64decode(secret["data"]["token"]))
        return file

    async def _probe(self, session: aiohttp.ClientSession, pod: _Pod) -> None:
        good = False
        if pod.process.poll() is None:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with session.get(f"http://{pod.address}:{pod.port}/ready") as answer:
                    good = answer.status == 200
        pod.failures = 0 if good else pod.failures + 1
        ready = pod.failures < FAILURES
        if ready != pod.reported:
            await self._report(pod, ready)

    async def _report(self, pod: _Pod, ready: bool) -> None:
        status = {
            "phase": "Running",
            "podIP": pod.address,
            "podIPs": [{"ip": pod.address}],
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        }
        with contextlib.suppress(NotFound):
            patch = {"metadata": {"uid": pod.uid}, "status": status}
            await self._kube.merge(PODS, pod.namespace, pod.name, patch, subresource="status")
        pod.reported = ready

    async def _end(self, pod: _Pod) -> None:
        """PreStop, SIGTERM, the grace period, SIGKILL; then the pod's object may go."""
        deadline = time.monotonic() + pod.grace
        await asyncio.sleep(pod.pre_stop)
        pod.process.send_signal(signal.SIGTERM)
        while pod.process.poll() is None:
            if time.monotonic() > deadline:
                pod.process.kill()
            await asyncio.sleep(0.05)
        while True:
            try:
                await self._kube.delete(PODS, pod.namespace, pod.name, uid=pod.uid)
            except (NotFound, Conflict):
                break
            except ApiError:
                await asyncio.sleep(PERIOD_SECONDS)
                continue
            break
        del self._pods[pod.uid]
