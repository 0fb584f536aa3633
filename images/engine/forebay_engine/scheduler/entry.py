"""Whether a request may come in at all, judged from the request and the sizes alone."""

from __future__ import annotations

from forebay_engine.kv.blocks import BlockPool
from forebay_engine.scheduler.finish import finish_reason
from forebay_engine.scheduler.state import SchedulerConfig, SequenceState
from forebay_engine.types import EngineRequest, FailEvent, TokenEvent


def can_never_run(request: EngineRequest, limit: int, config: SchedulerConfig, pool: BlockPool) -> FailEvent | None:
    """400 for a prompt without tokens, or too long to leave room for one output token below `limit`."""
    prompt = len(request.prompt_ids)
    if not prompt:
        return FailEvent(request.request_id, 400, "the prompt has no tokens; send at least one")
    if prompt >= limit:
        return FailEvent(
            request.request_id,
            400,
            f"the prompt has {prompt} tokens and at most {limit - 1} fit beside one output token "
            f"(max_model_len {config.max_model_len}, KV cache {pool.num_blocks} blocks of {pool.block_size} tokens); "
            "shorten the prompt",
        )
    return None


def last_event(request: EngineRequest, limit: int) -> TokenEvent | None:
    """The end of an answer that is complete already: its worker died between the last token and the end."""
    outputs = request.output_ids
    if not outputs:
        return None
    total = len(request.prompt_ids) + len(outputs)
    reason = finish_reason(request.params, len(outputs), outputs[-1], total, limit)
    if reason is None:
        return None
    stop_token = outputs[-1] if reason == "stop" else None
    return TokenEvent(request.request_id, [], finish_reason=reason, stop_token=stop_token)


def can_pull(state: SequenceState, block_size: int) -> bool:
    """Whether the source fits this prompt; one that does not is not read, its KV would be another prompt's."""
    source = state.pull
    return (
        source is not None
        and 0 < source.num_tokens <= len(state.token_ids)
        and len(source.block_ids) * block_size >= source.num_tokens
        and not state.wants_prompt_logprobs
    )
