"""A worker that follows a script: the wire protocol on a real socket, a deterministic answer, faults on demand."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from forebay_router.discovery import Endpoint
from forebay_wire import headers, paths, stream
from forebay_wire.load import LoadReport
from forebay_wire.messages import ContinueRequest, ReserveRequest, ReserveResponse

TOKEN = "token-of-the-test"
MODEL = "fake"
CREATED = 1_700_000_000
PROMPT_TOKENS = 37
PUSH_SECONDS = 0.03


def token(prompt: Any, seed: int, choice: int, i: int) -> int:
    """Token i of the answer: a function of the request alone, on every worker."""
    digest = hashlib.blake2b(json.dumps([prompt, seed, choice, i]).encode(), digest_size=2).digest()
    return int.from_bytes(digest, "big")


def text_of(token_id: int) -> str:
    return f"w{token_id} é "


@dataclass
class Fault:
    """Happens once, to the next leg of its kind."""

    kind: str
    """reset | stall | status | no_done | error_event | garbage"""

    after: int = 0
    """Events written before; 0: before the headers."""

    status: int = 500
    retry_after: str | None = None


@dataclass
class Call:
    leg: str
    body: dict[str, Any]
    headers: dict[str, str]
    done: bool = False
    aborted: bool = False

    @property
    def leg_id(self) -> str:
        return self.headers[headers.LEG]


@dataclass
class Answer:
    """The answer to one request, as events by position."""

    body: dict[str, Any]
    chat: bool
    request_id: str
    pad: int = 0
    tokens: int = field(init=False)
    prompt: Any = field(init=False)
    seed: int = field(init=False)
    _ids: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = self.body.get("max_completion_tokens") or self.body.get("max_tokens") or 16
        self.prompt = self.body.get("messages" if self.chat else "prompt")
        self.seed = self.body["seed"]

    def ids(self, choice: int = 0) -> list[int]:
        if choice not in self._ids:
            self._ids[choice] = [token(self.prompt, self.seed, choice, i) for i in range(self.tokens)]
        return self._ids[choice]

    def shown(self, i: int, choice: int = 0) -> str | None:
        """Text of event i; every fourth is held back and comes with the next."""
        if self.held(i):
            return None
        ids = self.ids(choice)
        return (text_of(ids[i - 1]) if i and self.held(i - 1) else "") + text_of(ids[i])

    def held(self, i: int) -> bool:
        return i % 4 == 3 and i != self.tokens - 1

    def text(self, choice: int = 0) -> str:
        return "".join(text_of(token_id) for token_id in self.ids(choice))

    def finish(self, i: int) -> str | None:
        return "length" if i == self.tokens - 1 else None

    def payload(self, i: int, choice: int = 0) -> bytes | None:
        shown = self.shown(i, choice)
        return None if shown is None else self.chunk(shown, choice, self.finish(i))

    def chunk(self, shown: str, choice: int, finish: str | None) -> bytes:
        content = {"delta": {"content": shown}} if self.chat else {"text": shown}
        return self._chunk([{"index": choice, **content, "finish_reason": finish}])

    def _chunk(self, choices: list[Any], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        answer_id = f"cmpl-{self.request_id}"
        shape = {"id": answer_id, "object": kind, "created": CREATED, "model": MODEL, "choices": choices, **more}
        shape["pad"] = "x" * self.pad
        return json.dumps(shape).encode()

    def opening(self, choice: int = 0) -> list[bytes]:
        return [self._chunk([{"index": choice, "delta": {"role": "assistant"}}])] if self.chat else []

    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": self.tokens * (self.body.get("n") or 1)}

    def closing(self) -> list[bytes]:
        asked = (self.body.get("stream_options") or {}).get("include_usage")
        return [self._chunk([], usage=self.usage())] if asked else []

    def whole(self) -> dict[str, Any]:
        def content(choice: int) -> dict[str, Any]:
            text = self.text(choice)
            return {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}

        count = self.body.get("n") or 1
        choices = [{"index": c, **content(c), "finish_reason": "length"} for c in range(count)]
        return {"id": f"cmpl-{self.request_id}", "choices": choices, "usage": self.usage()}


class FakeWorker:
    def __init__(self, name: str, role: str | None, *, compat_hash: str = "same", pool: str | None = None) -> None:
        self.name = name
        self.role = role
        self.pool = pool or role or "decode"
        self.compat_hash = compat_hash
        self.port = 0
        self.ready = True
        self.draining = False
        self.silent = False
        """Push no load: what a stopped process looks like."""

        self.hold_first = False
        """As prefill: first.delta is null."""

        self.admit = True
        self.gap = 0.0
        """Seconds between events."""

        self.pull_seconds = 0.0
        """What a decode leg takes to begin."""

        self.pad = 0
        """Bytes that make each chunk larger."""

        self.report: dict[str, Any] = {}
        self.faults: dict[str, deque[Fault]] = defaultdict(deque)
        self.calls: list[Call] = []
        self.reserved: dict[str, ReserveRequest] = {}
        self.kept: list[str] = []
        """Ids of all slots so far."""

        self.leases: set[str] = set()
        self.cancelled: list[str] = []
        self.released: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        """A leg waits for its gate before it answers."""

        self._engine = 0
        self._epoch = 0
        self._seen = 0
        self._server: asyncio.Server | None = None
        self._http: web.Server | None = None

    async def start(self) -> None:
        self._engine += 1
        self._epoch = self._seen = 0
        self._http = web.Server(self._handle, handler_cancellation=True, access_log=None)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._http, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        """As SIGKILL: the port refuses, every connection is reset."""
        if self._server is None or self._http is None:
            return
        self._server.close()
        for connection in self._http.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await self._http.shutdown(0.1)
        self._server = self._http = None
        self.reserved.clear()
        self.leases.clear()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.name, "127.0.0.1", self.port, self.pool, self.role)

    def legs(self, leg: str) -> list[Call]:
        return [call for call in self.calls if call.leg == leg]

    def load(self) -> LoadReport:
        self._epoch += 1
        values: dict[str, Any] = {
            "engine_id": f"{self.name}-{self._engine}",
            "epoch": self._epoch,
            "seen": self._seen,
            "ready": self.ready and not self.draining,
            "draining": self.draining,
            "model": MODEL,
            "compat_hash": self.compat_hash,
            "max_model_len": 4096,
            "free_blocks": 1000,
            "total_blocks": 1000,
            "max_running": 64,
            "prefill_tokens_per_second": 10_000.0,
            "prefill_tokens_total": self._epoch,
        }
        return LoadReport(**{**values, **self.report})

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return web.Response(status=401)
        if request.path == paths.LOAD_STREAM:
            return await self._push_load(request)
        body = await request.read()
        match request.path:
            case paths.RESERVE:
                # As a worker does: what it has read it carries out, though nobody waits for the answer any more.
                asked = asyncio.ensure_future(self._reserve(msgspec.json.decode(body, type=ReserveRequest)))
                return await asyncio.shield(asked)
            case paths.RELEASE:
                request_id = json.loads(body)["request_id"]
                self.released.append(request_id)
                self.reserved.pop(request_id, None)
                return web.json_response({})
            case paths.LEASE_CANCEL:
                if "cancel" in self.gates:
                    await self.gates["cancel"].wait()
                request_id = json.loads(body)["request_id"]
                self.cancelled.append(request_id)
                self.leases.discard(request_id)
                return web.json_response({})
        self._seen += headers.ROUTER in request.headers
        return await self._leg(request, body)

    async def _push_load(self, request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                if not self.silent:
                    await response.write(msgspec.json.encode(self.load()) + b"\n")
                await asyncio.sleep(PUSH_SECONDS)
        return response

    async def _reserve(self, message: ReserveRequest) -> web.StreamResponse:
        if "reserve" in self.gates:
            await self.gates["reserve"].wait()
        fault = self._fault("reserve")
        if fault is not None and fault.kind == "status":
            return web.Response(status=fault.status)
        admitted = self.admit
        if admitted:
            self.reserved[message.request_id] = message
            self.kept.append(message.request_id)
        return web.Response(
            body=msgspec.json.encode(ReserveResponse(admitted=admitted, reason="" if admitted else "x"))
        )

    def _fault(self, leg: str) -> Fault | None:
        return self.faults[leg].popleft() if self.faults[leg] else None

    async def _leg(self, request: web.BaseRequest, raw: bytes) -> web.StreamResponse:
        body = json.loads(raw)
        request_id = request.headers[headers.LEG]
        chat, params, start = request.path == paths.CHAT, body.pop("kv_transfer_params", None), 0
        leg = "plain"
        if request.path == paths.CONTINUE:
            leg = "continue"
            message = msgspec.json.decode(raw, type=ContinueRequest)
            body, chat, start = message.request, message.path == paths.CHAT, len(message.output_ids)
        elif params is not None and params.get("do_remote_decode"):
            leg = "prefill"
            body = {**{k: v for k, v in body.items() if k != "max_tokens"}, **params["client"]}
        elif params is not None:
            leg, start = "decode", 0 if params["first"]["delta"] is None else 1
            self.reserved.pop(request_id, None)
        call = Call(leg, json.loads(raw), dict(request.headers))
        self.calls.append(call)
        answer = Answer(body, chat, request_id, self.pad)
        try:
            if leg in self.gates:
                await self.gates[leg].wait()
            response = await self._answer(request, leg, answer, start)
        except (asyncio.CancelledError, ConnectionError):
            call.aborted = True
            raise
        call.done = True
        return response

    async def _answer(self, request: web.BaseRequest, leg: str, answer: Answer, start: int) -> web.StreamResponse:
        fault = self._fault(leg)
        if fault is not None and fault.kind == "status":
            extra = {"retry-after": fault.retry_after} if fault.retry_after else {}
            error = {"error": {"message": "planted", "type": "t", "param": None, "code": None}}
            return web.json_response({**error, "kv_transfer_params": None}, status=fault.status, headers=extra)
        if fault is not None and fault.after == 0:
            await self._break(request, fault)
        load = {headers.LOAD: msgspec.json.encode(self.load()).decode(), "x-secret-header": "not for clients"}
        if leg == "prefill":
            return web.json_response(self._prefill(answer), headers=load)
        if leg == "continue" and answer.ids()[:start] != json.loads(await request.read())["output_ids"]:
            return web.json_response({"error": "wrong output ids"}, status=400)
        if leg == "continue" and json.loads(await request.read()).get("prompt_tokens") not in (None, PROMPT_TOKENS):
            return web.json_response({"error": "wrong prompt tokens"}, status=400)
        if not answer.body.get("stream"):
            await asyncio.sleep(self.gap)
            return web.json_response(answer.whole(), headers=load)
        if leg == "decode":
            await asyncio.sleep(self.pull_seconds)
        response = web.StreamResponse(headers={**load, "content-type": "text/event-stream"})
        await response.prepare(request)
        for written, event in enumerate((*self._events(answer, start), stream.DONE)):
            if fault is not None and written == fault.after:
                await self._break(request, fault, response)
                if fault.kind in ("no_done", "error_event", "garbage"):
                    return response
            await response.write(event)
            await asyncio.sleep(self.gap)
        return response

    def _events(self, answer: Answer, start: int) -> Iterator[bytes]:
        count = answer.body.get("n") or 1
        for i in range(start, answer.tokens):
            for choice in range(count):
                if i == 0:
                    yield from (stream.event([], opening) for opening in answer.opening(choice))
                event = stream.event([answer.ids(choice)[i]] if count == 1 else [], answer.payload(i, choice))
                if event:
                    yield event
        yield from (stream.event([], closing) for closing in answer.closing())

    def _prefill(self, answer: Answer) -> dict[str, Any]:
        finished = answer.tokens == 1
        streamed = bool(answer.body.get("stream"))
        delta = None
        if streamed and not (self.hold_first and not finished):
            payload = answer.payload(0)
            assert payload is not None
            closing = answer.closing() if finished else []
            delta = [part.decode() for part in (*answer.opening(), payload, *closing)]
        if not finished:
            self.leases.add(answer.request_id)
        first_id = answer.ids()[0]
        first = {
            "token_id": first_id,
            "finish_reason": "length" if finished else None,
            "delta": delta,
            "state": {"output_ids": [first_id], "logprobs": None},
        }
        params = {
            "do_remote_prefill": not finished,
            "remote_request_id": answer.request_id,
            "compat_hash": self.compat_hash,
            "created": CREATED,
            "prompt_tokens": PROMPT_TOKENS,
            "cached_tokens": 5,
            "first": first,
            "signature": "kept byte for byte",
        }
        return {**answer.whole(), "kv_transfer_params": params}

    async def _break(self, request: web.BaseRequest, fault: Fault, response: web.StreamResponse | None = None) -> None:
        match fault.kind:
            case "reset":
                assert request.transport is not None
                request.transport.abort()
                raise ConnectionResetError
            case "stall":
                await asyncio.Event().wait()
            case "error_event" if response is not None:
                await response.write(b'data: {"error": {"message": "planted"}}\n\n')
            case "garbage" if response is not None:
                await response.write(b": t not-a-number\ndata: {}\n\n")
