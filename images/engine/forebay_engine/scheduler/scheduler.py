"""The scheduler of one worker."""

from __future__ import annotations

from forebay_engine.kv.blocks import BlockPool
from forebay_engine.scheduler.admission import Admission
from forebay_engine.scheduler.entry import can_never_run, can_pull, last_event
from forebay_engine.scheduler.outputs import take_outputs
from forebay_engine.scheduler.pace import Pace
from forebay_engine.scheduler.prefix import cached_prefix, publish
from forebay_engine.scheduler.reservations import Reservation
from forebay_engine.scheduler.state import (
    SchedulerConfig,
    SequenceState,
    Status,
    StepPlan,
    StepResult,
)
from forebay_engine.scheduler.steps import plan_chunk, sequence_step
from forebay_engine.scheduler.table import SequenceTable
from forebay_engine.types import EngineRequest, FailEvent, StepOutput, TokenEvent, UnsettledRead


class Scheduler:
    """Decides each step: decode tokens first, then running prompts' chunks, then admissions in FCFS order.

    Progress. Every sequence has a place in line (`order`). Blocks are taken from younger sequences only, and never from
    one whose read is under way; so the oldest running one is never preempted, and each admission computes at least one
    new token unless an older sequence needed the blocks. Prompts get all their blocks at admission: half-computed
    prompts never wait for each other. What else holds blocks (pulls, reservations, leases, quarantine) ends by time.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.config = config
        self.pool = pool
        self._table = SequenceTable(config, pool)
        self._admission = Admission(self._table)
        self._running = self._table.running
        self._pulling = self._table.pulling
        self._sequences = self._table.by_id
        self._ended: list[TokenEvent] = []
        self.pace = Pace()
        """Told of each step's time by whoever runs them; knowing nothing, it refuses nothing."""
        self.preemptions = 0
        self.recomputed = 0
        """Prompts computed here because their KV could not be had."""
        self._doubtful: list[tuple[UnsettledRead, list[int]]] = []

    @property
    def max_tokens(self) -> int:
        """Tokens of one sequence at most: prompt and output, and what the pool holds."""
        return self._table.max_tokens

    # Requests in and out.

    def add(self, request: EngineRequest) -> FailEvent | None:
        """Take a request in. A FailEvent says why not: 429 waiting line full, 400 can never fit, 409 id in use.

        A reservation of the same id is adopted: no read may be landing in its blocks any more.
        """
        reservation = self._table.reservations.take(request.request_id)
        failure = self._refusal(request, reserved=reservation is not None)
        last = last_event(request, self.max_tokens) if failure is None else None
        if failure is not None or last is not None:
            if reservation is not None:
                self.pool.free_blocks(reservation.blocks)
            if last is not None:
                self._ended.append(last)
            return failure
        state = SequenceState(
            request=request,
            order=self._table.place_in_line() if reservation is None else reservation.order,
            token_ids=[*request.prompt_ids, *request.output_ids],
            outputs=list(request.output_ids),
            pull=request.pull,
        )
        if state.pull is not None and not can_pull(state, self.pool.block_size):
            state.pull = None
            self.recomputed += 1
        self._sequences[request.request_id] = state
        if reservation is not None and state.pull is not None:
            state.reserved, state.early = reservation.blocks, reservation.early
            self._table.adopted.append(state)
            return None
        if reservation is not None:
            self.pool.free_blocks(reservation.blocks)
        state.expected_cached = len(cached_prefix(state, self.pool)) * self.pool.block_size
        late = self._too_late(state)
        if late is not None:
            del self._sequences[request.request_id]
            return late
        self._table.waiting.add(state)
        return None

    def _too_late(self, state: SequenceState) -> FailEvent | None:
        """429 for a prompt whose turn comes too late for it (R6). Never on an idle worker: nobody could do better."""
        request, queued = state.request, self.queued_prefill_tokens
        if request.wait_seconds <= 0 or state.pull is not None or not queued:
            return None
        wait = self.pace.prompt_seconds(queued + len(state.token_ids) - state.expected_cached)
        if wait is None or wait <= request.wait_seconds:
            return None
        return FailEvent(
            request.request_id,
            429,
            f"the prompt would be computed in {wait:.2f} s, behind {queued} tokens of others, and is to be within "
            f"{request.wait_seconds:.2f} s; retry later",
            retry_after_seconds=wait - request.wait_seconds,
        )

    def _refusal(self, request: EngineRequest, *, reserved: bool) -> FailEvent | None:
        request_id = request.request_id
        if self._table.knows(request_id):
            return FailEvent(request_id, 409, f"request id {request_id!r} is in use here; send a fresh id")
        waiting = len(self._table.waiting)
        if not reserved and waiting >= self.config.max_waiting:
            return FailEvent(
                request_id,
                429,
                f"{waiting} requests wait already (max_waiting {self.config.max_waiting}); retry later",
                retry_after_seconds=1.0,
            )
        return can_never_run(request, self.max_tokens, self.config, self.pool)

    def abort(self, request_id: str) -> bool:
        """Forget a request; False when it is not here. A reservation is untouched: see release().

        The blocks of a pulling one stay taken until pull_done(): a read may still be landing in them.
        """
        state = self._sequences.pop(request_id, None)
        if state is None:
            return False
        if state.status is Status.PULLING:
            state.status = Status.ABORTED
            return True
        if state.status is Status.RUNNING:
            self._running.remove(state)
            self._table.free(state)
        elif state.reserved:
            self._table.adopted.remove(state)
            self._table.free_reserved(state)
        else:
            self._table.waiting.remove(state)
        state.status = Status.FINISHED
        return True

    def reserve(self, request_id: str, prompt_tokens: int) -> list[int] | None:
        """Blocks and a place for a decode leg to come, until release(); None when there is no room now.

        No room also while the waiting line is short of blocks: a reservation must not overtake it.
        """
        need = self._table.blocks_for(prompt_tokens)
        if (
            not 0 < prompt_tokens < self.max_tokens
            or request_id in self._table.reservations
            or self._table.knows(request_id)
            or self._table.slots() < 1
            or self._admission.short_of_blocks
            or not self._table.pulls_may_hold(need)
            or self.pool.free - need < self._table.headroom()
        ):
            return None
        blocks = self.pool.allocate(need)
        assert blocks is not None
        # A copy: the caller's list goes to another thread.
        self._table.reservations.add(Reservation(request_id, self._table.place_in_line(), list(blocks)))
        return blocks

    def release(self, request_id: str, *, unsettled: UnsettledRead | None = None) -> None:
        """End a reservation. No read may be landing in its blocks any more but `unsettled`: see pull_done().

        Unknown ids are ignored.
        """
        reservation = self._table.reservations.take(request_id)
        if reservation is None:
            return
        if unsettled is not None:
            self._doubtful.append((unsettled, reservation.blocks))
        else:
            self.pool.free_blocks(reservation.blocks)

    def early_pulled(self, request_id: str, n_blocks: int) -> None:
        """The first `n_blocks` of a reservation hold the prompt's KV, read under the epoch that the lease will have."""
        reservation = self._table.reservations.get(request_id)
        if reservation is not None:
            reservation.early = min(n_blocks, len(reservation.blocks))

    def pull_done(self, request_id: str, ok: bool, *, unsettled: UnsettledRead | None = None) -> None:
        """A pull has ended. `ok` False: what was read is not to be used, and the prompt is computed here.

        No read lands in its blocks any more but `unsettled`: then the blocks are set aside until that is over, and the
        sequence goes back to the line.
        """
        self._table.ending.discard(request_id)
        state = self._pulling.pop(request_id, None)
        if state is None:
            return
        pulled = state.pullable
        state.pull = None
        if not ok and state.computed < pulled and state.status is not Status.ABORTED:
            self.recomputed += 1
        if unsettled is not None:
            self._doubtful.append((unsettled, state.blocks[state.published :]))
            state.blocks = state.blocks[: state.published]
        if state.status is Status.ABORTED:
            state.status = Status.FINISHED
            self._table.free(state)
        elif unsettled is not None:
            self._table.back_to_line(state)
        else:
            if ok:
                state.computed = max(state.computed, pulled)
                publish(state, self.pool)
            self._table.run(state)

    def reclaim(self) -> None:
        """Free the blocks whose unsettled reads are over."""
        for doubt in list(self._doubtful):
            read, blocks = doubt
            if read.over:
                self._doubtful.remove(doubt)
                self.pool.free_blocks(blocks)

    @property
    def doubtful_blocks(self) -> int:
        """Blocks set aside until their unsettled reads are over."""
        return sum(len(blocks) for _, blocks in self._doubtful)

    # One step.

    @property
    def has_work(self) -> bool:
        """Whether schedule() may find something to do; pulls alone are nothing, they report by pull_done()."""
        return bool(self._running or self._table.waiting or self._table.adopted or self._ended)

    def schedule(self) -> StepPlan:
        """The next step, the pulls to start, and who lost its blocks. May be empty while blocks are held elsewhere."""
        plan = StepPlan()
        plan.failed, self._ended = list(self._ended), []
        budget = self._beside_decodes(plan, self._plan_decodes(plan))
        for state in self._table.prompts():
            budget = plan_chunk(plan, state, budget, chunked=self.config.chunked_prefill)
        if plan.preempted:
            # Whoever lost its blocks is now first in line and needs more than is free.
            self._admission.short_of_blocks = True
        else:
            self._admission.admit(plan, budget)
        return plan

    def _plan_decodes(self, plan: StepPlan) -> int:
        budget = self.config.max_batched_tokens
        # One token is kept for the oldest prompt, or decodes could shut it out for as long as new ones come.
        prompts = list(self._table.prompts())
        kept = 1 if prompts and (budget > 1 or prompts[0] is self._running[0]) else 0
        for state in list(self._running):
            if budget <= kept:
                break
            if state.status is Status.RUNNING and state.remaining == 1 and self._grow(state, plan):
                plan.steps.append(sequence_step(state, 1))
                budget -= 1
        return budget

    def _beside_decodes(self, plan: StepPlan, budget: int) -> int:
        """What of `budget` prompts may use, so that the decodes of `plan` get their tokens in time."""
        if not plan.steps or not self.config.chunked_prefill:
            return budget
        limits = (self._sequences[step.request_id].request.step_seconds for step in plan.steps)
        limit = min((seconds for seconds in limits if seconds > 0), default=0.0)
        return min(budget, self.pace.mixed_chunk(limit)) if limit else budget

    def _grow(self, state: SequenceState, plan: StepPlan) -> bool:
        """Make room for the next token. False: it waits, keeping what it has, for an older one or for time."""
        short = self._table.blocks_for(len(state.token_ids)) - len(state.blocks)
        while short > 0:
            blocks = self.pool.allocate(short)
            if blocks is not None:
                state.blocks.extend(blocks)
                break
            youngest = self._running[-1]
            if youngest is state:
                return False
            self._preempt(youngest, plan)
        return True

    def _preempt(self, victim: SequenceState, plan: StepPlan) -> None:
        self._running.remove(victim)
        self._table.back_to_line(victim)
        victim.preemptions += 1
        self.preemptions += 1
        plan.preempted.append(victim.request_id)

    def update(self, plan: StepPlan, outputs: list[StepOutput]) -> StepResult:
        """Take in what the executor made of plan.steps, in their order."""
        return take_outputs(self._table, plan, outputs)

    # What the worker reports.

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests without a step so far or since their preemption, pulls under way left out."""
        return len(self._table.waiting) + len(self._table.adopted)

    @property
    def waiting_pulls(self) -> int:
        """Requests whose KV is still on another worker: reads under way, and waiting requests that will read."""
        return self._table.waiting_pulls

    @property
    def reservations(self) -> int:
        return len(self._table.reservations)

    @property
    def queued_prefill_tokens(self) -> int:
        """Tokens that prefill steps still have to compute, of running and waiting requests without a pull."""
        return self._table.queued_prefill_tokens

    @property
    def resident_decode_tokens(self) -> int:
        """Context tokens of the sequences that decode now."""
        return self._table.resident_decode_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was in the prefix cache, over all first admissions."""
        return self._admission.cached_tokens
