"""`forebay chat`: a conversation in the terminal, streamed."""

from __future__ import annotations

import time
import unicodedata
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from forebay_operator.local.errors import LocalError
from forebay_operator.sse import events
from forebay_operator.unreachable import reason
from forebay_wire.headers import DECODE, PREFILL
from forebay_wire.paths import CHAT

CONNECT_TIMEOUT_SECONDS = 5.0
STALL_TIMEOUT_SECONDS = 120.0
"""Without a byte for this long the answer counts as lost. A long prompt on a CPU takes a while."""


@dataclass(slots=True)
class Answer:
    """Filled while the stream is read."""

    prefill: str | None = None
    decode: str | None = None
    text: str = ""
    finish_reason: str | None = None
    completion_tokens: int | None = None
    first_content_seconds: float | None = None
    """From sending the request."""

    seconds: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)

    def summary(self) -> str:
        """Who served it and how fast, on one line."""
        parts = [f"prefill {self.prefill or '-'}", f"decode {self.decode or '-'}"]
        if self.completion_tokens is not None:
            parts.append(f"{self.completion_tokens} tokens")
        if self.first_content_seconds is not None:
            parts.append(f"TTFT {1000 * self.first_content_seconds:.0f} ms")
            if self.completion_tokens is not None and self.completion_tokens > 1:
                each = (self.seconds - self.first_content_seconds) / (self.completion_tokens - 1)
                parts.append(f"TPOT {1000 * each:.0f} ms")
        if self.finish_reason not in (None, "stop"):
            parts.append(f"ended by {self.finish_reason}")
        return ", ".join(parts)


async def stream_chat(
    base_url: str, body: dict[str, Any], answer: Answer, *, api_key: str | None = None
) -> AsyncIterator[str]:
    """Pieces of text as they come; `answer` is complete when the iterator ends. `base_url` ends in /v1.

    Raises LocalError when the server can't be reached, refuses, breaks off or falls silent.
    """
    url = base_url.removesuffix("/").removesuffix("/v1") + CHAT
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_SECONDS, sock_read=STALL_TIMEOUT_SECONDS, total=None)
    started = time.monotonic()
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(url, json=request, headers=headers) as response,
        ):
            if response.status != 200:
                raise LocalError(f"{url} answered {response.status}: {_error_text(await response.content.read(4096))}")
            answer.prefill, answer.decode = response.headers.get(PREFILL), response.headers.get(DECODE)
            done = False
            async for event in events(response.content):
                if event == b"[DONE]":
                    # Read on to the end: a client that leaves before it looks like one that gave up.
                    done = True
                    continue
                piece = _take(msgspec.json.decode(event), answer)
                if piece:
                    if answer.first_content_seconds is None:
                        answer.first_content_seconds = time.monotonic() - started
                    yield piece
            answer.seconds = time.monotonic() - started
            if not done:
                raise LocalError(f"the answer from {url} broke off")
    except TimeoutError:
        raise LocalError(f"{url} was silent for too long ({STALL_TIMEOUT_SECONDS:g} s)") from None
    except aiohttp.ClientError as error:
        raise LocalError(f"{url} can't be reached: {reason(error)}; is a router up there? (`forebay status`)") from None
    except ValueError as error:
        raise LocalError(f"{url} sent what is no chat chunk: {error}") from None


def _take(chunk: Any, answer: Answer) -> str:
    """The text of one chunk; what else it says goes into `answer`. Raises LocalError for an error sent mid-stream."""
    if not isinstance(chunk, dict):
        return ""
    if "error" in chunk:
        raise LocalError(f"the answer ended with an error: {_error_text(msgspec.json.encode(chunk))}")
    usage = chunk.get("usage")
    if isinstance(usage, dict):
        answer.usage = usage
        answer.completion_tokens = usage.get("completion_tokens")
    choices = chunk.get("choices")
    if not choices:
        return ""
    answer.finish_reason = choices[0].get("finish_reason") or answer.finish_reason
    text = (choices[0].get("delta") or {}).get("content") or ""
    answer.text += text
    return printable(text)


def printable(text: str) -> str:
    """Without control characters: a model's text must not steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def _error_text(raw: bytes) -> str:
    try:
        return str(msgspec.json.decode(raw)["error"]["message"])
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError):
        return raw.decode(errors="replace").strip()[:300] or "(no text)"
