"""A cluster for the suite, of what this machine has: a real API server where one is built, else the imitation."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from e2e.cluster.control_plane import ControlPlane, NotBuilt, control_plane
from e2e.cluster.process_kubelet import ProcessKubelet
from forebay_operator import kube as k
from forebay_operator.api import labels
from support.fake_cluster import FakeCluster, simulated_model
from support.fake_kube import FakeApi

NAMESPACE = "llm"
CRD_FILE = Path(__file__).parents[1] / "crds" / "serving.forebay.dev_disaggregatedmodels.yaml"
NAMESPACES = k.Resource("v1", "Namespace", "namespaces", namespaced=False)
ROUTER_PORT = 8000


@dataclass
class Site:
    """An API server, a kubelet that runs pods as processes, and an operator process that can be killed."""

    kube: k.KubeClient
    kubelet: ProcessKubelet
    kubeconfig: Path
    folder: Path
    session: aiohttp.ClientSession
    plane: ControlPlane | None
    api: FakeApi | None
    """One of the two."""

    running: asyncio.Task[None] | None = None
    """The kubelet's."""

    _operator: subprocess.Popen[bytes] | None = field(default=None)

    def start_operator(self) -> None:
        command = [sys.executable, "-m", "forebay_operator.main", "--operator-namespace=default", "--host=127.0.0.1",
                   "--port=0"]  # fmt: skip
        with (self.folder / "operator.log").open("ab") as log:
            environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig)}
            self._operator = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def end_operator(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self._operator is not None
        self._operator.send_signal(number)
        try:
            return self._operator.wait(15)
        finally:
            self._operator.kill()

    async def apply(self, obj: dict[str, Any]) -> None:
        await self.kube.apply(k.MODELS, {**obj, "metadata": {**obj["metadata"], "namespace": NAMESPACE}}, force=True)

    async def model(self) -> dict[str, Any]:
        return await self.kube.get(k.MODELS, NAMESPACE, "assistant")

    async def pods(self, **marks: str) -> list[dict[str, Any]]:
        selector = ",".join([labels.POOL, *(f"forebay.dev/{key}={value}" for key, value in marks.items())])
        return await self.kube.list(k.PODS, NAMESPACE, selector=selector)

    async def roles(self) -> tuple[int, int]:
        held = [
            pod["metadata"]["labels"].get(labels.ROLE)
            for pod in await self.pods()
            if not pod["metadata"].get("deletionTimestamp") and labels.DRAINING not in pod["metadata"]["labels"]
        ]
        return held.count("prefill"), held.count("decode")

    async def set_targets(self, prefill: int, decode: int) -> None:
        status = {"prefill": {"target": prefill}, "decode": {"target": decode}}
        await self.kube.merge(k.MODELS, NAMESPACE, "assistant", {"status": status}, subresource="status")

    async def settled(self) -> bool:
        held = await self.model()
        conditions = {c["type"]: c["status"] for c in held.get("status", {}).get("conditions", [])}
        current = held.get("status", {}).get("observedGeneration") == held["metadata"]["generation"]
        done = conditions.get("Ready") == "True" and conditions.get("Reconciling") == "False"
        return current and done and "operation" not in held["status"]

    async def router(self) -> str:
        pods = await self.kube.list(k.PODS, NAMESPACE, selector="app.kubernetes.io/component=router")
        return f"http://{pods[0]['status']['podIP']}:{ROUTER_PORT}"

    async def until(self, what: str, check: Callable[[], Awaitable[bool]], seconds: float = 60.0) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            if self.running is not None and self.running.done():
                self.running.result()
            with contextlib.suppress(k.NotFound):
                if await check():
                    return
            if asyncio.get_running_loop().time() > deadline:
                status = (await self.model()).get("status")
                log = (self.folder / "operator.log").read_text(errors="replace")[-2000:]
                raise AssertionError(f"not within {seconds:g} s: {what}; status {json.dumps(status)}; operator: {log}")
            await asyncio.sleep(0.1)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with contextlib.AsyncExitStack() as stack:
        api: FakeApi | None = None
        plane: ControlPlane | None = None
        try:
            plane = await asyncio.to_thread(
                stack.enter_context, control_plane(manifests=[yaml.safe_load(CRD_FILE.read_text())])
            )
        except NotBuilt as error:
            print(f"a real API server is left out: {error}")
            api = await stack.enter_async_context(FakeApi().serving())
            api.on_write = FakeCluster(api, kubelet=True).control
            api.missing.add("podmonitors")
            url, kube, credentials = api.url, api.client(), tmp_path
            kubeconfig = tmp_path / "kubeconfig"
            kubeconfig.write_text(json.dumps({
                "apiVersion": "v1", "kind": "Config", "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": url}}],
                "users": [{"name": "u", "user": {"token": "none"}}],
            }))  # fmt: skip
        else:
            url, kube, kubeconfig, credentials = plane.url, plane.client(), plane.kubeconfig(), plane.credentials()
            await kube.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        stack.push_async_callback(kube.close)
        kubelet = ProcessKubelet(
            kube, tmp_path, labels.MODEL, api=url, credentials=credentials, environment={"PATH": os.environ["PATH"]}
        )
        session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120), connector=aiohttp.TCPConnector(limit=0))
        )
        made = Site(kube, kubelet, kubeconfig, tmp_path, session, plane, api)

        async def served() -> bool:
            await kube.list(k.MODELS, NAMESPACE)
            return True

        await made.until("the kind served", served)
        running = made.running = asyncio.create_task(kubelet.run())
        made.start_operator()
        try:
            yield made
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                made.end_operator(signal.SIGKILL)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


__all__ = ["NAMESPACE", "Site", "simulated_model", "site"]
