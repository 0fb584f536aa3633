"""A sequence's use of the prefix cache. Keys are made once and kept: hashing a long prompt takes milliseconds."""

from __future__ import annotations

from forebay_engine.kv.blocks import BlockPool, chain_keys
from forebay_engine.scheduler.state import SequenceState


def cached_prefix(state: SequenceState, pool: BlockPool) -> list[int]:
    """Cached blocks for the sequence's beginning; never all of it, since its last token is computed for its logits."""
    if not pool.prefix_cache or state.wants_prompt_logprobs:
        return []
    usable = (len(state.token_ids) - 1) // pool.block_size
    _extend_keys(state, usable, pool.block_size)
    return pool.match(state.keys[:usable])


def publish(state: SequenceState, pool: BlockPool) -> None:
    """Register the full blocks computed since the last call."""
    full = state.computed // pool.block_size
    if full <= state.published:
        return
    if pool.prefix_cache:
        _extend_keys(state, full, pool.block_size)
        pool.register(state.keys[:full], state.blocks, state.published)
    state.published = full


def _extend_keys(state: SequenceState, blocks: int, block_size: int) -> None:
    have = len(state.keys)
    if have < blocks:
        parent = state.keys[-1] if have else None
        state.keys += chain_keys(state.token_ids, block_size, first_block=have, parent=parent)
