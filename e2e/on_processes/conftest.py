"""A cluster for the suite, of what this machine has: a real API server where one is built, else the imitation."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
import yaml

from e2e.cluster.control_plane import ControlPlane, NotBuilt, control_plane
from e2e.cluster.process_kubelet import ProcessKubelet
from e2e.site import Site
from forebay_operator import kube as k
from forebay_operator.api import labels
from support.fake_cluster import FakeCluster, simulated_model
from support.fake_kube import FakeApi

NAMESPACE = "llm"
CRD_FILE = Path(__file__).parents[2] / "crds" / "serving.forebay.dev_disaggregatedmodels.yaml"
NAMESPACES = k.Resource("v1", "Namespace", "namespaces", namespaced=False)
ROUTER_PORT = 8000


@dataclass
class ProcessSite(Site):
    """An API server, a kubelet that runs pods as processes, and an operator process that can be killed."""

    kubelet: ProcessKubelet = field(kw_only=True)
    kubeconfig: Path = field(kw_only=True)
    folder: Path = field(kw_only=True)
    session: aiohttp.ClientSession = field(kw_only=True)
    plane: ControlPlane | None = field(kw_only=True)
    api: FakeApi | None = field(kw_only=True)
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

    async def router(self) -> str:
        return f"http://{(await self.routers())[0]['status']['podIP']}:{ROUTER_PORT}"

    def watch(self) -> None:
        if self.running is not None and self.running.done():
            self.running.result()

    async def told(self) -> str:
        log = (self.folder / "operator.log").read_text(errors="replace")[-2000:]
        return f"{await super().told()}\noperator: {log}"


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[ProcessSite]:
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
        made = ProcessSite(
            kube,
            NAMESPACE,
            kubelet=kubelet,
            kubeconfig=kubeconfig,
            folder=tmp_path,
            session=session,
            plane=plane,
            api=api,
        )

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


__all__ = ["ProcessSite", "simulated_model", "site"]
