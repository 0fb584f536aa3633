"""Rescaling laws on real length traces, in virtual time: attainment, moves and GPU-seconds of every law.

    python -m bench.rescale --traces DIR --jobs 2          # all rows
    python -m bench.rescale --traces DIR --short           # at most 3 minutes

DIR holds azure2023/, mooncake/ and servegen/ as docs/rescaling.md lists them; they are no part of the repository.
Without it only made-up traffic of the same means is replayed, and the report says so. Every policy starts at 4:4.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from bench.report import finish
from forebay_engine.perf import load
from forebay_operator.replay.chain import Segment, chain
from forebay_operator.replay.cluster import Faults, Setup
from forebay_operator.replay.fleet import parse_gear
from forebay_operator.replay.policies import LAWS, Forebay
from forebay_operator.replay.run import run
from forebay_operator.replay.trace import Arrival, Trace, read
from forebay_operator.replay.worker import MIXED_SHARE, WorkerShape

WORKERS = 8
FILES = {
    "azure-code": ("azure2023/AzureLLMInferenceTrace_code.csv", "azure", 2048, 28),
    "azure-conv": ("azure2023/AzureLLMInferenceTrace_conv.csv", "azure", 1155, 211),
    "mooncake": ("mooncake/conversation_trace.jsonl", "mooncake", 12035, 343),
    "servegen-r1": ("servegen/generated_deepseek-r1_1h_peak10rps_seed0.csv", "servegen", 2135, 1118),
}
"""File, format, and the means that stand in for a file that is not there."""

RATES = {"heavy": (60.0, 18.0, 14.0), "light": (48.0, 14.0, 11.0)}
"""Requests/s of conv, code and R1: about 80 % and 64 % of what the best split of each regime carries on this model."""

MIX_POLICIES = [*LAWS, "oracle"]
FIXED = [f"fixed:{p}:{WORKERS - p}" for p in range(1, WORKERS)]


@dataclass(frozen=True, slots=True)
class Case:
    mix: str
    level: str
    gear: str
    convertible: bool
    policy: str
    seed: int
    ttft: float = 1.0
    tpot: float = 0.04
    variant: str = ""
    """`lag15`, `v-30`, `v+30` or nothing."""

    scale: float = 1.0
    """Of the segments' length."""

    rate: float = 0.0
    """Of a trace alone."""


_folder: Path | None = None


def made_up(name: str, seed: int = 7) -> Trace:
    """An hour of Poisson arrivals with lognormal lengths of the trace's means."""
    _, _, prompt, output = FILES[name]
    rng = random.Random(seed)
    at, trace = 0.0, []
    while (at := at + rng.expovariate(5.0)) < 3600:
        sizes = [max(1, round(mean * rng.lognormvariate(-0.5, 1.0))) for mean in (prompt, output)]
        trace.append(Arrival(at, min(sizes[0], 100_000), min(sizes[1], 20_000)))
    return trace


@cache
def source(name: str) -> Trace:
    path, format_name, _, _ = FILES[name]
    if _folder is None or not (_folder / path).is_file():
        return made_up(name)
    return read(_folder / path, format_name)


def trace_of(case: Case) -> Trace:
    scale = case.scale
    if case.mix in FILES:
        return chain([Segment(source(case.mix), rate=case.rate, seconds=2400 * scale)], case.seed)
    conv, code, r1 = RATES[case.level]
    parts: list[tuple[str, float, float]]
    if case.mix in ("mix", "tight"):
        parts = [
            ("azure-conv", conv, 600),
            ("azure-code", code, 600),
            ("servegen-r1", r1, 600),
            ("azure-conv", conv, 600),
        ]
    elif case.mix == "long":
        parts = [("azure-conv", conv, 1200), ("servegen-r1", r1, 1800)] * 2
    elif case.mix == "steady":
        parts = [("azure-conv", conv, 2400)]
    else:
        parts = [("azure-conv", conv, 150), ("servegen-r1", r1, 150)] * 8
    segments, at = [], 0.0
    for name, rate, seconds in parts:
        segments.append(Segment(source(name), at, rate, seconds * scale))
        at += seconds * scale
    return chain(segments, case.seed)


def setup_of(case: Case) -> Setup:
    return Setup(
        model=load("h100-llama-8b"),
        workers=WORKERS,
        start_prefill=WORKERS // 2,
        ttft_seconds=case.ttft,
        tpot_seconds=case.tpot,
        shape=WorkerShape(mixed_step_seconds=MIXED_SHARE * case.tpot),
        gear=parse_gear(case.gear),
        convertible=case.convertible,
        faults=Faults(metric_lag_seconds=15.0 if case.variant == "lag15" else 0.0),
        seed=case.seed,
    )


def play(case: Case) -> dict[str, object]:
    began = time.process_time()
    bias = {"v-30": 0.7, "v+30": 1.3}.get(case.variant, 1.0)
    after = 600.0 * case.scale if case.mix in FILES else 0.0
    ran = run(trace_of(case), setup_of(case), case.policy, prefill_bias=bias, decode_bias=bias, after=after)
    law = ran.law
    return {
        "mix": case.mix,
        "level": case.level,
        "gear": case.gear,
        "convertible": "on" if case.convertible else "off",
        "policy": case.policy,
        "seed": case.seed,
        "variant": case.variant,
        "requests": ran.score.requests,
        "attainment": ran.score.attainment_percent,
        "itl95": ran.score.itl95_percent,
        "moves": ran.score.moves,
        "gpu_seconds": ran.score.gpu_seconds,
        "refused": ran.score.refused,
        "cpu_s": round(time.process_time() - began, 2),
        "decide_ms": round(1e3 * law.seconds / max(1, law.calls), 2) if isinstance(law, Forebay) else None,
    }


def natural_rate(name: str, scale: float) -> float:
    """The rate at which the trace's best fixed split attains 95 %, by bisection, without convertible decoders."""
    low, high = 0.5, 120.0
    for _ in range(5):
        rate = (low * high) ** 0.5
        case = Case(name, "own", "role", False, "", 0, scale=scale / 2, rate=rate)
        best = max(float(str(play(replace(case, policy=fixed))["attainment"])) for fixed in FIXED[:6])
        low, high = (rate, high) if best >= 95 else (low, rate)
    return low


def cases(short: bool) -> Iterator[Case]:
    policies = [*MIX_POLICIES, *FIXED]
    if short:
        some = [*LAWS, *FIXED[1:5]]
        for convertible, policy in itertools.product((False, True), some):
            yield Case("mix", "heavy", "role", convertible, policy, 0, scale=0.15)
        for policy in ("forebay", "demand", "fixed:4:4"):
            yield Case("mix", "heavy", "replica-30", False, policy, 0, scale=0.15)
        return
    gears = ("role", "replica-30", "replica-120")
    for seed, level, gear, convertible in itertools.product(range(3), ("heavy", "light"), gears, (False, True)):
        for policy in policies:
            yield Case("mix", level, gear, convertible, policy, seed)
    for seed, convertible, policy in itertools.product(range(3), (False, True), policies):
        yield Case("tight", "heavy", "role", convertible, policy, seed, ttft=0.5, tpot=0.02)
    for mix, gear, convertible, policy in itertools.product(("long", "alternating"), gears, (False, True), policies):
        yield Case(mix, "heavy", gear, convertible, policy, 0)
    for variant, gear, convertible, seed in itertools.product(("lag15", "v-30", "v+30"), gears, (False, True), (0, 1)):
        yield Case("mix", "heavy", gear, convertible, "forebay", seed, variant=variant)
    for convertible in (False, True):
        yield Case("steady", "heavy", "role", convertible, "forebay", 0)


def _start(folder: Path | None) -> None:
    global _folder
    _folder = folder


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="folder of the public traces")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--minutes", type=float, default=75.0, help="stop after this long, and say what is left out")
    parser.add_argument("--only", default="", help="of the rows, those whose mix is this one")
    arguments = parser.parse_args()
    folder: Path | None = arguments.traces
    left_out = [name for name, (path, *_) in FILES.items() if folder is None or not (folder / path).is_file()]
    if left_out:
        say(f"left out: the traces {', '.join(left_out)} (give --traces DIR); made-up lengths of their means stand in")
    _start(folder)
    todo = [case for case in cases(arguments.short) if arguments.only in ("", case.mix)]
    if not arguments.short and arguments.only in ("", *FILES):
        for name in FILES:
            if arguments.only in ("", name):
                rate = natural_rate(name, 1.0)
                say(f"{name}: its best fixed split attains 95 % at {rate:.1f} requests/s")
                for convertible, policy in itertools.product((False, True), [*LAWS, *FIXED]):
                    todo.append(Case(name, "own", "role", convertible, policy, 0, rate=rate))
    deadline = time.monotonic() + 60 * arguments.minutes
    rows: list[dict[str, object]] = []
    with multiprocessing.get_context("spawn").Pool(arguments.jobs, _start, (folder,)) as pool:
        for row in pool.imap(play, todo):
            rows.append(row)
            say(
                f"{len(rows)}/{len(todo)} {row['mix']} {row['level']} {row['gear']} convertible {row['convertible']} "
                f"{row['policy']} {row['variant']} seed {row['seed']}: {row['attainment']} % {row['moves']} moves"
            )
            if time.monotonic() > deadline:
                say(f"left out: {len(todo) - len(rows)} of {len(todo)} rows, time is up (--minutes)")
                pool.terminate()
                break
    finish({"bench": "rescale", "left_out_traces": left_out, "rows": rows, "summary": summary(rows)})


def summary(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Mean over seeds, per setting: each law, and the best fixed split."""
    groups: dict[tuple[object, ...], dict[str, list[float]]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("mix", "level", "gear", "convertible", "variant"))
        policies = groups.setdefault(key, {})
        policies.setdefault(str(row["policy"]), []).append(float(str(row["attainment"])))
    result: list[dict[str, object]] = []
    for key, policies in groups.items():
        means = {policy: round(statistics.mean(values), 2) for policy, values in policies.items()}
        fixed = {policy: value for policy, value in means.items() if policy.startswith("fixed")}
        line: dict[str, object] = dict(zip(("mix", "level", "gear", "convertible", "variant"), key, strict=True))
        line.update({policy: value for policy, value in means.items() if policy not in fixed})
        if fixed:
            line["best_fixed"] = max(fixed, key=lambda p: fixed[p])
            line["best_fixed_attainment"] = max(fixed.values())
            line["start_split_attainment"] = fixed.get("fixed:4:4")
        result.append(line)
    return result


if __name__ == "__main__":
    main()
