"""Arrivals for a replay: traces scaled to a rate by superposition and chained one after the other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from forebay_operator.replay.trace import Arrival, Trace, TraceError

MAX_ARRIVALS = 2_000_000
"""About 1.2 GB of requests; a longer replay should be cut into pieces."""

MAX_SECONDS = 7 * 86_400.0
"""A law looks each 5 s, in silence too. A longer trace has its times in another unit more often than not."""


@dataclass(frozen=True, slots=True)
class Segment:
    trace: Trace
    at: float = 0.0
    """Seconds of the replay at which it starts."""

    rate: float | None = None
    """Requests per second; None: the trace's own."""

    seconds: float | None = None
    """How long it lasts; None: until the next segment starts, or once through the trace."""


def native_rate(trace: Trace) -> float:
    """Requests per second of the trace. One request alone counts as one per second."""
    span = trace[-1].at
    return len(trace) / span if span > 0 else float(len(trace))


def superpose(trace: Trace, rate: float | None, seconds: float, seed: int) -> Trace:
    """`seconds` of the trace at `rate`, from copies that begin at random places and go round.

    Superposition keeps the shape of bursts, where squeezing time would not. The last copy is thinned at random to the
    fraction that is left.
    """
    if rate is None:
        copies, rest = 1, 0.0
    else:
        if not rate > 0:
            raise TraceError(f"rate is {rate}; it must be greater than 0 requests per second")
        times = rate / native_rate(trace)
        copies, rest = int(times), times - int(times)
        if rate * seconds > MAX_ARRIVALS:
            raise TraceError(
                f"{rate:g} requests/s for {seconds:g} s are {rate * seconds:.0f} requests; at most {MAX_ARRIVALS}"
            )
    rng = random.Random(seed)
    # Going round, the last request is followed by a mean gap; requests all at one time come once a mean gap.
    period = trace[-1].at + 1 / native_rate(trace)
    arrivals: list[Arrival] = []
    for copy in range(copies + (1 if rest > 1e-9 else 0)):
        share = 1.0 if copy < copies else rest
        # One whole copy at the native rate is the trace itself, unmoved.
        offset = 0.0 if rate is None else rng.random() * period
        for arrival in trace:
            at = (arrival.at - offset) % period
            while at < seconds:
                if share >= 1.0 or rng.random() < share:
                    arrivals.append(Arrival(at, arrival.prompt_tokens, arrival.output_tokens))
                at += period
    arrivals.sort()
    return arrivals


def chain(segments: Sequence[Segment], seed: int = 0) -> Trace:
    """All segments' arrivals in order of time. Raises TraceError when they leave nothing."""
    arrivals: list[Arrival] = []
    starts = sorted(segment.at for segment in segments)
    for number, segment in enumerate(sorted(segments, key=lambda s: s.at)):
        if not segment.at >= 0:
            raise TraceError(f"a trace starts at {segment.at:g} s; it must be at 0 or later")
        later = [start for start in starts if start > segment.at]
        seconds = segment.seconds
        if seconds is None:
            own = segment.trace[-1].at + 1e-6
            seconds = later[0] - segment.at if later else own
        if not segment.at + seconds <= MAX_SECONDS:
            raise TraceError(
                f"a trace ends at {segment.at + seconds:g} s; at most {MAX_SECONDS:g} s (7 days) are replayed: "
                "write times in seconds, or cut it into pieces"
            )
        part = superpose(segment.trace, segment.rate, seconds, seed * 1009 + number)
        arrivals += [a._replace(at=a.at + segment.at) for a in part]
    if not arrivals:
        raise TraceError("the traces leave no request in their time; raise --rate or the segments' length")
    arrivals.sort()
    if len(arrivals) > MAX_ARRIVALS:
        raise TraceError(f"the replay has {len(arrivals)} requests; at most {MAX_ARRIVALS}: cut it into pieces")
    return arrivals
