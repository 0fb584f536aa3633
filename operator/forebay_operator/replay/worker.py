"""What the exact and the fast worker share: limits, callbacks, and the chunk that fits beside decodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from forebay_engine.perf import PerfModel
from forebay_operator.replay.job import Job
from forebay_router import gear

MIXED_SHARE = gear.MIXED_SHARE

MIN_CHUNK = 16


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """Limits of one worker, named as in the engine's settings."""

    max_running: int = 256
    max_waiting: int = 1024
    max_batched_tokens: int = 2048
    max_pulls: int = 8
    block_size: int = 16
    mixed_step_seconds: float = math.inf
    """A step with decodes in it computes only as many prompt tokens as fit this time."""


class Gaps:
    """Times between tokens, in buckets 2 % wide, over all requests."""

    PER_BUCKET = 1 / math.log(1.02)

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def add(self, seconds: float, count: int) -> None:
        bucket = round(math.log(seconds if seconds > 1e-6 else 1e-6) * self.PER_BUCKET)
        self.counts[bucket] = self.counts.get(bucket, 0) + count

    def percentile(self, share: float) -> float:
        """Nearest rank, seconds; 0 without any."""
        rank = share * sum(self.counts.values())
        for bucket in sorted(self.counts):
            rank -= self.counts[bucket]
            if rank <= 0:
                return math.exp(bucket / self.PER_BUCKET)
        return 0.0


class Listener(Protocol):
    """What a worker tells the cluster."""

    gaps: Gaps

    def wake(self, worker: Worker, at: float) -> None:
        """Call boundary() at `at`, and forget any earlier wish of this worker."""

    def prefilled(self, worker: Worker, job: Job, now: float) -> None:
        """Its prompt is computed and its first token out; its KV waits here for a pull, until release()."""

    def pulls(self, worker: Worker, job: Job, now: float) -> None:
        """Start reading its KV; pulled() when that has ended."""

    def finished(self, worker: Worker, job: Job, now: float) -> None: ...


class Worker(Protocol):
    """A worker that steps in virtual time. Every method takes the time; none may be called with an earlier one."""

    index: int
    name: str

    def submit(self, job: Job, now: float, *, hold: bool, placed: bool = False) -> bool:
        """A prompt to compute; with `hold` its decode runs elsewhere. False: the waiting line is full (a 429).

        Of an answer that has begun elsewhere, its tokens too. `placed`: it was taken in already, and has its place.
        """

    def submit_pull(self, job: Job, now: float) -> None:
        """A decode leg whose KV is held by another worker."""

    def pulled(self, job: Job, now: float) -> None: ...

    def pull_lost(self, job: Job, now: float) -> None:
        """Instead of pulled(): its KV is gone, and its prompt is computed here."""

    def evict(self, now: float) -> list[Job]:
        """End at once: every request leaves with the tokens that it has, and all KV is freed. In order of their coming.

        The step under way is lost, and the caller forgets its end.
        """

    def release(self, job: Job, now: float) -> None:
        """The KV that was held here for `job` has been read."""

    def boundary(self, now: float) -> None:
        """The step under way has ended."""

    def settle(self, now: float) -> None:
        """Bring the counters below up to `now`."""

    @property
    def queued_tokens(self) -> int: ...

    @property
    def in_flight(self) -> int:
        """Requests running, waiting or pulling, and KV held for others."""

    @property
    def decoding(self) -> int: ...

    @property
    def waiting_pulls(self) -> int: ...

    @property
    def resident_tokens(self) -> int: ...

    @property
    def free_tokens(self) -> int: ...

    generated: int
    """Tokens made by decode steps."""

    prefill_tokens: int
    prefill_seconds: float
    """Busy with steps that computed prompt tokens and nothing else."""

    prefilled_tokens: int
    """Of those steps alone: the measured velocity is prefilled_tokens / prefill_seconds."""

    busy_seconds: float
    decode_seconds: float
    """Busy with pure decode steps; with `decode_steps`, `decode_batch` (sum of batches) and `decode_resident` (sum of
    resident tokens) the observation of a step's cost."""

    decode_steps: int
    decode_batch: int
    decode_resident: int

    @property
    def preemptions(self) -> int: ...


class WorkerBase:
    """What both workers are made of, and their counters."""

    def __init__(self, index: int, model: PerfModel, shape: WorkerShape, slow_gap: float, listener: Listener) -> None:
        """`slow_gap`: gaps between tokens longer than this many seconds are counted per request."""
        self.index = index
        self.name = str(index)
        self.model = model
        self.shape = shape
        self.slow_gap = slow_gap
        self._listener = listener
        self.generated = 0
        self.prefill_tokens = 0
        self.prefilled_tokens = 0
        self.prefill_seconds = 0.0
        self.busy_seconds = 0.0
        self.decode_seconds = 0.0
        self.decode_steps = 0
        self.decode_batch = 0
        self.decode_resident = 0


def mixed_chunk(model: PerfModel, batch: int, resident: int, context: int, seconds: float) -> int:
    """Prompt tokens that fit a step of `seconds` beside `batch` decodes: the perf model's compute term, solved for n.

    `context` is how many tokens the prompt has computed already. At least MIN_CHUNK, or a prompt would never end.
    """
    if math.isinf(seconds):
        return 1 << 30
    fixed = model.overhead_seconds + model.prefill_overhead_seconds
    memory = model.weights_seconds + model.sequence_seconds * batch + model.resident_seconds * (resident + context)
    if fixed + memory > seconds:
        return MIN_CHUNK
    left = seconds - fixed - model.token_seconds * batch
    # token * n + attention * (n * context + n^2 / 2) = left
    linear = model.token_seconds + model.attention_seconds * context
    if model.attention_seconds > 0:
        root = math.sqrt(linear * linear + 2 * model.attention_seconds * max(left, 0.0))
        chunk = (root - linear) / model.attention_seconds
    else:
        chunk = left / linear if linear > 0 else 1 << 30
    return max(MIN_CHUNK, int(chunk))
