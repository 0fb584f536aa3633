"""A model whose ratio the rescaling law decides: what it remembers, what is asked of it, and what people see of it."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from bench.checkpoint import after_an_hour

from e2e.cluster.providers import tool
from e2e.on_kubernetes.conftest import KubernetesSite, site_of
from e2e.on_kubernetes.deployed import NAMESPACE, Deployed
from e2e.on_kubernetes.scene import Scene, model
from forebay_operator import kube as k
from forebay_operator.decide import reasons
from forebay_operator.rescaler import LAW, write_checkpoint

START: Final = (1, 3)
DECODE_HEAVY: Final = {"rate": 1.5, "fresh": 600, "tokens": 150}
"""A fifth of a prefill worker of `slow` workers, and half a decode worker: less than what is there at 1:3."""

PREFILL_HEAVY: Final = {"rate": 7.5, "fresh": 1500, "tokens": 8}
"""2.25 prefill workers."""

LONG_ANSWERS: Final = {"rate": 2.8, "fresh": 1200, "tokens": 400}
"""2.6 decode workers' memory, 0.7 of a prefill worker."""

SPEC: Final[dict[str, Any]] = {
    # The router's own gear would take the prompts to decode workers, whatever their role.
    "router": {"replicas": 1, "convertible": "Never"},
    "objectives": {"timeToFirstTokenMilliseconds": 1000, "timePerOutputTokenMilliseconds": 60},
}


@contextmanager
def watched(deployed: Deployed, name: str) -> Iterator[list[str]]:
    """Ratios as `kubectl get dm -w` prints them, each once while it stays."""
    command = [tool("kubectl"), f"--kubeconfig={deployed.cluster.kubeconfig}", "-n", NAMESPACE, "get", "dm", name, "-w"]
    seen: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        reading = threading.Thread(target=_read, args=(process, seen))
        reading.start()
        try:
            yield seen
        finally:
            process.kill()
            reading.join(10)


def _read(process: subprocess.Popen[str], seen: list[str]) -> None:
    assert process.stdout is not None
    # What stands before it is never empty.
    column = process.stdout.readline().split().index("RATIO")
    for line in process.stdout:
        ratio = line.split()[column]
        if seen[-1:] != [ratio]:
            seen.append(ratio)


def prefill_of(ratio: str) -> int:
    return int(ratio.partition(":")[0])


class Turning:
    """Traffic of one kind after another, and the ratio that follows it."""

    def __init__(self, site: KubernetesSite, ratios: list[str]) -> None:
        """`ratios`: of watched()."""
        self._site = site
        self.ratios = ratios
        self._ended: list[dict[str, Any]] = []

    async def to(self, **traffic: Any) -> None:
        self._ended.append(await self._site.stop_traffic())
        await self._site.start_traffic(streams=60, **traffic)

    async def until(self, what: str, wanted: Callable[[int], bool], seconds: float) -> float:
        """Seconds until the number of prefill workers is as `wanted`."""

        async def turned() -> bool:
            return wanted(prefill_of(self.ratios[-1]))

        return await self._site.until(what, turned, seconds)

    @property
    def most_prefill(self) -> int:
        return max(map(prefill_of, self.ratios))

    async def end(self) -> int:
        """How many streams there were."""
        self._ended.append(await self._site.stop_traffic())
        return sum(each["count"] for each in self._ended if each)

    def assert_unharmed(self) -> None:
        for each in self._ended:
            assert not each or (each["lost"], each["wrong"], each["cut"]) == (0, 0, 0), each


async def remember(site: KubernetesSite, start: tuple[int, int]) -> None:
    """As after an hour of service and a quiet minute: what an operator would have recorded for the next one.

    Speed is learnt from workers that have run for half a minute, and the law's windows are a minute long.
    """
    known = after_an_hour("slow", start, time.time(), requests=1, prompt_tokens=60, output=40.0)
    law = write_checkpoint(known)
    status = {"status": {"memory": {LAW: law}}}
    await site.kube.merge(k.MODELS, site.namespace, site.name, status, subresource="status")


async def ruled_site(deployed: Deployed, name: str) -> AsyncIterator[KubernetesSite]:
    """For a fixture: no traffic and no model is left when it ends."""
    async for made in site_of(deployed, name):
        try:
            yield made
        finally:
            await made.stop_traffic()
            deployed.kubectl("-n", NAMESPACE, "delete", "dm", name, "--ignore-not-found", seconds=120)


async def served(
    deployed: Deployed, site: KubernetesSite, made: dict[str, Any] | None = None, start: tuple[int, int] = START
) -> Scene:
    """The model, or another one that was `made`, answers at `start`; no law decides yet."""
    scene = Scene(deployed, site)
    await site.apply(made or model(*START, **SPEC))
    await scene.serves(*start)
    answer = await site.ask({"model": "assistant", "prompt": "ready?", "max_tokens": 1}, patience=30)
    assert answer["status"] == 200, answer
    return scene


async def condition(site: KubernetesSite, kind: str) -> dict[str, Any]:
    """Empty where there is none of that kind."""
    held = (await site.model())["status"].get("conditions", [])
    return next((c for c in held if c["type"] == kind), {})


async def rule(site: KubernetesSite, seconds: float) -> float:
    """The law decides from now on, with the memory of an hour; seconds until it has judged the split."""
    await remember(site, START)
    await site.apply(model(*START, **SPEC, scaling={"mode": "Auto"}))

    async def judged() -> bool:
        decision = (await site.model())["status"].get("decision") or {}
        return decision.get("reason") in (reasons.BALANCED, reasons.CAN_WAIT, reasons.BETTER_SPLIT)

    return await site.until("the law to hold the split that fits", judged, seconds)
