"""The scheduler of one worker."""

from __future__ import annotations

import math
from bisect import insort

from forebay_engine.kv.blocks import BlockPool
from forebay_engine.scheduler.entry import can_never_run, can_pull, last_event
from forebay_engine.scheduler.finish import finish_reason
from forebay_engine.scheduler.prefix import cached_prefix, publish
from forebay_engine.scheduler.reservations import Reservation, Reservations
from forebay_engine.scheduler.state import (
    PullOrder,
    SchedulerConfig,
    SequenceState,
    Status,
    StepPlan,
    StepResult,
)
from forebay_engine.scheduler.waiting import WaitingQueue
from forebay_engine.types import EngineRequest, FailEvent, SampleSpec, SequenceStep, StepOutput, TokenEvent


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
        self.max_tokens = min(config.max_model_len, pool.num_blocks * pool.block_size)
        """Tokens of one sequence at most: the answer ends with "length" there, since a lone sequence must fit."""
        self.pull_block_cap = max(1, pool.num_blocks // 2)
        """Blocks that pulls and reservations may hold together; a single one may hold more."""
        self._watermark = pool.num_blocks // 100
        """Blocks that an admission leaves to those that run already, so that they do not preempt it at once."""
        self._sequences: dict[str, SequenceState] = {}
        self._waiting = WaitingQueue()
        self._adopted: list[SequenceState] = []
        """Waiting with a reservation's blocks; they had their turn when the room was given."""
        self._running: list[SequenceState] = []
        """Oldest first."""
        self._pulling: dict[str, SequenceState] = {}
        """Also aborted ones, until their read has ended."""
        self._ending: set[str] = set()
        """Ids whose pull only ends the lease: the sequence runs already, but pull_done() will come."""
        self._ended: list[TokenEvent] = []
        self._reservations = Reservations()
        self._next_order = 0
        self._short_of_blocks = False
        """The head of the waiting line found too few blocks in the last round."""
        self.preemptions = 0
        self.recomputed = 0
        """Prompts computed here because their KV could not be had."""
        self.set_aside = 0
        """Blocks lost to reads that may never end; a worker that has lost many should be restarted."""
        self.cached_tokens = 0
        """Prompt tokens whose KV was in the prefix cache, over all first admissions."""

    # Requests in and out.

    def add(self, request: EngineRequest) -> FailEvent | None:
        """Take a request in. A FailEvent says why not: 429 waiting line full, 400 can never fit, 409 id in use.

        A reservation of the same id is adopted: no read may be landing in its blocks any more.
        """
        reservation = self._reservations.take(request.request_id)
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
            order=self._place_in_line() if reservation is None else reservation.order,
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
            self._adopted.append(state)
            return None
        if reservation is not None:
            self.pool.free_blocks(reservation.blocks)
        state.expected_cached = len(cached_prefix(state, self.pool)) * self.pool.block_size
        self._waiting.add(state)
        return None

    def _place_in_line(self) -> int:
        self._next_order += 1
        return self._next_order

    def _refusal(self, request: EngineRequest, *, reserved: bool) -> FailEvent | None:
        request_id = request.request_id
        if self._known(request_id):
            return FailEvent(request_id, 409, f"request id {request_id!r} is in use here; send a fresh id")
        if not reserved and len(self._waiting) >= self.config.max_waiting:
            return FailEvent(
                request_id,
                429,
                f"{len(self._waiting)} requests wait already (max_waiting {self.config.max_waiting}); retry later",
                retry_after_seconds=1.0,
            )
        return can_never_run(request, self.max_tokens, self.config, self.pool)

    def _known(self, request_id: str) -> bool:
        return request_id in self._sequences or request_id in self._pulling or request_id in self._ending

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
            self._free(state)
        elif state.reserved:
            self._adopted.remove(state)
            self._free_reserved(state)
        else:
            self._waiting.remove(state)
        state.status = Status.FINISHED
        return True

    def reserve(self, request_id: str, prompt_tokens: int) -> list[int] | None:
        """Blocks and a place for a decode leg to come, until release(); None when there is no room now.

        No room also while the waiting line is short of blocks: a reservation must not overtake it.
        """
        need = self._blocks_for(prompt_tokens)
        if (
            not 0 < prompt_tokens < self.max_tokens
            or request_id in self._reservations
            or self._known(request_id)
            or self._slots() < 1
            or self._short_of_blocks
            or not self._pulls_may_hold(need)
            or self.pool.free - need < self._headroom()
        ):
            return None
        blocks = self.pool.allocate(need)
        assert blocks is not None
        # A copy: the caller's list goes to another thread.
        self._reservations.add(Reservation(request_id, self._place_in_line(), list(blocks)))
        return blocks

    def release(self, request_id: str, *, unsettled: bool = False) -> None:
        """End a reservation. No read may be landing in its blocks any more, unless `unsettled`: see pull_done().

        Unknown ids are ignored.
        """
        reservation = self._reservations.take(request_id)
        if reservation is None:
            return
        if unsettled:
            self._set_aside(reservation.blocks)
        else:
            self.pool.free_blocks(reservation.blocks)

    def early_pulled(self, request_id: str, n_blocks: int) -> None:
        """The first `n_blocks` of a reservation hold the prompt's KV, read under the epoch that the lease will have."""
        reservation = self._reservations.get(request_id)
        if reservation is not None:
            reservation.early = min(n_blocks, len(reservation.blocks))

    def pull_done(self, request_id: str, ok: bool, *, unsettled: bool = False) -> None:
        """A pull has ended. `ok` False: what was read is not to be used, and the prompt is computed here.

        No read lands in its blocks any more, unless `unsettled` says that this is in doubt: then the blocks are set
        aside for good (they count in pool.quarantined and set_aside), and the sequence goes back to the line.
        """
        self._ending.discard(request_id)
        state = self._pulling.pop(request_id, None)
        if state is None:
            return
        pulled = self._pullable(state)
        state.pull = None
        if not ok and state.computed < pulled and state.status is not Status.ABORTED:
            self.recomputed += 1
        if unsettled:
            self._set_aside(state.blocks[state.published :])
            state.blocks = state.blocks[: state.published]
        if state.status is Status.ABORTED:
            state.status = Status.FINISHED
            self._free(state)
        elif unsettled:
            self._back_to_line(state)
        else:
            if ok:
                state.computed = max(state.computed, pulled)
                publish(state, self.pool)
            self._run(state)

    def _set_aside(self, blocks: list[int]) -> None:
        self.pool.quarantine(blocks, math.inf)
        self.set_aside += len(blocks)

    # One step.

    @property
    def has_work(self) -> bool:
        """Whether schedule() may find something to do; pulls alone are nothing, they report by pull_done()."""
        return bool(self._running or self._waiting or self._adopted or self._ended)

    def schedule(self) -> StepPlan:
        """The next step, the pulls to start, and who lost its blocks. May be empty while blocks are held elsewhere."""
        plan = StepPlan()
        plan.failed, self._ended = list(self._ended), []
        budget = self._plan_decodes(plan)
        for state in self._running:
            if state.remaining > 1:
                budget = self._plan_chunk(plan, state, budget)
        if plan.preempted:
            # Whoever lost its blocks is now first in line and needs more than is free.
            self._short_of_blocks = True
        else:
            self._admit(plan, budget)
        return plan

    def _plan_decodes(self, plan: StepPlan) -> int:
        budget = self.config.max_batched_tokens
        # One token is kept for the oldest prompt, or decodes could shut it out for as long as new ones come.
        prompts = [state for state in self._running if state.remaining > 1]
        kept = 1 if prompts and (budget > 1 or prompts[0] is self._running[0]) else 0
        for state in list(self._running):
            if budget <= kept:
                break
            if state.status is Status.RUNNING and state.remaining == 1 and self._grow(state, plan):
                plan.steps.append(self._step(state, 1))
                budget -= 1
        return budget

    def _plan_chunk(self, plan: StepPlan, state: SequenceState, budget: int) -> int:
        if budget <= 0:
            return budget
        size = min(state.remaining, budget) if self.config.chunked_prefill else state.remaining
        plan.steps.append(self._step(state, size))
        return budget - size

    def _step(self, state: SequenceState, size: int) -> SequenceStep:
        request = state.request
        start, end = state.computed, state.computed + size
        scored = request.params.prompt_logprobs if state.wants_prompt_logprobs else None
        return SequenceStep(
            request_id=request.request_id,
            token_ids=state.token_ids[start:end],
            start=start,
            block_table=state.blocks,
            sample=SampleSpec(request.params, request.prompt_ids, state.outputs)
            if end == len(state.token_ids)
            else None,
            prompt_logprobs=scored,
            next_token=state.token_ids[end] if scored is not None and end < state.prompt_tokens else None,
        )

    def _grow(self, state: SequenceState, plan: StepPlan) -> bool:
        """Make room for the next token. False: it waits, keeping what it has, for an older one or for time."""
        short = self._blocks_for(len(state.token_ids)) - len(state.blocks)
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
        self._back_to_line(victim)
        victim.preemptions += 1
        self.preemptions += 1
        plan.preempted.append(victim.request_id)

    def _back_to_line(self, state: SequenceState) -> None:
        self._free(state)
        # What it had published is found again at its next admission, unless it is evicted first.
        state.expected_cached = state.published * self.pool.block_size
        state.computed = state.published = state.reported = 0
        state.prompt_logprobs = []
        state.status = Status.WAITING
        self._waiting.add(state)

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """First come, first served: the first that cannot go stops the line."""
        self._short_of_blocks = False
        for state in list(self._adopted):
            if len(self._pulling) >= self.config.max_pulls:
                break
            self._adopted.remove(state)
            if not self._place(state, plan):
                # It needs more than was reserved and there is none: holding some while waiting could deadlock.
                self._free_reserved(state)
                self._waiting.add(state)
        while self._waiting:
            state = self._waiting.head()
            if state.pull is None:
                if budget <= 0:
                    return
            elif len(self._pulling) >= self.config.max_pulls:
                return
            if self._slots() < 1:
                return
            if not self._place(state, plan):
                self._short_of_blocks = True
                return
            self._waiting.remove(state)
            if state.status is Status.RUNNING:
                budget = self._plan_chunk(plan, state, budget)

    def _place(self, state: SequenceState, plan: StepPlan) -> bool:
        """Give a waiting sequence its blocks and start its pull, if it has one; False, nothing changed: too few."""
        total = self._blocks_for(len(state.token_ids))
        hits = cached_prefix(state, self.pool)
        kept = state.reserved[len(hits) : total]
        unused = state.reserved[: len(hits)] + state.reserved[total:]
        need = total - len(hits) - len(kept)
        room = self.pool.free - self.pool.unreferenced(hits) + len(unused)
        if need > 0 and room - need < self._headroom():
            return False
        covered = len(hits) * self.pool.block_size
        pulls = state.pull is not None and covered < self._pullable(state)
        if pulls and not state.reserved and not self._pulls_may_hold(total):
            return False
        self.pool.acquire(hits)
        if unused:
            self.pool.free_blocks(unused)
        fresh = self.pool.allocate(need)
        assert fresh is not None
        state.blocks = [*hits, *kept, *fresh]
        state.computed = covered
        state.published = len(hits)
        self._count_cached(state, covered)
        first_missing = max(len(hits), state.early)
        state.reserved, state.early = [], 0
        if state.pull is not None:
            last = self._blocks_for(state.pull.num_tokens) if pulls else 0
            missing = slice(min(first_missing, last), last)
            plan.pulls.append(
                PullOrder(state.request_id, state.pull, state.pull.block_ids[missing], state.blocks[missing])
            )
        if pulls:
            state.status = Status.PULLING
            self._pulling[state.request_id] = state
        else:
            if state.pull is not None:
                self._ending.add(state.request_id)
                state.pull = None
            self._run(state)
        return True

    def update(self, plan: StepPlan, outputs: list[StepOutput]) -> StepResult:
        """Take in what the executor made of plan.steps, in their order."""
        if len(outputs) != len(plan.steps):
            raise ValueError(f"the executor gave {len(outputs)} outputs for {len(plan.steps)} steps")
        result = StepResult()
        for step, output in zip(plan.steps, outputs, strict=True):
            state = self._sequences.get(step.request_id)
            if state is None or state.status is not Status.RUNNING or state.computed != step.start:
                continue  # aborted while the step ran
            state.computed += len(step.token_ids)
            publish(state, self.pool)
            if output.prompt_logprobs is not None:
                state.prompt_logprobs.extend(output.prompt_logprobs)
            if step.sample is not None:
                if output.token_id is None:
                    raise ValueError(f"request {step.request_id}: the executor sampled no token where one was due")
                self._take_token(state, output, output.token_id, result)
            if state.status is Status.RUNNING:
                self._report_progress(state, result)
        return result

    def _take_token(self, state: SequenceState, output: StepOutput, token: int, result: StepResult) -> None:
        params = state.request.params
        state.token_ids.append(token)
        state.outputs.append(token)
        reason = finish_reason(params, len(state.outputs), token, len(state.token_ids), self.max_tokens)
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
        self._running.remove(state)
        del self._sequences[state.request_id]
        state.status = Status.FINISHED
        if reason is None:
            result.finished_holds.append(state)
        else:
            self._free(state)

    def _report_progress(self, state: SequenceState, result: StepResult) -> None:
        full = state.computed // self.pool.block_size
        if state.request.hold and full > state.reported:
            state.reported = full
            result.progressed.append((state.request_id, state.blocks[:full]))

    # Blocks.

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)

    def _slots(self) -> int:
        taken = len(self._running) + len(self._pulling) + len(self._reservations) + len(self._adopted)
        return self.config.max_running - taken

    def _headroom(self) -> int:
        return self._watermark if self._running else 0

    def _pulls_may_hold(self, blocks: int) -> bool:
        held = self._reservations.blocks
        held += sum(len(state.blocks) for state in self._pulling.values())
        held += sum(len(state.reserved) for state in self._adopted)
        return held == 0 or held + blocks <= self.pull_block_cap

    def _pullable(self, state: SequenceState) -> int:
        """Tokens whose KV a pull gives. The last known token is always computed here: its logits give the next one."""
        return min(state.pull.num_tokens, len(state.token_ids) - 1) if state.pull is not None else 0

    def _count_cached(self, state: SequenceState, covered: int) -> None:
        if state.cached_tokens is None:
            state.cached_tokens = min(covered, state.prompt_tokens)
            self.cached_tokens += state.cached_tokens

    def _run(self, state: SequenceState) -> None:
        state.status = Status.RUNNING
        insort(self._running, state, key=lambda other: other.order)

    def _free(self, state: SequenceState) -> None:
        self.pool.free_blocks(state.blocks)
        state.blocks = []

    def _free_reserved(self, state: SequenceState) -> None:
        self.pool.free_blocks(state.reserved)
        state.reserved, state.early = [], 0

    # What the worker reports.

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests without a step so far or since their preemption, pulls under way left out."""
        return len(self._waiting) + len(self._adopted)

    @property
    def waiting_pulls(self) -> int:
        """Requests whose KV is still on another worker: reads under way, and waiting requests that will read."""
        queued = sum(1 for state in self._waiting if state.pull is not None)
        return len(self._pulling) + len(self._adopted) + queued

    @property
    def reservations(self) -> int:
        return len(self._reservations)

    @property
    def queued_prefill_tokens(self) -> int:
        """Tokens that prefill steps still have to compute, of running and waiting requests without a pull."""
        waiting = sum(
            max(1, len(state.token_ids) - state.expected_cached) for state in self._waiting if state.pull is None
        )
        return waiting + sum(state.remaining for state in self._running if state.remaining > 1)

    @property
    def resident_decode_tokens(self) -> int:
        """Context tokens of the sequences that decode now."""
        return sum(len(state.token_ids) for state in self._running if state.remaining == 1)
