"""Rescaling laws on real length traces, in virtual time: attainment, moves and GPU-seconds of every law.

    python -m bench.rescale --traces DIR --jobs 2          # all rows: about an hour on 2 cores
    python -m bench.rescale --traces DIR --short           # at most 3 minutes
    python -m bench.rescale --traces DIR --rows rows.jsonl --where mix=long --where gear=role,replica-30

With --rows, finished rows are kept in that file and not run again, so that the bench may be run in slices; the report
is about all rows in it that --where lets through. Every policy starts at 4:4. bench/mixes.py has the traffic.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import mixes
from bench.report import finish
from forebay_engine.perf import load
from forebay_operator.replay.cluster import Faults, Setup
from forebay_operator.replay.fleet import parse_gear
from forebay_operator.replay.oracle import minutes_missed
from forebay_operator.replay.policies import LAWS, Forebay
from forebay_operator.replay.run import Ran, run
from forebay_operator.replay.trace import Trace
from forebay_operator.replay.worker import MIXED_SHARE, WorkerShape

WORKERS = 8
START = f"fixed:{WORKERS // 2}:{WORKERS - WORKERS // 2}"
FIXED = [f"fixed:{p}:{WORKERS - p}" for p in range(1, WORKERS)]
MIX_POLICIES = [*LAWS, *FIXED, "oracle"]
GEARS = ("role", "replica-30", "replica-120")
ORACLE_REPLAYS = {"plans": 2, "changes": 2}
"""Its search takes eleven replays so, and is made where the targets name it: in the role gear at the heavy level."""

VARIANTS = ("lag15", "v-30", "v+30")
COLUMNS = ("mix", "level", "gear", "convertible", "variant", "policy", "seed")


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
    """`lag15`: metrics 15 s late; `v-30`, `v+30`: told velocities 30 % too low or high; or nothing."""

    scale: float = 1.0
    """Of the segments' length."""

    rate: float = 0.0
    """Of a trace alone."""

    @property
    def columns(self) -> dict[str, object]:
        """What names its row."""
        values = (self.mix, self.level, self.gear, "on" if self.convertible else "off", self.variant, self.policy)
        return dict(zip(COLUMNS, (*values, self.seed), strict=True))

    @property
    def shares(self) -> Case:
        """Equal for all cases that can use the same replays of fixed splits: those never move, whatever the gear."""
        return replace(self, gear="role", policy="")


def tight(mix: str, level: str, gear: str, convertible: bool, policy: str, seed: int) -> Case:
    return Case(mix, level, gear, convertible, policy, seed, ttft=0.5, tpot=0.02)


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


def short_cases() -> Iterator[Case]:
    some = [*LAWS, *FIXED[1:5]]
    for convertible, policy in itertools.product((False, True), some):
        yield Case("mix", "heavy", "role", convertible, policy, 0, scale=0.15)
    for policy in ("forebay", "demand", START):
        yield Case("mix", "heavy", "replica-30", False, policy, 0, scale=0.15)


def cases() -> Iterator[Case]:
    """All but the traces alone."""
    return (case for case in _cases() if case.policy != "oracle" or (case.gear, case.level) == ("role", "heavy"))


def _cases() -> Iterator[Case]:
    on_off = (False, True)
    for seed, level, gear, on, policy in itertools.product(range(3), mixes.RATES, GEARS, on_off, MIX_POLICIES):
        yield Case("mix", level, gear, on, policy, seed)
    for mix, gear, on, policy in itertools.product(("long", "alternating"), GEARS, on_off, MIX_POLICIES):
        yield Case(mix, "heavy", gear, on, policy, 0)
    for variant, gear, on, seed in itertools.product(VARIANTS, GEARS, on_off, (0, 1)):
        yield Case("mix", "heavy", gear, on, "forebay", seed, variant=variant)
    for variant, mix, gear in itertools.product(VARIANTS, ("long", "alternating"), GEARS):
        yield Case(mix, "heavy", gear, False, "forebay", 0, variant=variant)
    for gear, on in itertools.product(GEARS, on_off):
        yield Case("steady", "heavy", gear, on, "forebay", 0)
    for seed, level, on, policy in itertools.product(range(3), mixes.RATES, on_off, MIX_POLICIES):
        yield tight("tight", level, "role", on, policy, seed)


def alone_cases(name: str, rate: float) -> Iterator[Case]:
    for on, policy in itertools.product((False, True), [*LAWS, *FIXED]):
        yield Case(name, "own", "role", on, policy, 0, rate=rate)


def tasks(todo: Iterable[Case]) -> list[list[Case]]:
    """Fixed splits and oracles of one trace and setting together; every other case for itself."""
    groups: dict[object, list[Case]] = {}
    for case in todo:
        shared = case.policy in FIXED or case.policy == "oracle"
        groups.setdefault(case.shares if shared else case, []).append(case)
    # The long ones first, so that no worker is left with one at the end.
    return sorted(groups.values(), key=len, reverse=True)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Rows:
    """Rows that are done, in memory and, if given, in a file of JSON lines."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.done: dict[tuple[object, ...], dict[str, object]] = {}
        self.rates: dict[str, float] = {}
        if path is not None and path.is_file():
            for line in path.read_text().splitlines():
                self._take(json.loads(line))

    def _take(self, row: dict[str, object]) -> None:
        if "rate_of" in row:
            self.rates[str(row["rate_of"])] = float(str(row["rate"]))
        else:
            self.done[(*(row[name] for name in COLUMNS), row["scale"])] = row

    def add(self, row: dict[str, object]) -> None:
        self._take(row)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def has(self, case: Case) -> bool:
        return (*case.columns.values(), case.scale) in self.done


Where = dict[str, set[str]]


def where_of(texts: list[str]) -> Where:
    """`column=value,value` -> its values. Raises SystemExit for a column that is none."""
    found: Where = {}
    for text in texts:
        name, _, values = text.partition("=")
        if name not in COLUMNS:
            raise SystemExit(f"--where {text!r}: {name!r} is no column; use one of {', '.join(COLUMNS)}")
        found[name] = set(values.split(","))
    return found


def lets_through(where: Where, row: dict[str, object]) -> bool:
    return all(str(row[name]) in values for name, values in where.items())


@contextmanager
def workers(jobs: int, folder: Path | None) -> Iterator[Callable[..., Iterator[Any]]]:
    """`map`, or that of a pool of processes: results in the order of their items, as they come."""
    if jobs == 1:
        yield map
        return
    with multiprocessing.get_context("spawn").Pool(jobs, mixes.use, (folder,)) as pool:
        yield pool.imap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="folder of the public traces")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--minutes", type=float, default=75.0, help="stop after this long, and say what is left out")
    parser.add_argument("--where", action="append", default=[], metavar="COLUMN=VALUE,VALUE", help="only these rows")
    parser.add_argument("--rows", type=Path, help="file of finished rows (JSON lines) to go on from")
    parser.add_argument("--table", action="store_true", help="print the summary as a table, not as JSON")
    arguments = parser.parse_args()
    folder: Path | None = arguments.traces
    left_out = mixes.missing(folder)
    if left_out:
        say(f"left out: the traces {', '.join(left_out)} (give --traces DIR); made-up lengths of their means stand in")
    mixes.use(folder)
    where = where_of(arguments.where)
    rows = Rows(arguments.rows)
    deadline = time.monotonic() + 60 * arguments.minutes
    wanted = list(short_cases() if arguments.short else cases())
    with workers(arguments.jobs, folder) as spread:
        if not arguments.short:
            names = [n for n in mixes.FILES if n in where.get("mix", {n}) and "own" in where.get("level", {"own"})]
            unknown = [n for n in names if n not in rows.rates]
            for name, rate in zip(unknown, spread(natural_rate, unknown), strict=True):
                rows.add({"rate_of": name, "rate": rate})
            for name in names:
                say(f"{name}: its best fixed split attains 95 % at {rows.rates[name]:.1f} requests/s")
                wanted += alone_cases(name, rows.rates[name])
        wanted = [case for case in wanted if lets_through(where, case.columns)]
        todo = [case for case in wanted if not rows.has(case)]
        left = len(todo)
        for done in spread(play, tasks(todo)):
            for row in done:
                rows.add(row)
                left -= 1
                named = " ".join(str(row[name]) for name in COLUMNS)
                say(f"{len(wanted) - left}/{len(wanted)} {named}: {row['attainment']} % {row['moves']} moves")
            if time.monotonic() > deadline and left:
                say(f"left out: {left} of {len(wanted)} rows, time is up (--minutes)")
                break
    found = [rows.done[key] for case in wanted if (key := (*case.columns.values(), case.scale)) in rows.done]
    lines = summary(found)
    if arguments.table:
        print(table(lines))
    else:
        finish({"bench": "rescale", "left_out_traces": left_out, "rows": found, "summary": lines})


SETTING = ("mix", "level", "gear", "convertible", "variant")
"""Columns that the means of a summary's line go over the seeds of."""


def summary(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Mean over seeds, per setting: each law's attainment and moves, the best fixed split, and the best other law."""
    groups: dict[tuple[object, ...], dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        policies = groups.setdefault(tuple(row[name] for name in SETTING), {})
        figures = float(str(row["attainment"])), float(str(row["moves"]))
        policies.setdefault(str(row["policy"]), []).append(figures)
    result: list[dict[str, object]] = []
    for key, policies in groups.items():
        means = {policy: round(statistics.mean(a for a, _ in found), 2) for policy, found in policies.items()}
        moves = {policy: round(statistics.mean(m for _, m in found), 1) for policy, found in policies.items()}
        fixed = {policy: value for policy, value in means.items() if policy in FIXED}
        others = {policy: means[policy] for policy in means if policy in LAWS and policy != "forebay"}
        line: dict[str, object] = dict(zip(SETTING, key, strict=True))
        line["seeds"] = max(len(found) for found in policies.values())
        line["attainment"] = {policy: value for policy, value in means.items() if policy not in fixed}
        line["moves"] = {policy: value for policy, value in moves.items() if policy in LAWS}
        if fixed:
            line["best_fixed"] = max(fixed, key=lambda p: fixed[p])
            line["best_fixed_attainment"] = max(fixed.values())
            line["start_split_attainment"] = fixed.get(START)
        if others:
            line["best_other"] = max(others, key=lambda p: others[p])
            line["best_other_attainment"] = max(others.values())
        result.append(line)
    return result


def table(lines: list[dict[str, object]]) -> str:
    """The summary for docs/rescaling.md."""
    head = ["mix", "gear", "convertible", "forebay", "demand", "best other law", "best fixed", "4:4", "oracle"]
    text = [" | ".join(["", *head, ""]).strip(), "|".join(["", *["---"] * len(head), ""])]
    for line in lines:
        attained, moves = line["attainment"], line["moves"]
        assert isinstance(attained, dict)
        assert isinstance(moves, dict)

        def law(name: str, attained: dict[str, float] = attained, moves: dict[str, float] = moves) -> str:
            return f"{attained[name]:.1f} ({moves[name]:g})" if name in attained else "-"

        mix = " ".join(str(line[name]) for name in ("mix", "level", "variant") if line[name])
        best = f"{line['best_fixed_attainment']:.1f} {line['best_fixed']}" if "best_fixed" in line else "-"
        start = f"{line['start_split_attainment']:.1f}" if line.get("start_split_attainment") is not None else "-"
        other = f"{line['best_other_attainment']:.1f} {line['best_other']}" if "best_other" in line else "-"
        oracle = f"{attained['oracle']:.1f}" if "oracle" in attained else "-"
        cells = [mix, line["gear"], line["convertible"], law("forebay"), law("demand"), other, best, start, oracle]
        text.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(text)


if __name__ == "__main__":
    main()
