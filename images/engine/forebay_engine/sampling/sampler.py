"""From logits to tokens, for the rows of one step. A row's token depends on its own logits and SampleSpec only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from forebay_engine.device import download, upload
from forebay_engine.sampling import filters
from forebay_engine.sampling.batch import draw
from forebay_engine.sampling.rng import uniform
from forebay_engine.types import SampleSpec, StepOutput
from forebay_wire.transfer import TokenLogprob


def sample(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[StepOutput]:
    """One token per row. `logits` float32 [n, vocab_size], on any device, left unchanged; `specs` has n entries.

    Rows that are plain greedy cost one argmax; the others are drawn in float64. On a GPU all rows are drawn there, and
    the tokens come in one copy, together with the logits of the rows that are to report log-probabilities.
    """
    if logits.shape[0] != len(specs):
        raise ValueError(f"sampling {len(specs)} sequences from {logits.shape[0]} rows of logits")
    if logits.device.type != "cpu":
        return _sample_on_device(logits, specs)
    outputs: list[StepOutput | None] = [None] * len(specs)
    plain = [i for i, spec in enumerate(specs) if _is_plain_greedy(spec)]
    drawn = [i for i, spec in enumerate(specs) if not _is_plain_greedy(spec)]
    if plain:
        # argmax gives the first of equal maxima, which is the lowest id.
        for i, token in zip(plain, _rows(logits, plain).argmax(dim=-1).tolist(), strict=True):
            outputs[i] = StepOutput(token)
    for i in drawn:
        outputs[i] = _sample_row(logits[i].double().numpy(), specs[i])
    return [output for output in outputs if output is not None]


def _sample_on_device(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[StepOutput]:
    plain = [i for i, spec in enumerate(specs) if _is_plain_greedy(spec)]
    drawn = [i for i, spec in enumerate(specs) if not _is_plain_greedy(spec)]
    scored = [i for i, spec in enumerate(specs) if spec.params.logprobs is not None]
    best = _rows(logits, plain).argmax(dim=-1)
    tokens = draw(_rows(logits, drawn), [specs[i] for i in drawn]) if drawn else best[:0]
    here, rows = download(torch.cat((best, tokens)), _rows(logits, scored))
    token_of = dict(zip(plain + drawn, here.tolist(), strict=True))
    outputs = {i: StepOutput(token) for i, token in token_of.items()}
    for i, row in zip(scored, rows, strict=True):
        outputs[i] = StepOutput(token_of[i], score(row.double().numpy(), token_of[i], specs[i].params.logprobs or 0))
    return [outputs[i] for i in range(len(specs))]


def _rows(logits: torch.Tensor, wanted: list[int]) -> torch.Tensor:
    """Those of `logits`; all of it uncopied."""
    if len(wanted) == logits.shape[0]:
        return logits
    return logits.index_select(0, upload(np.array(wanted, dtype=np.int32), logits.device))


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
