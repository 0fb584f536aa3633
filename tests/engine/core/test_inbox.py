"""A snapshot of the step thread, and the requests that wait for the end of its step."""

from __future__ import annotations

from typing import Any

from forebay_engine.core.commands import Stop
from forebay_engine.core.handle import CoreStats
from forebay_engine.core.step_loop import StepLoop
from forebay_engine.types import EngineRequest, PullSource, SamplingParams

SOURCE = PullSource("e", "r", "h", 1, [1], 100, 1, "c", 30.0)


def request(name: str, tokens: int, **more: Any) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_ids=[1] * tokens, params=SamplingParams(), **more)


def loop() -> StepLoop:
    """One that is in a step for as long as the test lasts."""
    unused: Any = None
    return StepLoop(
        executor=unused,
        scheduler=unused,
        pool=unused,
        leases=unused,
        outbox=unused,
        transfer_stats=unused,
        wake_transfer=unused,
    )


def queue(steps: StepLoop, **stats: int) -> tuple[int, int]:
    found = steps.up_to_date(CoreStats(**stats))
    return found.waiting, found.queued_prefill_tokens


def test_what_was_sent_counts_before_it_is_taken_in() -> None:
    steps = loop()
    assert queue(steps) == (0, 0)
    steps.send(request("a", 100))
    steps.send(request("b", 20))
    assert queue(steps) == (2, 120)
    assert queue(steps, waiting=1, queued_prefill_tokens=7) == (3, 127)
    assert queue(steps, taken=1, taken_tokens=100, waiting=1, queued_prefill_tokens=100) == (2, 120)
    assert queue(steps, taken=2, taken_tokens=120, running=2) == (0, 0)


def test_a_prompt_whose_kv_is_pulled_is_nothing_to_compute_and_other_commands_are_no_requests() -> None:
    steps = loop()
    steps.send(request("a", 100, pull=SOURCE))
    steps.send(Stop())
    assert queue(steps) == (1, 0)
