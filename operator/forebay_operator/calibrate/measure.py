"""The measurement: prompts one by one, then batches of streams, against an idle pool."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from forebay_engine.perf.fit import Sample
from forebay_operator.calibrate.points import (
    ANSWER_TOKENS,
    MAX_PROMPT_SECONDS,
    DecodePoint,
    Limits,
    decode_points,
    prefill_lengths,
)
from forebay_operator.calibrate.probe import Pool, PoolLoad, Timing
from forebay_operator.calibrate.samples import CalibrationError, Handoff, Measured

Progress = Callable[[str, float], None]
"""What is measured now, and the share of the work that is done."""

REPEATS = 3
PULL_REPORT_SECONDS = 1.5
"""Workers push their load every 0.2 s; a pull that isn't reported by then did not happen."""

_SHORTEST_WINDOW = 5
"""Tokens per stream between the last stream's first one and the first stream's last one."""

PREFILL_SHARE = 0.5
"""Of the time allowed."""


class Measurement:
    """Against one pool. `seconds` bounds all of it: points that no longer fit are left out."""

    def __init__(self, pool: Pool, load: PoolLoad, *, seconds: float, seed: int, progress: Progress) -> None:
        self._pool = pool
        prefill, decode = load.ready("prefill"), load.ready("decode")
        if not prefill or not decode:
            raise CalibrationError(
                f"{pool.url} has {len(prefill)} ready workers for prefill and {len(decode)} for decode; one of each is "
                "needed"
            )
        self._decoders = len(decode)
        reports = [worker.load for worker in (*prefill, *decode) if worker.load is not None]
        self.model = reports[0].model
        self.limits = Limits(
            max_model_len=min(r.max_model_len for r in reports),
            kv_capacity_tokens=min(r.total_blocks * r.block_size for r in reports),
            max_running=min(r.max_running for r in reports) or 256,
        )
        self.measured = Measured()
        self.left_out: list[str] = []
        """Points that were planned and not measured, with the reason."""

        self._random = random.Random(seed)
        self._begin = time.monotonic()
        self._seconds = seconds
        self._progress = progress
        self._characters_per_token = 1.0

    async def run(self) -> Measured:
        # The first request of a pair of workers pays for their connection.
        warm = await self._pool.complete(self.model, self._text(256), 2)
        self._characters_per_token = 256 / max(1, warm.prompt_tokens)
        await self._prompts()
        await self._batches()
        return self.measured

    def _text(self, characters: float) -> str:
        """Random, so that no prefix cache knows it."""
        size = max(1, int(characters))
        return f"{self._random.getrandbits(4 * size):0{size}x}"[:size]

    def _prompt(self, tokens: int) -> str:
        return self._text(tokens * self._characters_per_token)

    def _spent(self) -> float:
        return (time.monotonic() - self._begin) / self._seconds

    async def _prompts(self) -> None:
        lengths = prefill_lengths(self.limits)
        longest = 0.0
        for i, tokens in enumerate(lengths):
            late = self._spent() > PREFILL_SHARE
            if i >= 3 and (late or 2 * longest > MAX_PROMPT_SECONDS):
                why = self._no_time() if late else f"one would take about {MAX_PROMPT_SECONDS:g} s or more"
                self.left_out.append(f"prompts of {_listed(lengths[i:])} tokens: {why}")
                break
            self._progress(f"prefill, {tokens} tokens", PREFILL_SHARE * i / len(lengths))
            timings = [await self._one_prompt(tokens) for _ in range(REPEATS)]
            middle = sorted(timings, key=lambda timing: timing.first_seconds)[REPEATS // 2]
            longest = middle.first_seconds
            self.measured.prefill.append(Sample(longest, chunks=((middle.prompt_tokens, middle.cached_tokens),)))

    async def _one_prompt(self, tokens: int) -> Timing:
        before = await self._pool.load()
        timing = await self._pool.complete(self.model, self._prompt(tokens), 2)
        moved = await self._pool.moved_since(before, within=PULL_REPORT_SECONDS)
        if moved is not None:
            self.measured.handoffs.append(Handoff(*moved, tokens=timing.prompt_tokens))
        return timing

    async def _batches(self) -> None:
        points = decode_points(self.limits)
        for i, point in enumerate(points):
            share = PREFILL_SHARE + (1 - PREFILL_SHARE) * i / len(points)
            if len(self.measured.decode) >= 3 and self._spent() > share and self._spent() > 1 - 1 / len(points):
                self._leave_out(points[i:], len(points))
                break
            self._progress(f"decode, {point.batch} streams at {point.context} tokens", share)
            prompts = [self._prompt(point.context) for _ in range(point.batch * self._decoders)]
            # Computed once before, so that the streams begin together.
            for prompt in prompts:
                await self._pool.complete(self.model, prompt, 1)
            timings = await asyncio.gather(
                *(self._pool.complete(self.model, prompt, ANSWER_TOKENS) for prompt in prompts)
            )
            self.measured.decode.extend(steps_of(timings))
            if self._spent() > 1 and len(self.measured.decode) >= 3:
                self._leave_out(points[i + 1 :], len(points))
                break

    def _leave_out(self, points: Sequence[DecodePoint], of: int) -> None:
        by_context: dict[int, list[int]] = defaultdict(list)
        for point in points:
            by_context[point.context].append(point.batch)
        rest = "; ".join(f"{_listed(sorted(by_context[c]))} streams at {c} tokens" for c in sorted(by_context))
        if rest:
            self.left_out.append(f"{len(points)} of {of} batches ({rest}): {self._no_time()}")

    def _no_time(self) -> str:
        return f"no time within {self._seconds / 60:g} minutes; give more --minutes"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def steps_of(timings: Sequence[Timing]) -> list[Sample]:
    """One decode sample for each worker whose streams ran at once long enough."""
    by_worker: dict[str, list[Timing]] = defaultdict(list)
    for timing in timings:
        by_worker[timing.decode].append(timing)
    found = []
    for streams in by_worker.values():
        # A stream's first token comes from prefill, its second waits for the pull.
        begin = max(stream.arrivals[min(2, len(stream.arrivals) - 1)] for stream in streams)
        end = min(stream.arrivals[-1] for stream in streams)
        gaps = [gap for stream in streams if (gap := _gap(stream, begin, end)) is not None]
        if len(gaps) < len(streams):
            continue
        resident = sum(stream.prompt_tokens + stream.completion_tokens // 2 for stream in streams)
        found.append(Sample(statistics.median(gaps), batch=len(streams), resident_tokens=resident))
    return found


def _gap(stream: Timing, begin: float, end: float) -> float | None:
    """Seconds between this stream's tokens from `begin` to `end`; None where too few came."""
    inside = [at for at in stream.arrivals if begin <= at <= end]
    if len(inside) <= _SHORTEST_WINDOW:
        return None
    tokens_per_chunk = stream.completion_tokens / len(stream.arrivals)
    return (inside[-1] - inside[0]) / ((len(inside) - 1) * max(1.0, tokens_per_chunk))
