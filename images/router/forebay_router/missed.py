"""What a request that missed an objective lost its time to: one of forebay_wire.metrics.MISSED_IN. Pure.

*prefill* and *decode* are the two roles' workers, queues included; *transfer* is moving the KV; *router* is waiting
here; *failed* are legs that had to be run again.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Times:
    """Of one request, on the event loop's clock; None: that did not happen."""

    received: float
    prefill_sent: float | None = None
    """When its latest prefill leg was sent, and when one was answered last."""

    prefill_done: float | None = None
    slot_known: float | None = None
    """When it was certain which decode worker keeps a slot, or (`slot_kept` False) that none does."""

    slot_kept: bool = False
    joined: float | None = None
    """When its decode leg had the KV and ran, the first time."""

    together_sent: float | None = None
    """When it was sent to a worker that runs both phases, the last time."""

    prefill_failed: bool = False
    """A prefill leg failed, rather than being turned away by a busy worker."""

    decode_failed: bool = False
    """A later leg did..."""

    broke_off: bool = False
    """...after the first token."""


def in_time_to_first_token(times: Times, first: float) -> str:
    """What the longest part of TTFT was. `first`: when the first content went out, or was there to be sent."""
    here = "failed" if times.prefill_failed or times.decode_failed else "router"
    sent, done = times.prefill_sent, times.prefill_done
    if times.together_sent is not None and times.together_sent <= first:
        # Its prompt is prefill work wherever it is computed.
        spent = {"prefill": first - times.together_sent, here: times.together_sent - times.received}
    elif sent is None or done is None or done < sent:
        return here
    else:
        slot = done if times.slot_known is None else min(first, max(done, times.slot_known))
        spent = {"prefill": done - sent, "decode": slot - done, here: sent - times.received}
        # Without a slot the decode leg waits for its turn at the worker.
        moving = "failed" if times.decode_failed else "transfer" if times.slot_kept else "decode"
        spent[moving] = spent.get(moving, 0.0) + first - max(done, slot)
    return max(spent, key=lambda part: spent[part])


def in_time_between_tokens(times: Times, first: float, last: float, tokens: float, objective: float) -> str:
    """What made the TPOT of an answer of `tokens` tokens longer than `objective` seconds.

    The first token comes from the prefill worker, so the hand-off lies in the gap to the second: it is to blame where
    all later gaps hold the objective. Of two tokens nothing tells the hand-off from the decode step.
    """
    if times.broke_off:
        return "failed"
    joined = times.joined
    if joined is None or joined <= first or not times.slot_kept:
        return "decode"
    return "transfer" if tokens > 2 and last - joined <= (tokens - 2) * objective else "decode"
