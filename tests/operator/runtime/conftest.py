"""A fake API server behind the real client."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from forebay_operator.kube import KubeClient
from support.fake_kube import FakeApi


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi().serving() as serving:
        yield serving


@pytest.fixture
async def kube(api: FakeApi) -> AsyncIterator[KubeClient]:
    client = api.client()
    yield client
    await client.close()
