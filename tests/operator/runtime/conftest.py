"""A fake API server behind the real client."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from forebay_operator.kube import KubeClient
from support.fake_cluster import FakeCluster
from support.fake_kube import FakeApi
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
