"""From the waiting line to running or pulling."""

from __future__ import annotations

from forebay_engine.scheduler.prefix import cached_prefix
from forebay_engine.scheduler.state import PullOrder, SequenceState, Status, StepPlan
from forebay_engine.scheduler.steps import plan_chunk
from forebay_engine.scheduler.table import SequenceTable


class Admission:
    """First come, first served: the first that cannot go stops the line."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self.short_of_blocks = False
        """Whoever is first in line found too few blocks in the last round."""
        self.cached_tokens = 0
        """Prompt tokens whose KV was in the prefix cache, over all first admissions."""

    def admit(self, plan: StepPlan, budget: int) -> None:
        """Admit into `plan`, with `budget` tokens left in the step."""
        table = self._table
        self.short_of_blocks = False
        for state in list(table.adopted):
            if len(table.pulling) >= table.config.max_pulls:
                break
            table.adopted.remove(state)
            if not self._place(state, plan):
                # It needs more than was reserved and there is none: holding some while waiting could deadlock.
                table.free_reserved(state)
                table.waiting.add(state)
        while table.waiting:
            state = table.waiting.head()
            if state.pull is None:
                if budget <= 0:
                    return
            elif len(table.pulling) >= table.config.max_pulls:
                return
            if table.slots() < 1:
                return
            if not self._place(state, plan):
                self.short_of_blocks = True
                return
            table.waiting.remove(state)
            if state.status is Status.RUNNING:
                budget = plan_chunk(plan, state, budget, chunked=table.config.chunked_prefill)

    def _place(self, state: SequenceState, plan: StepPlan) -> bool:
        """Give a waiting sequence its blocks and start its pull, if it has one; False, nothing changed: too few."""
        table = self._table
        total = table.blocks_for(len(state.token_ids))
        hits = cached_prefix(state, table.pool)
        kept = state.reserved[len(hits) : total]
        unused = state.reserved[: len(hits)] + state.reserved[total:]
        need = total - len(hits) - len(kept)
        room = table.pool.free - table.pool.unreferenced(hits) + len(unused)
        if need > 0 and room - need < table.headroom():
            return False
        covered = len(hits) * table.pool.block_size
        pulls = state.pull is not None and covered < state.pullable
        if pulls and not state.reserved and not table.pulls_may_hold(total):
            return False
        table.pool.acquire(hits)
        if unused:
            table.pool.free_blocks(unused)
        fresh = table.pool.allocate(need)
        assert fresh is not None
        state.blocks = [*hits, *kept, *fresh]
        state.computed = covered
        state.published = len(hits)
        self._count_cached(state, covered)
        first_missing = max(len(hits), state.early)
        state.reserved, state.early = [], 0
        if state.pull is not None:
            last = table.blocks_for(state.pull.num_tokens) if pulls else 0
            missing = slice(min(first_missing, last), last)
            plan.pulls.append(
                PullOrder(state.request_id, state.pull, state.pull.block_ids[missing], state.blocks[missing])
            )
        if pulls:
            state.status = Status.PULLING
            table.pulling[state.request_id] = state
        else:
            if state.pull is not None:
                table.ending.add(state.request_id)
                state.pull = None
            table.run(state)
        return True

    def _count_cached(self, state: SequenceState, covered: int) -> None:
        if state.cached_tokens is None:
            state.cached_tokens = min(covered, state.prompt_tokens)
            self.cached_tokens += state.cached_tokens
