"""The scheduling rules one by one, with hand-made outputs in place of an executor."""

from __future__ import annotations

import msgspec
import pytest

from forebay_engine.kv.blocks import BlockPool
from forebay_engine.scheduler import Scheduler, SchedulerConfig, StepPlan, StepResult
from forebay_engine.scheduler.finish import finish_reason
from forebay_engine.types import EngineRequest, PullSource, SamplingParams, StepOutput, TokenEvent, UnsettledRead
from forebay_wire.transfer import TokenLogprob

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


class TestPrefixCache:
    @pytest.mark.parametrize(
        ("cached", "prompt", "outputs", "computed"),
        [
            (8, 8, 0, 4),  # the last token is always computed, so that there are logits
            (8, 9, 0, 8),
            (9, 9, 0, 8),
            (7, 8, 0, 4),
            (8, 8, 1, 8),  # a continuation: all KV up to its last known token may be there
            (8, 7, 1, 4),
        ],
    )
    def test_hits_are_full_blocks_and_never_everything(
        self, cached: int, prompt: int, outputs: int, computed: int
    ) -> None:
        scheduler = made()
        ids = list(range(50, 70))
        scheduler.add(request("first", ids[:cached], max_tokens=1))
        run(scheduler)
        known = ids[: prompt + outputs]
        scheduler.add(request("second", known[:prompt], outputs=known[prompt:]))
        plan, result = run(scheduler)
        assert plan.steps[0].start == computed
        assert result.events[0].cached_tokens == min(computed, prompt)
        assert scheduler.cached_tokens == min(computed, prompt)

    def test_output_tokens_are_cached_too(self) -> None:
        scheduler = made()
        scheduler.add(request("a", [1, 2, 3], max_tokens=6))
        while scheduler.has_work:
            run(scheduler, token=9)
        scheduler.add(request("b", [1, 2, 3, 9, 9, 9, 9, 9, 9]))
        assert run(scheduler)[0].steps[0].start == 8

    def test_a_held_prompt_is_hit_while_it_is_leased(self) -> None:
        scheduler = made()
        ids = list(range(10))
        scheduler.add(request("a", ids, hold=True))
        (state,) = run(scheduler)[1].finished_holds
        scheduler.add(request("b", ids))
        plan, _ = run(scheduler)
        assert plan.steps[0].start == 8
        assert plan.steps[0].block_table[:2] == state.blocks[:2]

    def test_prompt_logprobs_need_all_logits(self) -> None:
        scheduler = made(tokens=4)
        ids = list(range(9))
        scheduler.add(request("warm", ids, max_tokens=1))
        while scheduler.has_work:
            run(scheduler)
        scheduler.add(request("a", ids, prompt_logprobs=1))
        seen: list[TokenLogprob] = []
        for start, count, following in ((0, 4, 4), (4, 4, 8), (8, 1, None)):
            plan = scheduler.schedule()
            (step,) = plan.steps
            assert (step.start, len(step.token_ids), step.next_token) == (start, count, following)
            scored = [TokenLogprob(i, -1.0) for i in range(start + 1, min(start + count, 8) + 1)]
            seen += scored
            result = scheduler.update(plan, [StepOutput(5 if step.sample else None, None, scored)])
        assert result.events[0].prompt_logprobs == seen
        assert [x.token_id for x in seen] == list(range(1, 9))
        _, later = run(scheduler)
        assert later.events[0].prompt_logprobs is None


class TestPreemption:
    def test_the_youngest_gives_way_and_comes_back_first(self) -> None:
        scheduler = made(6, tokens=64)
        for name in "abc":
            scheduler.add(request(name, 7))
        run(scheduler)  # 3 x 2 blocks: all taken
        scheduler.add(request("late", 2))
        run(scheduler)  # the eighth token still fits
        plan, result = run(scheduler)
        assert plan.preempted == ["c"]
        assert sorted(shape(plan)) == [("a", 1), ("b", 1)]
        assert [event.request_id for event in result.events] == ["a", "b"]
        scheduler.abort("a")
        plan, result = run(scheduler)
        assert next(step.request_id for step in plan.steps if step.request_id in ("c", "late")) == "c"
        again = next(event for event in result.events if event.request_id == "c")
        assert again.token_ids == [5]
        assert again.cached_tokens is None  # its first event was long ago
        assert scheduler.preemptions == 1

    def test_the_youngest_itself_waits_with_its_blocks(self) -> None:
        scheduler = made(4, tokens=64)
        scheduler.add(request("a", 7))
        scheduler.add(request("b", 8))
        run(scheduler)
        plan, _ = run(scheduler)  # b needs a third block, a does not yet
        assert shape(plan) == [("a", 1)]
        assert plan.preempted == []
        assert scheduler.running == 2

    def test_a_reservation_does_not_take_what_the_preempted_one_waits_for(self) -> None:
        scheduler = made(8, tokens=64)
        scheduler.add(request("a", 8))
        scheduler.add(request("b", 24))
        run(scheduler)
        plan, _ = run(scheduler)
        assert plan.preempted == ["b"]
        assert scheduler.pool.free == 5
        assert scheduler.reserve("d", 4) is None

    def test_a_preempted_hold_is_reported_and_its_progress_starts_again(self) -> None:
        scheduler = made(6, tokens=8)
        scheduler.add(request("a", 7))
        run(scheduler)
        scheduler.add(request("h", 15, hold=True))
        _, result = run(scheduler)
        assert [(name, len(blocks)) for name, blocks in result.progressed] == [("h", 1)]
        plan, result = run(scheduler)
        assert plan.preempted == ["h"]
        assert result.progressed == []


class TestHold:
    def test_progress_then_the_state_for_the_lease(self) -> None:
        scheduler = made(tokens=6)
        scheduler.add(request("h", 10, hold=True))
        _, result = run(scheduler)
        assert [(name, len(blocks)) for name, blocks in result.progressed] == [("h", 1)]
        _, result = run(scheduler)
        (state,) = result.finished_holds
        (event,) = result.events
        assert event.finish_reason is None
        assert (state.computed, len(state.blocks), state.outputs) == (10, 3, [5])
        assert not scheduler.has_work
        assert scheduler.pool.free == 97
        assert not scheduler.abort("h")

    def test_a_first_token_that_ends_the_answer_leaves_nothing_to_hold(self) -> None:
        scheduler = made()
        scheduler.add(request("h", 10, hold=True, max_tokens=1))
        _, result = run(scheduler)
        assert result.finished_holds == []
        assert result.events[0].finish_reason == "length"
        assert scheduler.pool.free == 100


class TestPull:
    def test_reads_only_what_is_not_cached_here_then_decodes(self) -> None:
        scheduler = made()
        ids = list(range(10))
        scheduler.add(request("warm", ids[:5], max_tokens=1))
        run(scheduler)
        pull = source("d", 10)
        scheduler.add(request("d", ids, outputs=[77], pull=pull))
        plan, _ = run(scheduler)
        (order,) = plan.pulls
        assert plan.steps == []
        assert order.remote_blocks == pull.block_ids[1:]
        assert len(order.local_blocks) == 2
        assert scheduler.waiting_pulls == 1
        scheduler.pull_done("d", True)
        plan, result = run(scheduler)
        assert (plan.steps[0].start, plan.steps[0].token_ids) == (10, [77])
        assert plan.steps[0].block_table[1:3] == order.local_blocks
        assert result.events[0].token_ids == [5]
        assert scheduler.recomputed == 0

    def test_a_failed_pull_is_computed_here_and_counted(self) -> None:
        scheduler = made()
        scheduler.add(request("d", 10, outputs=[77], pull=source("d", 10)))
        run(scheduler)
        scheduler.pull_done("d", False)
        plan, _ = run(scheduler)
        assert (plan.steps[0].start, len(plan.steps[0].token_ids)) == (0, 11)
        assert scheduler.recomputed == 1

    def test_what_was_read_is_not_found_by_others_before_the_pull_is_confirmed(self) -> None:
        scheduler = made()
        ids = list(range(10))
        scheduler.add(request("d", ids, outputs=[77], pull=source("d", 10)))
        run(scheduler)
        assert scheduler.pool.lookup(ids) == []
        scheduler.pull_done("d", True)
        assert len(scheduler.pool.lookup(ids)) == 2

    def test_all_cached_runs_at_once_and_only_ends_the_lease(self) -> None:
        scheduler = made()
        ids = list(range(8))
        scheduler.add(request("warm", ids, max_tokens=1))
        run(scheduler)
        scheduler.add(request("d", ids, outputs=[77], pull=source("d", 8)))
        plan, result = run(scheduler)
        assert [(order.remote_blocks, order.local_blocks) for order in plan.pulls] == [([], [])]
        assert result.events[0].request_id == "d"
        scheduler.pull_done("d", False)  # the lease was gone: nothing of it was needed
        assert scheduler.recomputed == 0
        run(scheduler)

    def test_at_most_max_pulls_at_a_time(self) -> None:
        scheduler = made(pulls=2)
        for name in "abc":
            scheduler.add(request(name, 8, outputs=[1], pull=source(name, 8)))
        assert [order.request_id for order in run(scheduler)[0].pulls] == ["a", "b"]
        assert run(scheduler)[0].pulls == []
        scheduler.pull_done("b", True)
        assert [order.request_id for order in run(scheduler)[0].pulls] == ["c"]

    def test_pulls_leave_half_of_the_blocks_to_what_runs(self) -> None:
        scheduler = made(20, pulls=8)
        for name in "abc":
            scheduler.add(request(name, 19, outputs=[1], pull=source(name, 19)))
        assert [order.request_id for order in run(scheduler)[0].pulls] == ["a", "b"]
        scheduler.pull_done("a", True)
        assert [order.request_id for order in run(scheduler)[0].pulls] == ["c"]

    def test_an_aborted_pull_keeps_its_blocks_until_the_read_has_ended(self) -> None:
        scheduler = made(10)
        scheduler.add(request("d", 10, outputs=[77], pull=source("d", 10)))
        run(scheduler)
        assert scheduler.abort("d")
        assert scheduler.pool.free == 7
        assert not scheduler.has_work
        retry = scheduler.add(request("d", 10))
        assert retry is not None
        assert retry.status == 409
        scheduler.pull_done("d", True)
        assert scheduler.pool.free == 10
        assert scheduler.add(request("d", 10)) is None

    @pytest.mark.parametrize("aborted", [False, True])
    def test_blocks_a_read_may_still_be_landing_in_are_not_used_before_it_is_over(self, aborted: bool) -> None:
        scheduler = made(10)
        ids = list(range(10))
        scheduler.add(request("warm", ids[:5], max_tokens=1))
        run(scheduler)
        scheduler.add(request("d", ids, outputs=[77], pull=source("d", 10)))
        (order,) = run(scheduler)[0].pulls
        if aborted:
            scheduler.abort("d")
        read = UnsettledRead()
        scheduler.pull_done("d", False, unsettled=read)
        assert scheduler.set_aside == 2
        assert scheduler.recomputed == (0 if aborted else 1)
        if not aborted:
            plan, _ = run(scheduler)
            assert plan.steps[0].start == 4
            assert not set(plan.steps[0].block_table) & set(order.local_blocks)
            scheduler.abort("d")
        scheduler.reclaim()
        scheduler.pool.release_quarantined(1e12)
        assert scheduler.pool.free == 8
        read.over = True
        scheduler.reclaim()
        scheduler.reclaim()
        assert (scheduler.pool.free, scheduler.set_aside) == (10, 0)
        scheduler.pool.check()

    @pytest.mark.parametrize("tokens", [0, 12])
    def test_a_source_that_does_not_fit_the_prompt_is_not_read(self, tokens: int) -> None:
        scheduler = made()
        scheduler.add(request("d", 10, outputs=[77], pull=source("d", tokens)))
        plan, _ = run(scheduler)
        assert plan.pulls == []
        assert shape(plan) == [("d", 11)]
        assert scheduler.recomputed == 1


class TestReservations:
    def test_the_decode_leg_takes_the_blocks_and_reads_only_the_rest(self) -> None:
        scheduler = made(100)
        blocks = scheduler.reserve("d", 10)
        assert blocks is not None
        assert len(blocks) == 3
        scheduler.early_pulled("d", 2)
        pull = source("d", 10)
        scheduler.add(request("d", 10, outputs=[77], pull=pull))
        (order,) = run(scheduler)[0].pulls
        assert (order.remote_blocks, order.local_blocks) == (pull.block_ids[2:], blocks[2:])
        assert scheduler.pool.free == 97
        scheduler.pull_done("d", True)
        assert run(scheduler)[0].steps[0].start == 10

    @pytest.mark.parametrize("estimate", [1, 6, 10, 30])
    def test_a_wrong_estimate_is_made_good(self, estimate: int) -> None:
        scheduler = made(100)
        scheduler.reserve("d", estimate)
        scheduler.early_pulled("d", 1)
        scheduler.add(request("d", 10, outputs=[77], pull=source("d", 10)))
        (order,) = run(scheduler)[0].pulls
        assert len(order.local_blocks) == 2
        assert scheduler.pool.free == 97
        scheduler.abort("d")
        scheduler.pull_done("d", False)
        assert scheduler.pool.free == 100

    def test_cached_blocks_replace_reserved_ones(self) -> None:
        scheduler = made(20)
        ids = list(range(10))
        scheduler.add(request("warm", ids, max_tokens=1))
        run(scheduler)
        scheduler.reserve("d", 10)
        scheduler.early_pulled("d", 1)
        scheduler.add(request("d", ids, outputs=[77], pull=source("d", 10)))
        (order,) = run(scheduler)[0].pulls
        assert len(order.local_blocks) == 1
        scheduler.pull_done("d", False)  # what was read early counts for nothing, what was cached does
        assert run(scheduler)[0].steps[0].start == 8
        scheduler.abort("d")
        assert scheduler.pool.free == 20

    def test_an_estimate_too_small_on_a_full_pool_joins_the_line_at_its_place(self) -> None:
        scheduler = made(8, tokens=64)
        scheduler.reserve("d", 4)
        scheduler.add(request("a", 26))
        run(scheduler)
        scheduler.add(request("b", 8))
        scheduler.add(request("d", 8, outputs=[77], pull=source("d", 8)))
        assert run(scheduler)[0].pulls == []
        assert scheduler.pool.free == 1
        scheduler.abort("a")
        plan, _ = run(scheduler)
        assert [order.request_id for order in plan.pulls] == ["d"]

    def test_gets_no_room_beyond_slots_blocks_or_its_share(self) -> None:
        assert made(running=1).reserve("x", 200) is None
        assert made(10).reserve("x", 41) is None
        scheduler = made(running=2)
        assert scheduler.reserve("a", 5) is not None
        assert scheduler.reserve("a", 5) is None
        assert scheduler.reserve("b", 5) is not None
        assert scheduler.reserve("c", 5) is None
        shared = made(20)
        assert shared.reserve("a", 28) is not None
        assert shared.reserve("b", 20) is None

    def test_does_not_overtake_a_line_that_is_short_of_blocks(self) -> None:
        scheduler = made(10)
        scheduler.add(request("a", 15))
        run(scheduler)
        scheduler.add(request("big", 30))
        run(scheduler)
        assert scheduler.reserve("d", 4) is None

    def test_a_release_gives_the_blocks_back(self) -> None:
        scheduler = made()
        scheduler.reserve("a", 8)
        scheduler.reserve("b", 8)
        scheduler.release("unknown")
        scheduler.release("a")
        assert scheduler.pool.free == 98
        scheduler.release("b")
        assert scheduler.pool.free == 100

    def test_a_release_in_doubt_sets_the_blocks_aside(self) -> None:
        scheduler = made()
        scheduler.reserve("a", 8)
        read = UnsettledRead()
        scheduler.release("a", unsettled=read)
        scheduler.reclaim()
        assert (scheduler.pool.free, scheduler.set_aside) == (98, 2)
        read.over = True
        scheduler.reclaim()
        assert (scheduler.pool.free, scheduler.set_aside) == (100, 0)

    def test_a_request_without_a_pull_gives_its_reservation_back(self) -> None:
        scheduler = made()
        scheduler.reserve("d", 40)
        scheduler.add(request("d", 4))
        assert scheduler.pool.free == 100
        run(scheduler)
        assert scheduler.pool.free == 99


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
