"""The fast worker: the scheduler's rules on counters, and one event for many pure decode steps.

It follows forebay_engine.scheduler step by step (decodes first, then running prompts' chunks, then admissions in FCFS
order, pulls under their cap, preemption of the youngest) but counts tokens instead of keeping blocks: the last, partly
filled block of a sequence counts as half a block. Steps in which only decodes run and nothing joins or leaves are taken
together; their times are summed in closed form. tests/operator/replay/test_agreement.py holds it against exact.py.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque

from forebay_engine.perf import PerfModel
from forebay_operator.replay.job import Job
from forebay_operator.replay.stretch import TOLERANCE, Stretch
from forebay_operator.replay.worker import Listener, WorkerBase, WorkerShape, mixed_chunk


class FastWorker(WorkerBase):
    def __init__(self, index: int, model: PerfModel, shape: WorkerShape, slow_gap: float, listener: Listener) -> None:
        super().__init__(index, model, shape, slow_gap, listener)
        self._capacity = model.kv_capacity_tokens // shape.block_size * shape.block_size
        self._half_block = shape.block_size // 2
        self._line = 0
        self._step = 0
        self._slow = 0
        self._preemptions = 0
        self._empty()

    def _empty(self) -> None:
        self._waiting: deque[Job] = deque()
        self._prompts: list[Job] = []
        """Running prompts, oldest first."""
        self._hold: set[int] = set()
        """Numbers of the jobs whose KV is kept for a pull when their prompt is done."""
        self._decodes: list[tuple[int, int, Job]] = []
        """Heap by finish step."""
        self._joining: list[Job] = []
        self._pulling_tokens = 0
        self._pulling: dict[int, Job] = {}
        self._prompt_tokens = 0
        """KV of running prompts."""
        self._held_tokens = 0
        self._held = 0
        self._pulls_waiting = 0
        self._queued = 0
        self._batch = 0
        self._resident = 0
        # The step or run under way.
        self._busy = False
        self._start = 0.0
        self._steps = 0
        self._stretch = Stretch(self.model, 0, 0)
        self._chunks: list[tuple[Job, int, int, bool]] = []
        """(job, new tokens, context before, last chunk)"""
        self._accounted = 0

    # Work in.

    def submit(self, job: Job, now: float, *, hold: bool, placed: bool = False) -> bool:
        if len(self._waiting) >= self.shape.max_waiting and not placed:
            return False
        job.left = job.known
        job.pull = False
        self._enqueue(job)
        self._queued += job.left
        if hold:
            self._hold.add(job.number)
        self._kick(now)
        return True

    def submit_pull(self, job: Job, now: float) -> None:
        job.pull = True
        self._enqueue(job)
        self._pulls_waiting += 1
        self._kick(now)

    def _enqueue(self, job: Job) -> None:
        self._line += 1
        job.order = self._line
        self._waiting.append(job)

    def pulled(self, job: Job, now: float) -> None:
        self._read_ended(job)
        self._joining.append(job)
        self._kick(now)

    def pull_lost(self, job: Job, now: float) -> None:
        # It keeps its place and its blocks, as in the scheduler.
        self._read_ended(job)
        job.left = job.known
        self._queued += job.left
        self._prompt_tokens += job.known + self._half_block
        insort(self._prompts, job, key=lambda other: other.order)
        self._kick(now)

    def _read_ended(self, job: Job) -> None:
        del self._pulling[job.number]
        self._pulling_tokens -= job.known + self._half_block
        job.pull = False

    def evict(self, now: float) -> list[Job]:
        spoke = self._start
        if self._busy and not self._chunks and (done := self._steps_by(now, round_up=False)):
            self._account(done)
            self._slow += self._stretch.longer(done, self.slow_gap)
            self._step += done
            spoke += self._stretch.seconds(done)
        leaving = [*self._waiting, *self._prompts, *self._joining, *self._pulling.values()]
        for finish, _, job in self._decodes:
            if finish <= self._step:
                self._finish(job, spoke)
                continue
            job.generated = job.output - (finish - self._step)
            job.slow_gaps += self._slow - job.slow_mark
            job.spoke = spoke
            leaving.append(job)
        self._empty()
        return sorted(leaving, key=lambda job: job.order)

    def release(self, job: Job, now: float) -> None:
        self._held -= 1
        self._held_tokens -= job.prompt + self._half_block
        if self._waiting:
            self._kick(now)

    # Time.

    def boundary(self, now: float) -> None:
        self._end(now)
        self._begin(now)

    def settle(self, now: float) -> None:
        if not self._busy or self._chunks or self._steps == 1:
            return
        done = self._steps_by(now, round_up=False)
        self._account(done)

    def _kick(self, now: float) -> None:
        if not self._busy:
            self._begin(now)
        elif not self._chunks and self._steps > 1:
            steps = self._steps_by(now, round_up=True)
            if steps < self._steps:
                self._steps = steps
                self._listener.wake(self, self._start + self._stretch.seconds(steps))

    def _steps_by(self, now: float, *, round_up: bool) -> int:
        """Steps of the run under way that have ended by `now`; round_up: the one in progress included, at least 1."""
        elapsed = now - self._start
        ended = self._stretch.ended(elapsed, self._steps)
        if not round_up or (ended and self._stretch.seconds(ended) >= elapsed - TOLERANCE):
            return ended
        return min(self._steps, ended + 1)

    def _account(self, steps: int) -> None:
        """Count the run's first `steps` steps, those already counted left out."""
        new = steps - self._accounted
        if new <= 0:
            return
        seconds = self._stretch.seconds(steps) - self._stretch.seconds(self._accounted)
        self.decode_seconds += seconds
        self.busy_seconds += seconds
        self.decode_steps += new
        self.decode_batch += self._batch * new
        middle = self._accounted + (new - 1) / 2
        self.decode_resident += int((self._resident + self._batch * middle) * new)
        self.generated += self._batch * new
        self._listener.gaps.add(seconds / new, self._batch * new)
        self._accounted = steps

    def _end(self, now: float) -> None:
        if not self._busy:
            return
        steps = self._steps
        # Still busy: what the listener submits below must not begin a step before this one is wholly taken in.
        self._steps = 1
        if self._chunks:
            seconds = now - self._start
            self.busy_seconds += seconds
            if self._batch:
                self.generated += self._batch
                self._listener.gaps.add(seconds, self._batch)
                self._slow += seconds > self.slow_gap
            tokens = sum(size for _, size, _, _ in self._chunks)
            self.prefill_tokens += tokens
            if not self._batch:
                self.prefilled_tokens += tokens
                self.prefill_seconds += seconds
        else:
            self._account(steps)
            self._slow += self._stretch.longer(steps, self.slow_gap)
        self._accounted = 0
        self._step += steps
        self._resident += self._batch * steps
        while self._decodes and self._decodes[0][0] <= self._step:
            job = heapq.heappop(self._decodes)[2]
            self._batch -= 1
            self._resident -= job.prompt + job.output
            self._finish(job, now)
        chunks, self._chunks = self._chunks, []
        for job, size, _, last in chunks:
            self._queued -= size
            job.left -= size
            if last:
                self._prompt_done(job, now)
        self._busy = False

    def _prompt_done(self, job: Job, now: float) -> None:
        self._prompts.remove(job)
        self._prompt_tokens -= job.known + self._half_block
        held = job.number in self._hold
        job.generated += 1
        if job.first < 0:
            job.first = now
        elif job.spoke >= 0:
            # Handed on: its pause ends with this token.
            self.generated += 1
            self._listener.gaps.add(now - job.spoke, 1)
            job.slow_gaps += now - job.spoke > self.slow_gap
            job.spoke = now
        if job.generated >= job.output:
            self._hold.discard(job.number)
            job.last = now
            self._listener.finished(self, job, now)
        elif held:
            self._hold.discard(job.number)
            self._held += 1
            self._held_tokens += job.prompt + self._half_block
            self._listener.prefilled(self, job, now)
        else:
            self._joining.append(job)

    def _finish(self, job: Job, now: float) -> None:
        job.generated = job.output
        job.last = now
        job.slow_gaps += self._slow - job.slow_mark
        self._listener.finished(self, job, now)

    def _begin(self, now: float) -> None:
        joined = self._joining
        for job in joined:
            job.finish_step = self._step + job.output - job.generated
            job.slow_mark = self._slow
            heapq.heappush(self._decodes, (job.finish_step, job.order, job))
            self._batch += 1
            self._resident += job.known
        self._joining = []
        while self._batch and self._used() + self._batch > self._capacity and self._preempt(now):
            pass
        self._admit(now)
        chunks = self._chunks
        if chunks:
            duration = self.model.step_seconds([(n, p) for _, n, p, _ in chunks], self._batch, self._resident)
            self._steps = 1
        elif self._batch:
            self._stretch = Stretch(self.model, self._batch, self._resident)
            steps = self._decodes[0][0] - self._step
            room = (self._capacity - self._used()) // self._batch
            steps = steps if steps < room else room
            self._steps = steps if steps > 1 else 1
            duration = 0.0
        else:
            return
        self._busy = True
        self._start = now
        if joined:
            first = duration if chunks else self._stretch.seconds(1)
            for job in joined:
                gap = now + first - (job.spoke if job.spoke >= 0 else job.first)
                if gap > first + 1e-9:
                    self._listener.gaps.add(gap, 1)
                if gap > self.slow_gap >= first:
                    job.slow_gaps += 1
        self._listener.wake(self, now + (duration if chunks else self._stretch.seconds(self._steps)))

    def _used(self) -> int:
        decoding = self._resident + self._half_block * self._batch
        return decoding + self._pulling_tokens + self._prompt_tokens + self._held_tokens

    def _preempt(self, now: float) -> bool:
        """The youngest decode loses its KV and computes it again here; False when it is the only one."""
        if self._batch < 2:
            return False
        at = max(range(len(self._decodes)), key=lambda i: self._decodes[i][1])
        finish, _, job = self._decodes[at]
        self._decodes[at] = self._decodes[-1]
        self._decodes.pop()
        heapq.heapify(self._decodes)
        job.generated = job.output - (finish - self._step)
        job.slow_gaps += self._slow - job.slow_mark
        self._batch -= 1
        self._resident -= job.known
        job.left = job.known
        if job.spoke >= 0:
            job.spoke = now
        self._queued += job.left
        waiting = [*self._waiting, job]
        waiting.sort(key=lambda other: other.order)
        self._waiting = deque(waiting)
        self._preemptions += 1
        return True

    def _admit(self, now: float) -> None:
        shape = self.shape
        budget: int | None = None
        for job in self._prompts:
            budget = self._budget(job) if budget is None else budget
            budget -= self._chunk(job, budget)
            if budget <= 0:
                break
        used = self._used()
        running = self._batch + len(self._prompts)
        while self._waiting:
            job = self._waiting[0]
            if running + len(self._pulling) + len(self._joining) >= shape.max_running:
                break
            if not job.pull:
                budget = self._budget(job) if budget is None else budget
                if budget <= 0:
                    break
            elif len(self._pulling) >= shape.max_pulls:
                break
            need = job.known + self._half_block
            headroom = self._capacity // 100 if running else 0
            if used + need > self._capacity - headroom:
                break
            if job.pull and self._pulling_tokens and self._pulling_tokens + need > self._capacity // 2:
                break
            self._waiting.popleft()
            used += need
            if job.pull:
                self._pulls_waiting -= 1
                self._pulling[job.number] = job
                self._pulling_tokens += need
                self._listener.pulls(self, job, now)
            else:
                running += 1
                self._prompts.append(job)
                self._prompt_tokens += need
                assert budget is not None
                budget -= self._chunk(job, budget)

    def _budget(self, first: Job) -> int:
        if not self._batch:
            return self.shape.max_batched_tokens
        chunk = mixed_chunk(
            self.model, self._batch, self._resident, first.known - first.left, self.shape.mixed_step_seconds
        )
        return min(chunk, self.shape.max_batched_tokens - self._batch)

    def _chunk(self, job: Job, budget: int) -> int:
        size = min(job.left, budget)
        if size > 0:
            self._chunks.append((job, size, job.known - job.left, size == job.left))
        return max(size, 0)

    # What the worker reports.

    @property
    def preemptions(self) -> int:
        return self._preemptions

    @property
    def queued_tokens(self) -> int:
        return self._queued

    @property
    def in_flight(self) -> int:
        joining = len(self._joining) + len(self._pulling)
        return self._batch + joining + len(self._prompts) + len(self._waiting) + self._held

    @property
    def decoding(self) -> int:
        return self._batch + len(self._joining) + len(self._pulling)

    @property
    def waiting_pulls(self) -> int:
        return self._pulls_waiting

    @property
    def resident_tokens(self) -> int:
        return self._resident + self._batch * self._accounted

    @property
    def free_tokens(self) -> int:
        free = self._capacity - self._used() - self._batch * self._accounted
        return free if free > 0 else 0
