"""One operator in the test's own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import kopf

from forebay_operator.build.surroundings import Surroundings
from forebay_operator.kube import KubeClient
from forebay_operator.leader import LeaderElector, LeaseTimes
from forebay_operator.main import Operator
from forebay_operator.metrics import OperatorMetrics
from forebay_operator.settings import Settings
from forebay_operator.status.build import build_status
from support.fake_cluster import FakeCluster
from support.fake_kube import FakeApi

TIMES = LeaseTimes(duration=1.5, renew_deadline=1.0, retry=0.1)


@dataclass
class Running:
    operator: Operator
    task: asyncio.Task[bool]


@asynccontextmanager
async def operator(
    api: FakeApi, cluster: FakeCluster, identity: str = "one", *, pod_monitors: bool = False, **options: Any
) -> AsyncIterator[Running]:
    """A whole operator, kopf included, that leads by a Lease renewed ten times a second."""
    settings = Settings("forebay", identity, lease=TIMES, surroundings=Surroundings("forebay"), **options)
    metrics = OperatorMetrics()
    elector: LeaderElector | None = None
    kube: KubeClient = api.client(
        may_write=lambda: elector is not None and elector.is_leader(), on_request=metrics.requested
    )
    elector = LeaderElector(
        kube,
        namespace="forebay",
        name=settings.lease_name,
        identity=identity,
        clock=asyncio.get_running_loop().time,
        times=TIMES,
    )
    made = Operator(
        settings,
        kube,
        cluster,
        build_status,
        metrics,
        elector,
        pod_monitors=pod_monitors,
        authenticate=lambda **_: kopf.ConnectionInfo(server=api.url),
    )
    task = asyncio.create_task(made.run())
    try:
        yield Running(made, task)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await kube.close()
