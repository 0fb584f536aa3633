"""Steady traffic whose every stream is checked to its last character."""

from __future__ import annotations

import asyncio
import random
import string
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from support.client import Answer, complete

RETRY_SECONDS = 0.1
REFUSED_SECONDS = 15.0
"""For how long a refused connection is tried again: no request was sent, so that none is lost."""

MOST_OPEN = 2.0
"""Times `streams`. While so many are open, none is begun: a machine that is slow for a while must not drown."""

SHOWN = 20
"""Harmed streams of a report that are told in words."""


@dataclass
class Traffic:
    """Streams begun at a steady rate, whatever becomes of those before (open loop), with answers known beforehand.

    Unless it is given, the rate is the one at which about `streams` are open at once while nothing disturbs them.
    A simulated worker's next token is a hash of the tags read from its KV blocks, so that lost, stale or foreign KV
    changes the text. An answer is right when it is, to the letter, what one undisturbed worker said.
    """

    url: str
    model: str
    streams: int = 20
    tokens: int = 60
    kinds: int = 8
    rate: float = 0.0
    """Streams begun a second, where that is not learnt."""

    fresh: int = 0
    """Letters of each stream's own prompt, which no cache holds: a token each. Its answer's text is not known."""

    lost: list[str] = field(default_factory=list)
    """Streams that were refused, ended early or with an error, in words."""

    wrong: list[str] = field(default_factory=list)
    """Streams that ended whole, with another text."""

    cut: int = 0
    """Streams whose connection broke. A caller that kills routers tells these from `lost`."""

    refused: int = 0
    """Connections that were refused and then tried again."""

    late: int = 0
    """Streams begun late, since `MOST_OPEN` were open."""

    count: int = 0
    """Streams that ended, well or not."""

    opened: int = 0
    _expected: dict[int, str] = field(default_factory=dict)
    _open: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """By the stream's number."""

    _starting: asyncio.Task[None] | None = None

    def _body(self, number: int) -> dict[str, Any]:
        kind = number % self.kinds
        prompt = f"Story {kind} of a mill by a stream, told slowly and at length. " * 4
        if self.fresh:
            prompt = "".join(random.Random(f"{number} {self.fresh}").choices(string.ascii_letters, k=self.fresh))
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": self.tokens,
            "temperature": 0.8,
            "seed": kind + 1,
            "stream": True,
            "ignore_eos": True,
        }

    async def learn(self, session: aiohttp.ClientSession) -> None:
        """What each answer is and how long one takes, from `streams` requests at once that nothing disturbs."""
        if self.fresh:
            return
        numbers = range(max(self.streams, self.kinds))
        began = time.monotonic()
        answers = await asyncio.gather(*(complete(session, self.url, self._body(number)) for number in numbers))
        self.rate = self.rate or self.streams / (time.monotonic() - began)
        for number, answer in zip(numbers, answers, strict=True):
            kind = number % self.kinds
            if not self._whole(answer) or self._expected.setdefault(kind, answer.text) != answer.text:
                raise AssertionError(f"without any disturbance: {self._told(kind, answer, 0.0)}")

    @staticmethod
    def _whole(answer: Answer) -> bool:
        return answer.status == 200 and answer.error is None and answer.done and answer.finish_reason == "length"

    async def start(self, session: aiohttp.ClientSession) -> None:
        self._starting = asyncio.create_task(self._begin(session))

    async def _begin(self, session: aiohttp.ClientSession) -> None:
        due, interval = time.monotonic(), 1 / self.rate
        while True:
            if len(self._open) < MOST_OPEN * self.streams:
                number = self.opened
                self.opened += 1
                self._open[number] = asyncio.create_task(self._one(session, number))
            else:
                self.late += 1
            due = max(due + interval, time.monotonic() - interval)
            await asyncio.sleep(due - time.monotonic())

    async def _one(self, session: aiohttp.ClientSession, number: int) -> None:
        started = time.monotonic()
        try:
            answer = await self._complete(session, number)
        except aiohttp.ClientConnectorError as error:
            self.lost.append(f"stream {number}: no connection for {REFUSED_SECONDS:g} s: {error}")
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError):
            self.cut += 1
        except Exception as error:
            # Whatever it was, the stream is not what it should be.
            self.lost.append(f"stream {number}: {type(error).__name__}: {error}")
        else:
            kind = number % self.kinds
            if not self._whole(answer):
                self.lost.append(f"stream {number} {self._told(kind, answer, time.monotonic() - started)}")
            elif not self.fresh and answer.text != self._expected[kind]:
                self.wrong.append(f"stream {number} {self._told(kind, answer, time.monotonic() - started)}")
        finally:
            self.count += 1
            del self._open[number]

    async def _complete(self, session: aiohttp.ClientSession, number: int) -> Answer:
        deadline = time.monotonic() + REFUSED_SECONDS
        while True:
            try:
                return await complete(session, self.url, self._body(number))
            except aiohttp.ClientConnectorError:
                self.refused += 1
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    def _told(self, kind: int, answer: Answer, seconds: float) -> str:
        expected = self._expected.get(kind, "")
        used = [answer.headers.get(f"x-forebay-{leg}") for leg in ("prefill", "decode")]
        pairs = enumerate(zip(answer.text, expected, strict=False))
        differs = next((at for at, (one, other) in pairs if one != other), None)
        return (
            f"on {used} after {seconds:.1f} s: status {answer.status}, error {answer.error}, done {answer.done}, "
            f"finish {answer.finish_reason}, {len(answer.text)} of {len(expected)} characters, differs at {differs}"
        )

    def report(self) -> dict[str, Any]:
        """`settled`: all streams of lower numbers have ended."""
        return {
            "count": self.count,
            "opened": self.opened,
            "open": len(self._open),
            "settled": min(self._open, default=self.opened),
            "lost": len(self.lost),
            "wrong": len(self.wrong),
            "told": [*self.lost[-SHOWN:], *self.wrong[-SHOWN:]],
            "cut": self.cut,
            "refused": self.refused,
            "late": self.late,
        }

    async def stop(self) -> None:
        """Let the streams that run end, and begin no more."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await asyncio.wait_for(asyncio.gather(*self._open.values()), 120)
