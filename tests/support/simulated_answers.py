"""The answers of a fault-free simulated worker, made without an arena or an executor: what tests compare against."""

from __future__ import annotations

from collections.abc import Sequence

from forebay_engine.executor.tags import extend, open_block, sample
from forebay_engine.types import SamplingParams


def block_tags(token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The right tag of every block of a context, the last one partly filled or not."""
    tags: list[bytes] = []
    for start in range(0, len(token_ids), block_size):
        tags.append(extend(open_block(tags[-1] if tags else None), token_ids[start : start + block_size]))
    return tags


def expected_tokens(
    prompt_ids: Sequence[int],
    n: int,
    params: SamplingParams | None = None,
    *,
    output_ids: Sequence[int] = (),
    block_size: int = 16,
) -> list[int]:
    """The next `n` tokens a fault-free simulated worker gives after prompt and output ids; fewer when a stop id comes.

    Greedy when `params` is None.
    """
    params = params or SamplingParams(temperature=0.0)
    context = [*prompt_ids, *output_ids]
    tags = block_tags(context, block_size)
    answer: list[int] = []
    while len(answer) < n:
        position = len(output_ids) + len(answer)
        token, _ = sample(b"".join(tags), params, position)
        answer.append(token)
        if token in params.stop_token_ids and position >= params.min_tokens:
            break
        if len(context) % block_size == 0:
            tags.append(open_block(tags[-1]))
        tags[-1] = extend(tags[-1], [token])
        context.append(token)
    return answer
