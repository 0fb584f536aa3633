"""What the workers' counters say of their speed: increments that can be trusted, and the capacity fitted to them. Pure.

An increment counts when its worker was warm, the same process and in the same role all the time it was made in.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final

import msgspec

from forebay_operator.decide.types import Workers
from forebay_operator.observe.worker_counters import NONE, Counters, Page

COLD_SECONDS: Final = 30.0
"""A new process compiles, allocates and fills caches: its first steps are no measure."""

LEAST_PROMPT_TOKENS: Final = 512
LEAST_DECODE_STEPS: Final = 20
LEAST_SECONDS: Final = 1e-9
"""Of all prompts of an increment, or of one decode step. No worker is so fast: less is no measure of it."""

VELOCITIES: Final = 24
"""Kept, of all workers: their median counts, so that one slow worker or stalled step does not."""

CELLS: Final = 64
GRID: Final = 1.2
STRONGEST_PRIOR: Final = 0.5
"""Weight of what is believed beforehand about a decode step's parts, in samples."""

HALF_BATCH: Final = 64.0
"""Batch at which half of a decode step is believed to be its sequences' own, where nothing is measured yet: reading the
KV of so many sequences takes about as long as reading the weights of an 8B model."""


class Watched:
    """One worker's counters as they may be learnt from: `credited` only ever grows."""

    def __init__(self, engine_id: str, role: str | None, now: float, *, cold: bool) -> None:
        self.engine_id = engine_id
        self.role = role
        self.warm_at = now + COLD_SECONDS if cold else now
        self.credited: Counters = NONE
        self.looks = 0
        self.looked_at: float | None = None
        self._page: Page | None = None
        self._moved = False
        """It changed roles since the last look."""

    def in_role(self, role: str | None) -> None:
        if role != self.role:
            self.role, self._moved = role, True

    def restarted(self, engine_id: str, now: float) -> None:
        self.engine_id, self.warm_at, self._page = engine_id, now + COLD_SECONDS, None

    def cold(self, now: float) -> bool:
        return now < self.warm_at

    def look(self, page: Page, now: float) -> Counters | None:
        """The increment since the last look, when it can be trusted."""
        before, moved = self._page, self._moved
        self._page, self._moved, self.looked_at = page, False, now
        self.looks += 1
        if before is None or moved or self.role is None or self.cold(now):
            return None
        gone = page.since(before)
        if gone is not None and self.role == "decode" and page.batch is not None:
            # vLLM counts prompts here whose KV was pulled, by the one step after it: no speed follows from that.
            gone = gone._replace(prompt_tokens=0.0, prompt_seconds=0.0)
        if gone is None or not gone.in_range:
            return None
        self.credited = self.credited.plus(gone)
        return gone


class Cell(msgspec.Struct, array_like=True):
    """Decode steps at about one load: means of the latest increments there."""

    batch: float
    resident: float
    seconds: float


class Capacity(msgspec.Struct):
    """Speed of the model's workers, learnt over all of them. Part of the law's soft memory."""

    velocities: list[float] = []
    """Prompt tokens per second, newest last."""

    cells: dict[str, Cell] = {}
    """By batch and context on a logarithmic grid, newest last: a fit needs loads that differ, not many alike."""

    prior: list[float] = []
    """Seconds of a decode step that are fixed, per sequence and per resident token, by the file that the law started
    from. Empty: there was none."""

    def copy(self) -> Capacity:
        return Capacity(list(self.velocities), dict(self.cells), list(self.prior))

    def start_from(self, workers: Workers) -> None:
        """Forget what was learnt. Until loads differ, a step's parts are in the proportion that `workers` has."""
        fixed = workers.overhead_seconds + workers.weights_seconds
        self.velocities, self.cells = [], {}
        self.prior = [fixed, workers.sequence_seconds, workers.resident_seconds]

    def add(self, gone: Counters) -> None:
        if gone.prompt_tokens >= LEAST_PROMPT_TOKENS and gone.prompt_seconds >= LEAST_SECONDS:
            self.velocities = [*self.velocities, gone.prompt_tokens / gone.prompt_seconds][-VELOCITIES:]
        steps, batches = gone.decode_steps, gone.decode_sequences
        if steps >= LEAST_DECODE_STEPS and batches >= steps and gone.decode_seconds / steps >= LEAST_SECONDS:
            self._add_cell(batches / steps, gone.decode_resident / steps, gone.decode_seconds / steps)

    def _add_cell(self, batch: float, resident: float, seconds: float) -> None:
        key = f"{_grid(batch)}:{_grid(resident / batch)}"
        held = self.cells.pop(key, None)
        if held is not None:
            batch, resident = (held.batch + batch) / 2, (held.resident + resident) / 2
            seconds = (held.seconds + seconds) / 2
        self.cells[key] = Cell(batch, resident, seconds)
        while len(self.cells) > CELLS:
            del self.cells[next(iter(self.cells))]

    def workers(self, kv_tokens: int, max_batch: int) -> Workers | None:
        """What the law needs to know of a worker; None until both phases have been measured."""
        if not self.velocities or not self.cells or kv_tokens <= 0:
            return None
        fixed, sequence, resident = _fit(list(self.cells.values()), self.prior)
        return Workers(
            prefill_velocity=statistics.median(self.velocities),
            weights_seconds=fixed,
            sequence_seconds=sequence,
            resident_seconds=resident,
            kv_tokens=kv_tokens,
            max_batch=max(1, max_batch),
        )


def _grid(value: float) -> int:
    """Steps of a fifth. `value` must be finite."""
    return 0 if value < GRID else math.floor(math.log(value) / math.log(GRID))


def _fit(cells: list[Cell], believed: Sequence[float]) -> tuple[float, float, float]:
    """seconds = fixed + sequence * batch + resident * tokens, none below 0, by least squares of the relative errors.

    Batch and tokens go up and down together, and at one load the parts can't be told apart: a weak prior shares the
    step out as `believed` does, or else HALF_BATCH. Coordinate descent; the problem is convex.
    """
    batch = statistics.fmean(c.batch for c in cells)
    tokens = max(1.0, statistics.fmean(c.resident for c in cells))
    level = statistics.fmean(c.seconds for c in cells)
    own = batch / (batch + HALF_BATCH)
    prior = (1 - own, own / 2, own / 2)
    if len(believed) == 3:
        parts = (believed[0], believed[1] * batch, believed[2] * tokens)
        prior = (parts[0] / sum(parts), parts[1] / sum(parts), parts[2] / sum(parts)) if sum(parts) > 0 else prior
    # In units of the means all three coefficients are shares of a mean step.
    rows = [
        (level / c.seconds, c.batch / batch * level / c.seconds, c.resident / tokens * level / c.seconds) for c in cells
    ]
    share = list(prior)
    for _ in range(200):
        for i in range(3):
            others = [1.0 - sum(row[j] * share[j] for j in range(3) if j != i) for row in rows]
            above = sum(row[i] * other for row, other in zip(rows, others, strict=True)) + STRONGEST_PRIOR * prior[i]
            share[i] = max(0.0, above / (sum(row[i] ** 2 for row in rows) + STRONGEST_PRIOR))
    return level * share[0], level * share[1] / batch, level * share[2] / tokens
