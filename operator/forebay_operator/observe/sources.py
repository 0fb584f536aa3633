"""Which source a model's spec asks for, made with what it needs."""

from __future__ import annotations

from collections.abc import Callable

import aiohttp

from forebay_operator.api.scaling import Metrics
from forebay_operator.kube import Kube
from forebay_operator.observe.endpoints import EndpointsSource
from forebay_operator.observe.fits import Capacity
from forebay_operator.observe.router_report import Totals
from forebay_operator.observe.traffic_source import TrafficSource


class Sources:
    """Of all models. One HTTP client serves them."""

    def __init__(self, kube: Kube, clock: Callable[[], float]) -> None:
        self._kube = kube
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None

    async def make(
        self, key: tuple[str, str], metrics: Metrics, totals: Totals | None, capacity: Capacity | None
    ) -> TrafficSource:
        """`totals`, `capacity`: of the source before, which the new one goes on from."""
        if self._session is None:
            self._session = aiohttp.ClientSession(trust_env=False)
        return EndpointsSource(self._session, self._clock, base=totals, capacity=capacity)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
