"""POST /v1/completions, /v1/chat/completions and /internal/continue: from body to answer, in one of four roles."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import hdrs, web

from forebay_engine.core.handle import CoreDied, CoreInfo
from forebay_engine.server import legs, plan, schema
from forebay_engine.server.generation import Generation
from forebay_engine.server.http import ID, STATE, json_response, read_body, read_message, router_of, write
from forebay_engine.server.job import Job
from forebay_engine.server.outcome import Outcome
from forebay_engine.server.plan import Plan
from forebay_engine.server.reply import Reply, StreamEvent
from forebay_engine.server.shapes import Shapes, json_logprobs
from forebay_engine.server.state import WorkerState
from forebay_engine.text.template import TemplateRefused
from forebay_engine.types import HoldInfo, TokenEvent
from forebay_wire import headers, paths, stream
from forebay_wire.errors import ApiError
from forebay_wire.messages import ContinueRequest
from forebay_wire.prefix import NOTHING, Beginnings, beginnings
from forebay_wire.transfer import FirstToken, StreamState

log = logging.getLogger(__name__)

REQUEST_SECONDS = 3600.0
"""An answer that takes longer is given up: nothing waits without end, not even for a wedged core."""

OFF_LOOP_CHARACTERS = 4096
"""Longer texts are tokenised in a thread: 1 ms a 4 KB otherwise stands between every other request's tokens."""

_STREAM_HEADERS = {
    hdrs.CONTENT_TYPE: "text/event-stream; charset=utf-8",
    hdrs.CACHE_CONTROL: "no-cache",
    "x-accel-buffering": "no",
}


async def chat(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    with request.app[STATE].admit(router_of(request)) as info:
        return await _v1(request, info, chat=True)


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    with request.app[STATE].admit(router_of(request)) as info:
        return await _v1(request, info, chat=False)


async def continuation(request: web.Request) -> web.StreamResponse:
    """POST /internal/continue."""
    state = request.app[STATE]
    state.authorize(request.headers.get(headers.AUTHORIZATION))
    with state.admit(router_of(request)) as info:
        return await _continue(request, info)


async def _v1(request: web.Request, info: CoreInfo, *, chat: bool) -> web.StreamResponse:
    state = request.app[STATE]
    began = state.monotonic()
    raw = await read_body(request)
    body = schema.parse_json(raw)
    known = _beginnings(raw)
    raw_params = body.pop(legs.FIELD, None)
    if raw_params is None:
        created = int(state.wall())
        made = await _plan(state, info, body, chat=chat, created=created)
        job = Job("plain", made, _leg_id(request), created, info, began, _comments(request, made), beginnings=known)
        return await _run(request, job)
    secret = state.authorize(request.headers.get(headers.AUTHORIZATION))
    params = legs.read_params(raw_params)
    if params.do_remote_prefill:
        legs.verify_params(params, secret, request_id=_leg_id(request), now_unix=state.wall())
        if params.created is None:
            raise ApiError(400, f"{legs.FIELD}.created: missing", param=f"{legs.FIELD}.created")
        made = await _plan(state, info, body, chat=chat, created=params.created)
        legs.check_single(made, "decode leg")
        legs.check_decode(params, made, info)
        first = legs.first_state(params)
        job = Job(
            "decode", made, _leg_id(request), params.created, info, began, _comments(request, made), beginnings=known
        )
        job.pull = legs.pull_source(params)
        job.output_ids, job.logprobs = first.output_ids, first.logprobs
        job.delivered = params.first is not None and params.first.delta is not None
        job.cached_tokens = params.cached_tokens
        return await _run(request, job)
    created = int(state.wall())
    if not params.do_remote_decode:
        made = await _plan(state, info, body, chat=chat, created=created)
        job = Job("plain", made, _leg_id(request), created, info, began, _comments(request, made), beginnings=known)
        return await _run(request, job)
    made = await _plan(state, info, legs.clients_body(body, params), chat=chat, created=created)
    legs.check_single(made, "prefill leg")
    job = Job("prefill", made, _leg_id(request), created, info, began, False, secret=secret, beginnings=known)
    return await _prefill(request, job)


def _beginnings(raw: bytes) -> Beginnings:
    """Of the prompt in a body that is a JSON object."""
    try:
        return beginnings(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]))
    except (msgspec.DecodeError, RecursionError):
        return NOTHING


async def _continue(request: web.Request, info: CoreInfo) -> web.StreamResponse:
    state = request.app[STATE]
    began = state.monotonic()
    message = await read_message(request, ContinueRequest)
    if message.path not in (paths.CHAT, paths.COMPLETIONS):
        raise ApiError(400, f"path: {message.path!r} is not {paths.CHAT} or {paths.COMPLETIONS}", param="path")
    made = await _plan(state, info, message.request, chat=message.path == paths.CHAT, created=message.created)
    legs.check_single(made, "continuation")
    legs.check_output_ids(message.output_ids, info, "output_ids")
    if len(message.output_ids) > made.params.max_tokens:
        raise ApiError(
            400,
            f"output_ids: {len(message.output_ids)} ids, the request allows {made.params.max_tokens}",
            param="output_ids",
        )
    if message.prompt_tokens not in (None, made.prompt_tokens):
        raise ApiError(
            400,
            f"prompt_tokens: {message.prompt_tokens} there, {made.prompt_tokens} here; the workers' models differ",
            param="prompt_tokens",
        )
    if message.output_ids and made.params.logprobs is not None and not made.stream:
        raise ApiError(400, "logprobs of the ids so far are not known here; run the request anew", param="output_ids")
    job = Job("continue", made, _leg_id(request), message.created, info, began, _comments(request, made))
    job.output_ids, job.delivered = message.output_ids, True
    job.cached_tokens = message.cached_tokens
    return await _run(request, job)


def _comments(request: web.Request, made: Plan) -> bool:
    # Interleaved answers have no ids a router could count: nothing tells whose they are.
    return router_of(request) is not None and made.choices == 1


async def _plan(state: WorkerState, info: CoreInfo, body: Mapping[str, Any], *, chat: bool, created: int) -> Plan:
    request = schema.parse_chat(body) if chat else schema.parse_completion(body)
    limits = state.limits(info)
    plan.check_model(request, limits)
    tokenizer, name = state.tokenizer, "messages" if chat else "prompt"
    try:
        sources = plan.sources(request, tokenizer, created)
    except TemplateRefused as error:
        raise ApiError(400, f"messages: the chat template refuses them: {error}", param="messages") from error
    prompts: list[list[int]] = []
    for source in sources:
        if source.text is None:
            prompts.append(source.ids or [])
            continue
        plan.check_text_length(source, tokenizer, limits, name)
        prompts.append(await _encode(state, source.text, source.add_special))
    texts = [source.text for source in sources]
    return plan.make_plan(request, prompts, texts, tokenizer, limits, default_seed=secrets.randbits(63))


def _leg_id(request: web.Request) -> str:
    """What the router knows this request by, among those that share its x-request-id."""
    leg = request.headers.get(headers.LEG)
    return leg if leg is not None and headers.is_request_id(leg) else request[ID]


def _read_limits(request: web.Request, job: Job) -> None:
    if router_of(request) is not None:
        job.step_seconds = _positive(request.headers.get(headers.STEP_SECONDS))
        job.wait_seconds = _positive(request.headers.get(headers.WAIT_SECONDS))


def _positive(text: str | None) -> float:
    """0 for what is no positive finite number: a limit that cannot be read is none."""
    try:
        value = float(text or 0)
    except ValueError:
        return 0.0
    return value if 0 < value < math.inf else 0.0


async def _encode(state: WorkerState, text: str, add_special: bool) -> list[int]:
    if not text:
        return []  # not even a BOS: an empty prompt is refused
    if len(text) <= OFF_LOOP_CHARACTERS:
        return state.tokenizer.encode(text, add_special=add_special)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(state.encoders, lambda: state.tokenizer.encode(text, add_special=add_special))


async def _run(request: web.Request, job: Job) -> web.StreamResponse:
    """Roles plain, decode and continue: answer the client, streamed or whole."""
    state = request.app[STATE]
    _read_limits(request, job)
    shapes = Shapes(job.plan, request[ID], job.created, state.tokenizer)
    reply = Reply(job.plan, shapes, state.tokenizer, cached_tokens=job.cached_tokens)
    outcome = Outcome(request, job, reply)
    with outcome:
        pending = reply.replay(job.output_ids, job.logprobs, delivered=job.delivered)
        if job.plan.stream:
            return await _stream(request, job, reply, pending, outcome)
        if not reply.all_finished:
            async with asyncio.timeout(REQUEST_SECONDS), Generation(state.core, job.requests(state)) as generation:
                async for index, event in generation:
                    _feed(reply, generation, index, event, outcome)
        _check_ended(reply)
        return json_response(reply.body())


def _feed(reply: Reply, generation: Generation, index: int, event: TokenEvent, outcome: Outcome) -> list[StreamEvent]:
    if event.finish_reason == "abort":
        raise ApiError(500, "the engine aborted the request", code="aborted")
    outcome.token()
    events = reply.feed(index, event)
    if reply.finished(index):
        generation.drop(index)
    return events


def _check_ended(reply: Reply) -> None:
    if not reply.all_finished:
        raise ApiError(500, "the engine ended the request without a finish reason", code="engine_error")


async def _stream(
    request: web.Request, job: Job, reply: Reply, pending: list[StreamEvent], outcome: Outcome
) -> web.StreamResponse:
    """Nothing is written before the core's first event, so that a refusal still has its HTTP status."""
    response = web.StreamResponse(headers=_STREAM_HEADERS)
    started = False

    async def send(events: list[StreamEvent]) -> None:
        nonlocal started
        data = _sse(events, job.comments)
        if not started:
            started = True
            await response.prepare(request)
        if data:
            await write(request, response, data)

    state = request.app[STATE]
    try:
        if not reply.all_finished:
            async with asyncio.timeout(REQUEST_SECONDS), Generation(state.core, job.requests(state)) as generation:
                async for index, event in generation:
                    events, pending = pending + _feed(reply, generation, index, event, outcome), []
                    await send(events)
        _check_ended(reply)
        await send([*pending, *(([], chunk) for chunk in reply.closing())])
        await write(request, response, stream.DONE)
        await response.write_eof()
    except (ApiError, CoreDied, TimeoutError) as error:
        failure = _as_api_error(error)
        if isinstance(error, CoreDied):
            state.died.set()
        if not started:
            raise failure from error
        # The status is long out: say it in the stream, and leave [DONE] out so that nobody takes it for a whole answer.
        outcome.code = failure.status
        with contextlib.suppress(ConnectionError):
            await write(request, response, stream.event([], failure.json()))
            await response.write_eof()
    return response


def _as_api_error(error: ApiError | CoreDied | TimeoutError) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CoreDied):
        return ApiError(500, f"the engine has died: {error}", code="engine_died")
    return ApiError(504, f"no whole answer within {REQUEST_SECONDS:.0f} s", code="timeout")


def _sse(events: list[StreamEvent], comments: bool) -> bytes:
    return b"".join(stream.event(ids if comments else [], chunk) for ids, chunk in events)


async def _prefill(request: web.Request, job: Job) -> web.StreamResponse:
    """Role prefill: one token and, unless it ends the answer, a lease on the prompt's KV."""
    state = request.app[STATE]
    _read_limits(request, job)
    shapes = Shapes(job.plan, request[ID], job.created, state.tokenizer)
    body_reply = Reply(job.plan, shapes, state.tokenizer, stream=False)
    with Outcome(request, job, body_reply) as outcome:
        events: list[TokenEvent] = []
        async with asyncio.timeout(REQUEST_SECONDS), Generation(state.core, job.requests(state)) as generation:
            async for index, event in generation:
                events.append(event)
                _feed(body_reply, generation, index, event, outcome)
        first = next((event for event in events if event.token_ids), None)
        hold = next((event.hold for event in events if event.hold is not None), None)
        if first is None or (hold is None and not body_reply.all_finished):
            raise ApiError(500, "the engine ended the prefill with neither a lease nor a finish", code="engine_error")
        if body_reply.all_finished and hold is not None:
            state.core.abort(job.leg_id)  # a stop string ended the answer, which the core couldn't know
            hold = None
        response = json_response(_prefill_body(state, job, shapes, body_reply, first, hold))
        try:
            await response.prepare(request)
            await response.write_eof()
        except BaseException:
            if hold is not None:
                state.core.abort(job.leg_id)  # nobody learnt of the lease: don't let it run out its time
            raise
        return response


def _prefill_body(
    state: WorkerState, job: Job, shapes: Shapes, body_reply: Reply, event: TokenEvent, hold: HoldInfo | None
) -> bytes:
    """The normal body plus kv_transfer_params. Its chunks come from the code that writes a plain stream's."""
    finish_reason = body_reply.finish_reason
    delta: list[str] | None = None
    if job.plan.stream:
        stream_reply = Reply(job.plan, shapes, state.tokenizer, stream=True)
        events = stream_reply.feed(0, event)
        if finish_reason is not None or body_reply.text:
            closing = stream_reply.closing() if finish_reason is not None else []
            delta = [*(chunk.decode() for _, chunk in events if chunk is not None), *(c.decode() for c in closing)]
    first = FirstToken(
        token_id=event.token_ids[0],
        finish_reason=finish_reason,
        delta=delta,
        state=StreamState(output_ids=list(event.token_ids), logprobs=json_logprobs(event.logprobs)),
    )
    if hold is not None:
        state.last_hold = state.monotonic()
    handoff = legs.Handoff(
        request_id=job.leg_id,
        created=job.created,
        now_unix=state.wall(),
        cached_tokens=body_reply.cached_tokens,
        first=first,
        hold=hold,
    )
    params = legs.signed_params(
        job.plan, handoff, job.info, host=state.settings.advertise_host, port=state.port, secret=job.secret
    )
    return body_reply.body(params)
