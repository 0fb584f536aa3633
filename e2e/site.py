"""One model on one cluster, as a test sees it, whatever runs its pods."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from forebay_operator import kube as k
from forebay_operator.api import labels

POLL_SECONDS = 0.1


@dataclass
class Site:
    kube: k.KubeClient
    namespace: str
    name: str = "assistant"

    async def apply(self, obj: dict[str, Any]) -> None:
        """Under a field manager that is not the operator's."""
        meta = {**obj["metadata"], "name": self.name, "namespace": self.namespace}
        await self.kube.apply(k.MODELS, {**obj, "metadata": meta}, force=True, manager="e2e")

    async def model(self) -> dict[str, Any]:
        return await self.kube.get(k.MODELS, self.namespace, self.name)

    async def pods(self, **marks: str) -> list[dict[str, Any]]:
        """Workers, also those that end."""
        chosen = (f"{labels.MODEL}={self.name}", labels.POOL, *(f"forebay.dev/{k}={v}" for k, v in marks.items()))
        return await self.kube.list(k.PODS, self.namespace, selector=",".join(chosen))

    async def routers(self) -> list[dict[str, Any]]:
        chosen = f"{labels.MODEL}={self.name},app.kubernetes.io/component=router"
        return await self.kube.list(k.PODS, self.namespace, selector=chosen)

    async def roles(self) -> tuple[int, int]:
        """Workers in role prefill and decode, those that leave left out."""
        held = [
            pod["metadata"]["labels"].get(labels.ROLE)
            for pod in await self.pods()
            if not pod["metadata"].get("deletionTimestamp") and labels.DRAINING not in pod["metadata"]["labels"]
        ]
        return held.count("prefill"), held.count("decode")

    async def set_targets(self, prefill: int, decode: int) -> None:
        status = {"prefill": {"target": prefill}, "decode": {"target": decode}}
        await self.kube.merge(k.MODELS, self.namespace, self.name, {"status": status}, subresource="status")

    async def settled(self) -> bool:
        held = await self.model()
        conditions = {c["type"]: c["status"] for c in held.get("status", {}).get("conditions", [])}
        current = held.get("status", {}).get("observedGeneration") == held["metadata"]["generation"]
        done = conditions.get("Ready") == "True" and conditions.get("Reconciling") == "False"
        return current and done and "operation" not in held["status"]

    async def at(self, prefill: int, decode: int) -> bool:
        """So many in each role, and nothing under way."""
        return await self.roles() == (prefill, decode) and await self.settled()

    async def until(self, what: str, check: Callable[[], Awaitable[bool]], seconds: float = 60.0) -> float:
        """Seconds it took. Raises AssertionError with what there is to see."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        while True:
            self.watch()
            with contextlib.suppress(k.NotFound, k.Unavailable):
                if await check():
                    return loop.time() - started
            if loop.time() - started > seconds:
                raise AssertionError(f"not within {seconds:g} s: {what}\n{await self.told()}")
            await asyncio.sleep(POLL_SECONDS)

    def watch(self) -> None:
        """Called while waiting: raise when going on makes no sense."""

    async def told(self) -> str:
        """For a person who looks into a failure."""
        try:
            status = (await self.model()).get("status") or {}
        except k.ApiError as error:
            return str(error)
        kept = {key: value for key, value in status.items() if key not in ("memory", "decisions")}
        pods = [
            f"{pod['metadata']['name']} on {pod['spec'].get('nodeName')}: {pod['status'].get('phase')}, "
            f"role {pod['metadata']['labels'].get(labels.ROLE)}"
            + (", ending" if pod["metadata"].get("deletionTimestamp") else "")
            for pod in [*await self.pods(), *await self.routers()]
        ]
        return "\n".join([f"status {json.dumps(kept)}", *pods])
