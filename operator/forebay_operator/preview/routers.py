"""The routers' load from outside the cluster, through the API server's proxy."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

import msgspec

from forebay_operator.build.names import selector
from forebay_operator.build.ports import HTTP
from forebay_operator.kube import PODS, ApiError, Kube
from forebay_operator.observe.load import MAX_ROUTERS, Loads, RouterReport, combine
from forebay_wire.messages import DrainResponse
from forebay_wire.paths import LOAD

log = logging.getLogger(__name__)

SECONDS: Final = 5.0


class ProxiedRouters:
    """`Workers` for somebody with a kubeconfig, who reaches no pod's address. It only reads."""

    def __init__(self, kube: Kube, namespace: str, model: str) -> None:
        self._kube = kube
        self._namespace = namespace
        self._selector = ",".join(f"{key}={value}" for key, value in selector(model, "router").items())

    async def loads(self, routers: Sequence[str]) -> Loads:
        pods = await self._kube.list(PODS, self._namespace, selector=self._selector)
        names = {str((pod.get("status") or {}).get("podIP")): pod["metadata"]["name"] for pod in pods}
        asked = [names[address] for address in routers if address in names][:MAX_ROUTERS]
        reports: list[RouterReport | None] = list(await asyncio.gather(*(self._report(name) for name in asked)))
        return combine(reports + [None] * (len(routers) - len(asked)))

    async def _report(self, pod: str) -> RouterReport | None:
        try:
            async with asyncio.timeout(SECONDS):
                answer = await self._kube.get(
                    PODS, self._namespace, f"{pod}:{HTTP}", subresource=f"proxy/{LOAD.lstrip('/')}"
                )
            return msgspec.convert(answer, type=RouterReport)
        except (ApiError, TimeoutError, msgspec.MsgspecError) as error:
            log.info("router %s does not report its load: %s", pod, error)
            return None

    async def drain(self, address: str, token: str, draining: bool, *, move: bool = False) -> DrainResponse | None:
        raise AssertionError(f"a plan never drains; asked to for the worker at {address}")
