"""A scheduler, requests for it, and its steps run by hand."""

from __future__ import annotations

from forebay_engine.kv.blocks import BlockPool
from forebay_engine.scheduler import Scheduler, SchedulerConfig, StepPlan, StepResult
from forebay_engine.types import EngineRequest, PullSource, SamplingParams, StepOutput

SIZE = 4


def made(
    num_blocks: int = 100,
    *,
    running: int = 8,
    waiting: int = 100,
    tokens: int = 16,
    model_len: int = 200,
    chunked: bool = True,
    pulls: int = 2,
) -> Scheduler:
    config = SchedulerConfig(running, waiting, tokens, model_len, chunked, pulls)
    return Scheduler(config, BlockPool(num_blocks, SIZE))


def request(
    name: str,
    prompt: int | list[int],
    *,
    max_tokens: int = 50,
    outputs: list[int] | None = None,
    hold: bool = False,
    pull: PullSource | None = None,
    prompt_logprobs: int | None = None,
) -> EngineRequest:
    """A prompt given by length is unlike any other request's prompt."""
    ids = prompt if isinstance(prompt, list) else [sum(name.encode()) * 1000 + i for i in range(prompt)]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
    return EngineRequest(name, ids, params, output_ids=outputs or [], hold=hold, pull=pull)


def source(name: str, tokens: int) -> PullSource:
    blocks = [1000 + i for i in range(-(-tokens // SIZE))]
    return PullSource("p", name, "host", 1, blocks, tokens, 1, "hash", 30.0)


def shape(plan: StepPlan) -> list[tuple[str, int]]:
    return [(step.request_id, len(step.token_ids)) for step in plan.steps]


def run(scheduler: Scheduler, token: int = 5) -> tuple[StepPlan, StepResult]:
    plan = scheduler.schedule()
    outputs = [StepOutput(token if step.sample is not None else None) for step in plan.steps]
    result = scheduler.update(plan, outputs)
    scheduler.pool.check()
    return plan, result
