"""The operator is killed after its writes, on a real API server with real controllers: always the same final state.

`test_reconcile.py` does the same on the fake API server, where each run costs milliseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest

from forebay_operator import kube as k
from forebay_operator.api import labels
from forebay_operator.build.surroundings import Surroundings
from forebay_operator.kube import KubeClient, Object
from forebay_operator.metrics import OperatorMetrics
from forebay_operator.queue import RetryAfter
from support.fake_cluster import simulated_model
from support.real_site import Site
from support.reconcile_bench import reconciler

REST_SECONDS = 90.0
CHANGED = {"type": "Simulated", "image": "e:2", "kvCache": {"memory": "1Gi"}}
STEPS: dict[str, Object | None] = {
    "create": simulated_model(2, 3),
    "scale-in": simulated_model(1, 1),
    "scale-out": simulated_model(1, 2),
    "rollout": simulated_model(1, 2, engine=CHANGED),
    "delete": None,
}


class Killed(BaseException):
    """No `except Exception` of the operator outlives it."""


class MortalClient(KubeClient):
    """Ends its operator after one of the writes that changed something; from then on it sends nothing."""

    def __init__(self, client: KubeClient, seen: set[str], kill: Callable[[], bool]) -> None:
        """`seen`: all resourceVersions that operators were told so far; a write that answers with one changed nothing,
        as most do of an operator that begins and applies everything once."""
        super().__init__(client._client)
        self._seen = seen
        self._kill = kill
        self._dead = False

    async def _request(self, verb: str, method: str, resource: k.Resource, *args: Any, **options: Any) -> Object:
        if self._dead:
            raise Killed
        answer = await super()._request(verb, method, resource, *args, **options)
        told = [obj.get("metadata", {}) for obj in answer.get("items", [answer])]
        versions = {meta["resourceVersion"] for meta in told if "resourceVersion" in meta}
        new = method == "DELETE" or not versions <= self._seen
        self._seen |= versions
        if method != "GET" and resource is not k.EVENTS and new and "dryRun" not in (options.get("query") or {}):
            self._dead = self._kill()
            if self._dead:
                raise Killed
        return answer


@dataclass
class Life:
    """One operator process."""

    site: Site
    seen: set[str]
    kill: Callable[[], bool]

    def __post_init__(self) -> None:
        self.client = MortalClient(self.site.plane.client(), self.seen, self.kill)
        self.reconciler = reconciler(
            self.client,
            self.site.workers,
            lambda: datetime.now(UTC),
            Surroundings("default"),
            OperatorMetrics(),
        )


@dataclass
class Change:
    """A change of the spec, carried out by operators that follow on each other."""

    site: Site
    kill: Callable[[int], bool]
    """By the number of a write, from 0."""

    writes: int = 0
    """That changed something."""

    lives: int = 1
    seen: set[str] = field(default_factory=set)

    def _kill(self) -> bool:
        self.writes += 1
        return self.kill(self.writes - 1)

    async def run(self, wanted: Object | None) -> dict[str, Any]:
        """Returns the state in which nothing is due."""
        site = self.site
        if wanted is None:
            held = await site.model()
            await site.kube.delete(k.MODELS, site.namespace, "assistant", uid=held["metadata"]["uid"])
        else:
            await site.apply(wanted)
        deadline = asyncio.get_running_loop().time() + REST_SECONDS
        life = Life(site, self.seen, self._kill)
        calm = 0
        while calm < 3:
            assert asyncio.get_running_loop().time() < deadline, (
                f"no rest after {self.lives} lives: {await self.state()}"
            )
            before = self.writes
            try:
                wait = await life.reconciler.reconcile((site.namespace, "assistant"))
            except Killed:
                await life.client.close()
                life, self.lives, calm = Life(site, self.seen, self._kill), self.lives + 1, 0
                continue
            except RetryAfter:
                wait = 1.0
            resting = (wait is None or wait > 20.0) and self.writes == before and await self._as_wanted(wanted)
            calm = calm + 1 if resting else 0
            await asyncio.sleep(0.1 if wait is None else min(wait, 0.1))  # as the queue waits for a watch to tell
        await life.client.close()
        return await self.state()

    async def _as_wanted(self, wanted: Object | None) -> bool:
        if wanted is None:
            return not (await self.state())["children"]
        roles = {role: wanted["spec"][role]["replicas"] for role in labels.POOLS}
        return await self.site.is_settled() and await self.site.roles() == roles

    async def state(self) -> dict[str, Any]:
        """Without what differs from run to run."""
        site, found = self.site, []
        for resource in k.CHILDREN:
            if resource is not k.POD_MONITORS:
                found += await site.kube.list(resource, site.namespace, selector=labels.MODEL)
        models = await site.kube.list(k.MODELS, site.namespace)
        pods = await site.kube.list(k.PODS, site.namespace, selector=labels.MODEL)
        return {
            "children": sorted((obj["kind"], obj["metadata"]["name"]) for obj in found),
            "replicas": {o["metadata"]["name"]: o["spec"]["replicas"] for o in found if o["kind"] == "Deployment"},
            "pods": sorted(sorted(pod["metadata"]["labels"].items()) for pod in pods),
            "operations": [model.get("status", {}).get("operation") for model in models],
        }


async def test_killed_after_every_write(site: Site) -> None:
    """Each operator gets one write done. The states are those of a life without kills."""
    expected = {name: await Change(site, lambda _: False).run(wanted) for name, wanted in STEPS.items()}
    assert expected["rollout"]["pods"] != expected["scale-out"]["pods"]
    for name, wanted in STEPS.items():
        change = Change(site, lambda _: True)
        assert await change.run(wanted) == expected[name], name
        # The fewest are a scale-out's: count, role, status. What status says in between is written where a look falls
        # into it, and on a busy machine none does; and writes on their way together end with the one life.
        assert name == "delete" or min(change.lives, change.writes) >= 3, (name, change.lives, change.writes)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name, wanted in STEPS.items() if wanted is not None])
async def test_killed_once_after_each_write(site: Site, name: str) -> None:
    """A run for each write of the change, which is the one that the operator is killed after."""
    names = list(STEPS)
    before = names[: names.index(name)][-1:]

    async def run(number: int) -> tuple[dict[str, Any], int]:
        for earlier in before:
            await Change(site, lambda _: False).run(STEPS[earlier])
        change = Change(site, lambda count: count == number)
        state = await change.run(STEPS[name])
        await Change(site, lambda _: False).run(None)
        return state, change.writes

    expected, writes = await run(-1)
    number = 0
    while number < writes:
        state, writes = await run(number)
        assert state == expected, f"killed after write {number} of {writes}"
        number += 1
