"""From logits to tokens, for the rows of one step. A row's token depends on its own logits and SampleSpec only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from forebay_engine.sampling import filters
from forebay_engine.sampling.rng import uniform
from forebay_engine.types import SampleSpec, StepOutput
from forebay_wire.transfer import TokenLogprob


def sample(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[StepOutput]:
    """One token per row. `logits` float32 [n, vocab_size], on any device, left unchanged; `specs` has n entries.

    Rows that are plain greedy cost one argmax; the others are drawn on the CPU in float64.
    """
    if logits.shape[0] != len(specs):
        raise ValueError(f"sampling {len(specs)} sequences from {logits.shape[0]} rows of logits")
    outputs: list[StepOutput | None] = [None] * len(specs)
    plain = [i for i, spec in enumerate(specs) if _is_plain_greedy(spec)]
    if plain:
        rows = logits if len(plain) == len(specs) else logits[plain]
        # argmax gives the first of equal maxima, which is the lowest id.
        for i, token in zip(plain, rows.argmax(dim=-1).tolist(), strict=True):
            outputs[i] = StepOutput(token)
    for i, spec in enumerate(specs):
        if outputs[i] is None:
            outputs[i] = _sample_row(logits[i].double().cpu().numpy(), spec)
    return [output for output in outputs if output is not None]


def score(row: filters.Row, token_id: int, top: int) -> TokenLogprob:
    """Natural-log probability of `token_id` under raw logits [vocab_size], and of the `top` likeliest ids."""
    peak = row.max()
    total = peak + np.log(np.exp(row - peak).sum())
    alternatives = [(int(i), float(row[i] - total)) for i in filters.best(row, top)] if top else []
    return TokenLogprob(token_id, float(row[token_id] - total), alternatives)


def _is_plain_greedy(spec: SampleSpec) -> bool:
    return spec.params.temperature == 0.0 and spec.params.logprobs is None and not filters.is_adjusted(spec)


def _sample_row(raw: filters.Row, spec: SampleSpec) -> StepOutput:
    params = spec.params
    row = filters.adjust(raw, spec) if filters.is_adjusted(spec) else raw
    token = int(row.argmax()) if params.temperature == 0.0 else _draw(row, spec)
    return StepOutput(token, None if params.logprobs is None else score(raw, token, params.logprobs))


def _draw(row: filters.Row, spec: SampleSpec) -> int:
    """Inverse of the cumulative distribution over the kept ids in ascending order, at the position's one number."""
    ids, weights = filters.kept(row, spec.params)
    edges = np.cumsum(weights)
    drawn = uniform(spec.params.seed, spec.params.choice, len(spec.output_ids)) * edges[-1]
    # "right": an id of weight 0 has an empty interval and is never hit.
    at = int(np.searchsorted(edges, drawn, side="right"))
    # Rounding of the product may reach the last edge itself.
    return int(ids[min(at, int(np.flatnonzero(weights)[-1]))])
