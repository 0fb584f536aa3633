"""A fluid model of the two pools: what share of the requests a split would make miss an objective.

Requests are a flow. Prefill is a queue measured in worker-seconds; decoders hold a number of requests whose common step
time follows from their batch. Convertible decoders take what waits longer than 0.7 of the TTFT objective. One-second
slots, so that bursts within a second are not seen; misses begin a little below an objective for that reason (RAMP).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from forebay_operator.decide.memory import Queues
from forebay_operator.decide.types import Split, Workers

TTFT_RAMP = (0.75, 1.1)
"""Share of the objective at which the first and the last request of a slot miss it: a slot's mean hides its spread."""

TPOT_RAMP = (0.85, 1.05)
QUEUE_SHARE = 0.7
"""Of the TTFT objective: the router's threshold for convertible decoders."""

STEP_SHARE = 0.6
"""Of the TPOT objective: decoders with slower steps take no prompt..."""

STEP_SPREAD = 0.1
"""...and their steps differ by this much of it either way, so that some still do when the mean one does not."""

MEMORY_SHARE = 0.95
"""Of the KV tokens: what is used when requests of different lengths share them."""

HELD_SHARE = 0.5
"""Of the KV tokens of prefill workers: what answers that wait for a decoder may hold of them."""

CLEAR_SECONDS = 600.0
STEP_LEAST_SECONDS = 1e-6
"""A fit of steps that grow faster than their batch has no fixed part; an empty decoder's step takes some time still."""


@dataclass(frozen=True, slots=True)
class Load:
    """What arrives and what a request costs."""

    prefill_seconds: Sequence[float]
    """Per slot: prefill work that arrives, in worker-seconds."""

    requests: Sequence[float]
    """Per slot."""

    output: float
    """Mean output tokens."""

    context: float
    """Mean context tokens of a request that decodes."""

    mean_prefill: float
    """Seconds of one prompt."""


@dataclass(frozen=True, slots=True)
class Model:
    """The pools' constants for one Load; made once for all splits."""

    ttft: float
    tpot: float
    most: float
    """Requests that fit a decoder."""

    base: float
    slope: float
    """Decode step = max(base + slope * batch, compute * batch) + overhead."""

    compute: float
    overhead: float
    convert: float
    """Prefill seconds that a decoder computes in a second of mixed steps; 0: not convertible."""

    mixed: float
    """Seconds of a mixed step."""

    earlier_weight: float = 1.0
    """What a request of earlier traffic takes of a decoder, in requests of this load..."""

    earlier_left: float = 1.0
    """...and the output tokens that it still makes, in the mean."""

    def step(self, batch: float) -> float:
        return self.overhead + max(self.base + self.slope * batch, self.compute * batch)


def model_of(
    load: Load, workers: Workers, decode_factor: float, ttft: float, tpot: float, convertible: bool, velocity: float
) -> Model:
    """`decode_factor`: measured over believed step time. `velocity`: measured prefill tokens per second."""
    context = max(1.0, load.context)
    most = min(float(workers.max_batch), MEMORY_SHARE * workers.kv_tokens / context)
    convert = 0.0
    mixed = workers.mixed_seconds
    if convertible and mixed > 0 and mixed != float("inf"):
        convert = min(1.0, workers.mixed_chunk / mixed / velocity)
    return Model(
        ttft=ttft,
        tpot=tpot,
        most=max(1.0, most),
        base=max(STEP_LEAST_SECONDS, decode_factor * workers.weights_seconds),
        slope=decode_factor * (workers.sequence_seconds + workers.resident_seconds * context),
        compute=decode_factor * workers.compute_seconds,
        overhead=decode_factor * workers.overhead_seconds,
        convert=convert,
        mixed=mixed if convert else 0.0,
    )


@dataclass(frozen=True, slots=True)
class Course:
    """Serving workers over time: `during` until `switch` seconds, then `after`."""

    during: Split
    after: Split
    switch: float


def slot_of(seconds: float) -> int:
    """Seconds of a slot for a roll of `seconds`: longer ones see bursts less sharply, for the same work."""
    return 1 if seconds <= 120 else 2 if seconds <= 240 else 4


def slowed(load: Load, by: float) -> Load:
    """The same requests with prompts that take `by` times as long to compute."""
    return replace(
        load, prefill_seconds=[work * by for work in load.prefill_seconds], mean_prefill=load.mean_prefill * by
    )


def roll(
    load: Load,
    model: Model,
    course: Course,
    queues: Queues,
    seconds: float,
    *,
    scale: float = 1.0,
    decode_scale: float = 1.0,
    slot: int = 1,
    horizon: float = 0.0,
    cap: float = math.inf,
    along: bool = False,
    bear: bool = False,
) -> tuple[float, float, Queues]:
    """(missed, offered, queues at the end) of `seconds` in which the load's slots repeat.

    `scale` multiplies arrivals, `decode_scale` output length as well. `slot` joins that many seconds. With `horizon`,
    what is left at the end is charged: arrivals meanwhile miss until the backlog has cleared, within 2 horizons fully
    and a twentieth of them until `cap` seconds. `along`: decoders that go at the switch take their requests with them.
    `bear`: answers that wait for decoders are charged from when they make tokens take too long, which is for gears that
    are elsewhere in seconds; else each is.
    """
    work, counts = load.prefill_seconds, load.requests
    n = len(work)
    output = load.output * decode_scale
    mean = load.mean_prefill
    ttft, tpot, most = model.ttft, model.tpot, model.most
    earlier, weight, still = queues.earlier, model.earlier_weight, model.earlier_left * decode_scale
    base, slope, compute, overhead = model.base, model.slope, model.compute, model.overhead
    convert, mixed = model.convert, model.mixed
    prefill, decode = float(course.during.prefill), float(course.during.decode)
    switch = course.switch
    waiting, decoding = queues.prefill_seconds, queues.decoding - queues.earlier
    t_low, t_span = TTFT_RAMP[0] * ttft, (TTFT_RAMP[1] - TTFT_RAMP[0]) * ttft
    p_low, p_span = TPOT_RAMP[0] * tpot, (TPOT_RAMP[1] - TPOT_RAMP[0]) * tpot
    allowed = QUEUE_SHARE * ttft
    least_room, room_span = (STEP_SHARE + STEP_SPREAD) * tpot, 2 * STEP_SPREAD * tpot
    missed = offered = 0.0
    index = n - int(seconds) % n if n else 0
    at = 0
    end = int(seconds)
    switched = switch <= 0
    if switched:
        prefill, decode = float(course.after.prefill), float(course.after.decode)
    while at < end:
        if not switched and at >= switch:
            if along and course.after.decode < decode:
                decoding *= course.after.decode / decode
                earlier *= course.after.decode / decode
            prefill, decode = float(course.after.prefill), float(course.after.decode)
            switched = True
        arrive = count = 0.0
        for _ in range(slot):
            if index >= n:
                index -= n
            arrive += work[index]
            count += counts[index]
            index += 1
        at += slot
        arrive *= scale
        count *= scale
        waiting += arrive
        served = prefill * slot
        if served > waiting:
            served = waiting
        waiting -= served
        batch = (decoding + weight * earlier) / decode
        full = batch if batch < most else most
        linear = base + slope * full
        step = compute * full
        step = overhead + (linear if linear > step else step)
        if convert and waiting > allowed * prefill and step < least_room:
            able = (least_room - step) / room_span
            room = QUEUE_SHARE * decode * slot * convert * (able if able < 1.0 else 1.0)
            extra = waiting - allowed * prefill
            if extra > room:
                extra = room
            waiting -= extra
            served += extra
            part = extra / (decode * slot * convert)
            step = step * (1 - part) + mixed * part
        crowded = batch / most if batch > most else 1.0
        effective = step * crowded
        running = slot / (step * crowded)
        decoding += served / mean - decoding * running / output
        if decoding < 0.0:
            decoding = 0.0
        if earlier:
            earlier -= earlier * running / still
            if earlier < 0.0:
                earlier = 0.0
        wait = waiting / prefill + mean
        late = (wait - t_low) / t_span
        late = 0.0 if late < 0.0 else 1.0 if late > 1.0 else late
        slow = (effective - p_low) / p_span
        slow = 0.0 if slow < 0.0 else 1.0 if slow > 1.0 else slow
        missed += count * (1.0 - (1.0 - late) * (1.0 - slow))
        offered += count
    if horizon > 0.0 and end > 0:
        rate = offered / end
        mean_work = rate * mean
        charged = _charge(waiting - allowed * prefill * 0.5, prefill - mean_work, horizon, cap)
        over = decoding + weight * earlier - most * decode
        full = model.step(most)
        drained = most * decode / (output * full) - rate
        room = 0.0
        if bear:
            # While answers wait their tokens take longer, and nothing is missed until they take too long. Their KV
            # waits on prefill workers, which need the other half of their memory for prompts.
            room = max(0.0, p_low / (full if full > mixed else mixed) - 1.0) * most * decode
            room = min(room, HELD_SHARE * most * prefill)
        missed += rate * max(charged, _charge_overflow(over, room, drained, horizon, cap))
    return missed, offered, Queues(waiting, decoding + weight * earlier)


def share(rolled: tuple[float, float, Queues]) -> float:
    """Of what roll() says was offered, the part that missed; 0 where nothing was."""
    missed, offered, _ = rolled
    return missed / offered if offered > 0 else 0.0


def _charge(backlog: float, speed: float, horizon: float, cap: float) -> float:
    """Seconds' worth of arrivals that miss while a backlog clears: fully for 2 horizons, then a twentieth of them."""
    clear = _clear(backlog, speed)
    return min(clear, 2 * horizon) + 0.05 * min(clear, cap)


def _charge_overflow(over: float, room: float, speed: float, horizon: float, cap: float) -> float:
    """As _charge(), of requests that decoders have no memory for: they miss from `room` of them on, and where they
    become so many within the 2 horizons, from then on."""
    if over > room:
        return _charge(over - room, speed, horizon, cap)
    grows = -speed * 2 * horizon
    if grows <= room - over:
        return 0.0
    return (1.0 - (room - over) / grows) * _charge(over, speed, horizon, cap)


def _clear(backlog: float, speed: float) -> float:
    """Seconds until a backlog is gone. One that grows counts as more, the faster it grows.

    So two splits that both miss everything for now are still told apart: the law does not park at the worse one.
    """
    if backlog <= 0:
        return 0.0
    if speed > 0:
        return min(CLEAR_SECONDS, backlog / speed)
    return CLEAR_SECONDS * (2 + min(4.0, -speed))
