"""What each split is worth: misses expected over the dwell, the move's price and the way back included.

docs/rescaling.md derives the terms. In short, for each split q and each of two windows of arrivals w:

    s_w(q) = (1 - beta) * c_w(q) + beta * m(q)        c_w: rolled out from now; m: over the last half hour
    gain(q) = min over w of s_w(stay) - s_w(q), less a dead band per worker moved

A slow gear's s_w is that of outlook.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from forebay_operator.decide import fluid
from forebay_operator.decide.estimate import WINDOW_SECONDS, Earlier, Estimate
from forebay_operator.decide.memory import Memory, Moved, Queues, Track, Traffic
from forebay_operator.decide.minute import NOTHING, Minute, Move
from forebay_operator.decide.outlook import Outlook, outlook
from forebay_operator.decide.regime import LEAST_SECONDS, dwell, follow, regret
from forebay_operator.decide.types import Option, Policy, Split

DONOR = 0.25
"""The donor's load is taken as up to this much heavier: the dead band in units of demand."""

RETURN = 1.5
"""beta = RETURN * Tb / (dwell + RETURN * Tb): weight of the last half hour, the chance to be caught by its return. A
quick gear is caught about once a look ahead."""

BAND = (0.0005, 0.02)
"""Gain that a move of one worker must have for nothing else: a part for any gear, and one that grows with its time."""

BAR = 0.02
DEBT = 3.0
FLAP = 0.03
"""What each flap of the last minutes adds to the bar: forecasts of a minute that did not hold for two."""

FLAP_SECONDS = 120.0
FLAPS_KEPT_SECONDS = 600.0
BAR_MOST = 0.5
WINDOWS_SLOW = (20.0, 60.0)
"""A burst, and some turnovers of a decode batch."""

WINDOWS_FAST = (10.0, 20.0)
"""A move that costs a second may follow what would be a burst to a slow one."""

MEMORY_SECONDS = 1800.0
NOTICE_SECONDS = 20.0
NOTICE_DRAIN_SECONDS = 30.0
"""From the shift to the decision, once for a hot gear and once for one that drains."""


@dataclass(frozen=True, slots=True)
class Valued:
    options: tuple[Option, ...]
    """Best first; the present split among them."""

    bar: float
    """Gain that makes a move worth it."""

    dwell: float
    modelled: float
    """Misses the model expects of what was really in force, over the last half hour."""

    band: float
    """What was taken off a gain per worker moved."""

    unpaid: dict[Split, Unpaid] = field(default_factory=dict)
    """Splits that a slow gear without convertible decoders may not move to yet."""

    early: frozenset[Split] = frozenset()
    """Splits that a quick gear may as well move to in WAIT_SECONDS."""


@dataclass(frozen=True, slots=True)
class Unpaid:
    """In requests: what a split would have saved in this regime so far, and what moving there is expected to cost since
    traffic may change back meanwhile: more than that."""

    saved: float
    risk: float


def valued(
    observation_seconds: float,
    now: float,
    serving: Split,
    target: Split,
    splits: list[Split],
    estimate: Estimate,
    policy: Policy,
    memory: Memory,
) -> Valued:
    """Rolls out every split in `splits`. Writes tracks and the regime to `memory`."""
    assert policy.ttft_seconds is not None
    assert policy.tpot_seconds is not None
    gear = policy.gear
    model = _model(estimate.load(WINDOW_SECONDS), estimate, policy, memory.decode_factor)
    drain_decode = drain_prefill = 0.0
    seconds = gear.seconds
    if gear.drains:
        drain_decode = 1.5 * estimate.output * model.step(min(model.most, estimate.decoding / max(1, target.decode)))
        drain_prefill = 1.0
        if memory.move_seconds:
            seconds = sum(memory.move_seconds) / len(memory.move_seconds)
            drain_decode = drain_prefill = 0.0
    transit = seconds + (drain_decode + drain_prefill) / 2
    on_wrong_side = transit + (NOTICE_DRAIN_SECONDS if gear.drains else NOTICE_SECONDS)
    if not gear.slow:
        # Metrics that are late are so much of the time until a shift is noticed; of a slow gear's they are little.
        on_wrong_side += max(0.0, now - memory.seen_at)
    _follow_tracks(observation_seconds, serving, splits, estimate, model, memory, gear.slow)
    real = memory.tracks["real"].share

    # A slow move can't save a split that drowns: telling two of them apart only moves workers out of service.
    cap = fluid.CLEAR_SECONDS if gear.slow else math.inf
    # What runs of earlier traffic has ended before a slow move serves: telling it apart only makes that gear bolder.
    earlier = None if gear.slow else estimate.earlier
    now_queues = Queues(estimate.queued_seconds, estimate.decoding, earlier.requests if earlier is not None else 0.0)
    coming = model if earlier is None else _coming(earlier, estimate, policy, memory.decode_factor)
    long = estimate.load(WINDOW_SECONDS)
    # A regime is the traffic's: each split is rolled from its own shadow's queues, not from what another one left.
    plain = {
        q.prefill: fluid.share(
            fluid.roll(
                long,
                model,
                fluid.Course(q, q, 0.0),
                memory.tracks[str(q.prefill)].queues,
                60.0,
                horizon=on_wrong_side,
                cap=cap,
            )
        )
        for q in splits
    }
    follow(memory, plain, now, transit)
    lasting = dwell(memory, now)
    expected = min(lasting, max(LEAST_SECONDS, 2 * on_wrong_side))
    ahead: Outlook | None = None
    if gear.slow:
        expected = lasting
        ahead = outlook(lasting, on_wrong_side, long, model, estimate.velocity, splits, target, policy, memory)
    beta = RETURN * on_wrong_side / (expected + RETURN * on_wrong_side)
    slow = min(1.0, on_wrong_side / 60.0)
    ways: dict[Split, list[Move]] = {q: [] for q in splits}
    for window in WINDOWS_SLOW if gear.slow else WINDOWS_FAST:
        load = estimate.load(window) if earlier is None else estimate.ahead(window)
        donating = fluid.slowed(load, 1 + DONOR * slow)
        for q in splits:
            out = seconds + (drain_decode if q.prefill > target.prefill else drain_prefill)
            course = fluid.Course(Split(min(q.prefill, serving.prefill), min(q.decode, serving.decode)), q, out)
            if q == target and q == serving:
                course = fluid.Course(q, q, 0.0)
            work = donating if q.prefill < target.prefill else load
            ways[q].append(Move(course, work, 1 + DONOR * slow if q.prefill > target.prefill else 1.0))

    minute = Minute(expected, on_wrong_side, cap, serving, coming, now_queues)

    def remembered(q: Split) -> float:
        # Of a split whose shadow has seen nothing yet, only what was really missed is known.
        track = memory.tracks[str(q.prefill)]
        return track.share if track.offered else real

    def cost(move: Move) -> float:
        if ahead is not None:
            return ahead.cost(move.course.after, move.load, coming, move.course, now_queues, move.decode_scale)
        return (1 - beta) * minute.cost(move) + beta * remembered(move.course.after)

    costs = {q: [cost(move) for move in moves] for q, moves in ways.items()}
    stay = costs[target]
    band = BAND[0] + BAND[1] * slow
    options = [
        Option(
            q,
            max(found),
            min(s - c for s, c in zip(stay, found, strict=True)) - band * abs(q.prefill - target.prefill),
        )
        for q, found in costs.items()
    ]
    options.sort(key=lambda o: (-o.gain, abs(o.split.prefill - target.prefill)))
    least = min((t.share for key, t in memory.tracks.items() if key != "real" and t.offered), default=real)
    # Only moves run into debt: standing still, the distance to the best split is a reason to move, not to stay.
    debt = max(0.0, real - least) if memory.moves else 0.0
    if not gear.slow:
        # What a first burst missed until it was noticed is most of a new model's requests, and no move's fault.
        debt *= min(1.0, memory.traffic.seconds / MEMORY_SECONDS)
    bar = min(BAR_MOST, BAR + DEBT * debt * slow + FLAP * flaps(memory.moves, now))

    def can_wait(q: Split) -> bool:
        lost = beta * max(0.0, remembered(target) - remembered(q))
        return all((1 - beta) * minute.waiting(move) + lost <= NOTHING for move in ways[q])

    gaining = [] if gear.slow else [option.split for option in options if option.gain >= bar]
    early = frozenset(q for q in gaining if can_wait(q))
    unpaid: dict[Split, Unpaid] = {}
    if ahead is not None and not policy.convertible and memory.before is not None:
        # Of a regime that goes on for `lasting` seconds in the mean.
        chance = 1 - math.exp(-on_wrong_side / lasting)
        found = {q: Unpaid(max(0.0, regret(memory, q.prefill)), chance * ahead.risk(q, target)) for q in splits}
        unpaid = {q: doubt for q, doubt in found.items() if doubt.risk > doubt.saved}
    return Valued(tuple(options), bar, expected, real, band, unpaid, early)


def flaps(moves: Sequence[Moved], now: float) -> int:
    """Moves of the last ten minutes that took the one before back within two."""
    recent = [move for move in moves if move.at > now - FLAPS_KEPT_SECONDS - FLAP_SECONDS]
    return sum(
        last.towards_prefill != move.towards_prefill
        for last, move in pairwise(recent)
        if move.at > now - FLAPS_KEPT_SECONDS and move.at - last.at <= FLAP_SECONDS
    )


def _model(load: fluid.Load, estimate: Estimate, policy: Policy, decode_factor: float) -> fluid.Model:
    assert policy.ttft_seconds is not None
    assert policy.tpot_seconds is not None
    objectives = policy.ttft_seconds, policy.tpot_seconds
    return fluid.model_of(load, policy.workers, decode_factor, *objectives, policy.convertible, estimate.velocity)


def _coming(earlier: Earlier, estimate: Estimate, policy: Policy, decode_factor: float) -> fluid.Model:
    """The model for what arrives, beside what still runs of earlier traffic."""
    workers = policy.workers
    fixed, token = workers.sequence_seconds, workers.resident_seconds
    new = fixed + token * earlier.arriving_context
    # Where a step takes as long whatever runs in it, one request takes as much of it as another.
    weight = (fixed + token * earlier.context) / new if new > 0 else 1.0
    model = _model(estimate.ahead(WINDOW_SECONDS), estimate, policy, decode_factor)
    return replace(model, earlier_weight=weight, earlier_left=earlier.left)


def _at_most(modelled: Queues, measured: Queues) -> Queues:
    """Of the split that serves, no shadow holds more than there is: where load nearly fills a pool, a model that is a
    little too pessimistic has it overflow after minutes. Slow gears tell regimes apart by shadows that nothing moved.
    """
    return Queues(
        min(modelled.prefill_seconds, measured.prefill_seconds),
        min(modelled.decoding, measured.decoding),
    )


def _follow_tracks(
    seconds: float,
    serving: Split,
    splits: list[Split],
    estimate: Estimate,
    model: fluid.Model,
    memory: Memory,
    slow: bool,
) -> None:
    """Run the last interval's arrivals through every split's shadow, and through what really served."""
    # Of two looks within half a second the second one rolls no arrivals; yet each split has a shadow after it, those
    # that were no candidates before too.
    load = estimate.load(seconds)
    keep = max(0.0, 1 - seconds / MEMORY_SECONDS)
    requests = sum(load.requests)
    past = memory.traffic
    memory.traffic = Traffic(
        keep * past.seconds + len(load.requests),
        keep * past.requests + requests,
        keep * past.prompt_tokens + sum(load.prefill_seconds) * estimate.velocity,
        keep * past.output_tokens + requests * load.output,
        keep * past.context_tokens + requests * load.context,
    )
    courses = {str(q.prefill): q for q in splits}
    courses["real"] = Split(max(1, serving.prefill), max(1, serving.decode))
    now_queues = Queues(estimate.queued_seconds, estimate.decoding)

    def rolled(tracks: dict[str, Track], keep: float) -> dict[str, Track]:
        found = {}
        for key, q in courses.items():
            track = tracks.get(key) or Track(now_queues)
            course = fluid.Course(q, q, 0.0)
            missed, offered, queues = fluid.roll(load, model, course, track.queues, float(len(load.requests)))
            if q == serving and not slow:
                queues = _at_most(queues, now_queues)
            found[key] = Track(queues, keep * track.missed + missed, keep * track.offered + offered)
        return found

    memory.tracks = rolled(memory.tracks, keep)
    memory.rivals = rolled(memory.rivals, 1.0)
    if memory.pending is not None:
        memory.pending_rivals = rolled(memory.pending_rivals, 1.0)
