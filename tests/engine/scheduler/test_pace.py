"""The measured pace: chunks that fit beside decodes, and predicted waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay_engine.perf import PerfModel
from forebay_engine.perf.catalog import load
from forebay_engine.scheduler.pace import MIN_CHUNK, Pace

Step = Callable[[int, int], float]


def run(pace: Pace, step: Step, limit: float, batch: int, steps: int, budget: int = 512) -> list[tuple[int, float]]:
    """Mixed steps with the chunk that the pace allows: (chunk, seconds)."""
    taken = []
    for _ in range(steps):
        chunk = min(budget, pace.mixed_chunk(limit))
        seconds = step(chunk, batch)
        pace.observe(chunk, batch, seconds)
        taken.append((chunk, seconds))
    return taken


def of_model(model: PerfModel, resident: int) -> Step:
    return lambda chunk, batch: model.step_seconds([(chunk, 0)] if chunk else [], batch, resident if batch else 0)


@pytest.mark.parametrize("name", ["h100-llama-8b", "a100-llama-8b", "slow"])
@pytest.mark.parametrize("warm", [True, False])
def test_mixed_steps_come_to_fit_and_use_the_time(name: str, warm: bool) -> None:
    model = load(name)
    batch, step = 8, of_model(load(name), 8 * 400)
    limit = 0.9 * model.tpot_objective_seconds
    pace = Pace()
    for _ in range(10):
        pace.observe(0, batch, step(0, batch))
    if warm:
        pace.observe(512, 0, step(512, 0))
    taken = run(pace, step, limit, batch, 40, budget=4096)
    assert all(seconds <= 2.1 * limit for _, seconds in taken), "not even the first ones are far off"
    assert sum(seconds > 1.02 * limit for _, seconds in taken) <= 3
    settled = [seconds for _, seconds in taken[-10:]]
    assert max(settled) <= 1.02 * limit
    assert min(settled) >= 0.6 * limit, "the time is used"


def test_a_batch_that_grows_gets_smaller_chunks() -> None:
    model = load("h100-llama-8b")
    pace = Pace()
    limit = 0.9 * model.tpot_objective_seconds
    chunks = {}
    for batch, resident in ((8, 8_000), (128, 190_000)):
        step = of_model(model, resident)
        for _ in range(60):
            pace.observe(0, batch, step(0, batch))
        chunks[batch] = run(pace, step, limit, batch, 30, budget=4096)[-1][0]
    assert chunks[128] < chunks[8]


def test_where_decoding_alone_takes_too_long_prompts_still_go_on() -> None:
    pace = Pace()
    for _ in range(5):
        pace.observe(0, 8, 0.1)
        pace.observe(16, 8, 0.12)
    assert pace.mixed_chunk(0.05) == MIN_CHUNK


def test_nothing_is_predicted_before_a_prompt_was_computed() -> None:
    pace = Pace()
    assert pace.prompt_seconds(1000) is None
    pace.observe(0, 4, 0.02)
    assert pace.prompt_seconds(1000) is None
    assert pace.mixed_velocity(decoding=True) == 0.0
    pace.observe(500, 0, 0.1)
    assert pace.prompt_seconds(1000) == pytest.approx(0.2)
    assert pace.mixed_velocity(decoding=False) == pytest.approx(5000)


steps = st.tuples(st.integers(0, 4096), st.integers(0, 256), st.floats(0, 10))


@given(st.lists(steps, max_size=60), st.floats(1e-6, 10))
def test_any_steps_leave_sane_figures(observed: list[tuple[int, int, float]], limit: float) -> None:
    pace = Pace()
    for prompt_tokens, decodes, seconds in observed:
        pace.observe(prompt_tokens, decodes, seconds)
        assert MIN_CHUNK <= pace.mixed_chunk(limit) <= 2 * 4096
        assert pace.decode_seconds >= 0
        wait = pace.prompt_seconds(100)
        assert wait is None or wait >= 0
        assert pace.mixed_velocity(decoding=True) >= 0
