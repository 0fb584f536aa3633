"""Sequences into the steps that an executor runs."""

from __future__ import annotations

from forebay_engine.scheduler.state import SequenceState, StepPlan
from forebay_engine.types import SampleSpec, SequenceStep


def plan_chunk(plan: StepPlan, state: SequenceState, budget: int, *, chunked: bool) -> int:
    """Add the sequence's next tokens; what is left of `budget`. Not `chunked`: all of them, even over the budget."""
    if budget <= 0:
        return budget
    size = min(state.remaining, budget) if chunked else state.remaining
    plan.steps.append(sequence_step(state, size))
    return budget - size


def sequence_step(state: SequenceState, size: int) -> SequenceStep:
    request = state.request
    start, end = state.computed, state.computed + size
    scored = request.params.prompt_logprobs if state.wants_prompt_logprobs else None
    return SequenceStep(
        request_id=request.request_id,
        token_ids=state.token_ids[start:end],
        start=start,
        block_table=state.blocks,
        sample=SampleSpec(request.params, request.prompt_ids, state.outputs) if end == len(state.token_ids) else None,
        prompt_logprobs=scored,
        next_token=state.token_ids[end] if scored is not None and end < state.prompt_tokens else None,
    )
