"""Prompts whose KV goes to another worker or comes from one."""

from __future__ import annotations

import pytest

from forebay_engine.types import UnsettledRead
from support.scheduling import made, request, run, shape, source


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
        assert scheduler.pool.free == 10
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
        assert (scheduler.pool.free, scheduler.doubtful_blocks) == (98, 2)
        read.over = True
        scheduler.reclaim()
        assert scheduler.doubtful_blocks == 0
        assert scheduler.pool.free == 100

    def test_a_request_without_a_pull_gives_its_reservation_back(self) -> None:
        scheduler = made()
        scheduler.reserve("d", 40)
        scheduler.add(request("d", 4))
        assert scheduler.pool.free == 100
        run(scheduler)
        assert scheduler.pool.free == 99
