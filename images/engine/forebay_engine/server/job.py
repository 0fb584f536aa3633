"""One request on its way through the server: what was asked, in which role, and what the core is asked for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from forebay_engine.core.handle import CoreInfo
from forebay_engine.server.plan import Plan
from forebay_engine.server.state import WorkerState
from forebay_engine.types import EngineRequest, PullSource
from forebay_wire.prefix import NOTHING, Beginnings
from forebay_wire.transfer import TokenLogprob


@dataclass
class Job:
    """One validated request and the role it is run in."""

    role: str
    """plain | prefill | decode | continue."""

    plan: Plan
    leg_id: str
    """Leases and reservations go by it."""

    created: int
    info: CoreInfo
    began: float
    """Monotonic."""

    comments: bool
    """Token ids go before the chunks (wire/stream.py)."""

    secret: bytes = b""
    pull: PullSource | None = None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    delivered: bool = False
    """The client's chunks cover `output_ids` already."""

    cached_tokens: int | None = None
    beginnings: Beginnings = NOTHING
    """Of the prompt."""

    step_seconds: float = 0.0
    wait_seconds: float = 0.0
    """What the router asks for; 0: nothing."""

    def requests(self, state: WorkerState) -> list[EngineRequest]:
        wait = self.wait_seconds if self.role in ("plain", "prefill") else 0.0
        return [
            msgspec.structs.replace(request, step_seconds=self.step_seconds, wait_seconds=wait)
            for request in self._requests(state)
        ]

    def _requests(self, state: WorkerState) -> list[EngineRequest]:
        if self.role in ("prefill", "decode"):
            # The lease and the reservation go by this very id.
            return [
                msgspec.structs.replace(
                    self.plan.engine_request(0, self.leg_id),
                    hold=self.role == "prefill",
                    pull=self.pull,
                    output_ids=list(self.output_ids),
                )
            ]
        requests = [self.plan.engine_request(i, state.fresh_id(self.leg_id)) for i in range(self.plan.choices)]
        if self.output_ids:
            requests[0].output_ids = list(self.output_ids)
        return requests
