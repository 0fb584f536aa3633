"""Which worker a replayed request goes to: the router's own choice, plus the gear of convertible decoders.

The router's snapshots are 200 ms old at most and count what was sent since; here they are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forebay_engine.perf import PerfModel
from forebay_operator.api.labels import Pool
from forebay_operator.replay.worker import Worker, WorkerShape, mixed_chunk
from forebay_router.choice import Candidate, Health, pick_any, pick_decode, pick_prefill

QUEUE_SHARE = 0.7
"""Of the TTFT objective: a prompt that would wait longer in the prefill pool may go to a decoder. The rest covers
bursts that arrive before it is computed."""

STEP_SHARE = 0.6
"""Of the TPOT objective: a decoder with slower steps takes no prompt. Its mixed steps take up to 0.9 of it, so this is
what its mean gap can afford."""


@dataclass(frozen=True, slots=True)
class Routing:
    model: PerfModel
    shape: WorkerShape
    ttft_seconds: float
    tpot_seconds: float
    convertible: bool

    def candidate(self, worker: Worker, role: Pool | None, velocity: float) -> Candidate:
        block = self.shape.block_size
        return Candidate(
            name=str(worker.index),
            engine_id="",
            role=role,
            health=Health.READY,
            queued_tokens=worker.queued_tokens,
            velocity=velocity,
            running=worker.in_flight,
            max_running=self.shape.max_running,
            resident_tokens=worker.resident_tokens,
            free_blocks=worker.free_tokens // block,
            total_blocks=self.model.kv_capacity_tokens // block,
            block_size=block,
        )

    def prefill(
        self, prefills: Sequence[Worker], decodes: Sequence[Worker], prompt: int, velocity: float, turn: int
    ) -> tuple[int, bool] | None:
        """(worker, whether its KV is handed to a decoder afterwards); None: no worker serves."""
        ahead = [self.candidate(w, "prefill", velocity) for w in prefills]
        best = pick_prefill(ahead, prompt, turn)
        if best is None:
            other = pick_any([self.candidate(w, "decode", velocity) for w in decodes], prompt, turn, mixed=True)
            return (int(other.name), False) if other is not None else None
        if not decodes:
            return int(best.name), False
        if self.convertible:
            seconds = (best.queued_tokens + prompt) / velocity
            if seconds > QUEUE_SHARE * self.ttft_seconds:
                other = self._convertible(decodes, prompt, velocity, seconds, turn)
                if other is not None:
                    return int(other.name), False
        return int(best.name), True

    def _convertible(
        self, decodes: Sequence[Worker], prompt: int, velocity: float, limit: float, turn: int
    ) -> Candidate | None:
        """The decoder with TPOT head-room that computes the prompt soonest, if sooner than `limit` seconds."""
        able = []
        for worker in decodes:
            batch = worker.decoding + worker.waiting_pulls
            step = self.model.decode_seconds(batch, worker.resident_tokens)
            if step >= STEP_SHARE * self.tpot_seconds or worker.free_tokens < prompt:
                continue
            able.append(self.candidate(worker, "decode", velocity * self._slowdown(batch, worker.resident_tokens)))
        best = pick_prefill(able, prompt, turn)
        if best is None or (best.queued_tokens + prompt) / best.velocity >= limit:
            return None
        return best

    def _slowdown(self, batch: int, resident: int) -> float:
        """Prefill velocity beside `batch` decodes over that of a worker that only computes prompts."""
        if not batch:
            return 1.0
        limit = self.shape.mixed_step_seconds
        alone = self.shape.max_batched_tokens
        chunk = min(mixed_chunk(self.model, batch, resident, 0, limit), max(1, alone - batch))
        mixed = self.model.step_seconds([(chunk, 0)], batch, resident)
        return min(1.0, chunk / mixed * self.model.prefill_seconds(alone) / alone)

    def decode(self, workers: Sequence[Worker], tokens: int, turn: int) -> int | None:
        picked = pick_decode([self.candidate(w, "decode", 1.0) for w in workers], tokens, turn)
        return int(picked.name) if picked is not None else None
