"""One replay of the bench, and its row."""

from __future__ import annotations

import time
from dataclasses import replace

from bench import mixes
from bench.rescale.cases import FIXED, WORKERS, Case
from forebay_engine.perf import load
from forebay_operator.replay.cluster import Faults, Setup
from forebay_operator.replay.fleet import parse_gear
from forebay_operator.replay.oracle import minutes_missed
from forebay_operator.replay.policies import Forebay
from forebay_operator.replay.run import Ran, run
from forebay_operator.replay.trace import Trace
from forebay_operator.replay.worker import MIXED_SHARE, WorkerShape

ORACLE_REPLAYS = {"plans": 2, "changes": 2}
"""Its search takes eleven replays so, and is made where the targets name it: in the role gear at the heavy level."""


def trace_of(case: Case) -> Trace:
    if case.mix in mixes.FILES:
        return mixes.alone(case.mix, case.rate, case.seed, case.scale)
    return mixes.mixed(case.mix, case.level, case.seed, case.scale)


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


def played(case: Case, trace: Trace, missed: dict[int, list[int]] | None = None) -> Ran:
    """`missed`: of the fixed splits, where they are known already (the oracle plans with them)."""
    bias = {"v-30": 0.7, "v+30": 1.3}.get(case.variant, 1.0)
    after = 600.0 * case.scale if case.mix in mixes.FILES else 0.0
    return run(
        trace,
        setup_of(case),
        case.policy,
        prefill_bias=bias,
        decode_bias=bias,
        after=after,
        fixed_missed=missed,
        **ORACLE_REPLAYS,
    )


def row_of(case: Case, ran: Ran, seconds: float) -> dict[str, object]:
    law = ran.law
    return {
        **case.columns,
        "scale": case.scale,
        "rate": round(case.rate, 3),
        "requests": ran.score.requests,
        "attainment": ran.score.attainment_percent,
        "itl95": ran.score.itl95_percent,
        "moves": ran.score.moves,
        "gpu_seconds": ran.score.gpu_seconds,
        "refused": ran.score.refused,
        "cpu_s": round(seconds, 2),
        "decide_ms": round(1e3 * law.seconds / max(1, law.calls), 2) if isinstance(law, Forebay) else None,
    }


def play(cases: list[Case]) -> list[dict[str, object]]:
    """Rows of cases that share a trace. Each fixed split is replayed once for all gears, and for the oracle."""
    trace = trace_of(cases[0])
    rows: list[dict[str, object]] = []
    known: dict[str, Ran] = {}
    for case in sorted(cases, key=lambda c: c.policy == "oracle"):
        began = time.process_time()
        missed = None
        if case.policy == "oracle":
            for name in FIXED:
                if name not in known:
                    known[name] = played(replace(case, policy=name), trace)
            missed = {ran.setup.start_prefill: minutes_missed(ran.outcome, ran.setup) for ran in known.values()}
        if case.policy in known:
            ran = known[case.policy]
        else:
            ran = played(case, trace, missed)
            if case.policy in FIXED:
                known[case.policy] = ran
        rows.append(row_of(case, ran, time.process_time() - began))
    return rows


def natural_rate(name: str, scale: float = 1.0) -> float:
    """The rate at which the trace's best fixed split attains 95 %, by bisection, without convertible decoders."""
    low, high = 0.5, 120.0
    best = FIXED[3]
    for _ in range(6):
        rate = (low * high) ** 0.5
        case = Case(name, "own", "role", False, "", 0, scale=scale / 2, rate=rate)
        trace = trace_of(case)
        held = False
        # The split that held the last rate is tried first: one that holds is enough.
        for policy in sorted(FIXED, key=lambda p: p != best):
            if played(replace(case, policy=policy), trace).score.attainment_percent >= 95:
                best, held = policy, True
                break
        low, high = (rate, high) if held else (low, rate)
    return low
