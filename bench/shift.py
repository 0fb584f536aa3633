"""The law live against its own replay: traffic turns from decode-heavy to prefill-heavy and back on six workers.

    python -m bench.shift [--seconds 50] [--seed 0] [--each FILE]

`forebay up` runs six simulated workers (`slow`) that start at 2:4; the same requests are replayed with the same law in
virtual time. Prints attainment of both, the moves, the busy share of the machine (over 60 % voids the run: its
queues are then the machine's, not the workers') and what the best and the worst fixed split would have had.
`each` joins the two request by request: how many met both objectives in the one and missed in the other; `--each FILE`
writes all of them, a line each.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import psutil

from bench.local_pool import LocalPool, Planned, Sent, local_pool, manifest, play, poisson
from bench.report import finish
from forebay_engine.perf import load
from forebay_operator.replay.cluster import Setup
from forebay_operator.replay.fleet import role_gear
from forebay_operator.replay.run import Ran, decisions, run
from forebay_operator.replay.trace import Arrival
from forebay_operator.replay.worker import MIXED_SHARE, WorkerShape

WORKERS = 6
START = (2, 4)
TTFT_MS = 1000
TPOT_MS = 40
DECODE_HEAVY = (2.0, 1200, 450)
"""Requests per second, prompt and answer tokens: the memory of two and a half decoders, and 900 tokens/s."""

PREFILL_HEAVY = (7.5, 1500, 16)
"""2.25 prefill workers, and 120 tokens/s."""

SWITCH_SECONDS = 0.3
"""Of a role in local mode: the router reads the workers file five times a second."""

VOID_BUSY = 0.6


def plan_of(seconds: float, seed: int, warm: float) -> list[Planned]:
    rng = random.Random(seed)
    kinds = (DECODE_HEAVY, PREFILL_HEAVY, DECODE_HEAVY)
    found: list[Planned] = []
    begin = 0.0
    for index, kind in enumerate(kinds):
        end = begin + seconds + (warm if index == 0 else 0.0)
        found += poisson(rng, begin, end, *kind)
        begin = end
    return found


def setup() -> Setup:
    tpot = TPOT_MS / 1e3
    return Setup(
        model=load("slow"),
        workers=WORKERS,
        start_prefill=START[0],
        ttft_seconds=TTFT_MS / 1e3,
        tpot_seconds=tpot,
        shape=WorkerShape(max_running=256, max_batched_tokens=2048, mixed_step_seconds=MIXED_SHARE * tpot),
        gear=role_gear(SWITCH_SECONDS),
        tick_seconds=1.0,
    )


def replay(plan: list[Planned], policy: str) -> Ran:
    return run([Arrival(p.at, p.prompt, p.output) for p in plan], setup(), policy, path="exact")


def attainment_of(plan: list[Planned], policy: str) -> float:
    """In percent."""
    return round(replay(plan, policy).score.attainment_percent, 2)


class Each(msgspec.Struct):
    """One request in both runs. Seconds; None: it had no such token."""

    at: float
    prompt: int
    output: int
    live_ttft: float | None
    live_tpot: float | None
    live_by: str
    replay_ttft: float | None
    replay_tpot: float | None

    def missed(self, run: str) -> str:
        """`ttft`, `tpot`, `both` or nothing."""
        ttft, tpot = getattr(self, f"{run}_ttft"), getattr(self, f"{run}_tpot")
        late = ttft is None or ttft > TTFT_MS / 1e3
        slow = tpot is None or tpot > TPOT_MS / 1e3
        return "both" if late and slow else "ttft" if late else "tpot" if slow else ""


def joined(sent: list[Sent], ran: Ran) -> list[Each]:
    """Requests in the order of arrival, which is that of the replay's jobs."""
    found = []
    for live, job in zip(sent, ran.outcome.jobs, strict=True):
        planned, answered = live.planned, live.status == 200 and live.first is not None and live.last is not None
        gaps = planned.output - 1
        found.append(
            Each(
                at=round(planned.at, 3),
                prompt=planned.prompt,
                output=planned.output,
                live_ttft=round((live.first or 0.0) - live.sent, 4) if answered else None,
                live_tpot=round(((live.last or 0.0) - (live.first or 0.0)) / gaps, 5) if answered else None,
                live_by=f"{live.prefill} {live.decode}",
                replay_ttft=round(job.first - job.arrived, 4) if job.first >= 0 else None,
                replay_tpot=round((job.last - job.first) / gaps, 5) if job.last >= 0 else None,
            )
        )
    return found


def differences(each: list[Each]) -> dict[str, int]:
    """Requests by what they missed, where the two runs differ: `live ttft, replay -` and the like."""
    counted = Counter((one.missed("live") or "-", one.missed("replay") or "-") for one in each)
    return {f"live {a}, replay {b}": n for (a, b), n in sorted(counted.items()) if a != b}


async def watch(pool: LocalPool, seen: list[tuple[float, str, str]]) -> None:
    """Each change of the ratio, with the time since the start."""
    started, last = time.monotonic(), ""
    while True:
        status = await pool.status()
        if status.ratio != last:
            last = status.ratio
            reason = status.decision.reason if status.decision else ""
            seen.append((round(time.monotonic() - started, 1), last, reason))
        await asyncio.sleep(0.5)


async def live(folder: Path, plan: list[Planned], seed: int) -> tuple[list[Sent], dict[str, Any]]:
    async with local_pool(folder, manifest(*START, ttft_ms=TTFT_MS, tpot_ms=TPOT_MS)) as pool:
        seen: list[tuple[float, str, str]] = []
        watching = asyncio.create_task(watch(pool, seen))
        psutil.cpu_percent()
        spent, began = pool.cpu_seconds(), time.monotonic()
        sent = await play(pool.url, plan, seed)
        busy = psutil.cpu_percent() / 100
        cores = (pool.cpu_seconds() - spent) / (time.monotonic() - began)
        watching.cancel()
        status = await pool.status()
    told = {
        "ratios": seen,
        "said": [line for line in (folder / "up.log").read_text().splitlines() if line.startswith("rescaling")],
        "moves": status.moves,
        "flaps": status.flaps,
        "machine_busy": round(busy, 3),
        "pool_cores": round(cores, 2),
    }
    return sent, told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=50.0, help="of each of the three parts")
    parser.add_argument("--warm", type=float, default=10.0, help="more of the first, while windows fill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay-only", action="store_true")
    parser.add_argument("--no-fixed", action="store_true", help="leave the fixed splits out")
    parser.add_argument("--each", type=Path, help="file for one JSON line a request")
    options = parser.parse_args()
    plan = plan_of(options.seconds, options.seed, options.warm)
    tokens = sum(p.output for p in plan) / plan[-1].at
    result: dict[str, object] = {"bench": "shift", "requests": len(plan), "generated_tokens_per_s": round(tokens)}
    ran = replay(plan, "forebay")
    attainment = round(ran.score.attainment_percent, 2)
    moved = [f"{at:.1f} {before}->{target} {reason}" for at, before, target, reason in decisions(ran)]
    result |= {"replay_attainment": attainment, "replay_moves": ran.outcome.moves, "replay_said": moved}
    if not options.no_fixed:
        splits = [f"{p}:{WORKERS - p}" for p in range(1, WORKERS)]
        result["fixed"] = {split: attainment_of(plan, f"fixed:{split}") for split in splits}
    if not options.replay_only:
        with tempfile.TemporaryDirectory() as folder:
            sent, told = asyncio.run(live(Path(folder), plan, options.seed))
        met = sum(s.met(TTFT_MS / 1e3, TPOT_MS / 1e3) for s in sent)
        result |= {"live_attainment": round(100 * met / len(sent), 2), **told}
        each = joined(sent, ran)
        result["each"] = differences(each)
        if options.each is not None:
            options.each.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in each))
        result["refused_or_failed"] = sum(s.status != 200 for s in sent)
        result["difference_points"] = round(100 * met / len(sent) - attainment, 2)
        result["void"] = told["machine_busy"] > VOID_BUSY
    finish(result)


if __name__ == "__main__":
    main()
