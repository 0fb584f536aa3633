"""What happens to one row of logits before a token is drawn. Pure functions over float64 arrays [vocab_size].

Order, as in vLLM: min_tokens mask, penalties, temperature, min_p, top_k, top_p.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from forebay_engine.types import SampleSpec, SamplingParams

Row = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_FIRST_CANDIDATES = 256
"""Tokens looked at first for top_p: sorting a whole vocabulary costs as much as several layers."""


def is_adjusted(spec: SampleSpec) -> bool:
    """Whether `adjust` would change the row."""
    p = spec.params
    masked = len(spec.output_ids) < p.min_tokens and bool(p.stop_token_ids)
    return masked or p.repetition_penalty != 1.0 or p.frequency_penalty != 0.0 or p.presence_penalty != 0.0


def adjust(row: Row, spec: SampleSpec) -> Row:
    """The row with stop ids masked and penalties applied; the given one is left as it is.

    repetition_penalty: ids of prompt and output; positive logits are divided by it, others multiplied (Keskar et al.
    2019, CTRL). frequency and presence: counts of output ids, subtracted (OpenAI).
    """
    p = spec.params
    row = row.copy()
    if p.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate((_ids(spec.prompt_ids), _ids(spec.output_ids))))
        values = row[seen]
        row[seen] = np.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if spec.output_ids and (p.frequency_penalty != 0.0 or p.presence_penalty != 0.0):
        seen, counts = np.unique(_ids(spec.output_ids), return_counts=True)
        row[seen] -= p.frequency_penalty * counts + p.presence_penalty
    if len(spec.output_ids) < p.min_tokens and p.stop_token_ids:
        row[_ids(p.stop_token_ids)] = -np.inf
    return row


def kept(row: Row, params: SamplingParams) -> tuple[Ids, Row]:
    """Ids that may be drawn, ascending, and their weights (not normalised) at the params' temperature, which is > 0.

    Of equal logits the lower id counts as the more likely one.
    """
    # Subtracted first: a tiny temperature would overflow otherwise.
    scaled = (row - row.max()) / params.temperature
    weights: Row = np.exp(scaled)
    ids: Ids = np.arange(row.shape[0])
    if params.min_p > 0.0:
        # The best token's weight is 1, so min_p is the threshold as it stands.
        ids = np.flatnonzero(weights >= min(params.min_p, 1.0))
    if 0 < params.top_k < ids.shape[0]:
        ids = np.sort(_best(scaled, ids, params.top_k))
    if params.top_p < 1.0:
        ids = np.sort(_nucleus(scaled, weights, ids, params.top_p))
    return ids, weights[ids]


def best(row: Row, count: int) -> Ids:
    """The `count` likeliest ids, best first, equal ones by ascending id."""
    return _best(row, np.arange(row.shape[0]), min(count, row.shape[0]))


def _nucleus(scaled: Row, weights: Row, ids: Ids, top_p: float) -> Ids:
    """The smallest set of likeliest ids whose share of all weight in `ids` reaches top_p; at least one id."""
    wanted = top_p * float(weights[ids].sum())
    count = min(_FIRST_CANDIDATES, ids.shape[0])
    while True:
        candidates = _best(scaled, ids, count)
        before = np.cumsum(weights[candidates])
        reached = int(np.searchsorted(before, wanted, side="left"))
        if reached < count or count == ids.shape[0]:
            return candidates[: reached + 1]
        count = min(count * 16, ids.shape[0])


def _best(values: Row, ids: Ids, count: int) -> Ids:
    """The `count` of `ids` (ascending) with the largest values, best first; of equal values the lowest ids."""
    mine = values[ids]
    if count < ids.shape[0]:
        edge = np.partition(mine, ids.shape[0] - count)[ids.shape[0] - count]
        above = np.flatnonzero(mine > edge)
        level = np.flatnonzero(mine == edge)[: count - above.shape[0]]
        chosen = np.concatenate((above, level))
    else:
        chosen = np.arange(ids.shape[0])
    # Stable, over positions that ascend within equal values.
    order = np.argsort(-mine[chosen], kind="stable")
    return ids[chosen[order]]


def _ids(values: Sequence[int]) -> Ids:
    return np.array(values, dtype=np.int64)
