"""The router's routes. A dict lookup by method and path; everything of a request beyond HTTP is in request.py."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from typing import Any

import msgspec
from aiohttp import web

from forebay_router import choice, legs, metrics, trust
from forebay_router.candidate import Health
from forebay_router.client_side import ClientGone
from forebay_router.context import Context
from forebay_router.discovery import Discovery, View
from forebay_router.metrics import RouterMetrics
from forebay_router.request import Exchange
from forebay_router.server import BodyRoom, Handler, HttpClientSide, Take, read_body
from forebay_router.settings import RouterSettings
from forebay_router.upstream import WorkerClient
from forebay_router.watchdog import Watchdog
from forebay_router.workers import Worker, Workers
from forebay_wire import VERSION, headers, paths
from forebay_wire.errors import ApiError

log = logging.getLogger(__name__)

MEET_PERIOD_SECONDS = 0.01

_JSON = "application/json"
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class Router:
    """One router: its view of the workers, and the handlers. Made and closed on the event loop."""

    def __init__(self, settings: RouterSettings, discovery: Discovery, rng: random.Random | None = None) -> None:
        clock = asyncio.get_running_loop().time
        self._settings = settings
        self._discovery = discovery
        self._clock = clock
        self._client = WorkerClient(settings.name, settings.token, settings.connect_timeout)
        self.workers = Workers(
            lambda worker: asyncio.ensure_future(self._client.follow_load(worker)),
            clock,
            suspect_after=settings.suspect_after,
            wedged_after=settings.handoff_timeout,
        )
        self.metrics = RouterMetrics(settings.ttft_objective, settings.tpot_objective)
        self._watchdog = Watchdog(clock, settings.suspect_stall)
        self._ctx = Context(
            settings, self.workers, self._client, self._watchdog, self.metrics, clock, rng or random.Random()
        )
        self._keys = trust.ApiKeys(settings.api_keys)
        self._registry = metrics.exporter(self.metrics)
        self._draining = False
        self._bodies = BodyRoom(settings.max_bodies)
        self._discovering: asyncio.Task[None] | None = None
        self._listed = False
        """Discovery has said which workers there are."""

        self._routes: dict[tuple[str, str], Handler] = {
            ("POST", paths.CHAT): self._generate,
            ("POST", paths.COMPLETIONS): self._generate,
            ("GET", paths.MODELS): self._models,
            ("GET", paths.HEALTH): self._health,
            ("GET", paths.READY): self._ready,
            ("GET", paths.METRICS): self._metrics,
            ("GET", paths.LOAD): self._load,
        }

    def start(self) -> None:
        self._discovering = asyncio.ensure_future(self._discovery.run(self._apply))

    def _apply(self, view: View) -> None:
        self._listed = True
        self.workers.apply(view)

    async def meet_workers(self, seconds: float) -> None:
        """Wait until a pair can serve or every worker was heard, by `seconds` at latest.

        A router that took requests before would answer 503 for a moment after each start.
        """
        deadline = self._clock() + seconds
        while not self._met() and self._clock() < deadline:  # noqa: ASYNC110 (several things may tell)
            await asyncio.sleep(MEET_PERIOD_SECONDS)

    def _met(self) -> bool:
        if not self._listed:
            return False
        ready = [c for c in self.workers.candidates() if c.health == Health.READY]
        if isinstance(choice.pick_pair(ready, 1), choice.Pair):
            return True
        now = self._clock()
        return all(worker.health(now) is not Health.UNKNOWN for worker in self.workers)

    async def close(self) -> None:
        if self._discovering is not None:
            self._discovering.cancel()
            await asyncio.gather(self._discovering, return_exceptions=True)
        await self._ctx.settle()
        await self.workers.close()
        self._watchdog.close()
        await self._client.close()

    def drain(self) -> None:
        """/ready turns false; running requests go on."""
        self._draining = True

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        handler = self._routes.get((request.method, request.path))
        if handler is None and request.method == "GET" and request.path.startswith(f"{paths.MODELS}/"):
            handler = self._model
        try:
            if handler is None:
                raise self._unknown(request)
            return await handler(request)
        except ApiError as error:
            return _error(error)

    def _unknown(self, request: web.BaseRequest) -> ApiError:
        allowed = sorted(method for method, path in self._routes if path == request.path)
        if allowed:
            return ApiError(405, f"{request.path} takes {', '.join(allowed)} only")
        return ApiError(404, f"no such path; this router serves {', '.join(sorted({p for _, p in self._routes}))}")

    # The OpenAI API

    async def _generate(self, request: web.BaseRequest) -> web.StreamResponse:
        request_id = trust.request_id(request.headers.get(headers.REQUEST_ID))
        with self._bodies.hold() as take:
            return await self._answer(request, request_id, take)

    async def _answer(self, request: web.BaseRequest, request_id: str, take: Take) -> web.StreamResponse:
        try:
            exchange, client = await self._admit(request, request_id, take)
        except ApiError as error:
            if self.metrics.finished(self._clock(), request.path, error.status, None, None):
                # No worker has seen it: what is full, or does not know enough workers, is this router.
                self.metrics.missed_in["router"] += 1
            return _error(error, {headers.REQUEST_ID: request_id})
        except asyncio.CancelledError:
            self.metrics.finished(self._clock(), request.path, 499, None, None)
            raise
        self.metrics.in_flight += 1
        try:
            await exchange.run()
        except ClientGone:
            client.abort()
        finally:
            self.metrics.in_flight -= 1
        return client.response

    async def _admit(self, request: web.BaseRequest, request_id: str, take: Take) -> tuple[Exchange, HttpClientSide]:
        """What the router itself judges; everything else is the worker's to refuse."""
        settings = self._settings
        self._authorize(request)
        if self.metrics.in_flight >= settings.max_in_flight:
            raise ApiError(
                503, f"{settings.max_in_flight} requests are being served already; try again later", retry_after=1.0
            )
        body = await read_body(request, settings, take)
        received = self._clock()
        call = legs.parse(request.path, body, self._ctx.rng)
        self._check_model(call.model)
        client = HttpClientSide(request, settings.write_timeout)
        exchange = Exchange(
            self._ctx,
            client,
            call,
            request_id=request_id,
            traceparent=trust.traceparent(request.headers.get(headers.TRACEPARENT)),
            received=received,
        )
        return exchange, client

    def _authorize(self, request: web.BaseRequest) -> None:
        if not self._keys.allows(request.headers.get(headers.AUTHORIZATION)):
            raise ApiError(401, "no valid API key; send Authorization: Bearer KEY", code="invalid_api_key")

    def _served(self) -> list[str]:
        if self._settings.served_name is not None:
            return [self._settings.served_name]
        return sorted({w.report.model for w in self.workers if w.report is not None and w.report.model})

    def _check_model(self, model: str | None) -> None:
        served = self._served()
        if model is not None and served and model not in served:
            raise ApiError(
                404,
                f"the model {model!r:.200} is not served here; there is {', '.join(served)}",
                param="model",
                code="model_not_found",
            )

    async def _models(self, request: web.BaseRequest) -> web.StreamResponse:
        self._authorize(request)
        return _json({"object": "list", "data": [self._described(name) for name in self._served()]})

    async def _model(self, request: web.BaseRequest) -> web.StreamResponse:
        """GET /v1/models/ID; an id may hold slashes."""
        self._authorize(request)
        name = request.path.removeprefix(f"{paths.MODELS}/")
        if name not in (served := self._served()):
            there = ", ".join(served) or "none yet: the workers are loading, wait"
            raise ApiError(404, f"the model {name!r:.200} is not served here; there is {there}", code="model_not_found")
        return _json(self._described(name))

    def _described(self, name: str) -> dict[str, Any]:
        reports = [w.report for w in self.workers if w.report is not None and w.report.model == name]
        lengths = [report.max_model_len for report in reports if report.max_model_len > 0]  # 0: it is loading
        entry = {"id": name, "object": "model", "created": 0, "owned_by": "forebay"}
        return {**entry, "max_model_len": min(lengths)} if lengths else entry

    # Probes and figures

    async def _health(self, _: web.BaseRequest) -> web.StreamResponse:
        return _json({"status": "ok", "version": VERSION})

    async def _ready(self, _: web.BaseRequest) -> web.StreamResponse:
        ready, reason = self.readiness()
        return _json({"ready": ready, "reason": reason}, 200 if ready else 503)

    def readiness(self) -> tuple[bool, str]:
        """Whether some combination of workers can serve a request now, and why (not)."""
        if self._draining:
            return False, "shutting down"
        candidates = [c for c in self.workers.candidates() if c.health == Health.READY]
        pair = choice.pick_pair(candidates, 1)
        if isinstance(pair, choice.Pair):
            return True, "a prefill and a decode worker are ready"
        if self._settings.both_phases and candidates:
            return True, f"degraded ({pair.kind}): {len(candidates)} workers serve both phases"
        states = ", ".join(f"{w.name} {w.health(self._clock()).name.lower()}" for w in self.workers)
        return False, f"{pair.kind}; workers: {states[:1000] or 'none listed'}"

    async def _metrics(self, _: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=metrics.text(self._registry), headers={"content-type": _PROMETHEUS})

    async def _load(self, _: web.BaseRequest) -> web.StreamResponse:
        now = self._clock()
        ready, reason = self.readiness()
        return _json(
            {
                "name": self._settings.name,
                "ready": ready,
                "reason": reason,
                **self.metrics.as_json(now),
                "workers": [_worker_json(worker, now) for worker in self.workers],
            }
        )


def _worker_json(worker: Worker, now: float) -> dict[str, Any]:
    requests, prefill_tokens, decode_tokens = worker.pending
    return {
        "name": worker.name,
        "host": worker.host,
        "port": worker.port,
        "pool": worker.pool,
        "role": worker.role,
        "state": worker.health(now).name.lower(),
        "age_seconds": None if worker.report is None else round(now - worker.heard_at, 3),
        "pending": {"requests": requests, "prefill_tokens": prefill_tokens, "decode_tokens": decode_tokens},
        "load": worker.report,
    }


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type=_JSON)


def _error(error: ApiError, extra: dict[str, str] | None = None) -> web.Response:
    response = web.Response(status=error.status, body=error.json(), content_type=_JSON, headers=extra)
    if error.retry_after is not None:
        response.headers[headers.RETRY_AFTER] = str(max(1, math.ceil(error.retry_after)))
    if error.status in (408, 413):
        # The rest of the body is not read.
        response.force_close()
    return response
