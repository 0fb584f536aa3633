"""How soon a role that traffic starves is helped: from the step in demand to the first token from a switched worker.

    python -m bench.switch [--rounds 5] [--seed 0]

Six simulated workers (`slow`) serve at 1:5 with next to no load; then prompts come that need five prefill workers.
Nothing is told to the law but the load. `switch_s`: from the first request of the step until the first token of a
request that was sent to a worker after its role became prefill. The router's own gear is off (spec.router.convertible
Never): with it decoders take prompts at once, whatever their role. Afterwards the ratio is put back by hand and the
queues run empty. The law starts with full windows, as after an hour of quiet.

`parts` splits each round's time: `looks`, whole seconds that ended before the role changed (the law looks just after
each); `role`, until the first label; `routed`, from there until a request was sent to that worker; `served`, its TTFT.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import yaml

from bench.checkpoint import after_an_hour
from bench.local_pool import LocalPool, Sent, local_pool, manifest, play, poisson
from bench.report import finish, percentile
from forebay_operator.api.load import load_manifest
from forebay_operator.local.rescaling import Saved, learnt_with

START = (1, 5)
TTFT_MS, TPOT_MS = 1000, 60
STEP = (16.0, 1500, 4)
"""Requests per second, prompt and answer tokens: 24,000 prompt tokens/s are five workers of 5,000."""

STEP_SECONDS = 6.0
QUIET_SECONDS = 13.0
"""The windows of the last seconds forget the step meanwhile."""


def learnt(model: dict[str, Any]) -> bytes:
    """What an earlier `up` of these workers had learnt, at the end of a quiet minute that ended just now."""
    known = after_an_hour("slow", START, time.time(), requests=1, prompt_tokens=60, output=40.0)
    spec = load_manifest(yaml.safe_dump(model), "bench").model
    return msgspec.json.encode(Saved(learnt_with(spec), known))


async def watch_roles(pool: LocalPool, switched: dict[str, float]) -> None:
    """When each worker that served decode at first was given the role prefill."""
    decoders = {c.name for c in (await pool.status()).containers if c.role == "decode"}
    while True:
        for container in (await pool.status()).containers:
            if container.name in decoders and container.role == "prefill":
                switched.setdefault(container.name, time.monotonic())
        await asyncio.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Switch:
    """One round's way to the first token of a request that was sent to a worker in its new role. Seconds."""

    looks: int
    """Ends of whole seconds between the first request and the first change of a role."""

    role: float
    routed: float
    served: float

    @property
    def took(self) -> float:
        return self.role + self.routed + self.served


def switch_of(sent: list[Sent], switched: dict[str, float], wall_offset: float) -> Switch | None:
    """`wall_offset`: wall time less the clock of `sent` and `switched`."""
    moved = [s for s in sent if s.first is not None and s.sent >= switched.get(s.prefill, math.inf)]
    if not moved:
        return None
    began, label = min(s.sent for s in sent), min(switched.values())
    first = min(moved, key=lambda s: s.first or math.inf)
    assert first.first is not None
    looks = math.floor(label + wall_offset) - math.floor(began + wall_offset)
    return Switch(looks, label - began, first.sent - label, first.first - first.sent)


async def one_round(pool: LocalPool, seed: int, seconds: float = STEP_SECONDS) -> tuple[Switch | None, list[Sent]]:
    switched: dict[str, float] = {}
    watching = asyncio.create_task(watch_roles(pool, switched))
    try:
        sent = await play(pool.url, poisson(random.Random(seed), 0.0, seconds, *STEP), seed)
    finally:
        watching.cancel()
    return switch_of(sent, switched, time.time() - time.monotonic()), sent


async def rounds(folder: Path, count: int, seed: int) -> dict[str, object]:
    model = manifest(*START, ttft_ms=TTFT_MS, tpot_ms=TPOT_MS)
    async with local_pool(folder, model, learnt(model)) as pool:
        psutil.cpu_percent()
        found: list[Switch] = []
        missed = failed = 0
        for number in range(count):
            took, sent = await one_round(pool, seed + number)
            failed += sum(s.status not in (200, 429) for s in sent)
            missed += took is None
            found += [] if took is None else [took]
            await asyncio.sleep(QUIET_SECONDS)
            await pool.ratio(f"{START[0]}:{START[1]}")
            await asyncio.sleep(2.0)
        status = await pool.status()
    times = [each.took for each in found]
    parts = [{key: round(value, 2) for key, value in asdict(each).items()} for each in found]
    return {
        "parts": parts,
        "switch_s": [round(t, 2) for t in times],
        "switch_s_p95": round(percentile(times, 0.95), 2) if times else None,
        "not_switched": missed,
        "failed_requests": failed,
        "moves": status.moves,
        "flaps": status.flaps,
        "machine_busy": round(psutil.cpu_percent() / 100, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(rounds(Path(folder), options.rounds, options.seed))
    finish({"bench": "switch", "rounds": options.rounds, **found})


if __name__ == "__main__":
    main()
