"""One replay from names to a score."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from forebay_operator.replay.cluster import Cluster, Decide, MakeWorker, Outcome, Setup
from forebay_operator.replay.exact import ExactWorker
from forebay_operator.replay.fast import FastWorker
from forebay_operator.replay.oracle import CHANGE_REPLAYS, PLAN_REPLAYS, Oracle, Scheduled
from forebay_operator.replay.policies import LAWS, Fixed, Forebay, Law, Plant
from forebay_operator.replay.score import Score, score
from forebay_operator.replay.trace import Trace

PATHS: dict[str, MakeWorker] = {"fast": FastWorker, "exact": ExactWorker}


class ReplayError(ValueError):
    """An option that makes no sense: its value, the limit and the remedy."""


@dataclass(frozen=True, slots=True)
class Ran:
    policy: str
    setup: Setup
    outcome: Outcome
    score: Score
    law: Decide | None
    replays: int = 1
    """That were made for it: the oracle's search takes many."""


ORACLE_LAWS = ("forebay", "demand")
"""Whose schedules the oracle's search begins with."""


def policy_names() -> list[str]:
    return [*LAWS, "fixed:P:D", "oracle"]


def plant_of(setup: Setup, prefill_bias: float = 1.0, decode_bias: float = 1.0) -> Plant:
    return Plant(
        model=setup.model,
        workers=setup.workers,
        ttft_seconds=setup.ttft_seconds,
        tpot_seconds=setup.tpot_seconds,
        gear_seconds=setup.gear.seconds,
        drains=setup.gear.drains,
        convertible=setup.convertible,
        max_batched_tokens=setup.shape.max_batched_tokens,
        max_running=setup.shape.max_running,
        mixed_step_seconds=setup.shape.mixed_step_seconds,
        prefill_bias=prefill_bias,
        decode_bias=decode_bias,
        start_prefill=setup.start_prefill,
    )


def parse_split(text: str, workers: int) -> int:
    """`P:D` -> P. Raises ReplayError unless both are at least 1 and make `workers`."""
    prefill, _, decode = text.partition(":")
    if not (prefill.isdigit() and decode.isdigit()) or int(prefill) < 1 or int(decode) < 1:
        raise ReplayError(f"{text!r} is no split; write P:D, both at least 1, such as 4:4")
    if int(prefill) + int(decode) != workers:
        raise ReplayError(f"the split {text} makes {int(prefill) + int(decode)} workers and there are {workers}")
    return int(prefill)


def run(
    trace: Trace,
    setup: Setup,
    policy: str,
    *,
    path: str = "fast",
    prefill_bias: float = 1.0,
    decode_bias: float = 1.0,
    after: float = 0.0,
    fixed_missed: dict[int, list[int]] | None = None,
    plans: int = PLAN_REPLAYS,
    changes: int = CHANGE_REPLAYS,
) -> Ran:
    """Replay `trace` under `policy` (policy_names()). `fixed:P:D` starts at P:D, others at setup.start_prefill.

    `fixed_missed` spares the oracle its replays of fixed splits; `plans`, `changes`: of its other replays, at most.
    Raises ReplayError for a policy that is not known.
    """
    law: Law | Scheduled | None
    replays = 1
    if policy == "oracle":
        plant = plant_of(setup)
        laws = {name: partial(LAWS[name], plant) for name in ORACLE_LAWS}
        search = Oracle(trace, setup, PATHS[path], laws=laws, plans=plans, changes=changes, fixed_missed=fixed_missed)
        best = search.search()
        law = Scheduled(best.schedule, best.seconds)
        setup, replays = replace(setup, start_prefill=best.schedule[0]), best.replays + 1
    elif policy.startswith("fixed:"):
        setup = replace(setup, start_prefill=parse_split(policy.removeprefix("fixed:"), setup.workers))
        law = Fixed(setup.start_prefill)
    elif policy in LAWS:
        law = LAWS[policy](plant_of(setup, prefill_bias, decode_bias))
    else:
        raise ReplayError(f"policy {policy!r} is not known; use one of {', '.join(policy_names())}")
    outcome = Cluster(setup, PATHS[path]).run(trace, law)
    return Ran(policy, setup, outcome, score(outcome, setup, after=after), law, replays)


def decisions(ran: Ran) -> list[tuple[float, str, str, str]]:
    """(time, from, to, reason) of every decision that moved something; empty for laws that give no reasons."""
    if not isinstance(ran.law, Forebay):
        return []
    return [(d.at, str(d.before), str(d.target), d.reason) for d in ran.law.decisions]
