"""Steady traffic whose every stream is checked to its last character."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from support.client import Answer, complete

RETRY_SECONDS = 0.1
REFUSED_SECONDS = 15.0
"""For how long a refused connection is tried again: no request was sent, so that none is lost."""


@dataclass
class Traffic:
    """`streams` at once, each begun anew when it ends, with answers that are known beforehand.

    A simulated worker's next token is a hash of the tags read from its KV blocks, so that lost, stale or foreign KV
    changes the text. An answer is right when it is, to the letter, what one undisturbed worker said.
    """

    url: str
    model: str
    streams: int = 20
    tokens: int = 60
    kinds: int = 8
    wrong: list[str] = field(default_factory=list)
    """Streams that ended in another way than right: truncated, refused, another text."""

    broken: list[float] = field(default_factory=list)
    """For how long each stream had run whose connection broke. A caller that kills routers tells these from `wrong`."""

    refused: int = 0
    """Connections that were refused and then tried again."""

    count: int = 0
    """Streams that ended, right or wrong."""

    opened: int = 0
    _expected: dict[int, str] = field(default_factory=dict)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _stop: bool = False

    def _body(self, kind: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": f"Story {kind} of a mill by a stream, told slowly and at length. " * 4,
            "max_tokens": self.tokens,
            "temperature": 0.8,
            "seed": kind + 1,
            "stream": True,
            "ignore_eos": True,
        }

    async def learn(self, session: aiohttp.ClientSession) -> None:
        """What each answer is, from requests that nothing disturbs."""
        answers = await asyncio.gather(*(complete(session, self.url, self._body(kind)) for kind in range(self.kinds)))
        for kind, answer in enumerate(answers):
            if not self._good(answer):
                raise AssertionError(f"without any disturbance: {answer.status} {answer.error} {answer.finish_reason}")
            self._expected[kind] = answer.text

    @staticmethod
    def _good(answer: Answer) -> bool:
        return answer.status == 200 and answer.error is None and answer.done and answer.finish_reason == "length"

    async def start(self, session: aiohttp.ClientSession) -> None:
        self._tasks = [asyncio.create_task(self._one(session, index)) for index in range(self.streams)]

    async def _one(self, session: aiohttp.ClientSession, index: int) -> None:
        turn = index
        while not self._stop:
            kind = turn % self.kinds
            turn += 1
            started = time.monotonic()
            self.opened += 1
            try:
                answer = await self._complete(session, kind)
            except aiohttp.ClientConnectorError as error:
                self.wrong.append(f"stream {index}: no connection for {REFUSED_SECONDS:g} s: {error}")
                continue
            except (aiohttp.ClientError, OSError) as error:
                if isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError | ConnectionError):
                    self.broken.append(time.monotonic() - started)
                else:
                    self.wrong.append(f"stream {index}: {type(error).__name__}: {error}")
                continue
            self.count += 1
            if not self._good(answer) or answer.text != self._expected[kind]:
                self.wrong.append(self._told(index, answer, self._expected[kind], time.monotonic() - started))

    async def _complete(self, session: aiohttp.ClientSession, kind: int) -> Answer:
        deadline = time.monotonic() + REFUSED_SECONDS
        while True:
            try:
                return await complete(session, self.url, self._body(kind))
            except aiohttp.ClientConnectorError:
                self.refused += 1
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    @staticmethod
    def _told(index: int, answer: Answer, expected: str, seconds: float) -> str:
        used = [answer.headers.get(f"x-forebay-{leg}") for leg in ("prefill", "decode")]
        pairs = enumerate(zip(answer.text, expected, strict=False))
        differs = next((at for at, (one, other) in pairs if one != other), None)
        return (
            f"stream {index} on {used} after {seconds:.1f} s: status {answer.status}, error {answer.error}, "
            f"done {answer.done}, {len(answer.text)} of {len(expected)} characters, differs at {differs}"
        )

    def report(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "open": self.opened - self.count - len(self.broken),
            "wrong": self.wrong[:20],
            "wrongs": len(self.wrong),
            "broken": len(self.broken),
            "refused": self.refused,
        }

    async def stop(self) -> None:
        """Let the streams that run end, and take no more."""
        self._stop = True
        await asyncio.wait_for(asyncio.gather(*self._tasks), 120)
