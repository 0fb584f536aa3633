"""One simulated model under steady traffic: what everything that disturbs it is done to, and how it is judged."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

from e2e.on_kubernetes.conftest import KubernetesSite
from e2e.on_kubernetes.deployed import NAMESPACE, OPERATOR_NAMESPACE, Deployed
from forebay_operator import kube as k
from forebay_operator.api import labels

NAME: Final = "assistant"
STREAMS: Final = 20
SETTLE_SECONDS: Final = 120.0
FLOW_SECONDS: Final = 90.0
UNHARMED: Final[dict[str, Any]] = {"lost": 0, "wrong": 0, "cut": 0, "refused": 0, "told": []}


def model(prefill: int, decode: int, *, gpus: int = 0, revision: int = 0, **spec: Any) -> dict[str, Any]:
    """A worker takes `gpus` of a node; none is computed on. Each `revision` is another pod template."""
    resources: dict[str, Any] = {"requests": {"cpu": "50m", "memory": "128Mi"}}
    if gpus:
        # In the pod's template: spec.<pool>.gpus is refused for an engine that uses none.
        resources["limits"] = {"nvidia.com/gpu": str(gpus)}
    worker = {"name": "engine", "resources": resources}
    router = {"name": "router", "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}}
    pool = {"gpus": {"count": 0}, "podTemplate": {"spec": {"containers": [worker]}}}
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND,
        "metadata": {},
        "spec": {
            "model": {"servedName": NAME},
            "engine": {
                "type": "Simulated",
                "kvCache": {"memory": "1Gi"},
                "simulated": {"performanceModel": "slow"},
                "env": [{"name": "REVISION", "value": str(revision)}] if revision else [],
            },
            "prefill": {"replicas": prefill, **pool},
            "decode": {"replicas": decode, **pool},
            "router": {"replicas": 2, "podTemplate": {"spec": {"containers": [router]}}},
            # The test says where the ratio goes.
            "scaling": {"mode": "Off"},
            "drain": {"timeoutSeconds": 60},
            **spec,
        },
    }


@dataclass
class Scene:
    deployed: Deployed
    site: KubernetesSite

    async def serve(self, prefill: int, decode: int, **options: Any) -> float:
        """Apply `model(...)` and wait until it serves so. Seconds it took."""
        await self.site.apply(model(prefill, decode, **options))
        return await self.serves(prefill, decode)

    async def serves(self, prefill: int, decode: int, seconds: float = SETTLE_SECONDS) -> float:
        return await self.site.until(f"{prefill}:{decode}", lambda: self.site.at(prefill, decode), seconds)

    async def remove(self) -> None:
        """The model and, which takes longer, its pods."""
        words = ("-n", NAMESPACE, "delete", "dm", NAME, "--ignore-not-found")
        await asyncio.to_thread(lambda: self.deployed.kubectl(*words, seconds=SETTLE_SECONDS))

        async def gone() -> bool:
            return not await self.site.pods() and not await self.site.routers()

        await self.site.until("its pods are gone", gone, SETTLE_SECONDS)

    async def begin_traffic(self) -> None:
        """Anew, the model being at rest."""
        # Ready routers are reached through the Service once kube-proxy has them too.
        answer = await self.site.ask({"model": NAME, "prompt": "ready?", "max_tokens": 1}, patience=30)
        assert answer["status"] == 200, f"the Service does not answer: {answer}"
        await self.site.start_traffic(streams=STREAMS)

    async def flowing(self, more: int) -> None:
        """Until so many more streams ended."""
        goal = (await self.site.traffic())["count"] + more

        async def reached() -> bool:
            return bool((await self.site.traffic())["count"] >= goal)

        await self.site.until(f"{more} more streams ended", reached, FLOW_SECONDS)

    async def settled_traffic(self) -> dict[str, Any]:
        """The traffic's report once every stream that is open now has ended."""
        opened = (await self.site.traffic())["opened"]

        async def ended() -> bool:
            return bool((await self.site.traffic())["settled"] >= opened)

        await self.site.until("all streams that were open ended", ended, FLOW_SECONDS)
        return await self.site.traffic()

    async def operators(self) -> list[dict[str, Any]]:
        return await self.site.kube.list(k.PODS, OPERATOR_NAMESPACE, selector="app.kubernetes.io/name=forebay-operator")


def harm(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """New since `before`: streams lost, with another text, or cut; connections refused at first. `told`: in words."""
    new = {name: after[name] - before[name] for name in ("lost", "wrong", "cut", "refused")}
    # The words of the last of each kind are kept; where nothing is new, they are old.
    return {**new, "told": after["told"] if new["lost"] or new["wrong"] else []}
