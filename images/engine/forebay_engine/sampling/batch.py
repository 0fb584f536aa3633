"""Drawing for many rows at once, where their logits are: sampler.py's rules in tensor operations.

On a CPU numpy is faster for the few rows that a step has there. A GPU would send each row, of 100,000 numbers and more,
to a processor that takes milliseconds for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from forebay_engine.device import upload
from forebay_engine.sampling import filters
from forebay_engine.sampling.rng import uniform
from forebay_engine.types import SampleSpec

ROWS = 32
"""At once: a row of 150,000 float64 takes some 10 MB on the way."""


def draw(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """A token for each row: int64 [n], on the logits' device and without waiting for it.

    `logits` [n, vocab_size], left unchanged. In float64, as on a CPU; sums are taken in another order, so that of two
    tokens whose shares meet within 1e-12 of the random number the other may come.
    """
    parts = [_draw(logits[at : at + ROWS], specs[at : at + ROWS]) for at in range(0, len(specs), ROWS)]
    return torch.cat(parts)


def _draw(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    rows = adjusted(logits.double(), specs)
    values, ids = torch.sort(rows, dim=-1, descending=True, stable=True)  # of equal logits the lower id is first
    params = [spec.params for spec in specs]
    greedy = [p.temperature == 0.0 for p in params]
    numbers = _floats(
        [
            [1.0 if g else p.temperature for p, g in zip(params, greedy, strict=True)],
            [min(p.min_p, 1.0) for p in params],
            # 2.0 is never reached: everything is kept.
            [2.0 if p.top_p >= 1.0 else p.top_p for p in params],
            [float(1 if g else p.top_k or rows.shape[1]) for p, g in zip(params, greedy, strict=True)],
            [uniform(s.params.seed, s.params.choice, len(s.output_ids)) for s in specs],
        ],
        logits.device,
    )
    temperature, min_p, top_p, top_k, random = (row[:, None] for row in numbers)
    weights = torch.exp((values - values[:, :1]) / temperature)
    ranks = torch.arange(rows.shape[1], device=rows.device)
    weights = torch.where((weights >= min_p) & (ranks < top_k), weights, 0.0)
    before = weights.cumsum(-1)
    wanted = top_p * before[:, -1:]
    before = torch.cat((torch.zeros_like(before[:, :1]), before[:, :-1]), -1)
    weights = torch.where(before < wanted, weights, 0.0)
    # Drawn by the cumulative distribution over ascending ids; an id of weight 0 has an empty interval there.
    by_id = torch.zeros_like(weights).scatter_(1, ids, weights)
    edges = by_id.cumsum(-1)
    at = torch.searchsorted(edges, random * edges[:, -1:], right=True).squeeze(1)
    # Rounding of the product may reach the last edge itself.
    last = torch.where(by_id > 0.0, ranks, 0).amax(-1)
    return torch.minimum(at, last)


def adjusted(rows: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """filters.adjust of each row: penalties and masked stop ids. A new tensor where there is anything to change."""
    if not any(filters.is_adjusted(spec) for spec in specs):
        return rows
    rows = rows.clone()
    repetition = [spec.params.repetition_penalty for spec in specs]
    if any(penalty != 1.0 for penalty in repetition):
        seen = torch.zeros_like(rows, dtype=torch.bool)
        _mark(seen, [[*s.prompt_ids, *s.output_ids] if s.params.repetition_penalty != 1.0 else [] for s in specs])
        (penalty,) = _floats([repetition], rows.device)
        rows = torch.where(seen, torch.where(rows > 0, rows / penalty[:, None], rows * penalty[:, None]), rows)
    if any(spec.params.frequency_penalty or spec.params.presence_penalty for spec in specs):
        counts = _counts(rows, [spec.output_ids for spec in specs])
        frequency, presence = _floats(
            [[spec.params.frequency_penalty for spec in specs], [spec.params.presence_penalty for spec in specs]],
            rows.device,
        )
        rows -= counts * frequency[:, None] + (counts > 0) * presence[:, None]
    early = [
        list(spec.params.stop_token_ids) if len(spec.output_ids) < spec.params.min_tokens else [] for spec in specs
    ]
    if any(early):
        masked = torch.zeros_like(rows, dtype=torch.bool)
        _mark(masked, early)
        rows = rows.masked_fill(masked, float("-inf"))
    return rows


def _mark(table: torch.Tensor, ids: list[list[int]]) -> None:
    """table[i, id] = True for each id of ids[i]."""
    row, column = _places(ids, table.device)
    table[row, column] = True


def _counts(like: torch.Tensor, ids: list[list[int]]) -> torch.Tensor:
    row, column = _places(ids, like.device)
    counts = torch.zeros_like(like)
    return counts.index_put_((row, column), torch.ones((), dtype=like.dtype, device=like.device), accumulate=True)


def _places(ids: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    owners = np.repeat(np.arange(len(ids), dtype=np.int32), [len(row) for row in ids])
    flat = np.fromiter((i for row in ids for i in row), dtype=np.int32, count=len(owners))
    both = upload(np.stack((owners, flat)), device).long()
    return both[0], both[1]


def _floats(rows: list[list[float]], device: torch.device) -> torch.Tensor:
    """float64 on the device, by the way that integers take."""
    return upload(np.array(rows, dtype=np.float64).view(np.int32), device).view(torch.float64)
