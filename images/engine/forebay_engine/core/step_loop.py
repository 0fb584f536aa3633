"""The step thread: commands in, one scheduler step at a time, events out.

Owns the scheduler, the block pool and the executor: nothing else touches them. Blocks while there is nothing to do.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from forebay_engine.core.commands import (
    BlocksExpired,
    BlocksFreed,
    Command,
    EarlyPulled,
    PullDone,
    ReleaseReservation,
    ReserveBlocks,
    Stop,
)
from forebay_engine.core.handle import CoreStats
from forebay_engine.executor.base import Executor
from forebay_engine.kv.blocks import BlockPool
from forebay_engine.kv.leases import LeaseTable
from forebay_engine.scheduler import PullOrder, Scheduler, SequenceState, StepPlan
from forebay_engine.types import (
    Abort,
    AbortDone,
    EngineRequest,
    FailEvent,
    HoldInfo,
    SetDraining,
    StepOutput,
    TokenEvent,
)

log = logging.getLogger(__name__)

IDLE_WAIT_SECONDS = 0.5
"""How long the thread sleeps at most when it has nothing to do; a command wakes it at once."""

BLOCKED_WAIT_SECONDS = 0.02
"""When work is there but none can run (pulls under way, blocks in quarantine)."""

STATS_INTERVAL_SECONDS = 0.05


class Outbox(Protocol):
    """Where the step thread's results go; every method is safe to call from it and returns at once."""

    def events(self, events: list[TokenEvent | FailEvent | AbortDone]) -> None: ...

    def pulls(self, orders: list[PullOrder]) -> None: ...

    def stats(self, stats: CoreStats) -> None: ...

    def died(self, cause: BaseException) -> None: ...


class StepLoop:
    def __init__(
        self,
        *,
        executor: Executor,
        scheduler: Scheduler,
        pool: BlockPool,
        leases: LeaseTable,
        outbox: Outbox,
        transfer_stats: Callable[[CoreStats], CoreStats],
        wake_transfer: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._pool = pool
        self._leases = leases
        self._outbox = outbox
        self._transfer_stats = transfer_stats
        self._wake_transfer = wake_transfer
        self._clock = clock
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="forebay-steps", daemon=True)
        self._stopping = False
        self._next_stats = 0.0
        self._prefill_tokens = 0
        self._prefill_busy = 0.0
        self._prompt_step_tokens = 0
        self._prompt_step_seconds = 0.0
        self._decode_steps = 0
        self._decode_tokens = 0
        self._decode_busy = 0.0
        self._decode_step_sequences = 0
        self._decode_step_resident = 0
        self._decoding = 0
        self._leases_expired = 0
        self._sent = self._sent_tokens = 0
        self._taken = self._taken_tokens = 0

    def start(self) -> None:
        self._thread.start()

    def send(self, command: Command) -> None:
        if isinstance(command, EngineRequest):
            # Requests come from one thread, so that these counters need no lock.
            self._sent += 1
            self._sent_tokens += _to_compute(command)
        self._inbox.put(command)

    def up_to_date(self, stats: CoreStats) -> CoreStats:
        """`stats` with the requests sent since. They are taken in between two steps, and a step of prompts may take
        half a second: who looks meanwhile must not take the queue for shorter than it is. Called by who sends them."""
        more = self._sent - stats.taken
        if more <= 0:
            return stats
        return msgspec.structs.replace(
            stats,
            waiting=stats.waiting + more,
            queued_prefill_tokens=stats.queued_prefill_tokens + max(0, self._sent_tokens - stats.taken_tokens),
        )

    def stop(self, timeout: float = 5.0) -> None:
        """Ends the thread after the step that runs; requests left get no more events."""
        self.send(Stop())
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            blocked = False
            while not self._stopping:
                self._take_commands(blocked)
                if not self._stopping:
                    blocked = not self._step()
        except BaseException as error:
            # Any fault here leaves the arena and the tables in doubt: the whole worker is restarted, never patched up.
            log.exception("the step thread failed")
            self._outbox.died(error)

    def _take_commands(self, blocked: bool) -> None:
        if self._scheduler.has_work and not blocked:
            wait = None
        else:
            wait = BLOCKED_WAIT_SECONDS if self._scheduler.has_work else IDLE_WAIT_SECONDS
        while not self._stopping:
            try:
                command = self._inbox.get_nowait() if wait is None else self._inbox.get(timeout=wait)
            except queue.Empty:
                return
            wait = None
            self._apply(command)

    def _apply(self, command: Command) -> None:
        match command:
            case EngineRequest():
                self._add(command)
            case Abort(request_id=request_id, receipt=receipt):
                self._abort(request_id, receipt)
            case PullDone(request_id=request_id, ok=ok, unsettled=unsettled):
                self._scheduler.pull_done(request_id, ok, unsettled=unsettled)
            case EarlyPulled(request_id=request_id, blocks=count):
                self._scheduler.early_pulled(request_id, count)
            case BlocksFreed(blocks=blocks):
                self._pool.free_blocks(blocks)
            case BlocksExpired(blocks=blocks):
                self._leases_expired += 1
                self._pool.quarantine(blocks, self._clock() + self._leases.lease_seconds)
            case ReserveBlocks(request_id=request_id, prompt_tokens=tokens, reply=reply):
                # The transfer loop ends reservations: only it knows when no read lands in the blocks any more.
                reply(self._scheduler.reserve(request_id, tokens))
            case ReleaseReservation(request_id=request_id, unsettled=unsettled):
                self._scheduler.release(request_id, unsettled=unsettled)
            case SetDraining():
                pass  # the server refuses new requests; what runs here finishes
            case Stop():
                self._stopping = True

    def _add(self, request: EngineRequest) -> None:
        self._taken += 1
        self._taken_tokens += _to_compute(request)
        if request.hold:
            self._leases.begin(request.request_id)
        failure = self._scheduler.add(request)
        if failure is not None:
            self._leases.drop(request.request_id)
            self._outbox.events([failure])

    def _abort(self, request_id: str, receipt: int | None) -> None:
        found = self._scheduler.abort(request_id)
        self._leases.drop(request_id)
        lease = self._leases.cancel(request_id, self._clock())
        if lease is not None:
            self._pool.free_blocks(lease.blocks)
        if receipt is not None:
            self._outbox.events([AbortDone(request_id, receipt)])
        elif found:
            # Cancelled by id, from elsewhere: whoever reads its events would wait for ever.
            self._outbox.events([TokenEvent(request_id, [], finish_reason="abort")])

    def _step(self) -> bool:
        """One round; False when nothing could run."""
        now = self._clock()
        self._pool.release_quarantined(now)
        self._scheduler.reclaim()
        ran = False
        if self._scheduler.has_work:
            plan = self._scheduler.schedule()
            for request_id in plan.preempted:
                self._leases.restart(request_id)
            for failure in plan.failed:
                self._leases.drop(failure.request_id)
            if plan.failed:
                self._outbox.events(list(plan.failed))
            if plan.pulls:
                self._outbox.pulls(plan.pulls)
            if plan.steps:
                self._execute(plan)
                ran = True
        self._report(now)
        return ran

    def _execute(self, plan: StepPlan) -> None:
        started = self._clock()
        outputs = self._executor.execute(plan.steps)
        ended = self._clock()
        self._account(plan, outputs, ended - started)
        result = self._scheduler.update(plan, outputs)
        for request_id, blocks in result.progressed:
            self._leases.advance(request_id, blocks)
        holds = {state.request.request_id: self._hold(state, ended) for state in result.finished_holds}
        if result.progressed or holds:
            self._wake_transfer()
        events: list[TokenEvent | FailEvent | AbortDone] = []
        for event in result.events:
            hold = holds.get(event.request_id)
            if hold is not None:
                event.hold = hold
            elif event.finish_reason is not None:
                self._leases.drop(event.request_id)
            events.append(event)
        if events:
            self._outbox.events(events)

    def _hold(self, state: SequenceState, now: float) -> HoldInfo:
        request = state.request
        tokens = len(request.prompt_ids)
        lease = self._leases.grant(request.request_id, state.blocks, tokens, now)
        return HoldInfo(
            block_ids=list(lease.blocks), num_tokens=tokens, epoch=lease.epoch, lease_seconds=self._leases.lease_seconds
        )

    def _account(self, plan: StepPlan, outputs: list[StepOutput], seconds: float) -> None:
        """A mixed step counts as prefill time: its length is set by the chunk, not by the decode tokens in it."""
        chunk_tokens = sum(len(step.token_ids) for step in plan.steps if len(step.token_ids) > 1)
        single = sum(1 for step in plan.steps if len(step.token_ids) == 1)
        if chunk_tokens:
            self._prefill_tokens += chunk_tokens
            self._prefill_busy += seconds
            if not single:
                self._prompt_step_tokens += chunk_tokens
                self._prompt_step_seconds += seconds
        else:
            self._decode_steps += 1
            self._decode_busy += seconds
            self._decode_step_sequences += single
            self._decode_step_resident += sum(step.start + 1 for step in plan.steps)
        self._decode_tokens += single
        self._decoding = single
        self._scheduler.pace.observe(chunk_tokens, single, seconds)

    def _report(self, now: float) -> None:
        if now < self._next_stats:
            return
        self._next_stats = now + STATS_INTERVAL_SECONDS
        scheduler = self._scheduler
        # A step's requests may have ended with it.
        decoding = min(self._decoding, scheduler.running)
        stats = CoreStats(
            taken=self._taken,
            taken_tokens=self._taken_tokens,
            running=scheduler.running,
            waiting=scheduler.waiting,
            queued_prefill_tokens=scheduler.queued_prefill_tokens,
            resident_decode_tokens=scheduler.resident_decode_tokens,
            free_blocks=self._pool.free,
            total_blocks=self._pool.num_blocks,
            held_blocks=self._leases.held_blocks,
            doubtful_blocks=scheduler.doubtful_blocks,
            waiting_pulls=scheduler.waiting_pulls,
            prefill_tokens=self._prefill_tokens,
            prefill_busy_seconds=self._prefill_busy,
            prompt_step_tokens=self._prompt_step_tokens,
            prompt_step_seconds=self._prompt_step_seconds,
            cached_tokens=scheduler.cached_tokens,
            decode_steps=self._decode_steps,
            decode_tokens=self._decode_tokens,
            decode_busy_seconds=self._decode_busy,
            decode_step_sequences=self._decode_step_sequences,
            decode_step_resident=self._decode_step_resident,
            decoding=decoding,
            decode_step_seconds=scheduler.pace.decode_seconds if decoding else 0.0,
            mixed_tokens_per_second=scheduler.pace.mixed_velocity(bool(decoding)),
            preemptions=scheduler.preemptions,
            recomputed=scheduler.recomputed,
            leases_expired=self._leases_expired,
        )
        self._outbox.stats(self._transfer_stats(stats))


def _to_compute(request: EngineRequest) -> int:
    """Prompt tokens, as far as is known before the prefix cache was asked."""
    return len(request.prompt_ids) if request.pull is None else 0
