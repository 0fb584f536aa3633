"""Blocks of the prefix cache, and blocks taken back."""

from __future__ import annotations

import pytest

from forebay_engine.types import StepOutput
from forebay_wire.transfer import TokenLogprob
from support.scheduling import made, request, run, shape


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
