"""What an executor computed, taken into the sequences."""

from __future__ import annotations

from forebay_engine.scheduler.finish import finish_reason
from forebay_engine.scheduler.prefix import publish
from forebay_engine.scheduler.state import SequenceState, Status, StepPlan, StepResult
from forebay_engine.scheduler.table import SequenceTable
from forebay_engine.types import StepOutput, TokenEvent


def take_outputs(table: SequenceTable, plan: StepPlan, outputs: list[StepOutput]) -> StepResult:
    """Take in what the executor made of plan.steps, in their order."""
    if len(outputs) != len(plan.steps):
        raise ValueError(f"the executor gave {len(outputs)} outputs for {len(plan.steps)} steps")
    result = StepResult()
    for step, output in zip(plan.steps, outputs, strict=True):
        state = table.by_id.get(step.request_id)
        if state is None or state.status is not Status.RUNNING or state.computed != step.start:
            continue  # aborted while the step ran
        state.computed += len(step.token_ids)
        publish(state, table.pool)
        if output.prompt_logprobs is not None:
            state.prompt_logprobs.extend(output.prompt_logprobs)
        if step.sample is not None:
            if output.token_id is None:
                raise ValueError(f"request {step.request_id}: the executor sampled no token where one was due")
            _take_token(table, state, output, output.token_id, result)
        if state.status is Status.RUNNING:
            _report_progress(state, result, table.pool.block_size)
    return result


def _take_token(table: SequenceTable, state: SequenceState, output: StepOutput, token: int, result: StepResult) -> None:
    params = state.request.params
    state.token_ids.append(token)
    state.outputs.append(token)
    reason = finish_reason(params, len(state.outputs), token, len(state.token_ids), table.max_tokens)
    event = TokenEvent(
        request_id=state.request_id,
        token_ids=[token],
        logprobs=[output.logprob] if output.logprob is not None else None,
        finish_reason=reason,
        stop_token=token if reason == "stop" else None,
    )
    if not state.spoke:
        event.cached_tokens = state.cached_tokens
        if state.wants_prompt_logprobs:
            event.prompt_logprobs = state.prompt_logprobs
        state.spoke = True
        state.prompt_logprobs = []
    result.events.append(event)
    if reason is None and not state.request.hold:
        return
    table.running.remove(state)
    del table.by_id[state.request_id]
    state.status = Status.FINISHED
    if reason is None:
        result.finished_holds.append(state)
    else:
        table.free(state)


def _report_progress(state: SequenceState, result: StepResult, block_size: int) -> None:
    full = state.computed // block_size
    if state.request.hold and full > state.reported:
        state.reported = full
        result.progressed.append((state.request_id, state.blocks[:full]))
