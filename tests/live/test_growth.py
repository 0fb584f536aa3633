"""Pools that grow and shrink with traffic in local mode: real workers come and go, and no request notices."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bench.checkpoint import believed
from bench.local_pool import LocalPool, Sent, local_pool, manifest, play, poisson

from forebay_operator.api.load import load_manifest
from forebay_operator.decide import Memory
from forebay_operator.local.rescaling import Saved, learnt_with
from forebay_operator.local.status import UpStatus
from forebay_operator.pilot import Checkpoint

pytestmark = [pytest.mark.live, pytest.mark.timeout(150)]

SURGE = (14.0, 1500, 4)
"""Requests per second, prompt and answer tokens: more than four prefill workers' work."""

DRIZZLE = (1.5, 60, 40)


def growing() -> dict[str, Any]:
    # Generous: after misses that demand does not explain nothing shrinks for ten minutes.
    model = manifest(1, 1, ttft_ms=20_000, tpot_ms=200)
    spec = model["spec"]
    del spec["prefill"], spec["decode"]
    spec["scaling"] = {
        "prefill": {"minReplicas": 1, "maxReplicas": 2},
        "decode": {"minReplicas": 1, "maxReplicas": 1},
        "behavior": {
            "scaleUp": {"stabilizationWindowSeconds": 1},
            "scaleDown": {
                "stabilizationWindowSeconds": 2,
                "policies": [{"type": "Pods", "value": 1, "periodSeconds": 1}],
            },
        },
    }
    spec["drain"] = {"timeoutSeconds": 20}
    return model


def memory(model: dict[str, Any]) -> bytes:
    """A law that has seen little for a minute. Of that minute's seconds it has none any more, so that those of the test
    are its whole window."""
    now = time.time()
    held = Memory(target=(1, 1), started_at=now - 61, seen_at=now, arrivals=[(float(int(now)), 1, 60)], output=20.0)
    spec = load_manifest(msgspec.json.encode(model).decode(), "test").model
    return msgspec.json.encode(Saved(learnt_with(spec), Checkpoint(memory=held.dump(), believed=believed("slow"))))


async def until(pool: LocalPool, what: str, pools: str, seconds: float) -> UpStatus:
    deadline = time.monotonic() + seconds
    while True:
        status = await pool.status()
        if status.pools == pools and status.ready and len(status.containers) == 1 + sum(map(int, pools.split(":"))):
            return status
        assert time.monotonic() < deadline, f"{what}: {status}"
        await asyncio.sleep(0.1)


async def test_load_that_grows_brings_a_worker_and_its_end_takes_it_away(tmp_path: Path) -> None:
    model = growing()
    rng = random.Random(0)
    async with local_pool(tmp_path, model, memory(model)) as pool:
        beside = asyncio.create_task(play(pool.url, poisson(rng, 0.0, 30.0, *DRIZZLE), 1))
        surge = await play(pool.url, poisson(rng, 0.0, 3.0, *SURGE), 2)
        grown = await until(pool, "growth", "2:1", 40)
        assert {c.name for c in grown.containers} == {"prefill-0", "prefill-1", "decode-0", "router-0"}
        assert all(c.ready for c in grown.containers)
        assert grown.ratio == "2:1"
        shrunk = await until(pool, "shrinking", "1:1", 60)
        drizzle: list[Sent] = await beside
    assert [s.status for s in [*surge, *drizzle] if s.status != 200] == [], "no request is lost"
    assert {s.prefill for s in drizzle} == {"prefill-0", "prefill-1"}, "both served"
    assert shrunk.resizes == 2
    said = (tmp_path / "up.log").read_text()
    assert "resizing: 1:1 -> 2:1 (Short)" in said
    assert "resizing: 2:1 -> 1:1 (Idle)" in said
    assert "has left" in said
