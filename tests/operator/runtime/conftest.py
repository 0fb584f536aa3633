"""A fake API server behind the real client; and a real one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from e2e.cluster.control_plane import ControlPlane

from forebay_operator.kube import KubeClient
from support.fake_cluster import FakeCluster
from support.fake_kube import FakeApi
from support.real_site import Site, running_plane, running_site
from support.reconcile_bench import Bench


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi().serving() as serving:
        yield serving


@pytest.fixture
async def kube(api: FakeApi) -> AsyncIterator[KubeClient]:
    client = api.client()
    yield client
    await client.close()


@pytest.fixture
def bench() -> Bench:
    api = FakeApi()
    cluster = FakeCluster(api)
    api.on_write = cluster.control
    api.missing.add("podmonitors")
    return Bench(api, api.direct(), cluster)


@pytest.fixture(scope="package")
def plane() -> Iterator[ControlPlane]:
    with running_plane() as running:
        yield running


@pytest.fixture
async def site(plane: ControlPlane, request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    async with running_site(plane, "n" + format(abs(hash(request.node.name)) % 10**8, "08d")) as made:
        yield made
