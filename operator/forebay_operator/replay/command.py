"""`forebay replay`: options to replays to a table."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from forebay_engine.perf import PerfModel, load
from forebay_operator.replay.chain import Segment, chain
from forebay_operator.replay.cluster import DRAIN_SECONDS, Faults, Setup
from forebay_operator.replay.fleet import Gear, parse_gear, replica_gear, role_gear
from forebay_operator.replay.plot import plot
from forebay_operator.replay.run import PATHS, Ran, ReplayError, parse_split, run
from forebay_operator.replay.table import as_json, as_tables
from forebay_operator.replay.trace import Trace, read
from forebay_operator.replay.worker import MIXED_SHARE, WorkerShape


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    traces: list[Path]
    formats: list[str]
    at: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    """One per trace, or none: the trace's own."""

    until: float | None = None
    workers: int = 8
    start: str | None = None
    perf: str = "h100-llama-8b"
    policies: list[str] = field(default_factory=lambda: ["forebay"])
    gear: str = "role"
    role_switch_seconds: float | None = None
    replica_start_seconds: float | None = None
    drain_seconds: float | None = None
    convertible: bool = False
    refuse_over: float = 0.0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    metric_lag_seconds: float = 0.0
    lost_writes: float = 0.0
    stale: list[str] = field(default_factory=list)
    path: str = "fast"
    max_running: int = 256
    max_batched_tokens: int = 2048
    seed: int = 0
    json: bool = False
    plot: Path | None = None


def setup_of(options: ReplayOptions) -> Setup:
    """Raises ValueError naming the option at fault."""
    if options.workers < 2:
        raise ReplayError(f"--workers is {options.workers}; prefill and decode need one each")
    model = load(options.perf)
    gear = _gear_of(options, model)
    ttft = options.ttft_ms / 1e3 if options.ttft_ms is not None else model.ttft_objective_seconds
    tpot = options.tpot_ms / 1e3 if options.tpot_ms is not None else model.tpot_objective_seconds
    if not (0 < ttft < math.inf and 0 < tpot < math.inf):
        raise ReplayError(
            f"objectives must be greater than 0 ms, and finite; they are {ttft * 1e3:g} and {tpot * 1e3:g}"
        )
    if not 0 <= options.lost_writes <= 1:
        raise ReplayError(f"--lost-writes is {options.lost_writes:g}; it is a share from 0 to 1")
    if options.refuse_over < 0:
        raise ReplayError(f"--refuse-over is {options.refuse_over:g}; write how many TTFT objectives, or 0 for never")
    drain = DRAIN_SECONDS if options.drain_seconds is None else options.drain_seconds
    if not drain >= 0:
        raise ReplayError(f"--drain is {drain:g}; write seconds from 0, or leave it out for {DRAIN_SECONDS:g}")
    if options.drain_seconds is not None and not gear.drains:
        raise ReplayError(
            f"--drain {drain:g} has no effect where workers change roles, for they finish what they have; leave it "
            "out, or ask for --gear replica-N or --replica-start-s (and no --role-switch-s)"
        )
    start = options.start or f"{options.workers // 2}:{options.workers - options.workers // 2}"
    return Setup(
        model=model,
        workers=options.workers,
        start_prefill=parse_split(start, options.workers),
        ttft_seconds=ttft,
        tpot_seconds=tpot,
        shape=WorkerShape(
            max_running=options.max_running,
            max_batched_tokens=options.max_batched_tokens,
            mixed_step_seconds=MIXED_SHARE * tpot,
        ),
        gear=gear,
        drain_seconds=drain,
        convertible=options.convertible,
        refusal_factor=options.refuse_over,
        faults=Faults(options.metric_lag_seconds, options.lost_writes, tuple(_span(text) for text in options.stale)),
        seed=options.seed,
    )


def _gear_of(options: ReplayOptions, model: PerfModel) -> Gear:
    """Raises ReplayError for two options that ask for different gears: one of them would be ignored."""
    gear, switch, start = parse_gear(options.gear), options.role_switch_seconds, options.replica_start_seconds
    if sum((gear.drains, switch is not None, start is not None)) > 1:
        raise ReplayError("--gear replica-N, --role-switch-s and --replica-start-s ask for different gears; give one")
    if start is not None:
        gear = replica_gear(start)
    elif switch is not None:
        gear = role_gear(switch)
    elif not gear.drains and model.role_switch_seconds is not None:
        gear = role_gear(model.role_switch_seconds)
    if not gear.seconds < math.inf:
        raise ReplayError(f"the gear takes {gear.seconds:g} s; write how many seconds a move takes")
    return gear


def _span(text: str) -> tuple[float, float]:
    begin, _, end = text.partition(":")
    try:
        span = float(begin), float(end)
    except ValueError:
        raise ReplayError(f"--stale {text!r} is no span; write FROM:TO in seconds, such as 600:660") from None
    if not 0 <= span[0] < span[1]:
        raise ReplayError(f"--stale {text!r} ends before it begins; write FROM:TO in seconds, such as 600:660")
    return span


def trace_of(options: ReplayOptions) -> Trace:
    """Raises TraceError or ReplayError."""
    n = len(options.traces)
    for name, values in (("--format", options.formats), ("--at", options.at), ("--rate", options.rates)):
        if len(values) not in (0, 1, n):
            raise ReplayError(f"{name} was given {len(values)} times for {n} traces; give it once for each")
    if len(options.at) == 1 and n > 1:
        raise ReplayError(f"--at was given once for {n} traces; give it once for each: where each one starts")
    formats = options.formats * n if len(options.formats) == 1 else options.formats
    if not formats:
        formats = [_format_of(path) for path in options.traces]
    for asked in options.rates:
        if not 0 < asked < math.inf:
            raise ReplayError(f"--rate is {asked:g}; it must be greater than 0, or left out for the trace's own")
    starts = options.at or [0.0] * n
    rates: list[float | None] = [*options.rates] or [None]
    if len(rates) == 1:
        rates *= n
    segments = []
    last = max(starts)
    for path, format_name, at, rate in zip(options.traces, formats, starts, rates, strict=True):
        seconds = None
        if options.until is not None and at == last:
            seconds = options.until - at
            if not seconds > 0:
                raise ReplayError(f"--until {options.until:g} is not after the last trace's start at {at:g} s")
        segments.append(Segment(read(path, format_name, seed=options.seed), at, rate, seconds))
    return chain(segments, options.seed)


def _format_of(path: Path) -> str:
    """Of a trace whose --format is not given. Azure's and ServeGen's end in .csv too: their columns tell them apart."""
    if path.suffix == ".csv":
        return "csv"
    raise ReplayError(f"--format is missing for {path}: write azure, mooncake, servegen or csv")


def replay(options: ReplayOptions, console: Console) -> None:
    if options.path not in PATHS:
        raise ReplayError(f"--path {options.path!r} is not known; use fast or exact")
    setup = setup_of(options)
    trace = trace_of(options)
    ran: list[Ran] = []
    for policy in options.policies:
        one = run(trace, setup, policy, path=options.path)
        if ran or options.plot is None:
            # Only the plot still needs them: a million requests take half a gigabyte.
            one = replace(one, outcome=replace(one.outcome, jobs=[]))
        ran.append(one)
    if options.plot is not None:
        plot(ran[0], options.plot)
    if options.json:
        console.out(json.dumps(as_json(ran)), highlight=False)
    else:
        for table in as_tables(ran, console):
            console.print(table)
        for one in ran:
            if one.replays > 1:
                console.print(f"{one.policy}: the best of {one.replays} replays, with the future known.")
        if options.path == "fast":
            console.print("Fast path: within 0.4 points of --path exact on the grid of tests/operator/replay.")
