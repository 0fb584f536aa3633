"""The exact worker: the engine's own scheduler and block pool, one event per step.

Slow (a step costs what it costs the real scheduler): for grids of small replays, to hold the fast worker against.
"""

from __future__ import annotations

import math
from dataclasses import replace

from forebay_engine.kv.blocks import BlockPool
from forebay_engine.perf import PerfModel
from forebay_engine.scheduler import Scheduler, SchedulerConfig, StepPlan
from forebay_engine.types import EngineRequest, PullSource, SamplingParams, StepOutput
from forebay_operator.replay.job import Job
from forebay_operator.replay.worker import Listener, WorkerBase, WorkerShape, mixed_chunk


class ExactWorker(WorkerBase):
    def __init__(self, index: int, model: PerfModel, shape: WorkerShape, slow_gap: float, listener: Listener) -> None:
        super().__init__(index, model, shape, slow_gap, listener)
        self._pool = BlockPool(model.kv_capacity_tokens // shape.block_size, shape.block_size, prefix_cache=False)
        self._config = SchedulerConfig(
            max_running=shape.max_running,
            max_waiting=1 << 30,  # submit() holds the limit, for prompts alone: a decode leg has its place already
            max_batched_tokens=shape.max_batched_tokens,
            max_model_len=model.kv_capacity_tokens,
            max_pulls=shape.max_pulls,
        )
        self._scheduler = Scheduler(self._config, self._pool)
        self._jobs: dict[str, Job] = {}
        self._spoke: dict[str, float] = {}
        """When each running request gave its last token."""
        self._kept: dict[int, list[int]] = {}
        """Blocks of finished prompts, by job, until their pull has ended."""
        self._plan: StepPlan | None = None
        self._start = 0.0

    @property
    def preemptions(self) -> int:
        return self._scheduler.preemptions

    def submit(self, job: Job, now: float, *, hold: bool, placed: bool = False) -> bool:
        if self._scheduler.waiting >= self.shape.max_waiting and not placed:
            return False
        if job.spoke >= 0:
            self._spoke[str(job.number)] = job.spoke
        self._add(job, now, hold=hold, pull=None)
        return True

    def submit_pull(self, job: Job, now: float) -> None:
        blocks = -(-job.prompt // self.shape.block_size)
        source = PullSource("", str(job.number), "", 0, [0] * blocks, job.prompt, 1, "", 30.0)
        self._add(job, now, hold=False, pull=source)

    def _add(self, job: Job, now: float, *, hold: bool, pull: PullSource | None) -> None:
        name = str(job.number)
        request = EngineRequest(
            request_id=name,
            prompt_ids=[0] * job.prompt,
            params=SamplingParams(max_tokens=job.output),
            output_ids=[0] * job.generated,
            hold=hold,
            pull=pull,
        )
        failure = self._scheduler.add(request)
        if failure is not None:
            raise RuntimeError(f"replay: the scheduler refused request {name}: {failure.message}")
        self._jobs[name] = job
        if self._plan is None:
            self._begin(now)

    def pulled(self, job: Job, now: float) -> None:
        self._read_ended(job, now, ok=True)

    def pull_lost(self, job: Job, now: float) -> None:
        self._read_ended(job, now, ok=False)

    def _read_ended(self, job: Job, now: float, *, ok: bool) -> None:
        self._spoke[str(job.number)] = job.first
        self._scheduler.pull_done(str(job.number), ok)
        if self._plan is None:
            self._begin(now)

    def evict(self, now: float) -> list[Job]:
        leaving = list(self._jobs.values())
        for name, job in self._jobs.items():
            job.spoke = self._spoke.get(name, -1.0)
            self._scheduler.abort(name)
            # Of a pull that was under way; others are not known to it.
            self._scheduler.pull_done(name, False)
        for blocks in self._kept.values():
            self._pool.free_blocks(blocks)
        self._jobs, self._spoke, self._kept, self._plan = {}, {}, {}, None
        return leaving

    def release(self, job: Job, now: float) -> None:
        blocks = self._kept.pop(job.number, None)
        if blocks:
            self._pool.free_blocks(blocks)
        if self._plan is None:
            self._begin(now)

    def settle(self, now: float) -> None:
        """Every step is an event: the counters are up to date."""

    def boundary(self, now: float) -> None:
        plan, self._plan = self._plan, None
        assert plan is not None
        self._account(plan, now)
        outputs = [StepOutput(0 if step.sample is not None else None) for step in plan.steps]
        result = self._scheduler.update(plan, outputs)
        for event in result.events:
            job = self._jobs[event.request_id]
            before = self._spoke.get(event.request_id)
            self._spoke[event.request_id] = now
            job.generated += 1
            if before is None:
                job.first = now
            else:
                self.generated += 1
                self._listener.gaps.add(now - before, 1)
                job.slow_gaps += now - before > self.slow_gap
            if event.finish_reason is not None:
                job.last = now
                del self._jobs[event.request_id], self._spoke[event.request_id]
                self._listener.finished(self, job, now)
        for state in result.finished_holds:
            job = self._jobs.pop(state.request_id)
            del self._spoke[state.request_id]
            self._kept[job.number] = state.blocks
            self._listener.prefilled(self, job, now)
        if self._plan is None:
            self._begin(now)

    def _account(self, plan: StepPlan, now: float) -> None:
        seconds = now - self._start
        self.busy_seconds += seconds
        decodes = [step for step in plan.steps if len(step.token_ids) == 1 and step.sample is not None]
        tokens = sum(len(step.token_ids) for step in plan.steps) - len(decodes)
        self.prefill_tokens += tokens
        if tokens and not decodes:
            self.prefilled_tokens += tokens
            self.prefill_seconds += seconds
        elif decodes and not tokens:
            self.decode_seconds += seconds
            self.decode_steps += 1
            self.decode_batch += len(decodes)
            self.decode_resident += sum(step.start + 1 for step in decodes)

    def _begin(self, now: float) -> None:
        scheduler = self._scheduler
        batch, resident = self._decoding()
        limit = self.shape.max_batched_tokens
        if batch and not math.isinf(self.shape.mixed_step_seconds):
            chunk = mixed_chunk(self.model, batch, resident, self._context(), self.shape.mixed_step_seconds)
            limit = min(limit, batch + chunk)
        scheduler.config = replace(self._config, max_batched_tokens=limit)
        plan = scheduler.schedule()
        for order in plan.pulls:
            self._listener.pulls(self, self._jobs[order.request_id], now)
        if not plan.steps:
            return
        chunks = []
        batch = resident = 0
        for step in plan.steps:
            if len(step.token_ids) == 1 and step.sample is not None:
                batch += 1
                resident += step.start + 1
            else:
                chunks.append((len(step.token_ids), step.start))
        self._plan = plan
        self._start = now
        self._listener.wake(self, now + self.model.step_seconds(chunks, batch, resident))

    def _decoding(self) -> tuple[int, int]:
        states = [state for state in self._scheduler._running if state.remaining == 1]
        return len(states), sum(len(state.token_ids) for state in states)

    def _context(self) -> int:
        for state in self._scheduler._running:
            if state.remaining > 1:
                return state.computed
        return 0

    # What the worker reports.

    @property
    def queued_tokens(self) -> int:
        return self._scheduler.queued_prefill_tokens

    @property
    def in_flight(self) -> int:
        return self._scheduler.running + self._scheduler.waiting + len(self._scheduler._pulling) + len(self._kept)

    @property
    def decoding(self) -> int:
        return self._decoding()[0] + len(self._scheduler._pulling)

    @property
    def waiting_pulls(self) -> int:
        return self._scheduler.waiting_pulls - len(self._scheduler._pulling)

    @property
    def resident_tokens(self) -> int:
        return self._scheduler.resident_decode_tokens

    @property
    def free_tokens(self) -> int:
        return self._pool.free * self.shape.block_size
