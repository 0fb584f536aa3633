"""The pool under measurement, over HTTP: timed requests, and what its router reports."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import aiohttp
import msgspec

from forebay_operator.calibrate.samples import CalibrationError
from forebay_operator.sse import events
from forebay_operator.unreachable import reason
from forebay_wire.headers import DECODE, PREFILL
from forebay_wire.load import LoadReport
from forebay_wire.paths import COMPLETIONS, LOAD

REQUEST_SECONDS = 180.0
LOAD_SECONDS = 5.0
WATCH_SECONDS = 1.0
_POLL_SECONDS = 0.1
_REMEDY = "calibrate an idle pool: its times are measured one request at a time"


class PoolWorker(msgspec.Struct):
    name: str
    role: str | None = None
    state: str = ""
    load: LoadReport | None = None


class PoolTotals(msgspec.Struct):
    offered_requests: int = 0


class PoolLoad(msgspec.Struct):
    """What of a router's /load is used here."""

    instance: str = ""
    """Of the router's process."""

    in_flight: int = 0
    totals: PoolTotals = msgspec.field(default_factory=PoolTotals)
    ttft_objective_ms: float | None = None
    tpot_objective_ms: float | None = None
    workers: list[PoolWorker] = []

    def ready(self, role: str) -> list[PoolWorker]:
        return [w for w in self.workers if w.role == role and w.state == "ready" and w.load is not None]

    @property
    def running(self) -> int:
        """Requests that run or wait now, by the router's word or by the workers', who know of other routers' too."""
        loads = [worker.load for worker in self.workers if worker.load is not None]
        return max(self.in_flight, max((load.running + load.waiting for load in loads), default=0))

    @property
    def moved(self) -> tuple[float, float]:
        """KV bytes and seconds of all pulls so far."""
        loads = [worker.load for worker in self.workers if worker.load is not None]
        return sum(load.kv_bytes_received for load in loads), sum(load.kv_seconds for load in loads)


@dataclass(frozen=True, slots=True)
class Timing:
    """One answer. Times are of this process's monotonic clock."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    sent: float
    arrivals: tuple[float, ...]
    """Of the chunks with text. A chunk may hold more than one token, and a token may show no text."""

    decode: str
    """The worker that streamed it."""

    @property
    def first_seconds(self) -> float:
        return self.arrivals[0] - self.sent


class Pool:
    """`url` is a router's, with or without /v1. Every method raises CalibrationError."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, api_key: str | None) -> None:
        self.url = url.removesuffix("/").removesuffix("/v1")
        self.sent = 0
        """Requests so far."""

        self._session = session
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

    async def load(self) -> PoolLoad:
        timeout = aiohttp.ClientTimeout(total=LOAD_SECONDS)
        try:
            async with self._session.get(self.url + LOAD, timeout=timeout) as response:
                raw = await response.read()
                if response.status != 200:
                    raise CalibrationError(
                        f"{self.url}{LOAD} answered {response.status}; give the address of a Forebay router"
                    )
                return msgspec.json.decode(raw, type=PoolLoad)
        except TimeoutError:
            raise CalibrationError(f"{self.url}{LOAD} did not answer within {LOAD_SECONDS:g} s") from None
        except aiohttp.ClientError as error:
            raise CalibrationError(
                f"{self.url} can't be reached: {reason(error)}; give the address of a running router, such as "
                "http://127.0.0.1:8000"
            ) from None
        except (msgspec.MsgspecError, RecursionError) as error:
            raise CalibrationError(f"{self.url}{LOAD} is no Forebay router's: {error}") from None

    async def idle_load(self) -> PoolLoad:
        """The load of a pool that nobody else uses. It is watched for a while: between short requests a busy one looks
        idle at most moments."""
        first = load = await self.load()
        deadline = time.monotonic() + WATCH_SECONDS
        while True:
            self.check_alone(first, load)
            if load.running:
                raise CalibrationError(f"{self.url} serves {load.running} requests now; {_REMEDY}")
            if time.monotonic() >= deadline:
                return load
            await asyncio.sleep(_POLL_SECONDS)
            load = await self.load()

    def check_alone(self, before: PoolLoad, after: PoolLoad, own: int = 0) -> None:
        """Raises CalibrationError when more requests than our `own` came between two looks at the same router."""
        others = after.totals.offered_requests - before.totals.offered_requests - own
        if after.instance == before.instance and others > 0:
            raise CalibrationError(f"{self.url} is in use: {others} requests of others came meanwhile; {_REMEDY}")

    async def moved_since(self, before: PoolLoad, *, within: float) -> tuple[float, float] | None:
        """KV bytes and seconds of the pulls since `before`; None when nothing was reported in time."""
        deadline = time.monotonic() + within
        while True:
            moved = (await self.load()).moved
            if moved[0] > before.moved[0]:
                return moved[0] - before.moved[0], moved[1] - before.moved[1]
            if time.monotonic() >= deadline:
                return None
            await asyncio.sleep(_POLL_SECONDS)

    async def complete(self, model: str, prompt: str, tokens: int) -> Timing:
        """Stream exactly `tokens` tokens after a prompt."""
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        self.sent += 1
        sent = time.monotonic()
        try:
            async with self._session.post(
                self.url + COMPLETIONS, json=body, headers=self._headers, timeout=timeout
            ) as response:
                if response.status != 200:
                    text = (await response.content.read(2048)).decode(errors="replace").strip()
                    raise CalibrationError(f"{self.url} answered {response.status}: {text}")
                return await _timing(response, sent)
        except TimeoutError:
            raise CalibrationError(f"{self.url} took more than {REQUEST_SECONDS:g} s for {tokens} tokens") from None
        except aiohttp.ClientError as error:
            raise CalibrationError(f"the answer of {self.url} broke off: {error}") from None


async def _timing(response: aiohttp.ClientResponse, sent: float) -> Timing:
    arrivals: list[float] = []
    usage: dict[str, object] = {}
    done = False
    try:
        async for event in events(response.content):
            if event == b"[DONE]":
                done = True
                continue
            chunk = msgspec.json.decode(event)
            if "error" in chunk:
                raise CalibrationError(f"the answer ended with an error: {chunk['error']}")
            usage = chunk.get("usage") or usage
            if chunk.get("choices") and chunk["choices"][0].get("text"):
                arrivals.append(time.monotonic())
    except (ValueError, AttributeError, TypeError) as error:
        if isinstance(error, CalibrationError):
            raise
        raise CalibrationError(f"the answer is no completion stream: {error}") from None
    if not done or not usage:
        raise CalibrationError("the answer broke off")
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens", 0) if isinstance(details, dict) else 0
    if not arrivals:
        # All of the answer was special tokens or half a character: its end is when the first one came, at the latest.
        arrivals.append(time.monotonic())
    return Timing(
        prompt_tokens=int(str(usage.get("prompt_tokens", 0))),
        cached_tokens=int(cached or 0),
        completion_tokens=int(str(usage.get("completion_tokens", 0))),
        sent=sent,
        arrivals=tuple(arrivals),
        decode=response.headers.get(DECODE) or response.headers.get(PREFILL) or "",
    )
