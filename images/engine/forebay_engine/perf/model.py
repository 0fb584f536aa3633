"""How long a step takes on a device: the model behind the simulated executor and replays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from forebay_engine.kv.arena import ArenaLayout

_COUNTS: Final = ("tp", "layers", "kv_heads", "head_size", "itemsize", "kv_capacity_tokens")
_ABOVE_0: Final = ("ttft_objective_seconds", "tpot_objective_seconds")
_MOST: Final = 10**15
_MOST_SECONDS: Final = 10_000.0
"""Far beyond any worker, and far from what sums of steps can't hold."""

_SHOWN: Final = 40
"""Characters of a text that is no JSON, in the message."""


class PerfModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A roofline: a step takes the longer of its compute and its memory traffic, plus fixed parts.

        compute = token_seconds * (prompt tokens + decoding sequences)
                + attention_seconds * sum over chunks of (n * p + n^2 / 2)
                + knee_seconds * max(0, prompt tokens - knee_tokens)
        memory  = weights_seconds + sequence_seconds * decoding sequences
                + resident_seconds * (resident decode tokens + sum of p)
        step    = overhead_seconds + (prefill_overhead_seconds if any chunk) + max(compute, memory)

    with n new tokens on top of p tokens of context in a chunk. The formulas' source for `source: formula` is in
    perf/formula.py, the data's for `source: fitted` in the JSON file's own `note`.
    """

    name: str
    source: str
    """`formula` (computed from data sheets), `fitted` (to measurements) or `made-up` (for tests)."""

    tp: int = 1
    """GPUs of one worker."""

    note: str = ""
    """Where the figures come from, with the data's licence."""

    layers: int
    kv_heads: int
    head_size: int
    itemsize: int = 2
    dtype: str = "bfloat16"

    token_seconds: float = 0.0
    attention_seconds: float = 0.0
    knee_tokens: float = 0.0
    knee_seconds: float = 0.0
    weights_seconds: float = 0.0
    sequence_seconds: float = 0.0
    resident_seconds: float = 0.0
    prefill_overhead_seconds: float = 0.0
    overhead_seconds: float = 0.0

    transfer_bytes_per_second: float
    """What one hand-off gets between two workers of this kind; 0 means no time at all."""

    transfer_seconds: float = 0.0
    """Fixed part of a hand-off."""

    kv_capacity_tokens: int
    """Tokens whose KV one worker holds."""

    ttft_objective_seconds: float
    tpot_objective_seconds: float

    role_switch_seconds: float | None = None
    """Until a router uses a worker's new role, where it was measured."""

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of all layers: 2 * layers * kv_heads * head_size * itemsize."""
        return self.layout(1).bytes_per_token

    def layout(self, block_size: int) -> ArenaLayout:
        return ArenaLayout(self.layers, self.kv_heads, self.head_size, block_size, self.dtype, self.itemsize)

    def prefill_seconds(self, new_tokens: int, context_before: int = 0) -> float:
        """One prompt (or chunk) alone in a step."""
        return self.step_seconds([(new_tokens, context_before)], 0, 0)

    def decode_seconds(self, batch: int, resident_tokens: int) -> float:
        """One token for each of `batch` sequences, whose contexts have `resident_tokens` tokens together."""
        return self.step_seconds([], batch, resident_tokens)

    def step_seconds(self, chunks: Sequence[tuple[int, int]], batch: int, resident_tokens: int) -> float:
        """A mixed step: chunks of (new tokens, context before) and `batch` decoding sequences. 0 for an empty one."""
        if not chunks and not batch:
            return 0.0
        fixed = self.overhead_seconds
        compute = self.token_seconds * batch
        context = 0
        if chunks:
            new, pairs = 0, 0.0
            for n, p in chunks:
                new += n
                pairs += n * p + n * n / 2
                context += p
            compute = self.token_seconds * (new + batch) + self.attention_seconds * pairs
            if new > self.knee_tokens:
                compute += self.knee_seconds * (new - self.knee_tokens)
            fixed += self.prefill_overhead_seconds
        memory = (
            self.weights_seconds + self.sequence_seconds * batch + self.resident_seconds * (resident_tokens + context)
        )
        return fixed + (compute if compute > memory else memory)

    def handoff_seconds(self, num_tokens: int) -> float:
        """Moving the KV of `num_tokens` tokens to another worker."""
        if not self.transfer_bytes_per_second:
            return self.transfer_seconds
        return self.transfer_seconds + num_tokens * self.kv_bytes_per_token / self.transfer_bytes_per_second


def read(path: Path) -> PerfModel:
    """A calibrated model from a JSON file. Raises ValueError naming the file and the field at fault."""
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise ValueError(f"performance model {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"performance model {path}: {error}") from error


def parse(text: str | bytes) -> PerfModel:
    """A calibrated model from the text of its file. Raises ValueError naming the field, its value and its limit."""
    try:
        model = msgspec.json.decode(text, type=PerfModel)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        shown = text if isinstance(text, str) else text.decode(errors="replace")
        raise ValueError(f"{error}; it begins with {shown[:_SHOWN]!r}") from error
    for name, value in msgspec.structs.asdict(model).items():
        if not isinstance(value, int | float):
            continue
        if name in _COUNTS and value < 1:
            raise ValueError(f"{name} is {value}; must be at least 1")
        if name in _ABOVE_0 and value <= 0:
            raise ValueError(f"{name} is {value:g}; must be over 0")
        if value < 0:
            raise ValueError(f"{name} is {value:g}; must be at least 0")
        most = _MOST_SECONDS if name.endswith("_seconds") else _MOST
        if value > most:
            raise ValueError(f"{name} is {value:g}; must be at most {most:g}")
    return model
