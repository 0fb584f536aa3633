"""Which worker a replayed request goes to: the router's own choice, its gear of convertible decoders included.

The router's snapshots are 200 ms old at most and count what was sent since; here they are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from forebay_engine.perf import PerfModel
from forebay_operator.api.labels import Pool
from forebay_operator.replay.worker import Worker, WorkerShape, mixed_chunk
from forebay_router import gear
from forebay_router.candidate import Candidate, Health
from forebay_router.choice import pick_any, pick_decode, pick_prefill

_READY: Final = Health.READY


@dataclass(frozen=True, slots=True)
class Routing:
    model: PerfModel
    shape: WorkerShape
    ttft_seconds: float
    tpot_seconds: float
    convertible: bool
    refusal_factor: float = 0.0

    def candidate(
        self,
        worker: Worker,
        role: Pool | None,
        velocity: float,
        decoding: int = 0,
        waiting_pulls: int = 0,
        step_seconds: float = 0.0,
        mixed_velocity: float = 0.0,
    ) -> Candidate:
        block = self.shape.block_size
        # By position, which takes half the time: two of each worker are made for every request of a replay.
        return Candidate(
            worker.name,
            "",
            role,
            _READY,
            "",
            worker.queued_tokens,
            velocity,
            worker.in_flight,
            self.shape.max_running,
            worker.resident_tokens,
            worker.free_tokens // block,
            self.model.kv_capacity_tokens // block,
            block,
            decoding,
            waiting_pulls,
            step_seconds,
            mixed_velocity,
        )

    def prefill(
        self, prefills: Sequence[Worker], decodes: Sequence[Worker], prompt: int, velocity: float, turn: int
    ) -> tuple[int, bool] | None:
        """(worker, whether its KV is handed to a decoder afterwards); None: refused, or no worker serves."""
        ahead = [self._prefiller(w, velocity) for w in prefills]
        if ahead and decodes and (self.convertible or self.refusal_factor):
            return self._place(ahead, decodes, prompt, velocity, turn)
        best = pick_prefill(ahead, prompt, turn)
        if best is None:
            other = pick_any([self.candidate(w, "decode", velocity) for w in decodes], prompt, turn, mixed=True)
            return (int(other.name), False) if other is not None else None
        return int(best.name), bool(decodes)

    def _place(
        self, ahead: list[Candidate], decodes: Sequence[Worker], prompt: int, velocity: float, turn: int
    ) -> tuple[int, bool] | None:
        behind = [self._decoder(worker, velocity) for worker in decodes]
        policy = gear.Policy(
            self.ttft_seconds,
            self.tpot_seconds,
            convertible="always" if self.convertible else "never",
            refusal_factor=self.refusal_factor,
        )
        handoff = self.model.handoff_seconds(prompt)
        placed = gear.place([*ahead, *behind], prompt, policy, handoff_seconds=handoff, turn=turn)
        if isinstance(placed, gear.Together):
            return int(placed.worker.name), False
        if isinstance(placed, gear.Refused):
            return None
        assert isinstance(placed, gear.Split)
        return int(placed.pair.prefill.name), True

    def _prefiller(self, worker: Worker, velocity: float) -> Candidate:
        """One that has just changed roles still decodes what it had, and prompts get what its mixed steps leave."""
        batch = worker.decoding
        mixed = self._mixed(batch, worker.resident_tokens, velocity) if batch else 0.0
        return self.candidate(worker, "prefill", velocity, batch, mixed_velocity=mixed)

    def _decoder(self, worker: Worker, velocity: float) -> Candidate:
        """With what the engine measures of its steps: what joins the batch next counts already."""
        pulls, resident = worker.waiting_pulls, worker.resident_tokens
        batch = worker.decoding + pulls
        step = self.model.decode_seconds(batch, resident)
        return self.candidate(worker, "decode", velocity, batch, pulls, step, self._mixed(batch, resident, velocity))

    def _mixed(self, batch: int, resident: int, velocity: float) -> float:
        """Prompt tokens a second beside `batch` decodes: `velocity`, that of a worker without decodes, at most."""
        if not batch:
            return velocity
        most = max(1, self.shape.max_batched_tokens - batch)
        chunk = min(most, mixed_chunk(self.model, batch, resident, 0, self.shape.mixed_step_seconds))
        return min(velocity, chunk / self.model.step_seconds(((chunk, 0),), batch, resident))

    def decode(self, workers: Sequence[Worker], tokens: int, turn: int) -> int | None:
        picked = pick_decode([self.candidate(w, "decode", 1.0) for w in workers], tokens, turn)
        return int(picked.name) if picked is not None else None
