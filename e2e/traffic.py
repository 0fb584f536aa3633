"""Steady traffic whose every stream is checked to its last character."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from support.client import Answer, complete


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
    count: int = 0
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
        for kind in range(self.kinds):
            answer = await complete(session, self.url, self._body(kind))
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
            try:
                answer = await complete(session, self.url, self._body(kind))
            except (aiohttp.ClientError, OSError) as error:
                self.wrong.append(f"stream {index}: {type(error).__name__}: {error}")
                continue
            self.count += 1
            if not self._good(answer) or answer.text != self._expected[kind]:
                used = [answer.headers.get(f"x-forebay-{leg}") for leg in ("prefill", "decode")]
                expected = self._expected[kind]
                pairs = enumerate(zip(answer.text, expected, strict=False))
                differs = next((at for at, (one, other) in pairs if one != other), None)
                self.wrong.append(
                    f"stream {index} on {used} after {time.monotonic() - started:.1f} s: status {answer.status}, "
                    f"error {answer.error}, done {answer.done}, {len(answer.text)} of {len(expected)} characters, "
                    f"differs at {differs}"
                )

    async def stop(self) -> None:
        """Let the streams that run end, and take no more."""
        self._stop = True
        await asyncio.wait_for(asyncio.gather(*self._tasks), 120)
