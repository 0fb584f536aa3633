"""Events of a server-sent stream, as bytes come in."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp

from forebay_wire.stream import parse

EVENT_LIMIT = 1024 * 1024


async def events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Data payloads, `[DONE]` too. Raises ValueError for an event above the limit."""
    buffer = b""
    async for chunk in content.iter_any():
        buffer += chunk
        while b"\n\n" in buffer:
            raw, buffer = buffer.split(b"\n\n", 1)
            for data in parse(raw)[1]:
                yield data
        if len(buffer) > EVENT_LIMIT:
            raise ValueError(f"an event of more than {EVENT_LIMIT} bytes")
