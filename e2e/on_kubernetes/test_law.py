"""The rescaling law on a cluster: traffic turns round and back, and the ratio of `kubectl get dm -w` follows."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from bench.checkpoint import after_an_hour

from e2e.cluster.providers import tool
from e2e.on_kubernetes.conftest import KubernetesSite, site_of
from e2e.on_kubernetes.deployed import NAMESPACE, Deployed
from e2e.on_kubernetes.scene import Scene, model
from forebay_operator import kube as k
from forebay_operator.decide import reasons
from forebay_operator.rescaler import LAW, write_checkpoint

NAME = "turning"
START = (1, 3)
TURN_SECONDS = 60.0

DECODE_HEAVY = {"rate": 1.5, "fresh": 600, "tokens": 150}
"""A fifth of a prefill worker of `slow` workers, and half a decode worker: less than what is there at 1:3."""

PREFILL_HEAVY = {"rate": 7.5, "fresh": 1500, "tokens": 8}
"""2.25 prefill workers."""

LONG_ANSWERS = {"rate": 2.0, "fresh": 1200, "tokens": 400}
"""Two decode workers' memory and more, half a prefill worker."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
async def site(deployed: Deployed) -> AsyncIterator[KubernetesSite]:
    async for made in site_of(deployed, NAME):
        try:
            yield made
        finally:
            await made.stop_traffic()
            deployed.kubectl("-n", NAMESPACE, "delete", "dm", NAME, "--ignore-not-found", seconds=120)


@contextmanager
def watched(deployed: Deployed) -> Iterator[list[str]]:
    """Ratios as `kubectl get dm -w` prints them, each once while it stays."""
    command = [tool("kubectl"), f"--kubeconfig={deployed.cluster.kubeconfig}", "-n", NAMESPACE, "get", "dm", NAME, "-w"]
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


def _prefill(ratio: str) -> int:
    return int(ratio.partition(":")[0])


async def _remember(site: KubernetesSite) -> None:
    """As after an hour of service and a quiet minute: what an operator would have recorded for the next one.

    Speed is learnt from workers that have run for half a minute, and the law's windows are a minute long.
    """
    known = after_an_hour("slow", START, time.time(), requests=1, prompt_tokens=60, output=40.0)
    law = write_checkpoint(known)
    status = {"status": {"memory": {LAW: law}}}
    await site.kube.merge(k.MODELS, site.namespace, site.name, status, subresource="status")


async def test_the_ratio_follows_traffic(deployed: Deployed, site: KubernetesSite) -> None:
    scene = Scene(deployed, site)
    spec = {
        # The router's own gear would take the prompts to decode workers, whatever their role.
        "router": {"replicas": 1, "convertible": "Never"},
        "objectives": {"timeToFirstTokenMilliseconds": 1000, "timePerOutputTokenMilliseconds": 60},
    }
    await site.apply(model(*START, **spec))
    await scene.serves(*START)
    answer = await site.ask({"model": "assistant", "prompt": "ready?", "max_tokens": 1}, patience=30)
    assert answer["status"] == 200, answer
    ended: list[dict[str, Any]] = []

    async def turn(**traffic: Any) -> None:
        ended.append(await site.stop_traffic())
        await site.start_traffic(streams=60, **traffic)

    async def judged() -> bool:
        decision = (await site.model())["status"].get("decision") or {}
        return decision.get("reason") in (reasons.BALANCED, reasons.BETTER_SPLIT)

    with watched(deployed) as ratios:
        await turn(**DECODE_HEAVY)
        await _remember(site)
        await site.apply(model(*START, **spec, scaling={"mode": "Auto"}))
        took = [await site.until("the law to hold the split that fits", judged, TURN_SECONDS)]
        assert ratios == [f"{START[0]}:{START[1]}"]

        async def more_prefill() -> bool:
            return _prefill(ratios[-1]) >= 2

        await turn(**PREFILL_HEAVY)
        took.append(await site.until("more prefill workers for long prompts", more_prefill, TURN_SECONDS))

        async def fewer_prefill() -> bool:
            return _prefill(ratios[-1]) < max(map(_prefill, ratios))

        await turn(**LONG_ANSWERS)
        took.append(await site.until("fewer for long answers", fewer_prefill, TURN_SECONDS))
        seen = list(ratios)
    ended.append(await site.stop_traffic())
    streams = sum(each["count"] for each in ended if each)
    print(f"\nkubectl get dm -w: {' -> '.join(seen)}; first judged, turned and back after "
          f"{', '.join(f'{each:.0f}' for each in took)} s; {streams} streams")  # fmt: skip
    for each in ended:
        assert not each or (each["lost"], each["wrong"], each["cut"]) == (0, 0, 0), each
