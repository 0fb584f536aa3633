"""A client that keeps what it got apart from when it got it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass
class Answer:
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""
    chunks: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Monotonic time of each chunk with content."""

    sent: float = 0.0
    done: bool = False
    """The stream ended with [DONE], or the body was whole."""

    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: Any = None
    comments: list[str] = field(default_factory=list)
    body: dict[str, Any] | None = None

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return choice["text"] or ""
    return (choice.get("delta") or choice.get("message") or {}).get("content") or ""


async def complete(session: aiohttp.ClientSession, url: str, body: dict[str, Any], **kwargs: Any) -> Answer:
    """POST a request (path by its shape) and read the answer to its end."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = Answer(0, sent=time.monotonic())
    async with session.post(url + path, json=body, **kwargs) as response:
        answer.status = response.status
        answer.headers = {name.lower(): value for name, value in response.headers.items()}
        if response.content_type != "text/event-stream":
            answer.body = await response.json()
            assert answer.body is not None
            answer.error = answer.body.get("error")
            answer.usage = answer.body.get("usage")
            if answer.error is None:
                choice = answer.body["choices"][0]
                answer.text, answer.finish_reason, answer.done = _text(choice), choice["finish_reason"], True
            return answer
        async for raw in response.content:
            line = raw.decode().rstrip("\r\n")
            if line.startswith(":"):
                answer.comments.append(line)
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                answer.done = True
                continue
            chunk = json.loads(data)
            answer.chunks.append(chunk)
            if "error" in chunk:
                answer.error = chunk["error"]
                continue
            answer.usage = chunk.get("usage") or answer.usage
            for choice in chunk["choices"]:
                text = _text(choice)
                if text:
                    answer.times.append(time.monotonic())
                answer.text += text
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    return answer
