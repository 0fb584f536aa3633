"""How a request went: its metrics, and its one line in the log."""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web

from forebay_engine.server.http import STATE
from forebay_engine.server.job import Job
from forebay_engine.server.metrics import METRICS
from forebay_engine.server.reply import Reply
from forebay_wire.errors import ApiError

log = logging.getLogger(__name__)


class Outcome:
    """Measures a request while it runs, and says in one log line how it went: never what was asked or answered."""

    def __init__(self, request: web.Request, job: Job, reply: Reply) -> None:
        self._state = request.app[STATE]
        self._metrics = request.app[METRICS]
        self._job = job
        self._reply = reply
        self._first: float | None = None
        self.code = 200

    def token(self) -> None:
        if self._first is None:
            self._first = self._state.monotonic()
            self._metrics.first_token(self._job.role, self._first - self._job.began)
            if self._job.plan.choices == 1:
                self._state.prefixes.add(self._job.beginnings.entries(self._job.plan.prompt_tokens))

    def __enter__(self) -> Outcome:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ApiError):
            self.code = error.status
        elif isinstance(error, (asyncio.CancelledError, ConnectionError)):
            self.code = 499  # the client left; nginx's number for it
        elif error is not None:
            self.code = 500
        seconds = self._state.monotonic() - self._job.began
        self._metrics.request(self._job.role, self.code, seconds)
        first = f"{(self._first - self._job.began) * 1e3:.0f}" if self._first is not None else "-"
        log.info(
            "request id=%s role=%s code=%d prompt_tokens=%d cached_tokens=%d completion_tokens=%d first_ms=%s ms=%.0f",
            self._job.leg_id,
            self._job.role,
            self.code,
            self._job.plan.prompt_tokens,
            self._reply.cached_tokens,
            self._reply.completion_tokens,
            first,
            seconds * 1e3,
        )
