"""A cluster with the product on it, for the whole run. `python -m e2e` starts the cluster and says which it is."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from e2e.cluster.providers import CLUSTER_VARIABLE, Cluster
from e2e.on_kubernetes.deployed import NAMESPACE, Deployed
from e2e.site import Site
from forebay_operator import kube as k


@pytest.fixture(scope="session")
def deployed() -> Iterator[Deployed]:
    said = os.environ.get(CLUSTER_VARIABLE)
    if said is None:
        pytest.skip("no cluster is up for the suite: run it as `make e2e`, or `python -m e2e [pytest's arguments]`")
    held: dict[str, Any] = json.loads(said)
    made = Deployed(Cluster(held["provider"], Path(held["kubeconfig"]), held["images"]))
    try:
        try:
            made.start()
        except Exception as error:
            error.add_note(made.logs())
            raise
        yield made
    finally:
        made.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.failed and report.when in ("setup", "call"):
        funcargs = getattr(item, "funcargs", {})
        made = funcargs.get("deployed")
        if isinstance(made, Deployed):
            report.sections.append(("the cluster", made.logs()))
    return report


class KubernetesSite(Site):
    """A model on the cluster, and the client's pod."""

    deployed: Deployed
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://{self.name}-router.{self.namespace}.svc:8000"

    async def ask(self, body: dict[str, Any], patience: float = 0.0) -> dict[str, Any]:
        """One request by the client's pod, through the Service; tried again for `patience` seconds."""
        asked = {"url": self.url, "body": body, "patience_s": patience}
        return await self._client("POST", "/complete", asked)

    async def start_traffic(self, **options: Any) -> None:
        await self._client("POST", "/traffic", {"url": self.url, "model": "assistant", **options})

    async def traffic(self) -> dict[str, Any]:
        return await self._client("GET", "/traffic")

    async def stop_traffic(self) -> dict[str, Any]:
        return await self._client("DELETE", "/traffic")

    async def _client(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        async with self.session.request(method, self.deployed.client_url(path), json=body) as answer:
            text = await answer.text()
            assert answer.status == 200, f"{method} {path} of the client's pod: {answer.status} {text[:2000]}"
            held: dict[str, Any] = json.loads(text)
            return held


def needs_own_nodes(deployed: Deployed, what: str) -> None:
    if not deployed.cluster.built_here:
        pytest.skip(f"{what}: needs the two nodes built here, not a cluster that is {deployed.cluster.provider}")


async def site_of(deployed: Deployed, name: str) -> AsyncIterator[KubernetesSite]:
    kube = await k.KubeClient.connect(kubeconfig=str(deployed.cluster.kubeconfig))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=240)) as session:
        made = KubernetesSite(kube, NAMESPACE, name)
        made.deployed, made.session = deployed, session
        try:
            yield made
        finally:
            await kube.close()
