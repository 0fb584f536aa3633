"""An operator's surroundings on a real API server with real controllers, and kubelets that say what kubelets say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import kopf
import pytest
import yaml
from e2e.cluster.control_plane import ControlPlane, Kubelets, NotBuilt, control_plane

from forebay_operator import kube as k
from forebay_operator.api import labels
from forebay_operator.build.surroundings import Surroundings
from forebay_operator.kube import KubeClient, Object
from forebay_operator.leader import LeaderElector
from forebay_operator.main import Operator
from forebay_operator.metrics import OperatorMetrics
from forebay_operator.observe.load import Loads, RouterReport, WorkerState, combine
from forebay_operator.observe.types import LatencyView
from forebay_operator.settings import Settings
from forebay_operator.status.build import build_status
from forebay_wire.load import LoadReport
from forebay_wire.messages import DrainResponse

NAMESPACES = k.Resource("v1", "Namespace", "namespaces", namespaced=False)
CRD_FILE = Path(__file__).parents[2] / "crds" / "serving.forebay.dev_disaggregatedmodels.yaml"


@dataclass
class PodWorkers:
    """Workers and routers behind the pods that the kubelets run."""

    kubelets: Kubelets
    namespace: str
    """Addresses are unique in a namespace only: each test has kubelets of its own."""

    running: dict[str, int] = field(default_factory=dict)
    latency: LatencyView | None = None

    async def loads(self, routers: Sequence[str]) -> Loads:
        states = []
        for name, pod in self.kubelets.seen.items():
            marks = pod["metadata"]["labels"]
            if labels.POOL in marks:
                load = LoadReport("e", 1, ready=True, running=self.running.get(name, 0))
                states.append(WorkerState(name, "draining" if labels.DRAINING in marks else "ready", 0.1, load))
        return replace(combine([RouterReport(workers=states) for _ in routers]), latency=self.latency)

    async def drain(self, address: str, token: str, draining: bool, *, move: bool = False) -> DrainResponse | None:
        for name, pod in self.kubelets.seen.items():
            if pod["metadata"]["namespace"] == self.namespace and pod["status"].get("podIP") == address:
                (self.kubelets.unready.add if draining else self.kubelets.unready.discard)(name)
                return DrainResponse(draining, self.running.get(name, 0), 0)
        return None


@dataclass
class Site:
    plane: ControlPlane
    kube: KubeClient
    kubelets: Kubelets
    workers: PodWorkers
    namespace: str
    requests: list[tuple[str, str, str, int]] = field(default_factory=list)

    @asynccontextmanager
    async def operator(self) -> AsyncIterator[Operator]:
        settings = Settings("default", "test", lease_name=f"op-{self.namespace}", namespaces=(self.namespace,),
                            surroundings=Surroundings("default"))  # fmt: skip
        metrics = OperatorMetrics()
        client = self.plane.client(on_request=lambda *what: self.requests.append(what))
        elector = LeaderElector(client, namespace="default", name=settings.lease_name, identity="test",
                                clock=asyncio.get_running_loop().time)  # fmt: skip
        info = kopf.ConnectionInfo(server=self.plane.url, token=self.plane.token, insecure=True)
        made = Operator(settings, client, self.workers, build_status, metrics, elector, pod_monitors=False,
                        authenticate=lambda **_: info)  # fmt: skip
        task = asyncio.create_task(made.run())
        try:
            yield made
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await client.close()

    async def apply(self, obj: Object) -> Object:
        obj = {**obj, "metadata": {**obj["metadata"], "namespace": self.namespace}}
        return await self.kube.apply(k.MODELS, obj, force=True)

    async def model(self, name: str = "assistant") -> Object:
        return await self.kube.get(k.MODELS, self.namespace, name)

    async def until(self, what: str, check: Callable[[], Any], seconds: float = 30.0) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while not await check():
            if asyncio.get_running_loop().time() > deadline:
                held = [m.get("status") for m in await self.kube.list(k.MODELS, self.namespace)]
                raise AssertionError(f"not within {seconds:g} s: {what}; status {held}")
            await asyncio.sleep(0.1)

    async def is_ready(self) -> bool:
        held = await self.model()
        conditions = held.get("status", {}).get("conditions", [])
        current = held.get("status", {}).get("observedGeneration") == held["metadata"]["generation"]
        return current and any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    async def is_settled(self) -> bool:
        conditions = {c["type"]: c["status"] for c in (await self.model()).get("status", {}).get("conditions", [])}
        return await self.is_ready() and conditions.get("Reconciling") == "False"

    async def roles(self) -> dict[str, int]:
        pods = await self.kube.list(k.PODS, self.namespace, selector=labels.ROLE)
        held = [pod["metadata"]["labels"][labels.ROLE] for pod in pods if not pod["metadata"].get("deletionTimestamp")]
        return {role: held.count(role) for role in labels.POOLS}


@contextmanager
def running_plane() -> Iterator[ControlPlane]:
    """With the CRD. Skips where the programs are not built."""
    try:
        with control_plane(manifests=[yaml.safe_load(CRD_FILE.read_text())]) as running:
            yield running
    except NotBuilt as error:
        pytest.skip(f"needs a real API server: {error}")


@asynccontextmanager
async def running_site(plane: ControlPlane, namespace: str) -> AsyncIterator[Site]:
    """A namespace of its own, with kubelets for its pods."""
    kube: KubeClient = plane.client()
    await kube.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    kubelets = Kubelets(kube, labels.MODEL)
    made = Site(plane, kube, kubelets, PodWorkers(kubelets, namespace), namespace)

    async def established() -> bool:
        try:
            await kube.list(k.MODELS, namespace)
        except k.NotFound:
            return False
        return True

    await made.until("the kind served", established)
    task = asyncio.create_task(kubelets.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await kube.close()
