"""The worker's HTTP application."""

from __future__ import annotations

import msgspec
from aiohttp import web

from forebay_engine.server import answers, internal, metrics
from forebay_engine.server.http import LIMITS, STATE, errors, json_response, stamp
from forebay_engine.server.state import WorkerState
from forebay_wire import paths
from forebay_wire.connections import ConnectionLimits
from forebay_wire.errors import ApiError


class _Model(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "forebay"


class _Models(msgspec.Struct):
    data: list[_Model]
    object: str = "list"


async def models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    state = request.app[STATE]
    info = state.loaded()
    model = _Model(state.settings.served_name, state.loaded_unix, info.max_model_len)
    return json_response(msgspec.json.encode(_Models([model])))


async def model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}."""
    state = request.app[STATE]
    info, asked, served = state.loaded(), request.match_info["id"], state.settings.served_name
    if asked != served:
        raise ApiError(404, f"the model {asked!r:.200} is not served here; there is {served}", code="model_not_found")
    return json_response(msgspec.json.encode(_Model(served, state.loaded_unix, info.max_model_len)))


async def health(request: web.Request) -> web.Response:
    """GET /health: the process lives and its core, once started, does too."""
    if request.app[STATE].died.is_set():
        raise ApiError(500, "the engine has died", code="engine_died")
    return json_response(b'{"status":"ok"}')


async def ready(request: web.Request) -> web.Response:
    """GET /ready: 200 while new requests are served, else 503 with the reason."""
    request.app[STATE].serving()
    return json_response(b'{"status":"ready"}')


def build_app(state: WorkerState, limits: ConnectionLimits | None = None) -> web.Application:
    """The application, without a socket. Serve it with `Listener` (listen.py): that is where `limits` take hold."""
    app = web.Application(middlewares=[errors])
    app[STATE] = state
    app[LIMITS] = limits or ConnectionLimits()
    app[metrics.METRICS] = metrics.ServerMetrics(lambda: state.core.stats)
    app.on_response_prepare.append(stamp)
    app.router.add_post(paths.CHAT, answers.chat)
    app.router.add_post(paths.COMPLETIONS, answers.completions)
    app.router.add_post(paths.CONTINUE, answers.continuation)
    app.router.add_get(paths.MODELS, models)
    app.router.add_get(paths.MODELS + "/{id:.+}", model)
    app.router.add_get(paths.HEALTH, health)
    app.router.add_get(paths.READY, ready)
    app.router.add_get(paths.METRICS, metrics.scrape)
    for method, path, handler in internal.ROUTES:
        app.router.add_route(method, path, handler)
    return app
