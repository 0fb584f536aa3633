"""A stretch of decode steps that nothing joins or leaves: its times in closed form."""

from __future__ import annotations

import math

from forebay_engine.perf import PerfModel

TOLERANCE = 1e-12
"""Seconds: sums of the same steps in another order differ by less."""


class Stretch:
    """Step i (from 0) lasts overhead + max(compute, memory + i * growth): each step adds a token per sequence."""

    __slots__ = ("_compute", "_crossing", "_growth", "_memory", "_overhead")

    def __init__(self, model: PerfModel, batch: int, resident: int) -> None:
        """`batch` sequences that hold `resident` tokens when the first step begins."""
        self._overhead = model.overhead_seconds
        self._compute = model.token_seconds * batch
        self._memory = model.weights_seconds + model.sequence_seconds * batch + model.resident_seconds * resident
        self._growth = model.resident_seconds * batch
        self._crossing = 0
        """How many steps compute bounds, before memory does."""
        if self._memory < self._compute:
            grows = self._growth > 0
            self._crossing = math.ceil((self._compute - self._memory) / self._growth) if grows else 1 << 62

    def seconds(self, steps: int) -> float:
        """Time of the first `steps` steps."""
        bound = self._crossing if self._crossing < steps else steps
        rest = steps - bound
        first = self._memory + self._growth * bound
        return steps * self._overhead + bound * self._compute + rest * first + self._growth * rest * (rest - 1) / 2

    def ended(self, elapsed: float, most: int) -> int:
        """How many of the first `most` steps have ended after `elapsed` seconds."""
        steps = min(most, max(0, self._solved(elapsed)))
        # Solved in floats: the sum itself decides.
        while steps < most and self.seconds(steps + 1) <= elapsed + TOLERANCE:
            steps += 1
        while steps and self.seconds(steps) > elapsed + TOLERANCE:
            steps -= 1
        return steps

    def _solved(self, elapsed: float) -> int:
        even = self._overhead + self._compute
        if self._crossing and elapsed <= self._crossing * even:
            return int(elapsed / even)
        left = elapsed - self._crossing * even
        half = self._growth / 2
        linear = self._overhead + self._memory + self._growth * self._crossing - half
        if half > 0:
            root = (math.sqrt(linear * linear + 4 * half * max(0.0, left)) - linear) / (2 * half)
        else:
            root = left / linear
        return self._crossing + int(root)

    def longer(self, steps: int, limit: float) -> int:
        """How many of the first `steps` steps last longer than `limit` seconds: the last ones, since steps grow."""
        if self._step(steps - 1) <= limit:
            return 0
        first = 0
        if self._growth > 0:
            solved = math.ceil((limit - self._overhead - self._memory) / self._growth)
            first = min(steps - 1, max(0, solved))
        while first and self._step(first - 1) > limit:
            first -= 1
        while self._step(first) <= limit:
            first += 1
        return steps - first

    def _step(self, index: int) -> float:
        return self.seconds(index + 1) - self.seconds(index)
