"""What a step holds, what is refused, and how answers end."""

from __future__ import annotations

import msgspec
import pytest

from forebay_engine.scheduler import Scheduler, SchedulerConfig
from forebay_engine.scheduler.finish import finish_reason
from forebay_engine.types import SamplingParams, StepOutput, TokenEvent
from support.scheduling import SIZE, made, request, run, shape, source


class TestStepOrder:
    def test_decodes_then_running_prompts_then_admissions(self) -> None:
        scheduler = made(tokens=16)
        scheduler.add(request("a", 3))
        run(scheduler)
        scheduler.add(request("b", 30))
        assert shape(run(scheduler)[0]) == [("a", 1), ("b", 15)]
        scheduler.add(request("c", 5))
        assert shape(run(scheduler)[0]) == [("a", 1), ("b", 15)]
        assert shape(run(scheduler)[0]) == [("a", 1), ("b", 1), ("c", 5)]

    def test_positions_tables_and_sampling(self) -> None:
        scheduler = made(tokens=6)
        scheduler.add(request("a", 10))
        first, second, third = (run(scheduler)[0].steps[0] for _ in range(3))
        assert (first.start, len(first.token_ids), first.sample) == (0, 6, None)
        assert (second.start, len(second.token_ids)) == (6, 4)
        assert second.sample is not None
        assert (third.start, third.token_ids) == (10, [5])
        assert len(third.block_table) * SIZE >= 11

    def test_the_oldest_prompt_gets_a_token_when_decodes_fill_the_step(self) -> None:
        scheduler = made(tokens=4, running=8)
        scheduler.add(request("old", 40))
        run(scheduler)
        for name in "bcdef":
            scheduler.add(request(name, 3, outputs=[1], pull=source(name, 3)))
        run(scheduler)
        for name in "bcdef":
            scheduler.schedule()
            scheduler.pull_done(name, True)
        plan, _ = run(scheduler)
        assert ("old", 1) in shape(plan)
        assert sum(n for _, n in shape(plan)) == 4

    def test_unchunked_a_prompt_is_one_step_however_long(self) -> None:
        scheduler = made(tokens=8, chunked=False)
        scheduler.add(request("a", 3))
        run(scheduler)
        scheduler.add(request("b", 100))
        scheduler.add(request("c", 3))
        assert shape(run(scheduler)[0]) == [("a", 1), ("b", 100)]
        assert shape(run(scheduler)[0]) == [("a", 1), ("b", 1), ("c", 3)]

    def test_first_come_first_served_even_when_a_later_one_would_fit(self) -> None:
        scheduler = made(10)
        scheduler.add(request("a", 20))
        run(scheduler)
        scheduler.add(request("big", 30))
        scheduler.add(request("small", 2))
        for _ in range(3):
            assert all(name == "a" for name, _ in shape(run(scheduler)[0]))

    def test_max_running_bounds_admissions(self) -> None:
        scheduler = made(running=2)
        for name in "abc":
            scheduler.add(request(name, 2))
        assert [name for name, _ in shape(run(scheduler)[0])] == ["a", "b"]
        assert (scheduler.running, scheduler.waiting) == (2, 1)


class TestRefusals:
    def test_a_full_waiting_line_is_429_with_both_numbers(self) -> None:
        scheduler = made(waiting=1)
        assert scheduler.add(request("a", 2)) is None
        failure = scheduler.add(request("b", 2))
        assert failure is not None
        assert (failure.status, failure.retry_after_seconds) == (429, 1.0)
        assert "1 requests" in failure.message
        assert "max_waiting 1" in failure.message

    @pytest.mark.parametrize(("prompt", "fits"), [(199, True), (200, False)])
    def test_a_prompt_must_leave_room_for_one_token(self, prompt: int, fits: bool) -> None:
        failure = made(100, model_len=200).add(request("a", prompt))
        assert (failure is None) is fits
        assert fits or (failure is not None and failure.status == 400 and "at most 199" in failure.message)

    def test_a_prompt_without_tokens_is_refused(self) -> None:
        failure = made().add(request("a", []))
        assert failure is not None
        assert failure.status == 400

    def test_a_prompt_beyond_the_pool_is_refused_at_once(self) -> None:
        failure = made(5, model_len=200).add(request("a", 20))
        assert failure is not None
        assert "5 blocks" in failure.message

    def test_an_id_in_use_is_409_and_leaves_the_first_alone(self) -> None:
        scheduler = made()
        scheduler.add(request("a", 3))
        failure = scheduler.add(request("a", 3))
        assert failure is not None
        assert failure.status == 409
        assert shape(run(scheduler)[0]) == [("a", 3)]

    @pytest.mark.parametrize("name", ["max_running", "max_waiting", "max_batched_tokens", "max_model_len", "max_pulls"])
    def test_settings_below_one_are_named(self, name: str) -> None:
        good = {"max_running": 1, "max_waiting": 1, "max_batched_tokens": 1, "max_model_len": 1, "max_pulls": 1}
        with pytest.raises(ValueError, match=f"{name} is 0"):
            SchedulerConfig(**{**good, name: 0})


class TestFinish:
    @pytest.mark.parametrize(
        ("output_tokens", "token", "total", "expected"),
        [
            (1, 7, 20, None),
            (1, 2, 20, None),  # a stop id below min_tokens
            (3, 2, 20, None),
            (4, 2, 20, "stop"),
            (5, 2, 20, "stop"),
            (9, 7, 20, None),
            (10, 7, 20, "length"),
            (10, 2, 20, "stop"),
            (5, 7, 99, None),
            (5, 7, 100, "length"),
        ],
    )
    def test_reasons(self, output_tokens: int, token: int, total: int, expected: str | None) -> None:
        params = SamplingParams(max_tokens=10, min_tokens=3, stop_token_ids=(2,))
        assert finish_reason(params, output_tokens, token, total, 100) == expected

    def test_the_event_names_the_stop_token(self) -> None:
        scheduler = made()
        asked = request("a", 3)
        asked.params = SamplingParams(temperature=0.0, max_tokens=50, stop_token_ids=(5,))
        scheduler.add(asked)
        (event,) = run(scheduler, token=5)[1].events
        assert (event.finish_reason, event.stop_token, event.token_ids) == ("stop", 5, [5])

    @pytest.mark.parametrize(("outputs", "expected"), [([1, 2, 3], "length"), ([1, 5], "stop")])
    def test_a_continuation_of_a_complete_answer_ends_without_a_token(self, outputs: list[int], expected: str) -> None:
        scheduler = made()
        asked = request("a", 3, outputs=outputs)
        asked.params = SamplingParams(temperature=0.0, max_tokens=3, stop_token_ids=(5,))
        assert scheduler.add(asked) is None
        assert scheduler.has_work
        plan, _ = run(scheduler)
        (event,) = plan.failed
        assert isinstance(event, TokenEvent)
        assert (event.token_ids, event.finish_reason) == ([], expected)
        assert not scheduler.has_work


class TestReports:
    def test_counts_what_is_queued_and_resident(self) -> None:
        scheduler = made(tokens=8, running=2)
        scheduler.add(request("a", 3))
        scheduler.add(request("b", 30))
        scheduler.add(request("c", 20))
        scheduler.add(request("d", 12, outputs=[1], pull=source("d", 12)))
        assert scheduler.queued_prefill_tokens == 53
        assert scheduler.waiting_pulls == 1
        run(scheduler)
        assert scheduler.resident_decode_tokens == 4
        assert scheduler.queued_prefill_tokens == 25 + 20

    def test_a_wrong_number_of_outputs_is_an_error(self) -> None:
        scheduler = made()
        scheduler.add(request("a", 3))
        plan = scheduler.schedule()
        with pytest.raises(ValueError, match="0 outputs for 1 steps"):
            scheduler.update(plan, [])


class TestPace:
    def warmed(self) -> Scheduler:
        """0.001 s a prompt token, 0.020 s a decode step."""
        scheduler = made(400, tokens=512, model_len=1600)
        for _ in range(40):
            scheduler.pace.observe(512, 0, 0.512)
            scheduler.pace.observe(0, 1, 0.020)
        return scheduler

    def decoding(self, scheduler: Scheduler, name: str, step_seconds: float) -> None:
        scheduler.add(msgspec.structs.replace(request(name, 3), step_seconds=step_seconds))
        run(scheduler)

    def test_a_prompt_beside_decodes_gets_what_the_step_has_time_for(self) -> None:
        scheduler = self.warmed()
        self.decoding(scheduler, "a", 0.060)
        scheduler.add(request("b", 500))
        sizes: list[int] = []
        while sum(sizes) < 500:
            plan = scheduler.schedule()
            size = dict(shape(plan))["b"]
            scheduler.pace.observe(size, 1, 0.020 + 0.001 * size)
            scheduler.update(plan, [StepOutput(5 if step.sample is not None else None) for step in plan.steps])
            sizes.append(size)
        assert sizes[0] <= 64, "a first guess"
        assert all(38 <= size <= 41 for size in sizes[1:-1])

    def test_without_a_limit_or_without_decodes_the_budget_holds(self) -> None:
        scheduler = self.warmed()
        self.decoding(scheduler, "a", 0.0)
        scheduler.add(request("b", 500))
        assert dict(shape(run(scheduler)[0]))["b"] == 500
        alone = self.warmed()
        alone.add(msgspec.structs.replace(request("c", 500), step_seconds=0.060))
        assert shape(run(alone)[0]) == [("c", 500)]

    def test_the_strictest_of_the_decodes_counts(self) -> None:
        scheduler = self.warmed()
        self.decoding(scheduler, "a", 0.500)
        self.decoding(scheduler, "b", 0.050)
        scheduler.add(request("c", 500))
        assert dict(shape(run(scheduler)[0]))["c"] <= 64

    def test_a_prompt_that_would_come_too_late_is_refused(self) -> None:
        scheduler = self.warmed()
        late = msgspec.structs.replace(request("b", 100), wait_seconds=0.5)
        # Idle: nobody could do better.
        assert scheduler.add(msgspec.structs.replace(request("lone", 900), wait_seconds=0.01)) is None
        failure = scheduler.add(late)
        assert failure is not None
        assert failure.status == 429
        assert failure.retry_after_seconds == pytest.approx(0.5, abs=0.02)
        assert "1.00 s" in failure.message
        assert scheduler.waiting == 1
        assert scheduler.add(msgspec.structs.replace(late, wait_seconds=1.1)) is None

    def test_what_is_cached_does_not_count(self) -> None:
        scheduler = self.warmed()
        prompt = list(range(1, 401))
        scheduler.add(request("a", prompt, max_tokens=1))
        run(scheduler)
        scheduler.add(request("other", 300))
        assert scheduler.add(msgspec.structs.replace(request("b", prompt), wait_seconds=0.4)) is None

    def test_without_a_pace_nothing_is_refused(self) -> None:
        scheduler = made(400, tokens=512, model_len=1600)
        scheduler.add(request("a", 1000))
        assert scheduler.add(msgspec.structs.replace(request("b", 1000), wait_seconds=0.001)) is None
