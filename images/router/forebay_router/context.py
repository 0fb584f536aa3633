"""What all requests of one router share."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from forebay_router import gear
from forebay_router.candidate import Candidate
from forebay_router.legs import ClientCall
from forebay_router.metrics import RouterMetrics
from forebay_router.settings import RouterSettings
from forebay_router.upstream import WorkerClient, WorkerFailed
from forebay_router.watchdog import Watchdog
from forebay_router.workers import Worker, Workers
from forebay_wire import paths
from forebay_wire.messages import CancelRequest

log = logging.getLogger(__name__)

CONTROL_SECONDS = 2.0
"""For a release or cancellation; when it fails, the worker's own time limits free what was held."""

SMALL_REPLY = 64 * 1024
MAX_SHARED_ID = 96
"""Characters of the client's id that workers see: the whole is at most 128."""

_BYTES_PER_TOKEN = 4.0


class TokenEstimate:
    """Prompt tokens from prompt bytes: the ratio seen lately (exponential mean), 4 bytes a token to begin with.

    The first answers count more: a queue of prompts misjudged by half would be a wrong prediction of every wait.
    """

    def __init__(self) -> None:
        self._bytes_per_token = _BYTES_PER_TOKEN
        self._learnt = 0

    def tokens(self, call: ClientCall) -> int:
        size, is_tokens = call.prompt_size()
        return max(1, size if is_tokens else round(size / self._bytes_per_token))

    def learn(self, call: ClientCall, tokens: int) -> None:
        size, is_tokens = call.prompt_size()
        if not is_tokens and tokens > 0:
            observed = min(16.0, max(0.25, size / tokens))
            self._learnt += 1
            self._bytes_per_token += max(0.1, 1 / self._learnt) * (observed - self._bytes_per_token)


class Mean:
    """Exponential mean of what was seen lately; 0 before anything was."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, value: float) -> None:
        self.value = value if not self.value else self.value + 0.1 * (value - self.value)


class Context:
    def __init__(
        self,
        settings: RouterSettings,
        workers: Workers,
        client: WorkerClient,
        watchdog: Watchdog,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.settings = settings
        self.workers = workers
        self.client = client
        self.watchdog = watchdog
        self.metrics = metrics
        self.clock = clock
        self.rng = rng
        self.estimate = TokenEstimate()
        self.policy = gear.Policy(
            settings.ttft_objective, settings.tpot_objective, settings.convertible, settings.refusal_factor
        )
        self.handoff_seconds = Mean()
        """From the decode leg's sending to its first token."""

        self.answer_tokens = Mean()
        self._turn = 0
        self._background: set[asyncio.Task[Any]] = set()
        self._legs = 0
        # Not of `rng`: two routers may be seeded alike.
        self._salt = secrets.token_hex(5)

    def turn(self) -> int:
        """Counts up with each request, so that equally good workers take turns."""
        self._turn += 1
        return self._turn

    def candidates(self, call: ClientCall, role: str | None = None) -> list[Candidate]:
        """All workers as of now, or those in `role`, for that request's prompt."""
        return self.workers.candidates(call.beginnings.names if self.settings.prefix_routing else (), role)

    def worker(self, candidate: Candidate) -> Worker:
        return self.workers[candidate.name]

    def failed(self, error: WorkerFailed) -> None:
        """Mark a worker whose connection broke, so that the next request does not walk into it."""
        if error.reason in ("refused", "connect_timeout"):
            error.worker.on_failure(refused=True)
        elif error.reason == "reset":
            error.worker.on_failure(refused=False)

    def leg_id(self, request_id: str) -> str:
        """What workers know a request by: the client's id and a part that no other request has, at any router. Leases
        and slots go by it, so what ends one try of a request must not hit another try of the same id.
        """
        self._legs += 1
        return f"{request_id[:MAX_SHARED_ID]}.{self._salt}-{self._legs}"

    def background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run clean-up that must not be cut short by the request it belongs to (its client may be gone)."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def settle(self) -> None:
        """Wait for the clean-up under way; each piece has its own time limit."""
        await asyncio.gather(*self._background, return_exceptions=True)

    async def release(self, worker: Worker, request_id: str, extra: Mapping[str, str]) -> None:
        """Give a decode slot back."""
        await self._control(worker, paths.RELEASE, request_id, extra)

    async def cancel_lease(self, worker: Worker, request_id: str, extra: Mapping[str, str]) -> None:
        """Have a prefill worker free what it holds for a request; a prefill still running there is aborted."""
        await self._control(worker, paths.LEASE_CANCEL, request_id, extra)

    async def _control(self, worker: Worker, path: str, request_id: str, extra: Mapping[str, str]) -> None:
        body = msgspec.json.encode(CancelRequest(request_id=request_id))
        try:
            async with asyncio.timeout(CONTROL_SECONDS):
                reply = await self.client.post(worker, path, body, extra, limit=SMALL_REPLY, counted=False)
            if reply.status >= 300:
                log.warning("request %s: %s at worker %s answered %d", request_id, path, worker.name, reply.status)
        except (WorkerFailed, TimeoutError) as error:
            log.info("request %s: %s at worker %s: %s", request_id, path, worker.name, error or "no answer in time")
